//! Extended attributes: those that several inodes have are stored once.

use std::collections::HashMap;

use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use crate::format::erofs::{XattrHeader, append_xattr};
use crate::format::identity;
use crate::format::tree::{NodeId, Tree};

/// The maximum number of shared attributes of an inode.
const SHARED_MAX: usize = u8::MAX as usize;

/// The encoded attributes of all inodes.
pub(super) struct Xattrs {
    shared: Vec<u8>,
    /// For each inode with attributes: header, numbers of shared ones, own ones.
    of_inodes: HashMap<NodeId, Vec<u8>>,
}

impl Xattrs {
    /// With `identities`, files in packs have room for theirs.
    pub(super) fn of(tree: &Tree, identities: bool) -> Self {
        let mut counts: HashMap<(&[u8], &[u8]), usize> = HashMap::new();
        for node in &tree.nodes {
            node.xattrs.iter().for_each(|(name, value)| *counts.entry((name, value)).or_default() += 1);
        }
        let mut shared = Vec::new();
        let mut numbers: HashMap<(&[u8], &[u8]), U32> = HashMap::new();
        let mut of_inodes = HashMap::new();
        for (id, node) in tree.nodes.iter().enumerate() {
            let has_identity = identities && node.content.is_in_packs();
            if node.xattrs.is_empty() && !has_identity {
                continue;
            }
            let (mut ids, mut own) = (Vec::new(), Vec::new());
            if has_identity {
                identity::append_empty(&mut own);
            }
            for (name, value) in &node.xattrs {
                let key = (name.as_slice(), value.as_slice());
                if counts[&key] > 1 && ids.len() < SHARED_MAX {
                    let number = numbers.entry(key).or_insert_with(|| {
                        let at = shared.len();
                        append_xattr(&mut shared, name, value);
                        // In units of four bytes.
                        U32::new(u32::try_from(at / 4).unwrap_or(u32::MAX))
                    });
                    ids.push(*number);
                } else {
                    append_xattr(&mut own, name, value);
                }
            }
            let count = u8::try_from(ids.len()).unwrap_or(u8::MAX);
            let header = XattrHeader { shared_count: count, ..XattrHeader::default() };
            let bytes = [header.as_bytes(), ids.as_bytes(), &own].concat();
            of_inodes.insert(id, bytes);
        }
        Self { shared, of_inodes }
    }

    /// Returns the shared attributes.
    pub(super) fn shared(&self) -> &[u8] {
        &self.shared
    }

    /// Returns what follows an inode.
    pub(super) fn of_inode(&self, id: NodeId) -> &[u8] {
        self.of_inodes.get(&id).map_or(&[], Vec::as_slice)
    }
}
