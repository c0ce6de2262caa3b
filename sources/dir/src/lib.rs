//! A host directory as a source of Ferry: local semantics, bounded descriptors, few system calls.
//!
//! ```
//! use ferry_dir::{Dir, Options};
//! use ferry_vfs::{Caller, FileSystem, Ino, Name, CreateArgs, OFlags};
//!
//! # let share = tempfile::tempdir().expect("a directory");
//! let dir = Dir::open(share.path(), Options::default())?;
//! let cx = Caller::default();
//! let new = CreateArgs { mode: 0o644, ..CreateArgs::default() };
//! let (entry, handle) = dir.create(&cx, Ino::ROOT, Name::new(b"hello")?, &new, OFlags::RDWR)?;
//! dir.release(&cx, entry.ino, handle);
//! dir.forget(entry.ino, 1);
//! assert!(share.path().join("hello").exists());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How inodes are found
//!
//! A name is looked up with `statx` relative to an `O_PATH` descriptor of its directory: one component, without
//! following links. So no lookup leaves the share, whatever the host or a client renames meanwhile.
//!
//! * On file systems with **file handles** (and with the privilege to use them: `CAP_DAC_READ_SEARCH`) the source
//!   stores an inode's handle. It opens a descriptor when an operation needs one, and caches it within a budget while
//!   it is used ([`Dir::begin`]).
//! * Elsewhere the source stores an `O_PATH` descriptor, and beyond the budget the directory and name. The inode found
//!   there must be the same, otherwise the operation fails with `ESTALE`.
//!
//! On ext4, XFS, btrfs, tmpfs and others with handles of the same form, an inode's number is its encrypted handle. So
//! the inode is found by number ([`FileSystem::lookup_self`]) even after its last reference was released. This holds
//! for inodes of the share's own file system, on XFS up to 512 GiB.
//!
//! When the process or the host runs out of descriptors, cached ones are evicted and the call is retried: the limits
//! never make a name vanish. An inode that loses its last name while a client references it is pinned.
//!
//! Device nodes, FIFOs and sockets are created and listed, never opened. Regular files are opened only through a
//! descriptor or a handle whose type was checked, so an open never blocks on another type.
//!
//! # System calls
//!
//! Per operation, with file handles and without (`tests/it/syscalls.rs` counts them under strace). "Held" is an inode
//! with a cached descriptor; an operation that opens one caches it for the next.
//!
//! | operation | handles | path |
//! | --- | --- | --- |
//! | lookup: new inode / known / held / no such name | 2 / 2 / 1 / 1 | 3 / 1 / 1 / 1 |
//! | getattr: first / later, or by handle | 2 / 1 | 1 / 1 |
//! | open: first / later | 3 / 1 | 1 / 1 |
//! | read, write, fsync (answered as extents), flush | 0 | 0 |
//! | release; forget of a held inode | 1 | 1 |
//! | create (5 more for a caller with another uid and gid) | 3 | 3 |
//! | mkdir, mknod, symlink | 3 | 4 |
//! | unlink, rmdir of a known inode / of a held one | 3 / 2 | 2 / 2 |
//! | rename to a new name | 2 | 3 |
//! | setattr: one change and the answer | 2 | 2 |
//! | opendir | 1 | 1 |
//! | readdir, per 32 KiB of names | 1 | 1 |
//! | readdirplus, besides: per new inode / held | 2 / 1 | 3 / 1 |
//! | getxattr, setxattr, listxattr, removexattr | 1 | 1 |
//! | POSIX lock: an owner's first / later, unlock | 2 / 1 | 2 / 1 |
//!
//! # Threads
//!
//! A thread that creates inodes gets its own umask and working directory with `unshare(CLONE_FS)`. A thread that
//! creates them for another user drops the server's supplementary groups. All other ids and capabilities are restored
//! before a call returns. [`Dir::open`] opens `/proc/self/fd` once: a process that forks must open its shares
//! afterwards.
#![deny(unsafe_code)]

mod attrs;
mod cache;
mod creds;
mod identity;
mod int_hasher;
mod io;
mod ioctl;
mod locks;
mod mount;
mod names;
mod number;
mod readdir;
mod resolve;
mod search;
mod sys;
mod table;
mod watch;
mod xattr;

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use ferry_vfs::{
    Attr, Backing, ByNumber, Caller, Changes, CopyRange, CreateArgs, Data, DirOutput, DirRange, Entry, Errno,
    FallocateFlags, Features, FileSystem, Handle, Handles, Ino, Input, IoRange, Lock, LockOutcome, Mappable, Migrate,
    Name, OFlags, Output, RenameFlags, Result, Seek, SetAttr, Statfs, Waiter, XattrFlags, openable,
};
use rustix::fs::Mode;

use crate::cache::{Cache, IdleEvictor};
use crate::creds::Creds;
use crate::io::Open;
use crate::locks::HostLocks;
use crate::mount::Mounts;
use crate::number::HandleNumbers;
use crate::table::{FoundInode, Inode, Table};
use crate::watch::{Directories, Watch};

