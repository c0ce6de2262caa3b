//! Decodes replies (FUSE protocol 7.45, `fuse_out_header` and the structs behind it) for clients: the native driver
//! and the tests.

use std::time::Duration;

use ferry_vfs::{Attr, Entry, Errno, Handle, Ino, Lock, LockKind, LockOwner, Statfs, Timespec};

use super::abi::{self, OpenFlags, OutHeader};
use super::reply::STATX_BTIME;
use super::{OpenReply, Reply, ReplyKind, Timeouts};
use crate::body::{Body, FieldError, ensure};

/// A malformed reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed FUSE reply: {reason}")]
pub struct ReplyDecodeError {
    /// What was wrong.
    pub reason: &'static str,
}

impl<'a> Reply<'a> {
    /// Decodes a whole reply. Returns the number of its request, and the reply or the server's error.
    ///
    /// Fields that the protocol does not carry are empty: the birth time in [`Attr`] except with STATX, `submount` with
    /// STATX, and the owner of a lock.
    ///
    /// # Errors
    ///
    /// [`ReplyDecodeError`] if the bytes are not a reply of this kind.
    pub fn decode(kind: ReplyKind, bytes: &'a [u8]) -> Result<(u64, Result<Self, Errno>), ReplyDecodeError> {
        Self::parse(kind, bytes).map_err(|flaw| ReplyDecodeError { reason: flaw.reason })
    }

    fn parse(kind: ReplyKind, bytes: &'a [u8]) -> Result<(u64, Result<Self, Errno>), FieldError> {
        let mut body = Body(bytes);
        let header: OutHeader = body.take()?;
        ensure(header.len as usize == bytes.len(), "its length is not that in its header")?;
        if header.error != 0 {
            ensure((-511..0).contains(&header.error), "an invalid error number")?;
            body.end()?;
            return Ok((header.unique, Err(Errno::from_raw_os_error(-header.error))));
        }
        let reply = match kind {
            ReplyKind::Empty => body.end().map(|()| Self::Empty)?,
            ReplyKind::Entry => entry_or_negative(body.only()?)?,
            ReplyKind::Created => {
                let entry: abi::EntryOut = body.take()?;
                let opened = opened(&body.only()?);
                match entry_or_negative(entry)? {
                    Self::Entry { entry, timeouts, dax } => Self::Created { entry, timeouts, dax, opened },
                    _ => return Err(FieldError::invalid("a created file has no inode")),
                }
            }
            ReplyKind::Attr => {
                let out: abi::AttrOut = body.only()?;
                let (attr, dax) = attr(&out.attr)?;
                Self::Attr { attr, timeout: timeout(out.attr_valid, out.attr_valid_nsec)?, dax }
            }
            ReplyKind::Statx => {
                let out: abi::StatxOut = body.only()?;
                Self::Statx { attr: statx(&out.stat)?, timeout: timeout(out.attr_valid, out.attr_valid_nsec)? }
            }
            ReplyKind::Open => Self::Open(opened(&body.only()?)),
            ReplyKind::Write => Self::Write { bytes: body.only::<abi::WriteOut>()?.size },
            ReplyKind::CopyFileRange64 => {
                Self::CopyFileRange64 { bytes: body.only::<abi::CopyFileRangeOut>()?.bytes_copied }
            }
            ReplyKind::Statfs => Self::Statfs(statfs(&body.only()?)),
            ReplyKind::XattrSize => Self::XattrSize { bytes: body.only::<abi::GetxattrOut>()?.size },
            ReplyKind::Lock => Self::Lock(lock(&body.only()?)?),
            ReplyKind::Lseek => Self::Lseek { offset: body.only::<abi::LseekOut>()?.offset },
            ReplyKind::Ioctl => {
                let out: abi::IoctlOut = body.take()?;
                ensure(out.flags == 0 && out.in_iovs == 0 && out.out_iovs == 0, "a request to retry an ioctl")?;
                Self::Ioctl { result: out.result, data: body.0 }
            }
            ReplyKind::Poll => Self::Poll { events: body.only::<abi::PollOut>()?.revents },
            ReplyKind::Bmap => Self::Bmap { block: body.only::<abi::BmapOut>()?.block },
            ReplyKind::Init => Self::Init(body.only()?),
            ReplyKind::Bytes => Self::Bytes(body.0),
        };
        Ok((header.unique, Ok(reply)))
    }
}

fn timeout(sec: u64, nsec: u32) -> Result<Duration, FieldError> {
    ensure(nsec < 1_000_000_000, "nanoseconds of a second or more")?;
    Ok(Duration::new(sec, nsec))
}

fn timespec(sec: u64, nsec: u32) -> Result<Timespec, FieldError> {
    ensure(nsec < 1_000_000_000, "nanoseconds of a second or more")?;
    Ok(Timespec { sec: sec.cast_signed(), nsec })
}

/// Returns the entry, its timeouts, and whether to use DAX.
pub(super) fn entry(out: &abi::EntryOut) -> Result<(Entry, Timeouts, bool), FieldError> {
    let timeouts = Timeouts {
        entry: timeout(out.entry_valid, out.entry_valid_nsec)?,
        attr: timeout(out.attr_valid, out.attr_valid_nsec)?,
    };
    let (attr, dax) = attr(&out.attr)?;
    Ok((Entry { ino: Ino(out.nodeid), generation: out.generation, attr }, timeouts, dax))
}

fn entry_or_negative<'a>(out: abi::EntryOut) -> Result<Reply<'a>, FieldError> {
    if out.nodeid == 0 {
        return Ok(Reply::Negative { timeout: timeout(out.entry_valid, out.entry_valid_nsec)? });
    }
    let (entry, timeouts, dax) = entry(&out)?;
    Ok(Reply::Entry { entry, timeouts, dax })
}

fn attr(out: &abi::Attr) -> Result<(Attr, bool), FieldError> {
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

fn statx(out: &abi::Statx) -> Result<Attr, FieldError> {
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

fn lock(out: &abi::LkOut) -> Result<Option<Lock>, FieldError> {
    let kind = match out.lk.kind {
        abi::LOCK_NONE => return Ok(None),
        abi::LOCK_READ => LockKind::Read,
        abi::LOCK_WRITE => LockKind::Write,
        _ => return Err(FieldError::invalid("an unknown lock type")),
    };
    let owner = LockOwner { session: Default::default(), id: 0 };
    Ok(Some(Lock { kind, owner, start: out.lk.start, end: out.lk.end, pid: out.lk.pid, flock: false }))
}
