//! Archives that a fuzzer has thought of.

pub const BLOCK: usize = 512;
/// Where a header has its size, and its sum.
const SIZE: std::ops::Range<usize> = 124..136;
const SUM: std::ops::Range<usize> = 148..156;

/// The archive with correct checksums, which random input does not have.
pub fn summed(mut archive: Vec<u8>) -> Vec<u8> {
    let mut at = 0;
    while let Some(header) = archive.get_mut(at..at + BLOCK) {
        if header.iter().any(|byte| *byte != 0) {
            header[SUM].fill(b' ');
            let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
            header[SUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
        let digits = std::str::from_utf8(&header[SIZE]).unwrap_or_default();
        let size = usize::from_str_radix(digits.trim_matches(['\0', ' ']), 8).unwrap_or_default();
        at = at.saturating_add(BLOCK).saturating_add(size.saturating_add(BLOCK - 1) / BLOCK * BLOCK);
    }
    archive
}
