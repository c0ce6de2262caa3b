//! The types of the contract.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::{Errno, Extent, FileType, OFlags, Result};

/// The number of an inode, chosen by the source. It differs from the number that `stat` shows ([`Attr::ino`]), which
/// need not be unique when a source spans several host file systems.
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
    /// Returns a new id, of a new client. No other session of this process has it.
    pub fn unique() -> Self {
        let number = Self::next();
        Self { number, client: number }
    }

    /// Returns a new id for another connection of the same client. Limits per client apply to all of its sessions
    /// together.
    #[must_use]
    pub fn same_client(self) -> Self {
        Self { number: Self::next(), client: self.client }
    }

    /// Returns the number of the client.
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
    /// Process id as the client sees it; 0 for requests of the client's kernel itself.
    pub pid: u32,
    /// Supplementary groups, as far as the protocol carries them (FUSE: only the group of a new file's directory).
    pub groups: &'a [u32],
}

impl Caller<'_> {
    /// The [`uid`](Self::uid) and [`gid`](Self::gid) of an unknown caller. Where idmapped mounts are allowed
    /// (`ALLOW_IDMAP`), Linux only sends the ids with requests that create an inode.
    pub const UNKNOWN: u32 = u32::MAX;

    /// Returns whether the caller is root. An unknown caller counts as root: its kernel checks permissions.
    pub fn is_root_or_unknown(&self) -> bool {
        self.uid == 0 || self.uid == Self::UNKNOWN
    }

    /// Filters a list of extended attributes for the caller: as on local file systems, only root sees names in
    /// `trusted.`.
    pub fn visible_xattrs(&self, names: Vec<u8>) -> Vec<u8> {
        if self.is_root_or_unknown() {
            return names;
        }
        let shown = names.split_inclusive(|byte| *byte == 0).filter(|name| !name.starts_with(b"trusted."));
        shown.flatten().copied().collect()
    }

    /// Returns whether the caller is root or in this group (Linux's `in_group_or_capable`). A caller with an unknown user
    /// or group counts as a member.
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
    /// Birth, if the source knows it.
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
    /// The inode is the root of another file system: clients may show it as a separate mount (`FUSE_ATTR_SUBMOUNT`).
    pub submount: bool,
}

impl Attr {
    /// Returns the file type in [`Self::mode`].
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }
}

/// The result of a lookup. It carries one reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The inode.
    pub ino: Ino,
    /// Distinguishes inodes that had the same number at different times.
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

/// The attributes to change; `None` leaves one unchanged.
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
    /// Last change of the inode; sources whose host sets it ignore it.
    pub ctime: Option<Timespec>,
    /// Clear suid and sgid, as a write or chown by an unprivileged user does ([`crate::without_privileges`];
    /// `FATTR_KILL_SUIDGID`). File capabilities are cleared by every change of size or owner.
    pub clear_privileges: bool,
}

/// The range of an open file to read or write.
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
    /// The current flags of the client's file (`fcntl` may have changed `O_APPEND`, `O_DIRECT`, ...).
    pub flags: OFlags,
    /// For writes: clear suid and sgid, as a write by an unprivileged user does (`FUSE_WRITE_KILL_SUIDGID`).
    /// For an [`Extent`] the export writes without `CAP_FSETID`.
    pub clear_privileges: bool,
    /// The lock owner, if the client sends one (mandatory locking; unused by Linux today).
    pub owner: Option<u64>,
}

/// The result of a read or write.
#[derive(Clone, Debug)]
#[must_use]
pub enum Data {
    /// The source moved this many bytes itself. A read shorter than requested means the end of the file.
    Bytes(usize),
    /// The export moves the bytes between its client and this extent.
    Extent(Extent),
}

impl Data {
    /// Returns the count of [`Data::Bytes`].
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
    /// 0, or the [`DirItem::next`] of the last entry received.
    pub offset: u64,
    /// The client requests an [`Entry`] (with its reference) for each name except `.` and `..`.
    pub plus: bool,
}

/// One entry of a directory listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirItem<'a> {
    /// The inode number shown to users.
    pub ino: u64,
    /// The offset of the next entry.
    pub next: u64,
    /// The file type.
    pub kind: FileType,
    /// The name; a source may list `.` and `..` too.
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
    /// The requested kind, or that of the lock found.
    pub kind: LockKind,
    /// The owner that requests or holds it.
    pub owner: LockOwner,
    /// First byte.
    pub start: u64,
    /// Last byte, inclusive; `i64::MAX` stands for the end of the file, whatever its size.
    pub end: u64,
    /// The process that requests or holds the lock (0: unknown, as for a process of the host).
    pub pid: u32,
    /// A `flock` lock: it has no range, and its owner is the open handle.
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
/// A client may cancel a wait (after a signal). The source is not called then: before it queues another waiter, it drops those that
/// are no longer [waiting](Waiter::is_waiting), and before it tries to grant a lock, it [claims](Waiter::claim) the waiter. If a source
/// that cannot claim grants a lock too late, the export releases it by an unlock of the same range.
pub struct Waiter {
    wake: Option<Box<dyn FnOnce(Result<()>) + Send>>,
    cancellation: Option<Arc<Cancellation>>,
}

