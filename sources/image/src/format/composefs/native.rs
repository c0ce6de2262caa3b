//! Version 2 of the layout: composefs-rs (the crate `composefs`) wrote it before it wrote mkcomposefs's, and still does
//! on demand.
//!
//! All inodes are extended, depth first, each with its number as `ino`; times have no nanoseconds. There are no stubs in
//! the root, and whiteouts stay devices. The rest is as in the other versions. (Found from composefs-rs's documentation,
//! and by comparing images.)

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use super::header::{HEADER_VERSION, Header, MAGIC, NATIVE_VERSION};
use super::prepare::path_of;
use super::shared_xattrs::Shared;
use super::view::{METACOPY, OVERLAY_PREFIX, REDIRECT, escape, metacopy};
use crate::format::erofs::{
    BLOCK_BITS, BLOCK_BYTES, COMPAT_MTIME, COMPAT_XATTR_FILTER, Extended, Layout, SLOT_BYTES, SUPER_MAGIC,
    SUPER_OFFSET, Super, put, split_xattr, xattr_count,
};
use crate::format::error::{Error, Result};
use crate::format::flat::dir;
use crate::format::tree::{Content, Node, NodeId, Tree};

/// The size of a chunk, as a power of two of blocks: each file is a single chunk.
const CHUNK_BITS: u32 = 31;
/// The maximum size of a file.
const FILE_BYTES_MAX: u64 = (BLOCK_BYTES as u64) << CHUNK_BITS;
/// A directory's last part that is longer than this gets a block.
const TAIL_BYTES_MAX: usize = BLOCK_BYTES / 2;

/// The attributes of an inode: composefs's own first, others by name.
type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// The bytes in an inode's blocks, followed by those after the inode.
struct Body {
    layout: Layout,
    tail: Vec<u8>,
    /// The number of blocks.
    blocks: usize,
}

/// The location of an inode.
#[derive(Clone, Copy, Default)]
struct Place {
    offset: usize,
    /// Its first block, counted from the first data block.
    block: usize,
}

/// Writes the image.
pub(super) fn write(tree: &Tree) -> Result<Vec<u8>> {
    let (order, parents) = order(tree);
    let xattrs: Vec<Xattrs> = tree.nodes.iter().map(xattrs).collect::<Result<_>>()?;
    let shared = Shared::of(order.iter().map(|id| &*xattrs[*id]), |one, other| key(one).cmp(&key(other)))?;
    let head = |id: NodeId| (size_of::<Extended>(), shared.size(&xattrs[id]));
    let mut places = vec![Place::default(); tree.nodes.len()];
    let (mut end, mut blocks) = (SUPER_OFFSET + size_of::<Super>(), 0);
    for id in &order {
        let body = body(tree, *id, |_| 0, 0)?;
        let (inode_bytes, xattr_bytes) = head(*id);
        let offset = settle(end.next_multiple_of(SLOT_BYTES), inode_bytes + xattr_bytes, &body);
        places[*id] = Place { offset, block: blocks };
        end = offset + inode_bytes + xattr_bytes + body.tail.len() - body.blocks * BLOCK_BYTES;
        blocks += body.blocks;
    }
    let xattr_start = end.next_multiple_of(SLOT_BYTES);
    let first_block = (xattr_start + shared.bytes.len()).div_ceil(BLOCK_BYTES);
    let number = |count: usize| u32::try_from(count).map(U32::new).map_err(|_| Error::TooLarge(u32::MAX));
    let mut bytes = vec![0; (first_block + blocks) * BLOCK_BYTES];
    let header = Header {
        magic: U32::new(MAGIC),
        version: U32::new(HEADER_VERSION),
        format: U32::new(NATIVE_VERSION),
        ..Header::default()
    };
    let superblock = Super {
        magic: U32::new(SUPER_MAGIC),
        feature_compat: U32::new(COMPAT_MTIME | COMPAT_XATTR_FILTER),
        block_bits: BLOCK_BITS,
        root_nid: U16::new(u16::try_from(places[0].offset / SLOT_BYTES).unwrap_or(u16::MAX)),
        inodes: U64::new(order.len() as u64),
        blocks: number(first_block + blocks)?,
        ..Super::default()
    };
    put(&mut bytes, 0, header.as_bytes());
    put(&mut bytes, SUPER_OFFSET, superblock.as_bytes());
    put(&mut bytes, xattr_start, &shared.bytes);
    let links = links(tree);
    let nid = |id: NodeId| (places[id].offset / SLOT_BYTES) as u64;
    for id in &order {
        let (node, place) = (&tree.nodes[*id], places[*id]);
        let Body { layout, mut tail, blocks } = body(tree, *id, nid, parents[*id])?;
        let block = first_block + place.block;
        if blocks > 0 {
            let whole: Vec<u8> = tail.drain(..blocks * BLOCK_BYTES).collect();
            put(&mut bytes, block * BLOCK_BYTES, &whole);
        }
        let (inode_bytes, xattr_bytes) = head(*id);
        let at = match layout {
            Layout::Chunks => U32::new(CHUNK_BITS),
            _ if blocks > 0 => number(block)?,
            _ => U32::new(node.rdev),
        };
        let size = match &node.content {
            Content::Directory(_) => (blocks * BLOCK_BYTES + tail.len()) as u64,
            Content::Object { bytes, .. } | Content::Elsewhere { bytes, .. } => *bytes,
            _ => tail.len() as u64,
        };
        let inode = Extended {
            format: U16::new(layout.format(true)),
            xattr_count: U16::new(xattr_count(xattr_bytes)),
            mode: U16::new(node.mode),
            size: U64::new(size),
            place: at,
            ino: number(place.offset / SLOT_BYTES)?,
            uid: U32::new(node.uid),
            gid: U32::new(node.gid),
            mtime: U64::new(node.mtime.sec.cast_unsigned()),
            nlink: U32::new(links[*id]),
            ..Extended::default()
        };
        put(&mut bytes, place.offset, inode.as_bytes());
        let after = place.offset + inode_bytes;
        put(&mut bytes, after, &shared.encode(&xattrs[*id], xattr_start));
        put(&mut bytes, after + xattr_bytes, &tail);
    }
    Ok(bytes)
}

