//! The results of a load, as one JSON object.

use std::collections::BTreeMap;

use serde::Serialize;

use super::worker::Tally;
use super::{Load, LoadTarget, Op};
use crate::measure::{Counter, ResourceUsage, Syscalls, ThreadUse};

/// The result of a load.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The operation.
    pub op: Op,
    /// The target: `file` or `disk`.
    pub on: &'static str,
    /// The number of request queues.
    pub queues: usize,
    /// The number of requests in flight per queue.
    pub depth: usize,
    /// The size of a READ or WRITE in bytes.
    pub block: usize,
    /// `random` or `sequential`.
    pub pattern: &'static str,
    /// The driver's way to wait: `poll` or `sleep`.
    pub wait: &'static str,
    /// Whether data was checked.
    pub verify: bool,
    /// The number of threads of the driver.
    pub threads: usize,
    /// The duration.
    pub seconds: f64,
    /// The number of times that the server was lost and another one continued.
    pub reattached: u32,
    /// The number of completed requests.
    pub requests: u64,
    /// The number of wrong replies among them.
    pub errors: u64,
    /// The first wrong reply.
    pub first_error: Option<String>,
    /// Requests per second.
    pub requests_per_second: f64,
    /// Data per second; 0 for operations without data.
    pub mib_per_second: f64,
    /// The latencies from sending a request to receiving its reply.
    pub latency_us: Latency,
    /// Kicks per request.
    pub kicks_per_request: f64,
    /// Interrupts (calls) of the server per request.
    pub calls_per_request: f64,
    /// The driver's own time per request for checks and sending, without polling and kicks.
    pub driver_ns_per_request: f64,
    /// The driver's time in kicks per request.
    pub driver_kick_ns_per_request: f64,
    /// With WRITE and `verify`: the number of blocks with the expected data afterwards.
    pub blocks_written: Option<u64>,
    /// The cost to the server, if its process is known.
    pub server: Option<ServerReport>,
    /// The server's system calls, if they were counted.
    pub syscalls: Option<SyscallReport>,
}

/// Latencies in microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Latency {
    /// Arithmetic mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The maximum.
    pub max: f64,
}

/// The cost of a load to the server.
#[derive(Debug, Clone, Serialize)]
pub struct ServerReport {
    /// CPU time of all threads.
    pub cpu_seconds: f64,
    /// The same per request, in microseconds.
    pub cpu_us_per_request: f64,
    /// The number of voluntary context switches.
    pub voluntary_switches: u64,
    /// The same per request.
    pub voluntary_switches_per_request: f64,
    /// The number of involuntary context switches.
    pub involuntary_switches: u64,
    /// Per thread.
    pub threads: Vec<ThreadUse>,
}

/// The server's system calls in a separate run.
#[derive(Debug, Clone, Serialize)]
pub struct SyscallReport {
    /// The counter: `perf` or `strace`.
    pub counter: Counter,
    /// The number of requests of that run.
    pub requests: u64,
    /// The total number of system calls.
    pub total: u64,
    /// System calls per request.
    pub per_request: f64,
    /// By thread (perf) or by name (strace).
    pub by: BTreeMap<String, u64>,
}

impl Report {
    pub(super) fn new(
        load: &Load,
        tally: &Tally,
        used: Option<ResourceUsage>,
        syscalls: Option<(Counter, Syscalls, u64)>,
        blocks_written: Option<u64>,
    ) -> Self {
        let seconds = tally.elapsed.as_secs_f64();
        let requests_per_second = ratio(tally.requests, seconds);
        let has_data = matches!(load.op, Op::Read | Op::Write);
        let block = if has_data { load.block } else { 0 };
        let each = |count: u64| ratio(count, float(tally.requests));
        Self {
            op: load.op,
            on: if load.on == LoadTarget::Disk { "disk" } else { "file" },
            queues: load.queues,
            depth: load.depth,
            block,
            pattern: if load.random { "random" } else { "sequential" },
            wait: if load.sleep { "sleep" } else { "poll" },
            verify: load.verify,
            threads: load.threads(),
            seconds,
            reattached: tally.reattached,
            requests: tally.requests,
            errors: tally.errors,
            first_error: tally.first_error.clone(),
            requests_per_second,
            mib_per_second: requests_per_second * float(block as u64) / float(1 << 20),
            latency_us: Latency::new(tally),
            kicks_per_request: each(tally.counters.kicks),
            calls_per_request: each(tally.counters.calls),
            driver_ns_per_request: each(tally.busy_ns),
            driver_kick_ns_per_request: each(tally.kick_ns),
            blocks_written,
            server: used.map(|used| ServerReport::new(used, tally.requests)),
            syscalls: syscalls.map(|(counter, counts, requests)| SyscallReport {
                counter,
                requests,
                total: counts.total,
                per_request: ratio(counts.total, float(requests)),
                by: counts.by,
            }),
        }
    }
}

impl Latency {
    fn new(tally: &Tally) -> Self {
        let us = |ns: u64| float(ns) / 1000.0;
        let latency = &tally.latency_ns;
        Self {
            mean: latency.mean() / 1000.0,
            p50: us(latency.value_at_quantile(0.5)),
            p99: us(latency.value_at_quantile(0.99)),
            max: us(latency.max()),
        }
    }
}

impl ServerReport {
    fn new(used: ResourceUsage, requests: u64) -> Self {
        let each = |value: f64| value / float(requests.max(1));
        Self {
            cpu_seconds: used.cpu_seconds,
            cpu_us_per_request: each(used.cpu_seconds * 1e6),
            voluntary_switches: used.voluntary_switches,
            voluntary_switches_per_request: each(float(used.voluntary_switches)),
            involuntary_switches: used.involuntary_switches,
            threads: used.threads,
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "a printed figure needs no more than 53 bits")]
fn float(count: u64) -> f64 {
    count as f64
}

fn ratio(count: u64, by: f64) -> f64 {
    if by > 0.0 { float(count) / by } else { 0.0 }
}
