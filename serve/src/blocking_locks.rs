//! Requests that wait for a lock (SETLKW), and INTERRUPT, which ends them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use ferry_vfs::sync::lock;
use ferry_vfs::{Cancellation, Errno, Result, Waiter};

/// The most INTERRUPTs that are remembered for requests that do not wait yet. The client sends one only while its
/// request is being served, and fewer than this are served at a time.
const EARLY_MAX: usize = 1024;

type ReplyFn = Box<dyn FnOnce(Result<()>) + Send>;

#[derive(Default)]
struct WaitState {
    reply: Option<ReplyFn>,
    /// Set once, by what ends the wait first: the source or an INTERRUPT.
    outcome: Option<Result<()>>,
    /// The source has kept the waiter. No reply is sent before that: the source may still refuse the lock, or panic.
    parked: bool,
}

/// A request that waits for a lock.
pub(crate) struct BlockedLock {
    stage: Mutex<WaitState>,
    cancellation: Arc<Cancellation>,
}

impl BlockedLock {
    /// Ends the wait; returns whether this call ended it.
    fn end(&self, outcome: Result<()>) -> bool {
        let mut stage = lock(&self.stage);
        if stage.outcome.is_some() {
            return false;
        }
        stage.outcome = Some(outcome);
        let reply = if stage.parked { stage.reply.take() } else { None };
        drop(stage);
        if let Some(reply) = reply {
            reply(outcome);
        }
        true
    }

    /// Allows the reply to be sent; returns whether it was sent now.
    fn park(&self) -> bool {
        let mut stage = lock(&self.stage);
        stage.parked = true;
        let Some(outcome) = stage.outcome else { return false };
        let reply = stage.reply.take();
        drop(stage);
        if let Some(reply) = reply {
            reply(outcome);
        }
        true
    }

    fn interrupt(&self) {
        // Cancels before the reply, so that no cancelled lock is granted. If a grant is under way, that sends the
        // reply.
        if self.cancellation.cancel() {
            self.end(Err(Errno::INTR));
        }
    }
}

#[derive(Default)]
struct State {
    parked: HashMap<u64, Arc<BlockedLock>>,
    /// INTERRUPTs that arrived before their request was parked.
    early: VecDeque<u64>,
}

/// The waiting requests of one session, by their `unique`.
///
/// An INTERRUPT for a request that is not parked is remembered: if the request is parked later, it ends at once.
/// EAGAIN would make the client send the INTERRUPT again and again. A `unique` is not used twice.
#[derive(Default)]
pub(crate) struct BlockedLocks(Mutex<State>);

impl BlockedLocks {
    /// Creates a waiter for request `unique`; `reply` sends the reply. `unlock` releases a lock that is granted after
    /// the client got EINTR, which a source that does not claim waiters can do.
    pub(crate) fn waiter(
        self: &Arc<Self>,
        unique: u64,
        reply: impl FnOnce(Result<()>) + Send + 'static,
        unlock: impl FnOnce() + Send + 'static,
    ) -> (Waiter, Arc<BlockedLock>) {
        let cancellation = Arc::<Cancellation>::default();
        let stage = WaitState { reply: Some(Box::new(reply)), ..WaitState::default() };
        let wait = Arc::new(BlockedLock { stage: Mutex::new(stage), cancellation: Arc::clone(&cancellation) });
        let (waits, ended) = (Arc::clone(self), Arc::clone(&wait));
        let wake = move |outcome: Result<()>| {
            if ended.end(outcome) {
                lock(&waits.0).parked.remove(&unique);
            } else if outcome.is_ok() {
                unlock();
            }
        };
        (Waiter::new(wake).until(cancellation), wait)
    }

    /// Parks a request whose waiter the source has kept: from now on an INTERRUPT ends it.
    pub(crate) fn park(&self, unique: u64, wait: Arc<BlockedLock>) {
        let mut state = lock(&self.0);
        if let Some(index) = state.early.iter().position(|early| *early == unique) {
            state.early.remove(index);
            drop(state);
            wait.interrupt();
            wait.park();
            return;
        }
        state.parked.insert(unique, Arc::clone(&wait));
        drop(state);
        if wait.park() {
            lock(&self.0).parked.remove(&unique);
        }
    }

    /// Ends all waits with EINTR: the client migrates or changes servers and repeats the requests. Meanwhile no lock
    /// is granted to it.
    pub(crate) fn interrupt_all(&self) {
        let parked: Vec<_> = lock(&self.0).parked.drain().map(|(_, wait)| wait).collect();
        parked.iter().for_each(|wait| wait.interrupt());
    }

