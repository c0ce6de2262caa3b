//! Open files and their data.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use ferry_engine::{Windows, write_input};
use ferry_vfs::sync::lock;
use ferry_vfs::{
    Backing, Caller, Change, CopyRange, Data, Errno, Extent, FallocateFlags, Handle, Ino, Input, IoRange, Lockable,
    OFlags, Result, Seek, openable,
};
use rustix::fs::{Mode, SeekFrom};
use rustix::path::DecInt;

use crate::Dir;
use crate::creds::WithoutFsetid;
use crate::readdir::Stream;
use crate::sys;
use crate::table::Inode;
use crate::watch::Directories;

/// The maximum size of one copy in bytes: it blocks a worker, and clients continue where it stopped.
const COPY_BYTES_MAX: u64 = 64 << 20;
/// The open flags that are passed to the host, besides the access mode.
const HOST_FLAGS: OFlags =
    OFlags::APPEND.union(OFlags::TRUNC).union(OFlags::DSYNC).union(OFlags::SYNC).union(OFlags::NOATIME);

fn backing(file: OwnedFd, flags: OFlags) -> Backing {
    if flags.contains(OFlags::APPEND) { Backing::appending(file) } else { Backing::new(file) }
}

/// An open file or directory.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) inode: Arc<Inode>,
    pub(crate) file: Arc<Backing>,
    /// Its flags.
    pub(crate) flags: OFlags,
    /// The file with the flags that the client has set since, or does not want for a write of its cache. The flags of a descriptor
    /// do not change: transfers that have not run yet would have those of later ones.
    others: Mutex<Vec<(OFlags, Arc<Backing>)>>,
    /// The listing, of a directory.
    pub(crate) stream: Option<Mutex<Stream>>,
}

impl Dir {
    /// Returns the host's open flags for a client's open flags.
    pub(crate) fn host_flags(&self, flags: OFlags) -> Result<OFlags> {
        let mut access = flags & OFlags::ACCMODE;
        if access == OFlags::ACCMODE {
            return Err(Errno::INVAL);
        }
        let mut keep = HOST_FLAGS;
        if self.options.direct_io {
            keep |= OFlags::DIRECT;
        }
        if self.options.writeback {
            // To write part of a page, the client's cache reads the rest of it. With such a cache the client also
            // places appended data itself.
            if access == OFlags::WRONLY {
                access = OFlags::RDWR;
            }
            keep -= OFlags::APPEND;
        }
        if self.options.read_only && (access != OFlags::RDONLY || flags.contains(OFlags::TRUNC)) {
            return Err(Errno::ROFS);
        }
        Ok(access | (flags & keep))
    }

    pub(crate) fn open_inode(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        let inode = self.table.get(ino)?;
        openable(inode.found.kind)?;
        let host = self.host_flags(flags)?;
        let truncates = host.contains(OFlags::TRUNC);
        let shortening = truncates.then(|| Self::shortening(cx.session, &inode, 0));
        let (file, host) = match self.open_data(&inode, host) {
            Err(Errno::PERM) if host.contains(OFlags::NOATIME) => {
                let host = host - OFlags::NOATIME;
                (self.open_data(&inode, host)?, host)
            }
            Err(Errno::ACCESS) if self.options.writeback && flags & OFlags::ACCMODE == OFlags::WRONLY => {
                let host = (host - OFlags::ACCMODE) | OFlags::WRONLY;
                (self.open_data(&inode, host)?, host)
            }
            other => (other?, host),
        };
        drop(shortening);
        if truncates {
            self.changes.publish(cx.session, || Change::Data { ino, offset: 0, len: u64::MAX });
        }
        self.add_handle(cx, inode, file, host - OFlags::TRUNC)
    }

    /// Creates the handle of an open inode.
    pub(crate) fn add_handle(
        &self,
        cx: &Caller<'_>,
        inode: Arc<Inode>,
        file: OwnedFd,
        flags: OFlags,
    ) -> Result<Handle> {
        let ino = inode.ino;
        self.handles.insert(cx.session, ino, Self::opened(inode, file, flags))
    }

    /// Returns the state of an open inode.
    pub(crate) fn opened(inode: Arc<Inode>, file: OwnedFd, flags: OFlags) -> Open {
        let stream = inode.is_dir().then(Mutex::default);
        Open { inode, file: Arc::new(backing(file, flags)), flags, others: Mutex::default(), stream }
    }

