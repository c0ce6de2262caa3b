//! The implementation of `FileSystem`.

use std::sync::Arc;

use ferry_vfs::{
    Attr, Backing, ByNumber, Caller, Changes, CopyRange, CreateArgs, Data, DirOutput, DirRange, Entry, FallocateFlags,
    Features, FileSystem, Handle, Ino, Input, IoRange, Lock, LockOutcome, Mappable, Name, OFlags, Output, RenameFlags,
    Result, Seek, SetAttr, Statfs, Waiter, XattrFlags,
};

use super::Tree;
use crate::store::Store;

impl<S: Store> FileSystem for Tree<S> {
    fn features(&self) -> Features {
        Features {
            read_only: self.limits.read_only,
            posix_acl: true,
            posix_locks: true,
            flock: true,
            backing: self.store.has_backing(),
            waits: false,
            direct: false,
            // A persistent store may reuse the number of a removed inode after a restart.
            by_number: if S::JOURNALED { ByNumber::Host } else { ByNumber::Any },
            constant: false,
        }
    }

    fn changes(&self) -> Option<&Changes> {
        Some(&self.changes)
    }

    fn mappable(&self) -> Option<&dyn Mappable> {
        self.store.has_backing().then_some(self)
    }

    fn lookup(&self, _: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        self.lookup_child(dir, name)
    }

    fn lookup_parent(&self, _: &Caller<'_>, dir: Ino) -> Result<Entry> {
        self.lookup_dotdot(dir)
    }

    fn lookup_self(&self, _: &Caller<'_>, ino: Ino) -> Result<Entry> {
        self.lookup_number(ino)
    }

    fn forget(&self, ino: Ino, count: u64) {
        if let Ok(node) = self.table.get(ino) {
            self.release_hold(&node, count);
        }
    }

    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        self.inode_attr(ino)
    }

    fn setattr(&self, cx: &Caller<'_>, ino: Ino, _: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        self.change_attr(cx, ino, set)
    }

    fn readlink(&self, _: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        self.link_target(ino)
    }

    fn mknod(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        self.make_node(cx, (dir, name), new)
    }

    fn mkdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        self.make_directory(cx, (dir, name), new)
    }

    fn symlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.make_symlink(cx, (dir, name), target)
    }

    fn link(&self, cx: &Caller<'_>, ino: Ino, dir: Ino, name: Name<'_>) -> Result<Entry> {
        self.link_inode(cx, ino, (dir, name))
    }

    fn unlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        self.unlink_entry(cx, (dir, name), false)
    }

    fn rmdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        self.unlink_entry(cx, (dir, name), true)
    }

    fn rename(&self, cx: &Caller<'_>, from: (Ino, Name<'_>), to: (Ino, Name<'_>), flags: RenameFlags) -> Result<()> {
        self.rename_entry(cx, from, to, flags)
    }

    fn open(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        self.open_inode(cx, ino, flags)
    }

    fn create(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        name: Name<'_>,
        new: &CreateArgs,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        self.create_file(cx, (dir, name), new, flags)
    }

    fn tmpfile(&self, cx: &Caller<'_>, dir: Ino, new: &CreateArgs, flags: OFlags) -> Result<(Entry, Handle)> {
        self.create_nameless(cx, dir, new, flags)
    }

    fn backing(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) -> Option<Arc<Backing>> {
        self.file_backing(cx, ino, handle)
    }

    fn read(&self, cx: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        self.read_file(cx, at, out)
    }

    fn write(&self, cx: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        self.write_file(cx, at, input)
    }

    fn flush(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, owner: u64) -> Result<()> {
        self.flush_file(cx, ino, handle, owner)
    }

    fn release(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        self.release_handle(cx, ino, handle);
    }

    fn fsync(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        self.fsync_file(cx, ino, handle, data_only)
    }

    fn opendir(&self, cx: &Caller<'_>, ino: Ino, _: OFlags) -> Result<Handle> {
        self.open_directory(cx, ino)
    }

    fn readdir(&self, cx: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        self.list_directory(cx, at, out)
    }

    fn releasedir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        self.release_handle(cx, ino, handle);
    }

    fn fsyncdir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        self.fsync_file(cx, ino, handle, data_only)
    }

    fn syncfs(&self, _: &Caller<'_>, _: Ino) -> Result<()> {
        self.store.sync()
    }

    fn statfs(&self, _: &Caller<'_>, ino: Ino) -> Result<Statfs> {
        self.inode_statfs(ino)
    }

    fn getxattr(&self, _: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        self.xattr_value(ino, name)
    }

    fn listxattr(&self, cx: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        self.xattr_names(ino).map(|names| cx.visible_xattrs(names))
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
        self.set_xattr_value(cx, ino, (name, value), flags, clear_sgid)
    }

    fn removexattr(&self, cx: &Caller<'_>, ino: Ino, name: &[u8]) -> Result<()> {
        self.remove_xattr_value(cx, ino, name)
    }

    fn access(&self, cx: &Caller<'_>, ino: Ino, mask: u32) -> Result<()> {
        self.check_access(cx, ino, mask)
    }

    fn get_lock(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, lock: &Lock) -> Result<Option<Lock>> {
        self.locks.get(&self.handles, cx, (ino, handle), lock)
    }

    fn set_lock(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        lock: &Lock,
        wait: Option<Waiter>,
    ) -> Result<LockOutcome> {
        self.locks.set(&self.handles, cx, (ino, handle), lock, wait, |_| Ok(()))
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
        self.fallocate_file(cx, (ino, handle), (offset, len), flags)
    }

    fn lseek(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, offset: u64, seek: Seek) -> Result<u64> {
        self.seek_file(cx, ino, handle, offset, seek)
    }

    fn copy_file_range(&self, cx: &Caller<'_>, copy: &CopyRange) -> Result<u64> {
        self.copy_range(cx, copy)
    }
}

impl<S: Store> Mappable for Tree<S> {
    fn map(&self, _: &Caller<'_>, ino: Ino, writes: bool) -> Result<Arc<Backing>> {
        self.map_inode(ino, writes)
    }
}
