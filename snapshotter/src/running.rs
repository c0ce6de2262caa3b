//! Background work of which there is one thread at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The work that a flag stands for runs until this is dropped, even by a panic.
#[derive(Debug)]
pub(crate) struct Running(Arc<AtomicBool>);

impl Running {
    /// Sets a flag; returns `None` if it is set.
    pub fn begin(flag: &Arc<AtomicBool>) -> Option<Self> {
        (!flag.swap(true, Ordering::AcqRel)).then(|| Self(Arc::clone(flag)))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn work_runs_once_at_a_time_and_again_after_a_panic() {
        let flag = Arc::default();
        let running = Running::begin(&flag).unwrap();
        assert!(Running::begin(&flag).is_none());
        thread::spawn(move || {
            let _running = running;
            panic!("it fails, as this test wants");
        })
        .join()
        .unwrap_err();
        assert!(Running::begin(&flag).is_some());
    }
}
