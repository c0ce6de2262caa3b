//! Negotiation.

use ferry_driver::fuse::negotiated;
use ferry_wire::fuse::abi::{InitIn, InitOut};
use ferry_wire::fuse::*;
use zerocopy::{FromBytes, IntoBytes};

use super::message;

fn offer(minor: u32, flags: InitFlags) -> InitRequest {
    InitRequest { major: 7, minor, max_readahead_bytes: 128 << 10, flags }
}

fn ready(request: &InitRequest, wanted: &InitOptions) -> (Negotiated, InitOut) {
    match negotiate(request, wanted) {
        Ok(InitOutcome::Ready(session, reply)) => (session, reply),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_lesser_minor_version_wins() {
    for (client, agreed) in [(27, 27), (31, 31), (45, 45), (46, 45), (1000, 45)] {
        let (session, reply) = ready(&offer(client, InitFlags::ALL), &InitOptions::default());
        assert_eq!((session.minor, reply.major, reply.minor), (agreed, 7, agreed));
    }
}

#[test]
fn only_flags_of_both_sides_are_negotiated() {
    let wanted = InitOptions {
        flags: InitFlags::ASYNC_READ | InitFlags::POSIX_ACL | InitFlags::SECURITY_CTX,
        max_write_bytes: 1 << 20,
        ..InitOptions::default()
    };
    let (session, reply) = ready(&offer(45, InitFlags::ALL - InitFlags::POSIX_ACL), &wanted);
    let agreed = InitFlags::ASYNC_READ | InitFlags::SECURITY_CTX | InitFlags::INIT_EXT | InitFlags::MAX_PAGES;
    assert_eq!(session.flags, agreed);
    assert_eq!(u64::from(reply.flags) | u64::from(reply.flags2) << 32, agreed.bits());
    assert_eq!((reply.max_write, reply.max_pages, reply.max_readahead), (1 << 20, 256, 128 << 10));
    assert_eq!((reply.map_alignment, reply.max_stack_depth, reply.request_timeout), (0, 0, 0));
    // READs have as many pages as WRITEs, whatever the size of a page.
    for (page_bytes, max_pages) in [(4096, 256), (16 << 10, 64), (64 << 10, 16), (4 << 20, 1)] {
        let (_, reply) = ready(&offer(45, InitFlags::ALL), &InitOptions { page_bytes, ..wanted });
        assert_eq!((reply.max_write, reply.max_pages), (1 << 20, max_pages));
    }
}

#[test]
fn an_old_client_gets_no_newer_fields() {
    let wanted = InitOptions { flags: InitFlags::ALL, max_write_bytes: 1 << 20, ..InitOptions::default() };
    let (session, reply) = ready(&offer(27, InitFlags::ASYNC_READ), &wanted);
    assert_eq!(session.flags, InitFlags::ASYNC_READ);
    assert_eq!((reply.flags2, reply.max_pages, reply.max_write), (0, 0, 128 << 10));
}

#[test]
fn fields_are_valid_only_with_their_flags() {
    let wanted = InitOptions {
        flags: InitFlags::MAP_ALIGNMENT | InitFlags::PASSTHROUGH | InitFlags::REQUEST_TIMEOUT,
        map_alignment_log2: 21,
        max_stack_depth: 2,
        request_timeout_s: 30,
        max_write_bytes: 5000,
        max_background: u16::MAX,
        time_gran_ns: 0,
        ..InitOptions::default()
    };
    let (_, reply) = ready(&offer(45, InitFlags::ALL), &wanted);
    assert_eq!((reply.map_alignment, reply.max_stack_depth, reply.request_timeout), (21, 2, 30));
    assert_eq!((reply.max_pages, reply.max_write, reply.time_gran), (2, 5000, 1));
    assert_eq!(reply.congestion_threshold, 49151);
    let (_, reply) = ready(&offer(45, InitFlags::ALL), &InitOptions { congestion_threshold: 5, ..wanted });
    assert_eq!(reply.congestion_threshold, 5);
}

#[test]
fn other_major_versions_get_a_retry_or_an_error() {
    let newer = InitRequest { major: 8, ..offer(0, InitFlags::empty()) };
    let Ok(InitOutcome::Retry(reply)) = negotiate(&newer, &InitOptions::default()) else { panic!("no retry") };
    assert_eq!((reply.major, reply.minor), (7, 45));
    for (major, minor) in [(7, 26), (7, 1), (6, 99), (0, 0)] {
        let error =
            negotiate(&InitRequest { major, ..offer(minor, InitFlags::ALL) }, &InitOptions::default()).unwrap_err();
        assert!(error.to_string().contains(&format!("{major}.{minor}")), "{error}");
    }
}

#[test]
fn the_client_decodes_the_negotiated_session() {
    let wanted = InitOptions { flags: InitFlags::SUBMOUNTS | InitFlags::SECURITY_CTX, ..InitOptions::default() };
    let request = offer(45, InitFlags::ALL);
    let (session, reply) = ready(&request, &wanted);
    assert_eq!(negotiated(&request, &reply), Some(session));
    assert_eq!(negotiated(&request, &InitOut { major: 8, ..reply }), None);
    assert_eq!(negotiated(&request, &InitOut { minor: 20, ..reply }), None);
    assert_eq!(negotiated(&offer(45, InitFlags::INIT_EXT), &reply), None);
}

/// Every length of an INIT body with every relevant version: a decoded body keeps its fields.
#[test]
fn bodies_of_all_versions_decode() {
    let fixed = InitIn { max_readahead: 1 << 17, flags: 1 << 30 | 1, flags2: 4, ..InitIn::ZERO };
    let body = [fixed.as_bytes(), &[0; 64]].concat();
    for (major, minor) in [(7, 1), (7, 5), (7, 26), (7, 27), (7, 35), (7, 36), (7, 45), (7, 46), (8, 0), (6, 1), (0, 0)]
    {
        for len in 0..body.len() {
            let mut body = body[..len].to_vec();
            if let Some(version) = body.get_mut(..8) {
                version.copy_from_slice([major, minor].as_bytes());
            }
            let message = message(Opcode::Init, &[&body]);
            let decoded = decode(&message, message.len(), &Negotiated::BEFORE_INIT);
            let known = major == 7 && minor >= 27;
            let good = if known { len == 16 || len == 64 || len > 64 && minor > 45 } else { len >= 8 };
            assert_eq!(decoded.is_ok(), good, "{major}.{minor}, {len} bytes");
            let Ok(Request { operation: Operation::Init(request), .. }) = decoded else { continue };
            assert_eq!((request.major, request.minor), (major, minor));
            assert_eq!(request.flags.contains(InitFlags::CREATE_SUPP_GROUP), known && len >= 64);
        }
    }
}

#[test]
fn the_reply_is_64_bytes_in_the_order_of_the_protocol() {
    let wanted = InitOptions { flags: InitFlags::ALL, congestion_threshold: 9, ..InitOptions::default() };
    let (session, reply) = ready(&offer(45, InitFlags::ALL), &wanted);
    let mut head = [0; REPLY_HEAD_BYTES_MAX];
    let bytes = Reply::Init(reply).encode(3, &session, &mut head);
    assert_eq!(bytes.len(), 16 + 64);
    let words: [u32; 20] = FromBytes::read_from_bytes(bytes).unwrap();
    let flags = InitFlags::ALL.bits();
    #[allow(clippy::cast_possible_truncation, reason = "halves")]
    let (low, high) = (flags as u32, (flags >> 32) as u32);
    assert_eq!(words[..4], [80, 0, 3, 0]);
    assert_eq!(words[4..14], [7, 45, 128 << 10, low, 9 << 16 | 64, 1 << 20, 1, 12 << 16 | 256, high, 1]);
}
