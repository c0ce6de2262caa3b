//! The contract between disks and the exports that offer them.

use std::sync::Arc;

use crate::{Backing, Data, Errno, Input, Output, Result};

/// How large a disk is and how it likes to be addressed. What is said in bytes is a power of two unless it is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The size in bytes, a multiple of [`Self::logical_block_bytes`].
    pub bytes: u64,
    /// The smallest unit that can be read or written.
    pub logical_block_bytes: u32,
    /// The smallest unit that is written without reading the rest of it first.
    pub physical_block_bytes: u32,
    /// The preferred size of a transfer; 0: there is none.
    pub optimal_io_bytes: u32,
    /// The unit in which discarding frees space.
    pub discard_bytes: u32,
}

/// What a disk can do, for as long as it is open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskFeatures {
    /// Nothing may be written.
    pub read_only: bool,
    /// [`Disk::discard`] frees space.
    pub discard: bool,
    /// Reads and writes that answer [`Data::Bytes`], and [`Disk::flush`], may wait for a device: exports call them on
    /// threads of their own.
    pub slow: bool,
}

/// The bytes that a read or write is about. The export has checked that they lie within the disk, are whole
/// [logical blocks](Geometry::logical_block_bytes), and more than none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// The first byte.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
    /// The largest power of two that divides every address and every length of the pieces of the client's memory: what
    /// `O_DIRECT` asks about.
    pub alignment: usize,
}

impl BlockRange {
    /// The first byte after the range.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}

/// A disk. As a [`FileSystem`](crate::FileSystem), it says where bytes live or moves them itself.
///
/// * Calls come from many threads at once. Requests that overlap while both are under way are the client's mistake;
///   each byte then is one of either.
/// * **Written data** may be lost in a power failure until a [`flush`](Self::flush) that was called after the write ended
///   has ended; data written with `durable` may not.
/// * **Discarded data** reads as anything that this client wrote there before, or as zeros: never as somebody else's.
/// * **The size** may change at any time. The export asks [`look_again`](Self::look_again) now and then, and answers
///   requests past the end with an error itself; a disk that shrank in between answers a short read.
/// * **Errors** are the client's to see as failed requests; nothing else stops.
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
#[allow(unused_variables, reason = "default bodies name their arguments for whoever overrides them")]
pub trait Disk: Send + Sync {
    /// The size and units as they are now.
    fn geometry(&self) -> Geometry;

    /// What the disk can do.
    fn features(&self) -> DiskFeatures {
        DiskFeatures::default()
    }

    /// Tells this disk from others; exports may cut it off (virtio-blk: after 20 bytes).
    fn serial(&self) -> String;

    /// Reads a range. An extent's bytes are moved by the export; fewer than asked for are an error there.
    fn read(&self, at: &BlockRange, out: &mut dyn Output) -> Result<Data>;

    /// Writes a range; `durable`: the write ends when the data would survive a power failure.
    fn write(&self, at: &BlockRange, durable: bool, input: &mut dyn Input) -> Result<Data> {
        Err(Errno::ROFS)
    }

    /// Whether [`write`](Self::write) would wait until the bytes are written: exports then call it where nothing else waits for it.
    fn write_waits(&self, at: &BlockRange) -> bool {
        self.features().slow
    }

    /// Makes what was written durable. A descriptor is left to the export: it calls `fdatasync`. `None`: it is durable
    /// already.
    fn flush(&self) -> Result<Option<Arc<Backing>>> {
        Ok(None)
    }

    /// Frees the space of a range whose contents nobody needs any more. May take long.
    fn discard(&self, offset: u64, bytes: u64) -> Result<()> {
        Err(Errno::NOTSUP)
    }

    /// Makes a range read as zeros, whatever that takes. `may_unmap` allows to free its space. May take long.
    fn write_zeroes(&self, offset: u64, bytes: u64, may_unmap: bool, durable: bool) -> Result<()> {
        Err(Errno::ROFS)
    }

    /// Looks whether the size has changed, and answers whether it has. May take as long as a `stat`.
    fn look_again(&self) -> Result<bool> {
        Ok(false)
    }
}
