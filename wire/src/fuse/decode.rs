//! Decodes requests.

use ferry_vfs::{
    CopyRange, CreateArgs, DirRange, Errno, FallocateFlags, FileType, Handle, Ino, IoRange, LockKind, OFlags,
    RenameFlags, Seek, SetAttr, SetTime, Timespec, XattrFlags,
};

use super::abi::{self, InitFlags, Opcode};
use super::body::XATTR_REPLY_BYTES_MAX;
use super::request::header;
use super::{
    BATCH_FORGET_BYTES_MAX, DecodeError, Extensions, InitRequest, LockRequest, Negotiated, Operation,
    REQUEST_HEAD_BYTES_MAX, Records, Release, Request, WRITE_HEAD_BYTES,
};
use crate::body::{Body, FieldError, PATH_BYTES_MAX, PERMISSIONS, XATTR_VALUE_BYTES_MAX, check_range, ensure, name};

/// Decodes a request of `message_bytes` bytes. `head` is the caller's copy of the first [`super::Peek::head_bytes`]
/// bytes: the whole message, except that the payload of a WRITE may be left out. `head` may be unaligned.
///
/// # Errors
///
/// [`DecodeError`] for every message that the protocol does not allow. Invalid names ([`ferry_vfs::Name`]) are `INVAL`
/// or `NAMETOOLONG`, unknown opcodes `NOSYS`.
pub fn decode<'a>(head: &'a [u8], message_bytes: usize, session: &Negotiated) -> Result<Request<'a>, DecodeError> {
    let Some((header, rest)) = header(head) else {
        return Err(DecodeError { unique: None, opcode: 0, errno: Errno::INVAL, reason: "shorter than a header" });
    };
    let fail = |error: FieldError| DecodeError {
        unique: Some(header.unique),
        opcode: header.opcode,
        errno: error.errno,
        reason: error.reason,
    };
    let (extensions, operation) = parse(&header, rest, head.len(), message_bytes, session).map_err(fail)?;
    Ok(Request {
        unique: header.unique,
        ino: Ino(header.nodeid),
        uid: header.uid,
        gid: header.gid,
        pid: header.pid,
        extensions,
        operation,
    })
}

type Parsed<'a> = Result<(Extensions<'a>, Operation<'a>), FieldError>;

fn parse<'a>(
    header: &abi::InHeader,
    rest: &'a [u8],
    head_bytes: usize,
    message_bytes: usize,
    session: &Negotiated,
) -> Parsed<'a> {
    let opcode = Opcode::from_raw(header.opcode).ok_or(FieldError::new(Errno::NOSYS, "an unknown opcode"))?;
    ensure(header.len as usize == message_bytes, "its length is not that in its header")?;
    let extension_bytes = usize::from(header.total_extlen) * 8;
    if opcode == Opcode::Write {
        // Extensions would follow the payload; no kernel sends any with a WRITE.
        ensure(extension_bytes == 0, "a WRITE with extensions")?;
        let payload_bytes =
            message_bytes.checked_sub(WRITE_HEAD_BYTES).ok_or(FieldError::invalid("a WRITE without arguments"))?;
        ensure(payload_bytes <= session.max_write_bytes as usize, "a WRITE of more bytes than negotiated")?;
        let operation = write(Body(rest).take()?, header.nodeid, payload_bytes)?;
        return Ok((Extensions::default(), operation));
    }
    let bytes_max = if opcode == Opcode::BatchForget { BATCH_FORGET_BYTES_MAX } else { REQUEST_HEAD_BYTES_MAX };
    if message_bytes > bytes_max {
        return Err(FieldError::new(Errno::TOOBIG, "longer than any request"));
    }
    ensure(head_bytes == message_bytes, "the message is incomplete")?;
    let split = rest.len().checked_sub(extension_bytes).ok_or(FieldError::invalid("extensions longer than itself"))?;
    let (arguments, extensions) = rest.split_at(split);
    let extensions = if extensions.is_empty() { Extensions::default() } else { Extensions::parse(extensions)? };
    // Linux 5.17 to 6.1 sends the security context without announcing it in the header.
    let may_have_tail = extension_bytes == 0 && session.has(InitFlags::SECURITY_CTX);
    let mut decoder = Decoder { body: Body(arguments), ino: Ino(header.nodeid), extensions, may_have_tail };
    let operation = decoder.operation(opcode, session)?;
    Ok((decoder.extensions, operation))
}

