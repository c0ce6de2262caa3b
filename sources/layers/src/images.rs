//! Images in registries, whose manifests are remembered for a moment: engines look for each layer of an image.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferry_image::told;
use ferry_registry::{Client, ContainerImage, Options, Remote};
use ferry_vfs::sync::lock;

use crate::error::{Error, Result};
use crate::name::location;

/// How long a manifest is used again: a tag can name another image later.
const KEPT: Duration = Duration::from_secs(60);
/// How long it is used again if it has no such layer: engines look for each layer of an image, also for those that have no table.
const FRESH: Duration = Duration::from_secs(5);
/// How long a failure is, so that an unreachable registry takes the time of one lookup, and not that of each layer.
const FAILURE_KEPT: Duration = Duration::from_secs(5);
/// The maximum number of images that are remembered.
const IMAGES_MAX: usize = 64;

/// The images.
#[derive(Debug)]
pub(crate) struct Images {
    plain_http: bool,
    known: Mutex<HashMap<String, Arc<Known>>>,
}

/// An image, and what was found of it.
#[derive(Debug)]
struct Known {
    remote: Arc<Remote>,
    /// Locked while its manifest is fetched.
    found: Mutex<Option<Found>>,
}

#[derive(Debug)]
struct Found {
    at: Instant,
    image: std::result::Result<Arc<ContainerImage>, String>,
}

impl Images {
    pub(crate) fn new(plain_http: bool) -> Self {
        Self { plain_http, known: Mutex::default() }
    }

    fn known(&self, reference: &str) -> Result<Arc<Known>> {
        let mut all = lock(&self.known);
        if let Some(known) = all.get(reference) {
            return Ok(Arc::clone(known));
        }
        if all.len() >= IMAGES_MAX {
            // Layers that are open keep their own.
            all.clear();
        }
        let none = || ferry_registry::Error::NoImage(reference.to_owned());
        let client = Client::new(Options { plain_http: self.plain_http, ..Options::default() });
        let remote = Arc::new(Remote::open(&location(reference).ok_or_else(none)?, client)?);
        let known = Arc::new(Known { remote, found: Mutex::default() });
        all.insert(reference.to_owned(), Arc::clone(&known));
        Ok(known)
    }

    /// Returns the registry of an image. Nothing is requested.
    pub(crate) fn remote(&self, reference: &str) -> Result<Arc<Remote>> {
        Ok(Arc::clone(&self.known(reference)?.remote))
    }

    /// Returns an image, which fits if there is such a one, and fetches its manifest if the one that is remembered does not.
    pub(crate) fn find(&self, reference: &str, fits: impl Fn(&ContainerImage) -> bool) -> Result<Arc<ContainerImage>> {
        let known = self.known(reference)?;
        let mut found = lock(&known.found);
        match &*found {
            Some(Found { at, image: Ok(image) }) if at.elapsed() < FRESH || at.elapsed() < KEPT && fits(image) => {
                return Ok(Arc::clone(image));
            }
            Some(Found { at, image: Err(reason) }) if at.elapsed() < FAILURE_KEPT => {
                return Err(Error::Recent(reason.clone()));
            }
            _ => {}
        }
        let fetched = ContainerImage::find(&known.remote).and_then(|image| {
            image.map(Arc::new).ok_or_else(|| ferry_registry::Error::NoImage(format!("{reference}, as a container's")))
        });
        let image = fetched.as_ref().map(Arc::clone).map_err(|error| told(error));
        *found = Some(Found { at: Instant::now(), image });
        Ok(fetched?)
    }
}
