//! Decodes T messages.

use ferry_vfs::{Errno, FileType, LockKind, OFlags, SetAttr, SetTime, XattrFlags};

use super::body::{CLIENT_BYTES_MAX, DecodeError, USER_BYTES_MAX, VERSION_BYTES_MAX};
use super::numbers::{AT_REMOVEDIR, Frame, HEADER_BYTES, NO_UID, Tag, WALK_NAMES_MAX, kind, lock, set};
use super::request::{LockRequest, Request, Steps, User, WriteHead};
use crate::body::{
    Body, FieldError, PATH_BYTES_MAX, PERMISSIONS, XATTR_NAME_BYTES_MAX, XATTR_VALUE_BYTES_MAX, check_range, ensure,
    name,
};

/// The largest major number in the kernel's 32-bit form of a device number.
const MAJOR_MAX: u32 = 0xfff;
const MINOR_MAX: u32 = 0xf_ffff;

/// Open flags on the wire (`P9_DOTL_*`, with the values of x86) that a server applies.
const OPEN_FLAGS: [(u32, OFlags); 10] = [
    (0o1000, OFlags::TRUNC),
    (0o2000, OFlags::APPEND),
    (0o10000, OFlags::DSYNC),
    (0o40000, OFlags::DIRECT),
    (0o200_000, OFlags::DIRECTORY),
    (0o400_000, OFlags::NOFOLLOW),
    (0o1_000_000, OFlags::NOATIME),
    // This bit alone is O_SYNC here. O_SYNC of Linux includes that of O_DSYNC, so both bits are encoded.
    (0o4_000_000, OFlags::SYNC),
    (0o1, OFlags::WRONLY),
    (0o2, OFlags::RDWR),
];
/// Flags that only the client applies: `O_NOCTTY`, `O_NONBLOCK`, `O_ASYNC`, `O_LARGEFILE`, `O_CLOEXEC`.
const OPEN_IGNORED: u32 = 0o400 | 0o4000 | 0o20000 | 0o100_000 | 0o2_000_000;
const OPEN_CREATE: u32 = 0o100;
const OPEN_EXCL: u32 = 0o200;
const OPEN_ACCMODE: u32 = 0o3;

impl<'a> Request<'a> {
    /// Decodes a complete message.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] for every message that the protocol does not allow: `INVAL`, `NAMETOOLONG`, `TOOBIG`. Unknown
    /// types are `OPNOTSUPP`, so that Linux's client falls back.
    pub fn decode(message: &'a [u8]) -> Result<(Tag, Self), DecodeError> {
        decode_message(message, request)
    }
}

/// Decodes a complete message, its body by `decode`, which is given the type.
pub(super) fn decode_message<'a, T>(
    message: &'a [u8],
    decode: impl FnOnce(u8, Body<'a>) -> Result<T, FieldError>,
) -> Result<(Tag, T), DecodeError> {
    decode_with_frame(message, |frame, body| {
        ensure(usize::try_from(frame.bytes) == Ok(message.len()), "its length is not that in its header")?;
        decode(frame.kind, body)
    })
}

/// Decodes the frame at the start of `bytes`, and what follows it by `decode`.
fn decode_with_frame<'a, T>(
    bytes: &'a [u8],
    decode: impl FnOnce(&Frame, Body<'a>) -> Result<T, FieldError>,
) -> Result<(Tag, T), DecodeError> {
    let Some(frame) = Frame::peek(bytes) else {
        return Err(DecodeError { tag: None, kind: 0, errno: Errno::INVAL, reason: "shorter than a header" });
    };
    let Frame { tag, kind, .. } = frame;
    let decoded = decode(&frame, Body(bytes.get(HEADER_BYTES..).unwrap_or_default()));
    let decoded =
        decoded.map_err(|FieldError { errno, reason }| DecodeError { tag: Some(tag), kind, errno, reason })?;
    Ok((tag, decoded))
}

