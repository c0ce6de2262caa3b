//! The stat walk: lists every directory of a tree and queries every name.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, StatxFlags};

/// What was found, to tell whether two trees are alike.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Found {
    /// Names, and the root.
    pub inodes: usize,
    /// Lengths of regular files, in bytes.
    pub bytes: u64,
}

/// Walks a tree, depth first, in the order in which directories are listed.
pub fn walk(root: &Path) -> Result<Found> {
    let mut found = Found { inodes: 1, bytes: 0 };
    let root = open(CWD, root).with_context(|| format!("cannot open {}", root.display()))?;
    directory(root, &mut found)?;
    Ok(found)
}

/// All regular files of a tree, below it, by name.
pub fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let (mut left, mut found) = (vec![root.to_owned()], Vec::new());
    while let Some(path) = left.pop() {
        for entry in std::fs::read_dir(&path).with_context(|| format!("cannot list {}", path.display()))? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                left.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path().strip_prefix(root)?.to_owned());
            }
        }
    }
    found.sort_unstable();
    Ok(found)
}

fn open<P: rustix::path::Arg>(at: impl std::os::fd::AsFd, path: P) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::openat(at, path, flags, Mode::empty())
}

fn directory(dir: OwnedFd, found: &mut Found) -> Result<()> {
    for entry in Dir::read_from(&dir).context("cannot list a directory")? {
        let entry = entry.context("cannot list a directory")?;
        let name: &CStr = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let named = || format!("cannot look at {}", name.to_string_lossy());
        let seen = rustix::fs::statx(&dir, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS);
        let seen = seen.with_context(named)?;
        found.inodes += 1;
        match FileType::from_raw_mode(seen.stx_mode.into()) {
            FileType::Directory => directory(open(&dir, name).with_context(named)?, found)?,
            FileType::RegularFile => found.bytes += seen.stx_size,
            _ => {}
        }
    }
    Ok(())
}
