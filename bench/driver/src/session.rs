//! FUSE requests over a queue, and their replies.

use ferry_wire::fuse::abi::{InHeader, Opcode, OutHeader};
use ferry_wire::fuse::{Reply, Request};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::fuse::{ReplyKind, decode_reply, encode, reply_kind};
use crate::queue::{Completion, Ticket};
use crate::{Driver, Error, Result};

/// The inode of the share's root directory.
pub const ROOT: u64 = 1;

/// On whose behalf requests are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Process, in the guest.
    pub pid: u32,
}

/// A request's header. `len` is that of the arguments (and data) behind it.
pub fn header(opcode: u32, unique: u64, node: u64, len: usize, caller: Caller) -> InHeader {
    InHeader {
        len: u32::try_from(size_of::<InHeader>() + len).unwrap_or(u32::MAX),
        opcode,
        unique,
        nodeid: node,
        uid: caller.uid,
        gid: caller.gid,
        pid: caller.pid,
        ..InHeader::ZERO
    }
}

/// Splits a reply into its header and the rest, after checking that they belong together.
///
/// # Errors
/// [`Error::BadReply`] when the length is wrong, [`Error::Errno`] for an error reply.
pub fn parse_reply(bytes: &[u8], used_len: u32) -> Result<(OutHeader, &[u8])> {
    let (header, body) = OutHeader::read_from_prefix(bytes)
        .map_err(|_| Error::BadReply(format!("{} bytes are no header", bytes.len())))?;
    if header.len != used_len || usize::try_from(header.len) != Ok(bytes.len()) {
        return Err(Error::BadReply(format!(
            "the header says {} bytes, the used ring {used_len}, the reply area holds {}",
            header.len,
            bytes.len()
        )));
    }
    match header.error {
        0 => Ok((header, body)),
        error @ -4095..0 if body.is_empty() => Err(Error::Errno(-error)),
        error => Err(Error::BadReply(format!("error {error} with {} bytes behind it", body.len()))),
    }
}

/// Reads a structure at the front of a reply's body.
///
/// # Errors
/// [`Error::BadReply`] when the body is too short.
pub fn parse<T: FromBytes + KnownLayout + Immutable>(body: &[u8]) -> Result<(T, &[u8])> {
    T::read_from_prefix(body)
        .map_err(|_| Error::BadReply(format!("{} bytes where {} are due", body.len(), size_of::<T>())))
}

impl Driver {
    /// Sends a request on the selected queue: `args` become one descriptor behind the header's, `data` another; the
    /// reply area is one descriptor for the header and one of `reply` bytes. It is not waited for.
    ///
    /// # Errors
    /// As [`crate::Queue::submit`].
    pub fn send(&mut self, opcode: Opcode, node: u64, args: &[&[u8]], data: &[u8], reply: usize) -> Result<Ticket> {
        let args = args.concat();
        let (caller, selected) = (self.caller, self.selected);
        let queue = self.queue(selected);
        let header = header(opcode.as_raw(), queue.peek_unique(), node, args.len() + data.len(), caller);
        let pieces = [header.as_bytes(), &args, data];
        let out: Vec<&[u8]> = pieces.into_iter().filter(|piece| !piece.is_empty()).collect();
        let room = [size_of::<OutHeader>(), reply];
        match (Opcode::wants_reply(opcode.as_raw()), reply) {
            (false, _) => queue.submit(&out, &[]),
            (true, 0) => queue.submit(&out, &room[..1]),
            (true, _) => queue.submit(&out, &room),
        }
    }

    /// Waits for the reply to a request of [`Driver::send`] on the selected queue; returns its body.
    ///
    /// # Errors
    /// [`Error::Errno`] for an error reply; [`Error::BadReply`]; as [`crate::Queue::wait_for`].
    pub fn receive(&mut self, ticket: Ticket) -> Result<Vec<u8>> {
        let (timeout, selected) = (self.config().timeout, self.selected);
        let done = self.queue(selected).wait_for(ticket, timeout)?;
        body(&done).map(<[u8]>::to_vec)
    }

