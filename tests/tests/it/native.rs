//! The server's life cycle and limits, driven from the host as by a guest's kernel.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver, Error, ROOT, Ticket};
use ferry_tests::{Cache, Options, Place, Process, Share, TIMEOUT};
use ferry_wire::fuse::abi::{FATTR_SIZE, FileLock, LK_FLOCK, Opcode, ReadIn, SetattrIn, WriteIn};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use tempfile::TempDir;
use zerocopy::IntoBytes;

const O_RDWR: u32 = 2;
const O_RDWR_CREAT: u32 = 0o102;
const CHUNK: u32 = 64 << 10;
const FILE_CHUNKS: u64 = 64;

/// What connections may leave in the allocator and in thread stacks.
const MORE_KIB: u64 = 32 << 10;

fn config() -> Config {
    Config { queues: 2, memory_bytes: 64 << 20, ..Config::default() }
}

fn connect(share: &Share) -> Driver {
    let mut driver = Driver::connect(&share.socket, config()).unwrap();
    driver.init().unwrap();
    driver
}

fn lock(kind: i32) -> FileLock {
    FileLock { start: 0, end: i64::MAX.cast_unsigned(), kind: kind.cast_unsigned(), pid: 1 }
}

fn write_lock() -> FileLock {
    lock(libc::F_WRLCK)
}

fn unlock() -> FileLock {
    lock(libc::F_UNLCK)
}

fn send_read(driver: &mut Driver, node: u64, fh: u64, offset: u64) -> Ticket {
    let args = ReadIn { fh, offset, size: CHUNK, ..ReadIn::ZERO };
    driver.send(Opcode::Read, node, &[args.as_bytes()], &[], CHUNK as usize).unwrap()
}

fn send_write(driver: &mut Driver, node: u64, fh: u64, offset: u64, data: &[u8]) -> Ticket {
    let args = WriteIn { fh, offset, size: u32::try_from(data.len()).unwrap(), ..WriteIn::ZERO };
    driver.send(Opcode::Write, node, &[args.as_bytes()], data, 8).unwrap()
}

/// A file of [`FILE_CHUNKS`] chunks on the host.
fn big_file(share: &Share, name: &str) {
    fs::write(share.path.join(name), vec![7; CHUNK as usize * usize::try_from(FILE_CHUNKS).unwrap()]).unwrap();
}

/// Takes a lock as the first owner, if need be after waiting for it.
#[track_caller]
fn lock_when_free(driver: &mut Driver, (node, fh): (u64, u64), flags: u32) {
    let ticket = driver.send_setlkw(node, fh, 1, write_lock(), flags).unwrap();
    let reply = driver.queue(1).wait_for(ticket, TIMEOUT).unwrap().reply;
    assert_eq!(reply[4..8], [0; 4], "the lock was not granted: {reply:?}");
}

/// Everything at once, and then the line is cut.
fn cut_in_flight(share: &Share) {
    let mut driver = connect(share);
    let file = driver.lookup(ROOT, "file").unwrap().nodeid;
    let fh = driver.open(file, O_RDWR).unwrap().fh;
    let second = driver.open(file, O_RDWR).unwrap().fh;
    let directory = driver.opendir(ROOT).unwrap().fh;
    driver.readdirplus(ROOT, directory, 0, 4096).unwrap();
    driver.tmpfile(ROOT, O_RDWR, 0o600).unwrap();
    // Whoever was cut off before may still have them: until the last of its requests is done with.
    lock_when_free(&mut driver, (file, fh), 0);
    lock_when_free(&mut driver, (file, fh), LK_FLOCK);
    driver.select(2);
    driver.send_setlkw(file, second, 2, write_lock(), 0).unwrap();
    driver.send_setlkw(file, second, 2, write_lock(), LK_FLOCK).unwrap();
    let data = vec![7; CHUNK as usize];
    for chunk in 0..FILE_CHUNKS / 2 {
        driver.select(if chunk % 2 == 0 { 1 } else { 2 });
        send_read(&mut driver, file, fh, chunk * u64::from(CHUNK));
        send_write(&mut driver, file, second, chunk * u64::from(CHUNK), &data);
    }
    driver.send(Opcode::Syncfs, ROOT, &[&[0; 8]], &[], 0).unwrap();
}

