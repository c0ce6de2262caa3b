//! The format of an image: the superblock, the layout that it defines, and the frame of a log record.
//!
//! ```text
//! block 0   superblock, first copy          ]  4 KiB each; the copy with the higher generation counts,
//! block 1   superblock, second copy         ]  and the other one if that copy is damaged
//! block 2   log area 0   (log_blocks)       ]  the area in use is `generation % 2`; it starts with a
//!           log area 1   (log_blocks)       ]  snapshot, and records follow until one does not check
//!           data area    (data_blocks)         4 KiB blocks, numbered from 0
//!
//! superblock                                  record, 8-byte aligned
//!   0  magic  "FERRYPM\n"                       0  payload length, bytes (u32)
//!   8  version (u32)                            4  CRC32C of salt, rest of header and payload (u32)
//!  12  salt of the log in use (u32)             8  sequence: generation << 32 | index (u64)
//!  16  uuid (16 bytes)                         16  payload: items, see `codec`
//!  32  generation (u64)                            (zero padding to 8 bytes)
//!  40  bytes of the image (u64)
//!  48  blocks of one log area (u64)           header of the second tier (block 0 of its file)
//!  56  blocks of the data area (u64)            0  magic "FERRYT2\n"
//!  64  records of the snapshot (u64)            8  version (u32), CRC32C (u32, of the rest)
//!  72  data blocks of the second tier (u64)    16  uuid of the image it belongs to
//!  80  snapshot records before this one (u64)  32  data blocks (u64); they follow, 4 KiB each
//!  88  salt of the log before this one (u32)
//!  92  CRC32C of bytes 0..92 (u32)
//!  96  zero to the end of the block
//! ```
//!
//! All numbers are little-endian. Every snapshot has a new salt, so that stale records in the area, of earlier use or
//! an interrupted attempt, are never valid.
#![forbid(unsafe_code)]

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The size of a block in bytes, the unit of allocation: a page, so that a block can be mapped.
pub const BLOCK_BYTES: u64 = 4096;
/// [`BLOCK_BYTES`] for buffers.
pub(crate) const BLOCK: usize = 4096;

/// First bytes of an image.
pub const MAGIC: [u8; 8] = *b"FERRYPM\n";
/// First bytes of a second tier.
pub const TIER2_MAGIC: [u8; 8] = *b"FERRYT2\n";
/// The version written and understood.
pub const VERSION: u32 = 1;

/// The minimum size of an image in bytes: two superblocks, two minimal log areas, and some data.
pub const IMAGE_BYTES_MIN: u64 = 1 << 20;
/// The minimum size of a log area: a snapshot of some hundred files, and room to log.
const LOG_BLOCKS_MIN: u64 = 32;
/// The divisor for the size of a log area: metadata of about 170 k files per GiB.
const LOG_SHARE: u64 = 32;
/// The maximum size of a log area, 1 GiB: indexes fit into 32 bits, and a snapshot takes about a second.
const LOG_BLOCKS_MAX: u64 = 1 << 18;
/// The maximum length of one record's payload in bytes, which bounds a reader's memory.
pub(crate) const PAYLOAD_BYTES_MAX: usize = 1 << 20;

/// The limit of generations and of records of a log, so that both fit into one sequence number.
const COUNTER_END: u64 = 1 << 32;

/// The number of bytes that the superblock's checksum covers.
const SUMMED_BYTES: usize = 92;

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawSuperblock {
    magic: [u8; 8],
    version: U32,
    salt: U32,
    uuid: [u8; 16],
    generation: U64,
    image_bytes: U64,
    log_blocks: U64,
    data_blocks: U64,
    snapshot_records: U64,
    tier2_blocks: U64,
    previous_records: U64,
    previous_salt: U32,
    checksum: U32,
}
const _: () = assert!(size_of::<RawSuperblock>() == SUMMED_BYTES + 4);

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawTier2 {
    magic: [u8; 8],
    version: U32,
    checksum: U32,
    uuid: [u8; 16],
    blocks: U64,
}
const _: () = assert!(size_of::<RawTier2>() == 40);

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRecord {
    bytes: U32,
    checksum: U32,
    sequence: U64,
}
/// The length of a record's header in bytes.
pub(crate) const RECORD_HEAD_BYTES: usize = size_of::<RawRecord>();
const _: () = assert!(RECORD_HEAD_BYTES == 16);

