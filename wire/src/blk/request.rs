//! Requests of a driver.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::SECTOR_BYTES;

/// Bytes before the data (5.2.6).
pub const HEADER_BYTES: usize = 16;
/// Bytes of one range of a discard or write-zeroes.
pub const RANGE_BYTES: usize = 16;
/// The longest name that a driver can read.
pub const ID_BYTES: usize = 20;
/// The most ranges in one request: file systems rarely have more to say at once, and each is a call of its own.
pub const RANGES_MAX: usize = 32;
/// The most that one range of a discard covers: freeing it takes a moment only, even of a fragmented file.
pub const DISCARD_BYTES_MAX: u64 = 1 << 30;
/// The most that one range of a write-zeroes covers: where zeros have to be written, this takes part of a second.
pub const WRITE_ZEROES_BYTES_MAX: u64 = 64 << 20;

const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
const T_GET_ID: u32 = 8;
const T_DISCARD: u32 = 11;
const T_WRITE_ZEROES: u32 = 13;

const RANGE_UNMAP: u32 = 1;

/// `struct virtio_blk_req` up to its data.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    kind: U32,
    /// An I/O priority in old drivers.
    reserved: U32,
    sector: U64,
}

const _: () = assert!(size_of::<Header>() == HEADER_BYTES);

/// `struct virtio_blk_discard_write_zeroes`.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRange {
    sector: U64,
    sectors: U32,
    flags: U32,
}

const _: () = assert!(size_of::<RawRange>() == RANGE_BYTES);

/// How a request ended (5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// Failed, or makes no sense.
    IoError = 1,
    /// Not known to the device.
    Unsupported = 2,
}

/// How many bytes a chain has for either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// What the driver sent, the header included.
    pub readable: usize,
    /// What the device may write, the status included.
    pub writable: usize,
}

/// What a disk allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Its size.
    pub bytes: u64,
    /// The unit of reads and writes, a multiple of [`SECTOR_BYTES`].
    pub block_bytes: u64,
    /// Nothing may be written.
    pub read_only: bool,
    /// Discards were offered.
    pub discard: bool,
}

/// A request that makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Fill the writable part, but for the status.
    Read {
        /// From this byte of the disk on.
        offset: u64,
        /// Whole blocks, at least one.
        bytes: usize,
    },
    /// Write what follows the header.
    Write {
        /// From this byte of the disk on.
        offset: u64,
        /// Whole blocks, at least one.
        bytes: usize,
    },
    /// Make what was written durable.
    Flush,
    /// Tell the disk's serial number, in at most so many bytes.
    Id {
        /// At most [`ID_BYTES`].
        bytes: usize,
    },
    /// Free the ranges that follow the header.
    Discard {
        /// How many there are, 1 to [`RANGES_MAX`].
        ranges: usize,
    },
    /// Make the ranges that follow the header zeros.
    WriteZeroes {
        /// How many there are, 1 to [`RANGES_MAX`].
        ranges: usize,
    },
}

/// Why a request is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is nowhere to say so either.
    #[error("a request has no room for a status")]
    NoStatus,
    /// The header is cut off.
    #[error("a request of {0} bytes is too short for a header")]
    Short(usize),
    /// Nobody knows this type.
    #[error("request type {0} is not known")]
    Type(u32),
    /// The data is none, or not whole blocks.
    #[error("{0} bytes are not a whole number of blocks, or none")]
    Length(usize),
    /// The place is not where a block begins.
    #[error("sector {0} is not where a block begins")]
    Unaligned(u64),
    /// The place is outside the disk.
    #[error("{bytes} bytes at sector {sector} reach past the end of the disk")]
    PastEnd {
        /// The first sector.
        sector: u64,
        /// The length.
        bytes: u64,
    },
    /// The disk is read-only.
    #[error("a write to a read-only disk")]
    ReadOnly,
    /// Not a whole number of ranges, or too many.
    #[error("{0} bytes are not 1 to {RANGES_MAX} ranges")]
    Ranges(usize),
    /// A range is longer than the configuration allows.
    #[error("a range of {0} bytes is longer than was offered")]
    RangeTooLong(u64),
    /// A range has flags that nobody knows, or that do not go with the request.
    #[error("a range with flags {0:#x}")]
    Flags(u32),
}

impl Refusal {
    /// What the driver is told.
    pub fn status(self) -> Status {
        match self {
            Self::Type(_) | Self::Flags(_) => Status::Unsupported,
            _ => Status::IoError,
        }
    }
}

