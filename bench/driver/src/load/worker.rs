//! The loop that drives load.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::ledger::Ledger;
use super::pattern::{self, Cursor};
use super::slots::{Data, Slot, Template};
use crate::queue::Counters;
use crate::{Error, Queue, Result};

/// Polls of idle queues before the CPU is offered to others.
const POLLS_BEFORE_YIELD: u32 = 500;
/// Polls of idle queues between two looks at the clock and the connection.
const POLLS_BEFORE_CHECK: u32 = 1 << 14;
/// How long a sleeping worker waits before it looks whether the server is still there.
const SLEEP_MS: i32 = 200;
/// The longest latency that is recorded exactly.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// What a worker does.
#[derive(Debug, Clone)]
pub(super) struct WorkerTask {
    pub(super) template: Template,
    pub(super) depth: usize,
    pub(super) sleep: bool,
    /// Compare what is read with the pattern; write the pattern of the place.
    pub(super) verify: bool,
    /// Per queue.
    pub(super) requests: Option<u64>,
    pub(super) seconds: Option<f64>,
    pub(super) stall: Duration,
}

/// What a worker found.
#[derive(Debug, Clone)]
pub(super) struct Tally {
    pub(super) requests: u64,
    pub(super) errors: u64,
    pub(super) first_error: Option<String>,
    pub(super) counters: Counters,
    pub(super) elapsed: Duration,
    /// How often the worker reconnected to a new server.
    pub(super) reattached: u32,
    /// Time spent on requests: neither polling idle queues nor kicking.
    pub(super) busy_ns: u64,
    /// Time spent in kicks.
    pub(super) kick_ns: u64,
    pub(super) latency_ns: Histogram<u64>,
}

impl Tally {
    pub(super) fn new() -> Result<Self> {
        let latency_ns = Histogram::new_with_max(LATENCY_NS_MAX, 3)
            .map_err(|error| Error::BadReply(format!("cannot make a histogram: {error}")))?;
        Ok(Self {
            requests: 0,
            errors: 0,
            first_error: None,
            counters: Counters::default(),
            elapsed: Duration::ZERO,
            reattached: 0,
            busy_ns: 0,
            kick_ns: 0,
            latency_ns,
        })
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or_else(|| other.first_error.clone());
        self.busy_ns += other.busy_ns;
        self.kick_ns += other.kick_ns;
        // Both have the same bounds, so that every value fits.
        let _ = self.latency_ns.add(&other.latency_ns);
    }
}

/// The requests of one queue. They outlive the connection.
#[derive(Debug)]
pub(super) struct QueueLoad {
    slots: Vec<Slot>,
    /// Ring descriptor to slot.
    by_head: Vec<u16>,
    cursor: Cursor,
    /// The expected contents of a disk, if they are verified.
    ledger: Option<Ledger>,
    /// Requests not yet sent.
    left: u64,
    in_flight: usize,
}

impl QueueLoad {
    /// Builds the requests of a queue.
    pub(super) fn new(queue: &mut Queue, orders: &WorkerTask, cursor: Cursor, ledger: Option<Ledger>) -> Result<Self> {
        let make = |_| Slot::new(queue, &orders.template);
        let slots: Vec<_> = (0..orders.depth).map(make).collect::<Result<_>>()?;
        let mut by_head = vec![u16::MAX; queue.ring.size().into()];
        for (slot, index) in slots.iter().zip(0..) {
            by_head[usize::from(slot.head)] = index;
        }
        Ok(Self { slots, by_head, cursor, ledger, left: 0, in_flight: 0 })
    }

    /// What the disk must hold afterwards.
    pub(super) fn ledger(&self) -> Option<&Ledger> {
        self.ledger.as_ref()
    }

    /// Sends the first requests.
    pub(super) fn begin(&mut self, queue: &mut Queue, orders: &WorkerTask) {
        queue.counters();
        queue.counters = Counters::default();
        self.left = orders.requests.unwrap_or(u64::MAX);
        queue.ring.suppress_calls();
        for index in 0..orders.depth.min(usize::try_from(self.left).unwrap_or(usize::MAX)) {
            self.send(queue, index, orders, 0);
        }
        queue.publish();
    }

    /// Sends slot `index` again.
    #[inline]
    fn send(&mut self, queue: &mut Queue, index: usize, orders: &WorkerTask, now_ns: u64) {
        let unique = queue.next_unique();
        let slot = &mut self.slots[index];
        slot.arm(unique, now_ns);
        match (&mut self.ledger, orders.template.data) {
            (_, Data::None) => {}
            (Some(ledger), _) => slot.aim(ledger.begin(&mut self.cursor)),
            (None, _) => slot.aim(self.cursor.next()),
        }
        if let (Data::Out(bytes), true) = (orders.template.data, orders.verify) {
            let mut block = vec![0; bytes];
            match &self.ledger {
                Some(ledger) => ledger.fill_next(&mut block, slot.offset),
                None => pattern::fill(&mut block, slot.offset, pattern::SEED_WRITTEN),
            }
            slot.write_data(&block);
        }
        queue.ring.push(slot.head, &slot.chain);
        self.left -= 1;
        self.in_flight += 1;
    }

