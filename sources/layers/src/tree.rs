//! The open images and layers, their inode numbers, and the references that clients hold.
//!
//! ```text
//! 1                        the root
//! 2^63 + N                 the directory of an image
//! N * 2^40                 the directory of a layer
//! N * 2^40 + 2^39 + 1, 2   its info and blob
//! N * 2^40 + INODE         an inode of the layer; 1 is diff
//! ```

use std::collections::HashMap;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferry_image::Source;
use ferry_vfs::sync::lock;
use ferry_vfs::{FileSystem, Ino, RatelimitedLog};

use crate::entry::{Entry, Key};
use crate::options::Options;

/// The maximum number of images that clients know.
const IMAGES_MAX: usize = 4096;
/// Set in the number of the directory of an image.
const IMAGE_BIT: u64 = 1 << 63;
/// The bits of an inode in its layer. Images have less than 2^32 inodes.
const LAYER_SHIFT: u32 = 40;
/// Set in the number of a file that describes a layer.
const FILE_BIT: u64 = 1 << 39;

/// What an inode number means.
#[derive(Clone, Debug)]
pub(crate) enum Node {
    Root,
    Image(Arc<str>),
    Layer(Arc<MountedLayer>),
    Info(Arc<MountedLayer>),
    Blob(Arc<MountedLayer>),
    /// An inode of a layer, by its number there.
    File(Arc<MountedLayer>, Ino),
}

/// A layer that is open.
#[derive(Debug)]
pub(crate) struct MountedLayer {
    number: u64,
    pub key: Key,
    pub entry: Entry,
    pub info: Vec<u8>,
    pub source: Source,
    memory_bytes: u64,
    /// Its blob, and when it was last read.
    pub blob: Mutex<Option<(Arc<File>, Instant)>>,
    pub log: RatelimitedLog,
    /// The references of clients to all of its inodes.
    references: AtomicU64,
}

impl MountedLayer {
    fn base(&self) -> u64 {
        self.number << LAYER_SHIFT
    }

    /// Returns the number of its directory.
    pub(crate) fn ino(&self) -> Ino {
        Ino(self.base())
    }

    pub(crate) fn info_ino(&self) -> Ino {
        Ino(self.base() | FILE_BIT | 1)
    }

    pub(crate) fn blob_ino(&self) -> Ino {
        Ino(self.base() | FILE_BIT | 2)
    }

    /// Returns the number of one of its inodes.
    pub(crate) fn file_ino(&self, ino: Ino) -> Ino {
        Ino(self.base() | ino.0)
    }

    /// Adds a reference to an inode of a layer that already has one.
    pub(crate) fn refer(&self) {
        self.references.fetch_add(1, Ordering::Relaxed);
    }
}

/// The open images and layers.
#[derive(Debug)]
pub(crate) struct Tree {
    layers_max: usize,
    memory_bytes_max: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By number: the reference, and the references of clients.
    images: HashMap<u64, (Arc<str>, u64)>,
    image_numbers: HashMap<Arc<str>, u64>,
    images_ever: u64,
    layers: HashMap<u64, (Arc<MountedLayer>, Instant)>,
    layer_numbers: HashMap<Key, u64>,
    /// The memory of all open layers.
    memory_bytes: u64,
    layers_ever: u64,
    /// The sums of the counters of closed layers.
    closed: HashMap<&'static str, u64>,
}

impl State {
    fn close(&mut self, number: u64) {
        let Some((layer, _)) = self.layers.remove(&number) else { return };
        self.memory_bytes -= layer.memory_bytes;
        // The key may belong to a newer layer.
        if self.layer_numbers.get(&layer.key) == Some(&number) {
            self.layer_numbers.remove(&layer.key);
        }
        for (name, count) in layer.source.counts() {
            *self.closed.entry(name).or_default() += count;
        }
    }

    /// Closes the least recently used layer without a reference.
    fn close_one(&mut self) -> bool {
        let unused = self.layers.iter().filter(|(_, (layer, _))| layer.references.load(Ordering::Relaxed) == 0);
        let oldest = unused.min_by_key(|(_, (_, used))| *used).map(|(number, _)| *number);
        oldest.map(|number| self.close(number)).is_some()
    }
}

impl Tree {
    pub(crate) fn new(options: &Options) -> Self {
        let Options { layers_max, memory_bytes_max, .. } = *options;
        Self { layers_max: layers_max.max(4), memory_bytes_max, state: Mutex::default() }
    }

    /// Returns the number of the directory of an image, with one more reference; `None`: there are too many.
    pub(crate) fn refer_image(&self, reference: &str) -> Option<Ino> {
        let mut state = lock(&self.state);
        if let Some(number) = state.image_numbers.get(reference).copied() {
            state.images.get_mut(&number)?.1 += 1;
            return Some(Ino(IMAGE_BIT | number));
        }
        if state.images.len() >= IMAGES_MAX {
            return None;
        }
        state.images_ever += 1;
        let (number, reference) = (state.images_ever, Arc::<str>::from(reference));
        state.images.insert(number, (Arc::clone(&reference), 1));
        state.image_numbers.insert(reference, number);
        Some(Ino(IMAGE_BIT | number))
    }

    /// Returns a layer that is open, with one more reference.
    pub(crate) fn refer(&self, key: &Key) -> Option<Arc<MountedLayer>> {
        let mut state = lock(&self.state);
        let number = *state.layer_numbers.get(key)?;
        let (layer, used) = state.layers.get_mut(&number)?;
        *used = Instant::now();
        layer.refer();
        Some(Arc::clone(layer))
    }

