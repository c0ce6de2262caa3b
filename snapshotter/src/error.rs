//! Errors of calls, with containerd's names.

use std::io;
use std::path::PathBuf;

/// Why a call fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no such snapshot.
    #[error("snapshot {0}: not found")]
    NotFound(String),
    /// The name is taken.
    #[error("snapshot {0}: already exists")]
    AlreadyExists(String),
    /// The snapshot is of a kind, or in a state, in which the call is impossible.
    #[error("{0}")]
    FailedPrecondition(String),
    /// A value of the request is not valid.
    #[error("{0}")]
    InvalidArgument(String),
    /// containerd must do it another way.
    #[error("{0}")]
    Unimplemented(String),
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
    /// The metadata cannot be read or written.
    #[error("cannot use the snapshotter's metadata")]
    Metadata(#[source] Box<redb::Error>),
    /// A record of the metadata is damaged.
    #[error("the record of snapshot {0} is damaged")]
    Record(String, #[source] prost::DecodeError),
    /// A layer's image cannot be built or read.
    #[error("the image of a layer")]
    Image(#[from] ferry_image::Error),
    /// Layers cannot be merged.
    #[error(transparent)]
    Merge(#[from] ferry_image::BuildLayersError),
    /// An image cannot be read lazily from its registry.
    #[error("{image}: {reason}")]
    Lazy {
        /// Its reference.
        image: String,
        /// The reason.
        reason: String,
    },
    /// The kernel does not mount a layer.
    #[error("the kernel does not mount {path}: {messages}")]
    Mount {
        /// The image.
        path: PathBuf,
        /// The kernel's own messages, or the operation that failed.
        messages: String,
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

impl<T, E: Into<io::Error>> IoContext<T> for std::result::Result<T, E> {
    fn doing(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|error| Error::Io { action, path: path.into(), error: error.into() })
    }
}

macro_rules! metadata_errors {
    ($($name:ident),*) => {
        $(impl From<redb::$name> for Error {
            fn from(error: redb::$name) -> Self {
                Self::Metadata(Box::new(error.into()))
            }
        })*
    };
}

metadata_errors!(CommitError, DatabaseError, StorageError, TableError, TransactionError);

/// Logs the failure of a step that the next cleanup repeats.
pub(crate) fn log_failure(outcome: Result<()>) {
    if let Err(error) = outcome {
        tracing::warn!("{}", ferry_image::error_chain(&error));
    }
}
