//! Connections that outlive their server, because another process has the descriptor, too.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};

use ferry_wire::fuse::abi::{self, OutHeader};
use zerocopy::IntoBytes;

use crate::device::{Device, send};

/// What the next server of a connection needs.
#[derive(Debug)]
pub struct Resumable {
    /// The descriptor of the mount call. Requests in flight wait as long as any process has it.
    pub device: OwnedFd,
    /// The kernel's INIT request, which it sends only once.
    pub init: Vec<u8>,
    /// The number of the connection in `/sys/fs/fuse/connections`.
    pub connection: u32,
}

/// Asks the kernel for all requests that the last server has not replied to (`FUSE_NOTIFY_RESEND`).
pub(crate) fn request_again(device: &Device) -> io::Result<()> {
    let bytes = u32::try_from(size_of::<OutHeader>()).unwrap_or(0);
    let header = OutHeader { len: bytes, error: abi::NOTIFY_RESEND, unique: 0 };
    Ok(send(device.as_fd(), &[IoSlice::new(header.as_bytes())])?)
}
