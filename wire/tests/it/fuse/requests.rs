//! Requests: round trips, and decoding of messages with changed bits and bytes.

use std::collections::BTreeSet;

use ferry_driver::fuse as client;
use ferry_vfs::{Handle, IoRange, OFlags};
use ferry_wire::fuse::abi::ForgetOne;
use ferry_wire::fuse::*;
use proptest::prelude::*;
use proptest::strategy::ValueTree;

use super::seed::seed;
use super::{BARE, FULL, SESSIONS, set_len};

/// Encodes a request as the caller of `decode` passes it: without the payload of a WRITE.
fn encode(request: &Request<'_>, session: &Negotiated) -> (Vec<u8>, usize) {
    let mut head = Vec::new();
    client::encode(request, session, &mut head);
    let header: &[u8; IN_HEADER_BYTES] = head.first_chunk().unwrap();
    let bytes = peek(header).len as usize;
    assert_eq!(peek(header).head_bytes(bytes), head.len());
    (head, bytes)
}

fn holds_only_valid_parts(operation: &Operation<'_>) -> bool {
    let name = |name: &ferry_vfs::Name<'_>| {
        let bytes = name.as_bytes();
        (1..=255).contains(&bytes.len())
            && !matches!(bytes, b"." | b"..")
            && !bytes.contains(&b'/')
            && !bytes.contains(&0)
    };
    let string = |bytes: &[u8], max| (1..=max).contains(&bytes.len()) && !bytes.contains(&0);
    match operation {
        Operation::Lookup { name: one }
        | Operation::Mknod { name: one, .. }
        | Operation::Mkdir { name: one, .. }
        | Operation::Unlink { name: one }
        | Operation::Rmdir { name: one }
        | Operation::Link { name: one, .. }
        | Operation::Create { name: one, .. } => name(one),
        Operation::Rename { name: one, new_name, .. } => name(one) && name(new_name),
        Operation::Symlink { name: one, target } => name(one) && string(target, 4095),
        Operation::Setxattr { name, value, .. } => string(name, 255) && value.len() <= 65536,
        Operation::Getxattr { name, .. } | Operation::Removexattr { name } => string(name, 255),
        _ => true,
    }
}

/// Decodes; a decoded request must be valid and survive another round trip.
fn survives(head: &[u8], bytes: usize, session: &Negotiated) -> bool {
    let Ok(request) = decode(head, bytes, session) else { return false };
    assert!(holds_only_valid_parts(&request.operation), "{request:?}");
    let (again, again_bytes) = encode(&request, session);
    assert_eq!(decode(&again, again_bytes, session), Ok(request));
    true
}

