//! Loads superblock, records and files from an image. The bytes are untrusted.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::collections::btree_map::IntoIter;

use ferry_vfs::Ino;

use super::codec::{CodecError, Item, Map, for_each};
use super::error::{DamageError, OnDamage};
use super::extents::Extents;
use super::format::{BLOCK, BLOCK_BYTES, FormatError, RECORD_HEAD_BYTES, Superblock, record_length, take_record};
use super::medium::Medium;

/// The read size for the log in bytes. Disks are not faster with more, and a small buffer keeps the memory of a mount
/// independent of the log's length.
const PIECE_BYTES: usize = 256 << 10;

/// The two copies of the superblock.
#[derive(Debug)]
pub(crate) struct SuperblockCopies(pub(crate) [Result<Superblock, FormatError>; 2]);

impl SuperblockCopies {
    /// Reads both.
    pub(crate) fn read(medium: &dyn Medium) -> Self {
        Self([0, BLOCK_BYTES].map(|at| {
            let mut block = [0; BLOCK];
            medium.read(at, &mut block).map_err(|error| FormatError::Unreadable(error.to_string()))?;
            Superblock::decode(&block)
        }))
    }

    /// The one that counts.
    pub(crate) fn best(&self) -> Option<&Superblock> {
        self.0.iter().flatten().max_by_key(|copy| copy.generation)
    }
}

/// The records of a log area, in order, up to the first invalid one.
struct Records<'a> {
    medium: &'a dyn Medium,
    superblock: Superblock,
    /// The part of the area that was read last.
    window: Vec<u8>,
    /// The offset of the window in the area.
    before: u64,
    /// The offset of the next record in the window.
    at: usize,
    /// The index of the next record.
    index: u64,
}

impl<'a> Records<'a> {
    fn new(medium: &'a dyn Medium, superblock: Superblock) -> Self {
        Self { medium, superblock, window: Vec::new(), before: 0, at: 0, index: 0 }
    }

    /// Returns the payload of the next record; `None` at the end of the log.
    fn next(&mut self) -> Result<Option<&[u8]>, DamageError> {
        let sequence = self.superblock.sequence(self.index);
        self.fill(RECORD_HEAD_BYTES)?;
        let Some(bytes) = record_length(self.rest(), sequence) else { return Ok(None) };
        self.fill(bytes)?;
        let rest = self.window.get(self.at..).unwrap_or_default();
        let Some((payload, bytes)) = take_record(rest, self.superblock.salt, sequence) else { return Ok(None) };
        self.at += bytes;
        self.index += 1;
        Ok(Some(payload))
    }

    /// Returns the length of the records so far, in bytes.
    fn bytes(&self) -> u64 {
        self.before + self.at as u64
    }

    fn rest(&self) -> &[u8] {
        self.window.get(self.at..).unwrap_or_default()
    }

    /// Reads until the window has this many bytes from the next record, or the rest of the area.
    fn fill(&mut self, bytes: usize) -> Result<(), DamageError> {
        let missing = bytes.saturating_sub(self.rest().len());
        if missing == 0 {
            return Ok(());
        }
        self.before = self.bytes();
        self.window.drain(..self.at.min(self.window.len()));
        self.at = 0;
        let (layout, read) = (self.superblock.layout, self.before + self.window.len() as u64);
        let unread = usize::try_from(layout.log_bytes().saturating_sub(read)).unwrap_or(usize::MAX);
        let start = self.window.len();
        self.window.resize(start + missing.max(PIECE_BYTES).min(unread), 0);
        let offset = layout.log_offset(self.superblock.generation) + read;
        let outcome = self.medium.read(offset, &mut self.window[start..]);
        outcome.map_err(|error| DamageError::Read(error.to_string()))
    }
}

/// A log as found. Its records are read from the medium on every iteration.
pub(crate) struct LoadedImage<'a> {
    medium: &'a dyn Medium,
    superblock: Superblock,
    records: u64,
    /// The length of the records in bytes.
    pub(crate) bytes: u64,
}

