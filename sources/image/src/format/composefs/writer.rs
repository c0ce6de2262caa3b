//! Writes a composefs image as mkcomposefs does.

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use super::header::{HEADER_VERSION, Header, MAGIC, NATIVE_VERSION};
use super::place::{self, Body, Places};
use super::shared_xattrs::Shared;
use super::{native, prepare};
use crate::format::erofs::{
    BLOCK_BITS, BLOCK_BYTES, COMPAT_MTIME, COMPAT_XATTR_FILTER, Compact, Extended, Layout, SLOT_BYTES, SUPER_MAGIC,
    SUPER_OFFSET, Super, put, xattr_count,
};
use crate::format::error::{Error, Result};
use crate::format::flat::dir;
use crate::format::tree::{Content, NodeId, Tree};

/// [`Header::flags`]: some inode has an ACL.
const FLAG_ACL: u32 = 1;

/// Writes the image. The default version is 0, or 1 if the tree has whiteouts, as in `mkcomposefs`.
pub(crate) fn write(mut tree: Tree, version: Option<u32>) -> Result<Vec<u8>> {
    if version == Some(NATIVE_VERSION) {
        return native::write(&tree);
    }
    let version = prepare::prepare(&mut tree, version);
    // In descending order of name, and of length and bytes of the value.
    let shared = Shared::of(tree.nodes.iter().map(|node| &*node.xattrs), |(name, value), (other, its)| {
        (other, its.len(), its).cmp(&(name, value.len(), value))
    })?;
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
        // The root is the first inode.
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

/// Writes inodes at their locations.
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
            // The number of the block; its lower half is overwritten by the chunk format.
            Body::MovedChunks { bits } => {
                (Layout::Chunks, u32::try_from(block).unwrap_or(u32::MAX) & 0xffff_0000 | bits)
            }
            Body::Near { tail: 0, blocks: 0 } => (Layout::Plain, self.tree.nodes[id].rdev),
            // Block numbers have 32 bits.
            Body::Near { tail, .. } => {
                let at = if place.blocks() == 0 { 0 } else { u32::try_from(block).unwrap_or(u32::MAX) };
                (if tail == 0 { Layout::Plain } else { Layout::Inline }, at)
            }
        };
        self.head(bytes, id, number, (layout, at));
        let xattrs = self.shared.encode(&self.tree.nodes[id].xattrs, self.xattr_start % BLOCK_BYTES);
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
        // It was checked when locations were assigned.
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
}