/// Returns the inodes, depth first, and the parent directory of each.
fn order(tree: &Tree) -> (Vec<NodeId>, Vec<NodeId>) {
    let (mut order, mut parents) = (Vec::new(), vec![0; tree.nodes.len()]);
    let mut seen = vec![false; tree.nodes.len()];
    let mut left = vec![0];
    while let Some(id) = left.pop() {
        // Another hard link of an earlier inode.
        if std::mem::replace(&mut seen[id], true) {
            continue;
        }
        order.push(id);
        let Content::Directory(names) = &tree.nodes[id].content else { continue };
        for (_, child) in names.iter().rev() {
            if !seen[*child] {
                parents[*child] = id;
                left.push(*child);
            }
        }
    }
    (order, parents)
}

/// Returns the sort key of a shared attribute: number of the prefix, rest of the name, value.
fn key<'a>((name, value): &(&'a [u8], &'a [u8])) -> (u8, &'a [u8], &'a [u8]) {
    let (prefix, rest) = split_xattr(name);
    (prefix, rest, value)
}

/// Returns the link count of each inode.
fn links(tree: &Tree) -> Vec<u32> {
    let mut links = vec![0_u32; tree.nodes.len()];
    for (id, node) in tree.nodes.iter().enumerate() {
        let Content::Directory(names) = &node.content else { continue };
        links[id] += 2;
        for (_, child) in names {
            let is_dir = matches!(tree.nodes[*child].content, Content::Directory(_));
            links[if is_dir { id } else { *child }] += 1;
        }
    }
    links
}

