//! Files that are written here.

use std::path::Path;

use crate::error::{Error, Result};

/// Names the file of an error.
pub(crate) fn with_path<T>(what: &'static str, path: &Path, outcome: std::io::Result<T>) -> Result<T> {
    outcome.map_err(|source| Error::Io { what, path: path.into(), source })
}

/// Returns the folder of a file.
pub(crate) fn parent_dir(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
