//! SHMEM_MAP and SHMEM_UNMAP (vhost-user, "Back-end message types" and "Shared memory regions"), supported by QEMU
//! from 11.1 and crosvm. The front end replies with a number, 0 for success.

/// The number of the shared memory region.
const REGION: u64 = 0;
pub(super) const MAP: u32 = 9;
pub(super) const UNMAP: u32 = 10;
const WRITABLE: u64 = 1;

/// A part of a file, and its place in the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// First byte in the window.
    pub window_offset: u64,
    /// First byte in the file.
    pub file_offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Whether the guest may write to it.
    pub writable: bool,
}

/// `VhostUserMMap`: the number of the region and seven bytes of padding, then four numbers of eight bytes.
pub(super) fn body(part: Part) -> Vec<u8> {
    let Part { window_offset, file_offset, bytes, writable } = part;
    let numbers = [REGION, file_offset, window_offset, bytes, if writable { WRITABLE } else { 0 }];
    numbers.into_iter().flat_map(u64::to_ne_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: Part = Part { window_offset: 0x40_0000, file_offset: 0x20_0000, bytes: 0x1000, writable: false };

    fn numbers(part: Part) -> Vec<u64> {
        body(part).chunks(8).map(|bytes| u64::from_ne_bytes(bytes.try_into().expect("eight bytes"))).collect()
    }

    #[test]
    fn a_message_has_one_part() {
        assert_eq!((MAP, numbers(PART)), (9, vec![0, 0x20_0000, 0x40_0000, 0x1000, 0]));
        let writable = Part { writable: true, ..PART };
        assert_eq!((UNMAP, numbers(writable)), (10, vec![0, 0x20_0000, 0x40_0000, 0x1000, 1]));
    }
}
