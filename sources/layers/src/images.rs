//! Images in registries. Their manifests are cached for a short time, because engines look up each layer of an image.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferry_image::error_chain;
use ferry_registry::{Client, ContainerImage, Options, Remote};
use ferry_vfs::sync::lock;

use crate::error::{Error, Result};
use crate::name::location;

/// The lifetime of a cached manifest: a tag can name another image later.
const MANIFEST_LIFETIME: Duration = Duration::from_secs(60);
/// Its lifetime for layers that it lacks: engines also look up layers without a table of contents.
const MISSING_LAYER_LIFETIME: Duration = Duration::from_secs(5);
/// The lifetime of a cached failure, so that an unreachable registry delays one lookup instead of one per layer.
const FAILURE_LIFETIME: Duration = Duration::from_secs(5);
/// The maximum number of cached images.
const IMAGES_MAX: usize = 64;

/// The images.
#[derive(Debug)]
pub(crate) struct Images {
    plain_http: bool,
    known: Mutex<HashMap<String, Arc<CachedImage>>>,
}

/// A cached image.
#[derive(Debug)]
struct CachedImage {
    remote: Arc<Remote>,
    /// Locked while its manifest is fetched.
    found: Mutex<Option<CachedManifest>>,
}

#[derive(Debug)]
struct CachedManifest {
    at: Instant,
    image: std::result::Result<Arc<ContainerImage>, String>,
}

impl Images {
    pub(crate) fn new(plain_http: bool) -> Self {
        Self { plain_http, known: Mutex::default() }
    }

    fn known(&self, reference: &str) -> Result<Arc<CachedImage>> {
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
        let known = Arc::new(CachedImage { remote, found: Mutex::default() });
        all.insert(reference.to_owned(), Arc::clone(&known));
        Ok(known)
    }

    /// Returns the registry of an image. Nothing is requested.
    pub(crate) fn remote(&self, reference: &str) -> Result<Arc<Remote>> {
        Ok(Arc::clone(&self.known(reference)?.remote))
    }

    /// Returns an image that `fits`, if there is one; fetches the manifest again if the cached one does not fit.
    pub(crate) fn find(&self, reference: &str, fits: impl Fn(&ContainerImage) -> bool) -> Result<Arc<ContainerImage>> {
        let known = self.known(reference)?;
        let mut found = lock(&known.found);
        match &*found {
            Some(CachedManifest { at, image: Ok(image) })
                if at.elapsed() < MISSING_LAYER_LIFETIME || at.elapsed() < MANIFEST_LIFETIME && fits(image) =>
            {
                return Ok(Arc::clone(image));
            }
            Some(CachedManifest { at, image: Err(reason) }) if at.elapsed() < FAILURE_LIFETIME => {
                return Err(Error::Recent(reason.clone()));
            }
            _ => {}
        }
        let fetched = ContainerImage::find(&known.remote).and_then(|image| {
            image.map(Arc::new).ok_or_else(|| ferry_registry::Error::NoImage(format!("{reference}, as a container's")))
        });
        let image = fetched.as_ref().map(Arc::clone).map_err(|error| error_chain(error));
        *found = Some(CachedManifest { at: Instant::now(), image });
        Ok(fetched?)
    }
}