impl Request {
    /// Decodes a header, of which `sizes.readable` says how much was there.
    ///
    /// # Errors
    /// [`Refusal`]: why it is not served, and what to answer.
    pub fn decode(header: &[u8; HEADER_BYTES], sizes: Sizes, limits: &Limits) -> Result<Self, Refusal> {
        let room = sizes.writable.checked_sub(1).ok_or(Refusal::NoStatus)?;
        let sent = sizes.readable.checked_sub(HEADER_BYTES).ok_or(Refusal::Short(sizes.readable))?;
        let header: &Header = zerocopy::transmute_ref!(header);
        let sector = header.sector.get();
        match header.kind.get() {
            T_IN => Ok(Self::Read { offset: limits.blocks(sector, room)?, bytes: room }),
            T_OUT | T_DISCARD | T_WRITE_ZEROES if limits.read_only => Err(Refusal::ReadOnly),
            T_OUT => Ok(Self::Write { offset: limits.blocks(sector, sent)?, bytes: sent }),
            T_FLUSH => Ok(Self::Flush),
            T_GET_ID => Ok(Self::Id { bytes: room.min(ID_BYTES) }),
            T_DISCARD if limits.discard => Ok(Self::Discard { ranges: count_ranges(sent)? }),
            T_WRITE_ZEROES => Ok(Self::WriteZeroes { ranges: count_ranges(sent)? }),
            kind => Err(Refusal::Type(kind)),
        }
    }
}

fn count_ranges(bytes: usize) -> Result<usize, Refusal> {
    let ranges = bytes / RANGE_BYTES;
    let fits = bytes.is_multiple_of(RANGE_BYTES) && (1..=RANGES_MAX).contains(&ranges);
    if fits { Ok(ranges) } else { Err(Refusal::Ranges(bytes)) }
}

impl Limits {
    /// The offset of whole blocks within the disk.
    fn blocks(&self, sector: u64, bytes: usize) -> Result<u64, Refusal> {
        let wide = bytes as u64;
        if bytes == 0 || !wide.is_multiple_of(self.block_bytes) {
            return Err(Refusal::Length(bytes));
        }
        let offset = self.within(sector, wide)?;
        if offset.is_multiple_of(self.block_bytes) { Ok(offset) } else { Err(Refusal::Unaligned(sector)) }
    }

    /// The offset of a sector from which so many bytes are within the disk.
    fn within(&self, sector: u64, bytes: u64) -> Result<u64, Refusal> {
        let offset = sector.checked_mul(SECTOR_BYTES);
        let end = offset.and_then(|offset| offset.checked_add(bytes));
        match (offset, end) {
            (Some(offset), Some(end)) if end <= self.bytes => Ok(offset),
            _ => Err(Refusal::PastEnd { sector, bytes }),
        }
    }
}

/// One range of a discard or write-zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first byte.
    pub offset: u64,
    /// The length in bytes, which may be 0.
    pub bytes: u64,
    /// The space may be freed (write-zeroes only).
    pub may_unmap: bool,
}

impl Range {
    /// Decodes all ranges of a discard.
    ///
    /// # Errors
    /// [`Refusal`], of the first range that makes no sense: then none is to be carried out.
    pub fn decode_discard(bytes: &[u8], limits: &Limits) -> Result<Vec<Self>, Refusal> {
        // The unmap flag belongs to write-zeroes alone: with anything else it is to be refused (5.2.6.2).
        Self::decode(bytes, limits, DISCARD_BYTES_MAX, 0)
    }

    /// Decodes all ranges of a write-zeroes.
    ///
    /// # Errors
    /// As for [`Self::decode_discard`].
    pub fn decode_write_zeroes(bytes: &[u8], limits: &Limits) -> Result<Vec<Self>, Refusal> {
        Self::decode(bytes, limits, WRITE_ZEROES_BYTES_MAX, RANGE_UNMAP)
    }

    fn decode(bytes: &[u8], limits: &Limits, bytes_max: u64, known_flags: u32) -> Result<Vec<Self>, Refusal> {
        count_ranges(bytes.len())?;
        let ranges = <[RawRange]>::ref_from_bytes(bytes).map_err(|_| Refusal::Ranges(bytes.len()))?;
        ranges.iter().map(|range| Self::check(range, limits, bytes_max, known_flags)).collect()
    }

    fn check(raw: &RawRange, limits: &Limits, bytes_max: u64, known_flags: u32) -> Result<Self, Refusal> {
        let flags = raw.flags.get();
        if flags & !known_flags != 0 {
            return Err(Refusal::Flags(flags));
        }
        let bytes = u64::from(raw.sectors.get()) * SECTOR_BYTES;
        if bytes > bytes_max {
            return Err(Refusal::RangeTooLong(bytes));
        }
        let offset = limits.within(raw.sector.get(), bytes)?;
        Ok(Self { offset, bytes, may_unmap: flags & RANGE_UNMAP != 0 })
    }
}
