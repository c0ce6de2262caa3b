//! The report of a run: Markdown, the lines themselves, a chart.

use std::fmt::{self, Write as _};
use std::path::Path;

use anyhow::Result;

use crate::chart;
use crate::line::{Counts, FERRY, Line};
use crate::machine::Machine;
use crate::rows::{Config, Row};
use crate::target::{self, Target};
use crate::{parts, stats};

/// The published figures.
const PUBLISHED: &str = include_str!("../../published/virtiofs-fio.csv");

/// The peer that the summary is about.
const PEER: &str = "virtiofsd";

/// Requests in flight over four queues and over one: how many times faster than the peer.
const NATIVE: [(&str, f64); 2] = [("native-read-4k q4 d16", 3.0), ("native-read-4k q1 d16", 2.0)];

/// A published row, in MiB/s; 0 where the job could not run.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    /// The job.
    pub name: String,
    /// 9P, cache=none.
    pub v9fs: f64,
    /// virtio-fs, cache=none.
    pub virtiofs: f64,
    /// The same with DAX.
    pub dax: f64,
}

/// Reads the published figures.
pub fn published() -> Vec<Published> {
    let number = |field: Option<&str>| field.and_then(|field| field.parse().ok()).unwrap_or(0.0);
    let row = |line: &str| {
        let mut fields = line.split(',').map(str::trim);
        let name = fields.next().unwrap_or_default().to_owned();
        let (v9fs, virtiofs, dax) = (number(fields.next()), number(fields.next()), number(fields.next()));
        Published { name, v9fs, virtiofs, dax }
    };
    PUBLISHED.lines().skip(1).filter(|line| !line.is_empty()).map(row).collect()
}

