//! The units of an image, and the encoding of its tables' entries.

use std::io;
use std::ops::RangeInclusive;

/// Set in an L1 or L2 entry with the only reference to its cluster, which may then be changed in place.
pub(super) const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// In standard entries of version 3: the whole cluster is zeros.
const ZERO: u64 = 1;
/// The bits of the offset in an L1 or L2 entry.
pub(super) const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Compressed data are addressed in sectors.
const SECTOR_BYTES: u64 = 512;

/// How clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    Deflate,
    Zstd,
}

/// The constant units of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub version: u32,
    pub cluster_bits: u32,
    /// L2 entries have 128 bits, with the state of 32 subclusters.
    pub extended: bool,
    pub refcount_order: u32,
    pub compression: Compression,
}

impl Shape {
    /// log2 of the cluster sizes: 512 bytes to 2 MiB.
    pub(super) const CLUSTER_BITS: RangeInclusive<u32> = 9..=21;

    pub(super) fn cluster_bytes(self) -> u64 {
        1 << self.cluster_bits
    }

    /// The cluster's size, for buffers.
    pub(super) fn cluster_len(self) -> usize {
        1 << self.cluster_bits
    }

    /// Whether a cluster begins here.
    pub(super) fn is_cluster(self, offset: u64) -> bool {
        offset.is_multiple_of(self.cluster_bytes())
    }

    /// Returns the unit of allocation and zeroing in bytes: a cluster, or a 32nd of one.
    pub(super) fn subcluster_bytes(self) -> u64 {
        self.cluster_bytes() / u64::from(self.subclusters())
    }

    pub(super) fn subclusters(self) -> u32 {
        if self.extended { 32 } else { 1 }
    }

    /// A bit for each subcluster.
    pub(super) fn all(self) -> u32 {
        if self.extended { u32::MAX } else { 1 }
    }

    pub(super) fn entry_bytes(self) -> u64 {
        if self.extended { 16 } else { 8 }
    }

    /// Returns log2 of the number of entries in an L2 table.
    pub(super) fn l2_bits(self) -> u32 {
        self.cluster_bits - if self.extended { 4 } else { 3 }
    }

    pub(super) fn l1_entries_for(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cluster_bytes()).div_ceil(1 << self.l2_bits())
    }

    /// Returns log2 of the number of counts in a refcount block.
    pub(super) fn refcount_bits(self) -> u32 {
        self.cluster_bits + 3 - self.refcount_order
    }
}

/// Where an entry's cluster is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ClusterLocation {
    #[default]
    None,
    /// A cluster of the file, which may be changed if nothing else refers to it.
    Cluster { offset: u64, copied: bool },
    /// Compressed bytes, which end at the end of a sector.
    Compressed { offset: u64, bytes: u64 },
}

/// An L2 entry: the location of a cluster, and the state of each subcluster. A subcluster that is neither allocated nor
/// zero has the data of the backing file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub place: ClusterLocation,
    pub allocated: u32,
    pub zero: u32,
}

/// Returns the error for invalid contents of an image.
pub(super) fn damaged(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Entry {
    /// Reads an entry.
    pub(super) fn decode(shape: Shape, bytes: &[u8]) -> io::Result<Self> {
        let word = |at: usize| bytes.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
        let first = word(0).unwrap_or_default();
        let second = if shape.extended { word(8).unwrap_or_default() } else { 0 };
        if first & COMPRESSED != 0 {
            let offset_bits = 62 - (shape.cluster_bits - 8);
            let offset = first & ((1 << offset_bits) - 1);
            let sectors = (first & (COMPRESSED - 1)) >> offset_bits;
            let bytes = (sectors + 1) * SECTOR_BYTES - offset % SECTOR_BYTES;
            return Ok(Self { place: ClusterLocation::Compressed { offset, bytes }, allocated: shape.all(), zero: 0 });
        }
        let offset = first & OFFSET;
        if !shape.is_cluster(offset) {
            return Err(damaged(format!("an L2 entry refers to byte {offset}, where no cluster begins")));
        }
        let place = match offset {
            0 => ClusterLocation::None,
            _ => ClusterLocation::Cluster { offset, copied: first & COPIED != 0 },
        };
        let (allocated, zero) = match (shape.extended, first & ZERO != 0) {
            #[allow(clippy::cast_possible_truncation, reason = "the two halves of the word")]
            (true, _) => (second as u32, (second >> 32) as u32),
            (false, true) if shape.version < 3 => {
                return Err(damaged("an L2 entry of a version 2 image has the zero flag".into()));
            }
            (false, true) => (0, 1),
            (false, false) => (u32::from(offset != 0), 0),
        };
        if allocated & zero != 0 || allocated != 0 && place == ClusterLocation::None {
            return Err(damaged(format!("an L2 entry contradicts itself: {first:#x} {second:#x}")));
        }
        Ok(Self { place, allocated, zero })
    }

    /// Encodes an entry without compression: new data are never compressed.
    pub(super) fn encode(self, shape: Shape, out: &mut Vec<u8>) {
        let first = match self.place {
            ClusterLocation::Cluster { offset, copied } => offset | if copied { COPIED } else { 0 },
            ClusterLocation::None | ClusterLocation::Compressed { .. } => 0,
        };
        if shape.extended {
            out.extend_from_slice(&first.to_be_bytes());
            out.extend_from_slice(&(u64::from(self.zero) << 32 | u64::from(self.allocated)).to_be_bytes());
        } else {
            out.extend_from_slice(&(first | u64::from(self.zero & 1)).to_be_bytes());
        }
    }

    /// Returns the cluster that belongs to this entry only.
    pub(super) fn own(&self) -> Option<u64> {
        match self.place {
            ClusterLocation::Cluster { offset, copied: true } => Some(offset),
            _ => None,
        }
    }

    pub(super) fn is_compressed(&self) -> bool {
        matches!(self.place, ClusterLocation::Compressed { .. })
    }
}
