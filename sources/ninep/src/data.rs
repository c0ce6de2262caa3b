//! Sends the cache's transfers without blocking a thread.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Instant;

use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, Result};
use ferry_wire::ninep::{Reply, Request};

use crate::cache::{CachedFile, Completion, Remote};
use crate::client::Shared;
use crate::connection::{Connection, Message, Outcome, Outgoing, RequestEnd, RequestError, Wake};
use crate::inode::Inode;
use crate::session::OwnedFid;

/// A file of the server, for its cache.
#[derive(Debug)]
struct RemoteFile {
    shared: Weak<Shared>,
    inode: Weak<Inode>,
}

/// One transfer.
#[derive(Debug)]
struct Transfer {
    shared: Arc<Shared>,
    inode: Arc<Inode>,
    what: TransferKind,
    offset: u64,
    buffer: Vec<u8>,
    done: Completion,
    /// When to abort it; `None` before it had to wait.
    until: Option<Instant>,
}

/// A transfer with its request in flight, and its buffer.
#[derive(Debug)]
pub(crate) struct SentTransfer {
    transfer: Transfer,
    held: Arc<OwnedFid>,
    /// The length of the buffer.
    bytes: usize,
}

impl SentTransfer {
    /// Called with the reply, or without one.
    pub(crate) fn answered(self, answer: RequestEnd) {
        let Self { mut transfer, held, bytes } = self;
        match answer {
            RequestEnd::Message(mut message) => {
                let moved = moved(held.connection(), transfer.what, &message, bytes);
                drop(held);
                let moved = moved.map_err(|_| Errno::IO).and_then(|moved| moved);
                transfer.done.end(message.buffer.take().unwrap_or_default(), moved);
            }
            // The connection's threads cannot wait for the next connection.
            RequestEnd::Lost { buffer, .. } => match (transfer.what, buffer) {
                // The data to write are lost with the request: zeros must not replace them.
                (TransferKind::Write, None) => transfer.done.end(Vec::new(), Err(Errno::IO)),
                (_, buffer) => {
                    transfer.buffer = buffer.unwrap_or_else(|| vec![0; bytes]);
                    transfer.queue_for_connection();
                }
            },
        }
    }
}

/// Transfers that wait for a connection or an open. One thread, which only exists then, waits for all of them.
#[derive(Debug, Default)]
pub(crate) struct WaitingTransfers {
    transfers: VecDeque<Transfer>,
    is_served: bool,
}

#[derive(Clone, Copy, Debug)]
enum TransferKind {
    Read,
    Write,
    Sync,
}

impl Inode {
    /// Returns the file's cache, if the client has one and the file was opened.
    pub(crate) fn cached(&self) -> Option<&Arc<CachedFile>> {
        self.cached.get()
    }

    /// Returns the file's cache, created if necessary, for a file of this size.
    pub(crate) fn cache(self: &Arc<Self>, shared: &Arc<Shared>, size: u64) -> Option<&Arc<CachedFile>> {
        let cache = shared.cache.as_ref()?;
        let data = || Arc::new(RemoteFile { shared: Arc::downgrade(shared), inode: Arc::downgrade(self) });
        Some(self.cached.get_or_init(|| cache.file(data(), size)))
    }
}

impl Remote for RemoteFile {
    fn message_bytes(&self) -> usize {
        self.shared.upgrade().map_or(1, |shared| Shared::message_bytes(&shared.link.current()).max(1))
    }

    fn read(&self, offset: u64, buffer: Vec<u8>, done: Completion) {
        self.begin(TransferKind::Read, offset, buffer, done);
    }

    fn write(&self, offset: u64, buffer: Vec<u8>, done: Completion) {
        self.begin(TransferKind::Write, offset, buffer, done);
    }

    fn sync(&self, done: Completion) {
        self.begin(TransferKind::Sync, 0, Vec::new(), done);
    }
}

impl RemoteFile {
    fn begin(&self, what: TransferKind, offset: u64, buffer: Vec<u8>, done: Completion) {
        match (self.shared.upgrade(), self.inode.upgrade()) {
            (Some(shared), Some(inode)) => {
                Transfer { shared, inode, what, offset, buffer, done, until: None }.begin();
            }
            _ => done.end(buffer, Err(Errno::IO)),
        }
    }
}

