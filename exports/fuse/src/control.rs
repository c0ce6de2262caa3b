//! The kernel's controls of a connection: the file system `fusectl`, usually at `/sys/fs/fuse/connections`, and the
//! mount's entry in `/sys/class/bdi`.

use std::fs::File;
use std::io::{self, Write};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// The usual mount point of the controls.
const PLACE: &str = "/sys/fs/fuse/connections";

/// Sets the read-ahead of a mount in bytes, and with it the size of a request, from the default of 128 KiB
/// (`read_ahead_kb`, Documentation/ABI/testing/sysfs-class-bdi in Linux).
pub(crate) fn read_ahead(number: u32, bytes: u32) -> io::Result<()> {
    let file = File::options().write(true).open(format!("/sys/class/bdi/0:{number}/read_ahead_kb"));
    file?.write_all((bytes >> 10).to_string().as_bytes())
}

/// Ends a connection, whatever its users and its server do. It belongs to this connection: after its end it has no
/// effect, even if a later connection gets the same number.
#[derive(Debug)]
pub struct AbortSwitch(File);

impl AbortSwitch {
    /// Opens the switch of a mounted connection.
    /// It fails for another user's connection, and if the controls are not mounted and this process may not mount them.
    pub(crate) fn of(number: u32) -> io::Result<Self> {
        match File::options().write(true).open(format!("{PLACE}/{number}/abort")) {
            Ok(file) => Ok(Self(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Self::from_private_mount(number).map_err(|_| error)
            }
            Err(error) => Err(error),
        }
    }

    /// As [`Self::of`], from a private mount of the controls, for containers.
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

    /// Ends the connection: current and later requests fail.
    ///
    /// # Errors
    ///
    /// Those of `write(2)`. A connection that has ended is not an error.
    pub fn abort(&self) -> io::Result<()> {
        (&self.0).write_all(b"1")
    }
}

/// For a process that will use the switch: writing any byte to the file ends the connection.
impl From<AbortSwitch> for File {
    fn from(switch: AbortSwitch) -> Self {
        switch.0
    }
}
