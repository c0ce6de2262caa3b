//! `kill -9` of the process that serves an image, and of the program, while a container reads.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::{Advice, fadvise};
use rustix::process::{Signal, kill_process};
use tonic::Code;

use crate::client::Client;
use crate::fake::{Reply, Way};
use crate::lazy_place::{Place, WAYS, is_right, layers, noise, until};
use crate::server::{DIR, Mounted, can_mount};
use crate::toc_layers::{Format, Writer};

/// The number of unfetched files per kill.
const FRESH: usize = 3;
const LENGTH: usize = 40_000;

/// Ends readers, also when the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Reads a file, and lets the kernel forget it: the next reader asks the store again.
fn read(at: &Path, number: usize) -> io::Result<Vec<u8>> {
    let path = at.join(format!("f-{number}"));
    let bytes = fs::read(&path)?;
    fadvise(fs::File::open(&path)?, 0, None, Advice::DontNeed)?;
    Ok(bytes)
}

/// Whether the kernel sends requests without a reply again to the next server of a mount over FUSE.
fn resends() -> bool {
    let release = rustix::system::uname();
    let mut numbers = release.release().to_str().unwrap().split(['.', '-']).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 9)
}

/// The processes that work in a directory, or did until it was removed.
fn processes_in(directory: &Path) -> usize {
    let works_there = |process: io::Result<fs::DirEntry>| {
        let works = fs::read_link(process.ok()?.path().join("cwd")).ok()?;
        works.starts_with(directory).then_some(())
    };
    fs::read_dir("/proc").unwrap().filter_map(works_there).count()
}

#[test]
fn a_pull_ends_with_the_program_and_leaves_nothing() {
    if !can_mount() {
        return;
    }
    let mut place = Place::new(layers(Format::Estargz));
    let directory = place.server.root().join("lazy");
    for round in 0..3 {
        // Without an answer to the manifest, or to what comes after it.
        place.fake.fault(move |request, reply| match round == 0 || !request.is_manifest() {
            true => Reply { way: Way::Silence, ..Reply::default() },
            false => reply,
        });
        drop(place.fake.requests());
        thread::scope(|scope| {
            let (socket, labels) = (place.server.socket(), place.labels(0));
            let lost = scope.spawn(move || Client::connect(&socket).unwrap().prepare_with("extract", "", labels));
            until("a request", || !place.fake.requests().is_empty());
            assert_eq!(processes_in(&directory), 1);
            place.server.kill();
            assert_ne!(lost.join().unwrap().unwrap_err().code(), Code::AlreadyExists);
        });
        until("the end of the process", || processes_in(&directory) == 0);
        drop(place.server.start_again());
        assert_eq!(place.images(), [] as [PathBuf; 0]);
    }
    place.fake.heal();
    let mut client = place.server.client();
    place.pull(&mut client);
    is_right(Mounted::of(&client.view("view", &place.top()).unwrap()).path());
}

/// A container sees what is right, and no error: readers wait for the next process, of missing data on the kernel's mount, and of all
/// that is not in the page cache on a mount over FUSE.
fn kills((format, directory): (Format, &str), rounds: usize) {
    let contents: Vec<_> = (0..).take((rounds + 1) * FRESH).map(|seed| noise(seed, LENGTH)).collect();
    let mut layer = Writer::new(format, &[if format == Format::Estargz { 128 << 10 } else { 10_000 }]);
    for (number, content) in contents.iter().enumerate() {
        layer.file(&format!("f-{number}"), content);
    }
    let mut place = Place::in_directory(directory, vec![layer.finish()], 0, "restarts = 1000\n");
    let mut client = place.server.client();
    place.pull(&mut client);
    let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
    let root = place.server.root();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let kind = if directory == DIR { "erofs" } else { "fuse.ferry" };
    let is_so =
        |line: &str| line.contains(&*root.join("lazy").to_string_lossy()) && line.contains(&format!(" - {kind} "));
    if !table.lines().any(is_so) {
        return ferry_skip::skip!("this kernel cannot make readers of missing data wait");
    }
    if kind != "erofs" && !resends() {
        return ferry_skip::skip!("Linux sends requests again from 6.9 on");
    }
    let (known, is_over) = (AtomicUsize::new(FRESH), AtomicBool::new(false));
    let reads = AtomicU64::new(0);
    let is_right = |number: usize| {
        let bytes = read(mounted.path(), number).unwrap_or_else(|error| panic!("file {number}: {error}"));
        assert!(bytes == contents[number], "file {number} is wrong");
        reads.fetch_add(1, Ordering::Relaxed);
    };
    thread::scope(|scope| {
        let _over = Over(&is_over);
        for reader in 0..2_usize {
            let (known, is_over, is_right) = (&known, &is_over, &is_right);
            scope.spawn(move || {
                let mut state = reader;
                while !is_over.load(Ordering::SeqCst) {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let known = known.load(Ordering::SeqCst);
                    // Each second one is new, or almost.
                    let from = if state >> 63 == 0 { 0 } else { known.saturating_sub(2 * FRESH) };
                    is_right(from + (state >> 33) % (known - from));
                }
            });
        }
        for round in 0..rounds {
            until("a process", || place.process().is_some());
            if round % 5 == 4 {
                // The next run of the program watches a process that it did not start, or starts one, which is killed at once.
                place.server.kill();
                if let Some(process) = place.process().filter(|_| round % 10 == 9) {
                    // Its end is waited for.
                    let _ = kill_process(process, Signal::KILL);
                    until("its end", || place.process() != Some(process));
                }
                client = place.server.start_again();
                until("a process", || place.process().is_some());
            }
            let Some(process) = place.process() else { continue };
            known.store((round + 2) * FRESH, Ordering::SeqCst);
            thread::sleep(Duration::from_millis((round * 37 % 50) as u64));
            // Its end is waited for.
            let _ = kill_process(process, Signal::KILL);
            until("its end", || place.process() != Some(process));
            (round * FRESH..(round + 2) * FRESH).for_each(is_right);
        }
    });
    println!("{format:?} in {directory}: {reads:?} reads were right, and none failed");
    (0..contents.len()).for_each(is_right);
    drop(mounted);
    for name in ["container", "sha256:chain-0"] {
        client.remove(name).unwrap();
    }
    assert_eq!(place.server.mount_points(), [] as [&Path; 0]);
}

#[test]
fn containers_do_not_notice_that_their_process_is_killed() {
    if can_mount() {
        WAYS.into_iter().for_each(|way| kills(way, 12));
    }
}

/// The long version of the one above.
#[test]
#[ignore = "long: make test-all"]
fn containers_do_not_notice_a_hundred_kills_of_their_process() {
    if can_mount() {
        WAYS.into_iter().for_each(|way| kills(way, 100));
    }
}
