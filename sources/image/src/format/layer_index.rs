//! The index of a pack that has the files of a container's layer, which a registry has compressed.
//!
//! ```text
//! NAME.index   40 bytes each, numbers are little-endian
//!   entry 0    2^64 - 2 (gzip) or 2^64 - 3 (zstd); SHA-256 of the layer's blob (32)
//!   entry 1    length of the blob (8); SHA-256 of its table of contents (32)
//!   then for each object two entries
//!              length (8), SHA-256 (32); a digest of zeros: the object consists of zeros and is not in the blob
//!              first byte of its stream in the blob (8), end of the stream (8), first byte of the object in the unpacked
//!              stream (8), 1: begins at a block, 0: follows the object before (8), zeros (8)
//! ```
//!
//! Objects are the chunks of the table of contents, in the order of the blob. The chunks of a file are one run of bytes.
//! NAME depends on the layer only, so images with equal layers share the pack.

use crate::format::chunk::CHUNK_BYTES;
use crate::format::digest::{Algorithm, DIGEST_BYTES, Digest};
use crate::format::erofs::BLOCK_BYTES;
use crate::format::object::{Object, RECORD_BYTES, ZEROS, record};

/// The first number of the index, for either compression. No object is that long.
const GZIP: u64 = u64::MAX - 1;
const ZSTD: u64 = u64::MAX - 2;
/// The maximum size of an object in bytes: it is proved in memory as a whole. eStargz has chunks of 4 MiB by default.
pub const LAYER_CHUNK_BYTES_MAX: u64 = 16 << 20;
const _: () = assert!(LAYER_CHUNK_BYTES_MAX > CHUNK_BYTES as u64);
/// The maximum number of bytes before an object in its stream: they are unpacked in vain.
const INNER_BYTES_MAX: u64 = 64 << 20;

/// How a layer is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// gzip (RFC 1952).
    Gzip,
    /// Zstandard (RFC 8878).
    Zstd,
}

/// The blob with a layer's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerBlob {
    /// Its compression.
    pub compression: Compression,
    /// Its SHA-256 digest, which is its name in the registry.
    pub sha256: [u8; DIGEST_BYTES],
    /// Its length in bytes.
    pub bytes: u64,
    /// The SHA-256 digest of its table of contents, which proves the objects.
    pub toc: [u8; DIGEST_BYTES],
    /// The place of each object.
    pub(crate) spans: Vec<Span>,
}

/// Where an object is in the blob; no numbers for one that consists of zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Span {
    /// The first byte of the compressed stream that has it.
    pub from: u64,
    /// The end of that stream.
    pub to: u64,
    /// The object's first byte in the unpacked stream.
    pub inner: u64,
    /// Whether the object is the first of its file, and so begins at a block.
    pub is_first: bool,
}

/// A chunk of a layer's file, before it has a place in a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Length in bytes.
    pub bytes: u64,
    /// SHA-256, or [`ZEROS`].
    pub digest: Digest,
    pub span: Span,
}

/// Encodes the index of these chunks.
pub(crate) fn encode(layer: &LayerBlob, chunks: impl Iterator<Item = Chunk>) -> Vec<u8> {
    let mark = match layer.compression {
        Compression::Gzip => GZIP,
        Compression::Zstd => ZSTD,
    };
    let digest = |bytes| Digest::new(Algorithm::Sha256, bytes);
    let mut bytes = [record(mark, digest(layer.sha256)), record(layer.bytes, digest(layer.toc))].concat();
    for Chunk { bytes: length, digest, span } in chunks {
        bytes.extend_from_slice(&record(length, digest));
        for number in [span.from, span.to, span.inner, u64::from(span.is_first), 0] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
    }
    bytes
}

/// Encodes a parsed index again.
pub(crate) fn write(layer: &LayerBlob, objects: &[Object]) -> Vec<u8> {
    let chunk = |(object, span): (&Object, &Span)| Chunk { bytes: object.bytes, digest: object.digest, span: *span };
    encode(layer, objects.iter().zip(&layer.spans).map(chunk))
}

/// Returns the numbers in an entry.
fn numbers(entry: &[u8]) -> [u64; 5] {
    let mut found = [0; 5];
    for (number, bytes) in found.iter_mut().zip(entry.chunks_exact(8)) {
        *number = bytes.try_into().map_or(0, u64::from_le_bytes);
    }
    found
}

