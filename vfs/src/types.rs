//! The types of the contract.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::{Errno, Extent, FileType, OFlags, Result};

/// An inode of a source, by the number that the source gave it. It is not the number that `stat` shows
/// ([`Attr::ino`]), which need not be unique when a source spans several host file systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ino(pub u64);

impl Ino {
    /// The root of every source. It is always referenced.
    pub const ROOT: Self = Self(1);
}

/// An open file or directory of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handle(pub u64);

/// One client's session with one export: a guest from INIT to disconnect, a mount, or a 9P connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId {
    number: u64,
    /// The number of the client's first session.
    client: u64,
}

impl SessionId {
    /// One that no other session of this process has, of a client that has no other.
    pub fn unique() -> Self {
        let number = Self::next();
        Self { number, client: number }
    }

    /// The same of the client that has this one, for a client with several connections: what is bounded for each client is
    /// bounded for all of its sessions.
    #[must_use]
    pub fn same_client(self) -> Self {
        Self { number: Self::next(), client: self.client }
    }

    /// Whose session it is.
    pub(crate) fn client(self) -> u64 {
        self.client
    }

    fn next() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }
}

/// The caller of a request. The numbers are what the client's kernel claims.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller<'a> {
    /// The connection that the request came through.
    pub session: SessionId,
    /// User id for file-system access.
    pub uid: u32,
    /// Group id for file-system access.
    pub gid: u32,
    /// Process id as the client sees it; 0 when the client's kernel asks for itself.
    pub pid: u32,
    /// Supplementary groups, as far as the protocol carries them (FUSE: the one that matters to a create).
    pub groups: &'a [u32],
}

impl Caller<'_> {
    /// The [`uid`](Self::uid) and [`gid`](Self::gid) of a caller that the client does not name. Linux names none where idmapped
    /// mounts are allowed (`ALLOW_IDMAP`), unless something is made.
    pub const UNKNOWN: u32 = u32::MAX;

    /// Whether the caller may have what is for the administrator alone. An unknown caller may: its own kernel checks it.
    pub fn is_root_or_unknown(&self) -> bool {
        self.uid == 0 || self.uid == Self::UNKNOWN
    }

    /// Of a list of extended attributes, the names that the caller may see: as on local file systems, those in `trusted.` are for
    /// the administrator.
    pub fn visible_xattrs(&self, names: Vec<u8>) -> Vec<u8> {
        if self.is_root_or_unknown() {
            return names;
        }
        let shown = names.split_inclusive(|byte| *byte == 0).filter(|name| !name.starts_with(b"trusted."));
        shown.flatten().copied().collect()
    }

    /// Whether the caller is root or in this group (Linux's `in_group_or_capable`). An unknown caller counts as one of them, and so
    /// does one of unknown groups.
    pub fn in_group_or_root(&self, gid: u32) -> bool {
        self.is_root_or_unknown() || [gid, Self::UNKNOWN].contains(&self.gid) || self.groups.contains(&gid)
    }
}

/// A time, in seconds and nanoseconds since the Unix epoch. `nsec` is below 10^9.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timespec {
    /// Seconds; negative before 1970.
    pub sec: i64,
    /// Nanoseconds within the second.
    pub nsec: u32,
}

/// The attributes of an inode, as `statx` shows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attr {
    /// The number shown to users.
    pub ino: u64,
    /// Size in bytes.
    pub size: u64,
    /// Allocated space, in units of 512 bytes.
    pub blocks: u64,
    /// Last access.
    pub atime: Timespec,
    /// Last change of the data.
    pub mtime: Timespec,
    /// Last change of the inode.
    pub ctime: Timespec,
    /// Birth, where the source knows it.
    pub btime: Option<Timespec>,
    /// File type and permission bits (`st_mode`).
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node, in the kernel's 32-bit form (12 bits of major, 20 of minor).
    pub rdev: u32,
    /// Preferred size of a transfer, in bytes.
    pub blksize: u32,
    /// The inode is the root of another file system: clients that can show it as a mount of its own
    /// (`FUSE_ATTR_SUBMOUNT`).
    pub submount: bool,
}

impl Attr {
    /// The file type in [`Self::mode`].
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }
}

