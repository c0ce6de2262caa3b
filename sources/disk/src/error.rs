//! Why there is no disk.

use std::io;
use std::path::PathBuf;

/// Why a disk cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is nothing of that name.
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
    /// It is a directory, a FIFO or the like.
    #[error("{path} is neither a file nor a block device", path = .0.display())]
    Kind(PathBuf),
    /// It has no sector.
    #[error("{path} is empty; make it as large as the disk is to be, for example with --resize 10G", path = .0.display())]
    Empty(PathBuf),
    /// It may be an image, or a raw disk whose guest made it look like one.
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
    /// Somebody else has it.
    #[error("{path} is in use by another process ({what}); end that one first", path = .path.display())]
    InUse {
        /// The disk's path.
        path: PathBuf,
        /// What the other one does.
        what: &'static str,
    },
    /// A block device is mounted.
    #[error("the device {path} is mounted or otherwise in use on this host; unmount it first", path = .0.display())]
    DeviceBusy(PathBuf),
    /// It cannot be made larger.
    #[error("cannot make {path} {bytes} bytes large: {reason}", path = .path.display())]
    Grow {
        /// The disk's path.
        path: PathBuf,
        /// The size asked for.
        bytes: u64,
        /// The reason.
        reason: io::Error,
    },
    /// An image has parts that may not be opened.
    #[error("{path} needs {other:?}: {why}", path = .path.display())]
    Refused {
        /// The image's path.
        path: PathBuf,
        /// The file that it names.
        other: String,
        /// Why not, and what to do.
        why: &'static str,
    },
    /// An image is damaged, or has features that are not known.
    #[error("cannot use the image {path}: {reason}", path = .path.display())]
    Image {
        /// The image's path.
        path: PathBuf,
        /// What is wrong with it.
        reason: io::Error,
    },
}
