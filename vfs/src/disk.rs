//! The contract between disks and the exports that offer them.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::{Backing, Data, Errno, Input, Output, Result};

/// The size and the preferred units of a disk, in bytes. Units are powers of two; those that are only preferred may be 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The size in bytes, a multiple of [`Self::logical_block_bytes`].
    pub bytes: u64,
    /// The smallest unit that can be read or written.
    pub logical_block_bytes: u32,
    /// The smallest unit that is written without reading the rest of it first.
    pub physical_block_bytes: u32,
    /// The preferred size of a transfer in bytes, or 0.
    pub optimal_io_bytes: u32,
    /// The unit in which discarding frees space.
    pub discard_bytes: u32,
}

/// The features of a disk. They do not change while it is open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskFeatures {
    /// The disk is read-only.
    pub read_only: bool,
    /// [`Disk::discard`] frees space.
    pub discard: bool,
    /// Reads and writes that return [`Data::Bytes`], and [`Disk::flush`], may wait for a device: exports call them on
    /// separate threads.
    pub slow: bool,
}

/// The range of a read or write. The export has checked that it lies within the disk, consists of whole
/// [logical blocks](Geometry::logical_block_bytes), and is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// The first byte.
    pub offset: u64,
    /// The length in bytes.
    pub bytes: u64,
    /// The largest power of two that divides the addresses and lengths of all pieces of the client's memory, for
    /// `O_DIRECT`.
    pub alignment: usize,
}

impl BlockRange {
    /// Returns the offset of the first byte after the range.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}

/// How the size of a disk changes while it is open.
#[derive(Clone, Copy, Debug)]
pub enum SizeChange<'a> {
    /// It does not.
    Never,
    /// With the length of this file.
    OfFile(BorrowedFd<'a>),
    /// At any time, without notice: exports check it each second.
    AnyTime,
}

/// A disk. Like a [`FileSystem`](crate::FileSystem), it returns extents or moves the bytes itself.
///
/// * Calls come from many threads at once. A client must not send overlapping requests concurrently; if it does, each
///   byte has the value of one of them.
/// * **Written data** may be lost in a power failure until a [`flush`](Self::flush) that began after the write ended has
///   ended; data written with `durable` may not.
/// * **Discarded data** reads as zeros or as earlier data of this client at that place, never as data of another one.
/// * **The size** may change, as [`size_change`](Self::size_change) says. The export calls
///   [`refresh_geometry`](Self::refresh_geometry) when it may have, and itself refuses requests past the end; a disk that shrank since then returns a short read.
/// * **Errors** fail the client's request; nothing else stops.
///
/// ```
/// use ferry_vfs::*;
///
/// /// A disk of zeros that forgets what is written.
/// struct Null;
///
/// impl Disk for Null {
///     fn geometry(&self) -> Geometry {
///         let (logical, physical) = (512, 4096);
///         Geometry {
///             bytes: 1 << 30,
///             logical_block_bytes: logical,
///             physical_block_bytes: physical,
///             optimal_io_bytes: 0,
///             discard_bytes: physical,
///         }
///     }
///     fn serial(&self) -> String {
///         "null".into()
///     }
///     fn read(&self, at: &BlockRange, out: &mut dyn Output) -> Result<Data> {
///         Ok(Data::Bytes((0..at.bytes / 512).map(|_| out.put(&[0; 512])).sum()))
///     }
///     fn write(&self, at: &BlockRange, _durable: bool, _: &mut dyn Input) -> Result<Data> {
///         usize::try_from(at.bytes).map(Data::Bytes).map_err(|_| Errno::INVAL)
///     }
///     fn write_zeroes(&self, _: u64, _: u64, _may_unmap: bool, _durable: bool) -> Result<()> {
///         Ok(())
///     }
/// }
///
/// let at = BlockRange { offset: 0, bytes: 1024, alignment: 512 };
/// let mut out = Vec::new();
/// assert_eq!(Null.read(&at, &mut out)?.bytes(), Some(1024));
/// # Ok::<(), Errno>(())
/// ```
#[allow(unused_variables, reason = "default bodies name their arguments for implementations")]
pub trait Disk: Send + Sync {
    /// Returns the current size and units.
    fn geometry(&self) -> Geometry;

    /// Returns the features of the disk.
    fn features(&self) -> DiskFeatures {
        DiskFeatures::default()
    }

    /// Returns a string that identifies the disk. Exports may truncate it (virtio-blk: to 20 bytes).
    fn serial(&self) -> String;

    /// Reads a range. The export moves the bytes of an extent; fewer bytes than requested are an error there. Errors
    /// are those of the device (`IO`).
    fn read(&self, at: &BlockRange, out: &mut dyn Output) -> Result<Data>;

    /// Writes a range. With `durable`, the write ends when the data would survive a power failure. Errors are those
    /// of the device (`IO`, `NOSPC`); the default returns `ROFS`.
    fn write(&self, at: &BlockRange, durable: bool, input: &mut dyn Input) -> Result<Data> {
        Err(Errno::ROFS)
    }

    /// Returns whether [`write`](Self::write) would block until the bytes are written. Exports then call it on a thread
    /// where it blocks nothing else.
    fn write_waits(&self, at: &BlockRange) -> bool {
        self.features().slow
    }

    /// Returns whether [`flush`](Self::flush) would block until the data is durable. Exports then call it on a thread where it blocks
    /// nothing else.
    fn flush_waits(&self) -> bool {
        self.features().slow
    }

    /// Makes written data durable. If it returns a descriptor, the export calls `fdatasync` on it. `None`: the data
    /// is durable already. Errors (`IO`) mean that written data may be lost.
    fn flush(&self) -> Result<Option<Arc<Backing>>> {
        Ok(None)
    }

    /// Discards a range: frees its space. The export has checked that it lies within the disk and consists of whole
    /// [logical blocks](Geometry::logical_block_bytes). It may take long. The default returns `NOTSUP`.
    fn discard(&self, offset: u64, bytes: u64) -> Result<()> {
        Err(Errno::NOTSUP)
    }

    /// Zeroes a range, checked as for [`Self::discard`]. `may_unmap` allows freeing its space; `durable` is that of
    /// [`Self::write`]. It may take long. The default returns `ROFS`.
    fn write_zeroes(&self, offset: u64, bytes: u64, may_unmap: bool, durable: bool) -> Result<()> {
        Err(Errno::ROFS)
    }

    /// Checks whether the size has changed, and returns whether it has. Costs about one `stat`.
    fn refresh_geometry(&self) -> Result<bool> {
        Ok(false)
    }

    /// Returns when the size may change. The same for as long as the disk is open.
    fn size_change(&self) -> SizeChange<'_> {
        SizeChange::AnyTime
    }
}
