//! Handles requests: from descriptor chains to served requests.

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use ferry_vfs::{Errno, Result};
use ferry_vhost::{Chain, ChainState, Io, Placement, QueueHandler};
use ferry_wire::ninep::{
    DecodeError, Frame, HEADER_BYTES, Reply as Rmessage, Request as Tmessage, Tag, WRITE_HEAD_BYTES, WriteHead, kind,
};

use super::chain::{Reply, Request};
use super::guest::{Arrival, Guest, slot};
use crate::carrier::Client;
use crate::rate::cost_bytes;
use crate::request_table::{RejectedRequest, Ticket};
use crate::serve::{Context, PendingTransfer, ReplyPlace, encode, serve, serve_write};
use crate::session::{self, Session};
use crate::share::Share;

/// The maximum length of a message other than Twrite in bytes: more than a path, or a walk of 16 names.
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// The length of an Rlerror in bytes. Without room for it no reply is possible.
const ERROR_BYTES: usize = HEADER_BYTES + 4;

/// A request in flight, or why it was rejected.
type Registered = std::result::Result<(Ticket, Arc<Session>), RejectedRequest>;

/// Serves the queue of one guest on one thread.
pub(super) struct Handler {
    share: Arc<Share>,
    guest: Arc<Guest>,
    /// The private copy of the message; of a Twrite without its data.
    message: Vec<u8>,
    short: Vec<u8>,
    /// Transfers in flight, by the low half of their token.
    moving: Vec<Option<PendingTransfer>>,
}

impl Handler {
    pub(super) fn new(share: Arc<Share>, guest: Arc<Guest>) -> Self {
        Self { share, guest, message: Vec::new(), short: Vec::new(), moving: Vec::new() }
    }

    /// Replies with an error, or not at all without room.
    fn error(&mut self, chain: &Chain, tag: Tag, errno: Errno) -> u32 {
        let mut reply = Reply { chain, short: &mut self.short };
        encode(&mut reply, tag, &Rmessage::Error(errno));
        put(chain, &self.short)
    }

    /// Copies the message whose head was read; returns an error if its length is wrong.
    fn copy(&mut self, chain: &Chain, arrival: &Arrival, frame: &Frame) -> Result<()> {
        let readable = chain.readable_bytes();
        let (bytes, msize) = (usize::try_from(frame.bytes).unwrap_or(usize::MAX), arrival.msize as usize);
        if !(HEADER_BYTES..=readable).contains(&bytes) || bytes > msize {
            self.share.metrics.invalid();
            let ratelimited_log = &self.share.ratelimited_log;
            ratelimited_log
                .warn(format_args!("a message of {bytes} bytes, in {readable}, with a negotiated maximum of {msize}"));
            return Err(Errno::MSGSIZE);
        }
        let copied = if frame.kind == kind::TWRITE { bytes.min(WRITE_HEAD_BYTES) } else { bytes };
        if copied > MESSAGE_BYTES_MAX {
            return Err(Errno::MSGSIZE);
        }
        self.message.resize(copied, 0);
        // The head is the checked copy, even if the guest has changed it since.
        self.message[..HEADER_BYTES].copy_from_slice(&arrival.head);
        chain.read_at(HEADER_BYTES, &mut self.message[HEADER_BYTES..]);
        Ok(())
    }

    fn serve_copy(&mut self, chain: &Chain, io: &mut Io<'_>, tag: Tag, registered: Registered) -> ChainState {
        let message = std::mem::take(&mut self.message);
        let is_write = message.get(4) == Some(&kind::TWRITE) && message.len() == WRITE_HEAD_BYTES;
        let state = if is_write {
            match WriteHead::decode(&message) {
                Ok((tag, head)) => {
                    self.charge(Some(head.bytes.into()));
                    self.serve_registered(chain, io, (tag, registered), |cx, request| serve_write(cx, &head, request))
                }
                Err(flaw) => self.flawed(chain, tag, &flaw),
            }
        } else {
            match Tmessage::decode(&message) {
                Ok((tag, Tmessage::Version { msize, version })) => self.version(chain, tag, msize, version),
                Ok((tag, Tmessage::Flush { old })) => match self.guest.flush(io.token(), tag, old) {
                    Ok(()) => ChainState::Later,
                    Err(refused) => self.refuse(chain, tag, refused),
                },
                Ok((tag, asked)) => {
                    self.charge(cost_bytes(&asked));
                    self.serve_registered(chain, io, (tag, registered), |cx, request| serve(cx, &asked, request))
                }
                Err(flaw) => self.flawed(chain, tag, &flaw),
            }
        };
        self.message = message;
        state
    }

    fn charge(&self, cost_bytes: Option<u64>) {
        if let (Some(limiter), Some(bytes)) = (&self.share.options.limiter, cost_bytes) {
            limiter.charge(bytes);
        }
    }

    fn version(&mut self, chain: &Chain, tag: Tag, msize: u32, version: &[u8]) -> ChainState {
        let (session, answer) = session::agree_on(&self.share, self.guest.holder(), msize, version);
        self.guest.begin(session);
        encode(&mut Reply { chain, short: &mut self.short }, tag, &answer);
        ChainState::Done(put(chain, &self.short))
    }

    fn flawed(&mut self, chain: &Chain, tag: Tag, flaw: &DecodeError) -> ChainState {
        self.share.metrics.invalid();
        // Any program in a guest can cause names that are too long.
        if !matches!(flaw.errno, Errno::NAMETOOLONG | Errno::OPNOTSUPP) {
            self.share.ratelimited_log.warn(format_args!("{flaw}"));
        }
        ChainState::Done(self.error(chain, tag, flaw.errno))
    }