fn xattrs(node: &Node) -> Result<Xattrs> {
    let refused = |reason: String| Err(Error::CannotHold { path: "the tree".into(), reason });
    let mut all = Vec::new();
    let (bytes, path, digest) = match &node.content {
        Content::Object { bytes, digest } => (*bytes, Some(path_of(*digest)), Some(*digest)),
        Content::Elsewhere { bytes: bytes @ 1.., path, digest } => (*bytes, path.clone(), *digest),
        _ => (0, None, None),
    };
    if bytes > FILE_BYTES_MAX {
        return refused(format!(
            "a file of {bytes} bytes: version {NATIVE_VERSION} of the layout holds no more than 8 TiB in a file"
        ));
    }
    if bytes > 0 {
        let Some((path, digest)) = path.zip(digest) else {
            return refused(format!(
                "a file without path or digest, which version {NATIVE_VERSION} of the layout does not hold"
            ));
        };
        all.push((METACOPY.to_vec(), metacopy(Some(digest))));
        all.push((REDIRECT.to_vec(), [b"/", path.as_slice()].concat()));
    }
    let mut named: Xattrs = node.xattrs.clone();
    for (name, _) in &mut named {
        if name.starts_with(OVERLAY_PREFIX) {
            *name = escape(name);
        }
        if name.starts_with(b"lustre.") {
            return refused(format!(
                "an attribute {}, which has another form in version {NATIVE_VERSION} of the layout",
                name.escape_ascii()
            ));
        }
    }
    named.sort_unstable();
    all.extend(named);
    Ok(all)
}

/// An inode's bytes.
fn body(tree: &Tree, id: NodeId, nid: impl Fn(NodeId) -> u64, parent: NodeId) -> Result<Body> {
    let node = &tree.nodes[id];
    let inline = |tail: Vec<u8>| {
        let layout = if tail.is_empty() { Layout::Plain } else { Layout::Inline };
        Body { layout, tail, blocks: 0 }
    };
    Ok(match &node.content {
        Content::Directory(_) => {
            let mut tail = dir::write(tree, id, parent, nid);
            if tail.len() % BLOCK_BYTES > TAIL_BYTES_MAX {
                tail.resize(tail.len().next_multiple_of(BLOCK_BYTES), 0);
            }
            let (blocks, is_whole) = (tail.len() / BLOCK_BYTES, tail.len().is_multiple_of(BLOCK_BYTES));
            Body { layout: if is_whole { Layout::Plain } else { Layout::Inline }, tail, blocks }
        }
        Content::Inline(data) if data.len() < BLOCK_BYTES => inline(data.clone()),
        Content::Inline(data) => {
            let reason = format!(
                "a file of {} bytes that is kept with its inode: version {NATIVE_VERSION} of the layout has no place for more than 4095",
                data.len()
            );
            return Err(Error::CannotHold { path: "the tree".into(), reason });
        }
        Content::Object { .. } | Content::Elsewhere { bytes: 1.., .. } => {
            Body { layout: Layout::Chunks, tail: vec![0xff; size_of::<U32>()], blocks: 0 }
        }
        Content::None
        | Content::Elsewhere { .. }
        | Content::Unread { .. }
        | Content::Packed { .. }
        | Content::Layer { .. }
        | Content::Chunks { .. } => inline(Vec::new()),
    })
}

/// Returns the offset of an inode from `at` on: its tail must not cross a block.
fn settle(at: usize, head: usize, body: &Body) -> usize {
    if body.layout != Layout::Inline {
        return at;
    }
    let last = at + head - 1;
    let end = at + head + body.tail.len() % BLOCK_BYTES;
    if last / BLOCK_BYTES == end / BLOCK_BYTES {
        return at;
    }
    (at + BLOCK_BYTES - last % BLOCK_BYTES).next_multiple_of(SLOT_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_precede_their_entries_and_links_appear_once() {
        let node = |content| Node {
            mode: 0o100_644,
            uid: 0,
            gid: 0,
            rdev: 0,
            mtime: ferry_vfs::Timespec::default(),
            nlink: 1,
            xattrs: Vec::new(),
            content,
        };
        let named = |names: &[(&str, NodeId)]| {
            let name = |name: &str| ferry_vfs::Name::new(name.as_bytes()).expect("a name").to_buf();
            Content::Directory(names.iter().map(|(text, id)| (name(text), *id)).collect())
        };
        let contents = [
            named(&[("a", 1), ("b", 2), ("c", 3)]),
            named(&[("x", 3), ("y", 4)]),
            Content::None,
            Content::None,
            Content::None,
        ];
        let tree = Tree { nodes: contents.map(node).into(), links: Default::default() };
        assert_eq!(order(&tree), (vec![0, 1, 3, 4, 2], vec![0, 0, 0, 1, 1]));
        assert_eq!(links(&tree), [3, 2, 1, 2, 1]);
    }
}
