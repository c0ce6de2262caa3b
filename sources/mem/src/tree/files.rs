//! Open files and their data.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ferry_engine::Windows;
use ferry_vfs::{
    Backing, Caller, Change, CopyRange, CreateArgs, Data, Entry, Errno, FallocateFlags, FileType, Handle, Ino, Input,
    IoRange, Lockable, Name, OFlags, Output, Result, Seek, openable,
};

use super::attrs::{S_ISGID, S_ISUID, S_IXGRP, now_after};
use super::node::{Body, Node, State};
use super::xattr::CAPABILITY;
use super::{Tree, log};
use crate::store::{Meta, Record, Store, WriteAt};

/// The maximum size of a file in bytes (`MAX_LFS_FILESIZE`).
const FILE_BYTES_MAX: u64 = i64::MAX as u64;
/// The maximum size of one copy in bytes: it blocks a worker, and clients continue where it stopped.
const COPY_BYTES_MAX: u64 = 64 << 20;

/// An open file or directory.
#[derive(Debug)]
pub(super) struct Open<S: Store> {
    pub(super) node: Arc<Node<S>>,
    /// The flags of the open call.
    flags: OFlags,
    /// The end of a listing of the directory ([`Dir::end`](super::dir::Dir::end)). It excludes names that are added
    /// later; otherwise repeated renames would make a listing endless.
    pub(super) list_end: Arc<AtomicU64>,
}

impl<S: Store> Lockable for Open<S> {
    type Owner = ();

    fn flags(&self) -> OFlags {
        self.flags
    }

    fn is_dir(&self) -> bool {
        self.node.is_dir()
    }
}

/// Returns whether an open with these flags may change the file.
fn writes(flags: OFlags) -> bool {
    flags.intersects(OFlags::WRONLY | OFlags::RDWR)
}

