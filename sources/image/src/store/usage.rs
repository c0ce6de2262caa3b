//! The space of images in a store, and what they share.

use std::collections::{BTreeMap, BTreeSet};

use crate::format::chunk;
use crate::format::data::{Data, ENTRY_BYTES, PackRef, Run};
use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Error, Flaw, ImageResult, Result};
use crate::format::image::Image;
use crate::format::walk::each_file;
use crate::store::object_list::{self, StoredFile};
use crate::store::packs::Store;

/// The maximum number of chunks of a file (256 GiB), to limit memory. A larger file counts as one object.
const CHUNKS_MAX: u64 = 1 << 22;

/// The location of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectLocation {
    /// In a pack, at this block.
    Packed(Digest, u64),
    /// In a file of composefs's directory of objects.
    Object(Vec<u8>),
}

/// Returns the objects of an image, each once, with their lengths in bytes. Each chunk of a large file is one.
///
/// # Errors
///
/// The image is damaged.
pub fn object_locations(image: &Image) -> ImageResult<BTreeMap<ObjectLocation, u64>> {
    let mut found = BTreeMap::new();
    let (mut entries_left, mut chunks_left) = (image.bytes() / ENTRY_BYTES as u64, CHUNKS_MAX);
    each_file(image, &mut |inode, data| {
        match data {
            // An image's claims are limited by its size, or by memory.
            Data::Far { pack, block } if chunk::count(inode.bytes) > chunks_left => {
                found.insert(ObjectLocation::Packed(image.packs()[pack].name, block), inode.bytes);
            }
            data @ (Data::Far { .. } | Data::Chunks(_)) => {
                let count = chunk::count(inode.bytes);
                let left = if matches!(data, Data::Far { .. }) { &mut chunks_left } else { &mut entries_left };
                let crowded = Flaw { what: "more pieces than there is room for", offset: 0 };
                *left = left.checked_sub(count).ok_or(crowded)?;
                for piece in data.pieces(inode.bytes) {
                    let Run { pack, at, bytes } = piece?;
                    found.insert(ObjectLocation::Packed(image.packs()[pack].name, at / BLOCK_BYTES as u64), bytes);
                }
            }
            Data::Object { path: Some(path), .. } => {
                found.insert(ObjectLocation::Object(path.to_vec()), inode.bytes);
            }
            Data::Object { path: None, .. } | Data::Near(..) => {}
        }
        Ok(())
    })?;
    Ok(found)
}

/// A pack may have so many bytes that an image does not need: a request more would cost as much.
const UNNEEDED_BYTES_MAX: u64 = 1 << 20;

/// Returns the packs of which an image does not need more than so many percent: a machine that fetches the whole image fetches all of them.
/// They were made for other images in the same store, or for another order of the files.
///
/// # Errors
///
/// The image is damaged.
pub fn unneeded_packs(image: &Image, percent: u64) -> ImageResult<Vec<Digest>> {
    let mut needed = BTreeMap::<Digest, u64>::new();
    for (place, bytes) in object_locations(image)? {
        if let ObjectLocation::Packed(pack, _) = place {
            let needed = needed.entry(pack).or_default();
            *needed = needed.saturating_add(padded(bytes));
        }
    }
    let is_unneeded = |pack: &&PackRef| {
        let needed = needed.get(&pack.name).copied().unwrap_or_default();
        let all = pack.blocks.saturating_mul(BLOCK_BYTES as u64);
        all.saturating_sub(needed) > (all / 100).saturating_mul(percent).max(UNNEEDED_BYTES_MAX)
    };
    Ok(image.packs().iter().filter(is_unneeded).map(|pack| pack.name).collect())
}

/// The objects of a store, and how many images reference them.
#[derive(Debug, Default)]
pub struct Usage {
    /// For each object the number of images, and its length in bytes.
    objects: BTreeMap<ObjectLocation, (usize, u64)>,
}

/// The space of one image: sizes of objects, rounded up to whole blocks.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ImageUsage {
    /// Of all objects of the image.
    pub bytes: u64,
    /// Of those that no other image has.
    pub own_bytes: u64,
}

/// The totals of a store.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Total {
    /// Packs.
    pub packs: usize,
    /// Objects in separate files.
    pub objects: usize,
    /// Bytes in them.
    pub bytes: u64,
    /// Bytes of referenced objects.
    pub live_bytes: u64,
    /// Bytes of unreferenced packs and files, which `gc` removes.
    pub garbage_bytes: u64,
}

impl Usage {
    /// Adds an image's objects.
    pub fn add(&mut self, object_locations: &BTreeMap<ObjectLocation, u64>) {
        for (place, bytes) in object_locations {
            let (count, length) = self.objects.entry(place.clone()).or_insert((0, *bytes));
            *count += 1;
            // A damaged image may claim anything.
            *length = (*length).max(*bytes);
        }
    }

    /// Returns the space of an image that was added.
    pub fn of_image(&self, object_locations: &BTreeMap<ObjectLocation, u64>) -> ImageUsage {
        let mut usage = ImageUsage::default();
        for (place, bytes) in object_locations {
            let bytes = padded(*bytes);
            usage.bytes = usage.bytes.saturating_add(bytes);
            if self.objects.get(place).is_none_or(|(count, _)| *count < 2) {
                usage.own_bytes = usage.own_bytes.saturating_add(bytes);
            }
        }
        usage
    }

    /// Returns the space of the store.
    ///
    /// # Errors
    ///
    /// It cannot be read.
    pub fn total(&self, store: &Store) -> Result<Total> {
        let pack_of = |place: &ObjectLocation| match place {
            ObjectLocation::Packed(pack, _) => Some(*pack),
            ObjectLocation::Object(_) => None,
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
        for StoredFile { name, metadata, .. } in object_list::list(store.directory())? {
            let Some(name) = name else { continue };
            total.objects += 1;
            total.bytes = total.bytes.saturating_add(padded(metadata.len()));
            if !self.objects.contains_key(&ObjectLocation::Object(name)) {
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
