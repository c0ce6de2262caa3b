//! Mounts of a 9P server on this host (`ferry mount 9p:...`): several of one server, many callers, and a server that is
//! killed and restarted.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferry_tests::mounts::{Cell, MountOptions, Mounted, NinePServer, ServerVendor};
use ferry_tests::{Place, directory};
use rustix::fs::{FlockOperation, fcntl_lock};
use tempfile::TempDir;

/// With `--cache auto`, names and attributes of unopened files are cached for a second.
const AGED: Duration = Duration::from_millis(1100);
/// After this time the kernel usually knows that a name must be looked up again.
const NOTIFIED: Duration = Duration::from_millis(100);
/// The time limit of each step; a longer step hangs.
const SOON: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;

fn cell(name: &str) -> Cell {
    name.parse().unwrap()
}

fn served() -> (TempDir, NinePServer) {
    let directory = directory(Place::Disk);
    let server = NinePServer::start(ServerVendor::Ferry, directory.path()).unwrap();
    (directory, server)
}

fn mount(server: &NinePServer, name: &str) -> Option<Mounted> {
    Mounted::of_server(server, &cell(name), &MountOptions::default())
}

/// Returns bytes that depend on their position.
fn pattern(seed: u32, bytes: usize) -> Vec<u8> {
    (0..u32::try_from(bytes).unwrap())
        .map(|n| (n.wrapping_add(seed << 20).wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0])
        .collect()
}

#[test]
fn an_open_sees_files_closed_on_another_mount() {
    let modes = [
        ("ninep_devfuse_none", Duration::ZERO),
        ("ninep_devfuse", AGED),
        // With Linux's writeback cache the kernel would trust its own length.
        ("ninep_devfuse_auto_writeback", AGED),
    ];
    for (name, age) in modes {
        let (_directory, server) = served();
        let Some(one) = mount(&server, name) else { return };
        let two = mount(&server, name).unwrap();
        let paths = [&one.site.path, &two.site.path];
        for round in 0..2 {
            let (writer, reader) = (paths[round], paths[1 - round]);
            // The second is as long as the first, so that the length is no evidence.
            for (number, bytes) in [300_000, 300_000, 500_000, 7].into_iter().enumerate() {
                let text = pattern(u32::try_from(round * 10 + number).unwrap(), bytes);
                let _ = fs::metadata(reader.join("file"));
                fs::write(writer.join("file"), &text).unwrap();
                // At once, although the length was just requested: each open requests it.
                assert!(fs::read(reader.join("file")).unwrap() == text, "{name}, round {round}, {number}");
                assert_eq!(fs::metadata(reader.join("file")).unwrap().len(), bytes as u64, "{name}");
            }
            fs::rename(writer.join("file"), writer.join("moved")).unwrap();
            fs::create_dir(writer.join("directory")).unwrap();
            std::thread::sleep(age);
            assert!(!reader.join("file").exists() && reader.join("moved").exists(), "{name}: a rename");
            assert_eq!(fs::read_dir(reader).unwrap().count(), 2, "{name}: a listing");
            fs::remove_file(reader.join("moved")).unwrap();
            fs::remove_dir(reader.join("directory")).unwrap();
            std::thread::sleep(age);
            assert_eq!(fs::read_dir(writer).unwrap().count(), 0, "{name}: removed");
        }
        one.finish();
        two.finish();
    }
}

