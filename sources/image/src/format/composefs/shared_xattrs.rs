//! Extended attributes that several inodes have.

use std::collections::HashMap;

use zerocopy::little_endian::U32;

use crate::format::erofs::{XattrHeader, append_xattr};
use crate::format::error::{Error, Result};
use crate::format::tree::Tree;

/// An attribute: full name and value.
type Pair<'a> = (&'a [u8], &'a [u8]);

/// Attributes that several inodes have, by name, length and bytes of the value, the greatest first.
pub(super) struct Shared<'a> {
    pub(super) bytes: Vec<u8>,
    offsets: HashMap<Pair<'a>, usize>,
}

impl<'a> Shared<'a> {
    pub(super) fn of(tree: &'a Tree) -> Result<Self> {
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

    pub(super) fn offset(&self, name: &[u8], value: &[u8]) -> Option<usize> {
        self.offsets.get(&(name, value)).copied()
    }

    /// The size of what follows an inode that has these attributes.
    pub(super) fn size(&self, xattrs: &[(Vec<u8>, Vec<u8>)]) -> usize {
        let one = |(name, value): &(Vec<u8>, Vec<u8>)| match self.offset(name, value) {
            Some(_) => size_of::<U32>(),
            None => crate::format::erofs::xattr_size(name, value),
        };
        if xattrs.is_empty() { 0 } else { size_of::<XattrHeader>() + xattrs.iter().map(one).sum::<usize>() }
    }
}
