//! The operations of a file system.

use std::sync::Arc;

use crate::{
    Attr, Backing, Caller, Changes, CopyRange, CreateArgs, Data, DirItem, DirRange, Entry, Errno, FallocateFlags,
    Features, FileType, Handle, Ino, IoRange, Lock, LockOutcome, Mappable, Migrate, Name, OFlags, RenameFlags, Result,
    Seek, SetAttr, Statfs, Waiter, XattrFlags,
};

/// The destination of a read. It is the export's memory; the source gets no slice of it because a guest may change it
/// at any time.
pub trait Output {
    /// Appends bytes and returns how many fitted.
    fn put(&mut self, bytes: &[u8]) -> usize;
}

/// The data of a write.
pub trait Input {
    /// Reads the next bytes and returns their number, which is less than requested only at the end.
    fn take(&mut self, bytes: &mut [u8]) -> usize;
}

/// The destination of a directory listing.
pub trait DirOutput {
    /// Returns whether an entry of this name still fits. Call it before taking a reference for [`Self::push`].
    fn fits(&self, name: &[u8]) -> bool;
    /// Returns whether the entry of this name is wanted, if entries were requested ([`DirRange::plus`]). Called once
    /// per name, in order. It lets a source skip an expensive lookup.
    fn wants(&mut self, name: &[u8], kind: FileType) -> bool {
        let _ = (name, kind);
        true
    }
    /// Appends an entry that fits, with its `entry` if the client requested it ([`DirRange::plus`]).
    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>);
}

impl Output for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) -> usize {
        self.extend_from_slice(bytes);
        bytes.len()
    }
}

impl Input for &[u8] {
    fn take(&mut self, bytes: &mut [u8]) -> usize {
        let count = bytes.len().min(self.len());
        let (now, later) = self.split_at(count);
        bytes[..count].copy_from_slice(now);
        *self = later;
        count
    }
}

/// A file system that exports can serve. See the crate documentation for the rules and an example.
///
/// Unless a method says otherwise: the default returns `NOSYS` (the [`guide`](crate::guide#what-is-not-written) explains
/// what that means to programs); an unknown inode is `STALE`, an unknown handle `BADF`; the other errors are those of the
/// Linux system call of the same name.
#[allow(unused_variables, reason = "the defaults need none of their arguments")]
pub trait FileSystem: Send + Sync {
    /// Returns the optional features of this file system.
    fn features(&self) -> Features {
        Features::default()
    }

    /// Returns the channel on which this file system publishes changes.
    fn changes(&self) -> Option<&Changes> {
        None
    }

    /// Returns whether [`Self::changes`] publishes every change of an inode that others make outside this process, of a
    /// directory's names, too. If not, clients that are told of changes keep what they know of it for a second at most.
    fn is_watched(&self, ino: Ino) -> bool {
        true
    }

    /// Returns the methods by which another process finds this file system's inodes and open files again. `None`: the
    /// server cannot be restarted under its clients, and a client cannot be migrated to another host.
    fn migrate(&self) -> Option<&dyn Migrate> {
        None
    }

    /// Returns the methods that map files into a client's memory (the DAX window of virtio-fs). `None`: files cannot be
    /// mapped.
    fn mappable(&self) -> Option<&dyn Mappable> {
        None
    }

    /// Returns what this file system counts beside requests, for its metrics: names such as `image_fetched_bytes_total`,
    /// without `ferry_`, and values. A name that ends in `_total` is that of a counter, which never decreases.
    fn counts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Looks a name up in a directory.
    fn lookup(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        Err(Errno::NOSYS)
    }

    /// Finds the parent of a directory (the name `..`, which is no [`Name`]); the root is its own parent.
    fn lookup_parent(&self, cx: &Caller<'_>, dir: Ino) -> Result<Entry> {
        Err(Errno::NOSYS)
    }

    /// Finds an inode by its number alone (the name `.`, which is no [`Name`]): the client has dropped its references
    /// and then opens a file handle (`open_by_handle_at(2)`, an NFS server). Called only for clients that
    /// [`Features::by_number`] allows. The default returns `STALE`.
    fn lookup_self(&self, cx: &Caller<'_>, ino: Ino) -> Result<Entry> {
        Err(Errno::STALE)
    }

    /// Drops `count` references to an inode.
    fn forget(&self, ino: Ino, count: u64) {}

    /// Returns the attributes of an inode, through an open handle if the client has one.
    fn getattr(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        Err(Errno::NOSYS)
    }

