//! Which kinds of extended attributes an image has that does not say so: clients that are told once that there are none ask no more, where
//! `ls -l` asks for two with each file.

use std::collections::HashSet;

use ferry_vfs::FileType;

use super::Image;
use crate::format::erofs::{FLAT_NO_KIND, denied_by};

/// So many names and attributes are looked at, however many a hostile image has: it is done while a client waits.
const LOOKS_MAX: usize = 1 << 20;

/// Which kinds no inode has (`FLAT_NO_*`): none that is known of, if the image is damaged or has too many names.
pub(super) fn absent(image: &Image) -> u8 {
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
