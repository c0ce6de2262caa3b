//! The 9P device, mounted by the stock v9fs of a QEMU guest with Debian's kernel.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_dir::Dir;
use ferry_ninep::{DeviceOptions, Export, Options};
use ferry_tests::suites::fsx::{self, MAPPED, PLAIN};
use ferry_tests::suites::pjdfstest::{self, Results};
use ferry_tests::{
    Cache, Device, Guest, Kind, MOUNTPOINT, Mount, Place, Running, SETTLE, Share, collect, directory, guest_on, run,
};
use ferry_vfs::FileSystem;
use tempfile::TempDir;

const PROBE: &str = env!("CARGO_BIN_EXE_ferry-probe");
/// A guest without KVM on a machine that has other things to do.
const TIMEOUT: Duration = Duration::from_secs(600);
/// The same, with a suite of hundreds of cases.
const SUITE_TIMEOUT: Duration = Duration::from_secs(1800);

/// A fresh directory as a 9P device, and the host's root for the programs in it.
struct NineP {
    dir: Arc<Dir>,
    path: PathBuf,
    socket: PathBuf,
    programs: Share,
    _export: Export,
    _directory: TempDir,
}

impl NineP {
    fn new() -> Self {
        let options = ferry_tests::Options { cache: Cache::Auto, queues: 1, ..ferry_tests::Options::default() };
        let dir = ferry_dir::Options { read_only: true, ..ferry_dir::Options::default() };
        let programs = Share::of(Path::new("/"), directory(Place::Disk), dir, options);
        let directory = directory(Place::Disk);
        let path = directory.path().join("shared");
        fs::create_dir(&path).unwrap();
        let dir = Arc::new(Dir::open(&path, ferry_dir::Options::default()).unwrap());
        let socket = directory.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let source = Arc::clone(&dir) as Arc<dyn FileSystem>;
        let export = Export::vhost_user(listener, source, DeviceOptions::of("work"), Options::default()).unwrap();
        Self { dir, path, socket, programs, _export: export, _directory: directory }
    }

    fn guest(&self, options: &str, script: &str) -> Guest {
        self.guest_with(options, ["sh", "-euxc", script])
    }

    fn guest_with<S: Into<OsString>>(&self, options: &str, command: impl IntoIterator<Item = S>) -> Guest {
        let mut guest = guest_on(&self.programs.socket, command);
        guest.kind = Kind::Qemu { cpus: 2, root: Some("t".into()) };
        guest.devices.push(Device::ninep(&self.socket, "work"));
        guest.mounts = vec![Mount {
            fstype: "9p".into(),
            source: "work".into(),
            mountpoint: MOUNTPOINT.into(),
            options: format!("trans=virtio,version=9p2000.L,{options}"),
        }];
        guest
    }

