//! Limits of rates, on both paths.

use crate::common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::sources::Null;
use common::{Mounted, mount, paths, plain, wait_until};
use ferry_engine::{BURST_MIN, Rates, TokenBucket};
use ferry_fuse::{Cache, Options, Path, RateLimiter};

const BLOCK: usize = 4096;
/// How long a limiter may be in advance beside its burst: a portion, and the precision of timers.
const ADVANCE: Duration = Duration::from_millis(10);

fn rates(requests: u64, bytes: u64) -> Option<Rates> {
    Some(Rates { requests: requests.try_into().ok(), bytes: bytes.try_into().ok(), burst: BURST_MIN })
}

/// A mount whose limit is set later.
fn limited(path: Path) -> (Mounted, Arc<TokenBucket>) {
    let all = TokenBucket::new(None);
    let limiter = Some(RateLimiter::new(&all));
    (mount(Arc::new(Null::default()), Options { limiter, cache: Cache::None, ..plain(path) }), all)
}

/// Reads for this time on so many threads; returns how many reads there were, and for how long.
fn read(mounted: &Mounted, threads: usize, time: Duration) -> (u64, Duration) {
    let (path, begin) = (mounted.path("file"), Instant::now());
    let done = thread::scope(|scope| {
        let work = || {
            let file = File::open(&path).unwrap();
            let mut done = 0;
            while begin.elapsed() < time {
                assert_eq!(file.read_at(&mut [0; BLOCK], 0).unwrap(), BLOCK);
                done += 1;
            }
            done
        };
        let readers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).sum()
    });
    (done, begin.elapsed())
}

/// Reads from a mount; asserts that there are no more than this many requests per second, and at least this part of them.
#[track_caller]
fn assert_rate(path: Path, limit: Option<Rates>, per_second: f64, threads: usize, time: Duration, least: f64) {
    let (mounted, all) = limited(path);
    all.set(limit);
    let (done, longest) = read(&mounted, threads, time);
    let most = per_second * (longest + BURST_MIN + ADVANCE).as_secs_f64() + threads as f64;
    assert!(done as f64 <= most, "{path:?}: {done} requests in {longest:?}, of {most}");
    let expected = per_second * longest.as_secs_f64();
    eprintln!("{path:?}: {done} requests in {longest:?}, {:.3} of the limit", done as f64 / expected);
    assert!(done as f64 >= expected * least, "{path:?}: {done} requests in {longest:?}, of {expected}");
    mounted.stop();
}

#[test]
fn a_mount_runs_at_its_limit() {
    for path in paths() {
        let time = Duration::from_millis(800);
        assert_rate(path, rates(1000, 0), 1000.0, 4, time, 0.3);
        assert_rate(path, rates(0, 4 << 20), 1024.0, 1, time, 0.3);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_mount_gets_its_limit_within_five_percent() {
    for path in paths() {
        for threads in [1, 8] {
            assert_rate(path, rates(2000, 0), 2000.0, threads, Duration::from_secs(5), 0.95);
            assert_rate(path, rates(0, 8 << 20), 2048.0, threads, Duration::from_secs(5), 0.95);
        }
    }
}

/// A process whose read waits for an hour, on a mount with an open file.
fn exhausted(path: Path) -> (Mounted, Arc<TokenBucket>, File, Child) {
    let (mounted, all) = limited(path);
    let file = File::open(mounted.path("file")).unwrap();
    let mut child = Command::new("dd")
        .arg(format!("if={}", mounted.path("file").display()))
        .args(["of=/dev/null", "bs=4096"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    thread::sleep(Duration::from_millis(100));
    all.set(rates(0, 1));
    thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none(), "it reads for an hour");
    (mounted, all, file, child)
}

#[test]
fn interrupts_and_flush_pass_requests_that_wait() {
    for path in paths() {
        let (mounted, _all, file, child) = exhausted(path);
        // More than a queue of the ring has entries at first.
        let look = |number: u32| Command::new("stat").arg(mounted.path(&format!("none-{number}"))).spawn().unwrap();
        let mut waiting: Vec<_> = (0..24).map(look).chain([child]).collect();
        thread::sleep(Duration::from_millis(300));
        let begin = Instant::now();
        drop(file);
        assert!(begin.elapsed() < Duration::from_secs(2), "{path:?}: close waits, {:?}", begin.elapsed());
        for child in &mut waiting {
            assert!(child.try_wait().unwrap().is_none(), "{path:?}: it waits");
            // A killed process waits for the reply to its request, unless that is interrupted.
            child.kill().unwrap();
            wait_until("a killed process ends", || child.try_wait().unwrap().is_some());
        }
        mounted.stop();
    }
}

#[test]
fn a_mount_stops_while_requests_wait() {
    for path in paths() {
        let (mounted, _all, file, mut child) = exhausted(path);
        mounted.stop();
        wait_until("the reader ends", || child.try_wait().unwrap().is_some());
        drop(file);
    }
}

#[test]
fn waiting_requests_are_served_when_the_limit_is_removed() {
    for path in paths() {
        let (mounted, all, file, mut child) = exhausted(path);
        thread::scope(|scope| {
            let read = || file.read_at(&mut [0; BLOCK], 0).unwrap_or_else(|error| panic!("{path:?}: {error}"));
            let readers: Vec<_> = (0..4).map(|_| scope.spawn(read)).collect();
            thread::sleep(Duration::from_millis(200));
            assert!(readers.iter().all(|reader| !reader.is_finished()), "{path:?}: they wait");
            let begin = Instant::now();
            all.set(None);
            readers.into_iter().for_each(|reader| assert_eq!(reader.join().unwrap(), BLOCK));
            assert!(begin.elapsed() < Duration::from_secs(2), "{path:?}: {:?}", begin.elapsed());
        });
        child.kill().unwrap();
        child.wait().unwrap();
        drop(file);
        mounted.stop();
    }
}

/// A reader that polls finds no request if its caller was killed meanwhile. It must not wait for the next one.
#[test]
fn killed_callers_do_not_delay_waiting_requests() {
    for path in paths() {
        let (mounted, all) = limited(path);
        let file = File::open(mounted.path("file")).unwrap();
        all.set(rates(100, 0));
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let killer = scope.spawn(|| {
                for round in 0..40_u64 {
                    let mut command = Command::new("dd");
                    command.arg(format!("if={}", mounted.path("file").display())).args(["of=/dev/null", "bs=4096"]);
                    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
                    thread::sleep(Duration::from_micros(500 + round * 100));
                    child.kill().unwrap();
                    child.wait().unwrap();
                }
                over.store(true, Ordering::Relaxed);
            });
            while !over.load(Ordering::Relaxed) {
                let begin = Instant::now();
                assert_eq!(file.read_at(&mut [0; BLOCK], 0).unwrap(), BLOCK);
                assert!(begin.elapsed() < Duration::from_secs(5), "{path:?}: {:?}", begin.elapsed());
            }
            killer.join().unwrap();
        });
        drop(file);
        mounted.stop();
    }
}
