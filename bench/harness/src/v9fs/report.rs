//! The report of the v9fs table.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use super::TABLE;
use super::fio::FILE_MIB;
use super::rows::{self, Place, Step};
use crate::chart;
use crate::line::{FERRY, Line, MessageCounts};
use crate::machine::Machine;
use crate::parts::{self, find};
use crate::target::{self, RowFigures, Target};

/// The published figures.
const PUBLISHED: &str = include_str!("../../../published/v9fs-iozone.csv");
/// Our configurations, as lines name them.
const COALESCED: &str = "coalesced";
const PIPELINED: &str = "pipelined";
const NONE: &str = "v9fs-none";
const LOOSE: &str = "v9fs-loose";

/// A published row, in MB/s.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    /// Its name.
    pub name: String,
    /// virtio-blk.
    pub disk: f64,
    /// 9P as it was.
    pub v9fs: f64,
    /// 9P with neighbours in one message.
    pub coalesced: f64,
}

/// Reads the published figures.
pub fn published() -> Vec<Published> {
    let row = |line: &str| {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let [operation, chunk, rest @ ..] = &fields[..] else { return None };
        let numbers: Vec<f64> = rest.iter().filter_map(|field| field.parse().ok()).collect();
        let [disk, v9fs, coalesced] = numbers[..] else { return None };
        Some(Published { name: format!("{operation} {chunk}"), disk, v9fs, coalesced })
    };
    PUBLISHED.lines().skip(1).filter_map(row).collect()
}

/// The rows of a place with a delay.
fn steps(place: Place, delay_ms: u64) -> impl Iterator<Item = Step> {
    rows::all().into_iter().filter(move |step| step.place == place && step.delay_ms == delay_ms)
}

/// What there is of the targets in these lines.
pub fn targets(lines: &[Line]) -> Vec<Target> {
    let mut targets = Vec::new();
    let ratios = |steps: &mut dyn Iterator<Item = Step>, config: &str, peer: &str| {
        RowFigures::ratios(steps.map(|step| find(lines, &step.name(), config)), peer)
    };
    for (delay_ms, link) in [(0, "direct"), (1, "1 ms"), (10, "10 ms")] {
        let mut sequential = steps(Place::Host, delay_ms).filter(|step| !step.random);
        let ratios = ratios(&mut sequential, COALESCED, "page-at-a-time");
        targets.extend(ratios.targets(&format!("sequential, {link}: coalesced : page-at-a-time"), 3.0));
    }
    for (place, guest, config) in
        [(Place::Uml, "uml", PIPELINED), (Place::Uml, "uml", LOOSE), (Place::Qemu, "qemu", LOOSE)]
    {
        let ratios = ratios(&mut steps(place, 0), config, "virtio-blk");
        targets.extend(ratios.targets(&format!("{guest}: {config} : virtio-blk"), 0.9));
    }
    let delayed = ratios(&mut steps(Place::Uml, 1), PIPELINED, LOOSE);
    targets.extend(delayed.targets("1 ms, both in User-mode Linux: pipelined : v9fs-loose", 4.0));
    let small = |step: &Step| step.name().ends_with(" unix write 4K");
    let large = ratios(&mut steps(Place::UmlUnix, 0).filter(|step| !small(step)), PIPELINED, LOOSE);
    targets.extend(large.targets("unix socket, both in User-mode Linux: pipelined : v9fs-loose", 1.5));
    for step in steps(Place::UmlUnix, 0).filter(small) {
        let line = find(lines, &step.name(), PIPELINED);
        targets.extend(Target::ratio(format!("{}: pipelined : v9fs-loose", step.name()), line, LOOSE, 3.0));
    }
    for (place, peer, limit) in [(Place::Uml, "diod", 1.5), (Place::Qemu, "qemu-9p", 2.0)] {
        for config in [NONE, LOOSE] {
            let ratios = ratios(&mut steps(place, 0), config, peer);
            targets.extend(ratios.targets(&format!("{config}: our server : {peer}"), limit));
        }
    }
    targets
}

/// Writes the report into a directory.
pub fn write(directory: &Path, lines: &[Line], machine: &Machine, targets: &[Target]) -> Result<()> {
    parts::save(directory, TABLE, lines, &markdown(lines, machine, targets), &chart::svg(lines, LOOSE))
}

fn markdown(lines: &[Line], machine: &Machine, targets: &[Target]) -> String {
    let mut out = String::from("# Files by 9P: Ferry beside Linux's client, diod and QEMU\n\n");
    head(&mut out, machine, lines);
    target::chapter(&mut out, targets);
    out.push_str("![How many times better our client is than Linux's in the same guest](v9fs.svg)\n\n");
    published_table(&mut out, lines);
    for (title, place) in [
        ("Our client on this host", Place::Host),
        ("In User-mode Linux, by TCP", Place::Uml),
        ("In User-mode Linux, by a unix socket", Place::UmlUnix),
        ("In a QEMU guest, by virtio", Place::Qemu),
    ] {
        figures(&mut out, title, place, lines);
    }
    messages(&mut out, lines);
    parts::shortfalls(&mut out, lines, |_| true, |_| parts::most_runs(lines));
    out
}

