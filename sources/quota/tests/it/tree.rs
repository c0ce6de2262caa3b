//! A limited directory of this host or memory file system, and its real usage.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferry_dir::Dir;
use ferry_quota::{Limits, Quota, Usage};
use ferry_vfs::*;

use crate::common::*;

pub const K: u64 = 1024;

/// A limited directory.
pub struct Tree {
    pub quota: Arc<Quota>,
    pub cx: Caller<'static>,
    pub dir: tempfile::TempDir,
}

pub fn limits(bytes: u64, files: Option<u64>) -> Limits {
    Limits { bytes, files }
}

pub fn open(path: &Path, limits: Limits) -> Arc<Quota> {
    let dir = Dir::open(path, ferry_dir::Options::default()).unwrap();
    Arc::new(Quota::new(Arc::new(dir), limits).unwrap())
}

impl Tree {
    /// Creates an empty directory with a limit in bytes, not counting itself.
    pub fn new(bytes: u64, files: Option<u64>) -> Self {
        Self::in_directory(&std::env::temp_dir(), bytes, files)
    }

    /// The same, on the file system of a directory.
    pub fn in_directory(directory: &Path, bytes: u64, files: Option<u64>) -> Self {
        let dir = tempfile::tempdir_in(directory).unwrap();
        let own = storage(&dir.path().metadata().unwrap());
        Self { quota: open(dir.path(), limits(bytes.saturating_add(own), files)), cx: caller(), dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Creates a file and opens it.
    pub fn create(&self, name: &str) -> Result<(Ino, Handle)> {
        let name = common_name(name);
        let made = self.quota.create(&self.cx, Ino::ROOT, name, &new(0o644), OFlags::RDWR);
        made.map(|(entry, handle)| (entry.ino, handle))
    }

    pub fn write(&self, at: (Ino, Handle), offset: u64, bytes: usize) -> Result<usize> {
        let range = range(at.0, at.1, offset, bytes, OFlags::RDWR);
        self.quota.write(&self.cx, &range, &mut &vec![7; bytes][..]).map(|data| data.bytes().unwrap())
    }

    pub fn close(&self, (ino, handle): (Ino, Handle)) {
        self.quota.release(&self.cx, ino, handle);
        self.quota.forget(ino, 1);
    }

    pub fn unlink(&self, name: &str) -> Result<()> {
        self.quota.unlink(&self.cx, Ino::ROOT, common_name(name))
    }

    pub fn set_size(&self, at: (Ino, Handle), size: u64) -> Result<Attr> {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        self.quota.setattr(&self.cx, at.0, Some(at.1), &set)
    }

    pub fn statfs(&self) -> Statfs {
        self.quota.statfs(&self.cx, Ino::ROOT).unwrap()
    }

    /// Asserts that the quota counts the real usage.
    #[track_caller]
    pub fn assert_exact(&self) {
        assert_eq!(self.quota.usage(), disk_usage(self.dir.path()));
    }
}

/// Whether files are in memory: tmpfs does not report allocated ranges, and has no aligned direct writes.
pub fn is_tmpfs(path: &Path) -> bool {
    rustix::fs::statfs(path).unwrap().f_type == 0x0102_1994
}

pub fn common_name(text: &str) -> Name<'_> {
    name(text)
}

fn storage(found: &fs::Metadata) -> u64 {
    found.blocks() * 512
}

/// Returns the usage of a tree, as `du` reports it.
pub fn disk_usage(path: &Path) -> Usage {
    let mut usage = Usage { bytes: 0, files: 0 };
    let (mut paths, mut seen) = (vec![path.to_owned()], HashSet::new());
    while let Some(path) = paths.pop() {
        let found = path.symlink_metadata().unwrap();
        if !seen.insert(found.ino()) {
            continue;
        }
        usage.bytes += storage(&found);
        usage.files += 1;
        if found.is_dir() {
            paths.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    usage
}
