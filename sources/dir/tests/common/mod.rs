//! Shared by the tests: a shared directory, a caller, and short names for the operations.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses some of it")]

#[path = "../../../tests/common.rs"]
mod contract;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

pub use contract::*;
use ferry_dir::{Dir, Options};
use ferry_vfs::*;

/// A shared temporary directory.
pub struct Share {
    pub tmp: tempfile::TempDir,
    pub dir: Dir,
    pub cx: Caller<'static>,
}

/// Where the tests' directories are made: on a real file system (`FERRY_TEST_DIR`, or the temporary directory).
pub fn tempdir() -> tempfile::TempDir {
    match std::env::var_os("FERRY_TEST_DIR") {
        Some(dir) => tempfile::tempdir_in(dir).unwrap(),
        None => tempfile::tempdir().unwrap(),
    }
}

/// Set in a test's own process. Without it, `--include-ignored` would run such a test among others.
pub const ALONE: &str = "FERRY_TEST_ALONE";

pub fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// With file handles and without.
pub fn both_modes() -> [Options; 2] {
    [Options::default(), Options { file_handles: false, ..Options::default() }]
}

impl Share {
    pub fn new(options: Options) -> Self {
        let tmp = tempdir();
        let dir = Dir::open(tmp.path(), options).unwrap();
        Self { tmp, dir, cx: caller() }
    }

    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.tmp.path().join(path)
    }

    /// Looks a path up, component by component; the references are kept.
    pub fn walk(&self, path: &str) -> Result<Entry> {
        let mut entry = Entry { ino: Ino::ROOT, generation: 0, attr: self.dir.getattr(&self.cx, Ino::ROOT, None)? };
        for component in path.split('/').filter(|component| !component.is_empty()) {
            entry = self.dir.lookup(&self.cx, entry.ino, name(component))?;
        }
        Ok(entry)
    }

    pub fn ino(&self, path: &str) -> Ino {
        self.walk(path).unwrap().ino
    }

    pub fn open(&self, path: &str, flags: OFlags) -> Result<(Ino, Handle)> {
        let ino = self.walk(path)?.ino;
        Ok((ino, self.dir.open(&self.cx, ino, flags)?))
    }

    pub fn create(&self, at: Ino, file: &str, flags: OFlags) -> Result<(Entry, Handle)> {
        self.dir.create(&self.cx, at, name(file), &new(0o644), flags)
    }

    pub fn read(&self, (ino, handle): (Ino, Handle), offset: u64, len: usize) -> Result<Vec<u8>> {
        let at = range(ino, handle, offset, len, OFlags::RDWR);
        let Data::Extent(extent) = self.dir.read(&self.cx, &at, &mut Vec::new())? else { panic!("no extent") };
        let mut buffer = vec![0; len];
        let count = rustix::io::pread(extent.file.as_fd(), &mut buffer, extent.offset)?;
        buffer.truncate(count);
        Ok(buffer)
    }

    pub fn write(&self, at: (Ino, Handle), offset: u64, bytes: &[u8]) -> Result<usize> {
        self.write_flags(at, offset, bytes, OFlags::RDWR)
    }

    pub fn write_flags(&self, (ino, handle): (Ino, Handle), offset: u64, bytes: &[u8], flags: OFlags) -> Result<usize> {
        let at = range(ino, handle, offset, bytes.len(), flags);
        let Data::Extent(extent) = self.dir.write(&self.cx, &at, &mut &*bytes)? else { panic!("no extent") };
        rustix::io::pwrite(extent.file.as_fd(), bytes, extent.offset)
    }

    /// Lists a directory, `per_call` names at a time.
    pub fn list(&self, ino: Ino, plus: bool, per_call: usize) -> Vec<Line> {
        list(&self.dir, &self.cx, ino, plus, per_call)
    }
}

/// Tells a thread to end, also when the test fails.
pub struct Stop<'a>(pub &'a std::sync::atomic::AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}
