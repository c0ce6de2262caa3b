//! One virtqueue with its buffers: requests go in, completions come out.

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::frontend::{RingAddresses, is_connected};
use crate::memory::{Buffer, Memory, PAGE_BYTES};
use crate::ring::{DESCRIPTOR_BYTES, Descriptor, INDIRECT, NEXT, Ring, SplitRing, Used, WRITE};
use crate::{Config, Error, Result};

/// How long [`Queue::wait`] polls before it sleeps.
const SPIN: Duration = Duration::from_micros(20);

/// The mark of the socket's events among those of the call eventfd.
const HANG_UP: u64 = 1;

/// Names a request in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

impl Ticket {
    /// The `unique` field of the request, if it was made with [`Queue::peek_unique`].
    pub fn unique(self) -> u64 {
        self.0
    }
}

/// A request that the server is done with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// The request.
    pub ticket: Ticket,
    /// The length in the used ring.
    pub used_len: u32,
    /// What the server wrote, as far as `used_len` says and the reply area reaches.
    pub reply: Vec<u8>,
}

/// How often each side has notified the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Kicks that the driver wrote.
    pub kicks: u64,
    /// Calls (interrupts) that the server wrote.
    pub calls: u64,
}

/// A chain to push, the descriptors that it uses (the first is its head), and its indirect table.
pub(crate) type Placed = (Vec<Descriptor>, Vec<u16>, Option<Buffer>);

#[derive(Debug)]
struct InFlight {
    ticket: Ticket,
    reply: Option<Buffer>,
    reply_bytes: usize,
    descriptors: Vec<u16>,
    _request: Buffer,
    _table: Option<Buffer>,
}

/// A virtqueue: index 0 is the high-priority queue (FORGET), the request queues follow.
#[derive(Debug)]
pub struct Queue {
    index: usize,
    pub(crate) ring: Ring,
    indirect: bool,
    memory: Arc<Memory>,
    socket: UnixStream,
    epoll: Epoll,
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
    err: EventFd,
    /// By head.
    in_flight: HashMap<u32, InFlight>,
    free: Vec<u16>,
    done: Vec<Completion>,
    submitted: u64,
    pub(crate) counters: Counters,
}

impl Queue {
    pub(crate) fn new(index: usize, config: &Config, memory: &Arc<Memory>, socket: UnixStream) -> Result<Self> {
        let size = config.queue_size;
        let ring = Ring::new(config, memory)?;
        let call = EventFd::new(EFD_NONBLOCK)?;
        let epoll = Epoll::new()?;
        epoll.ctl(ControlOperation::Add, call.as_raw_fd(), EpollEvent::new(EventSet::IN, 0))?;
        watch(&epoll, &socket)?;
        Ok(Self {
            index,
            ring,
            indirect: config.indirect,
            memory: Arc::clone(memory),
            socket,
            kick: EventFd::new(EFD_NONBLOCK)?,
            call,
            epoll,
            err: EventFd::new(EFD_NONBLOCK)?,
            in_flight: HashMap::new(),
            free: (0..size).rev().collect(),
            done: Vec::new(),
            submitted: 0,
            counters: Counters::default(),
        })
    }

    /// Switches to another connection. Requests in flight stay in flight.
    pub(crate) fn reattach(&mut self, socket: UnixStream) -> Result<()> {
        // It may be closed already, and then it is not watched any more.
        let _ = self.epoll.ctl(ControlOperation::Delete, self.socket.as_raw_fd(), EpollEvent::default());
        watch(&self.epoll, &socket)?;
        self.socket = socket;
        Ok(())
    }

    /// Makes new descriptors for the server's signals.
    pub(crate) fn renew_signals(&mut self) -> Result<()> {
        let call = EventFd::new(EFD_NONBLOCK)?;
        self.epoll.ctl(ControlOperation::Add, call.as_raw_fd(), EpollEvent::new(EventSet::IN, 0))?;
        self.epoll.ctl(ControlOperation::Delete, self.call.as_raw_fd(), EpollEvent::default())?;
        self.call = call;
        self.err = EventFd::new(EFD_NONBLOCK)?;
        Ok(())
    }

    /// Its index.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The bare ring, which must be a split one.
    ///
    /// # Panics
    /// If it is a packed one.
    pub fn ring(&self) -> &SplitRing {
        match &self.ring {
            Ring::Split(ring) => ring,
            Ring::Packed(_) => panic!("the queue has a packed ring"),
        }
    }

