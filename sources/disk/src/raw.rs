//! Raw disks: the bytes of a file or block device.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ferry_vfs::{
    Backing, BlockRange, Data, Disk, DiskFeatures, Errno, Extent, FallocateFlags, FileType, Geometry, Input, OFlags,
    Output, Result, SizeChange,
};

use crate::syncs::Syncs;
use crate::{Cache, Error, Options, lock, sys};

/// The unit of sizes in bytes, and the default block size.
const SECTOR_BYTES: u64 = 512;

/// The allocation unit of nearly all file systems, which nearly all disks write without reading it first.
const BLOCK_BYTES: u32 = 4096;

/// The size of copies in bytes when the client's memory is not aligned for `O_DIRECT`.
const COPIED_BYTES: usize = 256 << 10;

/// Zeros for file systems that cannot zero a range.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// An endless source of zeros.
struct Zeros;

impl Input for Zeros {
    fn take(&mut self, bytes: &mut [u8]) -> usize {
        bytes.fill(0);
        bytes.len()
    }
}

/// The descriptors for transfers: for writes that end when cached, and for those that end when durable.
struct DescriptorPair {
    plain: Arc<Backing>,
    durable: Arc<Backing>,
}

/// Descriptors for direct I/O, with its alignment of memory and offsets.
struct Direct {
    pair: DescriptorPair,
    alignment: usize,
}

/// A raw disk.
pub(crate) struct RawDisk {
    /// Descriptors for the page cache, also for transfers that are not aligned for `O_DIRECT`. The kernel keeps both
    /// coherent except in the case of [`Direct::needs_copy`].
    cached: DescriptorPair,
    direct: Option<Direct>,
    /// Something was written through the page cache, which a failed write to the disk loses.
    is_buffered: AtomicBool,
    syncs: Syncs,
    file: File,
    is_device: bool,
    bytes: AtomicU64,
    blocks: Blocks,
    features: DiskFeatures,
    serial: String,
}

/// The constant units of a disk.
#[derive(Clone, Copy)]
struct Blocks {
    logical: u32,
    physical: u32,
    optimal: u32,
    discard: u32,
}

impl RawDisk {
    /// Wraps an open and locked file.
    pub(crate) fn new(file: File, path: &Path, options: &Options) -> std::result::Result<Self, Error> {
        let failed = |error: Errno| Error::Open { path: path.into(), reason: error.into() };
        if let Some(bytes) = options.grow_to {
            grow(&file, path, bytes)?;
        }
        let found = rustix::fs::fstat(&file).map_err(failed)?;
        let is_device = FileType::from_raw_mode(found.st_mode) == FileType::BlockDevice;
        let blocks = if is_device { Blocks::of_device(&file) } else { Blocks::of_file(found.st_blksize) };
        let raw_bytes = sys::bytes(&file).map_err(failed)?;
        let bytes = raw_bytes - raw_bytes % u64::from(blocks.logical);
        if bytes == 0 {
            return Err(Error::too_small(path, raw_bytes, blocks.logical.into()));
        }
        if bytes != raw_bytes {
            tracing::warn!(
                "{}: the last {} bytes are not a whole block, and not offered",
                path.display(),
                raw_bytes - bytes
            );
        }
        let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let cached = DescriptorPair::open(&file, access, Backing::new).map_err(failed)?;
        let direct = match options.cache.unwrap_or(Cache::None) {
            Cache::None => Direct::open(&file, access),
            Cache::Writeback | Cache::Writethrough => None,
        };
        if direct.is_none() && options.cache.unwrap_or(Cache::None) == Cache::None {
            tracing::info!("{} cannot be used with O_DIRECT: its data goes through the page cache", path.display());
        }
        let features = DiskFeatures {
            read_only: options.read_only,
            discard: !options.read_only && can_discard(&file, is_device, raw_bytes),
            slow: false,
        };
        let serial = options.serial_of(path);
        // Without O_DIRECT, the previous server may have left something in the page cache.
        let (is_buffered, syncs) = (AtomicBool::new(direct.is_none()), Syncs::default());
        let bytes = bytes.into();
        Ok(Self { cached, direct, is_buffered, syncs, file, is_device, bytes, blocks, features, serial })
    }

    /// The descriptors for a direct transfer, if it can be one.
    fn direct(&self, at: &BlockRange) -> Option<&DescriptorPair> {
        let direct = self.direct.as_ref().filter(|direct| direct.fits_place(at) && direct.fits_memory(at));
        direct.map(|direct| &direct.pair)
    }

    /// The descriptor for a transfer.
    fn pick(&self, at: &BlockRange, durable: bool) -> Data {
        let pair = self.direct(at).unwrap_or(&self.cached);
        let file = Arc::clone(if durable { &pair.durable } else { &pair.plain });
        Data::Extent(Extent { file, offset: at.offset })
    }

