//! A random workload, its model, and what the file system promised meanwhile.

use std::time::Duration;

use ferry_mem::pmem::{Options, PMem};
use ferry_vfs::{
    CreateArgs, Errno, FallocateFlags, FileSystem, Handle, Ino, IoRange, OFlags, RenameFlags, SetAttr, XattrFlags,
};

use super::model::Model;
use crate::pmem_common::{Events, Random, World, at, close, cx, get, name, put, walk};

/// What a file takes that only is there to take room: of 190 blocks, 60 stay.
const BALLAST_BYTES: u64 = 130 * 4096;
/// Names in use: few, so that they meet.
const NAMES: u64 = 6;

/// What the workload was promised, as of an event.
#[derive(Debug)]
pub struct Promise {
    pub event: usize,
    /// The world that it is about.
    pub world: usize,
    pub what: What,
}

#[derive(Debug)]
pub enum What {
    /// All names and attributes.
    Names,
    /// The bytes of this inode.
    Bytes(u64),
}

pub struct Workload {
    fs: PMem,
    random: Random,
    events: Events,
    tiers: usize,
    model: Model,
    /// The world after each call that changed something; the first is before any.
    pub worlds: Vec<World>,
    /// Events so far, when each call ended.
    pub ends: Vec<usize>,
    pub promises: Vec<Promise>,
    /// Unlinked, perhaps, but open.
    held: Vec<(Ino, Handle)>,
}

pub fn options() -> Options {
    Options { commit: Some(Duration::ZERO), ..Options::default() }
}

impl Workload {
    pub fn new(fs: PMem, seed: u64, events: Events, tiers: usize) -> Self {
        let ends = vec![events.lock().unwrap().len()];
        let (random, model) = (Random::new(seed), Model::default());
        let (worlds, promises, held) = (vec![World::new()], Vec::new(), Vec::new());
        let mut workload = Self { fs, random, events, tiers, model, worlds, ends, promises, held };
        workload.take_room();
        workload
    }

    /// Leaves so little room that blocks go round soon.
    fn take_room(&mut self) {
        let (ino, handle) = put(&self.fs, Ino::ROOT, b"ballast", 0, &[]).unwrap();
        self.model.create(b"/ballast", ino.0);
        self.note();
        self.fs.fallocate(&cx(), ino, handle, 0, BALLAST_BYTES, FallocateFlags::KEEP_SIZE).unwrap();
        close(&self.fs, ino, handle);
        self.note();
    }

    fn dir(&mut self) -> (Ino, Vec<u8>) {
        let dir = if self.random.below(3) == 0 { self.fs.lookup(&cx(), Ino::ROOT, name(b"dir")).ok() } else { None };
        dir.map_or((Ino::ROOT, b"/".to_vec()), |entry| (entry.ino, b"/dir/".to_vec()))
    }

    /// A directory, a name in it, and its path.
    fn place(&mut self) -> (Ino, [u8; 1], Vec<u8>) {
        let ((dir, path), file) = (self.dir(), [b'a' + self.random.below(NAMES) as u8]);
        (dir, file, [&path[..], &file].concat())
    }

    /// One step; errors (no such file, no space) are part of life.
    pub fn step(&mut self) {
        match self.random.below(24) {
            what @ 0..=14 => self.file_step(what),
            15 => {
                let new = CreateArgs { mode: 0o755, ..CreateArgs::default() };
                if let Ok(entry) = self.fs.mkdir(&cx(), Ino::ROOT, name(b"dir"), &new) {
                    self.model.mkdir(b"/dir", entry.ino.0);
                }
            }
            16..=20 => self.name_step(),
            21 => {
                if let Some((ino, handle)) = self.held.pop() {
                    close(&self.fs, ino, handle);
                }
            }
            22 => {
                // Fills the log, so that a snapshot is due soon.
                for value in [[b'x'; 6000], [b'y'; 6000]].iter().cycle().take(8) {
                    let _ = self.fs.setxattr(&cx(), Ino::ROOT, b"user.churn", value, XattrFlags::empty(), false);
                }
                let handle = self.fs.opendir(&cx(), Ino::ROOT, OFlags::RDONLY).unwrap();
                assert!(self.fs.fsyncdir(&cx(), Ino::ROOT, handle, false).unwrap().is_none());
                self.fs.releasedir(&cx(), Ino::ROOT, handle);
                self.promise(What::Names);
            }
            _ => {
                self.fs.syncfs(&cx(), Ino::ROOT).unwrap();
                self.promise(What::Names);
                let inodes: Vec<u64> = self.model.world().values().map(|seen| seen.ino).collect();
                inodes.into_iter().for_each(|ino| self.promise(What::Bytes(ino)));
            }
        }
        self.note();
        assert_eq!(walk(&self.fs), self.model.world(), "step {}, without a power cut", self.worlds.len());
    }

