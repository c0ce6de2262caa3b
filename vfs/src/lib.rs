//! The contract between Ferry's *sources* (what is shared) and its *exports* (the ways to reach it).
//!
//! A source is one Rust type that implements [`FileSystem`]; an export turns requests of its protocol
//! (FUSE, 9P) into calls of it. Nothing else stands between the two, so any source goes through any export.
//!
//! # The rules
//!
//! * **Inodes** are numbers ([`Ino`]) that the source chooses; [`Ino::ROOT`] is the root. Every [`Entry`] that a
//!   method returns carries one reference to its inode; the export gives references back with
//!   [`FileSystem::forget`], also for clients that vanish. An inode with references stays usable, unlinked or not.
//! * **Handles** ([`Handle`]) are open files and directories; each is released as often as the source returned it.
//! * **Data** is returned as bytes or as an [`Extent`], a descriptor and an offset: see [`Data`].
//!   The export then chooses the cheapest transfer for its boundary.
//! * **Errors** are [`Errno`]s. A method that a source does not override returns [`Errno::NOSYS`], unless it says otherwise.
//! * **Permissions** are checked by the client's kernel (exports mount with `default_permissions`);
//!   the [`Caller`] is the owner of new files.
//! * **Calls** come from many threads at once. None may wait for long: a lock that must wait keeps its
//!   [`Waiter`]; transfers, fsync and the like can be left to the export as extents.
//! * **Changes** ([`Change`]) are published by the code that makes them, so that all exports of a source agree. The
//!   export publishes data that clients write.
//! * **A panic** in a method is `EIO` for its caller only.
//!
//! Disks have a separate contract, [`Disk`]: one range of bytes instead of a tree of files. Reads and writes return the
//! same types.
//!
//! DAX, restart and migration have separate traits, [`Mappable`] and [`Migrate`], which a source may offer.
//!
//! The [`guide`] explains what may wait, how to avoid deadlocks, what `ENOSYS` means to programs, and how
//! `posix_fadvise`, mappings and ioctls reach a source. The crate `ferry-fs` turns a file system into a program.
//!
//! # A complete file system
//!
//! Files of a fixed size in one directory, which all users may create, write, read, list and remove. To stay short, it
//! counts no references, so the contents of an open file end with its name, and a panic under its lock would end all:
//!
//! ```
//! use ferry_vfs::*;
//! use std::{collections::BTreeMap, sync::Mutex};
//!
//! const FILE_BYTES: usize = 4096;
//!
//! struct File { ino: Ino, bytes: Vec<u8> }
//!
//! #[derive(Default)]
//! struct Flat { files: Mutex<BTreeMap<NameBuf, File>>, next: std::sync::atomic::AtomicU64 }
//!
//! impl Flat {
//!     fn attr(&self, ino: Ino) -> Attr {
//!         match ino {
//!             Ino::ROOT => Attr::new(ino, FileType::Directory, 0o755),
//!             _ => Attr::new(ino, FileType::RegularFile, 0o644).with_size(FILE_BYTES as u64),
//!         }
//!     }
//!     fn with_file<T>(&self, ino: Ino, f: impl FnOnce(&mut File) -> T) -> Result<T> {
//!         let mut files = self.files.lock().unwrap();
//!         files.values_mut().find(|file| file.ino == ino).map(f).ok_or(Errno::STALE)
//!     }
//! }
//!
//! impl FileSystem for Flat {
//!     fn lookup(&self, _: &Caller, _dir: Ino, name: Name<'_>) -> Result<Entry> {
//!         let files = self.files.lock().unwrap();
//!         let file = files.get(name.as_bytes()).ok_or(Errno::NOENT)?;
//!         Ok(Entry::new(file.ino, self.attr(file.ino)))
//!     }
//!
//!     fn getattr(&self, _: &Caller, ino: Ino, _: Option<Handle>) -> Result<Attr> {
//!         Ok(self.attr(ino))
//!     }
//!
//!     fn create(&self, cx: &Caller, dir: Ino, name: Name<'_>, _: &CreateArgs, _: OFlags) -> Result<(Entry, Handle)> {
//!         let next = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
//!         let file = File { ino: Ino(next + 2), bytes: vec![0; FILE_BYTES] };
//!         let mut files = self.files.lock().unwrap();
//!         if files.contains_key(name.as_bytes()) {
//!             return Err(Errno::EXIST);
//!         }
//!         files.insert(name.to_buf(), file);
//!         drop(files);
//!         Ok((self.lookup(cx, dir, name)?, Handle(0)))
//!     }
//!
//!     fn unlink(&self, _: &Caller, _dir: Ino, name: Name<'_>) -> Result<()> {
//!         self.files.lock().unwrap().remove(name.as_bytes()).map(drop).ok_or(Errno::NOENT)
//!     }
//!
//!     fn open(&self, _: &Caller, _: Ino, _: OFlags) -> Result<Handle> {
//!         Ok(Handle(0))
//!     }
//!
//!     fn read(&self, _: &Caller, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
//!         self.with_file(at.ino, |file| at.read_from(&file.bytes, out))
//!     }
//!
//!     fn write(&self, _: &Caller, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
//!         self.with_file(at.ino, |file| at.write_to(&mut file.bytes, input, FILE_BYTES as u64))?
//!     }
//!
//!     fn opendir(&self, _: &Caller, _: Ino, _: OFlags) -> Result<Handle> {
//!         Ok(Handle(0))
//!     }
//!
//!     fn readdir(&self, _: &Caller, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
//!         let files = self.files.lock().unwrap();
//!         // The inode number serves as position; the list must be in that order.
//!         let mut names: Vec<_> = files.iter().map(|(name, file)| (file.ino.0, name, file.ino)).collect();
//!         names.sort_unstable();
//!         let names = names.into_iter().map(|(at, name, ino)| (at, name.as_name(), Entry::new(ino, self.attr(ino))));
//!         at.list(out, Ino::ROOT, names, |_| ());
//!         Ok(())
//!     }
//! }
//!
//! let fs = Flat::default();
//! let cx = Caller::default();
//! let (entry, handle) = fs.create(&cx, Ino::ROOT, Name::new(b"hello")?, &CreateArgs::default(), OFlags::RDWR)?;
//! let at = IoRange { ino: entry.ino, handle, offset: 0, len: 5, flags: OFlags::RDWR, clear_privileges: false, owner: None };
//! assert_eq!(fs.write(&cx, &at, &mut b"ferry".as_slice())?.bytes(), Some(5));
//! let mut out = Vec::new();
//! assert_eq!(fs.read(&cx, &at, &mut out)?.bytes(), Some(5));
//! assert_eq!(out, b"ferry");
//! # Ok::<(), Errno>(())
//! ```
#![deny(unsafe_code)]

