//! Malformed requests, and the expected errors.

use ferry_vfs::{Errno, Name};

use super::framed;
use crate::ninep::*;

/// Returns a message with these fields.
fn message(kind: u8, fields: &[&[u8]]) -> Vec<u8> {
    framed([&[0, 0, 0, 0, kind, 7, 0][..], &fields.concat()].concat())
}

fn errno(message: &[u8]) -> Option<Errno> {
    Request::decode(message).err().map(|flaw| flaw.errno)
}

fn string(text: &[u8]) -> Vec<u8> {
    [&u16::try_from(text.len()).unwrap().to_le_bytes()[..], text].concat()
}

#[test]
fn invalid_names_are_refused() {
    let (fid, zero, long) = ([1, 0, 0, 0], [0; 4], vec![b'x'; Name::BYTES_MAX + 1]);
    let cases: [(&[u8], Option<Errno>); 10] = [
        (b"a", None),
        (b"...", None),
        (&long[..255], None),
        (b"/x", Some(Errno::INVAL)),
        (b"a/b", Some(Errno::INVAL)),
        (b"..", Some(Errno::INVAL)),
        (b".", Some(Errno::INVAL)),
        (b"", Some(Errno::INVAL)),
        (b"a\0b", Some(Errno::INVAL)),
        (&long, Some(Errno::NAMETOOLONG)),
    ];
    for (name, expected) in cases {
        let n = string(name);
        let other = string(b"other");
        let takers = [
            message(kind::TLCREATE, &[&fid, &n, &zero, &zero, &zero]),
            message(kind::TSYMLINK, &[&fid, &n, &other, &zero]),
            message(kind::TMKNOD, &[&fid, &n, &zero, &zero, &zero, &zero]),
            message(kind::TRENAME, &[&fid, &fid, &n]),
            message(kind::TLINK, &[&fid, &fid, &n]),
            message(kind::TMKDIR, &[&fid, &n, &zero, &zero]),
            message(kind::TRENAMEAT, &[&fid, &n, &fid, &other]),
            message(kind::TRENAMEAT, &[&fid, &other, &fid, &n]),
            message(kind::TUNLINKAT, &[&fid, &n, &zero]),
        ];
        for taker in takers {
            assert_eq!(errno(&taker), expected, "type {}, {}", taker[4], name.escape_ascii());
        }
        // Only a walk accepts `..`.
        let walk = message(kind::TWALK, &[&fid, &fid, &[2, 0], &other, &n]);
        let expected = if name == b".." { None } else { expected };
        assert_eq!(errno(&walk), expected, "a walk to {}", name.escape_ascii());
    }
}

#[test]
fn a_walk_has_at_most_16_names() {
    let walk = |count: u8| {
        let names = string(b"n").repeat(count.into());
        message(kind::TWALK, &[&[0; 8], &[count, 0], &names])
    };
    assert_eq!((errno(&walk(16)), errno(&walk(17))), (None, Some(Errno::INVAL)));
}

#[test]
fn numbers_out_of_range_are_refused() {
    let (max, two) = (i64::MAX.cast_unsigned(), 2_u32.to_le_bytes());
    let read = |offset: u64| message(kind::TREAD, &[&[0; 4], &offset.to_le_bytes(), &two]);
    let write =
        |offset: u64, count: u32| message(kind::TWRITE, &[&[0; 4], &offset.to_le_bytes(), &count.to_le_bytes(), b"ab"]);
    let open = |flags: u32| message(kind::TLOPEN, &[&[0; 4], &flags.to_le_bytes()]);
    let node = |mode: u32, major: u32, minor: u32| {
        let numbers = [mode, major, minor, 0].map(u32::to_le_bytes).concat();
        message(kind::TMKNOD, &[&[0; 4], &string(b"n"), &numbers])
    };
    let lock = |kind_of_lock: u8, flags: u32, start: u64, len: u64| {
        let range = [start, len].map(u64::to_le_bytes).concat();
        message(kind::TLOCK, &[&[0; 4], &[kind_of_lock], &flags.to_le_bytes(), &range, &[0; 4], &string(b"c")])
    };
    let setattr = |bits: u32, uid: u32, size: u64, nsec: u64| {
        let numbers = [bits, 0, uid, uid].map(u32::to_le_bytes).concat();
        let times = [size, 0, nsec, 0, nsec].map(u64::to_le_bytes).concat();
        message(kind::TSETATTR, &[&[0; 4], &numbers, &times])
    };
    let xattr = |bytes: u64, flags: u32| {
        message(kind::TXATTRCREATE, &[&[0; 4], &string(b"user.a"), &bytes.to_le_bytes(), &flags.to_le_bytes()])
    };
    let invalid = Some(Errno::INVAL);
    let cases = [
        ("read to the end", read(max - 2), None),
        ("read past the end", read(max - 1), invalid),
        ("read overflow", read(u64::MAX), invalid),
        ("write to the end", write(max - 2, 2), None),
        ("write past the end", write(max, 2), invalid),
        ("write more than there is", write(0, 3), invalid),
        ("write less than there is", write(0, 1), invalid),
        ("write 4 GiB", write(0, u32::MAX), invalid),
        ("open", open(0o2), None),
        ("open with all that Linux sends", open(0o7_777_702), None),
        ("open without access", open(3), invalid),
        ("open O_PATH", open(0o10_000_000), invalid),
        ("open O_TMPFILE", open(0o20_200_002), invalid),
        ("mknod plain", node(0o644, 0, 0), None),
        ("mknod device", node(0o060_600, 0xfff, 0xf_ffff), None),
        ("mknod device major", node(0o060_600, 0x1000, 0), invalid),
        ("mknod device minor", node(0o060_600, 0, 0x10_0000), invalid),
        ("mknod directory", node(0o040_755, 0, 0), invalid),
        ("mknod link", node(0o120_777, 0, 0), invalid),
        ("mknod type", node(0o150_644, 0, 0), invalid),
        ("mknod beyond the type", node(0o1_010_644, 0, 0), invalid),
        ("lock to the end", lock(1, 1, 5, 0), None),
        ("lock the last byte", lock(0, 0, max, 1), None),
        ("lock kind", lock(3, 0, 0, 1), invalid),
        ("lock flags", lock(0, 4, 0, 1), invalid),
        ("lock past the end", lock(0, 0, max, 2), invalid),
        ("lock overflow", lock(0, 0, 2, u64::MAX), invalid),
        ("lock start beyond the maximum", lock(0, 0, max + 1, 0), invalid),
        ("setattr", setattr(0x1ff, 5, max, 999_999_999), None),
        ("setattr nothing, with invalid values", setattr(0, u32::MAX, u64::MAX, u64::MAX), None),
        ("setattr bits", setattr(0x200, 0, 0, 0), invalid),
        ("setattr no owner", setattr(2, u32::MAX, 0, 0), invalid),
        ("setattr no group", setattr(4, u32::MAX, 0, 0), invalid),
        ("setattr size", setattr(8, 0, max + 1, 0), invalid),
        ("setattr nanoseconds", setattr(0x90, 0, 0, 1_000_000_000), invalid),
        ("setattr to now, with nonsense", setattr(0x10, 0, 0, 1_000_000_000), None),
        ("xattr", xattr(65536, 2), None),
        ("xattr too long", xattr(65537, 0), Some(Errno::TOOBIG)),
        ("xattr flags", xattr(1, 4), invalid),
    ];
    for (what, message, expected) in cases {
        assert_eq!(errno(&message), expected, "{what}");
    }
}

