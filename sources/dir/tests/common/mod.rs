//! What the tests share: a shared directory, a caller, and short names for the contract's verbs.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses some of it")]

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

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

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

pub fn name(name: &str) -> Name<'_> {
    Name::new(name.as_bytes()).unwrap()
}

pub fn new(mode: u32) -> New {
    New { mode, ..New::default() }
}

/// Both ways to remember an inode.
pub fn both_modes() -> [Options; 2] {
    [Options::default(), Options { file_handles: false, ..Options::default() }]
}

impl Share {
    pub fn new(options: Options) -> Self {
        let tmp = tempdir();
        let dir = Dir::open(tmp.path(), options).unwrap();
        Self { tmp, dir, cx: Caller { session: SessionId::unique(), ..Caller::default() } }
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

    fn range(ino: Ino, handle: Handle, offset: u64, len: usize, flags: OFlags) -> IoRange {
        IoRange { ino, handle, offset, len: len.try_into().unwrap(), flags, clear_privileges: false, owner: None }
    }

    pub fn read(&self, (ino, handle): (Ino, Handle), offset: u64, len: usize) -> Result<Vec<u8>> {
        let at = Self::range(ino, handle, offset, len, OFlags::RDWR);
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
        let at = Self::range(ino, handle, offset, bytes.len(), flags);
        let Data::Extent(extent) = self.dir.write(&self.cx, &at, &mut &*bytes)? else { panic!("no extent") };
        rustix::io::pwrite(extent.file.as_fd(), bytes, extent.offset)
    }

    /// Lists a directory, `per_call` names at a time.
    pub fn list(&self, ino: Ino, plus: bool, per_call: usize) -> Vec<Line> {
        let handle = self.dir.opendir(&self.cx, ino, OFlags::RDONLY).unwrap();
        let mut lines = Vec::new();
        loop {
            let offset = lines.last().map_or(0, |line: &Line| line.next);
            let mut out = Listing { lines: Vec::new(), max: per_call };
            self.dir.readdir(&self.cx, &DirRange { ino, handle, offset, plus }, &mut out).unwrap();
            if out.lines.is_empty() {
                break;
            }
            lines.append(&mut out.lines);
        }
        self.dir.releasedir(&self.cx, ino, handle);
        lines
    }
}

/// Tells a thread to end, also when the test fails.
pub struct Stop<'a>(pub &'a std::sync::atomic::AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

/// One line of a listing.
#[derive(Clone, Debug)]
pub struct Line {
    pub name: String,
    pub kind: FileType,
    pub ino: u64,
    pub next: u64,
    pub entry: Option<Entry>,
}

/// Takes at most `max` lines.
pub struct Listing {
    pub lines: Vec<Line>,
    pub max: usize,
}

impl DirOutput for Listing {
    fn fits(&self, _: &[u8]) -> bool {
        self.lines.len() < self.max
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        assert!(self.lines.len() < self.max, "pushed without asking");
        self.lines.push(Line {
            name: String::from_utf8_lossy(item.name).into_owned(),
            kind: item.kind,
            ino: item.ino,
            next: item.next,
            entry: entry.copied(),
        });
    }
}
