//! The coherence table: how late a guest sees what the host changes, and what it costs to look when nothing has changed.

mod guests;
mod trees;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use ferry_guest::Cache;

use crate::cli::Cli;
use crate::line::{FERRY, Line, Requests};
use crate::machine::Machine;
use crate::progress::Progress;
use crate::stats::Better;
use crate::{earlier, parts, process};
use guests::{FILE, Guest, Place, System};
use trees::Size;

/// The table's name.
const TABLE: &str = "coherence";
/// The unit of all figures.
const UNIT: &str = "ms";
/// How long tar may take.
const TAR_TIMEOUT: Duration = Duration::from_secs(300);
/// The configuration that Ferry's lines name.
const CONFIG: &str = "always-events";
/// The pause before a command is run again.
const AGAIN_AFTER: Duration = Duration::from_secs(2);
/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    /// How long a command takes that looks at nothing.
    Nothing,
    /// From a change of the length to the first `stat` that shows it.
    Stat,
    /// From a change of the data to the first read, of a file opened for it, that shows it.
    Read,
    /// Looking at each file of the repository, which has not changed.
    Find,
    /// What git finds there.
    GitStatus,
    /// The packages of node.
    NpmLs,
    /// Crates that are built already.
    CargoCheck,
    /// What watching costs the host: the repository's files are unpacked in the share, while one guest has it mounted.
    Unpack,
}

impl Row {
    const ALL: [Self; 8] = [
        Self::Nothing,
        Self::Stat,
        Self::Read,
        Self::Find,
        Self::GitStatus,
        Self::NpmLs,
        Self::CargoCheck,
        Self::Unpack,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "a command in the guest that looks at nothing",
            Self::Stat => "a changed length is seen by stat",
            Self::Read => "changed data are seen by open and read",
            Self::Find => "find -size, warm",
            Self::GitStatus => "git status, warm",
            Self::NpmLs => "npm ls, warm",
            Self::CargoCheck => "cargo check with nothing to do, warm",
            Self::Unpack => "tar x on the host",
        }
    }

    /// The command of a row in which nothing changes, and the number of its files. It runs twice; the second run is measured.
    fn warm(self, size: Size) -> Option<(&'static str, usize)> {
        let files = size.dirs * Size::FILES;
        match self {
            Self::Nothing | Self::Stat | Self::Read | Self::Unpack => None,
            Self::Find => Some(("find tree -type f -size +1G", files)),
            Self::GitStatus => Some(("git -C tree --no-optional-locks status --porcelain", files)),
            Self::NpmLs => Some(("(cd packages && npm ls --all --offline --no-update-notifier)", 2 * size.packages)),
            Self::CargoCheck => {
                let line = "(cd crates && PATH=~/.cargo/bin:$PATH cargo check --quiet --offline)";
                Some((line, size.crates * (Size::MODULES + 2)))
            }
        }
    }

    fn systems(self) -> impl Iterator<Item = System> {
        System::ALL.into_iter().filter(move |system| match self {
            Self::Stat | Self::Read => system.sees_changes(),
            Self::Unpack => matches!(system, System::Leased | System::Auto | System::Virtiofsd),
            _ => true,
        })
    }

    /// One measurement, in milliseconds.
    fn measure(self, bench: &Bench, guest: &mut Guest, number: usize) -> Result<f64> {
        if let Some((line, _)) = self.warm(bench.effort.size) {
            guest.run(line)?;
            // By now cache time limits of one second have expired.
            std::thread::sleep(AGAIN_AFTER);
            return Ok(guest.run(line)?.as_secs_f64() * 1e3);
        }
        let file = bench.place.share.join(FILE);
        // Fills the guest's cache, which starts its time limit of one second.
        match self {
            // Not a read: that changes atime, so the attributes would be requested again.
            Self::Stat => _ = guest.run(&format!("[[ -s {FILE} ]]; :"))?,
            Self::Read => _ = guest.run(&format!("cat {FILE}"))?,
            _ => {}
        }
        std::thread::sleep(Duration::from_millis(u64::try_from(number * 379 % 1000)?));
        let begin = Instant::now();
        let line = match self {
            Self::Stat => {
                let is_full = fs::metadata(&file)?.len() != 0;
                fs::write(&file, if is_full { "" } else { "1" })?;
                format!("{} [[ -s {FILE} ]]; do :; done", if is_full { "while" } else { "until" })
            }
            Self::Read => {
                fs::write(&file, format!("{number:8}"))?;
                format!("v=; until [[ $v == {number} ]]; do read -r v <{FILE} || :; done")
            }
            _ => ":".into(),
        };
        guest.run(&line)?;
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    }
}

