//! Permission checks by the server, for squashed users, whom the client's kernel does not know. The rules are those of
//! Linux's `fs/namei.c`, `fs/attr.c` and `fs/xattr.c` for a user without capabilities, with the usual protection of
//! hard links and of files in sticky directories (`fs.protected_hardlinks`, `fs.protected_regular`).

use ferry_vfs::{Attr, Errno, FileType, Name, OFlags, Result, SetAttr, SetTime};

use super::Context;
use crate::session::{File, Node, State};
use crate::users::User;

pub(super) const READ: u32 = 4;
pub(super) const WRITE: u32 = 2;
pub(super) const SEARCH: u32 = 1;

/// The prefix of attributes that only root may see.
const TRUSTED: &[u8] = b"trusted.";

const S_ISUID: u32 = 0o4000;
const S_ISGID: u32 = 0o2000;
const S_ISVTX: u32 = 0o1000;
const S_IXGRP: u32 = 0o010;
const S_IWOTH: u32 = 0o002;
const PERMISSIONS: u32 = 0o7777;

/// Returns the permissions that an open with these flags needs.
pub(super) fn wanted(flags: OFlags) -> u32 {
    let access = match flags & OFlags::ACCMODE {
        OFlags::WRONLY => WRITE,
        OFlags::RDWR => READ | WRITE,
        _ => READ,
    };
    let truncation = if flags.contains(OFlags::TRUNC) { WRITE } else { 0 };
    access | truncation
}

