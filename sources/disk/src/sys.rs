//! Kernel interfaces for files and devices.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferry_vfs::{FileType, OFlags};
use rustix::fs::{AtFlags, Mode, SeekFrom, StatxFlags};
use rustix::io::Errno;

use crate::Error;

/// `_IO(0x12, 119)`: discard a range of a block device.
const BLKDISCARD: rustix::ioctl::Opcode = rustix::ioctl::opcode::none(0x12, 119);

/// How long to wait for a busy device, and the time between two attempts.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);

/// The alignments of `O_DIRECT` to try without information from the kernel (before Linux 6.1): some disks need the
/// first, all accept the second.
const ALIGNMENTS_TRIED: [usize; 2] = [512, 4096];

/// `TMPFS_MAGIC`: accepts `O_DIRECT` since Linux 6.5, but consists of the page cache.
const TMPFS: i64 = 0x0102_1994;

/// Opens a file or block device; a device for writing must not be in use on this host.
pub(crate) fn open(path: &Path, writes: bool) -> Result<File, Error> {
    let failed = |error: Errno| Error::Open { path: path.into(), reason: error.into() };
    let found = match rustix::fs::stat(path) {
        Err(Errno::NOENT) => return Err(Error::Missing(path.into())),
        found => found.map_err(failed)?,
    };
    // Checked before the open, because opening a FIFO would block, and opening some devices has side effects.
    let flags = match FileType::from_raw_mode(found.st_mode) {
        FileType::RegularFile => OFlags::empty(),
        FileType::BlockDevice if writes => OFlags::EXCL,
        FileType::BlockDevice => OFlags::empty(),
        _ => return Err(Error::Kind(path.into())),
    };
    let access = if writes { OFlags::RDWR } else { OFlags::RDONLY };
    let flags = access | flags | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let begun = Instant::now();
    let mut opened = rustix::fs::open(path, flags, Mode::empty());
    // A search for a free loop device opens each one exclusively for a moment.
    while matches!(opened, Err(Errno::BUSY)) && begun.elapsed() < PATIENCE {
        std::thread::sleep(PAUSE);
        opened = rustix::fs::open(path, flags, Mode::empty());
    }
    match opened {
        Ok(fd) => Ok(fd.into()),
        Err(Errno::BUSY) => Err(Error::DeviceBusy(path.into())),
        Err(error) => Err(failed(error)),
    }
}

/// A file created for a disk. It is removed on drop unless it becomes one.
#[must_use]
pub(crate) struct NewFile(Option<PathBuf>);

impl NewFile {
    /// Creates an empty file that only this user may read, unless the path exists.
    pub(crate) fn make_missing(path: &Path) -> Result<Option<Self>, Error> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        match rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) {
            Ok(_) => Ok(Some(Self(Some(path.into())))),
            Err(Errno::EXIST) => Ok(None),
            Err(error) => Err(Error::Open { path: path.into(), reason: error.into() }),
        }
    }

    pub(crate) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // A file with contents belongs to another process by now.
        if let Some(path) = &self.0
            && std::fs::metadata(path).is_ok_and(|found| found.len() == 0)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Returns whether a path leads to this file, or cannot be examined.
pub(crate) fn is_at(path: &Path, file: &File) -> bool {
    match (rustix::fs::stat(path), rustix::fs::fstat(file)) {
        (Ok(there), Ok(here)) => (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino),
        (Err(errno), _) => errno != Errno::NOENT,
        (Ok(_), Err(_)) => true,
    }
}

/// Reopens a file with other flags.
pub(crate) fn open_again(file: &File, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::open(link, flags | OFlags::CLOEXEC, Mode::empty())
}

/// Returns the size of a file or block device in bytes.
pub(crate) fn bytes(file: impl AsFd) -> rustix::io::Result<u64> {
    let found = rustix::fs::fstat(&file)?;
    match FileType::from_raw_mode(found.st_mode) {
        FileType::BlockDevice => rustix::fs::seek(&file, SeekFrom::End(0)),
        _ => Ok(u64::try_from(found.st_size).unwrap_or(0)),
    }
}

/// Returns the alignment of memory and offsets for `O_DIRECT`; `None`: not supported.
pub(crate) fn direct_alignment(direct: impl AsFd) -> Option<usize> {
    let known = rustix::fs::statx(&direct, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    if let Some(known) = known.filter(|known| known.stx_mask & StatxFlags::DIOALIGN.bits() != 0) {
        let larger = known.stx_dio_offset_align.max(known.stx_dio_mem_align);
        return usize::try_from(larger).ok().filter(|align| *align > 0 && known.stx_dio_offset_align > 0);
    }
    if rustix::fs::fstatfs(&direct).is_ok_and(|found| found.f_type == TMPFS) {
        return None;
    }
    let mut room = vec![0u8; 3 * 4096];
    let start = room.as_ptr().align_offset(4096);
    ALIGNMENTS_TRIED.into_iter().find(|align| {
        // A probe, not a transfer of data: aligned to exactly this, so that a smaller alignment is not found sufficient.
        let piece = &mut room[start + align..][..*align];
        rustix::io::pread(&direct, piece, *align as u64).is_ok()
    })
}

/// Discards a range of a block device.
pub(crate) fn discard_device(device: impl AsFd, offset: u64, bytes: u64) -> rustix::io::Result<()> {
    // SAFETY: BLKDISCARD reads two 64-bit numbers, offset and length, through its argument.
    unsafe { rustix::ioctl::ioctl(device, rustix::ioctl::Setter::<BLKDISCARD, [u64; 2]>::new([offset, bytes])) }
}

/// Returns a number from a block device's queue directory in sysfs; partitions use their disk's.
pub(crate) fn queue_limit(file: impl AsFd, name: &str) -> Option<u64> {
    let device = rustix::fs::fstat(file).ok()?.st_rdev;
    let node = format!("/sys/dev/block/{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let text =
        ["queue", "../queue"].iter().find_map(|at| std::fs::read_to_string(format!("{node}/{at}/{name}")).ok())?;
    text.trim().parse().ok()
}
