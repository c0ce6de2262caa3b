//! The images table: trees as images, mounted by the kernel and by ferry.

mod developer;
mod guest;
mod made;
mod mounts;
pub mod report;
mod rows;
mod runner;
mod systems;
mod tree;
pub mod walk;

use std::process::{Command, ExitCode, Stdio};

use anyhow::{Result, ensure};
use ferry_guest::Cache;

use self::made::Programs;
use self::rows::Work;
pub use self::runner::Effort;
use self::runner::Runner;
use crate::cli::Cli;
use crate::machine::Machine;
use crate::progress::Progress;
use crate::{earlier, parts, session};

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
    let directory = cli.results();
    // Before any measurement, so that unreadable input is reported at once.
    let earlier = match &directory {
        Some(directory) if cli.add => earlier::read(directory, TABLE, known_row)?,
        _ => Vec::new(),
    };
    let mut skipped = unknown_peers(&cli.peers);
    let mut found = |name: &str, set: ferry_guest::Result<std::path::PathBuf>| {
        set.map(|set| set.join("bin")).inspect_err(|error| skipped.push(format!("{name}: {error}"))).ok()
    };
    let composefs = found("composefs", cache.composefs());
    let erofs = found("erofs-utils", cache.erofs());
    let programs = Programs { ferry: crate::cli::program("ferry")?, composefs, erofs };
    let peers = peer_versions(&cache);
    let guests = guests(&cache);
    let work = cli.work.join("run");
    std::fs::create_dir_all(&work)?;
    let machine = Machine { command: crate::cli::command(), ..Machine::look(&cli.work, None, None) };
    let effort = if cli.quick { Effort::QUICK } else { Effort::FULL };
    let mut runner = Runner::new(programs, work, effort, guests);
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
    let verdict = crate::cli::verdict(&lines);
    let lines = parts::join(&earlier, &lines, order());
    let targets = report::targets(&lines);
    targets.iter().for_each(|target| eprintln!("{target}"));
    if let Some(directory) = directory {
        report::write(&directory, &lines, &machine, &peers, effort, &targets)?;
    }
    Ok(verdict)
}

/// Where guests run, or why none does. They are not needed for most rows.
fn guests(cache: &Cache) -> std::result::Result<guest::Place, String> {
    cache.uml().map_err(|error| error.to_string())?;
    let (guest_cpu, server_cpus) = session::divide_cpus().map_err(|error| error.to_string())?;
    Ok(guest::Place { cache: cache.clone(), virtiofsd: cache.peer("virtiofsd").ok(), guest_cpu, server_cpus })
}

/// All rows of a step, each with all of our configurations.
fn order() -> impl Iterator<Item = (String, &'static str)> {
    let ours = |work: Work| work.systems().iter().filter(|system| system.is_ours()).map(|system| system.name());
    let rows = move |work: Work| {
        work.rows().iter().flat_map(move |(_, row)| ours(work).map(|config| ((*row).to_owned(), config)))
    };
    rows::ALL.into_iter().flat_map(rows)
}

fn known_row(name: &str) -> Option<earlier::Row> {
    let work = rows::ALL.into_iter().find(|work| work.rows().iter().any(|(_, row)| *row == name))?;
    Some(earlier::Row { unit: work.unit(), better: work.better() })
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
            || systems::WALKED
                .iter()
                .chain(&systems::STARTED)
                .chain(&systems::GUESTS)
                .any(|system| system.name() == name)
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
    use super::rows::{TreeLocation, Walk};
    use super::*;
    use clap::Parser;

    fn cli(words: &[&str]) -> Cli {
        Cli::parse_from(["bench/run", "images", "--work", "/w"].iter().chain(words))
    }

    #[test]
    fn partial_runs_keep_the_order_of_rows() {
        let line = |row: &str, config: &str| {
            crate::line::Line::new(TABLE, row.into(), config, "ms", crate::stats::Better::Lower)
        };
        let earlier = [line("guest stat walk warm", "flat virtiofs"), line("stat walk warm", "flat fuse")];
        let joined = parts::join(&earlier, &[line("ls -lR cold", "flat"), line("no such row", "flat")], order());
        let rows: Vec<_> = joined.iter().map(|line| &*line.row).collect();
        assert_eq!(rows, ["ls -lR cold", "stat walk warm", "guest stat walk warm"]);
        assert_eq!(known_row("sequential read cold").map(|row| row.unit), Some("MiB/s"));
        assert!(known_row("no such row").is_none());
    }

    #[test]
    fn rows_can_be_chosen() {
        assert_eq!(works(&cli(&["--rows", "^stat walk warm$"])), [Work::Walk(Walk::Stat, TreeLocation::Root)]);
        assert_eq!(works(&cli(&["--rows", "size"])), [Work::Size]);
        assert_eq!(works(&cli(&[])).len(), rows::ALL.len());
        assert_eq!(works(&cli(&["--rows", "^guest"])).len(), 2);
        assert_eq!(unknown_peers(&["composefs".into(), "nfs".into()]), ["nfs: this table cannot run it"]);
    }
}
