//! Images of the layers of a container as they are in a registry, unmodified: the layers' tables of contents become
//! metadata, and the files stay in the layers' blobs until they are read ([`crate::store::layer_fetch`]).
//!
//! The chain of proofs: the digest of the manifest proves its annotations, an annotation proves a table of contents, the
//! table proves each chunk. So the same manifest gives the same image, bit for bit.

mod estargz;
mod toc;
mod zstd_chunked;

use std::io::{self, Write};
use std::path::Path;

use ferry_vfs::Name;

use crate::build::tar::{Kind, Layers, OverlayLayer, components};
use crate::build::tree_builder::Refusal;
use crate::format::digest::{Algorithm, DIGEST_BYTES, Digest, bytes_of_hex};
use crate::format::error::{IoContext, Result};
use crate::format::flat;
use crate::format::index::Index;
use crate::format::layer_index::{self, Chunk, Compression, LayerBlob, ParsedLayer};
use crate::format::object::ZEROS;
use crate::format::tree::{Content, NodeId, Tree};
use crate::store::layout::{self, INDEX_SUFFIX, PART_SUFFIX};
use crate::store::new_file::{self, NewFile};
use crate::store::packs::Store;

use toc::Item;
use zstd_chunked::Position;

/// How much of a blob's end is requested at once: footer and table of most layers of eStargz.
const END_BYTES: u64 = 128 << 10;

/// Why a layer cannot be read chunk by chunk.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// It has no table of contents that something proves, or a wrong one. It can be read as a whole.
    #[error("{0}")]
    Refused(String),
    /// Its blob cannot be read.
    #[error("cannot read a layer's table of contents: {0}")]
    Read(io::Error),
}

impl From<io::Error> for LayerError {
    fn from(error: io::Error) -> Self {
        Self::Read(error)
    }
}

impl From<Refusal> for LayerError {
    fn from(reason: Refusal) -> Self {
        Self::Refused(reason)
    }
}

/// A layer of a container's manifest that has a table of contents.
#[derive(Clone, Debug)]
pub struct LayerRef {
    sha256: [u8; DIGEST_BYTES],
    bytes: u64,
    kind: TocKind,
    toc: [u8; DIGEST_BYTES],
}

#[derive(Clone, Copy, Debug)]
enum TocKind {
    Estargz,
    ZstdChunked(Position),
}

/// The annotations of a layer.
const ESTARGZ: &str = "containerd.io/snapshot/stargz/toc.digest";
const CHECKSUM: &str = "io.github.containers.zstd-chunked.manifest-checksum";
const POSITION: &str = "io.github.containers.zstd-chunked.manifest-position";

