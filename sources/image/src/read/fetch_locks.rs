//! Locks among all processes that fetch into a store: one fetches, the others wait and find the object in the store.
//!
//! ```text
//! STORE/fetching     empty; a fetching process locks a range of it
//! ```
//!
//! The locks belong to an open file description, so the kernel releases them when a process ends. They are hints: a
//! process without a lock, or one that waits without progress, fetches on its own. All objects are verified, so
//! fetching twice is harmless.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::format::digest::Digest;
use crate::store::layout;

/// The file name in the store.
pub(crate) const FILE: &str = "fetching";
/// The number of lock offsets per pack as a power of two: as many as an image has blocks.
const NUMBERS_BITS: u32 = 32;
/// The rest of the offsets distinguishes packs. A collision causes needless waiting.
const PACK_BITS: u32 = 62 - NUMBERS_BITS;
/// The interval of checks for progress: initial, and maximum.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
const LOOK_INTERVAL_MAX: Duration = Duration::from_millis(20);
/// The maximum wait without progress: a server may be silent that long, and a process may have been stopped.
const PATIENCE: Duration = Duration::from_secs(10);

/// The locks of a fetching process.
#[derive(Debug)]
pub(crate) struct FetchLocks(Option<File>);

/// A locked range, or one without locks.
#[derive(Debug)]
pub(crate) struct FetchLock<'a> {
    file: Option<&'a File>,
    range: (i64, i64),
}

/// The progress of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Everything is available.
    Done,
    /// A counter that changes with progress.
    Of(u64),
}

/// Returns a lock request of this type for a range of the file.
fn request(kind: libc::c_int, (from, bytes): (i64, i64)) -> libc::flock {
    libc::flock {
        l_type: libc::c_short::try_from(kind).unwrap_or_default(),
        l_whence: libc::c_short::try_from(libc::SEEK_SET).unwrap_or_default(),
        l_start: from,
        l_len: bytes,
        l_pid: 0,
    }
}

impl FetchLocks {
    /// Opens the locks of a store. Without the file there is no waiting.
    pub(crate) fn of(store: &Path) -> Self {
        let mut options = File::options();
        let file = layout::lockable(options.read(true).write(true).create(true).truncate(false), &store.join(FILE));
        if let Err(error) = &file {
            tracing::debug!("{}: cannot tell what other processes fetch: {error}", store.display());
        }
        Self(file.ok())
    }

    /// Waits until no other process fetches some numbers of a pack, and locks them. `look` returns the other process's
    /// progress; `None` when it is done.
    pub(crate) fn take(
        &self,
        pack: Digest,
        numbers: Range<u64>,
        mut look: impl FnMut() -> Progress,
    ) -> Option<FetchLock<'_>> {
        let free = FetchLock { file: None, range: (0, 0) };
        let Some(file) = &self.0 else { return Some(free) };
        let [a, b, c, d, ..] = *pack.bytes();
        let base = u64::from(u32::from_le_bytes([a, b, c, d]) >> (32 - PACK_BITS)) << NUMBERS_BITS;
        let end = numbers.end.max(numbers.start + 1);
        let (Ok(from), Ok(bytes)) = (i64::try_from(base + numbers.start), i64::try_from(end - numbers.start)) else {
            return Some(free);
        };
        let range = (from, bytes);
        let (mut interval, mut seen, mut since) = (LOOK_INTERVAL, None, Instant::now());
        loop {
            match fcntl(file, FcntlArg::F_OFD_SETLK(&request(libc::F_WRLCK, range))) {
                Ok(_) => break,
                Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => {}
                // A file system without locks.
                Err(_) => return Some(free),
            }
            let progress = look();
            if progress == Progress::Done {
                return None;
            }
            if seen != Some(progress) {
                (seen, since) = (Some(progress), Instant::now());
            } else if since.elapsed() > PATIENCE {
                return Some(free);
            }
            thread::sleep(interval);
            interval = (2 * interval).min(LOOK_INTERVAL_MAX);
        }
        let lock = FetchLock { file: Some(file), range };
        // The previous owner may have just finished.
        (look() != Progress::Done).then_some(lock)
    }
}

impl Drop for FetchLock<'_> {
    fn drop(&mut self) {
        let Some(file) = self.file else { return };
        if let Err(error) = fcntl(file, FcntlArg::F_OFD_SETLK(&request(libc::F_UNLCK, self.range))) {
            tracing::warn!("cannot unlock fetched objects, so other processes wait: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::digest::Algorithm;

    #[test]
    fn one_has_a_range_and_the_next_one_gets_it_when_that_one_ends() {
        let directory = tempfile::tempdir().expect("a directory");
        let (one, two) = (FetchLocks::of(directory.path()), FetchLocks::of(directory.path()));
        let pack = Algorithm::Blake3.of(b"x");
        let wait = || Progress::Of(0);
        let held = one.take(pack, 10..20, wait).expect("nobody else");
        // Other numbers, and other packs, are free.
        drop(two.take(pack, 20..30, wait).expect("other numbers"));
        drop(two.take(Algorithm::Blake3.of(b"y"), 10..20, || Progress::Of(0)).expect("another pack"));
        let mut looks = 0;
        let come = two.take(pack, 15..16, || {
            looks += 1;
            if looks < 5 { Progress::Of(looks) } else { Progress::Done }
        });
        assert!(come.is_none() && looks == 5, "{come:?} after {looks}");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| two.take(pack, 0..100, wait).is_some());
            thread::sleep(Duration::from_millis(50));
            assert!(!waiting.is_finished());
            drop(held);
            assert!(waiting.join().expect("it does not panic"));
        });
        let held = one.take(pack, 0..1, wait).expect("it was given back");
        drop(one.take(pack, 1..2, wait).expect("the same one's"));
        assert!(held.file.is_some());
        // What has no file has its way.
        assert!(FetchLocks::of(Path::new("/none")).take(pack, 0..1, wait).expect("nobody can tell").file.is_none());
    }
}
