//! The report: the published table beside the measured one, and the targets.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;

use super::{FILE_MIB, TABLE};
use crate::line::{FERRY, Line};
use crate::machine::Machine;
use crate::report::{Published, published};
use crate::rows::{Config, Engine, Row, Work};
use crate::target::{self, RowFigures, Target};
use crate::{chart, parts};

/// The peer that the targets are about.
const PEER: &str = "virtiofsd";
/// What a window is compared with.
const NONE: &str = "ferry-none";
/// How much faster a window is to make a single job's reads than no cache: about what was published.
const DAX_GAIN: f64 = 7.0;
/// The geometric mean of all rows without a window, beside virtiofsd's, and of those with several jobs.
const MEAN: f64 = 1.5;
const MULTI_MEAN: f64 = 2.0;

/// What was to be reached, of the rows that ran.
pub fn targets(rows: &[Row], lines: &[Line]) -> Vec<Target> {
    let find = |row: &Row, config: Config| parts::find(lines, &row.name, config.name());
    let gain = |row: &Row| find(row, Config::NoneDax).and_then(|line| line.ratio.get(NONE).copied());
    let mut targets = Vec::new();
    for row in rows.iter().filter(|row| matches!(&*row.name, "seqread-psync" | "randread-psync")) {
        let what = format!("{}: DAX over cache=none", row.name);
        targets.extend(Target::ratio(what, find(row, Config::NoneDax), NONE, DAX_GAIN));
    }
    let mapped: Vec<&Row> =
        rows.iter().filter(|row| matches!(row.work, Work::Fio(job) if job.engine == Engine::Mmap)).collect();
    let possible = mapped.iter().filter(|row| find(row, Config::NoneDax).is_some_and(|line| line.ferry > Some(0.0)));
    if !mapped.is_empty() {
        targets.push(Target::at_least("mmap rows possible with DAX", number(possible.count()), number(mapped.len())));
    }
    // A row that failed has not the gain.
    let published = published();
    let published = |row: &Row| published.iter().find(|job| job.name == row.name).and_then(published_gain);
    let both: Vec<(Option<f64>, f64)> = rows.iter().filter_map(|row| Some((gain(row), published(row)?))).collect();
    if !both.is_empty() {
        let reached = both.iter().filter(|(ours, theirs)| ours.is_some_and(|ours| ours >= *theirs)).count();
        targets.push(Target::at_least("rows with the published gain of DAX", number(reached), number(both.len())));
    }
    let ratios = |wanted: fn(&Row) -> bool| {
        RowFigures::ratios(rows.iter().filter(|row| wanted(row)).map(|row| find(row, Config::None)), PEER)
    };
    let known = rows.iter().filter_map(|row| Some((row, *find(row, Config::None)?.ratio.get(PEER)?)));
    let least = known.min_by(|a, b| a.1.total_cmp(&b.1)).map_or("none", |(row, _)| &row.name);
    targets.extend(ratios(|_| true).least(&format!("ferry : {PEER} ({least})"), 1.0));
    targets.extend(ratios(|_| true).mean(&format!("ferry : {PEER}, all without DAX"), MEAN));
    targets.extend(ratios(Row::is_multi).mean(&format!("ferry : {PEER}, several jobs"), MULTI_MEAN));
    targets
}

#[allow(clippy::cast_precision_loss)] // A few rows.
fn number(count: usize) -> f64 {
    count as f64
}

fn published_gain(job: &Published) -> Option<f64> {
    (job.virtiofs > 0.0).then(|| job.dax / job.virtiofs)
}

/// Writes the report into a directory.
pub fn write(directory: &Path, lines: &[Line], machine: &Machine, targets: &[Target]) -> Result<()> {
    parts::save(directory, TABLE, lines, &markdown(lines, machine, targets), &chart::svg(lines, PEER))
}

fn markdown(lines: &[Line], machine: &Machine, targets: &[Target]) -> String {
    let mut out = String::from("# virtio-fs in a QEMU guest: 9pfs, virtiofsd, Ferry, Ferry with DAX\n\n");
    head(&mut out, machine, lines);
    target::chapter(&mut out, targets);
    out.push_str("![How many times better Ferry is, row by row](virtiofs-dax.svg)\n\n");
    figures(&mut out, lines);
    parts::shortfalls(&mut out, lines, |_| true, |_| parts::most_runs(lines));
    out
}

