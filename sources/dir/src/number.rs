//! Inode numbers that encode an encrypted host file handle.
//!
//! A client that has released its references may come back with a number only (LOOKUP of `.`, for
//! `open_by_handle_at(2)` and NFS servers). A table of all inodes ever seen would be unbounded. The number itself has
//! room for the parts of a handle that vary within a file system: an inode number and a generation. They are encrypted
//! with a key of this process, so that no client can construct the number of a file outside of the share.
//!
//! Numbers that encode handles have the top bit set; counted ones ([`crate::table::Table`]) do not.

use std::hash::BuildHasher;
use std::os::fd::BorrowedFd;

use ferry_vfs::{Ino, RandomKey};

use crate::mount::Mount;
use crate::sys::{self, HostHandle};

/// Set in numbers that encode handles.
const OF_HANDLE: u64 = 1 << 63;
/// Bits for an inode number; the generation has 32, and the top bit is [`OF_HANDLE`].
const INO_BITS: u32 = 31;
/// The minimum inode size of XFS in bytes. XFS derives inode numbers from disk locations.
const XFS_INODE_BYTES: u64 = 512;
/// Rounds of the cipher; four are enough for a pseudorandom permutation.
const ROUNDS: u8 = 4;
/// The index of the lower half of a 64-bit number, in words of 32 bits.
const LOW: usize = if cfg!(target_endian = "big") { 1 } else { 0 };

/// Handles of one type and length, as words of 32 bits.
struct Layout {
    kind: i32,
    words: usize,
    /// The index of the inode number, or of its lower half.
    ino: usize,
    generation: usize,
}

/// `FILEID_INO32_GEN` (ext4, f2fs and most others), tmpfs, `FILEID_INO64_GEN` (XFS), `FILEID_BTRFS_WITHOUT_PARENT`.
const LAYOUTS: [Layout; 4] = [
    Layout { kind: 1, words: 2, ino: 0, generation: 1 },
    Layout { kind: 1, words: 3, ino: 1, generation: 0 },
    Layout { kind: XFS, words: 3, ino: LOW, generation: 2 },
    Layout { kind: 0x4d, words: 5, ino: LOW, generation: 4 },
];
const XFS: i32 = 0x81;

/// Converts between handles of the root's file system and numbers.
#[derive(Debug)]
pub(crate) struct HandleNumbers {
    /// The mount whose inodes have such numbers.
    mount: u64,
    kind: i32,
    /// The root's handle; all others differ in two words only.
    root: Vec<u32>,
    ino: usize,
    generation: usize,
    key: RandomKey,
}

fn words(handle: &HostHandle) -> Option<Vec<u32>> {
    let (words, rest) = handle.parts().1.as_chunks::<4>();
    rest.is_empty().then(|| words.iter().map(|word| u32::from_ne_bytes(*word)).collect())
}

/// Returns whether a number encodes a handle, of any process.
pub(crate) fn is_of_handle(ino: Ino) -> bool {
    ino.0 & OF_HANDLE != 0
}

impl HandleNumbers {
    /// Returns `None` if handles are not persistent, have another form, or inode numbers may be too large. The root's
    /// inodes are then not found by number.
    pub(crate) fn new(root: BorrowedFd<'_>, mount: &Mount) -> Option<Self> {
        if !mount.handles_survive_eviction || mount.handles().is_none() {
            return None;
        }
        let handle = sys::name_to_handle(root, b"").ok()?;
        let numbers = Self::of_root(mount.id, &handle)?;
        let statfs = rustix::fs::fstatfs(root).ok()?;
        let inodes_max = match numbers.kind {
            // The number of an allocation group takes whole bits, so up to half of the numbers are unused.
            XFS => statfs.f_blocks.saturating_mul(statfs.f_bsize.unsigned_abs()) / XFS_INODE_BYTES * 2,
            _ => statfs.f_files,
        };
        let fits = inodes_max <= 1 << INO_BITS;
        tracing::debug!(kind = numbers.kind, inodes_max, fits, "inodes may be found by numbers");
        fits.then_some(numbers)
    }

    fn of_root(mount: u64, handle: &HostHandle) -> Option<Self> {
        let (kind, root) = (handle.parts().0, words(handle)?);
        let layout = LAYOUTS.iter().find(|layout| (layout.kind, layout.words) == (kind, root.len()))?;
        let Layout { ino, generation, .. } = *layout;
        Some(Self { mount, kind, root, ino, generation, key: RandomKey::new() })
    }

