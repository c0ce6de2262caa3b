//! The pages of a file: which of their bytes are known, dirty, being written, and not durable.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::around::Evidence;
pub(super) use super::limits::PAGE_BYTES;
use super::limits::Totals;

/// The size of a page in bytes, as an offset.
pub const PAGE: u64 = PAGE_BYTES as u64;

/// Pages per chunk: the bits of its sets.
const CHUNK: u64 = u64::BITS as u64;

/// A range of the bytes of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Span {
    pub from: usize,
    pub to: usize,
}

impl Span {
    pub const NONE: Self = Self { from: 0, to: 0 };
    pub const WHOLE: Self = Self { from: 0, to: PAGE_BYTES };

    /// Returns the part of a page within a range of the file.
    pub fn of(page: u64, from: u64, to: u64) -> Self {
        let start = page * PAGE;
        let inside = |at: u64| usize::try_from(at.saturating_sub(start)).map_or(PAGE_BYTES, |at| at.min(PAGE_BYTES));
        Self { from: inside(from), to: inside(to) }
    }

    pub fn is_empty(self) -> bool {
        self.from >= self.to
    }

    pub fn len(self) -> usize {
        self.to.saturating_sub(self.from)
    }

    /// Returns whether both form one range.
    pub fn joins(self, other: Self) -> bool {
        self.is_empty() || other.is_empty() || (self.from <= other.to && other.from <= self.to)
    }

    pub fn contains(self, other: Self) -> bool {
        other.is_empty() || (self.from <= other.from && other.to <= self.to)
    }

    /// Returns the smallest range that contains both.
    pub fn and(self, other: Self) -> Self {
        match (self.is_empty(), other.is_empty()) {
            (true, _) => other,
            (_, true) => self,
            _ => Self { from: self.from.min(other.from), to: self.to.max(other.to) },
        }
    }

    /// Returns the part before an end.
    pub fn until(self, end: usize) -> Self {
        let cut = Self { from: self.from, to: self.to.min(end) };
        if cut.is_empty() { Self::NONE } else { cut }
    }

    /// Returns the part from a start.
    pub fn since(self, start: usize) -> Self {
        let cut = Self { from: self.from.max(start), to: self.to };
        if cut.is_empty() { Self::NONE } else { cut }
    }
}

/// A page. Its range `valid` contains the three others.
#[derive(Debug)]
pub(super) struct Page {
    pub data: [u8; PAGE_BYTES],
    /// The known bytes, one range: a write that would leave a gap waits for the page.
    pub valid: Span,
    /// The number of known bytes at the start of the page, before [`Self::valid`], from a short read of the server.
    pub prefix: usize,
    /// To be written.
    pub dirty: Span,
    /// The range being written, as of the start of the write.
    pub writing: Span,
    /// Written and not durable.
    pub unstable: Span,
}

impl Page {
    fn new() -> Box<Self> {
        let none = Span::NONE;
        let data = [0; PAGE_BYTES];
        Box::new(Self { data, valid: none, prefix: 0, dirty: none, writing: none, unstable: none })
    }

    pub fn has(&self, span: Span) -> bool {
        self.valid.contains(span) || span.to <= self.prefix
    }

    /// What must not be lost.
    pub fn pinned(&self) -> Span {
        self.dirty.and(self.writing).and(self.unstable)
    }

    /// Returns the offset in the page at which to continue fetching.
    pub fn fetch_from(&self) -> usize {
        if self.valid.from == 0 { self.valid.to } else { self.prefix }
    }

    /// Stores bytes from the server, at or before [`Self::fetch_from`], where the page has no own data.
    pub fn fill(&mut self, from: usize, bytes: &[u8]) {
        let to = (from + bytes.len()).min(PAGE_BYTES);
        let known = self.fetch_from();
        if from > known || to <= known {
            return;
        }
        let own = if self.valid.from == 0 { Span { from: known, to: known } } else { self.valid };
        let before = Span { from: known, to: to.min(own.from.max(known)) };
        if !before.is_empty() {
            self.data[before.from..before.to].copy_from_slice(&bytes[before.from - from..before.to - from]);
        }
        let after = Span { from: own.to.max(known), to };
        if !after.is_empty() {
            self.data[after.from..after.to].copy_from_slice(&bytes[after.from - from..after.to - from]);
        }
        self.know_until(to);
    }

