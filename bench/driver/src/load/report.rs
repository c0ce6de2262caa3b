//! The results of a load, as one JSON object.

use std::collections::BTreeMap;

use serde::Serialize;

use super::worker::Tally;
use super::{Load, LoadTarget, Op};
use crate::measure::{Counter, ResourceUsage, Syscalls, ThreadUse};

/// What a load found.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// What was asked.
    pub op: Op,
    /// Of a `file` or a `disk`.
    pub on: &'static str,
    /// Request queues.
    pub queues: usize,
    /// Requests in flight per queue.
    pub depth: usize,
    /// Bytes per READ or WRITE.
    pub block: usize,
    /// `random` or `sequential`.
    pub pattern: &'static str,
    /// How the driver waited: `poll` or `sleep`.
    pub wait: &'static str,
    /// Whether data was checked.
    pub verify: bool,
    /// Threads of the driver.
    pub threads: usize,
    /// How long it took.
    pub seconds: f64,
    /// How often the server was lost and another one went on.
    pub reattached: u32,
    /// Requests answered.
    pub requests: u64,
    /// Those of them whose answer was wrong.
    pub errors: u64,
    /// The first wrong answer.
    pub first_error: Option<String>,
    /// Requests per second.
    pub requests_per_second: f64,
    /// Data per second; 0 where there is none.
    pub mib_per_second: f64,
    /// From sending to seeing the answer.
    pub latency_us: Latency,
    /// Kicks that the server asked for.
    pub kicks_per_request: f64,
    /// Calls that the server made.
    pub calls_per_request: f64,
    /// Time of the driver itself per request: checking and sending, without polling and kicking.
    pub driver_ns_per_request: f64,
    /// Time of the driver in kicks, per request.
    pub driver_kick_ns_per_request: f64,
    /// With WRITE and `verify`: blocks that were found written afterwards.
    pub blocks_written: Option<u64>,
    /// What it cost the server, where its process is known.
    pub server: Option<ServerReport>,
    /// The server's system calls, where they were to be counted.
    pub syscalls: Option<SyscallReport>,
}

/// Latencies in microseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Latency {
    /// Arithmetic mean.
    pub mean: f64,
    /// Half of the requests took no longer.
    pub p50: f64,
    /// 99 of 100 took no longer.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

/// What a load cost the server.
#[derive(Debug, Clone, Serialize)]
pub struct ServerReport {
    /// CPU time of all threads.
    pub cpu_seconds: f64,
    /// The same per request, in microseconds.
    pub cpu_us_per_request: f64,
    /// How often threads went to sleep.
    pub voluntary_switches: u64,
    /// The same per request.
    pub voluntary_switches_per_request: f64,
    /// How often threads were made to yield the CPU.
    pub involuntary_switches: u64,
    /// Thread by thread.
    pub threads: Vec<ThreadUse>,
}

/// System calls of the server, in a run of their own.
#[derive(Debug, Clone, Serialize)]
pub struct SyscallReport {
    /// What counted them.
    pub counter: Counter,
    /// Requests of that run.
    pub requests: u64,
    /// System calls in all.
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

#[allow(clippy::cast_precision_loss, reason = "a figure to print; 53 bits are more than it deserves")]
fn float(count: u64) -> f64 {
    count as f64
}

fn ratio(count: u64, by: f64) -> f64 {
    if by > 0.0 { float(count) / by } else { 0.0 }
}
