//! The metadata table: large trees in a guest, and the requests per file.

pub mod report;

use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result};
use ferry_guest::Cache;

use crate::cli::Cli;
use crate::data::{Data, LargeTrees};
use crate::machine::Machine;
use crate::progress::Progress;
use crate::rows::{self, Row, Task, Work};
use crate::server::Peer;
use crate::session::place;
use crate::time_limit::TimeLimit;
use crate::virtiofs::{Effort, Runner};
use crate::{earlier, parts};

/// The table's name.
const TABLE: &str = "metadata";

/// The full run: unpacking takes virtiofsd a minute or two.
const FULL: Effort = Effort {
    timeout: Duration::from_secs(400),
    limit: Some(TimeLimit::Full(Duration::from_secs(40 * 60))),
    count_tasks: true,
    ..Effort::FULL
};
/// The quick one, on smaller trees.
const QUICK: Effort = Effort { runs: 2, timeout: Duration::from_secs(60), count_tasks: true, ..Effort::QUICK };

/// Measures, prints and reports.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let mut rows = rows(cli);
    if let Some(code) = cli.listed(TABLE, rows.iter().map(Row::full_name)) {
        return Ok(code);
    }
    let directory = cli.results();
    // Before any measurement, so that unreadable input is reported at once.
    let earlier = match &directory {
        Some(directory) if cli.add => earlier::read(directory, TABLE, known_row)?,
        _ => Vec::new(),
    };
    let progress = Progress::new(rows.len());
    let (mut peers, mut skipped) = cli.peers();
    let cache = Cache::from_env()?;
    let virtiofsd = cache.peer("virtiofsd").inspect_err(|error| skipped.push(format!("virtiofsd: {error}"))).ok();
    if virtiofsd.is_none() {
        peers.retain(|peer| *peer != Peer::Virtiofsd);
    }
    if Command::new("npm").arg("--version").output().is_err() {
        skipped.push("npm-ci: no npm here (apt-get install npm)".into());
        rows.retain(|row| row.work != Work::Meta(Task::NpmCi));
    }
    let fio = cache.peer("fio")?;
    cache.uml()?;
    let machine = Machine::look(&cli.work, virtiofsd.as_deref(), None);
    progress.show("making the trees");
    let (trees, effort) = if cli.quick { (LargeTrees::QUICK, QUICK) } else { (LargeTrees::FULL, FULL) };
    let data = Data::make_large(&cli.work, trees).context("cannot make the trees")?;
    let place = place(cli, cache, virtiofsd, &data)?;
    let mut runner = Runner::new(TABLE, place, data, fio, peers, effort);
    let lines = progress.measure(&rows, Row::full_name, &skipped, |row| vec![runner.run(row)])?;
    let verdict = crate::cli::verdict(&lines);
    let order = rows::large().into_iter().map(|row| (row.name, row.config.name()));
    let lines = parts::join(&earlier, &lines, order);
    let targets = report::targets(&lines);
    targets.iter().for_each(|target| eprintln!("{target}"));
    if let Some(directory) = directory {
        let guest_kernel = runner.guest_kernel.clone().unwrap_or_else(|| "none ran".into());
        let machine = Machine { guest_kernel, command: crate::cli::command(), ..machine };
        report::write(&directory, &lines, &machine, &targets, trees)?;
    }
    Ok(verdict)
}

fn known_row(name: &str) -> Option<earlier::Row> {
    let row = rows::large().into_iter().find(|row| row.name == name)?;
    Some(earlier::Row { unit: row.unit(), better: row.better() })
}

fn rows(cli: &Cli) -> Vec<Row> {
    let wanted = |row: &Row| match &cli.rows {
        Some(regex) => regex.is_match(&row.full_name()),
        None => row.quick || !cli.quick,
    };
    rows::large().into_iter().filter(wanted).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn rows_can_be_chosen() {
        let names =
            |words: &[&str]| rows(&Cli::parse_from(["bench/run", TABLE, "--work", "/w"].iter().chain(words))).len();
        assert_eq!((names(&[]), names(&["--rows", "^find auto"]), names(&["--rows", "nothing"])), (13, 1, 0));
    }
}
