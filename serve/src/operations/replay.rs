//! Requests of an agent that replays an event.
//!
//! Nothing here changes the source. What a request would change is true already, or has been overtaken by what happened
//! later; either way the reply is about the present. A name that was made and has gone since is told of with a
//! placeholder: an inode that only the client's kernel knows, until the events after it remove the name.

use std::time::Duration;

use ferry_engine::ReplyBuffer;
use ferry_vfs::sync::lock;
use ferry_vfs::{Attr, Entry, Errno, Event, FileType, Handle, Ino, Name, NameBuf, OFlags, Place, Result};
use ferry_wire::events::Announcement;
use ferry_wire::fuse::{OpenFlags, Opened, Operation, Reply, Timeouts};

use crate::carrier::Served;
use crate::dispatch::changes_something;
use crate::events::{Active, Placeholder};
use crate::server::{Context, Server};

/// The handle of a file that was opened in a replay, which no source has opened.
const REPLAY_HANDLE: Handle = Handle(u64::MAX - 0xfe57);

fn is_at((dir, name): (Ino, Name<'_>), (other, old): (Ino, &NameBuf)) -> bool {
    dir == other && name == old.as_name()
}

impl Server {
    /// The agent is about to replay an event.
    pub(super) fn announce(&self, cx: &Context<'_>, input: &[u8], buffer: &mut impl ReplyBuffer) -> Result<Served> {
        let announcement = Announcement::decode(input).map_err(|_| Errno::INVAL)?;
        let queue = cx.session.events.queue().ok_or(Errno::NOENT)?;
        cx.session.events.lease.renew();
        // The one before has ended in any case.
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

    /// The type of what a name refers to.
    fn kind_now(&self, cx: &Context<'_>, dir: Ino, name: Name<'_>) -> Option<FileType> {
        let entry = self.share.source.lookup(&cx.caller, dir, name).ok()?;
        self.share.source.forget(entry.ino, 1);
        Some(entry.attr.kind())
    }

    /// Serves a request of the agent; `None` if it only reads, and is served as any other.
    pub(super) fn replay(
        &self,
        cx: &Context<'_>,
        operation: &Operation<'_>,
        buffer: &mut impl ReplyBuffer,
    ) -> Option<Result<Served>> {
        debug_assert!(cx.is_of_agent(), "others are served as any");
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
                Some(announced(cx).map(|()| cx.done(buffer, &Reply::Open(Opened::new(REPLAY_HANDLE, flags)))))
            }
            Operation::Flush { handle: REPLAY_HANDLE, .. } => done(Ok(())),
            Operation::Release(ref release) if release.handle == REPLAY_HANDLE => done(Ok(())),
            // Those of files can set attributes.
            Operation::Ioctl { .. } => Some(Err(Errno::PERM)),
            _ if changes_something(operation) => Some(Err(Errno::PERM)),
            _ => None,
        }
    }

    /// A name that is to be made does not exist before, and one that has been removed still does.
    fn replay_lookup(&self, cx: &Context<'_>, name: Name<'_>, buffer: &mut impl ReplyBuffer) -> Option<Result<Served>> {
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
                // What was there has the other name now, if nothing has happened since. That is not told: if the client had it
                // under both names, its kernel would exchange nothing.
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
            // The reference is not counted: it is given back with those that are.
            let attr = self.attr_of_removed(cx, ino).ok()?;
            let attr = Attr { nlink: attr.nlink.saturating_add(1), ..attr };
            let entry = Entry { ino, generation: 0, attr };
            return Some(Ok(cx.done(buffer, &Reply::Entry { entry, timeouts: Timeouts::default(), dax: false })));
        }
        let kind = if is_dir { FileType::Directory } else { FileType::RegularFile };
        Some(Ok(tell(cx, replays.add_placeholder(key, kind, |ino| cx.session.knows(ino)), buffer)))
    }

    /// MKNOD, MKDIR and SYMLINK.
    fn replay_creation(
        &self,
        cx: &Context<'_>,
        name: Name<'_>,
        mode: Option<u32>,
        buffer: &mut impl ReplyBuffer,
    ) -> Result<Served> {
        let replays = &mut *lock(&cx.session.events.replays);
        let active = replays.active(cx.caller.pid).filter(|active| !active.is_done).ok_or(Errno::STALE)?;
        let Event::Created { dir, name: made, .. } = &active.event else { return Err(Errno::STALE) };
        if !is_at((cx.ino, name), (*dir, made)) {
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
        Ok(tell(cx, placeholder, buffer))
    }

    /// The attributes of an inode that may not exist any more.
    fn attr_of_removed(&self, cx: &Context<'_>, ino: Ino) -> Result<Attr> {
        match self.share.source.getattr(&cx.caller, ino, None) {
            Ok(attr) => Ok(self.visible_attr(cx, ino, attr)),
            Err(errno) => {
                let kind = cx.session.kind_of(ino).ok_or(errno)?;
                Ok(Attr { ino: ino.0, mode: kind.as_raw_mode(), blksize: 4096, ..Attr::default() })
            }
        }
    }

    /// Attributes of a file whose event is replayed, although it may have gone since. Before a change of data, the client's
    /// kernel is shown another time of change, so that it drops what it has cached, even if the clock has not moved
    /// between two writes.
    fn replay_getattr(&self, cx: &Context<'_>, reply: impl FnOnce(Attr, Duration) -> Served) -> Option<Result<Served>> {
        let replays = &mut *lock(&cx.session.events.replays);
        if let Some(placeholder) = replays.placeholder(cx.ino) {
            return Some(Ok(reply(placeholder.attr(), Duration::ZERO)));
        }
        let active = replays.active(cx.caller.pid)?;
        let (Event::Modified(place) | Event::Closed(place) | Event::Attributes(place)) = &active.event else {
            return None;
        };
        // The directory of a name is on the way to the file.
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

    /// Sets nothing.
    fn replay_setattr(&self, cx: &Context<'_>, buffer: &mut impl ReplyBuffer) -> Result<Served> {
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

/// Refuses what was not announced.
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

/// Tells the client of a placeholder, which it asks for again at each use.
fn tell(cx: &Context<'_>, placeholder: Placeholder, buffer: &mut impl ReplyBuffer) -> Served {
    let entry = Entry { ino: placeholder.ino, generation: 0, attr: placeholder.attr() };
    cx.done(buffer, &Reply::Entry { entry, timeouts: Timeouts::default(), dax: false })
}
