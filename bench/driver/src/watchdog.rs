//! A time limit for servers that do not reply to a vhost-user message.
//!
//! The `vhost` crate retries a read that timed out without limit, so a socket timeout does not help.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
struct State {
    deadline: Option<Instant>,
    end: bool,
}

/// Shuts a socket down when what is being waited for takes too long.
#[derive(Debug)]
pub(crate) struct Watchdog {
    state: Arc<(Mutex<State>, Condvar)>,
    timeout: Duration,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub(crate) fn new(socket: UnixStream, timeout: Duration) -> Self {
        let state = Arc::<(Mutex<State>, Condvar)>::default();
        let watched = Arc::clone(&state);
        let thread = std::thread::spawn(move || watch(&watched, &socket));
        Self { state, timeout, thread: Some(thread) }
    }

    /// Runs `action` under watch.
    pub(crate) fn during<T>(&self, action: impl FnOnce() -> T) -> T {
        self.set(|state, timeout| state.deadline = Some(Instant::now() + timeout));
        let result = action();
        self.set(|state, _| state.deadline = None);
        result
    }

    fn set(&self, change: impl FnOnce(&mut State, Duration)) {
        let (state, changed) = &*self.state;
        change(&mut state.lock().unwrap_or_else(PoisonError::into_inner), self.timeout);
        changed.notify_one();
    }
}

fn watch(state: &(Mutex<State>, Condvar), socket: &UnixStream) {
    let (state, changed) = state;
    let mut now = state.lock().unwrap_or_else(PoisonError::into_inner);
    while !now.end {
        let left = now.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        now = match left {
            None => changed.wait(now).unwrap_or_else(PoisonError::into_inner),
            Some(Duration::ZERO) => {
                // Whoever waits sees the end of the connection.
                let _ = socket.shutdown(Shutdown::Both);
                return;
            }
            Some(left) => changed.wait_timeout(now, left).unwrap_or_else(PoisonError::into_inner).0,
        };
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.set(|state, _| state.end = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn ends_a_wait_that_takes_too_long() {
        let (mut ours, _theirs) = UnixStream::pair().unwrap();
        let dog = Watchdog::new(ours.try_clone().unwrap(), Duration::from_millis(20));
        assert_eq!(dog.during(|| 7), 7);
        assert_eq!(dog.during(|| ours.read(&mut [0; 4])).unwrap(), 0);
    }
}
