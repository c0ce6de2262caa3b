//! The report of the vhost-blk table: Markdown, the lines themselves, a chart.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use super::TABLE;
use super::systems::{System, Way};
use crate::chart;
use crate::line::{FERRY, Line};
use crate::machine::Machine;
use crate::parts::{self, find};
use crate::target::{self, RowFigures, Target};

/// The published figures.
const PUBLISHED: &str = include_str!("../../../published/vhost-blk-fio.csv");

const POLL: System = System::Ferry(Way::Poll);
/// The peer that the targets are about.
const PEER: System = System::StorageDaemon(Way::Poll);
/// A latency may be this much longer than on the file itself.
const LATENCY_FACTOR: f64 = 1.3;
/// System calls of the server for each request that are allowed at depth 32.
const SYSCALLS_MAX: f64 = 0.1;

/// A published row.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    /// Its name.
    pub name: String,
    /// QEMU's virtio-blk: requests per second and completion latency.
    pub virtio: (f64, f64),
    /// vhost-blk in the kernel.
    pub vhost: (f64, f64),
}

/// Reads the published figures.
pub fn published() -> Vec<Published> {
    let row = |line: &str| {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let [operation, depth, rest @ ..] = &fields[..] else { return None };
        let numbers: Vec<f64> = rest.iter().filter_map(|field| field.parse().ok()).collect();
        let [iops, latency, vhost_iops, vhost_latency] = numbers[..] else { return None };
        let name = format!("{operation} depth {depth}");
        Some(Published { name, virtio: (iops, latency), vhost: (vhost_iops, vhost_latency) })
    };
    PUBLISHED.lines().skip(1).filter_map(row).collect()
}

/// What there is of the targets in these lines.
pub fn targets(lines: &[Line]) -> Vec<Target> {
    let mut targets = Vec::new();
    let published: Vec<String> = published().into_iter().map(|row| row.name).collect();
    let random = |depth: usize| ["read", "write"].map(|operation| format!("random {operation} 4K depth {depth}"));
    let peer = PEER.name();
    let mut faster = |what: &str, rows: &[String], limit: f64| {
        for (config, cache) in [(POLL.name().to_owned(), "page cache"), (format!("{} direct", POLL.name()), "O_DIRECT")]
        {
            let ratios = RowFigures::ratios(rows.iter().map(|row| find(lines, row, &config)), peer);
            targets.extend(ratios.targets(&format!("{what}, {cache}: ferry : {peer}"), limit));
        }
    };
    faster("512 bytes, depth 1 to 3", &published, 1.16);
    faster("4 KiB, depth 32", &random(32), 1.5);
    faster("4 KiB, depth 128", &random(128), 2.0);
    for row in random(32) {
        let Some(line) = find(lines, &row, POLL.name()) else { continue };
        for (how, counts) in [("polls", &line.counts), ("sleeps", &line.counts_asleep)] {
            let calls = counts.get(FERRY).and_then(|counts| counts.syscalls_per_request);
            let what = format!("{row}: system calls for each request, driver that {how}");
            targets.push(Target::at_most(what, calls, SYSCALLS_MAX));
        }
    }
    for (config, cache) in [(POLL.name().to_owned(), "page cache"), (format!("{} direct", POLL.name()), "O_DIRECT")] {
        for row in random(1).into_iter().chain(published.iter().filter(|row| row.ends_with(" 1")).cloned()) {
            let Some(line) = find(lines, &row, &config) else { continue };
            let latency = |name: &str| line.also.get("latency_us")?.get(name).copied();
            let factor = latency(FERRY).zip(latency(System::BareFile.name())).map(|(ours, bare)| ours / bare);
            let what = format!("{row}, {cache}: latency : that of io_uring on the file");
            targets.push(Target::at_most(what, factor, LATENCY_FACTOR));
        }
    }
    targets
}

/// Writes the report into a directory.
pub fn write(directory: &Path, lines: &[Line], machine: &Machine, targets: &[Target]) -> Result<()> {
    // The default alone: all configurations would be more than a picture can hold.
    let shown: Vec<Line> = lines.iter().filter(|line| line.config.starts_with(POLL.name())).cloned().collect();
    parts::save(directory, TABLE, lines, &markdown(lines, machine, targets), &chart::svg(&shown, PEER.name()))
}

