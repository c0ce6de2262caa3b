//! The root directory of a server: an empty directory with only the shared trees.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};

use crate::{Error, Result};

/// The parent of the shared directories.
const SHARES: &str = "share";
/// The directory through which a server reopens its own descriptors.
const FDS: &str = "proc/self/fd";
/// The user id map of this process.
const MAP: &str = "proc/self/uid_map";

/// The access to a visible directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Its files are used.
    ReadWrite,
    /// Read files; everything below is read-only.
    ReadOnly,
    /// Connect to sockets; everything below is read-only and not executable.
    Sockets,
}

/// A directory that stays visible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// Its path on the host.
    pub path: PathBuf,
    /// The access to it.
    pub access: Access,
}

/// The part of the host that a server sees in its namespaces.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Directories with their paths inside.
    pub roots: Vec<Root>,
    /// Files that keep their absolute paths, read-only. If such a file is replaced later, the server still sees the old
    /// one.
    pub files: Vec<PathBuf>,
    /// Keep the host's network for threads that connect to servers; other threads leave it
    /// ([`leave_network`](crate::leave_network)).
    pub network: bool,
}

/// Adds the name of a step to the kernel's error.
pub(crate) fn step<T>(outcome: rustix::io::Result<T>, name: impl FnOnce() -> String) -> Result<T> {
    outcome.map_err(|errno| Error::Namespaces { step: name(), errno })
}

/// Creates the new root and enters it. Requires a mount namespace of this process. Returns the paths of the directories
/// inside, in order.
pub(crate) fn enter(View { roots, files, .. }: &View) -> Result<Vec<PathBuf>> {
    // Mounts of the host still propagate in, but none propagate out.
    let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    step(rustix::mount::mount_change("/", slave), || "cannot separate the mounts from those of the host".into())?;
    let cloned = roots.iter().map(|root| clone(&root.path, true)).collect::<Result<Vec<_>>>()?;
    let copies = files.iter().map(|path| clone(path, false)).collect::<Result<Vec<_>>>()?;
    let (fds, map) = (clone(Path::new("/proc/self/fd"), false)?, clone(Path::new("/proc/self/uid_map"), false)?);
    let new = create_tmpfs()?;
    // /proc always exists. It serves only as a mount point and disappears with the old root.
    let move_here = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    step(rustix::mount::move_mount(&new, "", CWD, "/proc", move_here), || "cannot mount an empty directory".into())?;
    let mut inside = Vec::new();
    create_dir(new.as_fd(), SHARES)?;
    for (number, (root, tree)) in roots.iter().zip(&cloned).enumerate() {
        let name = format!("{SHARES}/{number}");
        create_dir(new.as_fd(), &name)?;
        attach(tree.as_fd(), new.as_fd(), &name)?;
        let flags = match root.access {
            Access::ReadWrite => 0,
            Access::ReadOnly => libc::MOUNT_ATTR_RDONLY,
            Access::Sockets => libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOEXEC,
        };
        let outcome = set_flags(tree.as_fd(), flags | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV, true);
        step(outcome, || format!("cannot make the mounts below {} nosuid and nodev", root.path.display()))?;
        inside.push(Path::new("/").join(name));
    }
    for name in ["proc", "proc/self", FDS] {
        create_dir(new.as_fd(), name)?;
    }
    attach(fds.as_fd(), new.as_fd(), FDS)?;
    create_file(new.as_fd(), MAP)?;
    attach(map.as_fd(), new.as_fd(), MAP)?;
    for (path, copy) in files.iter().zip(&copies) {
        let name = path.strip_prefix("/").unwrap_or(path);
        let parents: Vec<&Path> = name.ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty()).collect();
        for parent in parents.into_iter().rev() {
            match rustix::fs::mkdirat(&new, parent, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => step(Err(errno), || format!("cannot create /{}", parent.display()))?,
            }
        }
        let name = name.to_string_lossy();
        create_file(new.as_fd(), &name)?;
        attach(copy.as_fd(), new.as_fd(), &name)?;
        let flags = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
        let outcome = set_flags(copy.as_fd(), flags | libc::MOUNT_ATTR_RDONLY, false);
        step(outcome, || format!("cannot make {} read-only", path.display()))?;
    }
    step(set_flags(new.as_fd(), libc::MOUNT_ATTR_RDONLY, false), || "cannot make the new root read-only".into())?;
    step(rustix::process::fchdir(&new), || "cannot enter the new root".into())?;
    // The old root is mounted over the new one and then unmounted: pivot_root(2), "pivot_root(".", ".")".
    step(rustix::process::pivot_root(".", "."), || "cannot change the root".into())?;
    let unmounted = rustix::mount::unmount(".", UnmountFlags::DETACH);
    step(unmounted, || "cannot unmount the host's mounts".into())?;
    step(rustix::process::chdir("/"), || "cannot enter the new root".into())?;
    Ok(inside)
}

/// Clones a mount tree, detached.
fn clone(path: &Path, recursive: bool) -> Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    flags.set(OpenTreeFlags::AT_RECURSIVE, recursive);
    step(rustix::mount::open_tree(CWD, path, flags), || format!("cannot clone the mount of {}", path.display()))
}

fn attach(tree: BorrowedFd<'_>, root: BorrowedFd<'_>, name: &str) -> Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    step(rustix::mount::move_mount(tree, "", root, name, flags), || format!("cannot mount /{name}"))
}

/// Creates a small tmpfs, detached.
fn create_tmpfs() -> Result<OwnedFd> {
    let make = || {
        let fs = rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        // It only holds directories and empty files, and becomes read-only.
        for (key, value) in [("mode", "0755"), ("size", "64k"), ("nr_inodes", "1k")] {
            rustix::mount::fsconfig_set_string(&fs, key, value)?;
        }
        rustix::mount::fsconfig_create(&fs)?;
        let flags =
            MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, flags)
    };
    step(make(), || "cannot create an empty directory (tmpfs)".into())
}

fn create_dir(root: BorrowedFd<'_>, name: &str) -> Result<()> {
    step(rustix::fs::mkdirat(root, name, Mode::from_raw_mode(0o755)), || format!("cannot create /{name}"))
}

/// Creates an empty file as a mount point.
fn create_file(root: BorrowedFd<'_>, name: &str) -> Result<()> {
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
    step(rustix::fs::openat(root, name, flags, Mode::RUSR).map(drop), || format!("cannot create /{name}"))
}

/// Calls mount_setattr(2), which the library lacks.
fn set_flags(mount: BorrowedFd<'_>, flags: u64, recursive: bool) -> rustix::io::Result<()> {
    let attributes = libc::mount_attr { attr_set: flags, attr_clr: 0, propagation: 0, userns_fd: 0 };
    let mut how = AtFlags::EMPTY_PATH.bits();
    if recursive {
        how |= libc::AT_RECURSIVE.unsigned_abs();
    }
    // SAFETY: mount_setattr reads a path that ends with NUL and a structure of the given length; both outlive the call.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            how,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if outcome < 0 { Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)) } else { Ok(()) }
}
