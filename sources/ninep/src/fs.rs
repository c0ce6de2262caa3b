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
        let (read_only, events) = (self.shared.link.options.read_only, self.shared.link.has_events);
        Features { read_only, events, posix_locks: true, waits: true, ..Features::default() }
    }

    fn changes(&self) -> Option<&Changes> {
        Some(&self.shared.changes)
    }

    ferry_vfs::delegate!(self => self.shared;
        lookup, lookup_parent, getattr, getattr_hint, mknod, mkdir, symlink, link, unlink, rmdir, rename, create, release,
        opendir, readdir, releasedir, syncfs, statfs, removexattr, get_lock, set_lock);

    fn forget(&self, ino: Ino, count: u64) {
        self.shared.inodes.forget(ino, count);
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

    fn open(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        let handle = self.shared.open(cx, ino, flags)?;
        if flags.contains(OFlags::TRUNC) {
            self.shared.changes.publish(cx.session, || Change::Data { ino, offset: 0, len: u64::MAX });
        }
        Ok(handle)
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

    fn fsync(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        self.shared.fsync(cx, ino, handle, data_only).map(|()| None)
    }

    fn fsyncdir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        self.shared.fsyncdir(cx, ino, handle, data_only).map(|()| None)
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
}
