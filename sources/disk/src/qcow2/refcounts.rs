//! Reference counts of the clusters of the file.
//!
//! A power failure may keep any of the writes since the last `fdatasync`, and lose the others. So the count of a
//! cluster is durable before a table refers to the cluster, and a cluster is freed only when the removal of its last
//! reference is durable. A failure in between leaves counted but unused clusters, which is harmless.

use std::io;
use std::ops::Range;

use ferry_vfs::{Errno, sync};

use super::header::REFCOUNT_TABLE_BYTES_MAX;
use super::image::{Image, Tables};
use super::shape::{OFFSET, damaged};

/// Counts are read in pieces of at most 2^12 bytes.
const PIECE_BITS: u32 = 12;

/// The offset of the refcount table's location in a header: offset, then clusters.
const HEADER_REFCOUNT_TABLE: u64 = 48;

/// The number of ranges waiting to be freed at which the image is flushed.
const UNREFERENCED_MAX: usize = 1024;

/// The maximum number of reserved bytes. A killed server leaves them counted and unused.
const RESERVED_BYTES_MAX: u64 = 16 << 20;

/// A cluster without a reference from a table yet.
#[derive(Clone, Copy)]
pub(super) struct NewCluster {
    pub offset: u64,
    /// It was past the end of the file when it was allocated, so it is zeros.
    pub is_fresh: bool,
}

/// Clusters for a request.
pub(super) struct NewClusters {
    pub clusters: Vec<NewCluster>,
    /// Clusters to reserve once they are durably counted.
    pub spare: Vec<NewCluster>,
    /// Whether all of `clusters` are durably counted.
    pub are_counted: bool,
}

/// Counts of 1 to 64 bits in a part of a refcount block.
struct Counts {
    bytes: Vec<u8>,
    order: u32,
}

impl Counts {
    fn get(&self, index: usize) -> u64 {
        match self.order.checked_sub(3) {
            Some(order) => {
                let bytes = &self.bytes[index << order..(index + 1) << order];
                bytes.iter().fold(0, |count, byte| count << 8 | u64::from(*byte))
            }
            None => {
                let bit = index << self.order;
                u64::from(self.bytes[bit / 8] >> (bit % 8)) & ((1 << (1 << self.order)) - 1)
            }
        }
    }

    fn set(&mut self, index: usize, count: u64) {
        match self.order.checked_sub(3) {
            Some(order) => {
                let bytes = &mut self.bytes[index << order..(index + 1) << order];
                let skip = 8 - bytes.len();
                bytes.copy_from_slice(&count.to_be_bytes()[skip..]);
            }
            None => {
                let bit = index << self.order;
                let mask: u8 = ((1u16 << (1 << self.order)) - 1).to_le_bytes()[0];
                let byte = &mut self.bytes[bit / 8];
                *byte = *byte & !(mask << (bit % 8)) | (count.to_le_bytes()[0] & mask) << (bit % 8);
            }
        }
    }
}

impl Tables {
    /// Records that clusters no longer hold a table and have no reference.
    pub(super) fn unreference_table(&mut self, clusters: Range<u64>) {
        for cluster in clusters.clone() {
            self.occupied.remove(&cluster);
        }
        self.unreference(clusters);
    }

    /// Records that clusters have no reference. The next flush frees them.
    pub(super) fn unreference(&mut self, clusters: Range<u64>) {
        match self.unreferenced.last_mut() {
            Some(last) if last.end == clusters.start => last.end = clusters.end,
            _ => self.unreferenced.push(clusters),
        }
    }
}

impl Image {
    /// Allocates clusters, for data or L2 tables; returns their offsets.
    pub(super) fn allocate(&self, tables: &mut Tables, count: usize) -> io::Result<Vec<u64>> {
        let mut found = Vec::with_capacity(count);
        while found.len() < count {
            if let Err(error) = self.allocate_in_piece(tables, count, &mut found) {
                self.give_back(tables, found);
                return Err(error);
            }
        }
        Ok(found)
    }

