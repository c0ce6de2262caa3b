//! Trees from OCI image directories: layers, applied in order, each verified by its digest.
//!
//! Each layer is read twice. The first pass reads the headers of the archives: it verifies all digests, and finds the
//! files of the final tree. The second pass reads their bytes, so nothing that an upper layer removes is stored.
//!
//! Source: OCI Image Format Specification 1.1, "Image Layout", "Image Manifest", "Filesystem Layers" ("Applying
//! Changesets").

mod blob;
mod manifest;

use std::ffi::OsStr;
use std::io::{self, BufRead, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use flate2::bufread::GzDecoder;

use crate::build::content_writer::ContentWriter;
use crate::build::meter::Meter;
use crate::build::tar::{Layers, fill};
use crate::format::error::{Error, IoContext, Result};
use crate::format::tree::Tree;

use blob::{Blob, HashReader};
use manifest::Layer;

/// The prefix of a source that is an image directory.
const PREFIX: &[u8] = b"oci:";
/// The maximum window of zstd, as a power of two: that of Go's decoder, by which containerd unpacks. It is allocated once per layer that is
/// being read.
const WINDOW_BITS_MAX: u32 = 29;
/// The size of the reads of a blob in bytes.
const BUFFER_BYTES: usize = 1 << 18;

/// An image in an image directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    directory: PathBuf,
    tag: Option<String>,
}

impl Reference {
    /// Parses `oci:DIRECTORY[:TAG]`; `None` without the prefix. Directories and tags may contain colons: the longest
    /// path that is a directory is used.
    pub(crate) fn parse(source: &Path) -> Option<Self> {
        let rest = source.as_os_str().as_bytes().strip_prefix(PREFIX)?;
        let path = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
        let colons = (0..rest.len()).rev().filter(|at| rest[*at] == b':');
        let ends = std::iter::once(rest.len()).chain(colons);
        let end = ends.clone().find(|end| path(&rest[..*end]).is_dir());
        // Without one, the error names the most likely directory.
        let end = end.or_else(|| ends.clone().nth(1)).unwrap_or(rest.len());
        let tag = rest.get(end + 1..).map(|tag| String::from_utf8_lossy(tag).into_owned());
        Some(Self { directory: path(&rest[..end]), tag })
    }
}

/// The default platform of images.
pub(crate) fn platform_here() -> String {
    format!("linux/{}", architecture_here())
}

/// Returns this machine's architecture as OCI images name it.
#[must_use]
pub fn architecture_here() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "x86" => "386",
        "aarch64" => "arm64",
        "powerpc64" => "ppc64le",
        "loongarch64" => "loong64",
        other => other,
    }
}

/// Reads the tree of an image's layers; `writer` stores the files' bytes.
pub(crate) fn read<W: ContentWriter>(
    reference: &Reference,
    platform: &str,
    writer: &mut W,
    meter: &Meter<'_>,
) -> Result<Tree> {
    let directory = &reference.directory;
    let found = manifest::layers(directory, reference.tag.as_deref(), platform)?;
    // For both passes.
    meter.expect(found.iter().map(|layer| layer.bytes).fold(0, u64::saturating_add).saturating_mul(2));
    let mut layers = Layers::begin(W::IS_COMPOSEFS);
    for layer in &found {
        with(directory, layer, meter, |archive, path| layers.add(archive, path))?;
    }
    let (mut tree, wanted) = layers.finish(directory)?;
    for (layer, wanted) in found.iter().zip(&wanted) {
        if wanted.is_empty() {
            meter.add(layer.bytes);
        } else {
            with(directory, layer, meter, |archive, path| fill(archive, path, wanted, &mut tree, writer))?;
        }
    }
    Ok(tree)
}

/// Reads the archive of a layer. Damage of the blob takes precedence over errors that it caused.
fn with(
    directory: &Path,
    layer: &Layer,
    meter: &Meter<'_>,
    read: impl FnOnce(&mut dyn Read, &Path) -> Result<()>,
) -> Result<()> {
    let mut blob = Blob::open(directory, layer.blob, layer.bytes, "a layer")?;
    let path = blob.path.clone();
    let (outcome, plain) = {
        let input = io::BufReader::with_capacity(BUFFER_BYTES, meter.over(&mut blob));
        let mut archive = HashReader::new(unpacked(input).doing("unpack", &path)?);
        (read(&mut archive, &path), archive.finish())
    };
    blob.finish()?;
    outcome?;
    let unpackable = |source| Error::Io { what: "unpack", path: path.clone(), source };
    let plain = plain.map_err(unpackable)?;
    if plain == layer.plain {
        return Ok(());
    }
    let reason = format!("its archive has the digest {plain}, not {} as the configuration says", layer.plain);
    Err(Error::Input { path, at: "a layer".into(), reason })
}

/// Decompresses input if it is compressed; returns other input unchanged. What cannot be decompressed has the kind `InvalidData`, unlike what
/// cannot be read.
pub(crate) fn unpacked<'a>(mut input: impl BufRead + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let head = input.fill_buf()?;
    Ok(if head.starts_with(&[0x1f, 0x8b]) {
        Box::new(Gunzip { part: Some(GzDecoder::new(InputReader { inner: input, has_failed: false })) })
    } else if head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) || is_skippable(head) {
        let mut decoder = zstd::Decoder::with_buffer(InputReader { inner: input, has_failed: false })?;
        decoder.window_log_max(WINDOW_BITS_MAX)?;
        Box::new(ZstdReader(decoder))
    } else {
        Box::new(input)
    })
}

