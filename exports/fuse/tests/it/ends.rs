//! The ways in which a mount ends, and does not begin.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::sources::Null;
use common::{abort, is_mounted, mount, paths, plain, threads_named};
use ferry_fuse::{Cache, Export, Options};
use ferry_vfs::{Attr, Caller, Entry, FileSystem, Handle, Ino, Name, Result};

/// A source that panics when all is over.
#[derive(Default)]
struct Sore(Null);

impl FileSystem for Sore {
    fn lookup(&self, caller: &Caller<'_>, dir: Ino, name: Name<'_>) -> Result<Entry> {
        self.0.lookup(caller, dir, name)
    }
    fn getattr(&self, caller: &Caller<'_>, ino: Ino, handle: Option<Handle>) -> Result<Attr> {
        self.0.getattr(caller, ino, handle)
    }
    fn syncfs(&self, _: &Caller<'_>, _: Ino) -> Result<()> {
        self.0.held.fetch_add(1, Ordering::Relaxed);
        panic!("as the test wants it");
    }
    fn forget(&self, _: Ino, _: u64) {
        panic!("as the test wants it");
    }
}

#[test]
fn a_panic_at_the_end_ends_only_the_mount() {
    for path in paths() {
        let source = Arc::new(Sore::default());
        let mounted = mount(Arc::clone(&source) as _, Options { cache: Cache::None, ..plain(path) });
        assert!(mounted.path("file").exists());
        mounted.stop();
        assert_eq!(source.0.held.load(Ordering::Relaxed), 1, "it was asked once");
    }
}

/// The ways in which another process ends a mount.
fn umount(at: &std::path::Path, lazily: bool) -> bool {
    let mut command = Command::new("umount");
    command.args(lazily.then_some("-l")).arg(at);
    command.status().unwrap().success()
}

/// Reads without end, until the mount is gone.
fn load(at: &std::path::Path, stop: &AtomicBool) -> usize {
    let mut reads = 0;
    while !stop.load(Ordering::Relaxed) {
        let Ok(file) = File::open(at.join("file")) else { break };
        while !stop.load(Ordering::Relaxed) && file.read_at(&mut [0; 4096], 0).is_ok() {
            reads += 1;
        }
    }
    reads
}

#[test]
fn the_mount_ends_under_load_in_every_way() {
    for path in paths() {
        for way in ["stop", "lazily", "abort", "drop"] {
            let mut mounted = mount(Arc::new(Null::default()), Options { cache: Cache::None, ..plain(path) });
            let stop = AtomicBool::new(false);
            // While four keep all CPUs busy, umount(2) itself may take as long as they do (synchronize_rcu_expedited, Linux 6.18).
            let clients = if way == "lazily" { 1 } else { 4 };
            std::thread::scope(|scope| {
                let loads: Vec<_> = (0..clients).map(|_| scope.spawn(|| load(&mounted.at, &stop))).collect();
                std::thread::sleep(Duration::from_millis(150));
                let start = Instant::now();
                let export = mounted.export.take().unwrap();
                match way {
                    "stop" => export.stop(),
                    "drop" => drop(export),
                    "abort" => {
                        abort(&mounted.at, export.connection_number());
                        export.wait();
                        export.stop();
                    }
                    _ => {
                        assert!(umount(&mounted.at, true));
                        assert!(!export.has_ended(), "files of it are open");
                        stop.store(true, Ordering::Relaxed);
                        export.wait();
                        export.stop();
                    }
                }
                assert!(start.elapsed() < Duration::from_secs(10), "{path:?} {way} took {:?}", start.elapsed());
                let reads: usize = loads.into_iter().map(|load| load.join().unwrap()).sum();
                assert!(reads > 0);
            });
            assert!(!is_mounted(&mounted.at), "{path:?} {way}");
        }
    }
}

#[test]
fn umount_ends_the_wait() {
    for path in paths() {
        let mounted = mount(Arc::new(Null::default()), plain(path));
        assert_eq!(File::open(mounted.path("file")).unwrap().read_at(&mut [0; 9], 0).unwrap(), 9);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| mounted.export().wait());
            std::thread::sleep(Duration::from_millis(50));
            assert!(!waiting.is_finished());
            assert!(umount(&mounted.at, false));
        });
        assert!(mounted.export().has_ended());
        mounted.stop();
    }
}