    /// Zeroes the bytes beyond the end of the file.
    pub fn fill_zeros(&mut self, from: usize) {
        if self.fetch_from() < from {
            return;
        }
        let start = if self.valid.is_empty() { from } else { from.max(self.valid.to) };
        self.data[start..].fill(0);
        if !self.valid.is_empty() && self.valid.from > from {
            let end = self.valid.from;
            self.data[from.max(self.prefix)..end].fill(0);
        }
        self.know_until(PAGE_BYTES);
    }

    fn know_until(&mut self, to: usize) {
        self.prefix = self.prefix.max(to);
        self.settle();
    }

    /// Merges the known parts if they are adjacent.
    pub fn settle(&mut self) {
        if self.valid.is_empty() || self.valid.from <= self.prefix {
            self.valid = Span { from: 0, to: self.valid.to.max(self.prefix) };
            self.prefix = self.valid.to;
        }
    }

    /// Drops the data from an offset in the page.
    pub fn cut(&mut self, end: usize) {
        self.data[end..].fill(0);
        for span in [&mut self.valid, &mut self.dirty, &mut self.writing, &mut self.unstable] {
            *span = span.until(end);
        }
        self.prefix = self.prefix.min(end);
        self.settle();
    }

    /// Drops data that the server has, too.
    pub fn forget_clean(&mut self) {
        self.valid = self.pinned();
        self.prefix = if self.valid.from == 0 { self.valid.to } else { 0 };
    }
}

/// 64 pages, with a bit for each in each set.
#[derive(Debug)]
pub(super) struct Chunk {
    pages: [Option<Box<Page>>; u64::BITS as usize],
    present: u64,
    dirty: u64,
    writing: u64,
    unstable: u64,
    /// Unstable when the last sync was requested.
    syncing: u64,
    /// Being fetched.
    fetching: u64,
    /// Used since the last pass of the eviction.
    used: u64,
    /// Fetched and not read yet, so that a file read once does not evict others.
    fresh: u64,
    /// Fetched by read-around, and not read yet.
    around: u64,
}

impl Chunk {
    fn new() -> Self {
        Self {
            pages: [const { None }; u64::BITS as usize],
            present: 0,
            dirty: 0,
            writing: 0,
            unstable: 0,
            syncing: 0,
            fetching: 0,
            used: 0,
            fresh: 0,
            around: 0,
        }
    }
}

/// The pages of one file.
#[derive(Debug)]
pub(super) struct Pages {
    chunks: BTreeMap<u64, Box<Chunk>>,
    totals: Arc<Totals>,
    /// Pages in memory or being fetched.
    pub count: usize,
    /// Pages that are dirty or being written.
    pub unwritten: usize,
    /// Pages that are unstable.
    pub unstable: usize,
    /// The chunk at which the eviction continues.
    hand: u64,
    /// The use of pages fetched by read-around.
    pub around: Evidence,
}

fn bit(page: u64) -> u64 {
    1 << (page % CHUNK)
}

fn slot(page: u64) -> usize {
    usize::try_from(page % CHUNK).unwrap_or_default()
}

impl Pages {
    pub fn new(totals: Arc<Totals>) -> Self {
        Self {
            chunks: BTreeMap::new(),
            totals,
            count: 0,
            unwritten: 0,
            unstable: 0,
            hand: 0,
            around: Evidence::default(),
        }
    }

    pub fn get(&self, page: u64) -> Option<&Page> {
        self.chunks.get(&(page / CHUNK))?.pages[slot(page)].as_deref()
    }

    /// Returns a page for reading, and marks it as used.
    pub fn read(&mut self, page: u64) -> Option<&Page> {
        let chunk = self.chunks.get_mut(&(page / CHUNK))?;
        let bit = bit(page);
        if chunk.fresh & bit == 0 {
            chunk.used |= bit;
        }
        chunk.fresh &= !bit;
        if chunk.around & chunk.present & bit != 0 {
            chunk.around &= !bit;
            self.around.used += 1;
        }
        chunk.pages[slot(page)].as_deref()
    }

