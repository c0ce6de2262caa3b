//! Changes are told while handlers are blocked that keep the kernel from being told of others.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::sources::block_until;
use common::{Mounted, mount, paths, plain, wait_until};
use ferry_fuse::{Cache, Options, Path};
use ferry_vfs::{
    Attr, Caller, Change, Changes, CreateArgs, Data, Entry, Errno, Features, FileSystem, FileType, Handle, Ino, Input,
    IoRange, Lock, LockOutcome, Name, OFlags, Result, SessionId, SetAttr, Waiter,
};
use rustix::fs::{FlockOperation, flock};

const BLOCKED: Ino = Ino(2);
const FREE: Ino = Ino(3);
const BUSY: Ino = Ino(4);
const GOES: Ino = Ino(5);
const LOCKED: Ino = Ino(6);

/// Two directories. To make a file in `blocked`, and to write to `free/busy`, takes as long as the test likes;
/// `free/goes` and `free/busy` are there until they are removed.
#[derive(Default)]
struct Rooms {
    changes: Changes,
    gone: AtomicBool,
    held: AtomicU64,
    let_go: AtomicBool,
}

impl Rooms {
    fn attr(ino: Ino) -> Attr {
        let (kind, mode) = match ino {
            Ino::ROOT | BLOCKED | FREE => (FileType::Directory, 0o755),
            _ => (FileType::RegularFile, 0o644),
        };
        Attr { ino: ino.0, mode: kind.as_raw_mode() | mode, nlink: 1, blksize: 4096, ..Attr::default() }
    }

    fn block(&self) {
        self.held.fetch_add(1, Ordering::SeqCst);
        block_until(|| self.let_go.load(Ordering::SeqCst));
        self.held.fetch_sub(1, Ordering::SeqCst);
    }

    fn publish(&self, change: &Change) {
        self.changes.publish(SessionId::default(), || change.clone());
    }

    /// Removes `goes` behind the client's back.
    fn remove(&self) {
        self.gone.store(true, Ordering::SeqCst);
        let name = Name::new(b"goes").unwrap().to_buf();
        self.publish(&Change::Removed { dir: FREE, name, ino: GOES });
    }
}

impl FileSystem for Rooms {
    fn features(&self) -> Features {
        Features { flock: true, ..Features::default() }
    }
    fn changes(&self) -> Option<&Changes> {
        Some(&self.changes)
    }
    fn lookup(&self, _: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        let gone = self.gone.load(Ordering::SeqCst);
        let ino = match (dir, name.as_bytes()) {
            (Ino::ROOT, b"blocked") => BLOCKED,
            (Ino::ROOT, b"free") => FREE,
            (FREE, b"busy") if !gone => BUSY,
            (FREE, b"goes") if !gone => GOES,
            (FREE, b"locked") => LOCKED,
            _ => return Err(Errno::NOENT),
        };
        Ok(Entry { ino, generation: 0, attr: Self::attr(ino) })
    }
    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        Ok(Self::attr(ino))
    }
    fn setattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>, _: &SetAttr) -> Result<Attr> {
        Ok(Self::attr(ino))
    }
    fn create(&self, _: &Caller<'_>, _: Ino, _: Name<'_>, _: &CreateArgs, _: OFlags) -> Result<(Entry, Handle)> {
        self.block();
        Err(Errno::PERM)
    }
    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(1))
    }
    fn write(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Input) -> Result<Data> {
        self.block();
        Ok(Data::Bytes(at.len as usize))
    }
    fn set_lock(&self, _: &Caller<'_>, _: Ino, _: Handle, _: &Lock, wait: Option<Waiter>) -> Result<LockOutcome> {
        if let Some(waiter) = wait {
            waiter.dismiss();
        }
        Ok(LockOutcome::Done)
    }
}

fn rooms(path: Path) -> (Arc<Rooms>, Mounted) {
    let source = Arc::new(Rooms::default());
    let mounted = mount(Arc::clone(&source) as _, Options { cache: Cache::Always, ring_depth: 2, ..plain(path) });
    (source, mounted)
}

/// What takes no longer than this does not wait for a handler that is blocked until the test ends.
const AT_ONCE: Duration = Duration::from_secs(5);

/// Has a handler blocked, runs the test, and lets the handler go.
fn while_blocked(path: Path, block: impl FnOnce(&Mounted) + Send, test: impl FnOnce(&Rooms, &Mounted)) {
    let (source, mounted) = rooms(path);
    std::thread::scope(|scope| {
        let blocked = scope.spawn(|| block(&mounted));
        wait_until("the handler is blocked", || source.held.load(Ordering::SeqCst) == 1);
        let (source, mounted) = (&source, &mounted);
        // If it fails, the handler continues.
        let tested = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(source, mounted)));
        let held = source.held.load(Ordering::SeqCst);
        source.let_go.store(true, Ordering::SeqCst);
        blocked.join().unwrap();
        if let Err(panic) = tested {
            std::panic::resume_unwind(panic);
        }
        assert_eq!(held, 1, "it was blocked until the end");
    });
    mounted.stop();
}

fn lock_and_unlock(mounted: &Mounted, when: &str) {
    let begin = Instant::now();
    let file = File::open(mounted.path("free/locked")).unwrap();
    flock(&file, FlockOperation::LockExclusive).unwrap();
    assert!(begin.elapsed() < AT_ONCE, "a lock took {:?} {when}", begin.elapsed());
}

#[test]
fn changes_elsewhere_are_notified_while_a_directory_is_locked() {
    for path in paths() {
        let make = |mounted: &Mounted| {
            let error = File::create_new(mounted.path("blocked/file")).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        };
        while_blocked(path, make, |source, mounted| {
            assert!(mounted.path("free/goes").exists());
            // The kernel keeps whoever tells it of these: the directory is the handler's. It need not for long.
            for name in [b"one", b"two"] {
                let name = Name::new(name).unwrap().to_buf();
                source.publish(&Change::Entry { dir: BLOCKED, name });
            }
            source.remove();
            wait_until("a name elsewhere is forgotten", || !mounted.path("free/goes").exists());
            lock_and_unlock(mounted, "while a directory is held");
            // More that is told too late.
            for number in 0..10 {
                let name = Name::new(format!("more{number}").as_bytes()).unwrap().to_buf();
                source.publish(&Change::Entry { dir: BLOCKED, name });
                lock_and_unlock(mounted, "while a directory is held, and changes");
            }
            // One waits, and one tells; and as many of the other test. Those of a mount that is gone are, in a moment.
            wait_until("there is not a thread for each change", || common::threads_named("fuse-notify") <= 6);
        });
    }
}

#[test]
fn a_file_removed_during_a_write_does_not_block_its_directory() {
    for path in paths() {
        let write = |mounted: &Mounted| {
            let file = File::options().write(true).open(mounted.path("free/busy")).unwrap();
            assert_eq!(file.write_at(b"text", 0).unwrap(), 4);
        };
        while_blocked(path, write, |source, mounted| {
            source.gone.store(true, Ordering::SeqCst);
            let name = Name::new(b"busy").unwrap().to_buf();
            source.publish(&Change::Removed { dir: FREE, name, ino: BUSY });
            wait_until("the name is forgotten", || !mounted.path("free/busy").exists());
            let begin = Instant::now();
            for number in 0..10 {
                assert!(!mounted.path(&format!("free/other{number}")).exists());
            }
            assert!(begin.elapsed() < AT_ONCE, "lookups took {:?}", begin.elapsed());
            lock_and_unlock(mounted, "while what was removed is written to");
        });
    }
}
