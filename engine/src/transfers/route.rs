//! The route of a transfer, for every export.

use ferry_vfs::Backing;

use super::Operation;
use super::io_hints::{self, IN_MEMORY, READ_CANNOT_TRY, READ_TRIES, REMOTE, WRITE_CANNOT_TRY, WRITE_TRIES};

/// From this many transfers, one call of the ring is cheaper than a call per transfer.
pub(crate) const RING_BATCH_MIN: usize = 3;

/// The means of a thread for transfers that may wait.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Means {
    /// An io_uring.
    pub(crate) ring: bool,
    /// A pool of threads that may block for long.
    pub(crate) pool: bool,
    /// Transfers that begin together.
    pub(crate) batch: usize,
}

/// Who runs a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// There is nothing to do.
    Nothing,
    /// It only copies: this thread runs it.
    Inline,
    /// This thread tries it without waiting (`RWF_NOWAIT`).
    Try,
    /// The ring makes it.
    Ring,
    /// A thread of the pool runs it.
    Pool,
    /// It may wait and there is no other means: this thread runs it.
    Blocking,
}

/// Chooses the route of a transfer that is not in the file's own [memory](Backing::memory).
pub(crate) fn route(file: &Backing, operation: Operation, means: Means) -> Route {
    if !means.ring && !means.pool {
        return Route::Blocking;
    }
    let is_fsync = matches!(operation, Operation::Fsync { .. });
    if file.appends() && matches!(operation, Operation::Write { .. }) && io_hints::with_place(file) & REMOTE == 0 {
        // A client may send one write in several parts, which belong behind each other.
        return Route::Inline;
    }
    let may_try =
        means.ring && !file.waits() && matches!(operation, Operation::Read | Operation::Write { waits: false, .. });
    // The result of a trial shows whether the location matters.
    let hints = if may_try { file.io_hints() } else { io_hints::with_place(file) };
    let (tries, cannot_try) = operation.hints();
    match () {
        () if is_fsync && hints & IN_MEMORY != 0 => Route::Nothing,
        () if !is_fsync && (hints & IN_MEMORY != 0 || file.memory().is_some()) => Route::Inline,
        () if !may_try || hints & REMOTE != 0 => waiting(hints, means),
        () if hints & cannot_try != 0 => Route::Inline,
        () if hints & tries != 0 && means.batch >= RING_BATCH_MIN => Route::Ring,
        () => Route::Try,
    }
}

/// Chooses the route of a transfer that the kernel cannot try without waiting (`EOPNOTSUPP`), and records that.
pub(crate) fn route_untried(file: &Backing, operation: Operation, means: Means) -> Route {
    let hints = io_hints::with_place(file);
    if hints & REMOTE != 0 {
        return waiting(hints, means);
    }
    file.add_io_hints(operation.hints().1);
    Route::Inline
}

/// The ring has few threads for transfers that cannot be tried, and remote files would occupy all of them.
fn waiting(hints: u8, means: Means) -> Route {
    match means {
        Means { pool: true, .. } if hints & REMOTE != 0 => Route::Pool,
        Means { ring: true, .. } => Route::Ring,
        _ => Route::Blocking,
    }
}

