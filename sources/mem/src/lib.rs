//! The memory file system, volatile ([`Mem`]) and persistent: full POSIX behaviour. Each file's bytes are where the
//! client's kernel can access them without a copy by this process.
//!
//! ```
//! use ferry_mem::{Mem, Options};
//! use ferry_vfs::{Caller, FileSystem, Ino, Name, CreateArgs, OFlags};
//!
//! let mem = Mem::new(&Options { size_bytes: Some(16 << 20), ..Options::default() })?;
//! let cx = Caller::default();
//! let new = CreateArgs { mode: 0o644, ..CreateArgs::default() };
//! let (entry, handle) = mem.create(&cx, Ino::ROOT, Name::new(b"hello")?, &new, OFlags::RDWR)?;
//! mem.release(&cx, entry.ino, handle);
//! mem.forget(entry.ino, 1);
//! assert_eq!(mem.lookup(&cx, Ino::ROOT, Name::new(b"hello")?)?.attr.size, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Structure
//!
//! [`Tree`] has names, inodes and attributes, in memory, for both kinds. Below it a [`store::Store`] has the bytes, and
//! logs every change as a [`store::Record`] before it is applied. The volatile store ([`Tmpfs`]) keeps bytes in a
//! private tmpfs and logs nothing.
//!
//! # Threads
//!
//! Inodes are in a sharded table, each with its own lock. Reads and writes hold it shared while they determine where
//! the bytes are. Lookups, reads and writes do not allocate memory.
//!
//! # Times
//!
//! While an inode has data, its data file has the access and modification time, because bytes are transferred without
//! the tree's knowledge. Times set by a client are set there, too. When the modification time has changed without the
//! tree, ctime changes with it.
#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "three calls of the C library")]
mod machine;
pub mod pmem;
pub mod store;
mod tmpfs;
mod tree;

use ferry_vfs::Errno;

use self::tree::space::INODE_BYTES;

pub use tmpfs::Tmpfs;
pub use tree::{Limits, Replay, ReplayError, Snapshot, Tree, TreeUsage};

/// The volatile memory file system.
pub type Mem = Tree<Tmpfs>;

/// Options of a memory file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The maximum size of all file data in bytes, rounded up to pages; `None`: half of the memory, as in tmpfs.
    pub size_bytes: Option<u64>,
    /// The maximum number of inodes. `None` for one per two pages of memory, as in tmpfs, but at most one per KiB of
    /// the size. Further names, long targets of symbolic links and extended attributes count as one inode per 1024
    /// bytes, as in tmpfs. So all of these together take no more memory than the data may.
    pub inodes_max: Option<u64>,
    /// Use huge pages where a file is large enough for one.
    pub huge: bool,
    /// Let the kernel swap data out.
    pub swap: bool,
    /// Refuse every change.
    pub read_only: bool,
    /// Keep data in memfds even if a private tmpfs is possible.
    pub memfds: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { size_bytes: None, inodes_max: None, huge: false, swap: true, read_only: false, memfds: false }
    }
}

/// Why a memory file system cannot be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The size is out of range.
    #[error("a memory file system cannot have {0} bytes; choose a size from 4096 to {max} bytes", max = i64::MAX)]
    Size(u64),
    /// There must be room for the root.
    #[error("a memory file system cannot have {0} inodes; choose at least 2, including the root")]
    Inodes(u64),
    /// The private tmpfs cannot be created.
    #[error("the private tmpfs that holds the data cannot be made ({what})")]
    Mount {
        /// The step that failed.
        what: &'static str,
        /// Why.
        #[source]
        errno: Errno,
    },
    /// No huge pages.
    #[error("this kernel has no huge pages for tmpfs; leave out the option for huge pages")]
    Huge(#[source] Errno),
    /// Swapping of data cannot be prevented.
    #[error("this kernel's tmpfs cannot do without swap (Linux 6.4 or later can); allow swap")]
    NoSwap(#[source] Errno),
    /// Options that require a mount.
    #[error(
        "huge pages and doing without swap need a private tmpfs, which this user may not mount; run as root, or leave these options out"
    )]
    NeedsMount(#[source] Errno),
    /// The tree cannot be created.
    #[error("the empty tree cannot be made")]
    Tree(#[source] ReplayError),
}

const SIZE_BYTES_MIN: u64 = 4096;
const INODES_MIN: u64 = 2;

impl Tree<Tmpfs> {
    /// Creates an empty memory file system. Its contents are lost when it is dropped.
    ///
    /// # Errors
    ///
    /// [`Error`] says in one sentence what is wrong with the options or the machine.
    pub fn new(options: &Options) -> Result<Self, Error> {
        let info = rustix::system::sysinfo();
        let memory_bytes = info.totalram.saturating_mul(info.mem_unit.into());
        let size_bytes = options.size_bytes.unwrap_or(memory_bytes / 2);
        if !(SIZE_BYTES_MIN..=i64::MAX.unsigned_abs()).contains(&size_bytes) {
            return Err(Error::Size(size_bytes));
        }
        let by_memory = memory_bytes / 4096 / 2;
        let inodes_max = options.inodes_max.unwrap_or(by_memory.min(size_bytes / INODE_BYTES).max(INODES_MIN));
        if inodes_max < INODES_MIN {
            return Err(Error::Inodes(inodes_max));
        }
        let store = Tmpfs::new(options, size_bytes)?;
        let metadata_bytes_max = inodes_max.saturating_mul(INODE_BYTES);
        let limits = Limits { inodes_max, metadata_bytes_max, read_only: options.read_only };
        Replay::new(store, limits).finish().map_err(Error::Tree)
    }
}
