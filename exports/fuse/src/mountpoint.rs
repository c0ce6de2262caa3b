//! Mount points: mounting, checking whether a mount is still in place, and unmounting.
//!
//! A process with permission mounts by `mount(2)`; others use `fusermount3`. In both cases the mount point is checked
//! first (`check`), so that an error is one sentence and not an errno. A mount whose server was killed is removed.

mod check;
mod error;
mod helper;
mod options;
mod table;

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use check::{Identity, Place};
pub use error::MountError;
use helper::Helper;
pub use options::MountOptions;
pub use table::MountEntry;

/// The device that a FUSE server talks to.
const DEVICE: &str = "/dev/fuse";

/// A mount of this process. Dropping it unmounts lazily.
#[derive(Debug)]
pub struct Mountpoint {
    path: PathBuf,
    identity: Identity,
    by: MountMethod,
    gone: bool,
}

/// How the mount was made, and so how to undo it.
#[derive(Debug)]
enum MountMethod {
    Ourselves,
    Helper(Helper),
}

impl Mountpoint {
    /// Mounts on `path`, in place of a dead ferry mount; returns the connection to the kernel, with INIT waiting.
    ///
    /// # Errors
    ///
    /// [`MountError`]: a sentence with the path and a remedy.
    pub fn mount(path: &Path, options: &MountOptions) -> Result<(OwnedFd, Self), MountError> {
        let place = check::prepare(path, &options.kernel_type(), options.nonempty)?;
        let direct =
            if options.auto_unmount { Err(HelperRefusal::NotPermitted) } else { mount_directly(&place, options) };
        let (device, by) = match direct {
            Ok(device) => (device, MountMethod::Ourselves),
            Err(HelperRefusal::NotPermitted) => {
                let (device, helper) = Helper::mount(&place.path, options)?;
                (device, MountMethod::Helper(helper))
            }
            Err(HelperRefusal::Error(error)) => return Err(error),
        };
        let identity = Identity::of(&place.path)
            .map_err(|reason| MountError::System { path: place.path.clone(), reason: reason.into() })?;
        Ok((device, Self { path: place.path, identity, by, gone: false }))
    }

    /// Unmounts ferry mounts of killed servers from `path`.
    ///
    /// # Errors
    ///
    /// [`MountError`]: a server of ferry's runs, or a mount cannot be removed.
    pub fn remove_dead(path: &Path) -> Result<(), MountError> {
        check::remove_dead(path, &MountOptions::default().kernel_type())
    }

    /// Returns the mount of this connection at `path`, whose server has ended, without a request to it.
    ///
    /// # Errors
    ///
    /// [`MountError::NotOurs`]: another mount is there.
    pub fn resumed(path: &Path, connection: u32) -> Result<Self, MountError> {
        let system = |reason: Errno| MountError::System { path: path.into(), reason: reason.into() };
        let identity = Identity::of(path).map_err(system)?;
        if identity.minor != connection || !check::is_mount_of_ferry(path) {
            return Err(MountError::NotOurs(path.into()));
        }
        Ok(Self { path: path.into(), identity, by: MountMethod::Ourselves, gone: false })
    }

    /// Returns the kernel's id of the mount of a path (not a symbolic link), if it is a ferry mount, even a dead one.
    #[must_use]
    pub fn of_ferry(path: &Path) -> Option<u64> {
        check::of_ferry(path)
    }

    /// Changes the flags of a ferry mount in place, as `mount -o remount` does. Other options stay unchanged.
    ///
    /// # Errors
    ///
    /// [`MountError`]: a sentence with the path and a remedy.
    pub fn remount(path: &Path, options: &MountOptions) -> Result<(), MountError> {
        let refused = |error| match error {
            Errno::PERM => MountError::RemountRefused(path.into()),
            Errno::BUSY => MountError::RemountBusy(path.into()),
            error => MountError::Remount { path: path.into(), reason: error.into() },
        };
        if !check::is_mount_of_ferry(path) {
            return Err(MountError::NotOurs(path.into()));
        }
        let flags = options.remount_flags();
        rustix::mount::mount_remount(path, flags, c"").map_err(refused)?;
        // A server that was started read-only refuses this in any case, before it looks for the name.
        if !options.read_only && rustix::fs::removexattr(path, "user.ferry.remount") == Err(Errno::ROFS) {
            rustix::mount::mount_remount(path, flags | MountFlags::RDONLY, c"").map_err(refused)?;
            return Err(MountError::ServedReadOnly(path.into()));
        }
        Ok(())
    }

