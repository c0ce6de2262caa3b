//! Changes of the data of files.

use std::os::fd::AsFd;
use std::sync::MutexGuard;

use ferry_engine::{WithoutFsetid, write_input};
use ferry_vfs::sync::lock;
use ferry_vfs::{
    Attr, Caller, CopyRange, Data, Errno, FallocateFlags, Handle, Ino, Input, IoRange, OFlags, Result, SetAttr,
};

use crate::account::Reservation;
use crate::charges::Held;
use crate::{BLOCK, Quota, sys, whole_blocks};

/// The maximum size of one copy in bytes, and so of its reservation. Clients continue where it stopped.
const COPY_BYTES_MAX: u64 = 64 << 20;

const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
const FS_IOC_FSSETXATTR: u32 = 0x401c_5820;
/// `struct fsxattr`.
const FSXATTR_BYTES: usize = 28;
/// `FS_XFLAG_REALTIME` and `RTINHERIT` (extents of the realtime device), `EXTSIZE`, `EXTSZINHERIT`, `COWEXTSIZE`.
const EXTENT_XFLAGS: u32 = 0x1 | 0x100 | 0x800 | 0x1000 | 0x1_0000;

/// Room for a write or a part of it.
struct Granted<'a> {
    reservation: Reservation<'a>,
    len: u64,
    /// The write relies on storage that the file has already.
    _layout: Option<MutexGuard<'a, ()>>,
}

