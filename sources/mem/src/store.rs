//! The interface of the tree to its store, which holds the bytes of files and logs changes.
//!
//! The tree (names, attributes, extended attributes) is in memory for every store. A [`Store`] has two duties:
//!
//! * **Data**: each regular file may have a [`Store::File`], created before the first write and removed when the inode
//!   ends. Empty files have none. The store is authoritative for the fields of [`Usage`].
//! * **Journal**: every change of the tree is described by one [`Record`] and given to [`Store::log`].
//!
//! # The order of records
//!
//! A record is logged **before** its change is applied and **with the locks of all changed inodes held**. If `log`
//! fails, nothing is applied and the caller gets the error; if it succeeds, applying cannot fail. So the order of `log`
//! calls is the order of changes to each inode, and replaying the records in that order gives the same tree. A record
//! is atomic: it is replayed completely or not at all.
//!
//! Many threads call `log`; it must neither call back into the tree nor wait for another call of the tree. A checkpoint
//! needs the whole tree at rest, so it is done in [`Store::admit`], which is called before every change while the
//! thread holds no lock: it may call [`Tree::checkpoint`](crate::Tree::checkpoint).
//!
//! The tree does not order data and records. Times of a write are logged when a handle is flushed, synced or released.

use std::fmt::Debug;
use std::sync::Arc;

use ferry_engine::FileId;
use ferry_vfs::{Backing, Data, FallocateFlags, Ino, Input, Name, Output, Result, Seek, Timespec};

use crate::machine::kernel_time;
use crate::tree::Tree;

/// The attributes of an inode that the tree keeps (the store keeps size and blocks).
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

/// A location in the tree: a directory and a name in it.
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

/// One change of the tree. `time` is the new mtime and ctime of the changed directories, and the new ctime of the
/// inodes whose link count changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record<'a> {
    /// An inode was created, with its initial state. The directory's time becomes `meta.ctime`. The number is new,
    /// except [`Ino::ROOT`], whose record (without a location) sets the root's attributes.
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
    /// An inode that is not a directory got another name.
    Link {
        /// The inode.
        ino: Ino,
        /// The new name.
        at: At<'a>,
        /// When.
        time: Timespec,
    },
    /// A name was removed (unlink and rmdir). An inode without names exists until its [`Record::Free`].
    Unlink {
        /// The name.
        at: At<'a>,
        /// When.
        time: Timespec,
    },
    /// A name was moved. The previous inode of `to` loses that name.
    Rename {
        /// The old name.
        from: At<'a>,
        /// The new name.
        to: At<'a>,
        /// The two names are exchanged.
        exchange: bool,
        /// The inode, created by this record, of a whiteout (character device 0:0) at `from`, with its attributes.
        whiteout: Option<(Ino, Meta)>,
        /// When.
        time: Timespec,
    },
    /// The attributes of an inode changed.
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
        /// All attributes of the inode afterwards (an ACL may change the mode).
        meta: Meta,
    },
    /// An inode without names lost its last user; its data are removed afterwards. An inode without a name at the end
    /// of a replay is freed, too: [`crate::Replay::finish`] logs this record for it.
    Free {
        /// The inode.
        ino: Ino,
    },
}

/// The store's attributes of a file's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Size in bytes.
    pub size: u64,
    /// Allocated space, in units of 512 bytes.
    pub blocks: u64,
    /// Access and modification time, if the store keeps them because bytes are transferred without the tree's
    /// knowledge. They then override the tree's, and [`Store::set_times`] sets them. With `None` the tree updates the
    /// times at each [`Store::read`] and [`Store::write`].
    pub times: Option<(Timespec, Timespec)>,
}

/// How to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteAt {
    /// Offset of the first byte; ignored when appending.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// Write at the end of the file (`O_APPEND`).
    pub append: bool,
    /// The bytes must be durable when the call, or the transfer to the extent, ends: `O_SYNC` or `O_DSYNC`.
    pub sync: bool,
}

/// Statistics of a store, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// All that data can take.
    pub total: u64,
    /// What is free of it.
    pub free: u64,
}

