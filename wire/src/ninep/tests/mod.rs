//! Tests of the codec as a whole.

mod malformed;
mod material;

use ferry_vfs::{Attr, DirItem, FileType, Ino, Name, OFlags};
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use material::{replies, requests, seed};

/// Returns the message with its length set.
fn framed(mut message: Vec<u8>) -> Vec<u8> {
    let bytes = u32::try_from(message.len()).unwrap();
    if let Some(field) = message.get_mut(..4) {
        field.copy_from_slice(&bytes.to_le_bytes());
    }
    message
}

fn encoded(request: &Request<'_>, tag: Tag) -> Vec<u8> {
    let mut message = b"before".to_vec();
    request.encode(tag, &mut message);
    message.split_off(6)
}

/// A Tfsync without its second field, as old clients send it.
const FSYNC_OLD_BYTES: usize = 11;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn requests_round_trip_and_truncated_ones_are_refused(seed in seed(), tag in any::<u16>()) {
        let mut steps = Vec::new();
        for request in requests(&seed, &mut steps) {
            let message = encoded(&request, Tag(tag));
            prop_assert_eq!(Request::decode(&message), Ok((Tag(tag), request)));
            prop_assert_eq!(Frame::peek(&message).map(|frame| frame.kind), Some(request.kind()));
            for end in 0..message.len() {
                let part = message[..end].to_vec();
                prop_assert!(Request::decode(&part).is_err(), "{:?} cut to {}", request, end);
                if let (Request::Fsync { fid, .. }, FSYNC_OLD_BYTES) = (request, end) {
                    let old = (Tag(tag), Request::Fsync { fid, data_only: false });
                    let part = framed(part);
                    prop_assert_eq!(Request::decode(&part), Ok(old));
                    continue;
                }
                prop_assert!(Request::decode(&framed(part)).is_err(), "{:?} cut to {}", request, end);
            }
            let longer = [&message[..], b"\0"].concat();
            prop_assert!(Request::decode(&longer).is_err());
            prop_assert!(Request::decode(&framed(longer)).is_err());
        }
    }

    #[test]
    fn replies_round_trip_and_truncated_ones_are_refused(seed in seed(), tag in any::<u16>()) {
        for reply in replies(&seed) {
            let mut message = Vec::new();
            reply.encode(Tag(tag), &mut message);
            prop_assert_eq!(Reply::decode(&message), Ok((Tag(tag), reply)));
            for end in 0..message.len() {
                let part = message[..end].to_vec();
                prop_assert!(Reply::decode(&part).is_err(), "{:?} cut to {}", reply, end);
                prop_assert!(Reply::decode(&framed(part)).is_err(), "{:?} cut to {}", reply, end);
            }
        }
    }

    #[test]
    fn any_bytes_are_a_request_or_an_error(kind in proptest::sample::select(&kind::ALL[..]), bytes in vec(any::<u8>(), 0..120)) {
        let message = framed([&[0, 0, 0, 0, kind, 1, 0][..], &bytes].concat());
        match Request::decode(&message) {
            Ok((tag, request)) => {
                let again = encoded(&request, tag);
                prop_assert_eq!(Request::decode(&again), Ok((tag, request)));
            }
            Err(flaw) => prop_assert_eq!((flaw.tag, flaw.kind), (Some(Tag(1)), kind)),
        }
        let answer = framed([&[0, 0, 0, 0, kind + 1, 1, 0][..], &bytes].concat());
        if let Ok((tag, reply)) = Reply::decode(&answer) {
            let mut again = Vec::new();
            reply.encode(tag, &mut again);
            prop_assert_eq!(Reply::decode(&again), Ok((tag, reply)));
        }
    }

    #[test]
    fn flipped_bits_never_panic(seed in seed(), flips in vec(any::<(prop::sample::Index, u8)>(), 40)) {
        let mut steps = Vec::new();
        for request in requests(&seed, &mut steps) {
            let message = encoded(&request, Tag(3));
            for (index, bits) in &flips {
                let mut message = message.clone();
                let at = index.index(message.len());
                message[at] ^= bits;
                let _ = Request::decode(&message);
                let _ = Reply::decode(&message);
            }
        }
    }

    #[test]
    fn listings_round_trip_and_stay_within_their_limit(seed in seed(), room in 0..200_usize) {
        let items: Vec<_> = seed.names.iter().enumerate().map(|(at, name)| DirItem {
            ino: seed.words[at], next: seed.words[at + 1], kind: FileType::Socket, name,
        }).collect();
        let mut data = Vec::new();
        let mut writer = DirWriter::new(&mut data, room);
        let told: Vec<_> = items.iter().filter(|item| writer.push(item)).collect();
        prop_assert!(data.len() <= room);
        let found: Vec<_> = DirEntries::new(&data).map(|entry| (entry.qid.path, entry.next, entry.kind, entry.name)).collect();
        let expected: Vec<_> = told.iter().map(|item| (item.ino, item.next, item.kind, item.name)).collect();
        prop_assert_eq!(found, expected);
        let fits = items.first().is_some_and(|item| dirent_bytes(item.name) <= room);
        prop_assert_eq!(fits, told.first() == items.first().as_ref());
        // A listing that is cut off anywhere has no other entries.
        for end in 0..data.len() {
            prop_assert!(DirEntries::new(&data[..end]).count() <= told.len());
        }
    }
}