#[test]
fn strings_have_limits() {
    let walk = |name: &[u8]| message(kind::TXATTRWALK, &[&[0; 8], &string(name)]);
    let link = |target: &[u8]| message(kind::TSYMLINK, &[&[0; 4], &string(b"n"), &string(target), &[0; 4]]);
    let attach = |user: &[u8], tree: &[u8]| message(kind::TATTACH, &[&[0; 8], &string(user), &string(tree), &[0; 4]]);
    let version = |text: &[u8]| message(kind::TVERSION, &[&[0; 4], &string(text)]);
    let long = vec![b'x'; 5000];
    for (what, message, expected) in [
        ("no attribute name", walk(b""), None),
        ("attribute name", walk(&long[..255]), None),
        ("attribute name too long", walk(&long[..256]), Some(Errno::RANGE)),
        ("attribute name with NUL", walk(b"user.\0"), Some(Errno::INVAL)),
        ("target", link(&long[..4095]), None),
        ("target too long", link(&long[..4096]), Some(Errno::NAMETOOLONG)),
        ("no target", link(b""), Some(Errno::NOENT)),
        ("target with NUL", link(b"a\0"), Some(Errno::INVAL)),
        ("user and tree", attach(&long[..256], &long[..4095]), None),
        ("user too long", attach(&long[..257], b""), Some(Errno::NAMETOOLONG)),
        ("tree too long", attach(b"", &long[..4096]), Some(Errno::NAMETOOLONG)),
        ("version too long", version(&long[..65]), Some(Errno::NAMETOOLONG)),
    ] {
        assert_eq!(errno(&message), expected, "{what}");
    }
}

#[test]
fn unknown_types_are_not_supported() {
    for kind in 0..=u8::MAX {
        let known = kind::ALL.contains(&kind);
        let unknown = errno(&message(kind, &[])) == Some(Errno::OPNOTSUPP);
        assert_eq!(unknown, !known, "type {kind}");
    }
}

#[test]
fn errors_name_their_request() {
    for bytes in 0..HEADER_BYTES {
        let flaw = Request::decode(&vec![1; bytes]).unwrap_err();
        assert_eq!((flaw.tag, flaw.kind), (None, 0));
    }
    let flaw = Request::decode(&message(kind::TLINK, &[b"x"])).unwrap_err();
    assert_eq!((flaw.tag, flaw.kind), (Some(Tag(7)), kind::TLINK));
    assert_eq!(flaw.to_string(), "malformed 9P message (type 70): shorter than its fields");
    // A wrong length.
    let mut longer = message(kind::TCLUNK, &[&[0; 4]]);
    longer[0] += 1;
    assert_eq!(errno(&longer), Some(Errno::INVAL));
}

#[test]
fn error_numbers_are_those_of_linux() {
    for (raw, errno) in [(2, Errno::NOENT), (0, Errno::IO), (4096, Errno::IO), (u32::MAX, Errno::IO)] {
        let message = message(kind::RLERROR, &[&raw.to_le_bytes()]);
        assert_eq!(Reply::decode(&message).unwrap().1, Reply::Error(errno), "{raw}");
    }
}
