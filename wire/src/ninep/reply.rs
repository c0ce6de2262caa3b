//! R messages (9P2000, intro(5); 9P2000.L).

use ferry_vfs::{Attr, Errno, Statfs};

use super::encode::{Message, put_lock, raw_lock_kind};
use super::numbers::{Qid, Tag, V9FS_MAGIC, WALK_NAMES_MAX, kind, valid};
use super::request::LockRequest;

/// The qids along a walk, at most [`WALK_NAMES_MAX`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Qids {
    qids: [Qid; WALK_NAMES_MAX],
    count: usize,
}

impl Qids {
    /// Appends a qid if there is room.
    pub fn push(&mut self, qid: Qid) {
        if let Some(slot) = self.qids.get_mut(self.count) {
            *slot = qid;
            self.count += 1;
        }
    }

    /// Returns the qids as a slice.
    pub fn as_slice(&self) -> &[Qid] {
        &self.qids[..self.count]
    }
}

/// The content of Rgetattr.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Getattr {
    /// The file. When decoding, its path is [`Attr::ino`].
    pub qid: Qid,
    /// Its attributes; the protocol does not carry [`Attr::submount`].
    pub attr: Attr,
    /// As [`ferry_vfs::Entry::generation`].
    pub generation: u64,
}

/// The outcome of Tlock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LockStatus {
    /// Done.
    Success = 0,
    /// A conflicting lock exists. A client that waits for the lock retries later.
    Blocked = 1,
    /// The lock cannot be granted.
    Error = 2,
    /// The server has just started: only reclaimed locks are granted.
    Grace = 3,
}

