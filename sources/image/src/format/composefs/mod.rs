//! The layout `composefs`: EROFS metadata exactly as `mkcomposefs` 1.0.8 writes it, for the kernel to mount below overlayfs.
//!
//! ```text
//! 0          composefs's header
//! 1024       superblock, then the inodes, breadth first, each followed by its attributes and a small file's bytes
//! 32-aligned attributes that several inodes share
//! aligned    whole blocks: directories and long links, in the order of the inodes
//! ```
//!
//! A larger file is all hole. Its attributes `trusted.overlay.redirect` and `trusted.overlay.metacopy` tell overlayfs where its
//! bytes are in the object store, and their fs-verity digest.
//!
//! Source: composefs-dump(5), Documentation/filesystems/overlayfs.rst and erofs.rst of Linux; the rest (orders, padding, which
//! part of an inode may cross a block) was found by comparing images with what they were made of.

mod filter;
mod native;
mod place;
mod prepare;
pub(crate) mod view;

pub(crate) use prepare::path_of;

use std::collections::HashMap;

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::format::erofs::{
    BLOCK_BITS, BLOCK_BYTES, COMPAT_MTIME, COMPAT_XATTR_FILTER, Compact, Extended, Layout, SLOT_BYTES, SUPER_MAGIC,
    SUPER_OFFSET, Super, XattrHeader, append_xattr, xattr_count,
};
use crate::format::error::{Error, Result};
use crate::format::flat::dir;
use crate::format::tree::{Content, NodeId, Tree};

use place::{Body, Place, Places};

pub(crate) use prepare::{fits, set_xattr};

/// What a composefs image begins with.
pub(crate) const MAGIC: u32 = 0xd078_629a;
/// The version of [`Header`], which has never changed.
const HEADER_VERSION: u32 = 1;
/// [`Header::flags`]: some inode has an ACL.
const FLAG_ACL: u32 = 1;

/// The first bytes of a composefs image.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Header {
    /// [`MAGIC`].
    pub magic: U32,
    /// [`HEADER_VERSION`].
    pub version: U32,
    /// [`FLAG_ACL`].
    pub flags: U32,
    /// The version of the layout: 1 where directories with whiteouts are marked as opaque, so that overlayfs finds those; 2 for what
    /// composefs-rs has of its own.
    pub format: U32,
    /// Not used.
    pub reserved: [U32; 4],
}

const _: () = assert!(size_of::<Header>() == 32);

/// The versions of composefs's layout: 0 and 1, which are mkcomposefs's, and 2, which is only composefs-rs's.
pub const COMPOSEFS_VERSION_MAX: u32 = native::VERSION;

/// An attribute: full name and value.
type Pair<'a> = (&'a [u8], &'a [u8]);

/// Writes the image. Without a version it has version 0, or 1 if the tree has whiteouts, as `mkcomposefs` does it.
pub(crate) fn write(mut tree: Tree, version: Option<u32>) -> Result<Vec<u8>> {
    if version == Some(native::VERSION) {
        return native::write(&tree);
    }
    let version = prepare::prepare(&mut tree, version);
    let shared = Shared::of(&tree)?;
    let places = place::all(&tree, &shared)?;
    let root = &tree.nodes[0];
    let has_acl =
        |node: &crate::format::tree::Node| node.xattrs.iter().any(|(name, _)| name.starts_with(b"system.posix_acl_"));
    let header = Header {
        magic: U32::new(MAGIC),
        version: U32::new(HEADER_VERSION),
        flags: U32::new(if tree.nodes.iter().any(has_acl) { FLAG_ACL } else { 0 }),
        format: U32::new(version),
        ..Header::default()
    };
    debug_assert!(matches!(root.content, Content::Directory(_)));
    let xattr_start = places.end.next_multiple_of(SLOT_BYTES);
    let first_block = (xattr_start + shared.bytes.len()).div_ceil(BLOCK_BYTES);
    let blocks = first_block + places.blocks;
    let number = |blocks: usize| u32::try_from(blocks).map(U32::new).map_err(|_| Error::TooLarge(u32::MAX));
    let superblock = Super {
        magic: U32::new(SUPER_MAGIC),
        feature_compat: U32::new(COMPAT_MTIME | COMPAT_XATTR_FILTER),
        block_bits: BLOCK_BITS,
        // The root is the first inode of all.
        root_nid: U16::new(u16::try_from(places.of[0].offset / SLOT_BYTES).unwrap_or(u16::MAX)),
        inodes: U64::new(places.order.len() as u64),
        epoch: U64::new(places.earliest.sec.cast_unsigned()),
        fixed_nsec: U32::new(places.earliest.nsec),
        blocks: number(blocks)?,
        xattr_block: number(xattr_start / BLOCK_BYTES)?,
        ..Super::default()
    };
    let mut bytes = vec![0; blocks * BLOCK_BYTES];
    put(&mut bytes, 0, header.as_bytes());
    put(&mut bytes, SUPER_OFFSET, superblock.as_bytes());
    put(&mut bytes, xattr_start, &shared.bytes);
    let writer = Writer { tree: &tree, places: &places, shared: &shared, first_block, xattr_start };
    for (number, id) in places.order.iter().enumerate() {
        writer.inode(&mut bytes, *id, u32::try_from(number).map_err(|_| Error::TooLarge(u32::MAX))?);
    }
    Ok(bytes)
}

fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    bytes[at..at + what.len()].copy_from_slice(what);
}

/// Attributes that several inodes have, by name, length and bytes of the value, the greatest first.
struct Shared<'a> {
    bytes: Vec<u8>,
    offsets: HashMap<Pair<'a>, usize>,
}

impl<'a> Shared<'a> {
    fn of(tree: &'a Tree) -> Result<Self> {
        let mut counts: HashMap<Pair<'a>, usize> = HashMap::new();
        for (name, value) in tree.nodes.iter().flat_map(|node| &node.xattrs) {
            *counts.entry((name, value)).or_default() += 1;
        }
        let mut several: Vec<Pair<'a>> =
            counts.into_iter().filter(|(_, count)| *count > 1).map(|(pair, _)| pair).collect();
        several
            .sort_unstable_by(|(name, value), (other, its)| (other, its.len(), its).cmp(&(name, value.len(), value)));
        let (mut bytes, mut offsets) = (Vec::new(), HashMap::with_capacity(several.len()));
        for (name, value) in several {
            offsets.insert((name, value), bytes.len());
            append_xattr(&mut bytes, name, value);
        }
        // An inode counts its shared attributes in a byte.
        let shared = |node: &crate::format::tree::Node| {
            node.xattrs
                .iter()
                .filter(|(name, value)| offsets.contains_key(&(name.as_slice(), value.as_slice())))
                .count()
        };
        if tree.nodes.iter().any(|node| node.xattrs.len() > 255 && shared(node) > 255) {
            let reason = "a file has more than 255 extended attributes that others have too".into();
            return Err(Error::CannotHold { path: "the tree".into(), reason });
        }
        Ok(Self { bytes, offsets })
    }

    fn offset(&self, name: &[u8], value: &[u8]) -> Option<usize> {
        self.offsets.get(&(name, value)).copied()
    }

    /// The size of what follows an inode that has these attributes.
    fn size(&self, xattrs: &[(Vec<u8>, Vec<u8>)]) -> usize {
        let one = |(name, value): &(Vec<u8>, Vec<u8>)| match self.offset(name, value) {
            Some(_) => size_of::<U32>(),
            None => crate::format::erofs::xattr_size(name, value),
        };
        if xattrs.is_empty() { 0 } else { size_of::<XattrHeader>() + xattrs.iter().map(one).sum::<usize>() }
    }
}

/// Writes inodes that have their places.
struct Writer<'a> {
    tree: &'a Tree,
    places: &'a Places,
    shared: &'a Shared<'a>,
    first_block: usize,
    xattr_start: usize,
}

