//! One image of a chain of layers: it shows what overlayfs shows of them, and its files are in the layers' packs. No byte of them is
//! read.
//!
//! The rules are those of overlayfs (Documentation/filesystems/overlayfs.rst): the highest layer that has a name wins;
//! directories are merged down to an opaque one, a whiteout or another file. Features of some kernels only are refused.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use ferry_vfs::{FileType, Name};

use crate::build::layer::BuildLayersError;
use crate::build::run;
use crate::format::data::Data;
use crate::format::digest::{Algorithm, DIGEST_BYTES, Digest};
use crate::format::erofs::{BLOCK_BYTES, SUPER_OFFSET, Super, put};
use crate::format::error::{Flaw, ImageResult, IoContext};
use crate::format::flat;
use crate::format::image::{Image, Inode, Nid};
use crate::format::tree::{Content, Node, NodeId, Tree};

/// The maximum size of all images together, which are in memory meanwhile: metadata of about three million files.
const BYTES_MAX: u64 = 256 << 20;
/// The prefix of overlayfs's own attributes.
const OVERLAY: &[u8] = b"trusted.overlay.";
/// Those of them that mean nothing in a lower layer.
const IGNORED_XATTRS: [&[u8]; 6] = [b"impure", b"nlink", b"origin", b"protattr", b"upper", b"uuid"];
const OPAQUE: &[u8] = b"opaque";

/// Merges the images of layers, the highest first, each with its digest, into one. The result is reproducible. With `inode_share`, files have the identities by which mounts share their page cache. Returns the digest.
///
/// # Errors
///
/// The layers have what only overlayfs can show (renamed directories, files without their data), are damaged or too large; or the image
/// cannot be written.
pub fn merge(layers: &[(PathBuf, Digest)], image: &Path, inode_share: bool) -> Result<Digest, BuildLayersError> {
    let mut bytes = 0;
    for (path, _) in layers {
        bytes += fs::metadata(path).doing("look at", path)?.len();
    }
    if bytes > BYTES_MAX {
        let (mib, most) = (bytes >> 20, BYTES_MAX >> 20);
        let why = format!("the images of the layers have {mib} MiB together, more than {most} MiB: merge fewer layers");
        return Err(BuildLayersError::Refused(why));
    }
    let images: Vec<Image> =
        layers.iter().map(|(path, digest)| Image::open(path, Some(*digest))).collect::<Result<_, _>>()?;
    let bytes = merged(&images, inode_share)?;
    let digest = Algorithm::Blake3.of(&bytes);
    run::save(image, &bytes, false)?;
    Ok(digest)
}

/// Returns the image.
fn merged(layers: &[Image], inode_share: bool) -> Result<Vec<u8>, BuildLayersError> {
    let mut merge = Merge { layers, tree: Tree::default(), packs: Vec::new(), links: HashMap::new() };
    merge.run()?;
    let mut bytes = flat::write_layers(&merge.tree, &merge.packs, &[0; DIGEST_BYTES], inode_share)?;
    // Overlayfs notes of which file system the original of a changed file is: images that replace each other below one upper directory
    // must not be taken for the same.
    let uuid = Algorithm::Blake3.of(&bytes);
    put(&mut bytes, SUPER_OFFSET + std::mem::offset_of!(Super, uuid), &uuid.bytes()[..16]);
    Ok(bytes)
}

/// An inode of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct LayerInode {
    layer: usize,
    nid: Nid,
}

/// What layers have under a name, the highest first: one file, or directories.
#[derive(Default)]
struct MergedName {
    stack: Vec<(LayerInode, Inode)>,
    /// Whether lower layers do not count.
    is_closed: bool,
}

struct Merge<'a> {
    layers: &'a [Image],
    tree: Tree,
    /// The packs that the merged image needs.
    packs: Vec<flat::Pack>,
    /// Files with several names in their layer.
    links: HashMap<LayerInode, NodeId>,
}

impl<'a> Merge<'a> {
    fn run(&mut self) -> Result<(), BuildLayersError> {
        let layers = self.layers;
        let at = |layer| move |flaw: Flaw| BuildLayersError::Refused(format!("the image of layer {layer}: {flaw}"));
        // Overlayfs merges all roots, whether they are opaque or not.
        let mut roots = Vec::new();
        for (layer, image) in layers.iter().enumerate() {
            let inode = image.inode(image.root()).map_err(at(layer))?;
            roots.push((LayerInode { layer, nid: inode.nid }, inode));
        }
        let Some(&(first, root)) = roots.first() else {
            return Err(BuildLayersError::Refused("there are no layers".into()));
        };
        let mut entered = HashSet::new();
        let root = self.add(first, &root)?;
        let mut left = vec![(root, roots)];
        while let Some((node, stack)) = left.pop() {
            let mut names: BTreeMap<&'a [u8], MergedName> = BTreeMap::new();
            for (place, inode) in stack {
                // A damaged image may reference its directories more than once.
                if !entered.insert(place) {
                    return Err(at(place.layer)(Flaw { what: "a directory with two names", offset: place.nid.0 }));
                }
                self.list(place.layer, &inode, &mut names)?;
            }
            let (mut entries, mut directories) = (Vec::with_capacity(names.len()), 0);
            for (name, found) in names {
                let Some(&(place, inode)) = found.stack.first() else { continue };
                let name = Name::new(name).map_err(|_| at(place.layer)(Flaw { what: "an invalid name", offset: 0 }))?;
                let id = self.child(place, &inode)?;
                entries.push((name.to_buf(), id));
                if inode.kind() == FileType::Directory {
                    directories += 1;
                    left.push((id, found.stack));
                }
            }
            let node = &mut self.tree.nodes[node];
            (node.nlink, node.content) = (2 + directories, Content::Directory(entries));
        }
        Ok(())
    }

