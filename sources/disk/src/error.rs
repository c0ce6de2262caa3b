//! Why there is no disk.

use std::io;
use std::path::{Path, PathBuf};

/// Why a disk cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The path does not exist.
    #[error("there is no {path}; make a disk with ferry disk {path} --resize 20G", path = .0.display())]
    Missing(PathBuf),
    /// It cannot be opened at all.
    #[error("cannot open {path}: {reason}", path = .path.display())]
    Open {
        /// The disk's path.
        path: PathBuf,
        /// The system's reason.
        reason: io::Error,
    },
    /// It is a directory, a FIFO or another unsuitable type.
    #[error("{path} is neither a file nor a block device", path = .0.display())]
    Kind(PathBuf),
    /// It has no sector.
    #[error("{path} is empty; make it as large as the disk is to be, for example with --resize 10G", path = .0.display())]
    Empty(PathBuf),
    /// It is smaller than one block.
    #[error(
        "{path} has {bytes} bytes, and a disk at least {block}; make it as large as the disk is to be, for example with --resize 10G",
        path = .path.display()
    )]
    TooSmall {
        /// The disk's path.
        path: PathBuf,
        /// How many bytes it has.
        bytes: u64,
        /// The size of a block in bytes.
        block: u64,
    },
    /// It may be an image, or a raw disk on which a guest wrote an image header.
    #[error(
        "{path} begins like a {looks} image; a guest could have written that to a raw disk to read files of this host, \
         so say what it is: --format raw or --format {looks}",
        path = .path.display()
    )]
    Ambiguous {
        /// The disk's path.
        path: PathBuf,
        /// What it looks like.
        looks: &'static str,
    },
    /// Another process has it open.
    #[error("{path} is in use by another process ({what}); stop it first", path = .path.display())]
    InUse {
        /// The disk's path.
        path: PathBuf,
        /// What the other process does.
        what: &'static str,
    },
    /// A block device is mounted.
    #[error("the device {path} is mounted or otherwise in use on this host; unmount it first", path = .0.display())]
    DeviceBusy(PathBuf),
    /// It cannot grow.
    #[error("cannot make {path} {bytes} bytes large: {reason}", path = .path.display())]
    Grow {
        /// The disk's path.
        path: PathBuf,
        /// The requested size in bytes.
        bytes: u64,
        /// The reason.
        reason: io::Error,
    },
    /// It is larger than the requested size.
    #[error(
        "{path} has {found} bytes, and {bytes} are fewer: a disk is not made smaller, for what its end holds would be lost \
         (truncate or qemu-img resize --shrink do that)",
        path = .path.display()
    )]
    Larger {
        /// The disk's path.
        path: PathBuf,
        /// The requested size in bytes.
        bytes: u64,
        /// The size that it has.
        found: u64,
    },
    /// An image has parts that may not be opened.
    #[error("{path} needs {other:?}: {why}", path = .path.display())]
    Refused {
        /// The image's path.
        path: PathBuf,
        /// The file that it names.
        other: String,
        /// Why not, and what to do.
        why: String,
    },
    /// An image has unsupported features.
    #[error("the image {path} {what}; {advice}", path = .path.display())]
    Unsupported {
        /// The image's path.
        path: PathBuf,
        /// What it has, or is.
        what: String,
        /// A command that helps.
        advice: String,
    },
    /// An image is damaged.
    #[error("cannot use the image {path}: {reason}", path = .path.display())]
    Image {
        /// The image's path.
        path: PathBuf,
        /// What is wrong with it.
        reason: io::Error,
    },
}

impl Error {
    /// Returns the error for a disk smaller than one block.
    pub(crate) fn too_small(path: &Path, bytes: u64, block: u64) -> Self {
        match bytes {
            0 => Self::Empty(path.into()),
            _ => Self::TooSmall { path: path.into(), bytes, block },
        }
    }
}