pub mod acl;
mod attr;
mod backing;
mod change;
pub mod checks;
mod delegate;
mod disk;
mod event;
mod fs;
pub mod guide;
mod handles;
mod locks;
mod mappable;
mod memory;
mod migrate;
mod name;
mod names;
mod random;
mod ratelimited_log;
mod removal;
pub mod sync;
mod types;

pub use acl::mode_without_acl;
pub use attr::{openable, without_privileges};
pub use backing::{Backing, Extent, Memory, Piece, Segment};
pub use change::{Change, Changes, DeliveryGuard, Listener, Subscription};
pub use disk::{BlockRange, Disk, DiskFeatures, Geometry, SizeChange};
pub use event::{Event, Place};
pub use fs::{DirOutput, FileSystem, Input, Output};
pub use handles::Handles;
pub use locks::{Lockable, Locks};
pub use mappable::Mappable;
pub use migrate::{IdentityScope, Migrate, MigrateLayer};
pub use name::{Name, NameBuf};
pub use names::Names;
pub use random::{RandomKey, random_u64};
pub use ratelimited_log::RatelimitedLog;
pub use removal::Removals;
pub use rustix::fs::{FallocateFlags, FileType, OFlags, RenameFlags, XattrFlags};
/// A typed error number, as Linux names them.
pub use rustix::io::Errno;
pub use types::{
    Attr, ByNumber, Caller, Cancellation, CopyRange, CreateArgs, Data, DirItem, DirRange, Entry, Features, Handle, Ino,
    IoRange, Lock, LockKind, LockOutcome, LockOwner, Seek, SessionId, SetAttr, SetTime, Statfs, Timespec, Waiter,
};

/// The result of every method of the contract.
pub type Result<T> = std::result::Result<T, Errno>;
