//! The queue between the change listener and the threads that notify the kernel.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use ferry_vfs::{Change, DeliveryGuard, Ino};

use super::pending::{Job, PendingNotifications};
use super::prunes::Prunes;

/// How long a reply waits for notifications that a blocked handler keeps back: longer than slow handlers take.
const TOLD_PATIENCE: Duration = Duration::from_secs(1);

/// The maximum number of stuck threads, each on another inode. Beyond it no notifications are sent until one returns.
const STUCK_MAX: usize = 64;

/// The current job of a thread.
#[derive(Debug)]
struct Step {
    number: u64,
    job: Job,
    /// The inode on whose lock or pages the kernel may block it.
    waits_for: Option<Ino>,
}

/// A thread that is stuck in the kernel.
#[derive(Debug)]
struct BlockedNotifier {
    number: u64,
    waits_for: Option<Ino>,
    since: Instant,
}

#[derive(Debug, Default)]
struct NotifyQueue {
    notes: PendingNotifications,
    /// Guards to drop once the queued notifications are sent.
    told: Vec<DeliveryGuard>,
    /// The jobs of the current round.
    round: VecDeque<Job>,
    /// Guards to drop once the round is done.
    round_told: Vec<DeliveryGuard>,
    current: Option<Step>,
    number: u64,
    stuck: Vec<BlockedNotifier>,
    /// Notifications of inodes on which a thread is stuck.
    deferred: PendingNotifications,
    /// Guards to drop once no thread is stuck, or after their deadline.
    late: Vec<(Instant, DeliveryGuard)>,
    prunes: Prunes,
    closed: bool,
}

impl NotifyQueue {
    /// Returns whether only stuck threads have work.
    fn is_quiet(&self) -> bool {
        self.notes.is_empty() && self.told.is_empty()
    }

    /// Returns the deadline of guards that wait for stuck threads, if there are any.
    fn wait_for_stuck(&self) -> Option<Instant> {
        let until = self.stuck.iter().map(|stuck| stuck.since + TOLD_PATIENCE).max()?;
        (until > Instant::now()).then_some(until)
    }

    /// Returns whether notifications are queued or in progress.
    fn is_behind(&self) -> bool {
        let telling = self.current.is_some() || !self.round.is_empty() || !self.round_told.is_empty();
        !self.closed && (telling || !self.is_quiet() || self.wait_for_stuck().is_some())
    }

    fn is_stuck_at(&self, ino: Ino) -> bool {
        self.stuck.iter().any(|stuck| stuck.waits_for == Some(ino))
    }

    /// Returns the next job of the round on whose inode no thread is stuck.
    fn pop(&mut self) -> Option<(u64, Job)> {
        while let Some(job) = self.round.pop_front() {
            let job = match job {
                Job::Removed(dir, name, ino) if self.is_stuck_at(ino) => Job::Entry(dir, name),
                job => job,
            };
            if job.waits_for().is_some_and(|ino| self.is_stuck_at(ino)) {
                self.deferred.put(job);
                continue;
            }
            // The lock of a removed inode is needed first: see `NotifyThread::removed`.
            let waits_for = if let Job::Removed(_, _, ino) = &job { Some(*ino) } else { job.waits_for() };
            self.number += 1;
            self.current = Some(Step { number: self.number, job: job.clone(), waits_for });
            return Some((self.number, job));
        }
        None
    }

    /// Ends a round: returns its guards, or keeps them for stuck threads.
    fn end_round(&mut self) -> Vec<DeliveryGuard> {
        let told = std::mem::take(&mut self.round_told);
        match self.wait_for_stuck() {
            Some(until) => {
                self.late.extend(told.into_iter().map(|told| (until, told)));
                Vec::new()
            }
            None => told,
        }
    }

    /// Begins a round with the queued notifications; returns whether there are any.
    fn begin_round(&mut self, prunes: bool) -> bool {
        if prunes {
            self.prunes.add(&self.notes);
        }
        self.round.extend(std::mem::take(&mut self.notes).into_jobs());
        // After the notifications: the kernel looks pruned inodes up again.
        self.round.extend(self.prunes.due(Instant::now()));
        self.round_told = std::mem::take(&mut self.told);
        !(self.round.is_empty() && self.round_told.is_empty())
    }
}

