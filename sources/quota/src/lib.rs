//! A layer over any source that limits the bytes and the files of its tree ([`Limits`]).
//!
//! ```
//! use std::sync::Arc;
//! use ferry_mem::{Mem, Options};
//! use ferry_quota::{Limits, Quota};
//! use ferry_vfs::{Caller, CreateArgs, Errno, FileSystem, Ino, Name};
//!
//! let mem = Arc::new(Mem::new(&Options::default())?);
//! let quota = Quota::new(mem, Limits { bytes: 1 << 20, files: Some(2) })?;
//! let (cx, new) = (Caller::default(), CreateArgs { mode: 0o755, ..CreateArgs::default() });
//! // The root and one directory are two files.
//! quota.mkdir(&cx, Ino::ROOT, Name::new(b"a")?, &new)?;
//! assert_eq!(quota.mkdir(&cx, Ino::ROOT, Name::new(b"b")?, &new), Err(Errno::NOSPC));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is counted
//!
//! Each inode counts once, with the space that the source reports for it ([`Attr::blocks`]), as `du` counts.
//! [`Quota::new`] counts the tree. A request that may grow the tree first reserves what it may need, and fails with
//! `NOSPC` if that does not fit. When it ends, the growth that is found replaces the reservation. So requests at the
//! same time cannot pass the limit together. A source that takes more space than was asked for (preallocation, large
//! blocks) can pass it once; then nothing grows.
//!
//! A write that fits only partly writes that part. Overwriting allocated storage needs no room. A file that is
//! unlinked while in use counts until its last user is gone.
//!
//! # What does not pass through
//!
//! This layer writes the data itself: it returns no extents for writes, no descriptors for passthrough, and no
//! mappings. The size of a file's extents cannot change. A background count finds changes by others ([`Quota::begin`]).
//!
//! References that a client drops while its file is open are dropped at the source when it is closed. So a source that
//! numbers inodes again does not give an open file a second number, with a charge of its own.
#![deny(unsafe_code)]

mod account;
mod charges;
mod count;
mod counter;
mod data;
mod names;
mod optional;
mod sys;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use ferry_vfs::sync::{CacheAligned, lock};
use ferry_vfs::{
    Attr, Backing, Caller, Changes, CopyRange, CreateArgs, Data, DirOutput, DirRange, Entry, Errno, FallocateFlags,
    Features, FileSystem, Handle, Ino, Input, IoRange, Lock, LockOutcome, Migrate, Name, OFlags, Output, RenameFlags,
    Result, Seek, SetAttr, Statfs, Waiter, XattrFlags,
};

use crate::account::{Account, Reservation};
use crate::charges::{Charges, Held};
use crate::counter::{Counter, Removals};

pub use crate::counter::CountError;

/// The unit in which room is reserved, the block size of most file systems.
const BLOCK: u64 = 4096;
/// Locks of directories, by number.
const DIR_LOCKS: usize = 64;

/// The limits of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of storage.
    pub bytes: u64,
    /// Inodes: files, directories (with the root), links and others. `None`: as many as the source allows.
    pub files: Option<u64>,
}

/// The usage of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of storage, with the reservations of active requests.
    pub bytes: u64,
    /// Inodes.
    pub files: u64,
}

/// A source with a limited tree. See the crate documentation.
pub struct Quota {
    source: Arc<dyn FileSystem>,
    limits: Limits,
    features: Features,
    bytes: Account,
    files: Account,
    charges: Charges,
    /// Held while the names in a directory change, so that the inode that loses one is known.
    dirs: [CacheAligned<Mutex<()>>; DIR_LOCKS],
    removals: Removals,
    /// Held by a count, and shared by requests that free what only a later measurement finds.
    counting: RwLock<()>,
    counter: Arc<Counter>,
}

impl fmt::Debug for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quota").field("limits", &self.limits).field("usage", &self.usage()).finish_non_exhaustive()
    }
}

/// Returns the bytes of storage in attributes.
fn storage(attr: &Attr) -> i64 {
    i64::try_from(attr.blocks.saturating_mul(512)).unwrap_or(i64::MAX)
}

/// Returns the room that so many bytes may need.
fn whole_blocks(bytes: u64) -> i64 {
    i64::try_from(bytes.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX)).unwrap_or(i64::MAX)
}