/// A reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as the requests")]
pub enum Reply<'a> {
    /// The request failed (Rlerror).
    Error(Errno),
    Version {
        msize: u32,
        version: &'a [u8],
    },
    Auth(Qid),
    Attach(Qid),
    Flush,
    /// One qid per step that succeeded.
    Walk(Qids),
    Read(&'a [u8]),
    Write {
        bytes: u32,
    },
    Clunk,
    Remove,
    /// Blocks are in units of [`Statfs::frsize`], the only block size in the message. `id`: the number of the file system.
    Statfs {
        totals: Statfs,
        id: u64,
    },
    /// `iounit`: the maximum size of one read or write in bytes; 0: limited by the message size.
    Open {
        qid: Qid,
        iounit: u32,
    },
    Create {
        qid: Qid,
        iounit: u32,
    },
    Symlink(Qid),
    Mknod(Qid),
    Rename,
    Readlink {
        target: &'a [u8],
    },
    Getattr(Getattr),
    Setattr,
    /// The length of the value, or of the list of names, in bytes.
    Xattrwalk {
        bytes: u64,
    },
    Xattrcreate,
    /// Entries written by [`super::DirWriter`].
    Readdir(&'a [u8]),
    Fsync,
    Lock(LockStatus),
    /// The conflicting lock; if there is none, the requested lock with type `Unlock`.
    Getlock(LockRequest<'a>),
    Link,
    Mkdir(Qid),
    Renameat,
    Unlinkat,
    /// A message of [`crate::events`], in which inodes are paths of qids.
    Events(&'a [u8]),
}

/// Returns the first bytes of an Rread or Rreaddir, for servers that have the data in place after them. `kind` is the
/// type of the request.
pub fn encode_data_head(kind: u8, tag: Tag, bytes: u32) -> [u8; super::READ_HEAD_BYTES] {
    let mut head = [0; super::READ_HEAD_BYTES];
    // This cannot overflow: the caller has the data in memory after this head.
    let size = bytes.saturating_add(11);
    head[..4].copy_from_slice(&size.to_le_bytes());
    head[4] = kind + 1;
    head[5..7].copy_from_slice(&tag.0.to_le_bytes());
    head[7..].copy_from_slice(&bytes.to_le_bytes());
    head
}

impl Reply<'_> {
    /// Appends the message to `out`.
    pub fn encode(&self, tag: Tag, out: &mut Vec<u8>) {
        let mut message = Message::begin(self.kind(), tag, out);
        let m = &mut message;
        match *self {
            Self::Error(errno) => m.u32(errno.raw_os_error().unsigned_abs()),
            Self::Version { msize, version } => m.u32(msize).string(version),
            Self::Auth(qid) | Self::Attach(qid) | Self::Symlink(qid) | Self::Mknod(qid) | Self::Mkdir(qid) => {
                m.qid(qid)
            }
            Self::Walk(qids) => {
                m.u16(u16::try_from(qids.count).unwrap_or(0));
                qids.as_slice().iter().fold(m, |m, qid| m.qid(*qid))
            }
            Self::Read(data) | Self::Readdir(data) | Self::Events(data) => m.data(data),
            Self::Write { bytes } => m.u32(bytes),
            Self::Statfs { totals, id } => put_statfs(m, &totals, id),
            Self::Open { qid, iounit } | Self::Create { qid, iounit } => m.qid(qid).u32(iounit),
            Self::Readlink { target } => m.string(target),
            Self::Getattr(ref getattr) => put_attr(m, getattr),
            Self::Xattrwalk { bytes } => m.u64(bytes),
            Self::Lock(status) => m.u8(status as u8),
            Self::Getlock(ref lock) => put_lock(m.u8(raw_lock_kind(lock.kind)), lock),
            Self::Flush
            | Self::Clunk
            | Self::Remove
            | Self::Rename
            | Self::Setattr
            | Self::Xattrcreate
            | Self::Fsync
            | Self::Link
            | Self::Renameat
            | Self::Unlinkat => m,
        };
    }

    /// Returns the message's type.
    pub fn kind(&self) -> u8 {
        let request = match self {
            Self::Error(_) => return kind::RLERROR,
            Self::Version { .. } => kind::TVERSION,
            Self::Auth(_) => kind::TAUTH,
            Self::Attach(_) => kind::TATTACH,
            Self::Flush => kind::TFLUSH,
            Self::Walk(_) => kind::TWALK,
            Self::Read(_) => kind::TREAD,
            Self::Write { .. } => kind::TWRITE,
            Self::Clunk => kind::TCLUNK,
            Self::Remove => kind::TREMOVE,
            Self::Statfs { .. } => kind::TSTATFS,
            Self::Open { .. } => kind::TLOPEN,
            Self::Create { .. } => kind::TLCREATE,
            Self::Symlink(_) => kind::TSYMLINK,
            Self::Mknod(_) => kind::TMKNOD,
            Self::Rename => kind::TRENAME,
            Self::Readlink { .. } => kind::TREADLINK,
            Self::Getattr(_) => kind::TGETATTR,
            Self::Setattr => kind::TSETATTR,
            Self::Xattrwalk { .. } => kind::TXATTRWALK,
            Self::Xattrcreate => kind::TXATTRCREATE,
            Self::Readdir(_) => kind::TREADDIR,
            Self::Fsync => kind::TFSYNC,
            Self::Lock(_) => kind::TLOCK,
            Self::Getlock(_) => kind::TGETLOCK,
            Self::Link => kind::TLINK,
            Self::Mkdir(_) => kind::TMKDIR,
            Self::Renameat => kind::TRENAMEAT,
            Self::Unlinkat => kind::TUNLINKAT,
            Self::Events(_) => kind::TEVENTS,
        };
        request + 1
    }
}

fn put_statfs<'m, 'a>(m: &'m mut Message<'a>, totals: &Statfs, id: u64) -> &'m mut Message<'a> {
    m.u32(V9FS_MAGIC)
        .u32(totals.frsize)
        .u64(totals.blocks)
        .u64(totals.bfree)
        .u64(totals.bavail)
        .u64(totals.files)
        .u64(totals.ffree)
        .u64(id)
        .u32(totals.namelen)
}

fn put_attr<'m, 'a>(m: &'m mut Message<'a>, Getattr { qid, attr, generation }: &Getattr) -> &'m mut Message<'a> {
    let has_btime = if attr.btime.is_some() { valid::BTIME } else { 0 };
    m.u64(valid::BASIC | valid::GENERATION | has_btime)
        .qid(*qid)
        .u32(attr.mode)
        .u32(attr.uid)
        .u32(attr.gid)
        .u64(attr.nlink.into())
        .u64(attr.rdev.into())
        .u64(attr.size)
        .u64(attr.blksize.into())
        .u64(attr.blocks)
        .time(attr.atime)
        .time(attr.mtime)
        .time(attr.ctime)
        .time(attr.btime.unwrap_or_default())
        .u64(*generation)
        .u64(0)
}
