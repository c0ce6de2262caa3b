//! `ferry fsck`: checks a persistent memory file system that is not mounted.

use anyhow::{Result, bail};
use ferry_control::printable;
use ferry_mem::pmem::{self, OpenError};

use crate::cli::FsckArgs;
use crate::flags::Kind;
use crate::output::print;
use crate::status;

/// Checks, and repairs on request; returns the exit status.
pub fn run(args: &FsckArgs) -> Result<u8> {
    let path = match Kind::of(&args.image) {
        Kind::Pmem(path) | Kind::Dir(path) => path,
        // A file may have this name, too.
        Kind::Mem | Kind::Image(_) | Kind::Layers(_) | Kind::Ninep(_) => args.image.clone(),
    };
    let report = match pmem::fsck(&path, args.tier2.as_deref(), args.repair) {
        Ok(report) => report,
        // The error's advice to create one is for mounts.
        Err(OpenError::Missing { path, .. }) => bail!("there is no {}", path.display()),
        Err(error) => {
            let status = match error {
                OpenError::Io { .. } | OpenError::Busy { .. } | OpenError::Tier2 { .. } => status::FAILED,
                _ => status::WRONG,
            };
            eprintln!("ferry: {}", printable(&format!("{:#}", anyhow::Error::from(error))));
            return Ok(status);
        }
    };
    let text = if args.json {
        serde_json::to_string(&report)? + "\n"
    } else {
        let mut text: String = report.findings.iter().map(|finding| printable(&finding.what) + "\n").collect();
        let state = match (report.is_clean(), report.repaired) {
            (true, _) => "clean",
            (false, true) => "repaired",
            (false, false) => "damaged; --repair keeps what is readable",
        };
        let (inodes, used, all) = (report.inodes, report.blocks_used, report.blocks);
        text += &format!("{}: {state}; {inodes} inodes, {used} of {all} blocks used\n", path.display());
        text
    };
    print(&text)?;
    Ok(if report.is_clean() || report.repaired { status::DONE } else { status::WRONG })
}
