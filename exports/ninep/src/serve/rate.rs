//! What requests are charged for a limit of rates.

use ferry_wire::ninep::{Request, WriteHead};

use crate::share::Share;

/// Returns whether a request waits for a limit. Tversion and Tflush, which end other requests, are served before, and
/// Tclunk only releases something.
pub(crate) fn is_limited(request: &Request<'_>) -> bool {
    !matches!(request, Request::Version { .. } | Request::Flush { .. } | Request::Clunk { .. })
}

/// Charges a request.
pub(super) fn charge(share: &Share, request: &Request<'_>) {
    let Some(limiter) = share.options.limiter.as_ref().filter(|limiter| limiter.is_on()) else { return };
    if is_limited(request) {
        limiter.charge(match request {
            Request::Read { bytes_max, .. } => (*bytes_max).into(),
            Request::Write { data, .. } => data.len() as u64,
            _ => 0,
        });
    }
}

/// Charges a Twrite of which there is only the head.
pub(super) fn charge_write(share: &Share, head: &WriteHead) {
    if let Some(limiter) = &share.options.limiter {
        limiter.charge(head.bytes.into());
    }
}
