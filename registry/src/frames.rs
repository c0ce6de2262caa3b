//! Parts of packs that are compressed piece by piece, so that any range of them can be had.
//!
//! ```text
//! blob          frames of Zstandard (RFC 8878) one after another, each of 256 KiB of the part, the last one of the rest
//! ferry.bytes   annotation of the blob: the length of the part, in decimal digits
//! ferry.frames  annotation of the blob: the lengths of the frames, 3 bytes each, little-endian, in base64 (RFC 4648, section 4)
//! ```
//!
//! What does not unpack is replaced by zeros, so that the digests of its objects refuse it, and only them.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ferry_image::ByteSink as Sink;
use zstd::bulk::{Compressor, Decompressor};

/// The bytes of a part in each frame.
const FRAME_BYTES: u64 = 256 << 10;
/// The maximum length of a frame: what does not shrink grows by less.
const PACKED_BYTES_MAX: u64 = FRAME_BYTES + 4096;
/// The number of bytes of a length in the annotation.
const LENGTH_BYTES: usize = 3;
const LEVEL: i32 = 3;
/// The maximum number of frames that are kept: 4 MiB.
const EDGES_MAX: usize = 15;
const _: () = assert!(EDGES_MAX as u64 * PACKED_BYTES_MAX <= 4 << 20);

/// Where the frames of a part are in its blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frames {
    /// The length of the part.
    pub bytes: u64,
    /// The ends of the frames in the blob.
    ends: Vec<u64>,
}

impl Frames {
    /// Compresses a part.
    pub(crate) fn pack(from: &mut dyn Read, to: &mut dyn Write) -> io::Result<Self> {
        let mut compressor = Compressor::new(LEVEL)?;
        let (mut frames, mut piece) = (Self { bytes: 0, ends: Vec::new() }, Vec::new());
        loop {
            piece.clear();
            from.take(FRAME_BYTES).read_to_end(&mut piece)?;
            if piece.is_empty() {
                return Ok(frames);
            }
            let packed = compressor.compress(&piece)?;
            to.write_all(&packed)?;
            frames.bytes += piece.len() as u64;
            frames.ends.push(frames.blob_bytes() + packed.len() as u64);
        }
    }

