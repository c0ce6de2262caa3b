//! Idmapped copies of mounts, which show files with the user ids of a container.
//!
//! containerd can make such mounts, too, and does for a single layer ([`crate::overlay`]). Of several layers it would, from 2.1.5 on, clone
//! the directory above all of them without the mounts below it, so that containers would see empty directories.
#![allow(unsafe_code, reason = "a child in a user namespace of its own, and a system call without a wrapper")]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::error::{IoContext, Result};
use crate::idmap::IdMaps;

/// Returns a user namespace with these maps. It exists as long as the descriptor or a mount with it.
///
/// # Errors
///
/// The kernel allows no user namespaces, or refuses the maps.
pub fn user_namespace(maps: &IdMaps) -> Result<OwnedFd> {
    // Any program works that waits for the end of its input.
    let mut command = Command::new("cat");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).env_clear().current_dir("/");
    // SAFETY: the closure runs in the child between fork and exec, where only async-signal-safe functions may be called: unshare(2) is a
    // plain system call that allocates nothing. No descriptor is closed or moved by a new user namespace.
    unsafe { command.pre_exec(|| unshare_unsafe(UnshareFlags::NEWUSER).map_err(io::Error::from)) };
    let mut child = command.spawn().map_err(namespace_error).doing("create a user namespace by", "cat")?;
    let process = format!("/proc/{}", child.id());
    let namespace = [("uid_map", &maps.users), ("gid_map", &maps.groups)]
        .into_iter()
        .try_for_each(|(name, map)| {
            let path = Path::new(&process).join(name);
            // One range per line, all in one call.
            fs::write(&path, map.replace(':', " ").replace(',', "\n")).doing("write ids to", path)
        })
        .and_then(|()| {
            let path = Path::new(&process).join("ns/user");
            File::open(&path).doing("open", path)
        });
    drop(child.stdin.take());
    // Its exit status is irrelevant.
    let _ = child.wait();
    Ok(namespace?.into())
}

/// Names the limit that the kernel reports as a lack of disk space.
fn namespace_error(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::StorageFull => {
            io::Error::other("the kernel allows no more user namespaces: raise the sysctl user.max_user_namespaces")
        }
        _ => error,
    }
}

/// Mounts a directory a second time, without the mounts below it: read-only, and with mapped ids.
///
/// # Errors
///
/// The file system of the directory, or the kernel, has no idmapped mounts.
pub fn mount(source: &Path, namespace: BorrowedFd<'_>, at: &Path) -> Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = open_tree(CWD, source, flags).doing("clone the mount of", source)?;
    set_users(tree.as_fd(), namespace).doing("idmap", source)?;
    move_mount(tree.as_fd(), "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).doing("mount on", at)
}

/// Calls mount_setattr(2), which rustix lacks.
fn set_users(tree: BorrowedFd<'_>, namespace: BorrowedFd<'_>) -> io::Result<()> {
    let userns_fd = u64::try_from(namespace.as_raw_fd()).map_err(io::Error::other)?;
    let attr_set = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_IDMAP;
    let attributes = libc::mount_attr { attr_set, attr_clr: 0, propagation: 0, userns_fd };
    // SAFETY: mount_setattr reads a path that ends with NUL and a structure of the given length; both outlive the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_user_namespaces_is_named() {
        let said = |code| namespace_error(io::Error::from_raw_os_error(code)).to_string();
        assert!(said(libc::ENOSPC).contains("user.max_user_namespaces"), "{}", said(libc::ENOSPC));
        assert!(said(libc::EPERM).contains("not permitted"), "{}", said(libc::EPERM));
    }
}