impl WriteHead {
    /// Decodes the head of a Twrite, of exactly [`WRITE_HEAD_BYTES`](super::WRITE_HEAD_BYTES) bytes.
    ///
    /// # Errors
    ///
    /// [`DecodeError`], as [`Request::decode`] returns for the whole message.
    pub fn decode(head: &[u8]) -> Result<(Tag, Self), DecodeError> {
        decode_with_frame(head, |frame, mut body| {
            ensure(frame.kind == kind::TWRITE, "not a Twrite")?;
            let (fid, offset, bytes) = (body.fid()?, body.u64()?, body.u32()?);
            body.end()?;
            let whole = head.len() as u64 + u64::from(bytes) == u64::from(frame.bytes);
            ensure(whole, "its length is not that in its header")?;
            check_range(offset, u64::from(bytes))?;
            Ok(Self { fid, offset, bytes })
        })
    }
}

fn request(message_kind: u8, mut body: Body<'_>) -> Result<Request<'_>, FieldError> {
    let b = &mut body;
    let request = match message_kind {
        kind::TVERSION => Request::Version { msize: b.u32()?, version: b.string(VERSION_BYTES_MAX)? },
        kind::TAUTH => {
            let afid = b.fid()?;
            let (user, tree) = user_and_tree(b)?;
            Request::Auth { afid, user, tree }
        }
        kind::TATTACH => {
            let (fid, afid) = (b.fid()?, b.fid()?);
            let (user, tree) = user_and_tree(b)?;
            Request::Attach { fid, afid, user, tree }
        }
        kind::TFLUSH => Request::Flush { old: Tag(b.u16()?) },
        kind::TWALK => Request::Walk { fid: b.fid()?, new_fid: b.fid()?, steps: steps(b)? },
        kind::TREAD => {
            let (fid, offset, bytes_max) = (b.fid()?, b.u64()?, b.u32()?);
            check_range(offset, u64::from(bytes_max))?;
            Request::Read { fid, offset, bytes_max }
        }
        kind::TWRITE => {
            let (fid, offset, data) = (b.fid()?, b.u64()?, b.data()?);
            check_range(offset, data.len() as u64)?;
            Request::Write { fid, offset, data }
        }
        kind::TCLUNK => Request::Clunk { fid: b.fid()? },
        kind::TREMOVE => Request::Remove { fid: b.fid()? },
        kind::TSTATFS => Request::Statfs { fid: b.fid()? },
        kind::TLOPEN => Request::Open { fid: b.fid()?, flags: open_flags(b.u32()?)? - OFlags::CREATE - OFlags::EXCL },
        kind::TREADLINK => Request::Readlink { fid: b.fid()? },
        kind::TGETATTR => Request::Getattr { fid: b.fid()?, mask: b.u64()? },
        kind::TSETATTR => setattr(b)?,
        kind::TREADDIR => Request::Readdir { fid: b.fid()?, offset: b.u64()?, bytes_max: b.u32()? },
        kind::TFSYNC => {
            let fid = b.fid()?;
            // The second field is newer; clients in Go omit it.
            Request::Fsync { fid, data_only: !b.0.is_empty() && b.u32()? != 0 }
        }
        kind::TLOCK => {
            let (fid, lock_kind, flags) = (b.fid()?, lock_kind(b.u8()?)?, b.u32()?);
            ensure(flags & !(lock::BLOCK | lock::RECLAIM) == 0, "unknown flags of a lock")?;
            let (wait, reclaim) = (flags & lock::BLOCK != 0, flags & lock::RECLAIM != 0);
            Request::Lock { fid, lock: lock_request(lock_kind, b)?, wait, reclaim }
        }
        kind::TGETLOCK => {
            let (fid, lock_kind) = (b.fid()?, lock_kind(b.u8()?)?);
            Request::Getlock { fid, lock: lock_request(lock_kind, b)? }
        }
        kind::TEVENTS => Request::Events { fid: b.fid()?, acknowledged: b.u64()?, wait_ms: b.u32()? },
        other => by_name(other, b)?,
    };
    body.end()?;
    Ok(request)
}

/// Decodes requests about names in directories and about extended attributes.
fn by_name<'a>(message_kind: u8, b: &mut Body<'a>) -> Result<Request<'a>, FieldError> {
    Ok(match message_kind {
        kind::TLCREATE => {
            let (fid, name, flags, mode) = (b.fid()?, b.name()?, open_flags(b.u32()?)?, b.u32()?);
            let plain = matches!(FileType::from_raw_mode(mode), FileType::RegularFile) || mode & !PERMISSIONS == 0;
            ensure(plain, "a Tlcreate of a file type other than regular")?;
            Request::Create { fid, name, flags: flags - OFlags::CREATE, mode: mode & PERMISSIONS, gid: b.u32()? }
        }
        kind::TSYMLINK => {
            let (dir, name, target) = (b.fid()?, b.name()?, b.string(PATH_BYTES_MAX)?);
            if target.is_empty() {
                return Err(FieldError::new(Errno::NOENT, "a symbolic link without a target"));
            }
            Request::Symlink { dir, name, target, gid: b.u32()? }
        }
        kind::TMKNOD => {
            let (dir, name, mode, major, minor) = (b.fid()?, b.name()?, b.u32()?, b.u32()?, b.u32()?);
            ensure(major <= MAJOR_MAX && minor <= MINOR_MAX, "a device number that Linux does not have")?;
            let rdev = (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12);
            Request::Mknod { dir, name, mode: node_mode(mode)?, rdev, gid: b.u32()? }
        }
        kind::TRENAME => Request::Rename { fid: b.fid()?, dir: b.fid()?, name: b.name()? },
        kind::TXATTRWALK => Request::Xattrwalk { fid: b.fid()?, new_fid: b.fid()?, name: xattr_name(b)? },
        kind::TXATTRCREATE => {
            let (fid, name, bytes) = (b.fid()?, xattr_name(b)?, b.u64()?);
            let flags = XattrFlags::from_bits_retain(b.u32()?);
            ensure(!name.is_empty(), "an extended attribute without a name")?;
            ensure(
                (XattrFlags::CREATE | XattrFlags::REPLACE).contains(flags),
                "unknown flags of an extended attribute",
            )?;
            if bytes > XATTR_VALUE_BYTES_MAX as u64 {
                return Err(FieldError::new(Errno::TOOBIG, "a value longer than Linux allows"));
            }
            Request::Xattrcreate { fid, name, bytes, flags }
        }
        kind::TLINK => Request::Link { dir: b.fid()?, fid: b.fid()?, name: b.name()? },
        kind::TMKDIR => Request::Mkdir { dir: b.fid()?, name: b.name()?, mode: b.u32()? & PERMISSIONS, gid: b.u32()? },
        kind::TRENAMEAT => Request::Renameat { dir: b.fid()?, name: b.name()?, new_dir: b.fid()?, new_name: b.name()? },
        kind::TUNLINKAT => {
            let (dir, name, flags) = (b.fid()?, b.name()?, b.u32()?);
            ensure(flags & !AT_REMOVEDIR == 0, "unknown flags of Tunlinkat")?;
            Request::Unlinkat { dir, name, is_dir: flags != 0 }
        }
        _ => return Err(FieldError::new(Errno::OPNOTSUPP, "an unknown message type")),
    })
}