#[test]
fn a_cut_line_leaves_nothing_behind() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let share = Share::new(Cache::Auto);
    big_file(&share, "file");
    for _ in 0..3 {
        cut_in_flight(&share);
    }
    share.assert_released();
    let before = Process::now();
    for _ in 0..50 {
        cut_in_flight(&share);
    }
    share.assert_released();
    before.assert_back(MORE_KIB);
    // And it still works.
    let mut driver = connect(&share);
    let file = driver.lookup(ROOT, "file").unwrap().nodeid;
    let fh = driver.open(file, O_RDWR).unwrap().fh;
    driver.setlk(file, fh, 3, write_lock(), 0).unwrap();
    assert_eq!(driver.read(file, fh, 0, 16).unwrap(), [7; 16]);
}

#[test]
fn a_new_connection_starts_without_state() {
    let share = Share::new(Cache::Auto);
    let mut driver = connect(&share);
    let (entry, open) = driver.create(ROOT, "file", O_RDWR_CREAT, 0o100_644).unwrap();
    driver.write(entry.nodeid, open.fh, 0, b"text").unwrap();
    driver.setlk(entry.nodeid, open.fh, 1, write_lock(), 0).unwrap();
    let mut driver = driver.reconnect().unwrap();
    assert!(driver.getattr(ROOT).is_err(), "a request before INIT must not work");
    driver.init().unwrap();
    share.assert_released();
    assert!(driver.read(entry.nodeid, open.fh, 0, 4).is_err(), "the old handle is still good");
    let file = driver.lookup(ROOT, "file").unwrap().nodeid;
    let fh = driver.open(file, O_RDWR).unwrap().fh;
    assert_eq!(driver.read(file, fh, 0, 4).unwrap(), b"text");
    driver.setlk(file, fh, 1, write_lock(), 0).unwrap();
}

#[test]
fn a_second_init_releases_everything() {
    let share = Share::new(Cache::Auto);
    let mut driver = connect(&share);
    for round in 0..20 {
        let (entry, open) = driver.create(ROOT, format!("file{round}"), O_RDWR_CREAT, 0o100_644).unwrap();
        let other = driver.open(entry.nodeid, O_RDWR).unwrap().fh;
        driver.setlk(entry.nodeid, open.fh, 1, write_lock(), 0).unwrap();
        driver.select(2);
        let parked = driver.send_setlkw(entry.nodeid, other, 2, write_lock(), 0).unwrap();
        driver.select(1);
        driver.init().unwrap();
        // What the first session held goes when the last batch of requests that began in it ends, on any queue.
        share.assert_released();
        assert!(driver.getattr(entry.nodeid).unwrap_err().errno().is_some());
        assert!(driver.read(entry.nodeid, open.fh, 0, 4).is_err());
        // The parked request may be answered or not, but its chain must not be answered twice or garbled.
        driver.select(2);
        let timeout = Duration::from_millis(20);
        match driver.queue(2).wait_for(parked, timeout) {
            Ok(_) | Err(Error::TimedOut(_)) => {}
            Err(error) => panic!("{error}"),
        }
        driver.select(1);
    }
}

#[test]
fn destroy_releases_everything() {
    let share = Share::new(Cache::Auto);
    let mut driver = connect(&share);
    let (entry, open) = driver.create(ROOT, "file", O_RDWR_CREAT, 0o100_644).unwrap();
    driver.setlk(entry.nodeid, open.fh, 1, write_lock(), 0).unwrap();
    driver.destroy().unwrap();
    share.assert_released();
    driver.init().unwrap();
    assert_ne!(driver.lookup(ROOT, "file").unwrap().nodeid, 0);
}