    /// The ring itself, for tests that corrupt it. It must be split.
    ///
    /// # Panics
    /// If it is a packed one.
    pub fn ring_mut(&mut self) -> &mut SplitRing {
        match &mut self.ring {
            Ring::Split(ring) => ring,
            Ring::Packed(_) => panic!("the queue has a packed ring"),
        }
    }

    /// The guest's memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Where the ring lies.
    pub fn addresses(&self) -> RingAddresses {
        self.ring.addresses()
    }

    pub(crate) fn err(&self) -> &EventFd {
        &self.err
    }

    /// Whether the server has reported an error on this ring (the error eventfd) since the last call.
    pub fn take_error(&self) -> bool {
        self.err.read().is_ok()
    }

    /// A number for the next request's `unique` field: even, and different on every queue.
    pub fn next_unique(&mut self) -> u64 {
        let unique = self.peek_unique();
        self.submitted += 1;
        unique
    }

    /// What [`Queue::next_unique`] will return: the ticket of the next submitted request has it too.
    pub fn peek_unique(&self) -> u64 {
        ((self.index as u64) << 48) | ((self.submitted + 1) << 1)
    }

    /// How many requests are in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The notifications so far.
    pub fn counters(&mut self) -> Counters {
        self.drain_calls();
        self.counters
    }

    /// Makes a request of `out` (each piece gets a descriptor that the server reads) with a reply area of
    /// `reply` (each length a descriptor that it writes), and kicks if the server wants it.
    ///
    /// # Errors
    /// [`Error::RingFull`], [`Error::Memory`].
    pub fn submit(&mut self, out: &[&[u8]], reply: &[usize]) -> Result<Ticket> {
        let alloc = |bytes| self.memory.alloc(bytes, PAGE_BYTES).ok_or(Error::Memory(bytes));
        let request = alloc(out.iter().map(|piece| piece.len()).sum())?;
        let reply_bytes = reply.iter().sum();
        let answer = if reply_bytes == 0 { None } else { Some(alloc(reply_bytes)?) };

        let mut chain = Vec::with_capacity(out.len() + reply.len());
        let mut at = 0;
        for piece in out {
            request.write(at, piece);
            chain.push(descriptor(request.guest() + at as u64, piece.len(), 0));
            at += piece.len();
        }
        at = 0;
        for &len in reply {
            let base = answer.as_ref().map_or(0, |buffer| buffer.guest());
            chain.push(descriptor(base + at as u64, len, WRITE));
            at += len;
        }
        let (chain, descriptors, table) = self.place(chain)?;
        let head = descriptors[0];
        let ticket = Ticket(self.next_unique());
        let flight = InFlight { ticket, reply: answer, reply_bytes, descriptors, _request: request, _table: table };
        self.in_flight.insert(head.into(), flight);
        self.ring.push(head, &chain);
        self.publish();
        Ok(ticket)
    }

    /// Writes a chain to an indirect table if those are enabled, and to the descriptor table of a split ring. Returns the
    /// chain to push, its descriptors, and the indirect table.
    pub(crate) fn place(&mut self, mut chain: Vec<Descriptor>) -> Result<Placed> {
        let mut table = None;
        if self.indirect {
            let bytes = chain.len() * DESCRIPTOR_BYTES;
            let buffer = self.memory.alloc(bytes, PAGE_BYTES).ok_or(Error::Memory(bytes))?;
            link(&mut chain, |position| u16::try_from(position).unwrap_or(u16::MAX));
            for (index, descriptor) in chain.iter().enumerate() {
                match self.ring {
                    Ring::Split(_) => descriptor.store(&buffer, index),
                    Ring::Packed(_) => descriptor.store_packed(&buffer, index),
                }
            }
            chain = vec![descriptor(buffer.guest(), bytes, INDIRECT)];
            table = Some(buffer);
        }
        let heads = self.take_descriptors(chain.len())?;
        if let Ring::Split(ring) = &self.ring {
            link(&mut chain, |position| heads[position]);
            for (descriptor, &index) in chain.iter().zip(&heads) {
                descriptor.store(ring.table(), index.into());
            }
        }
        Ok((chain, heads, table))
    }

    /// Takes `count` descriptors of the ring's table. They are not returned to the free list.
    ///
    /// # Errors
    /// [`Error::RingFull`].
    pub fn take_descriptors(&mut self, count: usize) -> Result<Vec<u16>> {
        let rest = self.free.len().checked_sub(count).ok_or(Error::RingFull(self.ring.size()))?;
        let mut taken = self.free.split_off(rest);
        taken.reverse();
        Ok(taken)
    }

    /// Publishes pushed chains to the server, and kicks if it asked for that.
    pub fn publish(&mut self) {
        if self.ring.publish() {
            self.kick();
        }
    }

