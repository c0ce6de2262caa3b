//! The images table: trees as images, mounted by the kernel and by us.

mod made;
mod mounts;
mod report;
mod rows;
mod runner;
mod systems;
mod tree;
mod walk;

use std::process::{Command, ExitCode, Stdio};

use anyhow::{Result, ensure};
use ferry_guest::Cache;

use self::made::Programs;
use self::rows::Work;
use self::runner::{Effort, Runner};
use crate::Cli;
use crate::machine::Machine;
use crate::progress::Progress;

/// The table's name.
pub const TABLE: &str = "images";

/// Measures, prints and reports.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let works = works(cli);
    if let Some(code) = cli.listed(TABLE, works.iter().flat_map(|work| work.rows()).map(|(_, name)| name)) {
        return Ok(code);
    }
    ensure!(rustix::process::geteuid().is_root(), "bench/run {TABLE} mounts images and needs to be root");
    let cache = Cache::from_env()?;
    let mut skipped = unknown_peers(&cli.peers);
    let mut found = |name: &str, set: ferry_guest::Result<std::path::PathBuf>| {
        set.map(|set| set.join("bin")).inspect_err(|error| skipped.push(format!("{name}: {error}"))).ok()
    };
    let composefs = found("composefs", cache.composefs());
    let erofs = found("erofs-utils", cache.erofs());
    let programs = Programs { ferry: crate::program("ferry")?, composefs, erofs };
    let peers = peer_versions(&cache);
    let folder = cli.work.join("run");
    std::fs::create_dir_all(&folder)?;
    let machine = Machine { command: crate::command(), ..Machine::look(&cli.work, None, None) };
    let effort = if cli.quick { Effort::QUICK } else { Effort::FULL };
    let mut runner = Runner::new(programs, folder, effort);
    let progress = Progress::new(works.len());
    let names = |work: &Work| work.rows().iter().map(|(_, name)| *name).collect::<Vec<_>>().join(", ");
    let wanted = |name: &str| cli.peers.is_empty() || cli.peers.iter().any(|peer| peer == name);
    let mut failed = None;
    let lines = progress.measure(&works, names, &skipped, |work| {
        runner.run(*work, wanted).unwrap_or_else(|error| {
            failed = Some(error);
            Vec::new()
        })
    })?;
    if let Some(error) = failed {
        return Err(error);
    }
    let targets = report::targets(&lines);
    targets.iter().for_each(|target| eprintln!("{target}"));
    if let Some(folder) = cli.results() {
        report::write(&folder, &lines, &machine, &peers, effort.files, &targets)?;
    }
    Ok(crate::verdict(&lines))
}

fn works(cli: &Cli) -> Vec<Work> {
    let wanted = |work: &Work| match &cli.rows {
        Some(regex) => work.rows().iter().any(|(_, name)| regex.is_match(name)),
        None => true,
    };
    rows::ALL.into_iter().filter(wanted).collect()
}

fn unknown_peers(peers: &[String]) -> Vec<String> {
    let known = |name: &str| {
        name == crate::line::FERRY
            || systems::WALKED.iter().chain(&systems::STARTED).any(|system| system.name() == name)
            || systems::BUILDERS.iter().any(|builder| builder.name() == name)
    };
    peers.iter().filter(|name| !known(name)).map(|name| format!("{name}: this table cannot run it")).collect()
}

/// The peers' packages, as the cache notes them.
fn peer_versions(cache: &Cache) -> String {
    let mut versions = Vec::new();
    for (set, package) in [("composefs", "composefs_"), ("erofs", "erofs-utils_")] {
        let stamp = std::fs::read_to_string(cache.path().join(set).join("stamp")).unwrap_or_default();
        let version = stamp.lines().find_map(|line| line.strip_prefix(package)?.split('_').next().map(str::to_owned));
        versions.extend(version.map(|version| format!("{}{version}", package.replace('_', " "))));
    }
    let ls = Command::new("ls").arg("--version").stdin(Stdio::null()).output();
    let ls = ls.map(|output| String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned());
    versions.extend(ls.ok());
    versions.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn cli(words: &[&str]) -> Cli {
        Cli::parse_from(["bench/run", "images", "--work", "/w"].iter().chain(words))
    }

    #[test]
    fn rows_can_be_chosen() {
        assert_eq!(works(&cli(&["--rows", "^stat walk warm$"])), [Work::Stat]);
        assert_eq!(works(&cli(&["--rows", "size"])), [Work::Size]);
        assert_eq!(works(&cli(&[])).len(), 7);
        assert_eq!(unknown_peers(&["composefs".into(), "nfs".into()]), ["nfs: this table cannot run it"]);
    }
}
