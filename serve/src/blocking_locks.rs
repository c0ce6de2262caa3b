//! Requests that wait for a lock, and how INTERRUPT ends them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use ferry_vfs::sync::lock;
use ferry_vfs::{Cancellation, Errno, Result, Waiter};

/// INTERRUPTs of requests that are not parked, remembered for when they are: more than ever run at the same time,
/// for the client sends one only while the request is under way.
const EARLY_MAX: usize = 1024;

type ReplyFn = Box<dyn FnOnce(Result<()>) + Send>;

#[derive(Default)]
struct WaitState {
    answer: Option<ReplyFn>,
    /// Set once, by whoever ends the wait first: the source, or an INTERRUPT.
    outcome: Option<Result<()>>,
    /// The source keeps the waiter. Before that nothing is sent: the source may still refuse the lock, or panic.
    parked: bool,
}

/// A request that waits.
pub(crate) struct BlockedLock {
    stage: Mutex<WaitState>,
    cancellation: Arc<Cancellation>,
}

impl BlockedLock {
    /// Ends the wait; returns whether it had not ended before.
    fn end(&self, outcome: Result<()>) -> bool {
        let mut stage = lock(&self.stage);
        if stage.outcome.is_some() {
            return false;
        }
        stage.outcome = Some(outcome);
        let answer = if stage.parked { stage.answer.take() } else { None };
        drop(stage);
        if let Some(answer) = answer {
            answer(outcome);
        }
        true
    }

    /// Lets the answer go; returns whether it went at once.
    fn park(&self) -> bool {
        let mut stage = lock(&self.stage);
        stage.parked = true;
        let Some(outcome) = stage.outcome else { return false };
        let answer = stage.answer.take();
        drop(stage);
        if let Some(answer) = answer {
            answer(outcome);
        }
        true
    }

    fn interrupt(&self) {
        // Before the answer, so that nobody grants what nobody wants. Whoever is granting the lock answers.
        if self.cancellation.cancel() {
            self.end(Err(Errno::INTR));
        }
    }
}

#[derive(Default)]
struct State {
    parked: HashMap<u64, Arc<BlockedLock>>,
    /// INTERRUPTs that came before their request was parked.
    early: VecDeque<u64>,
}

/// The requests of one session that wait, by their numbers.
///
/// An INTERRUPT for a request that is not parked is remembered rather than answered EAGAIN, which would have the client
/// send it again and again: if the request is parked later, it ends at once. Numbers are not used twice.
#[derive(Default)]
pub(crate) struct BlockedLocks(Mutex<State>);

impl BlockedLocks {
    /// A waiter for request `unique`, which is answered by `answer`. A lock that is granted although the client was
    /// told EINTR, by a source that does not claim waiters, is passed to `give_back`.
    pub(crate) fn waiter(
        self: &Arc<Self>,
        unique: u64,
        answer: impl FnOnce(Result<()>) + Send + 'static,
        give_back: impl FnOnce() + Send + 'static,
    ) -> (Waiter, Arc<BlockedLock>) {
        let cancellation = Arc::<Cancellation>::default();
        let stage = WaitState { answer: Some(Box::new(answer)), ..WaitState::default() };
        let wait = Arc::new(BlockedLock { stage: Mutex::new(stage), cancellation: Arc::clone(&cancellation) });
        let (waits, ended) = (Arc::clone(self), Arc::clone(&wait));
        let wake = move |outcome: Result<()>| {
            if ended.end(outcome) {
                lock(&waits.0).parked.remove(&unique);
            } else if outcome.is_ok() {
                give_back();
            }
        };
        (Waiter::new(wake).until(cancellation), wait)
    }

    /// The source keeps the waiter: from now on the request can be interrupted.
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

    /// The client goes on elsewhere, or here later, and asks again: nobody is to get a lock for it meanwhile.
    pub(crate) fn give_up(&self) {
        let parked: Vec<_> = lock(&self.0).parked.drain().map(|(_, wait)| wait).collect();
        parked.iter().for_each(|wait| wait.interrupt());
    }

    /// Returns how many requests wait.
    pub(crate) fn count(&self) -> usize {
        lock(&self.0).parked.len()
    }

    /// The client wants no answer to a request any more.
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

    /// What a wait ended with, and how many grants were given back.
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
    fn a_wait_ends_once_whoever_comes_first() {
        const INTR: Result<()> = Err(Errno::INTR);
        // Steps: p = park, i = interrupt, w = wake with the lock, d = drop the waiter.
        for (steps, answers, given_back) in [
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
                assert!(!(interrupted && waiting), "{steps}: the source is told");
            }
            if let Some(waiter) = waiter {
                waiter.dismiss();
            }
            assert_eq!(*seen.0.lock().unwrap(), (answers.to_vec(), given_back), "{steps}");
            assert!(lock(&waits.0).parked.is_empty(), "{steps}: nothing is kept");
        }
    }

    /// Otherwise the lock would be given back after the client was told EINTR, and may have it again by then.
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
