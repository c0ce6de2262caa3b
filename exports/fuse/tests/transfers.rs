//! Data that come from far: whoever waits for them holds up nobody else.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::sources::{Null, Relay};
use common::{Mounted, mount, paths, plain, stay_on, wait_until};
use ferry_fuse::{Cache, Options, Path};

/// A mount whose files lie in another mount, whose READs misbehave as their names say.
fn relay(path: Path, options: impl Fn(&mut Options)) -> (Arc<Null>, Mounted, Mounted) {
    let null = Arc::new(Null::default());
    let far = mount(Arc::clone(&null) as _, Options { cache: Cache::None, ..plain(Path::Devfuse) });
    let source = Arc::new(Relay { null: Null::default(), far: far.at.clone() });
    let mut chosen = Options { cache: Cache::None, ring_depth: 2, ..plain(path) };
    options(&mut chosen);
    let near = mount(source, chosen);
    (null, far, near)
}

fn read(mounted: &Mounted, name: &str) -> std::io::Result<usize> {
    File::open(mounted.path(name))?.read_at(&mut [0; 512], 0)
}

#[test]
fn a_slow_transfer_does_not_hold_up_its_cpu() {
    // What is blocked is relieved after 20 ms anyway: this is sooner.
    const SOON: Duration = Duration::from_millis(12);
    for path in paths().into_iter().filter(|path| *path == Path::Uring) {
        let (null, far, near) = relay(path, |_| {});
        assert_eq!(read(&near, "file").unwrap(), 512);
        let mut waits = Vec::new();
        for _ in 0..10 {
            std::thread::scope(|scope| {
                let calls = null.calls.load(Ordering::SeqCst);
                let reader = scope.spawn(|| {
                    stay_on(0);
                    read(&near, "slow").unwrap()
                });
                stay_on(0);
                wait_until("it reads", || null.calls.load(Ordering::SeqCst) > calls);
                let start = Instant::now();
                assert!(std::fs::metadata(near.path("file")).is_ok());
                waits.push(start.elapsed());
                assert_eq!(reader.join().unwrap(), 512);
            });
        }
        assert!(waits.iter().any(|wait| *wait < SOON), "{waits:?}");
        near.stop();
        far.stop();
    }
}

#[test]
fn many_slow_transfers_come_back_and_others_are_served() {
    // io_uring has a thread for each that waits, but no more than four times the CPUs.
    const HANGING: u64 = 4;
    for path in paths() {
        let (null, far, near) = relay(path, |_| {});
        std::thread::scope(|scope| {
            for _ in 0..HANGING {
                scope.spawn(|| {
                    stay_on(0);
                    assert_eq!(read(&near, "hangs").unwrap(), 512);
                });
            }
            wait_until("all wait at once", || null.held.load(Ordering::SeqCst) == HANGING);
            for _ in 0..20 {
                assert_eq!(read(&near, "file").unwrap(), 512);
                assert!(std::fs::metadata(near.path("file")).is_ok());
            }
            null.let_go.store(true, Ordering::SeqCst);
        });
        near.stop();
        far.stop();
    }
}

#[test]
fn a_mount_ends_while_transfers_are_under_way() {
    for path in paths() {
        let (null, far, near) = relay(path, |_| {});
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert!(read(&near, "hangs").is_err()));
            }
            wait_until("they wait", || null.held.load(Ordering::SeqCst) == 4);
            common::abort(&near.at, near.export().connection_number());
            near.export().wait();
        });
        null.let_go.store(true, Ordering::SeqCst);
        near.stop();
        far.stop();
    }
}

#[test]
fn a_file_in_memory_and_one_on_disk_are_written_durably() {
    for path in paths() {
        for folder in ["/dev/shm", "/var/tmp"] {
            let Ok(tmp) = tempfile::tempdir_in(folder) else { continue };
            let source = ferry_dir::Dir::open(tmp.path(), ferry_dir::Options::default()).unwrap();
            let mounted = mount(Arc::new(source), plain(path));
            let bytes: Vec<u8> = (0..300_000_u32).map(|at| at.to_le_bytes()[0]).collect();
            let mut options = File::options();
            std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_SYNC);
            let file = options.write(true).create(true).truncate(true).open(mounted.path("f")).unwrap();
            file.write_all_at(&bytes, 0).unwrap();
            file.write_all_at(&bytes, 123_457).unwrap();
            file.sync_all().unwrap();
            let back = std::fs::read(tmp.path().join("f")).unwrap();
            assert!(back[..123_457] == bytes[..123_457] && back[123_457..] == bytes, "{path:?} {folder}");
            assert!(std::fs::read(mounted.path("f")).unwrap() == back, "{path:?} {folder}");
            drop(file);
            mounted.stop();
        }
    }
}
