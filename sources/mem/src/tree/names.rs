//! Looks up, creates and removes names.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferry_vfs::{Caller, Change, CreateArgs, Entry, Errno, Event, FileType, Ino, Name, Result};

use super::acl::{self, Acl};
use super::attrs::{S_IFMT, S_ISGID, S_IXGRP, now_after};
use super::dir::Dir;
use super::node::{Body, FileBody, Node, State};
use super::space::{INODE_BYTES, SpaceAmount, target_bytes, xattr_bytes};
use super::{Tree, log};
use crate::store::{At, Meta, Record, Store, Xattr};

/// The maximum number of names of an inode (as XFS): the count fits into a signed number everywhere.
pub(crate) const LINKS_MAX: u32 = i32::MAX as u32;
/// The longest target of a symbolic link in bytes (`PATH_MAX`, which counts the NUL).
const TARGET_BYTES_MAX: usize = 4095;

/// The parameters of a new inode.
struct NewInode<S: Store> {
    mode: u32,
    umask: u32,
    rdev: u32,
    body: Body<S>,
}

impl<S: Store> Tree<S> {
    /// Finds a name and takes a reference.
    pub(crate) fn find(&self, dir: Ino, name: Name<'_>) -> Result<Arc<Node<S>>> {
        let dir = self.table.get(dir)?;
        let state = dir.read();
        let node = state.dir()?.get(name).ok_or(Errno::NOENT)?;
        // With the directory's lock, so that the last name cannot be removed in between.
        node.hold();
        Ok(Arc::clone(node))
    }

    pub(crate) fn lookup(&self, _: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        self.entry(&self.find(dir, name)?)
    }

    pub(crate) fn lookup_parent(&self, cx: &Caller<'_>, dir: Ino) -> Result<Entry> {
        let node = self.table.get(dir)?;
        if !node.is_dir() {
            return Err(Errno::NOTDIR);
        }
        self.lookup_self(cx, Ino(node.parent.load(Ordering::Acquire)))
    }

    /// Finds an inode by its number, for file handles.
    pub(crate) fn lookup_self(&self, _: &Caller<'_>, ino: Ino) -> Result<Entry> {
        let node = self.table.get(ino)?;
        let ended = {
            let state = node.read();
            node.hold();
            state.ended
        };
        if ended {
            return Err(Errno::STALE);
        }
        self.entry(&node)
    }

    /// Derives a new inode's attributes and ACLs from its directory, logs it, and adds it to the table, held once.
    fn make(
        &self,
        cx: &Caller<'_>,
        (dir_node, dir): (&Node<S>, &mut State<S>),
        name: Option<Name<'_>>,
        draft: NewInode<S>,
    ) -> Result<Arc<Node<S>>> {
        let time = now_after::<S>([dir.meta.ctime]);
        let kind = FileType::from_raw_mode(draft.mode);
        let mut mode = draft.mode;
        let mut gid = cx.gid;
        if dir.meta.mode & S_ISGID != 0 {
            gid = dir.meta.gid;
            if kind == FileType::Directory {
                mode |= S_ISGID;
            } else if mode & (S_ISGID | S_IXGRP) == S_ISGID | S_IXGRP
                && !(cx.uid == 0 || cx.gid == gid || cx.groups.contains(&gid))
            {
                // A caller outside of the group must not create programs that run as the group.
                mode &= !S_ISGID;
            }
        }
        let (mode, access, default) = inherit(dir, kind, mode, draft.umask);
        let meta =
            Meta { mode, uid: cx.uid, gid, rdev: draft.rdev, atime: time, mtime: time, ctime: time, btime: time };
        let acls = [(acl::ACCESS, &access), (acl::DEFAULT, &default)];
        let mut xattrs = [Xattr { name: &[], value: &[] }; 2];
        let mut count = 0;
        for (name, value) in acls {
            if let Some(value) = value {
                xattrs[count] = Xattr { name, value };
                count += 1;
            }
        }
        let target: &[u8] = if let Body::Symlink(target) = &draft.body { target } else { &[] };
        let attributes = xattrs[..count].iter().map(|xattr| xattr_bytes(xattr.name, xattr.value));
        let bytes = INODE_BYTES + target_bytes(target) + attributes.sum::<u64>();
        let reserved = self.reserve(SpaceAmount { inodes: 1, bytes })?;
        let ino = Ino(self.next_ino.fetch_add(1, Ordering::Relaxed));
        let at = name.map(|name| At { dir: dir_node.ino, name });
        log(&self.store, || Record::Make { ino, meta, target, xattrs: &xattrs[..count], at })?;
        reserved.keep();
        let nlink = if kind == FileType::Directory { 2 } else { u32::from(name.is_some()) };
        let mut state = State::new(meta, nlink, draft.body);
        for xattr in &xattrs[..count] {
            state.put_xattr(xattr.name, Some(xattr.value));
        }
        let node = Arc::new(Node::new(ino, dir_node.ino, state));
        node.hold();
        self.table.insert(Arc::clone(&node));
        if let (Some(name), Ok(names)) = (name, dir.dir_mut()) {
            names.insert(name, Arc::clone(&node));
            dir.nlink += u32::from(kind == FileType::Directory);
            (dir.meta.mtime, dir.meta.ctime) = (time, time);
        }
        Ok(node)
    }

