//! `ferry status`: what runs, who uses it, and what it costs.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result};
use ferry_control::{ExportKind, ExportReport, ServerReport, ShareReport, printable, printable_json};
use serde::Serialize;

use crate::control::reports_of;
use crate::status;

/// The version of the JSON. It grows when a field changes its meaning or is removed.
const VERSION: u32 = 1;
/// The most child processes of a server that are looked at: a guardian for each mount, and a keeper.
const CHILDREN_MAX: usize = 1024;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// A process id, a mount point, the socket of a share or disk, its address for 9P, or a shared directory or file. Without one:
    /// all shares, mounts and disks of yours that run; for root, those of all users.
    #[arg(value_name = "TARGET")]
    target: Option<PathBuf>,

    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// The report in JSON.
#[derive(Debug, Serialize)]
struct Report {
    version: u32,
    servers: Vec<Server>,
}

/// A server, with what this host tells of its processes.
#[derive(Debug, Serialize)]
struct Server {
    pid: u32,
    user: u32,
    uptime_s: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    descriptors: Option<u64>,
    shares: Vec<ShareReport>,
}

/// Shows what runs. Returns the status to end with: not 0 if a server that runs does not report.
pub fn run(args: &Args) -> Result<u8> {
    let (found, outcome) = reports_of(args.target.as_deref())?;
    if found.is_empty() && outcome == status::DONE {
        eprintln!("ferry: no ferry share, mount or disk of yours is running");
    }
    let servers: Vec<_> = found.into_iter().map(|(user, report)| Server::new(user, report)).collect();
    let text = match args.json {
        true => printable_json(&serde_json::to_string(&Report { version: VERSION, servers })?) + "\n",
        false => servers.iter().map(described).collect(),
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        // A pager that was left early.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(outcome),
        result => result.context("cannot write to standard output").map(|()| outcome),
    }
}

impl Server {
    fn new(user: u32, report: ServerReport) -> Self {
        let ServerReport { pid, uptime_s, shares, .. } = report;
        let processes = processes(pid);
        let memory = processes.iter().filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/status")).ok());
        let memory: Vec<_> = memory.filter_map(|status| resident_bytes(&status)).collect();
        let count = |pid: &u32| fs::read_dir(format!("/proc/{pid}/fd")).map(|entries| entries.count() as u64);
        // Those of a process in another namespace may be hidden; a part of the sum would mislead.
        let descriptors = processes.iter().map(count).sum::<std::io::Result<u64>>().ok();
        let memory_bytes = (!memory.is_empty()).then(|| memory.iter().sum());
        Self { pid, user, uptime_s, memory_bytes, descriptors, shares }
    }
}

/// A server's process and its children: the server in its sandbox, and helpers.
fn processes(pid: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let children = children.split_whitespace().filter_map(|word| word.parse().ok());
    std::iter::once(pid).chain(children.take(CHILDREN_MAX)).collect()
}

