//! Errors of opening an image.

use std::io;
use std::path::PathBuf;

use super::codec::CodecError;
use super::format::{FormatError, IMAGE_BYTES_MIN};
use crate::tree::ReplayError;

/// What to do about damage: refuse (`Err`), or take note and go on without what is damaged.
pub(super) type OnDamage<'a> = dyn FnMut(DamageError) -> Result<(), DamageError> + 'a;

/// See [`super::open()`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The file cannot be opened, sized or mapped.
    #[error("{path}: cannot {what} it")]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// Another process has it open.
    #[error("{path} is in use; unmount it there first (`fuser {path}` shows by whom)")]
    Busy {
        /// The file.
        path: PathBuf,
    },
    /// It has other contents.
    #[error("{path} holds something else: {reason}. To use it for pmem, empty it first (truncate -s 0)")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What shows that.
        reason: FormatError,
    },
    /// It is empty, and no size for a new image is given.
    #[error("{path} is empty; to make an image of it, give its size (for example {option} 8G)")]
    NoSize {
        /// The file.
        path: PathBuf,
        /// The program's option for it.
        option: &'static str,
    },
    /// There is no file.
    #[error("there is no {path}; to make it, give its size (for example {option} 8G)")]
    Missing {
        /// The file.
        path: PathBuf,
        /// The program's option for it.
        option: &'static str,
    },
    /// Too small a size.
    #[error("{path}: {bytes} bytes are too few; an image takes {IMAGE_BYTES_MIN} at least")]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// The size.
        bytes: u64,
    },
    /// Cut short.
    #[error("{path} has {found} bytes, but its superblock says {expected}: it was cut short; restore it from a copy")]
    Shrunk {
        /// The file.
        path: PathBuf,
        /// Its size.
        found: u64,
        /// What its size was.
        expected: u64,
    },
    /// Neither superblock is good.
    #[error("{path}: both superblocks are damaged (first: {first}; second: {second}); restore it from a copy")]
    Superblocks {
        /// The file.
        path: PathBuf,
        /// The first copy's damage.
        first: FormatError,
        /// The second copy's.
        second: FormatError,
    },
    /// Its contents are inconsistent.
    #[error("{path} is damaged; `ferry fsck` tells more")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found.
        source: DamageError,
    },
    /// The second tier is missing, or belongs to another image.
    #[error("{path}: {reason}")]
    Tier2 {
        /// The second tier, or the image if none was given.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// What is damaged inside an image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DamageError {
    /// The part of the log that is required.
    #[error("the log has {found} good records and begins with a snapshot of {expected}")]
    Snapshot {
        /// Records that check.
        found: u64,
        /// Records of the snapshot.
        expected: u64,
    },
    /// What is used instead.
    #[error(
        "names and files are taken from the log before it, of {records} records: newer changes are lost, and files that \
         changed since may hold bytes of other files"
    )]
    Older {
        /// Records of that log.
        records: u64,
    },
    /// A record with a valid checksum that does not parse.
    #[error("record {index} of the log: {reason}")]
    Record {
        /// Which one.
        index: u64,
        /// Why not.
        reason: CodecError,
    },
    /// A record that parses but contradicts the tree.
    #[error("record {index} of the log: {reason}")]
    Replay {
        /// Which one.
        index: u64,
        /// Why not.
        reason: ReplayError,
    },
    /// Blocks outside of the image, or blocks that two files have.
    #[error("inode {ino} has {count} blocks from block {block} on, which are outside the image or another file's, too")]
    Blocks {
        /// The inode.
        ino: u64,
        /// The first block.
        block: u64,
        /// How many.
        count: u64,
    },
    /// Blocks of an inode that is not a regular file.
    #[error("inode {ino} has data but is no regular file")]
    NoFile {
        /// The inode.
        ino: u64,
    },
    /// The medium cannot be read.
    #[error("the image cannot be read: {0}")]
    Read(String),
}
