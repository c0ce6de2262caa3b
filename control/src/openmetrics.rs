//! Reports as metrics: in OpenMetrics text (version 1.0.0), or in the older text format of Prometheus (0.0.4), where the names
//! of counters in comments have their suffix.

use std::borrow::Cow;
use std::fmt::Write as _;

use crate::escape::printable;
use crate::report::{BucketReport, ExportReport, OperationReport, ServerReport};

/// The bounds of buckets are powers of two in nanoseconds, from 2^9 to 2^35: a quarter of the counted buckets.
const BUCKET_BITS: std::ops::RangeInclusive<u32> = 9..=35;

/// The format of the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MetricsFormat {
    /// OpenMetrics 1.0.0.
    #[default]
    OpenMetrics,
    /// The text format of Prometheus, 0.0.4.
    Prometheus,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// One export, with the labels of its series.
struct Series<'a> {
    labels: String,
    export: &'a ExportReport,
}

/// A metric family.
struct Family {
    /// Without the suffix of counters.
    name: &'static str,
    kind: Kind,
    help: &'static str,
    samples: fn(&mut Text, &Series<'_>),
}

/// The text so far.
struct Text {
    out: String,
    /// The family's name.
    name: String,
    format: MetricsFormat,
}

/// The families of exports, in the order in which they are written.
const FAMILIES: [Family; 6] = [
    Family {
        name: "ferry_clients",
        kind: Kind::Gauge,
        help: "Connected virtual machine monitors or 9P connections.",
        samples: |text, series| {
            if let Some(clients) = series.export.clients {
                text.sample("", series, &[], clients);
            }
        },
    },
    Family {
        name: "ferry_path",
        kind: Kind::Gauge,
        help: "1 for a path of requests or data that is used, 0 for a better one that is not.",
        samples: |text, series| {
            for path in series.export.path.iter().flat_map(|path| path.split(", data by ")) {
                text.sample("", series, &[("path", path)], 1);
            }
            for lack in &series.export.lacks {
                text.sample("", series, &[("path", &lack.path)], 0);
            }
        },
    },
    Family {
        name: "ferry_requests_in_flight",
        kind: Kind::Gauge,
        help: "Requests that have begun and not ended, by operation.",
        samples: |text, series| {
            for operation in &series.export.operations {
                text.sample("", series, &[("operation", &operation.name)], operation.in_flight);
            }
        },
    },
    Family {
        name: "ferry_request_data_bytes",
        kind: Kind::Counter,
        help: "Bytes of files and disks that requests have moved, by operation.",
        samples: |text, series| {
            for operation in series.export.operations.iter().filter(|operation| operation.bytes > 0) {
                text.sample("_total", series, &[("operation", &operation.name)], operation.bytes);
            }
        },
    },
    Family {
        name: "ferry_request_errors",
        kind: Kind::Counter,
        help: "Requests that have failed, by operation and error.",
        samples: |text, series| {
            for operation in &series.export.operations {
                for error in &operation.errors {
                    let labels = [("operation", operation.name.as_str()), ("errno", &error.errno)];
                    text.sample("_total", series, &labels, error.requests);
                }
            }
        },
    },
    Family {
        name: "ferry_request_duration_seconds",
        kind: Kind::Histogram,
        help: "The time from taking a request to its reply, by operation.",
        samples: |text, series| {
            series.export.operations.iter().for_each(|operation| text.histogram(series, operation));
        },
    },
];

/// What exports and their sources report as [`crate::UsageReport`]: the name there, which makes a counter if it ends in `_total`, and what it is.
const USAGE: [(&str, &str); 23] = [
    ("fids", "Fids of 9P clients."),
    ("connections", "Connections of 9P clients, or virtual machine monitors of a 9P device."),
    ("threads", "Threads that serve 9P clients."),
    (
        "buffered_bytes",
        "Bytes that are held for 9P clients: unfinished messages, unread replies, values of attributes.",
    ),
    ("system_calls_total", "System calls of the workers of a mount, without those inside the source."),
    ("notifications_total", "Notifications that a mount has sent to the kernel."),
    ("message_bytes_total", "Bytes of messages of a mount through /dev/fuse, with their headers."),
    ("invalid_requests_total", "Requests that could not be decoded, or are of an unknown type."),
    ("inodes", "Inodes that FUSE clients know."),
    ("open_files", "Files and directories that FUSE clients have open."),
    ("parked_locks", "Locks that clients wait for."),
    ("dax_window_bytes", "The length of the window that the front end has requested; 0: none."),
    ("dax_window_mapped_bytes", "Bytes of the window that are mapped."),
    ("ring_fallbacks_total", "Times that io_uring was not available, and a slower path was chosen."),
    ("restarts_total", "Times that a server has taken over the guests of the one before (--state)."),
    ("limit_waits_total", "Times that requests had to wait for their limit (--limit)."),
    ("snapshots", "Snapshots of containers, by kind."),
    ("layer_directories", "Committed layers of containers that are directories, and no images."),
    ("layer_mounts", "Layers of containers that are mounted."),
    ("store_bytes", "Bytes on disk of the store that all layers share."),
    ("image_fetched_bytes_total", "Bytes of objects of an image that were fetched."),
    ("image_verified_bytes_total", "Bytes of objects of an image that were verified."),
    ("image_deduplicated_bytes_total", "Bytes of objects of an image that the store had, and were not fetched."),
];

/// Returns the text of reports. With `with_pid` each series has the label `pid`: the series of several servers may be equal.
#[must_use]
pub fn metrics_text(reports: &[ServerReport], format: MetricsFormat, with_pid: bool) -> String {
    let mut text = Text { out: String::new(), name: String::new(), format };
    let pid = |report: &ServerReport| if with_pid { format!("pid=\"{}\"", report.pid) } else { String::new() };
    let series: Vec<_> = reports
        .iter()
        .flat_map(|report| report.shares.iter().map(move |share| (pid(report), share)))
        .flat_map(|(pid, share)| share.exports.iter().map(move |export| (pid.clone(), share, export)))
        .map(|(mut labels, share, export)| {
            let at = share.share.place(export.kind).unwrap_or_default();
            for (name, value) in [("source", share.share.source.as_str()), ("export", export.kind.name()), ("at", &at)]
            {
                push_label(&mut labels, name, value);
            }
            Series { labels, export }
        })
        .collect();
    text.header("ferry_build_info", Kind::Gauge, "The version of Ferry.");
    for (report, program) in reports.iter().filter_map(|report| Some((report, report.program.as_ref()?))) {
        let mut labels = pid(report);
        push_label(&mut labels, "version", program);
        let _ = writeln!(text.out, "ferry_build_info{{{labels}}} 1");
    }
    text.header("ferry_uptime_seconds", Kind::Gauge, "Seconds since the server began to serve.");
    for report in reports {
        let _ = writeln!(text.out, "ferry_uptime_seconds{} {}", braced(pid(report)), report.uptime_s);
    }
    if reports.iter().any(|report| report.descriptors.is_some()) {
        text.header("ferry_descriptors", Kind::Gauge, "Descriptors that the server has open.");
        for (report, count) in reports.iter().filter_map(|report| Some((report, report.descriptors?))) {
            let _ = writeln!(text.out, "ferry_descriptors{} {count}", braced(pid(report)));
        }
    }
    for Family { name, kind, help, samples } in FAMILIES {
        text.header(name, kind, help);
        series.iter().for_each(|one| samples(&mut text, one));
    }
    for (name, help) in USAGE {
        text.usage(&series, name, help);
    }
    if format == MetricsFormat::OpenMetrics {
        text.out.push_str("# EOF\n");
    }
    text.out
}

/// The labels of a sample, if any.
fn braced(labels: String) -> String {
    if labels.is_empty() { labels } else { format!("{{{labels}}}") }
}

fn push_label(labels: &mut String, name: &str, value: &str) {
    let comma = if labels.is_empty() { "" } else { "," };
    let _ = write!(labels, "{comma}{name}=\"{}\"", escaped(value));
}

/// A label's value. A terminal may show it, so control characters are escaped.
fn escaped(value: &str) -> Cow<'_, str> {
    let value = printable(value);
    match value.contains(['\\', '"']) {
        true => value.replace('\\', "\\\\").replace('"', "\\\"").into(),
        false => value,
    }
}

