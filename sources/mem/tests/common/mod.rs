//! What the tests share: memory file systems, a caller, and short names for the contract's verbs.
#![allow(dead_code, clippy::unwrap_used, clippy::missing_panics_doc, reason = "each test uses some of it")]

#[path = "../../../tests/common.rs"]
mod contract;

use std::os::fd::AsFd;

pub use contract::*;
use ferry_engine::{Operation, copy_mapped};
use ferry_mem::{Mem, Options};
use ferry_vfs::*;

/// A memory file system and who uses it.
pub struct Share<F = Mem> {
    pub fs: F,
    pub cx: Caller<'static>,
    /// Moves bytes as an export does: in memory where that goes. Else always by the descriptor.
    pub memory: bool,
}

/// The segments that these bytes are, several if they are many.
pub fn segments(bytes: &[u8]) -> Vec<Segment> {
    let segment = |bytes: &[u8]| Segment { address: bytes.as_ptr().cast_mut(), bytes: bytes.len() };
    bytes.chunks(bytes.len().div_ceil(3).max(1000)).map(segment).collect()
}

/// Reads from an extent.
pub fn read_from(extent: &Extent, buffer: &mut [u8], memory: bool) -> Result<usize> {
    let pieces = segments(buffer);
    // SAFETY: the buffer is ours until this returns.
    match memory.then(|| unsafe { copy_mapped(Operation::Read, &extent.file, extent.offset, &pieces) }).flatten() {
        Some(outcome) => outcome.map_err(|error| Errno::from_io_error(&error).unwrap()),
        None => rustix::io::pread(extent.file.as_fd(), buffer, extent.offset),
    }
}

/// Writes to an extent.
pub fn write_to(extent: &Extent, bytes: &[u8], memory: bool) -> Result<usize> {
    let operation = Operation::Write { clear_privileges: false, waits: true };
    // SAFETY: the bytes are valid, and only read.
    match memory.then(|| unsafe { copy_mapped(operation, &extent.file, extent.offset, &segments(bytes)) }).flatten() {
        Some(outcome) => outcome.map_err(|error| Errno::from_io_error(&error).unwrap()),
        None => rustix::io::pwrite(extent.file.as_fd(), bytes, extent.offset),
    }
}

/// Both places for data: a private tmpfs, where this user may mount one, and memfds.
pub fn both() -> Vec<Share> {
    [false, true].map(|memfds| Share::new(Options { memfds, size_bytes: Some(64 << 20), ..Options::default() })).into()
}

impl Share<Mem> {
    pub fn new(options: Options) -> Self {
        Self::over(Mem::new(&options).unwrap())
    }
}

impl<F: FileSystem> Share<F> {
    pub fn over(fs: F) -> Self {
        Self { fs, cx: caller(), memory: true }
    }

    /// Looks a path up, component by component; the last reference is kept.
    pub fn walk(&self, path: &str) -> Result<Entry> {
        let mut entry = Entry { ino: Ino::ROOT, generation: 0, attr: self.fs.getattr(&self.cx, Ino::ROOT, None)? };
        for component in path.split('/').filter(|component| !component.is_empty()) {
            let next = self.fs.lookup(&self.cx, entry.ino, name(component));
            self.forget(entry.ino);
            entry = next?;
        }
        Ok(entry)
    }

    /// The inode at a path, without a reference: it must keep a name while it is used.
    pub fn ino(&self, path: &str) -> Ino {
        let ino = self.walk(path).unwrap().ino;
        self.forget(ino);
        ino
    }

    pub fn forget(&self, ino: Ino) {
        if ino != Ino::ROOT {
            self.fs.forget(ino, 1);
        }
    }

    pub fn attr(&self, ino: Ino) -> Attr {
        self.fs.getattr(&self.cx, ino, None).unwrap()
    }

    pub fn mkdir(&self, at: Ino, dir: &str) -> Ino {
        let ino = self.fs.mkdir(&self.cx, at, name(dir), &new(0o755)).unwrap().ino;
        self.forget(ino);
        ino
    }

    pub fn create(&self, at: Ino, file: &str, mode: u32) -> (Ino, Handle) {
        let made = self.fs.create(&self.cx, at, name(file), &new(mode), OFlags::RDWR | OFlags::EXCL);
        let (entry, handle) = made.unwrap();
        self.forget(entry.ino);
        (entry.ino, handle)
    }

    /// Makes a file with content, and closes it.
    pub fn file(&self, at: Ino, file: &str, content: &[u8]) -> Ino {
        let opened = self.create(at, file, 0o644);
        assert_eq!(self.write(opened, 0, content), Ok(content.len()));
        self.release(opened);
        opened.0
    }

    pub fn release(&self, (ino, handle): (Ino, Handle)) {
        self.fs.release(&self.cx, ino, handle);
    }

    pub fn read(&self, (ino, handle): (Ino, Handle), offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        let extent = match self.fs.read(&self.cx, &range(ino, handle, offset, len, OFlags::RDWR), &mut out)? {
            Data::Bytes(count) => {
                assert_eq!(count, out.len());
                return Ok(out);
            }
            Data::Extent(extent) => extent,
        };
        let mut buffer = vec![0; len];
        let count = read_from(&extent, &mut buffer, self.memory)?;
        buffer.truncate(count);
        Ok(buffer)
    }

    pub fn write(&self, at: (Ino, Handle), offset: u64, bytes: &[u8]) -> Result<usize> {
        self.write_at(&range(at.0, at.1, offset, bytes.len(), OFlags::RDWR), bytes)
    }

    pub fn write_at(&self, at: &IoRange, bytes: &[u8]) -> Result<usize> {
        match self.fs.write(&self.cx, at, &mut &*bytes)? {
            Data::Bytes(count) => Ok(count),
            Data::Extent(extent) => write_to(&extent, bytes, self.memory),
        }
    }

    /// Lists a directory, `per_call` names at a time; the references of a plus listing are given back.
    pub fn list(&self, ino: Ino, plus: bool, per_call: usize) -> Vec<Line> {
        self.forget_all(list(&self.fs, &self.cx, ino, plus, per_call))
    }

    pub fn list_some(&self, ino: Ino, handle: Handle, (offset, plus): (u64, bool), max: usize) -> Vec<Line> {
        let mut out = Listing { lines: Vec::new(), max };
        self.fs.readdir(&self.cx, &DirRange { ino, handle, offset, plus }, &mut out).unwrap();
        self.forget_all(out.lines)
    }

    fn forget_all(&self, lines: Vec<Line>) -> Vec<Line> {
        for entry in lines.iter().filter_map(|line| line.entry) {
            self.forget(entry.ino);
        }
        lines
    }

    /// The names in a directory but for `.` and `..`.
    pub fn names(&self, ino: Ino) -> Vec<String> {
        let lines = self.list(ino, false, 100);
        lines.into_iter().map(|line| line.name).filter(|name| name != "." && name != "..").collect()
    }
}
