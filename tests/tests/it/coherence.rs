//! One directory, changed through one mount, by another process or on the host, and read through another mount: how
//! stale is the result?

use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ferry_tests::mounts::{Cell, MountOptions, Mounted, Pair, each_change, ferry, missing};
use ferry_tests::{Place, directory, on_cells};

/// What a busy machine may add to any bound.
const SLACK: Duration = Duration::from_secs(20);
/// What it may add in the best of several rounds: it may hold up a mount's server or us for any time, but not each time.
const SLACK_LEAST: Duration = Duration::from_millis(500);
/// What a whole test may take.
const LIMIT: Duration = Duration::from_secs(400);

fn options(args: &[&str]) -> MountOptions {
    let args = args.iter().map(|arg| (*arg).to_owned()).collect();
    MountOptions { args, limit: LIMIT, ..MountOptions::default() }
}

/// Every kind of change by a process of the host, seen through a mount that keeps everything.
fn host_changes(cell: &Cell) {
    let Some(mounted) = Mounted::with(cell, &options(&["--watch", "always"])) else { return };
    let mut late = Vec::new();
    for _ in 0..3 {
        each_change(&mounted.below, &mounted.site.path, &mut late);
    }
    println!("{cell}, changed on the host: of 63 changes {} were seen at a second look: {late:?}", late.len());
    mounted.finish();
}

on_cells!(host_changes: quick [dir_devfuse_always, dir_uring_always, dir_passthrough_always] long [dir_uring_metadata]);

/// Two processes: each hears of the other's changes from the host.
fn process_changes(cells: [&str; 2]) {
    let [one, two]: [Cell; 2] = cells.map(|name| name.parse().unwrap());
    let shared = directory(Place::Disk);
    let Some(first) = Mounted::of_dir(shared.path(), &one, &options(&[])) else { return };
    let Some(second) = Mounted::of_dir(shared.path(), &two, &options(&[])) else { return };
    let mut late = Vec::new();
    for _ in 0..2 {
        each_change(&first.site.path, &second.site.path, &mut late);
        each_change(&second.site.path, &first.site.path, &mut late);
    }
    println!("{one} and {two}, two processes: of 84 changes {} were seen at a second look: {late:?}", late.len());
    first.finish();
    second.finish();
}

#[test]
fn two_processes_by_dev_fuse_and_io_uring() {
    process_changes(["dir_devfuse_always", "dir_uring_always"]);
}

#[test]
fn two_processes_with_passthrough() {
    process_changes(["dir_passthrough_always", "dir_devfuse_always"]);
}

/// An open shows the current size of a file, however long the mount's kernel may cache attributes.
fn opened_now(cell: &Cell) {
    let shared = directory(Place::Disk);
    let kept = ["--attr-timeout", "1000", "--entry-timeout", "1000", "--watch", "never"];
    let Some(mounted) = Mounted::of_dir(shared.path(), cell, &options(&kept)) else { return };
    fs::create_dir_all(shared.path().join("a/b")).unwrap();
    let [here, there] = [shared.path(), &mounted.site.path].map(|path| path.join("a/b/file"));
    // Nothing but open and read: what asks for all attributes learns the length from the server.
    let read = || {
        let mut bytes = [0; 4096];
        let count = File::open(&there).unwrap().read(&mut bytes).unwrap();
        String::from_utf8(bytes[..count].to_vec()).unwrap()
    };
    let mut expected = String::from("begin");
    fs::write(&here, &expected).unwrap();
    for round in 0..5 {
        assert_eq!(read(), expected);
        File::options().append(true).open(&here).unwrap().write_all(b" and on").unwrap();
        expected += " and on";
        assert_eq!(read(), expected, "round {round}");
    }
    mounted.finish();
}

on_cells!(opened_now: quick [dir_devfuse_auto, dir_uring_auto] long []);

/// How late something is seen, and after how many looks.
#[track_caller]
fn lag(what: &str, bound: Duration, change: impl FnOnce(), seen: impl Fn() -> bool) -> (Duration, u32) {
    assert!(!seen(), "{what}: seen before it was made");
    change();
    let begin = Instant::now();
    let mut looks = 1;
    while !seen() {
        assert!(begin.elapsed() < bound + SLACK, "{what}: not seen within {bound:?}");
        std::thread::sleep(Duration::from_millis(1));
        looks += 1;
    }
    (begin.elapsed(), looks)
}

