//! The 9P export, mounted by a real kernel: the stock v9fs of a User-mode Linux guest, by TCP.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ferry_ninep::Options;
use ferry_tests::ninep::{NinePShare, TREE};
use ferry_tests::suites::fsx::{self, MAPPED, PLAIN};
use ferry_tests::suites::pjdfstest::{self, Results};
use ferry_tests::{GuestResult, MOUNTPOINT, Place, TIMEOUT, collect, directory, run};

const PROBE: &str = env!("CARGO_BIN_EXE_ferry-probe");

/// The ways in which Linux's client caches, with messages of different sizes.
const MODES: [&str; 4] = [
    "msize=1048576,cache=none,posixacl",
    "msize=65536,cache=readahead",
    "msize=131072,cache=mmap",
    "msize=1048576,cache=loose,posixacl",
];

/// The mode that is the last of those, and a cache of another kind below it, which no guest here has a place for.
const FSCACHE: &str = "msize=1048576,cache=fscache,posixacl";

/// What Linux's client, with one message under way, gets out of files that are on the disk only. The rates are for people:
/// what is asserted is how much the host was asked to read ahead.
#[test]
#[ignore = "long: make test-all"]
fn cold_files_are_read_ahead_of_the_kernels_client() {
    const FILES: u64 = 5;
    const FILE_BYTES: u64 = 64 << 20;
    let mut rates: Vec<(&str, u64, Vec<u64>)> = Vec::new();
    let noise: Vec<u8> =
        (0..FILE_BYTES / 8).flat_map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    for (round, mode) in (0..2).flat_map(|round| [MODES[0], MODES[3]].map(|mode| (round, mode))) {
        let both = [0, Options::default().read_ahead_bytes_max];
        // The other one first in the second round.
        for read_ahead_bytes_max in [both[round], both[1 - round]] {
            let options = Options { read_ahead_bytes_max, ..Options::default() };
            let Some(share) = NinePShare::with(Place::Disk, options) else { return };
            for number in 0..FILES {
                let path = share.path.join(format!("f{number}"));
                fs::write(&path, &noise).unwrap();
                let file = File::open(&path).unwrap();
                rustix::fs::fsync(&file).unwrap();
                rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            }
            let script = "for file in f?; do
                begin=$(date +%s%N); dd if=$file of=/dev/null bs=1M 2>/dev/null; end=$(date +%s%N)
                echo $((64 * 1000000000 / (end - begin)))
            done";
            let out = share.sh(mode, script).ok();
            let asked = share.read_ahead_bytes();
            match read_ahead_bytes_max {
                0 => assert_eq!(asked, 0),
                // A client that does not coalesce asks for 4 KiB at a time, and that is in order, too.
                _ => assert!(asked > FILES * FILE_BYTES * 9 / 10, "{mode}: {asked} bytes were asked for"),
            }
            rates.push((mode, read_ahead_bytes_max, out.lines().map(|line| line.parse().unwrap()).collect()));
        }
    }
    for (mode, read_ahead, rates) in rates {
        println!("{mode}, up to {read_ahead} bytes ahead: {rates:?} MiB/s");
    }
}

/// A tree goes in and out, and is the same on both sides. `None` if it could not be tried.
fn tree_in(mode: &str, sh: impl FnOnce(&NinePShare, &str) -> GuestResult) -> Option<()> {
    let share = NinePShare::new(Place::Disk)?;
    fs::create_dir(share.path.join("host")).unwrap();
    for (name, bytes) in [("empty", 0), ("small", 5), ("odd", 100_001), ("large", 5_000_000)] {
        let data: Vec<u8> = (0..bytes).map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0]).collect();
        fs::write(share.path.join("host").join(name), data).unwrap();
    }
    symlink("../over there", share.path.join("host/link")).unwrap();
    fs::hard_link(share.path.join("host/odd"), share.path.join("host/odd2")).unwrap();
    for number in 0..200 {
        fs::write(share.path.join(format!("host/n{number}")), number.to_string()).unwrap();
    }
    let ran = sh(&share, TREE);
    println!("{mode}: {:?}", ran.took);
    assert_eq!(ran.clone().ok(), "2", "{ran:?}");
    let on_host = Command::new("sh")
        .args(["-euc", "find . -type f ! -name sums | xargs md5sum | sort -k 2 | cmp - sums"])
        .current_dir(&share.path)
        .output()
        .unwrap();
    assert!(on_host.status.success(), "{mode}: {on_host:?}");
    let moved = fs::metadata(share.path.join("guest/moved")).unwrap();
    assert_eq!((moved.len(), moved.mode()), (5, 0o106_711), "{mode}");
    assert_eq!(fs::metadata(share.path.join("guest/large")).unwrap().len(), 12345, "{mode}");
    share.assert_released();
    Some(())
}