impl Operation {
    /// Returns the hint that it can be tried without waiting, and the hint that it cannot.
    pub(super) fn hints(self) -> (u8, u8) {
        match self {
            Self::Read => (READ_TRIES, READ_CANNOT_TRY),
            Self::Write { .. } | Self::Fsync { .. } => (WRITE_TRIES, WRITE_CANNOT_TRY),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Operation = Operation::Read;
    const WRITE: Operation = Operation::Write { clear_privileges: false, waits: false };
    const DURABLE_WRITE: Operation = Operation::Write { clear_privileges: false, waits: true };
    const FSYNC: Operation = Operation::Fsync { data_only: true };

    const RING: Means = Means { ring: true, pool: false, batch: 1 };
    const BATCH: Means = Means { batch: RING_BATCH_MIN, ..RING };
    const POOL: Means = Means { pool: true, ..RING };
    const POOL_ONLY: Means = Means { ring: false, ..POOL };
    const NONE: Means = Means { ring: false, pool: false, batch: 1 };

    fn file(hints: u8) -> Backing {
        let file = Backing::new(tempfile::tempfile().unwrap().into());
        file.add_io_hints(hints | io_hints::PROBED);
        file
    }

    #[test]
    fn routes_follow_file_operation_and_means() {
        for (hints, operation, means, expected) in [
            // Nothing is known.
            (0, READ, RING, Route::Try),
            (0, WRITE, BATCH, Route::Try),
            (0, READ, POOL_ONLY, Route::Blocking),
            (0, READ, NONE, Route::Blocking),
            // It can be tried: a call each if they are few, one for many.
            (READ_TRIES, READ, RING, Route::Try),
            (READ_TRIES, READ, BATCH, Route::Ring),
            (READ_TRIES, WRITE, BATCH, Route::Try),
            (WRITE_TRIES, WRITE, BATCH, Route::Ring),
            // It cannot.
            (READ_CANNOT_TRY, READ, BATCH, Route::Inline),
            (READ_CANNOT_TRY, WRITE, BATCH, Route::Try),
            (WRITE_CANNOT_TRY, WRITE, RING, Route::Inline),
            // It waits for a device.
            (WRITE_CANNOT_TRY, DURABLE_WRITE, RING, Route::Ring),
            (0, FSYNC, POOL, Route::Ring),
            (0, FSYNC, NONE, Route::Blocking),
            // Memory never waits, whatever the flags.
            (IN_MEMORY, READ, RING, Route::Inline),
            (IN_MEMORY, DURABLE_WRITE, POOL, Route::Inline),
            (IN_MEMORY, FSYNC, RING, Route::Nothing),
            // A remote file may always wait.
            (REMOTE, READ, RING, Route::Ring),
            (REMOTE | READ_CANNOT_TRY, READ, POOL, Route::Pool),
            (REMOTE | READ_TRIES, READ, BATCH, Route::Ring),
            (REMOTE, DURABLE_WRITE, POOL, Route::Pool),
            (REMOTE, FSYNC, POOL_ONLY, Route::Pool),
            (REMOTE, WRITE, NONE, Route::Blocking),
        ] {
            let found = route(&file(hints), operation, means);
            assert_eq!(found, expected, "hints {hints:#x}, {operation:?}, {means:?}");
        }
        let direct = Backing::waiting(tempfile::tempfile_in("/dev/shm").unwrap().into());
        direct.add_io_hints(io_hints::PROBED);
        assert_eq!(route(&direct, READ, RING), Route::Ring, "O_DIRECT is never tried");
        for (hints, operation, expected) in [
            (0, WRITE, Route::Inline),
            (0, DURABLE_WRITE, Route::Inline),
            (REMOTE, WRITE, Route::Pool),
            (0, READ, Route::Try),
        ] {
            let appending = Backing::appending(tempfile::tempfile().unwrap().into());
            appending.add_io_hints(hints | io_hints::PROBED);
            assert_eq!(route(&appending, operation, POOL), expected, "hints {hints:#x}, {operation:?}, O_APPEND");
        }
    }

    #[test]
    fn files_that_cannot_be_tried_are_copied_unless_remote() {
        for (hints, means, expected) in
            [(0, RING, Route::Inline), (REMOTE, RING, Route::Ring), (REMOTE, POOL, Route::Pool)]
        {
            let file = file(hints);
            assert_eq!(route_untried(&file, READ, means), expected);
            let remembers = file.io_hints() & READ_CANNOT_TRY != 0;
            assert_eq!(remembers, expected == Route::Inline, "the place is what counts of a remote file");
        }
    }

    #[test]
    fn the_location_is_probed_only_if_a_trial_does_not_show_it() {
        for (operation, means, is_looked_up) in [
            (READ, POOL, false),
            (WRITE, RING, false),
            (READ, POOL_ONLY, true),
            (DURABLE_WRITE, RING, true),
            (FSYNC, POOL, true),
            (FSYNC, NONE, false),
        ] {
            let file = Backing::new(tempfile::tempfile().unwrap().into());
            route(&file, operation, means);
            assert_eq!(file.io_hints() & io_hints::PROBED != 0, is_looked_up, "{operation:?}, {means:?}");
        }
    }
}
