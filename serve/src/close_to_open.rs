//! Close-to-open consistency of file sizes.
//!
//! A client keeps attributes for a while, and OPEN brings none: of a file that somebody else has made longer it would
//! read what was there before, and not know that there is more. So the first OPEN of a file whose length is not what
//! the client was told is answered with ESTALE. Linux then looks up each name of the path again, whatever it knows
//! (`do_filp_open` with `LOOKUP_REVAL`), learns the length, and opens the file: no program sees the error, and where
//! nothing has changed there is no message more. Programs that open by file handle (`open_by_handle_at`), and NFS
//! servers, do see it, once. Opens that no path leads to are never refused: for an ioctl of a file's flags
//! (`FS_IOC_GETFLAGS`) Linux opens it on its own.

use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use ferry_vfs::{Attr, FileType, Handle, Ino, OFlags};
use ferry_wire::fuse::{InitFlags, Operation};

use crate::server::{Context, Server};

/// A length that a client was told, in as few bytes as each inode has to spare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReportedSize(NonZeroU32);

impl ReportedSize {
    /// Nothing but regular files has a length that a client would read to.
    pub(crate) fn of(attr: &Attr) -> Option<Self> {
        let mixed = attr.size.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let bits = u32::try_from(mixed).ok().and_then(|bits| NonZeroU32::new(bits | 1));
        bits.filter(|_| attr.kind() == FileType::RegularFile).map(Self)
    }
}

/// How long a thread that was refused has to open the file.
const REFUSED_FOR: Duration = Duration::from_secs(30);
/// Threads that may have been refused at a time; no others are, then.
const REFUSALS_MAX: usize = 1024;

/// Who was refused, and is not to be refused twice in a row: a file may grow all the time.
#[derive(Debug, Default)]
pub(crate) struct StaleOpens(Mutex<Vec<StaleOpen>>);

#[derive(Debug)]
struct StaleOpen {
    ino: Ino,
    /// The thread, by the client's number.
    pid: u32,
    at: Instant,
}

impl StaleOpens {
    /// The thread opens a file whose length is new to the client (`is_news`), or not: returns whether to refuse it.
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
    /// Whether what clients are told of lengths matters when they open files.
    pub(crate) fn checks_size_on_open(&self, cx: &Context<'_>) -> bool {
        // With a write-back cache Linux believes nobody but itself.
        self.share.policy.close_to_open(cx.session) && !cx.session.negotiated().has(InitFlags::WRITEBACK_CACHE)
    }

    /// Whether the client is to ask for the length of a file that was just opened for it, with these flags.
    pub(crate) fn must_revalidate(&self, cx: &Context<'_>, flags: OFlags, handle: Handle) -> bool {
        // `fuse_priv_ioctl_prepare` opens with no flag at all; what programs of 64 bits open has `O_LARGEFILE`.
        if flags.is_empty() || !self.checks_size_on_open(cx) {
            return false;
        }
        let Some(told) = cx.session.reported_size(cx.ino) else { return false };
        // Without an answer there is nothing to go by; and it is open already, so this must not fail.
        let ask = AssertUnwindSafe(|| self.share.source.getattr(&cx.caller, cx.ino, Some(handle)));
        let Ok(Ok(attr)) = catch_unwind(ask) else { return false };
        let is_news = ReportedSize::of(&attr).is_some_and(|now| now != told);
        cx.session.refusals.refuses(cx.ino, cx.caller.pid, is_news)
    }
}

/// The file whose length an operation changes, without that its answer tells the client's kernel what it is then.
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
    fn nobody_is_refused_twice_in_a_row() {
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
    fn refusals_that_nobody_comes_back_for_have_a_bound() {
        let refusals = StaleOpens::default();
        let refused = (0..5000).filter(|pid| refusals.refuses(Ino(2), *pid, true)).count();
        assert_eq!(refused, REFUSALS_MAX);
        assert!(!refusals.refuses(Ino(2), 0, true), "and whoever does come back is served");
        assert!(refusals.refuses(Ino(2), 6000, true), "which makes room");
    }

    #[test]
    fn lengths_differ_as_they_are_told() {
        let told = |size| ReportedSize::of(&Attr::new(Ino(2), FileType::RegularFile, 0o644).with_size(size));
        for (one, other) in [(0, 1), (1, 2), (4096, 4097), (1 << 32, 2 << 32), (5, 5 + (1 << 32)), (u64::MAX, 0)] {
            assert!(told(one).is_some() && told(one) != told(other), "{one} and {other}");
        }
        assert_eq!(ReportedSize::of(&Attr::new(Ino(2), FileType::Directory, 0o755).with_size(9)), None);
    }
}
