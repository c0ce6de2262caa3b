//! A tmpfs of this host: no disk is waited for, and all files go at once.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, UnmountFlags};

/// A mounted tmpfs. It goes when this is dropped.
#[derive(Debug)]
pub struct Tmpfs(PathBuf);

impl Tmpfs {
    /// Mounts one at `path`, which is created.
    pub fn mount(path: PathBuf) -> Result<Self> {
        std::fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        rustix::mount::mount("tmpfs", &path, "tmpfs", MountFlags::empty(), Some(c"nr_inodes=0"))
            .context("cannot mount a tmpfs, which root can")?;
        Ok(Self(path))
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Creates a directory with so many empty files in it, by the names of [`file_name`].
    pub fn make_files(&self, directory: &str, files: u64) -> Result<PathBuf> {
        let directory = self.0.join(directory);
        std::fs::create_dir(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        (0..files).try_for_each(|number| File::create(directory.join(file_name(number))).map(drop))?;
        Ok(directory)
    }
}

/// The name of a file by its number.
pub fn file_name(number: u64) -> String {
    format!("file-{number:03}")
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
    }
}
