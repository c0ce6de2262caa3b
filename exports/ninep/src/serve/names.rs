//! Tsymlink, Tmknod, Tmkdir, Tlink and Tunlinkat.

use std::sync::Arc;

use ferry_vfs::{CreateArgs, Entry, FileType, Name, Result};
use ferry_wire::ninep::{Fid, Qid, Reply};

use super::Context;
use super::permission::SEARCH;
use crate::session::{File, State};

impl Context<'_> {
    /// Returns the qid of a new inode, and releases the reference: the client will walk to it.
    fn made(&self, entry: Entry) -> Result<Qid> {
        let (node, attr) = self.session.node(entry)?;
        Ok(node.qid(&attr))
    }

    fn dir_to_add(&self, fid: Fid) -> Result<Arc<File>> {
        let dir = self.dir(fid)?;
        self.may_add(&dir)?;
        Ok(dir)
    }

    pub(super) fn symlink(&self, dir: Fid, name: Name<'_>, target: &[u8], gid: u32) -> Result<Reply<'static>> {
        let dir = self.dir_to_add(dir)?;
        let entry = self.share.source.symlink(&self.caller(dir.user, Some(gid)), dir.node.ino, name, target)?;
        self.made(entry).map(Reply::Symlink)
    }

    pub(super) fn mknod(&self, dir: Fid, name: Name<'_>, (mode, rdev): (u32, u32), gid: u32) -> Result<Reply<'static>> {
        let dir = self.dir_to_add(dir)?;
        self.may_mknod(dir.user, (mode, rdev))?;
        let new = CreateArgs { mode, umask: 0, rdev };
        let entry = self.share.source.mknod(&self.caller(dir.user, Some(gid)), dir.node.ino, name, &new)?;
        self.made(entry).map(Reply::Mknod)
    }

    pub(super) fn mkdir(&self, dir: Fid, name: Name<'_>, mode: u32, gid: u32) -> Result<Reply<'static>> {
        let dir = self.dir_to_add(dir)?;
        let new = CreateArgs { mode: FileType::Directory.as_raw_mode() | mode, umask: 0, rdev: 0 };
        let entry = self.share.source.mkdir(&self.caller(dir.user, Some(gid)), dir.node.ino, name, &new)?;
        self.made(entry).map(Reply::Mkdir)
    }

    pub(super) fn link(&self, dir: Fid, fid: Fid, name: Name<'_>) -> Result<Reply<'static>> {
        let (dir, file) = (self.dir(dir)?, self.session.get(fid)?);
        if matches!(file.state, State::Value(_) | State::NewValue(_)) {
            return Err(ferry_vfs::Errno::BADF);
        }
        self.may(dir.user, &dir.node, SEARCH)?;
        self.may_link(dir.user, &file)?;
        self.may_add(&dir)?;
        let entry = self.share.source.link(&self.caller(dir.user, None), file.node.ino, dir.node.ino, name)?;
        self.made(entry).map(|_| Reply::Link)
    }

    pub(super) fn unlinkat(&self, dir: Fid, name: Name<'_>, is_dir: bool) -> Result<Reply<'static>> {
        let dir = self.dir(dir)?;
        self.may_remove(&dir, name)?;
        let (source, cx) = (&self.share.source, self.caller(dir.user, None));
        match is_dir {
            true => source.rmdir(&cx, dir.node.ino, name)?,
            false => source.unlink(&cx, dir.node.ino, name)?,
        }
        self.session.removals.record_lookup((dir.node.ino, name), None);
        Ok(Reply::Unlinkat)
    }
}
