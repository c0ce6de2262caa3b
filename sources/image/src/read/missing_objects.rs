//! composefs's objects that are not all here: fetched when they are wanted, each proved before it has its name.
//!
//! On a server the objects of an image are one behind the other, in the order of [`file_objects`]. The image itself says what they are
//! called, how long they are and where they begin, so nothing else has to be fetched, and nothing has to be written down about what is here:
//! an object has its name when all of it is. What has come of a large one when the process ends is gone on with.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::Flaw;
use crate::format::digest::Digest;
use crate::format::image::Image;
use crate::read::fetch_locks::FetchLocks;
use crate::read::singleflight::{ObjectSet, Singleflight};
use crate::store::fetch::Missing;
use crate::store::file_objects::{FileObject, LARGE_BYTES, file_objects};
use crate::store::object_error::ObjectError;

/// The objects of an image, and how those that are not here are had.
#[derive(Debug)]
pub(crate) struct MissingObjects {
    pub missing: Missing,
    /// The image: the name that its objects have on the server.
    pub image: Digest,
    pub objects: Vec<FileObject>,
    /// Where each begins there, in bytes.
    pub begins: Vec<u64>,
    pub places: HashMap<Digest, usize>,
    pub here: Vec<AtomicBool>,
    pub flights: Singleflight,
    /// What other processes fetch.
    pub locks: FetchLocks,
    pub fetched_bytes: AtomicU64,
}

impl MissingObjects {
    pub(crate) fn new(image: &Image, store: &Path, missing: Missing) -> Result<Self, ObjectError> {
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
        let (flights, locks, fetched_bytes) = (Singleflight::default(), FetchLocks::of(store), AtomicU64::new(0));
        Ok(Self { missing, image: image.digest(), objects, begins, places, here, flights, locks, fetched_bytes })
    }

    /// Bytes of objects that were fetched.
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