fn user_and_tree<'a>(b: &mut Body<'a>) -> Result<(User<'a>, &'a [u8]), FieldError> {
    let (name, tree, uid) = (b.string(USER_BYTES_MAX)?, b.string(PATH_BYTES_MAX)?, b.u32()?);
    Ok((User { name, uid: (uid != NO_UID).then_some(uid) }, tree))
}

fn steps<'a>(b: &mut Body<'a>) -> Result<Steps<'a>, FieldError> {
    let count = b.u16()?;
    ensure(usize::from(count) <= WALK_NAMES_MAX, "a walk of more than 16 names")?;
    let all = b.0;
    for _ in 0..count {
        let bytes = usize::from(b.u16()?);
        let step = b.bytes(bytes)?;
        if step != b".." {
            name(step)?;
        }
    }
    Ok(Steps { bytes: &all[..all.len() - b.0.len()], count })
}

fn open_flags(raw: u32) -> Result<OFlags, FieldError> {
    ensure(raw & OPEN_ACCMODE != OPEN_ACCMODE, "an invalid access mode")?;
    let known = OPEN_FLAGS.iter().fold(OPEN_IGNORED | OPEN_CREATE | OPEN_EXCL, |known, (bits, _)| known | bits);
    ensure(raw & !known == 0, "unknown open flags")?;
    let mut flags = OFlags::RDONLY;
    for (_, flag) in OPEN_FLAGS.iter().filter(|(bits, _)| raw & bits == *bits) {
        flags |= *flag;
    }
    if raw & OPEN_EXCL != 0 {
        flags |= OFlags::EXCL;
    }
    Ok(flags)
}

