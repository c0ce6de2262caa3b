//! The file of an image.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
#[cfg(test)]
use std::sync::Mutex;

use ferry_vfs::OFlags;

use crate::syncs::Syncs;
use crate::{lock, sys};

/// Direct I/O uses whole pages: a partial page could be in the page cache, next to data of other writes.
const PAGE_BYTES: usize = 4096;

/// Memory that `O_DIRECT` can use.
pub(super) struct AlignedBuffer {
    memory: Vec<u8>,
    skew: usize,
    bytes: usize,
}

impl AlignedBuffer {
    pub(super) fn new(bytes: usize) -> Self {
        let memory = vec![0; bytes + PAGE_BYTES];
        let skew = memory.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES);
        Self { memory, skew, bytes }
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.skew..][..self.bytes]
    }
}

/// A file with and, optionally, without the page cache, which is the only cache of an image's tables.
pub(super) struct ImageFile {
    cached: File,
    direct: Option<File>,
    syncs: Syncs,
    /// The operations on the file, for tests of power failures.
    #[cfg(test)]
    pub(super) log: Mutex<Vec<Event>>,
    /// The offset at which writes of tables fail; 0: none does.
    #[cfg(test)]
    pub(super) failing_offset: std::sync::atomic::AtomicU64,
}

/// What was done to a file.
#[cfg(test)]
pub(super) enum Event {
    Write(u64, Vec<u8>),
    Sync,
}

impl ImageFile {
    /// Wraps an open and locked file.
    pub(super) fn new(cached: File, writes: bool, direct: bool) -> Self {
        let access = OFlags::DIRECT | if writes { OFlags::RDWR } else { OFlags::RDONLY };
        let opened = if direct { sys::open_again(&cached, access).ok() } else { None };
        let usable = opened.filter(|fd| sys::direct_alignment(fd).is_some_and(|bytes| bytes <= PAGE_BYTES));
        if let Some(fd) = usable.as_ref().filter(|_| writes) {
            lock::hold(fd);
        }
        Self {
            cached,
            direct: usable.map(File::from),
            syncs: Syncs::default(),
            #[cfg(test)]
            log: Mutex::default(),
            #[cfg(test)]
            failing_offset: std::sync::atomic::AtomicU64::default(),
        }
    }

    pub(super) fn bytes(&self) -> io::Result<u64> {
        Ok(sys::bytes(&self.cached)?)
    }

    fn pick(&self, bytes: &[u8], offset: u64) -> &File {
        let fits = bytes.len().is_multiple_of(PAGE_BYTES)
            && offset.is_multiple_of(PAGE_BYTES as u64)
            && bytes.as_ptr().addr().is_multiple_of(PAGE_BYTES);
        self.direct.as_ref().filter(|_| fits).unwrap_or(&self.cached)
    }

    /// Reads data; past the end of the file it reads zeros.
    pub(super) fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let file = self.pick(bytes, offset);
        let mut done = 0;
        while done < bytes.len() {
            match file.read_at(&mut bytes[done..], offset.saturating_add(done as u64)) {
                Ok(0) => {
                    bytes[done..].fill(0);
                    return Ok(());
                }
                // A direct read ends inside a page only at the end of the file.
                Ok(count) if !count.is_multiple_of(PAGE_BYTES) && done + count < bytes.len() => {
                    done += count;
                    return self.read_cached(&mut bytes[done..], offset + done as u64);
                }
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn read_cached(&self, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.cached.read_at(bytes, offset) {
                Ok(0) => {
                    bytes.fill(0);
                    return Ok(());
                }
                Ok(count) => {
                    bytes = &mut bytes[count..];
                    offset = offset.saturating_add(count as u64);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub(super) fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        #[cfg(test)]
        self.note(Event::Write(offset, bytes.to_vec()));
        self.pick(bytes, offset).write_all_at(bytes, offset)
    }

    /// Reads a part of a table, all of which must be in the file.
    pub(super) fn read_table(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.cached.read_exact_at(bytes, offset)
    }

    pub(super) fn write_table(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        #[cfg(test)]
        if offset > 0 && offset == self.failing_offset.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(rustix::io::Errno::IO.into());
        }
        #[cfg(test)]
        self.note(Event::Write(offset, bytes.to_vec()));
        self.cached.write_all_at(bytes, offset)
    }

    /// Frees the space of an unused range, if the file supports it.
    pub(super) fn punch(&self, offset: u64, bytes: u64) {
        use rustix::fs::FallocateFlags;
        #[cfg(test)]
        self.note(Event::Write(offset, vec![0; usize::try_from(bytes).unwrap_or_default()]));
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fallocate(&self.cached, flags, offset, bytes);
    }

    #[cfg(test)]
    fn note(&self, event: Event) {
        ferry_vfs::sync::lock(&self.log).push(event);
    }

    /// Makes all earlier writes durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.syncs.run(|| {
            let outcome = self.cached.sync_data();
            #[cfg(test)]
            self.note(Event::Sync);
            outcome
        })
    }
}
