//! Decodes replies (FUSE protocol 7.45, `fuse_out_header` and the structs behind it).

use std::time::Duration;

use ferry_vfs::{Attr, Entry, Errno, Handle, Ino, Lock, LockKind, LockOwner, Statfs, Timespec};
use ferry_wire::fuse::abi::{self, InitFlags, InitOut, OpenFlags, OutHeader};
use ferry_wire::fuse::{InitRequest, Negotiated, OpenReply, Operation, Reply, Timeouts};

use super::body::{Body, Malformed, ensure};

/// `STATX_BTIME` of Linux.
const STATX_BTIME: u32 = 0x800;

/// The content of a reply, for its decoder; see [`reply_kind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyKind {
    /// [`Reply::Empty`].
    Empty,
    /// [`Reply::Entry`] or [`Reply::Negative`].
    Entry,
    /// [`Reply::Created`].
    Created,
    /// [`Reply::Attr`].
    Attr,
    /// [`Reply::Statx`].
    Statx,
    /// [`Reply::Open`].
    Open,
    /// [`Reply::Write`].
    Write,
    /// [`Reply::CopyFileRange64`].
    CopyFileRange64,
    /// [`Reply::Statfs`].
    Statfs,
    /// [`Reply::XattrSize`].
    XattrSize,
    /// [`Reply::Lock`].
    Lock,
    /// [`Reply::Lseek`].
    Lseek,
    /// [`Reply::Ioctl`].
    Ioctl,
    /// [`Reply::Poll`].
    Poll,
    /// [`Reply::Bmap`].
    Bmap,
    /// [`Reply::Init`].
    Init,
    /// [`Reply::Bytes`].
    Bytes,
}

/// Returns the content of a successful reply; `None` if there is no reply.
///
/// # Panics
/// With [`Operation`]s that this module does not know.
pub fn reply_kind(operation: &Operation<'_>) -> Option<ReplyKind> {
    let kind = match operation {
        Operation::Forget { .. } | Operation::BatchForget { .. } | Operation::Interrupt { .. } => return None,
        Operation::Lookup { .. }
        | Operation::LookupSelf
        | Operation::LookupParent
        | Operation::Symlink { .. }
        | Operation::Mknod { .. }
        | Operation::Mkdir { .. }
        | Operation::Link { .. } => ReplyKind::Entry,
        Operation::Create { .. } | Operation::Tmpfile { .. } => ReplyKind::Created,
        Operation::Getattr { .. } | Operation::Setattr { .. } => ReplyKind::Attr,
        Operation::Statx { .. } => ReplyKind::Statx,
        Operation::Open { .. } | Operation::Opendir { .. } => ReplyKind::Open,
        Operation::Read(_) | Operation::Readdir { .. } | Operation::Readlink => ReplyKind::Bytes,
        Operation::Getxattr { bytes_max: 0, .. } | Operation::Listxattr { bytes_max: 0 } => ReplyKind::XattrSize,
        Operation::Getxattr { .. } | Operation::Listxattr { .. } => ReplyKind::Bytes,
        Operation::Write { .. } | Operation::CopyFileRange(_) => ReplyKind::Write,
        Operation::CopyFileRange64(_) => ReplyKind::CopyFileRange64,
        Operation::Statfs => ReplyKind::Statfs,
        Operation::GetLock(_) => ReplyKind::Lock,
        Operation::Lseek { .. } => ReplyKind::Lseek,
        Operation::Ioctl { .. } => ReplyKind::Ioctl,
        Operation::Poll { .. } => ReplyKind::Poll,
        Operation::Bmap { .. } => ReplyKind::Bmap,
        Operation::Init(_) => ReplyKind::Init,
        Operation::Unlink { .. }
        | Operation::Rmdir { .. }
        | Operation::Rename { .. }
        | Operation::Fallocate { .. }
        | Operation::Flush { .. }
        | Operation::Release(_)
        | Operation::Fsync { .. }
        | Operation::Releasedir(_)
        | Operation::Fsyncdir { .. }
        | Operation::Syncfs
        | Operation::Setxattr { .. }
        | Operation::Removexattr { .. }
        | Operation::Access { .. }
        | Operation::SetLock { .. }
        | Operation::Setupmapping { .. }
        | Operation::Removemapping { .. }
        | Operation::Destroy => ReplyKind::Empty,
        other => unreachable!("an unknown operation: {other:?}"),
    };
    Some(kind)
}

