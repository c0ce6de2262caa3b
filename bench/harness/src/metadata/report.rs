//! The report of the metadata table.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use super::TABLE;
use crate::data::LargeTrees;
use crate::line::{FERRY, Line};
use crate::machine::Machine;
use crate::target::{self, RowFigures, Target};
use crate::{chart, parts, rows};

/// The peer.
const PEER: &str = "virtiofsd";
/// How much faster every row is to be.
const RATIO: f64 = 1.5;
/// Requests of a kind that are fewer than one for so many files are not shown by name.
const SHOWN_PART: u64 = 1000;

/// What was to be reached, of the rows that this run has.
pub fn targets(lines: &[Line]) -> Vec<Target> {
    let target =
        |line: &Line| Target::ratio(format!("{} ({}): ferry : {PEER}", line.row, line.config), Some(line), PEER, RATIO);
    let rows = rows::large().into_iter().map(|row| parts::find(lines, &row.name, row.config.name()));
    let mean = RowFigures::ratios(rows, PEER).mean(&format!("ferry : {PEER}"), RATIO);
    lines.iter().filter_map(target).chain(mean).collect()
}

/// Writes the report into a directory.
pub fn write(directory: &Path, lines: &[Line], machine: &Machine, targets: &[Target], trees: LargeTrees) -> Result<()> {
    parts::save(directory, TABLE, lines, &markdown(lines, machine, targets, trees), &chart::svg(lines, PEER))
}

fn markdown(lines: &[Line], machine: &Machine, targets: &[Target], trees: LargeTrees) -> String {
    let mut out = String::from("# Large trees: Ferry beside virtiofsd\n\n");
    let runs = parts::most_runs(lines);
    let Machine { cpu, cpus, kernel, file_system, guest_kernel, virtiofsd, ferry, command, date, .. } = machine;
    let LargeTrees { repo_dirs, packages } = trees;
    let parts = if command.contains(" --add") { ", the last of several parts" } else { "" };
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC{parts}. {runs} runs of each server, in turn; medians, with the least and the greatest \
         in brackets.\n\n| | |\n| --- | --- |\n\
         | machine | {cpu}, {cpus} CPUs, Linux {kernel}, data on {file_system} |\n\
         | guest | User-mode Linux {guest_kernel}, one CPU of its own; the servers have the others |\n\
         | Ferry | {ferry}, `--no-xattr` |\n| virtiofsd | {virtiofsd}, `--sandbox none --seccomp none` |\n\n\
         * `find` and `git status` are on a repository of {} files in {repo_dirs} directories, after the guest has \
         forgotten all it knew; `find` only names them, `find-stat` shows sizes, modes and times, too. `unpack` (tar) and \
         `delete` (rm) are on a tree like a node_modules: {packages} packages of 50 files in 5 directories.\n\
         * `git-clone` is of the repository. `cargo-build` builds 20 small crates, for each of which its requests are shown. `npm-ci` installs \
         a tenth of the packages, from archives that the share has not.\n\
         * Requests are counted in runs of their own, from the servers' logs of each request (`ferry log SOCKET requests`; \
         virtiofsd's `--log-level debug`). FORGET and BATCH_FORGET, which nobody waits for, are left out of the sum.\n",
        repo_dirs * 100
    );
    target::chapter(&mut out, targets);
    out.push_str("![How many times better Ferry is, row by row](metadata.svg)\n\n");
    figures(&mut out, lines);
    requests(&mut out, lines);
    parts::shortfalls(&mut out, lines, |_| true, |_| parts::most_runs(lines));
    out
}

fn figures(out: &mut String, lines: &[Line]) {
    out.push_str(
        "## Figures\n\n| row | config | unit | Ferry | virtiofsd | ratio |\n| --- | --- | --- | --- | --- | --- |\n",
    );
    for line in lines {
        let (ours, theirs) = (parts::figure(line, FERRY), parts::figure(line, PEER));
        let ratio = parts::ratio(Some(line), PEER);
        let _ = writeln!(out, "| {} | {} | {} | {ours} | {theirs} | {ratio} |", line.row, line.config, line.unit);
    }
    out.push('\n');
}

fn requests(out: &mut String, lines: &[Line]) {
    out.push_str(
        "## Requests\n\n| row | config | server | for each file | by name |\n| --- | --- | --- | --- | --- |\n",
    );
    for line in lines {
        for (server, requests) in &line.requests {
            let all: u64 = requests.by_name.values().sum();
            let mut named: Vec<(&String, &u64)> =
                requests.by_name.iter().filter(|(_, count)| **count * SHOWN_PART >= all).collect();
            named.sort_by(|a, b| b.1.cmp(a.1));
            let named: Vec<String> = named.into_iter().map(|(name, count)| format!("{name} {count}")).collect();
            let (row, config, per_file) = (&line.row, &line.config, requests.per_file);
            let _ = writeln!(out, "| {row} | {config} | {server} | {per_file} | {} |", named.join(", "));
        }
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::Requests;
    use crate::rows::Row;

    #[test]
    fn shows_times_and_requests() {
        let fill = |row: &Row| {
            let mut line = Line::empty(TABLE, row);
            line.fill(&[(FERRY.to_owned(), vec![50.0]), (PEER.to_owned(), vec![100.0])].into());
            let by_name = [("lookup".to_owned(), 3000), ("statfs".to_owned(), 1)].into();
            line.requests.insert(FERRY.into(), Requests { per_file: 3.0, by_name });
            line
        };
        let lines: Vec<Line> = rows::large().iter().map(fill).collect();
        let targets = targets(&lines);
        assert_eq!(targets.len(), 14);
        let text = markdown(&lines, &Machine::default(), &targets, LargeTrees::FULL);
        for part in [
            "| find (auto-no-xattr): ferry : virtiofsd | 2.00 | at least 1.5 | reached |",
            "| unpack | always-no-xattr | ms | 50 [50, 50] | 100 [100, 100] | **2.00** |",
            "| delete | auto-no-xattr | ferry | 3 | lookup 3000 |",
            "repository of 50000 files",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
