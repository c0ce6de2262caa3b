//! What can go wrong when images are made, opened and read.

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
        /// What was to be done with it.
        what: &'static str,
        /// Which one.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file changed while it was read.
    #[error("{} changed while the image was built: build it again", .0.display())]
    Changed(PathBuf),
    /// The tree has something that EROFS cannot hold.
    #[error("{}: {reason}", path.display())]
    CannotHold {
        /// Where in the tree.
        path: PathBuf,
        /// What it is.
        reason: String,
    },
    /// A dump file or an archive is not what it should be.
    #[error("{}, {at}: {reason}", path.display())]
    Input {
        /// The file.
        path: PathBuf,
        /// Where in it.
        at: String,
        /// What is wrong.
        reason: String,
    },
    /// The image is larger than its format can say.
    #[error("the image would have more than {0} blocks of 4 KiB, which EROFS cannot number: split the tree")]
    TooLarge(u32),
    /// The image would name more packs than its format can.
    #[error(
        "the bytes of the tree's files are in {0} packs, more than an image can name: build it into a store of its own"
    )]
    TooManyPacks(usize),
    /// It is no image of Ferry's, or a damaged one.
    #[error("{} is no valid image: {reason}", path.display())]
    Invalid {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        reason: Flaw,
    },
    /// The image is not the one that was asked for.
    #[error("{} has the digest {found}, not {wanted}: it is damaged, or another image", path.display())]
    OtherDigest {
        /// Which file.
        path: PathBuf,
        /// What was asked for.
        wanted: Digest,
        /// What it has.
        found: Digest,
    },
    /// The image is not what others would read alike, so it proves no tree.
    #[error("{} is damaged, so it proves no tree: {finding} (ferry image fsck tells more)", path.display())]
    Unsound {
        /// Which file.
        path: PathBuf,
        /// What is wrong first.
        finding: String,
    },
    /// What was written is not what was to be written.
    #[error("what was written for {} has the fs-verity digest {found}, not {wanted}: disk or memory are faulty, or the index names another one's", path.display())]
    Unlike {
        /// Which file it was to be.
        path: PathBuf,
        /// What it should have.
        wanted: Digest,
        /// What it has.
        found: Digest,
    },
    /// Something that is not in the store cannot be fetched.
    #[error("cannot fetch {what}")]
    Fetch {
        /// What it is.
        what: String,
        /// Why not.
        source: io::Error,
    },
    /// A bound on what is kept of an image whose objects are files of their own.
    #[error(
        "what is kept of images of the layout composefs is not bounded: their objects are files that others may use, too"
    )]
    NoLimit,
    /// A pack that the image needs is not in the store, or damaged.
    #[error("the pack {pack} in {}: {reason}", store.display())]
    Pack {
        /// The store.
        store: PathBuf,
        /// The pack's name.
        pack: Digest,
        /// What is wrong with it.
        reason: String,
    },
    /// Several things went wrong, each for a reason of its own.
    #[error("{}", all_told(.0))]
    Several(Vec<Error>),
}

impl Error {
    /// All that went wrong with things that do not depend on each other, if anything did.
    pub(crate) fn of_all(mut failures: Vec<Self>) -> Option<Self> {
        if failures.len() > 1 { Some(Self::Several(failures)) } else { failures.pop() }
    }
}

/// An error and what it comes from, in one line.
pub fn told(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

fn all_told(errors: &[Error]) -> String {
    errors.iter().map(|error| told(error)).collect::<Vec<_>>().join("; ")
}

/// What is wrong with the bytes of an image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} at byte {offset}")]
pub struct Flaw {
    /// What is wrong.
    pub what: &'static str,
    /// Where, in bytes from the image's beginning.
    pub offset: u64,
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Names what was being done when an error of the system came.
pub(crate) trait IoContext<T> {
    /// Adds what and where.
    fn doing(self, what: &'static str, path: impl Into<PathBuf>) -> Result<T>;
}

impl<T, E: Into<io::Error>> IoContext<T> for Result<T, E> {
    fn doing(self, what: &'static str, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|error| Error::Io { what, path: path.into(), source: error.into() })
    }
}

/// The result of reading bytes of an image.
pub type Checked<T> = Result<T, Flaw>;