#[cfg(fuzzing)]
pub use crate::identity::fuzz as fuzz_identity;
pub use crate::watch::{OwnChanges, WatchError, WatchKind, can_watch};

/// How a directory is shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Refuse every change.
    pub read_only: bool,
    /// Report other host file systems below as submounts ([`Attr::submount`]), so inode numbers are unique within each.
    pub submounts: bool,
    /// Pass `O_DIRECT` on to the host. Without it, the flag only disables the client's cache.
    pub direct_io: bool,
    /// The client caches writes: files that it writes must be readable, too, and it places appended data itself.
    pub writeback: bool,
    /// Use host file handles where they work.
    pub file_handles: bool,
    /// The maximum number of descriptors for inodes; `None` derives it from the process's limit, which all shares have together.
    pub descriptors_max: Option<usize>,
    /// The maximum number of directories that [`Dir::watch`] watches where it cannot watch the file system; `None`:
    /// 65,536. The kernel may allow fewer (`fs.inotify.max_user_watches`).
    pub watches_max: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            read_only: false,
            submounts: false,
            direct_io: false,
            writeback: false,
            file_handles: true,
            descriptors_max: None,
            watches_max: None,
        }
    }
}

/// Why a directory cannot be shared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The path does not exist.
    #[error("cannot share {path}: there is no such directory", path = .0.display())]
    Missing(PathBuf),
    /// The path is not a directory.
    #[error("cannot share {path}: it is not a directory", path = .0.display())]
    NotADirectory(PathBuf),
    /// The server may not read the directory.
    #[error("cannot share {path}: this user may not read it", path = .0.display())]
    Permission(PathBuf),
    /// /proc is needed to open files of the share.
    #[error("cannot share {path}: cannot open /proc/self/fd; is /proc mounted?", path = .0.display())]
    Proc(PathBuf, #[source] Errno),
    /// Another error of the host.
    #[error("cannot share {path}", path = .0.display())]
    Host(PathBuf, #[source] Errno),
}

/// The resources that a [`Dir`] currently holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Inodes that clients reference.
    pub inodes: usize,
    /// Open files and directories.
    pub handles: usize,
    /// `O_PATH` descriptors of inodes.
    pub descriptors: usize,
    /// The maximum number of these, besides unlinked inodes that clients still use.
    pub descriptors_max: usize,
    /// Watched directories, if directories are watched.
    pub watches: usize,
}

/// A host directory. See the crate documentation.
#[derive(Debug)]
pub struct Dir {
    options: Options,
    features: Features,
    root: Arc<Inode>,
    table: Arc<Table>,
    cache: Arc<Cache>,
    mounts: Mounts,
    handles: Handles<Open>,
    locks: HostLocks,
    changes: Changes,
    creds: Creds,
    /// /proc/self/fd.
    proc_fds: OwnedFd,
    watch: OnceLock<Watch>,
    idle_evictor: OnceLock<Option<IdleEvictor>>,
    /// A client checks modes without ACLs. See [`Dir::look_for_acl`].
    looks_for_acls: AtomicBool,
    /// When a client last came too late to an inode. See [`Dir::hold_found`].
    last_stale: resolve::LastStale,
}

impl Dir {
    /// Returns whether inodes of the directory's own file system are found by file handles.
    pub fn has_file_handles(&self) -> bool {
        self.root.found.mount.handles().is_some()
    }

    /// Opens a directory to be shared. Raises the process's limit of open files as far as allowed.
    ///
    /// # Errors
    ///
    /// [`OpenError`] says in one sentence what is wrong with the path.
    pub fn open(path: impl AsRef<Path>, options: Options) -> std::result::Result<Self, OpenError> {
        let path = path.as_ref();
        let wrong = |errno| match errno {
            Errno::NOENT => OpenError::Missing(path.into()),
            Errno::NOTDIR => OpenError::NotADirectory(path.into()),
            Errno::ACCESS | Errno::PERM => OpenError::Permission(path.into()),
            errno => OpenError::Host(path.into(), errno),
        };
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let proc_fds = rustix::fs::open("/proc/self/fd", flags | OFlags::PATH, Mode::empty())
            .map_err(|errno| OpenError::Proc(path.into(), errno))?;
        let fd = rustix::fs::open(path, flags | OFlags::PATH, Mode::empty()).map_err(wrong)?;
        // Sharing a directory that cannot be listed is probably a mistake.
        rustix::fs::openat(&fd, ".", flags | OFlags::RDONLY, Mode::empty()).map_err(wrong)?;
        let st = resolve::statx(fd.as_fd(), b"").map_err(wrong)?;
        let key = resolve::key(&st);
        let mounts = Mounts::new(options.file_handles);
        let mount = mounts.get(key.mount, resolve::kind(&st), fd.as_fd(), proc_fds.as_fd());
        let btime = resolve::btime(&st);
        let kind = resolve::kind(&st);
        let numbers = HandleNumbers::new(fd.as_fd(), &mount);
        let by_number = if numbers.is_some() { ByNumber::Host } else { ByNumber::No };
        let found = FoundInode { key, kind, btime, mount, handle: None, mount_root: false, verified: true };
        let (table, root) = Table::new(found, numbers);
        let cache = Cache::new(options.descriptors_max);
        root.set_pinned(true);
        cache.keep(&table, &root, cache.wrap(fd));
        let mut dir = Self {
            features: Features {
                read_only: options.read_only,
                posix_acl: false,
                posix_locks: true,
                flock: true,
                backing: true,
                waits: false,
                direct: options.direct_io,
                by_number,
                events: true,
                constant: false,
            },
            options,
            root,
            table: Arc::new(table),
            cache: Arc::new(cache),
            mounts,
            handles: Handles::default(),
            locks: HostLocks::default(),
            changes: Changes::default(),
            creds: Creds::detect(),
            proc_fds,
            watch: OnceLock::new(),
            idle_evictor: OnceLock::new(),
            looks_for_acls: AtomicBool::new(false),
            last_stale: resolve::LastStale::never(),
        };
        let acl = dir.getxattr(&Caller::default(), Ino::ROOT, b"system.posix_acl_access");
        dir.features.posix_acl = !matches!(acl, Err(Errno::OPNOTSUPP | Errno::NOSYS));
        Ok(dir)
    }

