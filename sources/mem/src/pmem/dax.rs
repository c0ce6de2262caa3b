//! Writing CPU caches back to persistent memory.

/// Returns whether this CPU can write back cache lines by address, without which a DAX mapping cannot become durable.
pub(super) fn is_supported() -> bool {
    cfg!(target_arch = "x86_64")
}

/// The size of a cache line in bytes, on every CPU with persistent memory.
#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;

/// Writes back every cache line of a range; it is durable after [`fence`].
#[cfg(target_arch = "x86_64")]
pub(super) fn write_back(bytes: &[u8]) {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid_count, _mm_clflush};
    use std::sync::LazyLock;

    #[derive(Clone, Copy)]
    enum FlushInstruction {
        /// Keeps the line in the cache.
        Clwb,
        /// Evicts the line; unordered.
        Clflushopt,
        /// Evicts the line; ordered. Every x86-64 has it.
        Clflush,
    }
    /// Bits of CPUID leaf 7, register EBX (Intel SDM, volume 2A, CPUID).
    const CLWB: u32 = 1 << 24;
    const CLFLUSHOPT: u32 = 1 << 23;
    static WAY: LazyLock<FlushInstruction> = LazyLock::new(|| match __cpuid_count(7, 0).ebx {
        bits if bits & CLWB != 0 => FlushInstruction::Clwb,
        bits if bits & CLFLUSHOPT != 0 => FlushInstruction::Clflushopt,
        _ => FlushInstruction::Clflush,
    });

    let Some(last) = bytes.len().checked_sub(1) else { return };
    let start = bytes.as_ptr().addr() & (LINE_BYTES - 1);
    let first = bytes.as_ptr().wrapping_sub(start);
    let way = *WAY;
    for line in 0..=(start + last) / LINE_BYTES {
        let address = first.wrapping_add(line * LINE_BYTES);
        match way {
            // SAFETY: the CPU has the instruction (CPUID said so); the line holds bytes of a live slice, and writing
            // it back changes no memory that the program can see.
            FlushInstruction::Clwb => unsafe { asm!("clwb [{}]", in(reg) address, options(nostack, preserves_flags)) },
            // SAFETY: as above.
            FlushInstruction::Clflushopt => unsafe {
                asm!("clflushopt [{}]", in(reg) address, options(nostack, preserves_flags))
            },
            // SAFETY: as above; CLFLUSH is part of SSE2, which every x86-64 has.
            FlushInstruction::Clflush => unsafe { _mm_clflush(address) },
        }
    }
}

/// Waits until all write-backs are durable.
#[cfg(target_arch = "x86_64")]
pub(super) fn fence() {
    use std::arch::x86_64::_mm_sfence;
    // SAFETY: SFENCE is part of SSE, which every x86-64 has.
    unsafe { _mm_sfence() };
}

/// Never called: [`is_supported`] is false.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn write_back(_: &[u8]) {}

/// Never called: [`is_supported`] is false.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn fence() {}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    #[test]
    fn any_range_can_be_written_back() {
        let bytes = vec![7u8; 1000];
        for range in [0..0, 0..1, 63..65, 1..999] {
            super::write_back(&bytes[range]);
        }
        super::fence();
        assert!(bytes.iter().all(|byte| *byte == 7));
    }
}
