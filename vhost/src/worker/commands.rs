//! What other threads send to a worker.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use ferry_engine::Mailbox;

use crate::dirty::DirtyLog;
use crate::inflight::Region;
use crate::memory::Memory;
use crate::ring::{RingError, RingSetup};

/// How other threads reach a worker.
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
    /// Another thread has handed something in.
    Returned,
    Control(Control),
}

/// What the connection asks of a worker.
#[derive(Debug)]
pub(crate) enum Control {
    Start(usize, Start, Sender<Result<(), RingError>>),
    /// Completes the transfers of the ring, and then stops it.
    Stop(usize, Sender<Stopped>),
    /// The new guest memory for its chains. The ring itself stays where it is.
    Memory(usize, Memory),
    /// Where the driver is signalled from now on.
    Call(usize, Option<Arc<OwnedFd>>),
    /// Where the front end is told of errors from now on.
    Error(usize, Option<Arc<OwnedFd>>),
    Quit,
}

/// What is left of a ring that was served.
#[derive(Clone, Debug)]
pub(crate) struct Stopped {
    /// The index to go on from.
    pub(crate) base: u32,
    /// Chains before it that are not answered yet, because they wait for somebody (for a lock).
    pub(crate) out: Vec<u16>,
}

/// A ring to serve.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) memory: Memory,
    pub(crate) setup: RingSetup,
    pub(crate) base: u32,
    /// It goes on where it stopped last, whatever number that is.
    pub(crate) resumes: bool,
    pub(crate) log: Option<Region>,
    /// Chains that were taken before the state was saved, here or on another host, and that nobody has answered.
    pub(crate) resubmitted: Vec<u16>,
    /// Where to note which pages are written to.
    pub(crate) dirty: Option<Arc<DirtyLog>>,
    pub(crate) kick: Arc<OwnedFd>,
    pub(crate) call: Option<Arc<OwnedFd>>,
    pub(crate) error: Option<Arc<OwnedFd>>,
}
