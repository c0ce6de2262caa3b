//! The report of the images table: Markdown, the lines themselves, a chart.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use super::TABLE;
use super::rows::ALL;
use super::runner::Effort;
use super::systems::System;
use crate::chart;
use crate::line::{FERRY, Line};
use crate::machine::Machine;
use crate::parts::{self, find};
use crate::target::{self, Target};

/// The published figures.
const PUBLISHED: &str = include_str!("../../../published/images-ls-lR.csv");

/// Kernel mounts: how many times faster than composefs's, cold and warm.
const WALKS: [(&str, f64); 4] =
    [("ls -lR cold", 3.0), ("ls -lR warm", 1.7), ("stat walk cold", 3.0), ("stat walk warm", 1.7)];

/// A published row.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    /// What was mounted.
    pub system: String,
    /// Milliseconds with nothing in the caches.
    pub cold_ms: f64,
    /// Milliseconds with everything there.
    pub warm_ms: f64,
}

/// Reads the published figures.
pub fn published() -> Vec<Published> {
    let row = |line: &str| {
        let mut fields = line.rsplitn(3, ',');
        let (warm_ms, cold_ms) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        Some(Published { system: fields.next()?.to_owned(), cold_ms, warm_ms })
    };
    PUBLISHED.lines().skip(1).filter_map(row).collect()
}

/// What the project set itself to reach, as far as this run measured it.
pub fn targets(lines: &[Line]) -> Vec<Target> {
    let (flat, fuse) = (System::Ferry.name(), System::FerryFuse.name());
    let mut targets = Vec::new();
    let mut least = |what: String, (row, config, peer): (&str, &str, &str), limit: f64| {
        targets.extend(Target::ratio(what, find(lines, row, config), peer, limit));
    };
    for (row, limit) in WALKS {
        least(format!("{row}: flat : composefs mount"), (row, flat, "composefs"), limit);
    }
    for (row, _) in WALKS {
        let ratios = find(lines, row, flat).into_iter().flat_map(|line| &line.ratio);
        let erofs = ratios.filter(|(peer, _)| peer.starts_with("erofs")).min_by(|a, b| a.1.total_cmp(b.1));
        let peer = erofs.map_or("none", |(peer, _)| peer);
        least(format!("{row}: flat : the fastest other EROFS mount ({peer})"), (row, flat, peer), 1.0);
    }
    for (row, peer, limit) in [
        ("build", "composefs", 2.0),
        ("build", "erofs-full", 2.0),
        ("build", "erofs-blob", 2.0),
        ("image size", "composefs", 1.0),
        ("image size", "erofs-blob", 1.0),
    ] {
        least(format!("{row}: ferry : {peer}"), (row, flat, peer), limit);
    }
    for (row, limit) in [
        ("ls -lR warm", 1.0 / 2.0),
        ("ls -lR cold", 1.0 / 3.0),
        ("stat walk warm", 0.9),
        ("stat walk cold", 0.7),
        ("start again", 0.9),
        ("sequential read warm", 0.9),
    ] {
        least(format!("{row}: FUSE export : flat in the kernel"), (row, fuse, "ferry-flat"), limit);
    }
    let what = "sequential read cold: FUSE export, every byte proved : the bare file".to_owned();
    least(what, ("sequential read cold", fuse, "bare"), 0.8);
    let what = "start cold: flat, without a trace : erofs-blob-ahead".to_owned();
    least(what, ("start cold", flat, "erofs-blob-ahead"), 1.0);
    targets
}

/// Writes the report into a directory.
pub fn write(
    directory: &Path,
    lines: &[Line],
    machine: &Machine,
    peers: &str,
    effort: Effort,
    targets: &[Target],
) -> Result<()> {
    let flat: Vec<Line> = lines.iter().filter(|line| line.config == System::Ferry.name()).cloned().collect();
    let svg = chart::svg(&flat, "composefs");
    parts::save(directory, TABLE, lines, &markdown(lines, machine, peers, effort, targets), &svg)
}

fn markdown(lines: &[Line], machine: &Machine, peers: &str, effort: Effort, targets: &[Target]) -> String {
    let mut out = String::from("# Images of trees: Ferry beside composefs and mkfs.erofs\n\n");
    head(&mut out, lines, machine, peers, effort);
    target::chapter(&mut out, targets);
    out.push_str("![How many times better Ferry's flat images are, row by row](images.svg)\n\n");
    walks(&mut out, lines);
    figures(&mut out, lines);
    let work = |line: &Line| ALL.into_iter().find(|work| work.rows().iter().any(|(_, row)| *row == line.row));
    let asked = |line: &Line| work(line).map_or(0, |work| effort.runs_of(work));
    parts::shortfalls(&mut out, lines, |peer| peer != "bare" && !peer.starts_with(FERRY), asked);
    out
}