struct Decoder<'a> {
    body: Body<'a>,
    ino: Ino,
    extensions: Extensions<'a>,
    /// A security context may follow the arguments of a creating request.
    may_have_tail: bool,
}

impl<'a> Decoder<'a> {
    fn operation(&mut self, opcode: Opcode, session: &Negotiated) -> Result<Operation<'a>, FieldError> {
        let body = self.body;
        match opcode {
            Opcode::Lookup => self.lookup(),
            Opcode::Read => self.read(session),
            Opcode::Getattr => {
                let fixed: abi::GetattrIn = body.only()?;
                Ok(Operation::Getattr { handle: handle_if(fixed.getattr_flags & abi::GETATTR_FH != 0, fixed.fh) })
            }
            Opcode::Forget => Ok(Operation::Forget { count: body.only::<abi::ForgetIn>()?.nlookup }),
            Opcode::BatchForget => self.batch_forget(),
            Opcode::Statx => {
                let fixed: abi::StatxIn = body.only()?;
                let handle = handle_if(fixed.getattr_flags & abi::GETATTR_FH != 0, fixed.fh);
                Ok(Operation::Statx { handle, flags: fixed.sx_flags, mask: fixed.sx_mask })
            }
            Opcode::Setattr => setattr(&body.only()?),
            Opcode::Readlink => body.end().map(|()| Operation::Readlink),
            Opcode::Symlink | Opcode::Mknod | Opcode::Mkdir | Opcode::Create | Opcode::Tmpfile => self.make(opcode),
            Opcode::Unlink => Ok(Operation::Unlink { name: self.last_name()? }),
            Opcode::Rmdir => Ok(Operation::Rmdir { name: self.last_name()? }),
            Opcode::Rename | Opcode::Rename2 => self.rename(opcode),
            Opcode::Link => {
                let fixed: abi::LinkIn = self.body.take()?;
                Ok(Operation::Link { from: Ino(fixed.oldnodeid), name: self.last_name()? })
            }
            Opcode::Open => {
                let fixed: abi::OpenIn = body.only()?;
                let clear_privileges = fixed.open_flags & abi::OPEN_KILL_SUIDGID != 0;
                Ok(Operation::Open { flags: flags_to_open(fixed.flags)?, clear_privileges })
            }
            Opcode::Opendir => Ok(Operation::Opendir { flags: flags_to_open(body.only::<abi::OpenIn>()?.flags)? }),
            // `parse` handles WRITE before this.
            Opcode::Write | Opcode::NotifyReply => {
                Err(FieldError::new(Errno::NOSYS, "an opcode that servers do not implement"))
            }
            Opcode::CopyFileRange => self.copy().map(Operation::CopyFileRange),
            Opcode::CopyFileRange64 => self.copy().map(Operation::CopyFileRange64),
            Opcode::Fallocate => fallocate(&body.only()?),
            Opcode::Lseek => lseek(&body.only()?),
            Opcode::Flush => {
                let fixed: abi::FlushIn = body.only()?;
                Ok(Operation::Flush { handle: Handle(fixed.fh), owner: fixed.lock_owner })
            }
            Opcode::Release => self.release().map(Operation::Release),
            Opcode::Releasedir => self.release().map(Operation::Releasedir),
            Opcode::Fsync => self.fsync().map(|(handle, data_only)| Operation::Fsync { handle, data_only }),
            Opcode::Fsyncdir => self.fsync().map(|(handle, data_only)| Operation::Fsyncdir { handle, data_only }),
            Opcode::Readdir => self.readdir(false, session),
            Opcode::Readdirplus => self.readdir(true, session),
            Opcode::Syncfs => body.only::<abi::SyncfsIn>().map(|_| Operation::Syncfs),
            Opcode::Statfs => body.end().map(|()| Operation::Statfs),
            Opcode::Setxattr => self.setxattr(session),
            Opcode::Getxattr => self.getxattr(),
            Opcode::Listxattr => {
                let bytes_max = body.only::<abi::GetxattrIn>()?.size.min(XATTR_REPLY_BYTES_MAX);
                Ok(Operation::Listxattr { bytes_max })
            }
            Opcode::Removexattr => {
                let name = self.body.xattr_name()?;
                self.body.end().map(|()| Operation::Removexattr { name })
            }
            Opcode::Access => {
                let fixed: abi::AccessIn = body.only()?;
                ensure(fixed.mask & !0o7 == 0, "unknown permissions")?;
                Ok(Operation::Access { mask: fixed.mask })
            }
            Opcode::Getlk => Ok(Operation::GetLock(lock(&body.only()?)?)),
            Opcode::Setlk => Ok(Operation::SetLock { lock: lock(&body.only()?)?, wait: false }),
            Opcode::Setlkw => Ok(Operation::SetLock { lock: lock(&body.only()?)?, wait: true }),
            Opcode::Bmap => {
                let fixed: abi::BmapIn = body.only()?;
                Ok(Operation::Bmap { block: fixed.block, block_bytes: fixed.blocksize })
            }
            Opcode::Ioctl => self.ioctl(session),
            Opcode::Poll => {
                let fixed: abi::PollIn = body.only()?;
                let abi::PollIn { fh, kh: client_handle, flags, events } = fixed;
                Ok(Operation::Poll { handle: Handle(fh), client_handle, flags, events })
            }
            Opcode::Setupmapping => setupmapping(&body.only()?),
            Opcode::Removemapping => self.removemapping(),
            Opcode::Interrupt => Ok(Operation::Interrupt { unique: body.only::<abi::InterruptIn>()?.unique }),
            Opcode::Init => InitRequest::decode(body).map(Operation::Init),
            Opcode::Destroy => body.end().map(|()| Operation::Destroy),
        }
    }

    /// Takes a name, the last argument.
    fn last_name(&mut self) -> Result<ferry_vfs::Name<'a>, FieldError> {
        let name = self.body.c_name()?;
        self.body.end()?;
        Ok(name)
    }

    /// LOOKUP is the only operation that accepts `.` and `..`; nfsd looks up inodes and their parents with them.
    fn lookup(&mut self) -> Result<Operation<'a>, FieldError> {
        let bytes = self.body.c_string()?;
        self.body.end()?;
        match bytes {
            b"." => Ok(Operation::LookupSelf),
            b".." => Ok(Operation::LookupParent),
            _ => Ok(Operation::Lookup { name: name(bytes)? }),
        }
    }

    /// A short reply to READ means end of file, so the decoder must not shorten the range.
    fn read(&mut self, session: &Negotiated) -> Result<Operation<'a>, FieldError> {
        let fixed: abi::ReadIn = self.body.only()?;
        ensure(fixed.size <= session.max_read_bytes(), "a READ of more bytes than negotiated")?;
        check_range(fixed.offset, u64::from(fixed.size))?;
        Ok(Operation::Read(IoRange {
            ino: self.ino,
            handle: Handle(fixed.fh),
            offset: fixed.offset,
            len: fixed.size,
            flags: OFlags::from_bits_retain(fixed.flags),
            clear_privileges: false,
            owner: (fixed.read_flags & abi::READ_LOCKOWNER != 0).then_some(fixed.lock_owner),
        }))
    }

    fn batch_forget(&mut self) -> Result<Operation<'a>, FieldError> {
        let fixed: abi::BatchForgetIn = self.body.take()?;
        Ok(Operation::BatchForget { forgets: self.records(fixed.count)? })
    }

    fn removemapping(&mut self) -> Result<Operation<'a>, FieldError> {
        let fixed: abi::RemovemappingIn = self.body.take()?;
        Ok(Operation::Removemapping { ranges: self.records(fixed.count)? })
    }

    fn records<T: zerocopy::FromBytes + zerocopy::IntoBytes + zerocopy::Immutable>(
        &self,
        count: u32,
    ) -> Result<Records<'a, T>, FieldError> {
        let size = (count as usize).checked_mul(size_of::<T>());
        ensure(size == Some(self.body.0.len()), "a list whose length does not match its count")?;
        Ok(Records::from_bytes(self.body.0))
    }

    /// Decodes requests that create an inode and can carry a security context.
    fn make(&mut self, opcode: Opcode) -> Result<Operation<'a>, FieldError> {
        let operation = match opcode {
            Opcode::Symlink => {
                let (name, target) = (self.body.c_name()?, self.body.c_string()?);
                ensure(!target.is_empty(), "a symbolic link without a target")?;
                if target.len() > PATH_BYTES_MAX {
                    return Err(FieldError::new(Errno::NAMETOOLONG, "the target of a symbolic link is too long"));
                }
                Operation::Symlink { name, target }
            }
            Opcode::Mknod => {
                let abi::MknodIn { mode, rdev, umask, .. } = self.body.take()?;
                let kind = match FileType::from_raw_mode(mode) {
                    FileType::Unknown if mode & !PERMISSIONS == 0 => FileType::RegularFile,
                    FileType::Unknown | FileType::Directory | FileType::Symlink => {
                        return Err(FieldError::invalid("a file type that MKNOD cannot create"));
                    }
                    kind => kind,
                };
                Operation::Mknod { name: self.body.c_name()?, new: new(kind, mode, umask, rdev) }
            }
            Opcode::Mkdir => {
                let abi::MkdirIn { mode, umask } = self.body.take()?;
                Operation::Mkdir { name: self.body.c_name()?, new: new(FileType::Directory, mode, umask, 0) }
            }
            _ => {
                let fixed: abi::CreateIn = self.body.take()?;
                let kind = FileType::from_raw_mode(fixed.mode);
                let regular = kind == FileType::RegularFile || fixed.mode & !PERMISSIONS == 0;
                ensure(regular, "not a regular file")?;
                let new = new(FileType::RegularFile, fixed.mode, fixed.umask, 0);
                let flags = OFlags::from_bits_retain(fixed.flags);
                if opcode == Opcode::Tmpfile {
                    // Linux sends the name `/`, which has no meaning.
                    self.body.c_string()?;
                    Operation::Tmpfile { new, flags }
                } else {
                    let clear_privileges = fixed.open_flags & abi::OPEN_KILL_SUIDGID != 0;
                    Operation::Create { name: self.body.c_name()?, new, flags, clear_privileges }
                }
            }
        };
        if self.may_have_tail && !self.body.0.is_empty() {
            self.extensions = Extensions::parse(self.body.0)?;
            self.body.0 = &[];
        }
        self.body.end()?;
        Ok(operation)
    }

    fn rename(&mut self, opcode: Opcode) -> Result<Operation<'a>, FieldError> {
        let (new_dir, flags) = if opcode == Opcode::Rename {
            (self.body.take::<abi::RenameIn>()?.newdir, 0)
        } else {
            let fixed: abi::Rename2In = self.body.take()?;
            (fixed.newdir, fixed.flags)
        };
        let known = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE | RenameFlags::WHITEOUT;
        let flags = RenameFlags::from_bits_retain(flags);
        ensure(known.contains(flags), "unknown flags of a rename")?;
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        ensure(!exchange || flags == RenameFlags::EXCHANGE, "rename flags that exclude each other")?;
        let name = self.body.c_name()?;
        Ok(Operation::Rename { name, new_dir: Ino(new_dir), new_name: self.last_name()?, flags })
    }

    fn copy(&mut self) -> Result<CopyRange, FieldError> {
        let fixed: abi::CopyFileRangeIn = self.body.only()?;
        ensure(fixed.flags == 0, "unknown flags of a copy")?;
        check_range(fixed.off_in, 0)?;
        check_range(fixed.off_out, 0)?;
        Ok(CopyRange {
            from: (self.ino, Handle(fixed.fh_in), fixed.off_in),
            to: (Ino(fixed.nodeid_out), Handle(fixed.fh_out), fixed.off_out),
            len: fixed.len,
        })
    }

    fn release(&mut self) -> Result<Release, FieldError> {
        let fixed: abi::ReleaseIn = self.body.only()?;
        Ok(Release {
            handle: Handle(fixed.fh),
            flags: OFlags::from_bits_retain(fixed.flags),
            flush: fixed.release_flags & abi::RELEASE_FLUSH != 0,
            unlock_flock: fixed.release_flags & abi::RELEASE_FLOCK_UNLOCK != 0,
            owner: fixed.lock_owner,
        })
    }

    fn fsync(&mut self) -> Result<(Handle, bool), FieldError> {
        let fixed: abi::FsyncIn = self.body.only()?;
        Ok((Handle(fixed.fh), fixed.fsync_flags & abi::FSYNC_FDATASYNC != 0))
    }

    fn readdir(&mut self, plus: bool, session: &Negotiated) -> Result<Operation<'a>, FieldError> {
        let fixed: abi::ReadIn = self.body.only()?;
        let at = DirRange { ino: self.ino, handle: Handle(fixed.fh), offset: fixed.offset, plus };
        // The client requests the remaining entries later.
        Ok(Operation::Readdir { at, bytes_max: fixed.size.min(session.max_read_bytes()) })
    }

    fn setxattr(&mut self, session: &Negotiated) -> Result<Operation<'a>, FieldError> {
        let (size, flags, more) = if session.has(InitFlags::SETXATTR_EXT) {
            let fixed: abi::SetxattrIn = self.body.take()?;
            (fixed.size, fixed.flags, fixed.setxattr_flags)
        } else {
            let fixed: abi::SetxattrInShort = self.body.take()?;
            (fixed.size, fixed.flags, 0)
        };
        let size = size as usize;
        if size > XATTR_VALUE_BYTES_MAX {
            return Err(FieldError::new(Errno::TOOBIG, "the value of an extended attribute is too long"));
        }
        let flags = XattrFlags::from_bits_retain(flags);
        ensure((XattrFlags::CREATE | XattrFlags::REPLACE).contains(flags), "unknown flags of an extended attribute")?;
        let (name, value) = (self.body.xattr_name()?, self.body.bytes(size)?);
        self.body.end()?;
        Ok(Operation::Setxattr { name, value, flags, clear_sgid: more & abi::SETXATTR_ACL_KILL_SGID != 0 })
    }

    fn getxattr(&mut self) -> Result<Operation<'a>, FieldError> {
        let fixed: abi::GetxattrIn = self.body.take()?;
        let name = self.body.xattr_name()?;
        self.body.end()?;
        Ok(Operation::Getxattr { name, bytes_max: fixed.size.min(XATTR_REPLY_BYTES_MAX) })
    }

    fn ioctl(&mut self, session: &Negotiated) -> Result<Operation<'a>, FieldError> {
        let fixed: abi::IoctlIn = self.body.take()?;
        ensure(fixed.out_size <= session.max_read_bytes(), "an ioctl with more output than negotiated")?;
        let known = abi::IOCTL_COMPAT | abi::IOCTL_32BIT | abi::IOCTL_DIR | abi::IOCTL_COMPAT_X32;
        ensure(fixed.flags & !known == 0, "unknown flags of an ioctl")?;
        let input = self.body.bytes(fixed.in_size as usize)?;
        self.body.end()?;
        Ok(Operation::Ioctl {
            handle: Handle(fixed.fh),
            flags: fixed.flags,
            command: fixed.cmd,
            argument: fixed.arg,
            input,
            out_bytes_max: fixed.out_size,
        })
    }
}

