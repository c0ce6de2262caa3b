//! The virtio-fs device (VIRTIO 1.3, section 5.11).

use std::sync::{Arc, PoisonError, RwLock};

use ferry_engine::Lane;
use ferry_vfs::FileSystem;
use ferry_vhost::{Complaints, Device, Port, WorkerOptions};

use crate::handler::Handler;
use crate::mount::Mount;
use crate::policy::Policy;
use crate::{Options, Tag};

/// The queue that carries FORGET and INTERRUPT ahead of everything else; the request queues follow it.
const HIGH_PRIORITY_QUEUES: usize = 1;

/// A share: what all its guests, one after another, have in common.
pub(crate) struct Share {
    pub(crate) source: Arc<dyn FileSystem>,
    pub(crate) policy: Policy,
    pub(crate) read_only: bool,
    pub(crate) xattr: bool,
    pub(crate) complaints: Complaints,
    pub(crate) lane: Lane,
}

/// A share as a device.
pub(crate) struct VirtioFs {
    share: Arc<Share>,
    options: Options,
    /// One for each request queue, but no more than there are CPUs for them to run on: two workers that take turns
    /// on one CPU do worse than one that serves both queues in one pass.
    request_workers: usize,
}

impl VirtioFs {
    pub(crate) fn new(source: Arc<dyn FileSystem>, options: Options) -> Self {
        let features = source.features();
        let share = Share {
            policy: Policy::new(&options, features),
            read_only: features.read_only,
            xattr: options.xattr,
            source,
            complaints: Complaints::default(),
            lane: Lane::default(),
        };
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { share: Arc::new(share), request_workers: options.queues.min(cpus), options }
    }
}

/// What the queues of one connection share: the guest's session, once INIT came.
#[derive(Default)]
pub(crate) struct Session(RwLock<Option<Arc<Mount>>>);

impl Session {
    pub(crate) fn mount(&self) -> Option<Arc<Mount>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Begins (INIT) or ends (DESTROY) the guest's session. What the last one held is given back when no batch of
    /// requests uses it any more.
    pub(crate) fn set_mount(&self, mount: Option<Arc<Mount>>) {
        let last = std::mem::replace(&mut *self.0.write().unwrap_or_else(PoisonError::into_inner), mount);
        drop(last);
    }
}

impl Device for VirtioFs {
    type Handler = Handler;
    type Session = Session;

    fn queue_count(&self) -> usize {
        HIGH_PRIORITY_QUEUES + self.options.queues
    }

    /// `struct virtio_fs_config`: the tag, padded with NUL, and the number of request queues.
    fn config(&self) -> Option<Vec<u8>> {
        let tag = self.options.tag.as_ref()?.as_str();
        let mut config = vec![0; Tag::BYTES_MAX];
        config[..tag.len()].copy_from_slice(tag.as_bytes());
        config.extend(u32::try_from(self.options.queues).unwrap_or(1).to_le_bytes());
        Some(config)
    }

    fn worker_count(&self) -> usize {
        HIGH_PRIORITY_QUEUES + self.request_workers
    }

    fn worker_of(&self, index: usize) -> usize {
        match index.checked_sub(HIGH_PRIORITY_QUEUES) {
            Some(request_queue) => HIGH_PRIORITY_QUEUES + request_queue % self.request_workers,
            None => index,
        }
    }

    fn worker_options(&self, index: usize) -> WorkerOptions {
        // Nobody waits for a FORGET.
        let poll = if index < HIGH_PRIORITY_QUEUES { std::time::Duration::ZERO } else { self.options.poll };
        WorkerOptions { name: format!("virtiofs-{index}"), io: self.options.io, poll }
    }

    fn session(&self) -> Session {
        Session::default()
    }

    fn handler(&self, session: &Arc<Session>, _: usize, port: Arc<Port<Vec<u8>>>) -> Handler {
        Handler::new(Arc::clone(&self.share), Arc::clone(session), port)
    }
}
