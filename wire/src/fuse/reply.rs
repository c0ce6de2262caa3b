//! Replies.

use std::time::Duration;

use ferry_vfs::{Attr, Entry, Errno, Handle, Lock, LockKind, Statfs, Timespec};
use zerocopy::{Immutable, IntoBytes};

use super::Negotiated;
use super::abi::{self, InitFlags, InitOut, OpenFlags, OutHeader};

/// The maximum number of bytes before the payload of a reply: header and the longest fixed structure (STATX).
pub const REPLY_HEAD_BYTES_MAX: usize = size_of::<OutHeader>() + size_of::<abi::StatxOut>();

/// The same without STATX (the longest is that of CREATE).
pub const SHORT_HEAD_BYTES_MAX: usize = size_of::<OutHeader>() + size_of::<abi::EntryOut>() + size_of::<abi::OpenOut>();

#[allow(clippy::cast_possible_truncation, reason = "16 bytes")]
const HEADER_LEN: u32 = size_of::<OutHeader>() as u32;

/// How long the client may cache a name and attributes (`entry_valid` and `attr_valid` of `fuse_entry_out`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts {
    /// A name.
    pub entry: Duration,
    /// Attributes.
    pub attr: Duration,
}

/// An opened file (FUSE protocol 7.45, `fuse_open_out`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenReply {
    /// The handle.
    pub handle: Handle,
    /// How the client may treat the file.
    pub flags: OpenFlags,
    /// The backing file, as `FUSE_DEV_IOC_BACKING_OPEN` numbered it, with [`OpenFlags::PASSTHROUGH`].
    pub backing_id: i32,
}

impl OpenReply {
    /// Creates the result without a backing file.
    pub fn new(handle: Handle, flags: OpenFlags) -> Self {
        Self { handle, flags, backing_id: 0 }
    }
}

/// A reply without error (`fuse_*_out` of linux/fuse.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reply<'a> {
    /// Nothing but success.
    Empty,
    /// A name and its inode.
    Entry {
        /// The inode.
        entry: Entry,
        /// How long that holds.
        timeouts: Timeouts,
        /// Use DAX for it, with [`InitFlags::HAS_INODE_DAX`].
        dax: bool,
    },
    /// The name does not exist, and the client may cache that (LOOKUP only). Otherwise reply `NOENT`.
    Negative {
        /// How long that holds.
        timeout: Duration,
    },
    /// A new file, opened.
    Created {
        /// The inode.
        entry: Entry,
        /// How long that holds.
        timeouts: Timeouts,
        /// Use DAX for it, with [`InitFlags::HAS_INODE_DAX`].
        dax: bool,
        /// The open file.
        opened: OpenReply,
    },
    /// Attributes.
    Attr {
        /// The attributes.
        attr: Attr,
        /// How long they hold.
        timeout: Duration,
        /// Use DAX for the inode, with [`InitFlags::HAS_INODE_DAX`].
        dax: bool,
    },
    /// Attributes in the form of `statx`.
    Statx {
        /// The attributes.
        attr: Attr,
        /// How long they hold.
        timeout: Duration,
    },
    /// An opened file or directory.
    Open(OpenReply),
    /// The number of bytes written or copied.
    Write {
        /// Bytes written or copied.
        bytes: u32,
    },
    /// The number of bytes copied (COPY_FILE_RANGE_64).
    CopyFileRange64 {
        /// Bytes copied.
        bytes: u64,
    },
    /// Statistics of the file system.
    Statfs(Statfs),
    /// The length of a value or list of extended attributes.
    XattrSize {
        /// The length in bytes.
        bytes: u32,
    },
    /// A conflicting lock, or none.
    Lock(Option<Lock>),
    /// The offset of the next data or hole.
    Lseek {
        /// The offset in bytes.
        offset: u64,
    },
    /// The outcome of an ioctl.
    Ioctl {
        /// What `ioctl` returns.
        result: i32,
        /// Output; the encoder writes only its length.
        data: &'a [u8],
    },
    /// Events that are ready.
    Poll {
        /// The events.
        events: u32,
    },
    /// A block of the device.
    Bmap {
        /// The block.
        block: u64,
    },
    /// The reply to INIT, from [`super::negotiate`].
    Init(InitOut),
    /// Data: of a file, a listing, a symbolic link, extended attributes. The encoder writes only its length.
    Bytes(&'a [u8]),
}

