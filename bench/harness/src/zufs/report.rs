//! The report of the zufs table: Markdown, the lines themselves, curves.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use super::TABLE;
use super::curves::{self, Curve};
use super::rows::{self, Step, THREADS};
use super::systems::{CACHED, DATA, Files, Flavour, GUEST, NAMES, System, Way};
use crate::line::{FERRY, Line};
use crate::machine::Machine;
use crate::target::{self, RowFigures, Target};
use crate::{parts, stats};

/// The published figures.
const PUBLISHED: &str = include_str!("../../../published/zufs-fio.csv");

const NULL_URING: System = System::Ferry(Files::Null, Way::Uring);
const NULL_DEVFUSE: System = System::Ferry(Files::Null, Way::Devfuse);
const MEM_URING: System = System::Ferry(Files::Mem, Way::Uring);
const MEM_DEVFUSE: System = System::Ferry(Files::Mem, Way::Devfuse);
const MEM_PASSTHROUGH: System = System::Ferry(Files::Mem, Way::Passthrough);

/// A published row.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    /// The file system.
    pub system: String,
    /// Threads.
    pub threads: usize,
    /// Writes per second.
    pub iops: f64,
    /// Their mean latency.
    pub latency_us: f64,
}

/// Reads the published figures.
pub fn published() -> Vec<Published> {
    let row = |line: &str| {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let [system, threads, iops, _, latency] = fields[..] else { return None };
        Some(Published {
            system: system.to_owned(),
            threads: threads.parse().ok()?,
            iops: iops.parse().ok()?,
            latency_us: latency.parse().ok()?,
        })
    };
    PUBLISHED.lines().skip(1).filter_map(row).collect()
}

/// The line of one of our configurations in a row.
fn find<'a>(lines: &'a [Line], row: &str, ours: System) -> Option<&'a Line> {
    parts::find(lines, row, ours.name())
}

/// The rows in which one of our configurations is compared with a peer.
fn compared(ours: System, peer: &str) -> impl Iterator<Item = String> {
    let is_compared = move |step: &Step| {
        let systems = step.systems();
        systems.contains(&ours) && systems.iter().any(|system| ours.calls(*system).as_deref() == Some(peer))
    };
    rows::all().into_iter().filter(is_compared).flat_map(Step::rows).map(|(_, row)| row)
}

/// What the project set itself to reach, of the rows that this run has.
pub fn targets(lines: &[Line]) -> Vec<Target> {
    let mut targets = Vec::new();
    for (row, least) in [("threads 1", 2.5), ("threads 8", 2.0)] {
        for (ours, what) in [(NULL_URING, "null"), (MEM_URING, "mem")] {
            let name = format!("{row}, {what}: io_uring : libfuse on /dev/fuse");
            targets.extend(Target::ratio(name, find(lines, row, ours), "libfuse", least));
        }
    }
    let over_threads = |ours: System, peer: &str| {
        let lines = THREADS.iter().map(|threads| find(lines, &format!("threads {threads}"), ours));
        RowFigures::ratios(lines, peer)
    };
    targets.extend(over_threads(MEM_PASSTHROUGH, "tmpfs").mean("threads 1 to 8: mem with passthrough : tmpfs", 0.85));
    if let Some(mem) = find(lines, "threads 1", MEM_URING) {
        let null = find(lines, "threads 1", NULL_URING);
        let latency = |line: &Line| line.also.get("latency_us")?.get(FERRY).copied();
        let slower = null.and_then(latency).zip(latency(mem)).map(|(null, mem)| null / mem);
        let what = "threads 1: latency of the null ring : latency of mem through the ring";
        targets.push(Target::at_least(what, slower, 1.0 / 1.3));
    }
    let paths = [
        (NULL_DEVFUSE, "libfuse"),
        (MEM_DEVFUSE, "libfuse"),
        (NULL_URING, "libfuse-uring"),
        (MEM_URING, "libfuse-uring"),
        (MEM_PASSTHROUGH, "libfuse-passthrough"),
    ];
    for (ours, peer) in paths {
        let name = format!("threads 1 to 8: {} : {peer}", ours.name());
        targets.extend(over_threads(ours, peer).mean(&name, 1.0));
    }
    for row in ["create threads 1", "create threads 4", "unlink threads 1", "unlink threads 4"] {
        let name = format!("{row}: {} : libfuse-uring", MEM_URING.name());
        targets.extend(Target::ratio(name, find(lines, row, MEM_URING), "libfuse-uring", 1.2));
    }
    // Of all rows: reads and names as well as writes.
    for ours in [NULL_DEVFUSE, MEM_DEVFUSE] {
        let rows = compared(ours, "libfuse").filter(|row| !row.ends_with("threads 1"));
        let ratios = RowFigures::ratios(rows.map(|row| find(lines, &row, ours)), "libfuse");
        targets.extend(ratios.least(&format!("several threads: {} : libfuse", ours.name()), 1.0));
    }
    for ours in [NULL_URING, MEM_URING] {
        let rows = compared(ours, "libfuse-uring").map(|row| find(lines, &row, ours));
        let ratios = RowFigures::ratios(rows, "libfuse-uring");
        targets.extend(ratios.targets(&format!("{} : libfuse-uring", ours.name()), 1.1));
    }
    targets
}

