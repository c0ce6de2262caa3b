//! Mounts that fail, and servers that die.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use ferry_tests::mounts::{
    Cell, MountOptions, Mounted, Site, Source, assert_nothing_left, ferry, missing, mount_entry, program, unmount,
};
use ferry_tests::{GuestResult, Place, directory, on_cells};
use tempfile::TempDir;

const PROBE: &str = env!("CARGO_BIN_EXE_ferry-probe");

/// The time limit of each step; a longer step hangs.
const SOON: Duration = Duration::from_secs(30);

/// Returns the error of a refused mount.
#[track_caller]
fn sentence(ran: &GuestResult) -> &str {
    let text = ran.err.trim_end();
    assert_ne!(ran.status, 0, "it was not refused: {ran:?}");
    assert_eq!(text.lines().count(), 1, "not one sentence: {text}");
    assert!(text.starts_with("ferry: "), "{text}");
    text
}

/// A directory on a disk with a mount point; `None`: mounts are impossible here.
fn mountpoint() -> Option<(TempDir, PathBuf)> {
    if let Some(why) = missing() {
        ferry_skip::skip!("{why}");
        return None;
    }
    let directory = directory(Place::Disk);
    let at = directory.path().join("mnt");
    fs::create_dir(&at).unwrap();
    Some((directory, at))
}

/// Mounts in the background, as users do; returns the outcome of the command.
fn mount(source: &str, mountpoint: &Path, before: &[&str]) -> GuestResult {
    let mut words: Vec<PathBuf> = before.iter().map(PathBuf::from).collect();
    words.extend([program().into(), "mount".into(), source.into(), mountpoint.into()]);
    Site::on_host(Path::new("/")).run(Command::new(&words[0]).args(&words[1..]).env_remove("FERRY_LOG"), SOON)
}

#[test]
fn unsuitable_mount_points_are_refused() {
    let Some((directory, _)) = mountpoint() else { return };
    let place = |name: &str| directory.path().join(name);
    fs::write(place("file"), "").unwrap();
    fs::create_dir_all(place("full/inside")).unwrap();
    std::os::unix::fs::symlink("nowhere", place("link")).unwrap();
    for (name, words) in [
        ("none", &["does not exist", "mkdir"][..]),
        ("file", &["not a directory"]),
        ("full", &["not empty", "nonempty"]),
        ("link", &["does not exist"]),
        ("file/below", &["not"]),
    ] {
        let ran = mount("mem", &place(name), &[]);
        let text = sentence(&ran);
        assert!(text.contains(&*place(name).to_string_lossy()), "{text}");
        for word in words {
            assert!(text.contains(word), "{name}: '{word}' is not in: {text}");
        }
        assert_eq!(mount_entry(&place(name)), None);
    }
    let ran = mount(place("nothing").to_str().unwrap(), &place("full/inside"), &[]);
    assert!(sentence(&ran).contains("nothing"), "{ran:?}");
    let ran = mount(&format!("pmem:{}", place("full").display()), &place("full/inside"), &[]);
    assert!(sentence(&ran).contains("full"), "{ran:?}");
    assert_nothing_left(&place("full/inside").parent().unwrap().join("inside"));
}

#[test]
fn a_used_mount_point_is_refused() {
    let cell: Cell = "mem_devfuse".parse().unwrap();
    let Some(mounted) = Mounted::new(&cell) else { return };
    fs::write(mounted.site.path.join("file"), "still here").unwrap();
    let ran = mount("mem", &mounted.site.path, &[]);
    assert!(sentence(&ran).contains("already a ferry mount"), "{ran:?}");
    assert_eq!(fs::read_to_string(mounted.site.path.join("file")).unwrap(), "still here");
    mounted.finish();
}

#[test]
fn a_background_mount_is_ready_at_once() {
    let Some((_directory, at)) = mountpoint() else { return };
    mount("mem", &at, &[]).ok();
    // It exists when the command returns.
    assert!(mount_entry(&at).is_some_and(|entry| entry.contains("fuse.ferry")));
    fs::write(at.join("file"), "text").unwrap();
    assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "text");
    unmount(&at);
    assert_nothing_left(&at);
}