    /// The length of the blob.
    pub(crate) fn blob_bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or_default()
    }

    /// The value of the annotation.
    pub(crate) fn lengths(&self) -> String {
        let begins = std::iter::once(&0).chain(&self.ends);
        let lengths = self.ends.iter().zip(begins).map(|(end, begin)| (end - begin).to_le_bytes());
        STANDARD.encode(lengths.flat_map(|bytes| bytes.into_iter().take(LENGTH_BYTES)).collect::<Vec<u8>>())
    }

    /// Reads the annotations of a blob.
    ///
    /// # Errors
    ///
    /// What is wrong with them.
    pub(crate) fn parse(bytes: &str, lengths: &str, blob_bytes: u64) -> Result<Self, &'static str> {
        let bytes: u64 = bytes.parse().map_err(|_| "the length of a part is not a number")?;
        let lengths = STANDARD.decode(lengths).map_err(|_| "the lengths of a part's frames are no base64")?;
        if (lengths.len() / LENGTH_BYTES) as u64 != bytes.div_ceil(FRAME_BYTES)
            || !lengths.len().is_multiple_of(LENGTH_BYTES)
        {
            return Err("a part has not as many frames as its length needs");
        }
        let mut end = 0;
        let mut ends = Vec::with_capacity(lengths.len() / LENGTH_BYTES);
        for length in lengths.chunks_exact(LENGTH_BYTES) {
            let length = length.iter().rev().fold(0, |length, byte| length << 8 | u64::from(*byte));
            if length == 0 || length > PACKED_BYTES_MAX {
                return Err("a frame of a part is empty or too long");
            }
            end += length;
            ends.push(end);
        }
        if end != blob_bytes {
            return Err("the frames of a part are not its blob");
        }
        Ok(Self { bytes, ends })
    }

    /// Returns where a frame begins in the blob.
    fn begin(&self, at: usize) -> u64 {
        at.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    /// Passes a range of the part with this blob to `sink`, and asks `fetch` for the frames that have it, unless `edges` has them.
    ///
    /// # Errors
    ///
    /// That of `fetch`, or of `sink`, by `of_sink`. If `sink` refuses data of `edges` as damaged, its error has the kind `Interrupted`, as if
    /// other servers could be asked: the next call fetches them.
    pub(crate) fn read<E>(
        &self,
        (blob, range): (BlobDigest, &Range<u64>),
        edges: &EdgeFrames,
        fetch: impl Fn(&Range<u64>, &mut Sink<'_>) -> Result<(), E>,
        of_sink: impl Fn(io::Error) -> E,
        sink: &mut Sink<'_>,
    ) -> Result<(), E> {
        let index = |byte: u64| usize::try_from(byte / FRAME_BYTES).unwrap_or(usize::MAX);
        if range.is_empty() || range.end > self.bytes {
            return Ok(());
        }
        let all = index(range.start)..index(range.end - 1) + 1;
        let mut unpacker = Unpacker::new(self, range, all.start);
        let mut left = all.clone();
        let mut read = || {
            while !left.is_empty() {
                if let Some(packed) = edges.get(blob, left.start) {
                    unpacker.take(&packed, sink).map_err(|error| match error.kind() {
                        io::ErrorKind::InvalidData => of_sink(io::Error::new(io::ErrorKind::Interrupted, error)),
                        _ => of_sink(error),
                    })?;
                    left.start += 1;
                    continue;
                }
                let has_last = left.len() > 1 && edges.get(blob, left.end - 1).is_some();
                let end = left.end - usize::from(has_last);
                let wanted = self.begin(left.start)..self.ends[end - 1];
                fetch(&wanted, &mut |bytes| unpacker.take(bytes, sink))?;
                left.start = end;
            }
            Ok(())
        };
        let outcome = read();
        match &outcome {
            Ok(()) => edges.insert(blob, unpacker.edges),
            // They may be what is damaged.
            Err(_) => edges.remove(blob, &all),
        }
        outcome
    }
}

/// Compressed frames of which requests needed only a part: the next request needs the rest.
#[derive(Debug, Default)]
pub(crate) struct EdgeFrames(Mutex<VecDeque<EdgeFrame>>);

/// The SHA-256 digest of a blob.
type BlobDigest = [u8; 32];

/// A compressed frame of a blob, and its number.
type EdgeFrame = (BlobDigest, usize, Arc<[u8]>);

impl EdgeFrames {
    fn all(&self) -> MutexGuard<'_, VecDeque<EdgeFrame>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, blob: BlobDigest, at: usize) -> Option<Arc<[u8]>> {
        let all = self.all();
        all.iter().find(|frame| (frame.0, frame.1) == (blob, at)).map(|(.., packed)| Arc::clone(packed))
    }

    fn insert(&self, blob: BlobDigest, new: Vec<(usize, Arc<[u8]>)>) {
        let mut all = self.all();
        for (at, packed) in new {
            all.retain(|frame| (frame.0, frame.1) != (blob, at));
            all.push_back((blob, at, packed));
        }
        let surplus = all.len().saturating_sub(EDGES_MAX);
        all.drain(..surplus);
    }

    fn remove(&self, blob: BlobDigest, range: &Range<usize>) {
        self.all().retain(|frame| frame.0 != blob || !range.contains(&frame.1));
    }
}

/// Unpacks frames that come in pieces.
struct Unpacker<'a> {
    frames: &'a Frames,
    /// What is wanted of the part.
    range: &'a Range<u64>,
    /// The frame that comes, and its first byte in the blob.
    at: usize,
    begin: u64,
    packed: Vec<u8>,
    piece: Vec<u8>,
    /// One for all frames, from the first on.
    unpack: Option<Decompressor<'static>>,
    /// The frames of which only a part is wanted.
    edges: Vec<(usize, Arc<[u8]>)>,
}

impl<'a> Unpacker<'a> {
    /// Begins with a frame.
    fn new(frames: &'a Frames, range: &'a Range<u64>, at: usize) -> Self {
        let (packed, piece, edges) = Default::default();
        Self { frames, range, at, begin: frames.begin(at), packed, piece, unpack: None, edges }
    }

