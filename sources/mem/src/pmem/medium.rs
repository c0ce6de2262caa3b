//! The storage of an image.

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;

/// Persistent bytes: a file or device, mapped persistent memory, or a test's recording of one.
///
/// A write may become durable at any time and in any order, in units of 8 bytes; [`Self::persist`] makes it durable.
/// Offsets outside the medium are an error (`InvalidInput`), because callers use offsets of checked images.
pub trait Medium: Send + Sync + Debug {
    /// Size in bytes.
    fn bytes(&self) -> u64;

    /// Calls `seen` with a range, without a copy if the medium is memory.
    ///
    /// # Errors
    /// Those of the medium.
    fn look(&self, offset: u64, bytes: usize, seen: &mut dyn FnMut(&[u8])) -> io::Result<()>;

    /// Calls `fill` to write a range. It returns how many bytes it wrote from the start; the others keep their values.
    /// The initial contents of the buffer are undefined.
    ///
    /// # Errors
    /// Those of the medium.
    fn edit(&self, offset: u64, bytes: usize, fill: &mut dyn FnMut(&mut [u8]) -> usize) -> io::Result<usize>;

    /// Makes all writes to these ranges durable.
    ///
    /// # Errors
    ///
    /// Those of the medium; it is then unknown what is durable.
    fn persist(&self, ranges: &[Range<u64>]) -> io::Result<()>;

    /// Returns a new descriptor of the same bytes at the same offsets, always consistent with this medium, if possible.
    fn descriptor(&self) -> Option<OwnedFd> {
        None
    }

    /// Reads a range.
    ///
    /// # Errors
    /// Those of the medium.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.look(offset, bytes.len(), &mut |seen| bytes.copy_from_slice(seen))
    }

    /// Writes a range.
    ///
    /// # Errors
    /// Those of the medium.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let fill = &mut |to: &mut [u8]| {
            to.copy_from_slice(bytes);
            bytes.len()
        };
        self.edit(offset, bytes.len(), fill).map(drop)
    }
}

/// A small set of byte ranges: the dirty ones.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ranges(Vec<Range<u64>>);

/// More ranges than this are merged into one that covers them all.
const RANGES_MAX: usize = 64;

impl Ranges {
    pub(crate) fn add(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        // Most writes continue the last one, or repeat it.
        if let Some(last) = self.0.last_mut()
            && range.start <= last.end
            && last.start <= range.end
        {
            *last = last.start.min(range.start)..last.end.max(range.end);
            return;
        }
        self.0.push(range);
        if self.0.len() > RANGES_MAX {
            self.tidy();
        }
    }

    /// Adds all of another set.
    pub(crate) fn add_all(&mut self, other: Self) {
        other.0.into_iter().for_each(|range| self.add(range));
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the ranges, sorted and disjoint.
    pub(crate) fn into_sorted(mut self) -> Vec<Range<u64>> {
        self.sort();
        self.0
    }

    fn sort(&mut self) {
        self.0.sort_by_key(|range| range.start);
        self.0.dedup_by(|next, before| {
            let joins = next.start <= before.end;
            if joins {
                before.end = before.end.max(next.end);
            }
            joins
        });
    }

    fn tidy(&mut self) {
        self.sort();
        if let [first, .., last] = &self.0[..]
            && self.0.len() > RANGES_MAX / 2
        {
            let all = first.start..last.end;
            self.0.clear();
            self.0.push(all);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_stay_few_and_cover_all() {
        let mut ranges = Ranges::default();
        ranges.add(10..20);
        ranges.add(20..30);
        ranges.add(5..5);
        ranges.add(0..4);
        assert_eq!(ranges.clone().into_sorted(), [0..4, 10..30]);
        for at in 0..1000 {
            ranges.add(at * 100..at * 100 + 1);
        }
        let sorted = ranges.into_sorted();
        assert!(sorted.len() <= RANGES_MAX);
        assert!((0..1000).all(|at| sorted.iter().any(|range| range.contains(&(at * 100)))));
    }
}