/// The whole report.
fn markdown(lines: &[Line], machine: &Machine, targets: &[Target]) -> String {
    let mut out = String::from("# Disks for guests: Ferry beside QEMU\n\n");
    head(&mut out, machine, lines);
    target::chapter(&mut out, targets);
    out.push_str("![How many times better Ferry is, row by row](vhost-blk.svg)\n\n");
    published_table(&mut out, lines);
    let native = |line: &Line| !["qemu-img ", "uml ", "qemu "].iter().any(|prefix| line.row.starts_with(prefix));
    let cached = |line: &Line| !line.config.ends_with("direct");
    figures(&mut out, "From this host, page cache", lines.iter().filter(|line| native(line) && cached(line)));
    figures(&mut out, "From this host, O_DIRECT", lines.iter().filter(|line| native(line) && !cached(line)));
    for (title, prefix) in [
        ("qemu-img bench, over libblkio", "qemu-img "),
        ("fio in User-mode Linux", "uml "),
        ("fio in a QEMU guest", "qemu "),
    ] {
        figures(&mut out, title, lines.iter().filter(|line| line.row.starts_with(prefix)));
    }
    crate::report::counts(&mut out, lines);
    parts::shortfalls(&mut out, lines, |peer| peer.starts_with("qemu"), |_| parts::most_runs(lines));
    out
}

fn head(out: &mut String, machine: &Machine, lines: &[Line]) {
    let runs = parts::most_runs(lines);
    let Machine { cpu, cpus, kernel, file_system, guest_kernel, virtiofsd: daemon, fio, ferry, command, date } =
        machine;
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC. {runs} runs of each server, in turn; medians, with the least and the greatest \
         in brackets. A ratio above 1 means that Ferry is better. Latencies are means of a run, from sending a request \
         to seeing its answer.\n\n\
         | | |\n| --- | --- |\n\
         | machine | {cpu}, {cpus} CPUs, Linux {kernel}, disks are files of 64 MiB on {file_system} |\n\
         | guests | {guest_kernel} |\n\
         | Ferry | {ferry} |\n| peers | {daemon}; QEMU and its tools are Debian sid's |\n| fio | {fio} |\n"
    );
    let _ = writeln!(
        out,
        "* Configurations: `poll` is `ferry disk` as it is by default, `no-poll` with `--poll-us 0`, `packed` with packed \
         rings; `direct` is `--cache none` (O_DIRECT), all others `--cache writeback` on files that are in the page cache, in single pages.\n\
         * qemu-storage-daemon: `aio=io_uring`, the export in an iothread, which polls by default (`-no-poll`: \
         `poll-max-ns=0`), `cache.direct` as in our line. `qemu-virtio-blk` is QEMU's own disk in an iothread with \
         `aio=io_uring`, `-native` with `aio=native`.\n\
         * `io_uring-file`: fio with io_uring on the same kind of file, without any disk server.\n\
         * From this host, the driver polls its rings; over one queue it has one CPU and the server the others, over \
         several everybody may use all. qemu-img waits for signals.\n\
         * In User-mode Linux the page cache is used, in QEMU O_DIRECT, as by those who published; fio there with libaio, \
         direct. All disks of a guest are in one guest and take turns.\n\
         * SPDK's vhost server cannot be had from any package registry: `bench/peers/README.md`.\n"
    );
}

/// The six published rows, and what each kind of client found.
fn published_table(out: &mut String, lines: &[Line]) {
    out.push_str(
        "## The published rows\n\nRequests per second / microseconds. The published figures \
         (`bench/published/vhost-blk-fio.csv`) are of vhost-blk in the kernel beside QEMU's virtio-blk, on another \
         machine: they tell which rows matter and by how much a shorter way is faster, not how fast Ferry is.\n\n\
         | row | QEMU, published | vhost-blk, published | ratio | QEMU's disk in a QEMU guest | Ferry there | ratio \
         | storage daemon from this host | Ferry | ratio | the same, O_DIRECT |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for row in published() {
        let pair = |(iops, latency): (f64, f64)| format!("{iops} / {latency}");
        let guest = find(lines, &format!("qemu {}", row.name), &format!("{} direct", POLL.name()));
        let native = find(lines, &row.name, POLL.name());
        let direct = find(lines, &row.name, &format!("{} direct", POLL.name()));
        let peer = PEER.name();
        let _ = writeln!(
            out,
            "| {} | {} | {} | {:.2} | {} | {} | {} | {} | {} | {} | {} |",
            row.name,
            pair(row.virtio),
            pair(row.vhost),
            row.vhost.0 / row.virtio.0,
            shown(guest, "qemu-virtio-blk"),
            shown(guest, FERRY),
            parts::ratio(guest, "qemu-virtio-blk"),
            shown(native, peer),
            shown(native, FERRY),
            parts::ratio(native, peer),
            parts::ratio(direct, peer),
        );
    }
    out.push('\n');
}

/// Rate and latency of a server in a line.
fn shown(line: Option<&Line>, name: &str) -> String {
    let rate = line.and_then(|line| if name == FERRY { line.ferry } else { line.peers.get(name).copied() });
    let latency = line.and_then(|line| line.also.get("latency_us")?.get(name));
    match (rate, latency) {
        (Some(rate), Some(latency)) => format!("{rate} / {latency}"),
        _ => "-".into(),
    }
}

