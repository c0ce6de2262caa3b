//! Assigns a location to each inode.

use ferry_vfs::{FileType, Timespec};

use super::shared_xattrs::Shared;
use crate::format::erofs::{BLOCK_BYTES, Compact, Extended, SLOT_BYTES, SUPER_OFFSET, Super};
use crate::format::error::{Error, Result};
use crate::format::flat::dir;
use crate::format::tree::{Content, NodeId, Tree};

/// A last part of a directory or a file that is longer than this gets a block, instead of following the inode.
const TAIL_BYTES_MAX: usize = BLOCK_BYTES / 2;
/// The maximum chunk size, as a power of two of blocks (`EROFS_CHUNK_FORMAT_BLKBITS_MASK`).
const CHUNK_BITS_MAX: u32 = 31;
/// The maximum number of chunks of a file, as in mkcomposefs: their index is a block.
const CHUNKS_MAX: u64 = 1024;

/// Where the bytes of an inode are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Body {
    /// In the image: whole blocks, and the rest after the inode.
    Near { blocks: usize, tail: usize },
    /// A number of chunks that are holes.
    Chunks { bits: u32, count: usize },
    /// The same, but the index does not fit after the inode: mkcomposefs gives it an unreferenced block.
    MovedChunks { bits: u32 },
}

/// The location of an inode.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// In bytes.
    pub offset: usize,
    pub compact: bool,
    pub nlink: u32,
    /// Size of the file.
    pub bytes: u64,
    pub body: Body,
    /// Its first block, counted from the first data block.
    pub first_block: usize,
    /// A directory's parent.
    pub parent: NodeId,
}

/// All places.
pub(super) struct Places {
    /// By [`NodeId`].
    pub of: Vec<Place>,
    /// The order of the inodes.
    pub order: Vec<NodeId>,
    /// The end of the last inode, in bytes.
    pub end: usize,
    /// The number of whole blocks.
    pub blocks: usize,
    /// The earliest time, which compact inodes share.
    pub earliest: Timespec,
}

/// Assigns locations breadth first, in the order of names.
pub(super) fn all(tree: &Tree, shared: &Shared<'_>) -> Result<Places> {
    let (order, parents) = order(tree);
    let earliest = tree.nodes.iter().map(|node| node.mtime).min_by_key(|time| (time.sec, time.nsec));
    let earliest = earliest.unwrap_or_default();
    let none = Place {
        offset: 0,
        compact: false,
        nlink: 0,
        bytes: 0,
        body: Body::Near { blocks: 0, tail: 0 },
        first_block: 0,
        parent: 0,
    };
    let mut places =
        Places { of: vec![none; tree.nodes.len()], order, end: SUPER_OFFSET + size_of::<Super>(), blocks: 0, earliest };
    for at in 0..places.order.len() {
        let id = places.order[at];
        let mut place = shape(tree, id, earliest)?;
        place.parent = parents[id];
        let head = place.inode_bytes() + shared.size(&tree.nodes[id].xattrs);
        (place.offset, place.body) = settle(places.end, head, &place, tree.nodes[id].kind());
        place.first_block = places.blocks;
        places.blocks += place.blocks();
        places.end = place.offset
            + head
            + match place.body {
                Body::Near { tail, .. } => tail,
                Body::Chunks { count, .. } => 4 * count,
                Body::MovedChunks { .. } => 0,
            };
        places.of[id] = place;
    }
    Ok(places)
}

/// Returns the inodes, breadth first, and the parent directory of each.
fn order(tree: &Tree) -> (Vec<NodeId>, Vec<NodeId>) {
    let (mut order, mut parents) = (vec![0], vec![0; tree.nodes.len()]);
    let mut next = 0;
    while let Some(id) = order.get(next).copied() {
        next += 1;
        let Content::Directory(names) = &tree.nodes[id].content else { continue };
        for (name, child) in names {
            if !tree.is_link(id, name) {
                parents[*child] = id;
                order.push(*child);
            }
        }
    }
    (order, parents)
}

