//! The connection to a front end, which no end of a server closes.
//!
//! The keeper has the socket, and of the front end's messages those that say what the next server must know: the records. It
//! is also who takes messages from the socket and answers them. A server only looks at a message (`MSG_PEEK`), acts, and
//! commits with one packet what came of it: that the message is taken, the reply, and what is to be recorded. So
//! a message is either acted upon again by the next server, from the state before it, or it is taken, recorded and answered,
//! once.
//!
//! ```text
//! commit:  taken bytes | key | record bytes | record's descriptors | reply bytes | keys to drop   (6 words)
//!          keys to drop | record | reply                      descriptors: the record's, the reply's
//! ```

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::{io::IoSlice, mem::MaybeUninit};

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};

use crate::keeper::Packet;

/// Descriptors of a message and of its reply: as many as vhost-user allows, and one.
pub const FILES_MAX: usize = 33;
const NUMBERS: usize = 6;
/// The longest message and reply.
const MESSAGE_BYTES_MAX: usize = 12 + 4096;

/// Messages by key; the next server reads them in the order of their keys.
pub type Records = BTreeMap<u64, (Vec<u8>, Vec<OwnedFd>)>;

/// A connection that the server before has left.
#[derive(Debug)]
pub struct LeftConnection {
    /// The socket.
    pub socket: OwnedFd,
    /// What is to be known of what the front end said.
    pub records: Records,
}

/// What came of a message.
#[derive(Debug, Default)]
pub struct Commit<'a> {
    /// The length of the message, which is taken from the socket.
    pub taken_bytes: usize,
    /// What is recorded, and under which key; in the place of what was recorded under it before.
    pub record: Option<(u64, &'a [u8], &'a [OwnedFd])>,
    /// What is recorded no more.
    pub drops: &'a [u64],
    /// What the front end is answered; empty: it is not.
    pub reply: &'a [u8],
    /// Descriptors that go with the reply.
    pub reply_files: &'a [OwnedFd],
}

impl<'a> Commit<'a> {
    pub(crate) fn record_bytes(&self) -> &'a [u8] {
        self.record.map_or(&[], |(_, bytes, _)| bytes)
    }

    /// The numbers before the bytes, and the descriptors.
    pub(crate) fn encode(&self) -> (Vec<u8>, Vec<BorrowedFd<'a>>) {
        let (key, _, record_files) = self.record.unwrap_or((0, &[], &[]));
        let lengths = [self.record_bytes().len(), record_files.len(), self.reply.len(), self.drops.len()];
        let numbers = [self.taken_bytes as u64, key].into_iter().chain(lengths.map(|length| length as u64));
        let numbers = numbers.chain(self.drops.iter().copied()).flat_map(u64::to_le_bytes).collect();
        (numbers, record_files.iter().chain(self.reply_files).map(AsFd::as_fd).collect())
    }
}

/// What a packet says, as far as it makes sense.
#[derive(Debug)]
struct DecodedStep {
    taken_bytes: usize,
    record: Option<(u64, Vec<u8>, Vec<OwnedFd>)>,
    drops: Vec<u64>,
    reply: Vec<u8>,
    reply_files: Vec<OwnedFd>,
}

fn decode(body: &[u8], mut files: Vec<OwnedFd>) -> Option<DecodedStep> {
    let words = |bytes: &[u8]| -> Vec<u64> {
        bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes)).collect()
    };
    let (head, rest) = body.split_at_checked(NUMBERS * 8)?;
    let numbers = words(head);
    let number = |at: usize| usize::try_from(numbers[at]).ok();
    let (drops, rest) = rest.split_at_checked(number(5)?.checked_mul(8)?)?;
    let (record, reply) = rest.split_at_checked(number(2)?)?;
    let (taken_bytes, record_files) = (number(0)?, number(3)?);
    if reply.len() != number(4)? || taken_bytes > MESSAGE_BYTES_MAX || record_files > files.len() {
        return None;
    }
    let reply_files = files.split_off(record_files);
    let record = (numbers[1] != 0).then(|| (numbers[1], record.to_vec(), files));
    Some(DecodedStep { taken_bytes, record, drops: words(drops), reply: reply.to_vec(), reply_files })
}

/// Makes a server's step.
pub(crate) fn execute_step(packet: Packet, socket: BorrowedFd<'_>, records: &mut Records) -> Result<(), Errno> {
    let DecodedStep { taken_bytes, record, drops, reply, reply_files } =
        decode(&packet.body, packet.files).ok_or(Errno::BADMSG)?;
    for key in drops {
        records.remove(&key);
    }
    if let Some((key, bytes, files)) = record {
        records.insert(key, (bytes, files));
    }
    // The front end may have gone: the server will notice.
    let _ = take(socket, taken_bytes);
    let _ = answer(socket, &reply, &reply_files);
    Ok(())
}

/// Takes so many bytes from a front end's socket, without waiting for them, and closes what came with them.
///
/// # Errors
/// They are not there.
pub fn take(socket: BorrowedFd<'_>, mut bytes: usize) -> Result<(), Errno> {
    let mut buffer = [0; 512];
    while bytes > 0 {
        let wanted = bytes.min(buffer.len());
        match recv(socket, &mut buffer[..wanted], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Err(Errno::CONNRESET),
            Ok((_, came)) => bytes -= came.min(bytes),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Answers a front end, without waiting for it: one that does not read its answers gets none.
///
/// # Errors
/// It has gone, or does not read.
pub fn answer(socket: BorrowedFd<'_>, reply: &[u8], files: &[OwnedFd]) -> Result<(), Errno> {
    if reply.is_empty() {
        return Ok(());
    }
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(Errno::TOOMANYREFS);
    }
    let sent = loop {
        match sendmsg(socket, &[IoSlice::new(reply)], &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => break other,
        }
    };
    match sent {
        Ok(sent) if sent == reply.len() => Ok(()),
        // A part of an answer is none, and what follows would be taken for the rest.
        other => {
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
            other.and(Err(Errno::AGAIN))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn files(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| std::fs::File::open("/dev/null").expect("it is there").into()).collect()
    }

    #[test]
    fn a_commit_is_read_as_it_was_written() {
        let (mine, replys) = (files(2), files(1));
        let commit = Commit {
            taken_bytes: 20,
            record: Some((7, b"record", &mine)),
            drops: &[3, 4],
            reply: b"reply",
            reply_files: &replys,
        };
        let (numbers, sent) = commit.encode();
        assert_eq!(sent.len(), 3);
        let body = [&numbers[..], commit.record_bytes(), commit.reply].concat();
        let step = decode(&body, files(3)).expect("it makes sense");
        let (key, bytes, record_files) = step.record.expect("there is one");
        assert_eq!((step.taken_bytes, key, &bytes[..], record_files.len()), (20, 7, &b"record"[..], 2));
        assert_eq!((&step.drops[..], &step.reply[..], step.reply_files.len()), (&[3, 4][..], &b"reply"[..], 1));
        // With a byte, or a descriptor, too few.
        assert!(decode(&body[..body.len() - 1], files(3)).is_none());
        assert!(decode(&body, files(1)).is_none());
    }

    proptest! {
        #[test]
        fn any_packet_is_read_without_a_panic(words in proptest::collection::vec(any::<u64>(), 0..12), small in any::<u64>()) {
            let body: Vec<u8> = words.iter().flat_map(|word| (word & small).to_le_bytes()).collect();
            let _ = decode(&body, files(1));
        }
    }
}