/// A reader with an open file sees files closed by others only after another open, but writes under a lock as soon as it has the
/// lock.
#[test]
fn a_lock_shows_earlier_writes_under_it_elsewhere() {
    let (_directory, server) = served();
    let Some(one) = mount(&server, "ninep_devfuse") else { return };
    let two = mount(&server, "ninep_devfuse").unwrap();
    fs::write(one.site.path.join("file"), [0; 8]).unwrap();
    let open = |mounted: &Mounted| File::options().read(true).write(true).open(mounted.site.path.join("file")).unwrap();
    let files = [open(&one), open(&two)];
    std::thread::scope(|scope| {
        for file in &files {
            scope.spawn(move || {
                for _ in 0..200 {
                    lock(file, FlockOperation::LockExclusive);
                    let mut bytes = [0; 8];
                    file.read_exact_at(&mut bytes, 0).unwrap();
                    file.write_all_at(&(u64::from_le_bytes(bytes) + 1).to_le_bytes(), 0).unwrap();
                    lock(file, FlockOperation::Unlock);
                }
            });
        }
    });
    let mut bytes = [0; 8];
    File::open(server.shared().join("file")).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), 400, "some were lost");
    // One writes, and more each time; the other only reads.
    for round in 0..100_u8 {
        let [writer, reader] = &files;
        lock(writer, FlockOperation::LockExclusive);
        writer.write_all_at(&vec![round; 10 + usize::from(round)], 0).unwrap();
        lock(writer, FlockOperation::Unlock);
        lock(reader, FlockOperation::LockShared);
        let mut bytes = vec![0; 10 + usize::from(round)];
        // By a single read, which must see the new end, too.
        assert_eq!(reader.read_at(&mut bytes, 0).unwrap(), bytes.len(), "round {round}");
        assert!(bytes.iter().all(|byte| *byte == round), "round {round}: {bytes:?}");
        lock(reader, FlockOperation::Unlock);
    }
    drop(files);
    one.finish();
    two.finish();
}