fn new(kind: FileType, mode: u32, umask: u32, rdev: u32) -> CreateArgs {
    CreateArgs { mode: kind.as_raw_mode() | mode & PERMISSIONS, umask: umask & 0o777, rdev }
}

fn handle_if(condition: bool, fh: u64) -> Option<Handle> {
    condition.then_some(Handle(fh))
}

/// Decodes the flags of OPEN and OPENDIR. The client's kernel never sends the four refused flags. A server that passed
/// them on to its own kernel would create files, or get descriptors that cannot be read.
fn flags_to_open(flags: u32) -> Result<OFlags, FieldError> {
    // `O_TMPFILE` has two bits, one of which is `O_DIRECTORY`.
    let unnamed = OFlags::TMPFILE.difference(OFlags::DIRECTORY);
    let never = OFlags::CREATE | OFlags::EXCL | OFlags::PATH | unnamed;
    let flags = OFlags::from_bits_retain(flags);
    ensure(!flags.intersects(never), "flags that OPEN does not allow")?;
    Ok(flags)
}

fn write<'a>(fixed: abi::WriteIn, nodeid: u64, payload_bytes: usize) -> Result<Operation<'a>, FieldError> {
    ensure(fixed.size as usize == payload_bytes, "a WRITE whose payload has another length than its size field")?;
    check_range(fixed.offset, u64::from(fixed.size))?;
    let has = |flag| fixed.write_flags & flag != 0;
    let range = IoRange {
        ino: Ino(nodeid),
        handle: Handle(fixed.fh),
        offset: fixed.offset,
        len: fixed.size,
        flags: OFlags::from_bits_retain(fixed.flags),
        clear_privileges: has(abi::WRITE_KILL_SUIDGID),
        owner: has(abi::WRITE_LOCKOWNER).then_some(fixed.lock_owner),
    };
    Ok(Operation::Write { range, cached: has(abi::WRITE_CACHE) })
}

