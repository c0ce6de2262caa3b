//! Data of distant servers: a waiting transfer delays no other request.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::sources::{Null, Relay};
use common::{Mounted, mount, paths, plain, stay_on, wait_until};
use ferry_engine::io_hints;
use ferry_fuse::{Cache, Options, Path};
use ferry_vfs::{Attr, Caller, Data, Entry, FileSystem, Handle, Ino, Input, IoRange, Name, OFlags, Output, Result};

/// A mount whose files lie in another mount, whose READs misbehave as their names say.
fn relay(path: Path, options: impl Fn(&mut Options)) -> (Arc<Null>, Mounted, Mounted) {
    let null = Arc::new(Null::default());
    let far = mount(Arc::clone(&null) as _, Options { cache: Cache::None, ..plain(Path::Devfuse) });
    let source = Arc::new(Relay { null: Null::default(), far: far.at.clone() });
    let mut chosen = Options { cache: Cache::None, ring_depth: 2, ..plain(path) };
    options(&mut chosen);
    let near = mount(source, chosen);
    (null, far, near)
}

fn read(mounted: &Mounted, name: &str) -> std::io::Result<usize> {
    File::open(mounted.path(name))?.read_at(&mut [0; 512], 0)
}

#[test]
fn a_slow_transfer_does_not_delay_its_cpu() {
    // What is blocked is relieved after 20 ms anyway: this is sooner.
    const SOON: Duration = Duration::from_millis(12);
    for path in paths().into_iter().filter(|path| *path == Path::Uring) {
        let (null, far, near) = relay(path, |_| {});
        assert_eq!(read(&near, "file").unwrap(), 512);
        let mut waits = Vec::new();
        for _ in 0..10 {
            std::thread::scope(|scope| {
                let calls = null.calls.load(Ordering::SeqCst);
                let reader = scope.spawn(|| {
                    stay_on(0);
                    read(&near, "slow").unwrap()
                });
                stay_on(0);
                wait_until("it reads", || null.calls.load(Ordering::SeqCst) > calls);
                let start = Instant::now();
                assert!(std::fs::metadata(near.path("file")).is_ok());
                waits.push(start.elapsed());
                assert_eq!(reader.join().unwrap(), 512);
            });
        }
        assert!(waits.iter().any(|wait| *wait < SOON), "{waits:?}");
        near.stop();
        far.stop();
    }
}

#[test]
fn many_slow_transfers_return_and_others_are_served() {
    // More than four times the CPUs, as many as io_uring has threads for what waits unless it is told otherwise.
    const HANGING: u64 = 12;
    for path in paths() {
        let (null, far, near) = relay(path, |_| {});
        std::thread::scope(|scope| {
            for _ in 0..HANGING {
                scope.spawn(|| {
                    stay_on(0);
                    assert_eq!(read(&near, "hangs").unwrap(), 512);
                });
            }
            wait_until("all wait at once", || null.held.load(Ordering::SeqCst) == HANGING);
            for _ in 0..20 {
                assert_eq!(read(&near, "file").unwrap(), 512);
                assert!(std::fs::metadata(near.path("file")).is_ok());
            }
            null.let_go.store(true, Ordering::SeqCst);
        });
        near.stop();
        far.stop();
    }
}

/// What the kernel cannot cancel: pages of another mount that is cached, and does not answer.
struct DeferredTransfer {
    relay: Relay,
    /// io_uring is not asked to read, as if the file system below could not do without waiting.
    by_worker: bool,
    null: Arc<Null>,
    /// Set when all that was written was what its caller had handed over.
    kept: AtomicBool,
}

