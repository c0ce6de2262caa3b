//! The layout `flat`: metadata in the order of a walk, with file data in packs.
//!
//! Compared with other tools' images: inodes are compact where possible; a new file's data is a single run of blocks in
//! the address space of all devices, so it needs no chunk index; a directory is followed by the inodes of its files,
//! and directories are in depth-first order, as `ls -lR` needs them.
//!
//! ```text
//! block 0    zeros, at byte 960 the digest of a container's manifest or zeros (32 bytes), at 992 the digest of the tree
//!            or zeros (32 bytes), superblock, device table (the packs), the name of the attribute with identities, if
//!            files have them, root directory, its files' inodes, ...
//! ...        directories and inodes
//! aligned    attributes that several inodes share
//! ```
//!
//! The device table is at the front because its offset is a 16-bit number, so it cannot be after 8 MiB of metadata.

pub(crate) mod dir;
mod place;
mod xattr;

use std::collections::{BTreeMap, HashSet};

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::format::chunk::{self, CHUNK_BLOCKS, CHUNK_FORMAT};
use crate::format::digest::{DIGEST_BYTES, Digest};
use crate::format::erofs::{
    BLOCK_BITS, BLOCK_BYTES, COMPAT_ISHARE_XATTRS, COMPAT_MTIME, COMPAT_PLAIN_XATTR_PREFIXES, Compact, DeviceSlot,
    Extended, FLAT_NO_KIND, FLAT_VOLUME, IDENTITY_XATTR, INCOMPAT_CHUNKS, INCOMPAT_DEVICE_TABLE,
    INCOMPAT_XATTR_PREFIXES, Layout, MANIFEST_OFFSET, SLOT_AHEAD, SLOT_BYTES, SUPER_MAGIC, SUPER_OFFSET, Super,
    TREE_OFFSET, XATTR_PREFIX_TABLE, XATTR_PREFIX_UNIT, denied_by, put, xattr_count,
};
use crate::format::error::{Error, Result};
use crate::format::identity;
use crate::format::index::Places;
use crate::format::tree::{Content, Node, NodeId, Tree};
use crate::format::tree_digest;

use place::{Place, Placed, Times};
use xattr::Xattrs;

/// The offset of the device table, in bytes and in units of its entries.
const TABLE_OFFSET: usize = SUPER_OFFSET + size_of::<Super>();
const TABLE_SLOT: u16 = 9;
const _: () = assert!(TABLE_SLOT as usize * size_of::<DeviceSlot>() == TABLE_OFFSET);

/// A pack of the image.
#[derive(Clone, Copy, Debug)]
pub struct Pack {
    /// Its name.
    pub name: Digest,
    /// The number of its blocks.
    pub blocks: u64,
    /// Whether it is to be read at once.
    pub ahead: bool,
}

/// Returns the metadata of a tree, which contain the tree's digest, and that digest. With `identities`, files have those of their
/// contents.
///
/// # Errors
///
/// The tree exceeds what EROFS can number.
pub fn write(
    tree: &Tree,
    packs: &[Pack],
    pieces: &[Digest],
    places: &Places,
    identities: bool,
) -> Result<(Vec<u8>, Digest)> {
    let mut bytes = lay_out(tree, packs, pieces, places, identities)?;
    let digest = tree_digest::of_tree(tree, pieces);
    put(&mut bytes, TREE_OFFSET, digest.bytes());
    Ok((bytes, digest))
}

/// Returns the metadata of a tree whose files are in the packs of layers, with the digest of the container's manifest.
/// There is no digest of the tree, because the files were not read.
///
/// # Errors
///
/// As [`write`].
pub fn write_layers(tree: &Tree, packs: &[Pack], manifest: &[u8; DIGEST_BYTES], identities: bool) -> Result<Vec<u8>> {
    let mut bytes = lay_out(tree, packs, &[], &Places::new(), identities)?;
    put(&mut bytes, MANIFEST_OFFSET, manifest);
    Ok(bytes)
}