/// A reply's head under construction.
struct Head<'b> {
    bytes: &'b mut [u8],
    len: usize,
}

impl Head<'_> {
    fn put(&mut self, part: &(impl IntoBytes + Immutable)) {
        let part = part.as_bytes();
        self.bytes[self.len..self.len + part.len()].copy_from_slice(part);
        self.len += part.len();
    }
}

impl Reply<'_> {
    /// Returns the maximum length of the head in bytes.
    pub fn head_bytes_max(&self) -> usize {
        if matches!(self, Self::Statx { .. }) { REPLY_HEAD_BYTES_MAX } else { SHORT_HEAD_BYTES_MAX }
    }

    /// Writes the header and the fixed structure into `head`, and returns the written bytes. The header counts the
    /// payload ([`Self::payload`]); the caller sends it after the head, without a copy.
    ///
    /// # Panics
    ///
    /// `head` is shorter than [`Self::head_bytes_max`].
    pub fn encode<'b>(&self, unique: u64, session: &Negotiated, head: &'b mut [u8]) -> &'b [u8] {
        let mut out = Head { bytes: head, len: size_of::<OutHeader>() };
        self.put(session, &mut out);
        let Head { bytes, len } = out;
        put_header(bytes, unique, len + self.payload().len());
        &bytes[..len]
    }

    /// Returns the head of a reply whose payload of `payload_bytes` is already in place, as the data of a READ.
    pub fn encode_bytes_head(unique: u64, payload_bytes: usize) -> [u8; size_of::<OutHeader>()] {
        let mut head = [0; size_of::<OutHeader>()];
        put_header(&mut head, unique, size_of::<OutHeader>() + payload_bytes);
        head
    }

    /// Returns the bytes that follow the head.
    pub fn payload(&self) -> &[u8] {
        match self {
            Self::Bytes(data) | Self::Ioctl { data, .. } => data,
            _ => &[],
        }
    }

    fn put(&self, session: &Negotiated, out: &mut Head<'_>) {
        match self {
            Self::Empty | Self::Bytes(_) => (),
            Self::Entry { entry, timeouts, dax } => out.put(&entry_out(entry, *timeouts, *dax, session)),
            Self::Negative { timeout } => {
                let (entry_valid, entry_valid_nsec) = (timeout.as_secs(), timeout.subsec_nanos());
                out.put(&abi::EntryOut { entry_valid, entry_valid_nsec, ..abi::EntryOut::ZERO });
            }
            Self::Created { entry, timeouts, dax, opened } => {
                out.put(&entry_out(entry, *timeouts, *dax, session));
                out.put(&open_out(opened));
            }
            Self::Attr { attr, timeout, dax } => out.put(&abi::AttrOut {
                attr_valid: timeout.as_secs(),
                attr_valid_nsec: timeout.subsec_nanos(),
                dummy: 0,
                attr: attr_out(attr, *dax, session),
            }),
            Self::Statx { attr, timeout } => out.put(&abi::StatxOut {
                attr_valid: timeout.as_secs(),
                attr_valid_nsec: timeout.subsec_nanos(),
                flags: 0,
                spare: [0; 2],
                stat: statx_out(attr),
            }),
            Self::Open(opened) => out.put(&open_out(opened)),
            Self::Write { bytes } => out.put(&abi::WriteOut { size: *bytes, padding: 0 }),
            Self::CopyFileRange64 { bytes } => out.put(&abi::CopyFileRangeOut { bytes_copied: *bytes }),
            Self::Statfs(totals) => out.put(&kstatfs(totals)),
            Self::XattrSize { bytes } => out.put(&abi::GetxattrOut { size: *bytes, padding: 0 }),
            Self::Lock(lock) => out.put(&lk_out(lock.as_ref())),
            Self::Lseek { offset } => out.put(&abi::LseekOut { offset: *offset }),
            Self::Ioctl { result, .. } => out.put(&abi::IoctlOut { result: *result, ..abi::IoctlOut::ZERO }),
            Self::Poll { events } => out.put(&abi::PollOut { revents: *events, padding: 0 }),
            Self::Bmap { block } => out.put(&abi::BmapOut { block: *block }),
            Self::Init(init) => out.put(init),
        }
    }
}

fn put_header(head: &mut [u8], unique: u64, len: usize) {
    let len = u32::try_from(len).expect("the client asks for less than 4 GiB at a time");
    head[..size_of::<OutHeader>()].copy_from_slice(OutHeader { len, error: 0, unique }.as_bytes());
}

