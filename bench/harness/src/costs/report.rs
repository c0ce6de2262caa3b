//! The report of the costs table.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use super::memory::DIR_FILES;
use super::start::{Kind, MEMORY, START_ROWS, WAKES};
use super::{Size, TABLE};
use crate::line::{FERRY, Line};
use crate::machine::Machine;
use crate::target::{self, Target};
use crate::{chart, parts, report};

/// The peer of the rows about memory.
const PEER: &str = "virtiofsd";
/// The peer of the row about metrics.
const UNCOUNTED: &str = "without-metrics";

/// The least that is left of a load's requests with metrics.
const METRICS_RATIO_MIN: f64 = 0.98;

/// A server is to be ready in at most so many milliseconds.
const READY_MS_MAX: f64 = 30.0;

/// What was to be reached: servers that start soon and sleep, less memory than virtiofsd takes, and metrics that cost little.
pub fn targets(lines: &[Line]) -> Vec<Target> {
    let most = |line: &Line| {
        let limit = match &*line.row {
            row if START_ROWS.contains(&row) => READY_MS_MAX,
            row if row.starts_with(WAKES) => 0.0,
            _ => return None,
        };
        Some(Target::at_most(format!("{}, {}", line.row, line.unit), line.ferry, limit))
    };
    // Of the idle servers only a share has a peer.
    let has_peer = |line: &Line| line.row.starts_with(&format!("{MEMORY} of {}", Kind::Share.name()));
    let memory =
        lines.iter().filter(move |line| has_peer(line) || line.row.starts_with("memory: ") && line.unit != "ms");
    let ratio = |line: &Line| Target::ratio(format!("{}: {PEER} : ferry", line.row), Some(line), PEER, 1.0);
    let metrics = lines.iter().filter(|line| line.row.starts_with("metrics: "));
    let cost = |line: &Line| {
        Target::ratio(format!("{}: ferry : {UNCOUNTED}", line.row), Some(line), UNCOUNTED, METRICS_RATIO_MIN)
    };
    lines.iter().filter_map(most).chain(memory.filter_map(ratio)).chain(metrics.filter_map(cost)).collect()
}

/// Writes the report into a directory.
pub fn write(directory: &Path, lines: &[Line], machine: &Machine, targets: &[Target], size: Size) -> Result<()> {
    parts::save(directory, TABLE, lines, &markdown(lines, machine, targets, size), &chart::svg(lines, PEER))
}

fn markdown(lines: &[Line], machine: &Machine, targets: &[Target], size: Size) -> String {
    let mut out = String::from("# What Ferry costs: starts, memory, sandbox, limits, watching\n\n");
    let Machine { cpu, cpus, kernel, file_system, virtiofsd, ferry, command, date, .. } = machine;
    let Size { runs, starts, directories, changed } = size;
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC. {runs} runs of each (start: {starts}; idle: 1; sandbox: as the virtiofs table), in turn; medians, with the least \
         and the greatest in brackets. A ratio above 1 means that Ferry as it is by default is better.\n\n\
         | | |\n| --- | --- |\n\
         | machine | {cpu}, {cpus} CPUs, Linux {kernel}, data on {file_system} |\n\
         | Ferry | {ferry} |\n| virtiofsd | {virtiofsd}, `--sandbox none --seccomp none` |\n\n\
         * `start`: from the exec of the program until a guest that connects to it has the root's attributes, or until a file's can be had through the mount; \
         page faults of all its processes until then. virtiofsd with its defaults, by a shell script of two lines, which counts. The program's size is \
         what is loaded of it, without symbols.\n\
         * `idle`: voluntary context switches of all threads of all processes in 5 s, eight seconds after the guest's last request; \
         RSS, and what no other process has mapped.\n\
         * `memory`: the native driver walks over {} empty files in {directories} directories on a tmpfs by READDIRPLUS, keeps \
         all inodes for half a minute, and gives them back by BATCH_FORGET. All processes of a server count. Both servers remember files by file handles, and share \
         memory with the driver, which counts, too.\n\
         * `sandbox`: the native driver's loads, on `--sandbox none --seccomp none` as the peer.\n\
         * `metrics`: one such load, beside a server that does not count requests (FERRY_METRICS=off).\n\
         * `limits`: the native driver's reads without a limit; the peer has `--limit` at its maximum, which is never reached.\n\
         * `watching`: {changed} files are made, written, given a mode, renamed, and removed; a mount with `--watch always` \
         beside one with `--watch never` and beside no server at all. CPU times are the server's, until three seconds later.\n",
        directories * DIR_FILES
    );
    target::chapter(&mut out, targets);
    figures(&mut out, lines);
    cpu_times(&mut out, lines);
    report::counts(&mut out, lines);
    // Each kind of row has a number of runs of its own.
    parts::shortfalls(&mut out, lines, |_| true, |_| 0);
    out
}

fn figures(out: &mut String, lines: &[Line]) {
    out.push_str(
        "## Figures\n\n| row | unit | Ferry | beside | its figure | ratio |\n| --- | --- | --- | --- | --- | --- |\n",
    );
    for line in lines {
        let ours = parts::figure(line, FERRY);
        for peer in line.peers.keys() {
            let (theirs, ratio) = (parts::figure(line, peer), parts::ratio(Some(line), peer));
            let _ = writeln!(out, "| {} | {} | {ours} | {peer} | {theirs} | {ratio} |", line.row, line.unit);
        }
        if line.peers.is_empty() {
            let _ = writeln!(out, "| {} | {} | {ours} | - | - | - |", line.row, line.unit);
        }
    }
    out.push('\n');
}

fn cpu_times(out: &mut String, lines: &[Line]) {
    for line in lines {
        for (who, ms) in line.also.get("server_cpu_ms").into_iter().flatten() {
            let _ = writeln!(out, "* {}: CPU time of the server ({who}): {ms} ms", line.row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Better;

    #[test]
    fn less_memory_is_better() {
        let mut line = Line::new(TABLE, "memory: RSS after the walk".into(), "auto", "MiB", Better::Lower);
        line.fill(&[(FERRY.to_owned(), vec![300.0]), (PEER.to_owned(), vec![450.0])].into());
        let mut watched = Line::new(TABLE, "watching: changes".into(), "always", "ms", Better::Lower);
        watched.also.insert("server_cpu_ms".into(), [(FERRY.to_owned(), 280.0)].into());
        let [mut start, mut wakes] = [(START_ROWS[0].to_owned(), "ms"), (format!("{WAKES} of a share"), "wake-ups/s")]
            .map(|(row, unit)| Line::new(TABLE, row, "auto", unit, Better::Lower));
        start.fill(&[(FERRY.to_owned(), vec![12.0]), (PEER.to_owned(), vec![24.0])].into());
        wakes.fill(&[(FERRY.to_owned(), vec![0.0])].into());
        let lines = [start, wakes, line, watched];
        let targets = targets(&lines);
        assert_eq!(targets.len(), 3);
        let text = markdown(&lines, &Machine::default(), &targets, Size::FULL);
        for part in [
            "| start: ferry share, until a guest has an answer, ms | 12.00 | at most 30 | reached |",
            "| idle: wake-ups of a share, wake-ups/s | 0.00 | at most 0 | reached |",
            "| memory: RSS after the walk: virtiofsd : ferry | 1.50 | at least 1 | reached |",
            "| memory: RSS after the walk | MiB | 300 [300, 300] | virtiofsd | 450 [450, 450] | **1.50** |",
            "over 1000000 empty files in 1000 directories",
            "* watching: changes: CPU time of the server (ferry): 280 ms",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