/// When a process with cached data must see a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Staleness {
    /// When he looks again, for he is asked each time.
    AtOnce,
    /// So long after it was made, or by then if he is told.
    Within(Duration),
}

/// How late changes through `one` are seen through `two`, which knows what was there before; never later than is said.
fn measure(what: &str, one: &Path, two: &Path, seen: Staleness) {
    let bound = match seen {
        Staleness::AtOnce => Duration::ZERO,
        Staleness::Within(bound) => bound,
    };
    let name = |number: u32| (one.join(format!("f{number}")), two.join(format!("f{number}")));
    let mut worst: [(Duration, u32); 5] = Default::default();
    let mut least = [Duration::MAX; 5];
    for number in 0..3 {
        let (here, there) = name(number);
        let size = || fs::metadata(&there).map_or(0, |found| found.len());
        let new = lag("a new name", bound, || fs::write(&here, "one").unwrap(), || there.exists());
        assert_eq!(fs::read(&there).unwrap(), b"one");
        let mode = lag(
            "a mode",
            bound,
            || fs::set_permissions(&here, Permissions::from_mode(0o640)).unwrap(),
            || fs::metadata(&there).unwrap().mode() & 0o777 == 0o640,
        );
        let before = fs::metadata(&there).unwrap().mtime_nsec();
        let append = || File::options().append(true).open(&here).unwrap().write_all(b" and two").unwrap();
        let longer = lag("a size and its time", bound, append, || {
            size() == 11 && fs::metadata(&there).unwrap().mtime_nsec() != before
        });
        let read = || fs::read(&there).unwrap_or_default();
        assert_eq!(read(), b"one and two");
        let over = || File::options().write(true).open(&here).unwrap().write_all_at(b"ONE", 0).unwrap();
        let data = lag("bytes", bound, over, || read() == b"ONE and two");
        let gone = lag("a removal", bound, || fs::remove_file(&here).unwrap(), || !there.exists());
        for (at, now) in [new, mode, longer, data, gone].into_iter().enumerate() {
            worst[at] = worst[at].max(now);
            least[at] = least[at].min(now.0);
        }
    }
    let names = ["name", "mode", "size", "data", "removal"];
    let shown: Vec<_> =
        names.iter().zip(worst).map(|(name, (lag, looks))| format!("{name} {lag:.1?}/{looks}")).collect();
    println!("{what}: {seen:?}; latest/looks: {}", shown.join(", "));
    match seen {
        Staleness::AtOnce => {
            assert!(worst.iter().all(|(_, looks)| *looks == 1), "{what}: not at the first look: {shown:?}")
        }
        Staleness::Within(bound) => {
            assert!(least.iter().all(|lag| *lag <= bound + SLACK_LEAST), "{what}: not within {bound:?}: {least:.1?}");
        }
    }
}

/// The allowed staleness: none, a second, or until a notification.
fn when(cache: &str, writeback: bool, told: bool) -> Staleness {
    match cache {
        // Who writes back believes what it knows until it is told.
        "none" if !writeback => Staleness::AtOnce,
        "auto" if !told => Staleness::Within(Duration::from_secs(1)),
        _ => Staleness::Within(Duration::ZERO),
    }
}

const MODES: [&str; 4] = ["none", "auto", "metadata", "always"];

fn cell(cache: &str, writeback: bool) -> Cell {
    Cell { writeback, ..format!("dir_devfuse_{cache}").parse().unwrap() }
}

/// In both directions, two mounts of one process.
fn one_process(on: bool) {
    for cache in MODES {
        let Some(pair) = Pair::new([&cell(cache, on), &cell(cache, on)], LIMIT) else { return };
        let [a, b] = pair.paths();
        let what = format!("one process, cache={cache}{}", if on { ", writeback" } else { "" });
        measure(&what, a, b, when(cache, on, true));
        measure(&what, b, a, when(cache, on, true));
        pair.finish();
    }
}

#[test]
fn staleness_in_one_process() {
    one_process(false);
}

/// Kernels before 6.18 cannot be told to give up a length that they wrote themselves.
#[test]
fn staleness_in_one_process_written_back() {
    if can_prune() {
        one_process(true);
    }
}

fn can_prune() -> bool {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < (6, 18) {
        ferry_skip::skip!("Linux {release} has no FUSE_NOTIFY_PRUNE");
    }
    version >= (6, 18)
}

