//! Small sources for tests and measurements.
#![allow(dead_code, missing_docs, missing_debug_implementations, reason = "each user uses some of it")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferry_vfs::*;

/// A file system with one file, `file`, that forgets what is written and reads as zeros. Its other names misbehave.
#[derive(Default)]
pub struct Null {
    /// Calls of any method that a request leads to.
    pub calls: AtomicU64,
    /// Handlers that wait for [`Null::let_go`].
    pub held: AtomicU64,
    pub let_go: std::sync::atomic::AtomicBool,
    /// What [`Features::waits`] says.
    pub waits: bool,
    /// The longest READ, in bytes.
    pub longest: AtomicU64,
}

pub const FILE_BYTES: u64 = 1 << 30;

/// The names there are: what they do is done by READ, except for `lookup-panics`.
pub const NAMES: [&str; 7] = ["file", "panics", "slow", "hangs", "lies", "short", "napping"];

impl Null {
    fn attr(ino: Ino) -> Attr {
        let (mode, size) = match ino {
            Ino::ROOT => (FileType::Directory.as_raw_mode() | 0o755, 0),
            _ => (FileType::RegularFile.as_raw_mode() | 0o644, FILE_BYTES),
        };
        Attr { ino: ino.0, mode, size, nlink: 1, blksize: 4096, ..Attr::default() }
    }

    fn entry(ino: Ino) -> Entry {
        Entry { ino, generation: 0, attr: Self::attr(ino) }
    }

    /// Whether an inode is the file of this name.
    pub fn is_named(&self, ino: Ino, name: &str) -> bool {
        let place = usize::try_from(ino.0).ok().and_then(|ino| ino.checked_sub(2));
        place.and_then(|place| NAMES.get(place)).is_some_and(|known| *known == name)
    }

    fn called(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }
}

/// Blocks the calling thread as a handler would that waits for something that never comes.
pub fn block_until(done: impl Fn() -> bool) {
    while !done() {
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl FileSystem for Null {
    fn features(&self) -> Features {
        Features { waits: self.waits, ..Features::default() }
    }
    fn lookup(&self, _: &Caller<'_>, _: Ino, name: Name<'_>) -> Result<Entry> {
        self.called();
        assert_ne!(name.as_bytes(), b"lookup-panics", "as the test wants it");
        let index = NAMES.iter().position(|known| known.as_bytes() == name.as_bytes()).ok_or(Errno::NOENT)?;
        Ok(Self::entry(Ino(index as u64 + 2)))
    }
    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        self.called();
        Ok(Self::attr(ino))
    }
    fn setattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>, _: &SetAttr) -> Result<Attr> {
        Ok(Self::attr(ino))
    }
    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(1))
    }
    fn opendir(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(1))
    }
    fn fsync(&self, _: &Caller<'_>, _: Ino, _: Handle, _: bool) -> Result<Option<std::sync::Arc<Backing>>> {
        Ok(None)
    }
    fn readdir(&self, _: &Caller<'_>, at: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        for (index, name) in NAMES.iter().enumerate().skip(usize::try_from(at.offset).unwrap_or(usize::MAX)) {
            let ino = Ino(index as u64 + 2);
            if !out.fits(name.as_bytes()) {
                break;
            }
            let next = index as u64 + 1;
            let item = DirItem { ino: ino.0, next, kind: FileType::RegularFile, name: name.as_bytes() };
            out.push(&item, at.plus.then(|| Self::entry(ino)).as_ref());
        }
        Ok(())
    }
    fn read(&self, _: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        static ZEROS: [u8; 1 << 17] = [0; 1 << 17];
        self.called();
        self.longest.fetch_max(at.len.into(), Ordering::Relaxed);
        match NAMES.get(usize::try_from(at.ino.0).unwrap_or(usize::MAX).wrapping_sub(2)).copied() {
            Some("panics") => panic!("as the test wants it"),
            Some("slow") => std::thread::sleep(Duration::from_millis(300)),
            Some("napping") => std::thread::sleep(Duration::from_millis(2)),
            Some("hangs") => {
                self.held.fetch_add(1, Ordering::SeqCst);
                block_until(|| self.let_go.load(Ordering::SeqCst));
                self.held.fetch_sub(1, Ordering::SeqCst);
            }
            Some("lies") => {
                // More than was asked for, and says that it was even more.
                let more = vec![0x5a; at.len as usize + 100_000];
                out.put(&more);
                return Ok(Data::Bytes(usize::MAX));
            }
            Some("short") => return Ok(Data::Bytes(out.put(b"short"))),
            _ => {}
        }
        let mut left = (at.len as usize).min(usize::try_from(FILE_BYTES - at.offset.min(FILE_BYTES)).unwrap_or(0));
        let mut done = 0;
        while left > 0 {
            let count = out.put(&ZEROS[..left.min(ZEROS.len())]);
            (left, done) = (left - count, done + count);
            if count == 0 {
                break;
            }
        }
        Ok(Data::Bytes(done))
    }
    fn write(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Input) -> Result<Data> {
        Ok(Data::Bytes(at.len as usize))
    }
}

/// [`Null`], but the data of its files are those of files in another directory.
pub struct Relay {
    pub null: Null,
    pub far: std::path::PathBuf,
}

impl FileSystem for Relay {
    fn lookup(&self, caller: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        self.null.lookup(caller, dir, name)
    }
    fn getattr(&self, caller: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        self.null.getattr(caller, ino, handle)
    }
    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(1))
    }
    fn read(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Output) -> Result<Data> {
        let name = usize::try_from(at.ino.0).ok().and_then(|ino| NAMES.get(ino - 2)).ok_or(Errno::NOENT)?;
        let file = std::fs::File::open(self.far.join(name)).map_err(|_| Errno::IO)?;
        Ok(Data::Extent(Extent { file: std::sync::Arc::new(Backing::new(file.into())), offset: at.offset }))
    }
}
