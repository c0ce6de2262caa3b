//! The costs table: starts, idle servers, memory, the sandbox, metrics, rate limits, and watching for changes on the host.

mod memory;
pub mod report;
mod start;
mod watching;

use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use ferry_guest::Cache;

use self::memory::Memory;
use self::start::Starts;
use self::watching::Watching;
use crate::cli::Cli;
use crate::data::Data;
use crate::line::Line;
use crate::machine::Machine;
use crate::progress::Progress;
use crate::rows::{self, Row, Work};
use crate::server::{Peer, Programs};
use crate::session::place;
use crate::virtiofs::{Effort, Runner};

/// The table's name.
const TABLE: &str = "costs";

/// The load that metrics may cost at most a fiftieth of.
const METRICS_ROW: &str = "native-read-4k q1 d16";

/// How much is done.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Runs of each.
    runs: usize,
    /// Starts of each server.
    starts: usize,
    /// Directories of 1000 files that are walked over.
    directories: usize,
    /// Files that are changed where it is watched.
    changed: usize,
}

impl Size {
    /// A million files are walked over.
    pub const FULL: Self = Self { runs: 5, starts: 9, directories: 1000, changed: 20_000 };
    /// A fiftieth and a tenth.
    const QUICK: Self = Self { runs: 2, starts: 3, directories: 20, changed: 2000 };
}

/// What a row measures; one of starts, memory or watching makes several lines.
#[derive(Debug, Clone)]
enum Step {
    Start,
    Memory,
    Sandbox(Row),
    Metrics(Row),
    Limits(Row),
    Watching,
}

impl Step {
    fn name(&self) -> String {
        match self {
            Self::Start => "start, idle".into(),
            Self::Memory => "memory".into(),
            Self::Sandbox(row) => format!("sandbox: {}", row.name),
            Self::Metrics(row) => format!("metrics: {}", row.name),
            Self::Limits(row) => format!("limits: {}", row.name),
            Self::Watching => "watching".into(),
        }
    }
}

/// Measures, prints and reports.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let steps = steps(cli);
    if let Some(code) = cli.listed(TABLE, steps.iter().map(Step::name)) {
        return Ok(code);
    }
    ensure!(
        rustix::process::geteuid().is_root(),
        "bench/run {TABLE} mounts file systems and watches one, and needs to be root"
    );
    let size = if cli.quick { Size::QUICK } else { Size::FULL };
    let cache = Cache::from_env()?;
    let mut skipped = Vec::new();
    let virtiofsd = cache.peer("virtiofsd").inspect_err(|error| skipped.push(format!("virtiofsd: {error}"))).ok();
    let machine = Machine::look(&cli.work, virtiofsd.as_deref(), None);
    let programs = Programs { ferry: crate::cli::program("ferry")?, virtiofsd };
    let progress = Progress::new(steps.len());
    let data = Data::make(&cli.work, false, true, false).context("cannot make the data")?;
    let place = place(cli, cache, None, &data)?;
    let effort = if cli.quick { Effort::QUICK } else { Effort::FULL };
    let cpus = format!("{},{}", place.guest_cpu, place.server_cpus);
    let mut loads = Runner::new(TABLE, place, data, "fio".into(), Vec::new(), effort);
    let lines = progress.measure(&steps, Step::name, &[], |step| match step {
        Step::Sandbox(row) | Step::Metrics(row) | Step::Limits(row) => {
            let other = match step {
                Step::Metrics(_) => Peer::FerryUncounted,
                Step::Limits(_) => Peer::FerryLimited,
                _ => Peer::FerryOpen,
            };
            loads.set_peers(&[Peer::Ferry, other]);
            vec![Line { row: step.name(), note: None, ..loads.run(row) }]
        }
        Step::Start => Starts { work: &cli.work, programs: &programs, table: TABLE, runs: size.starts }.run(&skipped),
        Step::Memory => Memory { work: &cli.work, programs: &programs, cpus: &cpus, size }.run(&skipped),
        Step::Watching => Watching { work: &cli.work, ferry: &programs.ferry, size }.run(),
    })?;
    let targets = report::targets(&lines);
    targets.iter().for_each(|target| eprintln!("{target}"));
    if let Some(directory) = cli.results() {
        let machine = Machine { command: crate::cli::command(), ..machine };
        report::write(&directory, &lines, &machine, &targets, size)?;
    }
    Ok(crate::cli::verdict(&lines))
}

fn steps(cli: &Cli) -> Vec<Step> {
    let native = |row: &Row| matches!(row.work, Work::Native(native) if native.queues == 1);
    let native: Vec<_> = rows::all().into_iter().filter(native).collect();
    let metrics = native.clone().into_iter().filter(|row| row.name == METRICS_ROW).map(Step::Metrics);
    let limits = native.clone().into_iter().filter(|row| row.name.starts_with("native-read")).map(Step::Limits);
    let sandbox = native.into_iter().map(Step::Sandbox);
    let all =
        [Step::Start, Step::Memory].into_iter().chain(sandbox).chain(metrics).chain(limits).chain([Step::Watching]);
    all.filter(|step| cli.rows.as_ref().is_none_or(|regex| regex.is_match(&step.name()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn rows_can_be_chosen() {
        let count =
            |words: &[&str]| steps(&Cli::parse_from(["bench/run", TABLE, "--work", "/w"].iter().chain(words))).len();
        assert_eq!((count(&[]), count(&["--rows", "^sandbox"]), count(&["--rows", "^memory$"])), (12, 5, 1));
        assert_eq!(
            (count(&["--rows", "^metrics"]), count(&["--rows", "^limits"]), count(&["--rows", "^start"])),
            (1, 3, 1)
        );
    }
}
