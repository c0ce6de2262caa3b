//! Detects appends by a client that writes at the end of file that it knows.
//!
//! Only Tlopen carries `O_APPEND`: a Twrite does not repeat it, and the server does not learn when `fcntl` clears it. A
//! client that appends writes at the end that it knows, but others may have made the file longer. So a Twrite through a
//! fid opened for appending is an append if its offset is between the end known through this fid and the current end.
//! Any other offset is used as it is: the flag was cleared, or the client writes back cached pages. From then on only a
//! write at the current end is an append, as the client has no end that it adds to.
//!
//! Several programs of a client may append at the same end that it knows. Each of their writes is appended, so the file
//! is longer than the client believes, until it asks for the size. So a fid that is opened meanwhile begins with the end
//! that the client believes in ([`ClientEnds`]).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use ferry_vfs::Ino;
use ferry_vfs::sync::lock;

/// With fewer files, none is looked for that no fid is open for any more.
const ENDS_MIN: usize = 64;

/// The ends that a client believes in, of the files that it has open for appending.
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
}

/// The known end of a file, through one fid.
#[derive(Debug, Default)]
pub(crate) struct AppendTracking {
    offset: AtomicU64,
    /// The last write was not an append.
    is_elsewhere: AtomicBool,
    /// What all fids of the client for the file have in common.
    client_end: OnceLock<Arc<AtomicU64>>,
}

impl AppendTracking {
    /// Records the file's size at the open.
    pub(crate) fn found(&self, ends: &ClientEnds, ino: Ino, size: u64) {
        let end = self.client_end.get_or_init(|| ends.of(ino, size));
        self.offset.store(size.min(end.load(Ordering::Relaxed)), Ordering::Relaxed);
    }

    /// Records a write. Queries the file's size if it matters.
    pub(crate) fn writes(&self, offset: u64, bytes: usize, size: impl FnOnce() -> Option<u64>) {
        let mut known = self.offset.load(Ordering::Relaxed);
        let was_elsewhere = self.is_elsewhere.load(Ordering::Relaxed);
        let appends = (offset == known && !was_elsewhere) || {
            let size = size().unwrap_or(known);
            // Others may have shortened it.
            known = if was_elsewhere { size } else { known.min(size) };
            (known..=size).contains(&offset)
        };
        let behind = offset.saturating_add(bytes as u64);
        if let Some(end) = self.client_end.get() {
            end.fetch_max(behind, Ordering::Relaxed);
        }
        self.offset.store(if appends { behind } else { known.max(behind) }, Ordering::Relaxed);
        if was_elsewhere == appends {
            self.is_elsewhere.store(!appends, Ordering::Relaxed);
        }
    }

    /// Returns whether the last write was an append; reads then have the flag, too.
    pub(crate) fn appends(&self) -> bool {
        !self.is_elsewhere.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_at_a_known_end_are_appended() {
        let end = AppendTracking::default();
        end.found(&ClientEnds::default(), Ino(1), 10);
        assert!(end.appends());
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
            end.writes(offset, bytes, || Some(size));
            assert_eq!(end.appends(), appends, "at {offset} of {size}");
        }
    }
}