/// Writes the report into a directory.
pub fn write(directory: &Path, lines: &[Line], machine: &Machine, libfuse: &str, targets: &[Target]) -> Result<()> {
    let shown: Vec<Line> = lines.iter().map(comparable).collect();
    let svg = curves::svg("4 KiB random writes, O_DIRECT | O_SYNC", &curves(&shown));
    parts::save(directory, TABLE, lines, &markdown(&shown, machine, libfuse, targets), &svg)
}

/// A line without the peers that it is not compared with: lines of earlier runs may have them.
fn comparable(line: &Line) -> Line {
    let mut line = line.clone();
    let systems = || DATA.iter().chain(&NAMES).chain(&CACHED).chain(&GUEST);
    let Some(ours) = systems().find(|system| system.is_ours() && system.name() == line.config) else { return line };
    let is_peer = |name: &String| systems().any(|peer| ours.calls(*peer).as_ref() == Some(name));
    line.peers.retain(|name, _| is_peer(name));
    line.ratio.retain(|name, _| is_peer(name));
    line
}

/// The medians of each system over threads; ours from their own lines, peers from any.
fn over_threads(lines: &[Line], system: System) -> Vec<(usize, f64, Option<f64>)> {
    let of = |threads: usize| {
        let row = format!("threads {threads}");
        let ours = DATA.into_iter().filter(|ours| ours.is_ours());
        ours.filter_map(|ours| {
            let name = if ours == system { FERRY.to_owned() } else { ours.calls(system)? };
            let line = find(lines, &row, ours)?;
            let value = if ours == system { line.ferry? } else { *line.peers.get(&name)? };
            let latency = line.also.get("latency_us").and_then(|latencies| latencies.get(&name)).copied();
            Some((threads, value, latency))
        })
        .next()
    };
    THREADS.into_iter().filter_map(of).collect()
}

/// Less important systems are left out of the picture, so that it stays readable.
fn curves(lines: &[Line]) -> Vec<Curve> {
    let shown = DATA.into_iter().filter(|system| {
        !matches!(system, System::Libfuse(Files::Mem, Flavour::Splice) | System::Ferry(Files::Mem, Way::Devfuse))
    });
    let curve = |system: System| {
        let points = over_threads(lines, system);
        #[allow(clippy::cast_precision_loss)] // Eight threads at most.
        let points = points.into_iter().map(|(threads, rate, _)| (threads as f64, rate)).collect();
        Curve { name: system.full_name(), ours: system.is_ours(), points }
    };
    shown.map(curve).filter(|curve| !curve.points.is_empty()).collect()
}

/// The whole report.
fn markdown(lines: &[Line], machine: &Machine, libfuse: &str, targets: &[Target]) -> String {
    let mut out = String::from("# User-mode file systems: Ferry beside libfuse, tmpfs and XFS with DAX\n\n");
    head(&mut out, machine, libfuse, lines);
    target::chapter(&mut out, targets);
    out.push_str("![Requests per second over threads](zufs.svg)\n\n");
    let columns =
        |files: Files| DATA.into_iter().filter(|system| system.keeps_data() == (files == Files::Mem)).collect();
    published_table(&mut out, "Null file systems", lines, columns(Files::Null), &["fuse", "fuse-splice", "zufs"]);
    published_table(&mut out, "Memory file systems", lines, columns(Files::Mem), &["zufs", "xfs-dax"]);
    ratios(&mut out, lines);
    costs(&mut out, lines);
    parts::shortfalls(&mut out, lines, |peer| peer.starts_with("libfuse"), |_| parts::most_runs(lines));
    out
}

