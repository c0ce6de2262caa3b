//! Who fetches what, among all that use a store: other processes, too. One fetches, the others wait and find it in the store.
//!
//! ```text
//! STORE/fetching     empty; whoever fetches has a range of it locked
//! ```
//!
//! The lock is the kernel's (of the open file description), so it goes with whoever dies, and the next one goes on. It is a hint: who
//! cannot lock, or waits for somebody who gets no further, fetches by itself. All that comes is proved, so twice does no harm.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::format::digest::Digest;

/// The file's name in the store.
pub(crate) const FILE: &str = "fetching";
/// How many numbers each pack has: as many as an image has blocks.
const NUMBERS_BITS: u32 = 32;
/// What is left of the offsets of a file tells packs apart. Where two have the same, one waits for the other without need.
const PACK_BITS: u32 = 62 - NUMBERS_BITS;
/// How often it is looked whether something has come: first, and at most. FetchableSet takes longer.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
const LOOK_INTERVAL_MAX: Duration = Duration::from_millis(20);
/// How long is waited for somebody who gets no further: a server may say nothing for as long, and a process may have been stopped.
const PATIENCE: Duration = Duration::from_secs(10);

/// The locks of one who fetches.
#[derive(Debug)]
pub(crate) struct FetchLocks(Option<File>);

/// A range that is locked, or nobody can lock.
#[derive(Debug)]
pub(crate) struct FetchLock<'a> {
    file: Option<&'a File>,
    range: (i64, i64),
}

/// How far somebody else has got with what is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// All of it is here.
    Done,
    /// Any number, another one when there is more.
    Of(u64),
}

/// The lock of a kind for a range of the file.
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
    /// Of those who use a store. Where the file cannot be made, nobody waits.
    pub(crate) fn of(store: &Path) -> Self {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(store.join(FILE));
        if let Err(error) = &file {
            tracing::debug!("{}: cannot tell what other processes fetch: {error}", store.display());
        }
        Self(file.ok())
    }

    /// Waits until nobody else fetches some numbers of a pack, and has them then. `look` tells how far somebody else has got; `None` when
    /// it has got to the end.
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
        // Whoever had it before may have just ended.
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
        let folder = tempfile::tempdir().expect("a folder");
        let (one, two) = (FetchLocks::of(folder.path()), FetchLocks::of(folder.path()));
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
