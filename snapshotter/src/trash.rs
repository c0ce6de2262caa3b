//! Directories that are being removed, `ROOT/trash/NAME`.
//!
//! A container chooses how deep and wide they are, so subdirectories are moved up to the trash before they are removed. No path,
//! stack or memory grows with the depth or width.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, openat, renameat, unlinkat};
use rustix::io::Errno;

/// The maximum number of times that a directory with new entries is listed again.
const LISTED_MAX: usize = 16;

static NEXT: AtomicU64 = AtomicU64::new(0);

/// Returns a name that is unique in this process; another process may have used it.
fn unique(prefix: &str) -> OsString {
    format!("{prefix}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)).into()
}

/// Moves a directory to the trash; returns its name there, if it exists.
pub fn put(trash: &Path, directory: &Path) -> io::Result<Option<OsString>> {
    loop {
        let name = unique("");
        match renameat(CWD, directory, CWD, trash.join(&name)) {
            Ok(()) => return Ok(Some(name)),
            Err(Errno::NOENT) => return Ok(None),
            // A killed process has left an entry with this name.
            Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Removes a directory in the trash, and everything in it. Other threads may remove the same concurrently.
pub fn remove(trash: &Path, name: &OsString) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = openat(CWD, trash, flags, Mode::empty())?;
    let below = prefix(name);
    loop {
        let mut found = false;
        for entry in Dir::read_from(&top)? {
            let entry = entry?;
            let entry = entry.file_name().to_bytes();
            if entry == name.as_bytes() || entry.starts_with(below.as_bytes()) {
                found = true;
                remove_one(&top, &OsString::from_vec(entry.to_vec()), name)?;
            }
        }
        if !found {
            return Ok(());
        }
    }
}

/// Returns the name prefix for subdirectories of this one. It does not grow with each killed process.
fn prefix(name: &OsString) -> String {
    let name = name.to_string_lossy();
    let root = match name.find('.') {
        Some(at) if at > 0 => &name[..at],
        _ => &*name,
    };
    format!("{root}.")
}

/// Removes an entry of the trash, or a part of it on a full disk. Directories in it become entries of the trash.
fn remove_one(top: &OwnedFd, entry: &OsString, name: &OsString) -> rustix::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = match openat(top, entry, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::NOTDIR | Errno::LOOP) => return present(unlinkat(top, entry, AtFlags::empty())),
        opened => opened?,
    };
    let prefix = prefix(name);
    let mut has_moved = false;
    for _ in 0..LISTED_MAX {
        for child in Dir::read_from(&directory)? {
            let child = child?;
            let child = child.file_name();
            if matches!(child.to_bytes(), b"." | b"..") {
                continue;
            }
            match unlinkat(&directory, child, AtFlags::empty()) {
                Err(Errno::ISDIR) => match move_up(&directory, child, (top, &prefix)) {
                    // Removing the moved directories frees space.
                    Err(Errno::NOSPC | Errno::DQUOT) if has_moved => return Ok(()),
                    moved => {
                        moved?;
                        has_moved = true;
                    }
                },
                removed => present(removed)?,
            }
        }
        match unlinkat(top, entry, AtFlags::REMOVEDIR) {
            Err(Errno::NOTEMPTY) => {}
            removed => return present(removed),
        }
    }
    Err(Errno::NOTEMPTY)
}

fn move_up(directory: &OwnedFd, child: &std::ffi::CStr, (top, prefix): (&OwnedFd, &str)) -> rustix::io::Result<()> {
    loop {
        match renameat(directory, child, top, unique(prefix)) {
            Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => {}
            moved => return present(moved),
        }
    }
}

/// Ignores that an entry does not exist.
fn present(removed: rustix::io::Result<()>) -> rustix::io::Result<()> {
    match removed {
        Err(Errno::NOENT) => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::{mkdirat, openat};

    use super::*;

    #[test]
    fn directories_of_any_depth_and_width_are_removed() {
        const DEPTH: usize = 20_000;
        let root = tempfile::tempdir().unwrap();
        let (trash, directory) = (root.path().join("trash"), root.path().join("7"));
        fs::create_dir(&trash).unwrap();
        fs::create_dir(&directory).unwrap();
        for number in 0..300 {
            fs::create_dir(directory.join(format!("d{number}"))).unwrap();
            fs::write(directory.join(format!("d{number}/f")), "x").unwrap();
        }
        std::os::unix::fs::symlink("/", directory.join("root")).unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut at = openat(CWD, &directory, flags, Mode::empty()).unwrap();
        for _ in 0..DEPTH {
            mkdirat(&at, "deep", Mode::RWXU).unwrap();
            at = openat(&at, "deep", flags, Mode::empty()).unwrap();
        }
        drop(at);
        let left = trash.join("other");
        fs::write(&left, "").unwrap();
        let name = put(&trash, &directory).unwrap().unwrap();
        // On a stack that a frame for each directory would overflow.
        let removed = std::thread::Builder::new().stack_size(64 << 10);
        let (at, of) = (trash.clone(), name.clone());
        removed.spawn(move || remove(&at, &of)).unwrap().join().unwrap().unwrap();
        let names: Vec<_> = fs::read_dir(&trash).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(names, [left]);
        assert!(put(&trash, &directory).unwrap().is_none());
        assert_eq!(
            [prefix(&"7-1".into()), prefix(&"7-1.8-2".into()), prefix(&".tmp".into())],
            ["7-1.", "7-1.", ".tmp."]
        );
        remove(&trash, &name).unwrap();
    }
}
