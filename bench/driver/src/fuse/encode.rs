//! Encodes requests (FUSE protocol 7.45, `fuse_in_header` and the structs behind it).

use ferry_vfs::{CopyRange, Handle, IoRange, LockKind, Seek, SetAttr, SetTime};
use ferry_wire::fuse::abi::{self, ExtHeader, InHeader, InitFlags, InitIn, InitInShort, Secctx};
use ferry_wire::fuse::{Extensions, InitRequest, LockRequest, Negotiated, Operation, Release, Request};
use zerocopy::{Immutable, IntoBytes};

/// Appends the request to `out`. The header counts the payload of a WRITE; the caller sends the payload after it.
///
/// Fields that the session did not negotiate are omitted: `clear_sgid` without [`InitFlags::SETXATTR_EXT`]. The extensions
/// of a WRITE are omitted too, because its payload would have to come before them.
///
/// # Panics
/// With [`Operation`]s that this module does not know, with a request of 4 GiB or more, and with extensions of 512 KiB or
/// more.
pub fn encode(request: &Request<'_>, session: &Negotiated, out: &mut Vec<u8>) {
    let begin = out.len();
    put(out, &InHeader::ZERO);
    put_operation(&request.operation, session, out);
    let arguments_end = out.len();
    let payload_bytes = match &request.operation {
        Operation::Write { range, .. } => range.len as usize,
        _ => {
            put_extensions(&request.extensions, out);
            0
        }
    };
    let header = InHeader {
        len: u32::try_from(out.len() - begin + payload_bytes).expect("a request is shorter than 4 GiB"),
        opcode: request.operation.opcode().as_raw(),
        unique: request.unique,
        nodeid: request.ino.0,
        uid: request.uid,
        gid: request.gid,
        pid: request.pid,
        total_extlen: u16::try_from((out.len() - arguments_end) / 8).expect("extensions are short"),
        padding: 0,
    };
    out[begin..begin + size_of::<InHeader>()].copy_from_slice(header.as_bytes());
}

/// Appends one security context to `out`, in the format of [`ferry_wire::fuse::SecurityContexts::parse`].
///
/// # Panics
/// With a value of 4 GiB or more.
pub fn append_security_context(out: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    put(out, &Secctx { size: size(value), padding: 0 });
    put_string(out, name);
    out.extend_from_slice(value);
    out.resize(out.len().next_multiple_of(8), 0);
}

fn put_extensions(extensions: &Extensions<'_>, out: &mut Vec<u8>) {
    let header = |kind: u32, size: usize, out: &mut Vec<u8>| {
        let size = u32::try_from(size_of::<ExtHeader>() + size).expect("extensions are short");
        put(out, &ExtHeader { size, kind });
    };
    let (security, groups) = (&extensions.security, extensions.groups.as_bytes());
    if !security.is_empty() {
        header(u32::try_from(security.len()).expect("security contexts are few"), security.as_bytes().len(), out);
        out.extend_from_slice(security.as_bytes());
    }
    if !groups.is_empty() {
        let used = size_of::<u32>() + groups.len();
        header(abi::EXT_GROUPS, used.next_multiple_of(8), out);
        put(out, &u32::try_from(extensions.groups.len()).expect("groups are few"));
        out.extend_from_slice(groups);
        out.resize(out.len() + used.next_multiple_of(8) - used, 0);
    }
}

fn put_init(init: &InitRequest, out: &mut Vec<u8>) {
    let [flags, high]: [u32; 2] = zerocopy::transmute!(init.flags.bits());
    let InitRequest { major, minor, max_readahead_bytes: max_readahead, .. } = *init;
    if major != abi::MAJOR || minor < abi::MINOR_MIN {
        put(out, &[major, minor]);
    } else if init.flags.contains(InitFlags::INIT_EXT) {
        put(out, &InitIn { major, minor, max_readahead, flags, flags2: high, unused: [0; 11] });
    } else {
        put(out, &InitInShort { major, minor, max_readahead, flags });
    }
}

fn put(out: &mut Vec<u8>, part: &(impl IntoBytes + Immutable)) {
    out.extend_from_slice(part.as_bytes());
}

fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    out.extend_from_slice(string);
    out.push(0);
}

fn flag(condition: bool, flag: u32) -> u32 {
    if condition { flag } else { 0 }
}

