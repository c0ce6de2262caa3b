//! Dispatches requests to calls of the source.

mod data;
mod events;
mod locks;
mod metrics;
mod names;
mod open;
mod permission;
mod rename;
mod request_text;
mod tree;
mod watch;
mod xattr;

pub(crate) use self::data::PendingTransfer;
pub(crate) use self::metrics::metrics;
use self::request_text::{RequestText, WriteText};

use std::cell::Cell;
use std::sync::Arc;

use ferry_engine::metrics::Timer;
use ferry_vfs::{Attr, Caller, Errno, FileType, Name, OFlags, Result, SetAttr, Statfs, checks};
use ferry_wire::ninep::{Fid, Getattr, READ_HEAD_BYTES, Reply, Request, Tag, WriteHead, kind};

use crate::carrier::{Client, NinepCarrier, NinepReply};
use crate::request_table::Ticket;
use crate::session::{File, Session, State};
use crate::share::Share;
use crate::users::User;

/// The block size of file systems that report none.
const BLOCK_BYTES: u32 = 4096;

/// A request being served.
pub(crate) struct Context<'a> {
    pub(crate) share: &'a Arc<Share>,
    pub(crate) client: Arc<dyn Client>,
    pub(crate) session: &'a Arc<Session>,
    pub(crate) ticket: &'a Ticket,
    /// Runs until the end of the request is counted.
    pub(crate) timer: Cell<Option<Timer>>,
}

/// The place of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyPlace {
    /// In [`NinepReply::short`].
    Short,
    /// In its final place, with this length.
    Long(usize),
    /// It follows after the transfer.
    Later,
    /// Another thread may send it later.
    Parked,
}

impl Context<'_> {
    /// Writes a short reply.
    fn done(&self, buffer: &mut impl NinepReply, reply: &Reply<'_>) -> Result<ReplyPlace> {
        let bytes = encode(buffer, self.ticket.tag, reply);
        // Only clients with a very small msize get this.
        if bytes > self.session.msize as usize { Err(Errno::MSGSIZE) } else { Ok(ReplyPlace::Short) }
    }

    /// Returns the caller for the source. A new file gets the group that the client names, if the user has it.
    fn caller(&self, user: User, gid: Option<u32>) -> Caller<'_> {
        let has = |gid: u32| !user.checked || self.is_in_group(user, gid);
        let gid = gid.filter(|gid| *gid != u32::MAX && has(*gid)).unwrap_or(user.gid);
        Caller { session: self.session.id, uid: user.uid, gid, pid: 0, groups: self.share.options.users.groups(user) }
    }

    /// Returns the caller of a change. 9P does not carry a user's groups.
    fn writer(&self, user: User) -> Caller<'_> {
        let gid = if user.checked { user.gid } else { Caller::UNKNOWN };
        Caller { gid, ..self.caller(user, None) }
    }

    /// Returns a fid that is a directory, open or not, for a change in it.
    fn dir(&self, fid: Fid) -> Result<Arc<File>> {
        let file = self.session.get(fid)?;
        match (&file.state, file.node.kind) {
            (State::Path | State::Open(_), FileType::Directory) => Ok(file),
            (State::Path | State::Open(_), _) => Err(Errno::NOTDIR),
            _ => Err(Errno::BADF),
        }
    }

    fn attr(&self, file: &File) -> Result<Attr> {
        let handle = match &file.state {
            State::Open(open) => Some(open.handle),
            _ => None,
        };
        checks::attr(self.share.source.getattr(&self.caller(file.user, None), file.node.ino, handle)?)
    }
}

impl Context<'_> {
    /// Returns the attributes as the client must see them: a client that does not check ACLs uses the mode alone.
    fn shown(&self, file: &File, attr: Attr) -> Attr {
        let options = &self.share.options;
        if options.posix_acl && options.xattr {
            return attr;
        }
        let mode = self.share.source.mode_without_acl(&self.caller(file.user, None), file.node.ino, &attr);
        Attr { mode, ..attr }
    }
}

/// Writes a short reply; returns its bytes.
pub(crate) fn encode(buffer: &mut impl NinepReply, tag: Tag, reply: &Reply<'_>) -> usize {
    let memory = buffer.short();
    memory.clear();
    reply.encode(tag, memory);
    memory.len()
}

