//! The report of the containers table: Markdown, the lines themselves, a chart.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use super::rows::{self, Figure, TABLE, Work};
use super::systems::System;
use crate::line::{FERRY, Line};
use crate::machine::Machine;
use crate::target::{self, RowFigures, Target};
use crate::{chart, parts};

/// What the snapshotter may have in memory, in MiB.
const MEMORY_MIB: f64 = 50.0;

/// What the project set itself to reach, as far as this run measured it.
pub fn targets(lines: &[Line]) -> Vec<Target> {
    let of = |config: System, rows: &'static str| {
        lines.iter().filter(move |line| line.config == config.name() && line.row.starts_with(rows))
    };
    // The least ratio to any of some peers.
    let best = |line: &Line, peers: &[System]| {
        let ratios = peers.iter().filter_map(|peer| line.ratio.get(peer.name()).copied());
        ratios.min_by(f64::total_cmp)
    };
    let others: Vec<System> = System::ALL.into_iter().filter(|system| !system.is_ours()).collect();
    let built_in: Vec<System> = others.iter().copied().filter(|system| system.is_built_in()).collect();
    let mut targets = Vec::new();
    for prepared in [System::Prepared, System::Ordered] {
        let name = prepared.name();
        for line in of(prepared, "cold start") {
            let measured = others.iter().filter(|peer| line.ratio.contains_key(peer.name())).count();
            let what = format!("{}: {name} : the best of {measured} of {} peers", line.row, others.len());
            targets.push(Target::at_least(what, best(line, &others), 1.0));
        }
        let starts = rows::all().into_iter().filter(|work| matches!(work, Work::Cold(..))).flat_map(Work::rows);
        let starts = starts.filter(|(figure, _)| *figure == Figure::Cold);
        let starts = starts.map(|(_, row)| parts::find(lines, &row, name));
        let full = RowFigures::of(starts, |line| best(line, &built_in));
        targets.extend(full.mean(&format!("cold start: {name} : the best full pull"), 2.0));
    }
    for line in of(System::Estargz, "cold start") {
        let what = format!("{}: estargz : stargz", line.row);
        targets.extend(Target::ratio(what, Some(line), System::Stargz.name(), 1.0));
    }
    for rows in ["warm start", "ls -lR"] {
        for line in of(System::Layers, rows) {
            let what = format!("{}: layers : overlayfs", line.row);
            targets.extend(Target::ratio(what, Some(line), System::Overlayfs.name(), 1.5));
        }
    }
    let memory = || lines.iter().filter(|line| line.row.starts_with("memory"));
    let measured: Vec<f64> = memory().filter_map(|line| line.ferry).collect();
    if memory().count() > 0 {
        let what = format!("memory, the most of {} of {} rows, MiB", measured.len(), memory().count());
        let most = measured.into_iter().max_by(f64::total_cmp);
        targets.push(Target::at_most(what, most, MEMORY_MIB));
    }
    targets
}

/// Writes the report into a directory.
pub fn write(directory: &Path, lines: &[Line], machine: &Machine, peers: &str, targets: &[Target]) -> Result<()> {
    parts::save(
        directory,
        TABLE,
        lines,
        &markdown(lines, machine, peers, targets),
        &chart::svg(lines, System::Overlayfs.name()),
    )
}

fn markdown(lines: &[Line], machine: &Machine, peers: &str, targets: &[Target]) -> String {
    let mut out = String::from("# Containers: Ferry beside other snapshotters of containerd\n\n");
    let runs = parts::most_runs(lines);
    let Machine { cpu, cpus, kernel, file_system, ferry, command, date, .. } = machine;
    let parts = if command.contains(" --add") { ", the last of several parts" } else { "" };
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC{parts}. {runs} runs of each, in turn; medians, with the least and the greatest in brackets. A \
         ratio above 1 means that Ferry is better.\n\n\
         | | |\n| --- | --- |\n\
         | machine | {cpu}, {cpus} CPUs, Linux {kernel}, all on {file_system} |\n\
         | Ferry | {ferry} |\n| peers | {peers} |\n"
    );
    out.push_str(
        "* Images are made of Debian's packages: `shell` is a small distribution, on which the others are based; `python` imports eight \
         packages, `node` starts a server with Express, `java` is a development kit, of which `java --version` is started; `layered` is `python` with a layer for each package.\n\
         * `cold start`: containerd and the snapshotter are new, the kernel's caches are empty (but for programs and the registry); the time is \
         that of `ctr images pull` and of `ctr run` until its first output. The delay is there and back, each connection takes it once more, and TLS \
         again; the bandwidth is this machine's. Bytes and requests are those of containerd and the snapshotter, until the container has ended.\n\
         * `warm start`: `ctr run` a third time, with full caches; `start with empty caches`: so once more (but for programs). `ls -lR`: of the root, mounted by `ctr images mount`, with empty caches and again. `memory`: the \
         snapshotter's processes, and their part of what they share; overlayfs and erofs are parts of containerd. `disk of twenty images`: a base of which a twentieth of the files \
         changes four times, and an application of which a twentieth changes each time; the snapshots, without containerd's archives.\n\
         * `layers`: ferry-snapshotter with the same images as overlayfs and erofs; `stacked`: the same, without an image of all layers; `prepared`: after `ferry image convert`; `ordered`: after `ferry image convert --order-from` with what a start of it opened; `estargz`: \
         with the same images as `stargz`. `soci` has an index beside the ordinary image, and fetches layers below 10 MiB whole.\n\n",
    );
    target::chapter(&mut out, targets);
    out.push_str("![How many times better Ferry is than overlayfs, row by row](containers.svg)\n\n");
    figures(&mut out, lines);
    let asked = |line: &Line| if line.row == Figure::Disk.name() { 1 } else { runs };
    parts::shortfalls(&mut out, lines, |peer| !peer.starts_with(FERRY), asked);
    out
}

