//! Handlers that panic, block, hang and lie: an error to their caller alone.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::sources::{Null, block_until};
use common::{Mounted, mount, paths, plain, stay_on, wait_until};
use ferry_fuse::{Cache, Options, Path};
use ferry_vfs::{
    Attr, Caller, Data, Entry, Errno, FileSystem, Handle, Ino, IoRange, Name, OFlags, Output, Result, SetAttr,
};

/// The maximum number of rounds of a measurement.
const ROUNDS: u32 = 5;

fn null(path: Path, options: impl Fn(&mut Options)) -> (Arc<Null>, Mounted) {
    let source = Arc::new(Null::default());
    let mut chosen = Options { cache: Cache::None, ring_depth: 2, threads: 1, ..plain(path) };
    options(&mut chosen);
    let mounted = mount(Arc::clone(&source) as _, chosen);
    (source, mounted)
}

fn read(mounted: &Mounted, name: &str) -> std::io::Result<usize> {
    File::open(mounted.path(name))?.read_at(&mut [0; 512], 0)
}

fn errno(outcome: std::io::Result<usize>) -> Option<i32> {
    outcome.err().and_then(|error| error.raw_os_error())
}

#[test]
fn a_panic_fails_only_its_caller() {
    for path in paths() {
        let (_, mounted) = null(path, |_| {});
        for _ in 0..20 {
            assert_eq!(errno(read(&mounted, "panics")), Some(libc::EIO));
            assert_eq!(errno(read(&mounted, "lookup-panics")), Some(libc::EIO));
            assert_eq!(read(&mounted, "file").unwrap(), 512);
        }
        mounted.stop();
    }
}

#[test]
fn wrong_sizes_reach_no_client() {
    for path in paths() {
        let (_, mounted) = null(path, |_| {});
        let file = File::open(mounted.path("lies")).unwrap();
        let mut buffer = [0; 4096];
        match file.read_at(&mut buffer[..100], 0) {
            Ok(count) => assert!(count <= 100),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EIO)),
        }
        assert!(buffer[100..].iter().all(|byte| *byte == 0));
        assert_eq!(read(&mounted, "short").unwrap(), 5);
        assert_eq!(read(&mounted, "file").unwrap(), 512);
        mounted.stop();
    }
}

#[test]
fn a_handler_that_blocks_stalls_neither_its_cpu_nor_the_mount() {
    for path in paths() {
        let (source, mounted) = null(path, |_| {});
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    stay_on(0);
                    assert_eq!(read(&mounted, "hangs").unwrap(), 512);
                });
            }
            stay_on(0);
            wait_until(&format!("all are blocked at once by {path:?}"), || source.held.load(Ordering::SeqCst) == 6);
            let hundred_reads = || {
                let start = Instant::now();
                for _ in 0..100 {
                    assert_eq!(read(&mounted, "file").unwrap(), 512);
                }
                start.elapsed()
            };
            // Only the fastest round counts: the machine may be busy during the others. If each read waited until a handler is
            // seen to be blocked, it would be 2 s.
            let took = (0..ROUNDS).map(|_| hundred_reads()).find(|took| *took < Duration::from_secs(2));
            assert!(took.is_some(), "100 reads took 2 s or more in each of {ROUNDS} rounds");
            assert_eq!(source.held.load(Ordering::SeqCst), 6);
            source.let_go.store(true, Ordering::SeqCst);
        });
        assert_eq!(read(&mounted, "file").unwrap(), 512);
        mounted.stop();
    }
}

/// A source whose lookups of names with an `x` hang. It has no files.
#[derive(Default)]
struct Doors(Null);

impl FileSystem for Doors {
    fn lookup(&self, _: &Caller<'_>, _: Ino, name: Name<'_>) -> Result<Entry> {
        if name.as_bytes().contains(&b'x') {
            self.0.held.fetch_add(1, Ordering::SeqCst);
            block_until(|| self.0.let_go.load(Ordering::SeqCst));
            self.0.held.fetch_sub(1, Ordering::SeqCst);
        }
        Err(Errno::NOENT)
    }
    fn getattr(&self, caller: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        self.0.getattr(caller, ino, handle)
    }
}

