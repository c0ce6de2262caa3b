//! A source as its clients are to see it: [`IdMapped`] stands before any other source and gives users and groups other
//! numbers ([`Ids`]) and extended attributes other names ([`Xattrs`]), as virtiofsd does with `--translate-uid` and
//! `--xattrmap`.
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
//! Nothing is kept per inode or file, and data go where they always do: a mapped source answers the same extents.
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

/// A source with other numbers and names. See the crate's front page.
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
        f.debug_struct("Mapped").field("uids", uids).field("gids", gids).field("xattrs", xattrs).finish_non_exhaustive()
    }
}

impl IdMapped {
    /// Puts the translations before a source.
    pub fn new(source: Arc<dyn FileSystem>, uids: Ids, gids: Ids, xattrs: Xattrs) -> Self {
        let mut features = source.features();
        // A client that enforces ACLs must find them under their own names.
        features.posix_acl &= acl::NAMES.iter().all(|name| xattrs.is_identity(name));
        // What goes around us is not translated: nothing of it carries numbers or names.
        Self { source, uids, gids, xattrs, features }
    }

    /// The attributes as the client sees them.
    fn to_client(&self, attr: Attr) -> Attr {
        Attr { uid: self.uids.to_client(attr.uid), gid: self.gids.to_client(attr.gid), ..attr }
    }

    fn entry_to_client(&self, entry: Entry) -> Entry {
        Entry { attr: self.to_client(entry.attr), ..entry }
    }

    /// Calls `then` for the user that the caller is here. One whose number is forbidden keeps it: what that user may do is
    /// decided by the source, only what would belong to it is refused ([`Self::with_creator`]).
    fn with<T>(&self, cx: &Caller<'_>, then: impl FnOnce(&Caller<'_>) -> T) -> T {
        let uid = self.uids.to_host(cx.uid).unwrap_or(cx.uid);
        let gid = self.gids.to_host(cx.gid).unwrap_or(cx.gid);
        if cx.groups.is_empty() || self.gids.is_identity() {
            return then(&Caller { uid, gid, ..*cx });
        }
        let groups: Vec<u32> = cx.groups.iter().filter_map(|&group| self.gids.to_host(group)).collect();
        then(&Caller { uid, gid, groups: &groups, ..*cx })
    }

    /// The same for calls that make something.
    fn with_creator<T>(&self, cx: &Caller<'_>, then: impl FnOnce(&Caller<'_>) -> Result<T>) -> Result<T> {
        match (self.uids.to_host(cx.uid), self.gids.to_host(cx.gid)) {
            (Some(_), Some(_)) => self.with(cx, then),
            _ => Err(Errno::PERM),
        }
    }
}

/// A listing in which entries are as the client sees them.
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

    fn migrate(&self) -> Option<&dyn Migrate> {
        self.source.migrate().is_some().then_some(self)
    }

    fn mappable(&self) -> Option<&dyn Mappable> {
        self.source.mappable().is_some().then_some(self)
    }

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

    fn readlink(&self, cx: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        self.with(cx, |cx| self.source.readlink(cx, ino))
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

    fn unlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        self.with(cx, |cx| self.source.unlink(cx, dir, name))
    }

    fn rmdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        self.with(cx, |cx| self.source.rmdir(cx, dir, name))
    }

    fn rename(&self, cx: &Caller<'_>, from: (Ino, Name<'_>), to: (Ino, Name<'_>), flags: RenameFlags) -> Result<()> {
        self.with(cx, |cx| self.source.rename(cx, from, to, flags))
    }

    fn open(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        self.with(cx, |cx| self.source.open(cx, ino, flags))
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

    fn backing(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) -> Option<Arc<Backing>> {
        self.with(cx, |cx| self.source.backing(cx, ino, handle))
    }

    fn read(&self, cx: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        self.with(cx, |cx| self.source.read(cx, at, out))
    }

    fn write(&self, cx: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        self.with(cx, |cx| self.source.write(cx, at, input))
    }

    fn flush(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, owner: u64) -> Result<()> {
        self.with(cx, |cx| self.source.flush(cx, ino, handle, owner))
    }

    fn release(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        self.with(cx, |cx| self.source.release(cx, ino, handle));
    }

    fn fsync(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        self.with(cx, |cx| self.source.fsync(cx, ino, handle, data_only))
    }

    fn opendir(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        self.with(cx, |cx| self.source.opendir(cx, ino, flags))
    }

    fn readdir(&self, cx: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        self.with(cx, |cx| self.source.readdir(cx, at, &mut TranslatedListing { mapped: self, out }))
    }

    fn releasedir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        self.with(cx, |cx| self.source.releasedir(cx, ino, handle));
    }

    fn fsyncdir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        self.with(cx, |cx| self.source.fsyncdir(cx, ino, handle, data_only))
    }

    fn syncfs(&self, cx: &Caller<'_>, ino: Ino) -> Result<()> {
        self.with(cx, |cx| self.source.syncfs(cx, ino))
    }

    fn statfs(&self, cx: &Caller<'_>, ino: Ino) -> Result<Statfs> {
        self.with(cx, |cx| self.source.statfs(cx, ino))
    }

    fn getxattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        // No file has an attribute that none may have.
        let hidden = |error| if error == Errno::PERM { Errno::NODATA } else { error };
        let here = self.xattrs.to_host(name).map_err(hidden)?;
        let mut value = self.with(cx, |cx| self.source.getxattr(cx, ino, &here))?;
        if acl::is_one(name) {
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
        if acl::is_one(name) && !(self.uids.is_identity() && self.gids.is_identity()) {
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

    fn mode_without_acl(&self, cx: &Caller<'_>, ino: Ino, attr: &Attr) -> u32 {
        // By the source, which has ACLs under their own names, whatever a client calls them.
        self.with(cx, |cx| self.source.mode_without_acl(cx, ino, attr))
    }

    fn access(&self, cx: &Caller<'_>, ino: Ino, mask: u32) -> Result<()> {
        self.with(cx, |cx| self.source.access(cx, ino, mask))
    }

    fn get_lock(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, lock: &Lock) -> Result<Option<Lock>> {
        self.with(cx, |cx| self.source.get_lock(cx, ino, handle, lock))
    }

    fn set_lock(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        lock: &Lock,
        wait: Option<Waiter>,
    ) -> Result<LockOutcome> {
        self.with(cx, |cx| self.source.set_lock(cx, ino, handle, lock, wait))
    }

    fn ioctl(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        command: u32,
        input: &[u8],
        out_bytes_max: usize,
    ) -> Result<Vec<u8>> {
        self.with(cx, |cx| self.source.ioctl(cx, ino, handle, command, input, out_bytes_max))
    }

    fn fallocate(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        offset: u64,
        len: u64,
        flags: FallocateFlags,
    ) -> Result<()> {
        self.with(cx, |cx| self.source.fallocate(cx, ino, handle, offset, len, flags))
    }

    fn lseek(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, offset: u64, seek: Seek) -> Result<u64> {
        self.with(cx, |cx| self.source.lseek(cx, ino, handle, offset, seek))
    }

    fn copy_file_range(&self, cx: &Caller<'_>, copy: &CopyRange) -> Result<u64> {
        self.with(cx, |cx| self.source.copy_file_range(cx, copy))
    }
}
