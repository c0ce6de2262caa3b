//! Which parts of a file have no storage yet.
#![allow(unsafe_code, reason = "one ioctl; the block says why it is sound")]

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use ferry_vfs::{Errno, Result};
use rustix::fs::SeekFrom;

use crate::BLOCK;

/// Extents per call; a write of 1 MiB has at most 256 blocks.
const EXTENTS: usize = 64;
/// The maximum number of distinct holes. The rest of the range counts as a hole.
const HOLES_MAX: usize = 4096;

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` with room for extents.
#[repr(C)]
struct Map {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [Extent; EXTENTS],
}

const _: () = assert!(size_of::<Extent>() == 56 && std::mem::offset_of!(Map, extents) == 32);
#[allow(clippy::cast_possible_truncation, reason = "64")]
const COUNT: u32 = EXTENTS as u32;

/// Returns the first parts of a range that have storage, or space reserved for it, in order.
fn first_extents(fd: BorrowedFd<'_>, range: &Range<u64>) -> Result<Vec<Range<u64>>> {
    // `Ioctl` is signed with musl.
    #[allow(clippy::cast_possible_wrap, reason = "the kernel reads 32 bits")]
    const FS_IOC_FIEMAP: libc::Ioctl = 0xc020_660b_u32 as libc::Ioctl;
    let extents = [Extent::default(); EXTENTS];
    let length = range.end - range.start;
    let mut map = Map { start: range.start, length, flags: 0, mapped: 0, count: COUNT, reserved: 0, extents };
    // SAFETY: the kernel reads and writes a `struct fiemap` with `count` extents behind it, which is what `map` is.
    if unsafe { libc::ioctl(fd.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) } < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    let found = map.extents.iter().take(map.mapped as usize);
    Ok(found.map(|extent| extent.logical..extent.logical.saturating_add(extent.length)).collect())
}

/// Returns the next part of a range that has data.
fn next_data(fd: BorrowedFd<'_>, range: &Range<u64>) -> Result<Option<Range<u64>>> {
    let start = match rustix::fs::seek(fd, SeekFrom::Data(range.start)) {
        Err(Errno::NXIO) => return Ok(None),
        other => other?,
    };
    if start >= range.end {
        return Ok(None);
    }
    // The block with the file's end is allocated as a whole.
    let end = rustix::fs::seek(fd, SeekFrom::Hole(start))?;
    Ok(Some(start..end.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX)))
}

/// Returns the parts of a range that have no storage. File systems that cannot tell which parts are allocated tell
/// which have data; then allocated parts without data are among the result.
pub(crate) fn holes(fd: impl AsFd, range: Range<u64>) -> Result<Vec<Range<u64>>> {
    let fd = fd.as_fd();
    let (mut holes, mut at, mut by_extents) = (Vec::new(), range.start, true);
    while at < range.end && holes.len() < HOLES_MAX {
        let rest = at..range.end;
        let found = match by_extents.then(|| first_extents(fd, &rest)) {
            Some(Ok(found)) => found,
            _ => {
                by_extents = false;
                next_data(fd, &rest)?.into_iter().collect()
            }
        };
        let before = at;
        for extent in found {
            if extent.start > at {
                holes.push(at..extent.start.min(range.end));
            }
            at = at.max(extent.end);
        }
        if at == before {
            break;
        }
    }
    if at < range.end {
        holes.push(at..range.end);
    }
    Ok(holes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn ranges_without_storage_are_holes() {
        let found = |file: &std::fs::File, range| {
            let holes = holes(file, range).unwrap();
            holes.into_iter().map(|hole| (hole.start, hole.end)).collect::<Vec<_>>()
        };
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        assert_eq!(found(&file, 0..8192), [(0, 8192)]);
        file.write_all_at(&[1; 4096], 4096).unwrap();
        file.write_all_at(&[1; 4096], 12288).unwrap();
        assert_eq!(found(&file, 0..20480), [(0, 4096), (8192, 12288), (16384, 20480)]);
        assert_eq!(found(&file, 4096..8192), []);
        assert_eq!(found(&file, 1 << 30..(1 << 30) + 4096), [(1 << 30, (1 << 30) + 4096)]);
        // More extents than one call returns.
        (0..200).for_each(|n| file.write_all_at(&[1; 4096], n * 8192).unwrap());
        assert_eq!(found(&file, 0..200 * 8192).len(), 198);
    }
}
