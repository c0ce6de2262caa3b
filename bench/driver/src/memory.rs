//! The guest's memory: shared memory files, mapped here and, through SET_MEM_TABLE, in the server.
//!
//! All accesses go through [`Window`]. The other side (a server, or a thread that simulates a hostile guest) may change any byte at
//! any time, so there are no Rust references to plain bytes. All of this crate's `unsafe` is in this module.

use std::collections::BTreeMap;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The unit in which regions are laid out.
pub const PAGE_BYTES: usize = 4096;

/// The start of guest memory: not 0, so that a null address is outside.
pub const GUEST_BASE: u64 = 0x4000_0000;

/// One mapped memory file.
#[derive(Debug)]
pub struct Region {
    file: OwnedFd,
    guest: u64,
    host: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is shared memory that stays valid until `drop`, at an address that does not depend on the
// thread; all accesses through it are atomic, or copies that tolerate concurrent change (see `Window`).
unsafe impl Send for Region {}
// SAFETY: as above; no method of a shared `Region` hands out plain references.
unsafe impl Sync for Region {}

impl Region {
    fn new(guest: u64, len: usize) -> io::Result<Self> {
        let file = memfd_create("ferry-driver", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, len as u64)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null hint lets the kernel choose an unused range, so no existing mapping is replaced; the file
        // is `len` bytes long and only we hold it, so the mapping is backed to its end.
        let host = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &file, 0) }?;
        let host = NonNull::new(host.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { file, guest, host, len })
    }

    /// The guest-physical address of the first byte.
    pub fn guest(&self) -> u64 {
        self.guest
    }

    /// The address of the first byte in this process (what vhost-user calls the user address).
    pub fn host(&self) -> u64 {
        self.host.as_ptr().expose_provenance() as u64
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region is empty: never, because it has at least one page.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `host` and `len` are those of the mapping made in `new`, which nothing else unmaps; every `Window`
        // into it holds an `Arc` of this region, so none is left.
        let _ = unsafe { munmap(self.host.as_ptr().cast(), self.len) };
    }
}

/// A bounds-checked view into one region. Cloning is cheap; accesses out of bounds panic.
#[derive(Debug, Clone)]
pub struct Window {
    region: Arc<Region>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: `start` points into `region`, which is `Send` and `Sync` and is kept alive by the `Arc`.
unsafe impl Send for Window {}
// SAFETY: as above; all methods are atomic accesses or copies that tolerate concurrent change.
unsafe impl Sync for Window {}

impl Window {
    fn new(region: Arc<Region>, offset: usize, len: usize) -> Self {
        assert!(offset.checked_add(len).is_some_and(|end| end <= region.len), "window outside its region");
        // SAFETY: `offset <= region.len`, so the result stays within (or one past) the mapping.
        let start = unsafe { region.host.add(offset) };
        Self { region, start, len }
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte in this process.
    pub fn host(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    /// The guest-physical address of the first byte.
    pub fn guest(&self) -> u64 {
        self.region.guest + (self.host() - self.region.host())
    }

    /// Returns the part of `len` bytes at `offset`.
    ///
    /// # Panics
    ///
    /// The part is out of bounds.
    pub fn part(&self, offset: usize, len: usize) -> Self {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "part outside its window");
        let base = self.start.addr().get() - self.region.host.addr().get();
        Self::new(Arc::clone(&self.region), base + offset, len)
    }

    /// A checked pointer to a `T` at `offset`.
    #[inline]
    fn at<T>(&self, offset: usize) -> *mut T {
        assert!(offset.checked_add(size_of::<T>()).is_some_and(|end| end <= self.len), "access outside its window");
        // SAFETY: `offset + size_of::<T>() <= self.len`, so the pointer is within the mapping.
        let pointer = unsafe { self.start.as_ptr().add(offset) }.cast::<T>();
        assert!(pointer.is_aligned(), "unaligned access");
        pointer
    }

    /// Reads a little-endian `u16`.
    #[inline]
    pub fn load_u16(&self, offset: usize, order: Ordering) -> u16 {
        // SAFETY: `at` checked bounds and alignment; the mapping outlives the borrow of `self`, and this process
        // accesses the location atomically or by copies that tolerate races only.
        u16::from_le(unsafe { AtomicU16::from_ptr(self.at(offset)) }.load(order))
    }

    /// Writes a little-endian `u16`.
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16, order: Ordering) {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU16::from_ptr(self.at(offset)) }.store(value.to_le(), order);
    }

    /// Reads a little-endian `u32`, relaxed.
    #[inline]
    pub fn load_u32(&self, offset: usize) -> u32 {
        // SAFETY: as in `load_u16`.
        u32::from_le(unsafe { AtomicU32::from_ptr(self.at(offset)) }.load(Ordering::Relaxed))
    }

    /// Writes a little-endian `u32`, relaxed.
    #[inline]
    pub fn store_u32(&self, offset: usize, value: u32) {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU32::from_ptr(self.at(offset)) }.store(value.to_le(), Ordering::Relaxed);
    }

    /// Reads a little-endian `u64`, relaxed.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> u64 {
        // SAFETY: as in `load_u16`.
        u64::from_le(unsafe { AtomicU64::from_ptr(self.at(offset)) }.load(Ordering::Relaxed))
    }

    /// Writes a little-endian `u64`, relaxed.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU64::from_ptr(self.at(offset)) }.store(value.to_le(), Ordering::Relaxed);
    }

    /// Copies `bytes` to `offset`.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len), "write outside its window");
        // SAFETY: source and target are valid for `bytes.len()` bytes (checked above) and do not overlap: no `&[u8]`
        // ever points into the mapping. Another process may race with the copy; bytes have no invalid values.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(offset), bytes.len()) };
    }

    /// Copies from `offset` into `bytes`.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        assert!(offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len), "read outside its window");
        // SAFETY: as in `write`, in the other direction.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr().add(offset), bytes.as_mut_ptr(), bytes.len()) };
    }

    /// Returns a copy of the first `len` bytes.
    pub fn to_vec(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(0, &mut bytes);
        bytes
    }
}

