//! Two mounts of one source with `--cache always`: each shows the other's changes, and unchanged files cost no requests.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use ferry_tests::mounts::{Cell, MountOptions, Mounted, Pair, Site, each_change};
use ferry_tests::{Place, directory, on_cells};
use ferry_vfs::{Caller, FileSystem, Ino, Name};
use rustix::process::{Signal, kill_process};

const PROBE: &str = env!("CARGO_BIN_EXE_ferry-probe");

/// The tolerated delay of either side of a storm.
const LATE: Duration = Duration::from_millis(500);
/// The time limit of a test.
const LIMIT: Duration = Duration::from_secs(120);

fn changes(cells: [&str; 2]) {
    let [one, two]: [Cell; 2] = cells.map(|name| name.parse().unwrap());
    let Some(pair) = Pair::new([&one, &two], LIMIT) else { return };
    let [a, b] = pair.paths();
    let mut late = Vec::new();
    for _ in 0..5 {
        each_change(a, b, &mut late);
        each_change(b, a, &mut late);
    }
    println!("{one} and {two}: of 210 changes {} were seen at a second look: {late:?}", late.len());
    pair.finish();
}

#[test]
fn changes_by_io_uring() {
    changes(["mem_uring_always", "mem_uring_always"]);
}

#[test]
fn changes_by_dev_fuse() {
    changes(["mem_devfuse_always", "mem_devfuse_always"]);
}

#[test]
fn changes_by_both() {
    changes(["mem_uring_always", "mem_devfuse_always"]);
    changes(["dir_devfuse_always", "dir_uring_always"]);
}

#[test]
fn changes_of_passthrough_files() {
    changes(["mem_passthrough_always", "mem_passthrough_always"]);
    changes(["dir_passthrough_always", "dir_uring_always"]);
}

#[test]
fn changes_of_persistent_files() {
    changes(["pmem_uring_always", "pmem_devfuse_always"]);
}

/// Names and contents as one mount shows them.
fn contents(root: &Path) -> io::Result<BTreeMap<String, Vec<u8>>> {
    let mut all = BTreeMap::new();
    for directory in fs::read_dir(root)? {
        let directory = directory?.path();
        for entry in fs::read_dir(&directory)? {
            let path = entry?.path();
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            all.insert(name, fs::read(&path)?);
        }
    }
    Ok(all)
}

