//! Load at full speed, and what it costs.
//!
//! The requests are built once, with their descriptors; from one round to the next only `unique` and the offset are
//! rewritten. A thread drives one queue or several, by polling their used rings or by sleeping until a call comes.

mod file;
mod pattern;
mod report;
mod slots;
mod worker;

use std::path::Path;
use std::time::Duration;

use ferry_wire::fuse::abi::{AttrOut, EntryOut, GetattrIn, Opcode, ReadIn, WriteIn, WriteOut};
use serde::Serialize;
use zerocopy::IntoBytes;

use crate::measure::{Counter, Counting, Snapshot, Syscalls};
use crate::session::{Caller, header};
use crate::{Config, Driver, Error, ROOT, Result};
use file::Target;
use pattern::Cursor;
pub use report::{Latency, Report, ServerReport, SyscallReport};
use slots::{Data, Template};
use worker::{Lane, Orders, Tally};

/// Guest memory per request, beside its data: header, arguments, reply, table, and what rounding wastes.
const SLOT_BYTES: usize = 1024;
/// Guest memory for rings, per queue, and for what comes before and after the load.
const OTHER_BYTES: usize = 4 << 20;

/// What is asked of the server.
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
    /// The file, by its name in the root of the share. It is made if it does not exist.
    pub file: String,
    /// Its size; otherwise the size that it has.
    pub size: Option<u64>,
    /// What is asked.
    pub op: Op,
    /// Request queues to load.
    pub queues: usize,
    /// Entries of each queue.
    pub queue_size: u16,
    /// Use the event index.
    pub event_idx: bool,
    /// Use indirect descriptors.
    pub indirect: bool,
    /// Use packed rings.
    pub packed: bool,
    /// Requests in flight per queue.
    pub depth: usize,
    /// Bytes per READ or WRITE.
    pub block: usize,
    /// Random offsets rather than a walk.
    pub random: bool,
    /// Stop after so many seconds.
    pub seconds: Option<f64>,
    /// Stop after so many requests in all.
    pub requests: Option<u64>,
    /// Wait for calls in the kernel rather than polling the used ring.
    pub sleep: bool,
    /// Threads of the driver; otherwise one per queue, but not more than there are CPUs.
    pub threads: Option<usize>,
    /// Write a pattern first, and check what is read; with WRITE, read everything back afterwards.
    pub verify: bool,
    /// The server's process; otherwise the one that listens at the socket.
    pub pid: Option<u32>,
    /// Count the server's system calls, in a run of its own with so many requests.
    pub count_syscalls: Option<(Counter, u64)>,
}

impl Load {
    fn config(&self) -> Config {
        let slot = self.block.next_multiple_of(4096) + SLOT_BYTES;
        Config {
            queues: self.queues,
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

    /// The request to repeat.
    fn template(&self, target: Target) -> Result<Template> {
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
                let name = [self.file.as_bytes(), b"\0"].concat();
                (Opcode::Lookup, ROOT, name, size_of::<EntryOut>(), Data::None)
            }
        };
        let behind = args.len() + if let Data::Out(bytes) = data { bytes } else { 0 };
        let header = header(opcode.as_raw(), 0, node, behind, Caller { uid: 0, gid: 0, pid: 1 });
        Ok(Template { request: [header.as_bytes(), &args].concat(), reply_args, data })
    }

    fn orders(&self, template: Template, seconds: Option<f64>, requests: Option<u64>, stall: Duration) -> Orders {
        Orders {
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

/// Runs a load against the server that listens at `path`.
///
/// # Errors
/// When the connection, the preparation or the run fails. Error replies are counted in the report instead.
pub fn run(path: &Path, load: &Load) -> Result<Report> {
    let mut driver = Driver::connect(path, load.config())?;
    let target = file::prepare(&mut driver, load)?;
    let template = load.template(target)?;
    let orders = load.orders(template, load.seconds, load.requests, driver.config().timeout);
    let pid = load.pid.or_else(|| driver.peer());

    let mut lanes = build(&mut driver, load, &orders, target)?;
    let before = pid.and_then(|pid| Snapshot::take(pid).ok());
    let tally = drive(&mut lanes, load, &orders)?;
    let after = pid.and_then(|pid| Snapshot::take(pid).ok());
    let used = before.zip(after).map(|(before, after)| after.since(&before));
    let syscalls = match (load.count_syscalls, pid) {
        (Some((counter, requests)), Some(pid)) => Some(count(&mut lanes, load, &orders, pid, counter, requests)?),
        (Some(_), None) => return Err(Error::NotOffered("its process number")),
        (None, _) => None,
    };
    drop(lanes);
    let written = match (load.op, load.verify) {
        (Op::Write, true) => Some(file::check_written(&mut driver, load, target)?),
        _ => None,
    };
    Ok(Report::new(load, &tally, used, syscalls, written))
}

fn build<'a>(driver: &'a mut Driver, load: &Load, orders: &Orders, target: Target) -> Result<Vec<Lane<'a>>> {
    let queues = driver.request_queues().iter_mut().enumerate();
    let lane = |(index, queue)| {
        Lane::new(queue, orders, Cursor::new(target.size, load.block as u64, load.random, index, load.queues))
    };
    queues.map(lane).collect()
}

/// Runs all lanes on as many threads as asked for.
fn drive(lanes: &mut [Lane<'_>], load: &Load, orders: &Orders) -> Result<Tally> {
    let per_thread = lanes.len().div_ceil(load.threads());
    let run = |lanes| worker::run(lanes, orders);
    let run = &run;
    let results: Vec<Result<Tally>> = std::thread::scope(|scope| {
        let spawn = |lanes| scope.spawn(move || run(lanes));
        let threads: Vec<_> = lanes.chunks_mut(per_thread).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("workers do not panic")).collect()
    });
    let mut tally = Tally::new()?;
    for result in results {
        tally.add(&result?);
    }
    Ok(tally)
}

/// The same load again for a fixed number of requests, with the server's system calls counted.
fn count(
    lanes: &mut [Lane<'_>],
    load: &Load,
    orders: &Orders,
    pid: u32,
    counter: Counter,
    requests: u64,
) -> Result<(Counter, Syscalls, u64)> {
    let orders = Orders { seconds: None, requests: Some(requests.div_ceil(load.queues as u64)), ..orders.clone() };
    let counting = Counting::start(pid, counter)?;
    let tally = drive(lanes, load, &orders)?;
    Ok((counter, counting.finish()?, tally.requests))
}
