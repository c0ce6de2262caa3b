//! Handlers of a source that panic, block or return wrong results: only their caller gets an error.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use ferry_tests::mounts::{Cell, Mounted, Transport, missing, with_uring};
use ferry_tests::{Place, directory};

const FAULTY: &str = env!("CARGO_BIN_EXE_ferry-faulty");

/// What `good` holds.
const GOOD: &str = "as it should be\n";
/// After how long a handler is given up.
const GIVEN_UP: Duration = Duration::from_secs(2);
/// Longer than anything that does not wait for a blocked handler takes.
const SOON: Duration = Duration::from_secs(10);
/// More callers than there are CPUs, rings, and threads to begin with.
const CALLERS: usize = 24;

/// Mounts the faulty file system by one path, runs the test, unmounts it.
fn faulty(road: Transport, given_up: Duration, test: impl FnOnce(&Mounted)) {
    let uring = with_uring();
    if let Some(why) = missing().or(uring.as_ref().err().copied().filter(|_| road == Transport::Uring)) {
        ferry_skip::skip!("{why}");
        return;
    }
    let directory = directory(Place::Disk);
    let mountpoint = directory.path().join("mnt");
    fs::create_dir(&mountpoint).unwrap();
    let path = if road == Transport::Uring { "uring" } else { "devfuse" };
    let mut command = Command::new(FAULTY);
    command.arg(&mountpoint).args([path, &given_up.as_secs().to_string()]).env("RUST_BACKTRACE", "0");
    let cell: Cell = format!("mem_{path}_none").parse().unwrap();
    let mounted = Mounted::of(cell, &mountpoint, &mut command, Duration::from_secs(120));
    assert_good(&mounted, "at first");
    test(&mounted);
    assert_good(&mounted, "at the end");
    mounted.end();
}

#[track_caller]
fn assert_good(mounted: &Mounted, when: &str) {
    let begin = Instant::now();
    let text = fs::read_to_string(mounted.site.path.join("good")).unwrap_or_else(|error| panic!("{when}: {error}"));
    assert_eq!(text, GOOD, "{when}");
    assert!(begin.elapsed() < SOON, "{when}: somebody else's fault held this up for {:?}", begin.elapsed());
}

/// What somebody may do to a file.
type Deed = fn(&Path) -> io::Result<usize>;

fn look(path: &Path) -> io::Result<usize> {
    path.symlink_metadata().map(|_| 0)
}

fn open(path: &Path) -> io::Result<usize> {
    File::open(path).map(|_| 0)
}

fn read(path: &Path) -> io::Result<usize> {
    File::open(path)?.read_at(&mut [0; 4096], 0)
}

fn write(path: &Path) -> io::Result<usize> {
    File::options().write(true).open(path)?.write_at(&[0; 4096], 0)
}

fn list(path: &Path) -> io::Result<usize> {
    fs::read_dir(path)?.try_fold(0, |count, entry| entry.map(|_| count + 1))
}

fn link(path: &Path) -> io::Result<usize> {
    fs::read_link(path).map(|target| target.as_os_str().len())
}

fn attribute(path: &Path) -> io::Result<usize> {
    Ok(rustix::fs::getxattr(path, "user.long", &mut [0; 65_536])?)
}

fn attributes(path: &Path) -> io::Result<usize> {
    Ok(rustix::fs::listxattr(path, &mut [0; 65_536])?)
}

/// A file, what is done to it, and what may come of that: one of these errors, or a count up to this (-1: no success).
const TABLE: &[(&str, Deed, &[i32], isize)] = &[
    ("panic-lookup", look, &[libc::EIO], -1),
    ("panic-getattr", look, &[libc::EIO], -1),
    ("panic-open", open, &[libc::EIO], -1),
    ("panic-read", read, &[libc::EIO], -1),
    ("panic-write", write, &[libc::EIO], -1),
    ("panic-readdir", list, &[libc::EIO], -1),
    ("block-read", read, &[libc::EIO], -1),
    ("block-getattr", look, &[libc::EIO], -1),
    // All that there was room for was handed over: that may be what the caller gets.
    ("more-read", read, &[libc::EIO], 4096),
    ("claims-read", read, &[libc::EIO], 0),
    ("claims-write", write, &[libc::EIO], -1),
    ("size-negative", look, &[libc::EIO], -1),
    ("extent-path-only", read, &[libc::EIO, libc::EBADF], -1),
    ("extent-write-only", read, &[libc::EIO, libc::EBADF], -1),
    ("extent-empty", read, &[], 0),
    ("link-long", link, &[libc::EIO, libc::ENAMETOOLONG, libc::E2BIG, libc::ERANGE], 4095),
    ("link-empty", link, &[libc::EIO, libc::ENOENT, libc::EINVAL], 0),
    ("xattr-long", attribute, &[libc::EIO, libc::ERANGE, libc::E2BIG], -1),
    ("xattr-long", attributes, &[libc::EIO, libc::ERANGE, libc::E2BIG], -1),
    ("type-none", look, &[libc::EIO], -1),
    ("ino-of-root", look, &[libc::EIO], -1),
    ("names-bad", list, &[libc::EIO], -1),
];

fn each_fault(road: Transport) {
    faulty(road, GIVEN_UP, |mounted| {
        for (name, deed, errors, most) in TABLE {
            let path = mounted.site.path.join(name);
            for round in 0..2 {
                let begin = Instant::now();
                match deed(&path) {
                    Ok(count) => {
                        assert!(isize::try_from(count).unwrap() <= *most, "{name}, round {round}: gave {count}");
                    }
                    Err(error) => {
                        let error = error.raw_os_error().unwrap();
                        assert!(errors.contains(&error), "{name}, round {round}: error {error}");
                    }
                }
                assert!(begin.elapsed() < SOON, "{name}: {:?}", begin.elapsed());
                assert_good(mounted, name);
            }
        }
    });
}

#[test]
fn each_fault_by_io_uring() {
    each_fault(Transport::Uring);
}

#[test]
fn each_fault_by_dev_fuse() {
    each_fault(Transport::DevFuse);
}

fn start(mounted: &Mounted, script: &str) -> Child {
    mounted.site.spawn(Command::new("sh").args(["-c", script]).stderr(std::process::Stdio::null()))
}

fn ends(child: &mut Child) -> bool {
    let end = Instant::now() + SOON;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Many callers of a handler that never comes back: others do not notice, on any CPU, and the callers can be killed.
fn many_blocked(road: Transport) {
    // Nobody is given up in this test.
    faulty(road, Duration::from_secs(3600), |mounted| {
        let mut callers: Vec<Child> = (0..CALLERS).map(|_| start(mounted, "exec cat block-read")).collect();
        std::thread::sleep(Duration::from_millis(500));
        for caller in &mut callers {
            assert!(caller.try_wait().unwrap().is_none(), "a caller of a blocked handler has ended");
        }
        for cpu in 0..std::thread::available_parallelism().unwrap().get() {
            let ran = mounted.site.sh(&format!("exec taskset -c {cpu} cat good"), SOON);
            assert_eq!(ran.ok(), GOOD, "CPU {cpu}");
        }
        for caller in &mut callers {
            caller.kill().unwrap();
        }
        let left = callers.iter_mut().filter_map(|caller| (!ends(caller)).then_some(())).count();
        if left > 0 {
            mounted.emergency.abort();
        }
        assert_eq!(left, 0, "callers that cannot be killed");
    });
}

#[test]
fn many_blocked_by_io_uring() {
    many_blocked(Transport::Uring);
}

#[test]
fn many_blocked_by_dev_fuse() {
    many_blocked(Transport::DevFuse);
}
