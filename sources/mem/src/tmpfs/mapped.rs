//! Reads and writes of a data file without a system call.
//!
//! A shared mapping of a tmpfs file has two traps: a page beyond the end of the file, and a page that is not allocated
//! when the file system is full, both kill the program that touches it (SIGBUS), and even a read allocates. So bytes are
//! only ever copied where
//!
//! * all pages are **known to be allocated**: they were written through the descriptor, or the kernel told that they are
//!   there (`mincore`); and they lie **below a size that the file is known to have**;
//! * neither can be taken away meanwhile: copies hold the lock shared, and everything that takes pages away (truncate,
//!   punch) is a request to us, and holds it exclusively. What clients do through a descriptor that was handed to them
//!   (passthrough) only adds.
//!
//! All else goes by the descriptor, which allocates, grows the file, and fails with an error where there is no room.
//!
//! # Times
//!
//! The kernel does not see such a write, so its time is kept here and the file's mtime is the later of both. It is later than
//! each that was shown before the bytes were there (`written`): so who sees the same time twice has seen the same
//! bytes. After somebody set the times, the next write goes by the descriptor, for one that was set in the future gives way
//! to the kernel's. Reads move atime by the rule of `relatime`, as the kernel does for those that it sees.

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use ferry_vfs::{Errno, Memory, Result, Segment, Timespec};

use super::file::usage;
use super::mapping::Mapping;
use super::pages::{PAGE_BYTES, Pages, bits, touched, words};
use crate::machine::{coarse_time, is_ahead, later, nanoseconds, timespec};
use crate::store::Usage;

/// Transfers that a file sees before it is mapped: mapping costs as much as some of them, and most files are written
/// once and closed.
const USES_BEFORE: u32 = 8;
/// The longest copy. Beyond, a system call costs little by comparison, and the kernel need not fault pages in.
const COPY_BYTES_MAX: usize = 128 << 10;
/// The shortest mapping; longer ones double, so that growing files are seldom mapped again.
const MAPPED_BYTES_MIN: u64 = 1 << 20;
/// Files are mapped up to here. It bounds what a client gets us to remember by one write far out: a bit per page, 2 MiB.
const MAPPED_BYTES_MAX: u64 = 64 << 30;
/// `relatime` moves atime once a day whatever else happens.
const DAY_S: i64 = 24 * 60 * 60;
/// The most pieces of memory that one call of the kernel takes (`IOV_MAX`).
const SEGMENTS_MAX: usize = 1024;

/// The memory of one open data file.
#[derive(Debug)]
pub(super) struct MappedFile {
    map: RwLock<Map>,
    /// How often it was asked for, up to [`USES_BEFORE`].
    uses: AtomicU32,
    /// When bytes were last copied in, in nanoseconds since the epoch; 0 for never since times were set.
    wrote_ns: AtomicI64,
    /// When a copy out last moved atime; likewise.
    read_ns: AtomicI64,
    /// A read saw to atime, and nothing happened since that may have made it old.
    was_read: AtomicBool,
    /// The file's mtime lies ahead, or may: the next write is to go by the descriptor.
    is_ahead: AtomicBool,
    /// The mtime that was shown may be that of now: it is to move with the next write.
    was_shown: AtomicBool,
    /// The mtime that was shown last, in nanoseconds since the epoch. Its lock is taken to show times, and by the first write
    /// after that.
    shown_ns: Mutex<i64>,
}

/// What the lock guards.
#[derive(Debug, Default)]
struct Map {
    mapping: Option<Mapping>,
    pages: Pages,
    /// The file is at least this long.
    size: AtomicU64,
    /// It cannot be mapped, or not any more.
    refused: bool,
}

impl Map {
    /// Whether these bytes are mapped.
    fn covers(&self, bytes: &Range<u64>) -> bool {
        self.mapping.as_ref().is_some_and(|mapping| bytes.end <= mapping.bytes() as u64)
    }

    /// The mapping, if these bytes can be copied from or to it as long as the lock is held.
    fn holds(&self, bytes: &Range<u64>) -> Option<&Mapping> {
        let there = bytes.end <= self.size.load(Ordering::Relaxed) && self.pages.has(&touched(bytes));
        self.mapping.as_ref().filter(|mapping| there && bytes.end <= mapping.bytes() as u64)
    }