impl<S: Store> Tree<S> {
    /// Returns the open data of a file, created if necessary; kept only while there are handles.
    pub(crate) fn data(&self, node: &Node<S>, state: &mut State<S>) -> Result<Arc<S::File>> {
        let times = (state.meta.atime, state.meta.mtime);
        let body = state.file_mut()?;
        if let Some(file) = &body.file {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(self.store.open(node.ino, times)?);
        body.has_data = true;
        if body.opens > 0 {
            body.file = Some(Arc::clone(&file));
        }
        Ok(file)
    }

    /// Sets the size of a file; the caller changes the attributes.
    pub(crate) fn truncate(&self, node: &Node<S>, state: &mut State<S>, size: u64) -> Result<()> {
        let body = state.file()?;
        if size > FILE_BYTES_MAX {
            return Err(Errno::FBIG);
        }
        if size == 0 && !body.has_data {
            return Ok(());
        }
        let file = self.data(node, state)?;
        self.store.truncate(&file, size)?;
        let usage = self.store.usage(node.ino, Some(&file))?;
        let body = state.file_mut()?;
        (body.size, body.blocks) = (usage.size, usage.blocks);
        Ok(())
    }

    pub(crate) fn open(&self, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        let node = self.table.get(ino)?;
        self.open_node(cx, &node, flags)
    }

    /// Opens an existing inode.
    pub(crate) fn open_node(&self, cx: &Caller<'_>, node: &Arc<Node<S>>, flags: OFlags) -> Result<Handle> {
        openable(node.kind)?;
        if flags & OFlags::ACCMODE == OFlags::ACCMODE {
            return Err(Errno::INVAL);
        }
        let truncates = flags.contains(OFlags::TRUNC);
        if self.limits.read_only && (truncates || writes(flags)) {
            return Err(Errno::ROFS);
        }
        // Before any lock, as for SETATTR.
        let shortening = truncates.then(|| self.shortening(cx.session, node.ino, 0));
        let change = if truncates { Some(self.begin()?) } else { None };
        let mut state = node.write_live()?;
        if truncates {
            self.truncate_at_open(cx, node, &mut state)?;
        }
        let has_data = state.file()?.has_data || state.file()?.unknown;
        state.file_mut()?.opens += 1;
        let opened = if has_data { self.data(node, &mut state).map(drop) } else { Ok(()) };
        // Before the lock is given back: nothing ends the inode.
        node.hold();
        drop(state);
        drop(change);
        drop(shortening);
        if let Err(error) = opened {
            self.close(node);
            return Err(error);
        }
        if truncates {
            self.changes.publish(cx.session, || Change::Data { ino: node.ino, offset: 0, len: u64::MAX });
        }
        self.add_handle(cx, node, flags - OFlags::TRUNC)
    }

    fn truncate_at_open(&self, cx: &Caller<'_>, node: &Node<S>, state: &mut State<S>) -> Result<()> {
        use ferry_vfs::{SetAttr, SetTime};
        self.sync_attr(node, state)?;
        self.truncate(node, state, 0)?;
        let set = SetAttr { size: Some(0), mtime: Some(SetTime::Now), ..SetAttr::default() };
        let now = now_after::<S>([state.meta.ctime]);
        self.change_meta(cx, (node, state), &set, now)
    }

    /// Creates the handle of an open inode, which is held for it.
    fn add_handle(&self, cx: &Caller<'_>, node: &Arc<Node<S>>, flags: OFlags) -> Result<Handle> {
        let open = Open { node: Arc::clone(node), flags, list_end: Arc::new(AtomicU64::new(u64::MAX)) };
        self.handles.insert(cx.session, node.ino, open).inspect_err(|_| self.close(node))
    }

    /// Ends what an open began.
    fn close(&self, node: &Arc<Node<S>>) {
        let mut last = None;
        if node.kind == FileType::RegularFile {
            let gate = self.gate();
            let mut state = node.write();
            if let Err(error) = self.sync_attr(node, &mut state) {
                tracing::warn!(ino = node.ino.0, %error, "cannot log the attributes of a closed file");
            }
            if let Body::File(body) = &mut state.body {
                body.opens -= 1;
                if body.opens == 0 {
                    last = body.file.take();
                    if let Some(file) = &last {
                        self.store.closing(file);
                    }
                }
            }
            drop(state);
            drop(gate);
        }
        drop(last);
        self.release_hold(node, 1);
    }

    pub(crate) fn create(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        name: Name<'_>,
        new: &CreateArgs,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        let node = self.make_file(cx, (dir, name), new)?;
        self.open_made(cx, &node, flags)
    }

    /// Opens a new file, which is held for the reply.
    fn open_made(&self, cx: &Caller<'_>, node: &Arc<Node<S>>, flags: OFlags) -> Result<(Entry, Handle)> {
        let attr = {
            let mut state = node.write();
            state.file_mut()?.opens += 1;
            self.attr(node, &state)
        };
        node.hold();
        let handle = self.add_handle(cx, node, flags - OFlags::TRUNC).inspect_err(|_| self.release_hold(node, 1))?;
        match attr {
            Ok(attr) => Ok((Entry { ino: node.ino, generation: 0, attr }, handle)),
            Err(error) => {
                self.release(cx, node.ino, handle);
                self.release_hold(node, 1);
                Err(error)
            }
        }
    }

    pub(crate) fn tmpfile(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        new: &CreateArgs,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        let node = self.make_unnamed(cx, dir, new, !flags.contains(OFlags::EXCL))?;
        self.open_made(cx, &node, flags)
    }

    pub(crate) fn release(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        match self.handles.remove(cx.session, ino, handle) {
            Ok(open) => {
                self.locks.drop_handle(ino, handle, &open);
                self.close(&open.node);
            }
            Err(error) => tracing::debug!(?ino, ?handle, %error, "release"),
        }
    }

    pub(crate) fn flush(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, owner: u64) -> Result<()> {
        let open = self.handles.get(cx.session, ino, handle)?;
        self.locks.drop_owner(ino, cx.session, owner);
        if S::JOURNALED && open.node.kind == FileType::RegularFile && !self.limits.read_only {
            let _gate = self.gate();
            self.sync_attr(&open.node, &mut open.node.write())?;
        }
        Ok(())
    }

    pub(crate) fn backing(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) -> Option<Arc<Backing>> {
        if !self.store.has_backing() || self.limits.read_only {
            return None;
        }
        let open = self.handles.get(cx.session, ino, handle).ok()?;
        let mut state = open.node.write_live().ok()?;
        // Writes by the client's kernel do not clear suid and sgid here, so such files get no backing.
        let Meta { mode, .. } = state.meta;
        let privileged = mode & S_ISUID != 0 || mode & (S_ISGID | S_IXGRP) == S_ISGID | S_IXGRP;
        let passed = state.file().is_ok_and(|body| body.passed && body.opens > 1);
        if !passed && (privileged || state.xattr(CAPABILITY).is_some()) {
            return None;
        }
        let file = self.data(&open.node, &mut state).ok()?;
        let backing = self.store.backing(&file)?;
        state.file_mut().ok()?.passed = true;
        Some(backing)
    }

    pub(crate) fn read(&self, cx: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        // Not under the lock of the handles: a change of the file may take long, and others open files meanwhile.
        let open = self.handles.get(cx.session, at.ino, at.handle)?;
        let state = open.node.read();
        let late = !S::KEEPS_TIMES
            && !open.flags.contains(OFlags::NOATIME)
            && self.is_access_late(&state.meta, open.node.noted_write());
        let done = match &state.file()?.file {
            Some(file) => self.store.read(file, at.offset, at.len, out)?,
            None => Data::Bytes(0),
        };
        drop(state);
        if late {
            self.accessed(&open.node);
        }
        Ok(done)
    }

    pub(crate) fn write(&self, cx: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        let change = self.begin()?;
        if at.offset > FILE_BYTES_MAX - u64::from(at.len) {
            return Err(Errno::FBIG);
        }
        let open = self.handles.get(cx.session, at.ino, at.handle)?;
        if !writes(open.flags) {
            return Err(Errno::BADF);
        }
        let write = WriteAt {
            offset: at.offset,
            len: at.len,
            append: at.flags.contains(OFlags::APPEND),
            sync: at.flags.intersects(OFlags::SYNC | OFlags::DSYNC),
        };
        let mut state = open.node.read();
        if state.file()?.file.is_none() || state.needs_clearing(at.clear_privileges) {
            drop(state);
            self.prepare_write(cx, &open.node, at.clear_privileges)?;
            state = open.node.read();
        }
        // The handle keeps the data open.
        let file = state.file()?.file.as_ref().ok_or(Errno::BADF)?;
        let done = self.store.write(file, write, input)?;
        if !S::KEEPS_TIMES {
            open.node.note_write(&state.meta);
        }
        drop(state);
        drop(change);
        if let Data::Bytes(count) = done {
            let offset = if write.append { 0 } else { at.offset };
            let len = if write.append { u64::MAX } else { u64::try_from(count).unwrap_or(u64::MAX) };
            self.changes.publish(cx.session, || Change::Data { ino: at.ino, offset, len });
        }
        Ok(done)
    }

    /// Does the part of a write that needs the inode's lock exclusively. The caller began the change.
    fn prepare_write(&self, cx: &Caller<'_>, node: &Node<S>, clear: bool) -> Result<()> {
        let mut state = node.write_live()?;
        self.data(node, &mut state)?;
        self.sync_attr(node, &mut state)?;
        let cleared = self.clear_privileges(node, &mut state, clear.then_some(cx))?;
        drop(state);
        if cleared {
            self.changes.publish(cx.session, || Change::Attr { ino: node.ino });
        }
        Ok(())
    }

    pub(crate) fn fsync(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        data_only: bool,
    ) -> Result<Option<Arc<Backing>>> {
        let open = self.handles.get(cx.session, ino, handle)?;
        if S::JOURNALED && !data_only && !self.limits.read_only {
            let _gate = self.gate();
            self.sync_attr(&open.node, &mut open.node.write())?;
        }
        let file = open.node.read().file().ok().and_then(|body| body.file.clone());
        self.store.fsync(ino, file.as_deref(), data_only)
    }

    /// Changes the data of an open file, with its lock held exclusively.
    fn change_data<T>(
        &self,
        cx: &Caller<'_>,
        (ino, handle): (Ino, Handle),
        change: impl FnOnce(&S::File) -> Result<T>,
    ) -> Result<T> {
        let _change = self.begin()?;
        let open = self.handles.get(cx.session, ino, handle)?;
        if !writes(open.flags) {
            return Err(Errno::BADF);
        }
        let node = &open.node;
        let mut state = node.write_live()?;
        let file = self.data(node, &mut state)?;
        self.sync_attr(node, &mut state)?;
        // The protocol does not say whether the caller may keep privileges; root may.
        self.clear_privileges(node, &mut state, (cx.uid != 0).then_some(cx))?;
        let done = change(&file)?;
        node.note_write(&state.meta);
        self.sync_attr(node, &mut state)?;
        let meta = Meta { ctime: now_after::<S>([state.meta.ctime]), ..state.meta };
        if meta != state.meta {
            log(&self.store, || Record::Attr { ino: node.ino, meta })?;
            state.meta = meta;
        }
        Ok(done)
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
        if len == 0 {
            return Err(Errno::INVAL);
        }
        if offset.checked_add(len).is_none_or(|end| end > FILE_BYTES_MAX) {
            return Err(Errno::FBIG);
        }
        self.change_data(cx, (ino, handle), |file| {
            if flags != FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE {
                return self.store.fallocate(file, offset, len, flags);
            }
            Windows::of_process().punch(
                || self.store.file_id(ino),
                offset..offset + len,
                |flags, part| self.store.fallocate(file, part.start, part.end - part.start, flags),
            )
        })?;
        // Collapsing and inserting move all data behind the range.
        let moves = flags.intersects(FallocateFlags::COLLAPSE_RANGE | FallocateFlags::INSERT_RANGE);
        let len = if moves { u64::MAX } else { len };
        self.changes.publish(cx.session, || Change::Data { ino, offset, len });
        Ok(())
    }

    pub(crate) fn lseek(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, offset: u64, seek: Seek) -> Result<u64> {
        let open = self.handles.get(cx.session, ino, handle)?;
        let state = open.node.read();
        let Body::File(body) = &state.body else { return Err(Errno::INVAL) };
        match &body.file {
            Some(file) if offset <= FILE_BYTES_MAX => self.store.seek(file, offset, seek),
            _ => Err(Errno::NXIO),
        }
    }

    pub(crate) fn copy_file_range(&self, cx: &Caller<'_>, copy: &CopyRange) -> Result<u64> {
        let ((from_ino, from_handle, from_offset), (to_ino, to_handle, to_offset)) = (copy.from, copy.to);
        let from = self.handles.get(cx.session, from_ino, from_handle)?;
        if from.node.kind != FileType::RegularFile {
            return Err(if from.node.is_dir() { Errno::ISDIR } else { Errno::INVAL });
        }
        let len = copy.len.min(COPY_BYTES_MAX);
        if from_offset > FILE_BYTES_MAX - len || to_offset > FILE_BYTES_MAX - len {
            return Err(Errno::FBIG);
        }
        // Without the lock of the target inode, so that no two are ever held: the data stay open meanwhile.
        let Some(source) = from.node.read().file()?.file.clone() else { return Ok(0) };
        let count = self.change_data(cx, (to_ino, to_handle), |file| {
            self.store.copy((&source, from_offset), (file, to_offset), len)
        })?;
        if count > 0 {
            self.changes.publish(cx.session, || Change::Data { ino: to_ino, offset: to_offset, len: count });
        }
        Ok(count)
    }

    pub(crate) fn opendir(&self, cx: &Caller<'_>, ino: Ino, _: OFlags) -> Result<Handle> {
        let node = self.table.get(ino)?;
        if !node.is_dir() {
            return Err(Errno::NOTDIR);
        }
        node.hold();
        self.add_handle(cx, &node, OFlags::RDONLY)
    }
}

impl<S: Store> State<S> {
    /// Returns whether a write must clear privileges first.
    fn needs_clearing(&self, ids_too: bool) -> bool {
        let ids = self.meta.mode & (S_ISUID | S_ISGID) != 0;
        (ids_too && ids) || self.xattr(CAPABILITY).is_some()
    }
}
