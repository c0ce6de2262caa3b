//! Tests of the codec as a whole.

mod dir;
mod init;
mod malformed;
mod names;
mod replies;
mod requests;
mod seed;

use ferry_wire::fuse::abi::{InHeader, InitFlags};
use ferry_wire::fuse::{Negotiated, Opcode};
use zerocopy::IntoBytes;

/// A session with all features.
const FULL: Negotiated =
    Negotiated { minor: 45, flags: InitFlags::ALL, max_write_bytes: 1 << 20, max_readahead_bytes: 1 << 20 };
/// A session without features.
const BARE: Negotiated = Negotiated { minor: 27, flags: InitFlags::empty(), ..FULL };
const SESSIONS: [&Negotiated; 2] = [&FULL, &BARE];

/// Returns a message with these arguments.
fn message(opcode: Opcode, arguments: &[&[u8]]) -> Vec<u8> {
    let mut message = InHeader { opcode: opcode.as_raw(), unique: 7, nodeid: 1, ..InHeader::ZERO }.as_bytes().to_vec();
    arguments.iter().for_each(|argument| message.extend_from_slice(argument));
    set_len(&mut message);
    message
}

/// Sets the length in the header.
fn set_len(message: &mut [u8]) {
    let len = u32::try_from(message.len()).unwrap();
    if let Some(field) = message.get_mut(..4) {
        field.copy_from_slice(len.as_bytes());
    }
}
