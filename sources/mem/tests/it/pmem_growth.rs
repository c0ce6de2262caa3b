//! What a persistent image costs as it grows: CPU time of making, checking and mounting it, by the number of its files, and memory.
//!
//! ```text
//! cargo test -p ferry-mem --test it pmem_growth -- --include-ignored --nocapture --test-threads=1
//! ```
//!
//! `FERRY_TEST_DIR` says where; the default is the directory for temporary files.
use crate::pmem_common;

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ferry_mem::pmem::{Options, PMem, fsck, open};
use ferry_vfs::{CreateArgs, FileSystem, Ino};
use pmem_common::{close, cx, name, put};
use rustix::time::{ClockId, clock_gettime};

const FILES_OF_A_DIR: u64 = 1000;

/// One measures at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn directory() -> tempfile::TempDir {
    let parent = std::env::var_os("FERRY_TEST_DIR").map_or_else(std::env::temp_dir, Into::into);
    tempfile::tempdir_in(parent).unwrap()
}

fn image(dir: &Path, bytes: u64) -> PMem {
    open(&dir.join("image"), &Options { size_bytes: Some(bytes), ..Options::default() }).unwrap()
}

/// Processor time of this process so far.
fn cpu_time() -> Duration {
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(spent.tv_sec.try_into().unwrap(), spent.tv_nsec.try_into().unwrap())
}

/// A field of this process's status, in KiB.
fn status_kib(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Makes files of a few bytes, a thousand in a directory.
fn make(fs: &PMem, files: u64) {
    for index in 0..files {
        let dir = (index / FILES_OF_A_DIR).to_string();
        if index % FILES_OF_A_DIR == 0 {
            fs.mkdir(&cx(), Ino::ROOT, name(dir.as_bytes()), &CreateArgs { mode: 0o755, ..CreateArgs::default() })
                .unwrap();
            fs.forget(fs.lookup(&cx(), Ino::ROOT, name(dir.as_bytes())).unwrap().ino, 2);
        }
        let parent = fs.lookup(&cx(), Ino::ROOT, name(dir.as_bytes())).unwrap().ino;
        let (ino, handle) = put(fs, parent, index.to_string().as_bytes(), 0, b"something").unwrap();
        close(fs, ino, handle);
        fs.forget(parent, 1);
    }
}

/// Removes all that [`make`] made.
fn remove(fs: &PMem, files: u64) {
    for index in 0..files {
        let dir = (index / FILES_OF_A_DIR).to_string();
        let parent = fs.lookup(&cx(), Ino::ROOT, name(dir.as_bytes())).unwrap().ino;
        fs.unlink(&cx(), parent, name(index.to_string().as_bytes())).unwrap();
        fs.forget(parent, 1);
        if index % FILES_OF_A_DIR == FILES_OF_A_DIR - 1 {
            fs.rmdir(&cx(), Ino::ROOT, name(dir.as_bytes())).unwrap();
        }
    }
}

/// What each step with so many files takes of the processor.
fn costs(files: u64, bytes: u64) -> [(&'static str, Duration); 5] {
    let dir = directory();
    let mut last = cpu_time();
    let mut spent = || {
        let now = cpu_time();
        now - std::mem::replace(&mut last, now)
    };
    let fs = image(dir.path(), bytes);
    make(&fs, files);
    drop(fs);
    let made = spent();
    let check = || {
        let report = fsck(&dir.path().join("image"), None, false).unwrap();
        assert!(report.is_clean() && report.inodes > files, "{report:?}");
    };
    // What was made since the last snapshot is replayed record by record; the mount after that reads a snapshot.
    check();
    let checked = spent();
    drop(image(dir.path(), bytes));
    let mounted = spent();
    check();
    let checked_snapshot = spent();
    drop(image(dir.path(), bytes));
    [
        ("make", made),
        ("fsck of a log", checked),
        ("mount of a log", mounted),
        ("fsck of a snapshot", checked_snapshot),
        ("mount of a snapshot", spent()),
    ]
}

/// How often costs are measured before they count as more than linear.
const MEASUREMENTS_MAX: usize = 3;

/// Compares what so many files cost with what `times` as many do.
fn grows_like_the_files(files: u64, times: u32, bytes: u64) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let steps = || (costs(files, bytes), costs(files * u64::from(times), bytes));
    let (mut few, mut many) = steps();
    // Half as much again: caches and address translation help less with more.
    let ratio = |few: Duration, many: Duration| many.as_secs_f64() / few.as_secs_f64() / f64::from(times);
    let is_linear = |few: &[(_, Duration)], many: &[(_, Duration)]| {
        few.iter().zip(many).all(|((_, few), (_, many))| ratio(*few, *many) < 1.5)
    };
    for _ in 1..MEASUREMENTS_MAX {
        if is_linear(&few, &many) {
            break;
        }
        // Other programs take caches away: the least of several measurements is the step's own cost.
        let (few_again, many_again) = steps();
        few.iter_mut().zip(few_again).for_each(|(best, again)| best.1 = best.1.min(again.1));
        many.iter_mut().zip(many_again).for_each(|(best, again)| best.1 = best.1.min(again.1));
    }
    println!("{files} files: {few:?}, {times} times as many: {many:?}");
    assert!(is_linear(&few, &many), "{files} files: {few:?}, {times} times as many: {many:?}");
}

#[test]
fn four_times_the_files_cost_about_four_times_as_much() {
    if !ferry_alone::in_own_process() {
        return;
    }
    grows_like_the_files(25_000, 4, 1 << 30);
}

#[test]
#[ignore = "long: make test-all"]
fn ten_times_the_files_cost_about_ten_times_as_much() {
    if !ferry_alone::in_own_process() {
        return;
    }
    grows_like_the_files(50_000, 10, 8 << 30);
}

/// What a process of its own takes that looks at the image: how much more at most than before, and how much when it is mounted.
#[derive(Clone, Copy, Debug)]
struct Memory {
    most_kib: u64,
    mounted_kib: u64,
}

/// The image that [`this_process_mounts`] is to mount; without, it makes one.
const IMAGE: &str = "FERRY_TEST_IMAGE";

fn memory_of_a_mount(image: &Path) -> Memory {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "pmem_growth::this_process_mounts", "--ignored", "--nocapture"]).env(IMAGE, image);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    let numbers = said.lines().find_map(|line| line.rsplit_once("KiB: ")).unwrap().1;
    let (most, mounted) = numbers.split_once(' ').unwrap();
    Memory { most_kib: most.parse().unwrap(), mounted_kib: mounted.parse().unwrap() }
}