/// Serves a request with `serve` and counts it; `data_bytes` are those of a Twrite. The end of a transfer is counted
/// by the thread that sees it. A lock that must wait is counted until then.
fn counted(
    cx: &Context<'_>,
    (message, data_bytes): (u8, usize),
    serve: impl FnOnce() -> Result<ReplyPlace>,
) -> Result<ReplyPlace> {
    cx.timer.set(Some(cx.share.metrics.begin(usize::from(message) / 2)));
    let done = serve();
    if let Some(timer) = cx.timer.take() {
        let bytes = done.map(|place| match place {
            ReplyPlace::Long(bytes) if message == kind::TREAD => bytes.saturating_sub(READ_HEAD_BYTES),
            _ => data_bytes,
        });
        cx.share.metrics.end(timer, bytes);
    }
    done
}

/// Serves a request. The data of a Twrite comes from its carrier, see [`serve_write`].
pub(crate) fn serve(cx: &Context<'_>, request: &Request<'_>, carrier: &mut impl NinepCarrier) -> Result<ReplyPlace> {
    let data_bytes = if let Request::Write { data, .. } = request { data.len() } else { 0 };
    counted(cx, (request.kind(), data_bytes), || {
        watch::watched(cx, (watch::subject(request), &RequestText(request)), carrier, |carrier| {
            serve_one(cx, request, carrier)
        })
    })
}

fn serve_one(cx: &Context<'_>, request: &Request<'_>, carrier: &mut impl NinepCarrier) -> Result<ReplyPlace> {
    if cx.share.read_only && changes_something(request) {
        return Err(Errno::ROFS);
    }
    let reply = match *request {
        Request::Read { fid, offset, bytes_max } => return cx.read(carrier, fid, offset, bytes_max),
        Request::Write { fid, offset, data } => return cx.write(carrier, fid, offset, data.len()),
        Request::Walk { fid, new_fid, steps } => cx.walk(fid, new_fid, steps)?,
        Request::Getattr { fid, .. } => {
            let file = cx.session.get(fid)?;
            let attr = cx.attr(&file)?;
            let attr = cx.shown(&file, attr);
            let blksize = if attr.blksize == 0 { BLOCK_BYTES } else { attr.blksize };
            let (qid, generation) = (file.node.qid(&attr), file.node.generation);
            Reply::Getattr(Getattr { qid, attr: Attr { blksize, ..attr }, generation })
        }
        Request::Clunk { fid } => {
            let reply = cx.clunk(fid);
            // The fid's locks have ended.
            cx.client.lock_owners_changed(&cx.session.owner_count);
            reply?
        }
        Request::Open { fid, flags } => cx.open(fid, flags)?,
        Request::Create { fid, name, flags, mode, gid } => cx.create(fid, name, flags, (mode, gid))?,
        Request::Readdir { fid, offset, bytes_max } => return cx.readdir(carrier, fid, offset, bytes_max),
        Request::Setattr { fid, ref set, .. } => cx.setattr(fid, set)?,
        Request::Readlink { fid } => {
            let file = cx.session.get(fid)?;
            let target = cx.share.source.readlink(&cx.caller(file.user, None), file.node.ino)?;
            return cx.done(carrier, &Reply::Readlink { target: checks::target(&target)? });
        }
        Request::Statfs { fid } => cx.statfs(fid)?,
        Request::Fsync { fid, data_only } => return cx.fsync(carrier, fid, data_only),
        Request::Lock { fid, ref lock, wait, .. } => match cx.lock(fid, lock, wait)? {
            Some(reply) => reply,
            None => return Ok(ReplyPlace::Parked),
        },
        Request::Getlock { fid, lock } => cx.getlock(fid, lock)?,
        Request::Events { fid, acknowledged, wait_ms } => return cx.events(fid, acknowledged, wait_ms),
        ref other => serve_infrequent(cx, other)?,
    };
    cx.done(carrier, &reply)
}