fn setattr<'a>(fixed: &abi::SetattrIn) -> Result<Operation<'a>, FieldError> {
    const KNOWN: u32 = abi::FATTR_KILL_SUIDGID * 2 - 1;
    ensure(fixed.valid & !KNOWN == 0, "unknown attributes")?;
    let has = |flag| fixed.valid & flag != 0;
    let time = |sec: u64, nsec: u32| {
        ensure(nsec < 1_000_000_000, "nanoseconds of a second or more")?;
        Ok::<_, FieldError>(Timespec { sec: sec.cast_signed(), nsec })
    };
    let set_time = |now, at, sec, nsec| match () {
        () if has(now) => Ok(Some(SetTime::Now)),
        () if has(at) => time(sec, nsec).map(|time| Some(SetTime::At(time))),
        () => Ok(None),
    };
    // chown(2) reads -1 as "leave unchanged", so it must not be an owner.
    ensure(!has(abi::FATTR_UID) || fixed.uid != abi::INVALID_ID, "an invalid owner")?;
    ensure(!has(abi::FATTR_GID) || fixed.gid != abi::INVALID_ID, "an invalid group")?;
    if has(abi::FATTR_SIZE) {
        check_range(fixed.size, 0)?;
    }
    let set = SetAttr {
        mode: has(abi::FATTR_MODE).then_some(fixed.mode & PERMISSIONS),
        uid: has(abi::FATTR_UID).then_some(fixed.uid),
        gid: has(abi::FATTR_GID).then_some(fixed.gid),
        size: has(abi::FATTR_SIZE).then_some(fixed.size),
        atime: set_time(abi::FATTR_ATIME_NOW, abi::FATTR_ATIME, fixed.atime, fixed.atimensec)?,
        mtime: set_time(abi::FATTR_MTIME_NOW, abi::FATTR_MTIME, fixed.mtime, fixed.mtimensec)?,
        ctime: if has(abi::FATTR_CTIME) { Some(time(fixed.ctime, fixed.ctimensec)?) } else { None },
        clear_privileges: has(abi::FATTR_KILL_SUIDGID),
    };
    Ok(Operation::Setattr {
        handle: handle_if(has(abi::FATTR_FH), fixed.fh),
        owner: has(abi::FATTR_LOCKOWNER).then_some(fixed.lock_owner),
        set,
    })
}

