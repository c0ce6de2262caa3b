//! Where the threads that serve run, and when they give way. Alone in its process, whose threads it looks at.
#![allow(clippy::unwrap_used, missing_docs)]

use crate::common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use common::sources::Null;
use common::{gives_way, mount, paths, plain, stay_on, threads, wait_until, wait_within};
use ferry_fuse::{Cache, Options, Path};
use rustix::thread::{CpuSet, sched_getaffinity};

/// On a busy machine a thread that serves competes, up to some seconds, before it tries to give way again.
const UNDISTURBED: Duration = Duration::from_secs(20);

fn places(name: &str) -> Vec<CpuSet> {
    threads(name).into_iter().filter_map(|thread| sched_getaffinity(Some(thread)).ok()).collect()
}

/// Whether a thread may come back from `SCHED_IDLE`.
fn may_give_way() -> bool {
    rustix::process::geteuid().is_root()
        || rustix::process::getrlimit(rustix::process::Resource::Nice).current.is_none_or(|nice| nice >= 20)
}

#[test]
fn the_only_reader_follows_a_waiting_client_at_idle_priority() {
    if !ferry_alone::in_own_process() {
        return;
    }
    if paths().is_empty() {
        return;
    }
    let everywhere = sched_getaffinity(None).unwrap();
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| everywhere.is_set(*cpu));
    let (Some(first), Some(second)) = (cpus.next(), cpus.next()) else {
        return ferry_skip::skip!("there is one CPU");
    };
    let mounted = mount(Arc::new(Null::default()), Options { cache: Cache::None, ..plain(Path::Devfuse) });
    let file = File::options().write(true).open(mounted.path("file")).unwrap();
    let write = |bytes: usize| file.write_all_at(&vec![1; bytes], 0).unwrap();
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            for cpu in [first, second, first] {
                stay_on(cpu);
                let mut here = CpuSet::new();
                here.set(cpu);
                wait_until("the reader follows", || {
                    (0..50).for_each(|_| write(512));
                    places("fuse-reader") == [here]
                });
            }
            // Each sends an asynchronous RELEASE, which names no thread.
            stay_on(second);
            wait_until("the reader follows a client that opens and closes", || {
                (0..50).for_each(|_| drop(File::open(mounted.path("file")).unwrap()));
                let mut here = CpuSet::new();
                here.set(second);
                places("fuse-reader") == [here]
            });
            stay_on(first);
            if may_give_way() {
                wait_within(UNDISTURBED, "the reader gives way", || {
                    (0..50).for_each(|_| write(512));
                    threads("fuse-reader").into_iter().all(gives_way)
                });
            }
            wait_until("a reader that moves much runs anywhere", || {
                (0..20).for_each(|_| write(100_000));
                places("fuse-reader").iter().all(|place| *place == everywhere)
            });
            wait_until("and competes", || {
                (0..20).for_each(|_| write(100_000));
                !threads("fuse-reader").into_iter().any(gives_way)
            });
        });
        client.join().unwrap();
    });
    mounted.stop();
}

#[test]
fn workers_of_rings_run_at_idle_priority_until_progress_stops() {
    if !ferry_alone::in_own_process() {
        return;
    }
    if !paths().contains(&Path::Uring) {
        return;
    }
    if !may_give_way() {
        return ferry_skip::skip!("a thread may not come back from SCHED_IDLE here: needs root, or RLIMIT_NICE");
    }
    let mounted = mount(Arc::new(Null::default()), Options { cache: Cache::None, ..plain(Path::Uring) });
    let file = File::options().write(true).open(mounted.path("file")).unwrap();
    wait_within(UNDISTURBED, "a worker gives way", || {
        (0..50).for_each(|_| file.write_all_at(&[1; 512], 0).unwrap());
        threads("fuse-cpu-").into_iter().any(gives_way)
    });
    wait_until("all compete", || !threads("fuse-cpu-").into_iter().any(gives_way));
    mounted.stop();
}
