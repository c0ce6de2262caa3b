//! Memory that other processes access concurrently: rings, and the in-flight log.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// A piece of shared memory, accessed as whole little-endian numbers. Concurrent writes of the other side can give a
/// wrong number, nothing worse.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cells {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the holder keeps the memory mapped (`new`), on any thread, and all access is atomic.
unsafe impl Send for Cells {}

macro_rules! cells {
    ($number:ty, $atomic:ty, $load:ident, $store:ident) => {
        /// Reads a number.
        #[inline]
        pub(crate) fn $load(&self, offset: usize, order: Ordering) -> $number {
            // SAFETY: `at` checked place and alignment; `new`'s caller keeps the memory mapped.
            <$number>::from_le(unsafe { <$atomic>::from_ptr(self.at(offset)) }.load(order))
        }

        /// Writes a number.
        #[inline]
        pub(crate) fn $store(&self, offset: usize, value: $number, order: Ordering) {
            #[cfg(test)]
            crash::step();
            // SAFETY: as for reading.
            unsafe { <$atomic>::from_ptr(self.at(offset)) }.store(value.to_le(), order);
        }
    };
}

impl Cells {
    /// Wraps the `bytes` bytes from `start` on.
    ///
    /// # Safety
    /// They must stay mapped while this or a copy is used, and all other accesses must treat them as shared memory.
    pub(crate) unsafe fn new(start: *mut u8, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// Returns the start, for a bulk copy by the caller.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    #[inline]
    fn at<T>(&self, offset: usize) -> *mut T {
        let place = self.start.wrapping_add(offset).cast::<T>();
        assert!(offset <= self.bytes && size_of::<T>() <= self.bytes - offset && place.is_aligned(), "outside");
        place
    }

    cells!(u8, AtomicU8, load_u8, store_u8);
    cells!(u16, AtomicU16, load_u16, store_u16);
    cells!(u32, AtomicU32, load_u32, store_u32);
    cells!(u64, AtomicU64, load_u64, store_u64);
}

/// Simulates the end of the program before any chosen store.
#[cfg(test)]
pub(crate) mod crash {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    thread_local!(static LEFT: Cell<Option<usize>> = const { Cell::new(None) });

    struct Crash;

    pub(super) fn step() {
        match LEFT.get() {
            None => {}
            Some(0) => {
                LEFT.set(None);
                resume_unwind(Box::new(Crash));
            }
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }

    /// Runs `action` up to the store after the first `stores`. `None`: it did not finish.
    pub(crate) fn after<T>(stores: usize, action: impl FnOnce() -> T) -> Option<T> {
        LEFT.set(Some(stores));
        let outcome = catch_unwind(AssertUnwindSafe(action));
        LEFT.set(None);
        match outcome {
            Ok(value) => Some(value),
            Err(payload) if payload.is::<Crash>() => None,
            Err(payload) => resume_unwind(payload),
        }
    }
}
