//! The table of all objects in a store's packs, so that builds find objects without reading the index of each pack.
//!
//! ```text
//! STORE/packs/table
//!   head      magic number 8, number of packs 4, number of entries 4, BLAKE3 digest of the rest of the head 32;
//!             of each pack, by name: name 32, whether its index could be used 4;
//!             of each bucket: number of entries up to its end 4, first 8 bytes of the BLAKE3 digest of its entries
//!   entries   by digest, then by pack: digest of the object 32, number of the pack 4, its first block 4
//! ```
//!
//! Numbers are little-endian. The first bits of a digest select its bucket, so a lookup reads a single bucket. The
//! table is a hint: it is rebuilt from the packs' indexes when it is missing, damaged or outdated, and each entry is
//! verified against the index of its pack (`store/places.rs`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;

use crate::format::digest::{Algorithm, DIGEST_BYTES, Digest};
use crate::format::plain_file;

/// The file name beside the packs.
pub(crate) const FILE: &str = "table";
const MAGIC: &[u8; 8] = b"FERRYPT1";
/// Magic number, numbers, digest.
const FIXED_BYTES: usize = 8 + 4 + 4 + DIGEST_BYTES;
const PACK_BYTES: usize = DIGEST_BYTES + 4;
const ENTRY_BYTES: usize = DIGEST_BYTES + 4 + 4;
/// The number of buckets as a power of two: a thousand packs of a hundred objects have a hundred entries per bucket.
const BUCKET_BITS: u32 = 10;
const BUCKETS: usize = 1 << BUCKET_BITS;
const SUM_BYTES: usize = 8;
const BUCKET_BYTES: usize = 4 + SUM_BYTES;
/// The maximum number of packs: the head is read into memory, and no image names more.
const PACKS_MAX: usize = 1 << 20;

/// A pack in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TablePack {
    /// Its name.
    pub name: Digest,
    /// Whether its index could be used; otherwise it has no entries.
    pub is_usable: bool,
}

/// The location of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TableEntry {
    /// The object.
    pub digest: [u8; DIGEST_BYTES],
    /// The number of the pack in the table.
    pub pack: u32,
    /// Its first block there.
    pub block: u32,
}

/// The table is damaged and must be rebuilt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableDamage;

/// The head of a table.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    packs: Vec<TablePack>,
    /// The end of each bucket, in entries, and its checksum.
    buckets: Vec<(usize, [u8; SUM_BYTES])>,
    /// The offset of the entries.
    bytes: usize,
}

/// A table that is read bucket by bucket.
#[derive(Debug)]
pub(crate) struct Table {
    file: File,
    head: Head,
    buckets: Vec<OnceLock<Result<Vec<TableEntry>, TableDamage>>>,
}

fn number(bytes: &[u8]) -> Option<usize> {
    usize::try_from(u32::from_le_bytes(*bytes.first_chunk()?)).ok()
}

fn name(bytes: &[u8]) -> Option<[u8; DIGEST_BYTES]> {
    bytes.first_chunk().copied()
}

fn sum(bytes: &[u8]) -> [u8; SUM_BYTES] {
    let digest = blake3::hash(bytes);
    let mut sum = [0; SUM_BYTES];
    sum.copy_from_slice(&digest.as_bytes()[..SUM_BYTES]);
    sum
}

fn bucket_of(digest: &[u8; DIGEST_BYTES]) -> usize {
    usize::from(u16::from_be_bytes([digest[0], digest[1]]) >> (u16::BITS - BUCKET_BITS))
}

/// Returns the length of a head by its first bytes.
fn head_bytes(fixed: &[u8]) -> Option<usize> {
    let packs = fixed.strip_prefix(MAGIC).and_then(number).filter(|packs| *packs <= PACKS_MAX)?;
    Some(FIXED_BYTES + packs * PACK_BYTES + BUCKETS * BUCKET_BYTES)
}

impl Head {
    /// Parses the head of a table of this size.
    fn of(bytes: &[u8], table_bytes: u64) -> Option<Self> {
        if head_bytes(bytes)? != bytes.len() {
            return None;
        }
        let (fixed, rest) = bytes.split_at(FIXED_BYTES);
        let (packs, entries) = (number(&fixed[8..])?, number(&fixed[12..])?);
        if fixed[16..] != *blake3::hash(rest).as_bytes() {
            return None;
        }
        if table_bytes != bytes.len() as u64 + entries as u64 * ENTRY_BYTES as u64 {
            return None;
        }
        let (names, sums) = rest.split_at(packs * PACK_BYTES);
        let pack = |bytes: &[u8]| {
            let is_usable = match number(&bytes[DIGEST_BYTES..])? {
                0 => false,
                1 => true,
                _ => return None,
            };
            Some(TablePack { name: Digest::new(Algorithm::Blake3, name(bytes)?), is_usable })
        };
        let packs = names.chunks_exact(PACK_BYTES).map(pack).collect::<Option<Vec<_>>>()?;
        let bucket = |bytes: &[u8]| Some((number(bytes)?, *bytes[4..].first_chunk()?));
        let buckets = sums.chunks_exact(BUCKET_BYTES).map(bucket).collect::<Option<Vec<_>>>()?;
        let are_sorted = packs.is_sorted_by(|a, b| a.name < b.name) && buckets.is_sorted_by_key(|(end, _)| *end);
        let is_whole = buckets.last().is_some_and(|(end, _)| *end == entries);
        (are_sorted && is_whole).then_some(Self { packs, buckets, bytes: bytes.len() })
    }

