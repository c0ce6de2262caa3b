//! Renames: the only change with several directories, and so the reason for the order of locks.
//!
//! # The order of locks
//!
//! 1. The gate (shared), where the store keeps a journal.
//! 2. [`Tree::renames`], to move a name between two directories, or to put a directory in the place of another one. While it is held no
//!    directory changes its parent, so ancestor relations are stable.
//! 3. Directories, ancestors before descendants; unrelated directories by number.
//! 4. Everything else, by number.
//!
//! Without `renames` a thread locks a directory, and then inodes in it of which at most one is a directory. So only one thread at a time
//! locks directories in another order than from parent to child, and there is no cycle of waits. The locks of the shards of the tables come
//! after all of these, and only the store takes locks inside them.

use std::sync::atomic::Ordering;
use std::sync::{Arc, RwLockWriteGuard};

use ferry_vfs::sync::lock;
use ferry_vfs::{Caller, Change, Errno, Event, FileType, Ino, Name, RenameFlags, Result, Timespec};

use super::attrs::now_after;
use super::names::LINKS_MAX;
use super::node::{Body, Node, State};
use super::space::{INODE_BYTES, Reservation, SpaceAmount};
use super::{Tree, log};
use crate::store::{At, Meta, Record, Store};

type Guard<'a, S> = RwLockWriteGuard<'a, State<S>>;

/// The two directories of a rename, locked; the second is `None` if they are equal.
struct Dirs<'a, S: Store> {
    from: Guard<'a, S>,
    to: Option<Guard<'a, S>>,
}

impl<S: Store> Dirs<'_, S> {
    fn to(&mut self) -> &mut State<S> {
        self.to.as_deref_mut().unwrap_or(&mut self.from)
    }
}

/// The inodes of a rename, looked up.
struct Move<'a, S: Store> {
    from: (&'a Arc<Node<S>>, Name<'a>),
    to: (&'a Arc<Node<S>>, Name<'a>),
    source: Arc<Node<S>>,
    target: Option<Arc<Node<S>>>,
    flags: RenameFlags,
}

impl<S: Store> Tree<S> {
    /// Returns whether `above` is `below` or an ancestor of it. The result is stable only while no directory moves.
    pub(super) fn is_above(&self, above: &Node<S>, below: &Node<S>) -> bool {
        let mut at = below.ino;
        loop {
            if at == above.ino {
                return true;
            }
            let Ok(node) = self.table.get(at) else { return false };
            let parent = Ino(node.parent.load(Ordering::Acquire));
            if parent == at {
                return false;
            }
            at = parent;
        }
    }

    fn lock_dirs<'a>(&self, from: &'a Arc<Node<S>>, to: &'a Arc<Node<S>>) -> Dirs<'a, S> {
        if Arc::ptr_eq(from, to) {
            return Dirs { from: from.write(), to: None };
        }
        let from_first = self.is_above(from, to) || (!self.is_above(to, from) && from.ino < to.ino);
        if from_first {
            let from = from.write();
            Dirs { from, to: Some(to.write()) }
        } else {
            let to = to.write();
            Dirs { from: from.write(), to: Some(to) }
        }
    }

    pub(crate) fn rename(
        &self,
        cx: &Caller<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        let all = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE | RenameFlags::WHITEOUT;
        let others = RenameFlags::NOREPLACE | RenameFlags::WHITEOUT;
        if !all.contains(flags) || (flags.contains(RenameFlags::EXCHANGE) && flags.intersects(others)) {
            return Err(Errno::INVAL);
        }
        let change = self.begin()?;
        let (from_dir, to_dir) = (self.table.get(from.0)?, self.table.get(to.0)?);
        let between = from.0 != to.0;
        let mut renames = between.then(|| lock(&self.renames));
        let (mut dirs, source, target) = loop {
            let mut dirs = self.lock_dirs(&from_dir, &to_dir);
            let source = Arc::clone(dirs.from.dir()?.get(from.1).ok_or(Errno::NOENT)?);
            let target = dirs.to().dir()?.get(to.1).cloned();
            let is_pair = source.is_dir() && target.as_ref().is_some_and(|target| target.is_dir());
            if renames.is_some() || !is_pair {
                break (dirs, source, target);
            }
            drop(dirs);
            // The names may refer to others by then.
            renames = Some(lock(&self.renames));
        };
        let step = Move { from: (&from_dir, from.1), to: (&to_dir, to.1), source, target, flags };
        if flags.contains(RenameFlags::NOREPLACE) && step.target.is_some() {
            return Err(Errno::EXIST);
        }
        if flags.contains(RenameFlags::EXCHANGE) && step.target.is_none() {
            return Err(Errno::NOENT);
        }
        if between {
            self.refuse_loops(&step)?;
        }
        let Some(unnamed) = self.apply_rename(cx, &step, &mut dirs)? else { return Ok(()) };
        drop(dirs);
        drop(renames);
        if let Some(node) = &unnamed {
            self.end_if_unused(node, node.write());
        }
        drop(change);
        self.publish_rename(cx, from, to, &step, unnamed.as_ref());
        Ok(())
    }