impl Quota {
    /// Limits the tree of a source, and counts what it holds. That may be more than the limits: then nothing can grow.
    ///
    /// # Errors
    /// A part of the tree cannot be read.
    pub fn new(source: Arc<dyn FileSystem>, limits: Limits) -> std::result::Result<Self, CountError> {
        let features = Features { backing: false, ..source.features() };
        let quota = Self {
            source,
            limits,
            features,
            bytes: Account::new(limits.bytes),
            files: Account::new(limits.files.unwrap_or(u64::MAX)),
            charges: Charges::default(),
            dirs: [const { CacheAligned(Mutex::new(())) }; DIR_LOCKS],
            removals: Removals::default(),
            counting: RwLock::default(),
            counter: Arc::default(),
        };
        let counted = quota.walk()?;
        quota.bytes.settle(0, counted.bytes);
        quota.files.settle(0, counted.files);
        Ok(quota)
    }

    /// Returns the usage of the tree.
    pub fn usage(&self) -> Usage {
        let positive = |account: &Account| u64::try_from(account.balance().used).unwrap_or(0);
        Usage { bytes: positive(&self.bytes), files: positive(&self.files) }
    }

    /// Reserves room for a change of the tree; also requests a count if there is none.
    fn reserve_bytes(&self, bytes: u64) -> Result<Reservation<'_>> {
        self.bytes.reserve(whole_blocks(bytes)).ok_or_else(|| self.is_full())
    }

    fn reserve_file(&self) -> Result<Reservation<'_>> {
        self.files.reserve(1).ok_or_else(|| self.is_full())
    }

    /// Returns the error of a change that does not fit, and requests a count: others may have made room.
    fn is_full(&self) -> Errno {
        self.counter.request();
        Errno::NOSPC
    }

    /// Returns the charge of an inode that the caller is about to change.
    fn hold(&self, cx: &Caller<'_>, ino: Ino) -> Result<Held<'_>> {
        self.charges.begin(ino, || self.source.getattr(cx, ino, None).map(|attr| storage(&attr)))
    }

    /// As [`Self::hold`], by an open handle: the client may have dropped its references.
    fn hold_open(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) -> Result<Held<'_>> {
        self.charges.begin(ino, || self.source.getattr(cx, ino, Some(handle)).map(|attr| storage(&attr)))
    }

    /// Measures the growth of an inode after a change, by the handle that was used, if there was one.
    fn measure(&self, cx: &Caller<'_>, held: &Held<'_>, handle: Option<Handle>, reservation: Option<Reservation<'_>>) {
        // The client may have dropped its references, or it may have named a handle that does not exist.
        let found = || self.source.getattr(cx, held.ino, handle).or_else(|_| self.source.getattr(cx, held.ino, None));
        held.charge().settle(&self.bytes, reservation, || found().map(|attr| storage(&attr)));
    }

    /// As [`Self::measure`], and ends the use of the charge.
    fn settle(&self, cx: &Caller<'_>, held: Held<'_>, reservation: Option<Reservation<'_>>) {
        self.measure(cx, &held, None, reservation);
        self.put_back(held);
    }

    /// Ends the use of a charge. The last user of an inode without a name releases its room.
    fn put_back(&self, held: Held<'_>) {
        let ino = held.ino;
        held.charge().give_back(|count| self.source.forget(ino, count));
        drop(held);
        // Afterwards: who removed the last name before leaves the room to the last user.
        if self.charges.is_orphan(ino) {
            self.collect(ino);
        }
    }

    /// Releases the room of an inode without a name, if it has no users.
    fn collect(&self, ino: Ino) {
        if self.source.getattr(&Caller::default(), ino, None) != Err(Errno::STALE) {
            return;
        }
        let _removal = self.removals.begin();
        if let Some(charge) = self.charges.remove(ino, |charge| charge.is_orphan() && !charge.is_open()) {
            self.bytes.settle(0, -charge.bytes());
            self.files.settle(0, -1);
        }
    }

    /// Opens a file or directory by `open`, and counts its handle.
    fn counting_open(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        truncates: bool,
        open: impl FnOnce() -> Result<Handle>,
    ) -> Result<Handle> {
        let held = self.hold(cx, ino)?;
        held.charge().add_open();
        let opened = {
            let _removal = truncates.then(|| self.removals.begin());
            let _layout = truncates.then(|| lock(&held.charge().layout));
            let opened = open();
            if truncates {
                self.measure(cx, &held, opened.as_ref().ok().copied(), None);
            }
            opened
        };
        if opened.is_err() {
            held.charge().remove_open();
        }
        self.put_back(held);
        opened
    }

    /// Closes a handle by `close`, and its count.
    fn counting_release(&self, cx: &Caller<'_>, ino: Ino, close: impl FnOnce()) {
        let no_count = self.counting.try_read();
        close();
        let Some(held) = self.charges.get(ino) else { return };
        // XFS frees storage that it allocated in advance. A count under way may have found that already.
        if no_count.is_ok() && held.charge().has_changed() {
            self.measure(cx, &held, None, None);
        }
        drop(no_count);
        held.charge().remove_open();
        self.put_back(held);
    }

    /// The lock of the names in a directory.
    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below DIR_LOCKS")]
    fn dir_lock(&self, dir: Ino) -> usize {
        (dir.0 % DIR_LOCKS as u64) as usize
    }

    fn lock_names(&self, dir: Ino) -> MutexGuard<'_, ()> {
        lock(&self.dirs[self.dir_lock(dir)])
    }
}