/// Renames, removals and writes of the same few names through both mounts, each with a notification to the other.
fn storm(cells: [&str; 2], seconds: u64) {
    let [one, two]: [Cell; 2] = cells.map(|name| name.parse().unwrap());
    let Some(pair) = Pair::new([&one, &two], LIMIT + Duration::from_secs(seconds)) else { return };
    let start = |site: &Site, seed: u32| -> Child {
        site.spawn(Command::new(PROBE).args(["--role", "storm", ".", &seed.to_string(), &seconds.to_string()]))
    };
    let mut children: Vec<Child> = (0..4).map(|seed| start(&pair.sites[seed as usize % 2], seed)).collect();
    let end = Instant::now() + Duration::from_secs(seconds) + LATE * 40;
    let mut stuck = 0;
    for child in &mut children {
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                assert!(status.success(), "{one} and {two}: {}", pair.said());
                break;
            }
            if Instant::now() > end {
                stuck += 1;
                pair.sites[0].stop(child);
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    assert_eq!(stuck, 0, "{one} and {two}: processes are stuck: {}", pair.said());
    let [a, b] = pair.paths();
    let begin = Instant::now();
    loop {
        // A name that one mount still shows may be gone already.
        match (contents(a), contents(b)) {
            (Ok(by_one), Ok(by_other)) if by_one == by_other => break,
            both => assert!(begin.elapsed() < LATE * 40, "{one} and {two}: {both:?}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    pair.finish();
}

#[test]
fn storms() {
    storm(["mem_uring_always", "mem_uring_always"], 3);
    storm(["mem_devfuse_always", "mem_devfuse_always"], 3);
}

#[test]
#[ignore = "long: make test-all"]
fn storms_for_long() {
    storm(["mem_uring_always", "mem_uring_always"], 20);
    storm(["mem_devfuse_always", "mem_devfuse_always"], 20);
    storm(["mem_uring_always", "mem_devfuse_always"], 20);
    storm(["dir_uring_always", "dir_devfuse_always"], 20);
    storm(["pmem_uring_always", "pmem_devfuse_always"], 20);
    storm(["mem_passthrough_always", "mem_uring_always"], 20);
}

/// The number of files.
const FILES: u32 = 200;
/// The number of `stat` calls per file.
const LOOKS: u32 = 200;
/// The maximum ratio of a cached `stat` to one on a local file system: it only checks two time limits more, about 1.1.
const RATIO_MAX: f64 = 1.5;
/// Further rounds, because the machine may be busy during one of the two.
const TRIES: usize = 5;

/// Returns the time of a `stat` in each of these directories: medians over alternating rounds.
fn look(directories: [&Path; 2]) -> [Duration; 2] {
    let paths = directories.map(|at| (0..FILES).map(|number| at.join(format!("file{number}"))).collect::<Vec<_>>());
    let mut took = [Vec::new(), Vec::new()];
    for _ in 0..LOOKS {
        for (paths, took) in paths.iter().zip(&mut took) {
            let begin = Instant::now();
            for path in paths {
                assert_eq!(fs::metadata(path).unwrap().len(), 4);
            }
            took.push(begin.elapsed());
        }
    }
    took.map(|mut took| {
        took.sort();
        took[took.len() / 2] / FILES
    })
}

/// A cached `stat` sends no request, because the server is stopped, and takes hardly longer than on tmpfs.
fn cached_stat(cell: &Cell) {
    let Some(mounted) = Mounted::new(cell) else { return };
    let local = directory(Place::Memory);
    for directory in [&mounted.site.path, local.path()] {
        for number in 0..FILES {
            fs::write(directory.join(format!("file{number}")), "text").unwrap();
        }
    }
    let directories = [mounted.site.path.as_path(), local.path()];
    look(directories);
    let pid = mounted.server().pid();
    kill_process(pid, Signal::STOP).unwrap();
    let mut ratios = Vec::new();
    while !ratios.last().is_some_and(|ratio| *ratio < RATIO_MAX) && ratios.len() < TRIES {
        let [here, there] = look(directories);
        ratios.push(here.as_secs_f64() / there.as_secs_f64());
        println!("{cell}: a cached stat takes {here:?}, on tmpfs {there:?}");
    }
    kill_process(pid, Signal::CONT).unwrap();
    let least = ratios.iter().copied().fold(f64::MAX, f64::min);
    assert!(least < RATIO_MAX, "{cell}: a cached stat takes {ratios:.2?} times as long as on tmpfs");
    mounted.finish();
}

on_cells!(cached_stat: quick [mem_uring_always, mem_devfuse_always] long [dir_uring_always, pmem_uring_always]);

/// A file that is passed through is read and written while the server does not run.
fn past_the_server(cell: &Cell) {
    let Some(mounted) = Mounted::new(cell) else { return };
    let file = File::options().read(true).write(true).create_new(true).open(mounted.site.path.join("file")).unwrap();
    file.write_all_at(&[1; 65_536], 0).unwrap();
    let pid = mounted.server().pid();
    kill_process(pid, Signal::STOP).unwrap();
    for round in 0..100_u8 {
        file.write_all_at(&[round; 4096], u64::from(round % 16) * 4096).unwrap();
        let mut bytes = [0; 4096];
        file.read_exact_at(&mut bytes, u64::from(round % 16) * 4096).unwrap();
        assert_eq!(bytes, [round; 4096]);
    }
    kill_process(pid, Signal::CONT).unwrap();
    assert_eq!(fs::read(mounted.site.path.join("file")).unwrap().len(), 65_536);
    drop(file);
    mounted.finish();
}

on_cells!(past_the_server: quick [mem_passthrough, dir_passthrough] long [mem_passthrough_none, dir_passthrough_always]);

/// A mount without notifications keeps deleted files cached; their space is freed nevertheless.
#[test]
fn files_deleted_by_others_release_their_space() {
    let cell: Cell = "dir_devfuse_always".parse().unwrap();
    let options = MountOptions { args: vec!["--watch".into(), "never".into()], ..MountOptions::default() };
    let Some(mounted) = Mounted::with(&cell, &options) else { return };
    let file = mounted.below.join("file");
    fs::write(&file, "content").unwrap();
    mounted.site.sh("chmod 600 file", LIMIT).ok();
    let directory = format!("/proc/{}/fd", mounted.server().pid().as_raw_nonzero());
    let is_open = || {
        let open = fs::read_dir(&directory).unwrap().flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
        open.into_iter().any(|path| path.to_string_lossy().contains(file.to_str().unwrap()))
    };
    assert!(is_open());
    fs::remove_file(&file).unwrap();
    let begun = Instant::now();
    while is_open() {
        assert!(begun.elapsed() < LIMIT, "it stays open");
        std::thread::sleep(LATE / 10);
    }
    mounted.finish();
}

/// File handles of a mount that is shared again are unreliable: Linux finds only cached inodes by them.
#[test]
fn files_shared_again_stay_open() {
    /// Longer than a file that was used once stays open.
    const SEVERAL_TURNS: Duration = Duration::from_secs(11);
    let cell: Cell = "mem_devfuse".parse().unwrap();
    let Some(mounted) = Mounted::new(&cell) else { return };
    fs::write(mounted.site.path.join("file"), "content").unwrap();
    let shared = ferry_dir::Dir::open(&mounted.site.path, ferry_dir::Options::default()).unwrap();
    shared.begin();
    let (cx, name) = (Caller::default(), Name::new(b"file").unwrap());
    let file = shared.lookup(&cx, Ino::ROOT, name).unwrap().ino;
    shared.getattr(&cx, file, None).unwrap();
    let descriptors = shared.usage().descriptors;
    std::thread::sleep(SEVERAL_TURNS);
    assert_eq!(shared.usage().descriptors, descriptors);
    assert_eq!(shared.getattr(&cx, file, None).unwrap().size, 7);
    drop(shared);
    mounted.finish();
}
