//! Builds an image: scans, hashes, stores new data in a pack, lays out the metadata, and names the image.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::path::Path;
use std::sync::Arc;

use super::{directory, dump, oci, tar};
use crate::build::content_writer::{ContentWriter, WriterOutput};
use crate::build::meter::Meter;
use crate::build::object_writer::ObjectWriter;
use crate::build::options::{BuildReport, Layout, Options, Progress};
use crate::build::pack_writer::PackWriter;
use crate::format::digest::Algorithm;
use crate::format::error::{Error, IoContext, Result};
use crate::format::tree::Tree;
use crate::store::new_file::{NewFile, directory_of};
use crate::store::packs::Store;

/// Builds an image from a directory, a tar archive (optionally compressed), an OCI image directory
/// (`oci:DIRECTORY[:TAG]`), or a dump file (composefs-dump(5)). Adds what the store lacks; a dump file already locates
/// files' bytes, so it adds nothing. An existing image is replaced atomically at the end. A build that is killed leaves
/// only files whose names begin with `.new-`.
///
/// # Errors
///
/// Something cannot be read, changes meanwhile, or does not fit EROFS; the store or the image cannot be written.
pub fn build(
    source: &Path,
    image: &Path,
    store: Store,
    options: &Options,
    progress: &Progress<'_>,
) -> Result<BuildReport> {
    let store = Arc::new(store);
    match options.layout {
        Layout::Flat => {
            let writer = PackWriter::begin(&store, options)?;
            build_with(writer, source, image, options, progress)
        }
        Layout::Composefs { version } => {
            let writer = ObjectWriter::begin(&store, version, options.threads)?;
            build_with(writer, source, image, options, progress)
        }
    }
}

fn build_with<W: ContentWriter>(
    mut writer: W,
    source: &Path,
    image: &Path,
    options: &Options,
    progress: &Progress<'_>,
) -> Result<BuildReport> {
    let meter = Meter::new(progress);
    let refused = |at: &str, reason: &str| Error::Input { path: source.into(), at: at.into(), reason: reason.into() };
    let mut tree = match Input::of(source, &meter)? {
        Input::Tar(_) | Input::Dump(_) | Input::Oci(_) if !options.filter.exclude.is_empty() => {
            let reason = "files can be excluded only when the source is a directory (use the --exclude of tar)";
            return Err(refused("as a whole", reason));
        }
        Input::Directory | Input::Dump(_) | Input::Oci(_) if options.whiteouts.is_some() => {
            let reason = "whiteouts can be chosen only for a tar archive, which is one layer";
            return Err(refused("as a whole", reason));
        }
        Input::Directory => directory::read(source, &mut writer, options.threads.max(1), &options.filter, progress)?,
        Input::Dump(file) if W::IS_COMPOSEFS => dump::read(file, source)?,
        Input::Dump(_) => {
            let reason =
                "it names the objects of files but has no data, which the layout flat needs: use the layout composefs";
            return Err(refused("a dump file", reason));
        }
        Input::Tar(file) => tar::read(file, source, options.whiteouts, &mut writer)?,
        Input::Oci(reference) => {
            let platform = options.platform.clone().unwrap_or_else(oci::platform_here);
            oci::read(&reference, &platform, &mut writer, &meter)?
        }
    };
    options.filter.apply(&mut tree, options.whiteouts);
    store_tree(writer, tree, image, options)
}

/// Makes all that was stored durable, and writes the image of a tree.
pub(super) fn store_tree<W: ContentWriter>(
    mut writer: W,
    tree: Tree,
    image: &Path,
    options: &Options,
) -> Result<BuildReport> {
    let (inodes, data_bytes, new_bytes) = (tree.nodes.len(), writer.data_bytes(), writer.new_bytes()?);
    let WriterOutput { bytes, tree, packs } = writer.finish(tree, options.order.as_ref())?;
    let algorithm = if W::IS_COMPOSEFS { Algorithm::Verity } else { Algorithm::Blake3 };
    let digest = algorithm.of(&bytes);
    save(image, &bytes, options.verity)?;
    Ok(BuildReport {
        digest,
        tree: tree.unwrap_or(digest),
        image_bytes: bytes.len() as u64,
        inodes,
        data_bytes,
        new_bytes,
        packs,
    })
}

/// The source of an image.
enum Input<'a> {
    Directory,
    Dump(Box<dyn Read + 'a>),
    Tar(Box<dyn Read + 'a>),
    Oci(oci::Reference),
}

impl<'a> Input<'a> {
    /// An archive has the checksum of its first header, and a dump file begins with the root's path.
    fn of(source: &Path, meter: &'a Meter<'a>) -> Result<Self> {
        if let Some(reference) = oci::Reference::parse(source) {
            return Ok(Self::Oci(reference));
        }
        let is_stdin = source == Path::new("-");
        if !is_stdin && fs::metadata(source).doing("look at", source)?.is_dir() {
            return Ok(Self::Directory);
        }
        let file = File::open(if is_stdin { Path::new("/dev/stdin") } else { source }).doing("open", source)?;
        meter.expect(file.metadata().doing("look at", source)?.len());
        let mut file = oci::unpacked(BufReader::with_capacity(1 << 18, meter.over(file))).doing("read", source)?;
        let mut head = Vec::new();
        Read::by_ref(&mut file).take(tar::HEADER_BYTES as u64).read_to_end(&mut head).doing("read", source)?;
        let (is_tar, is_dump) = (tar::is_header(&head), head.first() == Some(&b'/'));
        let all = Box::new(io::Cursor::new(head).chain(file));
        match (is_tar, is_dump) {
            (true, _) => Ok(Self::Tar(all)),
            (false, true) => Ok(Self::Dump(all)),
            (false, false) => {
                let reason =
                    "it is not a directory, tar archive (plain, or packed by gzip or zstd) or composefs dump file"
                        .into();
                Err(Error::Input { path: source.into(), at: "at its beginning".into(), reason })
            }
        }
    }
}

/// Writes an image, and names it when it is complete.
pub(super) fn save(image: &Path, bytes: &[u8], has_verity: bool) -> Result<()> {
    let mut new = NewFile::begin(directory_of(image))?;
    new.file.write_all(bytes).doing("write to", &*new.path)?;
    new.keep_sealed(image, has_verity.then(|| Algorithm::Verity.of(bytes)))
}
