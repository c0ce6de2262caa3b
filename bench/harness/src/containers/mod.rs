//! The containers table: containers that containerd starts from Ferry's snapshots, and from those of others.

mod content;
mod engine;
mod image;
pub mod report;
mod rows;
mod runner;
mod systems;

use std::process::ExitCode;

use anyhow::{Result, ensure};
use ferry_guest::Cache;

use self::rows::{TABLE, Work};
use self::runner::{Effort, Runner};
use self::systems::{Programs, System};
use crate::cli::Cli;
use crate::machine::Machine;
use crate::progress::Progress;
use crate::stats::Better;
use crate::{earlier, parts, v9fs};

/// What is known of one that is not measured.
const NYDUS: &str =
    "nydus: Debian's nydus-snapshotter starts nydusd for each image, which Debian has not and nothing here builds";

/// The modules of the daemon of stargz-snapshotter.
const STARGZ_MODULES: &str = include_str!("../../../peers/stargz/go.mod");

/// Measures, prints and reports.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let works = works(cli);
    if let Some(code) = cli.listed(TABLE, works.iter().flat_map(|work| work.rows()).map(|(_, row)| row)) {
        return Ok(code);
    }
    ensure!(rustix::process::geteuid().is_root(), "bench/run {TABLE} starts containers and needs to be root");
    let directory = cli.results();
    // Before any measurement, so that unreadable input is reported at once.
    let earlier = match &directory {
        Some(directory) if cli.add => earlier::read(directory, TABLE, known_row)?,
        _ => Vec::new(),
    };
    let cache = Cache::from_env()?;
    let mut skipped = vec![NYDUS.to_owned()];
    let programs = programs(&cache, &mut skipped)?;
    let systems = systems(cli, &programs, &mut skipped);
    v9fs::loopback()?;
    let machine = Machine { command: crate::cli::command(), ..Machine::look(&cli.work, None, None) };
    let effort = if cli.quick { Effort::QUICK } else { Effort::FULL };
    let work = cli.work.join("run");
    std::fs::create_dir_all(&work)?;
    let mut runner = Runner::new(programs, work, effort, systems)?;
    let progress = Progress::new(works.len());
    let names = |work: &Work| work.rows().into_iter().map(|(_, name)| name).collect::<Vec<_>>().join(", ");
    let lines = progress.measure(&works, names, &skipped, |work| runner.run(*work))?;
    let verdict = crate::cli::verdict(&lines);
    let lines = parts::join(&earlier, &lines, order());
    let targets = report::targets(&lines);
    targets.iter().for_each(|target| eprintln!("{target}"));
    if let Some(directory) = directory {
        report::write(&directory, &lines, &machine, &versions(&cache), &targets)?;
    }
    Ok(verdict)
}

/// All programs; `skipped` is told what lacks.
fn programs(cache: &Cache, skipped: &mut Vec<String>) -> Result<Programs> {
    let mut found = |name: &str, set: ferry_guest::Result<std::path::PathBuf>| {
        set.map(|set| set.join("bin")).inspect_err(|error| skipped.push(format!("{name}: {error}"))).ok()
    };
    Ok(Programs {
        ferry: crate::cli::program("ferry")?,
        snapshotter: crate::cli::program("ferry-snapshotter")?,
        erofs: found("erofs", cache.erofs()),
        peers: found("stargz, soci", cache.snapshotters()),
        containerd: cache.containerd()?,
        umoci: cache.umoci()?,
        skopeo: cache.skopeo()?,
        registry: cache.registry()?,
        packages: cache.rootfs()?,
    })
}

/// Those that can run and are wanted; ours always.
fn systems(cli: &Cli, programs: &Programs, skipped: &mut Vec<String>) -> Vec<System> {
    let can = |system: &System| match system {
        System::Erofs => programs.erofs.is_some(),
        System::Estargz | System::Soci => programs.peers.is_some(),
        System::Stargz => programs.peers.as_ref().is_some_and(|peers| peers.join("stargz-snapshotter").exists()),
        _ => true,
    };
    if !can(&System::Stargz) {
        skipped.push("stargz: bench/peers/stargz/build, which needs Go, has not built it".into());
    }
    let wanted = |system: &System| {
        system.is_ours() || cli.peers.is_empty() || cli.peers.iter().any(|peer| peer == system.name())
    };
    let known =
        |name: &str| System::ALL.iter().any(|system| system.name() == name) || matches!(name, "ferry" | "nydus");
    let unknown = cli.peers.iter().filter(|name| !known(name));
    skipped.extend(unknown.map(|name| format!("{name}: this table cannot run it")));
    System::ALL.into_iter().filter(|system| can(system) && wanted(system)).collect()
}

