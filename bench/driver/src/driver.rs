//! A connection to a server: see [`Driver`].

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ferry_wire::fuse::Negotiated;

use crate::Result;
use crate::frontend::{Link, RingParameters, RingSetup};
use crate::memory::Memory;
use crate::queue::Queue;
use crate::session::Caller;

/// How to connect.
#[derive(Debug, Clone)]
pub struct Config {
    /// Request queues; those of [`Config::first_queues`] come on top.
    pub queues: usize,
    /// Queues before the request queues: a file system's high-priority queue.
    pub first_queues: usize,
    /// Entries of each ring: a power of two, unless it is a packed one.
    pub queue_size: u16,
    /// The guest's memory in all.
    pub memory_bytes: usize,
    /// The number of regions that it is made of.
    pub regions: usize,
    /// Negotiate the event index.
    pub event_idx: bool,
    /// Negotiate indirect descriptors, and use them.
    pub indirect: bool,
    /// Negotiate packed rings.
    pub packed: bool,
    /// Have the server keep account of what is in flight, for [`Driver::reattach`].
    pub inflight: bool,
    /// Ask for the device's shared memory region, which [`Driver::window`] then has.
    pub window: bool,
    /// The device's own feature bits to negotiate.
    pub device_features: u64,
    /// Those to negotiate where they are offered.
    pub optional_features: u64,
    /// How long the server may take to answer a message or a request.
    pub timeout: Duration,
    /// How long to wait for a server that does not listen yet.
    pub connect_within: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            queues: 1,
            first_queues: 1,
            queue_size: 1024,
            memory_bytes: 64 << 20,
            regions: 1,
            event_idx: true,
            indirect: true,
            packed: false,
            inflight: false,
            window: false,
            device_features: 0,
            optional_features: 0,
            timeout: Duration::from_secs(10),
            connect_within: Duration::from_secs(2),
        }
    }
}

impl Config {
    /// All queues.
    pub(crate) fn vrings(&self) -> usize {
        self.first_queues + self.queues
    }
}

/// A virtio driver, connected to a vhost-user back end; [`Driver::init`] and what follows it are a file system's.
///
/// Dropping it closes the connection at once, whatever is in flight. The guest's memory lives on until the last
/// [`Queue`] and [`crate::memory::Buffer`] are gone.
#[derive(Debug)]
pub struct Driver {
    link: Link,
    queues: Vec<Queue>,
    memory: Arc<Memory>,
    config: Config,
    path: PathBuf,
    pub(crate) selected: usize,
    pub(crate) caller: Caller,
    pub(crate) negotiated: Negotiated,
}

impl Driver {
    /// Connects to the server that listens at `path` and starts all queues.
    ///
    /// # Errors
    /// [`Error::Connect`](crate::Error::Connect), [`Vhost`](crate::Error::Vhost),
    /// [`NotOffered`](crate::Error::NotOffered), [`Queues`](crate::Error::Queues).
    pub fn connect(path: impl AsRef<Path>, config: Config) -> Result<Self> {
        let mut driver = Self::negotiate(path, config)?;
        for index in 0..driver.queues.len() {
            let base = driver.queues[index].ring.fresh_base();
            driver.start(index, base)?;
        }
        Ok(driver)
    }

