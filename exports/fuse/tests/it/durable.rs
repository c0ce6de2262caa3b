//! `O_SYNC` and `O_DSYNC`: a write is answered when what was written is durable, on whichever way it goes.
//!
//! The data of one mount's file are those of another mount's, whose source notes what it was asked to make durable.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::sources::Null;
use common::{mount, paths, plain};
use ferry_fuse::{Cache, Options, Path};
use ferry_vfs::{
    Attr, Backing, Caller, CreateArgs, Data, Entry, Extent, Features, FileSystem, FileType, Handle, Ino, Input,
    IoRange, Name, OFlags, Output, Result, SetAttr,
};

/// Notes calls of fsync.
#[derive(Default)]
struct Ledger {
    null: Null,
    data: AtomicUsize,
    all: AtomicUsize,
}

impl Ledger {
    /// How often data were made durable, and how often data and attributes.
    fn noted(&self) -> (usize, usize) {
        (self.data.load(Ordering::SeqCst), self.all.load(Ordering::SeqCst))
    }
}

impl FileSystem for Ledger {
    fn lookup(&self, caller: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        self.null.lookup(caller, dir, name)
    }
    fn getattr(&self, caller: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        self.null.getattr(caller, ino, handle)
    }
    fn setattr(&self, caller: &Caller<'_>, ino: Ino, handle: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        self.null.setattr(caller, ino, handle, set)
    }
    fn open(&self, caller: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        self.null.open(caller, ino, flags)
    }
    fn write(&self, caller: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        self.null.write(caller, at, input)
    }
    fn fsync(&self, _: &Caller<'_>, _: Ino, _: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        let count = if data_only { &self.data } else { &self.all };
        count.fetch_add(1, Ordering::SeqCst);
        Ok(None)
    }
}

/// A disk with a cache: one file, of which only what was there at a call of fsync survives.
struct Disk {
    null: Null,
    bytes: Mutex<Vec<u8>>,
    durable: Mutex<Vec<u8>>,
    syncs: AtomicUsize,
}

const DISK_BYTES: usize = 8 << 20;

impl Disk {
    fn new() -> Arc<Self> {
        let blank = || Mutex::new(vec![0; DISK_BYTES]);
        Arc::new(Self { null: Null::default(), bytes: blank(), durable: blank(), syncs: AtomicUsize::new(0) })
    }

    fn sized(attr: Attr) -> Attr {
        if FileType::from_raw_mode(attr.mode) == FileType::RegularFile {
            attr.with_size(DISK_BYTES as u64)
        } else {
            attr
        }
    }

    /// What a power cut leaves, as a file.
    fn after_a_cut(&self, at: &std::path::Path) {
        std::fs::write(at, &*self.durable.lock().unwrap()).unwrap();
    }
}

impl FileSystem for Disk {
    fn lookup(&self, caller: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        let entry = self.null.lookup(caller, dir, name)?;
        Ok(Entry { attr: Self::sized(entry.attr), ..entry })
    }
    fn getattr(&self, caller: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        self.null.getattr(caller, ino, handle).map(Self::sized)
    }
    fn setattr(&self, caller: &Caller<'_>, ino: Ino, handle: Option<Handle>, _: &SetAttr) -> Result<Attr> {
        self.getattr(caller, ino, handle)
    }
    fn open(&self, caller: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        self.null.open(caller, ino, flags)
    }
    fn read(&self, _: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        Ok(at.read_from(&self.bytes.lock().unwrap(), out))
    }
    fn write(&self, _: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        at.write_to(&mut self.bytes.lock().unwrap(), input, DISK_BYTES as u64)
    }
    fn fsync(&self, _: &Caller<'_>, _: Ino, _: Handle, _: bool) -> Result<Option<Arc<Backing>>> {
        self.durable.lock().unwrap().clone_from(&self.bytes.lock().unwrap());
        self.syncs.fetch_add(1, Ordering::SeqCst);
        Ok(None)
    }
}

