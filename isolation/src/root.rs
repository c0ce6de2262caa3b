//! The root directory of a server: an empty directory that contains the shared trees only.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags,
};

use crate::{Error, Result};

/// Where shared directories are.
const SHARES: &str = "share";
/// How a server reaches its own descriptors; `..` of it is in the same folder.
const FDS: &str = "proc/self/fd";
/// Which numbers of users there are.
const MAP: &str = "proc/self/uid_map";

/// What a directory stays visible for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Its files are used.
    ReadWrite,
    /// Its files are read; nobody may change anything below it.
    ReadOnly,
    /// Sockets in it are connected to; nobody may change or execute anything below it.
    Sockets,
}

/// A directory that stays visible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// Its path, outside.
    pub path: PathBuf,
    /// What for.
    pub access: Access,
}

/// What of the host is there for a server in namespaces of its own.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// Directories, each of which has another place inside.
    pub roots: Vec<Root>,
    /// Files that keep their places, by absolute paths: as they are now, to be read. One that is replaced by another file of the same
    /// name stays what it was.
    pub files: Vec<PathBuf>,
    /// The host's network is kept for now, for threads that connect to servers; the others leave it ([`leave_network`](crate::leave_network)).
    pub network: bool,
}

/// A step of the way, with the kernel's word on it.
pub(crate) fn step<T>(outcome: rustix::io::Result<T>, words: impl FnOnce() -> String) -> Result<T> {
    outcome.map_err(|errno| Error::Namespaces { step: words(), errno })
}

/// Makes the new root and goes there. Needs a namespace of mounts of this process's own. Returns where the directories
/// are now, in their order.
pub(crate) fn enter(View { roots, files, .. }: &View) -> Result<Vec<PathBuf>> {
    // Mounts of the host go on to come in, none of ours goes out.
    let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    step(rustix::mount::mount_change("/", slave), || "the host's mounts cannot be kept apart".into())?;
    let cloned = roots.iter().map(|root| clone(&root.path, true)).collect::<Result<Vec<_>>>()?;
    let copies = files.iter().map(|path| clone(path, false)).collect::<Result<Vec<_>>>()?;
    let (fds, map) = (clone(Path::new("/proc/self/fd"), false)?, clone(Path::new("/proc/self/uid_map"), false)?);
    let new = empty()?;
    // /proc is always there; it is only a place to be attached at, and gone with all the rest below.
    let move_here = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    step(rustix::mount::move_mount(&new, "", CWD, "/proc", move_here), || "an empty folder cannot be mounted".into())?;
    let mut inside = Vec::new();
    folder(new.as_fd(), SHARES)?;
    for (number, (root, tree)) in roots.iter().zip(&cloned).enumerate() {
        let name = format!("{SHARES}/{number}");
        folder(new.as_fd(), &name)?;
        attach(tree.as_fd(), new.as_fd(), &name)?;
        let flags = match root.access {
            Access::ReadWrite => 0,
            Access::ReadOnly => libc::MOUNT_ATTR_RDONLY,
            Access::Sockets => libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOEXEC,
        };
        let made = set_flags(tree.as_fd(), flags | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV, true);
        step(made, || format!("the mounts below {} cannot be made nosuid and nodev", root.path.display()))?;
        inside.push(Path::new("/").join(name));
    }
    for name in ["proc", "proc/self", FDS] {
        folder(new.as_fd(), name)?;
    }
    attach(fds.as_fd(), new.as_fd(), FDS)?;
    file(new.as_fd(), MAP)?;
    attach(map.as_fd(), new.as_fd(), MAP)?;
    for (path, copy) in files.iter().zip(&copies) {
        let name = path.strip_prefix("/").unwrap_or(path);
        let above: Vec<&Path> = name.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty()).collect();
        for above in above.into_iter().rev() {
            match rustix::fs::mkdirat(&new, above, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => step(Err(errno), || format!("/{} cannot be made", above.display()))?,
            }
        }
        let name = name.to_string_lossy();
        file(new.as_fd(), &name)?;
        attach(copy.as_fd(), new.as_fd(), &name)?;
        let flags = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
        let made = set_flags(copy.as_fd(), flags | libc::MOUNT_ATTR_RDONLY, false);
        step(made, || format!("{} cannot be made read-only", path.display()))?;
    }
    step(set_flags(new.as_fd(), libc::MOUNT_ATTR_RDONLY, false), || "the new root cannot be made read-only".into())?;
    step(rustix::process::fchdir(&new), || "the new root cannot be entered".into())?;
    // The old root comes to lie on the new one, and goes: pivot_root(2), "pivot_root(".", ".")".
    step(rustix::process::pivot_root(".", "."), || "the root cannot be changed".into())?;
    let gone = rustix::mount::unmount(".", UnmountFlags::DETACH);
    step(gone, || "the host's mounts cannot be let go of".into())?;
    step(rustix::process::chdir("/"), || "the new root cannot be entered".into())?;
    Ok(inside)
}

/// A tree of mounts that is attached nowhere.
fn clone(path: &Path, recursive: bool) -> Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    flags.set(OpenTreeFlags::AT_RECURSIVE, recursive);
    step(rustix::mount::open_tree(CWD, path, flags), || format!("{} cannot be mounted", path.display()))
}

fn attach(tree: BorrowedFd<'_>, root: BorrowedFd<'_>, name: &str) -> Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    step(rustix::mount::move_mount(tree, "", root, name, flags), || format!("/{name} cannot be mounted"))
}

/// A small memory file system, which is attached nowhere yet.
fn empty() -> Result<OwnedFd> {
    let make = || {
        let fs = rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        // Folders and files without contents, and not much more: it is read-only in the end.
        for (key, value) in [("mode", "0755"), ("size", "64k"), ("nr_inodes", "1k")] {
            rustix::mount::fsconfig_set_string(&fs, key, value)?;
        }
        rustix::mount::fsconfig_create(&fs)?;
        let flags =
            MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, flags)
    };
    step(make(), || "an empty folder cannot be made (tmpfs)".into())
}

fn folder(root: BorrowedFd<'_>, name: &str) -> Result<()> {
    step(rustix::fs::mkdirat(root, name, Mode::from_raw_mode(0o755)), || format!("/{name} cannot be made"))
}

/// A file without contents, to mount another one on.
fn file(root: BorrowedFd<'_>, name: &str) -> Result<()> {
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
    step(rustix::fs::openat(root, name, flags, Mode::RUSR).map(drop), || format!("/{name} cannot be made"))
}

/// mount_setattr(2), which the library does not have.
fn set_flags(mount: BorrowedFd<'_>, flags: u64, recursive: bool) -> rustix::io::Result<()> {
    let attributes = libc::mount_attr { attr_set: flags, attr_clr: 0, propagation: 0, userns_fd: 0 };
    let mut how = AtFlags::EMPTY_PATH.bits();
    if recursive {
        how |= libc::AT_RECURSIVE.unsigned_abs();
    }
    // SAFETY: mount_setattr reads a path, which ends with NUL, and a structure of the length that it is told; both live for
    // the call.
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
