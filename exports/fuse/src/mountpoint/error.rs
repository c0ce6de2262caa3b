//! Errors of mounting and unmounting.

use std::io;
use std::path::PathBuf;

/// Why a mount cannot be made or undone.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// Nothing is there.
    #[error("the mount point {path} does not exist; make it first: mkdir -p {path}", path = .0.display())]
    Missing(PathBuf),
    /// A file, which cannot be the root of a file system.
    #[error("the mount point {path} is not a directory; choose an empty directory", path = .0.display())]
    NotDirectory(PathBuf),
    /// Its files would be hidden.
    #[error(
        "the mount point {path} is not empty; choose an empty directory, or say nonempty to hide what is in it",
        path = .0.display()
    )]
    NotEmpty(PathBuf),
    /// Another ferry serves it.
    #[error(
        "{path} is already a ferry mount, of {source_name}, and it is alive; unmount it first (umount {path}) or choose \
         another mount point",
        path = .path.display()
    )]
    Mounted {
        /// The mount point.
        path: PathBuf,
        /// What is mounted there.
        source_name: String,
    },
    /// A mount whose server does not reply.
    #[error(
        "the mount on {path} ({kind}) does not answer; end its server, or unmount it: umount -l {path}",
        path = .path.display()
    )]
    Unresponsive {
        /// The mount point.
        path: PathBuf,
        /// The type of its file system.
        kind: String,
    },
    /// A dead mount of another program.
    #[error(
        "on {path} is a mount of another program ({kind}) whose server has died; unmount it first: umount -l {path}",
        path = .path.display()
    )]
    DeadForeign {
        /// The mount point.
        path: PathBuf,
        /// The type of its file system.
        kind: String,
    },
    /// The mount point is not accessible.
    #[error("no permission to reach the mount point {path}: {reason}", path = .path.display())]
    Access {
        /// The mount point.
        path: PathBuf,
        /// The system's reason.
        reason: io::Error,
    },
    /// The module is not loaded, or a container hides the device.
    #[error(
        "there is no FUSE here: load the module (modprobe fuse), or hand a container the device (--device /dev/fuse)"
    )]
    NoDevice,
    /// Usually a container's device rules.
    #[error("/dev/fuse may not be opened; hand the container the device (--device /dev/fuse) or change its mode")]
    DeviceRefused,
    /// No permission, and no fusermount3.
    #[error(
        "mounting {path} needs root or the program fusermount3, which is not installed: apt-get install fuse3, or your \
         distribution's package of that name",
        path = .0.display()
    )]
    NoHelper(PathBuf),
    /// Root without the capability, as in most containers.
    #[error(
        "mounting {path} is not permitted here; it needs CAP_SYS_ADMIN (for a container: --cap-add SYS_ADMIN --device \
         /dev/fuse)",
        path = .0.display()
    )]
    NotPermitted(PathBuf),
    /// The administrator has not allowed it.
    #[error(
        "only root may let other users into a mount; leave out allow_other, or let root add the line user_allow_other to \
         /etc/fuse.conf"
    )]
    AllowOther,
    /// Another user's directory.
    #[error("you may not write to the mount point {path}; choose a directory of your own", path = .0.display())]
    NotYours(PathBuf),
    /// Too many files are open.
    #[error("no file descriptor is left for the mount; raise the limit (ulimit -n)")]
    Descriptors,
    /// Whatever else `fusermount3` says.
    #[error("fusermount3 does not mount {path}: {text}", path = .path.display())]
    Helper {
        /// The mount point.
        path: PathBuf,
        /// What it said.
        text: String,
    },
    /// Text that cannot be passed to the kernel.
    #[error("the mount option {name} holds a NUL byte or a line break: {value:?}")]
    Option {
        /// Which option.
        name: &'static str,
        /// Its value.
        value: String,
    },
    /// Whatever else the kernel says.
    #[error("cannot mount on {path}: {reason}", path = .path.display())]
    System {
        /// The mount point.
        path: PathBuf,
        /// The system's reason.
        reason: io::Error,
    },
    /// Not a ferry mount.
    #[error("on {path} is no mount of ferry's", path = .0.display())]
    NotOurs(PathBuf),
    /// Not permitted; fusermount3 cannot remount.
    #[error(
        "only root may remount {path}; others unmount it (fusermount3 -u {path}) and mount it again",
        path = .0.display()
    )]
    RemountRefused(PathBuf),
    /// A file is open for writing.
    #[error(
        "{path} cannot be made read-only: files of it are open for writing (fuser -vm {path} shows by whom)",
        path = .0.display()
    )]
    RemountBusy(PathBuf),
    /// The kernel would allow changes, but the server refuses them.
    #[error(
        "{path} was mounted read-only, so its server changes nothing; unmount it, and mount it again to write to it",
        path = .0.display()
    )]
    ServedReadOnly(PathBuf),
    /// Whatever else the kernel says.
    #[error("cannot remount {path}: {reason}", path = .path.display())]
    Remount {
        /// The mount point.
        path: PathBuf,
        /// The system's reason.
        reason: io::Error,
    },
    /// It is in use.
    #[error("{path} is in use: end the processes that have files of it open (fuser -vm {path})", path = .0.display())]
    Busy(PathBuf),
    /// It stays.
    #[error("cannot unmount {path}: {reason}; try: umount -l {path}", path = .path.display())]
    Unmount {
        /// The mount point.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}