    /// Takes all completions and sends as many requests. Returns whether to kick.
    #[inline]
    fn turn(
        &mut self,
        queue: &mut Queue,
        orders: &WorkerTask,
        tally: &mut Tally,
        waiting: u16,
        now_ns: u64,
    ) -> Result<bool> {
        let mut sent = false;
        for _ in 0..waiting {
            let used = queue.ring.pop_ready();
            let head = usize::try_from(used.id).ok().and_then(|id| self.by_head.get(id));
            let index = head.copied().filter(|&index| index != u16::MAX).ok_or(Error::BadUsed(used.id))?;
            let index = usize::from(index);
            self.in_flight -= 1;
            tally.requests += 1;
            tally.latency_ns.saturating_record(now_ns - self.slots[index].sent_ns);
            self.judge(index, used.len, orders, tally);
            if self.left > 0 {
                self.send(queue, index, orders, now_ns);
                sent = true;
            }
        }
        queue.ring.keep_suppressed();
        Ok(sent && queue.ring.publish())
    }

    #[inline]
    fn judge(&mut self, index: usize, used_len: u32, orders: &WorkerTask, tally: &mut Tally) {
        let slot = &self.slots[index];
        let problem = match slot.check(used_len) {
            Err(answer) => Some(slot.explain(answer, used_len)),
            Ok(()) if orders.verify => mismatch(slot, orders, self.ledger.as_ref()),
            Ok(()) => None,
        };
        if let Some(ledger) = &mut self.ledger {
            ledger.end(slot.offset, problem.is_none() && matches!(orders.template.data, Data::Out(_)));
        }
        if let Some(problem) = problem {
            tally.errors += 1;
            tally.first_error.get_or_insert(problem);
        }
    }
}

/// Checks the data of a read; returns a description of the mismatch.
fn mismatch(slot: &Slot, orders: &WorkerTask, ledger: Option<&Ledger>) -> Option<String> {
    let Data::In(bytes) = orders.template.data else { return None };
    let mut block = vec![0; bytes];
    slot.read_data(&mut block);
    let good = match ledger {
        Some(ledger) => ledger.check(&block, slot.offset).is_ok(),
        None => pattern::matches(&block, slot.offset, pattern::SEED_INITIAL),
    };
    (!good).then(|| format!("the {bytes} bytes at offset {} are not what was written", slot.offset))
}

/// Drives the lanes of one thread until all requests are sent or the time is over, and all replies have arrived. `tally`
/// is valid after an error, too.
pub(super) fn run(
    queues: &mut [Queue],
    lanes: &mut [QueueLoad],
    orders: &WorkerTask,
    start: Instant,
    tally: &mut Tally,
) -> Result<()> {
    let epoll = Epoll::new()?;
    for queue in queues.iter() {
        epoll.ctl(ControlOperation::Add, queue.call.as_raw_fd(), EpollEvent::new(EventSet::IN, 0))?;
    }
    turns(queues, lanes, orders, tally, start, &epoll)
}

fn turns(
    queues: &mut [Queue],
    lanes: &mut [QueueLoad],
    orders: &WorkerTask,
    tally: &mut Tally,
    start: Instant,
    epoll: &Epoll,
) -> Result<()> {
    let end_ns = orders
        .seconds
        .map_or(u64::MAX, |seconds| u64::try_from(Duration::from_secs_f64(seconds).as_nanos()).unwrap_or(u64::MAX));
    let (mut idle, mut last_ns) = (0, nanoseconds(start));
    loop {
        let mut any = false;
        for (queue, lane) in queues.iter_mut().zip(lanes.iter_mut()) {
            let waiting = queue.ring.waiting_used();
            if waiting == 0 {
                continue;
            }
            any = true;
            let now_ns = nanoseconds(start);
            if now_ns >= end_ns {
                lane.left = 0;
            }
            let kick = lane.turn(queue, orders, tally, waiting, now_ns)?;
            let done_ns = nanoseconds(start);
            tally.busy_ns += done_ns - now_ns;
            last_ns = done_ns;
            if kick {
                queue.kick();
                tally.kick_ns += nanoseconds(start) - done_ns;
            }
        }
        if any {
            idle = 0;
            continue;
        }
        if lanes.iter().all(|lane| lane.in_flight == 0) {
            return Ok(());
        }
        idle += 1;
        rest(queues, orders, idle, epoll)?;
        if orders.sleep || idle.is_multiple_of(POLLS_BEFORE_CHECK) {
            check_alive(queues, orders, nanoseconds(start) - last_ns)?;
        }
    }
}

/// Waits or polls until a completion arrives.
#[inline]
fn rest(queues: &mut [Queue], orders: &WorkerTask, idle: u32, epoll: &Epoll) -> Result<()> {
    if !orders.sleep {
        if idle.is_multiple_of(POLLS_BEFORE_YIELD) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        return Ok(());
    }
    let mut waiting = false;
    for queue in queues.iter_mut() {
        waiting |= queue.ring.want_call();
    }
    if !waiting {
        let mut events = [EpollEvent::default(); 8];
        match epoll.wait(SLEEP_MS, &mut events) {
            Err(error) if error.kind() != std::io::ErrorKind::Interrupted => return Err(error.into()),
            _ => {}
        }
    }
    for queue in queues.iter_mut() {
        queue.drain_calls();
        queue.ring.suppress_calls();
    }
    Ok(())
}

fn check_alive(queues: &[Queue], orders: &WorkerTask, silent_ns: u64) -> Result<()> {
    if u128::from(silent_ns) > orders.stall.as_nanos() {
        return Err(Error::TimedOut(orders.stall));
    }
    if silent_ns > 100_000_000 && !queues.iter().all(Queue::is_connected) {
        return Err(Error::Disconnected);
    }
    Ok(())
}

#[inline]
fn nanoseconds(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
