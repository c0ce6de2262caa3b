//! Errors before a file system is available.

use std::io;

/// Why a file system cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The mount.
    #[error(transparent)]
    Mount(#[from] ferry_fuse::Error),
    /// The socket for virtual machines.
    #[error(transparent)]
    Socket(#[from] ferry_vhost::SocketError),
    /// The virtio-fs device.
    #[error(transparent)]
    Share(#[from] ferry_virtiofs::Error),
    /// The tag.
    #[error(transparent)]
    Tag(#[from] ferry_virtiofs::TagError),
    /// The way to the kernel.
    #[error(transparent)]
    Path(#[from] ferry_fuse::PathError),
    /// The level of the log.
    #[error(transparent)]
    Log(ferry_control::Error),
    /// Signals.
    #[error("cannot catch signals: {0}")]
    Signals(io::Error),
}