impl Text {
    fn header(&mut self, name: &str, kind: Kind, help: &str) {
        name.clone_into(&mut self.name);
        let suffix = if kind == Kind::Counter && self.format == MetricsFormat::Prometheus { "_total" } else { "" };
        let word = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let _ = writeln!(self.out, "# TYPE {name}{suffix} {word}");
        // Units are the last word of a name.
        if let (MetricsFormat::OpenMetrics, Some(unit)) =
            (self.format, ["bytes", "seconds"].into_iter().find(|unit| name.ends_with(&format!("_{unit}"))))
        {
            let _ = writeln!(self.out, "# UNIT {name} {unit}");
        }
        let _ = writeln!(self.out, "# HELP {name}{suffix} {help}");
    }

    fn sample(&mut self, suffix: &str, series: &Series<'_>, labels: &[(&str, &str)], value: u64) {
        let mut all = series.labels.clone();
        labels.iter().for_each(|(name, value)| push_label(&mut all, name, value));
        let _ = writeln!(self.out, "{}{suffix}{{{all}}} {value}", self.name);
    }

    /// Writes a family of usage counters, if any export reports it.
    fn usage(&mut self, series: &[Series<'_>], name: &str, help: &str) {
        let all = series.iter().flat_map(|one| one.export.usage.iter().map(move |usage| (one, usage)));
        let mut all = all.filter(|(_, usage)| usage.name == name).peekable();
        if all.peek().is_none() {
            return;
        }
        let (family, kind, suffix) = match name.strip_suffix("_total") {
            Some(family) => (family, Kind::Counter, "_total"),
            None => (name, Kind::Gauge, ""),
        };
        self.header(&format!("ferry_{family}"), kind, help);
        for (one, usage) in all {
            let kind = usage.kind.as_deref().map(|kind| ("kind", kind));
            self.sample(suffix, one, kind.as_slice(), usage.value);
        }
    }

    fn histogram(&mut self, series: &Series<'_>, operation: &OperationReport) {
        let name = operation.name.as_str();
        for bits in BUCKET_BITS {
            let end_ns = 1_u64 << bits;
            let count = cumulative(&operation.buckets, end_ns);
            self.sample("_bucket", series, &[("operation", name), ("le", &seconds(end_ns))], count);
        }
        let requests = operation.requests;
        self.sample("_bucket", series, &[("operation", name), ("le", "+Inf")], requests);
        self.sample("_count", series, &[("operation", name)], requests);
        let mut labels = series.labels.clone();
        push_label(&mut labels, "operation", name);
        let _ = writeln!(self.out, "{}_sum{{{labels}}} {}", self.name, seconds(operation.latency_ns));
    }
}

/// Requests with at most this latency, which is the end of a bucket.
fn cumulative(buckets: &[BucketReport], end_ns: u64) -> u64 {
    let within = buckets.iter().filter(|bucket| bucket.end_ns.is_some_and(|end| end <= end_ns));
    within.map(|bucket| bucket.requests).sum()
}

fn seconds(ns: u64) -> String {
    let (whole, part) = (ns / 1_000_000_000, format!("{:09}", ns % 1_000_000_000));
    let part = part.trim_end_matches('0');
    format!("{whole}.{}", if part.is_empty() { "0" } else { part })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{ErrorReport, ExportKind, ShareReport, ShareStatus, UsageReport};

    fn report(source: &str) -> ServerReport {
        let buckets = [(Some(512), 1), (Some(1280), 2), (None, 1)];
        let operation = OperationReport {
            name: "read".into(),
            requests: 4,
            in_flight: 1,
            bytes: 8192,
            latency_ns: 1_500_000_000,
            errors: vec![ErrorReport { errno: "EIO".into(), requests: 1 }],
            buckets: buckets.map(|(end_ns, requests)| BucketReport { end_ns, requests }).into(),
        };
        let export = ExportReport {
            kind: ExportKind::Ninep,
            clients: Some(2),
            operations: vec![operation],
            usage: vec![
                UsageReport { name: "fids".into(), value: 7, kind: None },
                UsageReport { name: "snapshots".into(), value: 3, kind: Some("view".into()) },
            ],
            ..ExportReport::default()
        };
        let share = ShareStatus { source: source.into(), ninep: Some("unix:/s".into()), ..ShareStatus::default() };
        let share = ShareReport { share, cache: None, limit: None, exports: vec![export] };
        let program = Some("0.0.1".into());
        ServerReport { version: 1, pid: 9, program, uptime_s: 3, descriptors: Some(12), shares: vec![share] }
    }

    #[test]
    fn a_report_becomes_series() {
        let text = metrics_text(&[report("/srv")], MetricsFormat::OpenMetrics, false);
        let labels = r#"source="/srv",export="9p",at="unix:/s""#;
        for line in [
            format!("ferry_clients{{{labels}}} 2"),
            format!(r#"ferry_requests_in_flight{{{labels},operation="read"}} 1"#),
            format!(r#"ferry_request_data_bytes_total{{{labels},operation="read"}} 8192"#),
            format!(r#"ferry_request_errors_total{{{labels},operation="read",errno="EIO"}} 1"#),
            format!(r#"ferry_request_duration_seconds_bucket{{{labels},operation="read",le="0.000000512"}} 1"#),
            format!(r#"ferry_request_duration_seconds_bucket{{{labels},operation="read",le="0.000001024"}} 1"#),
            format!(r#"ferry_request_duration_seconds_bucket{{{labels},operation="read",le="0.000002048"}} 3"#),
            format!(r#"ferry_request_duration_seconds_bucket{{{labels},operation="read",le="+Inf"}} 4"#),
            format!(r#"ferry_request_duration_seconds_sum{{{labels},operation="read"}} 1.5"#),
            format!("ferry_fids{{{labels}}} 7"),
            format!(r#"ferry_snapshots{{{labels},kind="view"}} 3"#),
            r#"ferry_build_info{version="0.0.1"} 1"#.into(),
            "ferry_uptime_seconds 3".into(),
            "ferry_descriptors 12".into(),
            "# TYPE ferry_request_errors counter".into(),
            "# UNIT ferry_request_data_bytes bytes".into(),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
        assert!(text.ends_with("# EOF\n"));
        let older = metrics_text(&[report("/srv")], MetricsFormat::Prometheus, true);
        assert!(older.contains("# TYPE ferry_request_errors_total counter\n") && !older.contains("# EOF"), "{older}");
        assert!(older.contains(r#"ferry_uptime_seconds{pid="9"} 3"#), "{older}");
        assert!(older.contains(r#"ferry_build_info{pid="9",version="0.0.1"} 1"#), "{older}");
    }

    #[test]
    fn names_cannot_end_a_label_or_reach_a_terminal() {
        let text = metrics_text(&[report("a\"} 1\nb\\\x1b[2J\u{202e}")], MetricsFormat::OpenMetrics, false);
        assert!(text.lines().all(|line| printable(line) == line), "{text:?}");
        assert!(text.contains(r#"source="a\"} 1\\nb\\\\u{1b}[2J\\u{202e}","#), "{text}");
        assert!(!text.lines().any(|line| line.starts_with('b')), "{text}");
    }
}