    fn entries(&self, bucket: usize) -> std::ops::Range<usize> {
        let end = |bucket: usize| self.buckets.get(bucket).map_or(0, |(end, _)| *end);
        bucket.checked_sub(1).map_or(0, end)..end(bucket)
    }

    /// Parses a bucket.
    fn bucket(&self, bucket: usize, bytes: &[u8]) -> Result<Vec<TableEntry>, TableDamage> {
        if self.buckets.get(bucket).is_none_or(|(_, wanted)| *wanted != sum(bytes)) {
            return Err(TableDamage);
        }
        let entry = |bytes: &[u8]| {
            let (digest, pack) = (name(bytes)?, number(&bytes[DIGEST_BYTES..])?);
            let is_usable = self.packs.get(pack).is_some_and(|pack| pack.is_usable);
            let block = number(&bytes[DIGEST_BYTES + 4..])?;
            let (pack, block) = (u32::try_from(pack).ok()?, u32::try_from(block).ok()?);
            Some(TableEntry { digest, pack, block }).filter(|_| is_usable && bucket_of(&digest) == bucket)
        };
        let entries = bytes.chunks_exact(ENTRY_BYTES).map(entry).collect::<Option<Vec<_>>>().ok_or(TableDamage)?;
        if entries.is_sorted() { Ok(entries) } else { Err(TableDamage) }
    }
}

/// Encodes a table; `None` if it would exceed the format.
pub fn write(packs: &[TablePack], mut entries: Vec<TableEntry>) -> Option<Vec<u8>> {
    if packs.len() > PACKS_MAX {
        return None;
    }
    let count = |length: usize| u32::try_from(length).ok().map(u32::to_le_bytes);
    entries.sort_unstable();
    let mut body = Vec::with_capacity(entries.len() * ENTRY_BYTES);
    let mut rest = Vec::with_capacity(packs.len() * PACK_BYTES + BUCKETS * BUCKET_BYTES);
    for pack in packs {
        rest.extend_from_slice(pack.name.bytes());
        rest.extend_from_slice(&u32::from(pack.is_usable).to_le_bytes());
    }
    let mut left = entries.as_slice();
    for bucket in 0..BUCKETS {
        let (now, later) = left.split_at(left.partition_point(|entry| bucket_of(&entry.digest) <= bucket));
        let from = body.len();
        for entry in now {
            body.extend_from_slice(&entry.digest);
            body.extend_from_slice(&entry.pack.to_le_bytes());
            body.extend_from_slice(&entry.block.to_le_bytes());
        }
        rest.extend_from_slice(&count(body.len() / ENTRY_BYTES)?);
        rest.extend_from_slice(&sum(&body[from..]));
        left = later;
    }
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&count(packs.len())?);
    bytes.extend_from_slice(&count(entries.len())?);
    bytes.extend_from_slice(blake3::hash(&rest).as_bytes());
    Some([bytes, rest, body].concat())
}

/// Parses a whole table.
///
/// # Errors
///
/// It is damaged.
pub fn read(bytes: &[u8]) -> Result<(Vec<TablePack>, Vec<TableEntry>), TableDamage> {
    let end = head_bytes(bytes).filter(|end| *end <= bytes.len()).ok_or(TableDamage)?;
    let (head, body) = bytes.split_at(end);
    let head = Head::of(head, bytes.len() as u64).ok_or(TableDamage)?;
    let mut entries = Vec::new();
    for bucket in 0..BUCKETS {
        let range = head.entries(bucket);
        let bytes = body.get(range.start * ENTRY_BYTES..range.end * ENTRY_BYTES).ok_or(TableDamage)?;
        entries.extend(head.bucket(bucket, bytes)?);
    }
    Ok((head.packs, entries))
}

