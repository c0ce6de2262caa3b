//! Requests of a virtio-blk driver (VIRTIO 1.3, section 5.2.6).

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::SECTOR_BYTES;

/// Bytes before the data (section 5.2.6).
pub const HEADER_BYTES: usize = 16;
/// Bytes of one range of a discard or write-zeroes.
pub const RANGE_BYTES: usize = 16;
/// The longest serial number that a driver can read, in bytes.
pub const ID_BYTES: usize = 20;
/// The maximum number of ranges in one request. File systems rarely send more, and each range is a system call.
pub const RANGES_MAX: usize = 32;
/// The maximum length of the data of a request, in bytes: a longer one would delay other requests and the end of the device. Linux
/// sends requests of some MiB by default.
pub const REQUEST_BYTES_MAX: usize = 1 << 30;
/// The maximum length of one DISCARD range in bytes: freeing it is quick even in a fragmented file.
pub const DISCARD_BYTES_MAX: u64 = 1 << 30;
/// The maximum length of one WRITE_ZEROES range in bytes: writing the zeros takes a fraction of a second.
pub const WRITE_ZEROES_BYTES_MAX: u64 = 64 << 20;

const T_IN: u32 = 0;
const T_OUT: u32 = 1;
const T_FLUSH: u32 = 4;
/// A flush in drivers of virtio 0.9, which some still send (illumos).
const FLUSH_OF_OLD_DRIVERS: u32 = 5;
const T_GET_ID: u32 = 8;
const T_DISCARD: u32 = 11;
const T_WRITE_ZEROES: u32 = 13;

const RANGE_UNMAP: u32 = 1;

/// `struct virtio_blk_req` up to its data.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    kind: U32,
    /// An I/O priority in legacy drivers.
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

/// The status byte of a request (section 5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The request failed or is invalid.
    IoError = 1,
    /// The device does not support the request.
    Unsupported = 2,
}

/// The lengths of the two parts of a descriptor chain, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The part that the device reads, with the header.
    pub readable: usize,
    /// The part that the device writes, with the status byte.
    pub writable: usize,
}

/// The limits of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Its size in bytes.
    pub bytes: u64,
    /// The unit of reads and writes in bytes, a multiple of [`SECTOR_BYTES`].
    pub block_bytes: u64,
    /// The disk is read-only.
    pub read_only: bool,
    /// DISCARD was offered.
    pub discard: bool,
}

/// A valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Fills the writable part, except the status byte.
    Read {
        /// The first byte on the disk.
        offset: u64,
        /// The length in bytes: whole blocks, at least one.
        bytes: usize,
    },
    /// Writes the data after the header.
    Write {
        /// The first byte on the disk.
        offset: u64,
        /// The length in bytes: whole blocks, at least one.
        bytes: usize,
    },
    /// Makes completed writes durable.
    Flush,
    /// Returns the serial number of the disk.
    Id {
        /// The room for it in bytes, at most [`ID_BYTES`].
        bytes: usize,
    },
    /// Frees the ranges that follow the header.
    Discard {
        /// The number of ranges, 1 to [`RANGES_MAX`].
        ranges: usize,
    },
    /// Zeroes the ranges that follow the header.
    WriteZeroes {
        /// The number of ranges, 1 to [`RANGES_MAX`].
        ranges: usize,
    },
}

/// Why a request is refused (virtio section 5.2.6.2). Lengths are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The chain has no byte for a status, so nothing can be replied.
    #[error("a request has no room for a status")]
    NoStatus,
    /// The header is incomplete.
    #[error("a request of {0} bytes is too short for a header")]
    Short(usize),
    /// The request type is unknown.
    #[error("request type {0} is not known")]
    Type(u32),
    /// The data is empty or not a whole number of blocks.
    #[error("the data length of {0} bytes is not a positive multiple of the block size")]
    Length(usize),
    /// The data is longer than [`REQUEST_BYTES_MAX`].
    #[error("the data length of {0} bytes is more than {REQUEST_BYTES_MAX}")]
    TooLong(usize),
    /// The sector is not at the start of a block.
    #[error("sector {0} is not at the start of a block")]
    Unaligned(u64),
    /// The range is outside the disk.
    #[error("{bytes} bytes at sector {sector} reach past the end of the disk")]
    PastEnd {
        /// The first sector.
        sector: u64,
        /// The length in bytes.
        bytes: u64,
    },
    /// The disk is read-only.
    #[error("a write to a read-only disk")]
    ReadOnly,
    /// The data is not a whole number of ranges, or holds too many.
    #[error("{0} bytes are not 1 to {RANGES_MAX} ranges")]
    Ranges(usize),
    /// A range is longer than the configuration space allows.
    #[error("a range of {0} bytes is longer than the device allows")]
    RangeTooLong(u64),
    /// A range has unknown flags, or flags that the request type does not allow.
    #[error("a range has the invalid flags {0:#x}")]
    Flags(u32),
}