    /// The mount point, absolute.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the mount is still in place: it may be unmounted, or covered by another mount.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        !self.gone && !self.identity.has_ended() && Identity::of(&self.path) == Ok(self.identity)
    }

    /// Returns the number of the connection in `/sys/fs/fuse/connections`.
    #[must_use]
    pub fn connection(&self) -> u32 {
        self.identity.minor
    }

    /// Unmounts, unless that has happened already. The server must still reply: the kernel sends pending writes.
    ///
    /// # Errors
    ///
    /// [`MountError::Busy`]: a process has a file of the mount open. Dropping the value detaches it anyway.
    pub fn unmount(&mut self) -> Result<(), MountError> {
        self.end(UnmountFlags::NOFOLLOW)
    }

    /// Detaches the mount at once; open files work while the server replies.
    ///
    /// # Errors
    /// [`MountError::Unmount`].
    pub fn detach(&mut self) -> Result<(), MountError> {
        self.end(UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)
    }

    fn end(&mut self, flags: UnmountFlags) -> Result<(), MountError> {
        if self.is_ours() {
            match &mut self.by {
                MountMethod::Ourselves => unmount(&self.path, flags)?,
                MountMethod::Helper(_) => helper::unmount(&self.path, flags.contains(UnmountFlags::DETACH))?,
            }
        }
        self.gone = true;
        if let MountMethod::Helper(helper) = &mut self.by {
            helper.end();
        }
        Ok(())
    }
}

impl Drop for Mountpoint {
    fn drop(&mut self) {
        if let Err(error) = self.detach() {
            tracing::warn!("{error}");
        }
    }
}

/// Why `mount(2)` failed.
enum HelperRefusal {
    /// A process with more privileges may succeed.
    NotPermitted,
    Error(MountError),
}

/// Mounts with the privileges of this process.
fn mount_directly(place: &Place, options: &MountOptions) -> Result<OwnedFd, HelperRefusal> {
    let device = match rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(device) => device,
        Err(Errno::ACCESS | Errno::PERM) if !rustix::process::geteuid().is_root() => {
            return Err(HelperRefusal::NotPermitted);
        }
        Err(error) => return Err(HelperRefusal::Error(device_error(error))),
    };
    // The directory that was checked, whatever its path leads to meanwhile.
    let target = format!("/proc/self/fd/{}", place.fd.as_raw_fd());
    let data = options.kernel_data(&device);
    match rustix::mount::mount(&*options.fsname, &*target, options.kernel_type(), options.kernel_flags(), &*data) {
        Ok(()) => Ok(device),
        Err(Errno::PERM) => Err(HelperRefusal::NotPermitted),
        Err(Errno::NODEV) => Err(HelperRefusal::Error(MountError::NoDevice)),
        Err(error) => Err(HelperRefusal::Error(MountError::System { path: place.path.clone(), reason: error.into() })),
    }
}

fn device_error(error: Errno) -> MountError {
    match error {
        Errno::NOENT | Errno::NXIO | Errno::NODEV => MountError::NoDevice,
        Errno::ACCESS | Errno::PERM => MountError::DeviceRefused,
        Errno::MFILE | Errno::NFILE => MountError::Descriptors,
        error => MountError::System { path: DEVICE.into(), reason: error.into() },
    }
}

fn unmount(path: &Path, flags: UnmountFlags) -> Result<(), MountError> {
    match rustix::mount::unmount(path, flags) {
        // Another process was faster.
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(Errno::BUSY) => Err(MountError::Busy(path.into())),
        Err(error) => Err(MountError::Unmount { path: path.into(), reason: std::io::Error::from(error).to_string() }),
    }
}