#[test]
fn look_ups_that_block_stall_neither_their_cpu_nor_the_mount() {
    const HANGING: u64 = 12;
    // Those that come later take entries that were added for those that wait.
    for (path, pace) in paths().into_iter().flat_map(|path| [0, 3, 7, 11].map(|pace| (path, pace))) {
        let source = Arc::new(Doors::default());
        let mounted = mount(Arc::clone(&source) as _, Options { cache: Cache::None, ring_depth: 2, ..plain(path) });
        std::thread::scope(|scope| {
            for number in 0..HANGING {
                let name = mounted.path(&format!("x{number}"));
                scope.spawn(move || {
                    stay_on(0);
                    std::thread::sleep(Duration::from_millis(number * pace % 40));
                    assert!(!name.exists());
                });
            }
            stay_on(0);
            let held = || source.0.held.load(Ordering::SeqCst);
            // Nothing else is asked meanwhile, that could set free what was left behind.
            wait_until(&format!("all are blocked at once by {path:?}"), || held() == HANGING);
            for number in 0..20 {
                assert!(!mounted.path(&format!("free{number}")).exists());
            }
            source.0.let_go.store(true, Ordering::SeqCst);
        });
        mounted.stop();
    }
}

#[test]
fn slow_handlers_of_many_callers_all_return() {
    for path in paths() {
        let (_, mounted) = null(path, |_| {});
        std::thread::scope(|scope| {
            for thread in 0..12 {
                let mounted = &mounted;
                scope.spawn(move || {
                    for name in ["slow", "file", "napping", "panics", "file"] {
                        let outcome = read(mounted, name);
                        assert_eq!(outcome.is_err(), name == "panics", "thread {thread}: {outcome:?}");
                    }
                });
            }
        });
        mounted.stop();
    }
}

#[test]
fn a_hanging_handler_is_aborted_and_its_late_reply_is_dropped() {
    for path in paths() {
        let (source, mounted) = null(path, |options| options.handler_timeout = Duration::from_millis(300));
        let start = Instant::now();
        assert_eq!(errno(read(&mounted, "hangs")), Some(libc::EIO));
        assert!(start.elapsed() < Duration::from_secs(3), "took {:?}", start.elapsed());
        // Its entry, or its thread's buffers, are used by others before it comes back.
        for round in 0..50 {
            if round == 25 {
                source.let_go.store(true, Ordering::SeqCst);
            }
            let mut buffer = [1; 512];
            let count = File::open(mounted.path("short")).unwrap().read_at(&mut buffer, 0).unwrap();
            assert_eq!(&buffer[..count], b"short");
            std::thread::sleep(Duration::from_millis(1));
        }
        wait_until("the handler comes back", || source.held.load(Ordering::SeqCst) == 0);
        assert_eq!(read(&mounted, "file").unwrap(), 512);
        mounted.stop();
    }
}

/// Threads that one CPU's ring has at most, but for those that were given up; readers of /dev/fuse are twice as many.
const RING_THREADS: usize = 32;

