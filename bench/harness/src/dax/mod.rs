//! `bench/run virtiofs --dax`: the fio jobs of the virtiofs table in a QEMU guest, with QEMU's 9pfs and a DAX window.

mod guest;
mod report;
mod runner;
mod systems;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use ferry_guest::Cache;
use rustix::mount::{MountFlags, UnmountFlags};

use self::runner::{Effort, Runner};
use self::systems::System;
use crate::cli::Cli;
use crate::data::write_noise;
use crate::line::Line;
use crate::machine::Machine;
use crate::progress::Progress;
use crate::rows::{self, Config, Row};
use crate::server::Programs;
use crate::target::Target;
use crate::{earlier, fio, parts, session};

/// The table's name.
pub const TABLE: &str = "virtiofs-dax";
/// The size of each file. Those of all four jobs take three quarters of the window: from four fifths on the guest gives mappings
/// back.
const FILE_MIB: u64 = 48;

/// Measures, prints and reports.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let rows = rows(cli);
    if let Some(code) = cli.listed("virtiofs --dax", rows.iter().map(|row| row.name.clone())) {
        return Ok(code);
    }
    ensure!(
        rustix::process::geteuid().is_root(),
        "bench/run virtiofs --dax mounts a file system for its data, and needs to be root"
    );
    let directory = cli.results();
    // Before any measurement, so that unreadable input is reported at once.
    let earlier = match &directory {
        Some(directory) if cli.add => earlier::read(directory, TABLE, known_row)?,
        _ => Vec::new(),
    };
    let unknown = unknown_peers(&cli.peers);
    let cache = Cache::from_env()?;
    // Before anything is measured.
    cache.qemu()?;
    let virtiofsd = cache.peer("virtiofsd").map_err(|error| error.to_string());
    let fio = cache.peer("fio")?;
    let machine = Machine::look(&cli.work, virtiofsd.as_deref().ok(), Some(&fio));
    let progress = Progress::new(rows.len());
    progress.show("making the files");
    let files = Files::make(cli.work.join("run"))?;
    let programs = Programs { ferry: crate::cli::program("ferry")?, virtiofsd: virtiofsd.ok() };
    let (first, others) = session::divide_cpus()?;
    let effort = if cli.quick { Effort::QUICK } else { Effort::FULL };
    let systems = System::ALL.into_iter().filter(|system| system.is_wanted(&cli.peers)).collect();
    let mut runner = Runner::new(cache, programs, fio, files, format!("{first},{others}"), systems, effort);
    let lines = progress.measure(&rows, |row| row.name.clone(), &unknown, |row| runner.run(row))?;
    let verdict = crate::cli::verdict(&lines);
    let configs = [Config::None, Config::Auto, Config::NoneDax].map(Config::name);
    let order = rows::jobs().into_iter().flat_map(|row| configs.map(|config| (row.name.clone(), config)));
    let lines = parts::join(&earlier, &lines, order);
    let targets = targets(&lines);
    targets.iter().for_each(|target| eprintln!("{target}"));
    if let Some(directory) = directory {
        let guest_kernel = runner.kernel.clone().unwrap_or_else(|| "none ran".into());
        let machine = Machine { guest_kernel, command: crate::cli::command(), ..machine };
        report::write(&directory, &lines, &machine, &targets)?;
    }
    Ok(verdict)
}

/// Writes the report of lines again.
pub fn write_again(directory: &Path, lines: &[Line], machine: &Machine) -> Result<()> {
    report::write(directory, lines, machine, &targets(lines))
}

/// What there is of the targets in the rows that these lines are about.
fn targets(lines: &[Line]) -> Vec<Target> {
    let has_run = |row: &Row| lines.iter().any(|line| line.row == row.name);
    report::targets(&rows::jobs().into_iter().filter(has_run).collect::<Vec<_>>(), lines)
}

fn known_row(name: &str) -> Option<earlier::Row> {
    let row = rows::jobs().into_iter().find(|row| row.name == name)?;
    Some(earlier::Row { unit: row.unit(), better: row.better() })
}

fn rows(cli: &Cli) -> Vec<Row> {
    let wanted = |row: &Row| match &cli.rows {
        Some(regex) => regex.is_match(&row.name),
        None => row.quick || !cli.quick,
    };
    rows::jobs().into_iter().filter(wanted).collect()
}

fn unknown_peers(peers: &[String]) -> Vec<String> {
    let is_known =
        |name: &String| System::ALL.iter().any(|system| system.name() == *name) || name == crate::line::FERRY;
    peers.iter().filter(|name| !is_known(name)).map(|name| format!("{name}: this table cannot run it")).collect()
}

/// The files, in memory: what disks are capable of is not what is to be compared.
#[derive(Debug)]
struct Files {
    /// Sockets and logs.
    directory: PathBuf,
    /// What is shared: a tmpfs.
    share: PathBuf,
}

impl Files {
    fn make(directory: PathBuf) -> Result<Self> {
        let share = directory.join("share");
        std::fs::create_dir_all(&share).with_context(|| format!("cannot create {}", share.display()))?;
        rustix::mount::mount("tmpfs", &share, "tmpfs", MountFlags::empty(), None).context("cannot mount a tmpfs")?;
        let files = Self { directory, share };
        for number in 0..fio::MULTI_JOBS {
            write_noise(&files.share.join(fio::file_name(number)), FILE_MIB << 20)?;
        }
        Ok(files)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.share, UnmountFlags::DETACH);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[test]
    fn rows_and_peers_can_be_chosen() {
        let cli =
            |words: &[&str]| Cli::parse_from(["bench/run", "virtiofs", "--dax", "--work", "/w"].iter().chain(words));
        assert_eq!(rows(&cli(&[])).len(), 24);
        assert_eq!(rows(&cli(&["--rows", "^seqread-psync$"])).len(), 1);
        assert!(rows(&cli(&["--quick"])).len() < 24);
        let wanted = |peers: &[String]| System::ALL.iter().filter(|system| system.is_wanted(peers)).count();
        assert_eq!((wanted(&[]), wanted(&["ferry".into()]), wanted(&["qemu-9p".into()])), (5, 3, 4));
        assert_eq!(unknown_peers(&["virtiofsd".into(), "nfs".into()]), ["nfs: this table cannot run it"]);
    }
}