fn head(out: &mut String, lines: &[Line], machine: &Machine, peers: &str, effort: Effort) {
    let Effort { files, developer_files, .. } = effort;
    let runs = parts::most_runs(lines);
    let Machine { cpu, cpus, kernel, file_system, ferry, command, date, .. } = machine;
    let parts = if command.contains(" --add") { ", the last of several parts" } else { "" };
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC{parts}. {runs} runs of each walk, in turn; medians, with the least and the greatest in \
         brackets. A ratio above 1 means that Ferry is better.\n\n\
         | | |\n| --- | --- |\n\
         | machine | {cpu}, {cpus} CPUs, Linux {kernel}, all on {file_system} |\n\
         | tree | {files} files as in a distribution's root (11 KiB on average), 10 for each directory |\n\
         | rows `developer` and `guest` | about {developer_files} files as in a developer's image: objects of git, packages of Node.js in each other, \
         Python's with their byte code, a tool chain; 19 KiB on average, a fiftieth of the names hard links, attributes |\n\
         | Ferry | {ferry} |\n| peers | {peers} |\n"
    );
    out.push_str(
        "* Cold: unmounted, the kernel's caches emptied, mounted, walked; the rows `mount and ...` have the time of the mount in \
         them. Warm: the same walk at once after that. `stat walk` lists every directory and calls statx(2) for every \
         name; `ls -lR` is GNU's, into /dev/null.\n\
         * `flat` is `ferry image mount`, which reads and proves the metadata before the mount; `flat fuse` is `ferry mount \
         image:` with `--cache always`; `flat ordered` as `flat`, built by a list of what `start` reads. `start` reads one file of a hundred, chosen \
         and ordered by chance, as a program that starts does. `ferry-verity`: `ferry image build --verity`; `ferry-composefs`: \
         `--layout composefs`, whose images are mkcomposefs's byte for byte; `composefs layout` is `ferry image mount` of one, `composefs layout fuse` \
         `ferry mount image:`.\n\
         * `composefs`: mkcomposefs with an object store, mount.composefs; `erofs-overlay`: the same image as EROFS with \
         overlayfs by hand; `erofs-full`: mkfs.erofs; `erofs-blob`: mkfs.erofs -E48bit with a blob device and chunks of 1 MiB. `-loop`: from loop \
         devices, else from files; `-ahead`: the metadata read before the mount. `bare`: the tree itself.\n\
         * Rows `guest`: in a User-mode Linux guest, booted for each run after the caches of this host were emptied. `flat virtiofs` is `ferry share \
         image:`, `virtiofsd-...` virtiofsd on what is mounted on this host; all with `--cache always` and without attributes. `stat walk` is \
         find(1)'s there, which prints each length.\n\n",
    );
}

/// Cold and warm, tree by tree, beside what others published.
fn walks(out: &mut String, lines: &[Line]) {
    let (flat, fuse, guest) = (System::Ferry.name(), System::FerryFuse.name(), System::FerryGuest.name());
    let ours = [flat, fuse, System::FerryComposefs.name(), System::FerryComposefsFuse.name()];
    for (title, before, ours) in [
        ("Walks", "", ours.as_slice()),
        ("Walks of a developer's tree", "developer ", ours.as_slice()),
        ("Walks of a developer's tree in a guest", "guest ", [guest].as_slice()),
    ] {
        let of = |row: &str, config: &str| find(lines, &format!("{before}{row}"), config);
        let first = ours[0];
        let peers = of("ls -lR cold", first).or(of("stat walk cold", first));
        if peers.is_none() && !before.is_empty() {
            continue;
        }
        let _ = writeln!(
            out,
            "## {title}, milliseconds\n\n| system | ls -lR cold | warm | stat walk cold | warm | the mount |\n\
             | --- | --- | --- | --- | --- | --- |"
        );
        let mut systems: Vec<_> = ours.iter().map(|config| (*config, FERRY)).collect();
        systems.extend(peers.iter().flat_map(|line| line.peers.keys()).map(|peer| (first, peer.as_str())));
        for (config, name) in systems {
            let cells = WALKS.map(|(row, _)| of(row, config).map_or("-".into(), |line| parts::figure(line, name)));
            let mount = of("ls -lR cold", config).and_then(|line| line.also.get("mount_ms")?.get(name));
            let mount = mount.map_or("-".into(), f64::to_string);
            let _ =
                writeln!(out, "| {} | {} | {mount} |", if name == FERRY { config } else { name }, cells.join(" | "));
        }
        out.push('\n');
    }
    out.push_str(
        "Published for `ls -lR` by the composefs project (`bench/published/images-ls-lR.csv`), on another machine with a \
         developer image's tree: they tell which rows matter.\n\n| system | cold | warm |\n| --- | --- | --- |\n",
    );
    for row in published() {
        let _ = writeln!(out, "| {} | {} | {} |", row.system, row.cold_ms, row.warm_ms);
    }
    out.push('\n');
}

