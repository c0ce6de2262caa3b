//! What images take in a store, and what they share.

use std::collections::{BTreeMap, BTreeSet};

use crate::format::chunk;
use crate::format::data::{Data, ENTRY_BYTES, Run};
use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Checked, Error, Flaw, Result};
use crate::format::image::Image;
use crate::format::walk::each_file;
use crate::store::object_list::{self, Stored};
use crate::store::packs::Store;

/// The most pieces of files in one run that are told apart, 256 GiB: memory is to be bounded. Beyond that a file is one object.
const PIECES_MAX: u64 = 1 << 22;

/// Where an object is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// In a pack, from this block on.
    Packed(Digest, u64),
    /// In a file of its own below composefs's folder of objects.
    Object(Vec<u8>),
}

/// The objects of an image, each once, with their lengths in bytes. Of a larger file each piece is one.
///
/// # Errors
/// The image is damaged.
pub fn places(image: &Image) -> Checked<BTreeMap<Place, u64>> {
    let mut found = BTreeMap::new();
    let (mut entries_left, mut pieces_left) = (image.bytes() / ENTRY_BYTES as u64, PIECES_MAX);
    each_file(image, &mut |inode, data| {
        match data {
            // What an image claims is bounded by what it has room for, or by memory.
            Data::Far { pack, block } if chunk::count(inode.bytes) > pieces_left => {
                found.insert(Place::Packed(image.packs()[pack].name, block), inode.bytes);
            }
            data @ (Data::Far { .. } | Data::Chunks(_)) => {
                let count = chunk::count(inode.bytes);
                let left = if matches!(data, Data::Far { .. }) { &mut pieces_left } else { &mut entries_left };
                let crowded = Flaw { what: "more pieces than there is room for", offset: 0 };
                *left = left.checked_sub(count).ok_or(crowded)?;
                for piece in data.pieces(inode.bytes) {
                    let Run { pack, at, bytes } = piece?;
                    found.insert(Place::Packed(image.packs()[pack].name, at / BLOCK_BYTES as u64), bytes);
                }
            }
            Data::Object { path: Some(path), .. } => {
                found.insert(Place::Object(path.to_vec()), inode.bytes);
            }
            Data::Object { path: None, .. } | Data::Near(..) => {}
        }
        Ok(())
    })?;
    Ok(found)
}

/// What a store holds, and for how many images.
#[derive(Debug, Default)]
pub struct Usage {
    /// For each object how many of the images need it, and its length in bytes.
    objects: BTreeMap<Place, (usize, u64)>,
}

/// Bytes of objects, each counted with the blocks that it fills.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Of all objects of the image.
    pub bytes: u64,
    /// Of those that no other image has.
    pub own_bytes: u64,
}

/// All of a store.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Total {
    /// Packs.
    pub packs: usize,
    /// Objects that are files of their own.
    pub objects: usize,
    /// Bytes in them.
    pub bytes: u64,
    /// Bytes of objects that images need.
    pub live_bytes: u64,
    /// Bytes of packs and files that no image needs: `gc` removes them.
    pub garbage_bytes: u64,
}

impl Usage {
    /// Adds an image's objects.
    pub fn add(&mut self, places: &BTreeMap<Place, u64>) {
        for (place, bytes) in places {
            let (count, length) = self.objects.entry(place.clone()).or_insert((0, *bytes));
            *count += 1;
            // A damaged image may claim anything.
            *length = (*length).max(*bytes);
        }
    }

    /// What an image that was added takes.
    pub fn share(&self, places: &BTreeMap<Place, u64>) -> Share {
        let mut share = Share::default();
        for (place, bytes) in places {
            let bytes = padded(*bytes);
            share.bytes = share.bytes.saturating_add(bytes);
            if self.objects.get(place).is_none_or(|(count, _)| *count < 2) {
                share.own_bytes = share.own_bytes.saturating_add(bytes);
            }
        }
        share
    }

    /// What the store takes.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn total(&self, store: &Store) -> Result<Total> {
        let pack_of = |place: &Place| match place {
            Place::Packed(pack, _) => Some(*pack),
            Place::Object(_) => None,
        };
        let used: BTreeSet<Digest> = self.objects.keys().filter_map(pack_of).collect();
        let mut total = Total::default();
        for pack in store.packs()? {
            let index = match store.index(pack) {
                Ok(index) => index,
                // It has just been removed.
                Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            let bytes = index.blocks.saturating_mul(BLOCK_BYTES as u64);
            total.packs += 1;
            total.bytes = total.bytes.saturating_add(bytes);
            if !used.contains(&pack) {
                total.garbage_bytes = total.garbage_bytes.saturating_add(bytes);
            }
        }
        for Stored { name, metadata, .. } in object_list::list(store.folder())? {
            let Some(name) = name else { continue };
            total.objects += 1;
            total.bytes = total.bytes.saturating_add(padded(metadata.len()));
            if !self.objects.contains_key(&Place::Object(name)) {
                total.garbage_bytes = total.garbage_bytes.saturating_add(padded(metadata.len()));
            }
        }
        let live = self.objects.values().map(|(_, bytes)| padded(*bytes));
        total.live_bytes = live.fold(0, u64::saturating_add);
        Ok(total)
    }
}

fn padded(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK_BYTES as u64).saturating_mul(BLOCK_BYTES as u64)
}
