//! The zufs table: file systems in user mode, on this host and in a guest with persistent memory.

mod commands;
mod costs;
mod curves;
mod fio;
mod guest;
mod load;
pub mod report;
mod rows;
mod runner;
mod systems;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail, ensure};
use ferry_guest::Cache;

use self::commands::Programs;
use self::load::Loads;
use self::rows::Step;
use self::runner::{Effort, Runner};
use self::systems::System;
use crate::cli::Cli;
use crate::line::FERRY;
use crate::machine::Machine;
use crate::progress::Progress;

/// The table's name.
pub const TABLE: &str = "zufs";

/// Builds libfuse's server; from the project's root.
const BUILD_PEERS: &str = "bench/peers/build";

/// Measures, prints and reports.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let steps = steps(cli);
    if let Some(code) = cli.listed("zufs", steps.iter().flat_map(|step| step.rows()).map(|(_, name)| name)) {
        return Ok(code);
    }
    ensure!(rustix::process::geteuid().is_root(), "bench/run zufs mounts file systems and needs to be root");
    let unknown = unknown_peers(&cli.peers);
    let cache = Cache::from_env()?;
    let fio = cache.peer("fio")?;
    let peers = Peers::prepare(&cache);
    let programs = Programs {
        ferry: crate::cli::program("ferry")?,
        null: crate::cli::program("ferry-bench-null")?,
        libfuse: peers.libfuse,
    };
    let directory = cli.work.join("run");
    std::fs::create_dir_all(&directory)?;
    let machine = Machine::look(&cli.work, None, Some(&fio));
    let loads = Loads { fio, names: crate::cli::program("ferry-bench-names")?, directory: directory.clone() };
    let effort = if cli.quick { Effort::QUICK } else { Effort::FULL };
    let wanted = cli.peers.clone();
    let mut runner = Runner::new(cache, programs, loads, peers.mkfs, directory, effort);
    let progress = Progress::new(steps.len());
    let names = |step: &Step| step.rows().into_iter().map(|(_, name)| name).collect::<Vec<_>>().join(", ");
    let lines = progress.measure(&steps, names, &unknown, |step| {
        let systems = step.systems().iter().copied().filter(|system| is_wanted(*system, &wanted));
        runner.run(*step, &systems.collect::<Vec<_>>())
    })?;
    let targets = report::targets(&lines);
    targets.iter().for_each(|target| eprintln!("{target}"));
    if let Some(directory) = cli.results() {
        let guest_kernel = runner.guest_kernel().unwrap_or("none ran").to_owned();
        let machine = Machine { guest_kernel, command: crate::cli::command(), ..machine };
        report::write(&directory, &lines, &machine, &peers.libfuse_version, &targets)?;
    }
    Ok(crate::cli::verdict(&lines))
}

fn steps(cli: &Cli) -> Vec<Step> {
    let wanted = |step: &Step| match &cli.rows {
        Some(regex) => step.rows().iter().any(|(_, name)| regex.is_match(name)),
        None => step.quick || !cli.quick,
    };
    rows::all().into_iter().filter(wanted).collect()
}

/// Ours always; the peers that were named, or all.
fn is_wanted(system: System, peers: &[String]) -> bool {
    system.is_ours() || peers.is_empty() || peers.iter().any(|name| name == system.name())
}

fn unknown_peers(peers: &[String]) -> Vec<String> {
    let known =
        |name: &str| name == FERRY || systems::DATA.iter().chain(&systems::GUEST).any(|system| system.name() == name);
    peers.iter().filter(|name| !known(name)).map(|name| format!("{name}: this table cannot run it")).collect()
}

/// What ours is compared with. What cannot be had is said where it would have run.
#[derive(Debug)]
struct Peers {
    libfuse: Option<PathBuf>,
    libfuse_version: String,
    mkfs: Option<PathBuf>,
}

impl Peers {
    fn prepare(cache: &Cache) -> Self {
        let set = cache.zufs().map_err(anyhow::Error::from);
        let libfuse = set.as_ref().map_err(|error| anyhow::anyhow!("{error:#}")).and_then(|set| build(set));
        let version = libfuse.as_ref().ok().and_then(|program| version(program).ok());
        if let Err(error) = &libfuse {
            eprintln!("bench/run: no libfuse to compare with: {error:#}");
        }
        Self {
            libfuse: libfuse.ok(),
            libfuse_version: version.unwrap_or_else(|| "none".into()),
            mkfs: set.ok().map(|set| set.join("bin/mkfs.xfs")),
        }
    }
}

fn build(set: &Path) -> Result<PathBuf> {
    let output = Command::new(BUILD_PEERS)
        .arg(set)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {BUILD_PEERS}"))?;
    if !output.status.success() {
        bail!("{BUILD_PEERS} failed ({}), see above", output.status);
    }
    Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim_end()))
}

fn version(program: &Path) -> Result<String> {
    let output = Command::new(program).arg("version").stdin(Stdio::null()).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn cli(words: &[&str]) -> Cli {
        Cli::parse_from(["bench/run", "zufs", "--work", "/w"].iter().chain(words))
    }

    #[test]
    fn rows_can_be_chosen() {
        assert_eq!(steps(&cli(&["--rows", "^threads 4$"])).len(), 1);
        assert_eq!(steps(&cli(&["--rows", "^unlink"])).len(), 2);
        assert!(steps(&cli(&["--quick"])).len() < steps(&cli(&[])).len());
    }

    #[test]
    fn peers_can_be_chosen() {
        let names = ["tmpfs".to_owned(), "nfs".to_owned()];
        let chosen = systems::DATA.iter().filter(|&&system| is_wanted(system, &names)).count();
        assert_eq!(chosen, 6, "ours and tmpfs");
        assert_eq!(unknown_peers(&names), ["nfs: this table cannot run it"]);
    }
}