fn fallocate<'a>(fixed: &abi::FallocateIn) -> Result<Operation<'a>, FieldError> {
    /// All `FALLOC_FL_*` flags of Linux 7.2 (keep size, punch, collapse, zero, insert, unshare, write zeroes) except
    /// `NO_HIDE_STALE`, which Linux does not implement.
    const KNOWN: u32 = 0x01 | 0x02 | 0x08 | 0x10 | 0x20 | 0x40 | 0x80;
    if fixed.mode & !KNOWN != 0 {
        return Err(FieldError::new(Errno::OPNOTSUPP, "unknown flags of fallocate"));
    }
    ensure(fixed.length != 0, "an empty range")?;
    check_range(fixed.offset, fixed.length)?;
    Ok(Operation::Fallocate {
        handle: Handle(fixed.fh),
        offset: fixed.offset,
        len: fixed.length,
        flags: FallocateFlags::from_bits_retain(fixed.mode),
    })
}

fn lseek<'a>(fixed: &abi::LseekIn) -> Result<Operation<'a>, FieldError> {
    // `SEEK_DATA` and `SEEK_HOLE` of Linux; the client's kernel handles the others.
    let seek = match fixed.whence {
        3 => Seek::Data,
        4 => Seek::Hole,
        _ => return Err(FieldError::invalid("an unknown whence")),
    };
    Ok(Operation::Lseek { handle: Handle(fixed.fh), offset: fixed.offset, seek })
}