/// The guests of all systems, or why there is none.
type Guests = Vec<(System, Result<Guest>)>;

/// How much is measured.
#[derive(Debug, Clone, Copy)]
struct Effort {
    size: Size,
    /// Measurements of how late a change is seen.
    change_runs: usize,
    /// Measurements of each command where nothing changes.
    command_runs: usize,
}

impl Effort {
    const FULL: Self = Self { size: Size::FULL, change_runs: 50, command_runs: 5 };
    const QUICK: Self = Self { size: Size::QUICK, change_runs: 15, command_runs: 3 };

    fn runs_of(self, row: Row) -> usize {
        if row == Row::Unpack || row.warm(self.size).is_some() { self.command_runs } else { self.change_runs }
    }
}

/// What all rows need.
struct Bench {
    place: Place,
    effort: Effort,
}

/// Returns a percentile of the samples.
fn percentile(samples: &[f64], percent: usize) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1))).copied()
}

/// Measures, prints and reports.
pub fn run(cli: &Cli) -> Result<ExitCode> {
    let wanted = |row: &Row| cli.rows.as_ref().is_none_or(|regex| regex.is_match(row.name()));
    let rows: Vec<Row> = Row::ALL.into_iter().filter(wanted).collect();
    if let Some(code) = cli.listed(TABLE, rows.iter().map(|row| row.name())) {
        return Ok(code);
    }
    let cache = Cache::from_env()?;
    let virtiofsd = cache.peer("virtiofsd").ok();
    let machine = Machine::look(&cli.work, virtiofsd.as_deref(), None);
    let (share, directory) = (cli.work.join("share"), cli.work.join("run"));
    fs::create_dir_all(&directory)?;
    fs::create_dir_all(&share)?;
    let mkfs = cache.disk().map(|set| set.join("bin/mkfs.ext4")).map_err(|error| error.to_string());
    let place = Place { ferry: crate::cli::program("ferry")?, virtiofsd, mkfs, share, directory };
    let effort = if cli.quick { Effort::QUICK } else { Effort::FULL };
    let bench = Bench { place, effort };
    let progress = Progress::new(rows.len());
    progress.show("making the trees");
    trees::make(&bench.place.share, effort.size)?;
    fs::write(bench.place.share.join(FILE), "")?;
    let mut guests: Option<Guests> = None;
    let mut lines = progress.measure(
        &rows,
        |row| row.name().into(),
        &[],
        |row| {
            if *row == Row::Unpack {
                guests = None;
                return vec![unpack(&cache, &bench)];
            }
            let start = |system| (system, Guest::start(system, &cache, &bench.place));
            let guests = guests.get_or_insert_with(|| System::ALL.map(start).into_iter().collect());
            vec![line(*row, &bench, guests)]
        },
    )?;
    drop(guests);
    if let Some(directory) = cli.results() {
        if cli.add {
            let known = |name: &str| {
                Row::ALL.iter().find(|row| row.name() == name)?;
                Some(earlier::Row { unit: UNIT, better: Better::Lower })
            };
            let order = Row::ALL.into_iter().map(|row| (row.name().to_owned(), CONFIG));
            lines = parts::join(&earlier::read(&directory, TABLE, known)?, &lines, order);
        }
        let machine = Machine { command: crate::cli::command(), ..machine };
        write(&directory, &lines, &machine, effort)?;
    }
    Ok(crate::cli::verdict(&lines))
}