    fn name_step(&mut self) {
        let ((dir, file, path), (to_dir, to, to_path)) = (self.place(), self.place());
        let (from, target) = ((dir, name(&file)), (to_dir, name(&to)));
        match self.random.below(5) {
            0 | 1 => {
                let exchange = self.random.below(4) == 0;
                let flags = if exchange { RenameFlags::EXCHANGE } else { RenameFlags::empty() };
                if self.fs.rename(&cx(), from, target, flags).is_ok() {
                    self.model.rename(&path, &to_path, exchange);
                }
            }
            2 | 3 => {
                if self.fs.unlink(&cx(), dir, name(&file)).is_ok() {
                    self.model.unlink(&path);
                }
            }
            _ => {
                if let Ok(entry) = self.fs.lookup(&cx(), dir, name(&file)) {
                    if let Ok(link) = self.fs.link(&cx(), entry.ino, to_dir, name(&to)) {
                        self.model.link(entry.ino.0, &to_path);
                        self.fs.forget(link.ino, 1);
                    }
                    self.fs.forget(entry.ino, 1);
                }
            }
        }
    }

    /// Opens or makes a file, and does something with it.
    fn file_step(&mut self, what: u64) {
        let (dir, file, path) = self.place();
        let Ok((ino, handle)) = put(&self.fs, dir, &file, 0, &[]) else { return };
        self.model.create(&path, ino.0);
        self.note();
        match what {
            0..=7 => self.write(what, (ino, handle)),
            8..=12 => self.change(what, (ino, handle)),
            _ => {
                let data_only = what == 14;
                assert!(self.fs.fsync(&cx(), ino, handle, data_only).unwrap().is_none());
                self.promise(What::Bytes(ino.0));
                if !data_only {
                    self.promise(What::Names);
                }
            }
        }
        if self.random.below(8) == 0 && self.held.len() < 3 {
            self.held.push((ino, handle));
        } else {
            close(&self.fs, ino, handle);
        }
        if self.tiers > 1 && self.random.below(3) == 0 {
            self.fs.store().move_to_tier2(8).unwrap();
        } else if self.tiers > 1 && self.random.below(3) == 0 {
            self.fs.store().bring_back(8).unwrap();
        }
    }

    fn write(&mut self, what: u64, (ino, handle): (Ino, Handle)) {
        let (offset, len) = (self.random.below(60_000), 1 + self.random.below(20_000) as usize);
        // Nobody else writes this byte at this time, so one that is seen in the wrong place is known.
        let bytes = vec![(self.worlds.len() % 255) as u8 + 1; len];
        let (flags, offset) = match what {
            6 => (OFlags::APPEND, self.model.bytes(ino.0).len() as u64),
            7 => (OFlags::DSYNC, offset),
            _ => (OFlags::empty(), offset),
        };
        let range = IoRange { flags: OFlags::RDWR | flags, ..at(ino, handle, offset, len) };
        match self.fs.write(&cx(), &range, &mut &bytes[..]) {
            Ok(data) => {
                // Without room for all, what fits is written, but records are appended as a whole.
                let count = data.bytes().unwrap();
                assert!(count == len || what != 6 && (1..len).contains(&count), "{count} of {len}");
                self.model.write(ino.0, offset as usize, &bytes[..count]);
                if what == 7 {
                    self.promise(What::Bytes(ino.0));
                }
            }
            Err(error) => assert_eq!(error, Errno::NOSPC),
        }
    }

    fn change(&mut self, what: u64, (ino, handle): (Ino, Handle)) {
        let (offset, len) = (self.random.below(60_000), 1 + self.random.below(20_000));
        let fs = &self.fs;
        let (start, bytes) = (offset as usize, len as usize);
        match what {
            8 => {
                let set = SetAttr { size: Some(offset), ..SetAttr::default() };
                if fs.setattr(&cx(), ino, Some(handle), &set).is_ok() {
                    self.model.truncate(ino.0, start);
                }
            }
            9 => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let done = fs.fallocate(&cx(), ino, handle, offset, len, flags);
                let before = self.model.bytes(ino.0).to_vec();
                self.model.punch(ino.0, start, bytes);
                if done.is_err() {
                    // Without room for the edges, some of it is done.
                    let found = get(fs, ino, handle, 0, before.len());
                    let punched = self.model.bytes(ino.0);
                    let either = |at: usize| found[at] == before[at] || found[at] == punched[at];
                    assert!(found.len() == before.len() && (0..found.len()).all(either));
                    self.model.write(ino.0, 0, &found);
                }
            }
            10 => {
                if fs.fallocate(&cx(), ino, handle, offset, len, FallocateFlags::empty()).is_ok() {
                    self.model.grow(ino.0, start + bytes);
                }
            }
            11 => {
                let value = vec![b'v'; bytes.min(50)];
                if fs.setxattr(&cx(), ino, b"user.x", &value, XattrFlags::empty(), false).is_ok() {
                    self.model.set_xattr(ino.0, b"user.x", &value);
                }
            }
            _ => {
                let mode = 0o600 + (len % 8) as u32;
                let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
                if fs.setattr(&cx(), ino, Some(handle), &set).is_ok() {
                    self.model.chmod(ino.0, mode);
                }
            }
        }
    }

    /// Takes down what is promised of the world after this call.
    fn promise(&mut self, what: What) {
        let event = self.events.lock().unwrap().len();
        // The call may be the second of its step: then its world is the next one.
        self.promises.push(Promise { event, world: self.worlds.len(), what });
    }

    /// A call ended.
    fn note(&mut self) {
        self.worlds.push(self.model.world());
        self.ends.push(self.events.lock().unwrap().len());
    }

    /// The latest world that can be on the medium after so many events.
    pub fn world_at(&self, event: usize) -> usize {
        self.ends.partition_point(|end| *end <= event).min(self.worlds.len() - 1)
    }
}