    /// Returns attributes of an open file without waiting, for the client's kernel to learn the file's size. They are
    /// neither shown to users nor cached, so times may be older than the last write. For sources whose
    /// [`Self::getattr`] may wait. `None`: use [`Self::getattr`].
    fn getattr_hint(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) -> Option<Attr> {
        None
    }

    /// Changes attributes and returns the new ones.
    fn setattr(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        Err(Errno::NOSYS)
    }

    /// Returns the target of a symbolic link. Other inodes are `INVAL`.
    fn readlink(&self, cx: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        Err(Errno::NOSYS)
    }

    /// Creates a file that is neither a directory nor a symbolic link.
    fn mknod(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        Err(Errno::NOSYS)
    }

    /// Creates a directory.
    fn mkdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        Err(Errno::NOSYS)
    }

    /// Creates a symbolic link. The target is any non-empty path without NUL.
    fn symlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        Err(Errno::NOSYS)
    }

    /// Creates a hard link.
    fn link(&self, cx: &Caller<'_>, ino: Ino, dir: Ino, name: Name<'_>) -> Result<Entry> {
        Err(Errno::NOSYS)
    }

    /// Removes a name of a file that is not a directory.
    fn unlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Removes an empty directory.
    fn rmdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Renames `from` to `to`, each a directory and a name (`renameat2`). Flags that the source does not support are `INVAL`.
    fn rename(&self, cx: &Caller<'_>, from: (Ino, Name<'_>), to: (Ino, Name<'_>), flags: RenameFlags) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Opens a file. `flags` never contain `O_CREAT` or `O_EXCL`. Refuse a device node, FIFO or socket: the client's
    /// kernel opens those itself. `O_TRUNC` does not clear suid and sgid: an export whose client has no right to keep
    /// them truncates by [`Self::setattr`] instead.
    fn open(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        Err(Errno::NOSYS)
    }

    /// Creates a file and opens it. `flags` always contains `O_EXCL`. `EXIST` if the name exists: the client's kernel
    /// then looks it up and checks whether the caller may open it.
    fn create(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        name: Name<'_>,
        new: &CreateArgs,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        Err(Errno::NOSYS)
    }

    /// Creates an unnamed file and opens it (`O_TMPFILE`). [`Self::link`] can name it later.
    fn tmpfile(&self, cx: &Caller<'_>, dir: Ino, new: &CreateArgs, flags: OFlags) -> Result<(Entry, Handle)> {
        Err(Errno::NOSYS)
    }

    /// Returns a descriptor that has the same bytes at the same offsets, and the same size, as the open file. An export
    /// that can pass it to the client's kernel (FUSE passthrough) does so, and then gets no reads and writes of this
    /// file; every handle of an inode must return the same file. Clients still get size and times by [`Self::getattr`].
    /// Needs [`Features::backing`].
    fn backing(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) -> Option<Arc<Backing>> {
        None
    }

    /// Reads from an open file. At the end of the file the result is shorter than requested.
    fn read(&self, cx: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        Err(Errno::NOSYS)
    }

    /// Writes to an open file. Returning an extent means that nothing is written yet: the export writes, and then
    /// publishes [`crate::Change::Data`].
    ///
    /// A write whose flags have `O_DSYNC` or `O_SYNC` must be durable before the reply. After [`Data::Bytes`] the export
    /// calls [`Self::fsync`] for that (`data_only` unless it is `O_SYNC`); a source whose data is durable already returns
    /// `None` there. The descriptor of an extent must have been opened with the flag, because the export only
    /// transfers.
    fn write(&self, cx: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        Err(Errno::NOSYS)
    }

    /// Called when this owner closes a descriptor of the handle. Releases the owner's POSIX locks on the inode and
    /// returns errors of earlier writes.
    fn flush(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, owner: u64) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Closes a handle, and releases the flock locks and waiters that belong to it.
    fn release(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {}

    /// Makes data (and, unless `data_only`, attributes) durable. Returning a descriptor means that nothing is done yet:
    /// the export then calls fsync on it without blocking other requests.
    fn fsync(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        Err(Errno::NOSYS)
    }

    /// Opens a directory for listing.
    fn opendir(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        Err(Errno::NOSYS)
    }

    /// Lists a directory from an offset, until `out` is full or the end is reached. A name that exists throughout is
    /// listed exactly once, whatever is created or removed meanwhile.
    fn readdir(&self, cx: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Closes a directory handle.
    fn releasedir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {}

    /// Makes the names in a directory durable; see [`Self::fsync`].
    fn fsyncdir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        Err(Errno::NOSYS)
    }

    /// Makes everything durable. It may take long; exports call it on a thread where it blocks nothing else.
    fn syncfs(&self, cx: &Caller<'_>, ino: Ino) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Returns the totals of the file system. If it returns `NOSYS`, clients see zeros.
    fn statfs(&self, cx: &Caller<'_>, ino: Ino) -> Result<Statfs> {
        Err(Errno::NOSYS)
    }

    /// Returns the value of an extended attribute. `name` is not empty and contains no NUL. An attribute that does not
    /// exist is `NODATA`, a namespace that the source does not support `OPNOTSUPP`.
    fn getxattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        Err(Errno::NOSYS)
    }

    /// Returns the names of all extended attributes, each terminated by NUL. The export filters them for the caller
    /// ([`Caller::visible_xattrs`]).
    fn listxattr(&self, cx: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        Err(Errno::NOSYS)
    }

    /// Sets an extended attribute; `EXIST` or `NODATA` if `flags` ask for another state. With `clear_sgid`, clears sgid if a caller outside the file's group sets an ACL
    /// (`FUSE_SETXATTR_ACL_KILL_SGID`).
    fn setxattr(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
        clear_sgid: bool,
    ) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Removes an extended attribute; `NODATA` if it does not exist.
    fn removexattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Returns the mode of an inode with these attributes for clients that do not check ACLs: it allows no user more than
    /// the ACL does. (Linux shows an ACL's mask as the permissions of the group.)
    fn mode_without_acl(&self, cx: &Caller<'_>, ino: Ino, attr: &Attr) -> u32 {
        if self.features().posix_acl { crate::mode_without_acl(self, cx, ino, attr) } else { attr.mode }
    }

    /// Checks the caller's permission (`R_OK`, `W_OK`, `X_OK` bits of unistd.h). Clients with `default_permissions` never call it.
    fn access(&self, cx: &Caller<'_>, ino: Ino, mask: u32) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Returns a lock that conflicts with `lock`, or `None`. For [`LockKind::Unlock`](crate::LockKind::Unlock), which Linux
    /// sends for `F_OFD_GETLK` since 6.7: the first lock of the same owner in the range.
    fn get_lock(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, lock: &Lock) -> Result<Option<Lock>> {
        Err(Errno::NOSYS)
    }

    /// Acquires, converts or releases a lock without blocking. On a conflict it returns `AGAIN` without a waiter, and
    /// [`LockOutcome::Waiting`] with one, which it wakes when the lock is granted. `DEADLK` if the wait would never end. A
    /// waiter that is not kept must be [dismissed](Waiter::dismiss). A waiter whose client has cancelled the wait
    /// ([`Waiter::is_waiting`]) gets no lock.
    fn set_lock(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        lock: &Lock,
        wait: Option<Waiter>,
    ) -> Result<LockOutcome> {
        if let Some(waiter) = wait {
            waiter.dismiss();
        }
        Err(Errno::NOSYS)
    }

    /// Carries out an ioctl whose argument is plain data: `input` is its input, and the result (at most `out_bytes_max`
    /// bytes) its output. Return `NOTTY`, as the default does, for an ioctl that is not known to be safe. The source must check whether the
    /// caller may: Linux checks owner and capabilities for `FS_IOC_SETFLAGS` and `FS_IOC_FSSETXATTR` only, since 5.13,
    /// and not for the numbers of 32-bit programs.
    fn ioctl(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        command: u32,
        input: &[u8],
        out_bytes_max: usize,
    ) -> Result<Vec<u8>> {
        Err(Errno::NOTTY)
    }

    /// Allocates, punches, zeroes, collapses or inserts `len` bytes of a file at `offset`. Flags that the source does not
    /// support are `OPNOTSUPP`.
    fn fallocate(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        offset: u64,
        len: u64,
        flags: FallocateFlags,
    ) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Returns the offset of the next data or hole at or after `offset`, in bytes. An offset at or past the end of the file is `NXIO`.
    fn lseek(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, offset: u64, seek: Seek) -> Result<u64> {
        Err(Errno::NOSYS)
    }

    /// Copies within the source. Returns the number of bytes copied, which may be less than requested. Ranges of one file
    /// that overlap are `INVAL`.
    fn copy_file_range(&self, cx: &Caller<'_>, copy: &CopyRange) -> Result<u64> {
        Err(Errno::NOSYS)
    }
}