    /// Kicks, wanted or not.
    pub fn kick(&mut self) {
        self.counters.kicks += 1;
        // It fails only when the counter is full, and then the server has a kick waiting.
        let _ = self.kick.write(1);
    }

    /// A completion, if one waits.
    ///
    /// # Errors
    /// [`Error::BadUsed`].
    pub fn poll(&mut self) -> Result<Option<Completion>> {
        if let Some(done) = self.done.pop() {
            return Ok(Some(done));
        }
        self.ring.pop().map(|used| self.complete(used)).transpose()
    }

    fn complete(&mut self, used: Used) -> Result<Completion> {
        let flight = self.in_flight.remove(&used.id).ok_or(Error::BadUsed(used.id))?;
        self.free.extend(&flight.descriptors);
        let bytes = usize::try_from(used.len).unwrap_or(usize::MAX).min(flight.reply_bytes);
        let reply = flight.reply.map_or_else(Vec::new, |buffer| buffer.to_vec(bytes));
        Ok(Completion { ticket: flight.ticket, used_len: used.len, reply })
    }

    /// The next completion, waited for.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::Disconnected`], [`Error::BadUsed`].
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion> {
        if let Some(done) = self.done.pop() {
            return Ok(done);
        }
        let used = self.wait_used(timeout)?;
        self.complete(used)
    }

    /// The completion of one request, waited for; others that come first are kept for [`Queue::poll`].
    ///
    /// # Errors
    /// As [`Queue::wait`].
    pub fn wait_for(&mut self, ticket: Ticket, timeout: Duration) -> Result<Completion> {
        if let Some(at) = self.done.iter().position(|done| done.ticket == ticket) {
            return Ok(self.done.swap_remove(at));
        }
        let end = Instant::now() + timeout;
        loop {
            let used = self
                .wait_used(end.saturating_duration_since(Instant::now()))
                .map_err(|error| if matches!(error, Error::TimedOut(_)) { Error::TimedOut(timeout) } else { error })?;
            let done = self.complete(used)?;
            if done.ticket == ticket {
                return Ok(done);
            }
            self.done.push(done);
        }
    }

    /// The next entry of the used ring as it stands there, waited for.
    ///
    /// # Errors
    /// [`Error::TimedOut`], [`Error::Disconnected`].
    pub fn wait_used(&mut self, timeout: Duration) -> Result<Used> {
        let end = Instant::now() + timeout;
        let spin = Instant::now() + SPIN;
        while Instant::now() < spin {
            if let Some(used) = self.ring.pop() {
                return Ok(used);
            }
            std::hint::spin_loop();
        }
        loop {
            let waiting = self.ring.want_call();
            if let Some(used) = self.ring.pop() {
                return Ok(used);
            }
            if waiting {
                continue;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::TimedOut(timeout));
            }
            let connected = self.sleep(left)?;
            if !connected && !self.ring.has_used() {
                return Err(Error::Disconnected);
            }
        }
    }

    /// Sleeps until a call comes, `timeout` is over, or the connection ends (false).
    fn sleep(&mut self, timeout: Duration) -> Result<bool> {
        let mut events = [EpollEvent::default(); 2];
        let ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX).max(1);
        let ready = match self.epoll.wait(ms, &mut events) {
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error.into()),
        };
        self.drain_calls();
        Ok(events[..ready].iter().all(|event| event.data() != HANG_UP))
    }

    pub(crate) fn drain_calls(&mut self) {
        self.counters.calls += self.call.read().unwrap_or(0);
    }

    /// Whether the server is still connected.
    pub fn is_connected(&self) -> bool {
        is_connected(&self.socket)
    }
}

/// Makes a hang-up of the socket end the wait.
fn watch(epoll: &Epoll, socket: &UnixStream) -> Result<()> {
    let hang_up = EpollEvent::new(EventSet::READ_HANG_UP, HANG_UP);
    Ok(epoll.ctl(ControlOperation::Add, socket.as_raw_fd(), hang_up)?)
}

pub(crate) fn descriptor(addr: u64, len: usize, flags: u16) -> Descriptor {
    Descriptor { addr, len: u32::try_from(len).unwrap_or(u32::MAX), flags, next: 0 }
}

/// Links each descriptor of a chain to the following one, whose index `index` knows.
pub(crate) fn link(chain: &mut [Descriptor], index: impl Fn(usize) -> u16) {
    let last = chain.len().saturating_sub(1);
    for (position, descriptor) in chain.iter_mut().enumerate().take(last) {
        descriptor.flags |= NEXT;
        descriptor.next = index(position + 1);
    }
}