fn size(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).expect("a request is shorter than 4 GiB")
}

fn put_operation(operation: &Operation<'_>, session: &Negotiated, out: &mut Vec<u8>) {
    match operation {
        Operation::LookupSelf => put_string(out, b"."),
        Operation::LookupParent => put_string(out, b".."),
        Operation::Lookup { name } | Operation::Unlink { name } | Operation::Rmdir { name } => {
            put_string(out, name.as_bytes())
        }
        Operation::Readlink | Operation::Statfs | Operation::Destroy => (),
        Operation::Symlink { .. }
        | Operation::Mknod { .. }
        | Operation::Mkdir { .. }
        | Operation::Rename { .. }
        | Operation::Link { .. }
        | Operation::Create { .. }
        | Operation::Tmpfile { .. } => put_names(operation, out),
        Operation::Setxattr { .. }
        | Operation::Getxattr { .. }
        | Operation::Listxattr { .. }
        | Operation::Removexattr { .. } => {
            put_xattr(operation, session, out);
        }
        Operation::Forget { count } => put(out, &abi::ForgetIn { nlookup: *count }),
        Operation::BatchForget { forgets } => {
            put(out, &abi::BatchForgetIn { count: size(forgets.as_bytes()) / 16, dummy: 0 });
            out.extend_from_slice(forgets.as_bytes());
        }
        Operation::Getattr { handle } => {
            let (getattr_flags, fh) = getattr_handle(*handle);
            put(out, &abi::GetattrIn { getattr_flags, dummy: 0, fh });
        }
        Operation::Statx { handle, flags, mask } => {
            let (getattr_flags, fh) = getattr_handle(*handle);
            put(out, &abi::StatxIn { getattr_flags, reserved: 0, fh, sx_flags: *flags, sx_mask: *mask });
        }
        Operation::Setattr { handle, owner, set } => put(out, &setattr(*handle, *owner, set)),
        Operation::Open { flags, clear_privileges } => {
            let open_flags = flag(*clear_privileges, abi::OPEN_KILL_SUIDGID);
            put(out, &abi::OpenIn { flags: flags.bits(), open_flags });
        }
        Operation::Opendir { flags } => put(out, &abi::OpenIn { flags: flags.bits(), open_flags: 0 }),
        Operation::Read(range) => put(out, &read(range)),
        Operation::Write { range, cached } => put(out, &write(range, *cached)),
        Operation::CopyFileRange(copy) | Operation::CopyFileRange64(copy) => put(out, &copy_file_range(copy)),
        Operation::Fallocate { handle, offset, len, flags } => {
            let (fh, offset, length, mode) = (handle.0, *offset, *len, flags.bits());
            put(out, &abi::FallocateIn { fh, offset, length, mode, padding: 0 });
        }
        Operation::Lseek { handle, offset, seek } => {
            let whence = match seek {
                Seek::Data => 3,
                Seek::Hole => 4,
            };
            put(out, &abi::LseekIn { fh: handle.0, offset: *offset, whence, padding: 0 });
        }
        Operation::Flush { handle, owner } => {
            put(out, &abi::FlushIn { fh: handle.0, unused: 0, padding: 0, lock_owner: *owner });
        }
        Operation::Release(end) | Operation::Releasedir(end) => put(out, &release(end)),
        Operation::Fsync { handle, data_only } | Operation::Fsyncdir { handle, data_only } => {
            let fsync_flags = flag(*data_only, abi::FSYNC_FDATASYNC);
            put(out, &abi::FsyncIn { fh: handle.0, fsync_flags, padding: 0 });
        }
        Operation::Readdir { at, bytes_max } => {
            let (fh, offset, size) = (at.handle.0, at.offset, *bytes_max);
            put(out, &abi::ReadIn { fh, offset, size, ..abi::ReadIn::ZERO });
        }
        Operation::Syncfs => put(out, &abi::SyncfsIn { padding: 0 }),
        Operation::Access { mask } => put(out, &abi::AccessIn { mask: *mask, padding: 0 }),
        Operation::GetLock(lock) | Operation::SetLock { lock, .. } => put(out, &lk_in(lock)),
        Operation::Bmap { block, block_bytes } => {
            put(out, &abi::BmapIn { block: *block, blocksize: *block_bytes, padding: 0 });
        }
        Operation::Ioctl { handle, flags, command, argument, input, out_bytes_max } => {
            let (fh, flags, cmd, arg, out_size) = (handle.0, *flags, *command, *argument, *out_bytes_max);
            put(out, &abi::IoctlIn { fh, flags, cmd, arg, in_size: size(input), out_size });
            out.extend_from_slice(input);
        }
        Operation::Poll { handle, client_handle, flags, events } => {
            put(out, &abi::PollIn { fh: handle.0, kh: *client_handle, flags: *flags, events: *events });
        }
        Operation::Setupmapping { handle, offset, len, window_offset, read, write } => {
            let read = if *read { abi::SETUPMAPPING_READ } else { 0 };
            let write = if *write { abi::SETUPMAPPING_WRITE } else { 0 };
            put(
                out,
                &abi::SetupmappingIn {
                    fh: handle.map_or(u64::MAX, |handle| handle.0),
                    foffset: *offset,
                    len: *len,
                    flags: read | write,
                    moffset: *window_offset,
                },
            );
        }
        Operation::Removemapping { ranges } => {
            put(out, &abi::RemovemappingIn { count: size(ranges.as_bytes()) / 16 });
            out.extend_from_slice(ranges.as_bytes());
        }
        Operation::Interrupt { unique } => put(out, &abi::InterruptIn { unique: *unique }),
        Operation::Init(init) => put_init(init, out),
        other => unreachable!("an unknown operation: {other:?}"),
    }
}