/// See the module's documentation.
///
/// Many threads call the methods. Calls that change the size or the allocation of a file hold the inode's lock
/// exclusively, reads and writes hold it shared.
pub trait Store: Sized + Send + Sync + Debug + 'static {
    /// The open data of an inode: one for all its handles, dropped with the last handle.
    type File: Send + Sync + Debug;

    /// Whether [`Self::log`] has an effect. If not, no records are created.
    const JOURNALED: bool;

    /// Whether [`Usage::times`] are always `Some`.
    const KEEPS_TIMES: bool = false;

    /// Returns the time stamp for changes of the tree. If the kernel stamps data files, it is the kernel's clock, so
    /// that the times of one tree never run backwards. Otherwise it is the finest clock, so that a change is never
    /// older than a time read before it, or than an earlier change of another inode.
    fn now() -> Timespec {
        if Self::KEEPS_TIMES { kernel_time() } else { Timespec::now() }
    }

    /// Logs a change before it is applied. An error (`NOSPC`, `IO`) refuses the change.
    ///
    /// # Errors
    /// `NOSPC` when the journal is full, `IO` when it cannot be written.
    fn log(&self, record: &Record<'_>) -> Result<()>;

    /// Called before each change without any lock: the place for a checkpoint.
    ///
    /// # Errors
    ///
    /// The error for the caller of the change.
    fn admit(&self, _tree: &Tree<Self>) -> Result<()> {
        Ok(())
    }

    /// Opens the data of an inode; creates empty data with these times if there are none.
    ///
    /// # Errors
    /// `NOSPC`, `NFILE`, `IO`.
    fn open(&self, ino: Ino, times: (Timespec, Timespec)) -> Result<Self::File>;

    /// Called at the last close of an inode, before its file is dropped. The inode's lock is held exclusively.
    fn closing(&self, _file: &Self::File) {}

    /// Returns size and blocks of an inode's data, all zero if it has none. `file` is given when it is open.
    ///
    /// # Errors
    /// `IO`.
    fn usage(&self, ino: Ino, file: Option<&Self::File>) -> Result<Usage>;

    /// Returns whether [`Self::backing`] returns descriptors.
    fn has_backing(&self) -> bool {
        false
    }

    /// Returns a descriptor of the whole file.
    fn backing(&self, _file: &Self::File) -> Option<Arc<Backing>> {
        None
    }

    /// Returns the host file of an inode's data, for stores with [`Self::backing`]; `None` if it has none.
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
    ///
    /// `OPNOTSUPP` for an unsupported mode, `NOSPC`, `INVAL`, `IO`.
    fn fallocate(&self, file: &Self::File, offset: u64, len: u64, flags: FallocateFlags) -> Result<()>;

    /// The next data or hole.
    ///
    /// # Errors
    /// `NXIO` beyond the end.
    fn seek(&self, file: &Self::File, offset: u64, seek: Seek) -> Result<u64>;

    /// Copies between files, or within one; returns the number of bytes, which may be less than requested.
    ///
    /// # Errors
    /// `INVAL` when the ranges of one file overlap, `NOSPC`, `IO`.
    fn copy(&self, from: (&Self::File, u64), to: (&Self::File, u64), len: u64) -> Result<u64>;

    /// Sets access and modification time, if [`Usage::times`] are the store's. `file` is given when it is open.
    ///
    /// # Errors
    /// `IO`.
    fn set_times(&self, _ino: Ino, _file: Option<&Self::File>, _times: (Timespec, Timespec)) -> Result<()> {
        Ok(())
    }

    /// Makes an inode's data durable and, unless `data_only`, all its records: see [`ferry_vfs::FileSystem::fsync`].
    /// Also called for directories, without a file.
    ///
    /// # Errors
    /// `IO`, `NOSPC`.
    fn fsync(&self, ino: Ino, file: Option<&Self::File>, data_only: bool) -> Result<Option<Arc<Backing>>>;

    /// Makes everything durable.
    ///
    /// # Errors
    /// `IO`, `NOSPC`.
    fn sync(&self) -> Result<()>;

    /// An inode is about to be recorded as freed: nothing is recorded of its data from now on.
    fn end(&self, ino: Ino) {
        let _ = ino;
    }

    /// Removes the data of an inode that ended, if it has any. Its file is not open.
    fn remove(&self, ino: Ino);

    /// Totals.
    ///
    /// # Errors
    /// `IO`.
    fn space(&self) -> Result<Space>;
}