/// Its file's data are those of a file elsewhere, opened as this one is.
struct Through {
    null: Null,
    far: PathBuf,
    passes: bool,
    opened: Mutex<HashMap<Handle, Arc<Backing>>>,
    number: AtomicU64,
}

impl Through {
    fn opened(&self, handle: Handle) -> Arc<Backing> {
        Arc::clone(&self.opened.lock().unwrap()[&handle])
    }
}

impl FileSystem for Through {
    fn features(&self) -> Features {
        Features { backing: self.passes, ..Features::default() }
    }
    fn lookup(&self, caller: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        self.null.lookup(caller, dir, name)
    }
    fn getattr(&self, caller: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        self.null.getattr(caller, ino, handle)
    }
    fn setattr(&self, caller: &Caller<'_>, ino: Ino, handle: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        self.null.setattr(caller, ino, handle, set)
    }
    fn open(&self, _: &Caller<'_>, _: Ino, flags: OFlags) -> Result<Handle> {
        // As the contract has it: the descriptor of an extent is opened with these flags.
        let durable = flags.bits().cast_signed() & libc::O_SYNC;
        let file = File::options().read(true).write(true).custom_flags(durable).open(&self.far).unwrap();
        let handle = Handle(self.number.fetch_add(1, Ordering::SeqCst));
        self.opened.lock().unwrap().insert(handle, Arc::new(Backing::new(file.into())));
        Ok(handle)
    }
    fn backing(&self, _: &Caller<'_>, _: Ino, handle: Handle) -> Option<Arc<Backing>> {
        self.passes.then(|| self.opened(handle))
    }
    fn write(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Input) -> Result<Data> {
        Ok(Data::Extent(Extent { file: self.opened(at.handle), offset: at.offset }))
    }
    fn release(&self, _: &Caller<'_>, _: Ino, handle: Handle) {
        // The next open may have come before it.
        self.opened.lock().unwrap().remove(&handle);
    }
}

fn far() -> (Arc<Ledger>, common::Mounted) {
    let ledger = Arc::new(Ledger::default());
    let mounted = mount(Arc::clone(&ledger) as _, Options { cache: Cache::None, ..plain(Path::Devfuse) });
    (ledger, mounted)
}

/// Writes with each of the flags, and looks what was made durable when the write was answered.
fn check(how: &str, file: &std::path::Path, ledger: &Ledger) {
    for (flags, data, all) in [(0, 0, 0), (libc::O_DSYNC, 1, 0), (libc::O_SYNC, 0, 1)] {
        let file = File::options().write(true).custom_flags(flags).open(file).unwrap();
        for bytes in [4096, 1 << 20] {
            let before = ledger.noted();
            assert_eq!(file.write_at(&vec![1; bytes], 0).unwrap(), bytes);
            let after = ledger.noted();
            let noted = (after.0 - before.0, after.1 - before.1);
            let enough = noted.0 >= data && noted.1 >= all && (flags != 0 || noted == (0, 0));
            assert!(enough, "{how}: {bytes} bytes with {flags:o}: {noted:?} instead of {:?}", (data, all));
        }
    }
}

#[test]
fn bytes_are_durable() {
    for path in paths() {
        let ledger = Arc::new(Ledger::default());
        let mounted = mount(Arc::clone(&ledger) as _, Options { cache: Cache::None, ..plain(path) });
        check(&format!("{path:?}"), &mounted.path("file"), &ledger);
        mounted.stop();
    }
}