fn works(cli: &Cli) -> Vec<Work> {
    let wanted = |work: &Work| match &cli.rows {
        Some(regex) => work.rows().iter().any(|(_, row)| regex.is_match(row)),
        None => work.is_quick() || !cli.quick,
    };
    rows::all().into_iter().filter(wanted).collect()
}

/// All rows, each with all of our configurations.
fn order() -> impl Iterator<Item = (String, &'static str)> {
    let ours = || System::ALL.into_iter().filter(|system| system.is_ours()).map(System::name);
    let rows = rows::all().into_iter().flat_map(Work::rows);
    rows.flat_map(move |(_, row)| ours().map(move |config| (row.clone(), config)))
}

fn known_row(name: &str) -> Option<earlier::Row> {
    let (figure, _) = rows::all().into_iter().flat_map(Work::rows).find(|(_, row)| row == name)?;
    Some(earlier::Row { unit: figure.unit(), better: Better::Lower })
}

/// The peers' packages, as the cache notes them. Of stargz-snapshotter the daemon is built here, by its module's version.
fn versions(cache: &Cache) -> String {
    let mut versions: Vec<String> =
        stargz_version().map(|version| format!("stargz-snapshotter {version}")).into_iter().collect();
    for (set, packages) in [
        ("containerd", ["containerd", "runc"].as_slice()),
        ("erofs", &["erofs-utils"]),
        ("snapshotters", &["soci-snapshotter"]),
        ("registry", &["docker-registry"]),
    ] {
        let stamp = std::fs::read_to_string(cache.path().join(set).join("stamp")).unwrap_or_default();
        for package in packages {
            let version =
                |line: &str| line.strip_prefix(package)?.strip_prefix('_')?.split('_').next().map(str::to_owned);
            versions.extend(stamp.lines().find_map(version).map(|version| format!("{package} {version}")));
        }
    }
    versions.join(", ")
}

/// The version of stargz-snapshotter that bench/peers/stargz/build builds.
fn stargz_version() -> Option<&'static str> {
    STARGZ_MODULES.lines().find_map(|line| line.trim().strip_prefix("github.com/containerd/stargz-snapshotter "))
}

#[cfg(test)]
mod tests {
    use super::image::Image;
    use super::*;
    use clap::Parser;

    fn cli(words: &[&str]) -> Cli {
        Cli::parse_from(["bench/run", "containers", "--work", "/w"].iter().chain(words))
    }

    #[test]
    fn rows_and_peers_can_be_chosen() {
        assert_eq!(works(&cli(&["--rows", "^warm start java$"])), [Work::Warm(Image::Java)]);
        assert_eq!(works(&cli(&["--rows", "^requests"])).len(), 4);
        assert_eq!((works(&cli(&[])).len(), works(&cli(&["--quick"])).len()), (18, 4));
        let [name] = &*works(&cli(&["--rows", "disk"])) else { panic!("one row is about disks") };
        assert_eq!(known_row(&name.rows()[0].1).map(|row| row.unit), Some("MB"));
        assert_eq!(order().count(), 45 * 5);
        assert!(stargz_version().is_some_and(|version| version.starts_with("v0.")), "{:?}", stargz_version());
        let none = || std::path::PathBuf::new();
        let programs = Programs {
            ferry: none(),
            snapshotter: none(),
            containerd: none(),
            erofs: Some(none()),
            peers: None,
            umoci: none(),
            skopeo: none(),
            registry: none(),
            packages: none(),
        };
        let mut skipped = Vec::new();
        let chosen = systems(&cli(&["--peers", "erofs,stargz,zfs"]), &programs, &mut skipped);
        assert_eq!(chosen, [System::Layers, System::Stacked, System::Prepared, System::Ordered, System::Erofs]);
        assert!(skipped[0].starts_with("stargz: ") && skipped[1] == "zfs: this table cannot run it", "{skipped:?}");
    }
}
