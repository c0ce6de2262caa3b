//! What an event tells, for both kinds of watching.

use ferry_vfs::{Change, Errno, Ino, NameBuf};

/// The handling of changes that this process makes. Only fanotify tells who made a change: with inotify they are always
/// published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnChanges {
    /// Ignore them: the code that makes them publishes them, as all operations of one [`crate::Dir`] do.
    Skip,
    /// Publish them, too: other sources of this process change the same files.
    Tell,
}

/// Why the host cannot be watched for changes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WatchError {
    /// Watching a file system requires `CAP_SYS_ADMIN`.
    #[error("only root can watch for changes on the host (CAP_SYS_ADMIN)")]
    Permission,
    /// Events name files by handles.
    #[error("the share does not use file handles, which changes on the host are reported by")]
    NoHandles,
    /// The kernel or the file system does not support it.
    #[error("this kernel or file system does not report changes (fanotify with names and targets: Linux 5.17)")]
    Unsupported,
    /// Another error of the host.
    #[error("cannot watch for changes on the host")]
    Host(#[source] Errno),
}

impl From<Errno> for WatchError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PERM | Errno::ACCESS => Self::Permission,
            Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP | Errno::XDEV | Errno::NODEV => Self::Unsupported,
            errno => Self::Host(errno),
        }
    }
}

/// Passes on the changes of an event: of a name in directories, and of the inodes that it refers to.
pub(super) fn changes_of(mask: u64, entry: Option<(&[Ino], &NameBuf)>, targets: &[Ino], tell: &mut impl FnMut(Change)) {
    let has = |kinds: u64| mask & kinds != 0;
    if let Some((dirs, name)) = entry
        && has(libc::FAN_CREATE | libc::FAN_DELETE | libc::FAN_MOVED_FROM | libc::FAN_MOVED_TO)
    {
        for dir in dirs {
            names(mask, *dir, name, targets).into_iter().for_each(&mut *tell);
        }
    }
    for ino in targets {
        tell(if has(libc::FAN_MODIFY | libc::FAN_CLOSE_WRITE) {
            Change::Data { ino: *ino, offset: 0, len: u64::MAX }
        } else {
            Change::Attr { ino: *ino }
        });
    }
}

/// Returns the changes of a name. The kernel merges events of one name, so several may have happened.
fn names(mask: u64, dir: Ino, name: &NameBuf, targets: &[Ino]) -> Vec<Change> {
    let [is_new, was_removed, came, went] =
        [libc::FAN_CREATE, libc::FAN_DELETE, libc::FAN_MOVED_TO, libc::FAN_MOVED_FROM].map(|kind| mask & kind != 0);
    let name = name.clone();
    match targets {
        // Clients that found the new name already need no notification.
        _ if is_new && !(was_removed || came || went) => vec![Change::Unsure { dir, name }],
        [ino] if was_removed && !(is_new || came) => vec![Change::Removed { dir, name, ino: *ino }],
        _ => vec![Change::Entry { dir, name }],
    }
}
