//! The commands that other threads send to a worker.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use ferry_engine::Mailbox;

use crate::dirty::DirtyLog;
use crate::inflight::Region;
use crate::memory::Memory;
use crate::ring::{RingError, RingSetup};

/// The mailbox of a worker.
#[derive(Debug)]
pub struct Port<M>(pub(crate) Mailbox<Command<M>>);

impl<M> Port<M> {
    /// Completes the chain with this token. An unknown token is ignored.
    pub fn reply(&self, token: u64, message: M) {
        self.0.post(Command::Reply(token, message));
    }
}

/// The receiver of a port. Dropped, it fails the requests that still wait for a reply.
pub(super) struct PortReceiver<M>(pub(super) Arc<Port<M>>);

impl<M> Drop for PortReceiver<M> {
    fn drop(&mut self) {
        self.0.0.close();
    }
}

#[derive(Debug)]
pub(crate) enum Command<M> {
    Reply(u64, M),
    /// Another thread has handed over a completion.
    Completion,
    Control(Control),
}

/// A command of the connection.
#[derive(Debug)]
pub(crate) enum Control {
    Start(usize, Start, Sender<Result<(), RingError>>),
    /// Completes the transfers of the ring, then stops it.
    Stop(usize, Sender<StoppedQueue>),
    /// The new guest memory for its chains. The ring itself stays where it is.
    Memory(usize, Memory),
    /// The new call descriptor.
    Call(usize, Option<Arc<OwnedFd>>),
    /// The new error descriptor.
    Error(usize, Option<Arc<OwnedFd>>),
    Quit,
}

/// The state of a ring that was served.
#[derive(Clone, Debug)]
pub(crate) struct StoppedQueue {
    /// The index at which to resume.
    pub(crate) base: u32,
    /// Heads of earlier chains that are still parked (for a lock).
    pub(crate) out: Vec<u16>,
}

/// A ring to serve.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) memory: Memory,
    pub(crate) setup: RingSetup,
    pub(crate) base: u32,
    /// It resumes where it stopped, whatever the base is.
    pub(crate) resumes: bool,
    pub(crate) log: Option<Region>,
    /// Heads of chains that were taken before the state was saved, here or on another host, and have no reply.
    pub(crate) resubmitted: Vec<u16>,
    /// The log of written pages.
    pub(crate) dirty: Option<Arc<DirtyLog>>,
    pub(crate) kick: Arc<OwnedFd>,
    pub(crate) call: Option<Arc<OwnedFd>>,
    pub(crate) error: Option<Arc<OwnedFd>>,
}
