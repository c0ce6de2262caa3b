//! The memory file system, volatile ([`Mem`]) and persistent: full POSIX behaviour, with each file's bytes where the
//! client's kernel can reach them without a copy by us.
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
//! # How it is put together
//!
//! [`Tree`] has names, inodes and attributes, in memory, for both kinds. Below it a [`store::Store`] has the bytes, and takes
//! down every change as a [`store::Record`] before it is made. The volatile store ([`Tmpfs`]) keeps bytes in a private
//! tmpfs and takes nothing down.
//!
//! # Threads
//!
//! Inodes are in a sharded table, each with a lock of its own; reads and writes take it shared, for as long as it takes to
//! answer where the bytes are. Nothing is allocated by a lookup, read or write.
//!
//! # Times
//!
//! While an inode has data, access and modification time are those of its data file, because bytes move there without our
//! knowledge; times that somebody sets are set there too. A change of the modification time that we did not make moves
//! ctime along.
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

/// What a memory file system is to be like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The most that files' data may take, rounded up to whole pages; `None` for half of the machine's memory, as tmpfs
    /// does.
    pub size_bytes: Option<u64>,
    /// The most inodes; `None` for one for each two pages of memory, as tmpfs does, but no more than one for each KiB of the size.
    /// Names after the first, long targets of symbolic links and extended attributes count, too, by 1024 bytes to an inode, as
    /// in tmpfs: so all of these together take no more than the data may.
    pub inodes_max: Option<u64>,
    /// Use huge pages where a file is large enough for one.
    pub huge: bool,
    /// Let the kernel swap data out.
    pub swap: bool,
    /// Refuse every change.
    pub read_only: bool,
    /// Keep data in memfds even where a private tmpfs is possible.
    pub memfds: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { size_bytes: None, inodes_max: None, huge: false, swap: true, read_only: false, memfds: false }
    }
}

/// Why there is no memory file system.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The size is too small or too large.
    #[error("a memory file system cannot have {0} bytes; give it from 4096 bytes to {max} bytes", max = i64::MAX)]
    Size(u64),
    /// There must be room for the root at least.
    #[error("a memory file system cannot have {0} inodes; give it at least 2, of which the root is one")]
    Inodes(u64),
    /// The private tmpfs cannot be made.
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
    /// No way to keep data from being swapped.
    #[error("this kernel's tmpfs cannot do without swap (Linux 6.4 or later can); allow swap")]
    NoSwap(#[source] Errno),
    /// Options that only a mount has.
    #[error(
        "huge pages and doing without swap need a private tmpfs, which this user may not mount; run as root, or leave these options out"
    )]
    NeedsMount(#[source] Errno),
    /// The tree cannot be made.
    #[error("the empty tree cannot be made")]
    Tree(#[source] ReplayError),
}

const SIZE_BYTES_MIN: u64 = 4096;
const INODES_MIN: u64 = 2;

impl Tree<Tmpfs> {
    /// Makes an empty memory file system. It is gone when it is dropped.
    ///
    /// # Errors
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