    fn make_named(&self, cx: &Caller<'_>, (dir, name): (Ino, Name<'_>), draft: NewInode<S>) -> Result<Arc<Node<S>>> {
        let change = self.begin()?;
        let node = self.table.get(dir)?;
        let mut state = node.write();
        if state.dir_mut()?.get(name).is_some() {
            return Err(Errno::EXIST);
        }
        let is_dir = FileType::from_raw_mode(draft.mode) == FileType::Directory;
        if is_dir && state.nlink >= LINKS_MAX {
            return Err(Errno::MLINK);
        }
        let made = self.make(cx, (&node, &mut state), Some(name), draft)?;
        drop(state);
        drop(change);
        self.changes.publish(cx.session, || Change::Entry { dir, name: name.to_buf() });
        self.changes.publish_event(cx.session, || {
            Some(Event::Created { dir, name: name.to_buf(), is_dir, ino: Some(made.ino) })
        });
        Ok(made)
    }

    /// Creates a regular file, held for the caller.
    pub(crate) fn make_file(&self, cx: &Caller<'_>, at: (Ino, Name<'_>), new: &CreateArgs) -> Result<Arc<Node<S>>> {
        let mode = FileType::RegularFile.as_raw_mode() | (new.mode & !S_IFMT);
        let body = Body::File(FileBody::default());
        self.make_named(cx, at, NewInode { mode, umask: new.umask, rdev: 0, body })
    }

    /// Creates a regular file without a name, held for the caller.
    pub(crate) fn make_unnamed(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        new: &CreateArgs,
        linkable: bool,
    ) -> Result<Arc<Node<S>>> {
        let _change = self.begin()?;
        let node = self.table.get(dir)?;
        let mut state = node.write();
        state.dir_mut()?;
        let mode = FileType::RegularFile.as_raw_mode() | (new.mode & !S_IFMT);
        let body = Body::File(FileBody::default());
        let made = self.make(cx, (&node, &mut state), None, NewInode { mode, umask: new.umask, rdev: 0, body })?;
        made.write().linkable = linkable;
        Ok(made)
    }

    pub(crate) fn mknod(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        let kind = match FileType::from_raw_mode(new.mode) {
            FileType::Unknown if new.mode & S_IFMT == 0 => FileType::RegularFile,
            FileType::Unknown | FileType::Symlink => return Err(Errno::INVAL),
            FileType::Directory => return Err(Errno::PERM),
            kind => kind,
        };
        let is_device = matches!(kind, FileType::BlockDevice | FileType::CharacterDevice);
        let is_file = kind == FileType::RegularFile;
        let draft = NewInode {
            mode: kind.as_raw_mode() | (new.mode & !S_IFMT),
            umask: new.umask,
            rdev: if is_device { new.rdev } else { 0 },
            body: if is_file { Body::File(FileBody::default()) } else { Body::Special },
        };
        self.entry(&self.make_named(cx, (dir, name), draft)?)
    }

    pub(crate) fn mkdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        // As in Linux, mkdir ignores suid and sgid.
        let mode = FileType::Directory.as_raw_mode() | (new.mode & 0o1777);
        let draft = NewInode { mode, umask: new.umask, rdev: 0, body: Body::Dir(Box::<Dir<S>>::default()) };
        self.entry(&self.make_named(cx, (dir, name), draft)?)
    }

    pub(crate) fn symlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        if target.is_empty() || target.contains(&0) {
            return Err(Errno::INVAL);
        }
        if target.len() > TARGET_BYTES_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        let mode = FileType::Symlink.as_raw_mode() | 0o777;
        let draft = NewInode { mode, umask: 0, rdev: 0, body: Body::Symlink(target.into()) };
        self.entry(&self.make_named(cx, (dir, name), draft)?)
    }

    pub(crate) fn readlink(&self, _: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
        let node = self.table.get(ino)?;
        let target = match &node.read().body {
            Body::Symlink(target) => target.to_vec(),
            _ => return Err(Errno::INVAL),
        };
        self.accessed(&node);
        Ok(target)
    }

    pub(crate) fn link(&self, cx: &Caller<'_>, ino: Ino, dir: Ino, name: Name<'_>) -> Result<Entry> {
        let change = self.begin()?;
        let (node, dir_node) = (self.table.get(ino)?, self.table.get(dir)?);
        let mut dir_state = dir_node.write();
        if dir_state.dir_mut()?.get(name).is_some() {
            return Err(Errno::EXIST);
        }
        if node.is_dir() {
            return Err(Errno::PERM);
        }
        let mut state = node.write();
        if state.ended || (state.nlink == 0 && !state.linkable) {
            return Err(Errno::NOENT);
        }
        if state.nlink >= LINKS_MAX {
            return Err(Errno::MLINK);
        }
        // The first name is included in the inode's own space.
        let bytes = if state.nlink == 0 { 0 } else { INODE_BYTES };
        let reserved = self.reserve(SpaceAmount { inodes: 0, bytes })?;
        self.sync_attr(&node, &mut state)?;
        let time = now_after::<S>([dir_state.meta.ctime, state.meta.ctime]);
        log(&self.store, || Record::Link { ino, at: At { dir, name }, time })?;
        reserved.keep();
        state.nlink += 1;
        state.linkable = false;
        state.meta.ctime = time;
        node.hold();
        dir_state.dir_mut()?.insert(name, Arc::clone(&node));
        (dir_state.meta.mtime, dir_state.meta.ctime) = (time, time);
        drop(state);
        drop(dir_state);
        drop(change);
        self.changes.publish(cx.session, || Change::Entry { dir, name: name.to_buf() });
        self.changes.publish_event(cx.session, || {
            Some(Event::Created { dir, name: name.to_buf(), is_dir: false, ino: Some(ino) })
        });
        self.changes.publish(cx.session, || Change::Attr { ino });
        self.entry(&node)
    }

    pub(crate) fn unlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, (dir, name), false)
    }

    pub(crate) fn rmdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, (dir, name), true)
    }

    fn remove(&self, cx: &Caller<'_>, (dir, name): (Ino, Name<'_>), directory: bool) -> Result<()> {
        let change = self.begin()?;
        let dir_node = self.table.get(dir)?;
        let mut dir_state = dir_node.write();
        let node = Arc::clone(dir_state.dir()?.get(name).ok_or(Errno::NOENT)?);
        match (node.is_dir(), directory) {
            (true, false) => return Err(Errno::ISDIR),
            (false, true) => return Err(Errno::NOTDIR),
            _ => {}
        }
        let mut state = node.write();
        if let Body::Dir(names) = &state.body
            && !names.is_empty()
        {
            return Err(Errno::NOTEMPTY);
        }
        self.sync_attr(&node, &mut state)?;
        let time = now_after::<S>([dir_state.meta.ctime, state.meta.ctime]);
        log(&self.store, || Record::Unlink { at: At { dir, name }, time })?;
        dir_state.dir_mut()?.remove(name);
        (dir_state.meta.mtime, dir_state.meta.ctime) = (time, time);
        dir_state.nlink -= u32::from(directory);
        self.taken.remove(state.drop_link(time));
        let has_names = state.nlink > 0;
        drop(dir_state);
        self.end_if_unused(&node, state);
        drop(change);
        self.changes.publish(cx.session, || Change::Removed { dir, name: name.to_buf(), ino: node.ino });
        let event = || Event::Removed { dir, name: name.to_buf(), is_dir: directory, ino: Some(node.ino) };
        self.changes.publish_event(cx.session, || Some(event()));
        if has_names {
            self.changes.publish(cx.session, || Change::Attr { ino: node.ino });
        }
        Ok(())
    }
}

