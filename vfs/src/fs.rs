//! The verbs of the contract.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::{
    Attr, Backing, Caller, Changes, Copy, Data, DirItem, DirRange, Entry, Errno, FallocateFlags, Features, FileType,
    Handle, Ino, IoRange, Lock, Locked, Name, New, OFlags, Piece, RenameFlags, Result, Seek, SetAttr, Statfs, Waiter,
    XattrFlags,
};

/// Where the bytes of a read go: the export's memory, of which the source sees no slice because a guest may be
/// changing it.
pub trait Output {
    /// Appends bytes; answers how many there was room for.
    fn put(&mut self, bytes: &[u8]) -> usize;
}

/// Where the bytes of a write come from.
pub trait Input {
    /// Takes the next bytes; answers how many there were, less than asked only at the end.
    fn take(&mut self, bytes: &mut [u8]) -> usize;
}

/// Where a directory listing goes.
pub trait DirOutput {
    /// Whether an entry of this name still fits. Ask before taking a reference for [`Self::push`].
    fn fits(&self, name: &[u8]) -> bool;
    /// Whether the entry of a name that fits is wanted, where entries were asked for ([`DirRange::plus`]). To be asked
    /// once for each name, in their order: whoever finds entries at a price can save it.
    fn wants(&mut self, name: &[u8], kind: FileType) -> bool {
        let _ = (name, kind);
        true
    }
    /// Appends an entry that fits; `entry` goes along when the client asked for it ([`DirRange::plus`]).
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

/// A file system that can be shared. See the crate's front page for the rules and an example.
///
/// Unless a method says otherwise: what is not overridden answers `NOSYS` (what that means to programs is in the
/// [`guide`](crate::guide#what-is-not-written)); an unknown inode is `STALE`, an unknown handle `BADF`; the other errors
/// are those of the Linux system call of the same name.
#[allow(unused_variables, reason = "the defaults need none of their arguments")]
pub trait FileSystem: Send + Sync {
    /// What this file system has beyond the plain calls.
    fn features(&self) -> Features {
        Features::default()
    }

    /// Where changes of this file system are published.
    fn changes(&self) -> Option<&Changes> {
        None
    }

    /// Finds a name in a directory.
    fn lookup(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        Err(Errno::NOSYS)
    }

    /// Finds the parent of a directory (the name `..`, which is no [`Name`]); the root is its own.
    fn lookup_parent(&self, cx: &Caller<'_>, dir: Ino) -> Result<Entry> {
        Err(Errno::NOSYS)
    }

    /// Finds an inode of which the client has kept the number only (the name `.`, which is no [`Name`]): it gave its
    /// references back, and then somebody came with a file handle (`open_by_handle_at(2)`, an NFS server). Only called for clients
    /// that [`Features::by_number`] allows it.
    fn lookup_self(&self, cx: &Caller<'_>, ino: Ino) -> Result<Entry> {
        Err(Errno::STALE)
    }

    /// Gives back `count` references of an inode.
    fn forget(&self, ino: Ino, count: u64) {}

    /// The attributes of an inode, through an open handle where the client has one.
    fn getattr(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        Err(Errno::NOSYS)
    }

    /// Attributes of an open file that a client's kernel wants for itself, to know where the file ends: no user is told
    /// them, and nobody keeps them, so times may be older than the last write. For sources that have [`Self::getattr`]
    /// wait for something; `None` if it does not now.
    fn glance(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) -> Option<Attr> {
        None
    }

    /// Changes attributes; answers the new ones.
    fn setattr(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        Err(Errno::NOSYS)
    }

    /// The target of a symbolic link.
    fn readlink(&self, cx: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        Err(Errno::NOSYS)
    }

    /// Makes a file that is no directory and no symbolic link.
    fn mknod(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &New) -> Result<Entry> {
        Err(Errno::NOSYS)
    }

    /// Makes a directory.
    fn mkdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &New) -> Result<Entry> {
        Err(Errno::NOSYS)
    }