#[test]
fn a_stopped_queue_completes_its_requests_and_continues_later() {
    let share = Share::new(Cache::Auto);
    big_file(&share, "file");
    let mut driver = connect(&share);
    let file = driver.lookup(ROOT, "file").unwrap().nodeid;
    let fh = driver.open(file, O_RDWR).unwrap().fh;
    let second = driver.open(file, O_RDWR).unwrap().fh;
    let data = vec![9; CHUNK as usize];
    for round in 0..50 {
        let mut tickets = Vec::new();
        for chunk in 0..FILE_CHUNKS / 2 {
            let at = chunk * u64::from(CHUNK);
            tickets.push(send_read(&mut driver, file, fh, at));
            tickets.push(send_write(&mut driver, file, second, at, &data));
        }
        let base = driver.stop(1).unwrap();
        // Not Driver::start, which begins with an empty ring: here it goes on as it is.
        let parameters = driver.parameters(1, base);
        driver.start_with(1, parameters).unwrap();
        // What was not taken before the stop is taken after the start: kick for it.
        driver.queue(1).kick();
        for ticket in tickets {
            if let Err(error) = driver.receive(ticket) {
                panic!("round {round}: {error}");
            }
        }
    }
}

#[test]
fn a_parked_lock_outlives_a_pause_of_its_queue() {
    let share = Share::new(Cache::Auto);
    let mut driver = connect(&share);
    let (entry, open) = driver.create(ROOT, "file", O_RDWR_CREAT, 0o100_644).unwrap();
    let other = driver.open(entry.nodeid, O_RDWR).unwrap().fh;
    for flags in [0, LK_FLOCK] {
        driver.setlk(entry.nodeid, open.fh, 1, write_lock(), flags).unwrap();
        driver.select(2);
        let parked = driver.send_setlkw(entry.nodeid, other, 2, write_lock(), flags).unwrap();
        // A round trip on the same queue: the lock request was taken.
        driver.getattr(ROOT).unwrap();
        let base = driver.stop(2).unwrap();
        driver.select(1);
        driver.setlk(entry.nodeid, open.fh, 1, unlock(), flags).unwrap();
        let parameters = driver.parameters(2, base);
        driver.start_with(2, parameters).unwrap();
        driver.select(2);
        driver.receive(parked).unwrap();
        driver.setlk(entry.nodeid, other, 2, unlock(), flags).unwrap();
        driver.select(1);
    }
}

#[test]
fn waiting_locks_hold_no_queue() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let share = Share::new(Cache::Auto);
    let mut driver = connect(&share);
    let (entry, open) = driver.create(ROOT, "file", O_RDWR_CREAT, 0o100_644).unwrap();
    let threads = Process::now().threads;
    driver.setlk(entry.nodeid, open.fh, 1, write_lock(), 0).unwrap();
    let waiting: Vec<_> = (0..100)
        .map(|number| {
            let fh = driver.open(entry.nodeid, O_RDWR).unwrap().fh;
            let owner = 100 + number;
            (driver.send_setlkw(entry.nodeid, fh, owner, write_lock(), 0).unwrap(), fh, owner)
        })
        .collect();
    driver.getattr(ROOT).unwrap();
    assert!(
        Process::now().threads <= threads + 4,
        "{} threads for 100 waiting locks",
        Process::now().threads - threads
    );
    driver.setlk(entry.nodeid, open.fh, 1, unlock(), 0).unwrap();
    let mut left = waiting;
    let end = Instant::now() + Duration::from_secs(20);
    while !left.is_empty() {
        assert!(Instant::now() < end, "{} of 100 waiting locks were never granted", left.len());
        let done = driver.queue(1).wait(Duration::from_secs(10)).unwrap();
        let at = left.iter().position(|(ticket, ..)| *ticket == done.ticket).unwrap();
        let (_, fh, owner) = left.swap_remove(at);
        ferry_driver::session::body(&done).unwrap();
        driver.setlk(entry.nodeid, fh, owner, unlock(), 0).unwrap();
    }
}

