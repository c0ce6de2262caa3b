//! Requests of block devices: every accepted range lies within the disk.
#![no_main]

use ferry_wire::blk::{HEADER_BYTES, Limits, Range, Request, Sizes};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((&[choice, low, high], message)) = bytes.split_first_chunk() else { return };
    let limits = Limits {
        bytes: 1 << 30,
        block_bytes: if choice & 1 == 0 { 512 } else { 4096 },
        read_only: choice & 2 != 0,
        discard: choice & 4 != 0,
    };
    let writable = usize::from(u16::from_le_bytes([low, high]));
    let mut header = [0; HEADER_BYTES];
    let known = message.len().min(HEADER_BYTES);
    header[..known].copy_from_slice(&message[..known]);
    let within = |offset: u64, bytes: u64| assert!(offset + bytes <= limits.bytes);
    match Request::decode(&header, Sizes { readable: message.len(), writable }, &limits) {
        Ok(Request::Read { offset, bytes } | Request::Write { offset, bytes }) => within(offset, bytes as u64),
        Ok(Request::Flush | Request::Id { .. }) => {}
        Ok(request @ (Request::Discard { ranges } | Request::WriteZeroes { ranges })) => {
            let decode = match request {
                Request::Discard { .. } => Range::decode_discard,
                _ => Range::decode_write_zeroes,
            };
            if let Ok(decoded) = decode(&message[HEADER_BYTES..], &limits) {
                assert_eq!(decoded.len(), ranges);
                decoded.iter().for_each(|range| within(range.offset, range.bytes));
            }
        }
        Err(refusal) => drop((refusal.to_string(), refusal.status())),
    }
});