    /// Refuses to move a directory into itself.
    fn refuse_loops(&self, step: &Move<'_, S>) -> Result<()> {
        if step.source.is_dir() && self.is_above(&step.source, step.to.0) {
            return Err(Errno::INVAL);
        }
        match &step.target {
            Some(target) if target.is_dir() && self.is_above(target, step.from.0) => {
                Err(if step.flags.contains(RenameFlags::EXCHANGE) { Errno::INVAL } else { Errno::NOTEMPTY })
            }
            _ => Ok(()),
        }
    }

    /// Checks, logs and applies the rename. Returns the inode that lost a name; `None` if there was nothing to do.
    #[allow(clippy::type_complexity, reason = "the two questions are not one")]
    fn apply_rename(
        &self,
        cx: &Caller<'_>,
        step: &Move<'_, S>,
        dirs: &mut Dirs<'_, S>,
    ) -> Result<Option<Option<Arc<Node<S>>>>> {
        let exchange = step.flags.contains(RenameFlags::EXCHANGE);
        if let Some(target) = &step.target {
            if Arc::ptr_eq(target, &step.source) {
                // Two names of one inode: POSIX requires no effect.
                return Ok(None);
            }
            match (step.source.is_dir(), target.is_dir()) {
                (true, false) if !exchange => return Err(Errno::NOTDIR),
                (false, true) if !exchange => return Err(Errno::ISDIR),
                _ => {}
            }
        }
        dirs.to().dir_mut()?;
        let moved_dirs =
            i64::from(step.source.is_dir()) - step.target.as_ref().map_or(0, |target| i64::from(target.is_dir()));
        if dirs.to.is_some() && moved_dirs > 0 && dirs.to().nlink >= LINKS_MAX {
            return Err(Errno::MLINK);
        }
        let (mut source, mut target) = lock_pair(&step.source, step.target.as_ref());
        if let Some(Body::Dir(names)) = target.as_ref().map(|target| &target.body)
            && !exchange
            && !names.is_empty()
        {
            return Err(Errno::NOTEMPTY);
        }
        for (node, state) in std::iter::once((&step.source, &mut source)).chain(step.target.iter().zip(&mut target)) {
            self.sync_attr(node, state)?;
        }
        let all = std::iter::once(&dirs.from).chain(&dirs.to).chain([&source]).chain(&target);
        let time = now_after::<S>(all.map(|state| state.meta.ctime));
        let whiteout = self.draft_whiteout(cx, step, time)?;
        log(&self.store, || Record::Rename {
            from: At { dir: step.from.0.ino, name: step.from.1 },
            to: At { dir: step.to.0.ino, name: step.to.1 },
            exchange,
            whiteout: whiteout.as_ref().map(|(ino, meta, _)| (*ino, *meta)),
            time,
        })?;
        source.meta.ctime = time;
        if let Some(target) = &mut target {
            if exchange {
                target.meta.ctime = time;
            } else {
                self.taken.remove(target.drop_link(time));
            }
        }
        drop((source, target));
        let whiteout = whiteout.map(|(ino, meta, reserved)| {
            reserved.keep();
            let node = Arc::new(Node::new(ino, step.from.0.ino, State::new(meta, 1, Body::Special)));
            self.table.insert(Arc::clone(&node));
            node
        });
        move_names(step, dirs, whiteout, time);
        Ok(Some(step.target.clone().filter(|_| !exchange)))
    }