fn make_node(path: &Path, kind: rustix::fs::FileType, device: u64) {
    rustix::fs::mknodat(CWD, path, kind, rustix::fs::Mode::from_raw_mode(0o666), device).unwrap();
}

#[test]
fn special_files_are_never_opened() {
    let share = Share::new(Cache::Auto);
    make_node(&share.path.join("fifo"), rustix::fs::FileType::Fifo, 0);
    make_node(&share.path.join("null"), rustix::fs::FileType::CharacterDevice, rustix::fs::makedev(1, 3));
    make_node(&share.path.join("block"), rustix::fs::FileType::BlockDevice, rustix::fs::makedev(250, 250));
    let _listener = UnixListener::bind(share.path.join("socket")).unwrap();
    symlink("/etc/passwd", share.path.join("link")).unwrap();
    let mut driver = connect(&share);
    let start = Instant::now();
    for name in ["fifo", "null", "block", "socket", "link"] {
        let node = driver.lookup(ROOT, name).unwrap().nodeid;
        for flags in [0, 1, 2, libc::O_NONBLOCK, libc::O_PATH, libc::O_TRUNC | 1, libc::O_CREAT | 2, libc::O_DIRECT] {
            let answer = driver.open(node, flags.cast_unsigned());
            assert!(matches!(answer, Err(Error::Errno(_))), "OPEN of {name} with {flags:#o}: {answer:?}");
            let answer = driver.create(ROOT, name, (flags | libc::O_CREAT).cast_unsigned(), 0o100_644);
            assert!(matches!(answer, Err(Error::Errno(_))), "CREATE of {name} with {flags:#o}: {answer:?}");
        }
        assert!(driver.opendir(node).is_err(), "OPENDIR of {name}");
        let size = SetattrIn { valid: FATTR_SIZE, ..SetattrIn::ZERO };
        assert!(driver.setattr(node, &size).is_err(), "truncation of {name}");
    }
    assert!(start.elapsed() < Duration::from_secs(2), "something blocked: {:?}", start.elapsed());
    for (name, kind) in [("fifo-made", libc::S_IFIFO), ("socket-made", libc::S_IFSOCK), ("null-made", libc::S_IFCHR)] {
        let entry = driver.mknod(ROOT, name, kind | 0o644, 0x103).unwrap();
        assert!(driver.open(entry.nodeid, 0).is_err(), "OPEN of {name}");
    }
    let kinds = ["fifo-made", "socket-made", "null-made"].map(|name| fs::metadata(share.path.join(name)).unwrap());
    assert!(
        kinds[0].file_type().is_fifo() && kinds[1].file_type().is_socket() && kinds[2].file_type().is_char_device()
    );
    assert_eq!(kinds[2].rdev(), rustix::fs::makedev(1, 3));
}

/// Swaps names in the share with links to what is outside, as fast as it can, until it is told to stop.
fn swap(share: &Path, stop: &AtomicBool) -> u64 {
    let mut swaps = 0;
    while !stop.load(Ordering::Relaxed) {
        for name in ["dir", "file", "sub/dir"] {
            let (name, other) = (share.join(name), share.join(format!("{name}.other")));
            renameat_with(CWD, &name, CWD, &other, RenameFlags::EXCHANGE).unwrap();
            swaps += 1;
        }
    }
    swaps
}

/// What a driver tries while names are swapped; gives the number of requests that worked.
struct Racer {
    driver: Driver,
    worked: u64,
    round: u64,
}