/// Splits an entry into its number and its digest.
fn parts(entry: &[u8]) -> (u64, [u8; DIGEST_BYTES]) {
    let (number, digest) = entry.split_at(8);
    (number.try_into().map_or(0, u64::from_le_bytes), digest.try_into().unwrap_or_default())
}

/// A parsed index.
#[derive(Debug)]
pub(crate) struct ParsedLayer {
    pub layer: LayerBlob,
    pub objects: Vec<Object>,
    /// The number of the pack's blocks.
    pub blocks: u64,
}

/// Parses an index; `None` for that of a pack that is not a layer's.
pub(crate) fn parse(bytes: &[u8]) -> Result<Option<ParsedLayer>, &'static str> {
    let mut entries = bytes.chunks_exact(RECORD_BYTES);
    let Some((mark, sha256)) = entries.next().map(parts) else { return Ok(None) };
    let compression = match mark {
        GZIP => Compression::Gzip,
        ZSTD => Compression::Zstd,
        _ => return Ok(None),
    };
    let (blob_bytes, toc) = entries.next().map(parts).ok_or("its index is cut off")?;
    let mut layer = LayerBlob { compression, sha256, bytes: blob_bytes, toc, spans: Vec::new() };
    let mut objects: Vec<Object> = Vec::new();
    let (mut end, mut last) = (0_u64, None);
    while let Some(entry) = entries.next() {
        let (length, digest) = parts(entry);
        let [from, to, inner, first @ 0..=1, 0] = numbers(entries.next().ok_or("its index is cut off")?) else {
            return Err("its index has unknown flags");
        };
        let span = Span { from, to, inner, is_first: first == 1 };
        let digest = Digest::new(Algorithm::Sha256, digest);
        if length == 0 || length > LAYER_CHUNK_BYTES_MAX {
            return Err("its index tells of a chunk of no bytes, or of more than 16 MiB");
        }
        check_span(blob_bytes, span, digest == ZEROS, &mut last, length)?;
        let too_large = "the lengths in its index are too large";
        if span.is_first {
            let begin = end.checked_next_multiple_of(BLOCK_BYTES as u64).ok_or(too_large)?;
            if let Some(before) = objects.last_mut() {
                before.padding = u16::try_from(begin - end).unwrap_or_default();
            }
            end = begin;
        } else if objects.is_empty() {
            return Err("its index begins within a file");
        }
        let skip = u16::try_from(end % BLOCK_BYTES as u64).unwrap_or_default();
        objects.push(Object { block: end / BLOCK_BYTES as u64, skip, padding: 0, bytes: length, digest });
        layer.spans.push(span);
        end = end.checked_add(length).filter(|end| *end < u64::MAX - BLOCK_BYTES as u64).ok_or(too_large)?;
    }
    let blocks = end.div_ceil(BLOCK_BYTES as u64);
    if let Some(before) = objects.last_mut() {
        before.padding = u16::try_from(blocks * BLOCK_BYTES as u64 - end).unwrap_or_default();
    }
    Ok(Some(ParsedLayer { layer, objects, blocks }))
}

