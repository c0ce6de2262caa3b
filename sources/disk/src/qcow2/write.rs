//! How an image is changed.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

use ferry_vfs::Errno;
use ferry_vfs::sync;

use super::image::{Image, Tables};
use super::refcounts::NewCluster;
use super::shape::{COPIED, ClusterLocation, Entry, OFFSET, damaged};

/// The offsets of the size, the L1 table's entries and offset, and the autoclear features in a header.
const HEADER_BYTES: u64 = 24;
const HEADER_L1: u64 = 36;
const HEADER_AUTOCLEAR: u64 = 88;

/// QEMU's limit of L1 entries.
const L1_ENTRIES_MAX: u64 = (32 << 20) / 8;

/// The number of zero bytes per write where no table flag can represent them.
const ZEROS_BYTES: u64 = 1 << 20;

/// A cluster that a write allocates or fills.
#[derive(Clone, Copy)]
struct Change {
    before: Entry,
    /// The offset of the cluster after the write.
    host: u64,
    /// The cluster was past the end of the file, so it is zeros.
    is_fresh: bool,
}

/// The allocations for a write of clusters.
struct Allocation {
    changes: Vec<Change>,
    spare: Vec<NewCluster>,
    are_counted: bool,
}

/// Clusters that have been written.
struct WrittenClusters {
    entries: Vec<Entry>,
    /// More than the request's data was written, so the data must be durable before the entry.
    has_more_than_data: bool,
}

/// How a range becomes zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Zeroing {
    /// Whole subclusters become zeros and are freed; the rest keeps its data.
    Discard,
    /// All of it becomes zeros; whole subclusters are freed.
    Unmap,
    /// All of it becomes zeros; its space stays allocated.
    Keep,
}

impl Image {
    /// Called before the first change.
    fn begin_change(&self) -> io::Result<()> {
        if self.changed.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut tables = sync::write(&self.tables);
        if tables.autoclear != 0 {
            // As the specification requires of programs that do not support these features (such as bitmaps).
            self.file.write_table(&[0; 8], HEADER_AUTOCLEAR)?;
            self.file.sync()?;
            tables.autoclear = 0;
        }
        self.changed.store(true, Ordering::Release);
        Ok(())
    }