/// Decodes a whole reply. Returns the number of its request, and the reply or the server's error.
///
/// Fields that the protocol does not carry are empty: the birth time in [`Attr`] except with STATX, `submount` with
/// STATX, and the owner of a lock.
///
/// # Errors
/// [`Malformed`] if the bytes are not a reply of this kind.
pub fn decode_reply(kind: ReplyKind, bytes: &[u8]) -> Result<(u64, Result<Reply<'_>, Errno>), Malformed> {
    let mut body = Body(bytes);
    let header: OutHeader = body.take()?;
    ensure(header.len as usize == bytes.len(), "its length is not that in its header")?;
    if header.error != 0 {
        ensure((-511..0).contains(&header.error), "an invalid error number")?;
        body.end()?;
        return Ok((header.unique, Err(Errno::from_raw_os_error(-header.error))));
    }
    let reply = match kind {
        ReplyKind::Empty => body.end().map(|()| Reply::Empty)?,
        ReplyKind::Entry => entry_or_negative(body.only()?)?,
        ReplyKind::Created => {
            let entry: abi::EntryOut = body.take()?;
            let opened = opened(&body.only()?);
            match entry_or_negative(entry)? {
                Reply::Entry { entry, timeouts, dax } => Reply::Created { entry, timeouts, dax, opened },
                _ => return Err(Malformed("a created file has no inode")),
            }
        }
        ReplyKind::Attr => {
            let out: abi::AttrOut = body.only()?;
            let (attr, dax) = attr(&out.attr)?;
            Reply::Attr { attr, timeout: timeout(out.attr_valid, out.attr_valid_nsec)?, dax }
        }
        ReplyKind::Statx => {
            let out: abi::StatxOut = body.only()?;
            Reply::Statx { attr: statx(&out.stat)?, timeout: timeout(out.attr_valid, out.attr_valid_nsec)? }
        }
        ReplyKind::Open => Reply::Open(opened(&body.only()?)),
        ReplyKind::Write => Reply::Write { bytes: body.only::<abi::WriteOut>()?.size },
        ReplyKind::CopyFileRange64 => {
            Reply::CopyFileRange64 { bytes: body.only::<abi::CopyFileRangeOut>()?.bytes_copied }
        }
        ReplyKind::Statfs => Reply::Statfs(statfs(&body.only()?)),
        ReplyKind::XattrSize => Reply::XattrSize { bytes: body.only::<abi::GetxattrOut>()?.size },
        ReplyKind::Lock => Reply::Lock(lock(&body.only()?)?),
        ReplyKind::Lseek => Reply::Lseek { offset: body.only::<abi::LseekOut>()?.offset },
        ReplyKind::Ioctl => {
            let out: abi::IoctlOut = body.take()?;
            ensure(out.flags == 0 && out.in_iovs == 0 && out.out_iovs == 0, "a request to retry an ioctl")?;
            Reply::Ioctl { result: out.result, data: body.0 }
        }
        ReplyKind::Poll => Reply::Poll { events: body.only::<abi::PollOut>()?.revents },
        ReplyKind::Bmap => Reply::Bmap { block: body.only::<abi::BmapOut>()?.block },
        ReplyKind::Init => Reply::Init(body.only()?),
        ReplyKind::Bytes => Reply::Bytes(body.0),
    };
    Ok((header.unique, Ok(reply)))
}

/// Interprets a server's reply to INIT. Returns `None` if the server does not accept [`abi::MAJOR`] and a supported minor
/// version, or accepts flags that were not offered.
pub fn negotiated(request: &InitRequest, reply: &InitOut) -> Option<Negotiated> {
    let low = InitFlags::from_bits_retain(u64::from(reply.flags));
    let high = if low.contains(InitFlags::INIT_EXT) { u64::from(reply.flags2) << 32 } else { 0 };
    let flags = low | InitFlags::from_bits_retain(high);
    let minor = reply.minor.min(request.minor);
    let known = reply.major == abi::MAJOR && (abi::MINOR_MIN..=abi::MINOR_MAX).contains(&minor);
    (known && request.flags.contains(flags)).then_some(Negotiated {
        minor,
        flags,
        max_write_bytes: reply.max_write,
        max_readahead_bytes: reply.max_readahead,
    })
}

