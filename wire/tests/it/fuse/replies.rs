//! Replies.

use std::time::Duration;

use ferry_driver::fuse::{ReplyKind, decode_reply};
use ferry_vfs::{Attr, Errno};
use ferry_wire::fuse::*;
use proptest::prelude::*;
use proptest::strategy::ValueTree;

use super::seed::seed;
use super::{BARE, FULL};

const KINDS: [ReplyKind; 17] = [
    ReplyKind::Empty,
    ReplyKind::Entry,
    ReplyKind::Created,
    ReplyKind::Attr,
    ReplyKind::Statx,
    ReplyKind::Open,
    ReplyKind::Write,
    ReplyKind::CopyFileRange64,
    ReplyKind::Statfs,
    ReplyKind::XattrSize,
    ReplyKind::Lock,
    ReplyKind::Lseek,
    ReplyKind::Ioctl,
    ReplyKind::Poll,
    ReplyKind::Bmap,
    ReplyKind::Init,
    ReplyKind::Bytes,
];

fn whole(reply: &Reply<'_>, session: &Negotiated) -> Vec<u8> {
    let mut head = [0xff; REPLY_HEAD_BYTES_MAX];
    [reply.encode(42, session, &mut head), reply.payload()].concat()
}

proptest! {
    #[test]
    fn every_reply_round_trips(seed in seed()) {
        for (kind, reply) in seed.replies() {
            let bytes = whole(&reply, &FULL);
            prop_assert_eq!(decode_reply(kind, &bytes), Ok((42, Ok(reply))));
        }
    }

    #[test]
    fn a_reply_of_another_length_is_refused(seed in seed()) {
        for (kind, reply) in seed.replies() {
            let bytes = whole(&reply, &FULL);
            for len in 0..bytes.len() {
                prop_assert!(decode_reply(kind, &bytes[..len]).is_err());
            }
        }
    }

    #[test]
    fn decoding_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400), whole in any::<bool>()) {
        let mut bytes = bytes;
        if whole && bytes.len() >= 16 {
            super::set_len(&mut bytes);
            bytes[4..8].fill(0);
        }
        for kind in KINDS {
            let _ = decode_reply(kind, &bytes);
        }
    }
}

#[test]
fn errors_round_trip() {
    let bytes = encode_error(5, Errno::NOENT);
    assert_eq!(bytes, [16, 0, 0, 0, 254, 255, 255, 255, 5, 0, 0, 0, 0, 0, 0, 0]);
    for kind in KINDS {
        assert_eq!(decode_reply(kind, &bytes), Ok((5, Err(Errno::NOENT))));
    }
    // Linux drops replies with other numbers.
    for strange in [512, 4095] {
        let bytes = encode_error(5, Errno::from_raw_os_error(strange));
        let (_, reply) = decode_reply(ReplyKind::Empty, &bytes).unwrap();
        assert_eq!(reply, Err(Errno::IO));
    }
}

#[test]
fn the_reply_to_a_read_can_be_encoded_as_head_alone() {
    let head = Reply::encode_bytes_head(6, 4096);
    assert_eq!(head, [16, 16, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0]);
    let mut other = [0; REPLY_HEAD_BYTES_MAX];
    assert_eq!(Reply::Bytes(&[0; 4096]).encode(6, &FULL, &mut other), head);
}

#[test]
fn flags_are_sent_only_to_clients_that_support_them() {
    let attr = Attr { submount: true, ..Attr::default() };
    let reply = Reply::Attr { attr, timeout: Duration::ZERO, dax: true };
    for (session, told) in [(&FULL, true), (&BARE, false)] {
        let bytes = whole(&reply, session);
        let (_, Ok(Reply::Attr { attr, dax, .. })) = decode_reply(ReplyKind::Attr, &bytes).unwrap() else {
            panic!("no attributes")
        };
        assert_eq!((attr.submount, dax), (told, told));
    }
}

#[test]
fn heads_have_the_lengths_of_the_protocol() {
    let mut head = [0; REPLY_HEAD_BYTES_MAX];
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let seed = seed().new_tree(&mut runner).unwrap().current();
    for (kind, reply) in seed.replies() {
        let fixed = match kind {
            ReplyKind::Empty | ReplyKind::Bytes => 0,
            ReplyKind::Entry => 128,
            ReplyKind::Created => 144,
            ReplyKind::Attr => 104,
            ReplyKind::Statx => 288,
            ReplyKind::Open | ReplyKind::Ioctl => 16,
            ReplyKind::Statfs => 80,
            ReplyKind::Lock => 24,
            ReplyKind::Init => 64,
            _ => 8,
        };
        assert_eq!(reply.encode(1, &FULL, &mut head).len(), 16 + fixed, "{kind:?}");
    }
}
