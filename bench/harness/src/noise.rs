//! Data that are the same each time.

/// A generator of the same bytes each time (xorshift), so that nothing compresses and all runs are alike.
#[derive(Debug)]
pub struct Noise(pub u64);

impl Noise {
    /// The next 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below a bound.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// So many bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let words = std::iter::repeat_with(|| self.next().to_le_bytes());
        let mut bytes: Vec<u8> = words.take(length.div_ceil(8)).flatten().collect();
        bytes.truncate(length);
        bytes
    }
}