    /// Starts the thread that closes idle descriptors: of files after at most 10 seconds, of directories after 20. So
    /// files that others delete on the host release their space, unless a client has them open. It has no effect unless
    /// the directory has persistent file handles, and only closes descriptors of inodes that their handles find again.
    /// Further calls have no effect.
    pub fn begin(&self) {
        if !(self.has_file_handles() && self.root.found.mount.handles_survive_eviction) {
            return;
        }
        self.idle_evictor.get_or_init(|| {
            let started = IdleEvictor::start(&self.cache, &self.table);
            let complain = |error: &std::io::Error| {
                tracing::warn!(
                    "files that are deleted on the host take room there until clients forget them: no thread can be started: {error}"
                );
            };
            started.inspect_err(complain).ok()
        });
    }

    /// Returns the current use of resources, for monitoring and tests.
    pub fn usage(&self) -> Usage {
        Usage {
            inodes: self.table.len(),
            handles: self.handles.len(),
            descriptors: self.cache.open(),
            descriptors_max: self.cache.budget(),
            watches: self.table.directories().map_or(0, Directories::len),
        }
    }
}

impl FileSystem for Dir {
    fn features(&self) -> Features {
        self.features
    }

    fn changes(&self) -> Option<&Changes> {
        Some(&self.changes)
    }

    fn is_watched(&self, ino: Ino) -> bool {
        match self.table.directories() {
            Some(directories) => {
                directories.has_all() || self.table.get(ino).is_ok_and(|inode| directories.is_watched(&inode))
            }
            None => true,
        }
    }

    fn migrate(&self) -> Option<&dyn Migrate> {
        Some(self)
    }

    fn mappable(&self) -> Option<&dyn Mappable> {
        Some(self)
    }

    ferry_vfs::delegate!(self => self;
        lookup, lookup_parent, lookup_self, getattr, setattr, readlink, mknod, mkdir, symlink, link, unlink, rmdir, rename,
        create, tmpfile, write, flush, release, opendir, readdir, syncfs, statfs, getxattr, listxattr, setxattr,
        removexattr, mode_without_acl, access, set_lock, ioctl, fallocate, lseek, copy_file_range);

    fn forget(&self, ino: Ino, count: u64) {
        self.table.forget(ino, count);
    }

    fn open(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        self.open_inode(cx, ino, flags)
    }

    fn backing(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) -> Option<Arc<Backing>> {
        self.handles.with(cx.session, ino, handle, |open| Ok(Arc::clone(&open.file))).ok()
    }

    fn read(&self, cx: &Caller<'_>, at: &IoRange, _: &mut dyn Output) -> Result<Data> {
        self.extent(cx, at)
    }

    fn fsync(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, _: bool) -> Result<Option<Arc<Backing>>> {
        self.handles.with(cx.session, ino, handle, |open| Ok(Some(Arc::clone(&open.file))))
    }

    fn fsyncdir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        self.fsync(cx, ino, handle, data_only)
    }

    fn releasedir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        self.release(cx, ino, handle);
    }

    fn get_lock(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, lock: &Lock) -> Result<Option<Lock>> {
        self.locks.table.get(&self.handles, cx, (ino, handle), lock)
    }
}

impl Mappable for Dir {
    fn map(&self, _: &Caller<'_>, ino: Ino, writes: bool) -> Result<Arc<Backing>> {
        let inode = self.table.get(ino)?;
        openable(inode.found.kind)?;
        if writes && self.options.read_only {
            return Err(Errno::ROFS);
        }
        let access = if writes { OFlags::RDWR } else { OFlags::RDONLY };
        self.open_data(&inode, access).map(|file| Arc::new(Backing::new(file)))
    }
}
