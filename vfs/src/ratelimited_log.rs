//! Rate-limited log lines, for messages that outside input can cause.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::sync::lock;

/// The maximum number of lines per [`WINDOW`]: enough to see the cause, too few to fill a disk.
const LINES_PER_WINDOW: u32 = 10;
const WINDOW: Duration = Duration::from_secs(10);

/// Limits log lines to ten in ten seconds, besides one that counts the suppressed ones. Each share, disk, image and mount
/// has its own; the clients of one share have one in common.
#[derive(Debug, Default)]
pub struct RatelimitedLog(Mutex<Option<(Instant, u32)>>);

impl RatelimitedLog {
    /// The target of its lines in log filters.
    pub const TARGET: &'static str = module_path!();

    /// Logs a warning, unless the limit is reached.
    pub fn warn(&self, message: std::fmt::Arguments<'_>) {
        if self.may_log() {
            tracing::warn!("{message}");
        }
    }

    /// Logs an error, unless the limit is reached.
    pub fn error(&self, message: std::fmt::Arguments<'_>) {
        if self.may_log() {
            tracing::error!("{message}");
        }
    }

    fn may_log(&self) -> bool {
        match self.admit() {
            None => false,
            Some(0) => true,
            Some(suppressed) => {
                tracing::warn!("{suppressed} more messages were not logged");
                true
            }
        }
    }

    /// Returns `None` if the limit is reached; otherwise the number of lines suppressed since the last one.
    pub fn admit(&self) -> Option<u32> {
        let now = Instant::now();
        let mut state = lock(&self.0);
        let (start, count, suppressed) = match *state {
            Some((start, count)) if now.duration_since(start) < WINDOW => (start, count.saturating_add(1), 0),
            Some((_, count)) => (now, 1, count.saturating_sub(LINES_PER_WINDOW)),
            None => (now, 1, 0),
        };
        *state = Some((start, count));
        (count <= LINES_PER_WINDOW).then_some(suppressed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_lines_per_window_are_logged_and_the_others_counted() {
        let ratelimited_log = RatelimitedLog::default();
        let admitted: Vec<_> = (0..100).filter_map(|_| ratelimited_log.admit()).collect();
        assert_eq!(admitted, [0; 10]);
        // The window is over.
        let state = ratelimited_log.0.lock().unwrap().take();
        let before = state.and_then(|(start, count)| Some((start.checked_sub(WINDOW)?, count)));
        *ratelimited_log.0.lock().unwrap() = before;
        assert_eq!((ratelimited_log.admit(), ratelimited_log.admit()), (Some(90), Some(0)));
    }
}