    fn writable(&self) -> Result<()> {
        if self.features.read_only { Err(Errno::ROFS) } else { Ok(()) }
    }

    fn fallocate(&self, flags: FallocateFlags, offset: u64, bytes: u64) -> Result<()> {
        if !(offset | bytes).is_multiple_of(BLOCK_BYTES.into()) {
            // Parts of blocks are zeroed in the page cache.
            self.is_buffered.store(true, Ordering::Relaxed);
        }
        rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(&self.file, flags | FallocateFlags::KEEP_SIZE, offset, bytes)
        })
    }
}

impl Disk for RawDisk {
    fn geometry(&self) -> Geometry {
        Geometry {
            bytes: self.bytes.load(Ordering::Relaxed),
            logical_block_bytes: self.blocks.logical,
            physical_block_bytes: self.blocks.physical,
            optimal_io_bytes: self.blocks.optimal,
            discard_bytes: self.blocks.discard,
        }
    }

    fn features(&self) -> DiskFeatures {
        self.features
    }

    fn serial(&self) -> String {
        self.serial.clone()
    }

    fn read(&self, at: &BlockRange, _: &mut dyn Output) -> Result<Data> {
        Ok(self.pick(at, false))
    }

    fn write_waits(&self, at: &BlockRange) -> bool {
        self.direct.as_ref().is_some_and(|direct| direct.needs_copy(at))
    }

    fn write(&self, at: &BlockRange, durable: bool, input: &mut dyn Input) -> Result<Data> {
        self.writable()?;
        match &self.direct {
            Some(direct) if direct.needs_copy(at) => direct.write_copy(at, durable, input).map(Data::Bytes),
            _ => {
                if self.direct(at).is_none() {
                    self.is_buffered.store(true, Ordering::Relaxed);
                }
                Ok(self.pick(at, durable))
            }
        }
    }

    fn flush_waits(&self) -> bool {
        !self.features.read_only && self.is_buffered.load(Ordering::Relaxed)
    }

    fn flush(&self) -> Result<Option<Arc<Backing>>> {
        if self.features.read_only {
            return Ok(None);
        }
        let file = &self.cached.plain;
        if !self.flush_waits() {
            return Ok(Some(Arc::clone(file)));
        }
        let synced = self.syncs.run(|| Ok(rustix::fs::fdatasync(&**file)?));
        synced.map(|()| None).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    fn discard(&self, offset: u64, bytes: u64) -> Result<()> {
        self.writable()?;
        match (bytes, self.is_device) {
            (0, _) => Ok(()),
            (_, true) => sys::discard_device(&self.file, offset, bytes),
            (_, false) => self.fallocate(FallocateFlags::PUNCH_HOLE, offset, bytes),
        }
    }

    fn write_zeroes(&self, offset: u64, bytes: u64, may_unmap: bool, durable: bool) -> Result<()> {
        self.writable()?;
        if bytes == 0 {
            return Ok(());
        }
        let ways = [FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE];
        let ways = if may_unmap { &ways[..] } else { &ways[1..] };
        let mut outcome = Err(Errno::NOTSUP);
        for way in ways {
            outcome = self.fallocate(*way, offset, bytes);
            if !matches!(outcome, Err(Errno::NOTSUP | Errno::NOSYS | Errno::INVAL)) {
                break;
            }
        }
        match outcome {
            Err(Errno::NOTSUP | Errno::NOSYS | Errno::INVAL) => {
                let at = BlockRange { offset, bytes, alignment: 1 };
                match &self.direct {
                    Some(direct) if direct.needs_copy(&at) => _ = direct.write_copy(&at, durable, &mut Zeros)?,
                    _ => {
                        self.is_buffered.store(true, Ordering::Relaxed);
                        write_zeros(&self.file, offset, bytes)?;
                    }
                }
            }
            outcome => outcome?,
        }
        if durable { rustix::fs::fdatasync(&self.file) } else { Ok(()) }
    }

    fn refresh_geometry(&self) -> Result<bool> {
        let now = sys::bytes(&self.file)?;
        let now = now - now % u64::from(self.blocks.logical);
        Ok(self.bytes.swap(now, Ordering::Relaxed) != now)
    }

    fn size_change(&self) -> SizeChange<'_> {
        if self.is_device { SizeChange::AnyTime } else { SizeChange::OfFile(self.file.as_fd()) }
    }
}

impl Blocks {
    fn of_file(block_bytes: impl TryInto<u32>) -> Self {
        // Some network file systems report megabytes here: a preferred transfer size, not a block size.
        let allocation = block_bytes.try_into().ok().filter(|bytes| *bytes <= 64 << 10 && bytes.is_power_of_two());
        let allocation = allocation.unwrap_or(BLOCK_BYTES).max(BLOCK_BYTES);
        Self { logical: 512, physical: BLOCK_BYTES, optimal: 0, discard: allocation }
    }