fn figures(out: &mut String, lines: &[Line]) {
    out.push_str("## All rows\n\n| row | config | unit | Ferry | peers (ratio) |\n| --- | --- | --- | --- | --- |\n");
    for line in lines {
        let peer = |(name, value): (&String, &f64)| {
            let ratio = line.ratio.get(name).map_or(String::new(), |ratio| format!(" (**{ratio:.2}**)"));
            format!("{name} {value}{ratio}")
        };
        let peers: Vec<String> = line.peers.iter().map(peer).collect();
        let ours = parts::figure(line, FERRY);
        let _ = writeln!(out, "| {} | {} | {} | {ours} | {} |", line.row, line.config, line.unit, peers.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Better;

    fn line(row: &str, config: &str, better: Better, values: &[(&str, f64)]) -> Line {
        let mut line = Line::new(TABLE, row.into(), config, "ms", better);
        line.fill(&values.iter().map(|(name, value)| ((*name).to_owned(), vec![*value])).collect());
        line
    }

    fn lines() -> Vec<Line> {
        let lower = Better::Lower;
        vec![
            line("build", "flat", lower, &[(FERRY, 5.0), ("composefs", 20.0), ("erofs-full", 8.0)]),
            line(
                "ls -lR cold",
                "flat",
                lower,
                &[(FERRY, 500.0), ("composefs", 1750.0), ("erofs-blob", 450.0), ("erofs-full", 900.0), ("bare", 1.0)],
            ),
            line("ls -lR cold", "flat fuse", lower, &[(FERRY, 2000.0), ("ferry-flat", 500.0)]),
            line("stat walk warm", "flat fuse", lower, &[(FERRY, 10.0), ("ferry-flat", 8.0)]),
            line("start again", "flat fuse", lower, &[(FERRY, 10.0), ("ferry-flat", 9.5)]),
            line("start cold", "flat", lower, &[(FERRY, 125.0), ("erofs-blob-ahead", 100.0)]),
            line("sequential read warm", "flat fuse", Better::Higher, &[(FERRY, 50.0), ("ferry-flat", 100.0)]),
            line("sequential read cold", "flat fuse", Better::Higher, &[(FERRY, 900.0), ("bare", 1000.0)]),
        ]
    }

    #[test]
    fn reads_the_published_figures() {
        let published = published();
        assert_eq!((published.len(), published[7].cold_ms, published[7].warm_ms), (8, 484.0, 300.0));
    }

    #[test]
    fn says_which_targets_are_reached() {
        let text: Vec<String> = targets(&lines()).iter().map(ToString::to_string).collect();
        let text = text.join("\n");
        for part in [
            "ls -lR cold: flat : composefs mount: 3.50 (target: at least 3: reached)",
            "ls -lR cold: flat : the fastest other EROFS mount (erofs-blob): 0.90 (target: at least 1: missed)",
            "build: ferry : erofs-blob: not measured (target: at least 2)",
            "build: ferry : erofs-full: 1.60 (target: at least 2: missed)",
            "ls -lR cold: FUSE export : flat in the kernel: 0.25 (target: at least 0.3333: missed)",
            "stat walk warm: FUSE export : flat in the kernel: 0.80 (target: at least 0.9: missed)",
            "start again: FUSE export : flat in the kernel: 0.95 (target: at least 0.9: reached)",
            "sequential read warm: FUSE export : flat in the kernel: 0.50 (target: at least 0.9: missed)",
            "every byte proved : the bare file: 0.90 (target: at least 0.8: reached)",
            "start cold: flat, without a trace : erofs-blob-ahead: 0.80 (target: at least 1: missed)",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert_eq!(targets(&[]), []);
    }

    #[test]
    fn shows_walks_and_shortfalls() {
        let text = markdown(&lines(), &Machine::default(), "composefs 1", Effort::QUICK, &targets(&lines()));
        for part in [
            "| flat | 500 [500, 500] | - | - | - | - |",
            "| erofs-blob | 450 [450, 450] |",
            "| erofs (loop buffered) | 300 | 188 |",
            "* ls -lR cold (flat): 0.90 of erofs-blob; the runs of both overlap",
        ] {
            let part = part.split("; the runs").next().unwrap();
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("of bare"), "{text}");
    }
}
