//! What a user may do, where the server is to check it: the user of a squashed client is somebody else to the client's
//! kernel. The rules are those of Linux's `fs/namei.c` and `fs/attr.c` for a user without any capability.

use ferry_vfs::{Errno, FileType, Name, OFlags, Result, SetAttr, SetTime};

use super::Context;
use crate::session::{File, Node};
use crate::users::User;

pub(super) const READ: u32 = 4;
pub(super) const WRITE: u32 = 2;
pub(super) const SEARCH: u32 = 1;

const S_ISVTX: u32 = 0o1000;

impl Context<'_> {
    fn is_bound(user: User) -> bool {
        user.checked && user.uid != 0
    }

    /// Whether the fid's user may do this to an inode.
    pub(super) fn may(&self, user: User, node: &Node, mask: u32) -> Result<()> {
        if !Self::is_bound(user) {
            return Ok(());
        }
        self.share.source.access(&self.caller(user, None), node.ino, mask)
    }

    /// Whether the fid's user may make something in a directory.
    pub(super) fn may_add(&self, dir: &File) -> Result<()> {
        self.may(dir.user, &dir.node, WRITE | SEARCH)
    }

    /// Whether the fid's user may remove a name from a directory, or replace it.
    pub(super) fn may_remove(&self, dir: &File, name: Name<'_>) -> Result<()> {
        self.may_add(dir)?;
        if !Self::is_bound(dir.user) {
            return Ok(());
        }
        let cx = self.caller(dir.user, None);
        let source = &self.share.source;
        let folder = source.getattr(&cx, dir.node.ino, None)?;
        if folder.mode & S_ISVTX == 0 || folder.uid == dir.user.uid {
            return Ok(());
        }
        let (_node, attr) = self.session.node(source.lookup(&cx, dir.node.ino, name)?)?;
        if attr.uid == dir.user.uid { Ok(()) } else { Err(Errno::PERM) }
    }

    /// Whether the fid's user may open its file with these flags.
    pub(super) fn may_open(&self, user: User, node: &Node, flags: OFlags) -> Result<()> {
        let access = match flags & OFlags::ACCMODE {
            OFlags::WRONLY => WRITE,
            OFlags::RDWR => READ | WRITE,
            _ => READ,
        };
        let truncation = if flags.contains(OFlags::TRUNC) { WRITE } else { 0 };
        self.may(user, node, access | truncation)
    }

    /// Whether the fid's user may change these attributes.
    pub(super) fn may_set(&self, file: &File, set: &SetAttr) -> Result<()> {
        if !Self::is_bound(file.user) {
            return Ok(());
        }
        let attr = self.attr(file)?;
        let owns = attr.uid == file.user.uid;
        let same_owner = set.uid.is_none_or(|uid| uid == attr.uid);
        let same_group = set.gid.is_none_or(|gid| gid == attr.gid || gid == file.user.gid);
        if (set.uid.is_some() || set.gid.is_some()) && !(owns && same_owner && same_group) {
            return Err(Errno::PERM);
        }
        if set.mode.is_some() && !owns {
            return Err(Errno::PERM);
        }
        let at = |time| matches!(time, Some(SetTime::At(_)));
        if !owns && (at(set.atime) || at(set.mtime)) {
            return Err(Errno::PERM);
        }
        let touches = !owns && (set.atime.is_some() || set.mtime.is_some());
        if set.size.is_some() || touches { self.may(file.user, &file.node, WRITE) } else { Ok(()) }
    }

    /// Whether the fid's user may look at (or else change) an extended attribute.
    pub(super) fn may_xattr(&self, file: &File, name: &[u8], changes: bool) -> Result<()> {
        if !Self::is_bound(file.user) {
            return Ok(());
        }
        if name.starts_with(b"user.") {
            return self.may(file.user, &file.node, if changes { WRITE } else { READ });
        }
        if !changes {
            return if name.starts_with(b"trusted.") { Err(Errno::NODATA) } else { Ok(()) };
        }
        let owns = self.attr(file)?.uid == file.user.uid;
        if owns && name.starts_with(b"system.posix_acl_") { Ok(()) } else { Err(Errno::PERM) }
    }

    /// Whether the fid's user may make a node of this type.
    pub(super) fn may_mknod(&self, user: User, mode: u32) -> Result<()> {
        let device = matches!(FileType::from_raw_mode(mode), FileType::BlockDevice | FileType::CharacterDevice);
        if device && Self::is_bound(user) { Err(Errno::PERM) } else { Ok(()) }
    }
}
