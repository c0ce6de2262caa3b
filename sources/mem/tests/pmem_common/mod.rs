//! What the tests of persistent images share: media in memory that take down every write, and file calls by path.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use ferry_mem::pmem::{Medium, PMem};
use ferry_vfs::{
    Caller, CreateArgs, Data, DirItem, DirOutput, DirRange, Entry, FileSystem, FileType, Handle, Ino, IoRange, Name,
    OFlags,
};

/// What happened to a medium.
#[derive(Clone, Debug)]
pub enum Event {
    Write { medium: usize, offset: usize, bytes: Vec<u8> },
    Persist { medium: usize, ranges: Vec<Range<u64>> },
}

/// The events of all media of a test, in order.
pub type Events = Arc<Mutex<Vec<Event>>>;

/// A medium in memory.
#[derive(Debug)]
pub struct Recording {
    bytes: Mutex<Vec<u8>>,
    number: usize,
    events: Option<Events>,
}

impl Recording {
    pub fn new(bytes: Vec<u8>, number: usize, events: Option<Events>) -> Arc<Self> {
        Arc::new(Self { bytes: Mutex::new(bytes), number, events })
    }

    pub fn contents(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }
}

impl Medium for Recording {
    fn bytes(&self) -> u64 {
        self.bytes.lock().unwrap().len() as u64
    }

    fn look(&self, offset: u64, bytes: usize, seen: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        let start = offset as usize;
        let part = self.bytes.lock().unwrap().get(start..start.saturating_add(bytes)).map(<[u8]>::to_vec);
        seen(&part.ok_or(io::ErrorKind::InvalidInput)?);
        Ok(())
    }

    fn edit(&self, offset: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8]) -> usize) -> io::Result<usize> {
        let start = offset as usize;
        let mut all = self.bytes.lock().unwrap();
        let part = all.get_mut(start..start.saturating_add(bytes)).ok_or(io::ErrorKind::InvalidInput)?;
        // As other media do, this one shows nothing of what was there.
        let mut filled = vec![0xa5; bytes];
        let count = fill(&mut filled);
        let part = &mut part[..count];
        part.copy_from_slice(&filled[..count]);
        if let Some(events) = &self.events {
            let event = Event::Write { medium: self.number, offset: start, bytes: part.to_vec() };
            events.lock().unwrap().push(event);
        }
        Ok(count)
    }

    fn persist(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        if let (Some(events), false) = (&self.events, ranges.is_empty()) {
            events.lock().unwrap().push(Event::Persist { medium: self.number, ranges: ranges.to_vec() });
        }
        Ok(())
    }
}

/// Numbers that look random and come again with the same seed (xorshift64*).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

pub fn cx() -> Caller<'static> {
    Caller::default()
}

pub fn name(bytes: &[u8]) -> Name<'_> {
    Name::new(bytes).unwrap()
}

pub fn at(ino: Ino, handle: Handle, offset: u64, len: usize) -> IoRange {
    IoRange { ino, handle, offset, len: len as u32, flags: OFlags::RDWR, clear_privileges: false, owner: None }
}

/// Makes a file, or opens what is there, and writes it: all of it, or it is an error.
pub fn put(fs: &PMem, dir: Ino, file: &[u8], offset: u64, mut bytes: &[u8]) -> ferry_vfs::Result<(Ino, Handle)> {
    let new = CreateArgs { mode: 0o644, ..CreateArgs::default() };
    let (entry, handle) = match fs.create(&cx(), dir, name(file), &new, OFlags::RDWR | OFlags::EXCL) {
        Err(ferry_vfs::Errno::EXIST) => {
            let entry = fs.lookup(&cx(), dir, name(file))?;
            (entry, fs.open(&cx(), entry.ino, OFlags::RDWR).inspect_err(|_| fs.forget(entry.ino, 1))?)
        }
        made => made?,
    };
    let len = bytes.len();
    let outcome = match fs.write(&cx(), &at(entry.ino, handle, offset, len), &mut bytes) {
        Ok(data) if data.bytes() == Some(len) => return Ok((entry.ino, handle)),
        Ok(_) => Err(ferry_vfs::Errno::NOSPC),
        Err(error) => Err(error),
    };
    close(fs, entry.ino, handle);
    outcome
}