fn head(out: &mut String, machine: &Machine, lines: &[Line]) {
    let runs = parts::most_runs(lines);
    let Machine { cpu, cpus, kernel, guest_kernel, virtiofsd, fio, ferry, command, date, .. } = machine;
    let parts = if command.contains(" --add") { ", the last of several parts" } else { "" };
    let _ = writeln!(
        out,
        "`{command}`, begun {date} UTC{parts}. {runs} runs of each system, in turn; medians, with the least and the greatest in \
         brackets.\n\n| | |\n| --- | --- |\n\
         | machine | {cpu}, {cpus} CPUs, Linux {kernel}, data on tmpfs |\n\
         | guest | QEMU, emulated unless KVM boots, stock Linux {guest_kernel}, two CPUs; everybody shares the machine's CPUs |\n\
         | Ferry | {ferry} |\n| virtiofsd | {virtiofsd}, `--sandbox none --seccomp none --cache never --allow-mmap` |\n\
         | 9pfs | of the same QEMU, `security_model=none`, mounted with `cache=none` |\n| fio | {fio} |\n"
    );
    let _ = writeln!(
        out,
        "* Ferry is `--cache none`, `--cache auto`, and `--cache none` mounted with `dax` (a window of 256 MiB), each with one queue, as virtiofsd \
         and what QEMU gives a device that is not told otherwise. All are mounted in one guest, from one directory; one works at a time.\n\
         * Each run begins with empty caches in the guest and goes over each {FILE_MIB} MiB file at most once, so that what is \
         measured is not the guest's page cache; `multi` is four jobs with a file each. 4 KiB blocks; libaio with `direct=1` \
         and 16 in flight; of what is written, all is with the server when a run ends. The files with DAX stay open, so that \
         their mappings are made in the first run that needs them and then stay.\n\
         * The published figures (`bench/published/virtiofs-fio.csv`, MiB/s) are the virtio-fs developers' own, years ago, \
         of another machine and kernel with KVM. 0: the job could not run. Compare gains, not rates: an emulated guest's own \
         work takes most of the time of a small request.\n"
    );
}

fn figures(out: &mut String, lines: &[Line]) {
    out.push_str(
        "## Figures\n\n| MiB/s | 9pfs none | virtiofsd none | Ferry none | Ferry auto | Ferry none, DAX | Ferry : virtiofsd \
         | DAX : none | published: 9pfs | virtio-fs none | with DAX | DAX : none |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    let published = published();
    for line in lines.iter().filter(|line| line.config == Config::None.name()) {
        let of = |config: Config| parts::find(lines, &line.row, config.name());
        let shown = |config| of(config).map_or("-".into(), |line| parts::figure(line, FERRY));
        let job = published.iter().find(|job| job.name == line.row);
        let theirs = |pick: fn(&Published) -> f64| job.map_or(String::new(), |job| pick(job).to_string());
        let gain = job.and_then(published_gain).map_or("-".into(), |gain| format!("{gain:.1}"));
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {gain} |",
            line.row,
            parts::figure(line, "qemu-9p"),
            parts::figure(line, PEER),
            parts::figure(line, FERRY),
            shown(Config::Auto),
            shown(Config::NoneDax),
            parts::ratio(Some(line), PEER),
            parts::ratio(of(Config::NoneDax), NONE),
            theirs(|job| job.v9fs),
            theirs(|job| job.virtiofs),
            theirs(|job| job.dax),
        );
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows;

    fn lines(rows: &[Row]) -> Vec<Line> {
        let of = |row: &Row, config: Config| {
            let mut line = Line::new(TABLE, row.name.clone(), config.name(), row.unit(), row.better());
            let ours = if config == Config::NoneDax { 80.0 } else { 10.0 };
            let samples = [(FERRY, ours), (PEER, 8.0), ("qemu-9p", 4.0), (NONE, 10.0)];
            let known = samples.into_iter().filter(|(name, _)| *name != NONE || config != Config::None);
            line.fill(&known.map(|(name, value)| (name.to_owned(), vec![value])).collect());
            line
        };
        rows.iter()
            .flat_map(|row| [Config::None, Config::Auto, Config::NoneDax].map(|config| of(row, config)))
            .collect()
    }

    #[test]
    fn results_are_reported() {
        let rows = rows::jobs();
        let lines = lines(&rows);
        let text = targets(&rows, &lines).iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        for part in [
            "seqread-psync: DAX over cache=none: 8.00 (target: at least 7: reached)",
            "mmap rows possible with DAX: 8.00 (target: at least 8: reached)",
            "rows with the published gain of DAX: 16.00 (target: at least 16: reached)",
            "least of 24 of 24 rows: 1.25 (target: at least 1: reached)",
            "all without DAX, geometric mean of 24 of 24 rows: 1.25 (target: at least 1.5: missed)",
            "several jobs, geometric mean of 12 of 12 rows: 1.25 (target: at least 2: missed)",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let none = targets(&rows, &[]);
        assert!(none.iter().all(|target| target.to_string().contains(": 0.00 (target: ")), "{none:?}");
    }

    #[test]
    fn has_the_published_table_beside_ours() {
        let rows = rows::jobs();
        let text = markdown(&lines(&rows), &Machine::default(), &[]);
        let row = "| randread-psync | 4 [4, 4] | 8 [8, 8] | 10 [10, 10] | 10 [10, 10] | 80 [80, 80] | **1.25** | **8.00** \
                   | 29 | 34 | 256 | 7.5 |";
        assert!(text.contains(row), "{text}");
        assert!(text.contains("| seqread-mmap | 4 [4, 4] |") && text.contains("| 24 | 0 | 168 | - |"), "{text}");
    }
}
