//! Digests.
//!
//! The flat layout uses BLAKE3 for trees, images, packs (of their indexes) and chunks. The composefs layout uses
//! fs-verity with SHA-256, as mkcomposefs and the kernel do.

use std::fmt;

/// The size of a digest, in bytes.
pub const DIGEST_BYTES: usize = 32;

/// The algorithm of a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// BLAKE3.
    Blake3,
    /// fs-verity, by SHA-256 over blocks of 4 KiB.
    Verity,
    /// BLAKE3 of a tree's contents, see `tree_digest.rs`.
    Tree,
    /// SHA-256 of a chunk, in the table of contents of a container's layer.
    Sha256,
}

impl Algorithm {
    /// Returns the prefix of the digits.
    fn name(self) -> &'static str {
        match self {
            Self::Blake3 => "blake3",
            // As fsverity(1) names them.
            Self::Verity => "sha256",
            Self::Tree => "tree",
            Self::Sha256 => "chunk",
        }
    }
}

/// The digest of a file, an image or a tree. As text it is `blake3:`, `sha256:` or `tree:`, and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest {
    algorithm: Algorithm,
    bytes: [u8; DIGEST_BYTES],
}

impl Digest {
    /// Creates a digest from its bytes.
    pub const fn new(algorithm: Algorithm, bytes: [u8; DIGEST_BYTES]) -> Self {
        Self { algorithm, bytes }
    }

    /// Returns its algorithm.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Returns its bytes.
    pub fn bytes(&self) -> &[u8; DIGEST_BYTES] {
        &self.bytes
    }

    /// Returns its digits, as in file names and for composefs's programs.
    pub fn hex(&self) -> String {
        hex(&self.bytes)
    }

    /// Parses the text form. Digits without a prefix are composefs's.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let prefixed = |algorithm: Algorithm| text.strip_prefix(algorithm.name().as_bytes())?.strip_prefix(b":");
        for algorithm in [Algorithm::Blake3, Algorithm::Verity, Algorithm::Tree, Algorithm::Sha256] {
            if let Some(digits) = prefixed(algorithm) {
                return Self::from_hex(algorithm, digits);
            }
        }
        Self::from_hex(Algorithm::Verity, text)
    }

    /// Parses 64 hexadecimal digits.
    pub fn from_hex(algorithm: Algorithm, digits: &[u8]) -> Option<Self> {
        Some(Self::new(algorithm, bytes_of_hex(digits)?))
    }
}

/// Returns the digits of bytes.
pub fn hex(bytes: &[u8; DIGEST_BYTES]) -> String {
    use fmt::Write;
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // A string accepts all output.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Parses 64 lower-case hexadecimal digits.
pub fn bytes_of_hex(digits: &[u8]) -> Option<[u8; DIGEST_BYTES]> {
    let mut bytes = [0; DIGEST_BYTES];
    if digits.len() != 2 * DIGEST_BYTES {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        let digit = |at: u8| match at {
            b'0'..=b'9' => Some(at - b'0'),
            b'a'..=b'f' => Some(at - b'a' + 10),
            _ => None,
        };
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_back() {
        for algorithm in [Algorithm::Blake3, Algorithm::Verity, Algorithm::Tree, Algorithm::Sha256] {
            let digest = algorithm.of(b"x");
            assert_eq!(Digest::parse(digest.to_string().as_bytes()), Some(digest));
            assert_eq!(Digest::from_hex(algorithm, digest.hex().as_bytes()), Some(digest));
            assert_eq!(
                Digest::parse(digest.hex().as_bytes()).map(|digest| digest.algorithm()),
                Some(Algorithm::Verity)
            );
        }
        assert_ne!(Algorithm::Blake3.of(b"x"), Algorithm::Verity.of(b"x"));
        for bad in [&b""[..], b"00", &[b'g'; 64], &[b'A'; 64], &[b'0'; 63], &[b'0'; 65], "ä".repeat(32).as_bytes()] {
            assert_eq!(Digest::parse(bad), None);
            assert_eq!(Digest::parse(&[b"blake3:", bad].concat()), None);
        }
        assert_eq!(Digest::parse(format!("sha512:{}", "0".repeat(64)).as_bytes()), None);
    }

    /// From the test vectors of BLAKE3's authors.
    #[test]
    fn the_digest_of_nothing_is_known() {
        let digest = "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
        assert_eq!(Algorithm::Blake3.of(&[]).to_string(), digest);
    }
}