#[test]
fn trees_are_the_same_on_both_sides() {
    for mode in MODES.into_iter().chain([FSCACHE]) {
        let Some(()) = tree_in(mode, |share, script| share.sh(mode, script)) else { return };
    }
}

/// The same by the kernel's other transport for sockets.
#[test]
fn trees_by_unix_sockets_are_the_same_on_both_sides() {
    for mode in MODES.into_iter().chain([FSCACHE]) {
        let sh = |share: &NinePShare, script: &str| {
            let script = format!("grep -q 'trans=unix' /proc/mounts\n{script}");
            run(share.guest_by(Some(PROBE), mode, ["sh", "-euc", &script]), TIMEOUT)
        };
        let Some(()) = tree_in(mode, sh) else { return };
    }
}

/// Other versions of the protocol are not spoken: the mount fails at once and says so, and the server serves the next one.
#[test]
fn other_versions_are_refused() {
    let Some(share) = NinePShare::new(Place::Disk) else { return };
    for version in ["9p2000", "9p2000.u"] {
        // The last one counts.
        let ran = share.sh(&format!("{},version={version}", MODES[0]), "echo mounted; cat /proc/mounts");
        assert!(ran.status != 0 && !ran.out.contains("mounted"), "{version}: {ran:?}");
        assert!(ran.err.contains("Remote I/O error"), "{version}: {ran:?}");
    }
    share.sh(MODES[0], "grep 'version=9p2000.L\\|trans=tcp' /proc/mounts; echo text >file").ok();
    assert_eq!(fs::read(share.path.join("file")).unwrap(), b"text\n");
    share.assert_released();
}

/// Linux's client cannot: there is no message for it in 9P2000.L, or it does not use the one there is.
const NO_FALLOCATE: &str = "the client has no fallocate, and this check makes use of it among other calls";
const NO_SHARED_MAP: &str = "without write-back in its cache, the client refuses shared mappings that can be written";
const NO_ACL: &str = "the client is not mounted with posixacl";

/// Checks of what each system call does that fail in a guest by 9P, in which modes, and why: each is the client's.
const FAILING: &[(&str, &[&str], &str)] = &[
    ("rename-flags", &MODES, "there is no renameat2 in the protocol"),
    ("rename-storm", &MODES, "it exchanges names"),
    ("tmpfile", &MODES, "there is no O_TMPFILE in the protocol"),
    ("tmpfile-storm", &MODES, "as tmpfile"),
    ("sgid-directory", &MODES, "as tmpfile"),
    ("btime", &MODES, "the client does not pass the time of birth on"),
    ("times", &MODES, "the client cuts times that are set to seconds"),
    ("flags-ioctl", &MODES, "there is no ioctl in the protocol"),
    ("idmapped-mount", &MODES, "the client allows none"),
    ("flock", &MODES, "the client makes a POSIX lock of it, so the two kinds meet"),
    ("fallocate", &MODES, NO_FALLOCATE),
    ("set-id-rules-of-ranges", &MODES, NO_FALLOCATE),
    ("set-id-exec-after-ranges", &MODES, NO_FALLOCATE),
    ("capabilities-cleared", &MODES, NO_FALLOCATE),
    ("holes", &MODES, "there is no SEEK_HOLE in the protocol"),
    ("mmap-shared", &["none", "readahead"], NO_SHARED_MAP),
    ("mmap-private", &["none", "readahead"], NO_SHARED_MAP),
    ("mmap-after-truncate", &["none", "readahead"], NO_SHARED_MAP),
    ("mapping-processes", &["none", "readahead"], NO_SHARED_MAP),
    ("mixed-opens", &["none", "readahead"], NO_SHARED_MAP),
    (
        "set-id-exec-after-mapping",
        &["none", "readahead", "mmap"],
        "as mmap-shared, or what is written back takes suid along, which a local file system keeps",
    ),
    ("acl", &["mmap", "readahead"], NO_ACL),
    ("acl-default", &["mmap", "readahead"], NO_ACL),
    ("acl-clears-sgid", &["mmap", "readahead"], NO_ACL),
];