/// Takes (with a wait) or releases a lock.
fn lock(file: &File, operation: FlockOperation) {
    loop {
        match fcntl_lock(file, operation) {
            Ok(()) => return,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// With `--cache always` cached data of open files is not requested again.
#[test]
fn cached_data_need_no_server() {
    let (_directory, server) = served();
    let text = pattern(1, 3 * MIB + 5);
    fs::write(server.shared().join("file"), &text).unwrap();
    let Some(mounted) = mount(&server, "ninep_devfuse_always") else { return };
    let at = &mounted.site.path;
    let file = File::open(at.join("file")).unwrap();
    let look = || {
        let mut bytes = vec![0; text.len()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == text && !at.join("none").exists());
        assert_eq!(fs::metadata(at.join("file")).unwrap().len(), text.len() as u64);
    };
    look();
    server.hold_up();
    look();
    server.go_on();
    drop(file);
    mounted.finish();
}

/// Concurrent callers, each with its own file and its own slots in a shared file.
const CALLERS: u32 = 16;
/// The length of each slot in bytes.
const SLOT: usize = 10_000;

fn caller(number: u32, at: &Path, shared: &File) -> io::Result<()> {
    let own = at.join(format!("own{number}"));
    let text = pattern(number, MIB + 17 * number as usize);
    {
        let file = File::create(&own)?;
        let mut done = 0;
        for piece in text.chunks(70_000 + number as usize * 1000) {
            file.write_all_at(piece, done)?;
            done += piece.len() as u64;
        }
        file.sync_all()?;
    }
    for slot in (number..8 * CALLERS).step_by(CALLERS as usize) {
        shared.write_all_at(&pattern(slot, SLOT), u64::from(slot) * SLOT as u64)?;
    }
    assert!(fs::read(&own)? == text, "caller {number}");
    fs::rename(&own, at.join(format!("done{number}")))
}

#[test]
fn many_callers_do_not_interfere() {
    for name in ["ninep_devfuse", "ninep_devfuse_none"] {
        let (_directory, server) = served();
        let Some(mounted) = mount(&server, name) else { return };
        let at = &mounted.site.path;
        let shared = File::options().create_new(true).read(true).write(true).open(at.join("shared")).unwrap();
        std::thread::scope(|scope| {
            for number in 0..CALLERS {
                let shared = &shared;
                scope.spawn(move || caller(number, at, shared).unwrap());
            }
        });
        let slots =
            |bytes: &[u8]| (0..8 * CALLERS).all(|slot| bytes[slot as usize * SLOT..][..SLOT] == pattern(slot, SLOT));
        assert!(slots(&fs::read(at.join("shared")).unwrap()), "{name}: by the mount");
        drop(shared);
        assert!(slots(&fs::read(server.shared().join("shared")).unwrap()), "{name}: at the server");
        for number in 0..CALLERS {
            let text = pattern(number, MIB + 17 * number as usize);
            assert!(fs::read(server.shared().join(format!("done{number}"))).unwrap() == text, "{name}: {number}");
        }
        mounted.finish();
    }
}

/// The length of records in bytes.
const RECORD: usize = 512;

/// The progress of the programs of the next test.
#[derive(Default)]
struct Progress {
    over: AtomicBool,
    /// The number of records with a completed fsync.
    records: AtomicU64,
    /// The number of files that were created, written, synced and renamed.
    files: AtomicU64,
    errors: AtomicU64,
    reads: AtomicU64,
}

impl Progress {
    /// Lost data may only cause EIO.
    fn take(&self, what: &str, outcome: io::Result<()>) -> bool {
        let Err(error) = outcome else { return true };
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{what}: {error}");
        self.errors.fetch_add(1, Ordering::Relaxed);
        false
    }

    /// Writes records one after another, each with an fsync.
    fn log(&self, at: &Path) {
        let file = File::options().create_new(true).write(true).open(at.join("log")).unwrap();
        let mut next = 0_u64;
        while !self.over.load(Ordering::Relaxed) {
            let record = pattern(u32::try_from(next % 1000).unwrap(), RECORD);
            let written = file.write_all_at(&record, next * RECORD as u64).and_then(|()| file.sync_data());
            if self.take("a record", written) {
                next += 1;
                self.records.store(next, Ordering::Relaxed);
            }
        }
    }

    /// Reads an unchanging file in pieces, with and without the cache.
    fn read(&self, at: &Path, text: &[u8]) {
        let file = File::open(at.join("text")).unwrap();
        let mut place = 0;
        while !self.over.load(Ordering::Relaxed) {
            place = (place * 31 + 77_777) % (text.len() - 50_000);
            let mut bytes = vec![0; 50_000];
            if self.take("a read", file.read_exact_at(&mut bytes, place as u64)) {
                assert!(bytes == text[place..place + 50_000], "wrong bytes at {place}");
                self.reads.fetch_add(1, Ordering::Relaxed);
            }
            let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        }
    }

    /// Creates files under one name and renames them to another. After an error it is unknown whether names were
    /// changed, and the kernel must look them up again although it caches names for longer.
    fn make(&self, at: &Path) {
        let mut next = 0_u32;
        while !self.over.load(Ordering::Relaxed) {
            let text = pattern(next % 1000, 5000);
            let made = (|| {
                let file = File::create(at.join("new"))?;
                file.write_all_at(&text, 0)?;
                file.sync_all()?;
                fs::rename(at.join("new"), at.join(format!("made{next}")))
            })();
            // The rename may have happened although its reply was lost. After EIO the file is simply made again.
            let was_moved = |error: io::Error| {
                let is_lost = error.raw_os_error() == Some(libc::EIO);
                let end = Instant::now() + if is_lost { NOTIFIED } else { SOON };
                while !moved(at, next, &text) {
                    if Instant::now() >= end {
                        return Err(error);
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
                Ok(())
            };
            if self.take("a file", made.or_else(was_moved)) {
                next += 1;
                self.files.store(next.into(), Ordering::Relaxed);
            }
        }
    }
}

/// Ends the programs, also when the test fails.
struct StopGuard<'a>(&'a AtomicBool);

impl Drop for StopGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn moved(at: &Path, number: u32, text: &[u8]) -> bool {
    fs::read(at.join(format!("made{number}"))).is_ok_and(|bytes| bytes == text)
}

#[test]
fn a_server_that_is_killed_and_started_again_loses_nothing_that_was_durable() {
    // Names are cached longer than they are waited for: only a notification makes the kernel look them up again.
    let keeps = ["--entry-timeout", "600", "--negative-timeout", "600"].map(String::from);
    for (name, args) in [("ninep_devfuse", &keeps[..]), ("ninep_devfuse_none", &[])] {
        let (_directory, server) = served();
        let text = pattern(99, 4 * MIB);
        fs::write(server.shared().join("text"), &text).unwrap();
        let options = MountOptions { args: args.to_vec(), ..MountOptions::default() };
        let Some(mounted) = Mounted::of_server(&server, &cell(name), &options) else { return };
        let (at, progress) = (&mounted.site.path, Progress::default());
        std::thread::scope(|scope| {
            let over = StopGuard(&progress.over);
            scope.spawn(|| progress.log(at));
            scope.spawn(|| progress.read(at, &text));
            scope.spawn(|| progress.make(at));
            for _ in 0..5 {
                std::thread::sleep(Duration::from_millis(300));
                server.restart();
            }
            // Each has made progress since.
            let now =
                || [&progress.records, &progress.files, &progress.reads].map(|count| count.load(Ordering::Relaxed));
            let (before, end) = (now(), Instant::now() + SOON);
            while now().iter().zip(before).any(|(now, before)| *now <= before) {
                assert!(Instant::now() < end, "{name}: {before:?} became {:?}", now());
                std::thread::sleep(Duration::from_millis(10));
            }
            drop(over);
        });
        let [records, files] = [&progress.records, &progress.files].map(|count| count.load(Ordering::Relaxed));
        let log = fs::read(server.shared().join("log")).unwrap();
        for number in 0..usize::try_from(records).unwrap() {
            let record = pattern(u32::try_from(number % 1000).unwrap(), RECORD);
            assert!(log[number * RECORD..][..RECORD] == record, "{name}: record {number} of {records}");
        }
        for number in 0..u32::try_from(files).unwrap() {
            assert!(moved(&server.shared(), number, &pattern(number % 1000, 5000)), "{name}: file {number} of {files}");
        }
        println!("{name}: {records} records, {files} files, {:?} errors", progress.errors);
        mounted.finish();
    }
}

#[test]
fn locks_outlive_the_server_and_not_the_mount() {
    let (_directory, server) = served();
    let Some(one) = mount(&server, "ninep_devfuse") else { return };
    let two = mount(&server, "ninep_devfuse").unwrap();
    fs::write(one.site.path.join("file"), "text").unwrap();
    let open = |mounted: &Mounted| File::options().read(true).write(true).open(mounted.site.path.join("file")).unwrap();
    let (first, second) = (open(&one), open(&two));
    let tries = || fcntl_lock(&second, FlockOperation::NonBlockingLockExclusive);
    // Errors of closed data that is not durable would be returned by the next fsync.
    first.sync_all().unwrap();
    lock(&first, FlockOperation::LockExclusive);
    assert_eq!(tries(), Err(rustix::io::Errno::AGAIN), "it is taken");
    server.restart();
    // The holder continues, and reclaims the lock before anything else.
    first.write_all_at(b"more", 0).unwrap();
    first.sync_all().unwrap();
    assert_eq!(tries(), Err(rustix::io::Errno::AGAIN), "it was taken again");
    lock(&first, FlockOperation::Unlock);
    tries().unwrap();
    lock(&second, FlockOperation::Unlock);
    // The end of a mount releases its locks.
    lock(&first, FlockOperation::LockExclusive);
    one.server().kill();
    let end = Instant::now() + SOON;
    while tries().is_err() {
        assert!(Instant::now() < end, "the lock of a dead mount stays");
        std::thread::sleep(Duration::from_millis(10));
    }
    drop((first, second));
    two.finish();
}