#[test]
fn a_missing_device_is_an_error() {
    let Some((_directory, at)) = mountpoint() else { return };
    // A separate device directory, as in a container.
    let script = "mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && exec \"$@\"";
    let ran = mount("mem", &at, &["unshare", "-m", "sh", "-euc", script, "sh"]);
    let text = sentence(&ran);
    assert!(text.contains("modprobe fuse") && text.contains("/dev/fuse"), "{text}");
    assert_nothing_left(&at);
}

/// With increasing limits of descriptors a mount is refused with an error, until the limit suffices.
#[test]
fn too_few_descriptors_are_an_error() {
    let Some((_directory, at)) = mountpoint() else { return };
    let (mut refused, mut worked) = (0, 0);
    for limit in (6..=64).step_by(2) {
        let ran = mount("mem", &at, &["prlimit", &format!("--nofile={limit}:{limit}")]);
        if ran.status == 0 {
            // A successful mount works.
            fs::write(at.join("file"), "text").unwrap();
            assert_eq!(fs::read_to_string(at.join("file")).unwrap(), "text");
            unmount(&at);
            worked += 1;
        } else {
            let text = sentence(&ran);
            assert!(text.contains("descriptor") && text.contains("ulimit -n"), "limit {limit}: {text}");
            // The cause and the advice are given once.
            assert!(text.matches("os error").count() <= 1, "limit {limit}: {text}");
            assert_eq!(text.matches("ulimit -n").count(), 1, "limit {limit}: {text}");
            refused += 1;
        }
        assert_nothing_left(&at);
    }
    println!("{refused} limits refused, {worked} worked");
    assert!(refused > 0 && worked > 0, "{refused} limits refused, {worked} worked");
}

/// Programs that keep a mount busy until they fail.
fn load(site: &Site) -> Vec<Child> {
    let churn = [PROBE, "--role", "churn", ".", "600"];
    let copy = ["sh", "-c", "while dd if=/dev/zero of=copied bs=64k count=64 conv=notrunc 2>/dev/null; do :; done"];
    let read = ["sh", "-c", "while cat copied >/dev/null 2>&1; do :; done"];
    fs::write(site.path.join("copied"), "").unwrap();
    let start =
        |words: &[&str]| site.spawn(Command::new(words[0]).args(&words[1..]).stderr(std::process::Stdio::null()));
    vec![start(&churn), start(&copy), start(&read)]
}

fn killed(cell: &Cell) {
    let options = MountOptions { limit: Duration::from_secs(120), ..MountOptions::default() };
    let Some(mounted) = Mounted::with(cell, &options) else { return };
    let at = mounted.site.path.clone();
    let kept = File::create(at.join("kept")).unwrap();
    kept.write_all_at(b"before", 0).unwrap();
    kept.sync_all().unwrap();
    let mut load = load(&mounted.site);
    std::thread::sleep(Duration::from_millis(700));
    for child in &mut load {
        assert!(child.try_wait().unwrap().is_none(), "{cell}: the load has ended early: {}", mounted.said());
    }
    let socket = PathBuf::from("/run/ferry").join(mounted.server().pid().as_raw_nonzero().to_string());
    assert!(socket.exists(), "{cell}: no control socket {}", socket.display());
    mounted.server().kill();
    let end = Instant::now() + SOON;
    for child in &mut load {
        while child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "{cell}: a process still waits for the dead server");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let error = |error: std::io::Error| error.raw_os_error().unwrap();
    assert_eq!(error(fs::metadata(at.join("kept")).unwrap_err()), libc::ENOTCONN, "{cell}: a lookup");
    assert_eq!(error(fs::write(at.join("new"), "").unwrap_err()), libc::ENOTCONN, "{cell}: a new file");
    // A file of the dead mount is still open, and the next mount replaces it nevertheless.
    let next = Mounted::again(*cell, &at, &options);
    if cell.source == Source::Mem {
        assert_eq!(fs::read_dir(&at).unwrap().count(), 0, "{cell}: memory outlived its server");
    } else {
        assert_eq!(fs::read_to_string(at.join("kept")).unwrap(), "before", "{cell}");
    }
    fs::write(at.join("after"), "after").unwrap();
    assert_eq!(fs::read_to_string(at.join("after")).unwrap(), "after");
    if !cell.passes_through() {
        assert!(kept.metadata().is_err(), "{cell}: a file of the dead mount");
    }
    drop(kept);
    next.finish();
    assert!(!socket.exists(), "{cell}: the dead server's control socket is left");
}

