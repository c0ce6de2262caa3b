//! Encodes requests (FUSE protocol 7.45, `fuse_in_header` and the structs behind it) for clients: the native driver
//! and the tests.

use ferry_vfs::{CopyRange, Handle, IoRange, Seek, SetAttr, SetTime};
use zerocopy::{Immutable, IntoBytes};

use super::abi::{self, InHeader, InitFlags};
use super::{LockRequest, Negotiated, Operation, Release, Request};
use crate::fuse::reply::lock_kind;

impl Request<'_> {
    /// Appends the request to `out`. The header counts the payload of a WRITE; the caller sends the payload after it.
    ///
    /// Fields that the session did not negotiate are omitted: `clear_sgid` without [`InitFlags::SETXATTR_EXT`].
    pub fn encode(&self, session: &Negotiated, out: &mut Vec<u8>) {
        let begin = out.len();
        out.extend_from_slice(InHeader::ZERO.as_bytes());
        self.operation.encode(session, out);
        let arguments_end = out.len();
        if !matches!(self.operation, Operation::Write { .. }) {
            self.extensions.encode(out);
        }
        let payload_bytes = match &self.operation {
            Operation::Write { range, .. } => range.len as usize,
            _ => 0,
        };
        let header = InHeader {
            len: u32::try_from(out.len() - begin + payload_bytes).expect("a request is shorter than 4 GiB"),
            opcode: self.operation.opcode().as_raw(),
            unique: self.unique,
            nodeid: self.ino.0,
            uid: self.uid,
            gid: self.gid,
            pid: self.pid,
            total_extlen: u16::try_from((out.len() - arguments_end) / 8).expect("extensions are short"),
            padding: 0,
        };
        out[begin..begin + size_of::<InHeader>()].copy_from_slice(header.as_bytes());
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

impl Operation<'_> {
    fn encode(&self, session: &Negotiated, out: &mut Vec<u8>) {
        match self {
            Self::LookupSelf => put_string(out, b"."),
            Self::LookupParent => put_string(out, b".."),
            Self::Lookup { name } | Self::Unlink { name } | Self::Rmdir { name } => put_string(out, name.as_bytes()),
            Self::Readlink | Self::Statfs | Self::Destroy => (),
            Self::Symlink { .. }
            | Self::Mknod { .. }
            | Self::Mkdir { .. }
            | Self::Rename { .. }
            | Self::Link { .. }
            | Self::Create { .. }
            | Self::Tmpfile { .. } => self.encode_names(out),
            Self::Setxattr { .. } | Self::Getxattr { .. } | Self::Listxattr { .. } | Self::Removexattr { .. } => {
                self.encode_xattr(session, out);
            }
            Self::Forget { count } => put(out, &abi::ForgetIn { nlookup: *count }),
            Self::BatchForget { forgets } => {
                put(out, &abi::BatchForgetIn { count: size(forgets.as_bytes()) / 16, dummy: 0 });
                out.extend_from_slice(forgets.as_bytes());
            }
            Self::Getattr { handle } => {
                let (getattr_flags, fh) = getattr_handle(*handle);
                put(out, &abi::GetattrIn { getattr_flags, dummy: 0, fh });
            }
            Self::Statx { handle, flags, mask } => {
                let (getattr_flags, fh) = getattr_handle(*handle);
                put(out, &abi::StatxIn { getattr_flags, reserved: 0, fh, sx_flags: *flags, sx_mask: *mask });
            }
            Self::Setattr { handle, owner, set } => put(out, &setattr(*handle, *owner, set)),
            Self::Open { flags, clear_privileges } => {
                let open_flags = flag(*clear_privileges, abi::OPEN_KILL_SUIDGID);
                put(out, &abi::OpenIn { flags: flags.bits(), open_flags });
            }
            Self::Opendir { flags } => put(out, &abi::OpenIn { flags: flags.bits(), open_flags: 0 }),
            Self::Read(range) => put(out, &read(range)),
            Self::Write { range, cached } => put(out, &write(range, *cached)),
            Self::CopyFileRange(copy) | Self::CopyFileRange64(copy) => put(out, &copy_file_range(copy)),
            Self::Fallocate { handle, offset, len, flags } => {
                let (fh, offset, length, mode) = (handle.0, *offset, *len, flags.bits());
                put(out, &abi::FallocateIn { fh, offset, length, mode, padding: 0 });
            }
            Self::Lseek { handle, offset, seek } => {
                let whence = match seek {
                    Seek::Data => 3,
                    Seek::Hole => 4,
                };
                put(out, &abi::LseekIn { fh: handle.0, offset: *offset, whence, padding: 0 });
            }
            Self::Flush { handle, owner } => {
                put(out, &abi::FlushIn { fh: handle.0, unused: 0, padding: 0, lock_owner: *owner });
            }
            Self::Release(end) | Self::Releasedir(end) => put(out, &release(end)),
            Self::Fsync { handle, data_only } | Self::Fsyncdir { handle, data_only } => {
                let fsync_flags = flag(*data_only, abi::FSYNC_FDATASYNC);
                put(out, &abi::FsyncIn { fh: handle.0, fsync_flags, padding: 0 });
            }
            Self::Readdir { at, bytes_max } => {
                let (fh, offset, size) = (at.handle.0, at.offset, *bytes_max);
                put(out, &abi::ReadIn { fh, offset, size, ..abi::ReadIn::ZERO });
            }
            Self::Syncfs => put(out, &abi::SyncfsIn { padding: 0 }),
            Self::Access { mask } => put(out, &abi::AccessIn { mask: *mask, padding: 0 }),
            Self::GetLock(lock) | Self::SetLock { lock, .. } => put(out, &lk_in(lock)),
            Self::Bmap { block, block_bytes } => {
                put(out, &abi::BmapIn { block: *block, blocksize: *block_bytes, padding: 0 });
            }
            Self::Ioctl { handle, flags, command, argument, input, out_bytes_max } => {
                let (fh, flags, cmd, arg, out_size) = (handle.0, *flags, *command, *argument, *out_bytes_max);
                put(out, &abi::IoctlIn { fh, flags, cmd, arg, in_size: size(input), out_size });
                out.extend_from_slice(input);
            }
            Self::Poll { handle, client_handle, flags, events } => {
                put(out, &abi::PollIn { fh: handle.0, kh: *client_handle, flags: *flags, events: *events });
            }
            Self::Setupmapping { handle, offset, len, window_offset, read, write } => {
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
            Self::Removemapping { ranges } => {
                put(out, &abi::RemovemappingIn { count: size(ranges.as_bytes()) / 16 });
                out.extend_from_slice(ranges.as_bytes());
            }
            Self::Interrupt { unique } => put(out, &abi::InterruptIn { unique: *unique }),
            Self::Init(init) => init.encode(out),
        }
    }

    /// Encodes operations with names after their structures.
    fn encode_names(&self, out: &mut Vec<u8>) {
        match self {
            Self::Symlink { name, target } => {
                put_string(out, name.as_bytes());
                put_string(out, target);
            }
            Self::Mknod { name, new } => {
                put(out, &abi::MknodIn { mode: new.mode, rdev: new.rdev, umask: new.umask, padding: 0 });
                put_string(out, name.as_bytes());
            }
            Self::Mkdir { name, new } => {
                put(out, &abi::MkdirIn { mode: new.mode & 0o7777, umask: new.umask });
                put_string(out, name.as_bytes());
            }
            Self::Rename { name, new_dir, new_name, flags } => {
                if flags.is_empty() {
                    put(out, &abi::RenameIn { newdir: new_dir.0 });
                } else {
                    put(out, &abi::Rename2In { newdir: new_dir.0, flags: flags.bits(), padding: 0 });
                }
                put_string(out, name.as_bytes());
                put_string(out, new_name.as_bytes());
            }
            Self::Link { from, name } => {
                put(out, &abi::LinkIn { oldnodeid: from.0 });
                put_string(out, name.as_bytes());
            }
            Self::Create { name, new, flags, clear_privileges } => {
                let open_flags = flag(*clear_privileges, abi::OPEN_KILL_SUIDGID);
                put(out, &abi::CreateIn { flags: flags.bits(), mode: new.mode, umask: new.umask, open_flags });
                put_string(out, name.as_bytes());
            }
            Self::Tmpfile { new, flags } => {
                put(out, &abi::CreateIn { flags: flags.bits(), mode: new.mode, umask: new.umask, open_flags: 0 });
                put_string(out, b"/");
            }
            _ => unreachable!("the caller passes no others"),
        }
    }

    fn encode_xattr(&self, session: &Negotiated, out: &mut Vec<u8>) {
        match self {
            Self::Setxattr { name, value, flags, clear_sgid } => {
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
            Self::Getxattr { name, bytes_max } => {
                put(out, &abi::GetxattrIn { size: *bytes_max, padding: 0 });
                put_string(out, name);
            }
            Self::Listxattr { bytes_max } => put(out, &abi::GetxattrIn { size: *bytes_max, padding: 0 }),
            Self::Removexattr { name } => put_string(out, name),
            _ => unreachable!("the caller passes no others"),
        }
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
