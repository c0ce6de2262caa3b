//! Malformed requests, and the expected errors.

use ferry_driver::fuse::append_security_context;
use ferry_vfs::{Errno, Name};
use ferry_wire::fuse::*;
use zerocopy::IntoBytes;

use super::{BARE, FULL, message};

fn errno(message: &[u8]) -> Option<Errno> {
    decode(message, message.len(), &FULL).err().map(|error| error.errno)
}

#[test]
fn without_a_header_there_is_no_reply() {
    for len in 0..40 {
        let error = decode(&vec![0; len], len, &FULL).unwrap_err();
        assert_eq!((error.unique, error.reply_to()), (None, None));
    }
}

#[test]
fn errors_name_their_request() {
    let mut message = message(Opcode::Unlink, &[b"a/b\0"]);
    let error = decode(&message, message.len(), &FULL).unwrap_err();
    assert_eq!((error.unique, error.opcode, error.reply_to()), (Some(7), 10, Some(7)));
    assert!(error.to_string().contains("opcode 10"), "{error}");
    // A wrong length.
    message[0] += 1;
    let error = decode(&message, message.len(), &FULL).unwrap_err();
    assert_eq!((error.errno, error.reply_to()), (Errno::INVAL, Some(7)));
}

#[test]
fn some_opcodes_get_no_reply() {
    for opcode in [Opcode::Forget, Opcode::BatchForget, Opcode::Interrupt, Opcode::NotifyReply] {
        let message = message(opcode, &[&[1; 3]]);
        let error = decode(&message, message.len(), &FULL).unwrap_err();
        assert_eq!((error.unique, error.reply_to()), (Some(7), None));
        assert!(!peek(message.first_chunk().unwrap()).wants_reply());
    }
}

#[test]
fn unknown_opcodes_are_not_implemented() {
    // Among them CUSE_INIT and the opcodes of the other byte order.
    for opcode in [0, 7, 19, 54, 4096, 1 << 20, 26 << 24, u32::MAX] {
        let mut message = message(Opcode::Statfs, &[]);
        message[4..8].copy_from_slice(opcode.as_bytes());
        assert_eq!(errno(&message), Some(Errno::NOSYS), "{opcode}");
    }
}

/// No size beyond the negotiated limits is passed on, whatever the client sends.
#[test]
fn sizes_beyond_the_negotiated_limits_are_refused_or_cut() {
    const WRITE_MAX: u32 = 1 << 20;
    const READ_MAX: u32 = 16 << 20;
    assert_eq!((FULL.max_write_bytes, FULL.max_read_bytes()), (WRITE_MAX, READ_MAX));
    for size in [0, 1, WRITE_MAX, WRITE_MAX + 1, READ_MAX, READ_MAX + 1, u32::MAX >> 1, u32::MAX - 80] {
        let read = abi::ReadIn { size, ..abi::ReadIn::ZERO };
        let found = |message: &[u8]| match decode(message, message.len(), &FULL).map(|request| request.operation) {
            Ok(Operation::Read(range)) => Ok(range.len),
            Ok(
                Operation::Readdir { bytes_max, .. }
                | Operation::Getxattr { bytes_max, .. }
                | Operation::Listxattr { bytes_max },
            ) => Ok(bytes_max),
            Ok(Operation::Ioctl { out_bytes_max, .. }) => Ok(out_bytes_max),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.errno),
        };
        let up_to = |max| if size <= max { Ok(size) } else { Err(Errno::INVAL) };
        assert_eq!(found(&message(Opcode::Read, &[read.as_bytes()])), up_to(READ_MAX));
        let ioctl = abi::IoctlIn { out_size: size, ..abi::IoctlIn::ZERO };
        assert_eq!(found(&message(Opcode::Ioctl, &[ioctl.as_bytes()])), up_to(READ_MAX));
        for opcode in [Opcode::Readdir, Opcode::Readdirplus] {
            assert_eq!(found(&message(opcode, &[read.as_bytes()])), Ok(size.min(READ_MAX)));
        }
        let xattr = abi::GetxattrIn { size, ..abi::GetxattrIn::ZERO };
        assert_eq!(found(&message(Opcode::Getxattr, &[xattr.as_bytes(), b"user.a\0"])), Ok(size.min(65536)));
        assert_eq!(found(&message(Opcode::Listxattr, &[xattr.as_bytes()])), Ok(size.min(65536)));
        // Only the head of a WRITE is present.
        let mut write = message(Opcode::Write, &[abi::WriteIn { size, ..abi::WriteIn::ZERO }.as_bytes()]);
        let message_bytes = write.len() as u64 + u64::from(size);
        let Ok(len) = u32::try_from(message_bytes) else { panic!("a header has 32 bits for it") };
        write[..4].copy_from_slice(&len.to_le_bytes());
        let outcome = decode(&write, len as usize, &FULL).map(drop).map_err(|error| error.errno);
        assert_eq!(outcome, up_to(WRITE_MAX).map(drop), "{size}");
    }
}

