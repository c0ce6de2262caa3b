//! Reads descriptors and checks chains of them.

use vm_memory::VolatileSlice;

use super::ChainError;
use crate::QUEUE_SIZE_MAX;
use crate::chain::Chain;
use crate::memory::Memory;

pub(super) const DESCRIPTOR_BYTES: u32 = 16;
/// Descriptor flags (VIRTIO 1.3, 2.7.5 and 2.8.1 to 2.8.4).
pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;

/// The most pieces of the buffers of a chain. Each descriptor of a driver lies in one region or, rarely, in neighbouring ones.
const PIECES_MAX: usize = 4 * QUEUE_SIZE_MAX as usize;

/// Copies one descriptor out of guest memory, as two halves of eight bytes.
pub(super) fn copy_out(table: *mut u8, index: u16) -> (u64, [u8; 8]) {
    let mut bytes = [0u8; DESCRIPTOR_BYTES as usize];
    let start = table.wrapping_add(bytes.len() * usize::from(index));
    // SAFETY: the creator of the table checked that it lies in guest memory, which the ring keeps mapped.
    unsafe { VolatileSlice::new(start, bytes.len()) }.copy_to(&mut bytes);
    let [a, b, c, d, e, f, g, h, rest @ ..] = bytes;
    (u64::from_le_bytes([a, b, c, d, e, f, g, h]), rest)
}

/// A buffer, or an indirect table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) address: u64,
    pub(super) bytes: u32,
}

/// Adds a buffer to a chain.
pub(super) fn add(chain: &mut Chain, memory: &Memory, extent: Extent, flags: u16) -> Result<(), ChainError> {
    let out = match flags & WRITE {
        0 if !chain.writable.is_empty() => return Err(ChainError::Order),
        0 => &mut chain.readable,
        _ => &mut chain.writable,
    };
    let Extent { address, bytes } = extent;
    match memory.translate(address, u64::from(bytes), out) {
        Some(may_fault) => {
            chain.may_fault |= may_fault;
            match chain.readable.len() + chain.writable.len() > PIECES_MAX {
                true => Err(ChainError::TooScattered(PIECES_MAX)),
                false => Ok(()),
            }
        }
        None => Err(ChainError::Outside { address, bytes }),
    }
}

/// Returns the address and the number of entries of an indirect table.
pub(super) fn indirect_table(memory: &Memory, extent: Extent) -> Result<(*mut u8, u16), ChainError> {
    let Extent { address, bytes } = extent;
    let entries = u16::try_from(bytes / DESCRIPTOR_BYTES).ok();
    let entries = entries.filter(|entries| (1..=QUEUE_SIZE_MAX).contains(entries));
    let (Some(entries), true) = (entries, bytes.is_multiple_of(DESCRIPTOR_BYTES)) else {
        return Err(ChainError::IndirectSize(bytes));
    };
    let start = memory.translate_whole(address, u64::from(bytes)).ok_or(ChainError::Outside { address, bytes })?;
    Ok((start, entries))
}
