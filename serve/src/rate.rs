//! Charges requests to a rate limit ([`RateLimiter`]).

use ferry_engine::RateLimiter;
use ferry_wire::fuse::{Opcode, Operation};

/// Returns whether a request waits for a limit. Requests that only release something do not: they unblock this client
/// or others. Nor do those that begin or end a session, and INTERRUPT, which ends another request's wait.
pub fn is_limited(opcode: u32) -> bool {
    !matches!(
        Opcode::from_raw(opcode),
        None | Some(
            Opcode::Init
                | Opcode::Destroy
                | Opcode::Forget
                | Opcode::BatchForget
                | Opcode::Interrupt
                | Opcode::Flush
                | Opcode::Release
                | Opcode::Releasedir
        )
    )
}

/// Charges a request. COPY_FILE_RANGE is charged its bytes when it ends.
pub(crate) fn charge(limiter: &RateLimiter, operation: &Operation<'_>) {
    if is_limited(operation.opcode() as u32) {
        let bytes = match operation {
            Operation::Read(range) | Operation::Write { range, .. } => range.len,
            _ => 0,
        };
        limiter.charge(bytes.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_only_release_something_pass() {
        for opcode in [Opcode::Forget, Opcode::BatchForget, Opcode::Interrupt, Opcode::Flush, Opcode::Release] {
            assert!(!is_limited(opcode as u32), "{opcode:?}");
        }
        for opcode in [Opcode::Read, Opcode::Write, Opcode::Lookup, Opcode::Fsync, Opcode::CopyFileRange] {
            assert!(is_limited(opcode as u32), "{opcode:?}");
        }
        assert!(!is_limited(u32::MAX), "an unknown request is an error at once");
    }
}
