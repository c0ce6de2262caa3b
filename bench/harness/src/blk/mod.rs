//! The vhost-blk table: disks for guests, from this host and in guests.

mod files;
mod fio;
mod guest;
pub mod report;
mod rows;
mod runner;
pub mod systems;

use std::process::ExitCode;

use anyhow::Result;
use ferry_guest::Cache;

use self::files::Files;
use self::rows::Step;
use self::runner::{Effort, Runner};
use self::systems::{Programs, System};
use crate::cli::Cli;
use crate::line::FERRY;
use crate::machine::Machine;
use crate::progress::Progress;
use crate::session;

/// The table's name.
pub const TABLE: &str = "vhost-blk";

/// A peer of interest that is not available here.
const SPDK: &str = "spdk";
const NO_SPDK: &str = "spdk: no package registry has its vhost server (bench/peers/README.md)";

/// Measures, prints and reports.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let steps = steps(cli);
    if let Some(code) = cli
        .listed(TABLE, steps.iter().map(|step| format!("{}{}", step.name(), if step.direct { " direct" } else { "" })))
    {
        return Ok(code);
    }
    let unknown = unknown_peers(&cli.peers);
    let cache = Cache::from_env()?;
    let fio = cache.peer("fio")?;
    let tools = cache.disk().map(|set| set.join("bin"));
    if let Err(error) = &tools {
        eprintln!("bench/run: neither qemu-storage-daemon nor qemu-img: {error}");
    }
    let programs = Programs { ferry: crate::cli::program("ferry")?, fio, disk_tools: tools.ok() };
    let daemon = programs.tool("qemu-storage-daemon").ok();
    let machine = Machine::look(&cli.work, daemon.as_deref(), Some(&programs.fio));
    let progress = Progress::new(steps.len());
    progress.show("making the disks");
    let files = Files::make(cli.work.join("run"))?;
    let effort = if cli.quick { Effort::QUICK } else { Effort::FULL };
    let mut runner = Runner::new(cache, programs, files, session::divide_cpus()?, effort);
    let lines = progress.measure(
        &steps,
        |step| step.name(),
        &unknown,
        |step| {
            let systems = step.systems().into_iter().filter(|system| is_wanted(*system, &cli.peers));
            runner.run(*step, &systems.collect::<Vec<_>>())
        },
    )?;
    let targets = report::targets(&lines);
    targets.iter().for_each(|target| eprintln!("{target}"));
    if let Some(directory) = cli.results() {
        let machine = Machine { guest_kernel: runner.guest_kernels(), command: crate::cli::command(), ..machine };
        report::write(&directory, &lines, &machine, &targets)?;
    }
    Ok(crate::cli::verdict(&lines))
}

fn steps(cli: &Cli) -> Vec<Step> {
    let wanted = |step: &Step| match &cli.rows {
        Some(regex) => {
            let with_cache = format!("{}{}", step.name(), if step.direct { " direct" } else { "" });
            regex.is_match(&step.name()) || regex.is_match(&with_cache)
        }
        None => step.quick || !cli.quick,
    };
    rows::all().into_iter().filter(wanted).collect()
}

/// Ours always; the peers that were named, or all.
fn is_wanted(system: System, peers: &[String]) -> bool {
    system.is_ours() || peers.is_empty() || peers.iter().any(|name| name == system.name())
}

fn unknown_peers(peers: &[String]) -> Vec<String> {
    let known = |name: &str| name == FERRY || systems::ALL.iter().any(|system| system.name() == name);
    let reason =
        |name: &String| if name == SPDK { NO_SPDK.into() } else { format!("{name}: this table cannot run it") };
    peers.iter().filter(|name| !known(name)).map(reason).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn cli(words: &[&str]) -> Cli {
        Cli::parse_from(["bench/run", TABLE, "--work", "/w"].iter().chain(words))
    }

    #[test]
    fn rows_can_be_chosen() {
        assert_eq!(steps(&cli(&["--rows", "^sequential read 512B depth 2$"])).len(), 2);
        assert_eq!(steps(&cli(&["--rows", "^sequential read 512B depth 2 direct$"])).len(), 1);
        assert!(steps(&cli(&["--quick"])).len() < steps(&cli(&[])).len());
    }

    #[test]
    fn peers_can_be_chosen() {
        let names = ["qemu-storage-daemon".to_owned(), SPDK.to_owned(), "nbd".to_owned()];
        assert_eq!(systems::ALL.iter().filter(|&&system| is_wanted(system, &names)).count(), 4, "ours and that one");
        assert_eq!(unknown_peers(&names), [NO_SPDK, "nbd: this table cannot run it"]);
    }
}
