//! From the bytes of an image to its superblock, records and files. The bytes may be anything.
#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use ferry_vfs::{FileType, Ino};

use super::codec::{CodecError, Item, Map, for_each};
use super::error::DamageError;
use super::extents::Extents;
use super::format::{BLOCK, BLOCK_BYTES, FormatError, Superblock, take_record};
use super::medium::Medium;
use super::open::OnDamage;
use crate::store::Record;

/// The two copies of the superblock.
#[derive(Debug)]
pub(crate) struct Copies(pub(crate) [Result<Superblock, FormatError>; 2]);

impl Copies {
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

/// A log as it was found.
#[derive(Debug)]
pub(crate) struct Found {
    area: Vec<u8>,
    payloads: Vec<Range<usize>>,
    /// Bytes of the area that records take.
    pub(crate) bytes: u64,
}

impl Found {
    /// Reads the log in use. If its snapshot is damaged, and that is no reason to stop, the log before it if that one is
    /// whole. Answers also the superblock to go on from.
    pub(crate) fn read(
        medium: &dyn Medium,
        superblock: &Superblock,
        on_damage: &mut OnDamage<'_>,
    ) -> Result<(Self, Superblock), DamageError> {
        let latest = Self::read_area(medium, superblock)?;
        let (found, expected) = (latest.len(), superblock.snapshot_records);
        if found >= expected {
            return Ok((latest, *superblock));
        }
        on_damage(DamageError::Snapshot { found, expected })?;
        if let Some(previous) = superblock.previous() {
            let older = Self::read_area(medium, &previous)?;
            if older.len() >= previous.snapshot_records {
                on_damage(DamageError::Older { records: older.len() })?;
                // The next snapshot goes to the area of the damaged one: the older one stays until it is complete.
                return Ok((older, Superblock { generation: superblock.generation + 1, ..*superblock }));
            }
        }
        Ok((latest, *superblock))
    }

    /// Reads a log up to the first record that does not check.
    fn read_area(medium: &dyn Medium, superblock: &Superblock) -> Result<Self, DamageError> {
        let bytes = usize::try_from(superblock.layout.log_bytes()).unwrap_or(usize::MAX);
        let mut area = vec![0; bytes];
        let start = superblock.layout.log_offset(superblock.generation);
        medium.read(start, &mut area).map_err(|error| DamageError::Read(error.to_string()))?;
        let mut payloads = Vec::new();
        let mut at = 0;
        while let Some((payload, bytes)) =
            take_record(area.get(at..).unwrap_or_default(), superblock.salt, superblock.sequence(payloads.len() as u64))
        {
            let start = at + super::format::RECORD_HEAD_BYTES;
            payloads.push(start..start + payload.len());
            at += bytes;
        }
        Ok(Self { area, payloads, bytes: at as u64 })
    }

    /// Records in all.
    pub(crate) fn len(&self) -> u64 {
        self.payloads.len() as u64
    }

    /// Every item of every record, in order. What does not parse is damage, and the rest of its record is left out.
    pub(crate) fn for_each(
        &self,
        on_damage: &mut OnDamage<'_>,
        mut each: impl FnMut(&mut OnDamage<'_>, u64, &Item<'_>) -> Result<(), DamageError>,
    ) -> Result<(), DamageError> {
        for (index, range) in (0..).zip(&self.payloads) {
            let mut failed = None;
            let parsed = for_each(self.area.get(range.clone()).unwrap_or_default(), |item| {
                each(on_damage, index, item).map_err(|error| {
                    failed = Some(error);
                    CodecError::Short
                })
            });
            if let Err(source) = parsed {
                failed.map_or_else(|| on_damage(DamageError::Record { index, source }), Err)?;
            }
        }
        Ok(())
    }

    /// The files that the records tell of, by inode: size and blocks.
    pub(crate) fn files(&self, on_damage: &mut OnDamage<'_>) -> Result<HashMap<Ino, (u64, Extents)>, DamageError> {
        let mut files: HashMap<Ino, (u64, Extents)> = HashMap::new();
        let mut regular = HashSet::new();
        self.for_each(on_damage, |on_damage, index, item| {
            match item {
                Item::Map(map) if !regular.contains(&map.ino) => on_damage(DamageError::NoFile { ino: map.ino.0 })?,
                Item::Map(map) if !is_possible(map) => {
                    on_damage(DamageError::Record { index, source: CodecError::Value { field: "piece" } })?;
                }
                Item::Map(map) => apply(files.entry(map.ino).or_default(), map),
                Item::Tree(Record::Make { ino, meta, .. }) => {
                    if FileType::from_raw_mode(meta.mode) == FileType::RegularFile {
                        regular.insert(*ino);
                    }
                }
                Item::Tree(Record::Free { ino }) => {
                    files.remove(ino);
                    regular.remove(ino);
                }
                Item::Tree(_) => {}
            }
            Ok(())
        })?;
        Ok(files)
    }
}

/// The last logical block that a file can have, plus one.
const LOGICAL_END: u64 = 1 << 51;

fn is_possible(map: &Map) -> bool {
    map.pieces.iter().all(|piece| piece.end() <= LOGICAL_END && piece.block.checked_add(piece.count).is_some())
}

fn apply((size, extents): &mut (u64, Extents), map: &Map) {
    extents.remove(map.from..map.to);
    map.pieces.iter().for_each(|piece| extents.insert(*piece));
    *size = map.size;
}
