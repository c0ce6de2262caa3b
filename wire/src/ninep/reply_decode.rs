//! Decodes R messages, for clients and tests.

use ferry_vfs::{Attr, Errno, FileType, Statfs, Timespec};

use super::body::{DecodeError, VERSION_BYTES_MAX};
use super::decode::{decode_message, lock_kind, lock_request};
use super::numbers::{Tag, WALK_NAMES_MAX, kind, valid};
use super::reply::{Getattr, LockStatus, Qids, Reply};
use crate::body::{Body, FieldError, PATH_BYTES_MAX, ensure};

impl<'a> Reply<'a> {
    /// Decodes a complete message.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] for every message that is not a reply.
    pub fn decode(message: &'a [u8]) -> Result<(Tag, Self), DecodeError> {
        decode_message(message, reply)
    }
}

fn reply(message_kind: u8, mut body: Body<'_>) -> Result<Reply<'_>, FieldError> {
    let b = &mut body;
    let request_kind = if message_kind % 2 == 1 { message_kind - 1 } else { 0 };
    let reply = match request_kind {
        _ if message_kind == kind::RLERROR => Reply::Error(errno(b.u32()?)),
        kind::TVERSION => Reply::Version { msize: b.u32()?, version: b.string(VERSION_BYTES_MAX)? },
        kind::TAUTH => Reply::Auth(b.qid()?),
        kind::TATTACH => Reply::Attach(b.qid()?),
        kind::TFLUSH => Reply::Flush,
        kind::TWALK => {
            let count = b.u16()?;
            ensure(usize::from(count) <= WALK_NAMES_MAX, "more qids than a walk can have names")?;
            let mut qids = Qids::default();
            for _ in 0..count {
                qids.push(b.qid()?);
            }
            Reply::Walk(qids)
        }
        kind::TREAD => Reply::Read(b.data()?),
        kind::TWRITE => Reply::Write { bytes: b.u32()? },
        kind::TCLUNK => Reply::Clunk,
        kind::TREMOVE => Reply::Remove,
        kind::TSTATFS => statfs(b)?,
        kind::TLOPEN => Reply::Open { qid: b.qid()?, iounit: b.u32()? },
        kind::TLCREATE => Reply::Create { qid: b.qid()?, iounit: b.u32()? },
        kind::TSYMLINK => Reply::Symlink(b.qid()?),
        kind::TMKNOD => Reply::Mknod(b.qid()?),
        kind::TRENAME => Reply::Rename,
        kind::TREADLINK => Reply::Readlink { target: b.string(PATH_BYTES_MAX)? },
        kind::TGETATTR => Reply::Getattr(getattr(b)?),
        kind::TSETATTR => Reply::Setattr,
        kind::TXATTRWALK => Reply::Xattrwalk { bytes: b.u64()? },
        kind::TXATTRCREATE => Reply::Xattrcreate,
        kind::TREADDIR => Reply::Readdir(b.data()?),
        kind::TFSYNC => Reply::Fsync,
        kind::TLOCK => Reply::Lock(match b.u8()? {
            0 => LockStatus::Success,
            1 => LockStatus::Blocked,
            2 => LockStatus::Error,
            3 => LockStatus::Grace,
            _ => return Err(FieldError::invalid("an unknown lock status")),
        }),
        kind::TGETLOCK => Reply::Getlock(lock_request(lock_kind(b.u8()?)?, b)?),
        kind::TLINK => Reply::Link,
        kind::TMKDIR => Reply::Mkdir(b.qid()?),
        kind::TRENAMEAT => Reply::Renameat,
        kind::TUNLINKAT => Reply::Unlinkat,
        kind::TEVENTS => Reply::Events(b.data()?),
        _ => return Err(FieldError::new(Errno::OPNOTSUPP, "an unknown message type")),
    };
    body.end()?;
    Ok(reply)
}

/// Error numbers that Linux does not have become `IO`.
fn errno(raw: u32) -> Errno {
    match i32::try_from(raw) {
        Ok(raw @ 1..=4095) => Errno::from_raw_os_error(raw),
        _ => Errno::IO,
    }
}

/// Servers on other systems send numbers that Linux does not have, in attributes that few callers need.
fn saturate(wide: u64) -> u32 {
    u32::try_from(wide).unwrap_or(u32::MAX)
}

fn time(b: &mut Body<'_>) -> Result<Timespec, FieldError> {
    let (sec, nsec) = (b.u64()?.cast_signed(), b.u64()?);
    Ok(Timespec { sec, nsec: saturate(nsec).min(999_999_999) })
}

fn statfs<'a>(b: &mut Body<'a>) -> Result<Reply<'a>, FieldError> {
    let (_type, block) = (b.u32()?, b.u32()?);
    let (blocks, bfree, bavail, files, ffree) = (b.u64()?, b.u64()?, b.u64()?, b.u64()?, b.u64()?);
    let (id, namelen) = (b.u64()?, b.u32()?);
    let totals = Statfs { blocks, bfree, bavail, files, ffree, bsize: block, namelen, frsize: block };
    Ok(Reply::Statfs { totals, id })
}

fn getattr(b: &mut Body<'_>) -> Result<Getattr, FieldError> {
    let (bits, qid) = (b.u64()?, b.qid()?);
    let (mode, uid, gid) = (b.u32()?, b.u32()?, b.u32()?);
    let (nlink, rdev, size, blksize, blocks) = (saturate(b.u64()?), b.u64()?, b.u64()?, saturate(b.u64()?), b.u64()?);
    let (atime, mtime, ctime, btime) = (time(b)?, time(b)?, time(b)?, time(b)?);
    let is_device = matches!(FileType::from_raw_mode(mode), FileType::BlockDevice | FileType::CharacterDevice);
    let rdev = u32::try_from(rdev).ok().filter(|_| is_device).unwrap_or(0);
    let (generation, _data_version) = (b.u64()?, b.u64()?);
    let attr = Attr {
        ino: qid.path,
        size,
        blocks,
        atime,
        mtime,
        ctime,
        btime: (bits & valid::BTIME != 0).then_some(btime),
        mode,
        nlink,
        uid,
        gid,
        rdev,
        blksize,
        submount: false,
    };
    Ok(Getattr { qid, attr, generation })
}
