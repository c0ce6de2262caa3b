//! Close-to-open consistency of file sizes.
//!
//! A client caches attributes for a while, and the reply to OPEN has none. So it would read a file that another
//! client has extended only up to the old end. Therefore the first OPEN of a file whose size differs from what the
//! client was told fails with ESTALE. Linux then looks up each name of the path again (`do_filp_open` with
//! `LOOKUP_REVAL`), learns the size and opens the file: programs see no error, and unchanged files cost no message.
//! Programs that open by file handle (`open_by_handle_at`) and NFS servers do see the error, once. Opens without a
//! path are never refused: Linux opens files itself for the ioctl of their flags (`FS_IOC_GETFLAGS`).

use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use ferry_vfs::{Attr, FileType, Handle, Ino, OFlags};
use ferry_wire::fuse::{InitFlags, Operation};

use crate::server::{Context, Server};

/// A file size that a client was told, as a hash that fits into 32 bits of the inode's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReportedSize(NonZeroU32);

impl ReportedSize {
    /// Returns `None` for all but regular files: only their size limits reads.
    pub(crate) fn of(attr: &Attr) -> Option<Self> {
        let mixed = attr.size.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let bits = u32::try_from(mixed).ok().and_then(|bits| NonZeroU32::new(bits | 1));
        bits.filter(|_| attr.kind() == FileType::RegularFile).map(Self)
    }
}

/// How long a refused thread may take to open the file again.
const REFUSED_FOR: Duration = Duration::from_secs(30);
/// The most threads that are remembered as refused; beyond that, none is refused.
const REFUSALS_MAX: usize = 1024;

/// Threads that got ESTALE and must not get it again for the same file, which may grow all the time.
#[derive(Debug, Default)]
pub(crate) struct StaleOpens(Mutex<Vec<StaleOpen>>);

#[derive(Debug)]
struct StaleOpen {
    ino: Ino,
    /// The thread's id in the client.
    pid: u32,
    at: Instant,
}

impl StaleOpens {
    /// Returns whether to refuse this open. `is_news`: the size differs from what the client was told.
    fn refuses(&self, ino: Ino, pid: u32, is_news: bool) -> bool {
        let mut refusals = lock(&self.0);
        if !is_news && refusals.is_empty() {
            return false;
        }
        refusals.retain(|refusal| refusal.at.elapsed() < REFUSED_FOR);
        let before = refusals.iter().position(|refusal| refusal.ino == ino && refusal.pid == pid);
        if let Some(index) = before {
            refusals.swap_remove(index);
        }
        let refuses = is_news && before.is_none() && refusals.len() < REFUSALS_MAX;
        if refuses {
            refusals.push(StaleOpen { ino, pid, at: Instant::now() });
        }
        refuses
    }
}

impl Server {
    /// Whether the sizes that this client was told matter when it opens files.
    pub(crate) fn checks_size_on_open(&self, cx: &Context<'_>) -> bool {
        // With a write-back cache Linux ignores the server's sizes.
        self.share.policy.close_to_open(cx.session) && !cx.session.negotiated().has(InitFlags::WRITEBACK_CACHE)
    }

    /// Whether the client must look up the size of a file that was just opened for it with these flags.
    pub(crate) fn must_revalidate(&self, cx: &Context<'_>, flags: OFlags, handle: Handle) -> bool {
        // `fuse_priv_ioctl_prepare` opens with no flag at all; opens of 64-bit programs have `O_LARGEFILE`.
        if flags.is_empty() || !self.checks_size_on_open(cx) {
            return false;
        }
        let Some(told) = cx.session.reported_size(cx.ino) else { return false };
        // On an error the size is unknown. The file is open already, so a panic must not pass either.
        let ask = AssertUnwindSafe(|| self.share.source.getattr(&cx.caller, cx.ino, Some(handle)));
        let Ok(Ok(attr)) = catch_unwind(ask) else { return false };
        let is_news = ReportedSize::of(&attr).is_some_and(|now| now != told);
        cx.session.refusals.refuses(cx.ino, cx.caller.pid, is_news)
    }
}

/// Returns the file whose size an operation changes, if the reply does not tell the client the new size.
pub(crate) fn size_changed_by(on: Ino, operation: &Operation<'_>) -> Option<Ino> {
    match operation {
        Operation::Write { .. } | Operation::Fallocate { .. } => Some(on),
        Operation::CopyFileRange(copy) | Operation::CopyFileRange64(copy) => Some(copy.to.0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_not_refused_twice_in_a_row() {
        let refusals = StaleOpens::default();
        let mut rounds = Vec::new();
        for is_news in [false, true, true, true, false, true, false] {
            rounds.push(refusals.refuses(Ino(2), 7, is_news));
        }
        assert_eq!(rounds, [false, true, false, true, false, true, false]);
        assert!(refusals.refuses(Ino(2), 7, true) && refusals.refuses(Ino(2), 8, true), "another thread");
        assert!(refusals.refuses(Ino(3), 7, true), "another file");
    }

    #[test]
    fn the_number_of_refusals_is_bounded() {
        let refusals = StaleOpens::default();
        let refused = (0..5000).filter(|pid| refusals.refuses(Ino(2), *pid, true)).count();
        assert_eq!(refused, REFUSALS_MAX);
        assert!(!refusals.refuses(Ino(2), 0, true), "a second attempt succeeds");
        assert!(refusals.refuses(Ino(2), 6000, true), "which makes room");
    }

    #[test]
    fn different_sizes_have_different_hashes() {
        let told = |size| ReportedSize::of(&Attr::new(Ino(2), FileType::RegularFile, 0o644).with_size(size));
        for (one, other) in [(0, 1), (1, 2), (4096, 4097), (1 << 32, 2 << 32), (5, 5 + (1 << 32)), (u64::MAX, 0)] {
            assert!(told(one).is_some() && told(one) != told(other), "{one} and {other}");
        }
        assert_eq!(ReportedSize::of(&Attr::new(Ino(2), FileType::Directory, 0o755).with_size(9)), None);
    }
}
