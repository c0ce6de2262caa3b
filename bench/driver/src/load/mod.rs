//! Load at full speed, and its cost to the server.
//!
//! The requests are built once, with their descriptors; each round only rewrites `unique` and the offset. A thread
//! drives one or several queues, by polling their used rings or by sleeping until a call.

mod disk;
mod file;
mod ledger;
mod pattern;
mod report;
mod slots;
mod worker;

use std::path::Path;
use std::time::{Duration, Instant};

use ferry_wire::fuse::abi::{AttrOut, EntryOut, GetattrIn, Opcode, ReadIn, WriteIn, WriteOut};
use serde::Serialize;
use zerocopy::IntoBytes;

use crate::measure::{Counter, Counting, Snapshot, Syscalls};
use crate::session::{Caller, header};
use crate::{Config, Driver, Error, Queue, ROOT, Result};
use file::Target;
use ledger::Ledger;
use pattern::Cursor;
pub use report::{Latency, Report, ServerReport, SyscallReport};
use slots::{Data, RequestProtocol, Template};
use worker::{QueueLoad, Tally, WorkerTask};

/// Guest memory in bytes per request without its data: header, arguments, reply, table, and rounding.
const SLOT_BYTES: usize = 1024;
/// Guest memory in bytes per queue for rings, and for requests before and after the load.
const OTHER_BYTES: usize = 4 << 20;
/// The pause before the next attempt if a server is lost during a takeover.
const REATTACH_PAUSE: Duration = Duration::from_millis(10);

/// What a load works on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadTarget {
    /// A file in the root of a share, by its name. It is created if it does not exist.
    File(String),
    /// A disk. With [`Load::verify`] its data is overwritten, and no block is in flight twice.
    Disk,
}

/// The operation of a load's requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// READ at changing offsets.
    Read,
    /// WRITE at changing offsets.
    Write,
    /// GETATTR of the file.
    Getattr,
    /// LOOKUP of the file's name.
    Lookup,
}

/// A load.
#[derive(Debug, Clone)]
pub struct Load {
    /// The target.
    pub on: LoadTarget,
    /// The size in bytes of the file, or of the used part of the disk; `None`: its current size.
    pub size: Option<u64>,
    /// The operation.
    pub op: Op,
    /// The number of request queues.
    pub queues: usize,
    /// The number of entries of each queue.
    pub queue_size: u16,
    /// Whether to use the event index.
    pub event_idx: bool,
    /// Whether to use indirect descriptors.
    pub indirect: bool,
    /// Whether to use packed rings.
    pub packed: bool,
    /// The number of requests in flight per queue.
    pub depth: usize,
    /// The size of a READ or WRITE in bytes.
    pub block: usize,
    /// Whether offsets are random; otherwise they are sequential.
    pub random: bool,
    /// The duration after which to stop, in seconds.
    pub seconds: Option<f64>,
    /// The total number of requests after which to stop.
    pub requests: Option<u64>,
    /// Whether to sleep until the server signals, instead of polling the used ring.
    pub sleep: bool,
    /// The number of threads; `None`: one per queue, at most one per CPU.
    pub threads: Option<usize>,
    /// Whether to write a pattern first and check read data; with WRITE, everything is read back afterwards.
    pub verify: bool,
    /// The maximum wait for another server after a loss. The load then continues with the requests in flight, which the server must
    /// track. `None`: a loss is an error.
    pub reattach: Option<Duration>,
    /// The server's process id; `None`: the process that listens on the socket.
    pub pid: Option<u32>,
    /// How to count the server's system calls, in a separate run with this many requests.
    pub count_syscalls: Option<(Counter, u64)>,
}

impl Load {
    fn config(&self) -> Config {
        let slot = self.block.next_multiple_of(4096) + SLOT_BYTES;
        let disk = self.on == LoadTarget::Disk;
        Config {
            queues: self.queues,
            first_queues: usize::from(!disk),
            optional_features: if disk { disk::features() } else { 0 },
            inflight: self.reattach.is_some(),
            queue_size: self.queue_size,
            memory_bytes: self.queues * (self.depth * slot + (1 << 20)) + OTHER_BYTES,
            event_idx: self.event_idx,
            indirect: self.indirect,
            packed: self.packed,
            ..Config::default()
        }
    }

