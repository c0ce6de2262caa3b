//! Disks under a verified load: every block must hold its last write, even when servers are killed.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferry_disk::{Cache, Options};
use ferry_driver::load::{self, Load, LoadTarget, Op, Report};
use ferry_tests::disks::DiskServer;
use ferry_tests::{Place, directory};
use ferry_vhost::Socket;

const BYTES: u64 = 8 << 20;
const TIMEOUT: Duration = Duration::from_secs(20);
/// The number of kills.
const KILLS: u32 = 6;
/// The environment variable with the directory of a disk to serve; see [`serve_if_asked`].
const DIR_VARIABLE: &str = "FERRY_TEST_DISK_DIR";

fn base() -> Load {
    Load {
        on: LoadTarget::Disk,
        size: None,
        op: Op::Write,
        queues: 1,
        queue_size: 128,
        event_idx: true,
        indirect: true,
        packed: false,
        depth: 16,
        block: 4096,
        random: true,
        seconds: None,
        requests: Some(6000),
        sleep: false,
        threads: None,
        verify: true,
        reattach: None,
        pid: None,
        count_syscalls: None,
    }
}

#[track_caller]
fn run(socket: &Path, load: &Load) -> Report {
    let report = load::run(socket, load).unwrap();
    assert_eq!((report.errors, &report.first_error), (0, &None), "{load:?}");
    report
}

#[test]
fn every_block_holds_its_last_write() {
    let disk = DiskServer::new(Place::Disk, BYTES, &Options { cache: Some(Cache::Writeback), ..Options::default() });
    for load in [
        base(),
        Load { packed: true, queue_size: 100, sleep: true, ..base() },
        Load { block: 512, random: false, depth: 3, indirect: false, ..base() },
        Load { op: Op::Read, packed: true, event_idx: false, ..base() },
        Load { op: Op::Read, sleep: true, block: 65536, ..base() },
    ] {
        let report = run(&disk.socket, &load);
        assert!(report.requests >= 6000, "{report:?}");
        assert_eq!(report.blocks_written.unwrap() > 0, load.op == Op::Write, "{report:?}");
    }
}

#[test]
fn a_block_changed_behind_the_load_is_detected() {
    let disk = DiskServer::new(Place::Disk, BYTES, &Options { cache: Some(Cache::Writeback), ..Options::default() });
    let done = AtomicBool::new(false);
    let load = Load { op: Op::Read, seconds: Some(1.0), requests: None, ..base() };
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = std::fs::File::options().write(true).open(&disk.file).unwrap();
            while !done.load(Ordering::Relaxed) {
                file.write_all_at(b"something else", 4096 * 77 + 5).unwrap();
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let report = load::run(&disk.socket, &load);
        done.store(true, Ordering::Relaxed);
        report
    });
    // Data from reads, and data found at the end.
    match report {
        Ok(report) => panic!("nobody noticed: {report:?}"),
        Err(error) => assert!(error.to_string().contains("the block at offset 315392 holds"), "{error}"),
    }
}

#[test]
fn invalid_loads_for_a_disk_are_refused() {
    let disk = DiskServer::new(Place::Disk, BYTES, &Options::default());
    for load in [
        Load { op: Op::Lookup, ..base() },
        Load { block: 1000, ..base() },
        Load { size: Some(BYTES * 2), ..base() },
        Load { size: Some(16 * 4096), ..base() },
    ] {
        assert!(matches!(load::run(&disk.socket, &load), Err(ferry_driver::Error::Unfit(_))), "{load:?}");
    }
}

/// Serves, if this is a process that [`start_server`] started.
#[test]
fn serve_if_asked() {
    let Some(directory) = std::env::var_os(DIR_VARIABLE) else { return };
    let directory = Path::new(&directory);
    let options = Options { cache: Some(Cache::Writeback), ..Options::default() };
    let disk = ferry_disk::open(&directory.join("disk"), &options).unwrap();
    let socket = Socket::bind(&directory.join("s")).unwrap();
    let _export = ferry_blk::Export::start(socket.listener().unwrap(), disk, ferry_blk::Options::default()).unwrap();
    loop {
        std::thread::park();
    }
}

fn start_server(directory: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["disk_load::serve_if_asked", "--exact", "--nocapture"])
        .env(DIR_VARIABLE, directory)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn nothing_is_lost_or_torn_when_servers_are_killed() {
    for (packed, sleep) in [(false, false), (true, true)] {
        // A busy machine starts few servers during the first load, so a longer one follows.
        let has_survived = |seconds| {
            let load =
                Load { packed, sleep, seconds: Some(seconds), requests: None, reattach: Some(TIMEOUT), ..base() };
            let report = run_while_servers_are_killed(&load);
            assert_eq!((report.errors, &report.first_error), (0, &None), "packed {packed}");
            assert!(report.blocks_written.unwrap() > 0, "packed {packed}: {report:?}");
            report.reattached >= 3
        };
        assert!([4.0, 12.0, 36.0].into_iter().any(has_survived), "packed {packed}: the load is not reattached");
    }
}

fn run_while_servers_are_killed(load: &Load) -> Report {
    let directory = directory(Place::Disk);
    ferry_disk::grow(&directory.path().join("disk"), BYTES, &Options::default()).unwrap();
    let mut server = start_server(directory.path());
    let start = std::time::Instant::now();
    while !directory.path().join("s").exists() {
        assert!(start.elapsed() < TIMEOUT, "the server does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    let written = || std::fs::metadata(directory.path().join("disk")).unwrap().modified().unwrap();
    let before = written();
    let done = AtomicBool::new(false);
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            // The load is connected: only later connections are retried.
            while written() == before && !done.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(5));
            }
            for kill in 0..KILLS {
                std::thread::sleep(Duration::from_millis(500 + u64::from(kill) * 7));
                if done.load(Ordering::Relaxed) {
                    break;
                }
                server.kill().unwrap();
                server.wait().unwrap();
                server = start_server(directory.path());
            }
        });
        let report = load::run(&directory.path().join("s"), load);
        done.store(true, Ordering::Relaxed);
        report
    });
    server.kill().unwrap();
    server.wait().unwrap();
    report.unwrap()
}
