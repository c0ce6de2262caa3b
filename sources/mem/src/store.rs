//! The tree's lower edge: where the bytes of files live, and where its changes are written down.
//!
//! The tree (names, attributes, extended attributes) is in memory for every store. A [`Store`] has two duties:
//!
//! * **Data**: each regular file may have a [`Store::File`], made when the first byte is about to be written and
//!   removed when the inode ends. Empty files have none. The store is the authority on what [`Usage`] holds.
//! * **Journal**: every change of the tree is described by one [`Record`] and given to [`Store::log`].
//!
//! # The order of records
//!
//! A record is logged **before** its change is applied and **with the locks of all inodes that it changes held**.
//! If `log` fails, nothing is applied and the caller gets the error; if it succeeds, applying cannot fail. So the order
//! of the calls of `log` is the order of the changes, wherever two changes touch the same inode, and replaying the
//! records in the order in which `log` was called gives the same tree. A record is atomic: either all of it is replayed
//! or nothing.
//!
//! `log` is called from many threads and must neither call back into the tree nor wait for another call of the tree.
//! What needs the whole tree at rest (a checkpoint) is done in [`Store::admit`], which is called before every change
//! while the thread holds no lock: there [`Tree::checkpoint`](crate::Tree::checkpoint) may be called.
//!
//! Data and records are not ordered by the tree. Times that a write moves are logged when a handle is flushed, synced or
//! released, not at each write.

use std::fmt::Debug;
use std::sync::Arc;

use ferry_vfs::{Backing, Data, FallocateFlags, FileId, Ino, Input, Name, Output, Result, Seek, Timespec};

use crate::machine::kernel_time;
use crate::tree::Tree;

/// The attributes of an inode that are the tree's to keep (size and blocks are the store's).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// File type and permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node.
    pub rdev: u32,
    /// Last access.
    pub atime: Timespec,
    /// Last change of the data.
    pub mtime: Timespec,
    /// Last change of the inode.
    pub ctime: Timespec,
    /// Birth.
    pub btime: Timespec,
}

/// A place in the tree: a directory and a name in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At<'a> {
    /// The directory.
    pub dir: Ino,
    /// The name.
    pub name: Name<'a>,
}

/// An extended attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Xattr<'a> {
    /// The full name, with its namespace.
    pub name: &'a [u8],
    /// The value.
    pub value: &'a [u8],
}

/// One change of the tree. `time` is the new mtime and ctime of the directories whose names change, and the new ctime
/// of the inodes whose number of names changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// An inode was made, with all that it has from its birth. The directory's time becomes `meta.ctime`. The number is
    /// new, except [`Ino::ROOT`], whose record (without a place) gives the root its attributes.
    Make {
        /// The inode.
        ino: Ino,
        /// Its attributes; the file type in `mode` never changes.
        meta: Meta,
        /// The target of a symbolic link, else empty.
        target: &'a [u8],
        /// Extended attributes (inherited ACLs).
        xattrs: &'a [Xattr<'a>],
        /// Its first name; `None` for a temporary file, which ends with its last handle unless it is linked.
        at: Option<At<'a>>,
    },
    /// An inode that is no directory got one more name.
    Link {
        /// The inode.
        ino: Ino,
        /// The new name.
        at: At<'a>,
        /// When.
        time: Timespec,
    },
    /// A name went (unlink and rmdir). An inode without names lives on until its [`Record::Free`].
    Unlink {
        /// The name.
        at: At<'a>,
        /// When.
        time: Timespec,
    },
    /// A name was moved. What `to` meant before loses that name.
    Rename {
        /// The old name.
        from: At<'a>,
        /// The new name.
        to: At<'a>,
        /// The two names change places instead.
        exchange: bool,
        /// The inode, made by this very record, of a whiteout (character device 0:0) that is left at `from`, with its
        /// attributes.
        whiteout: Option<(Ino, Meta)>,
        /// When.
        time: Timespec,
    },
    /// The attributes of an inode are these now.
    Attr {
        /// The inode.
        ino: Ino,
        /// All its attributes.
        meta: Meta,
    },
    /// An extended attribute was set or removed.
    Xattr {
        /// The inode.
        ino: Ino,
        /// The full name.
        name: &'a [u8],
        /// The value; `None` when it was removed.
        value: Option<&'a [u8]>,
        /// All attributes of the inode after it (an ACL may change the mode).
        meta: Meta,
    },
    /// An inode without names lost its last user; its data are removed after this. An inode that has no name at the
    /// end of a replay is freed too: [`crate::Replay::finish`] logs this record for it.
    Free {
        /// The inode.
        ino: Ino,
    },
}

/// What the store knows of a file's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Size in bytes.
    pub size: u64,
    /// Allocated space, in units of 512 bytes.
    pub blocks: u64,
    /// Access and modification time where the store keeps them (because bytes move without the tree's knowledge):
    /// they then win over the tree's, which are told by [`Store::set_times`] when somebody sets them.
    /// With `None` the tree moves the times itself whenever [`Store::read`] or [`Store::write`] is called.
    pub times: Option<(Timespec, Timespec)>,
}

/// How a write is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteAt {
    /// Offset of the first byte; does not matter when appending.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// Write at the end of the file (`O_APPEND`).
    pub append: bool,
    /// The bytes must be durable when the call (or the transfer to the extent) ends: `O_SYNC` or `O_DSYNC`.
    pub sync: bool,
}

