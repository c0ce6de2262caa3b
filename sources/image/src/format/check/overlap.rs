//! What two inodes of an image both claim: bytes of the image itself, or of a pack.
//!
//! Pieces that files share are in both, which is the point of packs; so whole pieces may be claimed as often as one likes, and only what
//! is a part of another's piece is damage. Of the image itself nothing is shared but attributes and the blocks of the same file's bytes.

use std::ops::Range;
use std::rc::Rc;

use crate::format::chunk::CHUNK_BYTES;
use crate::format::data::{PackRef, Run};
use crate::format::erofs::BLOCK_BYTES;
use crate::format::image::Image;
use crate::format::walk::Step;

/// Everything that is claimed, and by whom.
#[derive(Debug, Default)]
pub(super) struct Claims<'a> {
    owners: Vec<Rc<Step<'a>>>,
    near: Vec<Near>,
    far: Vec<Far>,
}

/// Bytes of the image.
#[derive(Debug, Clone, Copy)]
struct Near {
    from: usize,
    to: usize,
    owner: u32,
    /// Whether others may have the same.
    is_shared: bool,
}

/// Bytes of a pack: pieces one behind the other, of which only the last may be shorter than others. Small, for an image may tell of
/// one in four bytes.
#[derive(Debug, Clone, Copy)]
struct Far {
    /// The first block in the address space of the image.
    block: u32,
    owner: u32,
    bytes: u64,
}

impl Far {
    fn begin(&self) -> u64 {
        u64::from(self.block) * BLOCK_BYTES as u64
    }

    fn end(&self) -> u64 {
        self.begin().saturating_add(self.bytes)
    }

    /// Whether whoever begins with a piece of this, or goes on behind it, does so at a piece's border.
    fn is_cut_at(&self, at: u64) -> bool {
        (at - self.begin()).is_multiple_of(CHUNK_BYTES as u64)
    }
}

/// Two that claim the same, and where.
pub(super) struct Overlap<'a> {
    /// The one that begins later.
    pub of: Rc<Step<'a>>,
    pub with: Rc<Step<'a>>,
    pub place: String,
}

impl<'a> Claims<'a> {
    /// The next claims are of this path.
    pub(super) fn owner(&mut self, path: &Rc<Step<'a>>) {
        self.owners.push(Rc::clone(path));
    }

    fn last(&self) -> u32 {
        // An image of 16 GiB has room for 2^29 inodes.
        u32::try_from(self.owners.len().saturating_sub(1)).unwrap_or(u32::MAX)
    }

    /// Claims bytes of the image.
    pub(super) fn near(&mut self, bytes: Range<usize>, is_shared: bool) {
        if !bytes.is_empty() {
            self.near.push(Near { from: bytes.start, to: bytes.end, owner: self.last(), is_shared });
        }
    }

    /// Claims bytes of a pack.
    pub(super) fn far(&mut self, packs: &[PackRef], run: &Run) {
        let block = packs[run.pack].first_block + run.at / BLOCK_BYTES as u64;
        if run.bytes > 0 {
            let block = u32::try_from(block).unwrap_or(u32::MAX);
            self.far.push(Far { block, owner: self.last(), bytes: run.bytes });
        }
    }

    /// What is claimed more than once, as many as are wanted.
    pub(super) fn overlaps(mut self, image: &Image, most: usize) -> Vec<Overlap<'a>> {
        self.near.sort_unstable_by_key(|claim| (claim.from, claim.to, claim.owner));
        self.far.sort_unstable_by_key(|claim| (claim.block, claim.bytes, claim.owner));
        self.near_overlaps().chain(self.far_overlaps(image)).take(most).collect()
    }

    fn overlap(&self, of: u32, with: u32, place: String) -> Overlap<'a> {
        let path = |owner: u32| Rc::clone(&self.owners[owner as usize]);
        Overlap { of: path(of), with: path(with), place }
    }

    fn near_overlaps(&self) -> impl Iterator<Item = Overlap<'a>> {
        let mut widest: Option<Near> = None;
        self.near.iter().filter_map(move |claim| {
            // Of those before, the one that ends last; all others end before it.
            let before = widest.replace(widest.filter(|before| before.to >= claim.to).unwrap_or(*claim))?;
            let is_same = before.is_shared && claim.is_shared && (before.from, before.to) == (claim.from, claim.to);
            let is_overlap = claim.from < before.to && !is_same;
            is_overlap.then(|| self.overlap(claim.owner, before.owner, format!("byte {} of the image", claim.from)))
        })
    }

    fn far_overlaps(&self, image: &Image) -> impl Iterator<Item = Overlap<'a>> {
        let mut widest: Option<Far> = None;
        self.far.iter().filter_map(move |claim| {
            let before = widest.replace(widest.filter(|before| before.end() >= claim.end()).unwrap_or(*claim))?;
            // The end of a piece's last block is nobody else's.
            if claim.begin() >= before.end().next_multiple_of(BLOCK_BYTES as u64) {
                return None;
            }
            let ends_apart = match claim.end().cmp(&before.end()) {
                std::cmp::Ordering::Less => !claim.is_cut_at(claim.end()),
                std::cmp::Ordering::Equal => false,
                std::cmp::Ordering::Greater => !before.is_cut_at(before.end()),
            };
            (ends_apart || !before.is_cut_at(claim.begin())).then(|| {
                let block = u64::from(claim.block);
                let pack = image.packs().iter().find(|pack| pack.first_block <= block && block < pack.end());
                let place = pack.map_or_else(String::new, |pack| {
                    format!("block {} of the pack {}", block - pack.first_block, pack.name)
                });
                self.overlap(claim.owner, before.owner, place)
            })
        })
    }
}