fn lay_out(tree: &Tree, packs: &[Pack], pieces: &[Digest], places: &Places, identities: bool) -> Result<Vec<u8>> {
    if identities && tree.nodes.iter().any(|node| node.xattrs.iter().any(|(name, _)| name == IDENTITY_XATTR)) {
        return Err(Error::OwnIdentities);
    }
    let packed = ChunkPlacement::of(tree, pieces, places);
    let times = Times::of(tree);
    let xattrs = Xattrs::of(tree, identities);
    let prefixes = TABLE_OFFSET + packs.len() * size_of::<DeviceSlot>();
    let prefix_bytes = if identities { XATTR_PREFIX_TABLE.len().next_multiple_of(SLOT_BYTES) } else { 0 };
    let root = prefixes + prefix_bytes;
    let Placed { inodes, order, end } = place::all(tree, root, &times, &xattrs, &packed.scattered);

    let xattr_block = end.div_ceil(BLOCK_BYTES);
    let blocks = (xattr_block * BLOCK_BYTES + xattrs.shared().len()).div_ceil(BLOCK_BYTES);
    let mut bytes = vec![0; blocks * BLOCK_BYTES];
    bytes[xattr_block * BLOCK_BYTES..][..xattrs.shared().len()].copy_from_slice(xattrs.shared());

    let mut first_blocks = BTreeMap::new();
    let mut next = blocks as u64;
    for (slot, pack) in packs.iter().enumerate() {
        let mut tag = [0; 64];
        tag.copy_from_slice(pack.name.hex().as_bytes());
        let (count, first) = (number(pack.blocks)?, number(next)?);
        let flags = if pack.ahead { SLOT_AHEAD } else { 0 };
        let slot_bytes = DeviceSlot { tag, blocks: count, first_block: first, flags, ..DeviceSlot::default() };
        put(&mut bytes, TABLE_OFFSET + slot * size_of::<DeviceSlot>(), slot_bytes.as_bytes());
        first_blocks.insert(pack.name, next);
        next += pack.blocks;
    }
    // The number `u32::MAX` is no block's.
    number(next)?;

    let writer = Writer { tree, xattrs: &xattrs, inodes: &inodes, packs, first_blocks: &first_blocks, packed: &packed };
    for (number, id) in order.iter().enumerate() {
        writer.inode(&mut bytes, *id, u32::try_from(number).unwrap_or(u32::MAX))?;
    }
    let mut volume = [0; 16];
    volume[..FLAT_VOLUME.len()].copy_from_slice(FLAT_VOLUME);
    volume[15] = absent(tree);
    let mut header = Super {
        volume,
        magic: U32::new(SUPER_MAGIC),
        feature_compat: U32::new(COMPAT_MTIME),
        feature_incompat: U32::new(incompat(packs, &packed)),
        block_bits: BLOCK_BITS,
        // The root is the first inode.
        root_nid: U16::new(u16::try_from(inodes[0].offset / SLOT_BYTES).map_err(|_| Error::TooManyPacks(packs.len()))?),
        inodes: U64::new(tree.nodes.len() as u64),
        epoch: U64::new(times.epoch.unsigned_abs()),
        fixed_nsec: U32::new(times.nsec),
        blocks: number(blocks as u64)?,
        xattr_block: number(xattr_block as u64)?,
        extra_devices: U16::new(u16::try_from(packs.len()).map_err(|_| Error::TooManyPacks(packs.len()))?),
        device_table: U16::new(TABLE_SLOT),
        ..Super::default()
    };
    if identities {
        put(&mut bytes, prefixes, XATTR_PREFIX_TABLE);
        header.feature_compat |= COMPAT_PLAIN_XATTR_PREFIXES | COMPAT_ISHARE_XATTRS;
        header.feature_incompat |= INCOMPAT_XATTR_PREFIXES;
        header.xattr_prefix_count = 1;
        header.xattr_prefix_start = number((prefixes / XATTR_PREFIX_UNIT) as u64)?;
    }
    put(&mut bytes, SUPER_OFFSET, header.as_bytes());
    if identities {
        let in_packs = tree.nodes.iter().zip(&inodes).filter(|(node, _)| node.content.is_in_packs());
        let numbers = in_packs.map(|(_, place)| (place.offset / SLOT_BYTES) as u64);
        bytes =
            identity::fill(bytes, numbers).map_err(|reason| Error::Invalid { path: "the new image".into(), reason })?;
    }
    Ok(bytes)
}

/// Returns which attributes no inode has.
fn absent(tree: &Tree) -> u8 {
    let xattrs = tree.nodes.iter().flat_map(|node| &node.xattrs);
    xattrs.fold(FLAT_NO_KIND, |absent, (name, _)| absent & !denied_by(name))
}