/// Totals of a store, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// All that data can take.
    pub total: u64,
    /// What is free of it.
    pub free: u64,
}

/// See the module's documentation.
///
/// All methods are called from many threads. Those that change the size or the allocation of a file are called with the
/// inode's lock held exclusively, reads and writes with it held shared.
pub trait Store: Sized + Send + Sync + Debug + 'static {
    /// The data of an inode, open: one for all handles of an inode, dropped with the last handle.
    type File: Send + Sync + Debug;

    /// Whether [`Self::log`] does anything. Where it does not, no record is ever built.
    const JOURNALED: bool;

    /// Whether [`Usage::times`] always are the store's.
    const KEEPS_TIMES: bool = false;

    /// The clock that changes of the tree are stamped by. Where the kernel stamps data files it is the kernel's, or times of one tree
    /// would run backwards from one change to the next; elsewhere it is the finest there is, so that a change is never before
    /// a clock that was read before it, nor before a change of another inode.
    fn now() -> Timespec {
        if Self::KEEPS_TIMES { kernel_time() } else { Timespec::now() }
    }

    /// Takes down a change that is about to be made. An error (`NOSPC`, `IO`) refuses it.
    ///
    /// # Errors
    /// `NOSPC` when the journal is full, `IO` when it cannot be written.
    fn log(&self, record: &Record<'_>) -> Result<()>;

    /// Called before each change, with no lock held: the place for a checkpoint.
    ///
    /// # Errors
    /// What the caller of the change is to be told instead.
    fn admit(&self, _tree: &Tree<Self>) -> Result<()> {
        Ok(())
    }

    /// Opens the data of an inode, making them (empty) if there are none. New data have these times.
    ///
    /// # Errors
    /// `NOSPC`, `NFILE`, `IO`.
    fn open(&self, ino: Ino, times: (Timespec, Timespec)) -> Result<Self::File>;

    /// The last handle of an inode is closed, and its file about to be dropped. The inode's lock is held exclusively.
    fn closing(&self, _file: &Self::File) {}

    /// Size and blocks of an inode's data, all zero if it has none. `file` is given when it is open.
    ///
    /// # Errors
    /// `IO`.
    fn usage(&self, ino: Ino, file: Option<&Self::File>) -> Result<Usage>;

    /// Whether [`Self::backing`] answers.
    fn has_backing(&self) -> bool {
        false
    }

    /// The descriptor that the file is, as a whole.
    fn backing(&self, _file: &Self::File) -> Option<Arc<Backing>> {
        None
    }

    /// Which file of the host an inode's data are, for stores that have [`Self::backing`]; `None` if it has none.
    fn file_id(&self, _ino: Ino) -> Option<FileId> {
        None
    }

    /// Reads: see [`ferry_vfs::FileSystem::read`].
    ///
    /// # Errors
    /// `IO`.
    fn read(&self, file: &Self::File, offset: u64, len: u32, out: &mut dyn Output) -> Result<Data>;

    /// Writes: see [`ferry_vfs::FileSystem::write`].
    ///
    /// # Errors
    /// `NOSPC`, `FBIG`, `IO`.
    fn write(&self, file: &Self::File, at: WriteAt, input: &mut dyn Input) -> Result<Data>;

    /// Sets the size.
    ///
    /// # Errors
    /// `FBIG`, `NOSPC`, `IO`.
    fn truncate(&self, file: &Self::File, size: u64) -> Result<()>;

    /// Allocates, punches and so on.
    ///
    /// # Errors
    /// `OPNOTSUPP` for a mode that it has not, `NOSPC`, `INVAL`, `IO`.
    fn fallocate(&self, file: &Self::File, offset: u64, len: u64, flags: FallocateFlags) -> Result<()>;

    /// The next data or hole.
    ///
    /// # Errors
    /// `NXIO` beyond the end.
    fn seek(&self, file: &Self::File, offset: u64, seek: Seek) -> Result<u64>;

    /// Copies between files, or within one; returns how many bytes, possibly less than asked.
    ///
    /// # Errors
    /// `INVAL` when the ranges of one file overlap, `NOSPC`, `IO`.
    fn copy(&self, from: (&Self::File, u64), to: (&Self::File, u64), len: u64) -> Result<u64>;

    /// Somebody set access and modification time; only called where [`Usage::times`] are the store's. `file` is given
    /// when it is open.
    ///
    /// # Errors
    /// `IO`.
    fn set_times(&self, _ino: Ino, _file: Option<&Self::File>, _times: (Timespec, Timespec)) -> Result<()> {
        Ok(())
    }

    /// Makes an inode's data durable and, unless `data_only`, all records logged for it: see
    /// [`ferry_vfs::FileSystem::fsync`]. Also called for directories, without a file.
    ///
    /// # Errors
    /// `IO`, `NOSPC`.
    fn fsync(&self, ino: Ino, file: Option<&Self::File>, data_only: bool) -> Result<Option<Arc<Backing>>>;

    /// Makes everything durable.
    ///
    /// # Errors
    /// `IO`, `NOSPC`.
    fn sync(&self) -> Result<()>;

    /// Removes the data of an inode that ended, if it has any. Its file is not open.
    fn remove(&self, ino: Ino);

    /// Totals.
    ///
    /// # Errors
    /// `IO`.
    fn space(&self) -> Result<Space>;
}