    /// Maps the file at least up to `end`; answers whether it is.
    fn extend(&mut self, file: BorrowedFd<'_>, end: u64) -> bool {
        if self.refused {
            return false;
        }
        let size = rustix::fs::fstat(file).ok().and_then(|stat| u64::try_from(stat.st_size).ok()).unwrap_or_default();
        let bytes = end.max(size).max(MAPPED_BYTES_MIN).next_power_of_two().min(MAPPED_BYTES_MAX);
        let Ok(length) = usize::try_from(bytes) else { return false };
        let mapped = match &mut self.mapping {
            Some(mapping) => mapping.grow(length),
            None => {
                self.mapping = Mapping::new(file, length);
                self.mapping.is_some()
            }
        };
        if mapped {
            self.pages.grow(bytes / PAGE_BYTES);
        }
        self.refused = !mapped;
        mapped
    }

    /// Asks the kernel whether pages are allocated; answers the mapping if all are.
    fn learn(&self, file: BorrowedFd<'_>, bytes: &Range<u64>) -> Option<&Mapping> {
        let size = rustix::fs::fstat(file).ok().and_then(|stat| u64::try_from(stat.st_size).ok())?;
        let mapping = self.mapping.as_ref().filter(|_| bytes.end <= size)?;
        // It does not shrink as long as the lock is held.
        self.size.fetch_max(size, Ordering::Relaxed);
        // The kernel may take pages beyond the end away by itself (of huge pages).
        let below_end = touched(&(0..size));
        for word in words(&touched(bytes)) {
            self.pages.add(word, mapping.present(word) & bits(word, &below_end));
        }
        self.holds(bytes)
    }

    /// The same where nothing is known yet; later on, each write through the descriptor tells something.
    fn learn_once(&self, file: BorrowedFd<'_>, bytes: &Range<u64>) -> Option<&Mapping> {
        if self.pages.is_blank(bytes.start / PAGE_BYTES) { self.learn(file, bytes) } else { None }
    }

    /// Bytes were written through the descriptor while the lock is held.
    fn written(&self, bytes: Range<u64>) {
        self.size.fetch_max(bytes.end, Ordering::Relaxed);
        let pages = touched(&bytes);
        words(&pages).for_each(|word| self.pages.add(word, bits(word, &pages)));
    }
}

/// The bytes that a transfer is about, if it is one for us.
fn range(offset: u64, segments: &[Segment]) -> Option<(Range<u64>, usize)> {
    let bytes = segments.iter().try_fold(0_usize, |sum, segment| sum.checked_add(segment.bytes))?;
    let end = offset.checked_add(bytes as u64)?;
    (bytes > 0 && segments.len() <= SEGMENTS_MAX).then_some((offset..end, bytes))
}

/// A place in a mapping.
fn place(bytes: &Range<u64>) -> usize {
    usize::try_from(bytes.start).expect("what is mapped has an address")
}

impl MappedFile {
    /// Of a file whose mtime is known to be this.
    pub(super) fn new(mtime: Timespec) -> Self {
        Self {
            map: RwLock::default(),
            uses: AtomicU32::new(0),
            wrote_ns: AtomicI64::new(0),
            read_ns: AtomicI64::new(0),
            was_read: AtomicBool::new(false),
            is_ahead: AtomicBool::new(false),
            was_shown: AtomicBool::new(true),
            shown_ns: Mutex::new(nanoseconds(mtime)),
        }
    }

