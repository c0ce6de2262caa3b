//! The loop that drives load.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

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
/// The longest latency that is told apart.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// What a worker does.
#[derive(Debug, Clone)]
pub(super) struct Orders {
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
            busy_ns: 0,
            kick_ns: 0,
            latency_ns,
        })
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or_else(|| other.first_error.clone());
        self.counters.kicks += other.counters.kicks;
        self.counters.calls += other.counters.calls;
        self.elapsed = self.elapsed.max(other.elapsed);
        self.busy_ns += other.busy_ns;
        self.kick_ns += other.kick_ns;
        // Both have the same bounds, so that every value fits.
        let _ = self.latency_ns.add(&other.latency_ns);
    }
}

/// A queue under load.
#[derive(Debug)]
pub(super) struct Lane<'a> {
    queue: &'a mut Queue,
    slots: Vec<Slot>,
    /// Ring descriptor to slot.
    by_head: Vec<u16>,
    cursor: Cursor,
    /// Requests not yet sent.
    left: u64,
    in_flight: usize,
}

impl<'a> Lane<'a> {
    /// Builds the requests of a queue.
    pub(super) fn new(queue: &'a mut Queue, orders: &Orders, cursor: Cursor) -> Result<Self> {
        let make = |_| Slot::new(queue, &orders.template);
        let slots: Vec<_> = (0..orders.depth).map(make).collect::<Result<_>>()?;
        let mut by_head = vec![u16::MAX; queue.ring.size().into()];
        for (slot, index) in slots.iter().zip(0..) {
            by_head[usize::from(slot.head)] = index;
        }
        Ok(Self { queue, slots, by_head, cursor, left: 0, in_flight: 0 })
    }

    /// Sends slot `index` again.
    #[inline]
    fn send(&mut self, index: usize, orders: &Orders, now_ns: u64) {
        let unique = self.queue.next_unique();
        let slot = &mut self.slots[index];
        slot.arm(unique, now_ns);
        if orders.template.data != Data::None {
            slot.aim(self.cursor.next());
        }
        if let (Data::Out(bytes), true) = (orders.template.data, orders.verify) {
            let mut block = vec![0; bytes];
            pattern::fill(&mut block, slot.offset, pattern::SEED_WRITTEN);
            slot.write_data(&block);
        }
        self.queue.ring.push(slot.head, &slot.chain);
        self.left -= 1;
        self.in_flight += 1;
    }

    /// Takes everything that is done and sends as much again. True when a kick is due.
    #[inline]
    fn turn(&mut self, orders: &Orders, tally: &mut Tally, waiting: u16, now_ns: u64) -> Result<bool> {
        let mut sent = false;
        for _ in 0..waiting {
            let used = self.queue.ring.pop_ready();
            let head = usize::try_from(used.id).ok().and_then(|id| self.by_head.get(id));
            let index = head.copied().filter(|&index| index != u16::MAX).ok_or(Error::BadUsed(used.id))?;
            let index = usize::from(index);
            self.in_flight -= 1;
            tally.requests += 1;
            let slot = &self.slots[index];
            tally.latency_ns.saturating_record(now_ns - slot.sent_ns);
            self.judge(index, used.len, orders, tally);
            if self.left > 0 {
                self.send(index, orders, now_ns);
                sent = true;
            }
        }
        self.queue.ring.keep_suppressed();
        Ok(sent && self.queue.ring.publish())
    }

    #[inline]
    fn judge(&self, index: usize, used_len: u32, orders: &Orders, tally: &mut Tally) {
        let slot = &self.slots[index];
        let problem = match slot.check(used_len) {
            Err(answer) => Some(slot.explain(answer, used_len)),
            Ok(()) if orders.verify => mismatch(slot, orders),
            Ok(()) => None,
        };
        if let Some(problem) = problem {
            tally.errors += 1;
            tally.first_error.get_or_insert(problem);
        }
    }
}