    /// Opens a regular file. Its type was checked on the same inode, so the open cannot block or have side effects.
    pub(crate) fn open_data(&self, inode: &Arc<Inode>, flags: OFlags) -> Result<OwnedFd> {
        if let (Some(handle), Some(mount)) = (&inode.found.handle, inode.found.mount.handles())
            && inode.is_verified()
            && !inode.is_pinned()
        {
            match self.retry_with_room_to_keep(|| sys::open_by_handle(mount, handle, flags | OFlags::NOCTTY)) {
                // It was removed, and there may be a descriptor of it.
                Err(Errno::STALE) => {}
                opened => return opened,
            }
        }
        let fd = self.path_fd(inode)?;
        let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
        let open = || rustix::fs::openat(&self.proc_fds, DecInt::from_fd(fd.as_fd()), flags, Mode::empty());
        self.retry_with_room_to_keep(open)
    }

    pub(crate) fn opendir(&self, cx: &Caller<'_>, ino: Ino, _: OFlags) -> Result<Handle> {
        let (inode, fd) = self.path(ino)?;
        if !inode.is_dir() {
            return Err(Errno::NOTDIR);
        }
        self.watch_directory(&inode);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = self.retry_with_room_to_keep(|| rustix::fs::openat(fd.as_fd(), ".", flags, Mode::empty()))?;
        self.add_handle(cx, inode, file, OFlags::RDONLY)
    }

    /// Returns the location of the bytes of a read or write: the handle's descriptor, at the same offset.
    pub(crate) fn extent(&self, cx: &Caller<'_>, at: &IoRange) -> Result<Data> {
        self.handles.with(cx.session, at.ino, at.handle, |open| {
            if open.stream.is_some() {
                return Err(Errno::ISDIR);
            }
            // Reads do not depend on `O_APPEND`.
            let file = self.file_with(open, at.flags, self.settable() - OFlags::APPEND)?;
            Ok(Data::Extent(Extent { file, offset: at.offset }))
        })
    }

    /// As [`Self::extent`], for a write. A transfer of an extent lets the host's kernel clear suid and sgid as for a
    /// user outside of the file's groups. If that is wrong for this caller, this function writes the bytes itself.
    pub(crate) fn write(&self, cx: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        let _operation = self.writable()?;
        if at.clear_privileges {
            let open = self.handles.get(cx.session, at.ino, at.handle)?;
            if open.inode.has_sgid_mark() && self.lose_privileges(cx, &open.inode, open.file.as_fd())?.is_none() {
                let file = self.file_with(&open, at.flags, self.settable())?;
                self.attr_changed(cx.session, &open.inode);
                return write_input(file.as_fd(), at.offset, at.len as usize, input).map(Data::Bytes);
            }
        }
        self.handles.with(cx.session, at.ino, at.handle, |open| {
            if open.stream.is_some() {
                return Err(Errno::ISDIR);
            }
            let file = self.file_with(open, at.flags, self.settable())?;
            Ok(Data::Extent(Extent { file, offset: at.offset }))
        })
    }

    /// Returns the flags that a client may change after an open (`fcntl`).
    fn settable(&self) -> OFlags {
        let append = if self.options.writeback { OFlags::empty() } else { OFlags::APPEND };
        let direct = if self.options.direct_io { OFlags::DIRECT } else { OFlags::empty() };
        append | direct
    }

    /// Returns the open file with those of `flags` that are in `mask`, and its own others.
    fn file_with(&self, open: &Open, flags: OFlags, mask: OFlags) -> Result<Arc<Backing>> {
        if !(open.flags ^ flags).intersects(mask) {
            return Ok(Arc::clone(&open.file));
        }
        let flags = (open.flags - mask) | (flags & mask);
        let mut others = lock(&open.others);
        if let Some((_, file)) = others.iter().find(|(own, _)| *own == flags) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(backing(self.reopen(open.file.as_fd(), flags)?, flags));
        others.push((flags, Arc::clone(&file)));
        Ok(file)
    }

    pub(crate) fn flush(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, owner: u64) -> Result<()> {
        let open = self.handles.get(cx.session, ino, handle)?;
        self.locks.table.drop_owner(ino, cx.session, owner);
        if open.inode.found.mount.flushes {
            // Closing a duplicate makes the file system report errors.
            let copy = self.retry_with_room(|| rustix::io::fcntl_dupfd_cloexec(open.file.as_fd(), 0))?;
            return sys::close(copy);
        }
        Ok(())
    }

    pub(crate) fn release(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        let directories = self.table.directories();
        let _operation = directories.and_then(Directories::begin_operation);
        match self.handles.remove(cx.session, ino, handle) {
            Ok(open) => {
                self.locks.table.drop_handle(ino, handle, &open);
                let writes = open.flags().intersects(OFlags::WRONLY | OFlags::RDWR);
                drop(open);
                if let Some(directories) = directories.filter(|_| writes) {
                    directories.closed(ino);
                }
            }
            Err(error) => tracing::debug!(?ino, ?handle, %error, "release"),
        }
    }