    /// Adds what a directory of a layer has to what higher layers have.
    fn list(
        &self,
        layer: usize,
        directory: &Inode,
        names: &mut BTreeMap<&'a [u8], MergedName>,
    ) -> Result<(), BuildLayersError> {
        let image = &self.layers[layer];
        let at = |flaw: Flaw| BuildLayersError::Refused(format!("the image of layer {layer}: {flaw}"));
        for entry in image.entries(directory, 0).map_err(at)? {
            let entry = entry.map_err(at)?;
            let found = names.entry(entry.name).or_default();
            if matches!(entry.name, b"." | b"..") || found.is_closed {
                continue;
            }
            let inode = image.inode(entry.nid).map_err(at)?;
            let place = LayerInode { layer, nid: entry.nid };
            if inode.kind() == FileType::Directory {
                found.is_closed = attributes(image, &inode)?.1;
                found.stack.push((place, inode));
            } else {
                found.is_closed = true;
                if found.stack.is_empty() && !is_whiteout(&inode) {
                    found.stack.push((place, inode));
                }
            }
        }
        Ok(())
    }

    /// Returns the inode of a name, which is added unless it has another name already.
    fn child(&mut self, place: LayerInode, inode: &Inode) -> Result<NodeId, BuildLayersError> {
        if inode.nlink < 2 || inode.kind() == FileType::Directory {
            return self.add(place, inode);
        }
        match self.links.entry(place) {
            Entry::Occupied(known) => {
                self.tree.nodes[*known.get()].nlink += 1;
                Ok(*known.get())
            }
            Entry::Vacant(new) => {
                new.insert(self.tree.nodes.len());
                self.add(place, inode)
            }
        }
    }

    fn add(&mut self, LayerInode { layer, .. }: LayerInode, inode: &Inode) -> Result<NodeId, BuildLayersError> {
        let image = &self.layers[layer];
        let at = |flaw: Flaw| BuildLayersError::Refused(format!("the image of layer {layer}: {flaw}"));
        let (xattrs, _) = attributes(image, inode)?;
        let content = self.content(image, inode).map_err(at)?;
        let mode = u16::try_from(inode.mode).map_err(|_| at(Flaw { what: "an invalid mode", offset: inode.nid.0 }))?;
        let Inode { uid, gid, mtime, .. } = *inode;
        self.tree.nodes.push(Node { mode, uid, gid, rdev: inode.rdev(), mtime, nlink: 1, xattrs, content });
        Ok(self.tree.nodes.len() - 1)
    }

    fn content(&mut self, image: &Image, inode: &Inode) -> ImageResult<Content> {
        let bytes = inode.bytes;
        Ok(match inode.kind() {
            FileType::Directory => Content::Directory(Vec::new()),
            FileType::Symlink => Content::Inline(image.link(inode)?),
            FileType::RegularFile => match image.data(inode)? {
                Data::Near(whole, rest) => Content::Inline([whole, rest].concat()),
                Data::Far { pack, block } => Content::Layer { bytes, pack: self.pack(image, pack), block },
                data @ Data::Chunks(_) => {
                    let chunks = data.pieces(bytes).map(|piece| {
                        let piece = piece?;
                        Ok((self.pack(image, piece.pack), piece.at / BLOCK_BYTES as u64))
                    });
                    Content::Chunks { bytes, chunks: chunks.collect::<ImageResult<_>>()? }
                }
                Data::Object { .. } => return Err(Flaw { what: "a file in an object store", offset: inode.nid.0 }),
            },
            _ => Content::None,
        })
    }

    /// Returns the number of a layer's pack in the merged image.
    fn pack(&mut self, image: &Image, number: usize) -> usize {
        let pack = &image.packs()[number];
        let known = self.packs.iter().position(|known| known.name == pack.name);
        known.unwrap_or_else(|| {
            self.packs.push(flat::Pack { name: pack.name, blocks: pack.blocks, ahead: pack.ahead });
            self.packs.len() - 1
        })
    }
}

fn is_whiteout(inode: &Inode) -> bool {
    inode.kind() == FileType::CharacterDevice && inode.rdev() == 0
}

/// Names with values, by name.
type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// Returns the attributes that overlayfs shows, by name, and whether a directory is opaque.
fn attributes(image: &Image, inode: &Inode) -> Result<(Xattrs, bool), BuildLayersError> {
    let (mut shown, mut is_opaque) = (Vec::new(), false);
    for (name, value) in image.xattrs(inode).map_err(|flaw| BuildLayersError::Refused(flaw.to_string()))? {
        match name.strip_prefix(OVERLAY) {
            None => shown.push((name, value.to_vec())),
            Some(OPAQUE) if value == b"y" => is_opaque = true,
            Some(rest) if IGNORED_XATTRS.contains(&rest) => {}
            Some(_) => {
                let (name, value) = (name.escape_ascii(), value.escape_ascii());
                return Err(BuildLayersError::Refused(format!(
                    "the attribute {name}={value} of inode {} has no meaning outside overlayfs",
                    inode.nid.0
                )));
            }
        }
    }
    shown.sort_unstable();
    Ok((shown, is_opaque))
}

#[cfg(test)]
mod tests;
