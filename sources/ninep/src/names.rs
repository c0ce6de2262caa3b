//! Names: finding, making, renaming and removing.

use std::sync::Arc;

use ferry_vfs::sync::lock;
use ferry_vfs::{
    Caller, Change, CreateArgs, Entry, Errno, Event, FileType, Handle, Ino, Name, NameBuf, OFlags, RenameFlags, Result,
    SessionId,
};
use ferry_wire::ninep::{Fid, Getattr, Qid, QidKind, Reply, Request, Step, Steps};

use crate::client::{Shared, WANTED, attributes};
use crate::connection::{Outcome, Outgoing, RequestError};
use crate::inode::{Inode, Place, walk, walked};
use crate::session::{OwnedFid, Session};

/// Permission bits.
const PERMISSIONS: u32 = 0o7777;
const S_ISGID: u32 = 0o2000;
/// Flags for the server. Appends use offsets, and syncs use Tfsync.
const CREATE_FLAGS: OFlags = OFlags::WRONLY.union(OFlags::RDWR).union(OFlags::TRUNC).union(OFlags::EXCL);

/// A walk to one name, and a request for its attributes.
struct LookupStep {
    fid: Fid,
    found: Outcome<Option<(Qid, Option<Getattr>)>>,
}

impl Shared {
    pub(crate) fn lookup(&self, _: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        let dir = self.inodes.dir(dir)?;
        self.link.with_retry(|session| self.find(session, &dir, name))
    }

    pub(crate) fn lookup_parent(&self, _: &Caller<'_>, dir: Ino) -> Result<Entry> {
        let dir = self.inodes.dir(dir)?;
        let Some(Place { dir: parent, .. }) = dir.place() else {
            return Ok(Entry::new(Ino::ROOT, self.getattr_of(&dir)?));
        };
        match parent.place() {
            None => Ok(Entry::new(Ino::ROOT, self.getattr_of(&parent)?)),
            Some(Place { dir, name }) => self.link.with_retry(|session| self.find(session, &dir, name.as_name())),
        }
    }

    pub(crate) fn find(&self, session: &Arc<Session>, dir: &Arc<Inode>, name: Name<'_>) -> Outcome<Entry> {
        let found = self.find_all(session, dir, &[name.to_buf()])?.pop();
        found.unwrap_or(Err(RequestError::Errno(Errno::IO)))
    }

    /// Finds names in a directory by messages that do not wait for each other. Each that is found has a reference.
    pub(crate) fn find_all(
        &self,
        session: &Arc<Session>,
        dir: &Arc<Inode>,
        names: &[NameBuf],
    ) -> Outcome<Vec<Outcome<Entry>>> {
        let dir_fid = dir.fid(session, &self.link.options)?;
        let mut steps = walk_to(session, dir_fid.fid(), names);
        ask_again(session, &mut steps);
        let entries = steps.into_iter().zip(names).map(|(step, name)| {
            let found = match step.found {
                Ok(Some((qid, Some(found)))) if qid.path == found.qid.path => found,
                Ok(Some(_)) => {
                    drop(OwnedFid::new(session, step.fid));
                    return Err(RequestError::Errno(Errno::IO));
                }
                Ok(None) => {
                    session.free_fid(step.fid);
                    return Err(RequestError::Errno(Errno::NOENT));
                }
                Err(fail) => {
                    session.free_fid(step.fid);
                    return Err(fail);
                }
            };
            let held = OwnedFid::new(session, step.fid);
            let place = Place { dir: Arc::clone(dir), name: name.clone() };
            let inode = self.inodes.add_reference(session, &found, place, held, &self.link.options)?;
            let mut attr = inode.note(&found).inspect_err(|_| self.inodes.forget(inode.ino, 1))?;
            if inode.cached().is_some_and(|file| file.size() != attr.size) {
                // Only attributes that were requested after a mark can be ordered.
                attr = self.getattr_of(&inode).inspect_err(|_| self.inodes.forget(inode.ino, 1))?;
            }
            Ok(Entry::new(inode.ino, attr))
        });
        Ok(entries.collect())
    }

    /// Called when this client changed a name: listings of the directory must see it, and caches are notified.
    fn publish_entry(&self, cx: &Caller<'_>, dir: &Inode, name: Name<'_>) {
        dir.change();
        self.changes.publish(cx.session, || Change::Entry { dir: dir.ino, name: name.to_buf() });
    }