    fn threads(&self) -> usize {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        self.threads.unwrap_or(cpus).clamp(1, self.queues)
    }

    /// The request to a file, which is repeated.
    fn template(&self, name: &str, target: Target) -> Result<Template> {
        let size = u32::try_from(self.block).map_err(|_| Error::Memory(self.block))?;
        let (node, fh) = (target.node, target.fh);
        let (opcode, node, args, reply_args, data) = match self.op {
            Op::Read => {
                let args = ReadIn { fh, size, ..ReadIn::ZERO }.as_bytes().to_vec();
                (Opcode::Read, node, args, 0, Data::In(self.block))
            }
            Op::Write => {
                let args = WriteIn { fh, size, ..WriteIn::ZERO }.as_bytes().to_vec();
                (Opcode::Write, node, args, size_of::<WriteOut>(), Data::Out(self.block))
            }
            Op::Getattr => {
                (Opcode::Getattr, node, GetattrIn::ZERO.as_bytes().to_vec(), size_of::<AttrOut>(), Data::None)
            }
            Op::Lookup => {
                let name = [name.as_bytes(), b"\0"].concat();
                (Opcode::Lookup, ROOT, name, size_of::<EntryOut>(), Data::None)
            }
        };
        let behind = args.len() + if let Data::Out(bytes) = data { bytes } else { 0 };
        let header = header(opcode.as_raw(), 0, node, behind, Caller { uid: 0, gid: 0, pid: 1 });
        Ok(Template { form: RequestProtocol::Fuse, request: [header.as_bytes(), &args].concat(), reply_args, data })
    }

    fn orders(&self, template: Template, seconds: Option<f64>, requests: Option<u64>, stall: Duration) -> WorkerTask {
        WorkerTask {
            template,
            depth: self.depth,
            sleep: self.sleep,
            verify: self.verify,
            requests: requests.map(|all| all.div_ceil(self.queues as u64)),
            seconds,
            stall,
        }
    }
}

/// An open target.
enum Ready {
    File(Target),
    Disk,
}

/// Runs a load against the server that listens at `path`.
///
/// # Errors
/// The connection, the preparation or the run fails, or written data is missing afterwards. Error replies are counted in the
/// report instead.
pub fn run(path: &Path, load: &Load) -> Result<Report> {
    let mut driver = Driver::connect(path, load.config())?;
    let (ready, size, template) = match &load.on {
        LoadTarget::File(name) => {
            let target = file::prepare(&mut driver, load, name)?;
            (Ready::File(target), target.size, load.template(name, target)?)
        }
        LoadTarget::Disk => {
            let template = disk::template(load)?;
            (Ready::Disk, disk::prepare(&mut driver, load)?, template)
        }
    };
    let orders = load.orders(template, load.seconds, load.requests, driver.config().timeout);
    let pid = load.pid.or_else(|| driver.peer());

    let mut lanes = build(driver.request_queues(), load, &orders, size)?;
    let before = pid.and_then(|pid| Snapshot::take(pid).ok());
    let tally = drive(&mut driver, &mut lanes, load, &orders)?;
    let after = pid.and_then(|pid| Snapshot::take(pid).ok());
    let used = before.zip(after).map(|(before, after)| after.since(&before));
    let syscalls = match (load.count_syscalls, pid) {
        (Some((counter, requests)), Some(pid)) => {
            Some(count(&mut driver, &mut lanes, load, &orders, pid, counter, requests)?)
        }
        (Some(_), None) => return Err(Error::NotOffered("its process number")),
        (None, _) => None,
    };
    let written = match (ready, load.op, load.verify) {
        (Ready::File(target), Op::Write, true) => Some(file::check_written(&mut driver, load, target)?),
        (Ready::Disk, _, true) => Some(disk::check(&mut driver, lanes.iter().filter_map(QueueLoad::ledger))?),
        _ => None,
    };
    Ok(Report::new(load, &tally, used, syscalls, written))
}