/// Returns whether a skippable zstd frame begins here (`0x184d2a50` to `5f`, RFC 8878, 3.1.2).
fn is_skippable(head: &[u8]) -> bool {
    matches!(head, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..])
}

/// Records whether reading has failed.
struct InputReader<R> {
    inner: R,
    has_failed: bool,
}

impl<R: Read> Read for InputReader<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let outcome = self.inner.read(bytes);
        self.has_failed |= outcome.is_err();
        outcome
    }
}

impl<R> InputReader<R> {
    /// Gives an error of the decoder, which has this kind, the kind `InvalidData`.
    fn classify(&self, error: io::Error, of_decoder: io::ErrorKind) -> io::Error {
        match self.has_failed {
            false if error.kind() == of_decoder => io::Error::new(io::ErrorKind::InvalidData, error),
            _ => error,
        }
    }
}

impl<R: BufRead> BufRead for InputReader<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let outcome = self.inner.fill_buf();
        self.has_failed |= outcome.is_err();
        outcome
    }

    fn consume(&mut self, count: usize) {
        self.inner.consume(count);
    }
}

/// Decompresses zstd.
struct ZstdReader<R: BufRead>(zstd::Decoder<'static, InputReader<R>>);

impl<R: BufRead> Read for ZstdReader<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes).map_err(|error| self.0.get_ref().classify(error, io::ErrorKind::Other))
    }
}

/// Decompresses gzip with one or more members. Trailing zeros are accepted, as by gzip(1): tapes have whole records.
struct Gunzip<R> {
    /// `None` at the end.
    part: Option<GzDecoder<InputReader<R>>>,
}

impl<R: BufRead> Read for Gunzip<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        while let Some(part) = &mut self.part {
            let count = part.read(bytes);
            let count = count.map_err(|error| part.get_ref().classify(error, io::ErrorKind::InvalidInput))?;
            if count > 0 || bytes.is_empty() {
                return Ok(count);
            }
            let input = part.get_mut();
            match input.fill_buf()?.first() {
                Some(0) => {
                    only_zeros(input)?;
                    self.part = None;
                }
                Some(_) => self.part = self.part.take().map(|part| GzDecoder::new(part.into_inner())),
                None => self.part = None,
            }
        }
        Ok(0)
    }
}

/// Reads to the end, which must contain only zeros.
fn only_zeros(input: &mut impl BufRead) -> io::Result<()> {
    loop {
        let bytes = input.fill_buf()?;
        if bytes.is_empty() {
            return Ok(());
        }
        if bytes.iter().any(|byte| *byte != 0) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "something follows what gzip has packed"));
        }
        let count = bytes.len();
        input.consume(count);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// A wrong method, a block of no type, and a wrong checksum.
    #[test]
    fn damaged_gzip_is_distinguished_from_input_that_cannot_be_read() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::ErrorKind::InvalidInput.into())
            }
        }
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(b"some").expect("it can be packed");
        let packed = packed.finish().expect("it can be packed");
        let kind = |input: &mut dyn BufRead| {
            let outcome = unpacked(input).and_then(|mut plain| plain.read_to_end(&mut Vec::new()));
            outcome.map_err(|error| error.kind())
        };
        assert_eq!(kind(&mut &packed[..]), Ok(4));
        for (at, value) in [(2, 7), (10, 7), (packed.len() - 8, !packed[packed.len() - 8])] {
            let mut damaged = packed.clone();
            damaged[at] = value;
            assert_eq!(kind(&mut &damaged[..]), Err(io::ErrorKind::InvalidData), "{at}");
            let parts = [&packed[..], &damaged[..]].concat();
            assert_eq!(kind(&mut &parts[..]), Err(io::ErrorKind::InvalidData), "{at}, of the second part");
        }
        for end in [5, packed.len() - 10, packed.len()] {
            let mut input = io::BufReader::new(packed[..end].chain(Broken));
            assert_eq!(kind(&mut input), Err(io::ErrorKind::InvalidInput), "{end}");
        }
    }

    #[test]
    fn directories_and_tags_are_distinguished() {
        let directory = tempfile::tempdir().expect("a directory can be made");
        let colons = directory.path().join("a:b");
        std::fs::create_dir(&colons).expect("a directory can be made");
        let parse = |text: String| Reference::parse(Path::new(&text)).map(|found| (found.directory, found.tag));
        let (plain, colons) = (directory.path().to_owned(), colons);
        assert_eq!(parse(format!("oci:{}", plain.display())), Some((plain.clone(), None)));
        assert_eq!(parse(format!("oci:{}:x:1", plain.display())), Some((plain.clone(), Some("x:1".into()))));
        assert_eq!(parse(format!("oci:{}", colons.display())), Some((colons.clone(), None)));
        assert_eq!(parse(format!("oci:{}:x", colons.display())), Some((colons, Some("x".into()))));
        assert_eq!(parse("oci:/none/there:x".into()), Some(("/none/there".into(), Some("x".into()))));
        assert_eq!(parse("/tmp/oci:x".into()), None);
    }
}
