//! Every invalid name, in every request that has a name.

use ferry_vfs::Errno;
use ferry_wire::fuse::*;

use super::{SESSIONS, message};

/// Each opcode with the number of bytes before its first name, and the bytes before and after the tested name.
const TAKERS: &[(Opcode, usize, &[u8], &[u8])] = &[
    (Opcode::Lookup, 0, b"", b""),
    (Opcode::Symlink, 0, b"", b"target\0"),
    (Opcode::Mknod, 16, b"", b""),
    (Opcode::Mkdir, 8, b"", b""),
    (Opcode::Unlink, 0, b"", b""),
    (Opcode::Rmdir, 0, b"", b""),
    (Opcode::Rename, 8, b"", b"new\0"),
    (Opcode::Rename, 8, b"old\0", b""),
    (Opcode::Rename2, 16, b"", b"new\0"),
    (Opcode::Rename2, 16, b"old\0", b""),
    (Opcode::Link, 8, b"", b""),
    (Opcode::Create, 16, b"", b""),
];

fn decode_with(taker: &(Opcode, usize, &[u8], &[u8]), name: &[u8], session: &Negotiated) -> Result<(), Errno> {
    let (opcode, fixed, before, behind) = taker;
    let message = message(*opcode, &[&vec![0; *fixed], before, name, b"\0", behind]);
    let decoded = decode(&message, message.len(), session);
    if let Ok(Request { operation: Operation::LookupSelf | Operation::LookupParent, .. }) = decoded {
        assert!(*opcode == Opcode::Lookup && matches!(name, b"." | b".."));
        return Err(Errno::INVAL);
    }
    decoded.map(drop).map_err(|error| error.errno)
}

#[test]
fn bad_names_are_refused_everywhere() {
    let long = [b'x'; 256];
    let bad: &[(&[u8], Errno)] = &[
        (b"/x", Errno::INVAL),
        (b"a/b", Errno::INVAL),
        (b"a/", Errno::INVAL),
        (b"/", Errno::INVAL),
        (b"..", Errno::INVAL),
        (b".", Errno::INVAL),
        (b"", Errno::INVAL),
        (b"a\0b", Errno::INVAL),
        (b"\0", Errno::INVAL),
        (&long, Errno::NAMETOOLONG),
    ];
    for session in SESSIONS {
        for taker in TAKERS {
            for (name, errno) in bad {
                let got = decode_with(taker, name, session);
                assert_eq!(got, Err(*errno), "{:?} {}", taker.0, name.escape_ascii());
            }
            for good in [&b"a"[..], b"...", b".x", b"x y", b"\xff\xfe", &[b'x'; 255]] {
                assert_eq!(decode_with(taker, good, session), Ok(()), "{:?} {}", taker.0, good.escape_ascii());
            }
        }
    }
}

#[test]
fn only_lookup_accepts_dot_and_dotdot() {
    for session in SESSIONS {
        for (name, wanted) in [(&b".\0"[..], Operation::LookupSelf), (b"..\0", Operation::LookupParent)] {
            let message = message(Opcode::Lookup, &[name]);
            assert_eq!(decode(&message, message.len(), session).unwrap().operation, wanted);
        }
    }
}

#[test]
fn two_names_are_split_at_the_nul() {
    let message = message(Opcode::Rename2, &[&[0; 16], b"one\0", b"two\0"]);
    let Operation::Rename { name, new_name, .. } = decode(&message, message.len(), SESSIONS[0]).unwrap().operation
    else {
        panic!("not a rename")
    };
    assert_eq!((name.as_bytes(), new_name.as_bytes()), (&b"one"[..], &b"two"[..]));
}

#[test]
fn bad_targets_and_attribute_names_are_refused() {
    let long_target = [b'x'; 4096];
    let cases: &[(Opcode, usize, &[u8], Errno)] = &[
        (Opcode::Symlink, 0, b"name\0\0", Errno::INVAL),
        (Opcode::Symlink, 0, b"name\0", Errno::INVAL),
        (Opcode::Symlink, 0, b"name\0target", Errno::INVAL),
        (Opcode::Getxattr, 8, b"\0", Errno::RANGE),
        (Opcode::Getxattr, 8, b"user.x", Errno::INVAL),
        (Opcode::Getxattr, 8, b"user.x\0y", Errno::INVAL),
        (Opcode::Removexattr, 0, b"\0", Errno::RANGE),
        (Opcode::Setxattr, 16, b"\0", Errno::RANGE),
        (Opcode::Unlink, 0, b"name", Errno::INVAL),
        (Opcode::Unlink, 0, b"", Errno::INVAL),
    ];
    for (opcode, fixed, string, errno) in cases {
        let message = message(*opcode, &[&vec![0; *fixed], string]);
        let got = decode(&message, message.len(), &super::FULL).map(drop).map_err(|error| error.errno);
        assert_eq!(got, Err(*errno), "{opcode:?} {}", string.escape_ascii());
    }
    let message = message(Opcode::Symlink, &[b"name\0", &long_target, b"\0"]);
    assert_eq!(decode(&message, message.len(), &super::FULL).unwrap_err().errno, Errno::NAMETOOLONG);
}