fn head(out: &mut String, machine: &Machine, lines: &[Line]) {
    let runs = parts::most_runs(lines);
    let Machine { cpu, cpus, kernel, fio, ferry, command, date, .. } = machine;
    let parts = if command.contains(" --add") { ", the last of several parts" } else { "" };
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC{parts}. {runs} runs of each system, in turn; medians in MiB/s, with the least and the \
         greatest in brackets. A ratio above 1 means that Ferry is better.\n\n\
         | | |\n| --- | --- |\n\
         | machine | {cpu}, {cpus} CPUs, Linux {kernel}, files on tmpfs |\n\
         | Ferry | {ferry} |\n| peers | diod, QEMU and its disk as in Debian sid |\n| fio | {fio} |\n"
    );
    let _ = writeln!(
        out,
        "* fio, psync, one thread, a file of {FILE_MIB} MiB that exists, each system its own; a run ends with the file or \
         after half a second, and with fsync, which counts. Before each run the client's caches are dropped; our client is \
         mounted anew. The servers' files are in memory, so no disk is measured. Where every page takes a round trip of its own \
         (`page-at-a-time`, and all random writes of 4 KiB with a delay), a run writes 16, 2 or 1 MiB: with no delay, 1 and 10 ms.\n\
         * `pipelined` is `ferry mount 9p:tcp:...` as it is by default, `coalesced` the same with one message under way, \
         `page-at-a-time` with one message under way that has room for a page. `v9fs-none` and `v9fs-loose` are Linux's \
         client with `cache=none` and `cache=loose` and our server; `msize` 1 MiB by TCP, 512,000 by virtio.\n\
         * Rows `uml unix`: our server is in the guest too, on files in its memory, for a guest shares no unix socket with its host.\n\
         * diod: `--no-auth`; it decides on the message size. QEMU: `-virtfs` with `security_model=none`, and its own \
         virtio-blk (ext4, io_uring, an iothread). The disk in User-mode Linux is Ferry's (ext4), by vhost-user.\n\
         * 1 ms and 10 ms are what a byte takes to the other side, each way, through a proxy of the harness that limits \
         nothing else: this kernel has no netem. A round trip takes twice as long, and some 0.1 ms for the timers.\n\
         * The published figures (`bench/published/v9fs-iozone.csv`, MB/s, iozone) are of patches to Linux's client, of \
         another machine, years ago: they tell which rows matter and by how much coalescing helps, not how fast Ferry is.\n"
    );
}

fn published_table(out: &mut String, lines: &[Line]) {
    out.push_str(
        "## The published rows\n\n| row | virtio-blk, published | 9P | coalesced | page-at-a-time | coalesced | pipelined \
         | uml: v9fs-none | v9fs-loose | pipelined | virtio-blk | qemu: v9fs-none | v9fs-loose | virtio-blk |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for row in published() {
        let shown = |prefix: &str, config: &str, peer: Option<&str>| {
            let line = find(lines, &format!("{prefix}{}", row.name), config);
            let value = line.and_then(|line| peer.map_or(line.ferry, |peer| line.peers.get(peer).copied()));
            value.map_or("-".to_owned(), |value| value.to_string())
        };
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            row.name,
            row.disk,
            row.v9fs,
            row.coalesced,
            shown("", COALESCED, Some("page-at-a-time")),
            shown("", COALESCED, None),
            shown("", PIPELINED, None),
            shown("uml ", NONE, None),
            shown("uml ", LOOSE, None),
            shown("uml ", PIPELINED, None),
            shown("uml ", LOOSE, Some("virtio-blk")),
            shown("qemu ", NONE, None),
            shown("qemu ", LOOSE, None),
            shown("qemu ", LOOSE, Some("virtio-blk")),
        );
    }
    out.push('\n');
}

fn figures(out: &mut String, title: &str, place: Place, lines: &[Line]) {
    let steps: Vec<String> = rows::all().into_iter().filter(|step| step.place == place).map(Step::name).collect();
    let lines: Vec<&Line> = lines.iter().filter(|line| steps.contains(&line.row)).collect();
    if lines.is_empty() {
        return;
    }
    let _ = writeln!(out, "## {title}\n\n| row | config | Ferry | others (ratio) |\n| --- | --- | --- | --- |");
    for line in &lines {
        let peer = |name: &String| {
            let ratio = line.ratio.get(name).map_or(String::new(), |ratio| format!(" (**{ratio:.2}**)"));
            format!("{name} {}{ratio}", parts::figure(line, name))
        };
        let peers: Vec<String> = line.peers.keys().map(peer).collect();
        let _ =
            writeln!(out, "| {} | {} | {} | {} |", line.row, line.config, parts::figure(line, FERRY), peers.join("; "));
    }
    out.push('\n');
    parts::line_notes(out, &lines);
    out.push('\n');
}

