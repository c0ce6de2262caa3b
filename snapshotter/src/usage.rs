//! The space that a directory takes.

use std::collections::HashSet;
use std::ffi::CString;
use std::path::Path;

use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, openat, statat};
use rustix::io::Errno;

use crate::error::{Error, IoContext, Result};
use crate::metadata::Usage;

/// The size of a block in `stat`.
const BLOCK_BYTES: u64 = 512;
/// The maximum depth: each level takes a descriptor.
const DEPTH_MAX: usize = 4096;

/// A directory, and those in it that are not counted yet.
type Level = (OwnedFd, Vec<CString>);

/// The sums.
#[derive(Debug, Default)]
struct Count {
    linked: HashSet<(u64, u64)>,
    blocks: u64,
    inodes: u64,
    /// The lengths of files in bytes, holes included.
    file_bytes: u64,
}

impl Count {
    fn add(&mut self, found: &Stat) {
        let mut is_first = || self.linked.insert((found.st_dev, found.st_ino));
        if is_directory(found) || found.st_nlink == 1 || is_first() {
            self.blocks += u64::try_from(found.st_blocks).unwrap_or_default();
            self.inodes += 1;
            if FileType::from_raw_mode(found.st_mode) == FileType::RegularFile {
                self.file_bytes = self.file_bytes.saturating_add(u64::try_from(found.st_size).unwrap_or_default());
            }
        }
    }

    /// Counts the entries of a directory; `None`: it no longer exists or is no directory.
    fn open(&mut self, at: &OwnedFd, name: &CString) -> rustix::io::Result<Option<Level>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = match openat(at, name, flags, Mode::empty()) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
            opened => opened?,
        };
        let mut below = Vec::new();
        for entry in Dir::read_from(&directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            match statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => continue,
                found => {
                    let found = found?;
                    self.add(&found);
                    if is_directory(&found) {
                        below.push(name.to_owned());
                    }
                }
            }
        }
        Ok(Some((directory, below)))
    }
}

fn is_directory(found: &Stat) -> bool {
    FileType::from_raw_mode(found.st_mode) == FileType::Directory
}

/// Counts the inodes and blocks of a directory and everything in it; those with several names once. A container may change it
/// meanwhile: no symbolic link is followed.
///
/// # Errors
///
/// A directory cannot be listed, or is more than 4096 levels deep.
pub fn of(root: &Path) -> Result<Usage> {
    let count = count(root)?;
    let bytes = count.blocks.saturating_mul(BLOCK_BYTES);
    let inodes = i64::try_from(count.inodes).unwrap_or(i64::MAX);
    Ok(Usage { bytes: i64::try_from(bytes).unwrap_or(i64::MAX), inodes })
}

/// As [`of`]; returns the sum of the lengths of all files in bytes, holes included.
///
/// # Errors
///
/// As for [`of`].
pub fn file_bytes(root: &Path) -> Result<u64> {
    Ok(count(root)?.file_bytes)
}

fn count(root: &Path) -> Result<Count> {
    let mut count = Count::default();
    let here = openat(CWD, root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let here = here.doing("inspect", root)?;
    count.add(&rustix::fs::fstat(&here).doing("inspect", root)?);
    let mut levels: Vec<Level> = vec![(here, vec![c".".to_owned()])];
    while let Some((directory, below)) = levels.last_mut() {
        let Some(name) = below.pop() else {
            levels.pop();
            continue;
        };
        if let Some(level) = count.open(directory, &name).doing("list", root)? {
            if levels.len() > DEPTH_MAX {
                let why = format!("{} has more than {DEPTH_MAX} directories one in another", root.display());
                return Err(Error::FailedPrecondition(why));
            }
            levels.push(level);
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_count_once_and_links_to_directories_are_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        assert_eq!(of(directory.path()).unwrap().inodes, 1);
        fs::create_dir(at("a")).unwrap();
        fs::write(at("a/file"), vec![1; 100_000]).unwrap();
        fs::hard_link(at("a/file"), at("again")).unwrap();
        symlink("/", at("root")).unwrap();
        let usage = of(directory.path()).unwrap();
        assert_eq!(usage.inodes, 4);
        assert!((100_000..150_000).contains(&usage.bytes), "{usage:?}");
        fs::File::create(at("hole")).unwrap().set_len(1 << 42).unwrap();
        assert_eq!(file_bytes(directory.path()).unwrap(), 100_000 + (1 << 42));
        assert!(of(&at("none")).is_err());
    }
}
