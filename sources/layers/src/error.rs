//! Why a layer cannot be used.

use std::io;
use std::path::PathBuf;

/// Why a layer cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The registry failed, or its data is invalid.
    #[error(transparent)]
    Registry(#[from] ferry_registry::Error),
    /// The image of a layer is invalid.
    #[error("the image of a layer")]
    Image(#[from] ferry_image::Error),
    /// The image has no such layer.
    #[error("{reference} has no layer {name} with a table of contents")]
    NoLayer {
        /// The image.
        reference: String,
        /// The digest.
        name: String,
    },
    /// An earlier attempt failed a moment ago.
    #[error("{0}")]
    Recent(String),
    /// Another process has the directory.
    #[error("another process uses {0}: end it, or choose another directory")]
    InUse(PathBuf),
    /// A record of the directory is damaged.
    #[error("{path} is no record of a layer; remove it")]
    Record {
        /// The record.
        path: PathBuf,
        /// The reason.
        #[source]
        error: serde_json::Error,
    },
    /// A system call failed.
    #[error("cannot {action} {path}")]
    Io {
        /// The attempted action, as a verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        #[source]
        error: io::Error,
    },
}

/// A result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Adds the attempted action to errors of the operating system.
pub(crate) trait IoContext<T> {
    /// Converts the error. The action is a verb.
    fn doing(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn doing(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|error| Error::Io { action, path: path.into(), error })
    }
}