impl Refusal {
    /// Returns the status byte for the driver.
    pub fn status(self) -> Status {
        match self {
            Self::Type(_) | Self::Flags(_) => Status::Unsupported,
            _ => Status::IoError,
        }
    }
}

impl Request {
    /// Decodes a header, of which the first `sizes.readable` bytes are valid.
    ///
    /// # Errors
    ///
    /// [`Refusal`]: why the request is refused; [`Refusal::status`] is the status byte for the driver.
    pub fn decode(header: &[u8; HEADER_BYTES], sizes: Sizes, limits: &Limits) -> Result<Self, Refusal> {
        let room = sizes.writable.checked_sub(1).ok_or(Refusal::NoStatus)?;
        let sent = sizes.readable.checked_sub(HEADER_BYTES).ok_or(Refusal::Short(sizes.readable))?;
        let header: &Header = zerocopy::transmute_ref!(header);
        let sector = header.sector.get();
        match header.kind.get() {
            T_IN => Ok(Self::Read { offset: limits.blocks(sector, room)?, bytes: room }),
            T_OUT | T_DISCARD | T_WRITE_ZEROES if limits.read_only => Err(Refusal::ReadOnly),
            T_OUT => Ok(Self::Write { offset: limits.blocks(sector, sent)?, bytes: sent }),
            T_FLUSH | FLUSH_OF_OLD_DRIVERS => Ok(Self::Flush),
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
    /// Returns the disk offset of a range of whole blocks.
    fn blocks(&self, sector: u64, bytes: usize) -> Result<u64, Refusal> {
        let wide = bytes as u64;
        if bytes == 0 || !wide.is_multiple_of(self.block_bytes) {
            return Err(Refusal::Length(bytes));
        }
        if bytes > REQUEST_BYTES_MAX {
            return Err(Refusal::TooLong(bytes));
        }
        let offset = self.within(sector, wide)?;
        if offset.is_multiple_of(self.block_bytes) { Ok(offset) } else { Err(Refusal::Unaligned(sector)) }
    }

    /// Returns the disk offset of `sector` if `bytes` bytes from there are within the disk.
    fn within(&self, sector: u64, bytes: u64) -> Result<u64, Refusal> {
        let offset = sector.checked_mul(SECTOR_BYTES);
        let end = offset.and_then(|offset| offset.checked_add(bytes));
        match (offset, end) {
            (Some(offset), Some(end)) if end <= self.bytes => Ok(offset),
            _ => Err(Refusal::PastEnd { sector, bytes }),
        }
    }
}

/// One range of a DISCARD or WRITE_ZEROES request (section 5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first byte on the disk.
    pub offset: u64,
    /// The length in bytes, which may be 0.
    pub bytes: u64,
    /// The device may free the space (WRITE_ZEROES only).
    pub may_unmap: bool,
}

impl Range {
    /// Decodes all ranges of a DISCARD request.
    ///
    /// # Errors
    ///
    /// [`Refusal`] of the first invalid range. The device then changes none of the ranges.
    pub fn decode_discard(bytes: &[u8], limits: &Limits) -> Result<Vec<Self>, Refusal> {
        // Only WRITE_ZEROES may set the unmap flag; with DISCARD the request is refused (section 5.2.6.2).
        Self::decode(bytes, limits, DISCARD_BYTES_MAX, 0)
    }

    /// Decodes all ranges of a WRITE_ZEROES request.
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
