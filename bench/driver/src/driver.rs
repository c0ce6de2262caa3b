//! A connection to a server: see [`Driver`].

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
    /// Request queues; the high-priority queue comes on top.
    pub queues: usize,
    /// Entries of each ring: a power of two.
    pub queue_size: u16,
    /// The guest's memory in all.
    pub memory_bytes: usize,
    /// The number of regions that it is made of.
    pub regions: usize,
    /// Negotiate the event index.
    pub event_idx: bool,
    /// Negotiate indirect descriptors, and use them.
    pub indirect: bool,
    /// How long the server may take to answer a message or a request.
    pub timeout: Duration,
    /// How long a server that is not there yet (no socket, nobody listening) is waited for.
    pub connect_within: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            queues: 1,
            queue_size: 1024,
            memory_bytes: 64 << 20,
            regions: 1,
            event_idx: true,
            indirect: true,
            timeout: Duration::from_secs(10),
            connect_within: Duration::from_secs(2),
        }
    }
}

/// A virtio-fs driver, connected to a vhost-user-fs back end.
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
            driver.start(index, 0)?;
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
        let link = Link::open(&path, &config, &memory)?;
        let queue = |index| Queue::new(index, &config, &memory, link.socket()?);
        let queues = (0..=config.queues).map(queue).collect::<Result<_>>()?;
        let caller = Caller { uid: 0, gid: 0, pid: 1 };
        Ok(Self { link, queues, memory, config, path, selected: 1, caller, negotiated: Negotiated::BEFORE_INIT })
    }

    /// Connects anew, with fresh memory and rings; this connection is closed first.
    ///
    /// # Errors
    /// As [`Driver::connect`].
    pub fn reconnect(self) -> Result<Self> {
        let (path, config) = (self.path.clone(), self.config.clone());
        drop(self);
        Self::connect(path, config)
    }

    /// Starts a queue from the available index `base` (0 on a fresh ring; what [`Driver::stop`] returned else).
    ///
    /// # Errors
    /// [`Error::Vhost`](crate::Error::Vhost).
    pub fn start(&mut self, index: usize, base: u16) -> Result<()> {
        let parameters = self.parameters(index, base);
        self.queues[index].ring_mut().restart(base);
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
        &mut self.queues[1..]
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