/// The result of a lookup. It carries one reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The inode.
    pub ino: Ino,
    /// Tells apart inodes that had the same number at different times.
    pub generation: u64,
    /// The inode's attributes.
    pub attr: Attr,
}

/// The attributes of a new inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CreateArgs {
    /// File type and permission bits, before the umask.
    pub mode: u32,
    /// The caller's umask; a default ACL of the directory overrides it.
    pub umask: u32,
    /// Device number of a device node, in the form of [`Attr::rdev`].
    pub rdev: u32,
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The time of the call.
    Now,
    /// This time.
    At(Timespec),
}

/// The attributes to change; `None` leaves one alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size, in bytes.
    pub size: Option<u64>,
    /// Last access.
    pub atime: Option<SetTime>,
    /// Last change of the data.
    pub mtime: Option<SetTime>,
    /// Last change of the inode; sources whose host sets it on its own ignore it.
    pub ctime: Option<Timespec>,
    /// Clear suid and sgid as a write or chown by an unprivileged user does ([`crate::without_privileges`];
    /// `FATTR_KILL_SUIDGID`). File capabilities are cleared by every change of size or owner.
    pub clear_privileges: bool,
}

/// The range of an open file that a read or write concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoRange {
    /// The inode.
    pub ino: Ino,
    /// The open file.
    pub handle: Handle,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length, in bytes.
    pub len: u32,
    /// The flags that the client's file has now (`fcntl` may have changed `O_APPEND`, `O_DIRECT`, ...).
    pub flags: OFlags,
    /// For writes: clear suid and sgid as for an unprivileged writer (`FUSE_WRITE_KILL_SUIDGID`).
    /// An export that serves an [`Extent`] does it by writing without `CAP_FSETID`.
    pub clear_privileges: bool,
    /// The lock owner, where the client names one (mandatory locking; unused by Linux today).
    pub owner: Option<u64>,
}

/// The result of a read or write.
#[derive(Clone, Debug)]
#[must_use]
pub enum Data {
    /// The source moved this many bytes itself. A read shorter than asked means the end of the file.
    Bytes(usize),
    /// The export moves the bytes between its client and this extent.
    Extent(Extent),
}

impl Data {
    /// The count of [`Data::Bytes`].
    pub fn bytes(&self) -> Option<usize> {
        match self {
            Self::Bytes(count) => Some(*count),
            Self::Extent(_) => None,
        }
    }
}

/// Where a directory listing starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirRange {
    /// The directory.
    pub ino: Ino,
    /// The directory's open handle.
    pub handle: Handle,
    /// 0, or the [`DirItem::next`] of the last entry already seen.
    pub offset: u64,
    /// The client wants an [`Entry`] (with its reference) for each name but `.` and `..`.
    pub plus: bool,
}

/// One entry of a directory listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirItem<'a> {
    /// The inode number shown to users.
    pub ino: u64,
    /// The offset to go on from after this entry.
    pub next: u64,
    /// The file type.
    pub kind: FileType,
    /// The name; `.` and `..` are listed too where the source has them.
    pub name: &'a [u8],
}

/// The kind of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// Shared.
    Read,
    /// Exclusive.
    Write,
    /// None.
    Unlock,
}

/// The owner of a lock. Two requests with equal owners never conflict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LockOwner {
    /// The client. Owner ids of different clients are unrelated.
    pub session: SessionId,
    /// The owner within the client.
    pub id: u64,
}

/// A byte-range (POSIX) or whole-file (flock) lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// The kind of lock wanted, or found.
    pub kind: LockKind,
    /// Who asks, or holds.
    pub owner: LockOwner,
    /// First byte.
    pub start: u64,
    /// Last byte, inclusive; `i64::MAX` stands for the end of the file, wherever that is.
    pub end: u64,
    /// The process that requests or holds the lock (0: unknown, as for a process of the host).
    pub pid: u32,
    /// A `flock` lock: the range does not matter and the owner is the open handle.
    pub flock: bool,
}

/// The outcome of a request for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum LockOutcome {
    /// The lock is taken or released as requested.
    Done,
    /// The source keeps the [`Waiter`] and wakes it later.
    Waiting,
}