#[test]
fn numbers_out_of_range_are_refused() {
    let (i64_max, giga) = (u64::MAX >> 1, 1 << 30);
    let setattr = |valid, set: fn(&mut abi::SetattrIn)| {
        let mut fixed = abi::SetattrIn { valid, ..abi::SetattrIn::ZERO };
        set(&mut fixed);
        message(Opcode::Setattr, &[fixed.as_bytes()])
    };
    let lk = |start, end, kind| {
        let lk = abi::FileLock { start, end, kind, pid: 1 };
        message(Opcode::Setlk, &[abi::LkIn { lk, ..abi::LkIn::ZERO }.as_bytes()])
    };
    let read = |offset| message(Opcode::Read, &[abi::ReadIn { offset, size: 2, ..abi::ReadIn::ZERO }.as_bytes()]);
    let open = |flags| message(Opcode::Open, &[abi::OpenIn { flags, open_flags: 0 }.as_bytes()]);
    let fallocate = |mode, length| {
        message(Opcode::Fallocate, &[abi::FallocateIn { mode, length, ..abi::FallocateIn::ZERO }.as_bytes()])
    };
    let rename = |flags| {
        let fixed = abi::Rename2In { flags, ..abi::Rename2In::ZERO };
        message(Opcode::Rename2, &[fixed.as_bytes(), b"a\0b\0"])
    };
    let mknod = |mode| message(Opcode::Mknod, &[abi::MknodIn { mode, ..abi::MknodIn::ZERO }.as_bytes(), b"a\0"]);
    let create = |mode| message(Opcode::Create, &[abi::CreateIn { mode, ..abi::CreateIn::ZERO }.as_bytes(), b"a\0"]);
    let xattr = |size, flags| {
        let fixed = abi::SetxattrIn { size, flags, ..abi::SetxattrIn::ZERO };
        message(Opcode::Setxattr, &[fixed.as_bytes(), b"user.a\0", b"value"])
    };
    let map = |len, flags, moffset| {
        let fixed = abi::SetupmappingIn { len, flags, moffset, ..abi::SetupmappingIn::ZERO };
        message(Opcode::Setupmapping, &[fixed.as_bytes()])
    };
    let cases: &[(&str, Vec<u8>, Option<Errno>)] = &[
        ("atime", setattr(abi::FATTR_ATIME, |set| set.atimensec = 999_999_999), None),
        ("atime", setattr(abi::FATTR_ATIME, |set| set.atimensec = 1_000_000_000), Some(Errno::INVAL)),
        ("unset ctime", setattr(0, |set| set.ctimensec = 1_000_000_000), None),
        ("no owner", setattr(abi::FATTR_UID, |set| set.uid = u32::MAX), Some(Errno::INVAL)),
        ("no group", setattr(abi::FATTR_GID, |set| set.gid = u32::MAX), Some(Errno::INVAL)),
        ("size", setattr(abi::FATTR_SIZE, |set| set.size = 1 << 63), Some(Errno::INVAL)),
        ("valid", setattr(1 << 12, |_| ()), Some(Errno::INVAL)),
        ("lock to the end", lk(0, i64_max, 1), None),
        ("lock one byte", lk(5, 5, 0), None),
        ("lock backwards", lk(5, 4, 0), Some(Errno::INVAL)),
        ("lock past the end", lk(5, i64_max + 1, 0), Some(Errno::INVAL)),
        ("lock kind", lk(0, 1, 3), Some(Errno::INVAL)),
        ("read to the end", read(i64_max - 2), None),
        ("read past the end", read(i64_max - 1), Some(Errno::INVAL)),
        ("read around", read(u64::MAX), Some(Errno::INVAL)),
        ("open", open(0o2), None),
        ("open O_DIRECTORY", open(0o200_000), None),
        ("open O_CREAT", open(0o100), Some(Errno::INVAL)),
        ("open O_EXCL", open(0o200), Some(Errno::INVAL)),
        ("open O_PATH", open(0o10_000_000), Some(Errno::INVAL)),
        ("open O_TMPFILE", open(0o20_000_000), Some(Errno::INVAL)),
        ("fallocate", fallocate(3, giga), None),
        ("fallocate nothing", fallocate(0, 0), Some(Errno::INVAL)),
        ("fallocate too much", fallocate(0, i64_max + 1), Some(Errno::INVAL)),
        ("fallocate flags", fallocate(0x100, 1), Some(Errno::OPNOTSUPP)),
        ("rename whiteout", rename(5), None),
        ("rename exchange", rename(2), None),
        ("rename exchange and noreplace", rename(3), Some(Errno::INVAL)),
        ("rename flags", rename(8), Some(Errno::INVAL)),
        ("mknod plain", mknod(0o644), None),
        ("mknod fifo", mknod(0o010_644), None),
        ("mknod directory", mknod(0o040_755), Some(Errno::INVAL)),
        ("mknod link", mknod(0o120_777), Some(Errno::INVAL)),
        ("mknod type", mknod(0o150_644), Some(Errno::INVAL)),
        ("create", create(0o100_644), None),
        ("create plain", create(0o644), None),
        ("create device", create(0o020_644), Some(Errno::INVAL)),
        ("setxattr", xattr(5, 3), None),
        ("setxattr short", xattr(6, 0), Some(Errno::INVAL)),
        ("setxattr long", xattr(4, 0), Some(Errno::INVAL)),
        ("setxattr huge", xattr(65537, 0), Some(Errno::TOOBIG)),
        ("setxattr flags", xattr(5, 4), Some(Errno::INVAL)),
        ("map", map(4096, 3, 0), None),
        ("map nothing", map(0, 3, 0), Some(Errno::INVAL)),
        ("map flags", map(1, 4, 0), Some(Errno::INVAL)),
        ("map around", map(u64::MAX, 1, 1), Some(Errno::INVAL)),
        ("access", message(Opcode::Access, &[&[8, 0, 0, 0, 0, 0, 0, 0]]), Some(Errno::INVAL)),
        ("forget count", message(Opcode::BatchForget, &[&[1, 0, 0, 0, 0, 0, 0, 0]]), Some(Errno::INVAL)),
        ("unmap count", message(Opcode::Removemapping, &[&[0xff; 4]]), Some(Errno::INVAL)),
        (
            "lseek",
            message(Opcode::Lseek, &[abi::LseekIn { whence: 2, ..abi::LseekIn::ZERO }.as_bytes()]),
            Some(Errno::INVAL),
        ),
        (
            "ioctl",
            message(Opcode::Ioctl, &[abi::IoctlIn { in_size: 1, ..abi::IoctlIn::ZERO }.as_bytes()]),
            Some(Errno::INVAL),
        ),
        (
            "ioctl flags",
            message(Opcode::Ioctl, &[abi::IoctlIn { flags: 2, ..abi::IoctlIn::ZERO }.as_bytes()]),
            Some(Errno::INVAL),
        ),
    ];
    for (what, message, wanted) in cases {
        assert_eq!(errno(message), *wanted, "{what}");
    }
}

