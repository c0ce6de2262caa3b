//! Encodes messages.

use ferry_vfs::{LockKind, SetAttr, SetTime, Timespec};

use super::decode::raw_open_flags;
use super::numbers::{AT_REMOVEDIR, Fid, HEADER_BYTES, Qid, Tag, kind, lock, set};
use super::request::{LockRequest, Request, User};

/// A message under construction, appended to the buffer.
pub(super) struct Message<'a> {
    out: &'a mut Vec<u8>,
    start: usize,
}

impl<'a> Message<'a> {
    pub(super) fn begin(kind: u8, tag: Tag, out: &'a mut Vec<u8>) -> Self {
        let start = out.len();
        out.extend_from_slice(&[0; 4]);
        out.push(kind);
        out.extend_from_slice(&tag.0.to_le_bytes());
        debug_assert_eq!(out.len() - start, HEADER_BYTES);
        Self { out, start }
    }

    pub(super) fn u8(&mut self, value: u8) -> &mut Self {
        self.out.push(value);
        self
    }

    pub(super) fn u16(&mut self, value: u16) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(super) fn u32(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(super) fn u64(&mut self, value: u64) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    pub(super) fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.out.extend_from_slice(bytes);
        self
    }

    pub(super) fn fid(&mut self, fid: Fid) -> &mut Self {
        self.u32(fid.0)
    }

    pub(super) fn qid(&mut self, qid: Qid) -> &mut Self {
        self.u8(qid.kind.0).u32(qid.version).u64(qid.path)
    }

    /// Writes a string, cut to the maximum of its length field. No decoded string is that long.
    pub(super) fn string(&mut self, bytes: &[u8]) -> &mut Self {
        let count = u16::try_from(bytes.len()).unwrap_or(u16::MAX);
        self.u16(count).raw(&bytes[..count.into()])
    }

    /// Writes data with a 32-bit length; no message is longer than that.
    pub(super) fn data(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX)).raw(bytes)
    }

    pub(super) fn time(&mut self, time: Timespec) -> &mut Self {
        self.u64(time.sec.cast_unsigned()).u64(time.nsec.into())
    }
}

impl Drop for Message<'_> {
    /// Notes the length.
    fn drop(&mut self) {
        let bytes = u32::try_from(self.out.len() - self.start).unwrap_or(u32::MAX);
        self.out[self.start..self.start + 4].copy_from_slice(&bytes.to_le_bytes());
    }
}

