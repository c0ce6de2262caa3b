//! The shared state of an export's connections: its threads and their epoll.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferry_engine::{BlockingPool, IDLE_THREAD, Monitor, MonitorHandle};
use ferry_vfs::sync::lock;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use crate::clients::{Clients, ConnectionAccount, Resource};
use crate::connection::Connection;
use crate::delayed_requests::DelayedRequests;
use crate::peer::Peer;
use crate::share::Share;
use crate::shrink::{HighWater, LOOK, shrink};
use crate::{Error, Listener, keepalive, worker};

/// The minimum number of threads: one reads while another serves.
pub(crate) const THREADS_MIN: usize = 2;
/// The interval of checks for deadlines, and so the precision of timeouts.
const TICK: Duration = LOOK;
/// The kernel's buffer for replies to a client on a unix socket (the kernel doubles it): sixteen of 32 KiB. TCP's
/// buffer grows itself.
const UNIX_SEND_BUFFER_BYTES: usize = 512 << 10;
/// How long to wait for requests in flight at the end. Requests that take longer are abandoned.
const STOP_PATIENCE: Duration = Duration::from_secs(30);

/// The approximate size of a fid in bytes, the unit of held memory.
const HELD_BYTES: usize = 256;

/// The keys of epoll events: the stop event, then listeners, then connections.
pub(crate) const KEY_WAKE: u64 = 0;
/// The key of requests that need not wait for a limit any longer.
pub(crate) const KEY_LIMIT: u64 = KEY_CONNECTIONS - 1;
const KEY_CONNECTIONS: u64 = 1 << 32;

/// The resources of clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Connections.
    pub connections: usize,
    /// Fids of all sessions.
    pub fids: usize,
    /// Requests without a reply yet.
    pub requests: usize,
    /// Waiting lock requests.
    pub parked_locks: usize,
    /// Threads.
    pub threads: usize,
    /// Bytes of unfinished messages, of unread replies, and of extended attributes.
    pub buffered_bytes: usize,
}

/// What an idle thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdleThread {
    Ends,
    /// At most for so long.
    Waits(Option<Duration>),
}

#[derive(Debug, Default)]
struct Threads {
    count: usize,
    /// The hub has stopped.
    ended: bool,
}

/// See the module.
pub(crate) struct Hub {
    pub(crate) share: Arc<Share>,
    epoll: OwnedFd,
    wake_fd: OwnedFd,
    listeners: Vec<Listener>,
    connections: Mutex<HashMap<u64, Arc<Connection>>>,
    next_key: AtomicU64,
    threads: Mutex<Threads>,
    thread_ended: Condvar,
    /// Threads that wait for an event.
    idle: AtomicUsize,
    /// Threads that are about to.
    starting: AtomicUsize,
    stopping: AtomicBool,
    clients: Arc<Clients>,
    /// A listener pauses until the next tick, for lack of descriptors.
    resting: AtomicBool,
    /// The clock sleeps until [`Self::wind`]: there is no deadline, and no thread is about to create one.
    calm: AtomicBool,
    /// Requests that wait for a limit, if there may be one.
    pub(crate) delayed: Option<Arc<DelayedRequests<worker::ParkedRequest>>>,
    /// Detects requests that delay the next ones of their connection.
    pub(crate) monitor_handle: MonitorHandle,
    monitor: Mutex<Option<Monitor>>,
    /// Runs the ends of timed-out sessions: not on the share's pool, which others wait for.
    ends: BlockingPool,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub").field("listeners", &self.listeners).field("usage", &self.usage()).finish_non_exhaustive()
    }
}

fn system(what: &'static str) -> impl Fn(io::Error) -> Error {
    move |reason| Error::System { what, reason }
}