    fn of_device(device: &File) -> Self {
        let logical = rustix::fs::ioctl_blksszget(device).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(512);
        let physical = rustix::fs::ioctl_blkpbszget(device).ok().filter(|bytes| bytes.is_power_of_two());
        let limit = |name| sys::queue_limit(device, name).and_then(|bytes| u32::try_from(bytes).ok());
        let power = |bytes: &u32| bytes.is_power_of_two();
        Self {
            logical,
            physical: physical.unwrap_or(logical).max(logical),
            optimal: limit("optimal_io_size").filter(power).unwrap_or(0),
            discard: limit("discard_granularity").filter(power).unwrap_or(logical).max(logical),
        }
    }
}

impl DescriptorPair {
    fn open(file: &File, access: OFlags, wrap: fn(std::os::fd::OwnedFd) -> Backing) -> rustix::io::Result<Self> {
        let open = |flags| {
            let fd = sys::open_again(file, access | flags)?;
            if access.contains(OFlags::RDWR) {
                lock::hold(&fd);
            }
            Ok(Arc::new(wrap(fd).long_lived()))
        };
        Ok(Self { plain: open(OFlags::empty())?, durable: open(OFlags::DSYNC)? })
    }
}

impl Direct {
    fn open(file: &File, access: OFlags) -> Option<Self> {
        let pair = DescriptorPair::open(file, access | OFlags::DIRECT, Backing::waiting).ok()?;
        let alignment = sys::direct_alignment(&*pair.plain)?;
        Some(Self { pair, alignment })
    }

    fn fits_place(&self, at: &BlockRange) -> bool {
        [at.offset, at.bytes].iter().all(|number| number.is_multiple_of(self.alignment as u64))
    }

    fn fits_memory(&self, at: &BlockRange) -> bool {
        at.alignment.is_multiple_of(self.alignment)
    }

    /// Returns whether an unaligned write needs an aligned copy instead of the page cache. If direct writes may be
    /// smaller than a block, a write through the page cache to another part of the block would read the whole block and
    /// later overwrite concurrent direct writes.
    fn needs_copy(&self, at: &BlockRange) -> bool {
        self.alignment < BLOCK_BYTES as usize && self.fits_place(at) && !self.fits_memory(at)
    }

    /// Writes directly from an aligned copy; waits for the disk.
    fn write_copy(&self, at: &BlockRange, durable: bool, input: &mut dyn Input) -> Result<usize> {
        let file = if durable { &self.pair.durable } else { &self.pair.plain };
        let bytes = usize::try_from(at.bytes).map_err(|_| Errno::INVAL)?;
        let mut memory = vec![0; bytes.min(COPIED_BYTES) + self.alignment];
        let skew = memory.as_ptr().align_offset(self.alignment).min(self.alignment);
        let mut done = 0;
        while done < bytes {
            let piece = &mut memory[skew..][..COPIED_BYTES.min(bytes - done)];
            if input.take(piece) < piece.len() {
                return Err(Errno::FAULT);
            }
            let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(file, piece, at.offset + done as u64))?;
            if written < piece.len() {
                return Err(Errno::IO);
            }
            done += written;
        }
        Ok(done)
    }
}

/// Returns whether discarding frees space. The test punches a range past the end of the file.
fn can_discard(file: &File, is_device: bool, bytes: u64) -> bool {
    if is_device {
        return sys::queue_limit(file, "discard_max_bytes").is_some_and(|bytes| bytes > 0);
    }
    let past_end = bytes.next_multiple_of(BLOCK_BYTES.into());
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, past_end, BLOCK_BYTES.into()).is_ok()
}

fn write_zeros(file: &File, mut offset: u64, mut bytes: u64) -> Result<()> {
    while bytes > 0 {
        let piece = usize::try_from(bytes).map_or(ZEROS.len(), |bytes| bytes.min(ZEROS.len()));
        file.write_all_at(&ZEROS[..piece], offset)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        offset += piece as u64;
        bytes -= piece as u64;
    }
    Ok(())
}

/// Returns the size of a disk for a requested size.
pub(crate) fn rounded(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(SECTOR_BYTES).unwrap_or(bytes)
}

/// Grows a file if it is smaller; returns its size.
pub(crate) fn grow(file: &File, path: &Path, bytes: u64) -> std::result::Result<u64, Error> {
    let failed = |reason| Error::Grow { path: path.into(), bytes, reason };
    let now = sys::bytes(file).map_err(|error| failed(error.into()))?;
    let wanted = rounded(bytes);
    if wanted > now {
        file.set_len(wanted).map_err(failed)?;
    }
    Ok(wanted.max(now))
}