    /// Connects, negotiates and shares memory, but starts no queue.
    ///
    /// # Errors
    /// As [`Driver::connect`].
    pub fn negotiate(path: impl AsRef<Path>, config: Config) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let memory = Memory::new(config.memory_bytes, config.regions)?;
        let link = Link::open(&path, &config, &memory, None)?;
        let queue = |index| Queue::new(index, &config, &memory, link.socket()?);
        let queues = (0..config.vrings()).map(queue).collect::<Result<_>>()?;
        let caller = Caller { uid: 0, gid: 0, pid: 1 };
        let selected = config.first_queues;
        Ok(Self { link, queues, memory, config, path, selected, caller, negotiated: Negotiated::BEFORE_INIT })
    }

    /// Reconnects with new memory and rings; this connection is closed first.
    ///
    /// # Errors
    /// As [`Driver::connect`].
    pub fn reconnect(self) -> Result<Self> {
        let (path, config) = (self.path.clone(), self.config.clone());
        drop(self);
        Self::connect(path, config)
    }

    /// Connects to whichever server listens now, after the one before was lost: with the memory, the rings and what is
    /// in flight as they are. With [`Config::inflight`], the server answers what the other took and did not answer.
    ///
    /// # Errors
    /// As [`Driver::connect`].
    pub fn reattach(&mut self) -> Result<()> {
        // A copy, so that it is not lost if the next server is lost at once.
        let kept = match &self.link.inflight {
            Some((description, file)) => Some((*description, file.try_clone()?)),
            None => None,
        };
        self.link = Link::open(&self.path, &self.config, &self.memory, kept)?;
        for index in 0..self.queues.len() {
            self.queues[index].reattach(self.link.socket()?)?;
            let base = self.queues[index].ring.base_after_loss();
            self.start_with(index, self.parameters(index, base))?;
        }
        Ok(())
    }

    /// Closes the connection, and leaves memory, rings and what is in flight as they are, for [`Driver::reattach`].
    pub fn hang_up(&mut self) {
        self.link.close();
    }

    /// Stops all queues and has the server write its state; they go on with [`Driver::migrate`].
    ///
    /// # Errors
    /// [`Error::Vhost`](crate::Error::Vhost): among others when the server cannot.
    pub fn save(&mut self) -> Result<(Vec<u8>, Vec<u16>)> {
        let stopped = (0..self.queues.len()).map(|index| self.link.stop(index)).collect::<Result<Vec<u16>>>()?;
        let saved = self.link.save();
        if saved.is_err() {
            self.stay(&stopped)?;
        }
        Ok((saved?, stopped))
    }

    /// Has the server begin to read a state from a pipe, and does not wait for its end: no queue may run.
    ///
    /// # Errors
    /// [`Error::Vhost`](crate::Error::Vhost): the server refuses.
    pub fn begin_load(&self, pipe: OwnedFd) -> Result<()> {
        self.link.begin_load(pipe)
    }

    /// Goes on with the server that it is connected to, after [`Driver::save`]: the queues were stopped at these places.
    ///
    /// # Errors
    /// As [`Driver::connect`].
    pub fn stay(&mut self, stopped: &[u16]) -> Result<()> {
        stopped.iter().enumerate().try_for_each(|(index, base)| self.start_with(index, self.parameters(index, *base)))
    }

    /// Goes on with the server that listens at `path`, which takes up the state (see [`Driver::save`]) of the one before. Another
    /// server than the one before is connected to before that is left, as VMMs on one host do.
    ///
    /// # Errors
    /// As [`Driver::connect`].
    pub fn migrate(&mut self, path: impl AsRef<Path>, (state, stopped): &(Vec<u8>, Vec<u16>)) -> Result<()> {
        if self.path == path.as_ref() {
            self.link.close();
        }
        self.path = path.as_ref().to_owned();
        let after = Link::open(&self.path, &self.config, &self.memory, None)?;
        let before = std::mem::replace(&mut self.link, after);
        let loaded = self.link.load(state);
        before.close();
        loaded?;
        for (index, base) in stopped.iter().enumerate() {
            self.queues[index].reattach(self.link.socket()?)?;
            self.start_with(index, self.parameters(index, *base))?;
        }
        Ok(())
    }

    /// Does what a guest's reboot does: resets the device and starts all queues with fresh rings. What was in flight is
    /// forgotten.
    ///
    /// # Errors
    /// As [`Driver::connect`].
    pub fn reboot(&mut self) -> Result<()> {
        self.link.reset()?;
        self.link.renew_inflight(&self.config)?;
        for index in 0..self.queues.len() {
            self.queues[index] = Queue::new(index, &self.config, &self.memory, self.link.socket()?)?;
            let base = self.queues[index].ring.fresh_base();
            self.start(index, base)?;
        }
        Ok(())
    }

    /// Makes a region of the memory unknown to the server, or known again.
    ///
    /// # Errors
    /// [`Error::Vhost`](crate::Error::Vhost).
    pub fn share_region(&mut self, index: usize, share: bool) -> Result<()> {
        self.link.change_region(&self.memory.regions()[index], share)
    }

    /// Adds a part of a file to the memory that the server knows, for descriptors to lie in; no driver looks at it.
    ///
    /// # Errors
    /// [`Error::Vhost`](crate::Error::Vhost).
    pub fn share_file(&mut self, guest: u64, bytes: u64, file: BorrowedFd<'_>) -> Result<()> {
        self.link.add_file(guest, bytes, file)
    }

    /// Has the server signal a queue by another descriptor, and tell of errors by another.
    ///
    /// # Errors
    /// [`Error::Vhost`](crate::Error::Vhost).
    pub fn renew_signals(&mut self, index: usize) -> Result<()> {
        let queue = &mut self.queues[index];
        queue.renew_signals()?;
        self.link.signals(index, &queue.call, queue.err())
    }

    /// Enables or disables a queue.
    ///
    /// # Errors
    /// [`Error::Vhost`](crate::Error::Vhost).
    pub fn enable(&mut self, index: usize, on: bool) -> Result<()> {
        self.link.enable(index, on)
    }

    /// The length of the device's shared memory region (0: it has none), and the socket on which the server asks for
    /// mappings there, to be answered by hand: each request is to have a reply. With [`Config::window`] only, once.
    pub fn window(&mut self) -> Option<(u64, std::os::unix::net::UnixStream)> {
        self.link.window.take()
    }

    /// Bytes of the configuration space.
    ///
    /// # Errors
    /// [`Error::Vhost`](crate::Error::Vhost).
    pub fn read_config(&mut self, offset: u32, bytes: u32) -> Result<Vec<u8>> {
        self.link.read_config(offset, bytes)
    }

    /// Writes to the configuration space.
    ///
    /// # Errors
    /// [`Error::Vhost`](crate::Error::Vhost).
    pub fn write_config(&mut self, offset: u32, bytes: &[u8]) -> Result<()> {
        self.link.write_config(offset, bytes)
    }

    /// Starts a queue from the available index `base` (0 on a fresh split ring; what [`Driver::stop`] returned else).
    ///
    /// # Errors
    /// [`Error::Vhost`](crate::Error::Vhost).
    pub fn start(&mut self, index: usize, base: u16) -> Result<()> {
        let parameters = self.parameters(index, base);
        self.queues[index].ring.restart(base);
        self.start_with(index, parameters)
    }

    /// What [`Driver::start`] tells the server.
    pub fn parameters(&self, index: usize, base: u16) -> RingParameters {
        RingParameters { size: self.config.queue_size, base, addresses: self.queues[index].addresses() }
    }

    /// Starts a queue with any parameters, whatever its ring really is.
    ///
    /// # Errors
    /// [`Error::Vhost`](crate::Error::Vhost).
    pub fn start_with(&mut self, index: usize, parameters: RingParameters) -> Result<()> {
        let queue = &self.queues[index];
        self.link.start(index, &RingSetup { parameters, kick: &queue.kick, call: &queue.call, err: queue.err() })
    }

    /// Disables and stops a queue; returns the available index at which the server stopped.
    ///
    /// # Errors
    /// [`Error::Vhost`](crate::Error::Vhost).
    pub fn stop(&mut self, index: usize) -> Result<u16> {
        self.link.stop(index)
    }

    /// How it was connected.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The virtio features in force.
    pub fn features(&self) -> u64 {
        self.link.features
    }

    /// The vhost-user protocol features in force, as bits.
    pub fn protocol_features(&self) -> u64 {
        self.link.protocol.bits()
    }

    /// The tag and the number of request queues, from the device's configuration space.
    ///
    /// # Errors
    /// [`Error::Vhost`](crate::Error::Vhost); among others when the server does not offer CONFIG.
    pub fn config_space(&mut self) -> Result<(String, u32)> {
        self.link.config_space()
    }

    /// The process that serves the socket, where the kernel knows it.
    pub fn peer(&self) -> Option<u32> {
        self.link.peer()
    }

    /// Whether the server is still connected.
    pub fn is_connected(&self) -> bool {
        self.queues.iter().all(Queue::is_connected)
    }

    /// The guest's memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// A queue: 0 is the high-priority queue, the request queues follow.
    pub fn queue(&mut self, index: usize) -> &mut Queue {
        &mut self.queues[index]
    }

    /// The request queues.
    pub fn request_queues(&mut self) -> &mut [Queue] {
        &mut self.queues[self.config.first_queues..]
    }

    /// What both sides agreed on in the last INIT.
    pub fn negotiated(&self) -> &Negotiated {
        &self.negotiated
    }

    /// Chooses the queue that [`Driver::ask`] and the typed requests use; at first it is queue 1.
    pub fn select(&mut self, queue: usize) {
        assert!(queue < self.queues.len(), "there is no queue {queue}");
        self.selected = queue;
    }

    /// Chooses on whose behalf requests are made; at first it is root.
    pub fn set_caller(&mut self, caller: Caller) {
        self.caller = caller;
    }
}