fn timeout(sec: u64, nsec: u32) -> Result<Duration, Malformed> {
    ensure(nsec < 1_000_000_000, "nanoseconds of a second or more")?;
    Ok(Duration::new(sec, nsec))
}

fn timespec(sec: u64, nsec: u32) -> Result<Timespec, Malformed> {
    ensure(nsec < 1_000_000_000, "nanoseconds of a second or more")?;
    Ok(Timespec { sec: sec.cast_signed(), nsec })
}

/// Returns the entry, its timeouts, and whether to use DAX.
pub(super) fn entry(out: &abi::EntryOut) -> Result<(Entry, Timeouts, bool), Malformed> {
    let timeouts = Timeouts {
        entry: timeout(out.entry_valid, out.entry_valid_nsec)?,
        attr: timeout(out.attr_valid, out.attr_valid_nsec)?,
    };
    let (attr, dax) = attr(&out.attr)?;
    Ok((Entry { ino: Ino(out.nodeid), generation: out.generation, attr }, timeouts, dax))
}

fn entry_or_negative<'a>(out: abi::EntryOut) -> Result<Reply<'a>, Malformed> {
    if out.nodeid == 0 {
        return Ok(Reply::Negative { timeout: timeout(out.entry_valid, out.entry_valid_nsec)? });
    }
    let (entry, timeouts, dax) = entry(&out)?;
    Ok(Reply::Entry { entry, timeouts, dax })
}

fn attr(out: &abi::Attr) -> Result<(Attr, bool), Malformed> {
    let attr = Attr {
        ino: out.ino,
        size: out.size,
        blocks: out.blocks,
        atime: timespec(out.atime, out.atimensec)?,
        mtime: timespec(out.mtime, out.mtimensec)?,
        ctime: timespec(out.ctime, out.ctimensec)?,
        btime: None,
        mode: out.mode,
        nlink: out.nlink,
        uid: out.uid,
        gid: out.gid,
        rdev: out.rdev,
        blksize: out.blksize,
        submount: out.flags & abi::ATTR_SUBMOUNT != 0,
    };
    Ok((attr, out.flags & abi::ATTR_DAX != 0))
}

fn statx(out: &abi::Statx) -> Result<Attr, Malformed> {
    let time = |time: &abi::SxTime| timespec(time.tv_sec.cast_unsigned(), time.tv_nsec);
    Ok(Attr {
        ino: out.ino,
        size: out.size,
        blocks: out.blocks,
        atime: time(&out.atime)?,
        mtime: time(&out.mtime)?,
        ctime: time(&out.ctime)?,
        btime: if out.mask & STATX_BTIME == 0 { None } else { Some(time(&out.btime)?) },
        mode: u32::from(out.mode),
        nlink: out.nlink,
        uid: out.uid,
        gid: out.gid,
        rdev: (out.rdev_minor & 0xff) | ((out.rdev_major & 0xfff) << 8) | ((out.rdev_minor & 0xfff00) << 12),
        blksize: out.blksize,
        submount: false,
    })
}

fn opened(out: &abi::OpenOut) -> OpenReply {
    OpenReply { handle: Handle(out.fh), flags: OpenFlags::from_bits_retain(out.open_flags), backing_id: out.backing_id }
}

fn statfs(out: &abi::Kstatfs) -> Statfs {
    let abi::Kstatfs { blocks, bfree, bavail, files, ffree, bsize, namelen, frsize, .. } = *out;
    Statfs { blocks, bfree, bavail, files, ffree, bsize, namelen, frsize }
}

fn lock(out: &abi::LkOut) -> Result<Option<Lock>, Malformed> {
    let kind = match out.lk.kind {
        abi::LOCK_NONE => return Ok(None),
        abi::LOCK_READ => LockKind::Read,
        abi::LOCK_WRITE => LockKind::Write,
        _ => return Err(Malformed("an unknown lock type")),
    };
    let owner = LockOwner { session: Default::default(), id: 0 };
    Ok(Some(Lock { kind, owner, start: out.lk.start, end: out.lk.end, pid: out.lk.pid, flock: false }))
}