/// Serves a Twrite by its head; the carrier has the data.
pub(crate) fn serve_write(cx: &Context<'_>, head: &WriteHead, carrier: &mut impl NinepCarrier) -> Result<ReplyPlace> {
    counted(cx, (kind::TWRITE, head.bytes as usize), || {
        watch::watched(cx, (Some(head.fid), &WriteText(head)), carrier, |carrier| match cx.share.read_only {
            true => Err(Errno::ROFS),
            false => cx.write(carrier, head.fid, head.offset, head.bytes as usize),
        })
    })
}

/// Infrequent requests.
fn serve_infrequent<'a>(cx: &Context<'_>, request: &Request<'a>) -> Result<Reply<'a>> {
    match *request {
        Request::Attach { fid, afid, user, tree } => {
            if afid != Fid::NONE {
                return Err(Errno::INVAL);
            }
            cx.attach(fid, &user, tree)
        }
        Request::Symlink { dir, name, target, gid } => cx.symlink(dir, name, target, gid),
        Request::Mknod { dir, name, mode, rdev, gid } => cx.mknod(dir, name, (mode, rdev), gid),
        Request::Mkdir { dir, name, mode, gid } => cx.mkdir(dir, name, mode, gid),
        Request::Link { dir, fid, name } => cx.link(dir, fid, name),
        Request::Unlinkat { dir, name, is_dir } => cx.unlinkat(dir, name, is_dir),
        Request::Renameat { dir, name, new_dir, new_name } => cx.renameat((dir, name), (new_dir, new_name)),
        Request::Rename { fid, dir, name } => cx.rename(fid, dir, name),
        Request::Remove { fid } => cx.remove(fid),
        Request::Xattrwalk { fid, new_fid, name } => cx.xattrwalk(fid, new_fid, name),
        Request::Xattrcreate { fid, name, bytes, flags } => cx.xattrcreate(fid, name, bytes, flags),
        // No authentication: attach(5) requires an error then, and diod's tools only continue after this one.
        Request::Auth { .. } => Err(Errno::NOENT),
        _ => Err(Errno::OPNOTSUPP),
    }
}

/// Whether the request changes the source. Tlopen is checked when it opens.
fn changes_something(request: &Request<'_>) -> bool {
    match request {
        Request::Write { .. }
        | Request::Create { .. }
        | Request::Setattr { .. }
        | Request::Symlink { .. }
        | Request::Mknod { .. }
        | Request::Mkdir { .. }
        | Request::Link { .. }
        | Request::Unlinkat { .. }
        | Request::Renameat { .. }
        | Request::Rename { .. }
        | Request::Xattrcreate { .. } => true,
        Request::Open { flags, .. } => flags.intersects(OFlags::WRONLY | OFlags::RDWR | OFlags::TRUNC),
        _ => false,
    }
}

impl Context<'_> {
    fn setattr(&self, fid: Fid, set: &SetAttr) -> Result<Reply<'static>> {
        let file = self.session.get(fid)?;
        if matches!(file.state, State::Value(_) | State::NewValue(_)) {
            return Err(Errno::BADF);
        }
        let set = self.may_set(&file, set)?;
        let clear_privileges = set.size.is_some() && file.user.clears_privileges();
        let set = SetAttr { clear_privileges, ..set };
        // The ctime follows from the other changes.
        if set != SetAttr::default() {
            let handle = match &file.state {
                State::Open(open) => Some(open.handle),
                _ => None,
            };
            self.share.source.setattr(&self.writer(file.user), file.node.ino, handle, &set)?;
            if let Some(size) = set.size {
                self.session.client_ends.resized(file.node.ino, size);
            }
        }
        Ok(Reply::Setattr)
    }

    /// Returns zeros for a file system without statfs, for `df` and package managers.
    fn statfs(&self, fid: Fid) -> Result<Reply<'static>> {
        let file = self.session.get(fid)?;
        let totals = match self.share.source.statfs(&self.caller(file.user, None), file.node.ino) {
            Err(Errno::NOSYS) => {
                let namelen = u32::try_from(Name::BYTES_MAX).unwrap_or(u32::MAX);
                Statfs { bsize: BLOCK_BYTES, frsize: BLOCK_BYTES, namelen, ..Statfs::default() }
            }
            other => other?,
        };
        let frsize = if totals.frsize == 0 { totals.bsize.max(1) } else { totals.frsize };
        Ok(Reply::Statfs { totals: Statfs { frsize, ..totals }, id: 0 })
    }
}
