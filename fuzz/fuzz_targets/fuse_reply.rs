//! Replies: what decodes is the same again after another round trip.
#![no_main]

use ferry_driver::fuse::{ReplyKind, decode_reply};
use ferry_wire::fuse::*;
use libfuzzer_sys::fuzz_target;

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

fuzz_target!(|bytes: &[u8]| {
    // The first byte chooses the kind, and whether the header's length is made true.
    let Some((choice, message)) = bytes.split_first() else { return };
    let kind = KINDS[usize::from(choice >> 1) % KINDS.len()];
    let mut message = message.to_vec();
    if choice & 1 == 0 && message.len() >= 4 {
        let len = u32::try_from(message.len()).expect("the fuzzer's inputs are short");
        message[..4].copy_from_slice(&len.to_le_bytes());
    }
    let session = Negotiated { flags: InitFlags::ALL, ..Negotiated::BEFORE_INIT };
    match decode_reply(kind, &message) {
        Ok((unique, Ok(reply))) => {
            let mut head = [0; REPLY_HEAD_BYTES_MAX];
            let again = [reply.encode(unique, &session, &mut head), reply.payload()].concat();
            assert_eq!(decode_reply(kind, &again), Ok((unique, Ok(reply))));
        }
        Ok((unique, Err(errno))) => {
            assert_eq!(decode_reply(kind, &encode_error(unique, errno)), Ok((unique, Err(errno))));
        }
        Err(flaw) => {
            let _ = flaw.to_string();
        }
    }
});