/// Encodes operations with names after their structures.
fn put_names(operation: &Operation<'_>, out: &mut Vec<u8>) {
    match operation {
        Operation::Symlink { name, target } => {
            put_string(out, name.as_bytes());
            put_string(out, target);
        }
        Operation::Mknod { name, new } => {
            put(out, &abi::MknodIn { mode: new.mode, rdev: new.rdev, umask: new.umask, padding: 0 });
            put_string(out, name.as_bytes());
        }
        Operation::Mkdir { name, new } => {
            put(out, &abi::MkdirIn { mode: new.mode & 0o7777, umask: new.umask });
            put_string(out, name.as_bytes());
        }
        Operation::Rename { name, new_dir, new_name, flags } => {
            if flags.is_empty() {
                put(out, &abi::RenameIn { newdir: new_dir.0 });
            } else {
                put(out, &abi::Rename2In { newdir: new_dir.0, flags: flags.bits(), padding: 0 });
            }
            put_string(out, name.as_bytes());
            put_string(out, new_name.as_bytes());
        }
        Operation::Link { from, name } => {
            put(out, &abi::LinkIn { oldnodeid: from.0 });
            put_string(out, name.as_bytes());
        }
        Operation::Create { name, new, flags, clear_privileges } => {
            let open_flags = flag(*clear_privileges, abi::OPEN_KILL_SUIDGID);
            put(out, &abi::CreateIn { flags: flags.bits(), mode: new.mode, umask: new.umask, open_flags });
            put_string(out, name.as_bytes());
        }
        Operation::Tmpfile { new, flags } => {
            put(out, &abi::CreateIn { flags: flags.bits(), mode: new.mode, umask: new.umask, open_flags: 0 });
            put_string(out, b"/");
        }
        _ => unreachable!("the caller passes no others"),
    }
}

fn put_xattr(operation: &Operation<'_>, session: &Negotiated, out: &mut Vec<u8>) {
    match operation {
        Operation::Setxattr { name, value, flags, clear_sgid } => {
            let (size, flags) = (size(value), flags.bits());
            if session.has(InitFlags::SETXATTR_EXT) {
                let setxattr_flags = flag(*clear_sgid, abi::SETXATTR_ACL_KILL_SGID);
                put(out, &abi::SetxattrIn { size, flags, setxattr_flags, padding: 0 });
            } else {
                put(out, &abi::SetxattrInShort { size, flags });
            }
            put_string(out, name);
            out.extend_from_slice(value);
        }
        Operation::Getxattr { name, bytes_max } => {
            put(out, &abi::GetxattrIn { size: *bytes_max, padding: 0 });
            put_string(out, name);
        }
        Operation::Listxattr { bytes_max } => put(out, &abi::GetxattrIn { size: *bytes_max, padding: 0 }),
        Operation::Removexattr { name } => put_string(out, name),
        _ => unreachable!("the caller passes no others"),
    }
}