#[test]
fn a_message_longer_than_any_request_is_refused() {
    let message = message(Opcode::Ioctl, &[&vec![0; REQUEST_HEAD_BYTES_MAX]]);
    let head = peek(message.first_chunk().unwrap()).head_bytes(message.len());
    assert_eq!(head, REQUEST_HEAD_BYTES_MAX);
    assert_eq!(decode(&message[..head], message.len(), &FULL).unwrap_err().errno, Errno::TOOBIG);
}

#[test]
fn the_longest_setxattr_fits() {
    let fixed = abi::SetxattrIn { size: 65536, ..abi::SetxattrIn::ZERO };
    let message = message(Opcode::Setxattr, &[fixed.as_bytes(), &[b'n'; 255], b"\0", &vec![0; 65536]]);
    assert!(message.len() <= REQUEST_HEAD_BYTES_MAX);
    assert_eq!(errno(&message), None);
}

#[test]
fn the_name_of_a_tmpfile_is_ignored() {
    let message = message(Opcode::Tmpfile, &[&[0; 16], b"/\0"]);
    let request = decode(&message, message.len(), &FULL).unwrap();
    assert!(matches!(request.operation, Operation::Tmpfile { new, .. } if new.mode == 0o100_000), "{request:?}");
}

fn security_context() -> Vec<u8> {
    let mut contexts = Vec::new();
    append_security_context(&mut contexts, b"security.selinux", b"system_u:object_r:tmp_t:s0\0");
    let size = u32::try_from(contexts.len() + 8).unwrap();
    [abi::ExtHeader { size, kind: 1 }.as_bytes(), &contexts].concat()
}

