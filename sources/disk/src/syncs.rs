//! Making a file's data durable, for many callers at once.

use std::io;
use std::sync::{Condvar, Mutex};

use ferry_vfs::sync::{self, lock};

/// The synchronizations of one open file. The kernel reports to one call only that it has lost data, and takes the pages for written from
/// then on. So all concurrent callers share one call, and after a failure all later ones fail.
#[derive(Default)]
pub(crate) struct Syncs {
    state: Mutex<State>,
    ended: Condvar,
}

/// Counters of synchronizations.
#[derive(Default)]
struct State {
    begun: u64,
    ended: u64,
    is_running: bool,
    /// Data were lost.
    failed: bool,
}

impl Syncs {
    /// Returns when a call of `sync` that began after this has ended.
    ///
    /// # Errors
    ///
    /// That of `sync`; or an earlier one had failed.
    pub(crate) fn run(&self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut state = lock(&self.state);
        let mine = state.begun + 1;
        while state.ended < mine && !state.failed && state.is_running {
            state = sync::wait(&self.ended, state);
        }
        if state.ended < mine && !state.failed {
            state.begun += 1;
            state.is_running = true;
            drop(state);
            let outcome = sync();
            state = lock(&self.state);
            state.is_running = false;
            state.ended = state.begun;
            if let Err(error) = &outcome {
                state.failed = true;
                tracing::error!(
                    "data of a disk could not be made durable ({error}): its flushes fail until this server is started again"
                );
            }
            self.ended.notify_all();
            return outcome;
        }
        match state.failed {
            true => Err(io::Error::other("earlier writes could not be made durable")),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn a_failure_is_everybodys_and_lasts() {
        let (syncs, calls) = (Syncs::default(), AtomicUsize::new(0));
        let (begun, go_on) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        thread::scope(|scope| {
            let first = scope.spawn(|| {
                syncs.run(|| {
                    begun.wait();
                    go_on.wait();
                    Err(io::Error::from_raw_os_error(5))
                })
            });
            begun.wait();
            let second = scope.spawn(|| syncs.run(|| Ok(_ = calls.fetch_add(1, Ordering::Relaxed))));
            go_on.wait();
            first.join().unwrap().unwrap_err();
            second.join().unwrap().unwrap_err();
        });
        syncs.run(|| Ok(())).unwrap_err();
        assert_eq!(calls.into_inner(), 0);
    }

    #[test]
    fn each_caller_waits_for_a_call_that_began_later() {
        let (syncs, calls) = (Syncs::default(), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let before = calls.load(Ordering::SeqCst);
                        syncs.run(|| Ok(_ = calls.fetch_add(1, Ordering::SeqCst))).unwrap();
                        assert!(calls.load(Ordering::SeqCst) > before);
                    }
                });
            }
        });
    }
}
