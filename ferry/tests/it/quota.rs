//! `--quota` of the program: with mounts and 9P, across a restart, and what is refused.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Signal;

use crate::common::{Server, ferry, needs_fuse, refused, run};

/// A directory and a mount point.
struct Places {
    _directory: tempfile::TempDir,
    dir: PathBuf,
    at: PathBuf,
}

impl Places {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (dir, at) = (directory.path().join("dir"), directory.path().join("mnt"));
        fs::create_dir(&dir).unwrap();
        fs::create_dir(&at).unwrap();
        Self { _directory: directory, dir, at }
    }

    /// Mounts the directory; the root itself has 4 KiB.
    fn mount(&self, flags: &[&str]) -> Server {
        let mut command = ferry();
        Server::start(command.arg("share").arg(&self.dir).args(flags).arg("--mount").arg(&self.at))
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        // Servers are killed, which leaves their mounts.
        let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
    }
}

/// What `df` shows: 1K-blocks, used and available; then inodes, used and free.
fn df(path: &Path) -> [u64; 6] {
    let output = run(Command::new("df").arg("--output=size,used,avail,itotal,iused,iavail").arg(path));
    let text = String::from_utf8(output.stdout).unwrap();
    let numbers = text.lines().nth(1).unwrap().split_whitespace().map(|word| word.parse().unwrap());
    numbers.collect::<Vec<_>>().try_into().unwrap()
}

