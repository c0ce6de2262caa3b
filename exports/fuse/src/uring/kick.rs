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
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::mount::{OpenTreeFlags, open_tree};
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
    queue.kickers.fetch_add(1, Ordering::AcqRel);
    let present = ServingThread::new(&queue.connection);
    let started = std::thread::Builder::new().name("fuse-kick".into()).spawn({
        let queue = Arc::clone(queue);
        move || {
            stay_on(queue.cpu);
            for _ in 0..times {
                look_at(&queue.connection.mountpoint);
            }
            queue.kickers.fetch_sub(1, Ordering::AcqRel);
            drop(queue);
            drop(present);
        }
    });
    if let Err(error) = started {
        queue.kickers.fetch_sub(1, Ordering::AcqRel);
        tracing::debug!("requests of CPU {} may wait until another one ends: {error}", queue.cpu);
    }
}

/// Requests the attributes of whatever is mounted there now. This has no effect if the mount is not ours or access is denied.
/// Root uses a copy of the mount: a path would keep the mount itself busy until the reply, and `umount` would fail.
fn look_at(mountpoint: &Path) {
    let flags = AtFlags::STATX_FORCE_SYNC | AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let copies = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_SYMLINK_NOFOLLOW;
    let asked = match open_tree(CWD, mountpoint, copies | OpenTreeFlags::AT_NO_AUTOMOUNT) {
        Ok(copy) => statx(&copy, "", flags | AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS),
        Err(_) => statx(CWD, mountpoint, flags, StatxFlags::BASIC_STATS),
    };
    if let Err(error) = asked {
        tracing::debug!("the root of the mount cannot be asked for: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use ferry_vfs::sync::lock;
    use ferry_vfs::{Attr, Caller, FileSystem, FileType, Handle, Ino, Result};
    use rustix::mount::{UnmountFlags, unmount};

    use super::*;
    use crate::{Cache, Export, Options, Path as RequestPath};

    const SOON: Duration = Duration::from_secs(10);

    /// The root only. Once `waits` is set, its attributes are there when `go` says so.
    struct SlowRoot {
        waits: AtomicBool,
        asked: Sender<()>,
        go: Mutex<Receiver<()>>,
    }

    impl FileSystem for SlowRoot {
        fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
            if self.waits.load(Ordering::Relaxed) {
                self.asked.send(()).expect("the test waits for it");
                lock(&self.go).recv_timeout(SOON).expect("the test lets it go on");
            }
            let mode = FileType::Directory.as_raw_mode() | 0o755;
            Ok(Attr { ino: ino.0, mode, nlink: 1, ..Attr::default() })
        }
    }

    /// `umount` right after a mount, on a machine with much to do.
    #[test]
    fn a_mount_whose_root_is_asked_can_be_unmounted() {
        if !rustix::process::geteuid().is_root() {
            return ferry_skip::skip!("needs root, to copy a mount");
        }
        let directory = tempfile::tempdir().expect("a directory");
        let ((asked, is_asked), (go, wait)) = (channel(), channel());
        let source = Arc::new(SlowRoot { waits: AtomicBool::new(false), asked, go: Mutex::new(wait) });
        let options = Options { path: RequestPath::Devfuse, cache: Cache::None, ..Options::default() };
        let export =
            Export::mount(directory.path(), Arc::clone(&source) as Arc<dyn FileSystem>, options).expect("mounted");
        source.waits.store(true, Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| look_at(directory.path()));
            is_asked.recv_timeout(SOON).expect("the root is asked for");
            let outcome = unmount(directory.path(), UnmountFlags::NOFOLLOW);
            go.send(()).expect("it waits");
            assert_eq!(outcome, Ok(()));
        });
        export.wait();
    }
}
