//! Files of this host that are mapped in DAX windows, and how truncation is coordinated with them.
//!
//! A process that touches a mapped page past the end of a file gets SIGBUS, which few virtual machine monitors survive. So a source
//! announces a truncation ([`Windows::shortening`]), every [`Window`] with pages past the new end unmaps them, and then the source
//! truncates. Meanwhile that range cannot be mapped ([`Claim::limit`]).
//!
//! A store into a hole, or into blocks that other files share, is a SIGBUS on a full disk, too. So holes are not punched where
//! windows may store ([`Windows::punch`]), and ranges that are copied or appear there get blocks of their own
//! ([`Windows::fill`]).
//!
//! There is one table for the whole process ([`Windows::of_process`]), and files are identified by device and inode
//! number, because two sources may have the same one.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate, fstat};
use rustix::io::{pwrite, retry_on_intr};

use ferry_vfs::{Errno, Result, SessionId};

use ferry_vfs::sync::lock;

/// How long all windows together may take. A running virtual machine monitor takes milliseconds; a stopped one must
/// not delay other clients.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// Zeros to write, a chunk at a time.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// The page of all hosts that have windows: the end of a file within one leaves the whole page there.
const PAGE_BYTES: u64 = 4096;

/// Which file of the host: device and inode number (`st_dev` and `st_ino` of `stat(2)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// `st_dev`.
    pub dev: u64,
    /// `st_ino`.
    pub ino: u64,
}

/// A DAX window. No method may block.
pub trait Window: Send + Sync {
    /// Unmaps the file from the first page after `end`; drops `done` when that has happened.
    fn shorten(&self, file: FileId, end: u64, done: CompletionSignal);

    /// Called after a timeout: the file is truncated nevertheless. The window gets one more request, and then none
    /// until [`Member::take_missed`].
    fn late(&self);
}

/// Signals completion when dropped.
#[derive(Debug)]
pub struct CompletionSignal {
    _waits: SyncSender<()>,
}

/// A registered window.
pub struct Member {
    window: Box<dyn Window>,
    late: AtomicBool,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member").field("late", &self.late).finish_non_exhaustive()
    }
}

impl Member {
    /// Returns whether the window was late and has missed other shortenings. Call it at the start of [`Window::shorten`]; if true,
    /// compare all that is mapped with [`Windows::limit`] and the files' lengths.
    pub fn take_missed(&self) -> bool {
        self.late.swap(false, Ordering::SeqCst)
    }
}

/// What a window has of a file.
#[derive(Debug)]
struct Part {
    number: u64,
    member: Arc<Member>,
    by: SessionId,
    /// Where it is in the file.
    start: u64,
    end: u64,
    /// The window may store to it, which needs blocks that are the file's own.
    stores: bool,
}

impl Part {
    /// Whether it is mapped past the new end of a file that another session truncates.
    fn is_behind(&self, by: SessionId, end: u64) -> bool {
        let first_gone = end.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
        self.by != by && self.end > first_gone
    }
}

#[derive(Debug, Default)]
struct File {
    parts: Vec<Part>,
    /// Where it is about to end.
    ends: Vec<u64>,
}

impl File {
    fn limit(&self) -> u64 {
        self.ends.iter().copied().min().unwrap_or(u64::MAX)
    }
}

#[derive(Debug, Default)]
struct Table {
    files: HashMap<FileId, File>,
    parts_ever: u64,
}

#[derive(Debug, Default)]
struct Shared {
    /// Somebody has joined.
    has_windows: AtomicBool,
    table: Mutex<Table>,
}

impl Shared {
    /// Changes what is known of a file, and forgets it if that is nothing.
    fn with<T>(&self, file: FileId, change: impl FnOnce(&mut File) -> T) -> T {
        let mut table = lock(&self.table);
        let known = table.files.entry(file).or_default();
        let outcome = change(known);
        if known.parts.is_empty() && known.ends.is_empty() {
            table.files.remove(&file);
        }
        outcome
    }
}

/// The registry of files that are mapped in windows.
#[derive(Clone, Debug, Default)]
pub struct Windows(Arc<Shared>);

