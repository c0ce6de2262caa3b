//! The counters of requests.

use ferry_engine::metrics::{Metrics, Recorder, Timer};
use ferry_vfs::Errno;
use ferry_wire::blk::{Request, Status};

/// The names of operations, by their numbers.
const NAMES: [&str; 6] = ["read", "write", "flush", "id", "discard", "write_zeroes"];

pub(crate) fn metrics() -> Metrics {
    Metrics::new(|operation| NAMES.get(operation).copied().unwrap_or("other").into())
}

/// A request under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ActiveRequest {
    timer: Timer,
    /// The bytes of data that it moves if it succeeds.
    bytes: usize,
}

impl ActiveRequest {
    pub(crate) fn begin(recorder: &mut Recorder, request: Request) -> Self {
        let (operation, bytes) = match request {
            Request::Read { bytes, .. } => (0, bytes),
            Request::Write { bytes, .. } => (1, bytes),
            Request::Flush => (2, 0),
            Request::Id { .. } => (3, 0),
            Request::Discard { .. } => (4, 0),
            Request::WriteZeroes { .. } => (5, 0),
        };
        Self { timer: recorder.begin(operation), bytes }
    }

    /// Ends a request that was served at once, or by another thread.
    pub(crate) fn end(self, recorder: &mut Recorder, status: Status) {
        recorder.end(self.timer, self.outcome(status));
    }

    /// Ends a request whose transfer has ended.
    pub(crate) fn end_transfer(self, recorder: &mut Recorder, status: Status) {
        recorder.end_transfer(self.timer, self.outcome(status));
    }

    /// The error as the driver sees it: it gets no more than a status.
    pub(crate) fn outcome(self, status: Status) -> Result<usize, Errno> {
        match status {
            Status::Ok => Ok(self.bytes),
            Status::IoError => Err(Errno::IO),
            Status::Unsupported => Err(Errno::OPNOTSUPP),
        }
    }
}
