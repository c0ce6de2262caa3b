//! Makes the kernel look for requests that wait for a ring entry.
//!
//! A request that finds no free entry is queued, and the kernel looks at that queue only when a reply is committed:
//! entries that are registered meanwhile stay empty. So after a registration the worker requests a message to itself
//! per new entry (FUSE protocol 7.45, `FUSE_NOTIFY_RETRIEVE` of no bytes of a file). The message arrives on the queue of
//! the requesting CPU, and committing its reply fetches a waiting request.

use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferry_vfs::Errno;
use ferry_wire::fuse::abi::{NotifyRetrieveOut, OutHeader};
use rustix::fs::{AtFlags, StatxFlags};
use zerocopy::IntoBytes;

use super::queue::Queue;
use crate::connection::ServingThread;

use crate::device::send;
use crate::machine::stay_on;

/// `FUSE_NOTIFY_RETRIEVE`.
const NOTIFY_RETRIEVE: i32 = 5;
/// `FUSE_NOTIFY_REPLY`, the opcode of the message.
pub(super) const NOTIFY_REPLY: u32 = 41;
/// The kernel counts the requests that it makes itself from below, in steps of two.
const UNIQUE: u64 = 1 << 62;

/// Requests one message about a regular file that the kernel knows; the kernel sends none about other inodes. `number`
/// distinguishes it from others in flight, also of other CPUs.
pub(super) fn kick(device: BorrowedFd<'_>, file: u64, number: u64) -> Result<(), Errno> {
    let notify_unique = UNIQUE | (number << 1);
    let retrieve = NotifyRetrieveOut { notify_unique, nodeid: file, offset: 0, size: 0, padding: 0 };
    let bytes = size_of::<OutHeader>() + size_of::<NotifyRetrieveOut>();
    let header = OutHeader { len: u32::try_from(bytes).unwrap_or(0), error: NOTIFY_RETRIEVE, unique: 0 };
    send(device, &[IoSlice::new(header.as_bytes()), IoSlice::new(retrieve.as_bytes())])
}

/// For mounts without a regular file that the kernel knows: requests the attributes of the root this many times, on the queue's CPU.
/// A separate thread does that, because the calling thread serves the request.
///
/// That thread may find no free entry either, and then waits behind the others. So every registration kicks, because
/// new callers may have taken the previous entries.
pub(super) fn kick_by_stat(queue: &Arc<Queue>, times: usize) {
    queue.pokers.fetch_add(1, Ordering::AcqRel);
    let present = ServingThread::new(&queue.connection);
    let started = std::thread::Builder::new().name("fuse-kick".into()).spawn({
        let queue = Arc::clone(queue);
        move || {
            stay_on(queue.cpu);
            for _ in 0..times {
                look_at(&queue.connection.mountpoint);
            }
            queue.pokers.fetch_sub(1, Ordering::AcqRel);
            drop(queue);
            drop(present);
        }
    });
    if let Err(error) = started {
        queue.pokers.fetch_sub(1, Ordering::AcqRel);
        tracing::debug!("requests of CPU {} may wait until another one ends: {error}", queue.cpu);
    }
}

/// Whatever is mounted there now is asked; if it is not ours, or we may not, then in vain.
fn look_at(mountpoint: &Path) {
    let flags = AtFlags::STATX_FORCE_SYNC | AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    if let Err(error) = rustix::fs::statx(rustix::fs::CWD, mountpoint, flags, StatxFlags::BASIC_STATS) {
        tracing::debug!("the root of the mount cannot be asked for: {error}");
    }
}