fn getattr_handle(handle: Option<Handle>) -> (u32, u64) {
    handle.map_or((0, 0), |handle| (abi::GETATTR_FH, handle.0))
}

fn read(range: &IoRange) -> abi::ReadIn {
    abi::ReadIn {
        fh: range.handle.0,
        offset: range.offset,
        size: range.len,
        read_flags: flag(range.owner.is_some(), abi::READ_LOCKOWNER),
        lock_owner: range.owner.unwrap_or_default(),
        flags: range.flags.bits(),
        padding: 0,
    }
}

fn write(range: &IoRange, cached: bool) -> abi::WriteIn {
    abi::WriteIn {
        fh: range.handle.0,
        offset: range.offset,
        size: range.len,
        write_flags: flag(cached, abi::WRITE_CACHE)
            | flag(range.owner.is_some(), abi::WRITE_LOCKOWNER)
            | flag(range.clear_privileges, abi::WRITE_KILL_SUIDGID),
        lock_owner: range.owner.unwrap_or_default(),
        flags: range.flags.bits(),
        padding: 0,
    }
}

fn copy_file_range(copy: &CopyRange) -> abi::CopyFileRangeIn {
    abi::CopyFileRangeIn {
        fh_in: copy.from.1.0,
        off_in: copy.from.2,
        nodeid_out: copy.to.0.0,
        fh_out: copy.to.1.0,
        off_out: copy.to.2,
        len: copy.len,
        flags: 0,
    }
}

fn release(end: &Release) -> abi::ReleaseIn {
    abi::ReleaseIn {
        fh: end.handle.0,
        flags: end.flags.bits(),
        release_flags: flag(end.flush, abi::RELEASE_FLUSH) | flag(end.unlock_flock, abi::RELEASE_FLOCK_UNLOCK),
        lock_owner: end.owner,
    }
}

fn lk_in(lock: &LockRequest) -> abi::LkIn {
    abi::LkIn {
        fh: lock.handle.0,
        owner: lock.owner,
        lk: abi::FileLock { start: lock.start, end: lock.end, kind: lock_kind(lock.kind), pid: lock.pid },
        lk_flags: flag(lock.flock, abi::LK_FLOCK),
        padding: 0,
    }
}

const fn lock_kind(kind: LockKind) -> u32 {
    match kind {
        LockKind::Read => abi::LOCK_READ,
        LockKind::Write => abi::LOCK_WRITE,
        LockKind::Unlock => abi::LOCK_NONE,
    }
}

fn setattr(handle: Option<Handle>, owner: Option<u64>, set: &SetAttr) -> abi::SetattrIn {
    let time = |time: Option<SetTime>, at, now| match time {
        None => (0, 0, 0),
        Some(SetTime::Now) => (at | now, 0, 0),
        Some(SetTime::At(time)) => (at, time.sec.cast_unsigned(), time.nsec),
    };
    let (atime_valid, atime, atimensec) = time(set.atime, abi::FATTR_ATIME, abi::FATTR_ATIME_NOW);
    let (mtime_valid, mtime, mtimensec) = time(set.mtime, abi::FATTR_MTIME, abi::FATTR_MTIME_NOW);
    let (ctime_valid, ctime, ctimensec) = time(set.ctime.map(SetTime::At), abi::FATTR_CTIME, 0);
    abi::SetattrIn {
        valid: flag(set.mode.is_some(), abi::FATTR_MODE)
            | flag(set.uid.is_some(), abi::FATTR_UID)
            | flag(set.gid.is_some(), abi::FATTR_GID)
            | flag(set.size.is_some(), abi::FATTR_SIZE)
            | flag(handle.is_some(), abi::FATTR_FH)
            | flag(owner.is_some(), abi::FATTR_LOCKOWNER)
            | flag(set.clear_privileges, abi::FATTR_KILL_SUIDGID)
            | atime_valid
            | mtime_valid
            | ctime_valid,
        padding: 0,
        fh: handle.map_or(0, |handle| handle.0),
        size: set.size.unwrap_or_default(),
        lock_owner: owner.unwrap_or_default(),
        atime,
        mtime,
        ctime,
        atimensec,
        mtimensec,
        ctimensec,
        mode: set.mode.unwrap_or_default(),
        unused4: 0,
        uid: set.uid.unwrap_or_default(),
        gid: set.gid.unwrap_or_default(),
        unused5: 0,
    }
}
