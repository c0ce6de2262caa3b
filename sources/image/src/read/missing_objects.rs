//! Missing objects of composefs: fetched on demand, each verified before it gets its name.
//!
//! On a server the objects of an image are concatenated in the order of [`file_objects`]. The image has their names,
//! lengths and so their offsets; no index is needed, nor a record of what is available: a complete object has its name.
//! The received part of a large object is resumed.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::Flaw;
use crate::format::digest::Digest;
use crate::format::image::Image;
use crate::read::fetch_locks::FetchLocks;
use crate::read::singleflight::{ObjectSet, Singleflight};
use crate::store::fetch::FetchOptions;
use crate::store::file_objects::{FileObject, LARGE_BYTES, file_objects};
use crate::store::object_error::ObjectError;

/// The objects of an image, and how missing ones are fetched.
#[derive(Debug)]
pub(crate) struct MissingObjects {
    pub missing: FetchOptions,
    /// The image: the name of its objects on the server.
    pub image: Digest,
    pub objects: Vec<FileObject>,
    /// The offset of each object there.
    pub begins: Vec<u64>,
    pub places: HashMap<Digest, usize>,
    pub here: Vec<AtomicBool>,
    pub flights: Singleflight,
    /// Fetches of other processes.
    pub locks: FetchLocks,
    pub fetched_bytes: AtomicU64,
    /// Bytes of objects that the store had already.
    pub deduplicated_bytes: AtomicU64,
}

impl MissingObjects {
    pub(crate) fn new(image: &Image, store: &Path, missing: FetchOptions) -> Result<Self, ObjectError> {
        let objects = file_objects(image)?;
        let mut begins = Vec::with_capacity(objects.len());
        let mut end = 0_u64;
        for object in &objects {
            begins.push(end);
            let flaw = Flaw { what: "objects that are too long", offset: 0 };
            end = end.checked_add(object.bytes).ok_or(flaw)?;
        }
        let places = objects.iter().enumerate().map(|(at, object)| (object.digest, at)).collect();
        let here = objects.iter().map(|_| AtomicBool::new(false)).collect();
        let (flights, locks, image) = (Singleflight::default(), FetchLocks::of(store), image.digest());
        let (fetched_bytes, deduplicated_bytes) = Default::default();
        Ok(Self { missing, image, objects, begins, places, here, flights, locks, fetched_bytes, deduplicated_bytes })
    }

    /// Returns the bytes of objects that were fetched.
    pub(crate) fn fetched_bytes(&self) -> u64 {
        self.fetched_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn is_large(&self, at: usize) -> bool {
        self.objects[at].bytes >= LARGE_BYTES
    }
}

impl ObjectSet for MissingObjects {
    fn is_here(&self, at: usize) -> bool {
        self.here[at].load(Ordering::Acquire)
    }

    fn bytes(&self, at: usize) -> u64 {
        self.objects[at].bytes
    }
}