    pub fn is_fetching(&self, page: u64) -> bool {
        self.chunks.get(&(page / CHUNK)).is_some_and(|chunk| chunk.fetching & bit(page) != 0)
    }

    /// Returns whether a page must be fetched to be known completely, and is not being fetched.
    pub fn needs_fetch(&self, page: u64) -> bool {
        let Some(chunk) = self.chunks.get(&(page / CHUNK)) else { return true };
        chunk.fetching & bit(page) == 0 && chunk.pages[slot(page)].as_ref().is_none_or(|page| page.valid != Span::WHOLE)
    }

    pub fn is_writing(&self, page: u64) -> bool {
        self.chunks.get(&(page / CHUNK)).is_some_and(|chunk| chunk.writing & bit(page) != 0)
    }

    /// Records that a page is being fetched.
    pub fn fetch(&mut self, page: u64) {
        let chunk = self.chunks.entry(page / CHUNK).or_insert_with(|| Box::new(Chunk::new()));
        chunk.fetching |= bit(page);
        if chunk.present & bit(page) == 0 {
            self.count += 1;
            self.totals.pages.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records that a page is being fetched by read-around.
    pub fn fetch_around(&mut self, page: u64) {
        if let Some(chunk) = self.chunks.get_mut(&(page / CHUNK)) {
            chunk.around |= bit(page);
        }
    }

    /// Records the end of a fetch, and stores data if `fill` is given. An empty page is removed.
    pub fn fetched(&mut self, page: u64, fill: Option<impl FnOnce(&mut Page)>) {
        let Some(chunk) = self.chunks.get_mut(&(page / CHUNK)) else { return };
        chunk.fetching &= !bit(page);
        if fill.is_none() {
            chunk.around &= !bit(page);
        }
        let Some(fill) = fill else {
            if chunk.present & bit(page) == 0 {
                self.gone(page);
            }
            return;
        };
        chunk.present |= bit(page);
        chunk.fresh |= bit(page);
        fill(chunk.pages[slot(page)].get_or_insert_with(Page::new));
    }

    /// Uncounts a page without data.
    fn gone(&mut self, page: u64) {
        self.count -= 1;
        self.totals.pages.fetch_sub(1, Ordering::Relaxed);
        if self.chunks.get(&(page / CHUNK)).is_some_and(|chunk| chunk.present | chunk.fetching == 0) {
            self.chunks.remove(&(page / CHUNK));
        }
    }

    /// Changes a page, created if necessary, and updates the counts.
    pub fn update<T>(&mut self, page: u64, change: impl FnOnce(&mut Page) -> T) -> T {
        let chunk = self.chunks.entry(page / CHUNK).or_insert_with(|| Box::new(Chunk::new()));
        let bit = bit(page);
        if (chunk.present | chunk.fetching) & bit == 0 {
            self.count += 1;
            self.totals.pages.fetch_add(1, Ordering::Relaxed);
        }
        chunk.present |= bit;
        chunk.used |= bit;
        let content = chunk.pages[slot(page)].get_or_insert_with(Page::new);
        let answer = change(content);
        let was = ((chunk.dirty | chunk.writing) & bit != 0, chunk.unstable & bit != 0);
        set(&mut chunk.dirty, bit, !content.dirty.is_empty());
        set(&mut chunk.writing, bit, !content.writing.is_empty());
        set(&mut chunk.unstable, bit, !content.unstable.is_empty());
        let now = ((chunk.dirty | chunk.writing) & bit != 0, chunk.unstable & bit != 0);
        count(&mut self.unwritten, &self.totals.unwritten, was.0, now.0);
        count(&mut self.unstable, &self.totals.unstable, was.1, now.1);
        answer
    }

    /// Removes a page without data to keep; one being fetched stays counted.
    pub fn drop_clean(&mut self, page: u64) {
        let Some(chunk) = self.chunks.get_mut(&(page / CHUNK)) else { return };
        let bit = bit(page);
        if chunk.present & bit == 0 || (chunk.dirty | chunk.writing | chunk.unstable) & bit != 0 {
            return;
        }
        chunk.present &= !bit;
        chunk.around &= !bit;
        chunk.pages[slot(page)] = None;
        if chunk.fetching & bit == 0 {
            self.gone(page);
        }
    }

    /// Returns the next dirty page from one on.
    pub fn next_dirty(&self, from: u64) -> Option<u64> {
        self.next(from, |chunk| chunk.dirty)
    }

    /// Returns the next present page from one on.
    pub fn next_present(&self, from: u64) -> Option<u64> {
        self.next(from, |chunk| chunk.present)
    }

    /// Returns the next unstable page from one on.
    pub fn next_unstable(&self, from: u64) -> Option<u64> {
        self.next(from, |chunk| chunk.unstable)
    }

    fn next(&self, from: u64, set: impl Fn(&Chunk) -> u64) -> Option<u64> {
        self.chunks.range(from / CHUNK..).find_map(|(&at, chunk)| {
            let mask = if at == from / CHUNK { !0 << (from % CHUNK) } else { !0 };
            let bits = set(chunk) & mask;
            (bits != 0).then(|| at * CHUNK + u64::from(bits.trailing_zeros()))
        })
    }

    /// Returns the end offset of unwritten data; 0 if there are none.
    pub fn unwritten_end(&self) -> u64 {
        if self.unwritten == 0 {
            return 0;
        }
        let last = self.chunks.iter().rev().find_map(|(&at, chunk)| {
            let bits = chunk.dirty | chunk.writing;
            (bits != 0).then(|| at * CHUNK + CHUNK - 1 - u64::from(bits.leading_zeros()))
        });
        let end = |page: u64| self.get(page).map(|content| page * PAGE + content.dirty.and(content.writing).to as u64);
        last.and_then(end).unwrap_or(0)
    }

    /// Records the unstable pages at the request of a sync.
    pub fn sync_begins(&mut self) {
        for chunk in self.chunks.values_mut() {
            chunk.syncing = chunk.unstable;
        }
    }

    /// Records that a page was written again since: the sync does not cover it.
    pub fn not_in_sync(&mut self, page: u64) {
        if let Some(chunk) = self.chunks.get_mut(&(page / CHUNK)) {
            chunk.syncing &= !bit(page);
        }
    }

    /// Marks the pages covered by the sync as durable.
    pub fn sync_ended(&mut self) {
        let mut from = 0;
        while let Some(page) = self.next(from, |chunk| chunk.syncing) {
            self.update(page, |content| content.unstable = Span::NONE);
            self.not_in_sync(page);
            from = page + 1;
        }
    }

    /// Evicts up to this many pages not used since the last pass, from up to `chunks_max` chunks; returns how many.
    pub fn evict(&mut self, pages_max: usize, chunks_max: usize) -> usize {
        let mut evicted = 0;
        for _ in 0..chunks_max {
            let next = self.chunks.range_mut(self.hand..).next();
            let Some((&at, chunk)) = next else {
                self.hand = 0;
                break;
            };
            let spared = chunk.used | chunk.fresh;
            let kept = chunk.dirty | chunk.writing | chunk.unstable | chunk.fetching;
            let mut bits = chunk.present & !(spared | kept);
            while bits != 0 && evicted < pages_max {
                let page = at * CHUNK + u64::from(bits.trailing_zeros());
                bits &= bits - 1;
                self.drop_clean(page);
                evicted += 1;
            }
            if evicted >= pages_max {
                break;
            }
            if let Some(chunk) = self.chunks.get_mut(&at) {
                (chunk.used, chunk.fresh) = (0, 0);
            }
            self.hand = at + 1;
        }
        evicted
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.totals.pages.fetch_sub(self.count, Ordering::Relaxed);
        self.totals.unwritten.fetch_sub(self.unwritten, Ordering::Relaxed);
        self.totals.unstable.fetch_sub(self.unstable, Ordering::Relaxed);
    }
}

fn set(bits: &mut u64, bit: u64, on: bool) {
    if on {
        *bits |= bit;
    } else {
        *bits &= !bit;
    }
}

fn count(here: &mut usize, total: &std::sync::atomic::AtomicUsize, was: bool, now: bool) {
    match (was, now) {
        (false, true) => {
            *here += 1;
            total.fetch_add(1, Ordering::Relaxed);
        }
        (true, false) => {
            *here -= 1;
            total.fetch_sub(1, Ordering::Relaxed);
        }
        _ => (),
    }
}