/// The guest's memory: regions that follow one another without a gap in guest-physical addresses.
#[derive(Debug)]
pub struct Memory {
    regions: Vec<Arc<Region>>,
    /// Free ranges: guest address to length. A range lies within one region.
    free: Mutex<BTreeMap<u64, u64>>,
}

impl Memory {
    /// Creates `regions` regions of `bytes` bytes in total. The first and the last page of each region are never allocated, for tests of
    /// the boundaries (see [`Memory::window`]).
    ///
    /// # Errors
    /// Those of memfd_create(2), ftruncate(2) and mmap(2).
    pub fn new(bytes: usize, regions: usize) -> io::Result<Arc<Self>> {
        let each = (bytes / regions.max(1)).next_multiple_of(PAGE_BYTES).max(4 * PAGE_BYTES);
        let mut memory = Self { regions: Vec::new(), free: Mutex::default() };
        let mut free = BTreeMap::new();
        for index in 0..regions.max(1) {
            let guest = GUEST_BASE + (index * each) as u64;
            memory.regions.push(Arc::new(Region::new(guest, each)?));
            free.insert(guest + PAGE_BYTES as u64, (each - 2 * PAGE_BYTES) as u64);
        }
        memory.free = Mutex::new(free);
        Ok(Arc::new(memory))
    }

    /// The regions, by address.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// The first guest address past the last region.
    pub fn end(&self) -> u64 {
        self.regions.last().map_or(GUEST_BASE, |region| region.guest + region.len as u64)
    }

    /// Returns the window of `len` bytes at a guest address, if they lie in one region.
    pub fn window(&self, guest: u64, len: usize) -> Option<Window> {
        self.regions.iter().find_map(|region| {
            let offset = usize::try_from(guest.checked_sub(region.guest)?).ok()?;
            let fits = offset.checked_add(len)? <= region.len;
            fits.then(|| Window::new(Arc::clone(region), offset, len))
        })
    }

    /// Allocates `len` bytes in one region, aligned to `align` bytes (a power of two); `None`: no memory is free.
    pub fn alloc(self: &Arc<Self>, len: usize, align: usize) -> Option<Buffer> {
        let (len, align) = (len.max(1).next_multiple_of(64) as u64, align.max(64) as u64);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, have, at) = free.iter().find_map(|(&start, &have)| {
            let at = start.next_multiple_of(align);
            (at + len <= start + have).then_some((start, have, at))
        })?;
        free.remove(&start);
        if at > start {
            free.insert(start, at - start);
        }
        if at + len < start + have {
            free.insert(at + len, start + have - at - len);
        }
        let window = self.window(at, usize::try_from(len).ok()?)?;
        Some(Buffer { window, memory: Arc::clone(self) })
    }

    fn release(&self, mut start: u64, mut len: u64) {
        let edge = |at: u64| self.regions.iter().any(|region| region.guest == at);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((&before, &have)) = free.range(..start).next_back()
            && before + have == start
            && !edge(start)
        {
            free.remove(&before);
            (start, len) = (before, have + len);
        }
        if !edge(start + len)
            && let Some(have) = free.remove(&(start + len))
        {
            len += have;
        }
        free.insert(start, len);
    }
}

/// Allocated guest memory, freed when dropped. It derefs to its [`Window`], whose length is the requested one rounded up to 64
/// bytes.
#[derive(Debug)]
pub struct Buffer {
    window: Window,
    memory: Arc<Memory>,
}

impl Deref for Buffer {
    type Target = Window;

    fn deref(&self) -> &Window {
        &self.window
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.memory.release(self.window.guest(), self.window.len as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_disjoint_and_reused() {
        let memory = Memory::new(64 * PAGE_BYTES, 2).unwrap();
        let before = memory.free.lock().unwrap().clone();
        let buffers: Vec<_> = (1..40).map(|n| memory.alloc(n * 100, 64).unwrap()).collect();
        let mut spans: Vec<_> = buffers.iter().map(|b| (b.guest(), b.guest() + b.len() as u64)).collect();
        spans.sort_unstable();
        assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        drop(buffers);
        assert_eq!(*memory.free.lock().unwrap(), before);
        assert!(memory.alloc(33 * PAGE_BYTES, 64).is_none(), "no buffer crosses the boundary of a region");
    }

    #[test]
    fn a_window_ends_at_its_region() {
        let memory = Memory::new(8 * PAGE_BYTES, 2).unwrap();
        let edge = memory.regions()[1].guest();
        assert!(memory.window(edge - 8, 16).is_none());
        assert!(memory.window(edge - 8, 8).is_some());
        assert!(memory.window(u64::MAX, 2).is_none());
        let window = memory.window(edge, 16).unwrap();
        window.write(0, &[1, 2, 3, 4]);
        assert_eq!(window.load_u32(0), 0x0403_0201);
        assert_eq!(window.guest(), edge);
    }
}