fn build(queues: &mut [Queue], load: &Load, orders: &WorkerTask, size: u64) -> Result<Vec<QueueLoad>> {
    let lane = |(index, queue)| {
        if load.on == LoadTarget::Disk && load.verify {
            let ledger = Ledger::new(size, load.block as u64, index, load.queues);
            let cursor = ledger.cursor(load.random, index);
            return QueueLoad::new(queue, orders, cursor, Some(ledger));
        }
        let cursor = Cursor::new(size, load.block as u64, load.random, index, load.queues);
        QueueLoad::new(queue, orders, cursor, None)
    };
    queues.iter_mut().enumerate().map(lane).collect()
}

/// Runs all lanes on the configured number of threads, with further servers if the load survives losses.
fn drive(driver: &mut Driver, lanes: &mut [QueueLoad], load: &Load, orders: &WorkerTask) -> Result<Tally> {
    let mut tally = Tally::new()?;
    let start = Instant::now();
    for (queue, lane) in driver.request_queues().iter_mut().zip(lanes.iter_mut()) {
        lane.begin(queue, orders);
    }
    loop {
        match (turn(driver.request_queues(), lanes, load, orders, start, &mut tally), load.reattach) {
            (Ok(()), _) => break,
            (Err(Error::Disconnected), Some(within)) => reattach(driver, within)?,
            (Err(error), _) => return Err(error),
        }
        tally.reattached += 1;
    }
    tally.elapsed = start.elapsed();
    for queue in driver.request_queues() {
        let counters = queue.counters();
        tally.counters.kicks += counters.kicks;
        tally.counters.calls += counters.calls;
    }
    Ok(tally)
}

/// Drives all lanes until they are done or the server is lost.
fn turn(
    queues: &mut [Queue],
    lanes: &mut [QueueLoad],
    load: &Load,
    orders: &WorkerTask,
    start: Instant,
    tally: &mut Tally,
) -> Result<()> {
    let per_thread = lanes.len().div_ceil(load.threads());
    let results: Vec<Result<(Tally, Result<()>)>> = std::thread::scope(|scope| {
        let spawn = |(queues, lanes)| {
            scope.spawn(move || {
                let mut found = Tally::new()?;
                let end = worker::run(queues, lanes, orders, start, &mut found);
                Ok((found, end))
            })
        };
        let parts = queues.chunks_mut(per_thread).zip(lanes.chunks_mut(per_thread));
        let threads: Vec<_> = parts.map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("workers do not panic")).collect()
    });
    let mut ends = Vec::new();
    for result in results {
        let (found, end) = result?;
        tally.add(&found);
        ends.push(end);
    }
    // Another error is more precise than the loss of the server.
    let errors = ends.into_iter().filter_map(Result::err);
    errors.max_by_key(|error| !matches!(error, Error::Disconnected)).map_or(Ok(()), Err)
}

/// Waits for the next server and continues with it; it may be lost again during the takeover.
fn reattach(driver: &mut Driver, within: Duration) -> Result<()> {
    let end = Instant::now() + within;
    loop {
        match driver.reattach() {
            Err(Error::Vhost { .. } | Error::Connect { .. }) if Instant::now() < end => {
                std::thread::sleep(REATTACH_PAUSE);
            }
            result => return result,
        }
    }
}

/// Repeats the load for a fixed number of requests, and counts the server's system calls.
fn count(
    driver: &mut Driver,
    lanes: &mut [QueueLoad],
    load: &Load,
    orders: &WorkerTask,
    pid: u32,
    counter: Counter,
    requests: u64,
) -> Result<(Counter, Syscalls, u64)> {
    let orders = WorkerTask { seconds: None, requests: Some(requests.div_ceil(load.queues as u64)), ..orders.clone() };
    let counting = Counting::start(pid, counter)?;
    let tally = drive(driver, lanes, load, &orders)?;
    Ok((counter, counting.finish()?, tally.requests))
}