on_cells!(killed: quick [mem_uring, mem_devfuse, dir_passthrough, pmem_uring, ninep_devfuse]
    long [dir_uring, dir_devfuse, mem_passthrough, pmem_devfuse, mem_uring_always]);

/// Signals end a mount, also with open files.
#[test]
fn signals_end_a_mount() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let cell: Cell = "mem_devfuse".parse().unwrap();
        let Some(mounted) = Mounted::new(&cell) else { return };
        let at = mounted.site.path.clone();
        fs::write(at.join("file"), "text").unwrap();
        let pid = mounted.server().pid();
        rustix::process::kill_process(pid, signal).unwrap();
        let status = mounted.server().wait(SOON);
        assert!(status.is_some_and(|status| status.success()), "{signal:?}: {status:?}: {}", mounted.said());
        assert_eq!(mount_entry(&at), None, "{signal:?}");
    }
}

/// Unavailable features are refused before anything is mounted.
#[test]
fn unavailable_features_are_reported() {
    let Some((directory, at)) = mountpoint() else { return };
    let pmem = format!("pmem:{}", directory.path().join("below").display());
    let here = Site::on_host(directory.path());
    for (args, words) in [
        (&["mem", "--passthrough", "on", "--writeback"][..], &["writeback", "passthrough"][..]),
        (&[&pmem, "--size", "256M", "--passthrough", "on"], &["passthrough"]),
        (&["mem", "--path", "carrier-pigeon"], &["carrier-pigeon"]),
    ] {
        let ran = here.run(ferry(["mount"]).args(args).arg(&at), SOON);
        assert_ne!(ran.status, 0, "{args:?}: {ran:?}");
        for word in words {
            assert!(ran.err.contains(word), "{args:?}: '{word}' is not in: {}", ran.err);
        }
        assert_nothing_left(&at);
    }
}

/// Each keeps an entry of its CPU's ring, and without a free one the unlock would not arrive.
const MANY_WAITERS: &str = r#"
import errno, fcntl, os, resource, sys, threading, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
threading.stack_size(64 << 10)
path, count = sys.argv[1], 2200
holder = open(path, 'w')
fcntl.flock(holder, fcntl.LOCK_EX)
refused, got, tried = [], [], threading.Semaphore(0)
def wait():
    with open(path) as file:
        tried.release()
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            got.append(1)
        except OSError as error:
            refused.append(error.errno)
threads = [threading.Thread(target=wait) for _ in range(count)]
for thread in threads: thread.start()
for _ in threads: tried.acquire()
end = time.time() + 60
while not refused and time.time() < end: time.sleep(0.01)
os.stat(os.path.dirname(path))
fcntl.flock(holder, fcntl.LOCK_UN)
for thread in threads: thread.join()
assert len(got) + len(refused) == count and len(got) > 500, (len(got), len(refused))
assert set(refused) == {errno.ENOLCK}, set(refused)
"#;

#[test]
fn as_many_waiting_locks_as_entries_leave_room_for_the_unlock() {
    let cell: Cell = "dir_uring_none".parse().unwrap();
    let Some(mounted) = Mounted::with(&cell, &MountOptions::default()) else { return };
    let file = mounted.site.path.join("file");
    fs::write(&file, "").unwrap();
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "175", "python3", "-c", MANY_WAITERS]).arg(&file);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    mounted.finish();
}