    fn write_lock(&self) -> RwLockWriteGuard<'_, Map> {
        self.map.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The map, kept as it is, with these bytes mapped.
    fn ready(&self, file: BorrowedFd<'_>, bytes: &Range<u64>) -> Option<RwLockReadGuard<'_, Map>> {
        if bytes.end > MAPPED_BYTES_MAX {
            return None;
        }
        if self.uses.load(Ordering::Relaxed) < USES_BEFORE {
            self.uses.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let lock = || self.map.read().unwrap_or_else(PoisonError::into_inner);
        let map = lock();
        if map.refused || map.covers(bytes) {
            return (!map.refused).then_some(map);
        }
        drop(map);
        if !self.write_lock().extend(file, bytes.end) {
            return None;
        }
        Some(lock()).filter(|map| map.covers(bytes))
    }

    /// Makes a change that takes pages away from these bytes on, while nobody copies.
    pub(super) fn removing<T>(&self, bytes: Range<u64>, change: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut map = self.write_lock();
        map.pages.remove(&touched(&bytes));
        change()
    }

    /// Makes a change of the size, while nobody copies.
    pub(super) fn resizing<T>(&self, size: u64, change: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut map = self.write_lock();
        let known = map.size.get_mut();
        *known = size.min(*known);
        map.pages.remove(&(size.div_ceil(PAGE_BYTES)..u64::MAX));
        change()
    }

    /// Sets times, to which all writes until now do not matter any more.
    pub(super) fn setting_times<T>(&self, set: impl FnOnce() -> Result<T>) -> Result<T> {
        // A copy that is under way notes its time before the lock is given.
        let _map = self.write_lock();
        self.wrote_ns.store(0, Ordering::Relaxed);
        self.read_ns.store(0, Ordering::Relaxed);
        self.was_read.store(false, Ordering::Relaxed);
        self.is_ahead.store(true, Ordering::Relaxed);
        set()
    }

    /// What is to be shown of the file, of which the kernel tells this.
    pub(super) fn show(&self, look: impl FnOnce() -> Result<Usage>) -> Result<Usage> {
        let mut shown_ns = self.shown_ns.lock().unwrap_or_else(PoisonError::into_inner);
        self.was_shown.store(true, Ordering::Relaxed);
        // Either a write sees that its time is about to be shown, or its bytes and its time are seen here.
        fence(Ordering::SeqCst);
        let known = look()?;
        let times = known.times.map(|times| self.times(times));
        if let Some((_, mtime)) = times {
            *shown_ns = nanoseconds(mtime);
            if is_ahead(nanoseconds(coarse_time()), *shown_ns) {
                self.is_ahead.store(true, Ordering::Relaxed);
            }
        }
        Ok(Usage { times, ..known })
    }

    /// The file's times, of which the kernel knows these.
    pub(super) fn times(&self, (atime, mtime): (Timespec, Timespec)) -> (Timespec, Timespec) {
        let later = |known: Timespec, noted: &AtomicI64| match noted.load(Ordering::Relaxed) {
            0 => known,
            ns => known.max(timespec(ns)),
        };
        (later(atime, &self.read_ns), later(mtime, &self.wrote_ns))
    }

    /// Ends it: from now on everything goes by the descriptor. `keep` is called first, while nobody copies.
    pub(super) fn end(&self, keep: impl FnOnce()) {
        let mut map = self.write_lock();
        keep();
        *map = Map { refused: true, ..Map::default() };
    }

    /// Notes a copy that the kernel did not see.
    fn note_write(&self) {
        let now = nanoseconds(coarse_time());
        // The clock ticks seldom: mostly the line stays shared between CPUs.
        if self.wrote_ns.load(Ordering::Relaxed) != now {
            self.note_time(now);
        }
    }

    /// Notes a time of writing, unless a later one is noted that does not lie too far ahead.
    fn note_time(&self, time: i64) {
        let moves = |noted: i64| (noted < time || is_ahead(time, noted)).then_some(time);
        if self.wrote_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, moves).is_ok() {
            self.was_read.store(false, Ordering::Relaxed);
        }
    }

    fn note_read(&self, file: BorrowedFd<'_>) {
        if self.was_read.load(Ordering::Relaxed) || self.was_read.swap(true, Ordering::Relaxed) {
            return;
        }
        let Some(known) = rustix::fs::fstat(file).ok().and_then(|stat| usage(&stat).times) else { return };
        let ((atime, mtime), now) = (self.times(known), coarse_time());
        if atime <= mtime || now.sec.saturating_sub(atime.sec) >= DAY_S {
            self.read_ns.store(nanoseconds(now), Ordering::Relaxed);
        }
    }
}

impl Memory for MappedFile {
    unsafe fn read(&self, file: BorrowedFd<'_>, offset: u64, to: &[Segment]) -> Option<Result<usize>> {
        let (bytes, count) = range(offset, to).filter(|(_, count)| *count <= COPY_BYTES_MAX)?;
        let map = self.ready(file, &bytes)?;
        let mapping = map.holds(&bytes).or_else(|| map.learn(file, &bytes))?;
        // SAFETY: the segments are valid by contract; the pages are there, and stay as long as the lock is held.
        unsafe { mapping.copy_out(place(&bytes), to) };
        self.note_read(file);
        Some(Ok(count))
    }

