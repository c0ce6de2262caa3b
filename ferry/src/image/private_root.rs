//! Gives open files a path for the mount table. The path of a verified file may by now lead to another file, so the kernel
//! must open the verified one. But the mount table shows the path that was opened, and the path of a descriptor is
//! meaningless to people.
//!
//! So a thread with a private root directory, which contains only these files at their paths, calls the kernel.
//!
//! A thread with private mounts also has the image on a directory for kernels that need that.
#![allow(unsafe_code, reason = "a namespace for one thread has no safe wrapper")]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::{CWD, Mode, OFlags, RawMode, mkdirat, openat};
use rustix::io::{Errno, Result};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsmount, fsopen, mount_change, move_mount, open_tree,
};
use rustix::thread::UnshareFlags;

const DIR_MODE: RawMode = 0o755;
const FILE_MODE: RawMode = 0o600;

/// Runs `work` on a thread whose root directory contains only these files, at their absolute paths.
///
/// Fails if the kernel does not support this, or the user may not do it.
pub fn with_files<T: Send>(files: &[(&Path, &File)], work: impl FnOnce() -> T + Send) -> Result<T> {
    let copy = |(path, file): &(&Path, &File)| {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let path = path.strip_prefix("/").map_err(|_| Errno::INVAL)?.to_owned();
        Ok((path, open_tree(*file, "", flags)?))
    };
    // Copied in this namespace: files of other namespaces cannot be mounted.
    let copies = files.iter().map(copy).collect::<Result<Vec<_>>>()?;
    let root = empty_tmpfs()?;
    thread::scope(|scope| {
        let thread = scope.spawn(move || {
            enter_root(&root)?;
            for (path, copy) in &copies {
                mount_file(path, copy)?;
            }
            Ok(work())
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Runs `work` on a thread with its own copy of all mounts. What it mounts is invisible to other processes and ends with the thread.
///
/// Fails if the user may not do it, with `EINVAL` if the root directory is no mount point, as after chroot(1).
pub fn with_private_mounts<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = scope.spawn(|| unshare_mounts().map(|()| work()));
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Returns a detached, empty tmpfs.
fn empty_tmpfs() -> Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

/// Makes `root` the root directory of this thread, in a mount namespace that ends with it.
fn enter_root(root: &OwnedFd) -> Result<()> {
    unshare_mounts()?;
    move_mount(root.as_fd(), "", CWD, "/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    rustix::process::fchdir(root)?;
    rustix::process::chroot(".")
}

/// Gives this thread its own mount namespace.
fn unshare_mounts() -> Result<()> {
    // SAFETY: unshare_unsafe is unsafe for CLONE_FILES alone, which is not among these.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS | UnshareFlags::NEWNS) }?;
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
}

/// Mounts a file at a path below the root.
fn mount_file(path: &Path, file: &OwnedFd) -> Result<()> {
    let directories: Vec<_> = path.ancestors().skip(1).filter(|directory| !directory.as_os_str().is_empty()).collect();
    for directory in directories.into_iter().rev() {
        match mkdirat(CWD, directory, Mode::from_raw_mode(DIR_MODE)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
    }
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    drop(openat(CWD, path, flags, Mode::from_raw_mode(FILE_MODE))?);
    move_mount(file.as_fd(), "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

/// Returns paths for further files, which the mount table does not show.
pub fn placeholder_paths(count: usize) -> Vec<PathBuf> {
    (0..count).map(|number| format!("/.ferry-files/{number}").into()).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn there_is_nothing_else() {
        let directory = tempfile::tempdir().expect("directories can be made");
        let path = directory.path().join("a");
        fs::write(&path, "proved").expect("files can be made");
        let file = File::open(&path).expect("it was made");
        fs::rename(&path, directory.path().join("b")).expect("files can be renamed");
        fs::write(&path, "another").expect("files can be made");
        let look = || (fs::read_to_string(&path).ok(), fs::read_dir("/").map(|names| names.count()).ok());
        match with_files(&[(&path, &file)], look) {
            Ok(seen) => assert_eq!(seen, (Some("proved".into()), Some(1))),
            Err(error) => ferry_skip::skip!("only root has namespaces of mounts: {error}"),
        }
        assert_eq!(fs::read_to_string(&path).expect("it was made"), "another", "for others nothing has changed");
    }

    #[test]
    fn a_root_that_is_no_mount_point_has_no_private_mounts() {
        let directory = tempfile::tempdir().expect("a directory");
        let work = || -> Result<()> {
            // SAFETY: unshare_unsafe is unsafe for CLONE_FILES alone, which is not among these.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }?;
            rustix::process::chroot(directory.path())?;
            with_private_mounts(|| ())
        };
        match thread::scope(|scope| scope.spawn(work).join().expect("it does not panic")) {
            Err(Errno::PERM) => ferry_skip::skip!("only root has namespaces of mounts"),
            outcome => assert_eq!(outcome, Err(Errno::INVAL)),
        }
    }

    #[test]
    fn private_mounts_are_invisible_to_others() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().canonicalize().expect("it was made");
        let shown = |table: &str| fs::read_to_string(table).map(|table| table.contains(&*path.to_string_lossy())).ok();
        let look = || {
            move_mount(empty_tmpfs()?.as_fd(), "", CWD, &path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
            Ok((shown("/proc/thread-self/mountinfo"), shown("/proc/self/mountinfo")))
        };
        match with_private_mounts(look).flatten() {
            Ok(seen) => assert_eq!(seen, (Some(true), Some(false))),
            Err(error) => ferry_skip::skip!("only root has namespaces of mounts: {error}"),
        }
        assert_eq!(shown("/proc/self/mountinfo"), Some(false));
    }
}