#[test]
fn extents_and_passthrough_writes_are_durable() {
    for path in paths() {
        for passes in [false, true] {
            let (ledger, there) = far();
            let source = Through {
                null: Null::default(),
                far: there.path("file"),
                passes,
                opened: Mutex::default(),
                number: AtomicU64::default(),
            };
            let options = Options { cache: Cache::None, passthrough: None, ..plain(path) };
            let mounted = mount(Arc::new(source), options);
            let verdict = mounted.export().explain().passthrough.clone();
            let passed = verdict.used;
            if verdict.reason.as_ref().is_some_and(|reason| reason.contains("this kernel has no FUSE passthrough")) {
                ferry_skip::skip!("{verdict:?}");
                assert!(!passed);
            } else {
                assert_eq!(passed, passes && rustix::process::geteuid().is_root(), "{verdict:?}");
            }
            let written = mounted.export().stats().written_bytes;
            check(&format!("{path:?}, passed {passed}"), &mounted.path("file"), &ledger);
            assert_eq!(mounted.export().stats().written_bytes == written, passed, "who wrote");
            mounted.stop();
            there.stop();
        }
    }
}

/// The other direction: a `pmem` image on a file has that file's disk write.
#[test]
fn an_image_of_pmem_is_durable_where_it_is() {
    use ferry_mem::pmem;
    /// Where bytes are written, in blocks of their own.
    const PLACES: [u64; 2] = [0, 64 << 10];
    let commit = Some(std::time::Duration::ZERO);
    for path in paths() {
        let disk = Disk::new();
        let mounted = mount(Arc::clone(&disk) as _, plain(path));
        let image = pmem::open(&mounted.path("file"), &pmem::Options { commit, ..Default::default() }).unwrap();
        let (cx, name) = (Caller::default(), Name::new(b"safe").unwrap());
        let new = CreateArgs { mode: 0o644, ..CreateArgs::default() };
        let (entry, handle) = image.create(&cx, Ino::ROOT, name, &new, OFlags::RDWR).unwrap();
        let tmp = tempfile::tempdir().unwrap();
        let left = tmp.path().join("left");
        let found = || {
            disk.after_a_cut(&left);
            let left = pmem::open(&left, &pmem::Options { read_only: true, ..Default::default() }).ok()?;
            let entry = left.lookup(&cx, Ino::ROOT, name).ok()?;
            let handle = left.open(&cx, entry.ino, OFlags::RDONLY).unwrap();
            let bytes = PLACES.map(|place| {
                let mut bytes = Vec::new();
                // Less than what is answered as an extent.
                let read = left.read(&cx, &range(entry.ino, handle, place, 10), &mut bytes).unwrap();
                assert_eq!(read.bytes(), Some(bytes.len()));
                bytes
            });
            left.release(&cx, entry.ino, handle);
            left.forget(entry.ino, 1);
            Some(bytes)
        };
        assert_eq!(found(), None, "{path:?}: there before fsync");
        // Made (the end first: a file that grows has its old end made durable); one range and two that are written in place; all.
        let rounds: [(u8, &[usize], _); 4] =
            [(1, &[1, 0], Some(false)), (2, &[0], Some(true)), (3, &[0, 1], Some(true)), (4, &[1], None)];
        let mut written = [vec![0; 10], vec![0; 10]];
        for (round, places, data_only) in rounds {
            let syncs = disk.syncs.load(Ordering::SeqCst);
            for &place in places {
                written[place] = vec![round; 10];
                let range = range(entry.ino, handle, PLACES[place], 10);
                assert_eq!(image.write(&cx, &range, &mut &written[place][..]).unwrap().bytes(), Some(10));
            }
            assert_eq!(disk.syncs.load(Ordering::SeqCst), syncs, "{path:?}, round {round}: nobody asked for that");
            match data_only {
                Some(data_only) => drop(image.fsync(&cx, entry.ino, handle, data_only).unwrap()),
                None => image.syncfs(&cx, Ino::ROOT).unwrap(),
            }
            assert_eq!(found().as_ref(), Some(&written), "{path:?}, round {round}: what was synced is not there");
        }
        image.release(&cx, entry.ino, handle);
        image.forget(entry.ino, 1);
        drop(image);
        mounted.stop();
    }
}

fn range(ino: Ino, handle: Handle, offset: u64, len: u32) -> IoRange {
    IoRange { ino, handle, offset, len, flags: OFlags::RDWR, clear_privileges: false, owner: None }
}
