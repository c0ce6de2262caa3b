//! Which kinds of extended attributes an image has that does not say so: clients that are told once that there are none ask no more, where
//! `ls -l` asks for two with each file.

use super::Image;
use crate::erofs::{FLAT_NO_KIND, denied_by};
use crate::error::Flaw;
use crate::walk::walk;

/// So many names are looked at, which takes a tenth of a second.
const NAMES_MAX: usize = 1 << 20;

/// Nothing is known.
struct Unknown;

impl From<Flaw> for Unknown {
    fn from(_: Flaw) -> Self {
        Self
    }
}

/// Which kinds no inode has (`FLAT_NO_*`): none that is known of, if the image is damaged or has too many names.
pub(super) fn absent(image: &Image) -> u8 {
    let (mut absent, mut names) = (FLAT_NO_KIND, 0);
    let walked = walk(image, image.root(), b"/", |_, inode| {
        names += 1;
        for (name, _) in image.xattrs(inode)? {
            absent &= !denied_by(&name);
        }
        if absent == 0 || names > NAMES_MAX { Err(Unknown) } else { Ok(()) }
    });
    walked.map_or(0, |()| absent)
}