/// Returns a reply that only carries an error (`fuse_out_header`).
pub fn encode_error(unique: u64, errno: Errno) -> [u8; size_of::<OutHeader>()] {
    // Linux drops replies with error numbers of 512 and above.
    let error = match errno.raw_os_error() {
        raw @ 1..512 => -raw,
        _ => -Errno::IO.raw_os_error(),
    };
    zerocopy::transmute!(OutHeader { len: HEADER_LEN, error, unique })
}

pub(super) fn entry_out(entry: &Entry, timeouts: Timeouts, dax: bool, session: &Negotiated) -> abi::EntryOut {
    abi::EntryOut {
        nodeid: entry.ino.0,
        generation: entry.generation,
        entry_valid: timeouts.entry.as_secs(),
        attr_valid: timeouts.attr.as_secs(),
        entry_valid_nsec: timeouts.entry.subsec_nanos(),
        attr_valid_nsec: timeouts.attr.subsec_nanos(),
        attr: attr_out(&entry.attr, dax, session),
    }
}

fn attr_out(attr: &Attr, dax: bool, session: &Negotiated) -> abi::Attr {
    let flag = |wanted, needs, flag| if wanted && session.has(needs) { flag } else { 0 };
    abi::Attr {
        ino: attr.ino,
        size: attr.size,
        blocks: attr.blocks,
        atime: attr.atime.sec.cast_unsigned(),
        mtime: attr.mtime.sec.cast_unsigned(),
        ctime: attr.ctime.sec.cast_unsigned(),
        atimensec: attr.atime.nsec,
        mtimensec: attr.mtime.nsec,
        ctimensec: attr.ctime.nsec,
        mode: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: attr.blksize,
        flags: flag(attr.submount, InitFlags::SUBMOUNTS, abi::ATTR_SUBMOUNT)
            | flag(dax, InitFlags::HAS_INODE_DAX, abi::ATTR_DAX),
    }
}

/// `STATX_BASIC_STATS` of Linux: all fields of [`Attr`] except the birth time.
const STATX_BASIC_STATS: u32 = 0x7ff;
/// `STATX_BTIME` of Linux.
const STATX_BTIME: u32 = 0x800;

fn statx_out(attr: &Attr) -> abi::Statx {
    let time = |time: Timespec| abi::SxTime { tv_sec: time.sec, tv_nsec: time.nsec, reserved: 0 };
    abi::Statx {
        mask: STATX_BASIC_STATS | if attr.btime.is_some() { STATX_BTIME } else { 0 },
        blksize: attr.blksize,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        mode: (attr.mode & 0xffff) as u16,
        ino: attr.ino,
        size: attr.size,
        blocks: attr.blocks,
        atime: time(attr.atime),
        btime: time(attr.btime.unwrap_or_default()),
        ctime: time(attr.ctime),
        mtime: time(attr.mtime),
        // The 32-bit form holds the low 8 bits of the minor number, the major number's 12 bits, and the rest of the
        // minor number.
        rdev_major: (attr.rdev >> 8) & 0xfff,
        rdev_minor: (attr.rdev & 0xff) | ((attr.rdev >> 12) & 0xfff00),
        ..abi::Statx::ZERO
    }
}

fn open_out(opened: &OpenReply) -> abi::OpenOut {
    abi::OpenOut { fh: opened.handle.0, open_flags: opened.flags.bits(), backing_id: opened.backing_id }
}

fn kstatfs(totals: &Statfs) -> abi::Kstatfs {
    let Statfs { blocks, bfree, bavail, files, ffree, bsize, namelen, frsize } = *totals;
    abi::Kstatfs { blocks, bfree, bavail, files, ffree, bsize, namelen, frsize, padding: 0, spare: [0; 6] }
}

fn lk_out(lock: Option<&Lock>) -> abi::LkOut {
    let lk = match lock {
        None => abi::FileLock { kind: abi::LOCK_NONE, ..abi::FileLock::ZERO },
        Some(lock) => abi::FileLock { start: lock.start, end: lock.end, kind: lock_kind(lock.kind), pid: lock.pid },
    };
    abi::LkOut { lk }
}

const fn lock_kind(kind: LockKind) -> u32 {
    match kind {
        LockKind::Read => abi::LOCK_READ,
        LockKind::Write => abi::LOCK_WRITE,
        LockKind::Unlock => abi::LOCK_NONE,
    }
}