    /// Rejects a request. Unlike on a socket, a tag in use does not end the session: the reply has a place.
    fn refuse(&mut self, chain: &Chain, tag: Tag, refused: RejectedRequest) -> ChainState {
        let errno = match refused {
            RejectedRequest::Error(errno) => errno,
            RejectedRequest::TagInUse => Errno::INVAL,
        };
        ChainState::Done(self.error(chain, tag, errno))
    }

    /// Serves a request with a session. A panic of the source only fails this request.
    fn serve_registered(
        &mut self,
        chain: &Chain,
        io: &mut Io<'_>,
        (tag, registered): (Tag, Registered),
        serve: impl FnOnce(&Context<'_>, &mut Request<'_, '_>) -> Result<ReplyPlace>,
    ) -> ChainState {
        let token = io.token();
        let (ticket, session) = match registered {
            Ok(registered) => registered,
            Err(refused) => return self.refuse(chain, tag, refused),
        };
        let client = Arc::clone(&self.guest) as Arc<dyn Client>;
        let cx = Context { share: &self.share, client, session: &session, ticket: &ticket, timer: Cell::default() };
        let mut request = Request { reply: Reply { chain, short: &mut self.short }, io, moving: None };
        let served = catch_unwind(AssertUnwindSafe(|| serve(&cx, &mut request))).unwrap_or(Err(Errno::IO));
        if let Some(moving) = request.moving {
            self.expect(token, moving);
        }
        match served {
            Ok(ReplyPlace::Later) => ChainState::Later,
            Ok(ReplyPlace::Parked) => ChainState::Parked,
            ended => ChainState::Done(self.finish(chain, tag, ended)),
        }
    }

    /// Writes the rest of a reply; returns its length.
    fn finish(&mut self, chain: &Chain, tag: Tag, ended: Result<ReplyPlace>) -> u32 {
        match ended {
            Ok(ReplyPlace::Long(bytes)) if bytes <= chain.writable_bytes() => count(bytes),
            Ok(ReplyPlace::Short) if self.short.len() <= chain.writable_bytes() => put(chain, &self.short),
            Ok(_) => self.error(chain, tag, Errno::MSGSIZE),
            Err(errno) => self.error(chain, tag, errno),
        }
    }

    fn expect(&mut self, token: u64, moving: PendingTransfer) {
        let index = slot(token);
        if self.moving.len() <= index {
            self.moving.resize_with(index + 1, || None);
        }
        self.moving[index] = Some(moving);
    }
}

/// Lengths in the used ring have 32 bits.
fn count(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Writes a whole reply, or nothing.
fn put(chain: &Chain, reply: &[u8]) -> u32 {
    if chain.writable_bytes() < reply.len() { 0 } else { count(chain.write_at(0, reply)) }
}

impl QueueHandler for Handler {
    type Message = Vec<u8>;
    type PendingTransfer = PendingTransfer;

    fn accept(&mut self, token: u64, chain: &Chain) {
        let mut head = [0; HEADER_BYTES];
        let (readable, room) = (chain.readable_bytes(), chain.writable_bytes());
        let is_message = room >= ERROR_BYTES && chain.read_at(0, &mut head) == HEADER_BYTES;
        if !is_message {
            self.share.metrics.invalid();
            self.share
                .ratelimited_log
                .warn(format_args!("a request of {readable} bytes with room for {room} is invalid"));
        }
        self.guest.accept(token, is_message.then_some(head));
    }

    fn serve(&mut self, chain: &Chain, io: &mut Io<'_>) -> ChainState {
        let Some(arrival) = self.guest.arrival(io.token()) else { return ChainState::Done(0) };
        let Some(frame) = Frame::peek(&arrival.head) else { return ChainState::Done(0) };
        match self.copy(chain, &arrival, &frame) {
            Ok(()) => self.serve_copy(chain, io, frame.tag, arrival.registered),
            Err(errno) => ChainState::Done(self.error(chain, frame.tag, errno)),
        }
    }

    fn finish_transfer(&mut self, token: u64, chain: &Chain, outcome: io::Result<usize>) -> u32 {
        let Some(moving) = self.detach(token) else { return 0 };
        let outcome = outcome.map_err(|error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error));
        let tag = moving.ticket.tag;
        let mut reply = Reply { chain, short: &mut self.short };
        let ended = moving.end(&self.share, &mut reply, outcome);
        self.finish(chain, tag, ended)
    }

    fn complete(&mut self, token: u64, written: u32) -> u32 {
        if self.guest.complete(token) { written } else { 0 }
    }

    /// Writes a reply of another thread; an empty one for a request without a reply.
    fn deliver(&mut self, chain: &Chain, reply: Vec<u8>) -> u32 {
        put(chain, &reply)
    }

    /// A panic here is a bug in the device (the server catches the source's): the request's state is unknown.
    fn write_error(&mut self, _: &Chain) -> u32 {
        0
    }

    fn end_batch(&mut self) {
        self.guest.note_held();
    }

    /// As on sockets, Tversion and Tflush must be handled before later messages. Other requests are served in any
    /// order: a client waits for a reply before it sends a dependent one.
    fn placement(&self, chain: &Chain) -> Placement {
        let mut head = [0; HEADER_BYTES];
        chain.read_at(0, &mut head);
        match Frame::peek(&head).map(|frame| frame.kind) {
            None | Some(kind::TVERSION | kind::TFLUSH) => Placement::Here,
            Some(_) => Placement::Anywhere,
        }
    }

    fn delay(&self, _queue: usize) -> Option<Duration> {
        self.share.options.limiter.as_ref()?.wait()
    }

    fn detach(&mut self, token: u64) -> Option<PendingTransfer> {
        self.moving.get_mut(slot(token)).and_then(Option::take)
    }

    fn attach(&mut self, token: u64, moving: PendingTransfer) {
        self.expect(token, moving);
    }
}