impl Racer {
    fn count<T>(&mut self, answer: Result<T, Error>) -> Option<T> {
        match answer {
            Ok(value) => {
                self.worked += 1;
                Some(value)
            }
            Err(Error::Errno(_)) => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn round(&mut self) {
        self.round += 1;
        let made = format!("made{}", self.round % 4);
        let sub = self.driver.lookup(ROOT, "sub");
        let sub = self.count(sub).unwrap().nodeid;
        for parent in [ROOT, sub] {
            let found = self.driver.lookup(parent, "dir");
            let Some(found) = self.count(found) else { continue };
            self.in_directory(parent, found.nodeid, &made);
            let forget = self.driver.forget(found.nodeid, 1);
            self.count(forget);
        }
        self.file();
        let forget = self.driver.forget(sub, 1);
        self.count(forget);
    }

    fn in_directory(&mut self, parent: u64, dir: u64, made: &str) {
        let secret = self.driver.lookup(dir, "secret");
        if let Some(secret) = self.count(secret) {
            self.read(secret.nodeid);
            let _ = self.driver.forget(secret.nodeid, 1);
        }
        let created = self.driver.create(dir, made, O_RDWR_CREAT, 0o100_644);
        if let Some((entry, open)) = self.count(created) {
            let _ = self.driver.release(entry.nodeid, open.fh);
            let _ = self.driver.forget(entry.nodeid, 1);
        }
        let answer = self.driver.mkdir(dir, "made-dir", 0o755);
        let _ = self.count(answer);
        let answer = self.driver.symlink(dir, "made-link", "target");
        let _ = self.count(answer);
        let answer = self.driver.rename(dir, made, parent, "moved", 0);
        let _ = self.count(answer);
        let answer = self.driver.rename(parent, "moved", dir, "moved", 0);
        let _ = self.count(answer);
        for name in ["moved", "made-link", "victim", made] {
            let answer = self.driver.unlink(dir, name);
            let _ = self.count(answer);
        }
        for name in ["made-dir", "victim-dir"] {
            let answer = self.driver.rmdir(dir, name);
            let _ = self.count(answer);
        }
        if let Ok(open) = self.driver.opendir(dir) {
            for entry in self.driver.readdirplus(dir, open.fh, 0, 4096).unwrap_or_default() {
                assert!(!entry.name.starts_with(b"outside"), "a directory outside was listed");
                let node = entry.entry.map_or(0, |entry| entry.ino.0);
                if node != 0 && entry.name != b"." && entry.name != b".." {
                    let _ = self.driver.forget(node, 1);
                }
            }
            let _ = self.driver.releasedir(dir, open.fh);
        }
    }

    fn file(&mut self) {
        let found = self.driver.lookup(ROOT, "file");
        if let Some(found) = self.count(found) {
            self.read(found.nodeid);
            let size = self.driver.truncate(found.nodeid, 16);
            let _ = self.count(size);
            let attr = SetattrIn { valid: 1, mode: 0o640, ..SetattrIn::ZERO };
            let mode = self.driver.setattr(found.nodeid, &attr);
            let _ = self.count(mode);
            let _ = self.driver.setxattr(found.nodeid, "user.race", b"x", 0);
            let _ = self.driver.forget(found.nodeid, 1);
        }
        let created = self.driver.create(ROOT, "file", O_RDWR_CREAT, 0o100_644);
        if let Some((entry, open)) = self.count(created) {
            let read = self.driver.read(entry.nodeid, open.fh, 0, 64);
            let text = self.count(read).unwrap_or_default();
            assert!(!text.starts_with(b"outside"), "a file outside was read through CREATE");
            let write = self.driver.write(entry.nodeid, open.fh, 0, b"inside, written!");
            self.count(write);
            let _ = self.driver.release(entry.nodeid, open.fh);
            let _ = self.driver.forget(entry.nodeid, 1);
        }
    }

    fn read(&mut self, node: u64) {
        let open = self.driver.open(node, 0);
        let Some(open) = self.count(open) else { return };
        let read = self.driver.read(node, open.fh, 0, 64);
        let text = self.count(read).unwrap_or_default();
        assert!(!text.starts_with(b"outside"), "a file outside was read");
        let _ = self.driver.release(node, open.fh);
    }
}

fn race(time: Duration) {
    for file_handles in [true, false] {
        race_with(time / 2, file_handles);
    }
}

/// A share whose directory and file are swapped with links to what lies beside it.
fn race_with(time: Duration, file_handles: bool) {
    let directory = ferry_tests::directory(Place::Disk);
    let (inside, outside) = race_course(&directory);
    let before = tree(&outside);
    let options = ferry_dir::Options { file_handles, descriptors_max: Some(32), ..ferry_dir::Options::default() };
    let share = Share::of(&inside, directory, options, Options { cache: Cache::Auto, ..Options::default() });
    println!("file handles {file_handles}:");
    run_race(time, &inside, connect(&share));
    assert_eq!(tree(&outside), before, "something outside the share was changed");
    share.assert_released();
}

/// What is shared, and what is beside it.
fn race_course(directory: &TempDir) -> (PathBuf, PathBuf) {
    let (inside, outside) = (directory.path().join("shared"), directory.path().join("outside"));
    for dir in ["dir", "sub/dir"] {
        fs::create_dir_all(inside.join(dir)).unwrap();
        fs::write(inside.join(dir).join("secret"), "inside").unwrap();
        symlink(&outside, inside.join(format!("{dir}.other"))).unwrap();
    }
    fs::write(inside.join("file"), "inside, unwritten").unwrap();
    symlink(outside.join("secret"), inside.join("file.other")).unwrap();
    fs::create_dir_all(outside.join("victim-dir")).unwrap();
    for name in ["secret", "victim", "outside-name"] {
        fs::write(outside.join(name), "outside").unwrap();
    }
    (inside, outside)
}

fn run_race(time: Duration, inside: &Path, driver: Driver) {
    let stop = AtomicBool::new(false);
    let (worked, rounds, swaps) = std::thread::scope(|scope| {
        let swapper = scope.spawn(|| swap(inside, &stop));
        let mut racer = Racer { driver, worked: 0, round: 0 };
        let end = Instant::now() + time;
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // Once at least, however late it is by then.
            loop {
                racer.round();
                if Instant::now() >= end {
                    break;
                }
            }
        }));
        stop.store(true, Ordering::Relaxed);
        let swaps = swapper.join().unwrap();
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
        (racer.worked, racer.round, swaps)
    });
    println!("{rounds} rounds, {worked} requests worked, {swaps} swaps");
    assert!(worked > rounds, "hardly anything worked: {worked} requests in {rounds} rounds");
}