#[derive(Debug, Default)]
pub(super) struct Shared {
    notify_queue: Mutex<NotifyQueue>,
    noted: Condvar,
}

impl Shared {
    pub(super) fn note(&self, change: &Change) {
        self.change(lock(&self.notify_queue), |notify_queue| notify_queue.notes.add(change));
    }

    pub(super) fn is_behind(&self) -> bool {
        lock(&self.notify_queue).is_behind()
    }

    pub(super) fn when_delivered(&self, told: DeliveryGuard) {
        let notify_queue = lock(&self.notify_queue);
        if notify_queue.is_behind() {
            self.change(notify_queue, |notify_queue| notify_queue.told.push(told));
        }
    }

    fn change(&self, mut notify_queue: MutexGuard<'_, NotifyQueue>, change: impl FnOnce(&mut NotifyQueue)) {
        let first = notify_queue.is_quiet();
        change(&mut notify_queue);
        drop(notify_queue);
        if first {
            self.noted.notify_one();
        }
    }

    /// Returns the next job and its number, for the only thread that is not stuck; its last job is done. Waits for one;
    /// `None` after the close. `prunes`: whether changed inodes are pruned.
    pub(super) fn next(&self, prunes: bool) -> Option<(u64, Job)> {
        let mut notify_queue = lock(&self.notify_queue);
        notify_queue.current = None;
        loop {
            if notify_queue.closed {
                return None;
            }
            if let Some(job) = notify_queue.pop() {
                return Some(job);
            }
            let told = notify_queue.end_round();
            if !told.is_empty() {
                drop(notify_queue);
                // Without the lock: the waiting threads continue here.
                drop(told);
                notify_queue = lock(&self.notify_queue);
            } else if !notify_queue.begin_round(prunes) {
                let left = notify_queue.prunes.next().map(|next| next.saturating_duration_since(Instant::now()));
                notify_queue = match left {
                    Some(left) => self.noted.wait_timeout(notify_queue, left).unwrap_or_else(PoisonError::into_inner).0,
                    None => self.noted.wait(notify_queue).unwrap_or_else(PoisonError::into_inner),
                };
            }
        }
    }

    /// Splits the current job into these.
    pub(super) fn more(&self, jobs: impl Iterator<Item = Job>) {
        lock(&self.notify_queue).round.extend(jobs);
    }

    /// The first half of the current job is done; the second may block on another inode.
    pub(super) fn goes_on(&self, waits_for: Ino) {
        if let Some(step) = &mut lock(&self.notify_queue).current {
            step.waits_for = Some(waits_for);
        }
    }

    /// Records that the current thread is stuck, if `take` confirms it under the lock: another thread continues.
    pub(super) fn set_aside<T>(&self, take: impl FnOnce() -> Option<T>) -> Option<T> {
        let mut notify_queue = lock(&self.notify_queue);
        let taken = take()?;
        if let Some(Step { number, job, waits_for }) = notify_queue.current.take() {
            // Names are dropped nevertheless.
            if let Job::Removed(dir, name, ino) = job
                && waits_for == Some(ino)
            {
                notify_queue.round.push_front(Job::Entry(dir, name));
            }
            tracing::debug!("a blocked handler delays a notification about {waits_for:?}");
            notify_queue.stuck.push(BlockedNotifier { number, waits_for, since: Instant::now() });
        }
        Some(taken)
    }

    /// Returns whether the maximum number of threads is reached.
    pub(super) fn is_full(&self) -> bool {
        lock(&self.notify_queue).stuck.len() >= STUCK_MAX
    }

