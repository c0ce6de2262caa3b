//! Reads and writes of a data file without a system call.
//!
//! A shared mapping of a tmpfs file has two traps. Access to a page beyond the end of the file, or to an unallocated
//! page when the file system is full, kills the program (SIGBUS). Even a read allocates. So bytes are only copied under
//! two conditions:
//!
//! * all pages are **known to be allocated**, because they were written through the descriptor, or `mincore` reports
//!   them; and they are **below a known minimum size** of the file;
//! * neither can change meanwhile: copies hold the lock shared, and every operation that removes pages (truncate,
//!   punch) goes through this process and holds it exclusively. Clients with a passthrough descriptor only add pages.
//!
//! All other transfers use the descriptor, which allocates, grows the file, and returns an error without room.
//!
//! # Times
//!
//! The kernel does not see such a write, so its time is kept here, and the file's mtime is the later of both. It is
//! later than each mtime that was shown before the bytes changed (`written`): two equal times mean equal bytes. After
//! the times were set, the next write uses the descriptor, because the kernel's time must replace one in the future.
//! Reads update atime by the rule of `relatime`, as the kernel does.

use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Mutex, RwLock, RwLockReadGuard};

use ferry_vfs::sync::{self, lock};
use ferry_vfs::{Errno, Memory, Result, Segment, Timespec};

use rustix::fs::Stat;

use super::mapping::Mapping;
use super::pages::{PAGE_BYTES, Pages, bits, touched, words};
use crate::machine::{coarse_time, is_ahead, later, nanoseconds, timespec};
use crate::store::Usage;

/// The number of transfers before a file is mapped: mapping costs as much as several transfers, and most files are
/// written once and closed.
const USES_BEFORE: u32 = 8;
/// The maximum copy in bytes. Beyond it, a system call is comparatively cheap and avoids page faults.
const COPY_BYTES_MAX: usize = 128 << 10;
/// The minimum mapping in bytes; longer ones double, so that growing files are rarely remapped.
const MAPPED_BYTES_MIN: u64 = 1 << 20;
/// The maximum mapping in bytes, which bounds the set of pages (a bit per page, 2 MiB) after a write far out.
const MAPPED_BYTES_MAX: u64 = 64 << 30;
/// `relatime` updates atime at least once a day.
const DAY_S: i64 = 24 * 60 * 60;
/// The maximum number of segments per system call (`IOV_MAX`).
const SEGMENTS_MAX: usize = 1024;

/// The memory of one open data file.
#[derive(Debug)]
pub(super) struct MappedFile {
    map: RwLock<Map>,
    /// The number of transfers, up to [`USES_BEFORE`].
    uses: AtomicU32,
    /// The time of the last copy in, in nanoseconds since the epoch; 0: none since times were set.
    wrote_ns: AtomicI64,
    /// The time when a copy out last updated atime; likewise.
    read_ns: AtomicI64,
    /// A read has updated atime, and nothing has happened since that requires another update.
    was_read: AtomicBool,
    /// The file's mtime is, or may be, in the future: the next write must use the descriptor.
    is_ahead: AtomicBool,
    /// The mtime that was shown may equal the current time: the next write must advance it.
    was_shown: AtomicBool,
    /// The mtime that was shown last, in nanoseconds since the epoch. Locked to show times, and by the next write.
    shown_ns: Mutex<i64>,
}

/// What the lock guards.
#[derive(Debug, Default)]
struct Map {
    mapping: Option<Mapping>,
    pages: Pages,
    /// The minimum size of the file in bytes.
    size: AtomicU64,
    /// It cannot be mapped, or no longer.
    refused: bool,
}

impl Map {
    /// Whether these bytes are mapped.
    fn covers(&self, bytes: &Range<u64>) -> bool {
        self.mapping.as_ref().is_some_and(|mapping| bytes.end <= mapping.bytes() as u64)
    }

    /// Returns the mapping, if these bytes can be copied while the lock is held.
    fn holds(&self, bytes: &Range<u64>) -> Option<&Mapping> {
        let there = bytes.end <= self.size.load(Ordering::Relaxed) && self.pages.has(&touched(bytes));
        self.mapping.as_ref().filter(|mapping| there && bytes.end <= mapping.bytes() as u64)
    }

    /// Maps the file at least up to `end`; returns whether it is mapped.
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

    /// Queries whether pages are allocated; returns the mapping if all are.
    fn learn(&self, file: BorrowedFd<'_>, bytes: &Range<u64>) -> Option<&Mapping> {
        let size = rustix::fs::fstat(file).ok().and_then(|stat| u64::try_from(stat.st_size).ok())?;
        let mapping = self.mapping.as_ref().filter(|_| bytes.end <= size)?;
        // It does not shrink while the lock is held.
        self.size.fetch_max(size, Ordering::Relaxed);
        // The kernel may remove pages beyond the end (of huge pages).
        let below_end = touched(&(0..size));
        for word in words(&touched(bytes)) {
            self.pages.add(word, mapping.present(word) & bits(word, &below_end));
        }
        self.holds(bytes)
    }

    /// As [`Self::learn`], but only where nothing is known yet; later, writes through the descriptor add pages.
    fn learn_once(&self, file: BorrowedFd<'_>, bytes: &Range<u64>) -> Option<&Mapping> {
        if self.pages.is_blank(bytes.start / PAGE_BYTES) { self.learn(file, bytes) } else { None }
    }