/// The same with the program in its whole sandbox.
fn race_the_program(time: Duration, flags: &[&str]) {
    let directory = ferry_tests::directory(Place::Disk);
    let (inside, outside) = race_course(&directory);
    let before = tree(&outside);
    let socket = directory.path().join("s");
    let mut command = std::process::Command::new(ferry_tests::mounts::program());
    command.arg("share").arg(&inside).arg("--virtiofs").arg(&socket).arg("--json").args(flags);
    command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped()).env_remove("FERRY_LOG");
    let mut server = command.spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(server.stdout.take().unwrap()), &mut line).unwrap();
    let mut driver = Driver::connect(&socket, config()).unwrap();
    driver.init().unwrap();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run_race(time, &inside, driver)));
    server.kill().unwrap();
    server.wait().unwrap();
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
    assert_eq!(tree(&outside), before, "something outside the share was changed");
}

/// The names below a directory, with modes, sizes, contents of files and times of change.
fn tree(directory: &Path) -> Vec<(String, u32, String, i64, i64)> {
    let mut all: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let meta = entry.metadata().unwrap();
            let text = if meta.is_file() { fs::read_to_string(entry.path()).unwrap() } else { String::new() };
            (entry.file_name().into_string().unwrap(), meta.mode(), text, meta.ctime(), meta.ctime_nsec())
        })
        .collect();
    all.sort();
    all
}

#[test]
fn swapped_links_never_lead_out() {
    race(Duration::from_secs(6));
}

#[test]
#[ignore = "long: make test-all"]
fn swapped_links_never_lead_out_for_a_minute() {
    race(Duration::from_secs(60));
}

