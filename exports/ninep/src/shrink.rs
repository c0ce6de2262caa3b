//! Shrinks maps and the heap after large decreases.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Capacity of a map that is never released: a few pages.
const ROOM_MIN: usize = 1024;
/// The minimum decrease in held objects before the heap is trimmed: a few hundred KiB.
const HELD_MIN: usize = 1024;

/// Shrinks a map that has become sparse; the cost is amortized over the removals.
pub(crate) fn shrink<K: Eq + Hash, V>(map: &mut HashMap<K, V>) {
    if map.capacity() > ROOM_MIN && map.len() < map.capacity() / 4 {
        map.shrink_to((map.len() * 2).max(ROOM_MIN));
    }
}

/// The interval of checks after a decrease.
pub(crate) const LOOK: Duration = Duration::from_millis(500);
/// The number of checks after which the heap is trimmed again: idle threads end after a while and release their
/// buffers.
const LATER_LOOKS: u32 = 30;

/// Decides when to trim the heap.
#[derive(Debug, Default)]
pub(crate) struct HighWater {
    most: usize,
    last: usize,
    /// Checks until the heap is trimmed again; 0 if it is not.
    later: u32,
}

impl HighWater {
    /// Records the held amount; returns whether it is stable at half its maximum, and again [`LATER_LOOKS`] later.
    pub(crate) fn should_trim(&mut self, held: usize) -> bool {
        let is_still = held >= self.last;
        self.last = held;
        self.most = self.most.max(held);
        let has_sunk = is_still && self.most >= HELD_MIN && held <= self.most / 2;
        if has_sunk {
            (self.most, self.later) = (held, LATER_LOOKS + 1);
        }
        self.later = self.later.saturating_sub(1);
        has_sunk || self.later == 1
    }

    /// Returns whether nothing is to be trimmed as long as this is held.
    pub(crate) fn is_settled(&self, held: usize) -> bool {
        held == self.last && !self.is_waiting()
    }

    /// Returns whether the heap may have to be trimmed soon.
    fn is_waiting(&self) -> bool {
        self.later > 1 || self.most >= HELD_MIN && self.last <= self.most / 2
    }
}

/// Trims the heap of a server without a timer: by a thread that runs only while it is needed.
pub(crate) struct Trimmer {
    most: AtomicUsize,
    looks: AtomicBool,
    held: Box<dyn Fn() -> usize + Send + Sync>,
}

impl Trimmer {
    /// `held` returns the held amount.
    pub(crate) fn new(held: impl Fn() -> usize + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { most: AtomicUsize::new(0), looks: AtomicBool::new(false), held: Box::new(held) })
    }

    /// Records the held amount. Usually costs two loads.
    pub(crate) fn note(self: &Arc<Self>, held: usize) {
        let most = self.most.load(Ordering::Relaxed);
        if held > most {
            self.most.fetch_max(held, Ordering::Relaxed);
        } else if most >= HELD_MIN && held <= most / 2 && !self.looks.swap(true, Ordering::AcqRel) {
            let trimmer = Arc::clone(self);
            let thread = std::thread::Builder::new().name("9p-trim".into()).spawn(move || trimmer.look());
            if let Err(error) = thread {
                self.looks.store(false, Ordering::Release);
                tracing::debug!("cannot start a thread that releases memory: {error}");
            }
        }
    }

    /// Trims the heap when the amount is stable, and once more later.
    fn look(&self) {
        let mut high_water = HighWater { most: self.most.load(Ordering::Relaxed), ..HighWater::default() };
        loop {
            std::thread::sleep(LOOK);
            if high_water.should_trim((self.held)()) {
                ferry_engine::trim_heap();
            }
            if !high_water.is_waiting() {
                break;
            }
        }
        self.most.store(high_water.most, Ordering::Relaxed);
        self.looks.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_shrink_after_removals() {
        let mut map: HashMap<u32, u32> = (0..100_000).map(|number| (number, number)).collect();
        for number in 10..100_000 {
            map.remove(&number);
            shrink(&mut map);
        }
        assert!(map.len() == 10 && map.capacity() < 4 * ROOM_MIN, "{}", map.capacity());
    }

    #[test]
    fn the_heap_is_trimmed_after_large_decreases() {
        let mut high = HighWater::default();
        let looks = [0, 900, 400, 400, 200_000, 150_000, 90_000, 50_000, 50_000, 50_000, 24_000, 24_000, 3, 3];
        let looks = looks.into_iter().chain(std::iter::repeat_n(3, 100));
        let trims: Vec<_> = looks.enumerate().filter(|(_, held)| high.should_trim(*held)).map(|(at, _)| at).collect();
        assert_eq!(trims, [8, 11, 13, 13 + 29]);
    }
}
