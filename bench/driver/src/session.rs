//! FUSE requests over a queue, and their replies.

use ferry_wire::fuse::abi::{InHeader, Opcode, OutHeader};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

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
    let (header, body) = parse_reply(&done.reply, done.used_len).or_else(|error| match error {
        // The header of an error reply is checked like any other.
        Error::Errno(_) if OutHeader::read_from_prefix(&done.reply).is_ok_and(|(h, _)| h.unique != done.ticket.unique()) => {
            Err(Error::BadReply("an error reply to another request".into()))
        }
        error => Err(error),
    })?;
    if header.unique == done.ticket.unique() {
        return Ok(body);
    }
    Err(Error::BadReply(format!("it answers request {}, not {}", header.unique, done.ticket.unique())))
}
