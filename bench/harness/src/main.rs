//! Measures Ferry against other servers, interleaved, and prints one JSON object per row.
//!
//! `bench/run` builds and starts it, and gives it a temporary directory for its data.

#![forbid(unsafe_code)]

mod agent;
mod blk;
mod chart;
mod coherence;
mod containers;
mod costs;
mod data;
mod dax;
mod earlier;
mod fio;
mod images;
mod line;
mod locks;
mod machine;
mod metadata;
mod mounted;
mod native;
mod parts;
mod process;
mod progress;
mod report;
mod rows;
mod scale;
mod server;
mod session;
mod stats;
mod target;
mod trouble;
mod v9fs;
mod virtiofs;
mod zufs;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use ferry_guest::Cache;
use regex_lite::Regex;

use crate::data::Data;
use crate::line::Line;
use crate::machine::Machine;
use crate::progress::Progress;
use crate::report::Summary;
use crate::rows::{Row, Work};
use crate::server::{Peer, Programs};
use crate::session::Place;
use crate::virtiofs::{Effort, Runner};

/// Where the full run's results go, from the project's root.
const RESULTS: &str = "bench/results";

/// Measures Ferry against other servers, side by side; one JSON object per row on standard output.
#[derive(Debug, Parser)]
#[command(name = "bench/run")]
struct Cli {
    /// What to measure
    #[arg(value_enum)]
    table: Table,
    /// Under five minutes: fewer rows (all that match with --rows), shorter and fewer runs
    #[arg(long)]
    quick: bool,
    /// The servers to compare with [default: virtiofsd; for the other tables, all]
    #[arg(long, value_delimiter = ',', value_name = "A,B")]
    peers: Vec<String>,
    /// Only rows whose name matches, with the configuration behind it: 'stat-walk', '^stat-walk none$'
    #[arg(long, value_name = "REGEX")]
    rows: Option<Regex>,
    /// The jobs of fio in a QEMU guest, with QEMU's 9pfs, and with a DAX window (virtiofs)
    #[arg(long)]
    dax: bool,
    /// Where the report goes [default: bench/results; of a part or a quick run, nowhere]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Keep what the report has of other rows, so that a run in parts ends in one report (v9fs, images, containers, metadata, coherence, virtiofs --dax)
    #[arg(long)]
    add: bool,
    /// Only print the names of the rows
    #[arg(long)]
    list: bool,
    /// The folder for all data
    #[arg(long, hide = true)]
    work: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Table {
    Virtiofs,
    Zufs,
    V9fs,
    VhostBlk,
    Images,
    Containers,
    Metadata,
    Costs,
    Locks,
    Scale,
    Coherence,
}

impl Cli {
    fn rows(&self) -> Vec<Row> {
        let wanted = |row: &Row| match &self.rows {
            Some(regex) => regex.is_match(&row.name) || regex.is_match(&row.full_name()),
            None => row.quick || !self.quick,
        };
        rows::all().into_iter().filter(wanted).collect()
    }