    fn take(&mut self, mut bytes: &[u8], sink: &mut Sink<'_>) -> io::Result<()> {
        while !bytes.is_empty() {
            let Some(end) = self.frames.ends.get(self.at) else { return Err(io::ErrorKind::InvalidData.into()) };
            let length = usize::try_from(end - self.begin).map_err(|_| io::ErrorKind::OutOfMemory)?;
            let (now, later) = bytes.split_at(bytes.len().min(length - self.packed.len()));
            self.packed.extend_from_slice(now);
            bytes = later;
            if self.packed.len() == length {
                self.begin = *end;
                self.pass(sink)?;
                self.at += 1;
                self.packed.clear();
            }
        }
        Ok(())
    }

    /// Passes on what is wanted of a whole frame.
    fn pass(&mut self, sink: &mut Sink<'_>) -> io::Result<()> {
        let from = self.at as u64 * FRAME_BYTES;
        let length = FRAME_BYTES.min(self.frames.bytes - from);
        let wanted = [self.range.start, self.range.end].map(|byte| byte.clamp(from, from + length) - from);
        let [begin, end, length] =
            [wanted[0], wanted[1], length].map(|byte| usize::try_from(byte).unwrap_or(usize::MAX));
        self.piece.clear();
        self.piece.reserve_exact(length);
        let unpack = match &mut self.unpack {
            Some(unpack) => unpack,
            none => none.insert(Decompressor::new()?),
        };
        if unpack.decompress_to_buffer(&self.packed, &mut self.piece).ok() != Some(length) {
            self.piece.clear();
            self.piece.resize(length, 0);
        }
        if end - begin < length {
            self.edges.push((self.at, self.packed.as_slice().into()));
        }
        sink(&self.piece[begin..end])
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
mod tests {
    use std::cell::Cell;

    use proptest::prelude::*;

    use super::*;

    /// Some bytes that shrink, and some that do not.
    fn part(bytes: u64, seed: u64) -> Vec<u8> {
        let mut number = seed | 1;
        let mut next = |at: u64| {
            number = number.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            if (at / 100_000).is_multiple_of(2) { number.to_le_bytes()[7] } else { b'x' }
        };
        (0..bytes).map(&mut next).collect()
    }

    fn packed(part: &[u8]) -> (Frames, Vec<u8>) {
        let mut blob = Vec::new();
        let frames = Frames::pack(&mut &*part, &mut blob).unwrap();
        assert_eq!(Frames::parse(&frames.bytes.to_string(), &frames.lengths(), blob.len() as u64).unwrap(), frames);
        (frames, blob)
    }

    fn read(frames: &Frames, blob: &[u8], range: &Range<u64>, piece: usize) -> Vec<u8> {
        read_with(frames, blob, range, piece, &EdgeFrames::default()).0
    }

    /// Returns the range, and how many bytes of the blob were fetched for it.
    fn read_with(frames: &Frames, blob: &[u8], range: &Range<u64>, piece: usize, edges: &EdgeFrames) -> (Vec<u8>, u64) {
        let (mut found, fetched) = (Vec::new(), Cell::new(0));
        let fetch = |wanted: &Range<u64>, sink: &mut Sink<'_>| {
            fetched.set(fetched.get() + wanted.end - wanted.start);
            let [from, to] = [wanted.start, wanted.end].map(|at| usize::try_from(at).unwrap());
            blob[from..to].chunks(piece).try_for_each(sink)
        };
        let mut sink = |bytes: &[u8]| {
            found.extend_from_slice(bytes);
            Ok(())
        };
        frames.read(([7; 32], range), edges, fetch, |error| error, &mut sink).unwrap();
        (found, fetched.get())
    }

    #[test]
    fn frames_at_the_edges_of_requests_are_fetched_once() {
        let part = part(9 * FRAME_BYTES - 5, 1);
        let (frames, blob) = packed(&part);
        for step in [100_000, FRAME_BYTES, 700_000] {
            for is_backwards in [false, true] {
                let mut starts: Vec<u64> = (0..frames.bytes).step_by(usize::try_from(step).unwrap()).collect();
                if is_backwards {
                    starts.reverse();
                }
                let (edges, mut sum) = (EdgeFrames::default(), 0);
                for from in starts {
                    let range = from..(from + step).min(frames.bytes);
                    let (found, fetched) = read_with(&frames, &blob, &range, 10_000, &edges);
                    let [begin, end] = [range.start, range.end].map(|at| usize::try_from(at).unwrap());
                    assert_eq!(found, part[begin..end], "{range:?}");
                    sum += fetched;
                }
                assert_eq!(sum, blob.len() as u64, "{step} {is_backwards}");
                assert!(edges.all().len() <= EDGES_MAX);
            }
        }
    }

    #[test]
    fn refused_frames_are_fetched_again() {
        let part = part(3 * FRAME_BYTES, 1);
        let (frames, blob) = packed(&part);
        let mut wrong = blob.clone();
        wrong[4] ^= 1;
        let edges = EdgeFrames::default();
        // The end of the first frame is not looked at here.
        read_with(&frames, &wrong, &(0..1000), 10_000, &edges);
        assert_eq!(read_with(&frames, &blob, &(1000..2000), 10_000, &edges).1, 0);
        let refuse = |_: &[u8]| Err(io::ErrorKind::InvalidData.into());
        let none = |_: &Range<u64>, _: &mut Sink<'_>| -> io::Result<()> { panic!("it is here") };
        let error = frames.read(([7; 32], &(2000..3000)), &edges, none, |error| error, &mut { refuse }).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        assert_eq!(
            read_with(&frames, &blob, &(2000..3000), 10_000, &edges),
            (part[2000..3000].to_vec(), frames.ends[0])
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        #[test]
        fn any_range_is_had(
            bytes in prop_oneof![0_u64..5, FRAME_BYTES - 2..FRAME_BYTES + 3, 0_u64..5 * FRAME_BYTES],
            seed in any::<u64>(), from in any::<u64>(), length in any::<u64>(), piece in 1_usize..100_000,
        ) {
            let part = part(bytes, seed);
            let (frames, blob) = packed(&part);
            prop_assert_eq!(frames.bytes, bytes);
            let from = from % (bytes + 1);
            let range = from..from + length % (bytes - from + 1);
            let [begin, end] = [range.start, range.end].map(|at| usize::try_from(at).unwrap());
            prop_assert_eq!(&read(&frames, &blob, &range, piece), &part[begin..end]);
        }

        #[test]
        fn damaged_blobs_have_as_many_bytes(seed in any::<u64>(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let part = part(3 * FRAME_BYTES - 7, seed);
            let (frames, mut blob) = packed(&part);
            let at = at.index(blob.len());
            blob[at] = byte;
            let found = read(&frames, &blob, &(0..frames.bytes), 1 << 20);
            prop_assert_eq!(found.len(), part.len());
            // Only the frame with the byte may be another one.
            let frame = frames.ends.partition_point(|end| *end <= at as u64);
            for (number, (found, expected)) in found.chunks(1 << 18).zip(part.chunks(1 << 18)).enumerate() {
                prop_assert!(number == frame || found == expected, "frame {number}");
            }
        }

        #[test]
        fn any_annotations_are_read_or_refused(bytes in any::<u64>(), lengths in ".{0,40}", blob in any::<u64>()) {
            let _ = Frames::parse(&bytes.to_string(), &lengths, blob);
        }
    }

    #[test]
    fn annotations_that_do_not_fit_are_refused() {
        let (frames, blob) = packed(&part(FRAME_BYTES + 1, 3));
        let (lengths, bytes) = (frames.lengths(), blob.len() as u64);
        let refused = |part: &str, lengths: &str, bytes| Frames::parse(part, lengths, bytes).unwrap_err();
        assert!(refused("x", &lengths, bytes).contains("not a number"));
        assert!(refused("1", &lengths, bytes).contains("not as many frames"));
        assert!(refused(&u64::MAX.to_string(), &lengths, bytes).contains("not as many frames"));
        assert!(refused("262145", "!", bytes).contains("base64"));
        assert!(refused("262145", "AAAAAAAA", bytes).contains("empty or too long"));
        assert!(refused("262145", "////////", bytes).contains("empty or too long"));
        assert!(refused("262145", &lengths, bytes + 1).contains("not its blob"));
    }
}
