//! The kernel's controls of a connection: the file system `fusectl`, usually at `/sys/fs/fuse/connections`, and what
//! `/sys/class/bdi` has of the mount.

use std::fs::File;
use std::io::{self, Write};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// Where the controls are, where they are mounted.
const PLACE: &str = "/sys/fs/fuse/connections";

/// Lets the kernel read up to so much of a mount ahead, and so ask for as much at once, where it would ask for 128 KiB
/// (`read_ahead_kb`, Documentation/ABI/testing/sysfs-class-bdi in Linux).
///
/// # Errors
/// Those of `open(2)` and `write(2)`: sysfs is not there, or not for us to write.
pub(crate) fn read_ahead(number: u32, bytes: u32) -> io::Result<()> {
    let file = File::options().write(true).open(format!("/sys/class/bdi/0:{number}/read_ahead_kb"));
    file?.write_all((bytes >> 10).to_string().as_bytes())
}

/// What ends a connection, whoever uses it and whatever its server does. It belongs to this one connection: once that is
/// over it does nothing, even if a later connection gets the same number.
#[derive(Debug)]
pub struct AbortSwitch(File);

impl AbortSwitch {
    /// The switch of a connection that is mounted.
    ///
    /// # Errors
    /// The connection is over, or belongs to another user; or the controls are not mounted and we may not mount them.
    pub(crate) fn of(number: u32) -> io::Result<Self> {
        match File::options().write(true).open(format!("{PLACE}/{number}/abort")) {
            Ok(file) => Ok(Self(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Self::from_private_mount(number).map_err(|_| error)
            }
            Err(error) => Err(error),
        }
    }

    /// As [`Self::of`], from a mount of the controls that nobody else sees, as containers need it.
    fn from_private_mount(number: u32) -> io::Result<Self> {
        let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        let place = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        Ok(Self(rustix::fs::openat(place, format!("{number}/abort"), flags, Mode::empty())?.into()))
    }

    /// The same switch once more.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Ends the connection: who waits for it gets an error, and so does everybody who comes later.
    ///
    /// # Errors
    /// Those of `write(2)`; that the connection is over is none.
    pub fn abort(&self) -> io::Result<()> {
        (&self.0).write_all(b"1")
    }
}

/// For a process that is to throw the switch: any byte written to the file does.
impl From<AbortSwitch> for File {
    fn from(switch: AbortSwitch) -> Self {
        switch.0
    }
}
