//! The log entry and the metrics of a request that is being served.

use std::sync::Arc;

use ferry_engine::metrics::{Metrics, Recorder, Timer};
use ferry_engine::requests::{LoggedRequest, Outcome};
use ferry_vfs::Result;
use ferry_wire::fuse::{Opcode, Operation};

use crate::carrier::HEADER_BYTES;

/// A request that is being served.
#[derive(Debug)]
pub(crate) struct ActiveRequest {
    timer: Timer,
    /// Set if the outcome is to be logged.
    logged: Option<Box<LoggedRequest>>,
}

/// A request that another thread ends. Dropping it counts a success: the client is gone or already has its reply.
#[derive(Debug)]
pub(crate) struct DetachedRequest {
    request: Option<ActiveRequest>,
    metrics: Arc<Metrics>,
}

/// Creates the counters of FUSE requests, one per opcode.
pub(crate) fn metrics() -> Metrics {
    Metrics::new(|operation| {
        let opcode = u32::try_from(operation).ok().and_then(Opcode::from_raw);
        opcode.map_or_else(|| "other".into(), |opcode| format!("{opcode:?}").to_lowercase())
    })
}

impl ActiveRequest {
    pub(crate) fn begin(
        recorder: &mut Recorder,
        operation: &Operation<'_>,
        logged: Option<Box<LoggedRequest>>,
    ) -> Self {
        Self { timer: recorder.begin(operation.opcode().as_raw() as usize), logged }
    }

    /// Ends a request that was served at once. The log counts the bytes of the whole reply, the metrics only those of
    /// data.
    pub(crate) fn end(self, recorder: &mut Recorder, operation: &Operation<'_>, outcome: Outcome) {
        recorder.end(self.timer, data_bytes(operation, outcome));
        if let Some(logged) = self.logged {
            logged.end(outcome);
        }
    }

    /// Ends a request whose transfer has ended.
    pub(crate) fn end_transfer(self, outcome: Result<usize>, count: impl FnOnce(Timer, Result<usize>)) {
        count(self.timer, outcome);
        if let Some(logged) = self.logged {
            logged.end(outcome.into());
        }
    }
}

/// Returns the bytes of data that a request moved. A WRITE counts as whole: a source takes less only if it has no
/// room.
fn data_bytes(operation: &Operation<'_>, outcome: Outcome) -> Result<usize> {
    match (outcome, operation) {
        (Outcome::Error(errno), _) => Err(errno),
        (Outcome::Bytes(reply), Operation::Read(_)) => Ok(reply.saturating_sub(HEADER_BYTES)),
        (_, Operation::Write { range, .. }) => Ok(range.len as usize),
        _ => Ok(0),
    }
}

impl DetachedRequest {
    pub(crate) fn new(request: Option<ActiveRequest>, metrics: &Arc<Metrics>) -> Self {
        Self { request, metrics: Arc::clone(metrics) }
    }

    pub(crate) fn end(mut self, outcome: Result<usize>) {
        if let Some(request) = self.request.take() {
            request.end_transfer(outcome, |timer, outcome| self.metrics.end(timer, outcome));
        }
    }
}

impl Drop for DetachedRequest {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            self.metrics.end(request.timer, Ok(0));
        }
    }
}