impl LayerRef {
    /// Reads the annotations of a layer with this blob.
    ///
    /// # Errors
    ///
    /// No annotation proves a table of contents, or one is invalid.
    pub fn parse<'a>(
        sha256: [u8; DIGEST_BYTES],
        bytes: u64,
        media_type: &str,
        annotation: impl Fn(&str) -> Option<&'a str>,
    ) -> std::result::Result<Self, LayerError> {
        let digest = |text: &str| {
            let digits = text.strip_prefix("sha256:").and_then(|digits| bytes_of_hex(digits.as_bytes()));
            digits.ok_or_else(|| {
                format!("{:?} is no digest of a table of contents", text.chars().take(80).collect::<String>())
            })
        };
        // The converters of stargz write both for zstd, and then the first one is of the unpacked table.
        let is_zstd = media_type.ends_with("zstd");
        let (kind, toc) = match (annotation(ESTARGZ), annotation(CHECKSUM), annotation(POSITION)) {
            (None, None, _) => return Err(Refusal::from("it has no table of contents that its manifest proves").into()),
            (_, Some(sum), Some(position)) if is_zstd => {
                (TocKind::ZstdChunked(Position::parse(position)?), digest(sum)?)
            }
            (Some(toc), None, None) if !is_zstd => (TocKind::Estargz, digest(toc)?),
            // Nothing says that both are the same.
            _ => return Err(Refusal::from("its annotations do not say which of two tables of contents it has").into()),
        };
        if let TocKind::ZstdChunked(Position { offset, bytes: length, .. }) = kind
            && offset.saturating_add(length) > bytes
        {
            return Err(format!(
                "its table of contents is said to be at {offset}, outside of the blob of {bytes} bytes"
            )
            .into());
        }
        Ok(Self { sha256, bytes, kind, toc })
    }

    /// Returns the digest of the layer's blob.
    pub fn sha256(&self) -> &[u8; DIGEST_BYTES] {
        &self.sha256
    }

    /// Returns the digest of the table of contents.
    pub fn toc(&self) -> &[u8; DIGEST_BYTES] {
        &self.toc
    }

    /// Fetches the table of contents, verifies it, and parses it. `read` returns exactly a range of the blob.
    ///
    /// # Errors
    ///
    /// It cannot be fetched, or is wrong.
    pub fn fetch(
        &self,
        read: &dyn Fn(std::ops::Range<u64>) -> io::Result<Vec<u8>>,
    ) -> std::result::Result<Layer, LayerError> {
        let (json, end) = match self.kind {
            TocKind::ZstdChunked(position) => {
                let packed = read(position.offset..position.offset + position.bytes)?;
                (position.unpack(&packed, &self.toc)?, position.offset)
            }
            TocKind::Estargz => {
                let from = self.bytes.saturating_sub(END_BYTES);
                let tail = read(from..self.bytes)?;
                let begin = estargz::footer(&tail)?;
                let stop = self.bytes - estargz::FOOTER_BYTES as u64;
                if begin >= stop || stop - begin > toc::TOC_BYTES_MAX {
                    let bytes = self.bytes;
                    return Err(format!("its table of contents is said to be at {begin} of {bytes} bytes").into());
                }
                let packed = match usize::try_from(begin.saturating_sub(from)) {
                    Ok(skipped) if begin >= from => tail[skipped..].to_vec(),
                    _ => [read(begin..from)?, tail].concat(),
                };
                (estargz::unpack(&packed, &self.toc)?, begin)
            }
        };
        Ok(self.parse_toc(&json, end)?)
    }

    /// Parses a verified table of contents; files end at `end` in the blob.
    fn parse_toc(&self, json: &[u8], end: u64) -> std::result::Result<Layer, Refusal> {
        let toc::Toc { mut items, mut edges, landmark } = toc::parse(json)?;
        edges.push(end);
        edges.retain(|edge| *edge <= end);
        edges.sort_unstable();
        edges.dedup();
        for item in &mut items {
            for chunk in item.chunks.iter_mut().filter(|chunk| chunk.digest != ZEROS) {
                // A stream ends where another one, or the table, begins.
                let next = edges.partition_point(|edge| *edge <= chunk.span.from);
                let path = item.member.path.escape_ascii();
                chunk.span.to = *edges.get(next).ok_or_else(|| format!("a chunk of {path} is outside of the layer"))?;
            }
        }
        let mut files: Vec<usize> = (0..items.len()).filter(|at| !items[*at].chunks.is_empty()).collect();
        let begin = |item: &Item| {
            let stored = item.chunks.iter().find(|chunk| chunk.digest != ZEROS);
            stored.map_or((u64::MAX, 0), |chunk| (chunk.span.from, chunk.span.inner))
        };
        files.sort_by_cached_key(|at| begin(&items[*at]));
        let first = files.iter().copied().take_while(|at| begin(&items[*at]).0 < landmark).collect();
        let compression = if matches!(self.kind, TocKind::Estargz) { Compression::Gzip } else { Compression::Zstd };
        let (sha256, bytes, toc) = (self.sha256, self.bytes, self.toc);
        let blob = LayerBlob { compression, sha256, bytes, toc, spans: Vec::new() };
        let chunks: Vec<Chunk> = files.iter().flat_map(|at| items[*at].chunks.iter().copied()).collect();
        let index = layer_index::encode(&blob, chunks.iter().copied());
        let name = Algorithm::Blake3.of(&index);
        let ParsedLayer { layer, objects, blocks: pack_blocks } =
            layer_index::parse(&index)?.ok_or("it has no valid index")?;
        let mut blocks = vec![0; items.len()];
        let mut at = 0;
        for file in files {
            blocks[file] = objects[at].block;
            at += items[file].chunks.len();
        }
        let index = Index { pack: name, objects, blocks: pack_blocks, verity: None, layer: Some(layer) };
        Ok(Layer { items, blocks, index, first })
    }
}

/// A layer whose table of contents was verified.
pub struct Layer {
    items: Vec<Item>,
    /// The first block of each item in the layer's pack.
    blocks: Vec<u64>,
    index: Index,
    /// The items that its converter wants to be fetched first, in order.
    first: Vec<usize>,
}

impl std::fmt::Debug for Layer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Layer")
            .field("pack", &self.index.pack)
            .field("items", &self.items.len())
            .finish_non_exhaustive()
    }
}

impl Layer {
    /// Returns about how much memory this takes, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.items.iter().map(|item| item.memory_bytes() as u64).sum()
    }

    /// Returns the paths of the files that the layer's converter wants to be fetched first, in order.
    pub fn first(&self) -> impl Iterator<Item = Vec<u8>> {
        let names = |item: &Item| {
            Some(components(&item.member.path).ok()?.into_iter().map(Name::as_bytes).collect::<Vec<_>>().join(&b'/'))
        };
        self.first.iter().filter_map(move |at| Some([b"/", &names(&self.items[*at])?[..]].concat()))
    }

    /// Returns the index of the layer's pack.
    pub fn index(&self) -> &Index {
        &self.index
    }
}

