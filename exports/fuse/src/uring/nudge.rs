//! Having the kernel look for requests that wait for an entry.
//!
//! A request that finds no free entry is queued, and the kernel looks at that queue only when a reply is committed:
//! entries that are registered meanwhile stay empty. So after a registration we ask the kernel for a message to
//! ourselves, one for each new entry (FUSE protocol 7.45, `FUSE_NOTIFY_RETRIEVE` of no bytes of a file): it comes
//! through the queue of the CPU that asks, and what is committed to it fetches a request that waits.

use std::io::IoSlice;
use std::os::fd::BorrowedFd;

use ferry_vfs::Errno;
use ferry_wire::fuse::abi::{NotifyRetrieveOut, OutHeader};
use zerocopy::IntoBytes;

use crate::device::send;

/// `FUSE_NOTIFY_RETRIEVE`.
const NOTIFY_RETRIEVE: i32 = 5;
/// `FUSE_NOTIFY_REPLY`, the opcode of the message.
pub(super) const NOTIFY_REPLY: u32 = 41;
/// The kernel counts the requests that it makes itself from below, in steps of two.
const UNIQUE: u64 = 1 << 62;

/// Asks for one message about a regular file that the kernel knows; of other inodes it gives none. `number` tells it from
/// others under way, also of other CPUs.
pub(super) fn nudge(device: BorrowedFd<'_>, file: u64, number: u64) -> Result<(), Errno> {
    let notify_unique = UNIQUE | (number << 1);
    let retrieve = NotifyRetrieveOut { notify_unique, nodeid: file, offset: 0, size: 0, padding: 0 };
    let bytes = size_of::<OutHeader>() + size_of::<NotifyRetrieveOut>();
    let header = OutHeader { len: u32::try_from(bytes).unwrap_or(0), error: NOTIFY_RETRIEVE, unique: 0 };
    send(device, &[IoSlice::new(header.as_bytes()), IoSlice::new(retrieve.as_bytes())])
}
