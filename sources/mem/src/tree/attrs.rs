//! Attributes: reading, changing, and combining them with the store's.

use std::sync::Arc;

use ferry_engine::{Shortening, Windows};
use ferry_vfs::{
    Attr, Caller, Change, Entry, Errno, Handle, Ino, Result, SessionId, SetAttr, SetTime, Timespec, without_privileges,
};

use super::acl::{self, Acl};
use super::node::{Body, Node, State};
use super::xattr::CAPABILITY;
use super::{Tree, log};
use crate::machine::{later, nanoseconds, show, timespec};
use crate::store::{Meta, Record, Store, Usage};

pub(crate) const S_IFMT: u32 = 0o170_000;
pub(crate) const S_ISUID: u32 = 0o4000;
pub(crate) const S_ISGID: u32 = 0o2000;
pub(crate) const S_IXGRP: u32 = 0o010;

/// The preferred size of a transfer in `stat`, in bytes.
const BLOCK_BYTES: u32 = 4096;
const DAY_S: i64 = 24 * 60 * 60;

/// Returns the time of a change after changes at these times: later than each of them, so that no two states of an
/// inode have equal times. (9P's `qid.version` is derived from them.)
pub(crate) fn now_after<S: Store>(lasts: impl IntoIterator<Item = Timespec>) -> Timespec {
    timespec(after(nanoseconds(S::now()), lasts))
}

/// As [`now_after`] at the time `now`, in nanoseconds.
pub(crate) fn after(now: i64, lasts: impl IntoIterator<Item = Timespec>) -> i64 {
    lasts.into_iter().map(|last| later(now, nanoseconds(last))).fold(now, i64::max)
}

/// Overlays the store's attributes on the tree's. If data changed without the tree's knowledge, so did ctime.
fn overlay(meta: &mut Meta, usage: &Usage, noted_write: Option<Timespec>) {
    let mtime = match usage.times {
        Some((atime, mtime)) => {
            meta.atime = atime;
            show(mtime);
            mtime
        }
        None => noted_write.unwrap_or(meta.mtime),
    };
    if mtime != meta.mtime {
        meta.mtime = mtime;
        meta.ctime = meta.ctime.max(mtime);
    }
}

impl<S: Store> Tree<S> {
    /// Refreshes the state from the store, without logging.
    fn refresh(&self, node: &Node<S>, state: &mut State<S>) -> Result<()> {
        let Body::File(body) = &mut state.body else { return Ok(()) };
        if body.is_live() {
            let usage = self.store.usage(node.ino, body.file.as_deref())?;
            if std::mem::take(&mut body.unknown) {
                // An open may have made the data meanwhile.
                body.has_data |= usage.size != 0 || usage.blocks != 0;
            }
            (body.size, body.blocks) = (usage.size, usage.blocks);
            overlay(&mut state.meta, &usage, node.noted_write());
            node.forget_write();
        }
        Ok(())
    }

    /// Refreshes the state and logs it: records with some of the attributes would lose times that are only noted.
    pub(crate) fn sync_attr(&self, node: &Node<S>, state: &mut State<S>) -> Result<()> {
        let before = state.meta;
        self.refresh(node, state)?;
        let meta = state.meta;
        if meta != before {
            log(&self.store, || Record::Attr { ino: node.ino, meta })?;
        }
        Ok(())
    }

    /// Returns the tree's current attributes, with size and blocks.
    pub(crate) fn present(&self, node: &Node<S>, state: &State<S>) -> Result<(Meta, u64, u64)> {
        let mut meta = state.meta;
        let (size, blocks) = match &state.body {
            Body::File(body) if body.is_live() => {
                let usage = self.store.usage(node.ino, body.file.as_deref())?;
                overlay(&mut meta, &usage, node.noted_write());
                (usage.size, usage.blocks)
            }
            Body::File(body) => (body.size, body.blocks),
            Body::Dir(dir) => (u64::try_from(dir.len()).unwrap_or_default(), 0),
            Body::Symlink(target) => (u64::try_from(target.len()).unwrap_or_default(), 0),
            Body::Special => (0, 0),
        };
        Ok((meta, size, blocks))
    }

    /// The attributes now.
    pub(crate) fn attr(&self, node: &Node<S>, state: &State<S>) -> Result<Attr> {
        let (meta, size, blocks) = self.present(node, state)?;
        Ok(Attr {
            ino: node.ino.0,
            size,
            blocks,
            atime: meta.atime,
            mtime: meta.mtime,
            ctime: meta.ctime,
            btime: Some(meta.btime),
            mode: meta.mode,
            nlink: state.nlink,
            uid: meta.uid,
            gid: meta.gid,
            rdev: meta.rdev,
            blksize: BLOCK_BYTES,
            submount: false,
        })
    }

    /// Returns the entry of an inode; the caller took the reference, which is released on an error.
    pub(crate) fn entry(&self, node: &Arc<Node<S>>) -> Result<Entry> {
        let attr = self.attr(node, &node.read());
        match attr {
            Ok(attr) => Ok(Entry { ino: node.ino, generation: 0, attr }),
            Err(error) => {
                self.release_hold(node, 1);
                Err(error)
            }
        }
    }

