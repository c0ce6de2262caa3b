//! Files as memfds, with a limit that is enforced by allocating before each write.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, FallocateFlags, Ino, Input, Result, Timespec};
use rustix::fs::{MemfdFlags, SeekFrom};

use super::file::File;
use crate::store::{Space, WriteAt};

const PAGE_BYTES: u64 = 4096;
/// `st_blocks` counts in these.
const BLOCK_BYTES: u64 = 512;
/// Writes go through a buffer on the stack.
const BUFFER_BYTES: usize = 16 << 10;

/// All memfds, by inode.
#[derive(Debug)]
pub(super) struct Memfds {
    files: Mutex<HashMap<Ino, Arc<File>>>,
    limit: u64,
    used: AtomicU64,
}

fn allocated(file: &File) -> Result<u64> {
    Ok(file.usage()?.blocks * BLOCK_BYTES)
}

/// Returns the number of bytes of pages from `start` to `end` that may be holes. Allocated but unwritten pages also
/// look like holes; they are counted twice for a moment, so a write there may be refused when little room is left.
fn missing(file: &File, start: u64, end: u64) -> Result<u64> {
    let size = file.usage()?.size;
    let mut missing = 0;
    let mut at = start;
    while at < end {
        let data = match rustix::fs::seek(file.as_fd(), SeekFrom::Data(at)) {
            Ok(data) => data.min(end),
            // No data follow before the end of the file.
            Err(Errno::NXIO) => end,
            Err(error) => return Err(error),
        };
        missing += data - at;
        if data == end {
            break;
        }
        at = match rustix::fs::seek(file.as_fd(), SeekFrom::Hole(data)) {
            Ok(hole) if hole < size => hole,
            // SEEK_HOLE reports the end of the file, but the rest of its page is allocated.
            Ok(_) | Err(Errno::NXIO) => size.next_multiple_of(PAGE_BYTES),
            Err(error) => return Err(error),
        };
    }
    Ok(missing)
}

impl Memfds {
    pub(super) fn new(limit: u64) -> Self {
        Self { files: Mutex::default(), limit, used: AtomicU64::new(0) }
    }

    pub(super) fn get(&self, ino: Ino) -> Option<Arc<File>> {
        lock(&self.files).get(&ino).cloned()
    }

    pub(super) fn open(&self, ino: Ino, times: (Timespec, Timespec)) -> Result<Arc<File>> {
        if let Some(file) = self.get(ino) {
            return Ok(file);
        }
        let file = Arc::new(File::memfd(ino, rustix::fs::memfd_create("ferry-mem", MemfdFlags::CLOEXEC)?));
        file.set_times(times)?;
        lock(&self.files).insert(ino, Arc::clone(&file));
        Ok(file)
    }

    pub(super) fn remove(&self, ino: Ino) {
        let removed = lock(&self.files).remove(&ino);
        if let Some(file) = removed {
            self.less(allocated(&file).unwrap_or_default());
        }
    }

    pub(super) fn space(&self) -> Space {
        let used = self.used.load(Ordering::Relaxed);
        Space { total: self.limit, free: self.limit.saturating_sub(used) }
    }

    fn less(&self, bytes: u64) {
        let less = |used: u64| Some(used.saturating_sub(bytes));
        let _ = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Allocates a range, so that a write there can neither fail nor exceed the limit.
    pub(super) fn reserve(&self, file: &File, offset: u64, len: u64) -> Result<()> {
        self.reserve_locked(file, &mut lock(&file.dense_to), offset, len)
    }

    fn reserve_locked(&self, file: &File, dense_to: &mut u64, offset: u64, len: u64) -> Result<()> {
        let start = offset / PAGE_BYTES * PAGE_BYTES;
        let end = offset.saturating_add(len).next_multiple_of(PAGE_BYTES);
        if len == 0 || end <= *dense_to {
            return Ok(());
        }
        let missing = missing(file, start.max(*dense_to).min(end), end)?;
        let more = |used: u64| used.checked_add(missing).filter(|used| *used <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map_err(|_| Errno::NOSPC)?;
        let before = allocated(file)?;
        let done = rustix::fs::fallocate(file.as_fd(), FallocateFlags::KEEP_SIZE, start, end - start);
        let grown = allocated(file)?.saturating_sub(before);
        self.less(missing.saturating_sub(grown));
        done?;
        if start <= *dense_to {
            *dense_to = end;
        }
        Ok(())
    }

    /// Runs a change that frees memory from `offset`.
    pub(super) fn shrinking(&self, file: &File, offset: u64, change: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut dense_to = lock(&file.dense_to);
        *dense_to = (*dense_to).min(offset / PAGE_BYTES * PAGE_BYTES);
        let before = allocated(file)?;
        let done = change();
        self.less(before.saturating_sub(allocated(file)?));
        done
    }

    /// Writes, with the file's lock: only its holder knows the end, and frees nothing of what was allocated before it is written.
    pub(super) fn write(&self, file: &File, at: WriteAt, input: &mut dyn Input) -> Result<usize> {
        let mut dense_to = lock(&file.dense_to);
        let mut buffer = [0; BUFFER_BYTES];
        let mut left = usize::try_from(at.len).map_err(|_| Errno::INVAL)?;
        let mut done = 0;
        // All at once; if there is too little room for that, as much as there is.
        let begin = if at.append { file.usage()?.size } else { at.offset };
        let is_reserved = self.reserve_locked(file, &mut dense_to, begin, at.len.into()).is_ok();
        while left > 0 {
            let count = input.take(&mut buffer[..left.min(BUFFER_BYTES)]);
            if count == 0 {
                break;
            }
            let offset = begin + done as u64;
            let reserved = match is_reserved {
                true => Ok(()),
                false => self.reserve_locked(file, &mut dense_to, offset, count as u64),
            };
            match reserved.and_then(|()| rustix::io::pwrite(file.as_fd(), &buffer[..count], offset)) {
                Ok(written) => {
                    done += written;
                    if written < count {
                        break;
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
            left -= count;
        }
        Ok(done)
    }
}