impl Writer<'_> {
    fn inode(&self, bytes: &mut [u8], id: NodeId, number: u32) {
        let place = &self.places.of[id];
        let block = self.first_block + place.first_block;
        let (layout, at) = match place.body {
            Body::Chunks { bits, .. } => (Layout::Chunks, bits),
            // The number of the block, and over its lower half what chunks there are.
            Body::MovedChunks { bits } => {
                (Layout::Chunks, u32::try_from(block).unwrap_or(u32::MAX) & 0xffff_0000 | bits)
            }
            Body::Near { tail: 0, blocks: 0 } => (Layout::Plain, self.tree.nodes[id].rdev),
            // The image's blocks have numbers of 32 bits.
            Body::Near { tail, .. } => {
                let at = if place.blocks() == 0 { 0 } else { u32::try_from(block).unwrap_or(u32::MAX) };
                (if tail == 0 { Layout::Plain } else { Layout::Inline }, at)
            }
        };
        self.head(bytes, id, number, (layout, at));
        let xattrs = self.xattrs(id);
        let after = place.offset + place.inode_bytes();
        put(bytes, after, &xattrs);
        let after = after + xattrs.len();
        match place.body {
            Body::Chunks { count, .. } => bytes[after..after + count * size_of::<U32>()].fill(0xff),
            Body::MovedChunks { .. } => bytes[block * BLOCK_BYTES..][..BLOCK_BYTES].fill(0xff),
            Body::Near { tail, .. } => {
                let written;
                let data = match &self.tree.nodes[id].content {
                    Content::Directory(_) => {
                        let nid = |id: NodeId| (self.places.of[id].offset / SLOT_BYTES) as u64;
                        written = dir::write(self.tree, id, place.parent, nid);
                        &written
                    }
                    Content::Inline(data) => data,
                    _ => return,
                };
                let (whole, rest) = data.split_at(data.len() - tail);
                put(bytes, block * BLOCK_BYTES, whole);
                put(bytes, after, rest);
            }
        }
    }

    fn head(&self, bytes: &mut [u8], id: NodeId, number: u32, (layout, at): (Layout, u32)) {
        let (node, place) = (&self.tree.nodes[id], &self.places.of[id]);
        let xattr_count = U16::new(xattr_count(self.shared.size(&node.xattrs)));
        let mode = U16::new(node.mode);
        // What fits was found out when places were given.
        let short = |number: u32| U16::new(u16::try_from(number).unwrap_or(u16::MAX));
        if place.compact {
            let inode = Compact {
                format: U16::new(layout.format(false)),
                xattr_count,
                mode,
                nlink: short(place.nlink),
                size: U32::new(u32::try_from(place.bytes).unwrap_or(u32::MAX)),
                place: U32::new(at),
                ino: U32::new(number),
                uid: short(node.uid),
                gid: short(node.gid),
                ..Compact::default()
            };
            return put(bytes, place.offset, inode.as_bytes());
        }
        let inode = Extended {
            format: U16::new(layout.format(true)),
            xattr_count,
            mode,
            size: U64::new(place.bytes),
            place: U32::new(at),
            ino: U32::new(number),
            uid: U32::new(node.uid),
            gid: U32::new(node.gid),
            mtime: U64::new(node.mtime.sec.cast_unsigned()),
            mtime_nsec: U32::new(node.mtime.nsec),
            nlink: U32::new(place.nlink),
            ..Extended::default()
        };
        put(bytes, place.offset, inode.as_bytes());
    }

    /// Header, numbers of shared attributes, own ones; both in the order of names.
    fn xattrs(&self, id: NodeId) -> Vec<u8> {
        let xattrs = &self.tree.nodes[id].xattrs;
        if xattrs.is_empty() {
            return Vec::new();
        }
        let (mut shared, mut own) = (Vec::new(), Vec::new());
        for (name, value) in xattrs {
            match self.shared.offset(name, value) {
                // In units of four bytes, from the beginning of the block that the first one is in.
                Some(at) => shared.push(U32::new(
                    u32::try_from((self.xattr_start % BLOCK_BYTES + at) / size_of::<U32>()).unwrap_or(u32::MAX),
                )),
                None => append_xattr(&mut own, name, value),
            }
        }
        let header = XattrHeader {
            name_filter: U32::new(filter::of(xattrs.iter().map(|(name, _)| name.as_slice()))),
            shared_count: u8::try_from(shared.len()).unwrap_or(u8::MAX),
            ..XattrHeader::default()
        };
        [header.as_bytes(), shared.as_bytes(), &own].concat()
    }
}

impl Place {
    fn inode_bytes(&self) -> usize {
        if self.compact { size_of::<Compact>() } else { size_of::<Extended>() }
    }

    fn blocks(&self) -> usize {
        match self.body {
            Body::Near { blocks, .. } => blocks,
            Body::Chunks { .. } => 0,
            Body::MovedChunks { .. } => 1,
        }
    }
}