/// Returns the checks that fail in a mode.
pub(crate) fn known(mode: &str) -> BTreeSet<String> {
    let known = FAILING.iter().filter(|(_, modes, _)| modes.iter().any(|known| mode.contains(known)));
    known.map(|(name, ..)| (*name).to_owned()).collect()
}

#[test]
#[ignore = "long: make test-all"]
fn system_calls_behave_as_on_a_local_file_system() {
    for mode in MODES {
        let Some(share) = NinePShare::new(Place::Disk) else { return };
        let script = format!("mkdir -p disk && exec {PROBE} {MOUNTPOINT}/disk");
        let ran = run(share.guest(mode, ["sh", "-c", &script]), Duration::from_secs(600));
        let failed = |line: &str| line.split_once(" FAILED").map(|(name, _)| name.to_owned());
        let failed: BTreeSet<String> = ran.out.lines().filter_map(failed).collect();
        let lines = ran.out.lines().count();
        println!("{mode}: {lines} checks in {:?}, failed: {failed:?}", ran.took);
        assert_eq!((lines, failed), (72, known(mode)), "not what is known to fail:\n{}\n{}", ran.out, ran.err);
        share.assert_released();
    }
}

fn fsx_in(mode: &str, weights: &str, operations: u32, seed: u32) {
    let Some(share) = NinePShare::new(Place::Disk) else { return };
    let files = directory(Place::Disk);
    let file = Path::new(MOUNTPOINT).join("file");
    let command = fsx::command(&files.path().join("fsx.toml"), &file, weights, operations, seed);
    let ran = run(share.guest(mode, command), Duration::from_secs(120 + u64::from(operations) / 20));
    println!("fsx, {mode}, {operations} operations: {:?}", ran.took);
    ran.ok();
    share.assert_released();
}

#[test]
fn fsx_without_a_cache() {
    fsx_in(MODES[0], PLAIN, 2000, 1);
}

#[test]
fn fsx_with_maps() {
    fsx_in(MODES[2], MAPPED, 2000, 2);
}

#[test]
fn fsx_cached() {
    fsx_in(MODES[3], MAPPED, 2000, 3);
}

#[test]
#[ignore = "long: make test-all"]
fn fsx_in_every_mode() {
    for (seed, mode) in (4..).zip(MODES.into_iter().chain([FSCACHE])) {
        let maps = !(mode.contains("none") || mode.contains("readahead"));
        fsx_in(mode, if maps { MAPPED } else { PLAIN }, 20_000, seed);
    }
}

/// Cases of `pjdfstest` that fail, in which modes, and why.
const FAILING_CASES: &[(&str, &[&str], &str)] = &[
    ("utimensat::subsecond", &["cache"], "the client cuts times that are set to seconds"),
    ("rename::to_multiply_linked::block", &["loose", "fscache"], NO_CTIME),
    ("rename::to_multiply_linked::char", &["loose", "fscache"], NO_CTIME),
    ("rename::to_multiply_linked::fifo", &["loose", "fscache"], NO_CTIME),
    ("rename::to_multiply_linked::regular", &["loose", "fscache"], NO_CTIME),
    ("rename::to_multiply_linked::socket", &["loose", "fscache"], NO_CTIME),
];
const NO_CTIME: &str =
    "with its loose cache the client does not ask for the ctime of a file that lost a name by a rename";

