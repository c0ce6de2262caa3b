//! Assigns a location to each inode.

use std::collections::{BTreeMap, HashSet};

use super::dir;
use super::xattr::Xattrs;
use crate::format::chunk;
use crate::format::data::ENTRY_BYTES;
use crate::format::erofs::{BLOCK_BYTES, Compact, Extended, SLOT_BYTES};
use crate::format::tree::{Content, Node, NodeId, Tree};

/// The maximum number of gaps kept for later, smaller inodes. Only near gaps keep the order of the walk.
const GAPS_MAX: usize = 16;

/// The location of an inode, and of a directory's blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    /// The inode's offset, in bytes.
    pub offset: usize,
    /// Seconds since the image's epoch, for a compact inode.
    pub compact: Option<u32>,
    /// The first of the whole blocks of a directory, or of a very long link.
    pub first_block: usize,
    /// The number of its blocks.
    pub blocks: usize,
    /// A directory's parent.
    pub parent: NodeId,
}

/// All places.
pub(super) struct Placed {
    /// By [`NodeId`].
    pub inodes: Vec<Place>,
    /// The order in which the inodes were placed.
    pub order: Vec<NodeId>,
    /// The end of the last inode, in bytes.
    pub end: usize,
}

/// Assigns locations: a directory, its files, then its subdirectories. Scattered files are followed by their chunk
/// index. The root's location is the first from `first`.
pub(super) fn all(tree: &Tree, first: usize, times: &Times, xattrs: &Xattrs, scattered: &HashSet<NodeId>) -> Placed {
    let place = |id, parent, room: &mut Room| place(tree, (id, parent), times, xattrs, scattered, room);
    let mut room = Room { next: first, gaps: Vec::new() };
    let mut placed = Placed { inodes: vec![Place::default(); tree.nodes.len()], order: Vec::new(), end: 0 };
    let mut left = vec![(0, 0)];
    while let Some((id, parent)) = left.pop() {
        placed.inodes[id] = place(id, parent, &mut room);
        placed.order.push(id);
        let Content::Directory(names) = &tree.nodes[id].content else { continue };
        for (_, child) in names {
            if matches!(tree.nodes[*child].content, Content::Directory(_)) || placed.inodes[*child].offset > 0 {
                continue;
            }
            placed.inodes[*child] = place(*child, id, &mut room);
            placed.order.push(*child);
        }
        let directories = names.iter().filter(|(_, child)| matches!(tree.nodes[*child].content, Content::Directory(_)));
        left.extend(directories.rev().map(|(_, child)| (*child, id)));
    }
    placed.end = room.next;
    placed
}

fn place(
    tree: &Tree,
    (id, parent): (NodeId, NodeId),
    times: &Times,
    xattrs: &Xattrs,
    scattered: &HashSet<NodeId>,
    room: &mut Room,
) -> Place {
    let node = &tree.nodes[id];
    let bytes = match &node.content {
        Content::None | Content::Elsewhere { .. } => 0,
        Content::Inline(data) => data.len() as u64,
        Content::Packed { bytes, .. }
        | Content::Layer { bytes, .. }
        | Content::Chunks { bytes, .. }
        | Content::Object { bytes, .. }
        | Content::Unread { bytes } => *bytes,
        Content::Directory(_) => dir::size(tree, id) as u64,
    };
    let compact = times.fits_compact(node, bytes);
    let inode_bytes = if compact.is_some() { size_of::<Compact>() } else { size_of::<Extended>() };
    let head = inode_bytes + xattrs.of_inode(id).len();
    let mut place = Place { compact, parent, ..Place::default() };
    let data = usize::try_from(bytes).unwrap_or(usize::MAX);
    let tail = match &node.content {
        Content::Inline(_) | Content::Directory(_) => {
            let tail = data % BLOCK_BYTES;
            // The last part must be in the inode's block.
            let fits = head + tail <= BLOCK_BYTES;
            place.blocks = if fits { data / BLOCK_BYTES } else { data.div_ceil(BLOCK_BYTES) };
            if fits { tail } else { 0 }
        }
        Content::Packed { .. } | Content::Chunks { .. } if scattered.contains(&id) => {
            ENTRY_BYTES * usize::try_from(chunk::count(bytes)).unwrap_or(usize::MAX)
        }
        _ => 0,
    };
    place.offset = room.take(head + tail);
    if place.blocks > 0 {
        place.first_block = room.take_blocks(place.blocks);
    }
    place
}

/// The free space.
struct Room {
    next: usize,
    /// The unused ends of blocks that were too short: begin and end.
    gaps: Vec<(usize, usize)>,
}

impl Room {
    /// Returns the offset of free bytes within one block, unless there are more than a block.
    fn take(&mut self, bytes: usize) -> usize {
        let bytes = bytes.next_multiple_of(SLOT_BYTES);
        if let Some(gap) = self.gaps.iter_mut().find(|(from, to)| to - from >= bytes) {
            let at = gap.0;
            gap.0 += bytes;
            return at;
        }
        let left = self.next.next_multiple_of(BLOCK_BYTES) - self.next;
        if left < bytes && left > 0 {
            self.leave();
        }
        let at = self.next;
        self.next += bytes;
        at
    }

    /// Returns the first of this many whole blocks.
    fn take_blocks(&mut self, count: usize) -> usize {
        self.leave();
        let first = self.next / BLOCK_BYTES;
        self.next += count * BLOCK_BYTES;
        first
    }

    /// Continues with the next block.
    fn leave(&mut self) {
        let end = self.next.next_multiple_of(BLOCK_BYTES);
        self.gaps.retain(|(from, to)| to - from >= SLOT_BYTES);
        if end - self.next >= SLOT_BYTES {
            if self.gaps.len() == GAPS_MAX {
                self.gaps.remove(0);
            }
            self.gaps.push((self.next, end));
        }
        self.next = end;
    }
}

/// The times that compact inodes of this image share.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    pub(super) epoch: i64,
    pub(super) nsec: u32,
}

impl Times {
    /// Returns the earliest second, and the most common nanoseconds (the lowest of equally common ones).
    pub(super) fn of(tree: &Tree) -> Self {
        let epoch = tree.nodes.iter().map(|node| node.mtime.sec).min().unwrap_or(0).max(0);
        let mut counts = BTreeMap::new();
        for node in &tree.nodes {
            *counts.entry(node.mtime.nsec).or_insert(0_usize) += 1;
        }
        let nsec = counts.iter().max_by(|a, b| a.1.cmp(b.1).then(b.0.cmp(a.0))).map_or(0, |(nsec, _)| *nsec);
        Self { epoch, nsec }
    }

    /// Returns the time of a compact inode for this one, if it can be compact.
    fn fits_compact(&self, node: &Node, bytes: u64) -> Option<u32> {
        let since = u32::try_from(node.mtime.sec.checked_sub(self.epoch)?).ok()?;
        let fits = node.mtime.nsec == self.nsec
            && u16::try_from(node.uid).is_ok()
            && u16::try_from(node.gid).is_ok()
            && u16::try_from(node.nlink).is_ok()
            && u32::try_from(bytes).is_ok();
        fits.then_some(since)
    }
}

impl Place {
    pub(super) fn inode_bytes(&self) -> usize {
        if self.compact.is_some() { size_of::<Compact>() } else { size_of::<Extended>() }
    }

    /// Returns the offset of what follows an inode and its attributes.
    pub(super) fn tail(&self, xattr_bytes: usize) -> usize {
        self.offset + self.inode_bytes() + xattr_bytes
    }
}
