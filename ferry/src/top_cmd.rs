//! `ferry top`: what running servers do each second, live.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use console::{Term, measure_text_width, pad_str, truncate_str};
use ferry_control::{ExportReport, ServerReport, printable, printable_json};
use serde::Serialize;

use crate::control::reports_of;
use crate::output::print;
use crate::status;

/// The version of the JSON. It grows when a field changes its meaning or is removed.
const VERSION: u32 = 1;
/// A longer interval than an hour is no live view.
const INTERVAL_MAX: u64 = 3600;
/// The columns, with their widths. A terminal of 80 columns has some left for the place of an export.
const COLUMNS: [(&str, usize); 8] =
    [("PROCESS", 7), ("REQ/S", 8), ("R MiB/S", 8), ("W MiB/S", 8), ("P50", 9), ("P99", 9), ("FLIGHT", 7), ("ERR/S", 6)];

#[derive(Debug, clap::Args)]
pub struct Args {
    /// A process id, a mount point, the socket of a share or disk, its address for 9P, or a shared directory or file. Without one:
    /// all shares, mounts and disks of yours that run; for root, those of all users.
    #[arg(value_name = "TARGET")]
    target: Option<PathBuf>,

    /// The seconds between two lines of the same share.
    #[arg(long, short, value_name = "SECONDS", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=INTERVAL_MAX))]
    interval: u64,

    /// Print what happens in one interval, and end.
    #[arg(long)]
    once: bool,

    /// Print one JSON object for each interval.
    #[arg(long)]
    json: bool,
}