impl Hub {
    pub(crate) fn start(listeners: Vec<Listener>, share: Arc<Share>) -> Result<Arc<Self>, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|errno| system("epoll")(errno.into()))?;
        let wake_fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake_fd = wake_fd.map_err(|errno| system("eventfd")(errno.into()))?;
        let limits = &share.options.limits;
        let clients = Clients::new(limits.connections_max, limits.buffered_bytes_max);
        let delayed = share.options.limiter.as_ref().map(DelayedRequests::new);
        let delayed = delayed.transpose().map_err(system("eventfd"))?;
        let hub = Arc::new(Self {
            share,
            epoll,
            wake_fd,
            listeners,
            connections: Mutex::default(),
            next_key: AtomicU64::new(KEY_CONNECTIONS),
            threads: Mutex::default(),
            thread_ended: Condvar::new(),
            idle: AtomicUsize::new(0),
            starting: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            clients,
            resting: AtomicBool::new(false),
            calm: AtomicBool::new(false),
            delayed,
            monitor_handle: MonitorHandle::default(),
            monitor: Mutex::default(),
            ends: BlockingPool::default(),
        });
        let monitor = Monitor::start("9p-monitor", hub.monitor_handle.clone(), Box::new(|_, _, _| None));
        *lock(&hub.monitor) = Some(monitor.map_err(system("threads"))?);
        hub.watch().map_err(system("sockets"))?;
        for _ in 0..THREADS_MIN {
            hub.grow().map_err(system("threads")).inspect_err(|_| hub.stop())?;
        }
        let clock = Arc::clone(&hub);
        let clock = std::thread::Builder::new().name("9p-clock".into()).spawn(move || clock.check_deadlines());
        clock.map_err(system("threads")).inspect_err(|_| hub.stop())?;
        Ok(hub)
    }

    /// Registers the stop event and the listeners.
    fn watch(&self) -> io::Result<()> {
        epoll::add(&self.epoll, &self.wake_fd, EventData::new_u64(KEY_WAKE), EventFlags::IN)?;
        if let Some(delayed) = &self.delayed {
            epoll::add(&self.epoll, delayed, EventData::new_u64(KEY_LIMIT), EventFlags::IN)?;
        }
        for (index, listener) in self.listeners.iter().enumerate() {
            rustix::io::ioctl_fionbio(listener, true)?;
            let flags = EventFlags::IN | EventFlags::ONESHOT;
            epoll::add(&self.epoll, listener, EventData::new_u64(index as u64 + 1), flags)?;
        }
        Ok(())
    }

    pub(crate) fn usage(&self) -> Usage {
        let connections: Vec<_> = lock(&self.connections).values().cloned().collect();
        let mut usage = Usage {
            connections: connections.len(),
            fids: 0,
            requests: 0,
            parked_locks: 0,
            threads: lock(&self.threads).count,
            buffered_bytes: self.clients.held(Resource::Bytes),
        };
        for connection in connections {
            let (fids, requests, parked_locks) = connection.usage();
            usage.fids += fids;
            usage.requests += requests;
            usage.parked_locks += parked_locks;
        }
        usage
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Waits for the next event: its key and flags. `None` after the timeout, if there is one.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> io::Result<Option<(u64, EventFlags)>> {
        let timeout = timeout.and_then(|timeout| timeout.try_into().ok());
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }];
        self.idle.fetch_add(1, Ordering::AcqRel);
        let outcome = epoll::wait(&self.epoll, &mut events[..], timeout.as_ref());
        // Before the look at `calm` in `wind`.
        self.idle.fetch_sub(1, Ordering::SeqCst);
        match outcome {
            Ok(0) => Ok(None),
            Ok(_) => {
                self.wind();
                let [event] = events;
                Ok(Some((event.data.u64(), event.flags)))
            }
            Err(Errno::INTR) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Starts another thread, unless there are enough.
    fn grow(self: &Arc<Self>) -> io::Result<()> {
        let mut threads = lock(&self.threads);
        if threads.count < self.share.options.limits.threads_max && !threads.ended {
            let hub = Arc::clone(self);
            let thread = std::thread::Builder::new().name("9p".into());
            self.starting.fetch_add(1, Ordering::AcqRel);
            let spawned = thread.spawn(move || {
                hub.starting.fetch_sub(1, Ordering::AcqRel);
                worker::work(&hub);
            });
            if let Err(error) = spawned {
                self.starting.fetch_sub(1, Ordering::AcqRel);
                return Err(error);
            }
            threads.count += 1;
        }
        Ok(())
    }

    /// Called before a thread may block: ensures that another one waits for events.
    pub(crate) fn ensure_waiter(self: &Arc<Self>) {
        if self.idle.load(Ordering::Acquire) + self.starting.load(Ordering::Acquire) == 0
            && let Err(error) = self.grow()
        {
            self.share.ratelimited_log.warn(format_args!("no further thread for 9P requests: {error}"));
        }
    }

    /// The maximum number of threads that serve one client: others must be served, and new clients accepted.
    pub(crate) fn client_threads_max(&self) -> usize {
        (self.share.options.limits.threads_max * 3 / 4).max(THREADS_MIN)
    }

    /// Watches a client's `next` connection that waits for a thread, and the others if that cannot be served now.
    pub(crate) fn resume_waiting(&self, holder: &ConnectionAccount, mut next: Option<u64>) {
        while let Some(key) = next {
            if self.connection(key).is_some_and(|connection| connection.resume()) {
                return;
            }
            next = holder.next_waiting();
        }
    }

    /// Called by an idle thread; returns whether it must end, which is then counted, and otherwise how long it must wait before it
    /// asks again. The others may be blocked, so one that waits for events must be left.
    pub(crate) fn idle_thread(&self) -> IdleThread {
        let mut threads = lock(&self.threads);
        if threads.count <= THREADS_MIN {
            return IdleThread::Waits(None);
        }
        if self.idle.load(Ordering::Acquire) == 0 {
            return IdleThread::Waits(Some(IDLE_THREAD));
        }
        threads.count -= 1;
        IdleThread::Ends
    }

    /// Called by a thread that ends because the hub stops.
    pub(crate) fn thread_ended(&self) {
        lock(&self.threads).count -= 1;
        self.thread_ended.notify_all();
    }

    /// Accepts the waiting connections of a listener.
    pub(crate) fn accept(self: &Arc<Self>, key: u64) {
        let index = usize::try_from(key - 1).unwrap_or(usize::MAX);
        let Some(listener) = self.listeners.get(index) else { return };
        loop {
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(stream) => self.welcome(listener, stream),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => break,
                Err(errno) => {
                    // No descriptors or memory: others must end first.
                    self.share.ratelimited_log.warn(format_args!("cannot accept a connection: {errno}"));
                    self.resting.store(true, Ordering::Release);
                    return;
                }
            }
        }
        self.listen_again(index, listener);
    }

    fn listen_again(&self, index: usize, listener: &Listener) {
        let (key, flags) = (EventData::new_u64(index as u64 + 1), EventFlags::IN | EventFlags::ONESHOT);
        if let Err(error) = epoll::modify(&self.epoll, listener, key, flags) {
            tracing::error!("cannot listen on a 9P socket any longer: {error}");
        }
    }

    fn welcome(self: &Arc<Self>, listener: &Listener, stream: OwnedFd) {
        if self.is_stopping() {
            return;
        }
        let peer = Peer::of(stream.as_fd());
        let Ok(holder) = self.clients.welcome(peer) else {
            let most = self.share.options.limits.connections_max;
            self.share.ratelimited_log.warn(format_args!(
                "a connection was refused: there are {most}, which is the limit, and no client has more of them ({peer:?})"
            ));
            return;
        };
        if listener.is_tcp() {
            // Requests are small and waited for, and a dead peer must be detected in the end.
            let _ = rustix::net::sockopt::set_tcp_nodelay(&stream, true);
            keepalive::begin(&stream);
        } else {
            // Where the system's limit is lower, it is the limit.
            let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, UNIX_SEND_BUFFER_BYTES);
        }
        let Some(stream) = listener.stream(stream) else {
            self.share.ratelimited_log.warn(format_args!("a connection was refused: cannot set up TLS"));
            return;
        };
        let key = self.next_key.fetch_add(1, Ordering::Relaxed);
        let connection = Arc::new(Connection::new(Arc::clone(self), key, stream, Arc::clone(&holder)));
        if !holder.is_of(&connection) {
            // Others needed the room meanwhile.
            return;
        }
        lock(&self.connections).insert(key, Arc::clone(&connection));
        if let Err(error) = connection.watch() {
            self.share.ratelimited_log.warn(format_args!("cannot watch a connection: {error}"));
            connection.end(None);
        }
    }

    pub(crate) fn epoll(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(crate) fn connection(&self, key: u64) -> Option<Arc<Connection>> {
        lock(&self.connections).get(&key).cloned()
    }

    pub(crate) fn forget(&self, key: u64) {
        let mut connections = lock(&self.connections);
        let removed = connections.remove(&key);
        shrink(&mut connections);
        // Its end may take a while.
        drop(connections);
        drop(removed);
    }

    /// Returns the number of objects that clients hold, of a few hundred bytes each.
    fn held(&self) -> usize {
        let held = |resource| self.clients.held(resource);
        held(Resource::Connections) + held(Resource::Entries) + held(Resource::Bytes) / HELD_BYTES
    }

    /// Makes the clock look at deadlines again: there may be one now.
    pub(crate) fn wind(&self) {
        if self.calm.load(Ordering::SeqCst) && self.calm.swap(false, Ordering::SeqCst) {
            // The clock looks at `calm` under this lock before it sleeps.
            drop(lock(&self.threads));
            self.thread_ended.notify_all();
        }
    }

    /// Returns whether nothing needs the clock before the next [`Self::wind`]. A thread that wakes up after it was counted as idle
    /// sees `calm`, and winds.
    fn is_calm(&self, high_water: &HighWater) -> bool {
        let threads = lock(&self.threads).count;
        self.calm.store(true, Ordering::SeqCst);
        let is_idle = self.idle.load(Ordering::SeqCst) == threads && !self.resting.load(Ordering::Acquire);
        let connections = || lock(&self.connections).values().cloned().collect::<Vec<_>>();
        let is_calm = is_idle
            && high_water.is_settled(self.held())
            && !connections().into_iter().any(|connection| connection.has_deadline());
        if !is_calm {
            self.calm.store(false, Ordering::SeqCst);
        }
        is_calm
    }

    /// Waits for the next look at deadlines; returns whether the hub has not stopped.
    fn tick(&self, high_water: &HighWater) -> bool {
        let is_calm = self.is_calm(high_water);
        let mut threads = lock(&self.threads);
        while is_calm && !threads.ended && self.calm.load(Ordering::SeqCst) {
            threads = self.thread_ended.wait(threads).unwrap_or_else(PoisonError::into_inner);
        }
        if !threads.ended {
            threads = self.thread_ended.wait_timeout(threads, TICK).unwrap_or_else(PoisonError::into_inner).0;
        }
        !threads.ended
    }

    /// Ends slow connections, and releases unused memory, until the hub stops.
    fn check_deadlines(self: Arc<Self>) {
        let mut high_water = HighWater::default();
        while self.tick(&high_water) {
            let now = Instant::now();
            let connections: Vec<_> = lock(&self.connections).values().cloned().collect();
            for connection in connections {
                if let Some(reason) = connection.overdue(now)
                    && let Some(session) = connection.close(Some(reason))
                {
                    // The session's references return to the source, which may block.
                    let hub = Arc::clone(&self);
                    self.ends.run(move || {
                        drop(session);
                        hub.wind();
                    });
                }
            }
            if high_water.should_trim(self.held()) {
                self.ends.run(ferry_engine::trim_heap);
            }
            if self.resting.swap(false, Ordering::AcqRel) {
                self.listeners.iter().enumerate().for_each(|(index, listener)| self.listen_again(index, listener));
            }
        }
    }

    /// Stops the hub. Requests in progress are completed, with replies to connected clients.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        // Level-triggered and never read, so every thread sees it.
        let _ = rustix::io::write(&self.wake_fd, &1_u64.to_ne_bytes());
        let mut threads = lock(&self.threads);
        threads.ended = true;
        self.thread_ended.notify_all();
        let end = Instant::now() + STOP_PATIENCE;
        while threads.count > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::error!("{} 9P requests do not end; they are abandoned", threads.count);
                break;
            }
            threads = self.thread_ended.wait_timeout(threads, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(threads);
        drop(lock(&self.monitor).take());
        let connections: Vec<_> = lock(&self.connections).values().cloned().collect();
        connections.iter().for_each(|connection| connection.end(None));
        // They refer to their connections, and those to the hub.
        drop(self.delayed.as_ref().map(|delayed| delayed.end()));
    }
}