/// Writes the report of a full run into a directory.
pub fn write_full(directory: &Path, lines: &[Line], machine: &Machine) -> Result<()> {
    write(directory, lines, machine, Effort::FULL)
}

fn write(directory: &Path, lines: &[Line], machine: &Machine, effort: Effort) -> Result<()> {
    let svg = crate::chart::svg(lines, System::Virtiofsd.name());
    parts::save(directory, TABLE, lines, &markdown(lines, machine, effort), &svg)
}

/// Measures the unpacking with one server and guest at a time, because all that watch would get events.
fn unpack(cache: &Cache, bench: &Bench) -> Line {
    let mut line = Line::new(TABLE, Row::Unpack.name().into(), CONFIG, UNIT, Better::Lower);
    let mut samples = BTreeMap::<String, Vec<f64>>::new();
    let Place { share, directory, .. } = &bench.place;
    let (archive, target) = (directory.join("tree.tar"), share.join("unpacked"));
    let tar = |arguments: &[&OsStr]| {
        let mut command = Command::new("tar");
        command.args(arguments);
        process::run(command, directory, TAR_TIMEOUT)
    };
    let measure = |system| -> Result<f64> {
        fs::create_dir(&target)?;
        let guest = Guest::start(system, cache, &bench.place)?;
        rustix::fs::sync();
        let begin = Instant::now();
        tar(&["-xf".as_ref(), archive.as_ref(), "-C".as_ref(), target.as_ref()])?;
        let elapsed = begin.elapsed();
        drop(guest);
        Ok(elapsed.as_secs_f64() * 1e3)
    };
    let packed = tar(&["-cf".as_ref(), archive.as_ref(), "-C".as_ref(), share.as_ref(), "tree".as_ref()]);
    if let Err(error) = packed {
        line.fail(&format!("{error:#}"));
        return line;
    }
    for _ in 0..bench.effort.runs_of(Row::Unpack) {
        for system in Row::Unpack.systems() {
            match measure(system) {
                Ok(measured) => samples.entry(system.name().into()).or_default().push(measured),
                Err(error) => line.fail(&format!("{}: {error:#}", system.name())),
            }
            let _ = fs::remove_dir_all(&target);
        }
    }
    line.fill(&samples);
    line
}

fn line(row: Row, bench: &Bench, guests: &mut Guests) -> Line {
    let mut line = Line::new(TABLE, row.name().into(), CONFIG, UNIT, Better::Lower);
    let mut samples = BTreeMap::<String, Vec<f64>>::new();
    let warm = row.warm(bench.effort.size);
    let systems: Vec<System> = row.systems().collect();
    let mut failed = Vec::new();
    // One guest at a time: others would compete for its CPU.
    for number in 0..bench.effort.runs_of(row) {
        for (system, guest) in guests.iter_mut().filter(|(system, _)| systems.contains(system)) {
            if failed.contains(system) {
                continue;
            }
            let guest = guest.as_mut().map_err(|error| anyhow!("{error:#}"));
            match guest.and_then(|guest| row.measure(bench, guest, number)) {
                Ok(measured) => samples.entry(system.name().into()).or_default().push(measured),
                Err(error) => {
                    failed.push(*system);
                    let reason = format!("{}: {error:#}", system.name());
                    if system.is_ours() { line.fail(&reason) } else { line.skip(&reason) }
                }
            }
        }
    }
    for (name, measured) in &samples {
        let p99 = percentile(measured, 99).filter(|_| warm.is_none());
        p99.map(|p99| line.also.entry("p99".into()).or_default().insert(name.clone(), crate::stats::round(p99)));
    }
    line.fill(&samples);
    let Some((command, files)) = warm else { return line };
    for (system, guest) in guests.iter_mut().filter(|(system, _)| system.is_ours()) {
        let Ok(guest) = guest else { continue };
        match guest.requests(command, &bench.place) {
            Ok(by_name) => {
                let per_file = crate::stats::round(by_name.values().sum::<u64>() as f64 / files as f64);
                line.requests.insert(system.name().into(), Requests { per_file, by_name });
            }
            Err(error) => line.fail(&format!("{}: {error:#}", system.name())),
        }
    }
    line
}

