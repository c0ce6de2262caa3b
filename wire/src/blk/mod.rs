//! Requests and configuration of virtio-blk devices (VIRTIO 1.3, section 5.2).
//!
//! A request is a header, data in one direction, and one status byte, the last byte that the device may write.
//! [`Request::decode`] takes the header and the lengths of the readable and the writable part of a descriptor chain. A
//! driver may split the chain into descriptors anywhere (section 2.7.4.4). A decoded request lies within the disk, so
//! callers need no further checks of offsets.
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
    DISCARD_BYTES_MAX, HEADER_BYTES, ID_BYTES, Limits, RANGE_BYTES, RANGES_MAX, REQUEST_BYTES_MAX, Range, Refusal,
    Request, Sizes, Status, WRITE_ZEROES_BYTES_MAX,
};

/// The unit of all sectors on the wire, whatever the block size of the disk (section 5.2.4).
pub const SECTOR_BYTES: u64 = 512;
