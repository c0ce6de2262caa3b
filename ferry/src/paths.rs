//! Paths as the user wrote them, and the directory that they are relative to.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

static START_DIR: LazyLock<PathBuf> = LazyLock::new(|| std::env::current_dir().unwrap_or_default());

/// Returns the directory that this process was started in, also after it has changed directory; empty if that directory has no
/// path any more. The first call must precede the change.
pub fn start_dir() -> &'static Path {
    &START_DIR
}

/// Returns the absolute path, for messages and other programs.
pub fn absolute(path: &Path) -> String {
    let path = start_dir().join(path);
    std::path::absolute(&path).unwrap_or(path).to_string_lossy().into_owned()
}