    /// Prints the names of the rows if that was asked for, and says so if there is none: what to end with then.
    fn listed(&self, table: &str, names: impl Iterator<Item = impl std::fmt::Display>) -> Option<ExitCode> {
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
    fn peers(&self) -> (Vec<Peer>, Vec<String>) {
        let mut peers = vec![Peer::Ferry];
        let mut skipped = Vec::new();
        if self.peers.is_empty() {
            peers.push(Peer::Virtiofsd);
        }
        for name in &self.peers {
            if name == Peer::Virtiofsd.name() {
                peers.push(Peer::Virtiofsd);
            } else if name != line::FERRY {
                skipped.push(format!("{name}: this table cannot run it yet"));
            }
        }
        (peers, skipped)
    }

    fn results(&self) -> Option<PathBuf> {
        let full = !self.quick && self.rows.is_none() || self.add;
        self.out.clone().or_else(|| full.then(|| RESULTS.into()))
    }
}

/// A word of shell.
fn shell_word(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', r"'\''"))
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if cli.dax && !matches!(cli.table, Table::Virtiofs) {
        eprintln!("bench/run: --dax is for the table virtiofs");
        return ExitCode::from(2);
    }
    let has_parts = cli.dax
        || matches!(cli.table, Table::V9fs | Table::Images | Table::Containers | Table::Metadata | Table::Coherence);
    if cli.add && !has_parts {
        eprintln!(
            "bench/run: --add is for the tables v9fs, images, containers, metadata, coherence and virtiofs --dax"
        );
        return ExitCode::from(2);
    }
    let result = match cli.table {
        Table::Zufs => zufs::run(&cli),
        Table::VhostBlk => blk::run(&cli),
        Table::V9fs => v9fs::run(&cli),
        Table::Images => images::run(&cli),
        Table::Containers => containers::run(&cli),
        Table::Metadata => metadata::run(&cli),
        Table::Costs => costs::run(&cli),
        Table::Locks => locks::run(&cli),
        Table::Scale => scale::run(&cli),
        Table::Coherence => coherence::run(&cli),
        Table::Virtiofs if cli.dax => dax::run(&cli),
        Table::Virtiofs => run(&cli),
    };
    result.unwrap_or_else(|error| {
        eprintln!("bench/run: {error:#}");
        ExitCode::FAILURE
    })
}

fn run(cli: &Cli) -> Result<ExitCode> {
    let rows = cli.rows();
    if let Some(code) = cli.listed("virtiofs", rows.iter().map(Row::full_name)) {
        return Ok(code);
    }
    let progress = Progress::new(rows.len());
    let (mut peers, mut skipped) = cli.peers();
    let cache = Cache::from_env()?;
    let virtiofsd = cache.peer("virtiofsd").inspect_err(|error| skipped.push(format!("virtiofsd: {error}"))).ok();
    if virtiofsd.is_none() {
        peers.retain(|peer| *peer != Peer::Virtiofsd);
    }
    let fio = cache.peer("fio")?;
    // The guest, too, before anything is measured.
    cache.uml()?;
    let machine = Machine::look(&cli.work, virtiofsd.as_deref(), Some(&fio));

    progress.show("making the data");
    let mut runner = runner(cli, &rows, cache, virtiofsd, fio, peers)?;
    let lines = progress.measure(&rows, Row::full_name, &skipped, |row| vec![runner.run(row)])?;
    let summary = Summary::of(&rows, &lines);
    eprint!("{summary}");
    if let Some(folder) = cli.results() {
        let guest_kernel = runner.guest_kernel.clone().unwrap_or_else(|| "none ran".into());
        let machine = Machine { guest_kernel, command: command(), ..machine };
        report::write(&folder, &lines, &machine, &summary)?;
    }
    Ok(verdict(&lines))
}

/// A run in which something of ours failed has failed.
fn verdict(lines: &[Line]) -> ExitCode {
    if lines.iter().any(|line| line.error.is_some()) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn runner(
    cli: &Cli,
    rows: &[Row],
    cache: Cache,
    virtiofsd: Option<PathBuf>,
    fio: PathBuf,
    peers: Vec<Peer>,
) -> Result<Runner> {
    let effort = if cli.quick { Effort::QUICK } else { Effort::FULL };
    let has = |test: fn(&Work) -> bool| rows.iter().any(|row| test(&row.work));
    let data = Data::make(
        &cli.work,
        has(|work| matches!(work, Work::Fio(_))),
        has(|work| matches!(work, Work::Native(_))),
        has(|work| matches!(work, Work::Meta(_))),
    )
    .context("cannot make the data")?;
    let place = place(cli, cache, virtiofsd, &data)?;
    Ok(Runner::new("virtiofs", place, data, fio, peers, effort))
}

/// Where the servers and guests of a run are.
fn place(cli: &Cli, cache: Cache, virtiofsd: Option<PathBuf>, data: &Data) -> Result<Place> {
    let folder = cli.work.join("run");
    std::fs::create_dir_all(&folder)?;
    let ferry = program("ferry")?;
    let (guest_cpu, server_cpus) = session::divide_cpus()?;
    let programs = Programs { ferry, virtiofsd };
    Ok(Place { cache, programs, share: data.share.clone(), folder, guest_cpu, server_cpus })
}

/// A program that was built with this one.
fn program(name: &str) -> Result<PathBuf> {
    let here = std::env::current_exe().context("where is this program?")?;
    let program = here.with_file_name(name);
    anyhow::ensure!(program.is_file(), "no program {}: build it with cargo build --release", program.display());
    Ok(program)
}

/// The command as it was typed, without the wrapper's own words.
fn command() -> String {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = words.iter().position(|word| word == "--work") {
        words.drain(at..(at + 2).min(words.len()));
    }
    format!("bench/run {}", words.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cli(words: &[&str]) -> Cli {
        Cli::parse_from(["bench/run", "virtiofs", "--work", "/w"].iter().chain(words))
    }

    #[test]
    fn rows_can_be_chosen() {
        let names = |words: &[&str]| cli(words).rows().into_iter().map(|row| row.name).collect::<Vec<_>>();
        assert_eq!(names(&["--rows", "^stat-walk$"]).len(), 3);
        assert_eq!(names(&["--rows", "^stat-walk none$"]), ["stat-walk"]);
        assert!(names(&["--quick"]).len() < names(&[]).len());
        assert!(names(&["--quick", "--rows", "seqwrite-mmap-multi"]).contains(&"seqwrite-mmap-multi".into()));
        assert!(Cli::try_parse_from(["bench/run", "nonsense", "--work", "/w"]).is_err());
    }

    #[test]
    fn a_peer_that_is_not_there_has_a_reason() {
        let (peers, skipped) = cli(&["--peers", "virtiofsd,qemu-9p"]).peers();
        assert_eq!(peers, [Peer::Ferry, Peer::Virtiofsd]);
        assert_eq!(skipped, ["qemu-9p: this table cannot run it yet"]);
    }

    #[test]
    fn only_a_full_run_writes_the_results() {
        assert_eq!(cli(&[]).results(), Some(RESULTS.into()));
        assert_eq!(cli(&["--quick"]).results(), None);
        assert_eq!(cli(&["--rows", "^stat"]).results(), None);
        assert_eq!(cli(&["--rows", "^stat", "--add"]).results(), Some(RESULTS.into()));
        assert_eq!(cli(&["--quick", "--out", "/o"]).results(), Some("/o".into()));
        assert_eq!(shell_word(Path::new("/a'b")), r"'/a'\''b'");
        assert_eq!(rows::Config::Auto.name(), "auto");
    }
}