/// A request for a lock that may wait. The source keeps it and calls [`Waiter::wake`] with the outcome;
/// a waiter that is dropped (its handle was released, its client is gone) ends with `INTR`.
///
/// A client may cancel a wait (after a signal). The source is not called for that: before it grants a lock to a waiter,
/// and before it queues one more, it drops those that are no longer [waiting](Waiter::is_waiting). A grant that comes
/// too late all the same is given back by the export, as an unlock of the same range.
pub struct Waiter {
    wake: Option<Box<dyn FnOnce(Result<()>) + Send>>,
    gone: Option<Arc<AtomicBool>>,
}

impl Waiter {
    /// A waiter that passes its outcome to `wake`.
    pub fn new(wake: impl FnOnce(Result<()>) + Send + 'static) -> Self {
        Self { wake: Some(Box::new(wake)), gone: None }
    }

    /// The same, but once `gone` is true nobody waits any more.
    #[must_use]
    pub fn until(mut self, gone: Arc<AtomicBool>) -> Self {
        self.gone = Some(gone);
        self
    }

    /// Returns whether the client still waits for the lock.
    pub fn is_waiting(&self) -> bool {
        !self.gone.as_ref().is_some_and(|gone| gone.load(Ordering::Acquire))
    }

    /// Ends the wait.
    pub fn wake(mut self, outcome: Result<()>) {
        if let Some(wake) = self.wake.take() {
            wake(outcome);
        }
    }

    /// Drops the waiter without an outcome, because the lock was granted or refused at once.
    pub fn dismiss(mut self) {
        self.wake = None;
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if let Some(wake) = self.wake.take() {
            wake(Err(Errno::INTR));
        }
    }
}

impl fmt::Debug for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waiter")
    }
}

/// What `lseek` looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    /// The next data at or after the offset.
    Data,
    /// The next hole at or after the offset.
    Hole,
}

/// A copy within a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// Source inode, open file and offset in bytes.
    pub from: (Ino, Handle, u64),
    /// Destination inode, open file and offset in bytes.
    pub to: (Ino, Handle, u64),
    /// Length, in bytes.
    pub len: u64,
}

/// Totals of a file system, as `statfs` shows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statfs {
    /// Total blocks, in units of [`Self::frsize`].
    pub blocks: u64,
    /// Free blocks.
    pub bfree: u64,
    /// Free blocks for unprivileged users.
    pub bavail: u64,
    /// Total inodes.
    pub files: u64,
    /// Free inodes.
    pub ffree: u64,
    /// Preferred size of a transfer, in bytes.
    pub bsize: u32,
    /// Longest name, in bytes.
    pub namelen: u32,
    /// Size of a block, in bytes.
    pub frsize: u32,
}

/// Which clients can find an inode by number after dropping its references ([`crate::FileSystem::lookup_self`]), as an
/// NFS server that re-exports the share does. Other clients are told that file handles are not supported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ByNumber {
    /// Nobody: numbers go with the references.
    #[default]
    No,
    /// Mounts on this host, as long as they are there: a number may be another inode's for the next client, or a number that nobody was
    /// told of may lead to what is not shared. The mount's kernel names only what it was told of, and is told a generation with it.
    Host,
    /// Every client: all inodes there are are found, and no number is ever given to another one.
    Any,
}

/// What a source has beyond the plain calls; exports offer their clients no more than this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Every request that would change something is refused with `ROFS` (exports refuse it before the source is asked).
    pub read_only: bool,
    /// POSIX ACLs in `system.posix_acl_*`; default ACLs work on creation.
    pub posix_acl: bool,
    /// [`crate::FileSystem::get_lock`] and [`crate::FileSystem::set_lock`] work for byte ranges.
    pub posix_locks: bool,
    /// [`crate::FileSystem::set_lock`] works for flock.
    pub flock: bool,
    /// [`crate::FileSystem::backing`] answers for regular files: a mount on this host may pass reads, writes and
    /// mappings through to those descriptors (FUSE passthrough).
    pub backing: bool,
    /// Its calls wait, for a network say, without keeping a CPU busy: whoever serves it has many under way at once.
    pub waits: bool,
    /// Of files that are opened with `O_DIRECT`, extents lead past the page cache: writes to them wait for a device.
    pub direct: bool,
    /// Who finds inodes by their numbers alone.
    pub by_number: ByNumber,
    /// Nothing in it ever changes, and [`crate::FileSystem::readdir`] does not look at its handle: clients that keep
    /// listings need not ask before they use one.
    pub constant: bool,
}
