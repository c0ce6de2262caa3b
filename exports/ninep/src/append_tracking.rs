//! Detects appends by a client that believes to know the file's end.
//!
//! `O_APPEND` comes with Tlopen alone: neither does a Twrite repeat it, nor is the server told when `fcntl` takes it from the client's
//! file. But a client that appends writes where it believes the end to be, and others, also other processes of this client, for
//! which Linux may have other inodes, may have made the file longer. So a Twrite by a fid that was opened for appending is appended if its
//! offset lies between what was known of the end through this fid and where the file ends now. Any other offset is meant as it is said: the
//! flag is gone, or the client writes pages of its cache back.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What is known of the end of a file through one fid.
#[derive(Debug, Default)]
pub(crate) struct AppendTracking {
    offset: AtomicU64,
    /// The last write was not appended.
    is_elsewhere: AtomicBool,
}

impl AppendTracking {
    /// The file has this size when it is opened.
    pub(crate) fn found(&self, size: u64) {
        self.offset.store(size, Ordering::Relaxed);
    }

    /// Something is written here. Asks for the file's size now, if that matters.
    pub(crate) fn writes(&self, offset: u64, bytes: usize, size: impl FnOnce() -> Option<u64>) {
        let mut known = self.offset.load(Ordering::Relaxed);
        let appends = offset == known || {
            let size = size().unwrap_or(known);
            // Somebody may have made it shorter.
            known = known.min(size);
            (known..=size).contains(&offset)
        };
        let behind = offset.saturating_add(bytes as u64);
        self.offset.store(if appends { behind } else { known.max(behind) }, Ordering::Relaxed);
        if self.is_elsewhere.load(Ordering::Relaxed) == appends {
            self.is_elsewhere.store(!appends, Ordering::Relaxed);
        }
    }

    /// Whether the last write was appended, and so are reads' flags.
    pub(crate) fn appends(&self) -> bool {
        !self.is_elsewhere.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_at_an_end_that_the_client_may_know_is_appended() {
        let end = AppendTracking::default();
        end.found(10);
        assert!(end.appends());
        // Offset and length of a write, the file's size then, and whether it is appended.
        for (offset, bytes, size, appends) in [
            (10, 5, 10, true),
            // Others have appended.
            (15, 5, 40, true),
            (20, 5, 45, true),
            (45, 5, 50, true),
            (0, 5, 55, false),
            // Behind the end, from where it is one.
            (60, 5, 55, false),
            (65, 5, 65, true),
            // It was made shorter, by others and by the client.
            (70, 5, 0, true),
            (0, 5, 0, true),
            (3, 1, 5, false),
        ] {
            end.writes(offset, bytes, || Some(size));
            assert_eq!(end.appends(), appends, "at {offset} of {size}");
        }
    }
}
