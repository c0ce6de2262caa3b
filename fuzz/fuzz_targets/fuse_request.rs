//! Requests: what decodes is the same again after another round trip.
#![no_main]

use ferry_driver::fuse::{encode, reply_kind};
use ferry_wire::fuse::*;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // The first byte chooses what was agreed on, and whether the header's length is made true: without that,
    // hardly any input would get past it.
    let Some((choice, message)) = bytes.split_first() else { return };
    let flags = if choice & 1 == 0 { InitFlags::empty() } else { InitFlags::ALL };
    let session = Negotiated { flags, ..Negotiated::BEFORE_INIT };
    let mut message = message.to_vec();
    if choice & 2 == 0 && message.len() >= 4 {
        let len = u32::try_from(message.len()).expect("the fuzzer's inputs are short");
        message[..4].copy_from_slice(&len.to_le_bytes());
    }
    let Some(header) = message.first_chunk() else {
        assert!(decode(&message, message.len(), &session).is_err_and(|error| error.reply_to().is_none()));
        return;
    };
    let head = &message[..peek(header).head_bytes(message.len())];
    let request = match decode(head, message.len(), &session) {
        Ok(request) => request,
        Err(error) => {
            let _ = error.to_string();
            return;
        }
    };
    let _ = reply_kind(&request.operation);
    // Nothing that a source could make room for is longer than was agreed on.
    let (bytes, most) = match request.operation {
        Operation::Read(range) => (range.len, session.max_read_bytes()),
        Operation::Write { range, .. } => (range.len, session.max_write_bytes),
        Operation::Readdir { bytes_max, .. } => (bytes_max, session.max_read_bytes()),
        Operation::Ioctl { out_bytes_max, .. } => (out_bytes_max, session.max_read_bytes()),
        Operation::Getxattr { bytes_max, .. } | Operation::Listxattr { bytes_max } => (bytes_max, 1 << 16),
        _ => (0, 0),
    };
    assert!(bytes <= most, "{bytes} bytes, of {most}");
    request.extensions.security.iter().for_each(|(name, _)| assert!(!name.is_empty()));
    let mut again = Vec::new();
    encode(&request, &session, &mut again);
    let again_bytes = peek(again.first_chunk().expect("it has a header")).len as usize;
    assert_eq!(decode(&again, again_bytes, &session), Ok(request));
});