/// Checks that a chunk is in the blob, and behind the one before it.
fn check_span(
    blob_bytes: u64,
    span: Span,
    is_zeros: bool,
    last: &mut Option<(Span, u64)>,
    length: u64,
) -> Result<(), &'static str> {
    let Span { from, to, inner, .. } = span;
    if is_zeros {
        return if (from, to, inner) == (0, 0, 0) { Ok(()) } else { Err("its index has a place for zeros") };
    }
    if from >= to || to > blob_bytes {
        return Err("a chunk is outside of the blob");
    }
    if inner > INNER_BYTES_MAX {
        return Err("a chunk is more than 64 MiB behind the beginning of its stream");
    }
    let is_behind = last.is_none_or(|(before, bytes): (Span, u64)| {
        from >= before.to || (from, to) == (before.from, before.to) && inner >= before.inner + bytes
    });
    if !is_behind {
        return Err("chunks overlap, or are not in the order of the blob");
    }
    *last = Some((span, length));
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chunk(bytes: u64, span: Span) -> Chunk {
        Chunk { bytes, digest: Algorithm::Sha256.of(b"x"), span }
    }

    fn span(from: u64, to: u64, inner: u64, is_first: bool) -> Span {
        Span { from, to, inner, is_first }
    }

    fn index(chunks: &[Chunk]) -> Result<ParsedLayer, &'static str> {
        let (toc, spans) = ([2; 32], Vec::new());
        let layer = LayerBlob { compression: Compression::Zstd, sha256: [1; 32], bytes: 1000, toc, spans };
        let bytes = encode(&layer, chunks.iter().copied());
        let found = parse(&bytes)?.expect("it is a layer's");
        assert_eq!(write(&found.layer, &found.objects), bytes);
        Ok(found)
    }

    #[test]
    fn files_begin_at_blocks_and_their_chunks_follow_one_another() {
        let zeros = Chunk { bytes: 4096, digest: ZEROS, span: span(0, 0, 0, false) };
        let chunks = [
            chunk(5000, span(0, 10, 512, true)),
            chunk(3192, span(10, 20, 0, false)),
            chunk(1, span(20, 30, 0, true)),
            zeros,
            chunk(10, span(30, 40, 0, true)),
            chunk(10, span(30, 40, 10, false)),
        ];
        let found = index(&chunks).expect("it is right");
        let places: Vec<_> = found.objects.iter().map(|object| (object.block, object.skip, object.padding)).collect();
        assert_eq!(places, [(0, 0, 0), (1, 904, 0), (2, 0, 0), (2, 1, 4095), (4, 0, 0), (4, 10, 4076)]);
        assert_eq!((found.blocks, found.objects[1].blocks(), found.objects[3].blocks()), (5, 1, 2));
        assert!(found.objects[3].proves(&[0; 4096]) && !found.objects[3].proves(&[0; 4095]));
    }

    #[test]
    fn chunks_that_cannot_be_are_refused() {
        let first = chunk(10, span(10, 20, 0, true));
        for (chunks, expected) in [
            (vec![chunk(0, span(0, 1, 0, true))], "no bytes"),
            (vec![chunk(LAYER_CHUNK_BYTES_MAX + 1, span(0, 1, 0, true))], "more than 16 MiB"),
            (vec![chunk(1, span(1, 1, 0, true))], "outside of the blob"),
            (vec![chunk(1, span(999, 1001, 0, true))], "outside of the blob"),
            (vec![chunk(1, span(0, 1, (64 << 20) + 1, true))], "behind the beginning of its stream"),
            (vec![chunk(1, span(0, 1, 0, false))], "within a file"),
            (vec![first, chunk(1, span(0, 5, 0, true))], "overlap"),
            (vec![first, chunk(1, span(10, 20, 9, true))], "overlap"),
            (vec![first, chunk(1, span(15, 30, 0, true))], "overlap"),
            (vec![first, Chunk { bytes: 1, digest: ZEROS, span: span(0, 1, 0, true) }], "place for zeros"),
        ] {
            let error = index(&chunks).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
    }

    proptest! {
        #[test]
        fn indexes_are_read_as_they_are_written_or_refused(
            mut bytes in prop::collection::vec(any::<u8>(), 0..500), mark in 1_u64..4, sound in any::<bool>()
        ) {
            bytes.truncate(bytes.len() / RECORD_BYTES * RECORD_BYTES);
            if let Some(first) = bytes.first_chunk_mut::<8>() {
                *first = (u64::MAX - mark).to_le_bytes();
            }
            if sound {
                // Small numbers, which make sense more often.
                bytes.iter_mut().skip(40).enumerate().filter(|(at, _)| at % 8 > 1).for_each(|(_, byte)| *byte = 0);
            }
            if let Ok(Some(ParsedLayer { layer, objects, blocks })) = parse(&bytes) {
                prop_assert_eq!(write(&layer, &objects), bytes);
                let ends: Vec<u64> = objects.iter().map(|object| object.begin() + object.padded()).collect();
                let begins: Vec<u64> = objects.iter().skip(1).map(Object::begin).collect();
                prop_assert_eq!(&ends[..begins.len()], &begins[..]);
                prop_assert_eq!(ends.last().copied().unwrap_or(0), blocks * BLOCK_BYTES as u64);
            }
        }
    }
}
