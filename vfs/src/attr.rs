//! Creates and changes attributes as Linux's own file systems do.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::{Attr, Caller, CreateArgs, Entry, Errno, FileType, Ino, Result, SetAttr, SetTime, Timespec};

/// The unit of [`Attr::blocks`].
const BLOCK_BYTES: u64 = 512;
/// The preferred size of a transfer in [`Attr::new`]: a page.
const BLKSIZE: u32 = 4096;
/// Bits of `st_mode`: set user id, set group id, executable by the group, and all permissions.
const S_ISUID: u32 = 0o4000;
const S_ISGID: u32 = 0o2000;
const S_IXGRP: u32 = 0o010;
const PERMISSIONS: u32 = 0o7777;

/// Returns the mode of a regular file after a change of its data or size by `cx`, a caller without `CAP_FSETID`, or after
/// any change of its owner (Linux's `setattr_should_drop_suidgid`). `gid` is the file's group before the change.
///
/// Suid is cleared. Sgid is cleared if the group may execute the file, or if the caller is not in the group: without group
/// execution it is no privilege but a mark for mandatory locks.
pub fn without_privileges(mode: u32, gid: u32, cx: &Caller<'_>) -> u32 {
    let keeps_sgid = mode & S_IXGRP == 0 && cx.in_group_or_root(gid);
    mode & !(S_ISUID | if keeps_sgid { 0 } else { S_ISGID })
}

/// Checks whether [`open`](crate::FileSystem::open) applies to this file type: only to regular files.
///
/// # Errors
/// `ISDIR` and `LOOP` for directories and symbolic links; `ACCESS` for devices, as on a mount with `nodev`, and `NXIO` for
/// FIFOs and sockets: the client's kernel opens those itself.
pub fn openable(kind: FileType) -> Result<()> {
    match kind {
        FileType::RegularFile => Ok(()),
        FileType::Directory => Err(Errno::ISDIR),
        FileType::Symlink => Err(Errno::LOOP),
        FileType::BlockDevice | FileType::CharacterDevice => Err(Errno::ACCESS),
        FileType::Fifo | FileType::Socket | FileType::Unknown => Err(Errno::NXIO),
    }
}

impl Timespec {
    /// Returns the time of the host's clock.
    pub fn now() -> Self {
        SystemTime::now().into()
    }
}

impl From<SystemTime> for Timespec {
    fn from(time: SystemTime) -> Self {
        match time.duration_since(UNIX_EPOCH) {
            Ok(since) => Self { sec: i64::try_from(since.as_secs()).unwrap_or(i64::MAX), nsec: since.subsec_nanos() },
            Err(before) => {
                let before = before.duration();
                let sec = i64::try_from(before.as_secs()).unwrap_or(i64::MAX);
                match before.subsec_nanos() {
                    0 => Self { sec: -sec, nsec: 0 },
                    nsec => Self { sec: -sec - 1, nsec: 1_000_000_000 - nsec },
                }
            }
        }
    }
}

impl Attr {
    /// Returns the attributes of an empty inode of root with these permission bits, created now: one name, or two for a
    /// directory (its own and `.`). Callers change the fields as needed.
    pub fn new(ino: Ino, kind: FileType, permissions: u32) -> Self {
        let now = Timespec::now();
        Self {
            ino: ino.0,
            mode: kind.as_raw_mode() | (permissions & PERMISSIONS),
            nlink: if kind == FileType::Directory { 2 } else { 1 },
            blksize: BLKSIZE,
            atime: now,
            mtime: now,
            ctime: now,
            btime: Some(now),
            ..Self::default()
        }
    }

