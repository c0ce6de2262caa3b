//! The coherence table: how late a guest sees what the host changes, and what it costs to look when nothing has changed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ferry_guest::Cache;

use crate::agent::Agent;
use crate::line::{FERRY, Line};
use crate::machine::Machine;
use crate::progress::Progress;
use crate::server::{Server, TAG};
use crate::stats::Better;
use crate::{Cli, parts, session};

/// The table's name.
const TABLE: &str = "coherence";
/// What the lines of ours are about.
const CONFIG: &str = "always-events";
/// The file that changes.
const FILE: &str = "changes";
/// The directories of the tree, and the files in each.
const TREE: (usize, usize) = (40, 50);
/// The longest that a guest may take to see a change.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Something to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    /// With an agent, to which caches are leased.
    Leased,
    /// With an agent, and names and attributes for a second.
    Events,
    /// Without.
    Auto,
    /// The reference.
    Virtiofsd,
}

impl System {
    const ALL: [Self; 4] = [Self::Leased, Self::Events, Self::Auto, Self::Virtiofsd];

    fn name(self) -> &'static str {
        match self {
            Self::Leased => FERRY,
            Self::Events => "ferry-auto-events",
            Self::Auto => "ferry-auto",
            Self::Virtiofsd => "virtiofsd",
        }
    }

    fn has_agent(self) -> bool {
        matches!(self, Self::Leased | Self::Events)
    }

    fn command(self, place: &Place, socket: &Path) -> Result<Vec<OsString>> {
        let flags = match self {
            Self::Leased => "--cache always --events",
            Self::Events => "--cache auto --events",
            Self::Auto => "--cache auto",
            Self::Virtiofsd => "--sandbox none --seccomp none --log-level warn --cache auto",
        };
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let share = || OsString::from(&place.share);
        Ok(match self {
            Self::Virtiofsd => {
                let program = place.virtiofsd.clone().context("virtiofsd is not there")?;
                let mut command = vec![program.into(), "--tag".into(), TAG.into(), "--shared-dir".into(), share()];
                command.extend(["--socket-path".into(), socket.into()]);
                command.extend(words(flags));
                command
            }
            _ => {
                let mut command = vec![place.ferry.clone().into()];
                command.extend(words(&format!("--log warn share --tag {TAG} {flags}")));
                command.extend([share(), "--virtiofs".into(), socket.into()]);
                command
            }
        })
    }
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Row {
    /// How long a command takes that looks at nothing.
    Nothing,
    /// From a change of the length to the first `stat` that shows it.
    Stat,
    /// From a change of the data to the first read, of a file opened for it, that shows it.
    Read,
    /// Looking at each file of a tree that has not changed.
    WarmTree,
}

impl Row {
    const ALL: [Self; 4] = [Self::Nothing, Self::Stat, Self::Read, Self::WarmTree];

    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "a command in the guest that looks at nothing",
            Self::Stat => "a changed length is seen by stat",
            Self::Read => "changed data are seen by open and read",
            Self::WarmTree => "find in a tree of 2,000 files that has not changed",
        }
    }

    /// One measurement, in milliseconds.
    fn measure(self, share: &Path, guest: &mut Guest, number: usize) -> Result<f64> {
        let file = share.join(FILE);
        // A time limit of a second begins when the guest has looked.
        std::thread::sleep(Duration::from_millis(u64::try_from(number * 379 % 1000)?));
        let begin = Instant::now();
        let line = match self {
            Self::Nothing => ":".into(),
            Self::Stat => {
                let is_full = fs::metadata(&file)?.len() != 0;
                fs::write(&file, if is_full { "" } else { "1" })?;
                format!("{} [[ -s {FILE} ]]; do :; done", if is_full { "while" } else { "until" })
            }
            Self::Read => {
                fs::write(&file, format!("{number:8}"))?;
                format!("v=; until [[ $v == {number} ]]; do read -r v <{FILE} || :; done")
            }
            Self::WarmTree => "find tree -type f -size +1G".into(),
        };
        let done = guest.run(&line)?;
        let elapsed = if self == Self::WarmTree { done } else { begin.elapsed() };
        Ok(elapsed.as_secs_f64() * 1e3)
    }
}

/// Where everything is.
struct Place {
    ferry: PathBuf,
    virtiofsd: Option<PathBuf>,
    share: PathBuf,
    folder: PathBuf,
}

/// A guest, which goes before its server.
struct Guest {
    agent: Agent,
    server: Server,
}

impl Guest {
    fn start(system: System, cache: &Cache, place: &Place) -> Result<Self> {
        let (cpu, server_cpus) = session::divide_cpus()?;
        let socket = place.folder.join(system.name());
        let server = Server::spawn(system.name(), &socket, &server_cpus, system.command(place, &socket)?)?;
        let agent = Agent::boot(cache, &socket, cpu, &socket.with_extension("guest"))?;
        let mut guest = Self { agent, server };
        if system.has_agent() {
            let ferry = crate::shell_word(&place.ferry);
            guest.run(&format!("{ferry} agent . >/run/agent 2>&1 & sleep 2; kill -0 $!"))?;
        }
        // Twice: also what is looked at for the second time only.
        guest.run("for i in 1 2; do find tree -type f -size +1G; cat changes; done")?;
        Ok(guest)
    }

