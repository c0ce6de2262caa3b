//! Charges requests to a rate limit.

use ferry_wire::ninep::Request;

/// Returns the bytes that a request is charged; `None`: it does not wait for a limit. Tversion and Tflush end other
/// requests, and Tclunk only releases something.
pub(crate) fn cost_bytes(request: &Request<'_>) -> Option<u64> {
    match request {
        Request::Version { .. } | Request::Flush { .. } | Request::Clunk { .. } => None,
        Request::Read { bytes_max, .. } => Some((*bytes_max).into()),
        Request::Write { data, .. } => Some(data.len() as u64),
        _ => Some(0),
    }
}
