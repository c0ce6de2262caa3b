//! Additional connections for data.
//!
//! Names, attributes, locks and fsync use a session's first connection. Reads and writes of a file with much traffic
//! alternate between all of them, with a separate fid on each. Such a fid is found by the names that lead to the file;
//! no request waits for it. If it is not available (the name is gone, or the mode forbids another open), the first
//! connection serves alone. All connections end together (see [`Connection::bind`]), so the order of events is that of
//! one connection.

use std::sync::Arc;

use ferry_vfs::OFlags;
use ferry_vfs::sync::lock;
use ferry_wire::ninep::{Fid, Reply, Request, Step, Steps, WALK_NAMES_MAX};

use crate::connection::{Connection, Outgoing, RequestEnd, RequestError, Wake};
use crate::inode::{Inode, walked};
use crate::session::{OwnedFid, Session};

/// The minimum traffic in bytes before further connections are used: opening a file there takes two messages.
const BYTES_MIN: u64 = 4 << 20;

/// The fids of an open file on further connections.
#[derive(Debug, Default)]
pub(crate) struct ExtraFids {
    /// The session to which they belong.
    serial: Option<u64>,
    /// Changes with the session and at close, so that fids requested earlier are discarded.
    generation: u64,
    moved_bytes: u64,
    turn: usize,
    reads: Vec<Slot>,
    writes: Vec<Slot>,
}

/// A fid on one connection.
#[derive(Clone, Debug)]
enum Slot {
    Opening,
    Open(Arc<OwnedFid>),
    Refused,
}

impl ExtraFids {
    fn slots(&mut self, reads: bool) -> &mut Vec<Slot> {
        if reads { &mut self.reads } else { &mut self.writes }
    }

    /// Resets everything; the caller drops the old fids.
    fn reset(&mut self, serial: Option<u64>) -> Self {
        let new = Self { serial, generation: self.generation + 1, ..Self::default() };
        std::mem::replace(self, new)
    }
}

impl Inode {
    /// Returns the fid for a transfer of this many bytes, if it is a further connection's turn.
    pub(crate) fn extra_fid(self: &Arc<Self>, session: &Session, reads: bool, bytes: usize) -> Option<Arc<OwnedFid>> {
        if session.further.is_empty() {
            return None;
        }
        let mut beside = lock(&self.beside);
        let old = (beside.serial != Some(session.serial)).then(|| beside.reset(Some(session.serial)));
        beside.moved_bytes = beside.moved_bytes.saturating_add(bytes as u64);
        if beside.moved_bytes <= BYTES_MIN {
            return None;
        }
        let begins = beside.slots(reads).is_empty();
        if begins {
            *beside.slots(reads) = vec![Slot::Opening; session.further.len()];
        }
        beside.turn = (beside.turn + 1) % (session.further.len() + 1);
        let (turn, generation) = (beside.turn, beside.generation);
        let held = match turn.checked_sub(1).and_then(|index| beside.slots(reads).get(index)) {
            Some(Slot::Open(held)) => Some(Arc::clone(held)),
            _ => None,
        };
        drop(beside);
        // Dropping a fid sends a message.
        drop(old);
        if begins {
            for (index, root) in session.further.iter().enumerate() {
                PendingOpen { inode: Arc::clone(self), generation, reads, index }.begin(root);
            }
        }
        held
    }

    /// Called at the last close of the file.
    pub(crate) fn close_extra_fids(&self) {
        let old = lock(&self.beside).reset(None);
        drop(old);
    }
}

/// A fid being opened. The connection's reader takes the steps, so they never wait.
#[derive(Debug)]
struct PendingOpen {
    inode: Arc<Inode>,
    generation: u64,
    reads: bool,
    index: usize,
}

impl PendingOpen {
    /// Walks to the file.
    fn begin(self, root: &Arc<OwnedFid>) {
        let connection = Arc::clone(root.connection());
        let Some(names) = self.inode.names().ok().filter(|names| names.len() <= WALK_NAMES_MAX) else {
            return self.end(Slot::Refused);
        };
        let mut buffer = Vec::new();
        let steps = Steps::write(&mut buffer, names.iter().map(|name| Step::Child(name.as_name())));
        let new_fid = connection.new_fid();
        let request = Outgoing::new(&Request::Walk { fid: root.fid(), new_fid, steps });
        let steps = names.len();
        let other = Arc::clone(&connection);
        connection.send_later(request, Wake::call(move |answer| self.walked(&other, new_fid, steps, answer)));
    }

    fn walked(self, connection: &Arc<Connection>, fid: Fid, steps: usize, answer: RequestEnd) {
        let RequestEnd::Message(message) = answer else { return self.end(Slot::Refused) };
        let Ok(Some(qid)) = connection.take(&message, walked(steps)) else {
            // There is no such fid.
            connection.free_fid(fid);
            return self.end(Slot::Refused);
        };
        let held = OwnedFid::new(connection, fid);
        if qid.path != self.inode.path {
            return self.end(Slot::Refused);
        }
        let flags = if self.reads { OFlags::RDONLY } else { OFlags::WRONLY };
        let request = Outgoing::new(&Request::Open { fid, flags });
        connection.send_later(
            request,
            Wake::call(move |answer| {
                let qid = match answer {
                    RequestEnd::Message(message) => held.connection().take(&message, |reply| match reply {
                        Reply::Open { qid, .. } => Some(qid),
                        _ => None,
                    }),
                    RequestEnd::Lost { .. } => Err(RequestError::Lost { harmless: true }),
                };
                let is_it = qid.is_ok_and(|qid| qid.path == self.inode.path);
                self.end(if is_it { Slot::Open(held) } else { Slot::Refused });
            }),
        );
    }

    fn end(self, slot: Slot) {
        let mut beside = lock(&self.inode.beside);
        let is_wanted = beside.generation == self.generation;
        let place = beside.slots(self.reads).get_mut(self.index).filter(|_| is_wanted);
        let old = match place {
            Some(place) => std::mem::replace(place, slot),
            None => slot,
        };
        drop(beside);
        drop(old);
    }
}
