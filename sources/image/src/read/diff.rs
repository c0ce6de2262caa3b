//! Compares two images.

use std::collections::{BTreeMap, HashMap};

use ferry_vfs::FileType;

use crate::format::data::{Data, Run};
use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Flaw, ImageResult, Result};
use crate::format::image::{Image, Inode, Nid};
use crate::format::walk::{DEPTH_MAX, NAME_BYTES_MIN, Step};
use crate::store::packs::Store;

/// The kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It is in the newer image only.
    Added,
    /// It is in the older image only.
    Removed,
    /// It is in both, but not the same.
    Changed,
}

/// A path that differs between two images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The path, from `/`.
    pub path: Vec<u8>,
    /// What became of it.
    pub kind: Kind,
    /// What changed: `type`, `content`, `mode`, `owner`, `time`, `attributes`.
    pub what: Vec<&'static str>,
}

/// The digests of objects, by location.
#[derive(Debug, Default)]
pub struct Digests(HashMap<(Digest, u64), (u64, Digest)>);

impl Digests {
    /// Adds those of an image's packs.
    ///
    /// # Errors
    ///
    /// A pack's index is missing or damaged.
    pub fn add(&mut self, image: &Image, store: &Store) -> Result<()> {
        for pack in image.packs() {
            let objects = store.index(pack.name)?.objects;
            self.0.extend(objects.iter().map(|object| ((pack.name, object.block), (object.bytes, object.digest))));
        }
        Ok(())
    }
}

/// Compares two images; calls `each` with every change, in the order of paths. If a directory was added or removed,
/// everything in it is a change, too.
///
/// # Errors
///
/// An image is damaged, or the error of `each`.
pub fn diff<E: From<Flaw>>(
    old: &Image,
    new: &Image,
    digests: &Digests,
    each: &mut dyn FnMut(Change) -> Result<(), E>,
) -> Result<(), E> {
    let mut met = 0;
    let met_max = (old.bytes() + new.bytes()) / NAME_BYTES_MIN;
    let mut left = vec![(Step::top(b"/"), Some(old.root()), Some(new.root()))];
    while let Some((step, before, after)) = left.pop() {
        let a = before.map(|nid| old.inode(nid)).transpose()?;
        let b = after.map(|nid| new.inode(nid)).transpose()?;
        let change = match (&a, &b) {
            (Some(a), Some(b)) => compare((old, a), (new, b), digests)?,
            (None, _) => Some((Kind::Added, Vec::new())),
            (_, None) => Some((Kind::Removed, Vec::new())),
        };
        if let Some((kind, what)) = change {
            each(Change { path: step.path(), kind, what })?;
        }
        let mut names: BTreeMap<&[u8], (Option<Nid>, Option<Nid>)> = BTreeMap::new();
        children(old, a.as_ref(), &mut |name, nid| names.entry(name).or_default().0 = Some(nid))?;
        children(new, b.as_ref(), &mut |name, nid| names.entry(name).or_default().1 = Some(nid))?;
        met += names.len() as u64;
        if met > met_max || (step.depth == DEPTH_MAX && !names.is_empty()) {
            return Err(
                Flaw { what: "directories in each other, or more names than there is room for", offset: 0 }.into()
            );
        }
        left.extend(names.into_iter().rev().map(|(name, (a, b))| (step.below(name), a, b)));
    }
    Ok(())
}

fn children<'a>(image: &'a Image, dir: Option<&Inode>, each: &mut dyn FnMut(&'a [u8], Nid)) -> ImageResult<()> {
    let Some(dir) = dir.filter(|dir| dir.kind() == FileType::Directory) else { return Ok(()) };
    for entry in image.entries(dir, 0)? {
        let entry = entry?;
        if !matches!(entry.name, b"." | b"..") {
            each(entry.name, entry.nid);
        }
    }
    Ok(())
}

/// Returns what differs between two inodes, except link counts, which follow from names.
fn compare(
    a: (&Image, &Inode),
    b: (&Image, &Inode),
    digests: &Digests,
) -> ImageResult<Option<(Kind, Vec<&'static str>)>> {
    let ((old, x), (new, y)) = (a, b);
    let mut what = Vec::new();
    if x.kind() != y.kind() {
        what.push("type");
    } else if !same_content(a, b, digests)? {
        what.push("content");
    }
    if x.mode & 0o7777 != y.mode & 0o7777 {
        what.push("mode");
    }
    if (x.uid, x.gid) != (y.uid, y.gid) {
        what.push("owner");
    }
    if x.mtime != y.mtime {
        what.push("time");
    }
    let sorted = |image: &Image, inode: &Inode| -> ImageResult<BTreeMap<Vec<u8>, Vec<u8>>> {
        Ok(image.xattrs(inode)?.into_iter().map(|(name, value)| (name, value.to_vec())).collect())
    };
    if sorted(old, x)? != sorted(new, y)? {
        what.push("attributes");
    }
    Ok((!what.is_empty()).then_some((Kind::Changed, what)))
}

fn same_content((old, x): (&Image, &Inode), (new, y): (&Image, &Inode), digests: &Digests) -> ImageResult<bool> {
    if x.kind() != FileType::RegularFile {
        let target = |image: &Image, inode: &Inode| match inode.kind() {
            FileType::Symlink => image.link(inode),
            _ => Ok(Vec::new()),
        };
        return Ok(x.rdev() == y.rdev() && target(old, x)? == target(new, y)?);
    }
    if x.bytes != y.bytes {
        return Ok(false);
    }
    Ok(match (old.data(x)?, new.data(y)?) {
        (Data::Near(a, b), Data::Near(c, d)) => [a, b].concat() == [c, d].concat(),
        (Data::Object { path: a, digest: c }, Data::Object { path: b, digest: d }) => c == d && (c.is_some() || a == b),
        (Data::Near(..) | Data::Object { .. }, _) | (_, Data::Near(..) | Data::Object { .. }) => false,
        // Where a file is stored follows from its length.
        (Data::Far { pack: a, block: m }, Data::Far { pack: b, block: n })
            if (old.packs()[a].name, m) == (new.packs()[b].name, n) =>
        {
            true
        }
        (before, after) => {
            for (a, b) in before.pieces(x.bytes).zip(after.pieces(y.bytes)) {
                let (a, b) = (a?, b?);
                let place = |image: &Image, run: Run| (image.packs()[run.pack].name, run.at / BLOCK_BYTES as u64);
                let (old, new) = (place(old, a), place(new, b));
                let digest =
                    |place| digests.0.get(&place).filter(|(bytes, _)| *bytes == a.bytes).map(|(_, digest)| *digest);
                // The same location has the same bytes; another one may have them, too.
                if old != new && !matches!((digest(old), digest(new)), (Some(a), Some(b)) if a == b) {
                    return Ok(false);
                }
            }
            true
        }
    })
}
