//! Tattach, Twalk and Tclunk.

use std::sync::Arc;

use ferry_engine::requests;
use ferry_vfs::{Attr, Errno, FileType, Ino, Name, Result, checks};
use ferry_wire::ninep::{Fid, Qids, Reply, Step, Steps, User as Attacher};

use super::Context;
use super::permission::SEARCH;
use crate::session::{File, Node, Place, State};
use crate::users::User;

/// The maximum depth of an attached tree.
const TREE_DEPTH_MAX: usize = 256;

/// The current inode of a walk.
struct WalkPosition {
    node: Arc<Node>,
    place: Option<Arc<Place>>,
}

impl Context<'_> {
    /// Attaches to the source's root, or to a directory in it, named by its path. `..` does not lead out of it; but a
    /// client that can move directories in the source can move it.
    pub(super) fn attach(&self, fid: Fid, user: &Attacher<'_>, tree: &[u8]) -> Result<Reply<'static>> {
        self.session.is_free(fid)?;
        let user = self.share.options.users.resolve(user).inspect_err(|errno| {
            let uid = user.uid.map_or("no number".into(), |uid| uid.to_string());
            let name = user.name.escape_ascii();
            self.share.ratelimited_log.warn(format_args!("user \"{name}\" ({uid}) may not attach: {errno}"));
        })?;
        let mut attr = checks::attr(self.share.source.getattr(&self.caller(user, None), Ino::ROOT, None)?)?;
        let mut node = self.session.root(&attr);
        let parts = tree.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b"."));
        for (depth, part) in parts.enumerate() {
            if depth == TREE_DEPTH_MAX {
                return Err(Errno::NAMETOOLONG);
            }
            (node, attr) = self.child(&node, Name::new(part)?, user)?;
        }
        let qid = node.qid(&attr);
        let root = node.ino;
        self.session.insert(fid, File { node, place: None, user, root, state: State::Path })?;
        self.client.attached();
        Ok(Reply::Attach(qid))
    }

    fn child(&self, dir: &Arc<Node>, name: Name<'_>, user: User) -> Result<(Arc<Node>, Attr)> {
        if dir.kind != FileType::Directory {
            return Err(Errno::NOTDIR);
        }
        self.may(user, dir, SEARCH)?;
        let (node, attr) = self.session.node(self.share.source.lookup(&self.caller(user, None), dir.ino, name)?)?;
        self.session.removals.record_lookup((dir.ino, name), Some(node.ino));
        requests::record_name(&self.share.options.name, (dir.ino, name.as_bytes()), node.ino);
        Ok((node, attr))
    }

    fn parent(&self, dir: &Arc<Node>, file: &File) -> Result<(Arc<Node>, Attr)> {
        if dir.kind != FileType::Directory {
            return Err(Errno::NOTDIR);
        }
        self.may(file.user, dir, SEARCH)?;
        let cx = self.caller(file.user, None);
        if dir.ino == file.root {
            let attr = checks::attr(self.share.source.getattr(&cx, dir.ino, None)?)?;
            return Ok((Arc::clone(dir), attr));
        }
        self.session.node(self.share.source.lookup_parent(&cx, dir.ino)?)
    }

    /// Walks as far as possible (walk(5)): a failure of the first name is an error; after a failure of a later name,
    /// no fid is made.
    pub(super) fn walk(&self, fid: Fid, new_fid: Fid, steps: Steps<'_>) -> Result<Reply<'static>> {
        let from = self.session.get(fid)?;
        // Linux also walks from open fids.
        if !matches!(from.state, State::Path | State::Open(_)) {
            return Err(Errno::BADF);
        }
        if new_fid != fid {
            self.session.is_free(new_fid)?;
        } else if !matches!(from.state, State::Path) {
            return Err(Errno::BADF);
        }
        let mut reached = WalkPosition { node: Arc::clone(&from.node), place: from.place.clone() };
        let mut qids = Qids::default();
        for (number, step) in steps.iter().enumerate() {
            let made = match step {
                Step::Parent => self.parent(&reached.node, &from).map(|found| (found, None)),
                Step::Child(name) => self
                    .child(&reached.node, name, from.user)
                    .map(|found| (found, Some(self.session.place(&reached.node, name)))),
            };
            match made {
                Ok(((node, attr), place)) => {
                    qids.push(node.qid(&attr));
                    reached = WalkPosition { node, place };
                }
                Err(errno) if number == 0 => return Err(errno),
                Err(_) => return Ok(Reply::Walk(qids)),
            }
        }
        let WalkPosition { node, place } = reached;
        let file = File { node, place, user: from.user, root: from.root, state: State::Path };
        if new_fid == fid {
            self.session.replace(fid, &from, file)?;
        } else {
            self.session.insert(new_fid, file)?;
        }
        Ok(Reply::Walk(qids))
    }

    /// Releases a fid, in any case; the error is that of its writes.
    pub(super) fn clunk(&self, fid: Fid) -> Result<Reply<'static>> {
        let file = self.session.remove(fid)?;
        match &file.state {
            State::NewValue(value) => self.set_value(&file, value)?,
            State::Open(open) if !open.is_dir() => {
                let cx = self.caller(file.user, None);
                // No lock owner has this number; locks are released when the file is closed.
                match self.share.source.flush(&cx, file.node.ino, open.handle, 0) {
                    Ok(()) | Err(Errno::NOSYS) => {}
                    Err(errno) => return Err(errno),
                }
            }
            _ => {}
        }
        Ok(Reply::Clunk)
    }
}