/// Clients that have their own constants send `P9_DOTL_SYNC` without `P9_DOTL_DSYNC`.
#[test]
fn the_bit_of_o_sync_alone_means_synchronous_writes() {
    let message = |raw: u32| [&b"\x0f\0\0\0\x0c\x07\0\x01\0\0\0"[..], &raw.to_le_bytes()].concat();
    let open = Request::Open { fid: Fid(1), flags: OFlags::WRONLY | OFlags::SYNC };
    for raw in [0o4_000_001, 0o4_010_001] {
        assert_eq!(Request::decode(&message(raw)), Ok((Tag(7), open)), "{raw:o}");
    }
    assert_eq!(encoded(&open, Tag(7)), message(0o4_010_001));
}

/// Bytes as Linux's client formats them (`net/9p/client.c`).
#[test]
fn messages_have_the_layout_of_linux() {
    let name = |text: &'static str| Name::new(text.as_bytes()).unwrap();
    let mut buffer = Vec::new();
    let steps = Steps::write(&mut buffer, [Step::Child(name("ab")), Step::Parent]);
    let cases: [(Request<'_>, &[u8]); 5] = [
        (Request::Version { msize: 0x0010_0000, version: VERSION }, b"\x15\0\0\0\x64\x07\0\0\0\x10\0\x08\09P2000.L"),
        (
            Request::Attach { fid: Fid(1), afid: Fid::NONE, user: User { name: b"", uid: Some(5) }, tree: b"/" },
            b"\x18\0\0\0\x68\x07\0\x01\0\0\0\xff\xff\xff\xff\0\0\x01\0/\x05\0\0\0",
        ),
        (
            Request::Walk { fid: Fid(1), new_fid: Fid(2), steps },
            b"\x19\0\0\0\x6e\x07\0\x01\0\0\0\x02\0\0\0\x02\0\x02\0ab\x02\0..",
        ),
        (
            Request::Create { fid: Fid(1), name: name("f"), flags: OFlags::WRONLY | OFlags::EXCL, mode: 0o644, gid: 9 },
            b"\x1a\0\0\0\x0e\x07\0\x01\0\0\0\x01\0f\x81\0\0\0\xa4\x01\0\0\x09\0\0\0",
        ),
        (
            Request::Mknod { dir: Fid(1), name: name("n"), mode: 0o020_600, rdev: 0x0010_0205, gid: 0 },
            b"\x1e\0\0\0\x12\x07\0\x01\0\0\0\x01\0n\x80\x21\0\0\x02\0\0\0\x05\x01\0\0\0\0\0\0",
        ),
    ];
    for (request, bytes) in cases {
        assert_eq!(encoded(&request, Tag(7)), bytes, "{request:?}");
    }
}

/// FreeBSD sends all bits for the device number of what is no device.
#[test]
fn attributes_that_linux_does_not_have_are_cut() {
    let attr = Attr::new(Ino(2), FileType::RegularFile, 0o600);
    let mut message = Vec::new();
    Reply::Getattr(Getattr { qid: Qid::default(), attr, generation: 0 }).encode(Tag(1), &mut message);
    for field in [40, 48, 64, 88] {
        message[field..field + 8].fill(0xff);
    }
    let Ok((_, Reply::Getattr(Getattr { attr, .. }))) = Reply::decode(&message) else { panic!("it is refused") };
    assert_eq!((attr.nlink, attr.rdev, attr.blksize, attr.atime.nsec), (u32::MAX, 0, u32::MAX, 999_999_999));
    // A character device.
    message[28..32].copy_from_slice(&0o020_600_u32.to_le_bytes());
    message[48..56].copy_from_slice(&0x105_u64.to_le_bytes());
    let device = Reply::decode(&message).unwrap().1;
    assert!(matches!(device, Reply::Getattr(Getattr { attr: Attr { rdev: 0x105, .. }, .. })), "{device:?}");
}

#[test]
fn a_head_equals_the_start_of_the_whole_request() {
    let (fid, offset) = (Fid(0x0102_0304), 0x0506_0708_090a_0b0c);
    for (kind, request) in [
        (kind::TREAD, Request::Read { fid, offset, bytes_max: 4 }),
        (kind::TWRITE, Request::Write { fid, offset, data: b"data" }),
    ] {
        assert_eq!(encode_transfer_head(kind, fid, offset, 4), encoded(&request, Tag(0))[..WRITE_HEAD_BYTES]);
    }
}

#[test]
fn a_head_equals_the_start_of_the_whole_reply() {
    for (kind, reply) in [(kind::TREAD, Reply::Read(b"data")), (kind::TREADDIR, Reply::Readdir(b"data"))] {
        let mut whole = Vec::new();
        reply.encode(Tag(300), &mut whole);
        assert_eq!(encode_data_head(kind, Tag(300), 4), whole[..READ_HEAD_BYTES]);
    }
}

#[test]
fn versions_are_negotiated_as_in_the_manual() {
    const MAX: u32 = 1 << 20;
    for (msize, version, agreed) in [
        (8192, "9P2000.L", VersionReply::Session { msize: 8192, version: VERSION }),
        (u32::MAX, "9P2000.L", VersionReply::Session { msize: MAX, version: VERSION }),
        (MSIZE_MIN, "9P2000.L", VersionReply::Session { msize: MSIZE_MIN, version: VERSION }),
        (65536, "9P2000.L.Google.12", VersionReply::Session { msize: 65536, version: VERSION }),
        (8192, "9P2000.L.ferry", VersionReply::Session { msize: 8192, version: VERSION_OF_FERRY }),
        (8192, "9P2000.L.ferry2", VersionReply::Session { msize: 8192, version: VERSION }),
        (MSIZE_MIN - 1, "9P2000.L", VersionReply::TooSmall),
        (0, "9P2000.L", VersionReply::TooSmall),
        (8192, "9P2000", VersionReply::Unknown),
        (8192, "9P2000.u", VersionReply::Unknown),
        (8192, "9P2000.Lx", VersionReply::Unknown),
        (8192, "9P2001.L", VersionReply::Unknown),
        (8192, "9p2000.L", VersionReply::Unknown),
        (0, "unknown", VersionReply::Unknown),
        (8192, "", VersionReply::Unknown),
    ] {
        assert_eq!(agree(msize, version.as_bytes(), MAX), agreed, "{version}, {msize}");
    }
}