#[test]
#[ignore = "long: make test-all"]
fn pjdfstest_in_every_mode() {
    for mode in MODES.into_iter().chain([FSCACHE]) {
        let Some(share) = NinePShare::new(Place::Disk) else { return };
        let config = directory(Place::Disk);
        let path = config.path().join("pjdfstest.toml");
        let command = pjdfstest::command(&path, Path::new(MOUNTPOINT), Path::new("/dev/shm"), false);
        let ran = run(share.guest(mode, command), Duration::from_secs(900));
        let results = Results::parse(&ran.out, &ran.err, false);
        let (passed, skipped) = (results.passed.len(), results.skipped.len());
        println!("pjdfstest, {mode}: {passed} passed, {skipped} skipped, in {:?}", ran.took);
        println!("skipped: {:?}, failed: {:?}", results.skipped_for_good(), results.failed);
        let known = FAILING_CASES.iter().filter(|(_, modes, _)| modes.iter().any(|known| mode.contains(known)));
        let known: BTreeSet<_> = known.map(|(name, ..)| (*name).to_owned()).collect();
        assert_eq!(results.failed, known, "other cases fail than are known to");
        share.assert_released();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn dbench_in_every_mode() {
    let cache = ferry_tests::GuestCache::from_env().unwrap();
    let set = cache.path().join("dbench");
    if !set.exists() {
        ferry_skip::skip!("no dbench: guest/fetch dbench brings it");
        return;
    }
    for mode in MODES.into_iter().chain([FSCACHE]) {
        let Some(share) = NinePShare::new(Place::Disk) else { return };
        let (program, load) = (set.join("bin/dbench"), set.join("root/usr/share/dbench/client.txt"));
        let script = format!("exec {} -c {} -t 20 -D . 4", program.display(), load.display());
        let ran = run(share.guest(mode, ["sh", "-euc", &script]), Duration::from_secs(600));
        let out = ran.ok();
        let last = out.lines().last().unwrap_or_default();
        println!("{mode}: {last}");
        assert!(last.starts_with("Throughput") && !out.contains("ERROR"), "{mode}: {out}");
        share.assert_released();
    }
}

/// Counting under locks, by a guest and the host at the same time: none is lost, so the locks are real and shared.
#[test]
fn locks_are_shared_with_the_host() {
    let Some(share) = NinePShare::new(Place::Disk) else { return };
    fs::create_dir(share.path.join("posix")).unwrap();
    let script = format!("exec {PROBE} --role count posix posix 60");
    let start = Instant::now();
    let guest = share.guest(MODES[0], ["sh", "-euc", &script]).spawn().unwrap();
    let host = Command::new("sh").args(["-euc", &script]).current_dir(&share.path).status().unwrap();
    collect(guest, TIMEOUT, start).ok();
    assert!(host.success());
    let sum = u64::from_le_bytes(fs::read(share.path.join("posix/number")).unwrap().try_into().unwrap());
    assert_eq!(sum, 120, "counts were lost");
    share.assert_released();
}

/// A lock that the host holds is waited for, with one message and no asking again; a wait that is interrupted ends at
/// once, and nobody has the lock then.
#[test]
fn a_wait_for_a_lock_can_be_interrupted() {
    let Some(share) = NinePShare::new(Place::Disk) else { return };
    fs::write(share.path.join("file"), "").unwrap();
    let mut holder = Command::new(PROBE)
        .args(["--role", "hold", "posix", "file"])
        .current_dir(&share.path)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 5];
    std::io::Read::read_exact(holder.stdout.as_mut().unwrap(), &mut said).unwrap();
    let script = format!(
        "{PROBE} --role hold posix file </dev/null & waiting=$!; sleep 2; kill -9 $waiting; wait $waiting || echo $?
        echo gone >gone
        exec {PROBE} --role hold posix file </dev/null"
    );
    let start = Instant::now();
    let guest = share.guest(MODES[0], ["sh", "-uc", &script]).spawn().unwrap();
    while !share.path.join("gone").exists() {
        assert!(start.elapsed() < TIMEOUT, "the wait does not end");
        std::thread::sleep(Duration::from_millis(50));
    }
    // The other goes on to wait. It gets the lock as soon as it is free: Linux itself would ask again after 30 s only.
    std::thread::sleep(Duration::from_secs(2));
    let freed = Instant::now();
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
    let ran = collect(guest, TIMEOUT, start);
    assert!(freed.elapsed() < Duration::from_secs(20), "{:?}", freed.elapsed());
    assert!(ran.clone().ok().contains("137"), "{ran:?}");
    share.assert_released();
}
