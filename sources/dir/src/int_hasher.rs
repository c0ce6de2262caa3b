//! A hash function for numbers that attackers do not choose.

use std::hash::{BuildHasherDefault, Hasher};

/// Hashes integers chosen by the kernel or this crate.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IntHasher(u64);

impl Hasher for IntHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64((*byte).into());
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = u128::from(self.0 ^ value ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        #[allow(clippy::cast_possible_truncation, reason = "folds the upper half onto the lower")]
        {
            self.0 = mixed as u64 ^ (mixed >> 64) as u64;
        }
    }
}

/// Builds [`IntHasher`].
pub(crate) type BuildIntHasher = BuildHasherDefault<IntHasher>;
