//! Requests and configuration of virtio-blk devices (VIRTIO 1.3, section 5.2).
//!
//! A request is a header, data in one direction, and one status byte, which is the last that the device may write.
//! [`Request::decode`] takes the header and the sizes of the two halves of a descriptor chain; where the descriptors
//! are cut is nobody's business (2.7.4.4). What it answers has been checked against the size of the disk, so that no
//! offset is computed twice.
//!
//! ```
//! use ferry_wire::blk::{HEADER_BYTES, Limits, Request, Sizes};
//!
//! let limits = Limits { bytes: 1 << 20, block_bytes: 512, read_only: false, discard: true };
//! let mut header = [0; HEADER_BYTES];
//! header[8] = 3; // IN, from sector 3 on
//! let sizes = Sizes { readable: HEADER_BYTES, writable: 4096 + 1 };
//! assert_eq!(Request::decode(&header, sizes, &limits), Ok(Request::Read { offset: 1536, bytes: 4096 }));
//! ```

mod config;
mod request;
#[cfg(test)]
mod tests;

pub use config::{Config, DeviceFeatures};
pub use request::{
    DISCARD_BYTES_MAX, HEADER_BYTES, ID_BYTES, Limits, RANGE_BYTES, RANGES_MAX, Range, Refusal, Request, Sizes, Status,
    WRITE_ZEROES_BYTES_MAX,
};

/// The unit of all sectors on the wire, whatever the disk's blocks are (5.2.4).
pub const SECTOR_BYTES: u64 = 512;