/// A line for each row, a column for each system.
fn figures(out: &mut String, lines: &[Line]) {
    let names = System::ALL.map(System::name).join(" | ");
    let _ =
        writeln!(out, "## Figures\n\n| row | unit | {names} |\n| --- | --- |{}", " --- |".repeat(System::ALL.len()));
    let mut rows: Vec<&str> = lines.iter().map(|line| &*line.row).collect();
    rows.dedup();
    for row in rows {
        let mut of_row = lines.iter().filter(|line| line.row == row).peekable();
        let unit = of_row.peek().map_or("-", |line| &*line.unit);
        let of_row: Vec<&Line> = of_row.collect();
        let figure = |system: System| {
            let ours = of_row.iter().find(|line| line.config == system.name()).map(|line| parts::figure(line, FERRY));
            let theirs = || {
                of_row
                    .iter()
                    .find(|line| line.peers.contains_key(system.name()))
                    .map(|line| parts::figure(line, system.name()))
            };
            ours.or_else(theirs).unwrap_or_else(|| "-".into())
        };
        let _ = writeln!(out, "| {row} | {unit} | {} |", System::ALL.map(figure).join(" | "));
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Better;

    fn line(row: &str, config: System, values: &[(&str, f64)]) -> Line {
        let mut line = Line::new(TABLE, row.into(), config.name(), "ms", Better::Lower);
        line.fill(&values.iter().map(|(name, value)| ((*name).to_owned(), vec![*value])).collect());
        line
    }

    #[test]
    fn shows_figures_and_targets() {
        let peers = [("overlayfs", 3000.0), ("erofs", 2500.0), ("stargz", 1200.0)];
        let with = |ours: f64| [(FERRY, ours)].into_iter().chain(peers).collect::<Vec<_>>();
        let lines = [
            line("cold start python, 5 ms", System::Layers, &with(2400.0)),
            line("cold start python, 5 ms", System::Prepared, &with(1000.0)),
            line("cold start python, 5 ms", System::Estargz, &with(1500.0)),
            line("warm start python", System::Layers, &[(FERRY, 100.0), ("overlayfs", 130.0)]),
            line("memory after cold start python", System::Prepared, &[(FERRY, 30.0), ("stargz", 60.0)]),
        ];
        let text = markdown(&lines, &Machine::default(), "containerd 2", &targets(&lines));
        for part in [
            "| cold start python, 5 ms | ms | 2400 [2400, 2400] | 3000 [3000, 3000] | - | 1000 [1000, 1000] | - | 2500 [2500, 2500] | 1500 [1500, 1500] | 1200 [1200, 1200] | - |",
            "| cold start python, 5 ms: prepared : the best of 3 of 4 peers | 1.20 | at least 1 | reached |",
            "| cold start: prepared : the best full pull, geometric mean of 1 of 12 rows | 2.50 | at least 2 | reached |",
            "| cold start python, 5 ms: estargz : stargz | 0.80 | at least 1 | missed |",
            "| warm start python: layers : overlayfs | 1.30 | at least 1.5 | missed |",
            "| memory, the most of 1 of 1 rows, MiB | 30.00 | at most 50 | reached |",
            "* cold start python, 5 ms (estargz): 0.80 of stargz",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert_eq!(targets(&[]), []);
    }
}