    fn run(&mut self, line: &str) -> Result<Duration> {
        let server = &mut self.server;
        let done = self.agent.run(line, TIMEOUT, &mut || server.is_alive());
        done.map(|done| done.elapsed).with_context(|| self.server.last_words())
    }
}

/// The value below which so many hundredths of the samples are.
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
    let runs = if cli.quick { 15 } else { 100 };
    let cache = Cache::from_env()?;
    let virtiofsd = cache.peer("virtiofsd").ok();
    let machine = Machine::look(&cli.work, virtiofsd.as_deref(), None);
    let (share, folder) = (cli.work.join("share"), cli.work.join("run"));
    let place = Place { ferry: crate::program("ferry")?, virtiofsd, share, folder };
    fs::create_dir_all(&place.folder)?;
    for dir in 0..TREE.0 {
        let dir = place.share.join(format!("tree/{dir}"));
        fs::create_dir_all(&dir)?;
        (0..TREE.1).try_for_each(|file| fs::write(dir.join(file.to_string()), "x"))?;
    }
    fs::write(place.share.join(FILE), "")?;
    let progress = Progress::new(rows.len());
    progress.show("booting the guests");
    let mut guests: Vec<(System, Result<Guest>)> =
        System::ALL.map(|system| (system, Guest::start(system, &cache, &place))).into_iter().collect();
    let lines = progress.measure(
        &rows,
        |row| row.name().into(),
        &[],
        |row| vec![line(*row, &place.share, &mut guests, runs)],
    )?;
    drop(guests);
    if let Some(folder) = cli.results() {
        let machine = Machine { command: crate::command(), ..machine };
        let text = markdown(&lines, &machine, runs);
        parts::save(&folder, TABLE, &lines, &text, &crate::chart::svg(&lines, System::Virtiofsd.name()))?;
    }
    Ok(crate::verdict(&lines))
}

fn line(row: Row, share: &Path, guests: &mut [(System, Result<Guest>)], runs: usize) -> Line {
    let mut line = Line::new(TABLE, row.name().into(), CONFIG, "ms", Better::Lower);
    let mut samples = BTreeMap::<String, Vec<f64>>::new();
    // One guest at a time looks: the others would take its CPU.
    for (system, guest) in guests {
        let measured = match guest {
            Ok(guest) => (0..runs).map(|number| row.measure(share, guest, number)).collect::<Result<Vec<_>>>(),
            Err(error) => Err(anyhow::anyhow!("{error:#}")),
        };
        match measured {
            Ok(measured) => {
                let p99 = percentile(&measured, 99).unwrap_or_default();
                line.also.entry("p99").or_default().insert(system.name().into(), crate::stats::round(p99));
                samples.insert(system.name().into(), measured);
            }
            Err(error) if *system == System::Virtiofsd => line.skip(&format!("{}: {error:#}", system.name())),
            Err(error) => line.fail(&format!("{}: {error:#}", system.name())),
        }
    }
    line.fill(&samples);
    line
}

fn markdown(lines: &[Line], machine: &Machine, runs: usize) -> String {
    let Machine { cpu, cpus, kernel, ferry, virtiofsd, command, date, .. } = machine;
    let mut out = String::from("# How late a guest sees what the host changes\n\n");
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC, on {cpu}, {cpus} CPUs, Linux {kernel}; Ferry {ferry}; virtiofsd {virtiofsd}. {runs} \
         measurements of each in a User-mode Linux guest with one CPU: the median, with the least and the greatest in brackets, and the \
         99th percentile.\n\n\
         A change is timed from before the host makes it until the host has read that the guest has seen it; the first row is what that costs \
         without a change. The guest looks all the time, on the CPU that the agent needs, too. Before each change there is a pause of up to a second.\n"
    );
    let names = System::ALL.map(System::name);
    let _ = writeln!(out, "| ms | {} |\n| --- | --- | --- | --- | --- |", names.join(" | "));
    for line in lines {
        let p99 = |name: &str| line.also.get("p99").and_then(|all| all.get(name)).map(|value| format!("; p99 {value}"));
        let figures = names.map(|name| parts::figure(line, name) + &p99(name).unwrap_or_default());
        let _ = writeln!(out, "| {} | {} |", line.row, figures.join(" | "));
    }
    let _ = writeln!(
        out,
        "\n{FERRY}: `--cache always --events` and an agent in the guest; ferry-auto-events: `--cache auto --events` and an agent; \
         ferry-auto: `--cache auto`; virtiofsd: `--cache auto`.\n"
    );
    parts::disappointments(&mut out, lines, |_| true);
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
            line.also.entry("p99").or_default().insert(FERRY.into(), 2.5);
            line
        });
        let text = markdown(&lines, &Machine::default(), 2);
        assert_eq!(text.matches("; p99 2.5 |").count(), Row::ALL.len(), "{text}");
    }
}