/// Rows that belong together, and what they are called.
type Group = (&'static str, fn(&Row) -> bool);

/// The ratios of a run in a few figures.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// The group, how many of its rows have a ratio, and their mean.
    means: Vec<(&'static str, String, Option<f64>)>,
    /// The name of the least row, how many rows have a ratio, and the ratio.
    least: Option<(String, String, f64)>,
}

impl Summary {
    /// Of lines that belong to these rows.
    pub fn of(rows: &[Row], lines: &[Line]) -> Self {
        let ratios = || rows.iter().zip(lines).filter_map(|(row, line)| Some((row, *line.ratio.get(PEER)?)));
        let groups: [Group; 4] = [
            ("all rows", |_| true),
            ("metadata rows", Row::is_metadata),
            ("multi-job rows", Row::is_multi),
            ("native rows", |row| matches!(row.work, crate::rows::Work::Native(_))),
        ];
        let mean = |(name, test): Group| {
            let all = rows.iter().zip(lines).filter(|(row, _)| test(row)).count();
            let of_group: Vec<f64> = ratios().filter(|(row, _)| test(row)).map(|(_, ratio)| ratio).collect();
            let count = format!("{} of {all}", of_group.len());
            (all > 0).then(|| (name, count, stats::geometric_mean(of_group)))
        };
        let least = ratios().min_by(|(_, a), (_, b)| a.total_cmp(b));
        Self {
            means: groups.into_iter().filter_map(mean).collect(),
            least: least.map(|(row, ratio)| {
                let count = format!("{} of {}", ratios().count(), rows.len().min(lines.len()));
                (format!("{} ({})", row.name, row.config.name()), count, ratio)
            }),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count, mean) in &self.means {
            let mean = mean.map_or("not measured".into(), |mean| format!("{mean:.2}"));
            writeln!(f, "ferry : {PEER}, geometric mean of {name} ({count}): {mean}")?;
        }
        if let Some((name, count, ratio)) = &self.least {
            writeln!(f, "ferry : {PEER}, least row ({count}): {name}: {ratio:.2}")?;
        }
        Ok(())
    }
}

/// What the project set itself to reach, as far as this run measured it.
pub fn targets(lines: &[Line]) -> Vec<Target> {
    let target = |(row, limit): (&str, f64)| {
        Target::ratio(format!("{row}: ferry : {PEER}"), parts::find(lines, row, Config::None.name()), PEER, limit)
    };
    NATIVE.into_iter().filter_map(target).collect()
}

/// Writes the report into a directory.
pub fn write(directory: &Path, lines: &[Line], machine: &Machine, summary: &Summary, targets: &[Target]) -> Result<()> {
    let markdown = markdown(lines, machine, summary, targets);
    parts::save(directory, "virtiofs", lines, &markdown, &chart::svg(lines, PEER))
}

/// The whole report.
fn markdown(lines: &[Line], machine: &Machine, summary: &Summary, targets: &[Target]) -> String {
    let mut out = String::from("# virtio-fs: Ferry beside virtiofsd\n\n");
    head(&mut out, machine, lines);
    out.push_str("## Summary\n\n");
    for line in summary.to_string().lines() {
        let _ = writeln!(out, "* {line}");
    }
    out.push('\n');
    target::chapter(&mut out, targets);
    out.push_str("![How many times better Ferry is, row by row](virtiofs.svg)\n\n");
    figures(&mut out, lines);
    counts(&mut out, lines);
    parts::shortfalls(&mut out, lines, |peer| peer == PEER, |_| parts::most_runs(lines));
    out
}

fn head(out: &mut String, machine: &Machine, lines: &[Line]) {
    let runs = parts::most_runs(lines);
    let Machine { cpu, cpus, kernel, file_system, guest_kernel, virtiofsd, fio, ferry, command, date } = machine;
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC. {runs} runs of each server, in turn; medians, with the least and the greatest \
         in brackets. A ratio above 1 means that Ferry is better, whatever the unit.\n\n\
         | | |\n| --- | --- |\n\
         | machine | {cpu}, {cpus} CPUs, Linux {kernel}, data on {file_system} |\n\
         | guest | User-mode Linux {guest_kernel}, one CPU of its own; the servers have the others |\n\
         | Ferry | {ferry} |\n| peer | {virtiofsd}, `--sandbox none --seccomp none` |\n| fio | {fio} |\n"
    );
    let _ = writeln!(
        out,
        "* Configuration `none` is `--cache none` of Ferry and `--cache never --allow-mmap` of virtiofsd, `auto` is \
         `--cache auto` of both with extended attributes and ACLs, `auto-no-xattr` without them, and `auto-local-locks` besides without locks that others meet, which virtiofsd never has. Two guests, one on each server, share one directory; only one works at a time.\n\
         * fio: {} MiB files that the host has in its page cache, 4 KiB blocks, no fsync; libaio with `direct=1` and 16 \
         in flight; `multi` is four jobs in one guest. psync and mmap without `direct`.\n\
         * The published figures (`bench/published/virtiofs-fio.csv`, MiB/s) are the virtio-fs developers' own, years ago, \
         of another machine, kernel and guest: they tell which rows matter, not how fast Ferry is. 0: the job could not \
         run.\n\
         * `native` rows are requests of the native driver, which polls; over one queue it has one CPU and the server \
         the others, over four everybody may use all.\n",
        crate::fio::FILE_MIB
    );
}

fn figures(out: &mut String, lines: &[Line]) {
    out.push_str(
        "## Figures\n\n| row | config | unit | Ferry | virtiofsd | ratio | published: virtio-fs | 9P | virtio-fs with DAX |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    let published = published();
    for line in lines {
        let found = published.iter().find(|job| job.name == line.row && line.config == Config::None.name());
        let shown = |pick: fn(&Published) -> f64| found.map_or(String::new(), |job| pick(job).to_string());
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            line.row,
            line.config,
            line.unit,
            parts::figure(line, FERRY),
            parts::figure(line, PEER),
            parts::ratio(Some(line), PEER),
            shown(|job| job.virtiofs),
            shown(|job| job.v9fs),
            shown(|job| job.dax),
        );
    }
    out.push('\n');
    parts::line_notes(out, &lines.iter().collect::<Vec<_>>());
}

