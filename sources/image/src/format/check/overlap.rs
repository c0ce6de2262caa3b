//! Finds parts of the image or of a pack that two inodes both claim.
//!
//! Files share chunks in packs on purpose, so whole chunks may be claimed repeatedly; a claim of a part of another
//! file's chunk is damage. In the image itself, only attributes and the blocks of the same file's bytes may be shared.

use std::ops::Range;
use std::rc::Rc;

use crate::format::chunk::CHUNK_BYTES;
use crate::format::data::{PackRef, Run};
use crate::format::erofs::BLOCK_BYTES;
use crate::format::image::Image;
use crate::format::walk::Step;

/// All claims and their owners.
#[derive(Debug, Default)]
pub(super) struct Claims<'a> {
    owners: Vec<Rc<Step<'a>>>,
    near: Vec<ImageClaim>,
    far: Vec<PackClaim>,
}

/// Bytes of the image.
#[derive(Debug, Clone, Copy)]
struct ImageClaim {
    from: usize,
    to: usize,
    owner: u32,
    /// Whether others may claim the same.
    is_shared: bool,
}

/// Bytes of a pack: consecutive chunks; the last may be shorter. Compact: an image can have a claim per four bytes.
#[derive(Debug, Clone, Copy)]
struct PackClaim {
    /// The first block in the address space of the image.
    block: u32,
    owner: u32,
    bytes: u64,
}

impl PackClaim {
    fn begin(&self) -> u64 {
        u64::from(self.block) * BLOCK_BYTES as u64
    }

    fn end(&self) -> u64 {
        self.begin().saturating_add(self.bytes)
    }

    /// Returns whether a claim that begins or continues here is aligned with the chunks of this one.
    fn is_cut_at(&self, at: u64) -> bool {
        (at - self.begin()).is_multiple_of(CHUNK_BYTES as u64)
    }
}

/// Two overlapping claims.
pub(super) struct Overlap<'a> {
    /// The one that begins later.
    pub of: Rc<Step<'a>>,
    pub with: Rc<Step<'a>>,
    pub place: String,
}

impl<'a> Claims<'a> {
    /// Sets the owner of the next claims.
    pub(super) fn owner(&mut self, path: &Rc<Step<'a>>) {
        self.owners.push(Rc::clone(path));
    }

    fn last(&self) -> u32 {
        // An image of 16 GiB has room for 2^29 inodes.
        u32::try_from(self.owners.len().saturating_sub(1)).unwrap_or(u32::MAX)
    }

    pub(super) fn claim_image(&mut self, bytes: Range<usize>, is_shared: bool) {
        if !bytes.is_empty() {
            self.near.push(ImageClaim { from: bytes.start, to: bytes.end, owner: self.last(), is_shared });
        }
    }

    /// Claims bytes of a pack.
    pub(super) fn claim_pack(&mut self, packs: &[PackRef], run: &Run) {
        let block = packs[run.pack].first_block + run.at / BLOCK_BYTES as u64;
        if run.bytes > 0 {
            let block = u32::try_from(block).unwrap_or(u32::MAX);
            self.far.push(PackClaim { block, owner: self.last(), bytes: run.bytes });
        }
    }

    /// Returns what is claimed more than once, up to `most` overlaps.
    pub(super) fn overlaps(mut self, image: &Image, most: usize) -> Vec<Overlap<'a>> {
        self.near.sort_unstable_by_key(|claim| (claim.from, claim.to, claim.owner));
        self.far.sort_unstable_by_key(|claim| (claim.block, claim.bytes, claim.owner));
        self.image_overlaps().chain(self.pack_overlaps(image)).take(most).collect()
    }

    fn overlap(&self, of: u32, with: u32, place: String) -> Overlap<'a> {
        let path = |owner: u32| Rc::clone(&self.owners[owner as usize]);
        Overlap { of: path(of), with: path(with), place }
    }

    fn image_overlaps(&self) -> impl Iterator<Item = Overlap<'a>> {
        let mut widest: Option<ImageClaim> = None;
        self.near.iter().filter_map(move |claim| {
            // The earlier claim that ends last.
            let before = widest.replace(widest.filter(|before| before.to >= claim.to).unwrap_or(*claim))?;
            let is_same = before.is_shared && claim.is_shared && (before.from, before.to) == (claim.from, claim.to);
            let is_overlap = claim.from < before.to && !is_same;
            is_overlap.then(|| self.overlap(claim.owner, before.owner, format!("byte {} of the image", claim.from)))
        })
    }

    fn pack_overlaps(&self, image: &Image) -> impl Iterator<Item = Overlap<'a>> {
        let mut widest: Option<PackClaim> = None;
        self.far.iter().filter_map(move |claim| {
            let before = widest.replace(widest.filter(|before| before.end() >= claim.end()).unwrap_or(*claim))?;
            // The end of a chunk's last block belongs to no other one.
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