    /// Adds a layer, and closes others if their number or memory exceeds the limit.
    pub(crate) fn mount(&self, key: &Key, entry: &Entry, source: Source) {
        let memory_bytes = source.bytes().saturating_mul(2);
        let mut state = lock(&self.state);
        while state.layers.len() >= self.layers_max
            || state.memory_bytes.saturating_add(memory_bytes) > self.memory_bytes_max
        {
            if !state.close_one() {
                tracing::warn!(
                    "{} layers with {} bytes of metadata are in use: layer {} of {} is left to the engine to pull",
                    state.layers.len(),
                    state.memory_bytes,
                    key.1,
                    key.0
                );
                return;
            }
        }
        state.memory_bytes += memory_bytes;
        state.layers_ever += 1;
        let number = state.layers_ever;
        let layer = MountedLayer {
            number,
            key: key.clone(),
            info: entry.info(),
            entry: entry.clone(),
            source,
            memory_bytes,
            blob: Mutex::default(),
            log: RatelimitedLog::default(),
            references: AtomicU64::new(0),
        };
        state.layers.insert(number, (Arc::new(layer), Instant::now()));
        state.layer_numbers.insert(key.clone(), number);
    }

    /// Returns the references of all images if the tables are nearly full, so that clients can be made to drop unused entries.
    pub(crate) fn references_to_evict(&self) -> Vec<Arc<str>> {
        let state = lock(&self.state);
        let is_crowded = state.layers.len() * 4 >= self.layers_max * 3
            || state.memory_bytes >= self.memory_bytes_max / 4 * 3
            || state.images.len() * 4 >= IMAGES_MAX * 3;
        if is_crowded { state.image_numbers.keys().cloned().collect() } else { Vec::new() }
    }

    /// Drops blobs that were not read for this time: they take disk space.
    pub(crate) fn drop_blobs(&self, lifetime: Duration) {
        for (layer, _) in lock(&self.state).layers.values() {
            // A blob that is being fetched is locked.
            if let Ok(mut blob) = layer.blob.try_lock() {
                blob.take_if(|(_, read)| read.elapsed() >= lifetime);
            }
        }
    }

    /// Closes layers without a reference that no engine uses. Returns the entries of those that stay open.
    pub(crate) fn close_unused(&self, is_used: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        let mut state = lock(&self.state);
        let is_unused = |layer: &MountedLayer| layer.references.load(Ordering::Relaxed) == 0 && !is_used(&layer.entry);
        let unused = state.layers.iter().filter(|(_, (layer, _))| is_unused(layer)).map(|(number, _)| *number);
        for number in unused.collect::<Vec<_>>() {
            state.close(number);
        }
        state.layers.values().map(|(layer, _)| layer.entry.clone()).collect()
    }

    pub(crate) fn node(&self, ino: Ino) -> Option<Node> {
        if ino == Ino::ROOT {
            return Some(Node::Root);
        }
        let state = lock(&self.state);
        if ino.0 & IMAGE_BIT != 0 {
            return state.images.get(&(ino.0 ^ IMAGE_BIT)).map(|(reference, _)| Node::Image(Arc::clone(reference)));
        }
        let layer = Arc::clone(&state.layers.get(&(ino.0 >> LAYER_SHIFT))?.0);
        Some(match ino.0 & ((1 << LAYER_SHIFT) - 1) {
            0 => Node::Layer(layer),
            number if number == FILE_BIT | 1 => Node::Info(layer),
            number if number == FILE_BIT | 2 => Node::Blob(layer),
            number => Node::File(layer, Ino(number)),
        })
    }

    /// Drops references. Returns whether they were the last ones to a layer.
    pub(crate) fn forget(&self, ino: Ino, count: u64) -> bool {
        let mut state = lock(&self.state);
        if ino.0 & IMAGE_BIT == 0 {
            let Some((layer, _)) = state.layers.get(&(ino.0 >> LAYER_SHIFT)) else { return false };
            let less = |references: u64| Some(references.saturating_sub(count));
            let before = layer.references.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            // Unused layers stay open while there is space, for later lookups.
            let is_crowded = state.layers.len() * 2 > self.layers_max || state.memory_bytes > self.memory_bytes_max / 2;
            let is_last = before.is_ok_and(|before| before <= count);
            if is_last && is_crowded {
                state.close(ino.0 >> LAYER_SHIFT);
            }
            return is_last;
        }
        let number = ino.0 ^ IMAGE_BIT;
        let Some((reference, references)) = state.images.get_mut(&number) else { return false };
        *references = references.saturating_sub(count);
        if *references == 0 {
            let reference = Arc::clone(reference);
            state.images.remove(&number);
            state.image_numbers.remove(&reference);
        }
        false
    }

    /// Returns the sums of all layers' counters, and the number of open layers.
    pub(crate) fn counts(&self) -> Vec<(&'static str, u64)> {
        let state = lock(&self.state);
        let mut sums = state.closed.clone();
        for (layer, _) in state.layers.values() {
            for (name, count) in layer.source.counts() {
                *sums.entry(name).or_default() += count;
            }
        }
        let mut counts: Vec<_> = sums.into_iter().collect();
        counts.sort_unstable();
        counts.push(("layer_mounts", state.layers.len() as u64));
        counts
    }
}
