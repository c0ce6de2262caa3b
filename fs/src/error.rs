//! Errors before a file system is available.

use std::io;

/// Why a file system cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The mount failed.
    #[error(transparent)]
    Mount(#[from] ferry_fuse::Error),
    /// The socket for virtual machines cannot be created.
    #[error(transparent)]
    Socket(#[from] ferry_vhost::SocketError),
    /// The virtio-fs device cannot be served.
    #[error(transparent)]
    Share(#[from] ferry_virtiofs::Error),
    /// The tag is invalid.
    #[error(transparent)]
    Tag(#[from] ferry_virtiofs::TagError),
    /// `--path` is invalid.
    #[error(transparent)]
    Path(#[from] ferry_fuse::PathError),
    /// `--log` is invalid.
    #[error(transparent)]
    Log(ferry_control::Error),
    /// Signal handlers cannot be installed.
    #[error("cannot catch signals: {0}")]
    Signals(io::Error),
}