fn messages(out: &mut String, lines: &[Line]) {
    if lines.iter().all(|line| line.messages.is_empty()) {
        return;
    }
    out.push_str(
        "## What noise does not touch\n\nMessages, in runs of their own over a link of 1 ms: requests of any kind for each \
         MiB that fio asked for, bytes of the file in each that carries some, and how many requests were under way. What a client reads ahead of \
         the end of a run is in the messages, and not in the MiB.\n\n\
         | row | config | messages per MiB | bytes per message | under way, mean | most |\n\
         | --- | --- | --- | --- | --- | --- |\n",
    );
    let mut shown: Vec<(&str, String)> = Vec::new();
    for line in lines {
        for (name, sent) in &line.messages {
            let name = match name.as_str() {
                FERRY => line.config.clone(),
                "diod" => format!("diod, {}", line.config),
                _ => name.trim_start_matches("ferry-").to_owned(),
            };
            // Baselines stand in several lines.
            if shown.contains(&(&line.row, name.clone())) {
                continue;
            }
            let MessageCounts { messages_per_mib, bytes_per_message, in_flight_mean, in_flight_most } = sent;
            let bytes = bytes_per_message.map_or("-".into(), |bytes| bytes.to_string());
            let _ = writeln!(
                out,
                "| {} | {name} | {messages_per_mib} | {bytes} | {in_flight_mean} | {in_flight_most} |",
                line.row
            );
            shown.push((&line.row, name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Better;

    fn line(row: &str, config: &str, values: &[(&str, f64)]) -> Line {
        let mut line = Line::new(TABLE, row.into(), config, "MiB/s", Better::Higher);
        line.fill(&values.iter().map(|(name, value)| ((*name).to_owned(), vec![*value])).collect());
        line
    }

    fn lines() -> Vec<Line> {
        let mut lines = vec![
            line("write 1M", COALESCED, &[(FERRY, 400.0), ("page-at-a-time", 100.0)]),
            line("read 4K", COALESCED, &[(FERRY, 200.0), ("page-at-a-time", 100.0)]),
            line("read 4K 1 ms", PIPELINED, &[(FERRY, 500.0), ("page-at-a-time", 1.0), ("ferry-coalesced", 200.0)]),
            line("read 4K", PIPELINED, &[(FERRY, 120.0)]),
            line("uml unix read 4K", PIPELINED, &[(FERRY, 100.0), (LOOSE, 50.0)]),
            line("uml unix write 4K", PIPELINED, &[(FERRY, 100.0), (LOOSE, 50.0)]),
            line("uml read 4K", LOOSE, &[(FERRY, 150.0), ("diod", 100.0), ("virtio-blk", 200.0)]),
            line("qemu write 1M", NONE, &[(FERRY, 150.0), ("qemu-9p", 100.0), ("virtio-blk", 200.0)]),
        ];
        let sent = MessageCounts {
            messages_per_mib: 1.1,
            bytes_per_message: Some(1e6),
            in_flight_mean: 1.0,
            in_flight_most: 2,
        };
        lines[0].messages.insert(FERRY.into(), sent);
        lines[0].messages.insert("page-at-a-time".into(), sent);
        lines
    }

    #[test]
    fn reads_the_published_figures() {
        let row = published().into_iter().find(|row| row.name == "random read 4K").unwrap();
        assert_eq!((published().len(), row.disk, row.v9fs, row.coalesced), (8, 44.0, 41.0, 64.0));
    }

    #[test]
    fn says_which_targets_are_reached() {
        let text: Vec<String> = targets(&lines()).iter().map(ToString::to_string).collect();
        let text = text.join("\n");
        for part in [
            "sequential, direct: coalesced : page-at-a-time, least of 2 of 4 rows: 2.00 (target: at least 3: missed)",
            "uml: v9fs-loose : virtio-blk, geometric mean of 1 of 8 rows: 0.75 (target: at least 0.9: missed)",
            "unix socket, both in User-mode Linux: pipelined : v9fs-loose, least of 1 of 7 rows: 2.00 (target: at least 1.5: reached)",
            "uml unix write 4K: pipelined : v9fs-loose: 2.00 (target: at least 3: missed)",
            "v9fs-loose: our server : diod, least of 1 of 8 rows: 1.50 (target: at least 1.5: reached)",
            "v9fs-none: our server : qemu-9p, least of 1 of 8 rows: 1.50 (target: at least 2: missed)",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert_eq!(targets(&[]), []);
    }

    #[test]
    fn shows_figures_messages_and_shortfalls() {
        let lines = lines();
        let text = markdown(&lines, &Machine::default(), &targets(&lines));
        for part in [
            "| write 1M | 391 | 127 | 330 | 100 | 400 | - | - | - | - | - | 150 | - | - |",
            "| read 4K 1 ms | pipelined | 500 [500, 500] | ferry-coalesced 200 [200, 200] (**2.50**); page",
            "| write 1M | page-at-a-time | 1.1 | 1000000 | 1 | 2 |",
            "* uml read 4K (v9fs-loose): 0.75 of virtio-blk",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