proptest! {
    #[test]
    fn every_request_round_trips(seed in seed()) {
        for operation in seed.operations() {
            for extensions in [Extensions::default(), seed.extensions()] {
                let extensions = if let Operation::Write { .. } = operation { Extensions::default() } else { extensions };
                let request = seed.request(operation, extensions);
                let (head, bytes) = encode(&request, &FULL);
                prop_assert_eq!(decode(&head, bytes, &FULL), Ok(request));
                // All bytes of a WRITE may be present, too.
                let mut whole = head.clone();
                whole.resize(bytes, 0);
                prop_assert_eq!(decode(&whole, bytes, &FULL), Ok(request));
            }
        }
    }

    #[test]
    fn without_the_long_setxattr_only_its_flag_is_lost(seed in seed()) {
        for operation in seed.operations() {
            let request = seed.request(operation, Extensions::default());
            let (head, bytes) = encode(&request, &BARE);
            let back = decode(&head, bytes, &BARE).unwrap().operation;
            match (operation, back) {
                (Operation::Setxattr { name, value, flags, .. }, _) => {
                    prop_assert_eq!(back, Operation::Setxattr { name, value, flags, clear_sgid: false });
                }
                _ => prop_assert_eq!(back, operation),
            }
        }
    }

    #[test]
    fn a_request_of_another_length_is_refused(seed in seed()) {
        for (session, operation) in SESSIONS.into_iter().flat_map(|s| seed.operations().into_iter().map(move |o| (s, o))) {
            // INIT has two lengths, and any length in another major version; the tests in `init` cover it.
            if let Operation::Init(_) = operation {
                continue;
            }
            let (head, bytes) = encode(&seed.request(operation, Extensions::default()), session);
            for len in 0..head.len() {
                prop_assert!(decode(&head[..len], bytes, session).is_err());
                let mut short = head[..len].to_vec();
                prop_assert!(!survives(&short, len, session));
                set_len(&mut short);
                prop_assert!(!survives(&short, len, session), "{:?} cut to {} of {}", operation, len, bytes);
            }
            for more in 1..20 {
                let mut long = head.clone();
                long.resize(head.len() + more, 0);
                prop_assert!(!survives(&long, bytes + more, session));
                if let Operation::Write { .. } = operation {
                    continue;
                }
                set_len(&mut long);
                prop_assert!(!survives(&long, bytes + more, session), "{:?} with {} more", operation, more);
            }
        }
    }

    #[test]
    fn flipped_bits_and_cut_extensions_never_panic(seed in seed(), flips in proptest::collection::vec(any::<(prop::sample::Index, u8)>(), 200)) {
        for operation in seed.operations() {
            let extensions = match operation {
                Operation::Write { .. } => Extensions::default(),
                _ => seed.extensions(),
            };
            let (head, bytes) = encode(&seed.request(operation, extensions), &FULL);
            for (at, bit) in &flips {
                let mut changed = head.clone();
                *at.get_mut(&mut changed) ^= 1 << (bit % 8);
                survives(&changed, bytes, &FULL);
                survives(&changed, bytes, &BARE);
            }
            for len in 40..head.len() {
                let mut short = head[..len].to_vec();
                set_len(&mut short);
                survives(&short, len, &FULL);
            }
        }
    }

    #[test]
    fn random_arguments_never_panic(
        opcode in proptest::sample::select(Opcode::ALL), bytes in proptest::collection::vec(any::<u8>(), 0..200), extlen in 0..4_u16,
    ) {
        let mut message = super::message(opcode, &[&bytes]);
        survives(&message, message.len(), &FULL);
        survives(&message, message.len(), &BARE);
        message[36..38].copy_from_slice(&extlen.to_le_bytes());
        survives(&message, message.len(), &FULL);
    }

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        survives(&bytes, bytes.len(), &FULL);
    }
}

#[test]
fn every_opcode_has_an_operation() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut seen = BTreeSet::new();
    for _ in 0..64 {
        let seed = seed().new_tree(&mut runner).unwrap().current();
        seen.extend(seed.operations().iter().map(Operation::opcode));
    }
    let all: BTreeSet<_> = Opcode::ALL.iter().copied().filter(|opcode| *opcode != Opcode::NotifyReply).collect();
    assert_eq!(seen, all);
}

#[test]
fn lists_can_be_walked_at_any_alignment() {
    let one = ForgetOne { nodeid: 1, nlookup: 2 };
    let two = ForgetOne { nodeid: 3, nlookup: u64::MAX };
    let forgets = [one, two];
    let operation = Operation::BatchForget { forgets: Records::new(&forgets) };
    let request = Request {
        unique: 0,
        ino: ferry_vfs::Ino(0),
        uid: 0,
        gid: 0,
        pid: 0,
        extensions: Extensions { groups: Groups::new(&[4, 5, 6]), ..Extensions::default() },
        operation,
    };
    for shift in 0..8 {
        let mut bytes = vec![0; shift];
        client::encode(&request, &FULL, &mut bytes);
        let back = decode(&bytes[shift..], bytes.len() - shift, &FULL).unwrap();
        let Operation::BatchForget { forgets } = back.operation else { panic!("{back:?}") };
        assert_eq!(forgets.iter().collect::<Vec<_>>(), [one, two]);
        assert_eq!(back.extensions.groups.copy_to(&mut [0; 8]), [4, 5, 6]);
        assert_eq!(back.extensions.groups.copy_to(&mut [0; 2]), [4, 5]);
    }
}

#[test]
fn a_write_needs_only_its_head() {
    let range = IoRange {
        ino: ferry_vfs::Ino::ROOT,
        handle: Handle(1),
        offset: 4096,
        len: 1 << 20,
        flags: OFlags::WRONLY,
        clear_privileges: true,
        owner: None,
    };
    let operation = Operation::Write { range, cached: false };
    let request =
        Request { unique: 9, ino: range.ino, uid: 0, gid: 0, pid: 0, extensions: Extensions::default(), operation };
    let (head, bytes) = encode(&request, &FULL);
    assert_eq!((head.len(), bytes), (WRITE_HEAD_BYTES, WRITE_HEAD_BYTES + (1 << 20)));
    assert_eq!(decode(&head, bytes, &FULL), Ok(request));
    assert!(decode(&head, bytes - 1, &FULL).is_err());
    assert!(decode(&head[..79], bytes, &FULL).is_err());
}