#[test]
fn swapped_links_never_lead_out_of_the_sandbox() {
    race_the_program(Duration::from_secs(5), &["--inode-file-handles", "never"]);
}

#[test]
#[ignore = "long: make test-all"]
fn swapped_links_never_lead_out_of_the_sandbox_for_a_minute() {
    race_the_program(Duration::from_secs(30), &["--inode-file-handles", "never"]);
    race_the_program(Duration::from_secs(30), &["--inode-file-handles", "prefer"]);
}

/// `..` of the root, of a directory that was moved out of the share, and absolute link targets.
#[test]
fn dot_dot_stays_inside() {
    let share = Share::new(Cache::Auto);
    let outside = share.path.parent().unwrap().join("moved-out");
    fs::create_dir_all(share.path.join("dir/deep")).unwrap();
    let mut driver = connect(&share);
    let dir = driver.lookup(ROOT, "dir").unwrap().nodeid;
    let deep = driver.lookup(dir, "deep").unwrap().nodeid;
    let root_ino = driver.getattr(ROOT).unwrap().attr.ino;
    match driver.lookup(ROOT, "..") {
        Ok(entry) => assert_eq!(entry.attr.ino, root_ino),
        Err(Error::Errno(_)) => {}
        Err(error) => panic!("{error}"),
    }
    fs::rename(share.path.join("dir"), &outside).unwrap();
    // The guest still knows the directory; its parent is outside now, and must not become known.
    let outside_ino = fs::metadata(outside.parent().unwrap()).unwrap().ino();
    for (node, levels) in [(dir, 1), (deep, 2)] {
        let mut at = node;
        for _ in 0..levels {
            match driver.lookup(at, "..") {
                Ok(entry) => {
                    assert_ne!(entry.attr.ino, outside_ino, "'..' led out of the share");
                    at = entry.nodeid;
                }
                Err(Error::Errno(_)) => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert!(matches!(driver.lookup(dir, "../s"), Err(Error::Errno(_))));
}

/// All fallocate modes and what the host has of them: a guest's kernel passes on only some.
#[test]
fn fallocate_has_the_hosts_modes() {
    for place in [Place::Disk, Place::Memory] {
        let share = Share::with(place, Options::default());
        let mut driver = connect(&share);
        let (entry, open) = driver.create(ROOT, "file", O_RDWR_CREAT, 0o100_644).unwrap();
        let host = fs::File::create(share.path.join("host")).unwrap();
        for mode in 0..0x80_i32 {
            driver.truncate(entry.nodeid, 0).unwrap();
            driver.write(entry.nodeid, open.fh, 0, &[5; 64 << 10]).unwrap();
            host.set_len(0).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&host, &[5; 64 << 10], 0).unwrap();
            let ours = driver.fallocate(entry.nodeid, open.fh, mode.cast_unsigned(), 4096, 8192);
            let flags = rustix::fs::FallocateFlags::from_bits_retain(mode.cast_unsigned());
            let theirs = rustix::fs::fallocate(&host, flags, 4096, 8192);
            match (&ours, &theirs) {
                (Ok(()), Ok(())) | (Err(Error::Errno(_)), Err(_)) => {}
                _ => panic!("mode {mode:#x} on {place:?}: {ours:?}, on the host itself {theirs:?}"),
            }
            let [ours, theirs] = ["file", "host"].map(|name| fs::read(share.path.join(name)).unwrap());
            assert!(ours == theirs, "mode {mode:#x} on {place:?}: the contents differ from the host's");
        }
    }
}

/// More open files than descriptors: an error, no lost names, and all is well once some are closed.
#[test]
fn names_never_vanish_when_descriptors_run_out() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let share = Share::new(Cache::Auto);
    for number in 0..64 {
        fs::write(share.path.join(format!("f{number}")), "x").unwrap();
    }
    let mut driver = connect(&share);
    let used = fs::read_dir("/proc/self/fd").unwrap().count();
    let before = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let limit = |current: Option<u64>| {
        let limits = rustix::process::Rlimit { current, maximum: before.maximum };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limits).unwrap();
    };
    limit(Some(used as u64 + 24));
    let mut opened = Vec::new();
    let mut refused = 0;
    let mut wrong = Vec::new();
    for number in 0..64 {
        match driver.lookup(ROOT, format!("f{number}")) {
            Ok(entry) => match driver.open(entry.nodeid, O_RDWR) {
                Ok(open) => opened.push((entry.nodeid, open.fh)),
                Err(Error::Errno(errno)) if Errno::from_raw_os_error(errno) == Errno::MFILE => refused += 1,
                Err(Error::Errno(errno)) if Errno::from_raw_os_error(errno) == Errno::NFILE => refused += 1,
                Err(error) => wrong.push(format!("OPEN of f{number}: {error}")),
            },
            Err(error) => wrong.push(format!("LOOKUP of f{number}: {error}")),
        }
    }
    limit(before.current);
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(refused > 0, "the limit was never reached");
    for (node, fh) in opened {
        driver.release(node, fh).unwrap();
    }
    let node = driver.lookup(ROOT, "f63").unwrap().nodeid;
    driver.open(node, O_RDWR).unwrap();
}