/// Whether a client still wants what it waits for; shared by who may cancel the wait and who may end it.
#[derive(Debug, Default)]
pub struct Cancellation(AtomicU8);

impl Cancellation {
    const WAITING: u8 = 0;
    /// The source tries to grant the lock.
    const CLAIMED: u8 = 1;
    /// The same, and the client wants it no more.
    const CLAIMED_LATE: u8 = 2;
    const CANCELLED: u8 = 3;

    /// Cancels the wait. Returns whether it has ended; otherwise the source is trying to grant the
    /// lock, and wakes the waiter with the outcome (`INTR` if it fails).
    pub fn cancel(&self) -> bool {
        let next = |state| match state {
            Self::WAITING => Some(Self::CANCELLED),
            Self::CLAIMED => Some(Self::CLAIMED_LATE),
            _ => None,
        };
        let before = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).unwrap_or_else(|state| state);
        matches!(before, Self::WAITING | Self::CANCELLED)
    }

    /// Returns whether the wait has been cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire) == Self::CANCELLED
    }

    fn claim(&self) -> bool {
        self.0.compare_exchange(Self::WAITING, Self::CLAIMED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn unclaim(&self) -> bool {
        let next = |state| Some(if state == Self::CLAIMED { Self::WAITING } else { Self::CANCELLED });
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, next) == Ok(Self::CLAIMED)
    }
}

impl Waiter {
    /// Creates a waiter that passes its outcome to `wake`.
    pub fn new(wake: impl FnOnce(Result<()>) + Send + 'static) -> Self {
        Self { wake: Some(Box::new(wake)), cancellation: None }
    }

    /// Lets the client cancel the wait.
    #[must_use]
    pub fn until(mut self, cancellation: Arc<Cancellation>) -> Self {
        self.cancellation = Some(cancellation);
        self
    }

    /// Returns whether the client still waits for the lock.
    pub fn is_waiting(&self) -> bool {
        !self.cancellation.as_ref().is_some_and(|cancellation| cancellation.is_cancelled())
    }

    /// Begins an attempt to grant the lock: until [`Self::unclaim`] or [`Self::wake`], the client cannot end the wait. Returns whether
    /// it still waits.
    pub fn claim(&self) -> bool {
        self.cancellation.as_ref().is_none_or(|cancellation| cancellation.claim())
    }

    /// Ends a failed attempt. Returns whether the client still waits; if not, the waiter must be woken with `INTR`.
    pub fn unclaim(&self) -> bool {
        self.cancellation.as_ref().is_none_or(|cancellation| cancellation.unclaim())
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

/// What `lseek` searches for.
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
/// NFS server does that re-exports the share. For other clients, file handles are not supported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ByNumber {
    /// None: a number is only valid while it has references.
    #[default]
    No,
    /// Mounts on this host, while they exist. Another client must not: the number may belong to another inode by then, or
    /// lead to an inode that is not shared. The kernel of a mount only uses numbers that it received with a generation.
    Host,
    /// All clients: every existing inode is found, and no number is ever reused.
    Any,
}

/// The optional features of a source; exports offer their clients no others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Every request that would change something fails with `ROFS` (exports refuse it before they call the source).
    pub read_only: bool,
    /// POSIX ACLs in `system.posix_acl_*`; default ACLs apply to new files.
    pub posix_acl: bool,
    /// [`crate::FileSystem::get_lock`] and [`crate::FileSystem::set_lock`] work for byte ranges.
    pub posix_locks: bool,
    /// [`crate::FileSystem::set_lock`] works for flock.
    pub flock: bool,
    /// [`crate::FileSystem::backing`] returns a descriptor for regular files: a mount on this host may pass reads, writes and
    /// mappings through to those descriptors (FUSE passthrough).
    pub backing: bool,
    /// Its calls wait (for a network, for example) without using a CPU: exports run many of them concurrently.
    pub waits: bool,
    /// Extents of files opened with `O_DIRECT` bypass the page cache: writes to them wait for a device.
    pub direct: bool,
    /// Which clients find inodes by number.
    pub by_number: ByNumber,
    /// It publishes an [`crate::Event`] for each name that is made, removed or moved, and for each change that no client
    /// made. Without, agents in guests are told what a [`crate::Change`] tells: of a moved name that one was removed and
    /// another made.
    pub events: bool,
    /// Nothing in it ever changes, and no method needs the handle: clients may cache everything, and open files and
    /// directories without a call of [`crate::FileSystem::open`] or [`crate::FileSystem::opendir`]. The handle is 0 then.
    /// Either all inodes have a birth time ([`Attr::btime`]) or none has.
    pub constant: bool,
}