    /// Returns the attributes of an inode that `cx` creates now in a directory with the attributes `dir`: the caller is
    /// the owner, the umask is applied, and a directory with sgid passes on its group (and sgid, to directories).
    ///
    /// For sources without ACLs; a default ACL of the directory would replace the umask.
    pub fn for_new(ino: Ino, cx: &Caller<'_>, new: &CreateArgs, dir: &Self) -> Self {
        let kind = FileType::from_raw_mode(new.mode);
        let mut attr = Self::new(ino, kind, new.mode & !new.umask);
        (attr.uid, attr.gid, attr.rdev) = (cx.uid, cx.gid, new.rdev);
        if dir.mode & S_ISGID != 0 {
            attr.gid = dir.gid;
            if kind == FileType::Directory {
                attr.mode |= S_ISGID;
            }
        }
        attr
    }

    /// Returns the attributes with this size, all of it allocated.
    #[must_use]
    pub fn with_size(mut self, bytes: u64) -> Self {
        self.set_size(bytes);
        self
    }

    /// Sets size and allocated space together, as for a file without holes.
    pub fn set_size(&mut self, bytes: u64) {
        self.size = bytes;
        self.blocks = bytes.div_ceil(BLOCK_BYTES);
    }

    /// Clears suid and sgid, as a write by an unprivileged caller does ([`without_privileges`],
    /// [`crate::IoRange::clear_privileges`]).
    pub fn clear_privileges(&mut self, cx: &Caller<'_>) {
        self.mode = without_privileges(self.mode, self.gid, cx);
    }

    /// Returns whether this is a regular file with suid or sgid.
    pub fn is_set_id(&self) -> bool {
        self.kind() == FileType::RegularFile && self.mode & (S_ISUID | S_ISGID) != 0
    }
}

impl Entry {
    /// Returns an entry of an inode whose number is never reused. It carries one reference, which the source has counted.
    pub fn new(ino: Ino, attr: Attr) -> Self {
        Self { ino, generation: 0, attr }
    }
}