/// Compares what a READ brought.
fn mismatch(slot: &Slot, orders: &Orders) -> Option<String> {
    let Data::In(bytes) = orders.template.data else { return None };
    let mut block = vec![0; bytes];
    slot.read_data(&mut block);
    let good = pattern::matches(&block, slot.offset, pattern::SEED_INITIAL);
    (!good).then(|| format!("the {bytes} bytes at offset {} are not what was written", slot.offset))
}

/// Drives the lanes of one thread until their requests are spent or the time is over, and all answers are there.
pub(super) fn run(lanes: &mut [Lane<'_>], orders: &Orders) -> Result<Tally> {
    let mut tally = Tally::new()?;
    let epoll = Epoll::new()?;
    for lane in lanes.iter_mut() {
        let event = EpollEvent::new(EventSet::IN, 0);
        epoll.ctl(ControlOperation::Add, lane.queue.call.as_raw_fd(), event)?;
        lane.queue.counters();
        lane.queue.counters = Counters::default();
        lane.left = orders.requests.unwrap_or(u64::MAX);
        lane.queue.ring.suppress_calls();
    }
    let start = Instant::now();
    for lane in lanes.iter_mut() {
        for index in 0..orders.depth.min(usize::try_from(lane.left).unwrap_or(usize::MAX)) {
            lane.send(index, orders, nanoseconds(start));
        }
        lane.queue.publish();
    }
    turns(lanes, orders, &mut tally, start, &epoll)?;
    tally.elapsed = start.elapsed();
    for lane in lanes.iter_mut() {
        let counters = lane.queue.counters();
        tally.counters.kicks += counters.kicks;
        tally.counters.calls += counters.calls;
    }
    Ok(tally)
}

fn turns(lanes: &mut [Lane<'_>], orders: &Orders, tally: &mut Tally, start: Instant, epoll: &Epoll) -> Result<()> {
    let end_ns = orders
        .seconds
        .map_or(u64::MAX, |seconds| u64::try_from(Duration::from_secs_f64(seconds).as_nanos()).unwrap_or(u64::MAX));
    let (mut idle, mut last_ns) = (0, 0);
    loop {
        let mut any = false;
        for lane in lanes.iter_mut() {
            let waiting = lane.queue.ring.waiting_used();
            if waiting == 0 {
                continue;
            }
            any = true;
            let now_ns = nanoseconds(start);
            if now_ns >= end_ns {
                lane.left = 0;
            }
            let kick = lane.turn(orders, tally, waiting, now_ns)?;
            let done_ns = nanoseconds(start);
            tally.busy_ns += done_ns - now_ns;
            last_ns = done_ns;
            if kick {
                lane.queue.kick();
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
        rest(lanes, orders, idle, epoll)?;
        if orders.sleep || idle.is_multiple_of(POLLS_BEFORE_CHECK) {
            check_alive(lanes, orders, nanoseconds(start) - last_ns)?;
        }
    }
}

/// Passes the time until something is done.
#[inline]
fn rest(lanes: &mut [Lane<'_>], orders: &Orders, idle: u32, epoll: &Epoll) -> Result<()> {
    if !orders.sleep {
        if idle.is_multiple_of(POLLS_BEFORE_YIELD) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        return Ok(());
    }
    let mut waiting = false;
    for lane in lanes.iter_mut() {
        waiting |= lane.queue.ring.want_call();
    }
    if !waiting {
        let mut events = [EpollEvent::default(); 8];
        match epoll.wait(SLEEP_MS, &mut events) {
            Err(error) if error.kind() != std::io::ErrorKind::Interrupted => return Err(error.into()),
            _ => {}
        }
    }
    for lane in lanes.iter_mut() {
        lane.queue.drain_calls();
        lane.queue.ring.suppress_calls();
    }
    Ok(())
}

fn check_alive(lanes: &[Lane<'_>], orders: &Orders, silent_ns: u64) -> Result<()> {
    if u128::from(silent_ns) > orders.stall.as_nanos() {
        return Err(Error::TimedOut(orders.stall));
    }
    if silent_ns > 100_000_000 && !lanes.iter().all(|lane| lane.queue.is_connected()) {
        return Err(Error::Disconnected);
    }
    Ok(())
}

#[inline]
fn nanoseconds(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
