//! Detects appends by a client that writes at the end of file that it knows.
//!
//! Only Tlopen carries `O_APPEND`: a Twrite does not repeat it, and the server does not learn when `fcntl` clears it. A
//! client that appends writes at the end that it knows, but others may have made the file longer. So a Twrite through a
//! fid opened for appending is an append if its offset is between the end known through this fid and the current end.
//! Any other offset is used as it is: the flag was cleared, or the client writes back cached pages. From then on only a
//! write at the current end is an append, as the client has no end that it adds to.
//!
//! Several programs of a client may append at the same end that it knows. Each of their writes is appended, so the
//! file is longer than the client believes, until it asks for the size. So a fid that is opened meanwhile begins with
//! the end that the client believes in ([`ClientEnds`]).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use ferry_vfs::Ino;
use ferry_vfs::sync::lock;

/// With fewer files, unused entries are not collected.
const ENDS_MIN: usize = 64;

/// The ends of files that a client assumes, for those that it has open for appending.
#[derive(Debug, Default)]
pub(crate) struct ClientEnds(Mutex<HashMap<Ino, Weak<AtomicU64>>>);

impl ClientEnds {
    /// Returns the end of a file that is opened once more and has this size.
    fn of(&self, ino: Ino, size: u64) -> Arc<AtomicU64> {
        let mut ends = lock(&self.0);
        if let Some(end) = ends.get(&ino).and_then(Weak::upgrade) {
            return end;
        }
        if ends.len() >= ENDS_MIN && ends.len() == ends.capacity() {
            ends.retain(|_, end| end.strong_count() > 0);
        }
        let end = Arc::new(AtomicU64::new(size));
        ends.insert(ino, Arc::downgrade(&end));
        end
    }

    /// Records that the client has set a file's size.
    pub(crate) fn resized(&self, ino: Ino, size: u64) {
        if let Some(end) = lock(&self.0).get(&ino).and_then(Weak::upgrade) {
            end.store(size, Ordering::Relaxed);
        }
    }
}

/// A write through a fid that was opened with `O_APPEND`.
#[derive(Debug)]
pub(crate) struct TrackedWrite {
    /// Whether it is an append.
    pub(crate) appends: bool,
    tracking: Arc<AppendTracking>,
    offset: u64,
    /// The known end before it, and the one that is expected after it.
    before: u64,
    after: u64,
}

/// The known end of a file, through one fid.
#[derive(Debug, Default)]
pub(crate) struct AppendTracking {
    offset: AtomicU64,
    /// The last write was not an append.
    is_elsewhere: AtomicBool,
    /// Shared by all fids of the client for the file.
    client_end: OnceLock<Arc<AtomicU64>>,
}

impl AppendTracking {
    /// Records the file's size at the open.
    pub(crate) fn found(&self, ends: &ClientEnds, ino: Ino, size: u64) {
        let end = self.client_end.get_or_init(|| ends.of(ino, size));
        self.offset.store(size.min(end.load(Ordering::Relaxed)), Ordering::Relaxed);
    }

    /// Decides what a write is, and expects that it succeeds. Queries the file's size if it matters.
    pub(crate) fn begin_write(
        self: &Arc<Self>,
        offset: u64,
        bytes: usize,
        size: impl FnOnce() -> Option<u64>,
    ) -> TrackedWrite {
        let mut known = self.offset.load(Ordering::Relaxed);
        let was_elsewhere = self.is_elsewhere.load(Ordering::Relaxed);
        let appends = (offset == known && !was_elsewhere) || {
            let size = size().unwrap_or(known);
            // The file may have been truncated, by others or by the client.
            let client_end = self.client_end.get().map_or(u64::MAX, |end| end.load(Ordering::Relaxed));
            known = if was_elsewhere { size } else { known.min(size).min(client_end) };
            (known..=size).contains(&offset)
        };
        let mut write = TrackedWrite { appends, tracking: Arc::clone(self), offset, before: known, after: 0 };
        write.after = write.end(bytes);
        self.offset.store(write.after, Ordering::Relaxed);
        if was_elsewhere == appends {
            self.is_elsewhere.store(!appends, Ordering::Relaxed);
        }
        write
    }
}

