//! The log of a split ring (`QueueRegionSplit`).

use std::sync::atomic::Ordering;

use super::{LogError, MIGRATED, Region};

/// Offsets in the header.
const LAST_BATCH_HEAD_AT: usize = 12;
const USED_INDEX_AT: usize = 14;
/// The offset and length of the entries, and offsets in an entry (`DescStateSplit`).
const ENTRIES_BEGIN: usize = 16;
const ENTRY_BYTES: usize = 16;
const IN_FLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// Every store releases, so that another process sees a prefix of the stores.
const IN_ORDER: Ordering = Ordering::Release;

/// Records the chains in flight, by their head descriptors.
#[derive(Debug)]
pub(crate) struct SplitLog {
    region: Region,
    /// Numbers the chains in the order in which they were taken.
    counter: u64,
    /// Heads that were used since the used index was last published.
    batch: Vec<u16>,
}

impl SplitLog {
    /// Records chains of a guest that migrates here. Where its ring is, is not known before the queue starts.
    pub(crate) fn record_migrated(region: Region, heads: &[u16]) {
        region.reset();
        let mut log = Self { region, counter: 0, batch: Vec::new() };
        log.clear(0);
        let entries = log.region.entries;
        heads.iter().filter(|head| **head < entries).for_each(|head| log.take(*head));
        log.region.set_version(MIGRATED);
    }

    /// Opens the log of a queue with this used index. Returns the heads in flight in the order in which they were
    /// taken; `None` if the log is new or of another ring. `taken`: their number according to the front end, which only
    /// counts for a guest that has migrated.
    pub(crate) fn open(
        region: Region,
        size: u16,
        (used_index, taken): (u16, u16),
    ) -> Result<(Self, Option<Vec<u16>>), LogError> {
        let mut is_valid = region.is_valid(size)?;
        let is_migrated = region.is_migrated();
        let mut log = Self { region, counter: 0, batch: Vec::new() };
        if is_migrated {
            // A front end that has lost a server begins at the used index. A new ring begins at 0.
            let heads = (0..log.region.entries).filter(|head| log.is_in_flight(*head)).count();
            is_valid = heads == usize::from(taken) || taken == 0 && used_index != 0;
            log.store(USED_INDEX_AT, used_index);
        }
        // A new ring's index is far from that of the old one.
        let last_batch = used_index.wrapping_sub(log.load(USED_INDEX_AT));
        if !is_valid || last_batch > size {
            if is_valid || is_migrated {
                tracing::warn!("discarding the in-flight log of an earlier ring");
            }
            log.clear(used_index);
            log.region.set_valid();
            return Ok((log, None));
        }
        log.end_last_batch(last_batch, used_index)?;
        let mut found: Vec<(u64, u16)> = Vec::new();
        for head in (0..log.region.entries).filter(|head| log.is_in_flight(*head)) {
            found.push((log.region.cells.load_u64(log.entry(head) + COUNTER, Ordering::Relaxed), head));
        }
        found.sort_unstable();
        if found.len() > usize::from(size) || found.iter().any(|(_, head)| *head >= size) {
            return Err(LogError::Nonsense("more chains are in flight than the queue has entries"));
        }
        log.region.set_valid();
        log.counter = found.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok((log, Some(found.into_iter().map(|(_, head)| head).collect())))
    }

    fn clear(&mut self, used_index: u16) {
        for head in 0..self.region.entries {
            self.set_in_flight(head, false);
        }
        self.store(LAST_BATCH_HEAD_AT, 0);
        self.store(USED_INDEX_AT, used_index);
    }

    /// Finishes the last batch: it was published, but its entries may still be marked as in flight.
    fn end_last_batch(&mut self, chains: u16, used_index: u16) -> Result<(), LogError> {
        let mut head = self.load(LAST_BATCH_HEAD_AT);
        for _ in 0..chains {
            if head >= self.region.entries {
                return Err(LogError::Nonsense("the last batch leads nowhere"));
            }
            self.set_in_flight(head, false);
            head = self.load(self.entry(head) + NEXT);
        }
        self.store(USED_INDEX_AT, used_index);
        Ok(())
    }

    /// Records a chain that the device has taken.
    #[inline]
    pub(crate) fn take(&mut self, head: u16) {
        self.region.cells.store_u64(self.entry(head) + COUNTER, self.counter, IN_ORDER);
        self.counter = self.counter.wrapping_add(1);
        self.set_in_flight(head, true);
    }

    /// Records a chain that is in the used ring and not published yet.
    #[inline]
    pub(crate) fn add_used(&mut self, head: u16) {
        self.store(self.entry(head) + NEXT, self.load(LAST_BATCH_HEAD_AT));
        self.store(LAST_BATCH_HEAD_AT, head);
        self.batch.push(head);
    }

    /// Records that the used index was published.
    #[inline]
    pub(crate) fn end_publish(&mut self, used_index: u16) {
        for index in 0..self.batch.len() {
            self.set_in_flight(self.batch[index], false);
        }
        self.batch.clear();
        self.store(USED_INDEX_AT, used_index);
    }

    fn entry(&self, head: u16) -> usize {
        ENTRIES_BEGIN + ENTRY_BYTES * usize::from(head)
    }

    fn is_in_flight(&self, head: u16) -> bool {
        self.region.cells.load_u8(self.entry(head) + IN_FLIGHT, Ordering::Relaxed) == 1
    }

    fn set_in_flight(&mut self, head: u16, value: bool) {
        self.region.cells.store_u8(self.entry(head) + IN_FLIGHT, u8::from(value), IN_ORDER);
    }

    fn load(&self, offset: usize) -> u16 {
        self.region.cells.load_u16(offset, Ordering::Relaxed)
    }

    fn store(&mut self, offset: usize, value: u16) {
        self.region.cells.store_u16(offset, value, IN_ORDER);
    }
}
