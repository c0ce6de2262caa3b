//! Files that the kernel reads and writes directly (FUSE passthrough).

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ferry_engine::WithoutFsetid;
use ferry_serve::Backings;

use crate::device::Device;

/// Registers files with the kernel, on the connection's first descriptor.
pub(crate) struct DeviceBackings {
    device: Arc<Device>,
    takes_writers: bool,
}

impl DeviceBackings {
    pub(crate) fn new(device: &Arc<Device>, takes_writers: bool) -> Self {
        Self { device: Arc::clone(device), takes_writers }
    }
}

impl Backings for DeviceBackings {
    fn register(&self, file: BorrowedFd<'_>) -> io::Result<i32> {
        // The kernel writes with the current credentials: without the capability it clears suid and sgid.
        let _without = WithoutFsetid::enter()?;
        self.device.backing_open(file).map_err(|error| match error.raw_os_error() {
            Some(libc::ELOOP) => io::Error::other(
                "it lies on an overlayfs or another stacked file system, which has to be said when it is mounted \
                 (Options::stacked_source)",
            ),
            _ => error,
        })
    }

    fn unregister(&self, id: i32) {
        if let Err(error) = self.device.backing_close(id) {
            tracing::debug!("backing file {id} stays registered until the mount ends: {error}");
        }
    }

    fn takes_writers(&self) -> bool {
        self.takes_writers
    }
}