    /// A request and its reply's body, in raw bytes; see [`Driver::send`].
    ///
    /// # Errors
    /// As [`Driver::send`] and [`Driver::receive`].
    pub fn ask(&mut self, opcode: Opcode, node: u64, args: &[&[u8]], data: &[u8], reply: usize) -> Result<Vec<u8>> {
        let ticket = self.send(opcode, node, args, data, reply)?;
        self.receive(ticket)
    }

    /// A request with a structure of arguments, and the structure that the reply consists of.
    pub(crate) fn ask_for<A, R>(&mut self, opcode: Opcode, node: u64, args: &A, name: &[&[u8]]) -> Result<R>
    where
        A: IntoBytes + Immutable,
        R: FromBytes + KnownLayout + Immutable,
    {
        let pieces: Vec<&[u8]> = [args.as_bytes()].into_iter().chain(name.iter().copied()).collect();
        let body = self.ask(opcode, node, &pieces, &[], size_of::<R>())?;
        parse(&body).map(|(reply, _)| reply)
    }

    /// A request whose reply has no body.
    pub(crate) fn tell<A: IntoBytes + Immutable>(
        &mut self,
        opcode: Opcode,
        node: u64,
        args: &A,
        name: &[&[u8]],
    ) -> Result<()> {
        let pieces: Vec<&[u8]> = [args.as_bytes()].into_iter().chain(name.iter().copied()).collect();
        self.ask(opcode, node, &pieces, &[], 0).map(drop)
    }
}

/// The body of a completed request's reply.
///
/// # Errors
/// As [`parse_reply`]; also [`Error::BadReply`] when it answers another request.
pub fn body(done: &Completion) -> Result<&[u8]> {
    let sent = done.ticket.unique();
    match OutHeader::read_from_prefix(&done.reply) {
        Ok((header, _)) if header.unique != sent => {
            Err(Error::BadReply(format!("it answers request {}, not {sent}", header.unique)))
        }
        _ => parse_reply(&done.reply, done.used_len).map(|(_, body)| body),
    }
}

/// A reply that [`Driver::call`] waited for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypedReply {
    kind: ReplyKind,
    bytes: Vec<u8>,
}

impl TypedReply {
    /// The reply.
    ///
    /// # Errors
    /// [`Error::Errno`] for an error reply, [`Error::BadReply`] when it is none of the kind that the request asks for.
    pub fn get(&self) -> Result<Reply<'_>> {
        let decoded = decode_reply(self.kind, &self.bytes).map_err(|flaw| Error::BadReply(flaw.to_string()))?;
        decoded.1.map_err(|errno| Error::Errno(errno.raw_os_error()))
    }

    /// The reply as it came, with its header.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Driver {
    /// A typed request on any queue, with `data` behind it (a WRITE's), and room for `reply` bytes behind the reply's
    /// header. Its `unique` is replaced. `None` for requests that have no reply.
    ///
    /// # Errors
    /// As [`crate::Queue::submit`] and [`crate::Queue::wait_for`]; [`Error::BadReply`] when the reply is not to this
    /// request. An error reply is an `Ok` here: see [`TypedReply::get`].
    pub fn call(
        &mut self,
        queue: usize,
        request: &Request<'_>,
        data: &[u8],
        reply: usize,
    ) -> Result<Option<TypedReply>> {
        let (timeout, negotiated) = (self.config().timeout, self.negotiated);
        let queue = self.queue(queue);
        let request = Request { unique: queue.peek_unique(), ..*request };
        let mut bytes = Vec::new();
        encode(&request, &negotiated, &mut bytes);
        let (head, args) = bytes.split_at(size_of::<InHeader>());
        let out: Vec<&[u8]> = [head, args, data].into_iter().filter(|piece| !piece.is_empty()).collect();
        let kind = reply_kind(&request.operation);
        let room = [size_of::<OutHeader>(), reply];
        let room = match (kind, reply) {
            (None, _) => &[][..],
            (Some(_), 0) => &room[..1],
            (Some(_), _) => &room,
        };
        let ticket = queue.submit(&out, room)?;
        let done = queue.wait_for(ticket, timeout)?;
        let Some(kind) = kind else { return Ok(None) };
        match body(&done) {
            Ok(_) | Err(Error::Errno(_)) => Ok(Some(TypedReply { kind, bytes: done.reply })),
            Err(error) => Err(error),
        }
    }
}