impl SetAttr {
    /// Changes `attr` for `cx` as Linux's own file systems do: a change of owner clears suid and sgid, a change of size sets
    /// mtime, and every change sets ctime. The source changes the data of the file, its ACL and its capabilities.
    pub fn apply(&self, cx: &Caller<'_>, attr: &mut Attr) {
        let now = Timespec::now();
        let at = |time: SetTime| match time {
            SetTime::Now => now,
            SetTime::At(time) => time,
        };
        let chown = (self.uid.is_some() || self.gid.is_some()) && attr.kind() != FileType::Directory;
        if self.clear_privileges || chown {
            attr.clear_privileges(cx);
        }
        if let Some(mode) = self.mode {
            attr.mode = (attr.mode & !PERMISSIONS) | (mode & PERMISSIONS);
        }
        attr.uid = self.uid.unwrap_or(attr.uid);
        attr.gid = self.gid.unwrap_or(attr.gid);
        if let Some(bytes) = self.size {
            attr.set_size(bytes);
            attr.mtime = now;
        }
        attr.atime = self.atime.map_or(attr.atime, at);
        attr.mtime = self.mtime.map_or(attr.mtime, at);
        attr.ctime = self.ctime.unwrap_or(now);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_before_the_epoch_have_positive_nanoseconds() {
        let at = |millis: i64| {
            let by = Duration::from_millis(millis.unsigned_abs());
            Timespec::from(if millis < 0 { UNIX_EPOCH - by } else { UNIX_EPOCH + by })
        };
        for (millis, sec, nsec) in [(0, 0, 0), (1500, 1, 500_000_000), (-1, -1, 999_000_000), (-2000, -2, 0)] {
            assert_eq!(at(millis), Timespec { sec, nsec }, "{millis} ms");
        }
    }

    #[test]
    fn a_new_inode_belongs_to_its_caller_unless_the_directory_has_sgid() {
        let cx = Caller { uid: 5, gid: 6, ..Caller::default() };
        let file = FileType::RegularFile.as_raw_mode();
        let directory = FileType::Directory.as_raw_mode();
        // The directory's mode, the new inode's, the umask; the outcome's mode and group.
        for (dir_mode, mode, umask, made_mode, made_gid) in [
            (0o755, file | 0o666, 0o022, file | 0o644, 6),
            (0o755, directory | 0o777, 0o027, directory | 0o750, 6),
            (0o2755, file | 0o666, 0, file | 0o666, 9),
            (0o2755, directory | 0o755, 0, directory | 0o2755, 9),
        ] {
            let mut dir = Attr::new(Ino::ROOT, FileType::Directory, dir_mode);
            dir.gid = 9;
            let made = Attr::for_new(Ino(2), &cx, &CreateArgs { mode, umask, rdev: 0 }, &dir);
            assert_eq!((made.mode, made.uid, made.gid), (made_mode, 5, made_gid), "{mode:o} in {dir_mode:o}");
        }
    }

    #[test]
    fn privileges_are_cleared_as_on_linux() {
        let none = SetAttr::default();
        let cleared = SetAttr { size: Some(1), clear_privileges: true, ..none };
        let root = Caller::default();
        let (member, stranger) = (Caller { uid: 5, gid: 6, ..root }, Caller { uid: 5, gid: 7, ..root });
        let also = Caller { groups: &[6], ..stranger };
        let unknown = Caller { uid: Caller::UNKNOWN, gid: Caller::UNKNOWN, ..root };
        for (kind, before, cx, set, after) in [
            (FileType::RegularFile, 0o6755, root, SetAttr { uid: Some(1), ..none }, 0o755),
            (FileType::RegularFile, 0o6744, root, SetAttr { gid: Some(1), ..none }, 0o2744),
            (FileType::RegularFile, 0o6744, member, SetAttr { gid: Some(1), ..none }, 0o2744),
            (FileType::RegularFile, 0o6744, stranger, SetAttr { gid: Some(1), ..none }, 0o744),
            (FileType::RegularFile, 0o6755, stranger, SetAttr { size: Some(1), ..none }, 0o6755),
            (FileType::RegularFile, 0o6755, member, cleared, 0o755),
            (FileType::RegularFile, 0o6745, member, cleared, 0o2745),
            (FileType::RegularFile, 0o6745, also, cleared, 0o2745),
            (FileType::RegularFile, 0o6745, stranger, cleared, 0o745),
            (FileType::RegularFile, 0o6745, unknown, cleared, 0o2745),
            (FileType::RegularFile, 0o6745, Caller { gid: Caller::UNKNOWN, ..stranger }, cleared, 0o2745),
            (FileType::RegularFile, 0o6755, unknown, cleared, 0o755),
            (FileType::RegularFile, 0o755, root, SetAttr { mode: Some(0o4711), ..none }, 0o4711),
            (FileType::Directory, 0o2755, root, SetAttr { uid: Some(1), ..none }, 0o2755),
        ] {
            let mut attr = Attr { gid: 6, ..Attr::new(Ino(2), kind, before) };
            set.apply(&cx, &mut attr);
            assert_eq!(attr.mode, kind.as_raw_mode() | after, "{before:o}, {cx:?}, {set:?}");
        }
    }

    #[test]
    fn a_change_of_size_sets_the_blocks_and_the_times() {
        let old = Timespec { sec: 1, nsec: 0 };
        let mut attr = Attr { mtime: old, ctime: old, atime: old, ..Attr::new(Ino(2), FileType::RegularFile, 0o644) };
        SetAttr { size: Some(513), ..SetAttr::default() }.apply(&Caller::default(), &mut attr);
        assert_eq!((attr.size, attr.blocks, attr.atime), (513, 2, old));
        assert!(attr.mtime > old && attr.ctime > old);
        let times = SetAttr { mtime: Some(SetTime::At(old)), ctime: Some(old), ..SetAttr::default() };
        times.apply(&Caller::default(), &mut attr);
        assert_eq!((attr.mtime, attr.ctime), (old, old));
    }
}