    #[track_caller]
    fn assert_released(&self) {
        let end = Instant::now() + SETTLE;
        loop {
            let usage = self.dir.usage();
            if usage.inodes <= 1 && usage.handles == 0 {
                return;
            }
            assert!(Instant::now() < end, "still held: {usage:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn wait_for(&self, name: &str, guest: &Running) {
        let end = Instant::now() + TIMEOUT;
        while !self.path.join(name).exists() {
            assert!(Instant::now() < end, "the guest {} makes no {name}", guest.pid());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A tree goes in and out, in ways with and without a cache, and is the same on both sides.
#[test]
#[ignore = "long: make test-all"]
fn a_tree_is_the_same_on_both_sides() {
    let share = NineP::new();
    fs::create_dir(share.path.join("host")).unwrap();
    for (name, bytes) in [("empty", 0), ("small", 5), ("odd", 100_001), ("large", 5_000_000)] {
        let data: Vec<u8> = (0..bytes).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0]).collect();
        fs::write(share.path.join("host").join(name), data).unwrap();
    }
    symlink("../over there", share.path.join("host/link")).unwrap();
    for number in 0..100 {
        fs::write(share.path.join(format!("host/n{number}")), number.to_string()).unwrap();
    }
    let script = r#"
        mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose work /mnt/share && exit 1
        grep ' /mnt/share 9p .*trans=virtio' /proc/mounts
        for options in msize=512000,cache=none msize=512000,cache=loose msize=8192,cache=mmap \
            msize=131072,cache=readahead; do
            cd /
            umount /mnt/share
            mount -t 9p -o trans=virtio,version=9p2000.L,$options work /mnt/share
            cd /mnt/share
            rm -rf guest
            test "$(ls host | wc -l)" = 105
            cp -a host guest
            diff -r --no-dereference host guest
            mv guest/small guest/moved
            rm guest/n1*
            chmod 6711 guest/moved
            truncate -s 12345 guest/large
            exec 7<guest/n2; rm guest/n2; cat <&7; exec 7<&-
            dd if=/dev/urandom of=guest/random bs=1M count=16 2>/dev/null
            find host guest -type f | xargs md5sum | sort -k 2 >/tmp/sums
            cp /tmp/sums sums
            sync
        done
    "#;
    let ran = run(share.guest("msize=65536", script), TIMEOUT);
    println!("QEMU, a tree: {:?}", ran.took);
    ran.ok();
    share.assert_released();
    let sums = Command::new("sh")
        .args(["-c", "find host guest -type f | xargs md5sum | sort -k 2 | diff - sums"])
        .current_dir(&share.path)
        .output()
        .unwrap();
    assert!(sums.status.success(), "{}", String::from_utf8_lossy(&sums.stdout));
}

/// Counting under locks, by a guest and the host at the same time: none is lost. A wait is given up when its process is
/// killed, and ends as soon as the lock is free.
#[test]
#[ignore = "long: make test-all"]
fn locks_are_shared_with_the_host() {
    let share = NineP::new();
    fs::create_dir(share.path.join("posix")).unwrap();
    fs::write(share.path.join("file"), "").unwrap();
    let count = format!("{PROBE} --role count posix posix 60");
    let script = format!(
        "touch counting; {count}
        {PROBE} --role hold posix file </dev/null & waiting=$!; sleep 3; kill -9 $waiting; wait $waiting || echo $?
        echo gone >gone
        exec {PROBE} --role hold posix file </dev/null"
    );
    let start = Instant::now();
    let mut holder = Command::new(PROBE)
        .args(["--role", "hold", "posix", "file"])
        .current_dir(&share.path)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut [0; 5]).unwrap();
    let guest = share.guest("msize=512000,cache=none", &script).spawn().unwrap();
    share.wait_for("counting", &guest);
    assert!(Command::new("sh").args(["-euc", &count]).current_dir(&share.path).status().unwrap().success());
    share.wait_for("gone", &guest);
    // The other one waits by now, or comes in time to find the lock free.
    std::thread::sleep(Duration::from_secs(2));
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
    let ran = collect(guest, TIMEOUT, start);
    println!("QEMU, locks: {:?}", ran.took);
    assert!(ran.clone().ok().contains("137"), "{ran:?}");
    let sum = u64::from_le_bytes(fs::read(share.path.join("posix/number")).unwrap().try_into().unwrap());
    assert_eq!(sum, 120, "counts were lost");
    share.assert_released();
}

/// A guest that is killed holds nothing any more, also no lock, and the next one is served by the same device.
#[test]
#[ignore = "long: make test-all"]
fn a_guest_is_killed_and_another_one_comes() {
    let start = Instant::now();
    let share = NineP::new();
    fs::write(share.path.join("file"), "").unwrap();
    let script = format!(
        "exec 8<file
        sleep 1000 | {PROBE} --role hold posix file >/dev/null & sleep 2; touch ready
        dd if=/dev/zero of=written bs=64k count=100000 2>/dev/null"
    );
    let guest = share.guest("msize=512000,cache=none", &script).spawn().unwrap();
    share.wait_for("ready", &guest);
    share.wait_for("written", &guest);
    // A busy machine's guest takes its time between making it and writing to it.
    while fs::metadata(share.path.join("written")).unwrap().len() == 0 {
        assert!(start.elapsed() < TIMEOUT, "nothing is written");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(share.dir.usage().handles >= 2);
    guest.kill();
    drop(guest);
    share.assert_released();
    let script = format!("test -s written; rm written; {PROBE} --role hold posix file </dev/null; ls");
    let ran = run(share.guest("msize=512000,cache=loose", &script), TIMEOUT);
    assert!(ran.ok().contains("ready"));
    share.assert_released();
}

/// The ways in which Linux's client caches, with the longest messages that it has here.
const MODES: [&str; 4] = [
    "msize=512000,cache=none,posixacl",
    "msize=512000,cache=readahead",
    "msize=512000,cache=mmap",
    "msize=512000,cache=loose,posixacl",
];

/// Cases of `pjdfstest` that fail, the latter with `loose` only: see ninep.rs.
const FAILING_CASES: &[&str] = &["utimensat::subsecond"];
const FAILING_LOOSE: &[&str] = &[
    "rename::to_multiply_linked::block",
    "rename::to_multiply_linked::char",
    "rename::to_multiply_linked::fifo",
    "rename::to_multiply_linked::regular",
    "rename::to_multiply_linked::socket",
];

#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_in_every_mode() {
    for mode in MODES {
        let share = NineP::new();
        let config = directory(Place::Disk);
        let path = config.path().join("pjdfstest.toml");
        let command = pjdfstest::command(&path, Path::new(MOUNTPOINT), Path::new("/dev/shm"), false);
        let ran = run(share.guest_with(mode, command), SUITE_TIMEOUT);
        let results = Results::parse(&ran.out, &ran.err, false);
        let (passed, skipped) = (results.passed.len(), results.skipped.len());
        println!("QEMU, pjdfstest, {mode}: {passed} passed, {skipped} skipped, in {:?}", ran.took);
        let loose = if mode.contains("loose") { FAILING_LOOSE } else { &[] };
        let known: BTreeSet<_> = FAILING_CASES.iter().chain(loose).map(|name| (*name).to_owned()).collect();
        assert_eq!(results.failed, known, "other cases fail than are known to");
        share.assert_released();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn fsx_in_every_mode() {
    for (seed, mode) in (1..).zip(MODES) {
        let share = NineP::new();
        let files = directory(Place::Disk);
        let maps = !(mode.contains("none") || mode.contains("readahead"));
        let file = Path::new(MOUNTPOINT).join("file");
        let weights = if maps { MAPPED } else { PLAIN };
        let command = fsx::command(&files.path().join("fsx.toml"), &file, weights, 5000, seed);
        let ran = run(share.guest_with(mode, command), SUITE_TIMEOUT);
        println!("QEMU, fsx, {mode}: {:?}", ran.took);
        ran.ok();
        share.assert_released();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn dbench_in_every_mode() {
    let set = ferry_tests::GuestCache::from_env().unwrap().path().join("dbench");
    if !set.exists() {
        ferry_skip::skip!("no dbench: guest/fetch dbench brings it");
        return;
    }
    for mode in MODES {
        let share = NineP::new();
        let (program, load) = (set.join("bin/dbench"), set.join("root/usr/share/dbench/client.txt"));
        let script = format!("exec {} -c {} -t 20 -D . 4", program.display(), load.display());
        let ran = run(share.guest(mode, &script), SUITE_TIMEOUT);
        let out = ran.ok();
        let last = out.lines().last().unwrap_or_default();
        println!("QEMU, {mode}: {last}");
        assert!(last.starts_with("Throughput") && !out.contains("ERROR"), "{mode}: {out}");
        share.assert_released();
    }
}