/// Two processes, and the host.
fn two_processes(on: bool) {
    for cache in MODES {
        let shared = directory(Place::Disk);
        let start = || Mounted::of_dir(shared.path(), &cell(cache, on), &options(&[]));
        let (Some(first), Some(second)) = (start(), start()) else { return };
        let what = format!("two processes, cache={cache}{}", if on { ", writeback" } else { "" });
        let told = on || matches!(cache, "metadata" | "always");
        measure(&what, &first.site.path, &second.site.path, when(cache, on, told));
        measure(&format!("{what}, from the host"), shared.path(), &second.site.path, when(cache, on, told));
        first.finish();
        second.finish();
    }
}

#[test]
fn staleness_in_two_processes() {
    two_processes(false);
}

#[test]
fn staleness_in_two_processes_written_back() {
    if can_prune() {
        two_processes(true);
    }
}

/// Two sources of one directory in one process, because their flags differ: our own changes are told, too.
#[test]
fn staleness_in_one_process_with_two_sources() {
    for cache in ["auto", "always"] {
        let cells = [&cell(cache, false), &cell(cache, false)];
        let Some(pair) = Pair::with_each(cells, LIMIT, [&["--read-only"], &[]]) else { return };
        let [a, b] = pair.paths();
        measure(&format!("one process, two sources, cache={cache}"), b, a, Staleness::Within(Duration::ZERO));
        pair.finish();
    }
}

/// More changes than the kernel keeps, while the server is stopped: everything is looked at again.
#[test]
fn too_many_changes_drop_all_caches() {
    let limit = fs::read_to_string("/proc/sys/fs/fanotify/max_queued_events").unwrap_or_default();
    let limit: u32 = limit.trim().parse().unwrap_or(u32::MAX);
    if limit > 200_000 {
        ferry_skip::skip!("the kernel keeps {limit} events");
        return;
    }
    let Some(mounted) = Mounted::with(&cell("always", false), &options(&["--watch", "always"])) else { return };
    let (host, seen) = (&mounted.below, &mounted.site.path);
    fs::write(host.join("old"), "old").unwrap();
    assert!(seen.join("old").exists() && !seen.join("new").exists());
    assert_eq!(fs::read(seen.join("old")).unwrap(), b"old");
    let pid = mounted.server().pid();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let script = format!(
        "import os\nfor n in range({}):\n open(str(n), 'w').close()\n os.unlink(str(n))\nopen('old', 'w').write('newer')\nopen('new', 'w')",
        limit + 1000
    );
    let made = Command::new("python3").args(["-c", &script]).current_dir(host).status();
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    assert!(made.unwrap().success());
    let begin = Instant::now();
    loop {
        let (new, old) = (seen.join("new").metadata(), fs::read(seen.join("old")));
        if new.is_ok() && old.as_ref().is_ok_and(|old| old == b"newer") {
            break;
        }
        assert!(begin.elapsed() < SLACK, "still {new:?} and {old:?}: {}", mounted.said());
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("after too many changes all is seen within {:?}", begin.elapsed());
    mounted.finish();
}

/// Stores through a mapping make no events. The close of the file does.
#[test]
fn stores_of_the_host_through_a_mapping_are_seen_after_close() {
    let Some(mounted) = Mounted::with(&cell("always", false), &options(&[])) else { return };
    let (host, seen) = (mounted.below.join("file"), mounted.site.path.join("file"));
    fs::write(&host, "old bytes").unwrap();
    assert_eq!(fs::read(&seen).unwrap(), b"old bytes");
    let script = "import mmap\nwith open('file', 'r+b') as file:\n with mmap.mmap(file.fileno(), 0) as mapped:\n  mapped[0:3] = b'new'";
    let stored = Command::new("python3").args(["-c", script]).current_dir(&mounted.below).status();
    assert!(stored.unwrap().success());
    let begin = Instant::now();
    while fs::read(&seen).unwrap() != b"new bytes" {
        assert!(begin.elapsed() < SLACK, "still the old bytes");
        std::thread::sleep(Duration::from_millis(1));
    }
    mounted.finish();
}

/// Users without permission to watch file systems watch directories (`ferry/tests/it/places.rs`).
#[test]
fn only_directories_are_watched() {
    if let Some(why) = missing() {
        ferry_skip::skip!("{why}");
        return;
    }
    let shared = directory(Place::Disk);
    let mountpoint = shared.path().join("mnt");
    fs::create_dir(&mountpoint).unwrap();
    let mut command = ferry(["share", "mem", "--mount"]);
    let output = command.arg(&mountpoint).args(["--watch", "always"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("watch is for directories"), "{said}");
}
