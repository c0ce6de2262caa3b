//! Measures Ferry against other servers, interleaved, and prints one JSON object per row.
//!
//! `bench/run` builds and starts it, and gives it a temporary directory for its data.

#![forbid(unsafe_code)]

mod agent;
mod blk;
mod chart;
mod cli;
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
mod ninep;
mod noise;
mod parts;
mod process;
mod procfs;
mod progress;
mod report;
mod rows;
mod scale;
mod server;
mod session;
mod stats;
mod target;
mod time_limit;
mod tmpfs;
mod trouble;
mod v9fs;
mod virtiofs;
mod zufs;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use ferry_guest::Cache;

use crate::cli::{Cli, Table, command, verdict};
use crate::data::{Data, LargeTrees};
use crate::machine::Machine;
use crate::progress::Progress;
use crate::report::Summary;
use crate::rows::{Row, Work};
use crate::server::Peer;
use crate::session::place;
use crate::virtiofs::{Effort, Runner};

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
        _ if cli.report => write_report(&cli),
        Table::Zufs => zufs::run(&cli),
        Table::VhostBlk => blk::run(&cli),
        Table::V9fs => v9fs::run(&cli),
        Table::Images => images::run(&cli),
        Table::Containers => containers::run(&cli),
        Table::Metadata => metadata::run(&cli),
        Table::Costs => costs::run(&cli),
        Table::Locks => locks::run(&cli),
        Table::Ninep => ninep::run(&cli),
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
    let rows = rows(cli);
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
    let targets = report::targets(&lines);
    targets.iter().for_each(|target| eprintln!("{target}"));
    if let Some(directory) = cli.results() {
        let guest_kernel = runner.guest_kernel.clone().unwrap_or_else(|| "none ran".into());
        let machine = Machine { guest_kernel, command: command(), ..machine };
        report::write(&directory, &lines, &machine, &summary, &targets)?;
    }
    Ok(verdict(&lines))
}

/// Measures nothing, and writes the report again from its lines. Its head remains that of the measurement.
fn write_report(cli: &Cli) -> Result<ExitCode> {
    let directory = &cli.results().context("--report writes into a directory")?;
    let table = cli.table.to_possible_value().context("each table has a name")?;
    let table = if cli.dax { dax::TABLE } else { table.get_name() };
    let lines = &*earlier::all(directory, table)?;
    let machine = &Machine::default();
    parts::keep_head(directory, table, || match cli.table {
        Table::Virtiofs if cli.dax => dax::write_again(directory, lines, machine),
        Table::Virtiofs => {
            let is_of =
                |row: &Row| lines.iter().any(|line| (&*line.row, &*line.config) == (&*row.name, row.config.name()));
            let rows: Vec<_> = rows::all().into_iter().filter(is_of).collect();
            report::write(directory, lines, machine, &Summary::of(&rows, lines), &report::targets(lines))
        }
        Table::Zufs => zufs::report::write(directory, lines, machine, "", &zufs::report::targets(lines)),
        Table::V9fs => v9fs::report::write(directory, lines, machine, &v9fs::report::targets(lines)),
        Table::VhostBlk => blk::report::write(directory, lines, machine, &blk::report::targets(lines)),
        Table::Images => {
            images::report::write(directory, lines, machine, "", images::Effort::FULL, &images::report::targets(lines))
        }
        Table::Containers => {
            containers::report::write(directory, lines, machine, "", &containers::report::targets(lines))
        }
        Table::Metadata => {
            metadata::report::write(directory, lines, machine, &metadata::report::targets(lines), LargeTrees::FULL)
        }
        Table::Costs => {
            costs::report::write(directory, lines, machine, &costs::report::targets(lines), costs::Size::FULL)
        }
        Table::Locks => locks::write_full(directory, lines, machine),
        Table::Ninep => ninep::write_full(directory, lines, machine),
        Table::Scale => scale::write_full(directory, lines, machine),
        Table::Coherence => coherence::write_full(directory, lines, machine),
    })?;
    Ok(ExitCode::SUCCESS)
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

/// The rows that are wanted.
fn rows(cli: &Cli) -> Vec<Row> {
    let wanted = |row: &Row| match &cli.rows {
        Some(regex) => regex.is_match(&row.name) || regex.is_match(&row.full_name()),
        None => row.quick || !cli.quick,
    };
    rows::all().into_iter().filter(wanted).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cli(words: &[&str]) -> Cli {
        Cli::parse_from(["bench/run", "virtiofs", "--work", "/w"].iter().chain(words))
    }

    #[test]
    fn rows_can_be_chosen() {
        let names = |words: &[&str]| rows(&cli(words)).into_iter().map(|row| row.name).collect::<Vec<_>>();
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
}