    /// Takes reserved clusters for data, or allocates them and more to reserve: twice as many each time, until a flush.
    pub(super) fn take_clusters(&self, tables: &mut Tables, count: usize) -> io::Result<NewClusters> {
        let reserved = tables.reserved.len().min(count);
        let mut clusters: Vec<NewCluster> = tables.reserved.drain(..reserved).collect();
        let missing = count - reserved;
        if missing == 0 {
            return Ok(NewClusters { clusters, spare: Vec::new(), are_counted: true });
        }
        let file_bytes = self.file.bytes()?;
        let most = usize::try_from(RESERVED_BYTES_MAX >> self.shape.cluster_bits).unwrap_or(usize::MAX);
        let extra = tables.reserve.min(most);
        // If there is no room to reserve more, there may be enough for the request.
        let offsets = match self.allocate(tables, missing + extra) {
            Err(_) if extra > 0 => self.allocate(tables, missing),
            outcome => outcome,
        };
        let offsets = match offsets {
            Ok(offsets) => offsets,
            Err(error) => {
                tables.reserved.extend(clusters);
                return Err(error);
            }
        };
        tables.reserve = (2 * extra).max(1);
        clusters.extend(offsets.iter().map(|offset| NewCluster { offset: *offset, is_fresh: *offset >= file_bytes }));
        let spare = clusters.split_off(count);
        Ok(NewClusters { clusters, spare, are_counted: false })
    }

    /// Returns clusters without references to the free ones.
    pub(super) fn give_back(&self, tables: &mut Tables, offsets: impl IntoIterator<Item = u64>) {
        for offset in offsets {
            let cluster = offset >> self.shape.cluster_bits;
            tables.unreference(cluster..cluster + 1);
        }
    }

    /// Allocates free clusters of one part of a refcount block.
    fn allocate_in_piece(&self, tables: &mut Tables, count: usize, found: &mut Vec<u64>) -> io::Result<()> {
        let order = self.shape.refcount_order;
        let piece_bits = PIECE_BITS.min(self.shape.cluster_bits) + 3 - order;
        let first = tables.first_free >> piece_bits << piece_bits;
        let block = self.block(tables, first >> self.shape.refcount_bits())?;
        let in_block = first & ((1 << self.shape.refcount_bits()) - 1);
        let place = block + (in_block << order >> 3);
        let mut counts = Counts { bytes: vec![0; 1 << (piece_bits + order - 3)], order };
        self.file.read_table(&mut counts.bytes, place)?;
        let mut cluster = tables.first_free;
        let end = first + (1 << piece_bits);
        let before = found.len();
        while cluster < end && found.len() < count {
            let index = usize::try_from(cluster - first).unwrap_or(usize::MAX);
            if counts.get(index) == 0 {
                if tables.occupied.contains(&cluster) {
                    return Err(damaged(format!("cluster {cluster} holds a table, but is counted as free")));
                }
                counts.set(index, 1);
                found.push(cluster << self.shape.cluster_bits);
            }
            cluster += 1;
        }
        if found.len() > before
            && let Err(error) = self.file.write_table(&counts.bytes, place)
        {
            found.truncate(before);
            return Err(error);
        }
        tables.first_free = cluster;
        Ok(())
    }

    /// Returns the offset of a refcount block; creates it if necessary.
    fn block(&self, tables: &mut Tables, index: u64) -> io::Result<u64> {
        let slot = usize::try_from(index).unwrap_or(usize::MAX);
        if slot >= tables.refcounts.len() {
            self.grow_refcount_table(tables, slot.saturating_add(1))?;
        }
        match tables.refcounts.get(slot) {
            Some(0) => self.append_blocks(tables, slot, 0).map(|()| tables.refcounts[slot]),
            Some(offset) => Ok(*offset),
            None => Err(Errno::FBIG.into()),
        }
    }

    /// Returns the number of blocks that count some clusters and those blocks.
    fn blocks_for(&self, clusters: u64) -> u64 {
        let per_block = 1u64 << self.shape.refcount_bits();
        clusters.div_ceil(per_block - 1).max(1)
    }

    /// Creates the refcount block of a slot, and following ones as far as needed. They are among the clusters that they
    /// count, after `clusters` clusters, which are allocated as well.
    fn append_blocks(&self, tables: &mut Tables, slot: usize, clusters: u64) -> io::Result<()> {
        let blocks = self.write_blocks(tables, slot, clusters)?;
        // The table's entries must not become durable before the blocks that they refer to.
        self.file.sync()?;
        let words: Vec<u8> = blocks.iter().flat_map(|offset| offset.to_be_bytes()).collect();
        self.file.write_table(&words, tables.refcounts_offset + slot as u64 * 8)?;
        tables.refcounts[slot..slot + blocks.len()].copy_from_slice(&blocks);
        self.occupy_blocks(tables, &blocks);
        Ok(())
    }