/// An absolute target and one with `..` are the guest's to follow: they come back as they are, and lead nowhere here.
#[test]
fn links_are_returned_unchanged() {
    let share = Share::new(Cache::Auto);
    let mut driver = connect(&share);
    for target in ["/etc/passwd", "../../../../etc/passwd", &"x".repeat(4095)] {
        let entry = driver.symlink(ROOT, "link", target).unwrap();
        assert_eq!(driver.readlink(entry.nodeid).unwrap(), target.as_bytes());
        assert!(driver.open(entry.nodeid, 0).is_err());
        assert!(driver.lookup(entry.nodeid, "x").is_err());
        driver.unlink(ROOT, "link").unwrap();
        driver.forget(entry.nodeid, 1).unwrap();
    }
}

/// Listings bring along the inodes that the guest looks at, and leave out those that it does not.
#[test]
fn listings_include_attributes_that_are_used() {
    let share = Share::new(Cache::Auto);
    for number in 0..40 {
        let dir = share.path.join(format!("d{number:02}"));
        fs::create_dir_all(dir.join("below")).unwrap();
        for name in ["a", "b", "c"] {
            fs::write(dir.join(name), name).unwrap();
        }
    }
    let mut driver = connect(&share);
    // The files that come with their inodes, and those that do not; the directory always comes with its own.
    let mut list = |number: usize, looks: bool| {
        let dir = driver.lookup(ROOT, format!("d{number:02}")).unwrap().nodeid;
        let open = driver.opendir(dir).unwrap().fh;
        let mut listed = driver.readdirplus(dir, open, 0, 4096).unwrap();
        listed.retain(|listed| ![&b"."[..], b".."].contains(&&*listed.name));
        driver.releasedir(dir, open).unwrap();
        let (dirs, files): (Vec<_>, Vec<_>) = listed.into_iter().partition(|listed| listed.name == b"below");
        assert!(dirs[0].entry.is_some());
        let (with, without): (Vec<_>, Vec<_>) = files.into_iter().partition(|listed| listed.entry.is_some());
        for listed in without.iter().filter(|_| looks) {
            driver.lookup(dir, &listed.name).unwrap();
        }
        (with.len(), without.len())
    };
    let names: Vec<_> = (0..12).map(|number| list(number, false)).collect();
    assert_eq!((names[0], names[11]), ((2, 1), (0, 3)), "{names:?}");
    // The first look at a file changes that, for all directories.
    assert_eq!(list(12, true), (0, 3));
    let looks: Vec<_> = (13..40).map(|number| list(number, true)).collect();
    assert!(looks[..4].iter().all(|found| *found == (2, 1)), "{looks:?}");
    assert!(looks[6..].iter().filter(|found| **found == (3, 0)).count() >= 18, "{looks:?}");
}