    pub(crate) fn syncfs(&self, _: &Caller<'_>, ino: Ino) -> Result<()> {
        let inode = self.table.get(ino)?;
        if inode.ino == Ino::ROOT {
            // The client means all mounts that it sees.
            return self.mounts.for_each(|mount| mount.real().map_or(Ok(()), rustix::fs::syncfs));
        }
        inode.found.mount.real().map_or(Ok(()), rustix::fs::syncfs)
    }

    /// Returns a guard for a change for which the protocol does not say whether the caller may keep suid and sgid. A
    /// Linux client with idmapped mounts does not send the caller, and its fallocate clears them even for root.
    fn as_writer(&self, cx: &Caller<'_>, open: &Open) -> Result<Option<WithoutFsetid>> {
        if cx.uid == 0 { Ok(None) } else { self.lose_privileges(cx, &open.inode, open.file.as_fd()) }
    }

    pub(crate) fn fallocate(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        offset: u64,
        len: u64,
        flags: FallocateFlags,
    ) -> Result<()> {
        let _operation = self.writable()?;
        let open = self.handles.get(cx.session, ino, handle)?;
        let _shortening = match flags.contains(FallocateFlags::COLLAPSE_RANGE) {
            true => {
                let size = u64::try_from(rustix::fs::fstat(open.file.as_fd())?.st_size).unwrap_or(0);
                Some(Self::shortening(cx.session, &open.inode, size.saturating_sub(len)))
            }
            false => None,
        };
        let _guard = self.as_writer(cx, &open)?;
        let change = |flags, offset, len| rustix::fs::fallocate(open.file.as_fd(), flags, offset, len);
        match offset.checked_add(len) {
            Some(end) if len > 0 && flags == FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE => {
                Windows::of_process().punch(
                    || Some(open.inode.found.key.file_id()),
                    offset..end,
                    |flags, part| match change(flags, part.start, part.end - part.start) {
                        // As tmpfs.
                        Err(Errno::OPNOTSUPP) if flags.contains(FallocateFlags::ZERO_RANGE) => {
                            Windows::zero(&*self.file_with(&open, OFlags::empty(), OFlags::APPEND)?, part)
                        }
                        outcome => outcome,
                    },
                )?
            }
            _ => change(flags, offset, len)?,
        }
        // Collapsing and inserting move all data behind the range.
        let moves = flags.intersects(FallocateFlags::COLLAPSE_RANGE | FallocateFlags::INSERT_RANGE);
        let len = if moves { u64::MAX } else { len };
        self.changes.publish(cx.session, || Change::Data { ino, offset, len });
        if moves {
            // Holes are elsewhere now, and there may be a new one.
            let size = u64::try_from(rustix::fs::fstat(open.file.as_fd())?.st_size).unwrap_or(0);
            Windows::of_process().fill(|| Some(open.inode.found.key.file_id()), open.file.as_fd(), &(offset..size))?;
        }
        Ok(())
    }

    pub(crate) fn lseek(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, offset: u64, seek: Seek) -> Result<u64> {
        let open = self.handles.get(cx.session, ino, handle)?;
        if open.stream.is_some() {
            return Err(Errno::INVAL);
        }
        if i64::try_from(offset).is_err() {
            return Err(Errno::NXIO);
        }
        let from = match seek {
            Seek::Data => SeekFrom::Data(offset),
            Seek::Hole => SeekFrom::Hole(offset),
        };
        // Moves the descriptor's own position, which nothing else uses.
        rustix::fs::seek(open.file.as_fd(), from)
    }

    pub(crate) fn copy_file_range(&self, cx: &Caller<'_>, copy: &CopyRange) -> Result<u64> {
        let _operation = self.writable()?;
        let from = self.handles.get(cx.session, copy.from.0, copy.from.1)?;
        let to = self.handles.get(cx.session, copy.to.0, copy.to.1)?;
        let (mut from_offset, mut to_offset) = (copy.from.2, copy.to.2);
        let len = usize::try_from(copy.len.min(COPY_BYTES_MAX)).map_err(|_| Errno::INVAL)?;
        let guard = self.as_writer(cx, &to)?;
        // The client refuses to copy to files with `O_APPEND`.
        let to_file = self.file_with(&to, OFlags::empty(), OFlags::APPEND)?;
        let (from_file, to_file) = (from.file.as_fd(), to_file.as_fd());
        let count = rustix::fs::copy_file_range(from_file, Some(&mut from_offset), to_file, Some(&mut to_offset), len)?;
        drop(guard);
        let count = count as u64;
        if count > 0 {
            self.changes.publish(cx.session, || Change::Data { ino: copy.to.0, offset: copy.to.2, len: count });
            let part = copy.to.2..copy.to.2.saturating_add(count);
            Windows::of_process().fill(|| Some(to.inode.found.key.file_id()), to_file, &part)?;
        }
        Ok(count)
    }
}