impl FileSystem for DeferredTransfer {
    fn lookup(&self, caller: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        self.relay.lookup(caller, dir, name)
    }
    fn getattr(&self, caller: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        self.relay.getattr(caller, ino, handle)
    }
    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(1))
    }
    fn read(&self, caller: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        if !self.null.is_named(at.ino, "hangs") {
            return self.relay.null.read(caller, at, out);
        }
        let data = self.relay.read(caller, at, out)?;
        if let (true, Data::Extent(extent)) = (self.by_worker, &data) {
            extent.file.add_io_hints(io_hints::PROBED | io_hints::READ_CANNOT_TRY);
        }
        Ok(data)
    }
    /// Has the data of a write lie in their place until the far mount has answered, and looks at them then.
    fn write(&self, _: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        self.null.let_go.store(true, Ordering::SeqCst);
        while self.null.held.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Whoever reads the far mount has its pages now, and moves them.
        std::thread::sleep(Duration::from_millis(50));
        let mut bytes = vec![0; at.len as usize];
        let taken = input.take(&mut bytes);
        self.kept.store(taken > 0 && bytes[..taken].iter().all(|byte| *byte == PATTERN), Ordering::SeqCst);
        Ok(Data::Bytes(taken))
    }
}

const PATTERN: u8 = 0x5a;

#[test]
fn late_data_of_an_uncancellable_transfer_are_dropped() {
    stay_on(0);
    for (path, by_worker) in paths().into_iter().flat_map(|path| [(path, false), (path, true)]) {
        let null = Arc::new(Null::default());
        let far = mount(Arc::clone(&null) as _, plain(Path::Devfuse));
        let relay = Relay { null: Null::default(), far: far.at.clone() };
        let source =
            Arc::new(DeferredTransfer { relay, by_worker, null: Arc::clone(&null), kept: AtomicBool::new(false) });
        let options =
            Options { cache: Cache::None, ring_depth: 1, handler_timeout: Duration::from_millis(300), ..plain(path) };
        let near = mount(Arc::clone(&source) as _, options);
        let start = Instant::now();
        let error = read(&near, "hangs").expect_err("nobody answers");
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{path:?} {by_worker}");
        assert!(start.elapsed() < Duration::from_secs(3), "{path:?} {by_worker} took {:?}", start.elapsed());
        assert_eq!(null.held.load(Ordering::SeqCst), 1, "the transfer goes on");
        for _ in 0..20 {
            let mut buffer = [1; 512];
            let count = File::open(near.path("short")).unwrap().read_at(&mut buffer, 0).unwrap();
            assert_eq!(&buffer[..count], b"short");
        }
        // Its entry is the next one to be used.
        let file = File::options().write(true).open(near.path("file")).unwrap();
        file.write_all_at(&[PATTERN; 4096], 0).unwrap();
        assert!(source.kept.load(Ordering::SeqCst), "{path:?} {by_worker}: late data came into somebody else's");
        assert_eq!(null.held.load(Ordering::SeqCst), 0);
        assert_eq!(read(&near, "file").unwrap(), 512);
        drop(file);
        near.stop();
        far.stop();
    }
}

/// A source whose handlers wait for another mount, as they do for a disk or a server: a sleep that only death ends.
struct Behind {
    null: Null,
    far: std::path::PathBuf,
}

impl FileSystem for Behind {
    fn lookup(&self, caller: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        if name.as_bytes() == b"lies" {
            self.wait();
        }
        self.null.lookup(caller, dir, name)
    }
    fn getattr(&self, caller: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        self.null.getattr(caller, ino, handle)
    }
    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(1))
    }
    fn read(&self, caller: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        if self.null.is_named(at.ino, "hangs") {
            self.wait();
            return Ok(Data::Bytes(0));
        }
        if self.null.is_named(at.ino, "slow") {
            // Long enough to be relieved: the reply is sent by whoever has the queue then.
            std::thread::sleep(Duration::from_millis(60));
            return Ok(Data::Bytes(0));
        }
        self.null.read(caller, at, out)
    }
}

impl Behind {
    fn wait(&self) {
        let file = File::open(self.far.join("hangs")).expect("it can be opened");
        let _ = file.read_at(&mut [0; 512], 0);
    }
}