    /// Returns the number of waiting requests.
    pub(crate) fn count(&self) -> usize {
        lock(&self.0).parked.len()
    }

    /// Serves an INTERRUPT of a request.
    pub(crate) fn interrupt(&self, unique: u64) {
        let mut state = lock(&self.0);
        match state.parked.remove(&unique) {
            Some(wait) => {
                drop(state);
                wait.interrupt();
            }
            None => {
                if state.early.len() == EARLY_MAX {
                    state.early.pop_front();
                }
                state.early.push_back(unique);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The outcomes of a wait, and the number of locks that were released.
    #[derive(Default)]
    struct Outcomes(Mutex<(Vec<Result<()>>, usize)>);

    fn waiter(waits: &Arc<BlockedLocks>, unique: u64) -> (Waiter, Arc<BlockedLock>, Arc<Outcomes>) {
        let seen = Arc::new(Outcomes::default());
        let (one, other) = (Arc::clone(&seen), Arc::clone(&seen));
        let (waiter, wait) = waits.waiter(
            unique,
            move |outcome| one.0.lock().unwrap().0.push(outcome),
            move || other.0.lock().unwrap().1 += 1,
        );
        (waiter, wait, seen)
    }

    #[test]
    fn a_wait_ends_once() {
        const INTR: Result<()> = Err(Errno::INTR);
        // Steps: p = park, i = interrupt, w = wake with the lock, d = drop the waiter.
        for (steps, outcomes, unlocked) in [
            ("pw", [Ok(())], 0),
            ("pi", [INTR], 0),
            ("piw", [INTR], 1),
            ("pid", [INTR], 0),
            ("pd", [INTR], 0),
            ("wpi", [Ok(())], 0),
            ("ip", [INTR], 0),
            ("ipw", [INTR], 1),
            ("pwi", [Ok(())], 0),
        ] {
            let waits = Arc::new(BlockedLocks::default());
            let (waiter, wait, seen) = waiter(&waits, 8);
            let mut waiter = Some(waiter);
            for step in steps.chars() {
                match step {
                    'p' => waits.park(8, Arc::clone(&wait)),
                    'i' => waits.interrupt(8),
                    'w' => waiter.take().unwrap().wake(Ok(())),
                    _ => drop(waiter.take()),
                }
                let interrupted = seen.0.lock().unwrap().0 == [INTR];
                let waiting = waiter.as_ref().is_some_and(Waiter::is_waiting);
                assert!(!(interrupted && waiting), "{steps}: the source sees that the wait has ended");
            }
            if let Some(waiter) = waiter {
                waiter.dismiss();
            }
            assert_eq!(*seen.0.lock().unwrap(), (outcomes.to_vec(), unlocked), "{steps}");
            assert!(lock(&waits.0).parked.is_empty(), "{steps}: nothing is kept");
        }
    }

    /// Otherwise the lock would be released after the client got EINTR, and the client may hold it again by then.
    #[test]
    fn an_interrupt_during_a_grant_is_too_late() {
        for (is_granted, expected) in [(true, Ok(())), (false, Err(Errno::INTR))] {
            let waits = Arc::new(BlockedLocks::default());
            let (waiter, wait, seen) = waiter(&waits, 8);
            waits.park(8, wait);
            assert!(waiter.claim());
            waits.interrupt(8);
            assert!(seen.0.lock().unwrap().0.is_empty());
            if is_granted {
                waiter.wake(Ok(()));
            } else {
                assert!(!waiter.unclaim());
                waiter.wake(Err(Errno::INTR));
            }
            assert_eq!(*seen.0.lock().unwrap(), (vec![expected], 0));
            assert!(lock(&waits.0).parked.is_empty());
        }
        let waits = Arc::new(BlockedLocks::default());
        let (waiter, wait, seen) = waiter(&waits, 8);
        waits.park(8, wait);
        assert!(waiter.claim() && waiter.unclaim() && waiter.is_waiting());
        waits.interrupt(8);
        assert!(!waiter.claim() && !waiter.is_waiting());
        waiter.dismiss();
        assert_eq!(*seen.0.lock().unwrap(), (vec![Err(Errno::INTR)], 0));
    }

    #[test]
    fn early_interrupts_are_bounded_and_for_their_own_request() {
        let waits = Arc::new(BlockedLocks::default());
        (0..10 * EARLY_MAX as u64).for_each(|unique| waits.interrupt(2 * unique));
        assert_eq!(lock(&waits.0).early.len(), EARLY_MAX);
        let (store, wait, seen) = waiter(&waits, 3);
        waits.park(3, wait);
        assert!(store.is_waiting() && seen.0.lock().unwrap().0.is_empty());
        store.dismiss();
    }
}
