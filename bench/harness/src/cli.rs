//! The command line, and what all tables need of it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use regex_lite::Regex;

use crate::line::{FERRY, Line};
use crate::server::Peer;

/// Where the full run's results go, from the project's root.
const RESULTS: &str = "bench/results";

/// Measures Ferry against other servers, side by side; one JSON object per row on standard output.
#[derive(Debug, Parser)]
#[command(name = "bench/run")]
pub struct Cli {
    /// What to measure
    #[arg(value_enum)]
    pub table: Table,
    /// Under five minutes: fewer rows (all that match with --rows), shorter and fewer runs
    #[arg(long)]
    pub quick: bool,
    /// The servers to compare with [default: virtiofsd; for the other tables, all]
    #[arg(long, value_delimiter = ',', value_name = "A,B")]
    pub peers: Vec<String>,
    /// Only rows whose name matches, with the configuration behind it: 'stat-walk', '^stat-walk none$'
    #[arg(long, value_name = "REGEX")]
    pub rows: Option<Regex>,
    /// The jobs of fio in a QEMU guest, with QEMU's 9pfs, and with a DAX window (virtiofs)
    #[arg(long)]
    pub dax: bool,
    /// Where the report goes [default: bench/results; of a part, a quick run or one with --peers, nowhere]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Keep what the report has of other rows, so that a run in parts ends in one report (v9fs, images, containers, metadata, coherence, virtiofs --dax)
    #[arg(long)]
    pub add: bool,
    /// Measure nothing, and write the report again from its lines, with the notes and targets of now
    #[arg(long, conflicts_with_all = ["quick", "peers", "rows", "add", "list"])]
    pub report: bool,
    /// Only print the names of the rows
    #[arg(long)]
    pub list: bool,
    /// The directory for all data
    #[arg(long, hide = true)]
    pub work: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Table {
    Virtiofs,
    Zufs,
    V9fs,
    VhostBlk,
    Images,
    Containers,
    Metadata,
    Costs,
    Locks,
    Ninep,
    Scale,
    Coherence,
}

impl Cli {
    /// Prints the names of the rows if that was asked for, and says so if there is none: what to end with then.
    pub fn listed(&self, table: &str, names: impl Iterator<Item = impl std::fmt::Display>) -> Option<ExitCode> {
        let mut names = names.peekable();
        if self.list {
            names.for_each(|name| println!("{name}"));
            return Some(ExitCode::SUCCESS);
        }
        if names.peek().is_some() {
            return None;
        }
        eprintln!("bench/run: no row matches; bench/run {table} --list shows them");
        Some(ExitCode::from(2))
    }

    /// The servers that can run, ours first, and why others cannot.
    pub fn peers(&self) -> (Vec<Peer>, Vec<String>) {
        let mut peers = vec![Peer::Ferry];
        let mut skipped = Vec::new();
        if self.peers.is_empty() {
            peers.push(Peer::Virtiofsd);
        }
        for name in &self.peers {
            if name == Peer::Virtiofsd.name() {
                peers.push(Peer::Virtiofsd);
            } else if name != FERRY {
                skipped.push(format!("{name}: this table cannot run it yet"));
            }
        }
        (peers, skipped)
    }

    /// The directory that gets the report. Without `--out`, neither quick figures nor a run without some peers replace those of
    /// a full run.
    pub fn results(&self) -> Option<PathBuf> {
        let full = !self.quick && self.peers.is_empty() && (self.rows.is_none() || self.add);
        self.out.clone().or_else(|| full.then(|| RESULTS.into()))
    }
}

/// A word of shell.
pub fn shell_word(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', r"'\''"))
}

/// A run in which something of ours failed has failed.
pub fn verdict(lines: &[Line]) -> ExitCode {
    if lines.iter().any(|line| line.error.is_some()) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// A program that was built with this one.
pub fn program(name: &str) -> Result<PathBuf> {
    let here = std::env::current_exe().context("where is this program?")?;
    let program = here.with_file_name(name);
    anyhow::ensure!(program.is_file(), "no program {}: build it with cargo build --release", program.display());
    Ok(program)
}

/// The command as it was typed, without the wrapper's own words.
pub fn command() -> String {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = words.iter().position(|word| word == "--work") {
        words.drain(at..(at + 2).min(words.len()));
    }
    format!("bench/run {}", words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_full_run_writes_the_results() {
        let cli = |words: &[&str]| Cli::parse_from(["bench/run", "virtiofs", "--work", "/w"].iter().chain(words));
        assert_eq!(cli(&[]).results(), Some(RESULTS.into()));
        assert_eq!(cli(&["--quick"]).results(), None);
        assert_eq!(cli(&["--rows", "^stat"]).results(), None);
        assert_eq!(cli(&["--rows", "^stat", "--add"]).results(), Some(RESULTS.into()));
        assert_eq!(cli(&["--quick", "--add"]).results(), None);
        assert_eq!(cli(&["--peers", "virtiofsd"]).results(), None);
        assert_eq!(cli(&["--peers", "virtiofsd", "--rows", "^stat", "--add"]).results(), None);
        assert_eq!(cli(&["--quick", "--out", "/o"]).results(), Some("/o".into()));
        assert_eq!(shell_word(Path::new("/a'b")), r"'/a'\''b'");
    }
}