/// Tells an export from all others: process, kind, place and source.
type Key = (u32, &'static str, String, String);

/// The reports of all exports at one time.
struct Sample {
    at: Instant,
    exports: BTreeMap<Key, ExportReport>,
    outcome: u8,
}

/// What exports did in an interval.
#[derive(Debug, Serialize)]
struct Report {
    version: u32,
    interval_ms: u64,
    exports: Vec<Rates>,
}

/// What an export did in an interval.
#[derive(Debug, Serialize)]
struct Rates {
    pid: u32,
    source: String,
    export: &'static str,
    at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    clients: Option<u64>,
    requests_per_s: u64,
    read_bytes_per_s: u64,
    written_bytes_per_s: u64,
    errors_per_s: u64,
    in_flight: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    p50_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p99_ns: Option<u64>,
}

/// Shows what servers do. Returns the status to end with: not 0 if a server that runs does not report.
pub fn run(args: &Args) -> Result<u8> {
    let term = Term::stdout();
    let is_live = !args.once && !args.json;
    if is_live && !std::io::stdout().is_terminal() {
        return Err(status::misuse(anyhow!("standard output is not a terminal; use --once or --json")));
    }
    let interval = Duration::from_secs(args.interval);
    let mut before = Sample::take(args)?;
    loop {
        std::thread::sleep(interval);
        let now = Sample::take(args)?;
        let report = Report::between(&before, &now);
        if args.json {
            print(printable_json(&serde_json::to_string(&report)?) + "\n")?;
        } else if is_live {
            let (height, width) = term.size();
            let lines = report.lines(usize::from(width));
            let shown: Vec<_> = lines.into_iter().take(usize::from(height).saturating_sub(1)).collect();
            term.clear_screen()
                .and_then(|()| term.write_str(&shown.join("\n")))
                .context("cannot write to the terminal")?;
        } else {
            print(report.lines(usize::MAX).join("\n") + "\n")?;
        }
        if args.once {
            return Ok(now.outcome);
        }
        before = now;
    }
}

impl Sample {
    fn take(args: &Args) -> Result<Self> {
        let (reports, outcome) = reports_of(args.target.as_deref())?;
        Ok(Self::of(reports.into_iter().map(|(_, report)| report), outcome))
    }

    fn of(reports: impl Iterator<Item = ServerReport>, outcome: u8) -> Self {
        let mut exports = BTreeMap::new();
        for report in reports {
            for share in report.shares {
                for export in share.exports {
                    let at = share.share.place(export.kind).unwrap_or_default();
                    exports.insert((report.pid, export.kind.name(), at, share.share.source.clone()), export);
                }
            }
        }
        Self { at: Instant::now(), exports, outcome }
    }
}

impl Report {
    /// What happened between two samples, the busiest export first. An export that was not there before has done nothing yet.
    fn between(before: &Sample, now: &Sample) -> Self {
        let interval = now.at.saturating_duration_since(before.at);
        let of = |(key, export): (&Key, &ExportReport)| {
            Rates::between(key, before.exports.get(key).unwrap_or(export), export, interval)
        };
        let mut exports: Vec<_> = now.exports.iter().map(of).collect();
        exports.sort_by_key(|rates| std::cmp::Reverse(rates.requests_per_s));
        Self { version: VERSION, interval_ms: u64::try_from(interval.as_millis()).unwrap_or(u64::MAX), exports }
    }

    /// A heading, and a line for each export.
    fn lines(&self, width: usize) -> Vec<String> {
        let heading = COLUMNS.iter().fold(String::new(), |line, (name, width)| line + &right(name, *width));
        let lines = self.exports.iter().map(Rates::line);
        // The text has no control sequences, which are what a terminal's width does not count.
        let cut = |line: String| {
            if measure_text_width(&line) > width { truncate_str(&line, width, "…").into_owned() } else { line }
        };
        std::iter::once(heading + "  EXPORT").chain(lines).map(cut).collect()
    }
}

fn right(text: &str, width: usize) -> String {
    pad_str(text, width, console::Alignment::Right, None).into_owned()
}

impl Rates {
    fn between(key: &Key, before: &ExportReport, now: &ExportReport, interval: Duration) -> Self {
        let ms = interval.as_millis().max(1);
        let rate = |count: fn(&ExportReport) -> Option<u64>| {
            let more = count(now).unwrap_or(0).saturating_sub(count(before).unwrap_or(0));
            u64::try_from((u128::from(more) * 1000 + ms / 2) / ms).unwrap_or(u64::MAX)
        };
        let latencies = latencies(before, now);
        let (pid, export, at, source) = key;
        Self {
            pid: *pid,
            source: source.clone(),
            export,
            at: at.clone(),
            clients: now.clients,
            requests_per_s: rate(|export| export.requests),
            read_bytes_per_s: rate(|export| export.read_bytes),
            written_bytes_per_s: rate(|export| export.written_bytes),
            errors_per_s: rate(|export| export.errors),
            in_flight: now.in_flight.unwrap_or(0),
            p50_ns: quantile(&latencies, 50),
            p99_ns: quantile(&latencies, 99),
        }
    }

    fn line(&self) -> String {
        let mut line = String::new();
        for (text, (_, width)) in [
            self.pid.to_string(),
            self.requests_per_s.to_string(),
            mib(self.read_bytes_per_s),
            mib(self.written_bytes_per_s),
            self.p50_ns.map_or_else(|| "-".into(), duration),
            self.p99_ns.map_or_else(|| "-".into(), duration),
            self.in_flight.to_string(),
            self.errors_per_s.to_string(),
        ]
        .iter()
        .zip(COLUMNS)
        {
            line += &right(text, width);
        }
        let _ = write!(line, "  {} {} {}", self.export, printable(&self.at), printable(&self.source));
        line
    }
}

/// The requests of all operations that have ended between two reports, by their longest latency; `u64::MAX` for no limit.
fn latencies(before: &ExportReport, now: &ExportReport) -> BTreeMap<u64, u64> {
    let mut all = BTreeMap::new();
    let buckets = |report: &ExportReport| -> Vec<(u64, u64)> {
        let buckets = report.operations.iter().flat_map(|operation| &operation.buckets);
        buckets.map(|bucket| (bucket.end_ns.unwrap_or(u64::MAX), bucket.requests)).collect()
    };
    for (end_ns, requests) in buckets(now) {
        let count: &mut u64 = all.entry(end_ns).or_default();
        *count = count.saturating_add(requests);
    }
    for (end_ns, requests) in buckets(before) {
        all.entry(end_ns).and_modify(|count| *count = count.saturating_sub(requests));
    }
    all
}

/// The latency that so many in a hundred requests do not exceed; `None` without requests.
fn quantile(latencies: &BTreeMap<u64, u64>, percent: u128) -> Option<u64> {
    let total: u128 = latencies.values().map(|count| u128::from(*count)).sum();
    let mut left = (total * percent).div_ceil(100);
    latencies.iter().filter(|_| total > 0).find_map(|(end_ns, count)| {
        left = left.saturating_sub((*count).into());
        (left == 0).then_some(*end_ns)
    })
}

/// Bytes in MiB with one decimal, cut.
fn mib(bytes: u64) -> String {
    let tenths = (u128::from(bytes) * 10) >> 20;
    format!("{}.{}", tenths / 10, tenths % 10)
}

/// A latency in the unit that suits it; what is longer than all buckets has none.
fn duration(ns: u64) -> String {
    match ns {
        u64::MAX => "> 34 s".into(),
        0..1_000_000 => format!("{}.{} us", ns / 1000, ns % 1000 / 100),
        1_000_000..1_000_000_000 => format!("{}.{} ms", ns / 1_000_000, ns % 1_000_000 / 100_000),
        _ => format!("{}.{} s", ns / 1_000_000_000, ns % 1_000_000_000 / 100_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(source: &str, requests: u64, buckets: &[(Option<u64>, u64)]) -> ServerReport {
        let buckets: Vec<_> = buckets
            .iter()
            .map(|(end_ns, requests)| match end_ns {
                Some(end_ns) => serde_json::json!({ "end_ns": end_ns, "requests": requests }),
                None => serde_json::json!({ "requests": requests }),
            })
            .collect();
        let operation = serde_json::json!({ "name": "read", "requests": requests, "in_flight": 2, "bytes": 1, "latency_ns": 1,
                                            "errors": [], "buckets": buckets });
        let export = serde_json::json!({ "kind": "mount", "requests": requests, "read_bytes": requests << 20, "errors": requests,
                                         "written_bytes": 0, "in_flight": 2, "operations": [operation] });
        let share = serde_json::json!({ "source": source, "mount": source, "read_only": false, "exports": [export] });
        serde_json::from_value(serde_json::json!({ "version": 1, "pid": 7, "uptime_s": 1, "shares": [share] }))
            .expect("it is one")
    }

    fn between(before: Vec<ServerReport>, now: Vec<ServerReport>) -> Report {
        let before = Sample::of(before.into_iter(), 0);
        let now = Sample { at: before.at + Duration::from_secs(2), ..Sample::of(now.into_iter(), 0) };
        Report::between(&before, &now)
    }

    #[test]
    fn rates_are_those_of_the_interval() {
        let before = server("/a", 100, &[(Some(1024), 100)]);
        let now = server("/a", 300, &[(Some(1024), 100), (Some(20_480), 198), (Some(4_000_000), 2)]);
        let report = between(vec![before], vec![now.clone()]);
        let rates = &report.exports[0];
        assert_eq!((rates.requests_per_s, rates.read_bytes_per_s, rates.errors_per_s), (100, 100 << 20, 100));
        assert_eq!((rates.p50_ns, rates.p99_ns, rates.in_flight), (Some(20_480), Some(20_480), 2));
        let line = rates.line();
        let words: Vec<_> = line.split_whitespace().collect();
        assert_eq!(
            words,
            ["7", "100", "100.0", "0.0", "20.4", "us", "20.4", "us", "2", "100", "mount", "/a", "/a"],
            "{line}"
        );
        // One that was not there before has no rates yet, and one that is gone has no line.
        let report = between(vec![server("/b", 1, &[])], vec![now]);
        assert_eq!((report.exports.len(), report.exports[0].requests_per_s, report.exports[0].p50_ns), (1, 0, None));
    }

    #[test]
    fn quantiles_are_the_ends_of_buckets() {
        let latencies = |counts: &[(u64, u64)]| counts.iter().copied().collect::<BTreeMap<_, _>>();
        for (counts, percent, expected) in [
            (&[][..], 50, None),
            (&[(10, 0)], 99, None),
            (&[(10, 1)], 50, Some(10)),
            (&[(10, 50), (20, 50)], 50, Some(10)),
            (&[(10, 50), (20, 50)], 51, Some(20)),
            (&[(10, 99), (u64::MAX, 1)], 99, Some(10)),
            (&[(10, 98), (u64::MAX, 2)], 99, Some(u64::MAX)),
        ] {
            assert_eq!(quantile(&latencies(counts), percent), expected, "{counts:?} {percent}");
        }
    }

    #[test]
    fn lines_fit_and_names_do_nothing_to_a_terminal() {
        let hostile = format!("\x1b[2J\u{9b}\u{202e}\nprocess {}", "x".repeat(300));
        let report = between(vec![], vec![server(&hostile, 1, &[(None, 1)])]);
        let lines = report.lines(100);
        assert!(lines.iter().all(|line| printable(line) == *line && line.chars().count() <= 100), "{lines:?}");
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(report.lines(usize::MAX)[1].contains("\\u{1b}[2J"), "{lines:?}");
    }
}
