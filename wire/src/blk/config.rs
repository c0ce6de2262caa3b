//! The configuration space of a virtio-blk device (VIRTIO 1.3, section 5.2.4).

use std::ops::BitOr;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::request::{DISCARD_BYTES_MAX, RANGES_MAX, WRITE_ZEROES_BYTES_MAX};
use super::{Limits, SECTOR_BYTES};

/// The number of ranges of a DISCARD that is offered, below [`RANGES_MAX`]: Windows drivers before 2026 have an array of
/// this length and write past its end (virtio-win, pull request 1504).
const DISCARD_RANGES_OFFERED: U32 = U32::new(16);

/// Feature bits of a block device (section 5.2.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceFeatures(pub u64);

impl DeviceFeatures {
    /// `seg_max` is valid.
    pub const SEG_MAX: Self = Self(1 << 2);
    /// The disk is read-only.
    pub const RO: Self = Self(1 << 5);
    /// `blk_size` is valid.
    pub const BLK_SIZE: Self = Self(1 << 6);
    /// The device has a write cache and supports FLUSH.
    pub const FLUSH: Self = Self(1 << 9);
    /// The topology is valid.
    pub const TOPOLOGY: Self = Self(1 << 10);
    /// The driver may switch the write cache off and on.
    pub const CONFIG_WCE: Self = Self(1 << 11);
    /// There are several queues.
    pub const MQ: Self = Self(1 << 12);
    /// DISCARD is supported.
    pub const DISCARD: Self = Self(1 << 13);
    /// WRITE_ZEROES is supported.
    pub const WRITE_ZEROES: Self = Self(1 << 14);

    /// Returns whether all bits of `other` are set.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for DeviceFeatures {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The values that [`Config::encode`] writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Size and blocks.
    pub limits: Limits,
    /// The unit that the device writes without a read-modify-write, in bytes.
    pub physical_block_bytes: u32,
    /// The preferred size of a transfer in bytes; 0: none.
    pub optimal_io_bytes: u32,
    /// The unit in which DISCARD frees space, in bytes.
    pub discard_bytes: u32,
    /// The maximum number of data segments in a request.
    pub segments_max: u32,
    /// The number of queues.
    pub queues: u16,
    /// The write-back cache is enabled (section 5.2.5).
    pub writeback: bool,
}

/// `struct virtio_blk_config` (section 5.2.4), up to the last field of an offered feature.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    capacity: U64,
    size_max: U32,
    seg_max: U32,
    cylinders: U16,
    heads: u8,
    sectors: u8,
    blk_size: U32,
    physical_block_exp: u8,
    alignment_offset: u8,
    min_io_size: U16,
    opt_io_size: U32,
    writeback: u8,
    unused0: u8,
    num_queues: U16,
    max_discard_sectors: U32,
    max_discard_seg: U32,
    discard_sector_alignment: U32,
    max_write_zeroes_sectors: U32,
    max_write_zeroes_seg: U32,
    write_zeroes_may_unmap: u8,
    unused1: [u8; 3],
}

const _: () = assert!(size_of::<Raw>() == Config::BYTES);
const _: () = assert!(core::mem::offset_of!(Raw, blk_size) == 20);
const _: () = assert!(core::mem::offset_of!(Raw, writeback) == Config::WRITEBACK_OFFSET);
const _: () = assert!(core::mem::offset_of!(Raw, max_discard_sectors) == 36);
const _: () = assert!(core::mem::offset_of!(Raw, write_zeroes_may_unmap) == 56);

impl Config {
    /// The length of the configuration space in bytes.
    pub const BYTES: usize = 60;
    /// The offset of `writeback`, the only byte that a driver may write.
    pub const WRITEBACK_OFFSET: usize = 32;

    /// Encodes the configuration space.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        // All of these are powers of two far below 4 GiB, and the limits are constants.
        let narrow = |wide: u64| U32::new(u32::try_from(wide).unwrap_or(u32::MAX));
        let sectors = |bytes: u64| narrow(bytes / SECTOR_BYTES);
        let block_bytes = self.limits.block_bytes.max(SECTOR_BYTES);
        let blocks = |bytes: u32| u64::from(bytes) / block_bytes;
        let exponent = blocks(self.physical_block_bytes).max(1).ilog2();
        let discard = self.limits.discard && !self.limits.read_only;
        let when = |offered: bool, value: U32| if offered { value } else { U32::ZERO };
        let zeroes = !self.limits.read_only;
        let raw = Raw {
            capacity: U64::new(self.limits.bytes / SECTOR_BYTES),
            size_max: U32::ZERO,
            seg_max: U32::new(self.segments_max),
            cylinders: U16::ZERO,
            heads: 0,
            sectors: 0,
            blk_size: narrow(block_bytes),
            physical_block_exp: u8::try_from(exponent).unwrap_or(0),
            alignment_offset: 0,
            min_io_size: U16::new(u16::try_from(blocks(self.physical_block_bytes)).unwrap_or(0)),
            opt_io_size: narrow(blocks(self.optimal_io_bytes)),
            writeback: self.writeback.into(),
            unused0: 0,
            num_queues: U16::new(self.queues),
            max_discard_sectors: when(discard, sectors(DISCARD_BYTES_MAX)),
            max_discard_seg: when(discard, DISCARD_RANGES_OFFERED),
            discard_sector_alignment: when(discard, sectors(u64::from(self.discard_bytes))),
            max_write_zeroes_sectors: when(zeroes, sectors(WRITE_ZEROES_BYTES_MAX)),
            max_write_zeroes_seg: when(zeroes, narrow(RANGES_MAX as u64)),
            write_zeroes_may_unmap: zeroes.into(),
            unused1: [0; 3],
        };
        zerocopy::transmute!(raw)
    }
}