impl Windows {
    /// The one that all sources and exports of this process share.
    pub fn of_process() -> &'static Self {
        static ONE: LazyLock<Windows> = LazyLock::new(Windows::default);
        &ONE
    }

    /// A window that may claim parts of files.
    pub fn join(&self, window: impl Window + 'static) -> Arc<Member> {
        self.0.has_windows.store(true, Ordering::SeqCst);
        Arc::new(Member { window: Box::new(window), late: AtomicBool::new(false) })
    }

    /// A window is about to map this part of a file, for this session. It may map only what is before [`Claim::limit`] and within
    /// the length that the file has *after* this.
    pub fn claim(&self, member: &Arc<Member>, by: SessionId, file: FileId, part: Range<u64>) -> Claim {
        let number = {
            let mut table = lock(&self.0.table);
            table.parts_ever += 1;
            table.parts_ever
        };
        let Range { start, end } = part;
        let part = Part { number, member: Arc::clone(member), by, start, end, stores: false };
        let limit = self.0.with(file, |known| {
            known.parts.push(part);
            known.limit()
        });
        Claim { shared: Arc::clone(&self.0), file, by, number, end, limit }
    }

    /// The new end of a file during a truncation, otherwise `u64::MAX`.
    pub fn limit(&self, file: FileId) -> u64 {
        lock(&self.0.table).files.get(&file).map_or(u64::MAX, File::limit)
    }

    /// What windows may store to of this part of a file, in order. In processes without windows, `file` is not called.
    fn stored(&self, file: impl FnOnce() -> Option<FileId>, part: &Range<u64>) -> Vec<Range<u64>> {
        if !self.0.has_windows.load(Ordering::SeqCst) {
            return Vec::new();
        }
        let Some(file) = file() else { return Vec::new() };
        let table = lock(&self.0.table);
        let parts = table.files.get(&file).map_or(&[][..], |known| &known.parts);
        let mut stored: Vec<_> = parts
            .iter()
            .filter(|known| known.stores)
            .map(|known| known.start.max(part.start)..known.end.min(part.end))
            .filter(|both| !both.is_empty())
            .collect();
        stored.sort_unstable_by_key(|both| (both.start, both.end));
        stored
    }

    /// Punches a hole into a file, but where windows may store: there the bytes become 0, and the blocks stay. `change` is
    /// `fallocate(2)` of the file; `ZERO_RANGE` is asked for only there ([`Windows::zero`] for file systems without it).
    ///
    /// # Errors
    /// Those of `change`.
    pub fn punch(
        &self,
        file: impl Fn() -> Option<FileId>,
        part: Range<u64>,
        change: impl Fn(FallocateFlags, Range<u64>) -> Result<()>,
    ) -> Result<()> {
        let keep = FallocateFlags::KEEP_SIZE;
        let mut holes = Vec::new();
        let mut from = part.start;
        for kept in self.stored(&file, &part) {
            let kept = kept.start.max(from)..kept.end;
            if kept.is_empty() {
                continue;
            }
            holes.push(from..kept.start);
            from = kept.end;
            // Never a hole that is filled again: there may be no room for that.
            change(FallocateFlags::ZERO_RANGE | keep, kept)?;
        }
        holes.push(from..part.end);
        let mut holes = holes.into_iter().filter(|hole| !hole.is_empty());
        holes.try_for_each(|hole| change(FallocateFlags::PUNCH_HOLE | keep, hole))?;
        self.stored(&file, &part).into_iter().try_for_each(|kept| change(keep, kept))
    }

    /// Sets a part of a file to 0 and keeps its blocks, as `ZERO_RANGE` does, on file systems without that (tmpfs): it is
    /// allocated and then written, up to the end of the file. The descriptor has no `O_APPEND`.
    ///
    /// # Errors
    /// Those of `fallocate(2)`, with no byte changed, and of `pwrite(2)`.
    pub fn zero(file: impl AsFd, part: Range<u64>) -> Result<()> {
        let file = file.as_fd();
        fallocate(file, FallocateFlags::KEEP_SIZE, part.start, part.end.saturating_sub(part.start))?;
        let mut at = part.start;
        loop {
            // Others may truncate the file meanwhile.
            let end = part.end.min(u64::try_from(fstat(file)?.st_size).unwrap_or(0));
            let left = usize::try_from(end.saturating_sub(at)).unwrap_or(usize::MAX);
            if left == 0 {
                return Ok(());
            }
            at += retry_on_intr(|| pwrite(file, &ZEROS[..left.min(ZEROS.len())], at))? as u64;
        }
    }

    /// Gives what windows may store to of this part of a file blocks of its own: it was copied from another file, or is a hole.
    ///
    /// # Errors
    /// `ENOSPC` and others of `fallocate(2)`.
    pub fn fill(&self, file: impl FnOnce() -> Option<FileId>, fd: BorrowedFd<'_>, part: &Range<u64>) -> Result<()> {
        self.stored(file, part).into_iter().try_for_each(|stored| Self::allocate(fd, stored))
    }

    /// As [`Self::fill`], for what a file is about to grow by.
    ///
    /// # Errors
    /// `ENOSPC` and others of `fallocate(2)`.
    pub fn growing(&self, file: impl FnOnce() -> Option<FileId>, fd: BorrowedFd<'_>, size: u64) -> Result<()> {
        let stored = self.stored(file, &(0..size));
        if stored.is_empty() {
            return Ok(());
        }
        let old = u64::try_from(fstat(fd)?.st_size).unwrap_or(0);
        let mut grown = stored.into_iter().map(|part| part.start.max(old)..part.end).filter(|part| !part.is_empty());
        grown.try_for_each(|part| Self::allocate(fd, part))
    }

    /// Has a part of a file filled with blocks of its own: neither holes nor what other files share with it
    /// (reflinks). Where nothing can be reserved, nothing is.
    ///
    /// # Errors
    /// Those of `fallocate(2)`.
    pub fn allocate(file: impl AsFd, part: Range<u64>) -> Result<()> {
        let bytes = part.end.saturating_sub(part.start);
        let fill = |flags| fallocate(file.as_fd(), flags | FallocateFlags::KEEP_SIZE, part.start, bytes);
        match fill(FallocateFlags::UNSHARE_RANGE) {
            Err(Errno::OPNOTSUPP | Errno::INVAL) => {}
            outcome => return outcome,
        }
        match fill(FallocateFlags::empty()) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Call this before shortening a file to `end` on behalf of this session, without any lock that
    /// [`ferry_vfs::Mappable::map`] takes; drop the result afterwards. Waits until windows of other sessions
    /// have nothing behind the end any more, 10 s at most: a window that takes longer is not waited for again before it is
    /// back. Costs one load in processes without windows, where `file` is not called.
    pub fn shortening(&self, by: SessionId, file: impl FnOnce() -> Option<FileId>, end: u64) -> Shortening {
        self.shortening_within(by, file, end, ANSWER_WITHIN)
    }

    fn shortening_within(
        &self,
        by: SessionId,
        file: impl FnOnce() -> Option<FileId>,
        end: u64,
        within: Duration,
    ) -> Shortening {
        // A window that is created now is visible to its guest only long after this call.
        if !self.0.has_windows.load(Ordering::SeqCst) {
            return Shortening(None);
        }
        let Some(file) = file() else { return Shortening(None) };
        let mut asked: Vec<Arc<Member>> = Vec::new();
        self.0.with(file, |known| {
            known.ends.push(end);
            for part in known.parts.iter().filter(|part| part.is_behind(by, end)) {
                if !asked.iter().any(|member| Arc::ptr_eq(member, &part.member)) {
                    asked.push(Arc::clone(&part.member));
                }
            }
        });
        let until = Instant::now() + within;
        // One that is late looks at the limit when it is back, and that is set.
        asked.retain(|member| !member.late.load(Ordering::SeqCst));
        let waits: Vec<_> = asked
            .into_iter()
            .map(|member| {
                let (sender, done) = sync_channel(0);
                member.window.shorten(file, end, CompletionSignal { _waits: sender });
                (member, done)
            })
            .collect();
        for (member, done) in waits {
            let left = until.saturating_duration_since(Instant::now());
            if done.recv_timeout(left) == Err(RecvTimeoutError::Timeout) && !member.late.swap(true, Ordering::SeqCst) {
                member.window.late();
                // Informs it that it was late, even if it is done by now. Nothing waits for this request.
                member.window.shorten(file, end, CompletionSignal { _waits: sync_channel(0).0 });
            }
        }
        Shortening(Some((Arc::clone(&self.0), file, end)))
    }
}