/// Why a block is not a superblock.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Another type of file.
    #[error("it does not begin with the mark of a pmem image")]
    Magic,
    /// The medium returned an error; the contents are unknown.
    #[error("it cannot be read ({0})")]
    Unreadable(String),
    /// Another version of the format.
    #[error("its format is version {0}; this program knows version {VERSION}")]
    Version(u32),
    /// Damaged.
    #[error("its checksum is {found:#010x} and should be {expected:#010x}")]
    Checksum {
        /// In the block.
        found: u32,
        /// Of the block.
        expected: u32,
    },
    /// Impossible counters: a snapshot per second would take a century to reach them.
    #[error("it counts {generation} snapshots, the last of {records} records; the maximum is {}", COUNTER_END - 1)]
    Counters {
        /// The generation.
        generation: u64,
        /// Records of the snapshot.
        records: u64,
    },
    /// The numbers contradict each other.
    #[error(
        "it says {image_bytes} bytes with {log_blocks} blocks for each log and {data_blocks} for data, which do not add up"
    )]
    Layout {
        /// Bytes of the image.
        image_bytes: u64,
        /// Blocks of a log area.
        log_blocks: u64,
        /// Blocks of the data area.
        data_blocks: u64,
    },
}

/// Where an image keeps what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Blocks of one log area.
    pub log_blocks: u64,
    /// Blocks of the data area.
    pub data_blocks: u64,
}

impl Layout {
    /// Returns the layout of an image of this size in bytes; `None` if it is too small.
    pub fn for_bytes(image_bytes: u64) -> Option<Self> {
        let blocks = image_bytes / BLOCK_BYTES;
        if image_bytes < IMAGE_BYTES_MIN {
            return None;
        }
        let log_blocks = (blocks / LOG_SHARE).clamp(LOG_BLOCKS_MIN, LOG_BLOCKS_MAX);
        Some(Self { log_blocks, data_blocks: blocks - 2 - 2 * log_blocks })
    }

    /// Returns the first byte of a log area.
    pub fn log_offset(&self, generation: u64) -> u64 {
        (2 + generation % 2 * self.log_blocks) * BLOCK_BYTES
    }

    /// Bytes of a log area.
    pub fn log_bytes(&self) -> u64 {
        self.log_blocks * BLOCK_BYTES
    }

    /// Returns the first byte of the data area.
    pub fn data_offset(&self) -> u64 {
        (2 + 2 * self.log_blocks) * BLOCK_BYTES
    }

    fn fits(&self, image_bytes: u64) -> bool {
        let blocks = self.log_blocks.checked_mul(2).and_then(|logs| logs.checked_add(2)?.checked_add(self.data_blocks));
        self.log_blocks >= LOG_BLOCKS_MIN
            && self.log_blocks <= LOG_BLOCKS_MAX
            && blocks.and_then(|blocks| blocks.checked_mul(BLOCK_BYTES)).is_some_and(|bytes| bytes <= image_bytes)
    }
}

/// The superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Part of every checksum of the active log.
    pub salt: u32,
    /// The image's identifier.
    pub uuid: [u8; 16],
    /// The number of snapshots; selects the active log area.
    pub generation: u64,
    /// Bytes of the image.
    pub image_bytes: u64,
    /// Where is what.
    pub layout: Layout,
    /// The number of records of the snapshot at the start of the active log, all of which are required.
    pub snapshot_records: u64,
    /// Data blocks of the second tier, 0 without one.
    pub tier2_blocks: u64,
    /// The number of snapshot records in the other log. That log is valid until a newer one overwrites it, and is the
    /// fallback if this one is damaged.
    pub previous_records: u64,
    /// The salt of that log.
    pub previous_salt: u32,
}

impl Superblock {
    /// The superblock as a block.
    pub fn encode(&self) -> Vec<u8> {
        let mut raw = RawSuperblock {
            magic: MAGIC,
            version: VERSION.into(),
            salt: self.salt.into(),
            uuid: self.uuid,
            generation: self.generation.into(),
            image_bytes: self.image_bytes.into(),
            log_blocks: self.layout.log_blocks.into(),
            data_blocks: self.layout.data_blocks.into(),
            snapshot_records: self.snapshot_records.into(),
            tier2_blocks: self.tier2_blocks.into(),
            previous_records: self.previous_records.into(),
            previous_salt: self.previous_salt.into(),
            checksum: 0.into(),
        };
        raw.checksum = crc32c::crc32c(&raw.as_bytes()[..SUMMED_BYTES]).into();
        let mut block = raw.as_bytes().to_vec();
        block.resize(BLOCK, 0);
        block
    }

