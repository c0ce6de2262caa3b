//! One run of a load, on this host or in the guest: its command, and what it found.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::fio::{self, Found, Job};
use crate::process;

/// One figure of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// How many per second.
    pub rate: f64,
    /// Bandwidth and latency, where fio measured.
    pub found: Option<Found>,
}

/// The programs that make load.
#[derive(Debug, Clone)]
pub struct Loads {
    /// fio.
    pub fio: PathBuf,
    /// Ours, for names.
    pub names: PathBuf,
    /// For outputs.
    pub directory: PathBuf,
}

impl Loads {
    /// fio's command for a job.
    pub fn fio(&self, job: Job, dir: &Path) -> Command {
        let mut command = Command::new(&self.fio);
        // fio leaves files in its directory.
        command.args(fio::arguments(job, dir)).current_dir(&self.directory);
        command
    }

    /// The command for work on names.
    pub fn names(&self, dir: &Path, threads: usize, files: usize) -> Command {
        let mut command = Command::new(&self.names);
        command.arg(dir).args(["--threads", &threads.to_string(), "--files", &files.to_string()]);
        command
    }

    /// Runs a command and takes what it prints on standard output; see [`process::run`].
    pub fn run(&self, command: Command, timeout: Duration) -> Result<String> {
        process::run(command, &self.directory, timeout)
    }
}

/// Reads what the load on names prints.
pub fn parse_names(output: &str) -> Result<BTreeMap<String, f64>> {
    serde_json::from_str(output.trim()).context("the load on names printed no JSON")
}

/// Fills the files that a job works on, so that it measures overwriting.
pub fn fill(dir: &Path, files: usize, file_mib: u64) -> Result<()> {
    const CHUNK_BYTES: u64 = 1 << 20;
    let chunk = vec![0x5a; usize::try_from(CHUNK_BYTES)?];
    for number in 0..files {
        let path = dir.join(fio::file_name(number));
        let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        for index in 0..file_mib {
            let written = file.write_all_at(&chunk, index * CHUNK_BYTES);
            written.with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_rates() {
        assert_eq!(parse_names("{\"create\": 12.5}\n").unwrap()["create"], 12.5);
        assert!(parse_names("").is_err());
    }

    #[test]
    fn fills_files() {
        let dir = tempfile::tempdir().unwrap();
        fill(dir.path(), 2, 1).unwrap();
        assert_eq!(std::fs::metadata(dir.path().join("fio.1")).unwrap().len(), 1 << 20);
    }
}
