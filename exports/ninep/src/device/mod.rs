//! The virtio-9p device: descriptor chains as messages (Linux `net/9p/trans_virtio.c`; VIRTIO 1.3 has no section about
//! it). The readable part of a chain holds one T message, and the writable part has room for the R message. The
//! configuration space is the tag that the guest mounts: two bytes of length, then its bytes.

mod chain;
mod guest;
mod handler;

use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, Weak};

use ferry_engine::IoMode;
use ferry_vfs::sync::lock;
use ferry_vhost::{Device, FrontEnd, Port, Server, WorkerOptions};

use self::guest::Guest;
use self::handler::Handler;
use crate::share::Share;
use crate::shrink::Trimmer;
use crate::{Error, Usage};

/// The configuration space has a tag (`VIRTIO_9P_MOUNT_TAG`).
const F_MOUNT_TAG: u64 = 1;
/// The maximum length of a tag in bytes, longer than any VMM allows.
const TAG_BYTES_MAX: usize = 255;

/// The number of threads for requests that block, as for virtio-fs: usually more than a mount has in flight.
const SPARE_THREADS: usize = 128;

/// Options of a device, besides [`Options`](crate::Options).
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// The tag that the guest mounts: 1 to 255 bytes without NUL.
    pub tag: String,
    /// How data is moved.
    pub io: IoMode,
}

impl DeviceOptions {
    /// Returns the default options with a tag.
    pub fn of(tag: impl Into<String>) -> Self {
        Self { tag: tag.into(), io: IoMode::Auto }
    }
}

/// A share as a device.
struct NineP {
    share: Arc<Share>,
    options: DeviceOptions,
    config: Vec<u8>,
    now: Arc<Mutex<Weak<Guest>>>,
    trimmer: Arc<Trimmer>,
}

impl Device for NineP {
    type Handler = Handler;
    type Session = Arc<Guest>;

    /// Linux knows of one.
    fn queue_count(&self) -> usize {
        1
    }

    fn features(&self) -> u64 {
        F_MOUNT_TAG
    }

    fn config(&self) -> Option<Vec<u8>> {
        Some(self.config.clone())
    }

    fn reset(&self, guest: &Arc<Guest>) {
        guest.end_session();
    }

    fn spare_threads(&self) -> usize {
        SPARE_THREADS
    }

    fn worker_count(&self) -> usize {
        1
    }

    fn worker_of(&self, _: usize) -> usize {
        0
    }

    fn worker_options(&self, _: usize) -> WorkerOptions {
        WorkerOptions {
            name: "9p-device".into(),
            io: self.options.io,
            poll: self.share.options.poll.clone(),
            begun: None,
        }
    }

    fn session(&self) -> Arc<Guest> {
        let guest = Arc::new(Guest::new(Arc::clone(&self.trimmer)));
        *lock(&self.now) = Arc::downgrade(&guest);
        guest
    }

    fn handler(&self, guest: &Arc<Arc<Guest>>, _: usize, port: Arc<Port<Vec<u8>>>) -> Handler {
        // The same for each thread.
        guest.answers_by(port);
        Handler::new(Arc::clone(&self.share), Arc::clone(guest))
    }
}

/// A device being served.
#[derive(Debug)]
pub(crate) struct ServedDevice {
    server: Server,
    now: Arc<Mutex<Weak<Guest>>>,
}

impl ServedDevice {
    pub(crate) fn start(listener: UnixListener, share: &Arc<Share>, options: DeviceOptions) -> Result<Self, Error> {
        let tag = options.tag.as_bytes();
        if !(1..=TAG_BYTES_MAX).contains(&tag.len()) || tag.contains(&0) {
            return Err(Error::Tag(options.tag));
        }
        let length = u16::try_from(tag.len()).unwrap_or(u16::MAX).to_le_bytes();
        let config = [&length, tag].concat();
        let now = Arc::new(Mutex::new(Weak::new()));
        let guest = Arc::clone(&now);
        let trimmer = Trimmer::new(move || {
            let guest: Option<Arc<Guest>> = lock(&guest).upgrade();
            guest.map_or(0, |guest| guest.held())
        });
        let device = NineP { share: Arc::clone(share), options, config, now: Arc::clone(&now), trimmer };
        let server = Server::start(listener, device, "ferry-9p")?;
        Ok(Self { server, now })
    }

    pub(crate) fn usage(&self) -> Usage {
        usage(&self.now, &self.server.front_end())
    }

    pub(crate) fn usage_reader(&self) -> Box<dyn Fn() -> Usage + Send + Sync> {
        let (now, front_end) = (Arc::clone(&self.now), self.server.front_end());
        Box::new(move || usage(&now, &front_end))
    }

    pub(crate) fn stop(self) {
        self.server.stop();
    }
}

fn usage(now: &Mutex<Weak<Guest>>, front_end: &FrontEnd) -> Usage {
    let guest = lock(now).upgrade();
    let (fids, requests, parked_locks) = guest.map_or((0, 0, 0), |guest| guest.usage());
    let connections = front_end.is_connected().into();
    Usage { connections, fids, requests, parked_locks, threads: 1, buffered_bytes: 0 }
}