/// What requests of the native driver cost the servers.
pub fn counts(out: &mut String, lines: &[Line]) {
    if lines.iter().all(|line| line.counts.is_empty()) {
        return;
    }
    out.push_str(
        "\n## What noise does not touch\n\nPer request, in runs of their own: system calls of the server, how often \
         its threads were woken, interrupts (calls) and notifications (kicks). Polling, the driver looks at its rings \
         all the time; asleep, it waits for a call, as a guest does.\n\n\
         | row | config | driver | server | system calls | wake-ups | calls | kicks |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for line in lines {
        for (how, counts) in [("polling", &line.counts), ("asleep", &line.counts_asleep)] {
            for (server, counts) in counts {
                let Counts { syscalls_per_request, wakeups_per_request, calls_per_request, kicks_per_request } = counts;
                let shown = |value: &Option<f64>| value.map_or("-".into(), |value| value.to_string());
                let _ = writeln!(
                    out,
                    "| {} | {} | {how} | {server} | {} | {} | {calls_per_request} | {kicks_per_request} |",
                    line.row,
                    line.config,
                    shown(syscalls_per_request),
                    shown(wakeups_per_request)
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows;

    fn lines() -> (Vec<Row>, Vec<Line>) {
        let rows: Vec<Row> = rows::all()
            .into_iter()
            .filter(|row| {
                row.name.starts_with("randread-psync")
                    || row.name == "native-read-4k q1 d16"
                    || (&*row.name, row.config) == ("git-status", rows::Config::Auto)
            })
            .collect();
        let fill = |row: &Row| {
            let mut line = Line::empty("virtiofs", row);
            let samples = [("ferry", vec![90.0, 100.0, 110.0]), ("virtiofsd", vec![60.0, 50.0, 95.0])];
            line.fill(&samples.map(|(name, values)| (name.to_owned(), values)).into());
            line
        };
        let lines = rows.iter().map(fill).collect();
        (rows, lines)
    }

    #[test]
    fn reads_the_published_figures() {
        let job = published().into_iter().find(|job| job.name == "seqread-psync-multi").unwrap();
        assert_eq!((job.v9fs, job.virtiofs, job.dax), (117.0, 162.0, 894.0));
    }

    #[test]
    fn sums_up() {
        let (rows, lines) = lines();
        let text = Summary::of(&rows, &lines).to_string();
        assert!(text.contains("multi-job rows (1 of 1): 1.67"), "{text}");
        assert!(text.contains("metadata rows (1 of 1): 0.60"), "{text}");
        assert!(text.contains("least row (4 of 4): git-status (auto): 0.60"), "{text}");
        assert_eq!(Summary::of(&[], &[]).to_string(), "");
        let mut failed = lines;
        failed.iter_mut().for_each(|line| line.ratio.clear());
        let text = Summary::of(&rows, &failed).to_string();
        assert!(text.contains("multi-job rows (0 of 1): not measured"), "{text}");
    }

    #[test]
    fn shows_figures_and_shortfalls() {
        let (rows, mut lines) = lines();
        lines[0].skip("qemu-9p: no");
        let text = markdown(&lines, &Machine::default(), &Summary::of(&rows, &lines), &targets(&lines));
        let row = "| randread-psync | none | MiB/s | 100 [90, 110] | 60 [50, 95] | **1.67** | 34 | 29 | 256 |";
        assert!(text.contains(row), "{text}");
        assert!(text.contains("* git-status (auto): 0.60 of virtiofsd; the runs of both overlap"), "{text}");
        assert!(text.contains("skipped: qemu-9p: no"), "{text}");
        let target = "## Targets\n\n| | measured | target | |\n| --- | --- | --- | --- |\n\
                      | native-read-4k q1 d16: ferry : virtiofsd | 1.67 | at least 2 | missed |\n\n![";
        assert!(text.contains(target), "{text}");
        assert_eq!(targets(&[]), []);
    }
}