    /// Calls `act` as [`Link::with_retry`](crate::link::Link::with_retry) does. If it is unknown whether names were changed, because the
    /// connection was lost, clients revalidate them, the caller's too: its kernel has them as they were.
    fn change_names<T>(&self, names: &[(&Inode, Name<'_>)], act: impl FnMut(&Arc<Session>) -> Outcome<T>) -> Result<T> {
        self.link.with_retry(act).inspect_err(|errno| {
            for (dir, name) in names.iter().filter(|_| *errno == Errno::IO) {
                dir.change();
                self.changes.publish(SessionId::default(), || Change::Unsure { dir: dir.ino, name: name.to_buf() });
            }
        })
    }

    /// Publishes that this client made a name.
    fn publish_created(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, found: &Entry) {
        let (is_dir, ino) = (found.attr.kind() == FileType::Directory, Some(found.ino));
        self.publish_event(cx, || Event::Created { dir, name: name.to_buf(), is_dir, ino });
    }

    /// Returns the group of a new file in a directory, and whether it inherits setgid. With setgid it is the
    /// directory's group, as in Linux's client (`v9fs_get_fsgid_for_create`), for servers that do not derive it.
    fn group_in(&self, dir: &Inode, cx: &Caller<'_>) -> Result<(u32, u32)> {
        let seen = lock(&dir.seen).map(|(_, attr)| attr);
        let attr = seen.map_or_else(|| self.getattr_of(dir), Ok)?;
        Ok(if attr.mode & S_ISGID == 0 { (cx.gid, 0) } else { (attr.gid, S_ISGID) })
    }

    /// A directory in which a caller makes something. What is made belongs to the user that the fid was attached as.
    fn callers_dir(&self, session: &Arc<Session>, cx: &Caller<'_>, dir: &Inode) -> Outcome<Arc<OwnedFid>> {
        let options = &self.link.options;
        match cx.uid {
            u32::MAX => dir.fid(session, options),
            uid if uid == options.uid => dir.fid(session, options),
            uid => {
                // That one is known to be the directory, and of the other one it is enough that it has the same number.
                dir.fid(session, options)?;
                dir.find(session, uid, options)
            }
        }
    }

    /// Makes something that is no open file, and finds it.
    fn make(
        &self,
        cx: &Caller<'_>,
        dir: Ino,
        name: Name<'_>,
        request: impl Fn(Fid, (u32, u32)) -> Outgoing,
    ) -> Result<Entry> {
        let dir = self.inodes.dir(dir)?;
        let group = self.group_in(&dir, cx)?;
        self.change_names(&[(&dir, name)], |session| {
            let fid = self.callers_dir(session, cx, &dir)?;
            let message = session.send_one(request(fid.fid(), group)).wait(session)?;
            session.take(&message, |_| Some(()))
        })?;
        self.publish_entry(cx, &dir, name);
        let entry = self.link.with_retry(|session| self.find(session, &dir, name))?;
        self.publish_created(cx, dir.ino, name, &entry);
        Ok(entry)
    }

    pub(crate) fn mkdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        let mode = new.mode & !new.umask & PERMISSIONS;
        self.make(cx, dir, name, |dir, (gid, sgid)| {
            Outgoing::new(&Request::Mkdir { dir, name, mode: mode | sgid, gid })
        })
    }

    pub(crate) fn mknod(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry> {
        let (mode, rdev) = (new.mode & !(new.umask & PERMISSIONS), new.rdev);
        self.make(cx, dir, name, |dir, (gid, _)| Outgoing::new(&Request::Mknod { dir, name, mode, rdev, gid }))
    }

    pub(crate) fn symlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.make(cx, dir, name, |dir, (gid, _)| Outgoing::new(&Request::Symlink { dir, name, target, gid }))
    }

    /// Finds a file that was created and is open. Its errors do not make the caller create it again.
    fn find_created(&self, session: &Arc<Session>, dir: &Arc<Inode>, name: Name<'_>) -> Outcome<Entry> {
        let is_short =
            |fail: &RequestError| matches!(fail, RequestError::Errno(errno) if session.is_short_of_fids(*errno));
        let mut found = self.find(session, dir, name);
        if found.as_ref().is_err_and(is_short) && self.link.release_fids(session) {
            found = self.find(session, dir, name);
        }
        found.map_err(|fail| match fail {
            // It is no longer open.
            RequestError::Lost { .. } => RequestError::Lost { harmless: false },
            fail if is_short(&fail) => RequestError::Errno(Errno::IO),
            fail => fail,
        })
    }

    pub(crate) fn create(
        self: &Arc<Self>,
        cx: &Caller<'_>,
        dir: Ino,
        name: Name<'_>,
        new: &CreateArgs,
        flags: OFlags,
    ) -> Result<(Entry, Handle)> {
        let dir = self.inodes.dir(dir)?;
        let (mode, flags) = (new.mode & !new.umask & PERMISSIONS, flags & CREATE_FLAGS);
        let (gid, _) = self.group_in(&dir, cx)?;
        let (held, made, entry) = self.change_names(&[(&dir, name)], |session| {
            let held = session.clone_of(self.callers_dir(session, cx, &dir)?.fid())?;
            let request = Request::Create { fid: held.fid(), name, flags, mode, gid };
            let made = session.ask(&request, |reply| match reply {
                Reply::Create { qid, .. } => Some(qid),
                _ => None,
            })?;
            self.publish_entry(cx, &dir, name);
            Ok((held, made, self.find_created(session, &dir, name)?))
        })?;
        let open = || {
            let inode = self.inodes.get(entry.ino)?;
            if inode.path != made.path {
                // Somebody has moved another file there meanwhile. What is written by the fid would go into the new one.
                return Err(Errno::STALE);
            }
            if inode.kind != FileType::RegularFile {
                return Err(Errno::IO);
            }
            self.open_made(cx, &inode, (held, flags), entry.attr.size)
        };
        dir.change();
        self.publish_created(cx, dir.ino, name, &entry);
        let handle = open().inspect_err(|_| self.inodes.forget(entry.ino, 1))?;
        Ok((entry, handle))
    }

    pub(crate) fn link(&self, cx: &Caller<'_>, ino: Ino, dir: Ino, name: Name<'_>) -> Result<Entry> {
        let (inode, dir) = (self.inodes.get(ino)?, self.inodes.dir(dir)?);
        self.change_names(&[(&dir, name)], |session| {
            let options = &self.link.options;
            let (fid, dir) = (inode.fid(session, options)?, dir.fid(session, options)?);
            session.tell(&Request::Link { dir: dir.fid(), fid: fid.fid(), name })
        })?;
        self.publish_entry(cx, &dir, name);
        self.changes.publish(cx.session, || Change::Attr { ino });
        let entry = self.link.with_retry(|session| self.find(session, &dir, name))?;
        self.publish_created(cx, dir.ino, name, &entry);
        Ok(entry)
    }

    pub(crate) fn unlink(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, dir, name, false)
    }