    /// Parses a block.
    ///
    /// # Errors
    ///
    /// [`FormatError`]: what is wrong with the block.
    pub fn decode(block: &[u8]) -> Result<Self, FormatError> {
        let (raw, _) = RawSuperblock::read_from_prefix(block).map_err(|_| FormatError::Magic)?;
        if raw.magic != MAGIC {
            return Err(FormatError::Magic);
        }
        let (found, expected) = (raw.checksum.get(), crc32c::crc32c(&raw.as_bytes()[..SUMMED_BYTES]));
        if found != expected {
            return Err(FormatError::Checksum { found, expected });
        }
        if raw.version.get() != VERSION {
            return Err(FormatError::Version(raw.version.get()));
        }
        let (generation, records) = (raw.generation.get(), raw.snapshot_records.get());
        if generation >= COUNTER_END || records >= COUNTER_END {
            return Err(FormatError::Counters { generation, records });
        }
        let layout = Layout { log_blocks: raw.log_blocks.get(), data_blocks: raw.data_blocks.get() };
        let image_bytes = raw.image_bytes.get();
        let tier2_blocks = raw.tier2_blocks.get();
        if !layout.fits(image_bytes) || tier2_blocks >= TIER2_FIRST || layout.data_blocks >= TIER2_FIRST {
            let Layout { log_blocks, data_blocks } = layout;
            return Err(FormatError::Layout { image_bytes, log_blocks, data_blocks });
        }
        Ok(Self {
            salt: raw.salt.get(),
            uuid: raw.uuid,
            generation,
            image_bytes,
            layout,
            snapshot_records: records,
            tier2_blocks,
            previous_records: raw.previous_records.get(),
            previous_salt: raw.previous_salt.get(),
        })
    }

    /// Returns the superblock before its snapshot, if there was one.
    pub(crate) fn previous(&self) -> Option<Self> {
        let Self { previous_salt: salt, previous_records: snapshot_records, .. } = *self;
        let generation = self.generation.checked_sub(1).filter(|generation| *generation > 0)?;
        (snapshot_records > 0).then_some(Self { salt, snapshot_records, generation, ..*self })
    }

    /// Returns the sequence number of a record of the active log.
    pub(crate) fn sequence(&self, index: u64) -> u64 {
        self.generation << 32 | index
    }
}

/// The number of the second tier's first block: tiers share one space of block numbers.
pub const TIER2_FIRST: u64 = 1 << 40;

/// Returns the first block of a second tier that belongs to the image `uuid`.
pub fn encode_tier2(uuid: [u8; 16], blocks: u64) -> Vec<u8> {
    let mut raw =
        RawTier2 { magic: TIER2_MAGIC, version: VERSION.into(), checksum: 0.into(), uuid, blocks: blocks.into() };
    raw.checksum = crc32c::crc32c(raw.as_bytes()).into();
    let mut block = raw.as_bytes().to_vec();
    block.resize(BLOCK, 0);
    block
}

/// Decodes the first block of a second tier: the uuid of its image, and the number of data blocks.
///
/// # Errors
///
/// It is not the start of a second tier, or it is damaged.
pub fn decode_tier2(block: &[u8]) -> Result<([u8; 16], u64), FormatError> {
    let (mut raw, _) = RawTier2::read_from_prefix(block).map_err(|_| FormatError::Magic)?;
    if raw.magic != TIER2_MAGIC {
        return Err(FormatError::Magic);
    }
    let found = raw.checksum.get();
    raw.checksum = 0.into();
    let expected = crc32c::crc32c(raw.as_bytes());
    match (found == expected, raw.version.get()) {
        (false, _) => Err(FormatError::Checksum { found, expected }),
        (true, VERSION) => Ok((raw.uuid, raw.blocks.get())),
        (true, version) => Err(FormatError::Version(version)),
    }
}

/// Returns the length of a record with such a payload in the log.
pub(crate) fn record_bytes(payload_bytes: usize) -> usize {
    RECORD_HEAD_BYTES + payload_bytes.next_multiple_of(8)
}

/// Appends a record to `log`.
pub(crate) fn push_record(log: &mut Vec<u8>, salt: u32, sequence: u64, payload: &[u8]) {
    debug_assert!(payload.len() <= PAYLOAD_BYTES_MAX, "callers split what is longer");
    let bytes = u32::try_from(payload.len()).unwrap_or(0);
    let head = RawRecord { bytes: bytes.into(), checksum: 0.into(), sequence: sequence.into() };
    let checksum = record_checksum(salt, &head, payload);
    log.extend_from_slice(RawRecord { checksum: checksum.into(), ..head }.as_bytes());
    log.extend_from_slice(payload);
    log.resize(log.len().next_multiple_of(8), 0);
}

