//! The virtio-fs device (VIRTIO 1.3, section 5.11).

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ferry_serve::{Mappings, Server, SessionSlot, Share, ShareOptions};
use ferry_state::SavedSession;
use ferry_vfs::sync::lock;
use ferry_vfs::{Backing, FileSystem};
use ferry_vhost::{Device, Port, Window, WorkerOptions, in_flight_memory};
use ferry_wire::fuse::InitFlags;

use crate::connection_store::ConnectionStore;
use crate::dax::{Dax, WindowUsage};
use crate::handler::{HIGH_PRIORITY_QUEUES, Handler};
use crate::{Error, OnMigrationError, Options, QUEUES_MAX, Tag};

/// A share as a device.
pub(crate) struct VirtioFs {
    share: Arc<Share>,
    options: Options,
    /// One per request queue, but at most one per CPU: two workers on one CPU are slower than one with both queues.
    request_workers: usize,
    /// The window of the current front end, if it has requested one.
    window: Arc<WindowUsage>,
    /// The guest of the previous server, until its front end connects.
    before: Mutex<Option<Guest>>,
}

/// One guest.
pub(crate) struct Guest {
    session: Arc<SessionSlot>,
    dax: Option<Arc<Dax>>,
    /// Its front end has requested the window.
    has_window: AtomicBool,
}

impl Guest {
    fn new(session: Arc<SessionSlot>, dax: Option<Arc<Dax>>) -> Self {
        Self { session, dax, has_window: AtomicBool::new(false) }
    }
}

impl VirtioFs {
    pub(crate) fn new(source: Arc<dyn FileSystem>, options: Options, window: Arc<WindowUsage>) -> Result<Self, Error> {
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
            allow_idmap: options.allow_idmap,
            direct_opens: false,
            local_locks: options.local_locks,
            single_client: false,
            notifications: false,
            keeps_absent_names: false,
            events: options.events,
            limiter: options.limiter.clone(),
        };
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let share = Arc::new(Share::new(source, &share));
        let request_workers = options.queues.min(cpus);
        let mut before = None;
        if let Some(kept) = &options.kept {
            if share.source().migrate().is_none() {
                return Err(Error::NoIdentities);
            }
            let (session, dax) = new_session(share.source(), &options, &window);
            if session.restore_stored(&share)? {
                before = Some(Guest::new(Arc::new(session), dax));
            }
            if kept.in_flight().map_err(Error::InFlight)?.is_none() {
                let memory = in_flight_memory(HIGH_PRIORITY_QUEUES + options.queues).map_err(Error::InFlight)?;
                kept.keep_in_flight(&memory)?;
            }
        }
        Ok(Self { share, request_workers, window, options, before: Mutex::new(before) })
    }
}

/// The length of the window that the next guest is offered. No limit holds up what a guest does there.
fn window_bytes(source: &Arc<dyn FileSystem>, options: &Options) -> Option<u64> {
    let is_limited = options.limiter.as_ref().is_some_and(|limiter| limiter.is_on());
    options.dax_bytes.filter(|_| source.mappable().is_some() && !is_limited)
}

fn new_session(
    source: &Arc<dyn FileSystem>,
    options: &Options,
    window: &Arc<WindowUsage>,
) -> (SessionSlot, Option<Arc<Dax>>) {
    // Host file systems mounted below the shared directory are separate mounts in the guest.
    let mut session = SessionSlot::new(|_, wanted| wanted.flags |= InitFlags::SUBMOUNTS);
    if let Some(kept) = &options.kept {
        session = session.with_store(Arc::clone(kept));
    }
    let has_window = window_bytes(source, options).is_some();
    let dax = has_window.then(|| Arc::new(Dax::new(Arc::clone(source), options, Arc::clone(window))));
    if let Some(dax) = &dax {
        session = session.with_mappings(Arc::clone(dax) as Arc<dyn Mappings>);
    }
    (session, dax)
}

impl VirtioFs {
    pub(crate) fn share(&self) -> &Arc<Share> {
        &self.share
    }

