//! The implementation of `FileSystem`.

use std::sync::Arc;

use ferry_vfs::{
    Attr, Backing, Caller, Change, Changes, CreateArgs, Data, DirOutput, DirRange, Entry, Errno, Features, FileSystem,
    Handle, Ino, Input, IoRange, Lock, LockOutcome, LockOwner, Name, OFlags, Output, RenameFlags, Result, SetAttr,
    Statfs, Waiter, XattrFlags,
};
use ferry_wire::ninep::{Reply, Request};

use crate::Client;

impl FileSystem for Client {
    fn features(&self) -> Features {
        let read_only = self.shared.link.options.read_only;
        Features { read_only, posix_locks: true, waits: true, ..Features::default() }
    }

    fn changes(&self) -> Option<&Changes> {
        Some(&self.shared.changes)
    }

    fn lookup(&self, _: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        self.shared.lookup(dir, name)
    }

    fn lookup_parent(&self, _: &Caller<'_>, dir: Ino) -> Result<Entry> {
        self.shared.lookup_parent(dir)
    }

    fn forget(&self, ino: Ino, count: u64) {
        self.shared.inodes.forget(ino, count);
    }

    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        self.shared.getattr(ino)
    }

    fn getattr_hint(&self, _: &Caller<'_>, ino: Ino, _: Handle) -> Option<Attr> {
        self.shared.getattr_hint(ino)
    }

    fn setattr(&self, cx: &Caller<'_>, ino: Ino, _: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        let attr = self.shared.setattr(cx, ino, set)?;
        self.shared.changes.publish(cx.session, || match set.size {
            Some(offset) => Change::Data { ino, offset, len: u64::MAX },
            None => Change::Attr { ino },
        });
        Ok(attr)
    }

    fn readlink(&self, _: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        let inode = self.shared.inodes.get(ino)?;
        self.shared.link.with_retry(|session| {
            self.shared.by_any_fid(session, &inode, |fid| {
                session.ask(&Request::Readlink { fid: fid.fid() }, |reply| match reply {
                    Reply::Readlink { target } => Some(target.to_vec()),
                    _ => None,
                })
            })
        })
    }

    fn mknod(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        self.shared.mknod(cx, dir, name, new)
    }

    fn mkdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        self.shared.mkdir(cx, dir, name, new)
    }

    fn symlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.shared.symlink(cx, dir, name, target)
    }

    fn link(&self, cx: &Caller<'_>, ino: Ino, dir: Ino, name: Name<'_>) -> Result<Entry> {
        self.shared.link(cx, ino, dir, name)
    }

    fn unlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        self.shared.remove(cx, dir, name, false)
    }

    fn rmdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        self.shared.remove(cx, dir, name, true)
    }

    fn rename(&self, cx: &Caller<'_>, from: (Ino, Name<'_>), to: (Ino, Name<'_>), flags: RenameFlags) -> Result<()> {
        self.shared.rename(cx, from, to, flags)
    }

    fn open(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        let handle = self.shared.open(cx, ino, flags)?;
        if flags.contains(OFlags::TRUNC) {
            self.shared.changes.publish(cx.session, || Change::Data { ino, offset: 0, len: u64::MAX });
        }
        Ok(handle)
    }

    fn create(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        name: Name<'_>,
        new: &CreateArgs,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        self.shared.create(cx, dir, name, new, flags)
    }

    fn read(&self, cx: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        self.shared.read(cx, at, out).map(Data::Bytes)
    }

    fn write(&self, cx: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        self.shared.write(cx, at, input).map(Data::Bytes)
    }

    fn flush(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, owner: u64) -> Result<()> {
        let opened = self.shared.files.get(cx.session, ino, handle)?;
        // Other clients must see earlier writes before they get the lock.
        let flushed = self.shared.flush(&opened);
        flushed.and(self.shared.drop_owner(&opened.inode, LockOwner { session: cx.session, id: owner }))
    }

    fn release(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        self.shared.release(cx, ino, handle);
    }

    fn fsync(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        self.shared.fsync(cx, ino, handle, data_only).map(|()| None)
    }

    fn opendir(&self, cx: &Caller<'_>, ino: Ino, _: OFlags) -> Result<Handle> {
        self.shared.opendir(cx, ino)
    }

    fn readdir(&self, cx: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        self.shared.readdir(cx, at, out)
    }

    fn releasedir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        self.shared.releasedir(cx, ino, handle);
    }

    fn fsyncdir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        self.shared.fsyncdir(cx, ino, handle, data_only).map(|()| None)
    }

    fn syncfs(&self, _: &Caller<'_>, _: Ino) -> Result<()> {
        self.shared.syncfs()
    }

    fn statfs(&self, _: &Caller<'_>, ino: Ino) -> Result<Statfs> {
        self.shared.statfs(ino)
    }

    fn getxattr(&self, _: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        if name.is_empty() {
            return Err(Errno::INVAL);
        }
        self.shared.getxattr(ino, name)
    }

    fn listxattr(&self, _: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        self.shared.getxattr(ino, b"")
    }

    fn setxattr(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
        _clear_sgid: bool,
    ) -> Result<()> {
        self.shared.setxattr(cx, ino, name, value, flags)
    }

    fn removexattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<()> {
        self.shared.removexattr(cx, ino, name)
    }

    fn get_lock(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, lock: &Lock) -> Result<Option<Lock>> {
        self.shared.get_lock(cx, ino, handle, lock)
    }

    fn set_lock(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        lock: &Lock,
        wait: Option<Waiter>,
    ) -> Result<LockOutcome> {
        self.shared.set_lock(cx, ino, handle, lock, wait)
    }
}