/// The memory of a process that is in use, from its status (proc_pid_status(5)).
fn resident_bytes(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

/// A server in a line, and what it serves in others.
fn described(server: &Server) -> String {
    let mut text = format!("process {} of user {}, up {}", server.pid, server.user, duration(server.uptime_s));
    if let Some(bytes) = server.memory_bytes {
        let _ = write!(text, ", {} of memory", size(bytes));
    }
    if let Some(count) = server.descriptors {
        let _ = write!(text, ", {count} descriptors");
    }
    text.push('\n');
    server.shares.iter().for_each(|share| text += &described_share(share));
    text
}

fn described_share(report: &ShareReport) -> String {
    let share = &report.share;
    let read_only = if share.read_only { ", read-only" } else { "" };
    let cache = report.cache.as_deref().map(|cache| format!(", cache {}", printable(cache))).unwrap_or_default();
    let limit = report.limit.as_deref().map(|limit| format!(", limit {}", printable(limit))).unwrap_or_default();
    let mut text = format!("  {}{read_only}{cache}{limit}\n", printable(&share.source));
    for kind in ExportKind::ALL {
        let found = report.exports.iter().find(|export| export.kind == kind);
        // A descriptor is that of a share or of a disk, as its export says.
        let is_other = share.fd.is_some() && found.is_none() && matches!(kind, ExportKind::Virtiofs | ExportKind::Disk);
        let Some(place) = share.place(kind).filter(|_| !is_other) else { continue };
        let _ = write!(text, "    {} {}", kind.name(), printable(&place));
        text += &found.map_or_else(|| "\n".into(), described_export);
    }
    text
}

fn described_export(export: &ExportReport) -> String {
    let mut parts = Vec::new();
    parts.extend(export.clients.map(|count| format!("{count} {}", if count == 1 { "client" } else { "clients" })));
    parts.extend(export.path.as_deref().map(|path| format!("requests by {}", printable(path))));
    parts.extend(export.requests.map(|count| format!("{count} requests")));
    parts.extend(export.errors.filter(|count| *count > 0).map(|count| format!("{count} errors")));
    parts.extend(export.read_bytes.map(|bytes| format!("{} read", size(bytes))));
    parts.extend(export.written_bytes.map(|bytes| format!("{} written", size(bytes))));
    let mut text = if parts.is_empty() { "\n".into() } else { format!(": {}\n", parts.join(", ")) };
    for lack in &export.lacks {
        let _ = writeln!(text, "      not {}: {}", printable(&lack.path), printable(&lack.reason));
        if let Some(remedy) = &lack.remedy {
            let _ = writeln!(text, "      do: {}", printable(remedy));
        }
    }
    text
}

/// A number of bytes in the unit that suits it.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let power = (bytes.ilog2() / 10).min(4);
    // One decimal, cut.
    let tenths = u128::from(bytes) * 10 / (1_u128 << (10 * power));
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[power as usize - 1])
}

fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, ..) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_the_status_of_a_process() {
        assert_eq!(resident_bytes("Name:\tferry\nVmRSS:\t    1234 kB\nRssAnon:\t 1 kB\n"), Some(1234 << 10));
        for bad in [
            "",
            "VmRSS:",
            "VmRSS:\t12",
            "VmRSS:\t12 MB",
            "VmRSS:\t-1 kB",
            "VmRSS: 99999999999999999999 kB",
            "xVmRSS: 1 kB",
        ] {
            assert_eq!(resident_bytes(bad), None, "{bad:?}");
        }
        assert_eq!(resident_bytes(&format!("VmRSS:\t{} kB", u64::MAX)), None);
    }

    #[test]
    fn numbers_are_shown_in_units() {
        for (bytes, shown) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 10, "1.5 MiB"), (u64::MAX, "16777215.9 TiB")]
        {
            assert_eq!(size(bytes), shown);
        }
        for (seconds, shown) in [
            (0, "0 s"),
            (61, "1 min 1 s"),
            (3_661, "1 h 1 min"),
            (90_000, "1 d 1 h"),
            (u64::MAX, "213503982334601 d 7 h"),
        ] {
            assert_eq!(duration(seconds), shown);
        }
    }

    #[test]
    fn server_output_is_escaped_for_terminals() {
        let hostile = "\x1b[2J\u{9b}\u{202e}\nprocess 1";
        let json = serde_json::json!({
            "source": hostile, "mount": hostile, "9p": hostile, "virtiofs": hostile, "read_only": true, "cache": hostile,
            "limit": hostile,
            "exports": [{ "kind": "mount", "path": hostile, "requests": 1, "clients": 1, "read_bytes": 2,
                          "lacks": [{ "path": hostile, "reason": hostile, "remedy": hostile }] }],
        });
        let share: ShareReport = serde_json::from_value(json).expect("it is a share");
        let server =
            Server { pid: 1, user: 0, uptime_s: 1, memory_bytes: Some(1), descriptors: Some(1), shares: vec![share] };
        let text = described(&server);
        assert!(text.lines().all(|line| printable(line) == line), "{text:?}");
        assert_eq!(text.lines().count(), 7, "{text}");
        assert!(!text.lines().any(|line| line.starts_with("process 1\u{202e}")), "{text}");
    }
}