impl FileSystem for Quota {
    fn features(&self) -> Features {
        self.features
    }

    fn changes(&self) -> Option<&Changes> {
        self.source.changes()
    }

    fn is_watched(&self, ino: Ino) -> bool {
        self.source.is_watched(ino)
    }

    fn migrate(&self) -> Option<&dyn Migrate> {
        self.source.migrate().is_some().then_some(self)
    }

    ferry_vfs::delegate!(self => self.source;
        lookup, lookup_parent, lookup_self, getattr, getattr_hint, readlink, read, flush, fsync, readdir, fsyncdir, syncfs,
        getxattr, listxattr, mode_without_acl, access, get_lock, set_lock, lseek);

    // In the modules `data` and `names`.
    ferry_vfs::delegate!(self => self;
        setattr, mknod, mkdir, symlink, link, unlink, rmdir, rename, create, tmpfile, write, fallocate, copy_file_range, ioctl);

    fn forget(&self, ino: Ino, count: u64) {
        if let Some(held) = self.charges.get_or(ino, || self.source.forget(ino, count)) {
            held.charge().forget(count);
            self.put_back(held);
        }
    }

    fn open(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        let truncates = flags.contains(OFlags::TRUNC);
        self.counting_open(cx, ino, truncates, || self.source.open(cx, ino, flags))
    }

    fn release(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        self.counting_release(cx, ino, || self.source.release(cx, ino, handle));
    }

    fn opendir(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        self.counting_open(cx, ino, false, || self.source.opendir(cx, ino, flags))
    }

    fn releasedir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        self.counting_release(cx, ino, || self.source.releasedir(cx, ino, handle));
    }

    /// The limits are the size of the file system, as with project quotas of Linux.
    fn statfs(&self, cx: &Caller<'_>, ino: Ino) -> Result<Statfs> {
        let host = self.source.statfs(cx, ino)?;
        self.counter.request();
        let unit = u64::from(host.frsize.max(1));
        let usage = self.usage();
        let blocks = host.blocks.min(self.limits.bytes / unit);
        let free = self.limits.bytes.saturating_sub(usage.bytes) / unit;
        // Some file systems have no number of inodes, and show none.
        let has_files = host.files > 0;
        let (files, ffree) = match self.limits.files {
            Some(files) if has_files => (files.min(host.files), files.saturating_sub(usage.files).min(host.ffree)),
            Some(files) => (files, files.saturating_sub(usage.files)),
            None => (host.files, host.ffree),
        };
        Ok(Statfs { blocks, bfree: host.bfree.min(free), bavail: host.bavail.min(free), files, ffree, ..host })
    }

    fn setxattr(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
        clear_sgid: bool,
    ) -> Result<()> {
        let reservation = self.reserve_bytes((name.len() + value.len()) as u64)?;
        let held = self.hold(cx, ino)?;
        // A shorter value may free a block.
        let _removal = self.removals.begin();
        let set = self.source.setxattr(cx, ino, name, value, flags, clear_sgid);
        self.settle(cx, held, Some(reservation));
        set
    }

    fn removexattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<()> {
        let held = self.hold(cx, ino)?;
        let _removal = self.removals.begin();
        let removed = self.source.removexattr(cx, ino, name);
        self.settle(cx, held, None);
        removed
    }
}
