//! Extended attributes that several inodes have.

use std::cmp::Ordering;
use std::collections::HashMap;

use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use super::filter;
use crate::format::erofs::{XattrHeader, append_xattr, xattr_size};
use crate::format::error::{Error, Result};

/// The attributes of an inode: full names and values.
pub(super) type Xattrs = [(Vec<u8>, Vec<u8>)];

/// An attribute: full name and value.
type Pair<'a> = (&'a [u8], &'a [u8]);

/// Attributes that several inodes have.
pub(super) struct Shared<'a> {
    pub(super) bytes: Vec<u8>,
    offsets: HashMap<Pair<'a>, usize>,
}

impl<'a> Shared<'a> {
    /// Returns the shared attributes of these inodes in an order.
    pub(super) fn of(
        mut inodes: impl Iterator<Item = &'a Xattrs> + Clone,
        order: impl Fn(&Pair<'a>, &Pair<'a>) -> Ordering,
    ) -> Result<Self> {
        let mut counts: HashMap<Pair<'a>, usize> = HashMap::new();
        for (name, value) in inodes.clone().flatten() {
            *counts.entry((name, value)).or_default() += 1;
        }
        let mut several: Vec<Pair<'a>> =
            counts.into_iter().filter(|(_, count)| *count > 1).map(|(pair, _)| pair).collect();
        several.sort_unstable_by(order);
        let (mut bytes, mut offsets) = (Vec::new(), HashMap::with_capacity(several.len()));
        for (name, value) in several {
            offsets.insert((name, value), bytes.len());
            append_xattr(&mut bytes, name, value);
        }
        let shared = Self { bytes, offsets };
        // The number of an inode's shared attributes is a byte.
        let count = |xattrs: &Xattrs| xattrs.iter().filter(|xattr| shared.offset(xattr).is_some()).count();
        if inodes.any(|xattrs| xattrs.len() > 255 && count(xattrs) > 255) {
            let reason = "a file has more than 255 extended attributes that others have too".into();
            return Err(Error::CannotHold { path: "the tree".into(), reason });
        }
        Ok(shared)
    }

    fn offset(&self, (name, value): &(Vec<u8>, Vec<u8>)) -> Option<usize> {
        self.offsets.get(&(name.as_slice(), value.as_slice())).copied()
    }

    /// Returns the size of the attributes after an inode.
    pub(super) fn size(&self, xattrs: &Xattrs) -> usize {
        let one = |xattr: &(Vec<u8>, Vec<u8>)| match self.offset(xattr) {
            Some(_) => size_of::<U32>(),
            None => xattr_size(&xattr.0, &xattr.1),
        };
        if xattrs.is_empty() { 0 } else { size_of::<XattrHeader>() + xattrs.iter().map(one).sum::<usize>() }
    }

    /// Returns the attributes after an inode: header, numbers of shared ones, and own ones. The numbers are offsets in
    /// units of four bytes, where the shared attributes begin at `start`.
    pub(super) fn encode(&self, xattrs: &Xattrs, start: usize) -> Vec<u8> {
        if xattrs.is_empty() {
            return Vec::new();
        }
        let (mut shared, mut own) = (Vec::new(), Vec::new());
        for xattr in xattrs {
            match self.offset(xattr) {
                Some(at) => shared.push(U32::new(u32::try_from((start + at) / size_of::<U32>()).unwrap_or(u32::MAX))),
                None => append_xattr(&mut own, &xattr.0, &xattr.1),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_with_more_shared_attributes_than_its_header_counts_is_refused() {
        for (count, fits) in [(255, true), (256, false)] {
            let xattrs: Vec<_> =
                (0..count).map(|number| (format!("user.{number}").into_bytes(), b"v".to_vec())).collect();
            let inodes = [xattrs.as_slice(), xattrs.as_slice()];
            let shared = Shared::of(inodes.into_iter(), Pair::cmp);
            match shared {
                Ok(shared) => {
                    assert!(fits, "{count}");
                    assert_eq!(shared.encode(&xattrs, 0).len(), shared.size(&xattrs));
                }
                Err(error) => assert!(!fits && error.to_string().contains("more than 255"), "{count}: {error}"),
            }
        }
    }
}