    /// Writes the blocks for [`Self::append_blocks`]; returns their offset.
    fn write_blocks(&self, tables: &Tables, slot: usize, clusters: u64) -> io::Result<Vec<u64>> {
        let first = (slot as u64) << self.shape.refcount_bits();
        let count = self.blocks_for(clusters);
        let end = (first + clusters + count).checked_mul(self.shape.cluster_bytes());
        if end.is_none_or(|end| end > OFFSET) {
            return Err(Errno::FBIG.into());
        }
        if (first..first + clusters + count).any(|cluster| tables.occupied.contains(&cluster)) {
            return Err(damaged(format!("no refcount block counts cluster {first}, but it holds a table")));
        }
        let bytes = usize::try_from(count << self.shape.cluster_bits).map_err(|_| Errno::FBIG)?;
        let mut counts = Counts { bytes: vec![0; bytes], order: self.shape.refcount_order };
        for index in 0..usize::try_from(clusters + count).map_err(|_| Errno::FBIG)? {
            counts.set(index, 1);
        }
        let blocks = first + clusters..first + clusters + count;
        self.file.write_table(&counts.bytes, blocks.start << self.shape.cluster_bits)?;
        Ok(blocks.map(|cluster| cluster << self.shape.cluster_bits).collect())
    }

    /// Notes the clusters of new refcount blocks. Until the table names them, a failure leaves them free.
    fn occupy_blocks(&self, tables: &mut Tables, blocks: &[u64]) {
        tables.occupied.extend(blocks.iter().map(|offset| offset >> self.shape.cluster_bits));
    }

    /// Returns the first slot of the refcount table after the last block.
    fn unused_slot(tables: &Tables) -> usize {
        tables.refcounts.iter().rposition(|offset| *offset != 0).map_or(0, |slot| slot + 1)
    }

    /// Moves the refcount table to a larger area, followed by the blocks that count it.
    fn grow_refcount_table(&self, tables: &mut Tables, entries_min: usize) -> io::Result<()> {
        let slot = Self::unused_slot(tables);
        let mut entries = entries_min.max(tables.refcounts.len() * 2) as u64;
        // Entries for the blocks that count the table itself.
        entries += self.blocks_for((entries * 8) >> self.shape.cluster_bits) + 1;
        let bytes = (entries * 8).next_multiple_of(self.shape.cluster_bytes());
        if bytes > REFCOUNT_TABLE_BYTES_MAX {
            return Err(Errno::FBIG.into());
        }
        let clusters = bytes >> self.shape.cluster_bits;
        let blocks = self.write_blocks(tables, slot, clusters)?;
        let mut words = tables.refcounts.clone();
        words.resize(usize::try_from(bytes / 8).map_err(|_| Errno::FBIG)?, 0);
        words[slot..slot + blocks.len()].copy_from_slice(&blocks);
        let offset = ((slot as u64) << self.shape.refcount_bits()) << self.shape.cluster_bits;
        let content: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        self.file.write_table(&content, offset)?;
        self.file.sync()?;
        let count = u32::try_from(clusters).map_err(|_| Errno::FBIG)?;
        let header = [&offset.to_be_bytes()[..], &count.to_be_bytes()].concat();
        self.file.write_table(&header, HEADER_REFCOUNT_TABLE)?;
        let old = tables.refcounts_offset >> self.shape.cluster_bits;
        let old_clusters = tables.refcounts.len() as u64 * 8 / self.shape.cluster_bytes();
        tables.refcounts = words;
        tables.refcounts_offset = offset;
        tables.occupy_range(self.shape, offset, bytes);
        self.occupy_blocks(tables, &blocks);
        tables.unreference_table(old..old + old_clusters);
        Ok(())
    }