/// Encodes open flags, the reverse of [`Request::decode`].
pub(super) fn raw_open_flags(flags: OFlags) -> u32 {
    let excl = if flags.contains(OFlags::EXCL) { OPEN_EXCL } else { 0 };
    OPEN_FLAGS.iter().filter(|(_, flag)| flags.contains(*flag)).fold(excl, |raw, (bits, _)| raw | bits)
}

fn node_mode(mode: u32) -> Result<u32, FieldError> {
    let plain = mode & !PERMISSIONS == 0;
    match FileType::from_raw_mode(mode) {
        _ if plain => Ok(mode | FileType::RegularFile.as_raw_mode()),
        FileType::Directory | FileType::Symlink | FileType::Unknown => {
            Err(FieldError::invalid("a Tmknod of a file type that is not a node"))
        }
        kind if mode & !PERMISSIONS == kind.as_raw_mode() => Ok(mode),
        _ => Err(FieldError::invalid("an invalid file type in a mode")),
    }
}

fn xattr_name<'a>(b: &mut Body<'a>) -> Result<&'a [u8], FieldError> {
    match b.string(XATTR_NAME_BYTES_MAX) {
        Err(FieldError { errno: Errno::NAMETOOLONG, reason }) => Err(FieldError::new(Errno::RANGE, reason)),
        other => other,
    }
}

pub(super) fn lock_kind(raw: u8) -> Result<LockKind, FieldError> {
    match raw {
        lock::READ => Ok(LockKind::Read),
        lock::WRITE => Ok(LockKind::Write),
        lock::UNLOCK => Ok(LockKind::Unlock),
        _ => Err(FieldError::invalid("an unknown lock type")),
    }
}

pub(super) fn lock_request<'a>(lock_kind: LockKind, b: &mut Body<'a>) -> Result<LockRequest<'a>, FieldError> {
    let (start, len, pid) = (b.u64()?, b.u64()?, b.u32()?);
    let end = lock_end(start, len).ok_or(FieldError::invalid("a lock past the maximum file offset"))?;
    Ok(LockRequest { kind: lock_kind, start, end, pid, client: b.string(CLIENT_BYTES_MAX)? })
}

/// Returns the last byte of a lock; a length of 0 means the end of the file.
fn lock_end(start: u64, len: u64) -> Option<u64> {
    let last = i64::MAX.cast_unsigned();
    let end = if len == 0 { Some(last) } else { start.checked_add(len - 1) };
    end.filter(|end| start <= *end && *end <= last)
}

fn setattr<'a>(b: &mut Body<'a>) -> Result<Request<'a>, FieldError> {
    let (fid, bits) = (b.fid()?, b.u32()?);
    ensure(bits & !set::ALL == 0, "unknown attributes")?;
    let has = |bit| bits & bit != 0;
    let (mode, uid, gid, size) = (b.u32()?, b.u32()?, b.u32()?, b.u64()?);
    ensure(!has(set::UID) || uid != u32::MAX, "an invalid owner")?;
    ensure(!has(set::GID) || gid != u32::MAX, "an invalid group")?;
    ensure(!has(set::SIZE) || i64::try_from(size).is_ok(), "a size past the maximum file offset")?;
    // Times that are not set may have any value.
    let mut time = |bit, is_set| {
        let mut raw = Body(b.bytes(16)?);
        match (has(bit), has(is_set)) {
            (true, true) => raw.time().map(|time| Some(SetTime::At(time))),
            (true, false) => Ok(Some(SetTime::Now)),
            (false, _) => Ok(None),
        }
    };
    let (atime, mtime) = (time(set::ATIME, set::ATIME_SET)?, time(set::MTIME, set::MTIME_SET)?);
    let attr = SetAttr {
        mode: has(set::MODE).then_some(mode & PERMISSIONS),
        uid: has(set::UID).then_some(uid),
        gid: has(set::GID).then_some(gid),
        size: has(set::SIZE).then_some(size),
        atime,
        mtime,
        ctime: None,
        clear_privileges: false,
    };
    Ok(Request::Setattr { fid, set: attr, ctime: has(set::CTIME) })
}