/// Returns the length of the record at the start of `log`, if it has this sequence number and its header is complete.
pub(crate) fn record_length(log: &[u8], sequence: u64) -> Option<usize> {
    let (head, _) = RawRecord::read_from_prefix(log).ok()?;
    let bytes = head.bytes.get() as usize;
    (bytes <= PAYLOAD_BYTES_MAX && head.sequence.get() == sequence).then(|| record_bytes(bytes))
}

/// Returns the payload and the length of the record at the start of `log`, if it has this sequence number and is
/// complete and undamaged.
pub(crate) fn take_record(log: &[u8], salt: u32, sequence: u64) -> Option<(&[u8], usize)> {
    let bytes = record_length(log, sequence)?;
    let (head, rest) = RawRecord::read_from_prefix(log).ok()?;
    let payload = rest.get(..head.bytes.get() as usize)?;
    (record_checksum(salt, &head, payload) == head.checksum.get()).then_some((payload, bytes))
}

fn record_checksum(salt: u32, head: &RawRecord, payload: &[u8]) -> u32 {
    let sum = crc32c::crc32c_append(salt, head.bytes.as_bytes());
    crc32c::crc32c_append(crc32c::crc32c_append(sum, head.sequence.as_bytes()), payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock() -> Superblock {
        let image_bytes = 64 << 20;
        Superblock {
            salt: 7,
            uuid: [3; 16],
            generation: 5,
            image_bytes,
            layout: Layout::for_bytes(image_bytes).unwrap(),
            snapshot_records: 1,
            tier2_blocks: 0,
            previous_records: 3,
            previous_salt: 4,
        }
    }

    #[test]
    fn superblocks_round_trip_and_any_damaged_byte_is_detected() {
        let good = superblock().encode();
        assert_eq!(Superblock::decode(&good), Ok(superblock()));
        for at in 0..96 {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            assert!(Superblock::decode(&bad).is_err(), "byte {at}");
        }
        assert_eq!(Superblock::decode(&good[..95]), Err(FormatError::Magic));
        assert_eq!(Superblock::decode(&[0; BLOCK]), Err(FormatError::Magic));
    }

    #[test]
    fn layouts_that_do_not_fit_are_refused() {
        for (log_blocks, data_blocks) in [(0, 1), (1 << 62, 1), (32, u64::MAX), (u64::MAX / 2, 2), (32, 16384)] {
            let layout = Layout { log_blocks, data_blocks };
            let bad = Superblock { layout, ..superblock() }.encode();
            assert!(matches!(Superblock::decode(&bad), Err(FormatError::Layout { .. })), "{layout:?}");
        }
        assert_eq!(Layout::for_bytes(IMAGE_BYTES_MIN - 1), None);
        for bytes in [IMAGE_BYTES_MIN, 100 << 20, 1 << 40] {
            assert!(Layout::for_bytes(bytes).is_some_and(|layout| layout.fits(bytes)), "{bytes}");
        }
    }

    #[test]
    fn second_tiers_round_trip() {
        let good = encode_tier2([9; 16], 77);
        assert_eq!(decode_tier2(&good), Ok(([9; 16], 77)));
        for at in 0..40 {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(decode_tier2(&bad).is_err(), "byte {at}");
        }
    }

    #[test]
    fn records_check_their_bytes_salt_and_sequence() {
        let mut log = Vec::new();
        push_record(&mut log, 1, 10, b"first");
        push_record(&mut log, 1, 11, b"");
        let (payload, bytes) = take_record(&log, 1, 10).unwrap();
        assert_eq!((payload, bytes), (&b"first"[..], 24));
        assert_eq!(take_record(&log[bytes..], 1, 11), Some((&b""[..], 16)));
        assert_eq!(take_record(&log, 2, 10), None, "another salt");
        assert_eq!(take_record(&log, 1, 11), None, "another sequence");
        assert_eq!(take_record(&log[..20], 1, 10), None, "cut off");
        for at in 0..21 {
            let mut bad = log.clone();
            bad[at] ^= 4;
            assert_eq!(take_record(&bad, 1, 10), None, "byte {at}");
        }
    }
}