impl TrackedWrite {
    /// Records how many bytes were written: the client's next append begins there.
    pub(crate) fn ended(self, bytes: usize) {
        let end = self.end(bytes);
        if end != self.after {
            // Unless another write has begun.
            let _ = self.tracking.offset.compare_exchange(self.after, end, Ordering::Relaxed, Ordering::Relaxed);
        }
        if let Some(client_end) = self.tracking.client_end.get().filter(|_| bytes > 0) {
            client_end.fetch_max(self.offset.saturating_add(bytes as u64), Ordering::Relaxed);
        }
    }

    /// Returns the end that the client knows after so many bytes were written.
    fn end(&self, bytes: usize) -> u64 {
        let behind = self.offset.saturating_add(bytes as u64);
        match (self.appends, bytes) {
            (true, _) => behind,
            (false, 0) => self.before,
            (false, _) => self.before.max(behind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes; returns whether that is an append.
    fn write(end: &Arc<AppendTracking>, offset: u64, (bytes, done): (usize, usize), size: u64) -> bool {
        let write = end.begin_write(offset, bytes, || Some(size));
        let appends = write.appends;
        write.ended(done);
        appends
    }

    #[test]
    fn writes_at_a_known_end_are_appended() {
        let end = Arc::<AppendTracking>::default();
        end.found(&ClientEnds::default(), Ino(1), 10);
        // Offset and length of a write, the file's size then, and whether it is an append.
        for (offset, bytes, size, appends) in [
            (10, 5, 10, true),
            // Others have appended.
            (15, 5, 40, true),
            (20, 5, 45, true),
            (45, 5, 50, true),
            (0, 5, 55, false),
            // Past the end, and then at the end.
            (60, 5, 55, false),
            (65, 5, 65, true),
            // It was shortened, by others and by the client.
            (70, 5, 0, true),
            (0, 5, 0, true),
            (3, 1, 5, false),
            // Without the flag, before an end that others have moved; then the flag is back.
            (6, 1, 20, false),
            (20, 4, 20, true),
            (24, 4, 30, true),
        ] {
            assert_eq!(write(&end, offset, (bytes, bytes), size), appends, "at {offset} of {size}");
        }
    }

    /// The client appends where its last append ended, and others have appended meanwhile.
    #[test]
    fn appends_that_fail_or_are_short_are_followed_by_appends() {
        let (ends, end) = (ClientEnds::default(), Arc::<AppendTracking>::default());
        end.found(&ends, Ino(1), 100);
        assert!(write(&end, 100, (50, 20), 300));
        assert!(write(&end, 120, (50, 0), 320));
        assert!(write(&end, 120, (50, 50), 320));
        // A fid that is opened meanwhile begins with the new end.
        let other = Arc::<AppendTracking>::default();
        other.found(&ends, Ino(1), 370);
        assert!(write(&other, 170, (5, 5), 370));
        // A failed write elsewhere moves no end.
        assert!(!write(&end, 0, (1000, 0), 375));
        assert!(write(&end, 375, (5, 5), 375));
    }

    #[test]
    fn appends_after_the_client_has_shortened_the_file_are_appends() {
        let (ends, end) = (ClientEnds::default(), Arc::<AppendTracking>::default());
        end.found(&ends, Ino(1), 100);
        ends.resized(Ino(1), 0);
        // Others have appended again.
        assert!(write(&end, 0, (5, 5), 150));
        assert!(write(&end, 5, (5, 5), 155));
    }

    /// Each of two writes at a time has its own answer.
    #[test]
    fn concurrent_writes_are_distinguished() {
        let end = Arc::<AppendTracking>::default();
        end.found(&ClientEnds::default(), Ino(1), 10);
        let elsewhere = end.begin_write(0, 5, || Some(10));
        let append = end.begin_write(10, 5, || Some(10));
        assert!(!elsewhere.appends && append.appends);
        elsewhere.ended(0);
        append.ended(5);
        assert!(write(&end, 15, (5, 5), 40));
    }
}