impl Request<'_> {
    /// Appends the message to `out`.
    pub fn encode(&self, tag: Tag, out: &mut Vec<u8>) {
        let mut message = Message::begin(self.kind(), tag, out);
        let m = &mut message;
        match *self {
            Self::Version { msize, version } => m.u32(msize).string(version),
            Self::Auth { afid, user, tree } => put_user(m.fid(afid), user, tree),
            Self::Attach { fid, afid, user, tree } => put_user(m.fid(fid).fid(afid), user, tree),
            Self::Flush { old } => m.u16(old.0),
            Self::Walk { fid, new_fid, steps } => m.fid(fid).fid(new_fid).u16(steps.count).raw(steps.bytes),
            Self::Read { fid, offset, bytes_max } | Self::Readdir { fid, offset, bytes_max } => {
                m.fid(fid).u64(offset).u32(bytes_max)
            }
            Self::Write { fid, offset, data } => m.fid(fid).u64(offset).data(data),
            Self::Clunk { fid } | Self::Remove { fid } | Self::Statfs { fid } | Self::Readlink { fid } => m.fid(fid),
            Self::Open { fid, flags } => m.fid(fid).u32(raw_open_flags(flags)),
            Self::Create { fid, name, flags, mode, gid } => {
                m.fid(fid).string(name.as_bytes()).u32(raw_open_flags(flags)).u32(mode).u32(gid)
            }
            Self::Symlink { dir, name, target, gid } => m.fid(dir).string(name.as_bytes()).string(target).u32(gid),
            Self::Mknod { dir, name, mode, rdev, gid } => {
                let (major, minor) = ((rdev >> 8) & 0xfff, (rdev & 0xff) | ((rdev >> 12) & 0xf_ff00));
                m.fid(dir).string(name.as_bytes()).u32(mode).u32(major).u32(minor).u32(gid)
            }
            Self::Rename { fid, dir, name } => m.fid(fid).fid(dir).string(name.as_bytes()),
            Self::Getattr { fid, mask } => m.fid(fid).u64(mask),
            Self::Setattr { fid, ref set, ctime } => put_set(m.fid(fid), set, ctime),
            Self::Xattrwalk { fid, new_fid, name } => m.fid(fid).fid(new_fid).string(name),
            Self::Xattrcreate { fid, name, bytes, flags } => m.fid(fid).string(name).u64(bytes).u32(flags.bits()),
            Self::Fsync { fid, data_only } => m.fid(fid).u32(data_only.into()),
            Self::Lock { fid, ref lock, wait, reclaim } => {
                let flags = if wait { lock::BLOCK } else { 0 } | if reclaim { lock::RECLAIM } else { 0 };
                put_lock(m.fid(fid).u8(raw_lock_kind(lock.kind)).u32(flags), lock)
            }
            Self::Getlock { fid, ref lock } => put_lock(m.fid(fid).u8(raw_lock_kind(lock.kind)), lock),
            Self::Link { dir, fid, name } => m.fid(dir).fid(fid).string(name.as_bytes()),
            Self::Mkdir { dir, name, mode, gid } => m.fid(dir).string(name.as_bytes()).u32(mode).u32(gid),
            Self::Renameat { dir, name, new_dir, new_name } => {
                m.fid(dir).string(name.as_bytes()).fid(new_dir).string(new_name.as_bytes())
            }
            Self::Unlinkat { dir, name, is_dir } => {
                m.fid(dir).string(name.as_bytes()).u32(if is_dir { AT_REMOVEDIR } else { 0 })
            }
            Self::Events { fid, acknowledged, wait_ms } => m.fid(fid).u64(acknowledged).u32(wait_ms),
        };
    }

    /// Returns the message's type, one of [`kind`].
    pub fn kind(&self) -> u8 {
        match self {
            Self::Version { .. } => kind::TVERSION,
            Self::Auth { .. } => kind::TAUTH,
            Self::Attach { .. } => kind::TATTACH,
            Self::Flush { .. } => kind::TFLUSH,
            Self::Walk { .. } => kind::TWALK,
            Self::Read { .. } => kind::TREAD,
            Self::Write { .. } => kind::TWRITE,
            Self::Clunk { .. } => kind::TCLUNK,
            Self::Remove { .. } => kind::TREMOVE,
            Self::Statfs { .. } => kind::TSTATFS,
            Self::Open { .. } => kind::TLOPEN,
            Self::Create { .. } => kind::TLCREATE,
            Self::Symlink { .. } => kind::TSYMLINK,
            Self::Mknod { .. } => kind::TMKNOD,
            Self::Rename { .. } => kind::TRENAME,
            Self::Readlink { .. } => kind::TREADLINK,
            Self::Getattr { .. } => kind::TGETATTR,
            Self::Setattr { .. } => kind::TSETATTR,
            Self::Xattrwalk { .. } => kind::TXATTRWALK,
            Self::Xattrcreate { .. } => kind::TXATTRCREATE,
            Self::Readdir { .. } => kind::TREADDIR,
            Self::Fsync { .. } => kind::TFSYNC,
            Self::Lock { .. } => kind::TLOCK,
            Self::Getlock { .. } => kind::TGETLOCK,
            Self::Link { .. } => kind::TLINK,
            Self::Mkdir { .. } => kind::TMKDIR,
            Self::Renameat { .. } => kind::TRENAMEAT,
            Self::Unlinkat { .. } => kind::TUNLINKAT,
            Self::Events { .. } => kind::TEVENTS,
        }
    }
}

fn put_user<'m, 'a>(m: &'m mut Message<'a>, user: User<'_>, tree: &[u8]) -> &'m mut Message<'a> {
    m.string(user.name).string(tree).u32(user.raw_uid())
}

pub(super) fn raw_lock_kind(kind: LockKind) -> u8 {
    match kind {
        LockKind::Read => lock::READ,
        LockKind::Write => lock::WRITE,
        LockKind::Unlock => lock::UNLOCK,
    }
}

pub(super) fn put_lock<'m, 'a>(m: &'m mut Message<'a>, lock: &LockRequest<'_>) -> &'m mut Message<'a> {
    let whole = lock.end == i64::MAX.cast_unsigned();
    let len = if whole { 0 } else { lock.end.saturating_sub(lock.start).saturating_add(1) };
    m.u64(lock.start).u64(len).u32(lock.pid).string(lock.client)
}

fn put_set<'m, 'a>(m: &'m mut Message<'a>, attr: &SetAttr, ctime: bool) -> &'m mut Message<'a> {
    let is_at = |time: Option<SetTime>| matches!(time, Some(SetTime::At(_)));
    let bits = [
        (attr.mode.is_some(), set::MODE),
        (attr.uid.is_some(), set::UID),
        (attr.gid.is_some(), set::GID),
        (attr.size.is_some(), set::SIZE),
        (attr.atime.is_some(), set::ATIME),
        (attr.mtime.is_some(), set::MTIME),
        (ctime, set::CTIME),
        (is_at(attr.atime), set::ATIME_SET),
        (is_at(attr.mtime), set::MTIME_SET),
    ];
    let bits = bits.iter().filter(|(given, _)| *given).fold(0, |bits, (_, bit)| bits | bit);
    let time = |time: Option<SetTime>| match time {
        Some(SetTime::At(time)) => time,
        _ => Timespec::default(),
    };
    m.u32(bits)
        .u32(attr.mode.unwrap_or(0))
        .u32(attr.uid.unwrap_or(0))
        .u32(attr.gid.unwrap_or(0))
        .u64(attr.size.unwrap_or(0))
        .time(time(attr.atime))
        .time(time(attr.mtime))
}