fn head(out: &mut String, machine: &Machine, libfuse: &str, lines: &[Line]) {
    let runs = parts::most_runs(lines);
    let Machine { cpu, cpus, kernel, guest_kernel, fio, ferry, command, date, .. } = machine;
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC. {runs} runs of each system, in turn; medians. A ratio above 1 means that Ferry \
         is better, whatever the unit.\n\n\
         | | |\n| --- | --- |\n\
         | machine | {cpu}, {cpus} CPUs, Linux {kernel} |\n\
         | guest | QEMU (TCG, 2 CPUs, 512 MiB NVDIMMs of memory), Linux {guest_kernel} |\n\
         | Ferry | {ferry} |\n| peer | {libfuse}, built from its sources with io_uring: see bench/peers/README.md |\n\
         | fio | {fio} |\n"
    );
    out.push_str(
        "* fio: psync, 4 KiB, `direct=1 sync=1`, a file of 32 MiB for each thread (8 MiB in the guest), overwritten. \
         Neither fio nor any server is bound to a CPU by the harness; servers run with their own defaults.\n\
         * `null` answers at once and keeps nothing; `mem` keeps data in memory. `libfuse` is its /dev/fuse, \
         `libfuse-splice` the same with splice, `libfuse-uring` FUSE-over-io_uring, `libfuse-passthrough` with passthrough.\n\
         * `create`, `stat`, `unlink`: each thread with a directory of its own; `stat` with AT_STATX_FORCE_SYNC, so that \
         each one reaches the file system; `cached-stat` lets the kernel answer.\n\
         * The module parameter `enable_uring` of fuse is on during the run and is then as before.\n\
         * The published figures (`bench/published/zufs-fio.csv`) are the ZUFS developers' own, years ago, of another \
         machine and kernel: they tell which rows matter, not how fast Ferry is.\n\n",
    );
}

/// Requests of 4 KiB in a MiB.
const REQUESTS_PER_MIB: f64 = 256.0;

/// Thousands, the bandwidth, and the latency beside them.
fn cell(iops: f64, latency: Option<f64>) -> String {
    let latency = latency.map_or(String::new(), |latency| format!(" / {}", stats::round(latency)));
    format!("{} / {}{latency}", stats::round(iops / 1000.0), stats::round(iops / REQUESTS_PER_MIB))
}

fn published_table(out: &mut String, title: &str, lines: &[Line], systems: Vec<System>, beside: &[&str]) {
    let _ = writeln!(out, "## {title}: 4 KiB writes, thousand IOPS / MiB/s / mean microseconds\n");
    let mut names: Vec<String> = systems.iter().map(|system| system.full_name()).collect();
    names.extend(beside.iter().map(|name| format!("published: {name}")));
    let _ = writeln!(out, "| threads | {} |\n|{}", names.join(" | "), " --- |".repeat(names.len() + 1));
    let found: Vec<_> = systems.into_iter().map(|system| over_threads(lines, system)).collect();
    let published = published();
    for threads in THREADS {
        let ours = found.iter().map(|points| {
            let point = points.iter().find(|(at, ..)| *at == threads);
            point.map_or("-".into(), |(_, iops, latency)| cell(*iops, *latency))
        });
        let theirs = beside.iter().map(|name| {
            let row = published.iter().find(|row| row.system == **name && row.threads == threads);
            row.map_or("-".into(), |row| cell(row.iops, Some(row.latency_us)))
        });
        let cells: Vec<String> = ours.chain(theirs).collect();
        let _ = writeln!(out, "| {threads} | {} |", cells.join(" | "));
    }
    out.push('\n');
}

fn ratios(out: &mut String, lines: &[Line]) {
    out.push_str(
        "## All rows\n\nMedians with the least and the greatest run; of each peer, its median and how many times better \
         Ferry is.\n\n| row | config | unit | Ferry | peers |\n| --- | --- | --- | --- | --- |\n",
    );
    for line in lines {
        let peer = |(name, value): (&String, &f64)| {
            let ratio = line.ratio.get(name).map_or(String::new(), |ratio| format!(" (**{ratio:.2}**)"));
            format!("{name} {value}{ratio}")
        };
        let peers: Vec<String> = line.peers.iter().map(peer).collect();
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} |",
            line.row,
            line.config,
            line.unit,
            parts::figure(line, FERRY),
            peers.join(", ")
        );
    }
    out.push('\n');
    parts::line_notes(out, &lines.iter().collect::<Vec<_>>());
}