fn markdown(lines: &[Line], machine: &Machine, effort: Effort) -> String {
    let Machine { cpu, cpus, kernel, ferry, virtiofsd, command, date, .. } = machine;
    let (Effort { size, change_runs, command_runs }, files) = (effort, Size::FILES);
    let mut out = String::from("# How late a guest sees what the host changes, and what looking costs\n\n");
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC, on {cpu}, {cpus} CPUs, Linux {kernel}; Ferry {ferry}; virtiofsd {virtiofsd}. {change_runs} \
         measurements of each change and {command_runs} of each command in a User-mode Linux guest with one CPU: the median, with the least and the \
         greatest in brackets, and the 99th percentile.\n\n\
         A change is timed from before the host makes it until the host has read that the guest has seen it; the first row is what that costs \
         without a change. The guest looks all the time, on the CPU that the agent needs, too. Before each change there is a pause of up to a second. \
         A command is run twice, with a pause of two seconds, and the second time is measured by the guest's clock: a repository of {} files, {} packages, {} crates. \
         That repository is unpacked in the share, too, where the guest knows the directory it is in, and no other guest has it mounted.\n",
        size.dirs * files,
        size.packages,
        size.crates
    );
    let names = System::ALL.map(System::name);
    let _ = writeln!(out, "| ms | {} |\n| --- |{}", names.join(" | "), " --- |".repeat(names.len()));
    for line in lines {
        let p99 = |name: &str| line.also.get("p99").and_then(|all| all.get(name)).map(|value| format!("; p99 {value}"));
        let figures = names.map(|name| parts::figure(line, name) + &p99(name).unwrap_or_default());
        let _ = writeln!(out, "| {} | {} |", line.row, figures.join(" | "));
    }
    let _ = writeln!(
        out,
        "\n{FERRY}: `--cache always --events` and an agent in the guest; ferry-auto-events: `--cache auto --events` and an agent; \
         ferry-auto: `--cache auto`; virtiofsd: `--cache auto`; virtiofsd-always: `--cache always`, whose guest sees no change; \
         ext4: a disk of the guest's own.\n\n## Requests of one more run\n\n| row | server | for each file | by name |\n| --- | --- | --- | --- |"
    );
    for line in lines {
        for (server, Requests { per_file, by_name }) in &line.requests {
            let by_name = by_name.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ");
            let _ = writeln!(out, "| {} | {server} | {per_file} | {by_name} |", line.row);
        }
    }
    out.push('\n');
    let asked =
        |line: &Line| Row::ALL.into_iter().find(|row| row.name() == line.row).map_or(0, |row| effort.runs_of(row));
    parts::shortfalls(&mut out, lines, |_| true, asked);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_samples() {
        let samples: Vec<f64> = (0..100).rev().map(f64::from).collect();
        assert_eq!((percentile(&samples, 99), percentile(&samples, 50)), (Some(99.0), Some(50.0)));
        assert_eq!((percentile(&[7.0], 99), percentile(&[], 99)), (Some(7.0), None));
    }

    #[test]
    fn each_row_has_a_place_in_the_report() {
        let lines = Row::ALL.map(|row| {
            let mut line = Line::new(TABLE, row.name().into(), CONFIG, "ms", Better::Lower);
            line.fill(&BTreeMap::from([(FERRY.to_owned(), vec![1.5, 2.5])]));
            line.also.entry("p99".into()).or_default().insert(FERRY.into(), 2.5);
            line
        });
        let text = markdown(&lines, &Machine::default(), Effort::QUICK);
        assert_eq!(text.matches("; p99 2.5 |").count(), Row::ALL.len(), "{text}");
        assert!(text.contains("* 2 of 15 runs: ") && text.contains("* 2 of 3 runs: "), "{text}");
    }
}