/// Makes an image of layers, from the lowest to the highest, and stores the indexes of their packs. Returns the digest
/// of the image.
///
/// # Errors
///
/// The tables of contents disagree with each other, or the store or the image cannot be written.
pub fn build_layers(
    layers: &[Layer],
    manifest: &[u8; DIGEST_BYTES],
    image: &Path,
    store: &Store,
) -> std::result::Result<Digest, BuildLayersError> {
    let mut packs: Vec<flat::Pack> = Vec::new();
    let mut merged = Layers::begin(false);
    for (number, layer) in layers.iter().enumerate() {
        let blob = layer.index.pack;
        // A layer may be there twice.
        let known = packs.iter().position(|pack| pack.name == blob);
        let pack = known.unwrap_or(packs.len());
        if known.is_none() {
            packs.push(flat::Pack { name: blob, blocks: layer.index.blocks, ahead: false });
        }
        merged.next_layer();
        for (item, block) in layer.items.iter().zip(&layer.blocks) {
            add(&mut merged, item, pack, *block).map_err(|reason| {
                let path = item.member.path.escape_ascii();
                BuildLayersError::Refused(format!("layer {}, {path}: {reason}", number + 1))
            })?;
        }
    }
    write(merged.finish(image)?.0, &packs, layers, manifest, image, store)
}

/// Makes an image of one layer, for overlayfs to stack: it has overlayfs's whiteouts and opaque directories. The same layer gives the
/// same image, bit for bit. Returns its digest.
///
/// # Errors
///
/// As of [`build_layers`].
pub fn build_layer(layer: &Layer, image: &Path, store: &Store) -> std::result::Result<Digest, BuildLayersError> {
    let mut tree = OverlayLayer::begin();
    for (item, block) in layer.items.iter().zip(&layer.blocks) {
        tree.apply(&item.member, contents(item, 0, *block))
            .map_err(|reason| BuildLayersError::Refused(format!("{}: {reason}", item.member.path.escape_ascii())))?;
    }
    let tree = tree.finish().map_err(BuildLayersError::Refused)?;
    let pack = flat::Pack { name: layer.index.pack, blocks: layer.index.blocks, ahead: false };
    let blob = layer.index.layer.as_ref().map_or([0; DIGEST_BYTES], |layer| layer.sha256);
    write(tree, &[pack], std::slice::from_ref(layer), &blob, image, store)
}

/// Writes the image of a tree with the packs that it needs. `origin` is what it was made of: a manifest, or a layer.
fn write(
    mut tree: Tree,
    packs: &[flat::Pack],
    layers: &[Layer],
    origin: &[u8; DIGEST_BYTES],
    image: &Path,
    store: &Store,
) -> std::result::Result<Digest, BuildLayersError> {
    let used: Vec<usize> = used(&tree.nodes.iter().filter_map(|node| pack_of(&node.content)).collect::<Vec<_>>());
    for node in &mut tree.nodes {
        if let Content::Layer { pack, .. } = &mut node.content {
            *pack = used.binary_search(pack).unwrap_or_default();
        }
    }
    for layer in layers {
        keep_index(&layer.index, store)?;
    }
    let packs: Vec<flat::Pack> = used.iter().map(|pack| packs[*pack]).collect();
    let bytes = flat::write_layers(&tree, &packs, origin, false)?;
    let digest = Algorithm::Blake3.of(&bytes);
    let mut new = NewFile::begin(new_file::directory_of(image))?;
    new.file.write_all(&bytes).doing("write to", &*new.path)?;
    new.keep(image)?;
    Ok(digest)
}

/// Why layers do not make an image.
#[derive(Debug, thiserror::Error)]
pub enum BuildLayersError {
    /// The layers cannot be used this way; the text says why.
    #[error("{0}")]
    Refused(String),
    /// Something cannot be written, or does not fit.
    #[error(transparent)]
    Image(#[from] crate::format::error::Error),
}

fn pack_of(content: &Content) -> Option<usize> {
    if let Content::Layer { pack, .. } = content { Some(*pack) } else { None }
}

/// Returns the packs that files need, sorted.
fn used(packs: &[usize]) -> Vec<usize> {
    let mut used = packs.to_vec();
    used.sort_unstable();
    used.dedup();
    used
}

fn add(merged: &mut Layers, item: &Item, pack: usize, block: u64) -> std::result::Result<Option<NodeId>, Refusal> {
    merged.apply(&item.member, contents(item, pack, block))
}

/// Returns the contents of a regular file.
fn contents(item: &Item, pack: usize, block: u64) -> Option<Content> {
    match item.member.bytes {
        _ if item.member.kind != Kind::File => None,
        0 => Some(Content::Inline(Vec::new())),
        bytes => Some(Content::Layer { bytes, pack, block }),
    }
}

/// Stores the index of an incomplete pack, where fetches look for it.
fn keep_index(index: &Index, store: &Store) -> Result<()> {
    if store.has(index.pack) || index.objects.is_empty() {
        return Ok(());
    }
    let name = format!("{}{PART_SUFFIX}{INDEX_SUFFIX}", index.pack.hex());
    let path = layout::packs_directory(store.directory()).join(name);
    let mut new = NewFile::begin(new_file::directory_of(&path))?;
    new.file.write_all(&index.to_bytes()).doing("write to", &*new.path)?;
    new.keep(&path)
}
