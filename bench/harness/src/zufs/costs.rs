//! What noise does not touch: system calls, switches and FUSE requests for each request of a program.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use ferry_driver::measure::{Counter, Counting, Snapshot};

use super::fio::{self, Job, Length};
use super::load::Loads;
use super::systems::System;
use crate::line::Costs;
use crate::mounted::Mounted;
use crate::stats;

/// How long a counting run may take.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Counts over one job of so many requests in each thread.
pub fn count(system: System, mounted: &Mounted, loads: &Loads, job: Job, requests: u64) -> Result<Costs> {
    let job = Job { length: Length::Requests(requests), ..job };
    let before = mounted.pid().map(Snapshot::take).transpose()?;
    let counting = mounted.pid().map(start).transpose()?;
    let output = loads.run(loads.fio(job, mounted.dir()), TIMEOUT)?;
    let calls = counting.map(Counting::finish).transpose().context("system calls")?;
    let after = mounted.pid().map(Snapshot::take).transpose()?;
    let found = fio::parse(job, &output)?;
    let each = |count: f64| stats::round(count / found.requests);
    let switches = before.zip(after).map_or(0, |(before, after)| {
        let used = after.since(&before);
        used.voluntary_switches + used.involuntary_switches
    });
    Ok(Costs {
        syscalls_per_request: each(as_f64(calls.map_or(0, |calls| calls.total))),
        server_switches_per_request: each(as_f64(switches)),
        program_switches_per_request: each(found.switches),
        fuse_requests_per_request: fuse_requests(loads, job, mounted).map(each),
        copies_per_byte: system.copies_per_byte().into(),
    })
}

/// perf is cheap and needs rights; strace is slow and nearly always there.
fn start(pid: u32) -> Result<Counting> {
    Counting::start(pid, Counter::Perf)
        .or_else(|_| Counting::start(pid, Counter::Strace))
        .context("cannot count system calls with perf or strace")
}

/// How many requests the kernel sent to FUSE servers for the job, in a run of its own; nothing where perf cannot tell.
/// A request is sent by the thread that waits for it, so perf need only follow fio.
fn fuse_requests(loads: &Loads, job: Job, mounted: &Mounted) -> Option<f64> {
    let fio = loads.fio(job, mounted.dir());
    let said = loads.directory.join("perf.out");
    let mut perf = Command::new("perf");
    perf.args(["stat", "-x,", "-e", "fuse:fuse_request_send", "-o"]).arg(&said).arg("--");
    perf.arg(fio.get_program()).args(fio.get_args()).current_dir(&loads.directory).stdin(Stdio::null());
    loads.run(perf, TIMEOUT).ok()?;
    parse_perf(&std::fs::read_to_string(said).ok()?)
}

fn parse_perf(said: &str) -> Option<f64> {
    let line = said.lines().find(|line| line.contains("fuse:fuse_request_send"))?;
    line.split(',').next()?.parse().ok()
}

#[allow(clippy::cast_precision_loss)] // Counts of one run are far below 2^52.
fn as_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perf_output_is_parsed() {
        assert_eq!(parse_perf("# started\n\n20004,,fuse:fuse_request_send,100,100.00,,\n"), Some(20004.0));
        assert_eq!(parse_perf("<not supported>,,fuse:fuse_request_send,0,100.00,,\n"), None);
        assert_eq!(parse_perf(""), None);
    }
}
