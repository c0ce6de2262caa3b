//! A filter of 32 bits over attribute names: which ones an inode surely lacks.
//!
//! Source: fs/erofs/xattr.c of Linux (`erofs_init_inode_xattrs`, `EROFS_XATTR_FILTER_SEED`) and the specification of
//! xxHash ("XXH32 algorithm description").

use crate::format::erofs::split_xattr;

/// The number of a name's prefix is added to this.
const SEED: u32 = 0x25bb_e08f;

const PRIMES: [u32; 5] = [0x9e37_79b1, 0x85eb_ca77, 0xc2b2_ae3d, 0x27d4_eb2f, 0x1656_67b1];

/// Returns the filter of these full names: a bit is 0 if a name may exist.
pub(super) fn of<'a>(names: impl Iterator<Item = &'a [u8]>) -> u32 {
    names.fold(u32::MAX, |filter, name| {
        let (prefix, rest) = split_xattr(name);
        filter & !(1 << (xxh32(rest, SEED.wrapping_add(prefix.into())) % 32))
    })
}

fn xxh32(mut bytes: &[u8], seed: u32) -> u32 {
    let length = bytes.len();
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0_u32, |word, byte| word << 8 | u32::from(*byte));
    let mut hash = if length >= 16 {
        let mut lanes = [
            seed.wrapping_add(PRIMES[0]).wrapping_add(PRIMES[1]),
            seed.wrapping_add(PRIMES[1]),
            seed,
            seed.wrapping_sub(PRIMES[0]),
        ];
        while bytes.len() >= 16 {
            for lane in &mut lanes {
                let (now, later) = bytes.split_at(4);
                *lane = lane.wrapping_add(word(now).wrapping_mul(PRIMES[1])).rotate_left(13).wrapping_mul(PRIMES[0]);
                bytes = later;
            }
        }
        lanes.into_iter().zip([1, 7, 12, 18]).fold(0_u32, |sum, (lane, turn)| sum.wrapping_add(lane.rotate_left(turn)))
    } else {
        seed.wrapping_add(PRIMES[4])
    };
    // Only the lower bits of a length count; names are short.
    hash = hash.wrapping_add(u32::try_from(length).unwrap_or(u32::MAX));
    let words = bytes.chunks_exact(4);
    let rest = words.remainder();
    for now in words {
        hash = hash.wrapping_add(word(now).wrapping_mul(PRIMES[2])).rotate_left(17).wrapping_mul(PRIMES[3]);
    }
    for byte in rest {
        hash = hash.wrapping_add(u32::from(*byte).wrapping_mul(PRIMES[4])).rotate_left(11).wrapping_mul(PRIMES[0]);
    }
    hash = (hash ^ hash >> 15).wrapping_mul(PRIMES[1]);
    hash = (hash ^ hash >> 13).wrapping_mul(PRIMES[2]);
    hash ^ hash >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the reference program `xxhsum -H32`, and of the specification for the empty input.
    #[test]
    fn hashes_are_those_of_the_specification() {
        assert_eq!(xxh32(b"", 0), 0x02cc_5d05);
        assert_eq!(xxh32(b"a", 0), 0x550d_7456);
        assert_eq!(xxh32(b"abc", 0), 0x32d1_53ff);
        assert_eq!(xxh32(b"Nobody inspects the spammish repetition", 0), 0xe229_3b2f);
    }

    /// As mkcomposefs writes it for `trusted.overlay.opaque`.
    #[test]
    fn a_name_clears_its_bit() {
        assert_eq!(of([&b"trusted.overlay.opaque"[..]].into_iter()), 0xffef_ffff);
        assert_eq!(of([].into_iter()), u32::MAX);
    }
}
