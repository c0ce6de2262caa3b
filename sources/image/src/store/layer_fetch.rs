//! Fetches the objects of a layer's pack: parts of the layer's blob are requested and unpacked.
//!
//! What does not unpack is replaced by zeros, so that the digest of the object refuses it, and only that object.

use std::io::{self, Write};
use std::ops::Range;

use flate2::write::GzDecoder;

use crate::format::index::{Index, Object};
use crate::format::layer_index::{Compression, LayerBlob, Span};
use crate::store::fetch::{ByteSink, Fetch};

/// Unneeded bytes of a blob between two objects up to which one request has both: a request costs more.
const GAP_BYTES_MAX: u64 = 64 << 10;
/// The pieces in which zeros are passed on, in bytes.
const ZEROS: [u8; 4096] = [0; 4096];

/// Passes a range of a pack to `sink`. In a layer's pack, the range begins and ends with an object.
pub(crate) fn read(from: &dyn Fetch, index: &Index, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
    let Some(layer) = &index.layer else { return from.read(index.pack, range, sink) };
    let first = index.objects.partition_point(|object| object.begin() < range.start);
    let end = index.objects.partition_point(|object| object.begin() < range.end);
    let mut run = first..end;
    while !run.is_empty() {
        let count = request(&layer.spans[run.clone()]);
        let objects = run.start..run.start + count;
        match fetch(from, layer, &index.objects, objects, range.end, sink) {
            // A registry that has the image as Ferry pushed it has the pack instead of the blob.
            Err(error) if is_missing(&error) && run.start == first => {
                return from
                    .read(index.pack, range, sink)
                    .map_err(|other| if is_missing(&other) { error } else { other });
            }
            outcome => outcome?,
        }
        run.start += count;
    }
    Ok(())
}

/// Returns whether the source may lack it. S3 refuses requests for missing keys of those who may not list the bucket.
fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied)
}

/// Returns how many objects one request has.
fn request(spans: &[Span]) -> usize {
    let mut end = None;
    let is_near = |span: &&Span| {
        let near = end.is_none_or(|end: u64| span.from <= end.saturating_add(GAP_BYTES_MAX));
        if span.to > 0 {
            end = Some(span.to);
        }
        near
    };
    spans.iter().take_while(is_near).count().max(1)
}

/// Fetches adjacent objects with one request.
fn fetch(
    from: &dyn Fetch,
    layer: &LayerBlob,
    objects: &[Object],
    run: Range<usize>,
    end: u64,
    sink: &mut ByteSink<'_>,
) -> io::Result<()> {
    let spans = &layer.spans[run.clone()];
    let mut out = Objects { objects: &objects[run], spans, at: 0, passed: 0, end, sink };
    out.pass_zeros()?;
    let stored = || spans.iter().filter(|span| span.to > 0);
    let Some((begin, stop)) = stored().next().zip(stored().next_back()).map(|(first, last)| (first.from, last.to))
    else {
        return Ok(());
    };
    let mut streams = Streams { compression: layer.compression, at: begin, stream: None, out: &mut out };
    from.blob(layer.sha256, layer.bytes, begin..stop, &mut |bytes| streams.take(bytes))?;
    streams.end_stream()?;
    Ok(())
}

/// The objects of a request, which receive their bytes in order.
struct Objects<'a, 'b> {
    objects: &'a [Object],
    spans: &'a [Span],
    /// The current object, and how many of its bytes were passed on.
    at: usize,
    passed: u64,
    /// The end of the requested range in the pack.
    end: u64,
    sink: &'a mut ByteSink<'b>,
}

impl Objects<'_, '_> {
    /// Returns the place of the current object.
    fn span(&self) -> Option<Span> {
        self.spans.get(self.at).copied()
    }

    /// Returns the place of the current object if this stream has it.
    fn span_in(&self, stream: Span) -> Option<Span> {
        self.span().filter(|span| (span.from, span.to) == (stream.from, stream.to))
    }

    /// Passes on bytes of the current object.
    fn pass(&mut self, bytes: &[u8]) -> io::Result<()> {
        (self.sink)(bytes)?;
        self.passed += bytes.len() as u64;
        self.end_object()
    }

    /// Ends a complete object with its padding, and passes on objects of zeros after it.
    fn end_object(&mut self) -> io::Result<()> {
        let object = &self.objects[self.at];
        if self.passed < object.bytes {
            return Ok(());
        }
        if object.end() < self.end {
            zeros(self.sink, object.padding.into())?;
        }
        (self.at, self.passed) = (self.at + 1, 0);
        self.pass_zeros()
    }

    fn pass_zeros(&mut self) -> io::Result<()> {
        while let Some(object) = self.objects.get(self.at).filter(|object| object.is_zeros()) {
            let padding = if object.end() < self.end { object.padding } else { 0 };
            zeros(self.sink, object.bytes + u64::from(padding))?;
            self.at += 1;
        }
        Ok(())
    }
}

fn zeros(sink: &mut ByteSink<'_>, mut bytes: u64) -> io::Result<()> {
    while bytes > 0 {
        let count = usize::try_from(bytes).unwrap_or(usize::MAX).min(ZEROS.len());
        sink(&ZEROS[..count])?;
        bytes -= count as u64;
    }
    Ok(())
}

/// Unpacks the compressed streams of a part of a blob.
struct Streams<'a, 'b, 'c> {
    compression: Compression,
    /// The offset of the next byte in the blob.
    at: u64,
    stream: Option<(Span, Decoder)>,
    out: &'a mut Objects<'b, 'c>,
}