fn number(blocks: u64) -> Result<U32> {
    u32::try_from(blocks).map(U32::new).map_err(|_| Error::TooLarge(u32::MAX))
}

/// Returns the incompatible features.
fn incompat(packs: &[Pack], packed: &ChunkPlacement<'_>) -> u32 {
    let devices = if packs.is_empty() { 0 } else { INCOMPAT_DEVICE_TABLE };
    devices | if packed.scattered.is_empty() { 0 } else { INCOMPAT_CHUNKS }
}

/// The locations of files' chunks.
struct ChunkPlacement<'a> {
    pieces: &'a [Digest],
    places: &'a Places,
    /// Files that are not a single run of blocks and need a chunk index.
    scattered: HashSet<NodeId>,
}

impl<'a> ChunkPlacement<'a> {
    fn of(tree: &Tree, pieces: &'a [Digest], places: &'a Places) -> Self {
        let mut packed = Self { pieces, places, scattered: HashSet::new() };
        for (id, node) in tree.nodes.iter().enumerate() {
            if let Content::Chunks { .. } = node.content {
                packed.scattered.insert(id);
            }
            let Content::Packed { bytes, first } = node.content else { continue };
            let mut places = packed.places(bytes, first);
            let mut next = places.next().map(|(pack, block)| (pack, block + CHUNK_BLOCKS));
            let is_run = places.all(|(pack, block)| {
                let is_next = next == Some((pack, block));
                next = Some((pack, block + CHUNK_BLOCKS));
                is_next
            });
            if !is_run {
                packed.scattered.insert(id);
            }
        }
        packed
    }

    /// Returns the pack and block of each chunk of a file.
    fn places(&self, bytes: u64, first: usize) -> impl Iterator<Item = (Digest, u64)> + 'a {
        let count = usize::try_from(chunk::count(bytes)).unwrap_or(usize::MAX);
        let places = self.places;
        // The chunks of all files have locations.
        self.pieces[first..][..count].iter().filter_map(move |digest| places.get(digest).copied())
    }
}

/// Writes inodes at their locations.
struct Writer<'a> {
    tree: &'a Tree,
    xattrs: &'a Xattrs,
    inodes: &'a [Place],
    packs: &'a [Pack],
    first_blocks: &'a BTreeMap<Digest, u64>,
    packed: &'a ChunkPlacement<'a>,
}

