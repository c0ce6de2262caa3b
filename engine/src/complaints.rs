//! Log lines that a guest can cause, a few at a time.

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Lines per [`WINDOW`]; enough to see what is wrong, too few to fill a disk.
const LINES_PER_WINDOW: u32 = 10;
const WINDOW: Duration = Duration::from_secs(10);

/// Limits how often somebody hostile makes us log.
#[derive(Debug, Default)]
pub struct Complaints(Mutex<Option<(Instant, u32)>>);

impl Complaints {
    /// Logs a warning, unless too many complaints came lately.
    pub fn warn(&self, message: std::fmt::Arguments<'_>) {
        if self.may_complain() {
            tracing::warn!("{message}");
        }
    }

    /// Logs an error, unless too many complaints came lately.
    pub fn error(&self, message: std::fmt::Arguments<'_>) {
        if self.may_complain() {
            tracing::error!("{message}");
        }
    }

    fn may_complain(&self) -> bool {
        let now = Instant::now();
        let mut state = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (start, count) = match *state {
            Some((start, count)) if now.duration_since(start) < WINDOW => (start, count + 1),
            Some((_, count)) if count > LINES_PER_WINDOW => {
                tracing::warn!("{} more complaints were not logged", count - LINES_PER_WINDOW);
                (now, 1)
            }
            _ => (now, 1),
        };
        *state = Some((start, count));
        count <= LINES_PER_WINDOW
    }
}
