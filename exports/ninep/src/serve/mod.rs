//! Each request, as calls of the source.

mod data;
mod locks;
mod names;
mod open;
mod permission;
mod rename;
mod tree;
mod xattr;

use std::sync::Arc;

use ferry_vfs::{Attr, Caller, Errno, FileType, Name, OFlags, Result, SetAttr, Statfs};
use ferry_wire::ninep::{Fid, Getattr, Reply, Request};

use crate::checks;
use crate::connection::Connection;
use crate::hub::Hub;
use crate::line::Ticket;
use crate::session::{File, Session, State};
use crate::users::User;

/// The block size of file systems that name none.
const BLOCK_BYTES: u32 = 4096;

/// A request being served.
pub(crate) struct Context<'a> {
    pub(crate) hub: &'a Arc<Hub>,
    pub(crate) connection: &'a Arc<Connection>,
    pub(crate) session: &'a Arc<Session>,
    pub(crate) ticket: &'a Ticket,
}

/// A thread's memory for replies.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// Short replies.
    pub(crate) reply: Vec<u8>,
    /// Replies whose data is filled in before their head is known. Its length is the most that was needed yet.
    pub(crate) data: Vec<u8>,
}

/// Where the reply is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Done {
    /// In [`Buffers::reply`].
    Reply,
    /// These many bytes of [`Buffers::data`].
    Data(usize),
    /// Somebody else sends it later, maybe.
    Parked,
}

impl Context<'_> {
    /// Writes a short reply.
    fn done(&self, buffers: &mut Buffers, reply: &Reply<'_>) -> Result<Done> {
        buffers.reply.clear();
        reply.encode(self.ticket.tag, &mut buffers.reply);
        // Only a client that agreed on very short messages can be shown this.
        if buffers.reply.len() > self.session.msize as usize { Err(Errno::MSGSIZE) } else { Ok(Done::Reply) }
    }

    /// On whose behalf the source is asked; a new file gets the group that the client names.
    fn caller(&self, user: User, gid: Option<u32>) -> Caller<'static> {
        let gid = gid.filter(|gid| !user.checked && *gid != u32::MAX).unwrap_or(user.gid);
        Caller { session: self.session.id, uid: user.uid, gid, pid: 0, groups: &[] }
    }

    /// A fid that is a directory, open or not, in which something is to be changed.
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
        checks::attr(self.hub.source.getattr(&self.caller(file.user, None), file.node.ino, handle)?)
    }
}

/// Serves a request.
pub(crate) fn serve(cx: &Context<'_>, request: &Request<'_>, buffers: &mut Buffers) -> Result<Done> {
    if cx.hub.read_only && changes_something(request) {
        return Err(Errno::ROFS);
    }
    let reply = match *request {
        Request::Read { fid, offset, bytes_max } => return cx.read(buffers, fid, offset, bytes_max),
        Request::Write { fid, offset, data } => cx.write(fid, offset, data)?,
        Request::Walk { fid, new_fid, steps } => cx.walk(fid, new_fid, steps)?,
        Request::Getattr { fid, .. } => {
            let file = cx.session.get(fid)?;
            let attr = cx.attr(&file)?;
            Reply::Getattr(Getattr { qid: file.node.qid(&attr), attr, generation: file.node.generation })
        }
        Request::Clunk { fid } => cx.clunk(fid)?,
        Request::Open { fid, flags } => cx.open(fid, flags)?,
        Request::Create { fid, name, flags, mode, gid } => cx.create(fid, name, flags, (mode, gid))?,
        Request::Readdir { fid, offset, bytes_max } => return cx.readdir(buffers, fid, offset, bytes_max),
        Request::Setattr { fid, ref set, .. } => cx.setattr(fid, set)?,
        Request::Readlink { fid } => {
            let file = cx.session.get(fid)?;
            let target = cx.hub.source.readlink(&cx.caller(file.user, None), file.node.ino)?;
            return cx.done(buffers, &Reply::Readlink { target: checks::target(&target)? });
        }
        Request::Statfs { fid } => cx.statfs(fid)?,
        Request::Fsync { fid, data_only } => cx.fsync(fid, data_only)?,
        Request::Lock { fid, ref lock, wait, .. } => match cx.lock(fid, lock, wait)? {
            Some(reply) => reply,
            None => return Ok(Done::Parked),
        },
        Request::Getlock { fid, lock } => cx.getlock(fid, lock)?,
        ref other => serve_rarer(cx, other)?,
    };
    cx.done(buffers, &reply)
}

/// The requests that no load consists of.
fn serve_rarer<'a>(cx: &Context<'_>, request: &Request<'a>) -> Result<Reply<'a>> {
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
        // Nobody is asked who he is: attach(5) has a server without authentication answer so.
        _ => Err(Errno::OPNOTSUPP),
    }
}

/// Whether the request would change anything in the source. What is opened is looked at when it is opened.
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
        self.may_set(&file, set)?;
        let clear_privileges = set.size.is_some() && file.user.clears_privileges();
        let set = SetAttr { clear_privileges, ..*set };
        // The time of the change alone follows from whatever changed.
        if set != SetAttr::default() {
            let handle = match &file.state {
                State::Open(open) => Some(open.handle),
                _ => None,
            };
            self.hub.source.setattr(&self.caller(file.user, None), file.node.ino, handle, &set)?;
        }
        Ok(Reply::Setattr)
    }

    /// A file system that does not count gives `df` and package managers zeros rather than an error.
    fn statfs(&self, fid: Fid) -> Result<Reply<'static>> {
        let file = self.session.get(fid)?;
        let totals = match self.hub.source.statfs(&self.caller(file.user, None), file.node.ino) {
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
