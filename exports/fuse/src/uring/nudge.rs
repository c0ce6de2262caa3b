//! Having the kernel look for requests that wait for an entry.
//!
//! A request that finds no free entry is queued, and the kernel looks at that queue only when a reply is committed:
//! entries that are registered meanwhile stay empty. So after a registration we ask the kernel for a message to
//! ourselves, one for each new entry (FUSE protocol 7.45, `FUSE_NOTIFY_RETRIEVE` of no bytes of the root): it comes
//! through the queue of the CPU that asks, and what is committed to it fetches a request that waits.

use std::io::IoSlice;
use std::os::fd::BorrowedFd;

use ferry_vfs::{Errno, Ino};
use ferry_wire::fuse::abi::OutHeader;
use zerocopy::IntoBytes;

use crate::device::send;

/// `FUSE_NOTIFY_RETRIEVE`.
const NOTIFY_RETRIEVE: i32 = 5;
/// `FUSE_NOTIFY_REPLY`, the opcode of the message.
pub(super) const NOTIFY_REPLY: u32 = 41;
/// The kernel counts the requests that it makes itself from below, in steps of two.
const UNIQUE: u64 = 1 << 62;

/// `struct fuse_notify_retrieve_out`.
#[repr(C)]
#[derive(zerocopy::IntoBytes, zerocopy::Immutable)]
struct Retrieve {
    notify_unique: u64,
    nodeid: u64,
    offset: u64,
    size: u32,
    padding: u32,
}

/// Asks for one message. `number` tells it from others under way, also of other CPUs.
pub(super) fn nudge(device: BorrowedFd<'_>, number: u64) -> Result<(), Errno> {
    let unique = UNIQUE | (number << 1);
    let retrieve = Retrieve { notify_unique: unique, nodeid: Ino::ROOT.0, offset: 0, size: 0, padding: 0 };
    let bytes = size_of::<OutHeader>() + size_of::<Retrieve>();
    let header = OutHeader { len: u32::try_from(bytes).unwrap_or(0), error: NOTIFY_RETRIEVE, unique: 0 };
    send(device, &[IoSlice::new(header.as_bytes()), IoSlice::new(retrieve.as_bytes())])
}
