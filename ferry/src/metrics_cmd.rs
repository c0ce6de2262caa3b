//! `ferry metrics`: the counters of running servers, as text for a collector.

use std::path::PathBuf;

use anyhow::Result;
use ferry_control::{MetricsFormat, metrics_text};

use crate::control::reports_of;
use crate::output::print;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// A process id, a mount point, the socket of a share or disk, its address for 9P, or a shared directory or file. Without one:
    /// all shares, mounts and disks of yours that run; for root, those of all users.
    #[arg(value_name = "TARGET")]
    target: Option<PathBuf>,

    /// The format of the text.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t)]
    format: Format,
}

/// The format of the text.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum Format {
    /// OpenMetrics 1.0.0.
    #[default]
    Openmetrics,
    /// The older text format of Prometheus, 0.0.4, which promtool check metrics reads.
    Prometheus,
}

impl From<Format> for MetricsFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Openmetrics => Self::OpenMetrics,
            Format::Prometheus => Self::Prometheus,
        }
    }
}

/// Prints metrics. Returns the status to end with: not 0 if a server that runs does not report.
pub fn run(args: &Args) -> Result<u8> {
    let (reports, outcome) = reports_of(args.target.as_deref())?;
    let reports: Vec<_> = reports.into_iter().map(|(_, report)| report).collect();
    // A process may have several servers.
    print(metrics_text(&reports, args.format.into(), args.target.is_none() || reports.len() > 1))?;
    Ok(outcome)
}
