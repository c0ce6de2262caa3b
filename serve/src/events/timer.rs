//! Ends waits for events at their deadlines, on one thread for all clients of a share.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

use ferry_vfs::sync::lock;

use super::queue::Queue;

#[derive(Default)]
struct State {
    queues: Vec<Weak<Queue>>,
    has_thread: bool,
    /// A reader has begun to wait since the thread last looked.
    is_changed: bool,
    is_over: bool,
}

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

/// Replies to readers whose deadline has passed.
#[derive(Default)]
pub struct Timer(Arc<Inner>);

impl std::fmt::Debug for Timer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Timer")
    }
}

impl Timer {
    /// Watches the deadline of a queue's reader.
    pub fn watch(&self, queue: &Arc<Queue>) {
        let mut state = lock(&self.0.state);
        let queue = Arc::downgrade(queue);
        if !state.queues.iter().any(|known| known.ptr_eq(&queue)) {
            state.queues.retain(|known| known.strong_count() != 0);
            state.queues.push(queue);
        }
        if !state.has_thread {
            let inner = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("events".into()).spawn(move || inner.run());
            match thread {
                Ok(_) => state.has_thread = true,
                Err(error) => tracing::warn!("waits for events have no deadline: cannot start a thread: {error}"),
            }
        }
        state.is_changed = true;
        drop(state);
        self.0.changed.notify_one();
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        lock(&self.0.state).is_over = true;
        self.0.changed.notify_one();
    }
}

impl Inner {
    fn run(&self) {
        let mut state = lock(&self.state);
        while !state.is_over {
            state.is_changed = false;
            let queues: Vec<_> = state.queues.iter().filter_map(Weak::upgrade).collect();
            drop(state);
            let now = Instant::now();
            let next = queues.iter().filter_map(|queue| queue.expire(now)).min();
            drop(queues);
            state = lock(&self.state);
            if state.is_over || state.is_changed {
                continue;
            }
            state = match next {
                Some(next) => {
                    let rest = next.saturating_duration_since(Instant::now());
                    self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}
