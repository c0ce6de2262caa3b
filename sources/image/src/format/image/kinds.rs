//! Determines which kinds of extended attributes an image lacks. A client that is told so once stops asking, while `ls
//! -l` asks for two attributes per file.

use std::collections::HashSet;

use ferry_vfs::FileType;

use super::Image;
use crate::format::erofs::{FLAT_NO_ACLS, FLAT_NO_KIND, FLAT_NO_LABELS, FLAT_NO_XATTRS, FLAT_VOLUME, denied_by};

/// The maximum number of names and attributes that are read of an untrusted image while a client waits.
const LOOKS_MAX: usize = 1 << 20;

impl Image {
    /// Returns whether an inode may have extended attributes.
    pub fn may_have_xattrs(&self) -> bool {
        !self.lacks(FLAT_NO_XATTRS)
    }

    /// Returns whether an inode may have an ACL; if not, mounts are faster when the kernel is told.
    pub fn may_have_acls(&self) -> bool {
        !self.lacks(FLAT_NO_XATTRS | FLAT_NO_ACLS)
    }

    /// Returns whether an inode may have an SELinux label.
    pub fn may_have_labels(&self) -> bool {
        !self.lacks(FLAT_NO_XATTRS | FLAT_NO_LABELS)
    }

    /// Whether the image says that no inode has such an attribute. Readers then hide it.
    pub(crate) fn denies(&self, xattr: &[u8]) -> bool {
        let volume = &self.header.volume;
        volume.starts_with(FLAT_VOLUME) && volume[15] & denied_by(xattr) != 0
    }

    /// Returns whether no inode has an attribute of these kinds. Flat images say so; others are searched once.
    fn lacks(&self, kinds: u8) -> bool {
        let volume = &self.header.volume;
        let absent = self.absent.get_or_init(|| match volume.starts_with(FLAT_VOLUME) {
            true => volume[15],
            false => absent(self),
        });
        absent & kinds != 0
    }
}

/// Returns the kinds that no inode has (`FLAT_NO_*`); none if the image is damaged or has too many names.
fn absent(image: &Image) -> u8 {
    look(image).unwrap_or(0)
}

fn look(image: &Image) -> Option<u8> {
    let (mut absent, mut looks) = (FLAT_NO_KIND, 0);
    let (mut entered, mut left) = (HashSet::from([image.root()]), vec![image.root()]);
    while let Some(dir) = left.pop() {
        // The directory itself is one of its entries.
        for entry in image.entries(&image.inode(dir).ok()?, 0).ok()? {
            let inode = image.inode(entry.ok()?.nid).ok()?;
            let xattrs = image.xattrs(&inode).ok()?;
            absent &= xattrs.iter().fold(FLAT_NO_KIND, |absent, (name, _)| absent & !denied_by(name));
            looks += 1 + xattrs.len();
            if absent == 0 || looks > LOOKS_MAX {
                return None;
            }
            if inode.kind() == FileType::Directory && entered.insert(inode.nid) {
                left.push(inode.nid);
            }
        }
    }
    Some(absent)
}
