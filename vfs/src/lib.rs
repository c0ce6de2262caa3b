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
//! * **Handles** ([`Handle`]) are open files and directories; each is released exactly once.
//! * **Data** is answered as bytes or as an [`Extent`] ("these bytes live in that descriptor"): see [`Data`].
//!   The export then picks the cheapest way that its boundary has.
//! * **Errors** are [`Errno`]s. A method that a source does not override answers [`Errno::NOSYS`].
//! * **Permission** is the client kernel's to check (exports mount with `default_permissions`);
//!   the [`Caller`] says on whose behalf new files are made.
//! * **Calls** come from many threads at once. None may wait for long: a lock that must wait parks its
//!   [`Waiter`]; transfers, fsync and the like can be left to the export's engine as extents.
//! * **Changes** ([`Change`]) are published by whoever makes them, so that several exports of one source agree.
//!
//! # A complete file system
//!
//! Files of a fixed size that anybody may create, write, read, list and remove, all in one directory:
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
//!         let (kind, permissions, size) = match ino {
//!             Ino::ROOT => (FileType::Directory, 0o755, 0),
//!             _ => (FileType::RegularFile, 0o644, FILE_BYTES as u64),
//!         };
//!         Attr { ino: ino.0, mode: kind.as_raw_mode() | permissions, nlink: 1, size, ..Attr::default() }
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
//!         Ok(Entry { ino: file.ino, generation: 0, attr: self.attr(file.ino) })
//!     }
//!
//!     fn getattr(&self, _: &Caller, ino: Ino, _: Option<Handle>) -> Result<Attr> {
//!         Ok(self.attr(ino))
//!     }
//!
//!     fn create(&self, cx: &Caller, dir: Ino, name: Name<'_>, _: &New, _: OFlags) -> Result<(Entry, Handle)> {
//!         let next = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
//!         let file = File { ino: Ino(next + 2), bytes: vec![0; FILE_BYTES] };
//!         self.files.lock().unwrap().entry(name.to_buf()).or_insert(file);
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
//!         self.with_file(at.ino, |file| {
//!             let start = (at.offset as usize).min(FILE_BYTES);
//!             let end = (start + at.len as usize).min(FILE_BYTES);
//!             Data::Bytes(out.put(&file.bytes[start..end]))
//!         })
//!     }
//!
//!     fn write(&self, _: &Caller, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
//!         self.with_file(at.ino, |file| {
//!             let start = (at.offset as usize).min(FILE_BYTES);
//!             let end = (start + at.len as usize).min(FILE_BYTES);
//!             match input.take(&mut file.bytes[start..end]) {
//!                 0 => Err(Errno::NOSPC),
//!                 n => Ok(Data::Bytes(n)),
//!             }
//!         })?
//!     }
//!
//!     fn opendir(&self, _: &Caller, _: Ino, _: OFlags) -> Result<Handle> {
//!         Ok(Handle(0))
//!     }
//!
//!     fn readdir(&self, cx: &Caller, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
//!         let files = self.files.lock().unwrap();
//!         for (index, (name, file)) in files.iter().enumerate().skip(at.offset as usize) {
//!             let entry = at.plus.then(|| Entry { ino: file.ino, generation: 0, attr: self.attr(file.ino) });
//!             let item = DirItem { ino: file.ino.0, next: index as u64 + 1, kind: FileType::RegularFile, name: name.as_name().as_bytes() };
//!             if !out.fits(item.name) {
//!                 break;
//!             }
//!             out.push(&item, entry.as_ref());
//!         }
//!         Ok(())
//!     }
//! }
//!
//! let fs = Flat::default();
//! let cx = Caller::default();
//! let (entry, handle) = fs.create(&cx, Ino::ROOT, Name::new(b"hello")?, &New::default(), OFlags::RDWR)?;
//! let at = IoRange { ino: entry.ino, handle, offset: 0, len: 5, flags: OFlags::RDWR, clear_privileges: false, owner: None };
//! assert_eq!(fs.write(&cx, &at, &mut b"ferry".as_slice())?.bytes(), Some(5));
//! let mut out = Vec::new();
//! assert_eq!(fs.read(&cx, &at, &mut out)?.bytes(), Some(5));
//! assert_eq!(out, b"ferry");
//! # Ok::<(), Errno>(())
//! ```
#![forbid(unsafe_code)]

mod change;
mod fs;
mod name;
mod types;

pub use change::{Change, Changes, Subscription};
pub use fs::{DirOutput, FileSystem, Input, Output};
pub use name::{Name, NameBuf};
pub use rustix::fs::{FallocateFlags, FileType, OFlags, RenameFlags, XattrFlags};
/// A typed error number, as Linux names them.
pub use rustix::io::Errno;
pub use types::{
    Attr, Backing, Caller, Copy, Data, DirItem, DirRange, Entry, Extent, Features, Handle, Ino, IoRange, Lock,
    LockKind, LockOwner, Locked, New, Seek, SessionId, SetAttr, SetTime, Statfs, Timespec, Waiter,
};

/// What every method of the contract answers.
pub type Result<T> = std::result::Result<T, Errno>;