/// Returns a location without offsets.
fn shape(tree: &Tree, id: NodeId, earliest: Timespec) -> Result<Place> {
    let node = &tree.nodes[id];
    let mut nlink = node.nlink;
    let near = |length: usize, always: bool| match length % BLOCK_BYTES {
        tail if tail > TAIL_BYTES_MAX && !always => Body::Near { blocks: length / BLOCK_BYTES + 1, tail: 0 },
        tail => Body::Near { blocks: length / BLOCK_BYTES, tail },
    };
    let (bytes, body) = match &node.content {
        Content::None => (0, near(0, false)),
        Content::Directory(names) => {
            let is_dir = |(_, id): &&(_, NodeId)| matches!(tree.nodes[*id].content, Content::Directory(_));
            nlink = 2 + u32::try_from(names.iter().filter(is_dir).count()).unwrap_or(u32::MAX - 2);
            let length = dir::size(tree, id);
            let body = near(length, false);
            // Partial blocks count as whole ones.
            match body {
                Body::Near { blocks, tail: 0 } => ((blocks * BLOCK_BYTES) as u64, body),
                _ => (length as u64, body),
            }
        }
        Content::Inline(data) => (data.len() as u64, near(data.len(), node.kind() == FileType::Symlink)),
        Content::Object { bytes, .. } | Content::Elsewhere { bytes: bytes @ 1.., .. } => (*bytes, chunks(*bytes)?),
        // The latter belong to the flat layout, and nothing is left unread.
        Content::Elsewhere { .. }
        | Content::Unread { .. }
        | Content::Packed { .. }
        | Content::Layer { .. }
        | Content::Chunks { .. } => (0, near(0, false)),
    };
    let short = [node.uid, node.gid, nlink].iter().all(|number| *number <= u16::MAX.into());
    let is_earliest = (node.mtime.sec, node.mtime.nsec) == (earliest.sec, earliest.nsec);
    let compact = is_earliest && short && u32::try_from(bytes).is_ok();
    Ok(Place { offset: 0, compact, nlink, bytes, body, first_block: 0, parent: 0 })
}

/// Returns the smallest chunk size with which one chunk suffices, or the maximum size.
fn chunks(bytes: u64) -> Result<Body> {
    let blocks = bytes.div_ceil(BLOCK_BYTES as u64);
    let bits = blocks.next_power_of_two().ilog2().min(CHUNK_BITS_MAX);
    let count = blocks.div_ceil(1 << bits);
    if count > CHUNKS_MAX {
        let reason = format!("a file of {bytes} bytes: composefs holds no more than 8 PiB in a file");
        return Err(Error::CannotHold { path: "the tree".into(), reason });
    }
    Ok(Body::Chunks { bits, count: usize::try_from(count).unwrap_or(usize::MAX) })
}

/// Returns the offset of an inode after `end`, so that its tail crosses no block.
fn settle(end: usize, head: usize, place: &Place, kind: FileType) -> (usize, Body) {
    let at = end.next_multiple_of(SLOT_BYTES);
    let index = match place.body {
        // The kernel requires a link and its inode to be in one block.
        Body::Near { .. } if kind == FileType::Symlink => {
            let length = usize::try_from(place.bytes).unwrap_or(usize::MAX);
            let fits = at % BLOCK_BYTES + head + length <= BLOCK_BYTES;
            let at = if fits { at } else { at.next_multiple_of(BLOCK_BYTES) };
            let body = if head + length < BLOCK_BYTES { place.body } else { Body::Near { blocks: 1, tail: 0 } };
            return (at, body);
        }
        Body::Near { tail, .. } => tail,
        Body::Chunks { count, .. } => 4 * count,
        Body::MovedChunks { .. } => 0,
    };
    let crosses = |at: usize| index > 0 && (at + head) / BLOCK_BYTES != (at + head + index - 1) / BLOCK_BYTES;
    if !crosses(at) {
        return (at, place.body);
    }
    let shifted = ((at + head).next_multiple_of(BLOCK_BYTES) - head).next_multiple_of(SLOT_BYTES);
    match place.body {
        Body::Chunks { bits, .. } if crosses(shifted) => (at.next_multiple_of(BLOCK_BYTES), Body::MovedChunks { bits }),
        body => (shifted, body),
    }
}

impl Place {
    pub(super) fn inode_bytes(&self) -> usize {
        if self.compact { size_of::<Compact>() } else { size_of::<Extended>() }
    }

    pub(super) fn blocks(&self) -> usize {
        match self.body {
            Body::Near { blocks, .. } => blocks,
            Body::Chunks { .. } => 0,
            Body::MovedChunks { .. } => 1,
        }
    }
}
