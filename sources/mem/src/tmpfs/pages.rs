//! Which pages of a file are known to be allocated.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The granularity in bytes; the kernel's pages are no smaller.
pub(super) const PAGE_BYTES: u64 = 4096;
/// Pages in a word of the set.
pub(super) const WORD_PAGES: u64 = u64::BITS as u64;

/// A set of allocated pages, whose access cannot fail. Many threads may add pages; removal requires exclusive access.
#[derive(Debug, Default)]
pub(super) struct Pages(Vec<AtomicU64>);

/// Returns the pages that a range of bytes touches.
pub(super) fn touched(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES)
}

/// Returns the words that hold these pages.
pub(super) fn words(pages: &Range<u64>) -> Range<u64> {
    pages.start / WORD_PAGES..pages.end.div_ceil(WORD_PAGES)
}

pub(super) fn bits(word: u64, pages: &Range<u64>) -> u64 {
    let first = word * WORD_PAGES;
    let start = pages.start.clamp(first, first + WORD_PAGES) - first;
    let end = pages.end.clamp(first, first + WORD_PAGES) - first;
    let below = |end: u64| if end == WORD_PAGES { u64::MAX } else { (1 << end) - 1 };
    below(end) & !below(start)
}

impl Pages {
    /// Makes room for this many pages.
    pub(super) fn grow(&mut self, pages: u64) {
        let words = usize::try_from(pages.div_ceil(WORD_PAGES)).unwrap_or(usize::MAX);
        if words > self.0.len() {
            self.0.resize_with(words, AtomicU64::default);
        }
    }

    fn word(&self, word: u64) -> Option<&AtomicU64> {
        self.0.get(usize::try_from(word).ok()?)
    }

    /// Returns whether all of these are in the set.
    pub(super) fn has(&self, pages: &Range<u64>) -> bool {
        words(pages).all(|word| {
            let wanted = bits(word, pages);
            self.word(word).is_some_and(|has| has.load(Ordering::Relaxed) & wanted == wanted)
        })
    }

    /// Returns whether nothing is known around a page.
    pub(super) fn is_blank(&self, page: u64) -> bool {
        self.word(page / WORD_PAGES).is_some_and(|has| has.load(Ordering::Relaxed) == 0)
    }

    /// Adds the pages of a word's bits, within the capacity.
    pub(super) fn add(&self, word: u64, bits: u64) {
        if let Some(has) = self.word(word)
            && has.load(Ordering::Relaxed) & bits != bits
        {
            has.fetch_or(bits, Ordering::Relaxed);
        }
    }

    /// Removes these, wherever they are.
    pub(super) fn remove(&mut self, pages: &Range<u64>) {
        let all = 0..self.0.len() as u64 * WORD_PAGES;
        let pages = pages.start.min(all.end)..pages.end.min(all.end);
        for word in words(&pages) {
            if let Some(has) = self.word(word) {
                has.fetch_and(!bits(word, &pages), Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_ranges_convert_to_pages_and_bits() {
        for (bytes, pages) in [(0..1, 0..1), (0..4096, 0..1), (4095..4097, 0..2), (8192..8192, 2..2)] {
            assert_eq!(touched(&bytes), pages, "{bytes:?}");
        }
        for (word, pages, expected) in [
            (0, 0..1, 1),
            (0, 0..64, u64::MAX),
            (1, 0..64, 0),
            (1, 63..66, 0b11),
            (0, 63..66, 1 << 63),
            (2, 0..u64::MAX, u64::MAX),
            (0, 5..5, 0),
        ] {
            assert_eq!(bits(word, &pages), expected, "{word} {pages:?}");
        }
    }

    #[test]
    fn the_set_agrees_with_a_plain_set() {
        let mut pages = Pages::default();
        let mut plain = std::collections::BTreeSet::new();
        pages.grow(200);
        assert!(!pages.has(&(0..1)) && !pages.has(&(10_000..10_001)) && pages.has(&(7..7)));
        for (adds, range) in [(true, 3..130), (false, 64..65), (true, 190..300), (false, 100..u64::MAX), (true, 64..66)]
        {
            if adds {
                words(&range).for_each(|word| pages.add(word, bits(word, &range)));
                plain.extend(range.clone());
            } else {
                pages.remove(&range);
                plain.retain(|page| !range.contains(page));
            }
            for page in 0..256 {
                assert_eq!(pages.has(&(page..page + 1)), plain.contains(&page), "{page} after {range:?}");
            }
            assert_eq!(pages.has(&(3..100)), (3..100).all(|page| plain.contains(&page)));
        }
    }
}