#[test]
#[ignore = "started by others here"]
fn this_process_mounts() {
    let own = directory();
    let image = std::env::var_os(IMAGE).unwrap_or_else(|| {
        drop(self::image(own.path(), 1 << 20));
        own.path().join("image").into()
    });
    let before = status_kib("VmHWM");
    assert!(fsck(Path::new(&image), None, false).unwrap().is_clean());
    let mounted = open(Path::new(&image), &Options::default()).unwrap();
    println!("KiB: {} {}", status_kib("VmHWM") - before, status_kib("RssAnon"));
    drop(mounted);
}

/// Its log has room for a million files, and is read as far as it goes.
#[test]
fn an_empty_image_is_checked_and_mounted_in_little_memory_however_large_it_is() {
    let dir = directory();
    let path = dir.path().join("image");
    File::create(&path).unwrap().set_len(16 << 30).unwrap();
    drop(open(&path, &Options::default()).unwrap());
    let memory = memory_of_a_mount(&path);
    println!("an empty image of 16 GiB: {memory:?}");
    assert!(memory.most_kib < 16 << 10, "{memory:?}");
}

/// What a mount costs past a processor's caches is the memory that it goes through.
#[test]
fn a_file_of_a_few_bytes_takes_little_memory() {
    const FILES: u64 = 30_000;
    let dir = directory();
    let fs = image(dir.path(), 1 << 30);
    make(&fs, FILES);
    drop(fs);
    let memory = memory_of_a_mount(&dir.path().join("image"));
    let (most, mounted) = (memory.most_kib * 1024 / FILES, memory.mounted_kib * 1024 / FILES);
    println!("{most} bytes for a file at most, {mounted} when mounted");
    assert!(mounted < 900, "{mounted} bytes for a file: {memory:?}");
}

/// An image from which so many files were removed takes the memory of a new one.
fn gives_memory_back(files: u64, bytes: u64) {
    let dir = directory();
    drop(image(dir.path(), bytes));
    let new = memory_of_a_mount(&dir.path().join("image"));
    let fs = image(dir.path(), bytes);
    make(&fs, files);
    fs.syncfs(&cx(), Ino::ROOT).unwrap();
    remove(&fs, files);
    assert_eq!(fs.usage().inodes, 1);
    drop(fs);
    let emptied = memory_of_a_mount(&dir.path().join("image"));
    println!("{files} files made and removed: {new:?} before, {emptied:?} after");
    assert!(emptied.mounted_kib < new.mounted_kib + (4 << 10), "{emptied:?}, and {new:?} when new");
}

#[test]
fn removed_files_take_no_memory_at_the_next_mount() {
    gives_memory_back(30_000, 1 << 30);
}

#[test]
#[ignore = "long: make test-all"]
fn half_a_million_removed_files_take_no_memory_at_the_next_mount() {
    gives_memory_back(500_000, 8 << 30);
}