impl Quota {
    /// Reserves the room that a range of a file may need, which begins at `place`. With little room, reserves it for
    /// a part of the range, but not for an empty one.
    fn grant<'a>(
        &'a self,
        cx: &Caller<'_>,
        (held, handle): (&'a Held<'a>, Handle),
        place: &dyn Fn() -> Result<u64>,
        len: u64,
    ) -> Result<Granted<'a>> {
        let range = |offset: u64| (offset - offset % BLOCK, offset.saturating_add(len));
        let (begin, end) = range(place()?);
        if let Some(reservation) = self.bytes.reserve(whole_blocks(end - begin)) {
            return Ok(Granted { reservation, len, _layout: None });
        }
        // Parts of the range may have storage. Nothing frees it while `layout` is held.
        let layout = lock(&held.charge().layout);
        // Others may have appended meanwhile.
        let offset = place()?;
        let (begin, end) = range(offset);
        let file = self.source.backing(cx, held.ino, handle).ok_or_else(|| self.is_full())?;
        let holes = sys::holes(&*file, begin..end.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX))?;
        let (room, mut needed, mut fits_to) = (self.bytes.room(), 0, end);
        for hole in holes {
            let more = whole_blocks(hole.end - hole.start);
            if more > room - needed {
                let part = (room - needed) - (room - needed) % BLOCK.cast_signed();
                needed += part;
                fits_to = end.min(hole.start.saturating_add(part.cast_unsigned()));
                break;
            }
            needed += more;
        }
        let fits = fits_to.saturating_sub(offset);
        if fits == 0 && len > 0 {
            return Err(self.is_full());
        }
        let reservation = self.bytes.reserve(needed).ok_or_else(|| self.is_full())?;
        Ok(Granted { reservation, len: fits, _layout: Some(layout) })
    }

    pub(crate) fn write(&self, cx: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<Data> {
        let held = self.hold_open(cx, at.ino, at.handle)?;
        let written = self.write_granted(cx, &held, at, input);
        self.put_back(held);
        written.map(Data::Bytes)
    }

    fn write_granted(&self, cx: &Caller<'_>, held: &Held<'_>, at: &IoRange, input: &mut dyn Input) -> Result<usize> {
        let place = || match at.flags.contains(OFlags::APPEND) {
            // The host places the data at the end.
            true => Ok(self.source.getattr(cx, at.ino, Some(at.handle))?.size),
            false => Ok(at.offset),
        };
        let granted = self.grant(cx, (held, at.handle), &place, at.len.into())?;
        let at = IoRange { len: u32::try_from(granted.len).map_or(at.len, |len| len.min(at.len)), ..*at };
        let mut input = Part { input, rest: at.len as usize };
        let written = match self.source.write(cx, &at, &mut input) {
            Ok(Data::Bytes(count)) => Ok(count),
            Ok(Data::Extent(extent)) => {
                let _guard = at.clear_privileges.then(WithoutFsetid::enter).transpose()?;
                let written = write_input(extent.file.as_fd(), extent.offset, at.len as usize, &mut input);
                if let Some(memory) = extent.file.memory() {
                    memory.written();
                }
                written
            }
            Err(error) => Err(error),
        };
        self.measure(cx, held, Some(at.handle), Some(granted.reservation));
        written
    }

    pub(crate) fn fallocate(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        offset: u64,
        len: u64,
        flags: FallocateFlags,
    ) -> Result<()> {
        let held = self.hold_open(cx, ino, handle)?;
        let frees = flags.intersects(FallocateFlags::PUNCH_HOLE | FallocateFlags::COLLAPSE_RANGE);
        // Inserting moves what is allocated, and may split a block.
        let moves = flags.contains(FallocateFlags::INSERT_RANGE);
        let allocated = (|| {
            let _removal = frees.then(|| self.removals.begin());
            let _layout = (frees || moves).then(|| lock(&held.charge().layout));
            let granted = match (frees, moves) {
                (true, _) => None,
                (_, true) => Some((self.reserve_bytes(BLOCK)?, None)),
                _ => {
                    let granted = self.grant(cx, (&held, handle), &|| Ok(offset), len)?;
                    if granted.len < len {
                        return Err(self.is_full());
                    }
                    Some((granted.reservation, granted._layout))
                }
            };
            let allocated = self.source.fallocate(cx, ino, handle, offset, len, flags);
            let (reservation, _layout) = granted.unzip();
            self.measure(cx, &held, Some(handle), reservation);
            allocated
        })();
        self.put_back(held);
        allocated
    }

    pub(crate) fn copy_file_range(&self, cx: &Caller<'_>, copy: &CopyRange) -> Result<u64> {
        let (ino, handle, offset) = copy.to;
        let held = self.hold_open(cx, ino, handle)?;
        let copied = (|| {
            // A source that is short needs less room than its client asks for.
            let size = self.source.getattr(cx, copy.from.0, Some(copy.from.1))?.size;
            let len = copy.len.min(COPY_BYTES_MAX).min(size.saturating_sub(copy.from.2));
            let granted = self.grant(cx, (&held, handle), &|| Ok(offset), len)?;
            let copied = self.source.copy_file_range(cx, &CopyRange { len: granted.len, ..*copy });
            self.measure(cx, &held, Some(handle), Some(granted.reservation));
            copied
        })();
        self.put_back(held);
        copied
    }

    /// A new size may free storage. A larger one makes a hole, which needs none until it is written.
    pub(crate) fn setattr(&self, cx: &Caller<'_>, ino: Ino, handle: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        if set.size.is_none() {
            return self.source.setattr(cx, ino, handle, set);
        }
        let held = match handle {
            Some(handle) => self.hold_open(cx, ino, handle),
            None => self.hold(cx, ino),
        }?;
        let changed = {
            let _removal = self.removals.begin();
            let _layout = lock(&held.charge().layout);
            let changed = self.source.setattr(cx, ino, handle, set);
            self.measure(cx, &held, handle, None);
            changed
        };
        self.put_back(held);
        changed
    }

    /// A change of the extent size is `PERM`: then a write of one byte could allocate gigabytes.
    pub(crate) fn ioctl(
        &self,
        cx: &Caller<'_>,
        ino: Ino,
        handle: Handle,
        command: u32,
        input: &[u8],
        out_bytes_max: usize,
    ) -> Result<Vec<u8>> {
        if command == FS_IOC_FSSETXATTR {
            let now = self.source.ioctl(cx, ino, handle, FS_IOC_FSGETXATTR, &[], FSXATTR_BYTES)?;
            if extent_sizes(&now) != extent_sizes(input) {
                return Err(Errno::PERM);
            }
        }
        self.source.ioctl(cx, ino, handle, command, input, out_bytes_max)
    }
}

/// Returns what determines the size of extents in a `struct fsxattr`: flags, `fsx_extsize`, `fsx_cowextsize`.
fn extent_sizes(fsxattr: &[u8]) -> Option<[u32; 3]> {
    let field = |at| fsxattr.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes);
    Some([field(0)? & EXTENT_XFLAGS, field(4)?, field(16)?])
}

/// The first bytes of an input.
struct Part<'a> {
    input: &'a mut dyn Input,
    rest: usize,
}

impl Input for Part<'_> {
    fn take(&mut self, bytes: &mut [u8]) -> usize {
        let most = bytes.len().min(self.rest);
        let taken = self.input.take(&mut bytes[..most]);
        self.rest -= taken;
        taken
    }
}
