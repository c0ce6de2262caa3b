//! Where a client that appends to a file believes it to end.
//!
//! `O_APPEND` comes with Tlopen alone: neither does a Twrite repeat it, nor is the server told when `fcntl` takes it from the client's
//! file. But a client that appends writes where it believes the end to be, and somebody else may have made the file longer.
//! So a Twrite by a fid that was opened for appending is appended, wherever the file ends by now, if its offset is what the client takes
//! for the end. Any other offset is meant as it is said: the flag is gone, or the client writes pages of its cache back.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ferry_vfs::Ino;

use crate::hub::lock;

/// What one client believes of the files that it has open for appending.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    files: Mutex<HashMap<Ino, End>>,
    /// How many these are: for most clients, at most times, none.
    count: AtomicUsize,
}

#[derive(Debug)]
struct End {
    opens: usize,
    /// Known as soon as the file is open.
    offset: Option<u64>,
}

impl Ends {
    /// A file is opened for appending.
    pub(crate) fn opened(&self, ino: Ino) {
        let mut files = lock(&self.files);
        files.entry(ino).or_insert(End { opens: 0, offset: None }).opens += 1;
        self.count.store(files.len(), Ordering::Relaxed);
    }

    /// The reverse of [`Self::opened`].
    pub(crate) fn closed(&self, ino: Ino) {
        let mut files = lock(&self.files);
        if let Some(end) = files.get_mut(&ino) {
            end.opens -= 1;
            if end.opens == 0 {
                files.remove(&ino);
            }
        }
        self.count.store(files.len(), Ordering::Relaxed);
    }

    fn with<T>(&self, ino: Ino, look: impl FnOnce(&mut End) -> T) -> Option<T> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        lock(&self.files).get_mut(&ino).map(look)
    }

    /// A file that was opened has this size. It is what the client believes, unless more is known about that.
    pub(crate) fn found(&self, ino: Ino, size: u64) {
        self.with(ino, |end| _ = end.offset.get_or_insert(size));
    }

    /// The client is told a file's size, or sets it.
    pub(crate) fn told(&self, ino: Ino, size: u64) {
        self.with(ino, |end| end.offset = Some(size));
    }

    /// The client writes here: answers whether that is where it believes the file to end.
    pub(crate) fn writes(&self, ino: Ino, offset: u64, bytes: usize) -> bool {
        let look = |end: &mut End| {
            let is_end = end.offset.is_none_or(|end| end == offset);
            end.offset = end.offset.max(Some(offset.saturating_add(bytes as u64)));
            is_end
        };
        self.with(ino, look).unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_at_the_end_that_the_client_knows_is_appended() {
        let (ends, ino) = (Ends::default(), Ino(2));
        assert!(!ends.writes(ino, 0, 5), "not open for appending");
        ends.opened(ino);
        ends.found(ino, 10);
        for (offset, bytes, is_end) in [(10, 5, true), (15, 5, true), (0, 5, false), (20, 1, true), (30, 1, false)] {
            assert_eq!(ends.writes(ino, offset, bytes), is_end, "{offset}");
        }
        ends.opened(ino);
        ends.found(ino, 99);
        ends.told(ino, 40);
        ends.closed(ino);
        assert!(ends.writes(ino, 40, 1) && !ends.writes(Ino(3), 0, 1));
        ends.closed(ino);
        assert!(!ends.writes(ino, 41, 1));
    }
}