/// Writes a file by `dd`; returns its size and what `dd` said.
fn dd(path: &Path, extra: &[&str]) -> (u64, String) {
    let of = format!("of={}", path.display());
    let mut command = Command::new("timeout");
    let output = run(command.args(["60", "dd", "if=/dev/zero", "bs=64K", &of]).args(extra).env("LC_ALL", "C"));
    (path.metadata().map_or(0, |found| found.len()), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Waits until a file of this size can be written: the room of a removed file comes back when the kernel forgets it.
#[track_caller]
fn dd_until(path: &Path, bytes: u64, flags: &[&str]) {
    let end = Instant::now() + Duration::from_secs(30);
    // With write-back, a count that fits.
    let count = if flags == ["--writeback"] { bytes / (64 << 10) } else { 1000 };
    let bytes = if flags == ["--writeback"] { count * (64 << 10) } else { bytes };
    while dd(path, &["conv=fsync", &format!("count={count}")]).0 != bytes {
        assert!(Instant::now() < end, "{:?}", df(path));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_mount_is_filled_and_emptied() {
    needs_fuse!();
    for flags in [&[][..], &["--writeback"], &["--cache", "none"], &["--path", "devfuse"]] {
        let places = Places::new();
        let own_kib = 4;
        let server = places.mount(&[&["--quota", "8M,files=10"], flags].concat());
        let [size, used, available, files, files_used, files_free] = df(&places.at);
        assert_eq!((size, used, available), (8192, own_kib, 8192 - own_kib), "{flags:?}");
        assert_eq!((files, files_used, files_free), (10, 1, 9), "{flags:?}");
        let (a, b) = (places.at.join("a"), places.at.join("b"));
        // With write-back, Linux takes whatever fits in memory, and fsync reports what did not fit on the disk.
        let (_, said) = dd(&a, &["conv=fsync", "count=300"]);
        assert!(said.contains("No space left on device"), "{flags:?}: {said}");
        let stored = places.dir.join("a").metadata().unwrap().blocks() * 512;
        assert_eq!(stored, (8192 - own_kib) << 10, "{flags:?}");
        assert_eq!(df(&places.at)[1..3], [8192, 0], "{flags:?}");
        assert_eq!(File::create(&b).unwrap_err().raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
        if flags != ["--writeback"] {
            let full = OpenOptions::new().append(true).open(&a).unwrap().write(b"x").unwrap_err();
            assert_eq!(full.raw_os_error(), Some(Errno::NOSPC.raw_os_error()), "{flags:?}");
        }
        // What is there can be written again.
        OpenOptions::new().write(true).open(&a).unwrap().write_all_at(&[1; 100_000], 5000).unwrap();
        fs::remove_file(&a).unwrap();
        dd_until(&b, (8192 - own_kib) << 10, flags);
        fs::remove_file(&b).unwrap();
        while df(&places.at)[1] > own_kib {
            std::thread::sleep(Duration::from_millis(10));
        }
        // Inodes.
        (0..9).for_each(|n| fs::write(places.at.join(n.to_string()), "").unwrap());
        let full = fs::create_dir(places.at.join("9")).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
        assert_eq!(df(&places.at)[3..], [10, 10, 0], "{flags:?}");
        fs::hard_link(places.at.join("0"), places.at.join("9")).unwrap();
        drop(server);
    }
}

#[test]
fn a_restarted_server_counts_existing_files() {
    needs_fuse!();
    let places = Places::new();
    let mut server = places.mount(&["--quota", "1M"]);
    fs::write(places.at.join("a"), vec![1; 600 << 10]).unwrap();
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    // By another process meanwhile.
    fs::write(places.dir.join("b"), vec![1; 100 << 10]).unwrap();
    let mut server = places.mount(&["--quota", "1M"]);
    assert_eq!(df(&places.at)[..3], [1024, 704, 320]);
    assert_eq!(dd(&places.at.join("c"), &[]).0, 320 << 10);
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    // A quota that is smaller than what is there.
    let _server = places.mount(&["--quota", "0"]);
    assert_eq!(df(&places.at)[2], 0);
    assert!(File::create(places.at.join("d")).is_err());
    fs::remove_file(places.at.join("a")).unwrap();
    assert!(File::create(places.at.join("d")).is_err());
}

#[test]
fn an_unlinked_file_takes_room_until_it_is_closed() {
    needs_fuse!();
    let places = Places::new();
    let _server = places.mount(&["--quota", "1M"]);
    let path = places.at.join("a");
    let mut file = File::create(&path).unwrap();
    file.write_all(&vec![1; 800 << 10]).unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(dd(&places.at.join("b"), &[]).0, 220 << 10);
    file.write_all(&[1; 8192]).unwrap_err();
    drop(file);
    dd_until(&places.at.join("c"), 800 << 10, &[]);
}

#[test]
fn quotas_that_could_not_hold_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (dir, socket) = (directory.path(), directory.path().join("s"));
    for (flags, words) in [
        (&["--quota", "1G", "--dax", "128M"][..], "--quota and --dax exclude each other"),
        (&["--quota", "18446744073709551616"], "is not a quota"),
        (&["--quota", "1G,files=x"], "\"files=x\" is not possible"),
        (&["--quota", "1G", "--mount", "/mnt", "--passthrough", "on"], "--quota and --passthrough on exclude"),
    ] {
        let output = run(ferry().arg("share").arg(dir).args(flags).arg("--virtiofs").arg(&socket));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {said}");
        assert!(said.contains(words) && !socket.exists(), "{flags:?}: {said}");
    }
    let output = run(ferry().args(["share", "mem", "--quota", "1G", "--virtiofs"]).arg(&socket));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("--quota is for directories, and mem is not one"), "{said}");
    let mut command = ferry();
    command.arg("share").arg(dir).args(["--quota", "1G", "--virtiofs"]).arg(&socket).arg(dir);
    let said = refused(2, command.arg("--virtiofs").arg(directory.path().join("t")));
    assert!(said.contains("share the same files with different flags"), "{said}");
}

/// In the sandbox, where the tree is counted, and counted again.
#[test]
fn clients_of_9p_have_the_quota_of_the_server() {
    needs_fuse!();
    let places = Places::new();
    fs::write(places.dir.join("host"), vec![1; 500 << 10]).unwrap();
    let socket = format!("unix:{}", places.dir.with_file_name("sock").display());
    let mut command = ferry();
    let _server =
        Server::start(command.arg("share").arg(&places.dir).args(["--quota", "1M,files=5", "--9p"]).arg(&socket));
    let mut command = ferry();
    let source = format!("9p:{socket}");
    let _client = Server::start(command.args(["share", &source, "--cache", "none", "--mount"]).arg(&places.at));
    assert_eq!(df(&places.at)[..5], [1024, 504, 520, 5, 2]);
    let (path, other) = (places.at.join("f"), places.at.join("g"));
    let (size, said) = dd(&path, &["count=100"]);
    assert!(size == 520 << 10 && said.contains("No space left on device"), "{size}: {said}");
    assert_eq!(df(&places.at)[1..3], [1024, 0]);
    fs::remove_file(places.dir.join("host")).unwrap();
    dd_until(&other, 500 << 10, &[]);
}
