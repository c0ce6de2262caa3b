//! Verifiable data: each 8 bytes are a function of their offset and a seed.

/// The seed of a new file's data.
pub(super) const SEED_INITIAL: u64 = 0x1;
/// The seed of written data.
pub(super) const SEED_WRITTEN: u64 = 0x9;

/// Fills `block` with the data at `offset`.
pub(super) fn fill(block: &mut [u8], offset: u64, seed: u64) {
    for (word, index) in block.chunks_mut(8).zip(0_u64..) {
        let mixed = (offset / 8 + index + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mixed = (mixed ^ (mixed >> 29)).to_le_bytes();
        word.copy_from_slice(&mixed[..word.len()]);
    }
}

/// Whether `block` holds the data at `offset`.
pub(super) fn matches(block: &[u8], offset: u64, seed: u64) -> bool {
    let mut expected = vec![0; block.len()];
    fill(&mut expected, offset, seed);
    block == expected
}

/// The sequence of offsets.
#[derive(Debug, Clone)]
pub(super) struct Cursor {
    block: u64,
    blocks: u64,
    /// The next block of a sequential walk, or the state of the generator.
    state: u64,
    stride: u64,
    random: bool,
}

impl Cursor {
    /// Creates the sequence of lane `lane` out of `lanes` over `size` bytes.
    pub(super) fn new(size: u64, block: u64, random: bool, lane: usize, lanes: usize) -> Self {
        let state = if random { 0x2545_F491_4F6C_DD1D ^ ((lane as u64 + 1) << 32) } else { lane as u64 };
        Self { block, blocks: (size / block.max(1)).max(1), state, stride: lanes as u64, random }
    }

    /// Returns the next offset in bytes.
    #[inline]
    pub(super) fn next(&mut self) -> u64 {
        if self.random {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            // The high half of a product maps evenly onto the range, without a division.
            let scaled = (u128::from(self.state) * u128::from(self.blocks)) >> 64;
            return u64::try_from(scaled).unwrap_or(0) * self.block;
        }
        if self.state >= self.blocks {
            self.state %= self.blocks;
        }
        let offset = self.state * self.block;
        self.state += self.stride;
        offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_walk_every_block_in_order() {
        let mut lanes: Vec<_> = (0..3).map(|lane| Cursor::new(9 * 512, 512, false, lane, 3)).collect();
        let walk: Vec<_> = (0..12).map(|n| lanes[n % 3].next() / 512).collect();
        assert_eq!(walk, [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]);
    }

    #[test]
    fn random_offsets_reach_all_blocks() {
        let mut cursor = Cursor::new(16 * 4096, 4096, true, 0, 1);
        let mut seen = [0; 16];
        for _ in 0..1600 {
            seen[usize::try_from(cursor.next() / 4096).unwrap()] += 1;
        }
        assert!(seen.iter().all(|&count| count > 50), "{seen:?}");
    }

    #[test]
    fn the_pattern_depends_on_the_offset_only() {
        let mut whole = [0; 64];
        fill(&mut whole, 4096, 1);
        assert!(matches(&whole[24..40], 4096 + 24, 1));
        assert!(!matches(&whole[24..40], 4096 + 32, 1));
        assert!(!matches(&whole[24..40], 4096 + 24, 2));
    }
}