pub fn close(fs: &PMem, ino: Ino, handle: Handle) {
    fs.release(&cx(), ino, handle);
    fs.forget(ino, 1);
}

/// Reads, also through an extent.
pub fn get(fs: &PMem, ino: Ino, handle: Handle, offset: u64, len: usize) -> Vec<u8> {
    let mut out = Vec::new();
    match fs.read(&cx(), &at(ino, handle, offset, len), &mut out).unwrap() {
        Data::Bytes(count) => assert_eq!(count, out.len()),
        Data::Extent(extent) => {
            out.resize(len, 0);
            assert_eq!(rustix::io::pread(&*extent.file, &mut out, extent.offset), Ok(len));
        }
    }
    out
}

/// A whole file by its name.
pub fn get_all(fs: &PMem, dir: Ino, file: &[u8]) -> Vec<u8> {
    let entry = fs.lookup(&cx(), dir, name(file)).unwrap();
    let handle = fs.open(&cx(), entry.ino, OFlags::RDONLY).unwrap();
    let bytes = get(fs, entry.ino, handle, 0, entry.attr.size as usize);
    close(fs, entry.ino, handle);
    bytes
}

/// What a walk sees of an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub ino: u64,
    pub mode: u32,
    pub nlink: u32,
    pub size: u64,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub bytes: Arc<Vec<u8>>,
}

impl Seen {
    /// The same but for the bytes.
    pub fn same_but_bytes(&self, other: &Self) -> bool {
        let no_bytes = |seen: &Self| Self { bytes: Arc::default(), ..seen.clone() };
        no_bytes(self) == no_bytes(other)
    }
}

struct Names(Vec<Vec<u8>>);

impl DirOutput for Names {
    fn fits(&self, _: &[u8]) -> bool {
        true
    }

    fn push(&mut self, item: &DirItem<'_>, _: Option<&Entry>) {
        if item.name != b"." && item.name != b".." {
            self.0.push(item.name.to_vec());
        }
    }
}

/// Everything there is, by path.
pub type World = BTreeMap<Vec<u8>, Seen>;

pub fn walk(fs: &PMem) -> World {
    let mut world = World::new();
    walk_dir(fs, Ino::ROOT, b"", &mut world);
    world
}

fn walk_dir(fs: &PMem, dir: Ino, path: &[u8], world: &mut World) {
    let handle = fs.opendir(&cx(), dir, OFlags::RDONLY).unwrap();
    let mut names = Names(Vec::new());
    fs.readdir(&cx(), &DirRange { ino: dir, handle, offset: 0, plus: false }, &mut names).unwrap();
    fs.releasedir(&cx(), dir, handle);
    for file in names.0 {
        let entry = fs.lookup(&cx(), dir, name(&file)).unwrap();
        let path = [path, b"/", &file].concat();
        let mut xattrs = BTreeMap::new();
        for xattr in fs.listxattr(&cx(), entry.ino).unwrap().split(|byte| *byte == 0).filter(|xattr| !xattr.is_empty())
        {
            xattrs.insert(xattr.to_vec(), fs.getxattr(&cx(), entry.ino, xattr).unwrap());
        }
        let mut bytes = Vec::new();
        match entry.attr.kind() {
            FileType::Directory => walk_dir(fs, entry.ino, &path, world),
            FileType::RegularFile => bytes = get_all(fs, dir, &file),
            FileType::Symlink => bytes = fs.readlink(&cx(), entry.ino).unwrap(),
            _ => {}
        }
        let size = if entry.attr.kind() == FileType::Directory { 0 } else { entry.attr.size };
        let (mode, nlink) = (entry.attr.mode, entry.attr.nlink);
        world.insert(path, Seen { ino: entry.ino.0, mode, nlink, size, xattrs, bytes: Arc::new(bytes) });
        fs.forget(entry.ino, 1);
    }
}