impl Context<'_> {
    /// Whether the user is a member of a group.
    pub(super) fn is_in_group(&self, user: User, gid: u32) -> bool {
        gid == user.gid || self.share.options.users.groups(user).contains(&gid)
    }

    /// Whether the fid's user may do this to an inode.
    pub(super) fn may(&self, user: User, node: &Node, mask: u32) -> Result<()> {
        if !user.is_bound() {
            return Ok(());
        }
        self.share.source.access(&self.caller(user, None), node.ino, mask)
    }

    /// Whether the fid's user may create a name in a directory.
    pub(super) fn may_add(&self, dir: &File) -> Result<()> {
        self.may(dir.user, &dir.node, WRITE | SEARCH)
    }

    /// Checks whether the fid's user may remove or replace a name in a directory. For users checked by their own
    /// kernel, checks whether that kernel can have seen the current file: see [`ferry_vfs::Removals`].
    pub(super) fn may_remove(&self, dir: &File, name: Name<'_>) -> Result<()> {
        self.may_add(dir)?;
        if !dir.user.is_bound() {
            let cx = self.caller(dir.user, None);
            return self.session.removals.may_remove(&*self.share.source, &cx, (dir.node.ino, name));
        }
        let cx = self.caller(dir.user, None);
        let source = &self.share.source;
        let directory = source.getattr(&cx, dir.node.ino, None)?;
        if directory.mode & S_ISVTX == 0 || directory.uid == dir.user.uid {
            return Ok(());
        }
        let (_node, attr) = self.session.node(source.lookup(&cx, dir.node.ino, name)?)?;
        if attr.uid == dir.user.uid { Ok(()) } else { Err(Errno::PERM) }
    }

    /// Whether the fid's user may open its file with these flags.
    pub(super) fn may_open(&self, user: User, node: &Node, flags: OFlags) -> Result<()> {
        if !user.is_bound() {
            return Ok(());
        }
        self.may(user, node, wanted(flags))?;
        if flags.contains(OFlags::NOATIME)
            && self.share.source.getattr(&self.caller(user, None), node.ino, None)?.uid != user.uid
        {
            return Err(Errno::PERM);
        }
        Ok(())
    }

    /// Whether the fid's user may open an existing file by Tlcreate. In a sticky world-writable directory, a file of
    /// a user other than the directory's owner is treated as a trap (`may_create_in_sticky` with
    /// `protected_regular`).
    pub(super) fn may_open_by_creating(&self, dir: &File, attr: &Attr) -> Result<()> {
        if !dir.user.is_bound() || attr.uid == dir.user.uid {
            return Ok(());
        }
        let directory = self.share.source.getattr(&self.caller(dir.user, None), dir.node.ino, None)?;
        let is_trap = directory.mode & S_ISVTX != 0 && directory.mode & S_IWOTH != 0 && attr.uid != directory.uid;
        if is_trap { Err(Errno::ACCESS) } else { Ok(()) }
    }

    /// Checks whether a user may link a file, as `may_linkat` does with `protected_hardlinks`.
    pub(super) fn may_link(&self, user: User, file: &File) -> Result<()> {
        if !user.is_bound() {
            return Ok(());
        }
        let attr = self.attr(file)?;
        let is_program = attr.mode & S_ISUID != 0 || attr.mode & (S_ISGID | S_IXGRP) == S_ISGID | S_IXGRP;
        let is_safe = || attr.kind() == FileType::RegularFile && !is_program;
        match attr.uid == user.uid || (is_safe() && self.may(user, &file.node, READ | WRITE).is_ok()) {
            true => Ok(()),
            false => Err(Errno::PERM),
        }
    }

    /// Checks whether the fid's user may change these attributes; returns the changes to make (`setattr_prepare`).
    pub(super) fn may_set(&self, file: &File, set: &SetAttr) -> Result<SetAttr> {
        let user = file.user;
        if !user.is_bound() {
            return Ok(*set);
        }
        let attr = self.attr(file)?;
        let owns = attr.uid == user.uid;
        let same_owner = set.uid.is_none_or(|uid| uid == attr.uid);
        let same_group = set.gid.is_none_or(|gid| gid == attr.gid || self.is_in_group(user, gid));
        let changes_owner = set.uid.is_some() || set.gid.is_some();
        if changes_owner && !(owns && same_owner && same_group) {
            return Err(Errno::PERM);
        }
        if set.mode.is_some() && !owns {
            return Err(Errno::PERM);
        }
        if !owns && (set.atime.is_some() || set.mtime.is_some()) {
            match (set.atime, set.mtime) {
                (Some(SetTime::Now), Some(SetTime::Now)) => self.may(user, &file.node, WRITE)?,
                // The mtime of the new size.
                (None, Some(SetTime::Now)) if set.size.is_some() => {}
                _ => return Err(Errno::PERM),
            }
        }
        let is_open_to_write = matches!(&file.state, State::Open(open) if open.can_write());
        if set.size.is_some() && !is_open_to_write {
            self.may(user, &file.node, WRITE)?;
        }
        let mut set = *set;
        if let Some(mode) = &mut set.mode {
            if !self.is_in_group(user, set.gid.unwrap_or(attr.gid)) {
                *mode &= !S_ISGID;
            }
        } else if changes_owner
            && attr.kind() != FileType::Directory
            && attr.mode & S_ISGID != 0
            && !self.is_in_group(user, attr.gid)
        {
            // The host's kernel, to which this process is root, would keep the bit of a file that its group may not
            // execute.
            set.mode = Some(attr.mode & PERMISSIONS & !(S_ISUID | S_ISGID));
        }
        Ok(set)
    }

    /// Whether the fid's user may read (or else change) an extended attribute (`xattr_permission`).
    pub(super) fn may_xattr(&self, file: &File, name: &[u8], changes: bool) -> Result<()> {
        let user = file.user;
        if !user.is_bound() {
            return Ok(());
        }
        if name.starts_with(b"user.") {
            let kind = file.node.kind;
            if !matches!(kind, FileType::RegularFile | FileType::Directory) {
                return Err(if changes { Errno::PERM } else { Errno::NODATA });
            }
            if changes && kind == FileType::Directory {
                let attr = self.attr(file)?;
                if attr.mode & S_ISVTX != 0 && attr.uid != user.uid {
                    return Err(Errno::PERM);
                }
            }
            return self.may(user, &file.node, if changes { WRITE } else { READ });
        }
        if !changes {
            return if name.starts_with(TRUSTED) { Err(Errno::NODATA) } else { Ok(()) };
        }
        let owns = self.attr(file)?.uid == user.uid;
        if owns && name.starts_with(b"system.posix_acl_") { Ok(()) } else { Err(Errno::PERM) }
    }

    /// Returns whether setting this attribute clears the file's sgid, as an ACL may (`posix_acl_update_mode`).
    pub(super) fn clears_sgid(&self, file: &File, name: &[u8]) -> Result<bool> {
        let is_acl = file.user.is_bound() && name == b"system.posix_acl_access";
        Ok(is_acl && !self.is_in_group(file.user, self.attr(file)?.gid))
    }

    /// Whether the fid's user may create a node of this type. A whiteout is no device.
    pub(super) fn may_mknod(&self, user: User, (mode, rdev): (u32, u32)) -> Result<()> {
        let is_device = match FileType::from_raw_mode(mode) {
            FileType::BlockDevice => true,
            FileType::CharacterDevice => rdev != 0,
            _ => false,
        };
        if is_device && user.is_bound() { Err(Errno::PERM) } else { Ok(()) }
    }
}