    /// Allocates contiguous clusters; returns the first one.
    pub(super) fn allocate_run(&self, tables: &mut Tables, count: u64) -> io::Result<u64> {
        let found = self.allocate(tables, usize::try_from(count).map_err(|_| Errno::FBIG)?)?;
        let bytes = self.shape.cluster_bytes();
        if found.windows(2).all(|pair| pair[1] == pair[0] + bytes) {
            return Ok(found.first().copied().unwrap_or_default() >> self.shape.cluster_bits);
        }
        self.give_back(tables, found);
        let blocks = usize::try_from(self.blocks_for(count)).map_err(|_| Errno::FBIG)?;
        if Self::unused_slot(tables) + blocks > tables.refcounts.len() {
            let wanted = Self::unused_slot(tables) + 2 * blocks;
            self.grow_refcount_table(tables, wanted)?;
        }
        let slot = Self::unused_slot(tables);
        if slot + blocks > tables.refcounts.len() {
            return Err(Errno::FBIG.into());
        }
        self.append_blocks(tables, slot, count)?;
        Ok((slot as u64) << self.shape.refcount_bits())
    }

    /// Makes earlier writes durable, and then frees the clusters without a reference.
    pub(super) fn flush(&self) -> io::Result<()> {
        let unreferenced = self.take_unreferenced();
        self.file.sync()?;
        if unreferenced.is_empty() {
            return Ok(());
        }
        let mut tables = sync::write(&self.tables);
        let mut outcome = Ok(());
        for range in unreferenced {
            let mut free = range.start..range.start;
            for cluster in range {
                let released = self.release(&mut tables, cluster);
                if !matches!(released, Ok(true)) {
                    self.punch(free.clone());
                    free.start = cluster + 1;
                }
                free.end = cluster + 1;
                outcome = outcome.and(released.map(drop));
            }
            self.punch(free);
        }
        outcome
    }

    /// Takes the clusters without a reference, and the reserved ones.
    fn take_unreferenced(&self) -> Vec<Range<u64>> {
        let tables = sync::read(&self.tables);
        if tables.unreferenced.is_empty() && tables.reserved.is_empty() {
            return Vec::new();
        }
        drop(tables);
        let mut tables = sync::write(&self.tables);
        let reserved = std::mem::take(&mut tables.reserved);
        self.give_back(&mut tables, reserved.into_iter().map(|cluster| cluster.offset));
        tables.reserve = 0;
        std::mem::take(&mut tables.unreferenced)
    }

    /// [Flushes](Self::flush) if many clusters wait to be freed.
    pub(super) fn flush_if_many_wait(&self) -> io::Result<()> {
        let waiting = sync::read(&self.tables).unreferenced.len();
        if waiting > UNREFERENCED_MAX { self.flush() } else { Ok(()) }
    }

    fn punch(&self, clusters: Range<u64>) {
        if !clusters.is_empty() {
            let bits = self.shape.cluster_bits;
            self.file.punch(clusters.start << bits, (clusters.end - clusters.start) << bits);
        }
    }

    /// Removes a reference to a cluster; returns whether it was the last one.
    fn release(&self, tables: &mut Tables, cluster: u64) -> io::Result<bool> {
        let (order, bits) = (self.shape.refcount_order, self.shape.refcount_bits());
        let slot = usize::try_from(cluster >> bits).unwrap_or(usize::MAX);
        let block = tables.refcounts.get(slot).copied().filter(|offset| *offset != 0);
        let block = block.ok_or_else(|| damaged(format!("cluster {cluster} is used, but no block counts it")))?;
        let in_block = cluster & ((1 << bits) - 1);
        let bytes = 1usize << order.saturating_sub(3);
        let place = block + (in_block << order >> 3);
        let mut counts = Counts { bytes: vec![0; bytes], order };
        self.file.read_table(&mut counts.bytes, place)?;
        // Counts of less than a byte share the byte that was read.
        let index = if order < 3 { usize::try_from(in_block).unwrap_or_default() % (8 >> order) } else { 0 };
        let count = counts.get(index);
        if count == 0 || tables.occupied.contains(&cluster) {
            return Err(damaged(format!("cluster {cluster} is used twice, or counted as free")));
        }
        counts.set(index, count - 1);
        self.file.write_table(&counts.bytes, place)?;
        if count == 1 {
            tables.first_free = tables.first_free.min(cluster);
        }
        Ok(count == 1)
    }
}
