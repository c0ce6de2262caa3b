//! A layer over any source that maps the ids of users and groups ([`Ids`]) and the names of extended attributes
//! ([`Xattrs`]), as virtiofsd does with `--translate-uid` and `--xattrmap`.
//!
//! ```
//! use std::sync::Arc;
//! use ferry_idmap::{Ids, IdMapped, Rule, Xattrs};
//! use ferry_mem::{Mem, Options};
//! use ferry_vfs::{Caller, FileSystem, Ino, Name, CreateArgs};
//!
//! // The guest's root is user 1000 here.
//! let ids = Ids::new(&["map:0:1000:1".parse::<Rule>()?])?;
//! let mem = Arc::new(Mem::new(&Options::default())?);
//! let mapped = IdMapped::new(mem.clone(), ids, Ids::default(), Xattrs::default());
//! let new = CreateArgs { mode: 0o755, ..CreateArgs::default() };
//! let made = mapped.mkdir(&Caller::default(), Ino::ROOT, Name::new(b"d")?, &new)?;
//! assert_eq!(made.attr.uid, 0);
//! assert_eq!(mem.getattr(&Caller::default(), made.ino, None)?.uid, 1000);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! It has no state per inode or file, and returns the source's own extents.
#![forbid(unsafe_code)]

mod acl;
mod capability;
mod ids;
mod optional;
mod xattrs;

use std::borrow::Cow;
use std::sync::Arc;

use ferry_vfs::{
    Attr, Backing, Caller, Changes, CopyRange, CreateArgs, Data, DirItem, DirOutput, DirRange, Entry, Errno,
    FallocateFlags, Features, FileSystem, FileType, Handle, Ino, Input, IoRange, Lock, LockOutcome, Mappable, Migrate,
    Name, OFlags, Output, RenameFlags, Result, Seek, SetAttr, Statfs, Waiter, XattrFlags,
};

pub use crate::ids::{Ids, Rule, RuleError};
pub use crate::xattrs::{XattrError, Xattrs};

/// A source with mapped ids and attribute names. See the crate documentation.
pub struct IdMapped {
    source: Arc<dyn FileSystem>,
    uids: Ids,
    gids: Ids,
    xattrs: Xattrs,
    features: Features,
}

impl std::fmt::Debug for IdMapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { uids, gids, xattrs, .. } = self;
        f.debug_struct("IdMapped")
            .field("uids", uids)
            .field("gids", gids)
            .field("xattrs", xattrs)
            .finish_non_exhaustive()
    }
}

impl IdMapped {
    /// Wraps a source.
    pub fn new(source: Arc<dyn FileSystem>, uids: Ids, gids: Ids, xattrs: Xattrs) -> Self {
        let mut features = source.features();
        // A client that enforces ACLs must find them under their own names.
        features.posix_acl &= acl::NAMES.iter().all(|name| xattrs.is_identity(name));
        // Descriptors and extents are passed on: their data contain no ids or names.
        Self { source, uids, gids, xattrs, features }
    }

    /// Returns attributes for the client.
    fn to_client(&self, attr: Attr) -> Attr {
        Attr { uid: self.uids.to_client(attr.uid), gid: self.gids.to_client(attr.gid), ..attr }
    }

    fn entry_to_client(&self, entry: Entry) -> Entry {
        Entry { attr: self.to_client(entry.attr), ..entry }
    }

    /// Calls `then` with the caller's ids on the host. A forbidden id is passed on: the source decides what that user
    /// may do, and only new files of it are refused ([`Self::with_creator`]).
    fn with<T>(&self, cx: &Caller<'_>, then: impl FnOnce(&Caller<'_>) -> T) -> T {
        let uid = self.uids.to_host(cx.uid).unwrap_or(cx.uid);
        let gid = self.gids.to_host(cx.gid).unwrap_or(cx.gid);
        if cx.groups.is_empty() || self.gids.is_identity() {
            return then(&Caller { uid, gid, ..*cx });
        }
        let groups: Vec<u32> = cx.groups.iter().filter_map(|&group| self.gids.to_host(group)).collect();
        then(&Caller { uid, gid, groups: &groups, ..*cx })
    }

    /// As [`Self::with`], for calls that create a file.
    fn with_creator<T>(&self, cx: &Caller<'_>, then: impl FnOnce(&Caller<'_>) -> Result<T>) -> Result<T> {
        match (self.uids.to_host(cx.uid), self.gids.to_host(cx.gid)) {
            (Some(_), Some(_)) => self.with(cx, then),
            _ => Err(Errno::PERM),
        }
    }
}

/// A listing that maps its entries for the client.
struct TranslatedListing<'a> {
    mapped: &'a IdMapped,
    out: &'a mut dyn DirOutput,
}

impl DirOutput for TranslatedListing<'_> {
    fn fits(&self, name: &[u8]) -> bool {
        self.out.fits(name)
    }

    fn wants(&mut self, name: &[u8], kind: FileType) -> bool {
        self.out.wants(name, kind)
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        self.out.push(item, entry.map(|entry| self.mapped.entry_to_client(*entry)).as_ref());
    }
}

impl FileSystem for IdMapped {
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

