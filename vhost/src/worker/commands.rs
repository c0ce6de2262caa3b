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
    /// Has the chain of this token answered. A token whose chain is gone is nobody's loss.
    pub fn reply(&self, token: u64, message: M) {
        self.0.post(Command::Reply(token, message));
    }
}

/// The reading end of a port: whoever waits for an answer learns of its end.
pub(super) struct Reading<M>(pub(super) Arc<Port<M>>);

impl<M> Drop for Reading<M> {
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
    /// Ends all that moves.
    Stop(usize, Sender<Stopped>),
    /// From now on, its chains lie here. The ring itself stays where it is.
    Memory(usize, Memory),
    /// From now on, the driver is signalled here.
    Call(usize, Option<Arc<OwnedFd>>),
    /// From now on, the front end is told of errors here.
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