/// A part of a file that a window has mapped; until it is dropped.
#[derive(Debug)]
pub struct Claim {
    shared: Arc<Shared>,
    file: FileId,
    by: SessionId,
    number: u64,
    end: u64,
    limit: u64,
}

impl Claim {
    /// The file.
    pub fn file(&self) -> FileId {
        self.file
    }

    /// The session that it was mapped for.
    pub fn by(&self) -> SessionId {
        self.by
    }

    /// Where the part ends in the file.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Where the file was about to end when the part was claimed.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The window is going to store there. Only after this are holes to be filled ([`Windows::allocate`]): from then on none are made.
    pub fn stores(&mut self) {
        let number = self.number;
        self.shared.with(self.file, |known| {
            known.parts.iter_mut().filter(|part| part.number == number).for_each(|part| part.stores = true);
        });
    }

    /// Reduces the claim to what was mapped.
    #[must_use]
    pub fn up_to(mut self, end: u64) -> Self {
        self.end = end;
        let number = self.number;
        self.shared.with(self.file, |known| {
            known.parts.iter_mut().filter(|part| part.number == number).for_each(|part| part.end = end);
        });
        self
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.shared.with(self.file, |known| known.parts.retain(|part| part.number != self.number));
    }
}

/// A truncation in progress. Until this is dropped, the range past the new end cannot be mapped.
#[derive(Debug)]
#[must_use]
pub struct Shortening(Option<(Arc<Shared>, FileId, u64)>);

impl Drop for Shortening {
    fn drop(&mut self) {
        let Some((shared, file, end)) = &self.0 else { return };
        shared.with(*file, |known| {
            if let Some(at) = known.ends.iter().position(|known| known == end) {
                known.ends.swap_remove(at);
            }
        });
    }
}

#[cfg(test)]
mod tests;
