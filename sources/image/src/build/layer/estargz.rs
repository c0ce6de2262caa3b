//! eStargz: a gzip archive whose last member is the table of contents, and whose end says where that begins.
//!
//! ```text
//! blob      gzip members: headers of the archive, files (each chunk begins a member), the table, the footer
//! table     a member with a tar archive of one file, stargz.index.json
//! footer    51 bytes: an empty member with an extra field "SG" of 22 bytes: the offset of the table in 16 hexadecimal
//!           digits, then "STARGZ"
//! ```
//!
//! Source: "eStargz: Standard-Compatible Extension to Container Image Layers for Lazy Pulling", stargz-snapshotter.

use std::io::Read;

use flate2::bufread::GzDecoder;
use sha2::{Digest as _, Sha256};

use super::toc::TOC_BYTES_MAX;
use crate::build::tar::HEADER_BYTES;
use crate::build::tree_builder::Refusal;
use crate::format::digest::{DIGEST_BYTES, hex};

/// The length of the footer in bytes.
pub(super) const FOOTER_BYTES: usize = 51;
/// The beginning of the footer: gzip's magic, a flag for the extra field; time, compression and system are not looked at.
const HEAD: [u8; 4] = [0x1f, 0x8b, 8, 4];
/// The extra field: its length, its name, the length of its data.
const EXTRA: [u8; 6] = [26, 0, b'S', b'G', 22, 0];
const EXTRA_AT: usize = 10;
const DIGITS: usize = 16;
const MAGIC: &[u8] = b"STARGZ";
/// The name of the table in its archive.
const NAME: &[u8] = b"stargz.index.json\0";

/// Returns the offset of the table of contents, by the last bytes of a blob.
pub(super) fn footer(end: &[u8]) -> Result<u64, Refusal> {
    let none = || Refusal::from("its end is no footer of eStargz");
    let footer = end.len().checked_sub(FOOTER_BYTES).and_then(|from| end.get(from..)).ok_or_else(none)?;
    let (extra, rest) = footer[EXTRA_AT..].split_at(EXTRA.len());
    let (digits, rest) = rest.split_at(DIGITS);
    if !footer.starts_with(&HEAD) || extra != EXTRA || !rest.starts_with(MAGIC) {
        return Err(none());
    }
    // `from_str_radix` would accept a sign.
    let digits = std::str::from_utf8(digits).ok().filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
    digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()).ok_or_else(none)
}

/// Unpacks a table of contents, and verifies it.
pub(super) fn unpack(packed: &[u8], expected: &[u8; DIGEST_BYTES]) -> Result<Vec<u8>, Refusal> {
    let broken = |error| format!("its table of contents does not unpack: {error}");
    let mut archive = GzDecoder::new(packed).take(TOC_BYTES_MAX + HEADER_BYTES as u64);
    let mut header = [0; HEADER_BYTES];
    archive.read_exact(&mut header).map_err(broken)?;
    let digits = std::str::from_utf8(&header[124..136]).unwrap_or_default().trim_matches(['\0', ' ']);
    let bytes = u64::from_str_radix(digits, 8).ok().filter(|_| header.starts_with(NAME));
    let bytes = bytes.ok_or("its table of contents has another name")?;
    if bytes > TOC_BYTES_MAX {
        return Err(format!("its table of contents has {bytes} bytes; the maximum is {TOC_BYTES_MAX}"));
    }
    let mut json = Vec::new();
    archive.take(bytes).read_to_end(&mut json).map_err(broken)?;
    verify(&json, expected)?;
    Ok(json)
}

/// Verifies the digest of a table of contents.
pub(super) fn verify(bytes: &[u8], expected: &[u8; DIGEST_BYTES]) -> Result<(), Refusal> {
    let found: [u8; DIGEST_BYTES] = Sha256::digest(bytes).into();
    if found == *expected {
        return Ok(());
    }
    Err(format!(
        "its table of contents has the digest sha256:{}, not sha256:{} as its annotation says",
        hex(&found),
        hex(expected)
    ))
}