    /// Called when a stuck thread returns: its deferred notifications can be sent.
    pub(super) fn come_back(&self, number: u64) {
        let mut notify_queue = lock(&self.notify_queue);
        notify_queue.stuck.retain(|stuck| stuck.number != number);
        let over = if notify_queue.stuck.is_empty() { std::mem::take(&mut notify_queue.late) } else { Vec::new() };
        self.change(notify_queue, |notify_queue| {
            let deferred = std::mem::take(&mut notify_queue.deferred);
            deferred.into_jobs().for_each(|job| notify_queue.notes.put(job));
        });
        drop(over);
    }

    /// Drops guards whose deadline has passed; returns whether any are left.
    pub(super) fn let_go(&self) -> bool {
        let now = Instant::now();
        let mut notify_queue = lock(&self.notify_queue);
        let (late, over) = std::mem::take(&mut notify_queue.late).into_iter().partition(|(until, _)| *until > now);
        notify_queue.late = late;
        let some = !notify_queue.late.is_empty();
        drop(notify_queue);
        let over: Vec<(Instant, DeliveryGuard)> = over;
        drop(over);
        some
    }

    pub(super) fn close(&self) {
        let mut notify_queue = lock(&self.notify_queue);
        let left = std::mem::take(&mut *notify_queue);
        notify_queue.closed = true;
        drop(notify_queue);
        // The connection has ended, so the kernel caches nothing.
        drop(left);
        self.noted.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use ferry_vfs::Name;

    use super::super::pending::of_all;
    use super::*;

    /// The maximum wait for an existing job.
    const PATIENCE: Duration = Duration::from_secs(10);

    /// A guard that counts its drops.
    #[derive(Default)]
    struct Waiting(Arc<AtomicUsize>);

    impl Waiting {
        fn one(&self, shared: &Shared) {
            let done = Arc::clone(&self.0);
            shared.when_delivered(DeliveryGuard::new(move || {
                done.fetch_add(1, Ordering::Relaxed);
            }));
        }

        fn done(&self) -> usize {
            self.0.load(Ordering::Relaxed)
        }
    }

    fn attributes(shared: &Shared, ino: u64) {
        shared.note(&Change::Attr { ino: Ino(ino) });
    }

    fn entry(shared: &Shared, dir: u64, name: &[u8]) {
        shared.note(&Change::Entry { dir: Ino(dir), name: Name::new(name).unwrap().to_buf() });
    }

    /// Returns the next job, which must exist.
    fn next(shared: &Shared) -> (u64, Job) {
        let (done, is_done) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                if is_done.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                    shared.close();
                }
            });
            let next = shared.next(false);
            drop(done);
            next.expect("there is a job")
        })
    }

    /// Returns all jobs that do not wait.
    fn all(shared: &Shared) -> Vec<Job> {
        const LAST: u64 = u64::MAX;
        // The last of its round.
        attributes(shared, LAST);
        let next = || Some(next(shared).1).filter(|job| *job != Job::Attributes(Ino(LAST)));
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn guards_are_dropped_when_notifications_are_sent() {
        let (shared, waiting) = (Shared::default(), Waiting::default());
        assert!(!shared.is_behind());
        attributes(&shared, 2);
        waiting.one(&shared);
        assert!(shared.is_behind());
        assert_eq!(next(&shared).1, Job::Attributes(Ino(2)));
        // Notifications in progress count as queued ones.
        assert!(shared.is_behind());
        attributes(&shared, 3);
        waiting.one(&shared);
        assert_eq!(waiting.done(), 0);
        assert_eq!(next(&shared).1, Job::Attributes(Ino(3)));
        assert_eq!(waiting.done(), 1);
        attributes(&shared, 4);
        waiting.one(&shared);
        assert_eq!(next(&shared).1, Job::Attributes(Ino(4)));
        assert_eq!(waiting.done(), 2);
        shared.close();
        assert_eq!(waiting.done(), 3, "all guards are dropped");
        waiting.one(&shared);
        assert_eq!(waiting.done(), 4);
        assert!(shared.next(false).is_none() && !shared.is_behind());
    }

    #[test]
    fn a_stuck_thread_is_waited_for_with_a_limit() {
        let (shared, waiting) = (Shared::default(), Waiting::default());
        entry(&shared, 7, b"x");
        attributes(&shared, 2);
        waiting.one(&shared);
        let (stuck, job) = next(&shared);
        assert_eq!(job.waits_for(), Some(Ino(7)));
        assert_eq!(shared.set_aside(|| None::<()>), None, "it has just come back");
        assert!(lock(&shared.notify_queue).stuck.is_empty());
        shared.set_aside(|| Some(())).unwrap();
        // The next thread sends notifications of other inodes.
        assert_eq!(next(&shared).1, Job::Attributes(Ino(2)));
        entry(&shared, 8, b"y");
        entry(&shared, 7, b"z");
        let jobs = all(&shared);
        assert!(!jobs.is_empty() && jobs.iter().all(|job| job.waits_for() == Some(Ino(8))), "{jobs:?}");
        assert!(shared.is_behind() && shared.let_go());
        assert_eq!(waiting.done(), 0);
        let begin = Instant::now();
        while shared.let_go() {
            assert!(begin.elapsed() < TOLD_PATIENCE * 10);
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(waiting.done(), 1);
        // Nobody waits for him any more.
        attributes(&shared, 3);
        waiting.one(&shared);
        assert_eq!(next(&shared).1, Job::Attributes(Ino(3)));
        attributes(&shared, 4);
        assert_eq!(next(&shared).1, Job::Attributes(Ino(4)));
        assert_eq!(waiting.done(), 2);
        // Deferred notifications are sent when the thread returns.
        shared.come_back(stuck);
        let jobs = all(&shared);
        assert!(jobs.contains(&Job::Entry(Ino(7), Name::new(b"z").unwrap().to_buf())), "{jobs:?}");
    }

    #[test]
    fn deferred_notifications_continue_when_a_stuck_thread_returns() {
        let (shared, waiting) = (Shared::default(), Waiting::default());
        entry(&shared, 7, b"x");
        waiting.one(&shared);
        let (stuck, _) = next(&shared);
        shared.set_aside(|| Some(())).unwrap();
        attributes(&shared, 2);
        assert_eq!(next(&shared).1, Job::Attributes(Ino(2)));
        assert!(shared.let_go(), "it waits");
        shared.come_back(stuck);
        assert_eq!((waiting.done(), shared.let_go()), (1, false));
    }

    #[test]
    fn removed_names_in_use_are_dropped() {
        let shared = Shared::default();
        let name = Name::new(b"x").unwrap().to_buf();
        let removed = Change::Removed { dir: Ino(1), name: name.clone(), ino: Ino(9) };
        for round in 0..2 {
            shared.note(&removed);
            if round == 0 {
                assert_eq!(next(&shared).1, Job::Removed(Ino(1), name.clone(), Ino(9)));
                shared.set_aside(|| Some(())).unwrap();
            }
            assert_eq!(next(&shared).1, Job::Entry(Ino(1), name.clone()), "round {round}");
            all(&shared);
        }
        // If the directory itself is locked, no thread can proceed.
        shared.note(&Change::Removed { dir: Ino(1), name: name.clone(), ino: Ino(10) });
        let (_, job) = next(&shared);
        assert_eq!(job, Job::Removed(Ino(1), name.clone(), Ino(10)));
        shared.goes_on(Ino(1));
        shared.set_aside(|| Some(())).unwrap();
        assert!(all(&shared).iter().all(|job| job.waits_for() != Some(Ino(1))));
    }

    #[test]
    fn a_thread_stuck_in_a_full_invalidation_delays_nothing_else() {
        let shared = Shared::default();
        shared.note(&Change::All);
        assert_eq!(next(&shared).1, Job::All);
        shared.more(of_all(vec![Ino(2), Ino(3)]));
        let mut jobs = Vec::new();
        for _ in 0..2 {
            jobs.push(next(&shared).1);
            shared.set_aside(|| Some(())).unwrap();
        }
        jobs.extend(all(&shared));
        let data = |ino| Job::Data(ino, (0, u64::MAX));
        assert_eq!(jobs, [data(Ino(2)), data(Ino(3)), data(Ino::ROOT)]);
    }
}