#[test]
fn a_blocked_handler_does_not_keep_the_mount() {
    for path in paths() {
        let source = Arc::new(Null::default());
        let mounted = mount(Arc::clone(&source) as _, Options { cache: Cache::None, ..plain(path) });
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| File::open(mounted.path("hangs")).unwrap().read_at(&mut [0; 9], 0).is_err());
            common::wait_until("it blocks", || source.held.load(Ordering::SeqCst) == 1);
            abort(&mounted.at, mounted.export().connection_number());
            assert!(reader.join().unwrap(), "the caller gets an error");
            mounted.export().wait();
        });
        source.let_go.store(true, Ordering::SeqCst);
        mounted.stop();
    }
}

/// Tells a test that it has a process of its own; without it, `--include-ignored` runs it among others.
const ALONE: &str = "FERRY_TEST_ALONE";

/// Runs `test` in a process of its own, for what it does to the whole process.
fn in_a_process(test: &str) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn each_step_of_the_start_may_lack_descriptors() {
    in_a_process("ends::lacking_descriptors");
}

/// The numbers of the descriptors that are open, without the one that it takes to look.
fn open_descriptors() -> Vec<u64> {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let looking = |entry: &std::fs::DirEntry| std::fs::read_link(entry.path()).is_ok_and(|to| to.ends_with("fd"));
    let mut numbers: Vec<u64> = links
        .filter(|entry| !looking(entry))
        .map(|entry| entry.file_name().to_str().unwrap().parse().unwrap())
        .collect();
    numbers.sort_unstable();
    numbers
}

/// The limit that leaves so many numbers free; those in use may have gaps.
fn limit_with_free(used: &[u64], free: usize) -> u64 {
    (0..).filter(|number| !used.contains(number)).nth(free).unwrap()
}

#[test]
#[ignore = "limits the descriptors of its process: run by each_step_of_the_start_may_lack_descriptors"]
fn lacking_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    if std::env::var_os(ALONE).is_none() {
        return;
    }
    let before = getrlimit(Resource::Nofile);
    for path in paths() {
        let (mut refused, mut served) = (0, 0);
        let used = open_descriptors();
        for more in 0..40 {
            let tmp = tempfile::tempdir().unwrap();
            setrlimit(Resource::Nofile, Rlimit { current: Some(limit_with_free(&used, more)), ..before }).unwrap();
            let outcome = Export::mount(tmp.path(), Arc::new(Null::default()), plain(path));
            setrlimit(Resource::Nofile, before).unwrap();
            match outcome {
                Ok(export) => {
                    served += 1;
                    assert_eq!(File::open(tmp.path().join("file")).unwrap().read_at(&mut [0; 9], 0).unwrap(), 9);
                    export.stop();
                }
                Err(error) => {
                    refused += 1;
                    assert!(error.to_string().contains("descriptor"), "{path:?} with {more} more: {error}");
                }
            }
            assert!(!is_mounted(tmp.path()), "{path:?} with {more} more");
            assert_eq!(open_descriptors(), used, "{path:?} with {more} more: descriptors leak");
            common::wait_until("all threads end", || threads_named("fuse-") == 0);
        }
        assert!(refused > 0 && served > 0, "{path:?}: {refused} refused, {served} served");
    }
}

#[test]
fn unavailable_features_are_reported() {
    if paths().is_empty() {
        return;
    }
    let tmp = tempfile::tempdir().unwrap();
    let source = || Arc::new(Null::default());
    let error = Export::mount(tmp.path(), source(), Options { passthrough: Some(true), ..Options::default() });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("passthrough") && error.contains("not whole files"), "{error}");
    let error = Export::mount(&tmp.path().join("nowhere"), source(), Options::default()).unwrap_err().to_string();
    assert!(error.contains("nowhere") && error.contains("does not exist"), "{error}");
    assert!(!is_mounted(tmp.path()));
}