    pub(crate) fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        let node = self.table.get(ino)?;
        let state = node.read();
        self.attr(&node, &state)
    }

    pub(crate) fn setattr(&self, cx: &Caller<'_>, ino: Ino, _: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        // Before any lock: a client that has the file mapped may be about to map more of it.
        let _shortening = set.size.map(|size| self.shortening(cx.session, ino, size));
        let _change = self.begin()?;
        let node = self.table.get(ino)?;
        let mut state = node.write_live()?;
        self.sync_attr(&node, &mut state)?;
        let now = now_after::<S>([state.meta.ctime]);
        if let Some(size) = set.size {
            self.truncate(&node, &mut state, size)?;
        }
        self.change_meta(cx, (&node, &mut state), set, now)?;
        let attr = self.attr(&node, &state)?;
        drop(state);
        match set.size {
            Some(size) => self.changes.publish(cx.session, || Change::Data { ino, offset: size, len: u64::MAX }),
            None => self.changes.publish(cx.session, || Change::Attr { ino }),
        }
        Ok(attr)
    }

    /// Returns a guard for shortening a file to `size`; see [`Windows::shortening`].
    pub(crate) fn shortening(&self, by: SessionId, ino: Ino, size: u64) -> Shortening {
        Windows::of_process().shortening(by, || self.store.file_id(ino), size)
    }

    pub(crate) fn change_meta(
        &self,
        cx: &Caller<'_>,
        (node, state): (&Node<S>, &mut State<S>),
        set: &SetAttr,
        now: Timespec,
    ) -> Result<()> {
        let mut meta = state.meta;
        let file = !node.is_dir();
        let owner = set.uid.is_some() || set.gid.is_some();
        meta.uid = set.uid.unwrap_or(meta.uid);
        meta.gid = set.gid.unwrap_or(meta.gid);
        if file && (owner || set.clear_privileges) {
            meta.mode = without_privileges(meta.mode, state.meta.gid, cx);
        }
        if let Some(mode) = set.mode {
            meta.mode = (meta.mode & S_IFMT) | (mode & !S_IFMT);
        }
        let time = |set: Option<SetTime>| {
            set.map(|time| match time {
                SetTime::Now => now,
                SetTime::At(time) => time,
            })
        };
        let (atime, mtime) = (time(set.atime), time(set.mtime).or(set.size.map(|_| now)));
        meta.atime = atime.unwrap_or(meta.atime);
        meta.mtime = mtime.unwrap_or(meta.mtime);
        meta.ctime = set.ctime.unwrap_or(now);
        if atime.is_some() || mtime.is_some() {
            self.tell_times(node, state, (meta.atime, meta.mtime))?;
        }
        if file && (owner || set.size.is_some() || set.clear_privileges) && state.xattr(CAPABILITY).is_some() {
            self.change_xattr(node, state, (CAPABILITY, None), meta)?;
        }
        if set.mode.is_some()
            && let Some(mut acl) = state.access_acl()
        {
            acl.chmod(meta.mode);
            return self.change_xattr(node, state, (acl::ACCESS, Some(&acl.to_bytes())), meta);
        }
        log(&self.store, || Record::Attr { ino: node.ino, meta })?;
        state.meta = meta;
        Ok(())
    }

    /// Passes times set by a client to the store.
    fn tell_times(&self, node: &Node<S>, state: &State<S>, times: (Timespec, Timespec)) -> Result<()> {
        node.forget_write();
        match &state.body {
            Body::File(body) if body.has_data => self.store.set_times(node.ino, body.file.as_deref(), times),
            _ => Ok(()),
        }
    }

    /// Clears file capabilities before a write, and suid and sgid unless this caller may keep them (`None`: all stay);
    /// returns whether there was anything to clear.
    pub(crate) fn clear_privileges(
        &self,
        node: &Node<S>,
        state: &mut State<S>,
        cx: Option<&Caller<'_>>,
    ) -> Result<bool> {
        let mut meta = state.meta;
        if let Some(cx) = cx {
            meta.mode = without_privileges(meta.mode, meta.gid, cx);
        }
        let capable = state.xattr(CAPABILITY).is_some();
        if meta.mode == state.meta.mode && !capable {
            return Ok(false);
        }
        meta.ctime = now_after::<S>([meta.ctime]);
        if capable {
            self.change_xattr(node, state, (CAPABILITY, None), meta)?;
        } else {
            log(&self.store, || Record::Attr { ino: node.ino, meta })?;
            state.meta = meta;
        }
        Ok(true)
    }

    /// Updates the access time after a read, as `relatime` does: when it is older than a change, or than a day.
    pub(crate) fn accessed(&self, node: &Node<S>) {
        if self.is_access_late(&node.read().meta, node.noted_write()) {
            // Not logged separately: the next record includes it.
            node.write().meta.atime = S::now();
        }
    }

    /// Whether a read now changes the access time.
    pub(crate) fn is_access_late(&self, meta: &Meta, noted_write: Option<Timespec>) -> bool {
        let now = S::now();
        let mtime = noted_write.unwrap_or(meta.mtime);
        let is_old = meta.atime <= mtime || meta.atime <= meta.ctime || now.sec.saturating_sub(meta.atime.sec) >= DAY_S;
        is_old && meta.atime < now && !self.limits.read_only
    }

    pub(crate) fn access(&self, cx: &Caller<'_>, ino: Ino, mask: u32) -> Result<()> {
        let node = self.table.get(ino)?;
        let state = node.read();
        let Meta { mode, uid, gid, .. } = state.meta;
        let want = mask & 7;
        if want & 2 != 0 && self.limits.read_only {
            return Err(Errno::ROFS);
        }
        let in_group = |group: u32| cx.gid == group || cx.groups.contains(&group);
        let granted = if cx.uid == 0 {
            // Root may only execute files that have an execute bit.
            want & 1 == 0 || node.is_dir() || mode & 0o111 != 0
        } else if cx.uid == uid {
            (mode >> 6) & want == want
        } else if let Some(acl) = state.access_acl().filter(Acl::is_extended) {
            acl.allows(want, cx.uid, in_group, gid)
        } else if in_group(gid) {
            (mode >> 3) & want == want
        } else {
            mode & want == want
        };
        if granted { Ok(()) } else { Err(Errno::ACCESS) }
    }
}
