//! The room of what has gone: given back, so that a server takes no more than its clients need now.

use std::collections::HashMap;
use std::hash::Hash;

/// Entries of a map whose room is never given back: no more than a few pages.
const ROOM_MIN: usize = 1024;
/// So much has to have gone, in things held, before the heap is looked at: a few hundred KiB.
const HELD_MIN: usize = 1024;

/// Gives back the room of a map of which most has gone. Each entry that goes pays for a part of that.
pub(crate) fn shrink<K: Eq + Hash, V>(map: &mut HashMap<K, V>) {
    if map.capacity() > ROOM_MIN && map.len() < map.capacity() / 4 {
        map.shrink_to((map.len() * 2).max(ROOM_MIN));
    }
}

/// How many looks later the heap is trimmed once more: threads that have nothing to do any more end after a while, and their buffers with them.
const LATER_LOOKS: u32 = 30;

/// Tells when the heap is worth trimming.
#[derive(Debug, Default)]
pub(crate) struct HighWater {
    most: usize,
    last: usize,
    /// Looks until the heap is trimmed once more; 0 if it is not to be.
    later: u32,
}

impl HighWater {
    /// Notes how much is held now; returns whether half of the most has gone since that was, and nothing goes at the moment. Once more
    /// [`LATER_LOOKS`] later.
    pub(crate) fn has_sunk(&mut self, held: usize) -> bool {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_give_back_the_room_of_what_has_gone() {
        let mut map: HashMap<u32, u32> = (0..100_000).map(|number| (number, number)).collect();
        for number in 10..100_000 {
            map.remove(&number);
            shrink(&mut map);
        }
        assert!(map.len() == 10 && map.capacity() < 4 * ROOM_MIN, "{}", map.capacity());
    }

    #[test]
    fn the_heap_is_trimmed_when_half_has_gone_and_the_rest_stays_and_once_more_later() {
        let mut high = HighWater::default();
        let looks = [0, 900, 400, 400, 200_000, 150_000, 90_000, 50_000, 50_000, 50_000, 24_000, 24_000, 3, 3];
        let looks = looks.into_iter().chain(std::iter::repeat_n(3, 100));
        let trims: Vec<_> = looks.enumerate().filter(|(_, held)| high.has_sunk(*held)).map(|(at, _)| at).collect();
        assert_eq!(trims, [8, 11, 13, 13 + 29]);
    }
}