impl<'a> LoadedImage<'a> {
    /// Finds the active log. If its snapshot is damaged, and `on_damage` continues, falls back to the previous log if
    /// that is intact. Also returns the superblock to continue from.
    pub(crate) fn find(
        medium: &'a dyn Medium,
        superblock: &Superblock,
        on_damage: &mut OnDamage<'_>,
    ) -> Result<(Self, Superblock), DamageError> {
        let latest = Self::find_end(medium, *superblock)?;
        let (found, expected) = (latest.len(), superblock.snapshot_records);
        if found >= expected {
            return Ok((latest, *superblock));
        }
        on_damage(DamageError::Snapshot { found, expected })?;
        if let Some(previous) = superblock.previous() {
            let older = Self::find_end(medium, previous)?;
            if older.len() >= previous.snapshot_records {
                on_damage(DamageError::Older { records: older.len() })?;
                // The next snapshot overwrites the damaged one; the older one stays until it is complete.
                return Ok((older, Superblock { generation: superblock.generation + 1, ..*superblock }));
            }
        }
        Ok((latest, *superblock))
    }

    /// Reads the log of a superblock up to the first invalid record.
    fn find_end(medium: &'a dyn Medium, superblock: Superblock) -> Result<Self, DamageError> {
        let mut records = Records::new(medium, superblock);
        while records.next()?.is_some() {}
        Ok(Self { medium, superblock, records: records.index, bytes: records.bytes() })
    }

    /// Records in all.
    pub(crate) fn len(&self) -> u64 {
        self.records
    }

    /// Calls `each` with every item of every record, in order. An invalid item is damage; its record's rest is skipped.
    pub(crate) fn for_each(
        &self,
        on_damage: &mut OnDamage<'_>,
        mut each: impl FnMut(&mut OnDamage<'_>, u64, &Item<'_>) -> Result<(), DamageError>,
    ) -> Result<(), DamageError> {
        let mut records = Records::new(self.medium, self.superblock);
        for index in 0..self.records {
            let payload = records.next()?;
            let payload = payload.ok_or_else(|| DamageError::Read(format!("record {index} of the log changed")))?;
            let mut failed = None;
            let parsed = for_each(payload, |item| {
                each(on_damage, index, item).map_err(|error| {
                    failed = Some(error);
                    CodecError::Short
                })
            });
            if let Err(reason) = parsed {
                failed.map_or_else(|| on_damage(DamageError::Record { index, reason }), Err)?;
            }
        }
        Ok(())
    }
}

/// Size and blocks of the files, ordered by inode: files created in sequence have their blocks in sequence.
#[derive(Debug, Default)]
pub(crate) struct Files(BTreeMap<Ino, (u64, Extents)>);

impl Files {
    /// Applies a map of record `index` to an existing file.
    pub(crate) fn apply(&mut self, index: u64, map: &Map) -> Result<(), DamageError> {
        if !is_possible(map) {
            return Err(DamageError::Record { index, reason: CodecError::Value { field: "piece" } });
        }
        let (size, extents) = self.0.entry(map.ino).or_default();
        extents.remove(map.from..map.to);
        map.pieces.iter().for_each(|piece| extents.insert(*piece));
        *size = map.size;
        Ok(())
    }

    /// Forgets a file that ended.
    pub(crate) fn remove(&mut self, ino: Ino) {
        self.0.remove(&ino);
    }
}

impl IntoIterator for Files {
    type Item = (Ino, (u64, Extents));
    type IntoIter = IntoIter<Ino, (u64, Extents)>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// The limit of logical blocks of a file.
const LOGICAL_END: u64 = 1 << 51;

fn is_possible(map: &Map) -> bool {
    map.pieces.iter().all(|piece| piece.end() <= LOGICAL_END && piece.block.checked_add(piece.count).is_some())
}
