//! The native driver's rows.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use ferry_driver::load::{self, Load, LoadTarget, Report};
use ferry_driver::measure::Counter;
use rustix::thread::CpuSet;

use crate::data::{NATIVE_BYTES, NATIVE_FILE};
use crate::line::Counts;
use crate::rows::Native;
use crate::stats;

/// How long one load may take beside its own time: connecting, preparing, counting.
const SLACK: Duration = Duration::from_secs(60);

/// Where and how a load runs.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The server's socket.
    pub socket: &'a Path,
    /// The CPU of the driver; `None`: any.
    pub cpu: Option<usize>,
    /// Whether the server has only one queue; it gets all requests in flight there.
    pub one_queue: bool,
}

/// Requests per second.
pub fn rate(native: Native, place: Place<'_>, seconds: f64) -> Result<f64> {
    let load = Load { seconds: Some(seconds), ..load(native, place) };
    let report = run(place.socket, place.cpu, load)?;
    Ok(report.requests_per_second)
}

/// All that is known of a load over several queues, with any CPU.
pub fn report(native: Native, socket: &Path, seconds: f64) -> Result<Report> {
    let place = Place { socket, cpu: None, one_queue: false };
    run(socket, None, Load { seconds: Some(seconds), ..load(native, place) })
}

/// What a request costs, in a run of its own. `sleep` makes the driver wait in the kernel, as a guest does.
pub fn counts(native: Native, place: Place<'_>, requests: u64, sleep: bool) -> Result<Counts> {
    costs(place.socket, place.cpu, &Load { sleep, ..load(native, place) }, requests)
}

/// What a request of a load costs the server, in a run of so many requests.
pub fn costs(socket: &Path, cpu: Option<usize>, load: &Load, requests: u64) -> Result<Counts> {
    let load = Load { requests: Some(requests), ..load.clone() };
    let counter = |counter, requests| Load { count_syscalls: Some((counter, requests)), ..load.clone() };
    // perf is cheap and needs rights; strace is slow and nearly always there.
    let report = run(socket, cpu, counter(Counter::Perf, requests))
        .or_else(|_| run(socket, cpu, counter(Counter::Strace, requests.min(2000))))
        .or_else(|_| run(socket, cpu, load.clone()))?;
    Ok(Counts {
        syscalls_per_request: report.syscalls.map(|calls| stats::round(calls.per_request)),
        wakeups_per_request: report.server.map(|server| stats::round(server.voluntary_switches_per_request)),
        calls_per_request: stats::round(report.calls_per_request),
        kicks_per_request: stats::round(report.kicks_per_request),
    })
}

fn load(native: Native, place: Place<'_>) -> Load {
    let (queues, depth) =
        if place.one_queue { (1, native.queues * native.depth) } else { (native.queues, native.depth) };
    Load {
        on: LoadTarget::File(NATIVE_FILE.into()),
        size: Some(NATIVE_BYTES),
        op: native.op,
        queues,
        queue_size: 1024,
        event_idx: true,
        indirect: true,
        packed: false,
        depth,
        block: 4096,
        random: true,
        seconds: None,
        requests: None,
        sleep: false,
        threads: None,
        verify: false,
        reattach: None,
        pid: None,
        count_syscalls: None,
    }
}

/// Runs a load on its CPU, in a thread that is waited for with a time limit.
pub fn run(socket: &Path, cpu: Option<usize>, load: Load) -> Result<Report> {
    let socket = socket.to_owned();
    let timeout = SLACK + Duration::from_secs_f64(load.seconds.unwrap_or(0.0));
    let (to_report, report) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let pinned = cpu.map_or(Ok(()), |cpu| {
            let mut cpus = CpuSet::new();
            cpus.set(cpu);
            rustix::thread::sched_setaffinity(None, &cpus).context("cannot choose the driver's CPU")
        });
        let result = pinned.and_then(|()| load::run(&socket, &load).map_err(|error| anyhow!("the driver: {error}")));
        let _ = to_report.send(result);
    });
    let report = report.recv_timeout(timeout).map_err(|_| anyhow!("the driver did not end in time"))??;
    if report.errors > 0 {
        bail!("{} wrong answers, the first: {}", report.errors, report.first_error.unwrap_or_default());
    }
    Ok(report)
}