    /// Records a write through the descriptor while the lock is held.
    fn written(&self, bytes: Range<u64>) {
        self.size.fetch_max(bytes.end, Ordering::Relaxed);
        let pages = touched(&bytes);
        words(&pages).for_each(|word| self.pages.add(word, bits(word, &pages)));
    }
}

/// Returns the bytes of a transfer, if it is small enough.
fn range(offset: u64, segments: &[Segment]) -> Option<(Range<u64>, usize)> {
    let bytes = segments.iter().try_fold(0_usize, |sum, segment| sum.checked_add(segment.bytes))?;
    let end = offset.checked_add(bytes as u64)?;
    (bytes > 0 && segments.len() <= SEGMENTS_MAX).then_some((offset..end, bytes))
}

/// A place in a mapping.
fn place(bytes: &Range<u64>) -> usize {
    usize::try_from(bytes.start).expect("a mapped offset fits an address")
}

impl MappedFile {
    /// Creates the state of a file with this known mtime.
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

    /// Returns the map with the lock held, with these bytes mapped.
    fn ready(&self, file: BorrowedFd<'_>, bytes: &Range<u64>) -> Option<RwLockReadGuard<'_, Map>> {
        if bytes.end > MAPPED_BYTES_MAX {
            return None;
        }
        if self.uses.load(Ordering::Relaxed) < USES_BEFORE {
            self.uses.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let lock = || sync::read(&self.map);
        let map = lock();
        if map.refused || map.covers(bytes) {
            return (!map.refused).then_some(map);
        }
        drop(map);
        if !sync::write(&self.map).extend(file, bytes.end) {
            return None;
        }
        Some(lock()).filter(|map| map.covers(bytes))
    }

    /// Makes a change that removes pages of these bytes, without concurrent copies.
    pub(super) fn removing<T>(&self, bytes: Range<u64>, change: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut map = sync::write(&self.map);
        map.pages.remove(&touched(&bytes));
        change()
    }

    /// Makes a change of the size, without concurrent copies.
    pub(super) fn resizing<T>(&self, size: u64, change: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut map = sync::write(&self.map);
        let known = map.size.get_mut();
        *known = size.min(*known);
        map.pages.remove(&(size.div_ceil(PAGE_BYTES)..u64::MAX));
        change()
    }

    /// Sets times, which override all earlier writes.
    pub(super) fn setting_times<T>(&self, set: impl FnOnce() -> Result<T>) -> Result<T> {
        // A concurrent copy records its time before it releases the lock.
        let _map = sync::write(&self.map);
        self.wrote_ns.store(0, Ordering::Relaxed);
        self.read_ns.store(0, Ordering::Relaxed);
        self.was_read.store(false, Ordering::Relaxed);
        self.is_ahead.store(true, Ordering::Relaxed);
        set()
    }

    /// Returns the attributes to show, from those of the kernel.
    pub(super) fn show(&self, look: impl FnOnce() -> Result<Usage>) -> Result<Usage> {
        let mut shown_ns = lock(&self.shown_ns);
        self.was_shown.store(true, Ordering::Relaxed);
        // Either a write sees that its time is about to be shown, or its bytes and its time are visible here.
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

    /// Returns the file's times, from those of the kernel.
    pub(super) fn times(&self, (atime, mtime): (Timespec, Timespec)) -> (Timespec, Timespec) {
        let later = |known: Timespec, noted: &AtomicI64| match noted.load(Ordering::Relaxed) {
            0 => known,
            ns => known.max(timespec(ns)),
        };
        (later(atime, &self.read_ns), later(mtime, &self.wrote_ns))
    }

    /// Ends the mapping: all later transfers use the descriptor. `keep` is called first, without concurrent copies.
    pub(super) fn end(&self, keep: impl FnOnce()) {
        let mut map = sync::write(&self.map);
        keep();
        *map = Map { refused: true, ..Map::default() };
    }

    /// Records a write that the kernel did not see.
    fn note_write(&self) {
        let now = nanoseconds(coarse_time());
        // The clock ticks rarely, so the cache line usually stays shared between CPUs.
        if self.wrote_ns.load(Ordering::Relaxed) != now {
            self.note_time(now);
        }
    }

    /// Records a time of writing, unless a later one is recorded that is not too far ahead.
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

    /// The kernel stamps a write before its bytes are visible, and with tick granularity without multigrain times
    /// (before Linux 6.13). If its time may have been shown already, a later one is recorded.
    fn written(&self) {
        fence(Ordering::SeqCst);
        if !self.was_shown.load(Ordering::Relaxed) {
            return;
        }
        let shown_ns = lock(&self.shown_ns);
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

/// What `stat` says of a data file.
#[allow(clippy::useless_conversion, clippy::unnecessary_fallible_conversions, reason = "types differ by architecture")]
pub(super) fn usage(stat: &Stat) -> Usage {
    let time = |sec, nsec| Timespec { sec, nsec: u32::try_from(nsec).unwrap_or_default() };
    Usage {
        size: u64::try_from(stat.st_size).unwrap_or_default(),
        blocks: u64::try_from(stat.st_blocks).unwrap_or_default(),
        times: Some((time(stat.st_atime, stat.st_atime_nsec), time(stat.st_mtime, stat.st_mtime_nsec))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel before Linux 6.13, with a clock that does not advance.
    #[test]
    fn a_write_after_a_look_changes_the_time() {
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
        // Without a look only the clock changes the time.
        (0..10).for_each(|_| mapped.written());
        assert!(show() > last);
        assert!(nanoseconds(show()) - nanoseconds(coarse_time()) < 10_000_000);
        // A time in the past, or far ahead, is replaced by the next write.
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