fn costs(out: &mut String, lines: &[Line]) {
    if lines.iter().all(|line| line.costs.is_empty()) {
        return;
    }
    out.push_str(
        "\n## What noise does not touch\n\nPer write of 4 KiB, in runs of their own: system calls of the server, how often \
         its threads and fio's slept or were made to yield, and requests from the kernel to the server. Copies are by \
         construction: the kernel's tracing of its copy functions is not to be had everywhere.\n\n\
         | row | system | system calls | switches of the server | switches of fio | FUSE requests | copies of each byte |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for line in lines {
        for (server, costs) in &line.costs {
            let name = if server == FERRY { format!("{FERRY} {}", line.config) } else { server.clone() };
            let requests = costs.fuse_requests_per_request.map_or("-".into(), |requests| requests.to_string());
            let _ = writeln!(
                out,
                "| {} | {name} | {} | {} | {} | {requests} | {} |",
                line.row,
                costs.syscalls_per_request,
                costs.server_switches_per_request,
                costs.program_switches_per_request,
                costs.copies_per_byte
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::Costs;
    use crate::stats::Better;

    fn lines() -> Vec<Line> {
        let line = |threads: usize, ours: System, values: &[(&str, f64)]| {
            let row = format!("threads {threads}");
            let mut line = Line::new("zufs", row, ours.name(), "IOPS", Better::Higher);
            line.fill(&values.iter().map(|(name, value)| ((*name).to_owned(), vec![*value])).collect());
            let latencies = values.iter().map(|(name, value)| ((*name).to_owned(), 1e6 / value)).collect();
            line.also.insert("latency_us".into(), latencies);
            line
        };
        vec![
            line(1, NULL_URING, &[(FERRY, 200_000.0), ("libfuse", 50_000.0), ("libfuse-uring", 250_000.0)]),
            line(1, MEM_URING, &[(FERRY, 100_000.0), ("libfuse", 50_000.0), ("tmpfs", 700_000.0)]),
            line(8, MEM_DEVFUSE, &[(FERRY, 40_000.0), ("libfuse", 50_000.0)]),
            Line {
                row: "create threads 4".into(),
                ..line(4, MEM_URING, &[(FERRY, 90_000.0), ("libfuse-uring", 100_000.0)])
            },
            line(8, MEM_PASSTHROUGH, &[(FERRY, 630_000.0), ("libfuse", 50_000.0), ("tmpfs", 700_000.0)]),
        ]
    }

    #[test]
    fn reads_the_published_figures() {
        let published = published();
        assert_eq!(published.len(), 4 * 8);
        let row = published.iter().find(|row| row.system == "zufs" && row.threads == 4).unwrap();
        assert_eq!((row.iops, row.latency_us), (187_984.0, 17.527_123));
    }

    #[test]
    fn sums_up() {
        let text: Vec<String> = targets(&lines()).iter().map(ToString::to_string).collect();
        let text = text.join("\n");
        for part in [
            "threads 1, null: io_uring : libfuse on /dev/fuse: 4.00 (target: at least 2.5: reached)",
            "threads 1, mem: io_uring : libfuse on /dev/fuse: 2.00 (target: at least 2.5: missed)",
            "threads 1 to 8: mem with passthrough : tmpfs, geometric mean of 1 of 8 rows: 0.90 (target: at least 0.85: reached)",
            "mem through the ring: 0.50",
            "threads 1 to 8: null uring : libfuse-uring, geometric mean of 1 of 8 rows: 0.80",
            "create threads 4: mem uring : libfuse-uring: 0.90 (target: at least 1.2: missed)",
            "several threads: mem devfuse : libfuse, least of 1 of 12 rows: 0.80 (target: at least 1: missed)",
            "null uring : libfuse-uring, geometric mean of 1 of 11 rows: 0.80 (target: at least 1.1: missed)",
            "mem passthrough : libfuse-passthrough, geometric mean of 0 of 8 rows: not measured (target: at least 1)",
            "null uring : libfuse-uring, least of 1 of 11 rows: 0.80 (target: at least 1.1: missed)",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert_eq!(targets(&[]), []);
    }

    #[test]
    fn shows_figures_costs_and_shortfalls() {
        let mut lines = lines();
        let costs = Costs {
            syscalls_per_request: 1.0,
            server_switches_per_request: 2.0,
            program_switches_per_request: 3.0,
            fuse_requests_per_request: None,
            copies_per_byte: "1".into(),
        };
        lines[0].costs.insert(FERRY.into(), costs);
        lines[1].skip("tmpfs: no");
        let passed = comparable(&lines[4]);
        assert_eq!((passed.peers.len(), passed.ratio.len(), lines[4].peers.len()), (1, 1, 2));
        let text = markdown(&lines, &Machine::default(), "libfuse 3", &targets(&lines));
        for part in [
            "| 1 | 200 / 781.3 / 5 | 50 / 195.3 / 20 | - | - | 250 / 976.6 / 4 | 33.61 / 131.3 / 26.53 |",
            "| threads 1 | ferry null uring | 1 | 2 | 3 | - | 1 |",
            "* threads 1 (null uring): 0.80 of libfuse-uring",
            "* skipped: tmpfs: no (in threads 1 (mem uring))",
            "tmpfs 700000 (**0.90**)",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn a_curve_for_each_system_that_ran() {
        let names: Vec<String> = curves(&lines()).into_iter().map(|curve| curve.name).collect();
        assert!(names.contains(&"ferry null uring".into()) && names.contains(&"libfuse null".into()), "{names:?}");
        assert!(!names.contains(&"libfuse-splice null".into()), "{names:?}");
    }
}