    /// Returns whether inodes on this mount have such numbers.
    pub(crate) fn is_of(&self, mount: &Mount) -> bool {
        mount.id == self.mount
    }

    /// Returns the number of a handle; `None` if it does not fit.
    pub(crate) fn number(&self, handle: &HostHandle) -> Option<Ino> {
        let mut words =
            words(handle).filter(|words| handle.parts().0 == self.kind && words.len() == self.root.len())?;
        let (ino, generation) = (words[self.ino], words[self.generation]);
        (words[self.ino], words[self.generation]) = (self.root[self.ino], self.root[self.generation]);
        if words != self.root || ino >> INO_BITS != 0 {
            return None;
        }
        let mut number = OF_HANDLE | u64::from(generation) << INO_BITS | u64::from(ino);
        // Repeats until the result is in range again, which gives a permutation of the range.
        loop {
            number = (0..ROUNDS).fold(number, |number, round| {
                let (left, right) = halves(number);
                join(right, left ^ self.mix(round, right))
            });
            if number & OF_HANDLE != 0 {
                return Some(Ino(number));
            }
        }
    }

    /// Returns the handle of a number. A forged number leads, in all likelihood, to no file.
    pub(crate) fn handle(&self, ino: Ino) -> Option<HostHandle> {
        let mut number = is_of_handle(ino).then_some(ino.0)?;
        loop {
            number = (0..ROUNDS).rev().fold(number, |number, round| {
                let (left, right) = halves(number);
                join(right ^ self.mix(round, left), left)
            });
            if number & OF_HANDLE != 0 {
                break;
            }
        }
        let mut words = self.root.clone();
        words[self.ino] = halves(number).1 & ((1 << INO_BITS) - 1);
        words[self.generation] = halves((number & !OF_HANDLE) >> INO_BITS).1;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        HostHandle::from_parts(self.kind, &bytes)
    }

    fn mix(&self, round: u8, half: u32) -> u32 {
        halves(self.key.hash_one((round, half))).1
    }
}

#[allow(clippy::cast_possible_truncation, reason = "both halves are taken")]
fn halves(number: u64) -> (u32, u32) {
    ((number >> 32) as u32, number as u32)
}

fn join(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn handle(kind: i32, words: &[u32]) -> HostHandle {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        HostHandle::from_parts(kind, &bytes).expect("it is short")
    }

    fn of_root(kind: i32, root: &[u32]) -> HandleNumbers {
        HandleNumbers::of_root(1, &handle(kind, root)).expect("a known form")
    }

    proptest! {
        #[test]
        fn handles_round_trip_through_numbers(ino in 0..1_u32 << INO_BITS, generation: u32) {
            for (kind, root, other) in [
                (1, vec![2, 0], vec![ino, generation]),
                (1, vec![7, 1, 0], vec![generation, ino, 0]),
                (XFS, vec![128, 0, 9], vec![ino, 0, generation]),
                (0x4d, vec![256, 0, 5, 0, 1], vec![ino, 0, 5, 0, generation]),
            ] {
                let numbers = of_root(kind, &root);
                let number = numbers.number(&handle(kind, &other)).expect("it has room");
                prop_assert!(is_of_handle(number));
                prop_assert_eq!(numbers.handle(number), Some(handle(kind, &other)));
                // Another process cannot decode it.
                prop_assert_ne!(of_root(kind, &root).handle(number), Some(handle(kind, &other)));
            }
        }
    }

    #[test]
    fn handles_that_do_not_fit_have_no_number() {
        let numbers = of_root(0x4d, &[256, 0, 5, 0, 1]);
        for (kind, other) in [
            (0x4d, vec![1 << INO_BITS, 0, 5, 0, 1]),
            (0x4d, vec![300, 1, 5, 0, 1]),
            (0x4d, vec![300, 0, 6, 0, 1]),
            (0x4d, vec![300, 0, 5, 0]),
            (1, vec![300, 0, 5, 0, 1]),
        ] {
            assert_eq!(numbers.number(&handle(kind, &other)), None, "{kind} {other:?}");
        }
        assert_eq!(numbers.handle(Ino(7)), None);
        assert!(HandleNumbers::of_root(1, &handle(9, &[1, 2])).is_none());
    }
}
