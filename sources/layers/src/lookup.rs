//! Lookups of layers: at most one per layer, each on a thread of its own, within a time limit.

use std::collections::HashMap;
use std::fs::File;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ferry_image::{FetchOptions, Image, Source, error_chain};
use ferry_registry::{ContainerImage, Sha256, StackedLayer, fetch_layer, pull_metadata};
use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, RatelimitedLog};

use crate::entry::{Entries, Entry, Key};
use crate::error::{Error, IoContext, Result};
use crate::garbage::Garbage;
use crate::images::Images;
use crate::options::Options;
use crate::tree::{MountedLayer, Tree};

/// The maximum number of lookups that run at once. Engines look layers up one after another.
const LOOKUPS_MAX: usize = 32;

/// Finds layers.
#[derive(Debug)]
pub(crate) struct Finder {
    pub entries: Entries,
    pub images: Images,
    pub options: Options,
    pub tree: Tree,
    pub running: Mutex<HashMap<Key, Arc<RunningLookup>>>,
    pub garbage: Garbage,
}

/// A running lookup.
#[derive(Debug, Default)]
pub(crate) struct RunningLookup {
    has_ended: Mutex<bool>,
    ended: Condvar,
}

impl RunningLookup {
    /// Waits for the end; returns whether it has ended.
    fn wait(&self, time: Duration) -> bool {
        let is_running = |has_ended: &mut bool| !*has_ended;
        let waited = self.ended.wait_timeout_while(lock(&self.has_ended), time, is_running);
        waited.is_ok_and(|(has_ended, _)| *has_ended)
    }
}

/// Ends a lookup when it is dropped, also by a panic.
struct EndOnDrop {
    finder: Arc<Finder>,
    key: Key,
}

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        if let Some(lookup) = lock(&self.finder.running).remove(&self.key) {
            *lock(&lookup.has_ended) = true;
            lookup.ended.notify_all();
        }
    }
}

impl Finder {
    /// Returns a layer, with one more reference; opens it if necessary.
    ///
    /// # Errors
    ///
    /// `NOENT`: it cannot be read by chunks, or not in time. The log has the reason.
    pub(crate) fn layer(self: &Arc<Self>, reference: &str, name: &str) -> ferry_vfs::Result<Arc<MountedLayer>> {
        let end = Instant::now() + self.options.lookup_timeout;
        let key = (reference.to_owned(), name.to_owned());
        if let Some(layer) = self.tree.refer(&key) {
            return Ok(layer);
        }
        let _no_removal = self.garbage.prevent();
        let mut has_run = false;
        loop {
            if let Some(layer) = self.tree.refer(&key) {
                return Ok(layer);
            }
            if has_run {
                return Err(Errno::NOENT);
            }
            let lookup = self.begin(&key)?;
            has_run = lookup.wait(end.saturating_duration_since(Instant::now()));
            if !has_run {
                let seconds = self.options.lookup_timeout.as_secs();
                tracing::warn!(
                    "{reference}: layer {name} was not found in {seconds} s: it is left to the engine to pull"
                );
                return Err(Errno::NOENT);
            }
        }
    }

    /// Returns the lookup of a layer, and begins it if necessary.
    fn begin(self: &Arc<Self>, key: &Key) -> ferry_vfs::Result<Arc<RunningLookup>> {
        let mut running = lock(&self.running);
        if let Some(lookup) = running.get(key) {
            return Ok(Arc::clone(lookup));
        }
        if running.len() >= LOOKUPS_MAX {
            tracing::warn!("{}: {LOOKUPS_MAX} lookups run: layer {} is left to the engine to pull", key.0, key.1);
            return Err(Errno::NOENT);
        }
        let lookup = Arc::<RunningLookup>::default();
        running.insert(key.clone(), Arc::clone(&lookup));
        drop(running);
        let end = EndOnDrop { finder: Arc::clone(self), key: key.clone() };
        let work = move || {
            let (finder, (reference, name)) = (&end.finder, &end.key);
            let no_removal = finder.garbage.prevent();
            match finder.open(reference, name) {
                Ok((entry, source)) => {
                    finder.tree.mount(&end.key, &entry, source);
                    // If the engine does not use it.
                    finder.garbage.has_leftovers.store(true, Ordering::Release);
                }
                // A layer without a table of contents is not an error: engines look up each layer.
                Err(error @ (Error::NoLayer { .. } | Error::Recent(_))) => tracing::debug!("{}", error_chain(&error)),
                Err(error) => {
                    tracing::warn!(
                        "{reference}: layer {name}: {}; it is left to the engine to pull",
                        error_chain(&error)
                    )
                }
            }
            drop(no_removal);
            drop(end);
        };
        thread::Builder::new().name("layer-lookup".into()).spawn(work).map_err(|error| {
            tracing::warn!("cannot start a thread: {error}");
            Errno::NOENT
        })?;
        Ok(lookup)
    }

