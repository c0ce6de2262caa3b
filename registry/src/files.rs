//! Files that are written here.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Names the file of an error.
pub(crate) fn with_path<T>(what: &'static str, path: &Path, outcome: std::io::Result<T>) -> Result<T> {
    outcome.map_err(|source| Error::Io { what, path: path.into(), source })
}

/// Returns the directory of a file.
pub(crate) fn parent_dir(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The maximum size in bytes of a list of files to fetch first: some ten thousand paths.
pub const LIST_BYTES_MAX: u64 = 4 << 20;

/// Returns the place of the list of an image's files that are fetched first: `IMAGE.trace`.
pub fn list_beside(image: &Path) -> PathBuf {
    let mut list = image.as_os_str().to_owned();
    list.push(".trace");
    list.into()
}