    pub(crate) fn rmdir(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<()> {
        self.remove(cx, dir, name, true)
    }

    fn remove(&self, cx: &Caller<'_>, dir: Ino, name: Name<'_>, is_dir: bool) -> Result<()> {
        let dir = self.inodes.dir(dir)?;
        self.change_names(&[(&dir, name)], |session| {
            let fid = dir.fid(session, &self.link.options)?;
            let _under_way = self.inodes.begin_removal();
            session.at_or_else(
                || session.tell(&Request::Unlinkat { dir: fid.fid(), name, is_dir }),
                || remove_by_fid(session, fid.fid(), name, is_dir),
            )?;
            self.inodes.removed(&dir, name);
            Ok(())
        })?;
        self.publish_entry(cx, &dir, name);
        self.publish_event(cx, || Event::Removed { dir: dir.ino, name: name.to_buf(), is_dir, ino: None });
        Ok(())
    }

    pub(crate) fn rename(
        &self,
        cx: &Caller<'_>,
        from: (Ino, Name<'_>),
        to: (Ino, Name<'_>),
        flags: RenameFlags,
    ) -> Result<()> {
        // The protocol knows no flags.
        if !flags.is_empty() {
            return Err(Errno::INVAL);
        }
        let (dir, new_dir) = (self.inodes.dir(from.0)?, self.inodes.dir(to.0)?);
        let under_way = self.change_names(&[(&dir, from.1), (&new_dir, to.1)], |session| {
            let options = &self.link.options;
            let (fid, new_fid) = (dir.fid(session, options)?, new_dir.fid(session, options)?);
            let (name, new_name) = (from.1, to.1);
            let under_way = self.inodes.begin_removal();
            session.at_or_else(
                || session.tell(&Request::Renameat { dir: fid.fid(), name, new_dir: new_fid.fid(), new_name }),
                || {
                    let (held, _) = walk(session, fid.fid(), &[name.to_buf()])?;
                    session.tell(&Request::Rename { fid: held.fid(), dir: new_fid.fid(), name: new_name })?;
                    // diod, whose fids are paths, knows those below by their old names only.
                    self.inodes.drop_fids();
                    Ok(())
                },
            )?;
            self.inodes.removed(&new_dir, new_name);
            Ok(under_way)
        })?;
        // So that it is known where to look for it should the connection be lost.
        let found = self.link.with_retry(|session| self.find(session, &new_dir, to.1));
        let found = found.inspect(|entry| self.inodes.forget(entry.ino, 1));
        drop(under_way);
        self.publish_entry(cx, &dir, from.1);
        self.publish_entry(cx, &new_dir, to.1);
        let is_dir = found.is_ok_and(|entry| entry.attr.kind() == FileType::Directory);
        let [from, to] = [from, to].map(|(dir, name)| (dir, name.to_buf()));
        self.publish_event(cx, || Event::Renamed { from, to, is_dir, exchanged: false });
        Ok(())
    }
}

/// Removes a name by the older message, which knows no types, and releases the fid whatever its reply (remove(5)).
fn remove_by_fid(session: &Arc<Session>, dir: Fid, name: Name<'_>, is_dir: bool) -> Outcome<()> {
    let (held, qid) = walk(session, dir, &[name.to_buf()])?;
    match (qid.kind == QidKind::DIR, is_dir) {
        (true, false) => return Err(RequestError::Errno(Errno::ISDIR)),
        (false, true) => return Err(RequestError::Errno(Errno::NOTDIR)),
        _ => {}
    }
    let removed = session.tell(&Request::Remove { fid: held.fid() });
    held.mark_ended();
    removed
}

/// Walks to each name, and requests the attributes in parallel if the server has supported that so far.
fn walk_to(session: &Arc<Session>, dir: Fid, names: &[NameBuf]) -> Vec<LookupStep> {
    let asks = session.is_in_order();
    let mut requests = Vec::new();
    let fids: Vec<Fid> = names.iter().map(|_| session.new_fid()).collect();
    for (name, fid) in names.iter().zip(&fids) {
        let mut buffer = Vec::new();
        let steps = Steps::write(&mut buffer, [Step::Child(name.as_name())]);
        requests.push(Outgoing::new(&Request::Walk { fid: dir, new_fid: *fid, steps }));
        if asks {
            requests.push(Outgoing::new(&Request::Getattr { fid: *fid, mask: WANTED }));
        }
    }
    let mut tickets = session.send(requests).into_iter();
    let mut answer = || tickets.next().map_or(Err(RequestError::Errno(Errno::IO)), |ticket| ticket.wait(session));
    fids.into_iter()
        .map(|fid| {
            let walk = answer().and_then(|message| session.take(&message, walked(1)));
            session.note_walk(&walk);
            let attr = asks.then(|| answer().and_then(|message| session.take(&message, attributes)));
            let found = match (walk, attr) {
                (Ok(Some(qid)), Some(Ok(found))) => Ok(Some((qid, Some(found)))),
                (Ok(Some(qid)), None | Some(Err(RequestError::Errno(_)))) => Ok(Some((qid, None))),
                (Ok(Some(_)), Some(Err(lost))) => Err(lost),
                (Ok(None), _) => Ok(None),
                (Err(fail), _) => Err(fail),
            };
            LookupStep { fid, found }
        })
        .collect()
}

/// Asks for the attributes that did not come, now that the fids are there.
fn ask_again(session: &Arc<Session>, steps: &mut [LookupStep]) {
    let missing = |step: &&mut LookupStep| matches!(step.found, Ok(Some((_, None))));
    let mut steps: Vec<&mut LookupStep> = steps.iter_mut().filter(missing).collect();
    let requests = steps.iter().map(|step| Outgoing::new(&Request::Getattr { fid: step.fid, mask: WANTED }));
    let tickets = session.send(requests.collect());
    for (step, ticket) in steps.iter_mut().zip(tickets) {
        let attr = ticket.wait(session).and_then(|message| session.take(&message, attributes));
        match attr {
            Ok(found) => {
                if session.is_in_order() {
                    session.mark_out_of_order();
                }
                if let Ok(Some((_, missing))) = &mut step.found {
                    *missing = Some(found);
                }
            }
            Err(fail) => {
                // The fid is there, and ends.
                drop(OwnedFid::new(session, step.fid));
                step.fid = session.new_fid();
                step.found = Err(fail);
            }
        }
    }
}