    /// Opens a layer: by its stored entry, or by its registry.
    fn open(&self, reference: &str, name: &str) -> Result<(Entry, Source)> {
        let remote = self.images.remote(reference)?;
        let store = self.entries.store();
        let known = self.entries.get(reference, name)?;
        let uses = known.as_ref().map_or(0, |known| known.uses);
        let entry = match known.filter(|entry| self.entries.image(entry).exists()) {
            Some(entry) => entry,
            None => {
                let (image, number, layer, toc) = self.find(reference, name)?;
                let entry = Entry { uses, ..Entry::new(reference, name, &layer, &toc) };
                let path = self.entries.image(&entry);
                if !path.exists() {
                    image.pull_layer(number, &path, &store)?;
                }
                self.entries.put(&entry)?;
                entry
            }
        };
        let path = self.entries.image(&entry);
        let digest = Image::open(&path, None)?.digest();
        // As the image exists, nothing is requested.
        let from = pull_metadata(&remote, &path, &store, None)?;
        let missing = FetchOptions { from, ahead_bytes: self.options.ahead_bytes, cache_bytes: None };
        Ok((entry, Source::open_with(&path, &store, Some(digest), Some(missing))?))
    }

    /// Returns the image of a layer, the layer's number in it, and the digest of its table of contents.
    fn find(&self, reference: &str, name: &str) -> Result<(Arc<ContainerImage>, usize, StackedLayer, String)> {
        let toc = |layer: &StackedLayer| layer.toc.map(|toc| format!("sha256:{toc}"));
        let place = |image: &ContainerImage| {
            image
                .layers()
                .iter()
                .position(|layer| toc(layer).is_some_and(|toc| toc == name || format!("sha256:{}", layer.blob) == name))
        };
        let image = self.images.find(reference, |image| place(image).is_some())?;
        let none = || Error::NoLayer { reference: reference.to_owned(), name: name.to_owned() };
        let number = place(&image).ok_or_else(none)?;
        let layer = image.layers()[number];
        let toc = toc(&layer).ok_or_else(none)?;
        Ok((image, number, layer, toc))
    }

    /// Fetches the whole blob of a layer, verified, to a file without a name.
    pub(crate) fn fetch_blob(&self, entry: &Entry) -> Result<File> {
        let _no_removal = self.garbage.prevent();
        let none = || Error::NoLayer { reference: entry.reference.clone(), name: entry.blob.clone() };
        let blob = entry.blob.strip_prefix("sha256:").and_then(Sha256::from_hex).ok_or_else(none)?;
        // Not by the manifest: the tag may name another image by now.
        let remote = self.images.remote(&entry.reference)?;
        let directory = self.entries.image(entry).with_extension("blob");
        let directory = tempfile::Builder::new()
            .prefix(".new-")
            .tempdir_in(directory.parent().unwrap_or(&directory))
            .doing("create a directory for", &directory)?;
        let path = directory.path().join("blob");
        fetch_layer(&remote, blob, entry.bytes, &path)?;
        File::open(&path).doing("open", path)
    }

    /// Logs why the blob of a layer cannot be read.
    pub(crate) fn refuse_blob(log: &RatelimitedLog, error: &Error) -> Errno {
        log.error(format_args!("{}; its readers get EIO", error_chain(error)));
        Errno::IO
    }
}