impl Transfer {
    /// Sends the transfer if connection and fid are available; otherwise queues it for another thread.
    fn begin(self) {
        if self.is_too_late() {
            return self.done.end(self.buffer, Err(Errno::IO));
        }
        let session = self.shared.link.current();
        let held = match self.what {
            TransferKind::Read => self.inode.open_read_fid(&session),
            TransferKind::Write => self.inode.open_write_fid(&session),
            TransferKind::Sync => self.inode.opened_fid(&session),
        };
        match held.filter(|_| !session.is_broken()) {
            Some(held) => {
                let beside = match self.what {
                    // A sync covers all earlier writes, of every connection.
                    TransferKind::Sync => None,
                    what => self.inode.extra_fid(&session, matches!(what, TransferKind::Read), self.buffer.len()),
                };
                self.send(beside.unwrap_or(held));
            }
            None => self.queue_for_connection(),
        }
    }

    /// Whether this is a write after the client has lost its locks: it could overwrite what another client wrote under them.
    fn is_too_late(&self) -> bool {
        matches!(self.what, TransferKind::Write) && lock(&self.inode.io).lost_locks
    }

    fn send(mut self, held: Arc<OwnedFid>) {
        let mut buffer = std::mem::take(&mut self.buffer);
        // After a new connection messages may be shorter; the cache sends the rest in further ones.
        buffer.truncate(Shared::message_bytes(held.connection()));
        let (bytes, connection) = (buffer.len(), Arc::clone(held.connection()));
        let request = request(self.what, &held, self.offset, buffer);
        connection.send_waking(request, Wake::Transfer(SentTransfer { transfer: self, held, bytes }));
    }

    /// Queues it for the waiting thread.
    fn queue_for_connection(mut self) {
        let (shared, now) = (Arc::clone(&self.shared), Instant::now());
        if *self.until.get_or_insert(now + shared.link.options.patience) <= now {
            return self.done.end(self.buffer, Err(Errno::IO));
        }
        let is_served = {
            let mut waiting = lock(&shared.waiting);
            waiting.transfers.push_back(self);
            std::mem::replace(&mut waiting.is_served, true)
        };
        if is_served {
            return;
        }
        let worker = Arc::clone(&shared);
        let started = std::thread::Builder::new().name("9p-again".into()).spawn(move || begin_again(&worker));
        if let Err(error) = started {
            let dropped = std::mem::take(&mut *lock(&shared.waiting));
            tracing::error!(
                "{} transfers of files end with EIO, and unwritten data may be lost: cannot start a thread that waits for the 9P server: {error}; raise the limit of threads (ulimit -u)",
                dropped.transfers.len()
            );
            drop(dropped);
        }
    }

    /// Waits until it can be sent.
    fn resend(self) {
        let Self { shared, inode, what, .. } = &self;
        let until = self.until.unwrap_or_else(Instant::now);
        let ready = shared.link.with_retry_until(until, |session| match what {
            TransferKind::Read => inode.fid_for(shared, session, true),
            TransferKind::Write => inode.fid_for(shared, session, false),
            TransferKind::Sync => inode.open_fid(shared, session),
        });
        match ready {
            // Locks are taken again, or lost, before the new connection is used.
            Ok(_) if self.is_too_late() => self.done.end(self.buffer, Err(Errno::IO)),
            Ok(held) => self.send(held),
            Err(errno) => self.done.end(self.buffer, Err(errno)),
        }
    }
}

/// Runs the waiting thread.
fn begin_again(shared: &Shared) {
    loop {
        let mut waiting = lock(&shared.waiting);
        let Some(transfer) = waiting.transfers.pop_front() else {
            waiting.is_served = false;
            return;
        };
        drop(waiting);
        transfer.resend();
    }
}

fn request(what: TransferKind, held: &OwnedFid, offset: u64, buffer: Vec<u8>) -> Outgoing {
    match what {
        TransferKind::Read => Outgoing::read(held.fid(), offset, buffer),
        TransferKind::Write => Outgoing::write(held.fid(), offset, buffer),
        TransferKind::Sync => Outgoing::new(&Request::Fsync { fid: held.fid(), data_only: false }),
    }
}

/// Returns how many bytes a reply reports.
fn moved(connection: &Connection, what: TransferKind, message: &Message, bytes: usize) -> Outcome<Result<usize>> {
    if let Some(data) = message.data() {
        return Ok(Ok(data.len()));
    }
    let count = connection.take(message, |reply| match (what, reply) {
        (TransferKind::Write, Reply::Write { bytes: count }) => {
            usize::try_from(count).ok().filter(|count| *count <= bytes)
        }
        (TransferKind::Sync, Reply::Fsync) => Some(0),
        _ => None,
    });
    match count {
        // As for an fsync without the cache.
        Err(RequestError::Errno(Errno::NOSYS)) => Ok(Err(Errno::OPNOTSUPP)),
        Err(RequestError::Errno(errno)) => Ok(Err(errno)),
        other => other.map(Ok),
    }
}
