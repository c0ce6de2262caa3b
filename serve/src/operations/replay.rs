//! Requests of an agent that replays an event.
//!
//! Nothing here changes the source. The change that a request names has happened already, or later events have
//! overtaken it; the reply reflects the present state. A name that was created and removed since is reported as a
//! placeholder: an inode that exists only in the client's kernel until a later event removes the name.

use std::time::Duration;

use ferry_engine::ReplyBuffer;
use ferry_vfs::sync::lock;
use ferry_vfs::{Attr, Entry, Errno, Event, FileType, Handle, Ino, Name, NameBuf, OFlags, Place, Result};
use ferry_wire::events::Announcement;
use ferry_wire::fuse::{OpenFlags, OpenReply, Operation, Reply, Timeouts};

use crate::carrier::ServeOutcome;
use crate::dispatch::changes_something;
use crate::events::{Active, Placeholder};
use crate::server::{Context, Server};

/// The handle of a file that a replay opened; the source does not know it.
const REPLAY_HANDLE: Handle = Handle(u64::MAX - 0xfe57);

fn is_at((dir, name): (Ino, Name<'_>), (other, old): (Ino, &NameBuf)) -> bool {
    dir == other && name == old.as_name()
}

impl Server {
    /// Serves ANNOUNCE: the agent is about to replay an event.
    pub(super) fn announce(
        &self,
        cx: &Context<'_>,
        input: &[u8],
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        let announcement = Announcement::decode(input).map_err(|_| Errno::INVAL)?;
        let queue = cx.session.events.queue().ok_or(Errno::NOENT)?;
        cx.session.events.lease.renew();
        // The previous replay has ended.
        lock(&cx.session.events.replays).active = None;
        let (event, mut is_gone) = queue.announce(announcement.number).ok_or(Errno::NOENT)?;
        let mut mode = 0;
        if let Event::Created { dir, name, is_dir, .. } = &event {
            let found = if is_gone { None } else { self.kind_now(cx, *dir, name.as_name()) };
            is_gone = found.is_none_or(|kind| (kind == FileType::Directory) != *is_dir);
            mode = match found.filter(|_| !is_gone) {
                Some(kind) => kind.as_raw_mode(),
                None if *is_dir => FileType::Directory.as_raw_mode(),
                None => FileType::RegularFile.as_raw_mode(),
            };
        }
        let pid = cx.caller.pid;
        let (number, is_unsure) = (announcement.number, queue.is_unsure(announcement.number));
        let active = Active { pid, number, event, is_done: false, is_gone, has_attributes: false, is_unsure };
        lock(&cx.session.events.replays).active = Some(active);
        let data = Announcement { number: announcement.number, mode }.encode();
        Ok(cx.done(buffer, &Reply::Ioctl { result: 0, data: &data }))
    }

    /// Returns the type of the inode that has this name now.
    fn kind_now(&self, cx: &Context<'_>, dir: Ino, name: Name<'_>) -> Option<FileType> {
        let entry = self.share.source.lookup(&cx.caller, dir, name).ok()?;
        self.share.source.forget(entry.ino, 1);
        Some(entry.attr.kind())
    }

    /// Serves a request of the agent; returns `None` if it only reads and is served as any other.
    pub(super) fn replay(
        &self,
        cx: &Context<'_>,
        operation: &Operation<'_>,
        buffer: &mut impl ReplyBuffer,
    ) -> Option<Result<ServeOutcome>> {
        debug_assert!(cx.is_of_agent(), "only the agent replays");
        let mut done = |outcome: Result<()>| Some(outcome.map(|()| cx.done(buffer, &Reply::Empty)));
        match *operation {
            Operation::Lookup { name } => self.replay_lookup(cx, name, buffer),
            Operation::Mknod { name, ref new } => Some(self.replay_creation(cx, name, Some(new.mode), buffer)),
            Operation::Mkdir { name, .. } => {
                Some(self.replay_creation(cx, name, Some(FileType::Directory.as_raw_mode()), buffer))
            }
            Operation::Symlink { name, .. } => {
                Some(self.replay_creation(cx, name, Some(FileType::Symlink.as_raw_mode()), buffer))
            }
            Operation::Unlink { name } | Operation::Rmdir { name } => done(replay_removal(cx, name)),
            Operation::Rename { name, new_dir, new_name, .. } => done(replay_rename(cx, name, (new_dir, new_name))),
            Operation::Getattr { .. } => self.replay_getattr(cx, |attr, timeout| {
                cx.done(buffer, &Reply::Attr { attr, timeout, dax: cx.session.dax(&attr) })
            }),
            Operation::Statx { .. } => {
                self.replay_getattr(cx, |attr, timeout| cx.done(buffer, &Reply::Statx { attr, timeout }))
            }
            Operation::Setattr { .. } => Some(self.replay_setattr(cx, buffer)),
            Operation::Open { flags, .. } if flags.intersects(OFlags::WRONLY | OFlags::RDWR) => {
                let flags = OpenFlags::NOFLUSH;
                Some(announced(cx).map(|()| cx.done(buffer, &Reply::Open(OpenReply::new(REPLAY_HANDLE, flags)))))
            }
            Operation::Flush { handle: REPLAY_HANDLE, .. } => done(Ok(())),
            Operation::Release(ref release) if release.handle == REPLAY_HANDLE => done(Ok(())),
            // Ioctls of files can set attributes.
            Operation::Ioctl { .. } => Some(Err(Errno::PERM)),
            _ if changes_something(operation) => Some(Err(Errno::PERM)),
            _ => None,
        }
    }

    /// Before its event is replayed, a created name does not exist, and a removed one still does.
    fn replay_lookup(
        &self,
        cx: &Context<'_>,
        name: Name<'_>,
        buffer: &mut impl ReplyBuffer,
    ) -> Option<Result<ServeOutcome>> {
        let at = (cx.ino, name);
        let replays = &mut *lock(&cx.session.events.replays);
        let event = replays.active(cx.caller.pid).filter(|active| !active.is_done)?.event.clone();
        let key = (cx.ino, name.to_buf());
        let (is_dir, known) = match &event {
            Event::Created { dir, name, .. } if is_at(at, (*dir, name)) => return Some(Err(Errno::NOENT)),
            Event::Removed { dir, name, is_dir, ino } if is_at(at, (*dir, name)) => (*is_dir, *ino),
            Event::Renamed { from, to, is_dir, exchanged } if is_at(at, (from.0, &from.1)) => {
                if replays.placeholders.contains_key(&key) || *exchanged {
                    (*is_dir, None)
                } else {
                    let is_dir = *is_dir;
                    let (dir, name) = to.clone();
                    match self.share.source.lookup(&cx.caller, dir, name.as_name()) {
                        Ok(entry) if (entry.attr.kind() == FileType::Directory) == is_dir => {
                            return Some(self.entry(cx, None, entry, buffer));
                        }
                        Ok(entry) => self.share.source.forget(entry.ino, 1),
                        Err(_) => {}
                    }
                    (is_dir, None)
                }
            }
            Event::Renamed { from, to, exchanged, .. } if is_at(at, (to.0, &to.1)) => {
                if !exchanged {
                    return Some(Err(Errno::NOENT));
                }
                // The old inode has the other name now, unless later events changed that. It is not reported: with
                // the same inode under both names, the kernel would exchange nothing.
                (self.kind_now(cx, from.0, from.1.as_name()) == Some(FileType::Directory), None)
            }
            Event::Modified(place) | Event::Closed(place) | Event::Attributes(place) => match place {
                Place { ino, name: Some(name) } if is_at(at, (*ino, name)) => {
                    match self.share.source.lookup(&cx.caller, cx.ino, name.as_name()) {
                        Ok(entry) => return Some(self.entry(cx, Some(at.1), entry, buffer)),
                        Err(_) => (false, None),
                    }
                }
                _ => return None,
            },
            _ => return None,
        };
        if let Some(ino) = known.filter(|ino| cx.session.knows(*ino)) {
            // The reference is not counted: the client releases it together with the counted ones.
            let attr = self.attr_of_removed(cx, ino).ok()?;
            let attr = Attr { nlink: attr.nlink.saturating_add(1), ..attr };
            let entry = Entry { ino, generation: 0, attr };
            return Some(Ok(cx.done(buffer, &Reply::Entry { entry, timeouts: Timeouts::default(), dax: false })));
        }
        let kind = if is_dir { FileType::Directory } else { FileType::RegularFile };
        Some(Ok(placeholder_reply(cx, replays.add_placeholder(key, kind, |ino| cx.session.knows(ino)), buffer)))
    }

    /// MKNOD, MKDIR and SYMLINK.
    fn replay_creation(
        &self,
        cx: &Context<'_>,
        name: Name<'_>,
        mode: Option<u32>,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<ServeOutcome> {
        let replays = &mut *lock(&cx.session.events.replays);
        let active = replays.active(cx.caller.pid).filter(|active| !active.is_done).ok_or(Errno::STALE)?;
        let Event::Created { dir, name: created, .. } = &active.event else { return Err(Errno::STALE) };
        if !is_at((cx.ino, name), (*dir, created)) {
            return Err(Errno::STALE);
        }
        active.is_done = true;
        let is_gone = active.is_gone;
        let mode = mode.unwrap_or_default();
        let kind = FileType::from_raw_mode(mode);
        let key = (cx.ino, name.to_buf());
        replays.placeholders.remove(&key);
        if !is_gone && let Ok(entry) = self.share.source.lookup(&cx.caller, cx.ino, name) {
            if entry.attr.kind() == kind {
                return self.entry(cx, Some(name), entry, buffer);
            }
            self.share.source.forget(entry.ino, 1);
        }
        let placeholder = replays.add_placeholder(key, kind, |ino| cx.session.knows(ino));
        Ok(placeholder_reply(cx, placeholder, buffer))
    }

    /// Returns the attributes of an inode that may have been removed.
    fn attr_of_removed(&self, cx: &Context<'_>, ino: Ino) -> Result<Attr> {
        match self.share.source.getattr(&cx.caller, ino, None) {
            Ok(attr) => Ok(self.visible_attr(cx, ino, attr)),
            Err(errno) => {
                let kind = cx.session.kind_of(ino).ok_or(errno)?;
                Ok(Attr { ino: ino.0, mode: kind.as_raw_mode(), blksize: 4096, ..Attr::default() })
            }
        }
    }

    /// Returns the attributes of a file whose event is replayed; it may have been removed. Before a change of data
    /// the reply has a changed mtime, so that the client's kernel drops its cached data even if two writes had the
    /// same time.
    fn replay_getattr(
        &self,
        cx: &Context<'_>,
        reply: impl FnOnce(Attr, Duration) -> ServeOutcome,
    ) -> Option<Result<ServeOutcome>> {
        let replays = &mut *lock(&cx.session.events.replays);
        if let Some(placeholder) = replays.placeholder(cx.ino) {
            return Some(Ok(reply(placeholder.attr(), Duration::ZERO)));
        }
        let active = replays.active(cx.caller.pid)?;
        let (Event::Modified(place) | Event::Closed(place) | Event::Attributes(place)) = &active.event else {
            return None;
        };
        // The agent looks up the directory on its way to the file.
        if place.name.is_some() == (place.ino == cx.ino) {
            return None;
        }
        if place.name.is_none() && std::mem::take(&mut active.is_unsure) {
            // The client's kernel looks its names up again.
            return Some(Err(Errno::STALE));
        }
        let is_modified = matches!(active.event, Event::Modified(_));
        let is_first = is_modified && !std::mem::replace(&mut active.has_attributes, true);
        Some(self.attr_of_removed(cx, cx.ino).map(|mut attr| {
            attr.mtime.nsec ^= u32::from(is_first);
            reply(attr, Duration::ZERO)
        }))
    }

    /// Replies with the present attributes and sets none.
    fn replay_setattr(&self, cx: &Context<'_>, buffer: &mut impl ReplyBuffer) -> Result<ServeOutcome> {
        announced(cx)?;
        let placeholder = lock(&cx.session.events.replays).placeholder(cx.ino);
        if let Some(placeholder) = placeholder {
            let attr = placeholder.attr();
            return Ok(cx.done(buffer, &Reply::Attr { attr, timeout: Duration::ZERO, dax: false }));
        }
        let attr = self.attr_of_removed(cx, cx.ino)?;
        cx.session.sync_window_before_attr(cx.ino);
        Ok(cx.done(buffer, &Reply::Attr { attr, timeout: Duration::ZERO, dax: cx.session.dax(&attr) }))
    }
}

/// Returns STALE unless the agent has announced an event.
fn announced(cx: &Context<'_>) -> Result<()> {
    lock(&cx.session.events.replays).active(cx.caller.pid).map(|_| ()).ok_or(Errno::STALE)
}

/// UNLINK and RMDIR.
fn replay_removal(cx: &Context<'_>, name: Name<'_>) -> Result<()> {
    let replays = &mut *lock(&cx.session.events.replays);
    let active = replays.active(cx.caller.pid).filter(|active| !active.is_done).ok_or(Errno::STALE)?;
    match &active.event {
        Event::Removed { dir, name: old, .. } if is_at((cx.ino, name), (*dir, old)) => {
            active.is_done = true;
            replays.placeholders.remove(&(cx.ino, name.to_buf()));
            Ok(())
        }
        _ => Err(Errno::STALE),
    }
}

/// RENAME and RENAME2.
fn replay_rename(cx: &Context<'_>, name: Name<'_>, new: (Ino, Name<'_>)) -> Result<()> {
    let replays = &mut *lock(&cx.session.events.replays);
    let active = replays.active(cx.caller.pid).filter(|active| !active.is_done).ok_or(Errno::STALE)?;
    match &active.event {
        Event::Renamed { from, to, exchanged, .. }
            if is_at((cx.ino, name), (from.0, &from.1)) && is_at(new, (to.0, &to.1)) =>
        {
            let (from, to, exchanged) = (from.clone(), to.clone(), *exchanged);
            active.is_done = true;
            let moved = replays.placeholders.remove(&from);
            let replaced = replays.placeholders.remove(&to);
            replays.placeholders.extend(moved.map(|moved| (to, moved)));
            replays.placeholders.extend(replaced.filter(|_| exchanged).map(|replaced| (from, replaced)));
            Ok(())
        }
        _ => Err(Errno::STALE),
    }
}

/// Replies with a placeholder, which the client must not cache.
fn placeholder_reply(cx: &Context<'_>, placeholder: Placeholder, buffer: &mut impl ReplyBuffer) -> ServeOutcome {
    let entry = Entry { ino: placeholder.ino, generation: 0, attr: placeholder.attr() };
    cx.done(buffer, &Reply::Entry { entry, timeouts: Timeouts::default(), dax: false })
}
