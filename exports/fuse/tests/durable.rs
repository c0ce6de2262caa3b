//! `O_SYNC` and `O_DSYNC`: a write is answered when what was written is durable, on whichever way it goes.
//!
//! The data of one mount's file are those of another mount's, whose source notes what it was asked to make durable.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

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
    Attr, Backing, Caller, Data, Entry, Extent, Features, FileSystem, Handle, Ino, Input, IoRange, Name, OFlags,
    Result, SetAttr,
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
fn extents_and_what_is_passed_through_are_durable() {
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
                println!("skipped: {verdict:?}");
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