impl<S: Store> State<S> {
    /// Removes one name; a directory has only one. Returns the space of the name; the last name's belongs to the inode.
    pub(crate) fn drop_link(&mut self, time: ferry_vfs::Timespec) -> SpaceAmount {
        let before = self.metadata_bytes();
        self.nlink = if matches!(self.body, Body::Dir(_)) { 0 } else { self.nlink.saturating_sub(1) };
        self.meta.ctime = time;
        SpaceAmount { inodes: 0, bytes: before - self.metadata_bytes() }
    }
}

type Value = Option<Vec<u8>>;

/// Returns the mode, access ACL and default ACL of a new file in a directory.
fn inherit<S: Store>(dir: &State<S>, kind: FileType, mode: u32, umask: u32) -> (u32, Value, Value) {
    if kind == FileType::Symlink {
        return (mode, None, None);
    }
    let value = dir.xattr(acl::DEFAULT);
    let Some(mut access) = value.and_then(|value| Acl::parse(value).ok().flatten()) else {
        return (mode & !(umask & 0o777), None, None);
    };
    let default = value.filter(|_| kind == FileType::Directory).map(<[u8]>::to_vec);
    let mode = access.restrict_to(mode);
    (mode, access.is_extended().then(|| access.to_bytes()), default)
}