    fn on_panic(&self, lost: usize, what: &str) -> Result<(), String> {
        let name = &self.options.name;
        match (lost, self.options.on_migration_error) {
            (0, _) => Ok(()),
            (_, OnMigrationError::Abort) => Err(format!(
                "{lost} inodes, open files or locks of the guest {what}; --migration-on-error guest-error makes them errors \
                 for the guest instead"
            )),
            (_, OnMigrationError::GuestError) => {
                tracing::warn!("{name}: {lost} inodes, open files or locks of the guest {what}, and are errors for it");
                Ok(())
            }
        }
    }
}

impl Device for VirtioFs {
    type Handler = Handler;
    type Session = Guest;

    fn queue_count(&self) -> usize {
        HIGH_PRIORITY_QUEUES + self.options.queues
    }

    fn queues_flag(&self, wanted: usize) -> Option<usize> {
        wanted.checked_sub(HIGH_PRIORITY_QUEUES).filter(|queues| *queues <= QUEUES_MAX)
    }

    /// Returns `struct virtio_fs_config` (VIRTIO 1.3, section 5.11.4): the tag, and the number of request queues.
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

    fn spare_threads(&self) -> usize {
        self.options.spare_threads
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
        // No request waits for a FORGET.
        let poll = match index < HIGH_PRIORITY_QUEUES {
            true => std::time::Duration::ZERO.into(),
            false => self.options.poll.clone(),
        };
        WorkerOptions { name: format!("virtiofs-{index}"), io: self.options.io, poll, begun: self.options.begun.worker }
    }

    fn window_bytes(&self) -> Option<u64> {
        window_bytes(self.share.source(), &self.options)
    }

    fn window_opened(&self, guest: &Guest, window: &Arc<Window>) {
        guest.has_window.store(true, Ordering::Relaxed);
        self.window.open(window.bytes());
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
        let before = lock(&self.before).take();
        before.unwrap_or_else(|| {
            let (session, dax) = new_session(self.share.source(), &self.options, &self.window);
            Guest::new(Arc::new(session), dax)
        })
    }

    fn in_flight(&self) -> Option<File> {
        self.options.kept.as_ref()?.in_flight().ok().flatten()
    }

    fn last(&self) -> Option<Arc<Backing>> {
        self.options.kept.as_ref().map(|kept| Arc::clone(kept.line()))
    }

    fn connection_store(&self) -> Option<Arc<dyn ferry_vhost::ConnectionStore>> {
        Some(Arc::new(ConnectionStore(Arc::clone(self.options.kept.as_ref()?))))
    }

    fn gone(&self, guest: &Guest) {
        self.window.open(0);
        guest.session.end();
    }

    fn migrates(&self) -> bool {
        self.share.source().migrate().is_some()
    }

    fn save(&self, guest: &Guest) -> Result<Vec<u8>, String> {
        if guest.has_window.load(Ordering::Relaxed) {
            return Err("the guest maps files (DAX): omit --dax for guests that will be migrated".into());
        }
        let mut state = Vec::new();
        if let Some((saved, lost)) = guest.session.save(self.options.migration) {
            self.on_panic(lost, "cannot be named to another host (unlinked, or moved by somebody else)")?;
            saved.encode(&mut state);
            guest.session.release_locks_for_migration();
        }
        Ok(state)
    }

    fn resumed(&self, guest: &Guest) {
        guest.session.reclaim_locks();
        if let Some(dax) = &guest.dax {
            dax.resume();
        }
    }

    fn load(&self, guest: &Guest, state: &[u8]) -> Result<(), String> {
        // The guest had not mounted the share.
        if state.is_empty() {
            return Ok(());
        }
        let saved = SavedSession::decode(state).map_err(|error| error.to_string())?;
        let lost = guest.session.load(&self.share, saved, self.options.migration).map_err(|error| error.to_string())?;
        self.on_panic(lost, "are not found here under the same name").inspect_err(|_| guest.session.end())
    }

    fn handler(&self, guest: &Arc<Guest>, index: usize, port: Arc<Port<Vec<u8>>>) -> Handler {
        let server = Server::new(Arc::clone(&self.share), Arc::clone(&guest.session));
        Handler { server: server.with_journal(index), port, limiter: self.options.limiter.clone() }
    }
}