    /// Writes a range of the disk.
    pub(super) fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.begin_change()?;
        let clusters = self.clusters(offset, data.len() as u64);
        if self.write_in_place(data, offset, clusters.clone())? {
            return Ok(());
        }
        let held = self.changes.take(clusters.clone());
        let Allocation { changes, spare, are_counted } = self.prepare(clusters.clone())?;
        let filled = self.fill_all(clusters.start, &changes, data, offset);
        // A cluster must be filled and counted before a table refers to it, even after a power failure.
        let filled = filled.and_then(|filled| {
            if !are_counted || filled.has_more_than_data {
                self.file.sync()?;
            }
            Ok(filled.entries)
        });
        let mut tables = sync::write(&self.tables);
        let moved = changes.iter().filter(|change| change.before.own().is_none());
        match filled {
            Ok(entries) => {
                tables.reserved.extend(spare);
                // If this fails, it is unknown which clusters a table refers to, so none is freed.
                self.store(&tables, clusters.start, &entries)?;
                moved.for_each(|change| self.unreference_place(&mut tables, change.before.place));
            }
            Err(error) => {
                let unused = moved.map(|change| change.host).chain(spare.iter().map(|cluster| cluster.offset));
                self.give_back(&mut tables, unused);
                return Err(error);
            }
        }
        drop((tables, held));
        self.flush_if_many_wait()
    }

    fn fill_all(&self, first: u64, changes: &[Change], data: &[u8], offset: u64) -> io::Result<WrittenClusters> {
        let mut filled = WrittenClusters { entries: Vec::with_capacity(changes.len()), has_more_than_data: false };
        for (cluster, change) in (first..).zip(changes) {
            let entry = self.fill(cluster, change, data, offset, &mut filled.has_more_than_data)?;
            filled.entries.push(entry);
        }
        Ok(filled)
    }

    /// Writes to allocated clusters; returns `false` if not all are.
    fn write_in_place(&self, data: &[u8], offset: u64, clusters: Range<u64>) -> io::Result<bool> {
        let tables = sync::read(&self.tables);
        let entries = self.entries(&tables, clusters.clone())?;
        let mut places: Vec<(u64, usize)> = Vec::new();
        for (cluster, entry) in clusters.zip(&entries) {
            let part = self.part(cluster, data, offset);
            let Some(host) = entry.own().filter(|_| entry.allocated & self.touched(&part) == self.touched(&part))
            else {
                return Ok(false);
            };
            self.check_is_data(&tables, host)?;
            let (place, bytes) = (host + part.start, usize::try_from(part.end - part.start).unwrap_or_default());
            match places.last_mut() {
                Some((last, count)) if *last + *count as u64 == place => *count += bytes,
                _ => places.push((place, bytes)),
            }
        }
        let mut rest = data;
        for (place, bytes) in places {
            let (now, after) = rest.split_at(bytes);
            self.file.write(now, place)?;
            rest = after;
        }
        Ok(true)
    }

    /// Returns the bytes of a cluster that data at an offset of the disk cover.
    fn part(&self, cluster: u64, data: &[u8], offset: u64) -> Range<u64> {
        let start = cluster << self.shape.cluster_bits;
        let end = (offset + data.len() as u64).min(start + self.shape.cluster_bytes());
        offset.max(start) - start..end - start
    }

    /// Returns the subclusters that bytes of a cluster touch.
    fn touched(&self, part: &Range<u64>) -> u32 {
        let unit = self.shape.subcluster_bytes();
        let (first, end) = (part.start / unit, part.end.div_ceil(unit));
        #[allow(clippy::cast_possible_truncation, reason = "there are at most 32")]
        let bits = ((1u64 << end) - (1u64 << first)) as u32;
        bits
    }

    fn check_is_data(&self, tables: &Tables, host: u64) -> io::Result<()> {
        match tables.occupied.contains(&(host >> self.shape.cluster_bits)) {
            true => Err(damaged(format!("the cluster at {host} holds a table, and data as well"))),
            false => Ok(()),
        }
    }

    /// Allocates the clusters for data.
    fn prepare(&self, clusters: Range<u64>) -> io::Result<Allocation> {
        let mut tables = sync::write(&self.tables);
        self.own_l2_tables(&mut tables, clusters.clone())?;
        let entries = self.entries(&tables, clusters)?;
        for host in entries.iter().filter_map(Entry::own) {
            self.check_is_data(&tables, host)?;
        }
        let missing = entries.iter().filter(|entry| entry.own().is_none()).count();
        let new = self.take_clusters(&mut tables, missing)?;
        let mut hosts = new.clusters.into_iter();
        let changes = entries.into_iter().map(|before| match before.own() {
            Some(host) => Ok(Change { before, host, is_fresh: false }),
            None => {
                let new = hosts.next().ok_or(Errno::IO)?;
                Ok(Change { before, host: new.offset, is_fresh: new.is_fresh })
            }
        });
        let changes = changes.collect::<io::Result<_>>()?;
        Ok(Allocation { changes, spare: new.spare, are_counted: new.are_counted })
    }

    /// Writes data to a cluster, with the rest of newly allocated subclusters; returns the new entry.
    fn fill(
        &self,
        cluster: u64,
        change: &Change,
        data: &[u8],
        offset: u64,
        has_more_than_data: &mut bool,
    ) -> io::Result<Entry> {
        let Change { before, host, is_fresh } = *change;
        let base = cluster << self.shape.cluster_bits;
        let part = self.part(cluster, data, offset);
        let touched = self.touched(&part);
        let unit = self.shape.subcluster_bytes();
        let is_moved = before.own().is_none() && before.allocated != 0;
        let is_there = |at: u64| {
            let bit = 1u32 << (at / unit);
            let is_in_place = before.own().is_some() && before.allocated & bit != 0;
            is_in_place || is_fresh && before.allocated & bit == 0 && self.has_zeros(&before, bit, base + at)
        };
        let whole = match is_moved {
            true => 0..self.shape.cluster_bytes(),
            false => {
                let start = if is_there(part.start) { part.start } else { part.start - part.start % unit };
                let end = if is_there(part.end - 1) { part.end } else { part.end.next_multiple_of(unit) };
                start..end
            }
        };
        let first = base + part.start - offset;
        let from = usize::try_from(first).unwrap_or(usize::MAX);
        let now = &data[from..][..usize::try_from(part.end - part.start).unwrap_or_default()];
        if whole == part {
            self.file.write(now, host + part.start)?;
        } else {
            *has_more_than_data = true;
            let mut bytes = vec![0; usize::try_from(whole.end - whole.start).unwrap_or_default()];
            self.read_entries(&[before], cluster, &mut bytes, base + whole.start)?;
            bytes[usize::try_from(part.start - whole.start).unwrap_or_default()..][..now.len()].copy_from_slice(now);
            self.file.write(&bytes, host + whole.start)?;
        }
        Ok(Entry {
            place: ClusterLocation::Cluster { offset: host, copied: true },
            allocated: before.allocated | touched,
            zero: before.zero & !touched,
        })
    }

    /// Returns whether an unallocated subcluster reads as zeros.
    fn has_zeros(&self, entry: &Entry, bit: u32, at: u64) -> bool {
        let unit = self.shape.subcluster_bytes();
        entry.zero & bit != 0 || self.below.as_ref().is_none_or(|below| below.bytes() <= at - at % unit)
    }

    /// Creates missing L2 tables of clusters, and copies those that a snapshot shares.
    fn own_l2_tables(&self, tables: &mut Tables, clusters: Range<u64>) -> io::Result<()> {
        let indices = clusters.start >> self.shape.l2_bits()..=(clusters.end - 1) >> self.shape.l2_bits();
        let index_of = |index: u64| usize::try_from(index).unwrap_or(usize::MAX);
        let missing: Vec<u64> = indices.filter(|index| !tables.l2_is_own(index_of(*index))).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let new = self.allocate(tables, missing.len())?;
        if let Err(error) = self.write_l2_tables(tables, &missing, &new) {
            self.give_back(tables, new.iter().copied());
            return Err(error);
        }
        for (done, (index, place)) in missing.iter().zip(&new).enumerate() {
            if let Err(error) = self.link_l2_table(tables, *index, *place) {
                // Not this one: the L1 table in the file may refer to it.
                self.give_back(tables, new[done + 1..].iter().copied());
                return Err(error);
            }
        }
        Ok(())
    }

    /// Writes L2 tables to new clusters.
    fn write_l2_tables(&self, tables: &mut Tables, indices: &[u64], new: &[u64]) -> io::Result<()> {
        let mut content = vec![0; self.shape.cluster_len()];
        for (index, place) in indices.iter().zip(new) {
            match self.l2_table(tables, index << self.shape.l2_bits())? {
                Some(old) => self.file.read_table(&mut content, old)?,
                None => content.fill(0),
            }
            self.file.write_table(&content, *place)?;
        }
        self.file.sync()
    }

    /// Links an L2 table in the L1 table.
    fn link_l2_table(&self, tables: &mut Tables, index: u64, place: u64) -> io::Result<()> {
        let slot = usize::try_from(index).unwrap_or(usize::MAX);
        let Some(entry) = tables.l1.get(slot).copied() else { return Err(Errno::INVAL.into()) };
        let linked = place | COPIED;
        self.file.write_table(&linked.to_be_bytes(), tables.l1_offset + index * 8)?;
        tables.l1[slot] = linked;
        tables.occupied.insert(place >> self.shape.cluster_bits);
        let old = (entry & OFFSET) >> self.shape.cluster_bits;
        if old != 0 {
            tables.unreference_table(old..old + 1);
        }
        Ok(())
    }

    /// Stores the entries of clusters from `first`, whose L2 tables exist.
    fn store(&self, tables: &Tables, first: u64, entries: &[Entry]) -> io::Result<()> {
        let mut at = first;
        let mut rest = entries;
        while !rest.is_empty() {
            let table = self.l2_table(tables, at)?.ok_or(Errno::IO)?;
            let index = at & ((1 << self.shape.l2_bits()) - 1);
            let room = usize::try_from((1 << self.shape.l2_bits()) - index).unwrap_or(usize::MAX);
            let (now, after) = rest.split_at(room.min(rest.len()));
            let mut bytes = Vec::new();
            now.iter().for_each(|entry| entry.encode(self.shape, &mut bytes));
            self.file.write_table(&bytes, table + index * self.shape.entry_bytes())?;
            at += now.len() as u64;
            rest = after;
        }
        Ok(())
    }

    fn unreference_place(&self, tables: &mut Tables, place: ClusterLocation) {
        let bits = self.shape.cluster_bits;
        match place {
            ClusterLocation::None => {}
            ClusterLocation::Cluster { offset, .. } => tables.unreference(offset >> bits..(offset >> bits) + 1),
            ClusterLocation::Compressed { offset, bytes } => {
                let end = (offset + bytes).div_ceil(self.shape.cluster_bytes());
                // Each of them has a reference from each compressed cluster with bytes in it.
                tables.unreference(offset >> bits..end);
            }
        }
    }

    /// Returns whether a freed cluster reads as zeros.
    pub(super) fn has_zero_clusters(&self) -> bool {
        self.shape.version >= 3 || self.below.is_none()
    }

    /// Zeroes or frees a range of the disk.
    pub(super) fn zero(&self, offset: u64, bytes: u64, how: Zeroing) -> io::Result<()> {
        self.begin_change()?;
        let end = offset + bytes;
        let unit = self.shape.subcluster_bytes();
        let by_tables = self.has_zero_clusters() && !(how == Zeroing::Keep && self.shape.version < 3);
        let first = offset.next_multiple_of(unit);
        // The disk's last subcluster may extend past the end of the disk.
        let last = if end == self.bytes { end.next_multiple_of(unit) } else { end - end % unit };
        if !by_tables || first >= last {
            return self.write_zeros(offset..end, how);
        }
        self.write_zeros(offset..first, how)?;
        if last < end {
            self.write_zeros(last..end, how)?;
        }
        let table_bytes = self.shape.cluster_bytes() << self.shape.l2_bits();
        let mut at = first;
        while at < last {
            let part_end = last.min((at / table_bytes + 1).saturating_mul(table_bytes));
            for compressed in self.zero_in_table(at..part_end, how)? {
                self.write_zeros(compressed, how)?;
            }
            self.flush_if_many_wait()?;
            at = part_end;
        }
        Ok(())
    }

    fn write_zeros(&self, mut range: Range<u64>, how: Zeroing) -> io::Result<()> {
        let zeros = vec![0; usize::try_from(ZEROS_BYTES.min(range.end - range.start)).unwrap_or_default()];
        while how != Zeroing::Discard && !range.is_empty() {
            let bytes = ZEROS_BYTES.min(range.end - range.start);
            self.write(&zeros[..usize::try_from(bytes).unwrap_or_default()], range.start)?;
            range.start += bytes;
        }
        Ok(())
    }

    /// Zeroes whole subclusters with entries in one L2 table. Returns the ranges that must be written instead, because
    /// they are part of a compressed cluster.
    fn zero_in_table(&self, range: Range<u64>, how: Zeroing) -> io::Result<Vec<Range<u64>>> {
        let clusters = self.clusters(range.start, range.end - range.start);
        let _held = self.changes.take(clusters.clone());
        let mut tables = sync::write(&self.tables);
        let mut written = Vec::new();
        if self.l2_table(&tables, clusters.start)?.is_none() && self.below.is_none() {
            return Ok(written);
        }
        self.own_l2_tables(&mut tables, clusters.clone())?;
        let mut entries = self.entries(&tables, clusters.clone())?;
        let mut unreferenced = Vec::new();
        for (cluster, entry) in clusters.clone().zip(&mut entries) {
            let base = cluster << self.shape.cluster_bits;
            let part = range.start.max(base) - base..range.end.min(base + self.shape.cluster_bytes()) - base;
            let bits = self.touched(&part);
            if entry.is_compressed() && bits != self.shape.all() {
                written.push(base + part.start..base + part.end);
                continue;
            }
            let before = *entry;
            if self.shape.version >= 3 {
                entry.zero |= bits;
            }
            entry.allocated &= !bits;
            if entry.allocated == 0 && !(how == Zeroing::Keep && before.own().is_some()) {
                entry.place = ClusterLocation::None;
                unreferenced.push(before.place);
            }
        }
        // Unchanged compressed entries cannot be encoded again.
        let mut at = clusters.start;
        for run in entries.chunk_by(|one, other| one.is_compressed() == other.is_compressed()) {
            if !run[0].is_compressed() {
                self.store(&tables, at, run)?;
            }
            at += run.len() as u64;
        }
        for place in unreferenced {
            self.unreference_place(&mut tables, place);
        }
        Ok(written)
    }

    /// Grows the disk before it is used.
    pub(super) fn grow(&mut self, bytes: u64) -> io::Result<()> {
        if bytes <= self.bytes {
            return Ok(());
        }
        if self.shape.version < 3 && self.snapshots > 0 {
            return Err(io::Error::other("an image of version 2 with snapshots cannot grow"));
        }
        self.begin_change()?;
        let entries = self.shape.l1_entries_for(bytes);
        if entries > L1_ENTRIES_MAX {
            return Err(Errno::FBIG.into());
        }
        self.grow_l1(entries)?;
        // Otherwise the new part would show the rest of the last cluster, and of a backing file larger than the disk.
        let old = self.bytes;
        let below = self.below.as_ref().map_or(0, super::image::BackingImage::bytes);
        let shown = below.max(old.next_multiple_of(self.shape.cluster_bytes())).min(bytes);
        self.bytes = bytes;
        if old < shown {
            self.zero(old, shown - old, Zeroing::Unmap)?;
        }
        self.file.sync()?;
        self.file.write_table(&bytes.to_be_bytes(), HEADER_BYTES)?;
        self.flush()?;
        // This process may only open the image for another one to serve, so no further change is due.
        *self.changed.get_mut() = false;
        Ok(())
    }

    fn grow_l1(&self, entries: u64) -> io::Result<()> {
        let mut tables = sync::write(&self.tables);
        let old_entries = tables.l1.len() as u64;
        if entries <= old_entries {
            return Ok(());
        }
        let clusters = (entries * 8).div_ceil(self.shape.cluster_bytes());
        let first = self.allocate_run(&mut tables, clusters)?;
        let offset = first << self.shape.cluster_bits;
        let mut words = tables.l1.clone();
        words.resize(usize::try_from(entries).map_err(|_| Errno::FBIG)?, 0);
        let mut content: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        content.resize(content.len().next_multiple_of(self.shape.cluster_len()), 0);
        self.file.write_table(&content, offset)?;
        self.file.sync()?;
        let count = u32::try_from(entries).map_err(|_| Errno::FBIG)?;
        self.file.write_table(&[&count.to_be_bytes()[..], &offset.to_be_bytes()].concat(), HEADER_L1)?;
        let old = tables.l1_offset >> self.shape.cluster_bits;
        tables.l1 = words;
        tables.l1_offset = offset;
        if old_entries > 0 {
            tables.unreference_table(old..old + (old_entries * 8).div_ceil(self.shape.cluster_bytes()));
        }
        tables.occupy_range(self.shape, offset, entries * 8);
        Ok(())
    }
}
