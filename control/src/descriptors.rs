//! The number of open descriptors of this process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, OnceLock};

use ferry_vfs::sync::lock;
use rustix::fs::{Mode, OFlags, RawDir, SeekFrom, fstat, seek};

/// Its entries are the descriptors of this process.
const DIR: &str = "/proc/self/fd";
/// Room for some hundred entries.
const BUFFER_BYTES: usize = 16 << 10;

/// The open directory. Its position is shared, so one thread lists it at a time.
static OPEN: OnceLock<Option<Mutex<OwnedFd>>> = OnceLock::new();

/// Opens the table of descriptors. Call it in the process that serves, before its sandbox hides `/proc`.
pub fn open_descriptor_table() {
    OPEN.get_or_init(|| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(DIR, flags, Mode::empty());
        opened.map(Mutex::new).map_err(|error| tracing::debug!("descriptors are not counted: {DIR}: {error}")).ok()
    });
}

/// Returns the number of open descriptors; `None` without `/proc`.
pub(crate) fn count() -> Option<u64> {
    open_descriptor_table();
    let directory = lock(OPEN.get()?.as_ref()?);
    match known(directory.as_fd())? {
        0 => listed(directory.as_fd()),
        count => Some(count),
    }
}

/// The count that Linux 6.2 and later give as the directory's size; 0 before.
fn known(directory: BorrowedFd<'_>) -> Option<u64> {
    fstat(directory).ok().and_then(|found| u64::try_from(found.st_size).ok())
}

/// The number of entries of the directory.
fn listed(directory: BorrowedFd<'_>) -> Option<u64> {
    seek(directory, SeekFrom::Start(0)).ok()?;
    let mut buffer = Vec::with_capacity(BUFFER_BYTES);
    let mut entries = RawDir::new(directory, buffer.spare_capacity_mut());
    let mut count = 0;
    while let Some(entry) = entries.next() {
        if !matches!(entry.ok()?.file_name().to_bytes(), b"." | b"..") {
            count += 1;
        }
    }
    Some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_counting_agree() {
        // Other tests of this process open and close descriptors meanwhile.
        let agree = |_: &u32| {
            let before = count().expect("/proc");
            let list = std::fs::File::open(DIR).expect("/proc");
            let all = listed(list.as_fd());
            known(list.as_fd()).is_some_and(|size| size == 0 || Some(size) == all) && all == Some(before + 1)
        };
        assert!((0..100).any(|at| agree(&at)));
    }
}
