//! Counts calls with their latencies and errors.

use std::sync::Arc;

use ferry_engine::metrics::Metrics;
use ferry_vfs::Errno;

use crate::error::{Error, Result};

/// The calls of the API, by the names of their metrics.
const CALLS: [&str; 11] =
    ["prepare", "view", "mounts", "commit", "remove", "stat", "update", "usage", "cleanup", "list", "apply"];

/// Returns counters for all calls.
pub(crate) fn metrics() -> Arc<Metrics> {
    Arc::new(Metrics::new(|call| CALLS.get(call).copied().unwrap_or("other").to_owned()))
}

/// Counts one call.
#[derive(Clone)]
pub(crate) struct CallCounter {
    metrics: Arc<Metrics>,
    call: usize,
}

impl CallCounter {
    /// Creates the counter of a method, by its name in the API; `None`: there is no such method.
    pub(crate) fn of(metrics: &Arc<Metrics>, method: &str) -> Option<Self> {
        let call = CALLS.iter().position(|call| method.eq_ignore_ascii_case(call))?;
        Some(Self { metrics: Arc::clone(metrics), call })
    }

    /// Runs the call.
    pub(crate) fn count<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let timer = self.metrics.begin(self.call);
        let outcome = call();
        self.metrics.end(timer, outcome.as_ref().map(|_| 0).map_err(errno));
        outcome
    }
}

/// Returns the error number of an error in the metrics.
fn errno(error: &Error) -> Errno {
    match error {
        Error::NotFound(_) => Errno::NOENT,
        Error::AlreadyExists(_) => Errno::EXIST,
        Error::FailedPrecondition(_) => Errno::BUSY,
        Error::InvalidArgument(_) => Errno::INVAL,
        Error::Unimplemented(_) => Errno::NOSYS,
        Error::Io { error, .. } | Error::Mount { error, .. } => {
            error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
        }
        _ => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn every_call_has_a_name_and_every_error_a_number() {
        let metrics = metrics();
        let counter = CallCounter { metrics: Arc::clone(&metrics), call: 3 };
        counter.count(|| Ok(())).unwrap();
        let full = io::Error::from_raw_os_error(28);
        for error in [
            Error::NotFound("a".into()),
            Error::AlreadyExists("a".into()),
            Error::FailedPrecondition("a".into()),
            Error::InvalidArgument("a".into()),
            Error::Io { action: "write to", path: "/a".into(), error: full },
        ] {
            counter.count::<()>(|| Err(error)).unwrap_err();
        }
        let counted = metrics.snapshot();
        let [commit] = &counted.operations[..] else { panic!("{counted:?}") };
        assert_eq!((commit.name.as_str(), commit.requests(), commit.in_flight), ("commit", 6, 0));
        assert_eq!(commit.errors, [(2, 1), (16, 1), (17, 1), (22, 1), (28, 1)]);
    }
}