fn figures<'a>(out: &mut String, title: &str, lines: impl Iterator<Item = &'a Line>) {
    let lines: Vec<&Line> = lines.collect();
    if lines.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "## {title}\n\n| row | config | Ferry, requests/s | us | others, requests/s (ratio), us |\n\
         | --- | --- | --- | --- | --- |"
    );
    for line in &lines {
        let latency =
            |name: &str| line.also.get("latency_us").and_then(|all| all.get(name)).map_or("-".into(), f64::to_string);
        let peer = |(name, value): (&String, &f64)| {
            let ratio = line.ratio.get(name).map_or(String::new(), |ratio| format!(" (**{ratio:.2}**)"));
            format!("{name} {value}{ratio}, {}", latency(name))
        };
        let peers: Vec<String> = line.peers.iter().map(peer).collect();
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} |",
            line.row,
            line.config,
            parts::figure(line, FERRY),
            latency(FERRY),
            peers.join("; ")
        );
    }
    out.push('\n');
    parts::line_notes(out, &lines);
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::Counts;
    use crate::stats::Better;

    fn line(row: &str, config: &str, values: &[(&str, f64)]) -> Line {
        let mut line = Line::new("vhost-blk", row.into(), config, "IOPS", Better::Higher);
        line.fill(&values.iter().map(|(name, value)| ((*name).to_owned(), vec![*value])).collect());
        let latencies = values.iter().map(|(name, value)| ((*name).to_owned(), 1e6 / value)).collect();
        line.also.insert("latency_us".into(), latencies);
        line
    }

    fn lines() -> Vec<Line> {
        let peer = PEER.name();
        let mut lines = vec![
            line("sequential read 512B depth 1", "poll", &[(FERRY, 100_000.0), (peer, 50_000.0)]),
            line("sequential write 512B depth 3", "poll", &[(FERRY, 50_000.0), (peer, 100_000.0)]),
            line("random read 4K depth 32", "poll", &[(FERRY, 300_000.0), (peer, 200_000.0)]),
            line("random read 4K depth 1", "poll direct", &[(FERRY, 10_000.0), ("io_uring-file", 12_500.0)]),
            line("qemu sequential read 512B depth 1", "poll direct", &[(FERRY, 300.0), ("qemu-virtio-blk", 200.0)]),
        ];
        let counts = Counts {
            syscalls_per_request: Some(0.05),
            wakeups_per_request: None,
            calls_per_request: 0.0,
            kicks_per_request: 0.1,
        };
        lines[2].counts.insert(FERRY.into(), counts);
        lines
    }

    #[test]
    fn reads_the_published_figures() {
        let row = published().into_iter().find(|row| row.name == "sequential read 512B depth 2").unwrap();
        assert_eq!((row.virtio, row.vhost), ((7814.0, 222.0), (8645.0, 202.0)));
    }

    #[test]
    fn says_which_targets_are_reached() {
        let text: Vec<String> = targets(&lines()).iter().map(ToString::to_string).collect();
        let text = text.join("\n");
        for part in [
            "depth 1 to 3, page cache: ferry : qemu-storage-daemon, geometric mean of 2 of 6 rows: 1.00 (target: at least 1.16: missed)",
            "depth 1 to 3, page cache: ferry : qemu-storage-daemon, least of 2 of 6 rows: 0.50",
            "depth 32, page cache: ferry : qemu-storage-daemon, least of 1 of 2 rows: 1.50 (target: at least 1.5: reached)",
            "random read 4K depth 32: system calls for each request, driver that polls: 0.05 (target: at most 0.1: reached)",
            "random read 4K depth 32: system calls for each request, driver that sleeps: not measured (target: at most 0.1)",
            "random read 4K depth 1, O_DIRECT: latency : that of io_uring on the file: 1.25 (target: at most 1.3: reached)",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert_eq!(targets(&[]), []);
    }

    #[test]
    fn shows_figures_counts_and_shortfalls() {
        let mut lines = lines();
        lines[0].skip("spdk: no");
        let text = markdown(&lines, &Machine::default(), &targets(&lines));
        for part in [
            "| sequential read 512B depth 1 | 4116 / 214 | 4755 / 183 | 1.16 | 200 / 5000 | 300 / 3333",
            "| **1.50** | 50000 / 20 | 100000 / 10 | **2.00** | - |",
            "## From this host, page cache",
            "qemu-storage-daemon 50000 (**2.00**), 20 |",
            "* sequential write 512B depth 3 (poll): 0.50 of qemu-storage-daemon",
            "* skipped: spdk: no (in sequential read 512B depth 1 (poll))",
            "| random read 4K depth 32 | poll | polling | ferry | 0.05 | - | 0 | 0.1 |",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("fio in User-mode Linux\n"), "nothing ran there");
    }
}
