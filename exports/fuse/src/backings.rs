//! Files that the kernel reads and writes by itself (FUSE passthrough).

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ferry_engine::WithoutFsetid;
use ferry_serve::Backings;

use crate::device::Device;

/// Registers files with the kernel, on the connection's first descriptor.
pub(crate) struct DeviceBackings(pub(crate) Arc<Device>);

impl Backings for DeviceBackings {
    fn register(&self, file: BorrowedFd<'_>) -> io::Result<i32> {
        // The kernel will write with the credentials of this moment: without the capability it clears suid and sgid.
        let _without = WithoutFsetid::enter()?;
        self.0.backing_open(file)
    }

    fn unregister(&self, id: i32) {
        if let Err(error) = self.0.backing_close(id) {
            tracing::debug!("backing file {id} stays registered until the mount ends: {error}");
        }
    }
}