    unsafe fn write(&self, file: BorrowedFd<'_>, offset: u64, from: &[Segment]) -> Option<Result<usize>> {
        let (bytes, count) = range(offset, from)?;
        let map = self.ready(file, &bytes);
        if let Some(map) = &map
            && count <= COPY_BYTES_MAX
            && !self.is_ahead.load(Ordering::Relaxed)
            && let Some(mapping) = map.holds(&bytes).or_else(|| map.learn_once(file, &bytes))
        {
            // SAFETY: the segments are valid by contract; the pages are there, and stay as long as the lock is held.
            unsafe { mapping.copy_in(place(&bytes), from) };
            self.note_write();
            self.written();
            return Some(Ok(count));
        }
        let was_ahead = self.is_ahead.swap(false, Ordering::Relaxed);
        // SAFETY: passed on to the caller.
        let outcome = unsafe { write_through(file, bytes.start, from) };
        match outcome {
            Ok(count) => {
                if let Some(map) = &map {
                    map.written(bytes.start..bytes.start + count as u64);
                }
                self.was_read.store(false, Ordering::Relaxed);
                self.written();
            }
            Err(_) if was_ahead => self.is_ahead.store(true, Ordering::Relaxed),
            Err(_) => {}
        }
        Some(outcome)
    }

    /// The kernel stamps a write before its bytes are there, and by the tick where it has no multigrain times (before Linux
    /// 6.13). So where its time may have been shown already, another one is given now.
    fn written(&self) {
        fence(Ordering::SeqCst);
        if !self.was_shown.load(Ordering::Relaxed) {
            return;
        }
        let shown_ns = self.shown_ns.lock().unwrap_or_else(PoisonError::into_inner);
        self.note_time(later(nanoseconds(coarse_time()), *shown_ns));
        self.was_shown.store(false, Ordering::Relaxed);
    }
}

/// Writes through the descriptor.
///
/// # Safety
/// The segments are valid for reads.
unsafe fn write_through(file: BorrowedFd<'_>, offset: u64, from: &[Segment]) -> Result<usize> {
    let offset = libc::off_t::try_from(offset).map_err(|_| Errno::FBIG)?;
    let count = libc::c_int::try_from(from.len()).map_err(|_| Errno::INVAL)?;
    loop {
        // SAFETY: the descriptor is open, the memory valid by contract, and `Segment` is laid out as `iovec`.
        let written = unsafe { libc::pwritev(file.as_raw_fd(), from.as_ptr().cast(), count, offset) };
        match usize::try_from(written) {
            Ok(written) => return Ok(written),
            Err(_) => {
                let error = std::io::Error::last_os_error();
                match Errno::from_io_error(&error).unwrap_or(Errno::IO) {
                    Errno::INTR => {}
                    errno => return Err(errno),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel of before Linux 6.13, whose clock stands still.
    #[test]
    fn who_looks_in_between_sees_another_time() {
        let known = coarse_time();
        let mapped = MappedFile::new(known);
        let show = || {
            let look = || Ok(Usage { times: Some((known, known)), ..Usage::default() });
            mapped.show(look).expect("nothing fails").times.expect("times").1
        };
        let mut last = known;
        for round in 0..1000 {
            mapped.written();
            let now = show();
            assert!(now > last, "round {round}: {now:?} after {last:?}");
            assert_eq!(show(), now, "nothing was written");
            last = now;
        }
        // Nobody looks: nothing moves but the clock.
        (0..10).for_each(|_| mapped.written());
        assert!(show() > last);
        assert!(nanoseconds(show()) - nanoseconds(coarse_time()) < 10_000_000);
        // A time that was set long ago, or lies far ahead, is left by the next write.
        for set in [Timespec { sec: 5, nsec: 5 }, Timespec { sec: 1 << 33, nsec: 5 }] {
            mapped.setting_times(|| Ok(())).expect("nothing fails");
            let look = || Ok(Usage { times: Some((set, set)), ..Usage::default() });
            assert_eq!(mapped.show(look).map(|usage| usage.times), Ok(Some((set, set))));
            assert!(mapped.is_ahead.load(Ordering::Relaxed), "the kernel is to see the next write");
            mapped.written();
            let noted = mapped.wrote_ns.load(Ordering::Relaxed);
            assert!((nanoseconds(coarse_time()) - noted).abs() < 1_000_000_000, "{noted}");
        }
    }
}