impl Writer<'_> {
    fn inode(&self, bytes: &mut [u8], id: usize, number_of_inode: u32) -> Result<()> {
        let (node, place) = (&self.tree.nodes[id], &self.inodes[id]);
        let xattrs = self.xattrs.of_inode(id);
        let (layout, length, at) = match &node.content {
            // A build refuses the latter for this layout.
            Content::None | Content::Elsewhere { .. } => (Layout::Plain, 0, node.rdev),
            Content::Inline(data) => self.near(bytes, place, xattrs.len(), data)?,
            // Nothing is left unread, and objects belong to the composefs layout.
            Content::Unread { .. } | Content::Object { .. } => (Layout::Plain, 0, 0),
            Content::Layer { bytes: length, pack, block } => {
                (Layout::Plain, *length, self.block_of_pack(*pack, *block)?.get())
            }
            Content::Chunks { bytes: length, chunks } => {
                let index = chunks.iter().map(|(pack, block)| self.block_of_pack(*pack, *block));
                put(bytes, place.tail(xattrs.len()), index.collect::<Result<Vec<U32>>>()?.as_bytes());
                (Layout::Chunks, *length, CHUNK_FORMAT)
            }
            Content::Packed { bytes: length, first } => {
                let mut blocks = self
                    .packed
                    .places(*length, *first)
                    .map(|(pack, block)| number(self.first_blocks.get(&pack).copied().unwrap_or_default() + block));
                if self.packed.scattered.contains(&id) {
                    let index = blocks.collect::<Result<Vec<U32>>>()?;
                    put(bytes, place.tail(xattrs.len()), index.as_bytes());
                    (Layout::Chunks, *length, CHUNK_FORMAT)
                } else {
                    (Layout::Plain, *length, blocks.next().transpose()?.unwrap_or_default().get())
                }
            }
            Content::Directory(_) => {
                let data = dir::write(self.tree, id, place.parent, |id| (self.inodes[id].offset / SLOT_BYTES) as u64);
                self.near(bytes, place, xattrs.len(), &data)?
            }
        };
        self.head(bytes, node, place, (layout, length, at), (xattrs, number_of_inode));
        Ok(())
    }

    /// Returns the number of a pack's block in the address space of the image.
    fn block_of_pack(&self, pack: usize, block: u64) -> Result<U32> {
        let first = self.packs.get(pack).and_then(|pack| self.first_blocks.get(&pack.name));
        number(first.copied().unwrap_or_default() + block)
    }

    /// Writes bytes in the image: whole blocks, and the rest after the inode.
    fn near(&self, bytes: &mut [u8], place: &Place, xattr_bytes: usize, data: &[u8]) -> Result<(Layout, u64, u32)> {
        let (blocks, tail) = data.split_at((place.blocks * BLOCK_BYTES).min(data.len()));
        put(bytes, place.first_block * BLOCK_BYTES, blocks);
        put(bytes, place.tail(xattr_bytes), tail);
        let layout = if tail.is_empty() { Layout::Plain } else { Layout::Inline };
        Ok((layout, data.len() as u64, number(place.first_block as u64)?.get()))
    }

    fn head(
        &self,
        bytes: &mut [u8],
        node: &Node,
        place: &Place,
        (layout, length, at): (Layout, u64, u32),
        (xattrs, ino): (&[u8], u32),
    ) {
        let xattr_count = U16::new(xattr_count(xattrs.len()));
        let mode = U16::new(node.mode);
        // It was checked when locations were assigned.
        let short = |number: u32| U16::new(u16::try_from(number).unwrap_or(u16::MAX));
        match place.compact {
            Some(since) => {
                let inode = Compact {
                    format: U16::new(layout.format(false)),
                    xattr_count,
                    mode,
                    nlink: short(node.nlink),
                    size: U32::new(u32::try_from(length).unwrap_or(u32::MAX)),
                    mtime: U32::new(since),
                    place: U32::new(at),
                    ino: U32::new(ino),
                    uid: short(node.uid),
                    gid: short(node.gid),
                    ..Compact::default()
                };
                put(bytes, place.offset, inode.as_bytes());
            }
            None => {
                let inode = Extended {
                    format: U16::new(layout.format(true)),
                    xattr_count,
                    mode,
                    size: U64::new(length),
                    place: U32::new(at),
                    ino: U32::new(ino),
                    uid: U32::new(node.uid),
                    gid: U32::new(node.gid),
                    mtime: U64::new(node.mtime.sec.cast_unsigned()),
                    mtime_nsec: U32::new(node.mtime.nsec),
                    nlink: U32::new(node.nlink),
                    ..Extended::default()
                };
                put(bytes, place.offset, inode.as_bytes());
            }
        }
        put(bytes, place.offset + place.inode_bytes(), xattrs);
    }
}

#[cfg(test)]
mod tests {
    use ferry_vfs::Timespec;

    use super::*;
    use crate::format::digest::Algorithm;
    use crate::format::image::Image;

    /// The root's number has 16 bits, and the table of packs is before it.
    #[test]
    fn more_packs_than_an_image_can_name_are_refused() {
        let mtime = Timespec { sec: 1, nsec: 0 };
        let content = Content::Directory(Vec::new());
        let root = Node { mode: 0o040_755, uid: 0, gid: 0, rdev: 0, mtime, nlink: 2, xattrs: Vec::new(), content };
        let tree = Tree { nodes: vec![root], ..Tree::default() };
        let image = |count: usize| {
            let pack =
                |number: usize| Pack { name: Algorithm::Blake3.of(&number.to_le_bytes()), blocks: 1, ahead: false };
            write(&tree, &(0..count).map(pack).collect::<Vec<_>>(), &[], &Places::default(), false)
        };
        let most = (usize::from(u16::MAX) * SLOT_BYTES - TABLE_OFFSET) / size_of::<DeviceSlot>();
        let (bytes, _) = image(most).expect("so many can be named");
        let found = Image::from_bytes(bytes).expect("it is sound");
        assert_eq!((found.packs().len(), crate::check(&found).findings), (most, Vec::new()));
        let error = image(most + 1).expect_err("one too many");
        assert!(matches!(error, Error::TooManyPacks(count) if count == most + 1), "{error}");
    }
}
