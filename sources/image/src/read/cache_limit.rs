//! Limits the cache of incomplete packs to the objects that were used last.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use ferry_vfs::sync::lock;

/// Index of the image's pack, and of the object in it.
pub(crate) type Key = (usize, usize);

/// The cached objects, and their readers.
#[derive(Debug)]
pub(crate) struct CacheLimit {
    bytes_max: u64,
    kept: Mutex<CacheState>,
}

#[derive(Debug, Default)]
struct CacheState {
    bytes: u64,
    tick: u64,
    /// By the time of the last use.
    by_use: BTreeMap<u64, Key>,
    objects: HashMap<Key, (u64, u64)>,
    /// The number of readers that hold an object.
    holds: HashMap<Key, usize>,
}

impl CacheState {
    fn touch(&mut self, key: Key) {
        self.tick += 1;
        if let Some((tick, _)) = self.objects.get_mut(&key) {
            self.by_use.remove(tick);
            *tick = self.tick;
            self.by_use.insert(self.tick, key);
        }
    }
}

impl CacheLimit {
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, kept: Mutex::default() }
    }

    /// Returns whether this many more bytes evict nothing.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        lock(&self.kept).bytes.saturating_add(bytes) <= self.bytes_max
    }

    /// Counts an object, and calls `then` before the object can be evicted.
    pub(crate) fn keep(&self, key: Key, bytes: u64, then: impl FnOnce()) {
        let mut kept = lock(&self.kept);
        if kept.objects.insert(key, (0, bytes)).is_some_and(|(tick, _)| kept.by_use.remove(&tick).is_some()) {
            kept.bytes -= bytes;
        }
        kept.bytes += bytes;
        kept.touch(key);
        then();
    }

    /// Evicts the least recently used objects by `forget`, until the rest fits. Objects that are held stay.
    pub(crate) fn shrink(&self, mut forget: impl FnMut(Key)) {
        let mut kept = lock(&self.kept);
        while kept.bytes > self.bytes_max {
            let oldest = kept.by_use.iter().find(|(_, key)| !kept.holds.contains_key(key));
            let Some((tick, key)) = oldest.map(|(tick, key)| (*tick, *key)) else { return };
            kept.by_use.remove(&tick);
            if let Some((_, bytes)) = kept.objects.remove(&key) {
                kept.bytes -= bytes;
            }
            forget(key);
        }
    }

    /// Protects an object from eviction while the guard exists.
    pub(crate) fn hold(&self, key: Key) -> Hold<'_> {
        let mut kept = lock(&self.kept);
        *kept.holds.entry(key).or_default() += 1;
        kept.touch(key);
        Hold { limit: self, key }
    }
}

/// See [`CacheLimit::hold`].
#[derive(Debug)]
pub(crate) struct Hold<'a> {
    limit: &'a CacheLimit,
    key: Key,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let mut kept = lock(&self.limit.kept);
        if let Some(count) = kept.holds.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                kept.holds.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shrunk(limit: &CacheLimit) -> Vec<usize> {
        let mut gone = Vec::new();
        limit.shrink(|(_, object)| gone.push(object));
        gone
    }

    #[test]
    fn the_least_recently_used_object_is_evicted_unless_held() {
        let limit = CacheLimit::new(30);
        (0..3).for_each(|object| limit.keep((0, object), 10, || {}));
        assert_eq!(shrunk(&limit), [0_usize; 0]);
        assert!(!limit.has_room(1) && limit.has_room(0));
        drop(limit.hold((0, 0)));
        limit.keep((0, 3), 10, || {});
        assert_eq!(shrunk(&limit), [1]);
        let hold = limit.hold((0, 2));
        limit.keep((0, 4), 20, || {});
        assert_eq!(shrunk(&limit), [0, 3]);
        // CacheState twice is counted once.
        limit.keep((0, 4), 20, || {});
        assert_eq!(shrunk(&limit), [0_usize; 0]);
        limit.keep((0, 5), 30, || {});
        assert_eq!(shrunk(&limit), [4, 5], "what is too large stays only while it is held");
        drop(hold);
        limit.keep((0, 6), 30, || {});
        assert_eq!(shrunk(&limit), [2]);
    }
}