#[test]
fn security_contexts_are_found_in_old_and_new_formats() {
    let context = security_context();
    let message = message(Opcode::Mkdir, &[&[0; 8], b"dir\0", &context]);
    // Linux 5.17 to 6.1: only the INIT flag announces it.
    assert!(decode(&message, message.len(), &BARE).is_err());
    let old = decode(&message, message.len(), &FULL).unwrap();
    // Linux 6.2 and later: the header announces it.
    let mut message = message.clone();
    message[36] = u8::try_from(context.len() / 8).unwrap();
    let new = decode(&message, message.len(), &BARE).unwrap();
    assert_eq!(old, new);
    assert!(matches!(new.operation, Operation::Mkdir { name, .. } if name == Name::new(b"dir").unwrap()));
    let contexts: Vec<_> = new.extensions.security.iter().collect();
    assert_eq!(contexts, [(&b"security.selinux"[..], &b"system_u:object_r:tmp_t:s0\0"[..])]);
}

#[test]
fn malformed_extensions_are_refused() {
    let groups = |size: u32, count: u32, kind: u32| {
        [abi::ExtHeader { size, kind }.as_bytes(), count.as_bytes(), 1000_u32.as_bytes()].concat()
    };
    let good = groups(16, 1, 32);
    let bad: &[(&str, Vec<u8>)] = &[
        ("too small", groups(7, 1, 32)),
        ("not a multiple", groups(12, 1, 32)),
        ("too large", groups(24, 1, 32)),
        ("too many groups", groups(16, 2, 32)),
        ("very many groups", groups(16, u32::MAX, 32)),
        ("unknown", groups(16, 1, 33)),
        ("missing security contexts", groups(16, 1, 31)),
        ("twice", [good.clone(), good.clone()].concat()),
        ("cut", good[..8].to_vec()),
    ];
    let with = |extension: &[u8]| {
        let mut message = message(Opcode::Mkdir, &[&[0; 8], b"dir\0", extension]);
        message[36] = u8::try_from(extension.len() / 8).unwrap();
        decode(&message, message.len(), &FULL).map(|request| request.extensions.groups.iter().collect::<Vec<_>>())
    };
    assert_eq!(with(&good).unwrap(), [1000]);
    assert_eq!(with(&groups(16, 0, 32)).unwrap(), [] as [u32; 0]);
    assert_eq!(with(&[good, security_context()].concat()).unwrap(), [1000]);
    for (what, extension) in bad {
        assert!(with(extension).is_err(), "{what}");
    }
    let mut whole = message(Opcode::Statfs, &[]);
    whole[36..38].copy_from_slice(&[0xff; 2]);
    assert!(decode(&whole, whole.len(), &FULL).is_err());
}