fn lock(fixed: &abi::LkIn) -> Result<LockRequest, FieldError> {
    let abi::LkIn { fh, owner, lk, lk_flags, .. } = *fixed;
    let kind = match lk.kind {
        abi::LOCK_READ => LockKind::Read,
        abi::LOCK_WRITE => LockKind::Write,
        abi::LOCK_NONE => LockKind::Unlock,
        _ => return Err(FieldError::invalid("an unknown lock type")),
    };
    ensure(lk.start <= lk.end && i64::try_from(lk.end).is_ok(), "a lock with an invalid range")?;
    let flock = lk_flags & abi::LK_FLOCK != 0;
    Ok(LockRequest { handle: Handle(fh), owner, kind, start: lk.start, end: lk.end, pid: lk.pid, flock })
}

fn setupmapping<'a>(fixed: &abi::SetupmappingIn) -> Result<Operation<'a>, FieldError> {
    ensure(fixed.flags & !(abi::SETUPMAPPING_READ | abi::SETUPMAPPING_WRITE) == 0, "unknown flags of a mapping")?;
    ensure(fixed.len != 0, "an empty range")?;
    check_range(fixed.foffset, fixed.len)?;
    check_range(fixed.moffset, fixed.len)?;
    Ok(Operation::Setupmapping {
        handle: handle_if(fixed.fh != u64::MAX, fixed.fh),
        offset: fixed.foffset,
        len: fixed.len,
        window_offset: fixed.moffset,
        read: fixed.flags & abi::SETUPMAPPING_READ != 0,
        write: fixed.flags & abi::SETUPMAPPING_WRITE != 0,
    })
}
