//! Directories: blocks of sorted entries, each followed by their names.

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U64};

use crate::format::erofs::{BLOCK_BYTES, Dirent, kind};
use crate::format::tree::{Content, NodeId, Tree};

const ENTRY_BYTES: usize = size_of::<Dirent>();

/// Returns the sorted names of a directory with their inodes, including `.` and `..`.
fn entries(tree: &Tree, id: NodeId, parent: NodeId) -> Vec<(&[u8], NodeId)> {
    let Content::Directory(names) = &tree.nodes[id].content else { return Vec::new() };
    let mut all: Vec<(&[u8], NodeId)> = Vec::with_capacity(names.len() + 2);
    all.extend([(&b"."[..], id), (&b".."[..], parent)]);
    all.extend(names.iter().map(|(name, id)| (name.as_name().as_bytes(), *id)));
    all.sort_unstable();
    all
}

/// Splits entries into parts that each fit into a block.
fn cut<'a, 'n>(mut entries: &'a [(&'n [u8], NodeId)]) -> impl Iterator<Item = &'a [(&'n [u8], NodeId)]> {
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |(name, _): &&(&[u8], NodeId)| {
            bytes += ENTRY_BYTES + name.len();
            bytes <= BLOCK_BYTES
        };
        let count = entries.iter().take_while(fits).count();
        let (now, later) = entries.split_at(count);
        entries = later;
        (count > 0).then_some(now)
    })
}

fn bytes_of(part: &[(&[u8], NodeId)]) -> usize {
    part.iter().map(|(name, _)| ENTRY_BYTES + name.len()).sum()
}

/// Returns the size of a directory in bytes.
pub(crate) fn size(tree: &Tree, id: NodeId) -> usize {
    let all = entries(tree, id, id);
    let mut parts = cut(&all).peekable();
    let mut size = 0;
    while let Some(part) = parts.next() {
        size += if parts.peek().is_some() { BLOCK_BYTES } else { bytes_of(part) };
    }
    size
}

/// Returns the bytes of a directory.
pub(crate) fn write(tree: &Tree, id: NodeId, parent: NodeId, nid: impl Fn(NodeId) -> u64) -> Vec<u8> {
    let all = entries(tree, id, parent);
    let mut bytes = Vec::with_capacity(bytes_of(&all).next_multiple_of(BLOCK_BYTES));
    for part in cut(&all) {
        bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
        let mut name_offset = part.len() * ENTRY_BYTES;
        for (name, id) in part {
            let entry = Dirent {
                nid: U64::new(nid(*id)),
                // Within a block.
                name_offset: U16::new(u16::try_from(name_offset).unwrap_or(u16::MAX)),
                kind: kind(tree.nodes[*id].kind()),
                ..Dirent::default()
            };
            bytes.extend_from_slice(entry.as_bytes());
            name_offset += name.len();
        }
        part.iter().for_each(|(name, _)| bytes.extend_from_slice(name));
    }
    bytes
}
