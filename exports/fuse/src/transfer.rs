//! The transfer of a request, in the payload of its message or of its reply.

use ferry_engine::{Segment, Transfer, TransferRequest};
use ferry_serve::HEADER_BYTES;
use ferry_wire::fuse::WRITE_HEAD_BYTES;

/// Describes a transfer within the payload at `payload` of so many bytes: a write's message, or a read's reply.
pub(crate) fn in_payload(request: TransferRequest, payload: *mut u8, payload_bytes: usize) -> Transfer {
    let head_bytes = if request.is_read() { HEADER_BYTES } else { WRITE_HEAD_BYTES };
    let at = request.at.saturating_sub(head_bytes).min(payload_bytes);
    let segment = Segment { address: payload.wrapping_add(at), bytes: request.bytes.min(payload_bytes - at) };
    Transfer::new(request.operation, request.file, request.file_offset, [segment])
}
