//! Errors of building, opening and reading images.

use std::io;
use std::path::PathBuf;

use crate::format::digest::Digest;

/// Why an image could not be built, opened or checked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or directory could not be used.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file changed while it was read.
    #[error("{} changed while the image was built: build it again", .0.display())]
    Changed(PathBuf),
    /// The tree contains something that EROFS cannot represent.
    #[error("{}: {reason}", path.display())]
    CannotHold {
        /// The path in the tree.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A dump file or an archive is invalid.
    #[error("{}, {at}: {reason}", path.display())]
    Input {
        /// The file.
        path: PathBuf,
        /// The position in it.
        at: String,
        /// What is wrong.
        reason: String,
    },
    /// The image is larger than its format allows.
    #[error("the image would have more than {0} blocks of 4 KiB, which EROFS cannot number: split the tree")]
    TooLarge(u32),
    /// The image would need more packs than its format allows.
    #[error(
        "the bytes of the tree's files are in {0} packs, more than an image can name: build it into a store of its own"
    )]
    TooManyPacks(usize),
    /// A file has the attribute of identities, which the kernel would believe.
    #[error(
        "a file has the attribute trusted.overlay.ferry.content, by which images would share memory: remove it, or build without --inode-share"
    )]
    OwnIdentities,
    /// The file is no image of Ferry's, or is damaged.
    #[error("{} is no valid image: {reason}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: Flaw,
    },
    /// The image is not the requested one.
    #[error("{} has the digest {found}, not {wanted}: it is damaged, or another image", path.display())]
    OtherDigest {
        /// The file.
        path: PathBuf,
        /// The requested digest.
        wanted: Digest,
        /// Its digest.
        found: Digest,
    },
    /// Other readers may read the image differently, so it proves no tree.
    #[error("{} is damaged, so it proves no tree: {finding} (ferry image fsck tells more)", path.display())]
    Unsound {
        /// The file.
        path: PathBuf,
        /// The first finding.
        finding: String,
    },
    /// The written file has a wrong digest.
    #[error("what was written for {} has the fs-verity digest {found}, not {wanted}: disk or memory are faulty, or the index has the digest of another pack", path.display())]
    Unlike {
        /// The file.
        path: PathBuf,
        /// The expected digest.
        wanted: Digest,
        /// Its digest.
        found: Digest,
    },
    /// Something that the store lacks cannot be fetched.
    #[error("cannot fetch {what}")]
    Fetch {
        /// What it is.
        what: String,
        /// The cause.
        source: io::Error,
    },
    /// A cache limit for an image whose objects are separate files.
    #[error("--cache-size does not apply to the composefs layout: its objects are files that others may use, too")]
    NoLimit,
    /// A pack of the image is missing from the store, or damaged.
    #[error("the pack {pack} in {}: {reason}", store.display())]
    Pack {
        /// The store.
        store: PathBuf,
        /// The pack's name.
        pack: Digest,
        /// What is wrong with it.
        reason: String,
    },
    /// Several independent errors.
    #[error("{}", error_chains(.0))]
    Several(Vec<Error>),
}

impl Error {
    /// Combines errors of independent operations; `None` without any.
    pub(crate) fn of_all(mut failures: Vec<Self>) -> Option<Self> {
        if failures.len() > 1 { Some(Self::Several(failures)) } else { failures.pop() }
    }
}

/// Formats an error and its sources on one line.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

fn error_chains(errors: &[Error]) -> String {
    errors.iter().map(|error| error_chain(error)).collect::<Vec<_>>().join("; ")
}

/// Damage in the bytes of an image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} at byte {offset}")]
pub struct Flaw {
    /// What is wrong.
    pub what: &'static str,
    /// The offset in the image.
    pub offset: u64,
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Adds the operation and the file to an error.
pub(crate) trait IoContext<T> {
    /// Adds the operation and the file.
    fn doing(self, what: &'static str, path: impl Into<PathBuf>) -> Result<T>;
}

impl<T, E: Into<io::Error>> IoContext<T> for Result<T, E> {
    fn doing(self, what: &'static str, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|error| Error::Io { what, path: path.into(), source: error.into() })
    }
}

/// The result of reading bytes of an image.
pub type ImageResult<T> = Result<T, Flaw>;
