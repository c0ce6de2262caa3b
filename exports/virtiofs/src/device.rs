//! The virtio-fs device (VIRTIO 1.3, section 5.11).

use std::sync::Arc;

use ferry_serve::{Mappings, Server, Session, Share, ShareOptions};
use ferry_vfs::FileSystem;
use ferry_vhost::{Device, Port, Window, WorkerOptions};
use ferry_wire::fuse::InitFlags;

use crate::dax::Dax;
use crate::handler::Handler;
use crate::{Options, Tag};

/// The queue that carries FORGET and INTERRUPT ahead of everything else; the request queues follow it.
const HIGH_PRIORITY_QUEUES: usize = 1;

/// A share as a device.
pub(crate) struct VirtioFs {
    share: Arc<Share>,
    options: Options,
    /// One for each request queue, but no more than there are CPUs for them to run on: two workers that take turns
    /// on one CPU do worse than one that serves both queues in one pass.
    request_workers: usize,
}

/// One guest.
pub(crate) struct Guest {
    session: Arc<Session>,
    dax: Option<Arc<Dax>>,
}

impl VirtioFs {
    pub(crate) fn new(source: Arc<dyn FileSystem>, options: Options) -> Self {
        let share = ShareOptions {
            name: options.name.clone(),
            read_only: options.read_only,
            cache: options.cache,
            entry_timeout: options.entry_timeout,
            attr_timeout: options.attr_timeout,
            negative_timeout: options.negative_timeout,
            writeback: options.writeback,
            mmap: options.mmap,
            readdirplus: options.readdirplus,
            xattr: options.xattr,
            posix_acl: options.posix_acl,
            security_label: options.security_label,
            direct_opens: false,
        };
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let share = Arc::new(Share::new(source, &share));
        Self { share, request_workers: options.queues.min(cpus), options }
    }
}

impl Device for VirtioFs {
    type Handler = Handler;
    type Session = Guest;

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

    fn serves_once(&self) -> bool {
        self.options.once
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

    fn window_bytes(&self) -> Option<u64> {
        self.options.dax_bytes.filter(|_| self.share.source().features().mappable)
    }

    fn window_opened(&self, guest: &Guest, window: &Arc<Window>) {
        if let Some(dax) = &guest.dax {
            dax.open(window);
        }
    }

    fn reset(&self, guest: &Guest) {
        if let Some(dax) = &guest.dax {
            dax.clear(Box::new(|_| ()));
        }
    }

    fn session(&self) -> Guest {
        // Host file systems mounted below the shared directory are mounts of their own in the guest.
        let session = Session::new(|_, wanted| wanted.flags |= InitFlags::SUBMOUNTS);
        let dax = self.window_bytes().map(|_| {
            let Options { name, dax_files, read_only, .. } = &self.options;
            Arc::new(Dax::new(Arc::clone(self.share.source()), name.clone(), *dax_files, *read_only))
        });
        let session = match &dax {
            Some(dax) => session.with_mappings(Arc::clone(dax) as Arc<dyn Mappings>),
            None => session,
        };
        Guest { session: Arc::new(session), dax }
    }

    fn handler(&self, guest: &Arc<Guest>, _: usize, port: Arc<Port<Vec<u8>>>) -> Handler {
        Handler { server: Server::new(Arc::clone(&self.share), Arc::clone(&guest.session)), port }
    }
}