    fn mappable(&self) -> Option<&dyn Mappable> {
        self.source.mappable().is_some().then_some(self)
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        self.source.counts()
    }

    // The source stores ACLs under their own names, so `mode_without_acl` needs no mapping.
    ferry_vfs::delegate!(self.with => self.source;
        readlink, unlink, rmdir, rename, open, backing, read, write, flush, release, fsync, opendir, releasedir, fsyncdir,
        syncfs, statfs, mode_without_acl, access, get_lock, set_lock, ioctl, fallocate, lseek, copy_file_range);

    fn lookup(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        self.with(cx, |cx| self.source.lookup(cx, dir, name)).map(|entry| self.entry_to_client(entry))
    }

    fn lookup_parent(&self, cx: &Caller<'_>, dir: Ino) -> Result<Entry> {
        self.with(cx, |cx| self.source.lookup_parent(cx, dir)).map(|entry| self.entry_to_client(entry))
    }

    fn lookup_self(&self, cx: &Caller<'_>, ino: Ino) -> Result<Entry> {
        self.with(cx, |cx| self.source.lookup_self(cx, ino)).map(|entry| self.entry_to_client(entry))
    }

    fn forget(&self, ino: Ino, count: u64) {
        self.source.forget(ino, count);
    }

    fn getattr(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        self.with(cx, |cx| self.source.getattr(cx, ino, handle)).map(|attr| self.to_client(attr))
    }

    fn getattr_hint(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) -> Option<Attr> {
        self.with(cx, |cx| self.source.getattr_hint(cx, ino, handle)).map(|attr| self.to_client(attr))
    }

    fn setattr(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        let to_host = |ids: &Ids, id: Option<u32>| id.map(|id| ids.to_host(id).ok_or(Errno::PERM)).transpose();
        let set = SetAttr { uid: to_host(&self.uids, set.uid)?, gid: to_host(&self.gids, set.gid)?, ..*set };
        self.with(cx, |cx| self.source.setattr(cx, ino, handle, &set)).map(|attr| self.to_client(attr))
    }

    fn mknod(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        self.with_creator(cx, |cx| self.source.mknod(cx, dir, name, new)).map(|entry| self.entry_to_client(entry))
    }

    fn mkdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        self.with_creator(cx, |cx| self.source.mkdir(cx, dir, name, new)).map(|entry| self.entry_to_client(entry))
    }

    fn symlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.with_creator(cx, |cx| self.source.symlink(cx, dir, name, target)).map(|entry| self.entry_to_client(entry))
    }

    fn link(&self, cx: &Caller<'_>, ino: Ino, dir: Ino, name: Name<'_>) -> Result<Entry> {
        self.with(cx, |cx| self.source.link(cx, ino, dir, name)).map(|entry| self.entry_to_client(entry))
    }

    fn create(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        name: Name<'_>,
        new: &CreateArgs,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        let (entry, handle) = self.with_creator(cx, |cx| self.source.create(cx, dir, name, new, flags))?;
        Ok((self.entry_to_client(entry), handle))
    }

    fn tmpfile(&self, cx: &Caller<'_>, dir: Ino, new: &CreateArgs, flags: OFlags) -> Result<(Entry, Handle)> {
        let (entry, handle) = self.with_creator(cx, |cx| self.source.tmpfile(cx, dir, new, flags))?;
        Ok((self.entry_to_client(entry), handle))
    }

    fn readdir(&self, cx: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        self.with(cx, |cx| self.source.readdir(cx, at, &mut TranslatedListing { mapped: self, out }))
    }

    fn getxattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        // No file has a forbidden attribute.
        let hidden = |error| if error == Errno::PERM { Errno::NODATA } else { error };
        let here = self.xattrs.to_host(name).map_err(hidden)?;
        let mut value = self.with(cx, |cx| self.source.getxattr(cx, ino, &here))?;
        if acl::is_acl(name) {
            acl::each_id(&mut value, |uid| Some(self.uids.to_client(uid)), |gid| Some(self.gids.to_client(gid)))?;
        }
        if name == capability::NAME {
            value = capability::of_root(&value, |uid| Some(self.uids.to_client(uid)))?.into_owned();
        }
        Ok(value)
    }

    fn listxattr(&self, cx: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        let names = self.with(cx, |cx| self.source.listxattr(cx, ino))?;
        Ok(self.xattrs.list_to_client(names))
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
        let here = self.xattrs.to_host(name)?;
        let mut value = Cow::Borrowed(value);
        if acl::is_acl(name) && !(self.uids.is_identity() && self.gids.is_identity()) {
            acl::each_id(value.to_mut(), |uid| self.uids.to_host(uid), |gid| self.gids.to_host(gid))?;
        }
        if name == capability::NAME {
            value = Cow::Owned(capability::of_root(&value, |uid| self.uids.to_host(uid))?.into_owned());
        }
        self.with(cx, |cx| self.source.setxattr(cx, ino, &here, &value, flags, clear_sgid))
    }

    fn removexattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<()> {
        let here = self.xattrs.to_host(name)?;
        self.with(cx, |cx| self.source.removexattr(cx, ino, &here))
    }
}