#[test]
fn handlers_that_never_return_leave_room_for_others() {
    // More than there may be threads on either path.
    const CALLERS: usize = 2 * RING_THREADS + 8;
    for path in paths() {
        let (source, mounted) = null(path, |options| options.handler_timeout = Duration::from_millis(500));
        std::thread::scope(|scope| {
            let hang = || {
                stay_on(0);
                errno(read(&mounted, "hangs"))
            };
            let callers: Vec<_> = (0..CALLERS).map(|_| scope.spawn(hang)).collect();
            for (number, caller) in callers.into_iter().enumerate() {
                assert_eq!(caller.join().unwrap(), Some(libc::EIO), "caller {number} by {path:?}");
            }
            let others = scope.spawn(|| {
                stay_on(0);
                (0..20).map(|_| read(&mounted, "file").unwrap()).sum::<usize>()
            });
            assert_eq!(others.join().unwrap(), 20 * 512, "{path:?}");
        });
        assert_eq!(source.held.load(Ordering::SeqCst), CALLERS as u64, "none has come back");
        source.let_go.store(true, Ordering::SeqCst);
        wait_until("the handlers come back", || source.held.load(Ordering::SeqCst) == 0);
        assert_eq!(read(&mounted, "file").unwrap(), 512);
        mounted.stop();
    }
}

#[test]
fn the_last_thread_of_a_ring_is_released() {
    for path in paths().into_iter().filter(|path| *path == Path::Uring) {
        let (source, mounted) = null(path, |options| options.handler_timeout = Duration::ZERO);
        let held = || usize::try_from(source.held.load(Ordering::SeqCst)).unwrap();
        // In a thread of its own, for its children are bound to the CPU that it is bound to.
        let mut children = std::thread::scope(|scope| {
            let start = || {
                stay_on(0);
                let start = |number| {
                    let mut cat = std::process::Command::new("cat");
                    let cat = cat.arg(mounted.path("hangs"));
                    let child = cat.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
                    wait_until("one more blocks", || held() == number);
                    child
                };
                (1..=RING_THREADS).map(start).collect::<Vec<_>>()
            };
            scope.spawn(start).join().unwrap()
        });
        // It is detected as blocked, and no thread is free.
        std::thread::sleep(Duration::from_millis(200));
        let mut last = children.pop().unwrap();
        last.kill().unwrap();
        wait_until("the last one ends", || last.try_wait().unwrap().is_some());
        assert_eq!(held(), RING_THREADS);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                stay_on(0);
                assert_eq!(read(&mounted, "file").unwrap(), 512);
            });
        });
        source.let_go.store(true, Ordering::SeqCst);
        for mut child in children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        wait_until("the handlers come back", || held() == 0);
        mounted.stop();
    }
}

/// A source whose copies hang.
#[derive(Default)]
struct Copier(Null);

impl FileSystem for Copier {
    fn lookup(&self, caller: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        self.0.lookup(caller, dir, name)
    }
    fn getattr(&self, caller: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        self.0.getattr(caller, ino, handle)
    }
    fn setattr(&self, caller: &Caller<'_>, ino: Ino, handle: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        self.0.setattr(caller, ino, handle, set)
    }
    fn open(&self, caller: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        self.0.open(caller, ino, flags)
    }
    fn read(&self, caller: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        self.0.read(caller, at, out)
    }
    fn copy_file_range(&self, _: &Caller<'_>, copy: &ferry_vfs::CopyRange) -> Result<u64> {
        self.0.held.fetch_add(1, Ordering::SeqCst);
        block_until(|| self.0.let_go.load(Ordering::SeqCst));
        self.0.held.fetch_sub(1, Ordering::SeqCst);
        Ok(copy.len)
    }
}

