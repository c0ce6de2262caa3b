//! Errors of background writes: `fsync` reports each once to every open handle of the file (Linux: errseq_t).

use std::sync::atomic::{AtomicU64, Ordering};

use ferry_vfs::{Errno, Result};

/// The number of a file's errors that an open handle has reported. One per handle.
#[derive(Debug)]
pub struct ErrorCursor(AtomicU64);

/// The errors of a file.
#[derive(Debug, Default)]
pub(super) struct Errors {
    count: u64,
    last: Option<Errno>,
    told: bool,
}

impl Errors {
    pub fn note(&mut self, error: Errno) {
        self.count += 1;
        self.last = Some(error);
        self.told = false;
    }

    /// Creates a cursor for a new handle. It also reports an error that no handle has reported.
    pub fn cursor(&self) -> ErrorCursor {
        let untold = u64::from(!self.told && self.count > 0);
        ErrorCursor(AtomicU64::new(self.count - untold))
    }

    /// Returns the last error that [`Self::tell`] would return, and leaves it to be returned again.
    pub fn show(&self, cursor: &ErrorCursor) -> Result<()> {
        let is_told = cursor.0.load(Ordering::Relaxed) == self.count;
        self.last.filter(|_| !is_told).map_or(Ok(()), Err)
    }

    /// Returns the last error since this handle asked last.
    pub fn tell(&mut self, cursor: &ErrorCursor) -> Result<()> {
        if cursor.0.swap(self.count, Ordering::Relaxed) == self.count {
            return Ok(());
        }
        self.told = true;
        self.last.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_handle_gets_an_error_once() {
        let mut errors = Errors::default();
        let (one, two) = (errors.cursor(), errors.cursor());
        assert_eq!(errors.tell(&one), Ok(()));
        errors.note(Errno::NOSPC);
        let late = errors.cursor();
        assert_eq!(errors.show(&one), Err(Errno::NOSPC));
        assert_eq!(errors.tell(&one), Err(Errno::NOSPC));
        assert_eq!(errors.tell(&one), Ok(()));
        assert_eq!(errors.show(&one), Ok(()));
        let after = errors.cursor();
        assert_eq!(errors.tell(&two), Err(Errno::NOSPC));
        assert_eq!(errors.tell(&late), Err(Errno::NOSPC));
        assert_eq!(errors.tell(&after), Ok(()), "opened after the error was reported");
    }
}