impl Streams<'_, '_, '_> {
    /// Receives the next bytes of the blob.
    fn take(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let Some(next) = self.stream.as_ref().map(|(span, _)| *span).or_else(|| self.out.span()) else {
                return Ok(());
            };
            // Between streams there are other members of the archive.
            let (end, is_in) = if self.at < next.from { (next.from, false) } else { (next.to, true) };
            let count = usize::try_from(end - self.at).unwrap_or(usize::MAX).min(bytes.len());
            let (now, later) = bytes.split_at(count);
            (bytes, self.at) = (later, self.at + count as u64);
            if is_in {
                self.unpack(next, now)?;
            }
            // Now, so that a refusal is attributed to the right server.
            if self.stream.as_ref().is_some_and(|(span, _)| self.at >= span.to) {
                self.end_stream()?;
            }
        }
        Ok(())
    }

    fn unpack(&mut self, span: Span, bytes: &[u8]) -> io::Result<()> {
        let (_, decoder) = match &mut self.stream {
            Some(stream) => stream,
            none => none.insert((span, Decoder::new(self.compression)?)),
        };
        // In small parts, so that what they unpack to is, too.
        for mut part in bytes.chunks(INPUT_BYTES) {
            while !part.is_empty() && !decoder.is_broken && self.out.span_in(span).is_some() {
                part = decoder.write(part);
                let (from, unpacked) = decoder.unpacked();
                deliver(self.out, span, from, &unpacked)?;
            }
        }
        Ok(())
    }

    /// Ends a stream; objects in it that did not get all their bytes get zeros.
    fn end_stream(&mut self) -> io::Result<()> {
        let Some((span, mut decoder)) = self.stream.take() else { return Ok(()) };
        decoder.finish();
        let (from, unpacked) = decoder.unpacked();
        deliver(self.out, span, from, &unpacked)?;
        while self.out.span_in(span).is_some() {
            let left = self.out.objects[self.out.at].bytes - self.out.passed;
            zeros(self.out.sink, left)?;
            self.out.passed += left;
            self.out.end_object()?;
        }
        Ok(())
    }
}

/// Passes on those unpacked bytes, from an offset of the stream on, that belong to objects in it.
fn deliver(out: &mut Objects<'_, '_>, stream: Span, mut from: u64, mut bytes: &[u8]) -> io::Result<()> {
    while let Some(span) = out.span_in(stream) {
        let skipped = (span.inner + out.passed).saturating_sub(from);
        let Some(rest) = usize::try_from(skipped).ok().and_then(|skipped| bytes.get(skipped..)) else { return Ok(()) };
        let left = out.objects[out.at].bytes - out.passed;
        let count = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
        if count == 0 {
            return Ok(());
        }
        let (now, later) = rest.split_at(count);
        (from, bytes) = (from + skipped + count as u64, later);
        out.pass(now)?;
    }
    Ok(())
}

/// The compressed bytes that are unpacked at once: gzip makes at most 1032 of one.
const INPUT_BYTES: usize = 4 << 10;
/// The maximum number of unpacked bytes that are kept at once: more than a chunk.
const OUTPUT_BYTES_MAX: usize = 20 << 20;
/// The maximum window of a zstd stream in bytes, as a power of two: the largest that the encoders of zstd:chunked and eStargz use.
const WINDOW_BITS_MAX: u32 = 25;

/// Unpacks one stream.
struct Decoder {
    inner: Inner,
    /// The offset of the first byte that is not yet taken.
    taken: u64,
    is_broken: bool,
}

enum Inner {
    Gzip(Box<GzDecoder<Bounded>>),
    Zstd(Box<zstd::stream::write::Decoder<'static, Bounded>>),
}

/// Memory with a limit.
#[derive(Default)]
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > OUTPUT_BYTES_MAX {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Decoder {
    fn new(compression: Compression) -> io::Result<Self> {
        let inner = match compression {
            Compression::Gzip => Inner::Gzip(Box::new(GzDecoder::new(Bounded::default()))),
            Compression::Zstd => {
                let mut decoder = zstd::stream::write::Decoder::new(Bounded::default())?;
                decoder.window_log_max(WINDOW_BITS_MAX)?;
                Inner::Zstd(Box::new(decoder))
            }
        };
        Ok(Self { inner, taken: 0, is_broken: false })
    }

    /// Unpacks some bytes; returns the rest.
    fn write<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let written = match &mut self.inner {
            Inner::Gzip(decoder) => decoder.write(bytes),
            Inner::Zstd(decoder) => decoder.write(bytes),
        };
        match written {
            Ok(count @ 1..) => &bytes[count..],
            // Or the stream ends before its place does.
            Ok(0) | Err(_) => {
                self.is_broken = true;
                bytes
            }
        }
    }

    fn finish(&mut self) {
        // Checksums do not matter: digests prove more.
        let _ = match &mut self.inner {
            Inner::Gzip(decoder) => decoder.try_finish(),
            Inner::Zstd(decoder) => decoder.flush(),
        };
    }

    /// Takes what was unpacked, with its offset.
    fn unpacked(&mut self) -> (u64, Vec<u8>) {
        let bytes = std::mem::take(match &mut self.inner {
            Inner::Gzip(decoder) => &mut decoder.get_mut().0,
            Inner::Zstd(decoder) => &mut decoder.get_mut().0,
        });
        let from = self.taken;
        self.taken += bytes.len() as u64;
        (from, bytes)
    }
}
