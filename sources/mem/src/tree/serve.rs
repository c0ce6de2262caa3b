//! The implementation of `FileSystem`.

use std::sync::Arc;

use ferry_vfs::{
    Attr, Backing, ByNumber, Caller, Changes, CopyRange, CreateArgs, Data, DirOutput, DirRange, Entry, Errno,
    FallocateFlags, Features, FileSystem, Handle, Ino, Input, IoRange, Lock, LockOutcome, Mappable, Name, OFlags,
    Output, RenameFlags, Result, Seek, SetAttr, Statfs, Waiter, XattrFlags, openable,
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
            events: true,
            constant: false,
        }
    }

    fn changes(&self) -> Option<&Changes> {
        Some(&self.changes)
    }

    fn mappable(&self) -> Option<&dyn Mappable> {
        self.store.has_backing().then_some(self)
    }

    ferry_vfs::delegate!(self => self;
        lookup, lookup_parent, lookup_self, getattr, setattr, readlink, mknod, mkdir, symlink, link, unlink, rmdir, rename,
        open, create, tmpfile, backing, read, write, flush, release, fsync, opendir, readdir, statfs, getxattr, listxattr,
        setxattr, removexattr, access, fallocate, lseek, copy_file_range);

    fn forget(&self, ino: Ino, count: u64) {
        if let Ok(node) = self.table.get(ino) {
            self.release_hold(&node, count);
        }
    }

    fn releasedir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        self.release(cx, ino, handle);
    }

    fn fsyncdir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        self.fsync(cx, ino, handle, data_only)
    }

    fn syncfs(&self, _: &Caller<'_>, _: Ino) -> Result<()> {
        if S::JOURNALED && !self.limits.read_only {
            // Times of open files that are being written are only recorded in memory.
            for node in self.table.select(|node| node.noted_write().is_some()) {
                let _gate = self.gate();
                self.sync_attr(&node, &mut node.write())?;
            }
        }
        self.store.sync()
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
}

impl<S: Store> Mappable for Tree<S> {
    fn map(&self, _: &Caller<'_>, ino: Ino, writes: bool) -> Result<Arc<Backing>> {
        let node = self.table.get(ino)?;
        openable(node.kind)?;
        if writes && self.limits.read_only {
            return Err(Errno::ROFS);
        }
        let mut state = node.write();
        if state.ended {
            return Err(Errno::STALE);
        }
        let file = self.data(&node, &mut state)?;
        self.store.backing(&file).ok_or(Errno::NOSYS)
    }
}