impl Table {
    /// Opens the table in a directory of packs; `None` if it is missing or its head is damaged.
    pub(crate) fn open(packs: &Path) -> io::Result<Option<Self>> {
        let file = match plain_file::open_to_read(&packs.join(FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let length = file.metadata()?.len();
        let mut bytes = vec![0; FIXED_BYTES];
        if length < FIXED_BYTES as u64 {
            return Ok(None);
        }
        file.read_exact_at(&mut bytes, 0)?;
        let Some(end) = head_bytes(&bytes).filter(|end| *end as u64 <= length) else { return Ok(None) };
        bytes.resize(end, 0);
        file.read_exact_at(&mut bytes[FIXED_BYTES..], FIXED_BYTES as u64)?;
        let buckets = (0..BUCKETS).map(|_| OnceLock::new()).collect();
        Ok(Head::of(&bytes, length).map(|head| Self { file, head, buckets }))
    }

    /// Returns its packs, by name.
    pub(crate) fn packs(&self) -> &[TablePack] {
        &self.head.packs
    }

    /// Returns the locations of an object in the table.
    ///
    /// # Errors
    ///
    /// The bucket is damaged.
    pub(crate) fn find(&self, digest: &Digest) -> Result<&[TableEntry], TableDamage> {
        let bucket = bucket_of(digest.bytes());
        let entries = self.buckets[bucket].get_or_init(|| {
            let range = self.head.entries(bucket);
            let mut bytes = vec![0; range.len() * ENTRY_BYTES];
            let from = self.head.bytes as u64 + range.start as u64 * ENTRY_BYTES as u64;
            self.file.read_exact_at(&mut bytes, from).map_err(|_| TableDamage)?;
            self.head.bucket(bucket, &bytes)
        });
        let entries = entries.as_ref().map_err(|damaged| *damaged)?;
        let from = entries.partition_point(|entry| entry.digest < *digest.bytes());
        let to = from + entries[from..].partition_point(|entry| entry.digest == *digest.bytes());
        Ok(&entries[from..to])
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn packs() -> impl Strategy<Value = Vec<TablePack>> {
        prop::collection::btree_map(any::<[u8; 32]>(), any::<bool>(), 0..8).prop_map(|packs| {
            let pack = |(name, is_usable)| TablePack { name: Digest::new(Algorithm::Blake3, name), is_usable };
            packs.into_iter().map(pack).collect()
        })
    }

    /// Packs, and entries of those that have some; few digests, so that several packs have the same objects.
    fn tables() -> impl Strategy<Value = (Vec<TablePack>, Vec<TableEntry>)> {
        (packs(), prop::collection::vec((any::<u16>(), any::<prop::sample::Index>(), any::<u32>()), 0..200)).prop_map(
            |(packs, entries)| {
                let usable: Vec<usize> = (0..packs.len()).filter(|at| packs[*at].is_usable).collect();
                let entry = |(digest, pack, block): (u16, prop::sample::Index, u32)| {
                    let mut bytes = [7; DIGEST_BYTES];
                    bytes[..2].copy_from_slice(&digest.to_be_bytes());
                    let pack = u32::try_from(*pack.get(&usable)).expect("few");
                    TableEntry { digest: bytes, pack, block }
                };
                let entries = if usable.is_empty() { Vec::new() } else { entries.into_iter().map(entry).collect() };
                (packs, entries)
            },
        )
    }

    proptest! {
        #[test]
        fn tables_are_read_as_they_are_written_and_all_is_found((packs, entries) in tables()) {
            let bytes = write(&packs, entries.clone()).expect("there is room");
            let (read_packs, read_entries) = read(&bytes).expect("it is sound");
            let mut sorted = entries.clone();
            sorted.sort_unstable();
            prop_assert_eq!((&read_packs, &read_entries), (&packs, &sorted));
            let directory = tempfile::tempdir().expect("a directory");
            std::fs::write(directory.path().join(FILE), &bytes).expect("room");
            let table = Table::open(directory.path()).expect("it can be read").expect("it is sound");
            prop_assert_eq!(table.packs(), &packs[..]);
            for entry in &entries {
                let found = table.find(&Digest::new(Algorithm::Blake3, entry.digest)).expect("it is sound");
                let expected: Vec<_> = sorted.iter().filter(|other| other.digest == entry.digest).copied().collect();
                prop_assert_eq!(found, &expected[..]);
            }
            prop_assert_eq!(table.find(&Algorithm::Blake3.of(b"nowhere")), Ok(&[][..]));
        }

        #[test]
        fn whatever_is_changed_in_a_table_is_found(
            (packs, entries) in tables(), at in any::<prop::sample::Index>(), bit in 0..8, cut in any::<bool>()
        ) {
            let mut bytes = write(&packs, entries).expect("there is room");
            let at = at.index(bytes.len());
            if cut { bytes.truncate(at) } else { bytes[at] ^= 1_u8 << bit }
            prop_assert_eq!(read(&bytes), Err(TableDamage));
        }
    }
}
