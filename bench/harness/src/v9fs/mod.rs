//! The v9fs table: files by 9P, our client and server beside the kernel's client and other servers.

mod fio;
mod guest;
mod host;
pub mod link;
mod messages;
mod place;
pub mod report;
mod rows;
mod runner;
mod systems;

use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, ensure};
use ferry_guest::Cache;

use self::place::{Cpus, Files};
use self::rows::Step;
use self::runner::{Effort, Runner};
use self::systems::{Programs, System};
use crate::cli::Cli;
use crate::line::FERRY;
use crate::machine::Machine;
use crate::progress::Progress;
use crate::stats::Better;
use crate::{earlier, parts, session};

/// The table's name.
pub const TABLE: &str = "v9fs";
/// The unit of all figures.
const UNIT: &str = "MiB/s";

/// Measures, prints and reports.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let steps = steps(cli);
    if let Some(code) = cli.listed(TABLE, steps.iter().map(|step| step.name())) {
        return Ok(code);
    }
    ensure!(
        rustix::process::geteuid().is_root(),
        "bench/run {TABLE} mounts file systems and makes network devices, and needs to be root"
    );
    loopback()?;
    let directory = cli.results();
    // Before any measurement, so that unreadable input is reported at once.
    let earlier = match &directory {
        Some(directory) if cli.add => earlier::read(directory, TABLE, known_row)?,
        _ => Vec::new(),
    };
    let unknown = unknown_peers(&cli.peers);
    let cache = Cache::from_env()?;
    let programs = Programs {
        ferry: crate::cli::program("ferry")?,
        fio: cache.peer("fio")?,
        diod: cache.diod().map_err(|error| error.to_string()),
        mkfs: cache.disk().map(|set| set.join("bin/mkfs.ext4")).map_err(|error| error.to_string()),
    };
    let machine = Machine::look(&cli.work, None, Some(&programs.fio));
    let progress = Progress::new(steps.len());
    progress.show("making the files");
    let files = Files::make(cli.work.join("run"), &programs)?;
    let (guest, servers) = session::divide_cpus()?;
    let cpus = Cpus { guest, all: format!("{guest},{servers}"), servers };
    let effort = if cli.quick { Effort::QUICK } else { Effort::FULL };
    let mut runner = Runner::new(cache, programs, files, cpus, effort);
    let lines = progress.measure(
        &steps,
        |step| step.name(),
        &unknown,
        |step| {
            let systems = step.systems().into_iter().filter(|system| is_wanted(*system, &cli.peers));
            runner.run(*step, &systems.collect::<Vec<_>>())
        },
    )?;
    let verdict = crate::cli::verdict(&lines);
    let lines = parts::join(&earlier, &lines, order());
    let targets = report::targets(&lines);
    targets.iter().for_each(|target| eprintln!("{target}"));
    if let Some(directory) = directory {
        let machine = Machine { command: crate::cli::command(), ..machine };
        report::write(&directory, &lines, &machine, &targets)?;
    }
    Ok(verdict)
}

/// bench/run gives this a network of its own, so that taps and addresses go with it; its loopback is down at first.
pub fn loopback() -> Result<()> {
    let mut ip = Command::new("ip");
    let status = ip.args(["link", "set", "lo", "up"]).stdin(Stdio::null()).status();
    let status = status.context("cannot start ip (package iproute2)")?;
    ensure!(status.success(), "the loopback device cannot be brought up");
    Ok(())
}

/// Any row is taken; those that are no more are in no order, and so are left out.
fn known_row(_: &str) -> Option<earlier::Row> {
    Some(earlier::Row { unit: UNIT, better: Better::Higher })
}

/// The rows and our configurations in them, in their order.
fn order() -> impl Iterator<Item = (String, &'static str)> {
    let ours = |step: Step| step.systems().into_iter().filter(|system| system.is_ours()).map(move |ours| (step, ours));
    rows::all().into_iter().flat_map(ours).map(|(step, ours)| (step.name(), ours.name()))
}

fn steps(cli: &Cli) -> Vec<Step> {
    let wanted = |step: &Step| match &cli.rows {
        Some(regex) => regex.is_match(&step.name()),
        None => step.quick || !cli.quick,
    };
    rows::all().into_iter().filter(wanted).collect()
}

/// Ours always, and what its baselines are; the peers that were named, or all.
fn is_wanted(system: System, peers: &[String]) -> bool {
    system.is_ours() || peers.is_empty() || peers.iter().any(|name| name == system.name())
}

fn unknown_peers(peers: &[String]) -> Vec<String> {
    let known: Vec<&str> = rows::all().into_iter().flat_map(Step::systems).map(System::name).collect();
    let unknown = peers.iter().filter(|name| *name != FERRY && !known.contains(&name.as_str()));
    unknown.map(|name| format!("{name}: this table cannot run it")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn cli(words: &[&str]) -> Cli {
        Cli::parse_from(["bench/run", TABLE, "--work", "/w"].iter().chain(words))
    }

    #[test]
    fn a_repeated_run_replaces_the_earlier_one() {
        let line = |row: &str, config: &str, value: f64| {
            let mut line = crate::line::Line::new(TABLE, row.into(), config, UNIT, Better::Higher);
            (line.ferry, line.n) = (Some(value), 1);
            line
        };
        let earlier = [line("uml read 4K", "v9fs-loose", 5.0), line("read 4K", "pipelined", 6.0)];
        let now = [line("qemu read 4K", "v9fs-none", 7.0), line("uml read 4K", "v9fs-loose", 8.0)];
        let joined: Vec<_> =
            parts::join(&earlier, &now, order()).into_iter().map(|line| (line.row, line.ferry)).collect();
        let expected = [("read 4K", 6.0), ("uml read 4K", 8.0), ("qemu read 4K", 7.0)];
        assert_eq!(joined, expected.map(|(row, value)| (row.to_owned(), Some(value))));
    }

    #[test]
    fn rows_and_peers_can_be_chosen() {
        assert_eq!(steps(&cli(&["--rows", "^uml read"])).len(), 6);
        assert!(steps(&cli(&["--quick"])).len() < steps(&cli(&[])).len());
        let systems = |peers: &[&str]| {
            let peers: Vec<String> = peers.iter().map(|name| (*name).to_owned()).collect();
            let step = steps(&cli(&["--rows", "^uml read 1M$"]))[0];
            step.systems().into_iter().filter(|system| is_wanted(*system, &peers)).count()
        };
        assert_eq!((systems(&[]), systems(&["diod"]), systems(&["ferry"])), (6, 5, 3));
        assert_eq!(unknown_peers(&["diod".into(), "nfs".into()]), ["nfs: this table cannot run it"]);
    }
}
