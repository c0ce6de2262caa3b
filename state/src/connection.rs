//! The connection to a front end, which outlives the server.
//!
//! The keeper owns the socket and stores the front end's messages that the next server needs: the records. Only the
//! keeper takes messages from the socket and sends replies. A server peeks at a message (`MSG_PEEK`), acts, and then
//! commits the outcome in one packet: the message is taken, the reply, and the record. So the next server either
//! repeats a message from the state before it, or finds it taken, recorded and answered exactly once.
//!
//! ```text
//! commit:  taken bytes | key | record bytes | record's descriptors | reply bytes | keys to drop   (6 words)
//!          keys to drop | record | reply                      descriptors: the record's, the reply's
//! ```

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::{io::IoSlice, mem::MaybeUninit};

use rustix::cmsg_space;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};

use crate::keeper::Packet;

/// The maximum number of descriptors of a message and its reply: 32, the limit of vhost-user, for the message, and one for the reply.
pub(crate) const FILES_MAX: usize = 33;
const NUMBERS: usize = 6;
/// The longest message and reply.
const MESSAGE_BYTES_MAX: usize = 12 + 4096;

/// Messages by key; the next server reads them in the order of their keys.
pub type Records = BTreeMap<u64, (Vec<u8>, Vec<OwnedFd>)>;

/// A connection that the previous server left.
#[derive(Debug)]
pub struct InheritedConnection {
    /// The socket.
    pub socket: OwnedFd,
    /// The recorded messages of the front end.
    pub records: Records,
}

/// The outcome of one message.
#[derive(Debug, Default)]
pub struct Commit<'a> {
    /// The length of the message to take from the socket, in bytes.
    pub taken_bytes: usize,
    /// The key and contents of the record, which replaces a previous one with this key.
    pub record: Option<(u64, &'a [u8], &'a [OwnedFd])>,
    /// The keys of the records to remove.
    pub drops: &'a [u64],
    /// The reply to the front end; empty: none.
    pub reply: &'a [u8],
    /// The descriptors of the reply.
    pub reply_files: &'a [OwnedFd],
}

impl<'a> Commit<'a> {
    pub(crate) fn record_bytes(&self) -> &'a [u8] {
        self.record.map_or(&[], |(_, bytes, _)| bytes)
    }

    /// Returns the packet: numbers and bytes, and the descriptors.
    pub(crate) fn encode(&self) -> (Vec<u8>, Vec<BorrowedFd<'a>>) {
        let (key, _, record_files) = self.record.unwrap_or((0, &[], &[]));
        let lengths = [self.record_bytes().len(), record_files.len(), self.reply.len(), self.drops.len()];
        let numbers = [self.taken_bytes as u64, key].into_iter().chain(lengths.map(|length| length as u64));
        let numbers = numbers.chain(self.drops.iter().copied()).flat_map(u64::to_le_bytes).collect();
        (numbers, record_files.iter().chain(self.reply_files).map(AsFd::as_fd).collect())
    }
}

/// A decoded commit packet.
#[derive(Debug)]
struct DecodedCommit {
    taken_bytes: usize,
    record: Option<(u64, Vec<u8>, Vec<OwnedFd>)>,
    drops: Vec<u64>,
    reply: Vec<u8>,
    reply_files: Vec<OwnedFd>,
}

fn decode(body: &[u8], mut files: Vec<OwnedFd>) -> Option<DecodedCommit> {
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
    Some(DecodedCommit { taken_bytes, record, drops: words(drops), reply: reply.to_vec(), reply_files })
}

/// Applies a commit.
pub(crate) fn apply_commit(packet: Packet, socket: BorrowedFd<'_>, records: &mut Records) -> Result<(), Errno> {
    let DecodedCommit { taken_bytes, record, drops, reply, reply_files } =
        decode(&packet.body, packet.files).ok_or(Errno::BADMSG)?;
    for key in drops {
        records.remove(&key);
    }
    if let Some((key, bytes, files)) = record {
        records.insert(key, (bytes, files));
    }
    // If the front end is gone, the server notices.
    let _ = take(socket, taken_bytes);
    let _ = answer(socket, &reply, &reply_files);
    Ok(())
}

/// Takes this many bytes from a front end's socket without blocking, and closes their descriptors.
fn take(socket: BorrowedFd<'_>, mut bytes: usize) -> Result<(), Errno> {
    let mut buffer = [0; 512];
    while bytes > 0 {
        let wanted = bytes.min(buffer.len());
        match retry_on_intr(|| recv(socket, &mut buffer[..wanted], RecvFlags::DONTWAIT))? {
            (_, 0) => return Err(Errno::CONNRESET),
            (_, came) => bytes -= came.min(bytes),
        }
    }
    Ok(())
}

/// Replies to a front end without blocking: one that does not read its replies gets none.
fn answer(socket: BorrowedFd<'_>, reply: &[u8], files: &[OwnedFd]) -> Result<(), Errno> {
    if reply.is_empty() {
        return Ok(());
    }
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(Errno::TOOMANYREFS);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match retry_on_intr(|| sendmsg(socket, &[IoSlice::new(reply)], &mut control, flags)) {
        Ok(sent) if sent == reply.len() => Ok(()),
        // A partial reply is useless, and the next one would be taken for its rest.
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
    fn a_commit_round_trips() {
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
        // With one byte, or one descriptor, too few.
        assert!(decode(&body[..body.len() - 1], files(3)).is_none());
        assert!(decode(&body, files(1)).is_none());
    }

    proptest! {
        #[test]
        fn any_packet_is_decoded_without_a_panic(words in proptest::collection::vec(any::<u64>(), 0..12), small in any::<u64>()) {
            let body: Vec<u8> = words.iter().flat_map(|word| (word & small).to_le_bytes()).collect();
            let _ = decode(&body, files(1));
        }
    }
}
