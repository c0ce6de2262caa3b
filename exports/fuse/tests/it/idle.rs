//! What an idle mount costs. Alone in its process, whose threads it counts.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::sources::Null;
use common::{mount, paths, plain, stay_on, threads, wait_until};
use ferry_fuse::{Cache, Options};

/// How often the threads of the export have gone to sleep.
fn sleeps() -> u64 {
    let count = |thread: rustix::thread::Pid| -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse().ok()
    };
    threads("fuse-").into_iter().filter_map(count).sum()
}

#[test]
fn an_idle_mount_wakes_no_thread_and_a_later_blocked_handler_delays_nothing() {
    if !ferry_alone::in_own_process() {
        return;
    }
    for path in paths() {
        let source = Arc::new(Null::default());
        let options = Options { cache: Cache::None, ring_depth: 2, threads: 1, ..plain(path) };
        let mounted = mount(Arc::clone(&source) as _, options);
        let read = |name: &str| File::open(mounted.path(name)).unwrap().read_at(&mut [0; 512], 0).unwrap();
        for round in 0..2 {
            assert_eq!(read("file"), 512);
            // The monitor looks for half a second longer, and the scheduling class of workers is put back.
            let mut before = sleeps();
            let start = Instant::now();
            loop {
                std::thread::sleep(Duration::from_secs(1));
                let now = sleeps();
                if now == before {
                    break;
                }
                assert!(start.elapsed() < Duration::from_secs(10), "round {round} by {path:?}: {} more", now - before);
                before = now;
            }
        }
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    stay_on(0);
                    assert_eq!(read("hangs"), 512);
                });
            }
            stay_on(0);
            wait_until("all are blocked at once", || source.held.load(Ordering::SeqCst) == 3);
            assert_eq!(read("file"), 512);
            source.let_go.store(true, Ordering::SeqCst);
        });
        mounted.stop();
    }
}
