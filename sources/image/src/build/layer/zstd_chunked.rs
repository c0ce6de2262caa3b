//! zstd:chunked: a zstd archive whose table of contents is in a skippable frame behind it. An annotation of the layer in
//! its manifest says where.
//!
//! ```text
//! blob      zstd frames: headers of the archive, files (each chunk begins a frame)
//!           skippable frame: the table, compressed by zstd
//!           skippable frames: the archive's headers (tar-split), a footer; neither is read here
//! position  OFFSET:LENGTH:UNPACKED:1 in decimal digits, in bytes; 1 is the kind of table
//! ```
//!
//! Source: the documentation of zstd:chunked in containers/storage.

use std::io::Read;

use super::estargz::verify;
use super::toc::TOC_BYTES_MAX;
use crate::build::tree_builder::Refusal;
use crate::format::digest::DIGEST_BYTES;

/// Where a table of contents is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub offset: u64,
    pub bytes: u64,
    unpacked: u64,
}

impl Position {
    /// Parses an annotation.
    pub(super) fn parse(text: &str) -> Result<Self, Refusal> {
        let wrong = || {
            format!("{:?} is not a valid position of a table of contents", text.chars().take(80).collect::<String>())
        };
        let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u64>().ok())?;
        let fields: Vec<Option<u64>> = text.split(':').map(number).collect();
        let [Some(offset), Some(bytes @ 1..), Some(unpacked), Some(kind)] = fields[..] else { return Err(wrong()) };
        if kind != 1 {
            return Err(format!("a table of contents of the unknown kind {kind}"));
        }
        if bytes > TOC_BYTES_MAX || unpacked > TOC_BYTES_MAX {
            return Err(format!(
                "its table of contents has {} bytes; the maximum is {TOC_BYTES_MAX}",
                bytes.max(unpacked)
            ));
        }
        offset.checked_add(bytes).ok_or_else(wrong)?;
        Ok(Self { offset, bytes, unpacked })
    }

    /// Verifies a table of contents, and unpacks it.
    pub(super) fn unpack(&self, packed: &[u8], expected: &[u8; DIGEST_BYTES]) -> Result<Vec<u8>, Refusal> {
        verify(packed, expected)?;
        let mut json = Vec::new();
        let read =
            zstd::Decoder::with_buffer(packed).and_then(|input| input.take(self.unpacked + 1).read_to_end(&mut json));
        read.map_err(|error| format!("its table of contents does not unpack: {error}"))?;
        let found = json.len() as u64;
        if found == self.unpacked {
            Ok(json)
        } else {
            Err(format!("its table of contents unpacks to {found} bytes, not {}", self.unpacked))
        }
    }
}
