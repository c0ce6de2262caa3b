//! Paths of the user, which are relative to the start directory, and of descriptors.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

static START_DIR: LazyLock<PathBuf> = LazyLock::new(|| std::env::current_dir().unwrap_or_default());

/// Returns the directory in which this process was started, also after `chdir`; empty if that directory was removed. The first call
/// must precede the change.
pub fn start_dir() -> &'static Path {
    &START_DIR
}

/// Returns the absolute path, for messages and other programs.
pub fn absolute(path: &Path) -> String {
    let path = start_dir().join(path);
    std::path::absolute(&path).unwrap_or(path).to_string_lossy().into_owned()
}

/// Returns a path that leads to an open file, whatever its name.
pub fn descriptor_path(file: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}