    /// Prepares the whiteout that a rename leaves, if requested.
    fn draft_whiteout(
        &self,
        cx: &Caller<'_>,
        step: &Move<'_, S>,
        time: Timespec,
    ) -> Result<Option<(Ino, Meta, Reservation<'_>)>> {
        if !step.flags.contains(RenameFlags::WHITEOUT) {
            return Ok(None);
        }
        let reserved = self.reserve(SpaceAmount { inodes: 1, bytes: INODE_BYTES })?;
        let mode = FileType::CharacterDevice.as_raw_mode();
        let (uid, gid) = (cx.uid, cx.gid);
        let meta = Meta { mode, uid, gid, rdev: 0, atime: time, mtime: time, ctime: time, btime: time };
        Ok(Some((Ino(self.next_ino.fetch_add(1, Ordering::Relaxed)), meta, reserved)))
    }

    fn publish_rename(
        &self,
        cx: &Caller<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        step: &Move<'_, S>,
        unnamed: Option<&Arc<Node<S>>>,
    ) {
        let changes = &self.changes;
        changes.publish(cx.session, || Change::Entry { dir: from.0, name: from.1.to_buf() });
        if let Some(node) = unnamed {
            changes.publish(cx.session, || Change::Removed { dir: to.0, name: to.1.to_buf(), ino: node.ino });
        }
        changes.publish(cx.session, || Change::Entry { dir: to.0, name: to.1.to_buf() });
        changes.publish_event(cx.session, || {
            let (from, to) = ((from.0, from.1.to_buf()), (to.0, to.1.to_buf()));
            let exchanged = step.flags.contains(RenameFlags::EXCHANGE);
            Some(Event::Renamed { from, to, is_dir: step.source.is_dir(), exchanged })
        });
        if step.flags.contains(RenameFlags::WHITEOUT) {
            let created = || Event::Created { dir: from.0, name: from.1.to_buf(), is_dir: false, ino: None };
            changes.publish_event(cx.session, || Some(created()));
        }
        for node in std::iter::once(&step.source).chain(&step.target) {
            changes.publish(cx.session, || Change::Attr { ino: node.ino });
        }
    }
}

/// Moves the names. The directories are locked, their inodes no longer.
fn move_names<S: Store>(step: &Move<'_, S>, dirs: &mut Dirs<'_, S>, whiteout: Option<Arc<Node<S>>>, time: Timespec) {
    let removed = "both directories were checked under the locks that are still held";
    let exchanged = step.target.as_ref().filter(|_| step.flags.contains(RenameFlags::EXCHANGE));
    let names = dirs.from.dir_mut().expect(removed);
    // A name that stays keeps its place in listings.
    match exchanged.cloned().or(whiteout) {
        Some(node) => names.replace(step.from.1, node),
        None => names.remove(step.from.1),
    };
    if let Some(target) = exchanged {
        dirs.from.nlink += u32::from(target.is_dir());
        target.parent.store(step.from.0.ino.0, Ordering::Release);
    }
    let moved = Arc::clone(&step.source);
    if let Some(target) = &step.target {
        dirs.to().dir_mut().expect(removed).replace(step.to.1, moved);
        dirs.to().nlink -= u32::from(target.is_dir());
    } else {
        dirs.to().dir_mut().expect(removed).insert(step.to.1, moved);
    }
    dirs.from.nlink -= u32::from(step.source.is_dir());
    dirs.to().nlink += u32::from(step.source.is_dir());
    step.source.parent.store(step.to.0.ino.0, Ordering::Release);
    for dir in std::iter::once(&mut dirs.from).chain(&mut dirs.to) {
        (dir.meta.mtime, dir.meta.ctime) = (time, time);
    }
}

/// Locks the moved inode and the replaced one: directories first, then by number.
fn lock_pair<'a, S: Store>(
    source: &'a Arc<Node<S>>,
    target: Option<&'a Arc<Node<S>>>,
) -> (Guard<'a, S>, Option<Guard<'a, S>>) {
    let Some(target) = target else { return (source.write(), None) };
    if (!source.is_dir(), source.ino) < (!target.is_dir(), target.ino) {
        let source = source.write();
        (source, Some(target.write()))
    } else {
        let target = target.write();
        (source.write(), Some(target))
    }
}