#[test]
fn a_handler_that_cannot_be_woken_delays_no_other() {
    /// Callers who come after it, more than a ring has entries.
    const OTHERS: usize = 8;
    for path in paths() {
        let null = Arc::new(Null::default());
        let far = mount(Arc::clone(&null) as _, plain(Path::Devfuse));
        let source = Arc::new(Behind { null: Null::default(), far: far.at.clone() });
        let near = mount(source, Options { cache: Cache::None, ring_depth: 4, ..plain(path) });
        let done = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            assert_eq!(read(&near, "file").unwrap(), 512);
            let hangs = scope.spawn(|| {
                stay_on(0);
                assert_eq!(read(&near, "hangs").unwrap(), 0);
            });
            wait_until("it hangs", || null.held.load(Ordering::SeqCst) == 1);
            // Whoever comes before it is seen to be blocked may have to wait for it.
            std::thread::sleep(Duration::from_millis(100));
            for _ in 0..OTHERS {
                scope.spawn(|| {
                    stay_on(0);
                    for _ in 0..3 {
                        assert_eq!(read(&near, "slow").unwrap(), 0);
                        assert_eq!(read(&near, "file").unwrap(), 512);
                    }
                    done.fetch_add(1, Ordering::SeqCst);
                });
            }
            let start = Instant::now();
            while done.load(Ordering::SeqCst) < OTHERS && start.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(5));
            }
            let done = done.load(Ordering::SeqCst);
            let still = !hangs.is_finished();
            null.let_go.store(true, Ordering::SeqCst);
            assert!(still, "it was to hang");
            assert_eq!(done, OTHERS, "others wait by {path:?}");
        });
        near.stop();
        far.stop();
    }
}

#[test]
fn a_random_reader_sends_large_requests_to_a_source_that_waits() {
    // What Linux reads ahead unless it is told otherwise, and so asks for.
    const USUAL: u64 = 128 << 10;
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("sysfs is root's");
        return;
    }
    for path in paths() {
        let source = Arc::new(Null { waits: true, ..Null::default() });
        let near = mount(Arc::clone(&source) as _, Options { cache: Cache::Auto, ..plain(path) });
        let mut buffer = vec![1; 1 << 20];
        File::open(near.path("file")).unwrap().read_exact_at(&mut buffer, 300 << 20).unwrap();
        assert!(buffer.iter().all(|byte| *byte == 0));
        let asked = source.longest.load(Ordering::Relaxed);
        assert!(asked > USUAL, "{path:?}: {asked} bytes at most");
        near.stop();
    }
}

#[test]
fn a_mount_ends_while_transfers_are_under_way() {
    for path in paths() {
        let (null, far, near) = relay(path, |_| {});
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert!(read(&near, "hangs").is_err()));
            }
            wait_until("they wait", || null.held.load(Ordering::SeqCst) == 4);
            common::abort(&near.at, near.export().connection_number());
            near.export().wait();
        });
        null.let_go.store(true, Ordering::SeqCst);
        near.stop();
        far.stop();
    }
}

#[test]
fn a_file_in_memory_and_one_on_disk_are_written_durably() {
    for path in paths() {
        for directory in ["/dev/shm", "/var/tmp"] {
            let tmp = tempfile::tempdir_in(directory).unwrap();
            let source = ferry_dir::Dir::open(tmp.path(), ferry_dir::Options::default()).unwrap();
            let mounted = mount(Arc::new(source), plain(path));
            let bytes: Vec<u8> = (0..300_000_u32).map(|at| at.to_le_bytes()[0]).collect();
            let mut options = File::options();
            std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_SYNC);
            let file = options.write(true).create(true).truncate(true).open(mounted.path("f")).unwrap();
            file.write_all_at(&bytes, 0).unwrap();
            file.write_all_at(&bytes, 123_457).unwrap();
            file.sync_all().unwrap();
            let back = std::fs::read(tmp.path().join("f")).unwrap();
            assert!(back[..123_457] == bytes[..123_457] && back[123_457..] == bytes, "{path:?} {directory}");
            assert!(std::fs::read(mounted.path("f")).unwrap() == back, "{path:?} {directory}");
            drop(file);
            mounted.stop();
        }
    }
}