#[test]
fn copies_that_never_end_are_aborted() {
    for path in paths() {
        let copier = |timeout: Duration| {
            let source = Arc::new(Copier::default());
            let options = Options { cache: Cache::None, ring_depth: 2, handler_timeout: timeout, ..plain(path) };
            let mounted = mount(Arc::clone(&source) as _, options);
            (source, mounted)
        };
        let held = |source: &Copier| source.0.held.load(Ordering::SeqCst);
        let finish = |source: &Copier, mounted: Mounted| {
            assert_eq!(held(source), 1, "it was given up, and goes on");
            assert_eq!(read(&mounted, "file").unwrap(), 512);
            source.0.let_go.store(true, Ordering::SeqCst);
            wait_until("the copy comes back", || held(source) == 0);
            assert_eq!(read(&mounted, "file").unwrap(), 512);
            mounted.stop();
        };

        let (source, mounted) = copier(Duration::from_millis(300));
        let from = File::open(mounted.path("file")).unwrap();
        let to = File::options().write(true).open(mounted.path("short")).unwrap();
        let start = Instant::now();
        let copied = rustix::fs::copy_file_range(&from, None, &to, None, 4096);
        assert_eq!(copied, Err(Errno::IO), "{path:?}");
        assert!(start.elapsed() < Duration::from_secs(3), "took {:?}", start.elapsed());
        drop((from, to));
        finish(&source, mounted);

        let (source, mounted) = copier(Duration::ZERO);
        let mut cp = std::process::Command::new("cp");
        // It would look for holes first, in a file that takes no room.
        let cp = cp.arg("--sparse=never").arg(mounted.path("file")).arg(mounted.path("short"));
        let mut cp = cp.spawn().unwrap();
        wait_until("it blocks", || held(&source) == 1);
        cp.kill().unwrap();
        wait_until("a caller who is killed is let go", || cp.try_wait().unwrap().is_some());
        finish(&source, mounted);
    }
}

#[test]
fn a_killed_caller_is_released() {
    for path in paths() {
        let (source, mounted) = null(path, |_| {});
        let mut child =
            std::process::Command::new("cat").arg(mounted.path("hangs")).stderr(Stdio::null()).spawn().unwrap();
        wait_until("it blocks", || source.held.load(Ordering::SeqCst) == 1);
        let start = Instant::now();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(start.elapsed() < Duration::from_secs(4), "took {:?}", start.elapsed());
        assert_eq!(read(&mounted, "file").unwrap(), 512);
        source.let_go.store(true, Ordering::SeqCst);
        wait_until("the handler comes back", || source.held.load(Ordering::SeqCst) == 0);
        mounted.stop();
    }
}

#[test]
fn a_wait_for_a_lock_ends_when_its_caller_is_interrupted() {
    for path in paths() {
        let tmp = tempfile::tempdir().unwrap();
        std::fs::write(tmp.path().join("f"), "").unwrap();
        let source = ferry_dir::Dir::open(tmp.path(), ferry_dir::Options::default()).unwrap();
        let mounted = mount(Arc::new(source), Options { ring_depth: 2, ..plain(path) });
        let held = File::open(mounted.path("f")).unwrap();
        rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
        // More waiters than a ring has entries.
        let waiters: Vec<_> = (0..10)
            .map(|_| {
                let mut flock = std::process::Command::new("flock");
                flock.arg(mounted.path("f")).arg("true").spawn().unwrap()
            })
            .collect();
        // A signal to one whose request a ring is just taking may be lost in the kernel.
        wait_until("all wait for the lock", || mounted.export().share().usage().parked_locks == 10);
        assert_eq!(std::fs::read_dir(&mounted.at).unwrap().count(), 1, "others are served");
        let (interrupted, patient) = waiters.into_iter().partition::<Vec<_>, _>(|child| child.id() % 2 == 0);
        for mut child in interrupted {
            let pid = rustix::process::Pid::from_child(&child);
            // Not SIGINT, which is ignored below whatever a shell has started in the background.
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
            let mut status = None;
            wait_until("an interrupted waiter ends", || {
                status = child.try_wait().unwrap();
                status.is_some()
            });
            assert!(!status.unwrap().success());
        }
        rustix::fs::flock(&held, rustix::fs::FlockOperation::Unlock).unwrap();
        for mut child in patient {
            let mut status = None;
            wait_until("a patient waiter gets the lock", || {
                status = child.try_wait().unwrap();
                status.is_some()
            });
            assert!(status.unwrap().success());
        }
        // The kernel sends the RELEASE of a process that has ended some time later.
        let lock = || rustix::fs::flock(&held, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        wait_until("nobody keeps it", || lock().is_ok());
        drop(held);
        mounted.stop();
    }
}