    /// Makes a symbolic link; the target is any path, not empty and without NUL.
    fn symlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        Err(Errno::NOSYS)
    }

    /// Gives an inode one more name.
    fn link(&self, cx: &Caller<'_>, ino: Ino, dir: Ino, name: Name<'_>) -> Result<Entry> {
        Err(Errno::NOSYS)
    }

    /// Removes a name of a file that is no directory.
    fn unlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Removes an empty directory.
    fn rmdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Renames `from` to `to`, each a directory and a name (`renameat2`).
    fn rename(&self, cx: &Caller<'_>, from: (Ino, Name<'_>), to: (Ino, Name<'_>), flags: RenameFlags) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Opens a file. Flags that only make sense when a file is made (`O_CREAT`, `O_EXCL`) never arrive.
    /// A device node, FIFO or socket is refused: it is the client's kernel that opens those. `O_TRUNC` does not clear
    /// suid and sgid: an export whose client has no right to keep them truncates by [`Self::setattr`] instead.
    fn open(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        Err(Errno::NOSYS)
    }

    /// Makes a file and opens it; `flags` always has `O_EXCL`. `EXIST` where the name is there: what has it the caller may not be
    /// allowed to open, which its own kernel decides once it has looked again.
    fn create(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &New, flags: OFlags) -> Result<(Entry, Handle)> {
        Err(Errno::NOSYS)
    }

    /// Makes a file without a name and opens it (`O_TMPFILE`); [`Self::link`] can name it later.
    fn tmpfile(&self, cx: &Caller<'_>, dir: Ino, new: &New, flags: OFlags) -> Result<(Entry, Handle)> {
        Err(Errno::NOSYS)
    }

    /// The descriptor that an open file is, as a whole: the same bytes at the same offsets, and the same size. An
    /// export that can hand it to the client's kernel (FUSE passthrough) does, and then sees no reads and writes of
    /// this file; every handle of an inode must answer the same file. The size and times of such an inode are
    /// asked for with [`Self::getattr`] as always. Needs [`Features::backing`].
    fn backing(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) -> Option<Arc<Backing>> {
        None
    }

    /// A descriptor of a regular file, as a whole, to be mapped into a client's memory (the DAX window of virtio-fs): the
    /// same bytes at the same offsets, open for reading, and for writing too if `writes`. There need be no handle: Linux
    /// asks by inode. It stays valid when the file is unlinked. What the client does through the mapping nobody sees;
    /// its size it changes by other calls: whoever makes such a file shorter says so before ([`crate::Windows::shortening`]). Needs
    /// [`Features::mappable`].
    fn map(&self, cx: &Caller<'_>, ino: Ino, writes: bool) -> Result<Arc<Backing>> {
        Err(Errno::NOSYS)
    }

    /// Where the bytes of a part of a regular file are, to be mapped into a client's memory that reads them only, for sources whose
    /// files are no descriptors as a whole and never change: piece by piece, in order, up to the end of the part or the file. `offset`
    /// and `len` are whole pages of 4 KiB; each piece but the last is, too. It is asked before [`Self::map`].
    fn map_pieces(&self, cx: &Caller<'_>, ino: Ino, offset: u64, len: u64) -> Result<Vec<Piece>> {
        Err(Errno::NOSYS)
    }

    /// Reads from an open file. At the end of the file the answer is shorter than asked.
    fn read(&self, cx: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        Err(Errno::NOSYS)
    }

    /// Writes to an open file. Answering an extent means that nothing is written yet: the export will, and then
    /// publishes the [`crate::Change::Data`].
    ///
    /// A write whose flags have `O_DSYNC` or `O_SYNC` is durable when the client is answered. After
    /// [`Data::Bytes`] the export calls [`Self::fsync`] for that (`data_only` unless it is `O_SYNC`), so a source need
    /// do nothing, and one that is durable already answers `None` there. An extent's descriptor is to be one that
    /// was opened with the flag, as [`Self::open`] was: the export only transfers.
    fn write(&self, cx: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        Err(Errno::NOSYS)
    }

    /// A descriptor of the client's handle was closed by this owner: give up the POSIX locks that it holds on the
    /// inode, and tell errors of earlier writes.
    fn flush(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, owner: u64) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Ends a handle, with the flock locks and waiters that came through it.
    fn release(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {}

    /// Makes data (and, unless `data_only`, attributes) durable. Answering a descriptor means that nothing is
    /// done yet: the export is to fsync that, without holding up other requests.
    fn fsync(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        Err(Errno::NOSYS)
    }

    /// Opens a directory for listing.
    fn opendir(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        Err(Errno::NOSYS)
    }

    /// Lists a directory from an offset on, until `out` is full or there is no more. Names that stay are listed
    /// once, whatever else comes and goes meanwhile.
    fn readdir(&self, cx: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Ends a directory handle.
    fn releasedir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {}

    /// Makes the names in a directory durable; see [`Self::fsync`].
    fn fsyncdir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        Err(Errno::NOSYS)
    }

    /// Makes everything durable. May take long: exports call it where it holds up nothing else.
    fn syncfs(&self, cx: &Caller<'_>, ino: Ino) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Totals of the file system. Where this answers `NOSYS`, clients are shown zeros.
    fn statfs(&self, cx: &Caller<'_>, ino: Ino) -> Result<Statfs> {
        Err(Errno::NOSYS)
    }

    /// The value of an extended attribute. `name` has neither NUL nor zero length.
    fn getxattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        Err(Errno::NOSYS)
    }

    /// The names of all extended attributes, each ended by NUL. The export shows the caller those that are for it
    /// ([`Caller::xattrs_shown`]).
    fn listxattr(&self, cx: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        Err(Errno::NOSYS)
    }

    /// Sets an extended attribute. `clear_sgid` asks to clear sgid when an ACL is set by somebody outside the
    /// file's group (`FUSE_SETXATTR_ACL_KILL_SGID`).
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

    /// Removes an extended attribute.
    fn removexattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// The mode to show, of an inode with these attributes, to clients that do not check ACLs by themselves: one that gives nobody more
    /// than the ACL does. (Linux shows an ACL's mask as the permissions of the group.)
    fn mode_without_acl(&self, cx: &Caller<'_>, ino: Ino, attr: &Attr) -> u32 {
        if self.features().posix_acl { crate::mode_without_acl(self, cx, ino, attr) } else { attr.mode }
    }

    /// Checks the caller's permission (`R_OK`, `W_OK`, `X_OK` bits); clients with `default_permissions` never ask.
    fn access(&self, cx: &Caller<'_>, ino: Ino, mask: u32) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// A lock that conflicts with `lock`, or `None`.
    fn get_lock(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, lock: &Lock) -> Result<Option<Lock>> {
        Err(Errno::NOSYS)
    }

    /// Takes, changes or gives up a lock, and never waits itself. On a conflict: `AGAIN` without a waiter;
    /// with one, [`Locked::Waiting`], and the waiter is woken when the lock is granted. `DEADLK` where the wait
    /// would never end. A waiter that is not kept must be [dismissed](Waiter::dismiss), and one whose client has
    /// given up ([`Waiter::is_waiting`]) gets no lock.
    fn set_lock(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, lock: &Lock, wait: Option<Waiter>) -> Result<Locked> {
        if let Some(waiter) = wait {
            waiter.dismiss();
        }
        Err(Errno::NOSYS)
    }

    /// An ioctl whose argument is plain data: `input` goes in, the answer (at most `out_bytes_max`) comes back.
    /// What is not known to be safe is `NOTTY`. Whether the caller may, is for the source to say: Linux looks at owner and capabilities
    /// for `FS_IOC_SETFLAGS` and `FS_IOC_FSSETXATTR` only, since 5.13, and not for the numbers that 32-bit programs use.
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

    /// Allocates, punches, zeroes, collapses or inserts a range of a file.
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

    /// The offset of the next data or hole.
    fn lseek(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, offset: u64, seek: Seek) -> Result<u64> {
        Err(Errno::NOSYS)
    }

    /// Copies within the source; answers how many bytes, possibly less than asked.
    fn copy_file_range(&self, cx: &Caller<'_>, copy: &Copy) -> Result<u64> {
        Err(Errno::NOSYS)
    }

    /// How another process, which shares the same files, finds an inode again: bytes that mean something to its
    /// [`Self::adopt`] only. They stay good, whatever happens to the inode's name, if that is possible `within` these bounds.
    fn identify(&self, ino: Ino, within: Bounds) -> Result<Vec<u8>> {
        Err(Errno::NOSYS)
    }

    /// What [`Self::identify`] would answer for inodes that it does not find any more, because they are where nobody has seen
    /// them: looks for them in the whole tree, and answers those that are there. The client stands still meanwhile, so a source gives
    /// up after a while.
    fn search(&self, inos: &[Ino], within: Bounds) -> Vec<(Ino, Vec<u8>)> {
        Vec::new()
    }

    /// Whether what [`Self::identify`] answers for what is in this directory depends on its name.
    fn follows_names(&self, dir: Ino) -> bool {
        false
    }

    /// Lets an inode be known by the number that it had in another process, with so many references. The `identity` was
    /// made `within` these bounds. Only within [`Bounds::Host`] it comes from where no client can write; from elsewhere it
    /// may be anybody's, and leads to nothing that a lookup would not lead to, but within [`Bounds::Handles`], where its writer
    /// is trusted with handles. `file` is open, and leads to the inode if the identity does not any more.
    fn adopt(
        &self,
        ino: Ino,
        references: u64,
        (identity, within): (&[u8], Bounds),
        file: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        Err(Errno::NOSYS)
    }

    /// Opens a file or directory under the number that it had in another process, with the flags that it was opened
    /// with there, or takes the descriptor that it had there.
    fn adopt_open(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        flags: OFlags,
        file: Option<OwnedFd>,
    ) -> Result<()> {
        Err(Errno::NOSYS)
    }
}

/// Between which processes an inode is to be found again ([`FileSystem::identify`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bounds {
    /// On this host, while nothing is mounted anew.
    Host,
    /// Wherever the same tree is, by names.
    Paths,
    /// The same, and only if that is the same file: on hosts that share a file system.
    CheckedPaths,
    /// On hosts that share a file system, whatever the file is called by then.
    Handles,
}
