//! Fetches objects for ferry-image.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferry_image::{ByteSink, Digest, Fetch, Store};

use crate::container::Container;
use crate::error::{Error, Result};
use crate::frames::EdgeFrames;
use crate::layers;
use crate::manifest::{Blob, PackBlobs, Part, Sha256};
use crate::remote::{Document, Remote};

/// A server that is near answers a first request within this time.
const NEAR: Duration = Duration::from_millis(20);
/// How many indexes are fetched ahead, and the size of each in bytes.
const INDEXES_MAX: usize = 8;
const INDEX_BYTES_MAX: u64 = 8 << 20;

/// Returns the error kind: whether only the requested object is missing, or another error.
fn kind(error: &Error) -> io::ErrorKind {
    match error {
        Error::Status { status: 404, .. } => io::ErrorKind::NotFound,
        Error::Status { status: 401 | 403, .. } => io::ErrorKind::PermissionDenied,
        _ => io::ErrorKind::Other,
    }
}

/// What the server has.
#[derive(Clone, Debug)]
enum Known {
    /// The packs of a manifest.
    Packs(Arc<HashMap<Digest, PackBlobs>>),
    /// The layers of a container.
    Container(Arc<Container>),
}

/// The packs of one image on a server. The manifest is fetched on demand.
#[derive(Debug)]
pub struct Packs {
    remote: Arc<Remote>,
    known: Mutex<Option<Known>>,
    /// Prefetched indexes, until they are used.
    indexes: Mutex<HashMap<Digest, Vec<u8>>>,
    edges: EdgeFrames,
}

impl Packs {
    /// Creates the packs of a manifest.
    pub(crate) fn new(remote: Arc<Remote>, packs: HashMap<Digest, PackBlobs>) -> Self {
        Self::of(remote, Some(Known::Packs(Arc::new(packs))))
    }

    /// Creates the layers of a container.
    pub(crate) fn of_container(remote: Arc<Remote>, container: Box<Container>) -> Self {
        Self::of(remote, Some(Known::Container(container.into())))
    }

    /// Creates packs whose manifest is fetched on demand.
    pub(crate) fn on_demand(remote: Arc<Remote>) -> Self {
        Self::of(remote, None)
    }

    fn of(remote: Arc<Remote>, known: Option<Known>) -> Self {
        Self { remote, known: Mutex::new(known), indexes: Mutex::default(), edges: EdgeFrames::default() }
    }

    /// Fetches the manifest now, so that an unreachable server is reported early.
    ///
    /// # Errors
    ///
    /// The server is not reachable, or its response is invalid.
    pub fn fetch_manifest(&self) -> Result<()> {
        self.known().map(drop)
    }

    /// Returns whether the server takes so long to answer that readers should not wait for each round trip; asks it if it has not yet
    /// answered anything.
    pub fn is_far(&self) -> bool {
        if let Some(latency) = self.latency() {
            return latency > NEAR;
        }
        let blob = match self.known() {
            Ok(Known::Packs(packs)) => packs.values().find_map(|pack| pack.parts.first()).map(|part| part.blob),
            Ok(Known::Container(container)) => container.layers.first().map(|layer| layer.blob),
            Err(_) => None,
        };
        let begun = Instant::now();
        // Who needs more of it learns what is wrong.
        blob.is_some_and(|blob| self.remote.read_part(blob, &(0..1), &mut |_| Ok(())).is_ok()) && begun.elapsed() > NEAR
    }

    /// Whether they are layers of a container, not packs that were pushed.
    pub fn are_layers(&self) -> bool {
        matches!(&*self.known.lock().unwrap_or_else(PoisonError::into_inner), Some(Known::Container(_)))
    }

    /// Returns the shortest time that the server took to answer, if it was asked.
    pub fn latency(&self) -> Option<Duration> {
        self.remote.latency()
    }

    /// Prefetches the indexes that a store lacks. Failures are ignored, and retried on demand.
    pub(crate) fn fetch_indexes(&self, store: &Path) {
        let (Ok(Known::Packs(packs)), Ok(store)) = (self.known(), Store::open(store)) else { return };
        for (pack, index) in packs.iter().filter_map(|(pack, blobs)| Some((pack, blobs.index?))).take(INDEXES_MAX) {
            if !store.has_index(*pack)
                && let Ok(bytes) = self.remote.read_all(index, INDEX_BYTES_MAX)
            {
                self.indexes.lock().unwrap_or_else(PoisonError::into_inner).insert(*pack, bytes);
            }
        }
    }

    fn known(&self) -> Result<Known> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*known {
            return Ok(known.clone());
        }
        let found = match self.remote.find()?.0 {
            Document::Image(manifest) => Known::Packs(Arc::new(manifest.packs)),
            Document::Container(container) => Known::Container(container.into()),
        };
        *known = Some(found.clone());
        Ok(found)
    }

    /// Calls `work` with the server's blobs of a pack.
    fn with_pack<T>(&self, pack: Digest, work: impl FnOnce(&PackBlobs) -> io::Result<T>) -> io::Result<T> {
        let reason = || format!("{} has no such pack", self.remote.reference());
        let none = || io::Error::new(io::ErrorKind::NotFound, reason());
        match self.known().map_err(io::Error::other)? {
            Known::Packs(packs) => work(packs.get(&pack).ok_or_else(none)?),
            Known::Container(_) => Err(none()),
        }
    }
}

fn told(error: Error) -> io::Error {
    match error {
        Error::Sink(error) => error,
        error => io::Error::new(kind(&error), error),
    }
}

impl Fetch for Packs {
    fn index(&self, pack: Digest, bytes_max: u64) -> io::Result<Vec<u8>> {
        if let Known::Container(container) = self.known().map_err(io::Error::other)? {
            // Made of the layer's table of contents.
            return layers::index_of(&self.remote, &container, pack).ok_or_else(|| io::ErrorKind::NotFound.into());
        }
        let ahead = self.indexes.lock().unwrap_or_else(PoisonError::into_inner).remove(&pack);
        if let Some(bytes) = ahead.filter(|bytes| bytes.len() as u64 <= bytes_max) {
            return Ok(bytes);
        }
        let index = self.with_pack(pack, |blobs| blobs.index.ok_or_else(|| io::ErrorKind::NotFound.into()))?;
        self.remote.read_all(index, bytes_max).map_err(io::Error::other)
    }

    fn read(&self, pack: Digest, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
        self.with_pack(pack, |blobs| {
            let short = || io::Error::other("its parts on the server are shorter than the pack");
            for (Part { blob, frames }, range) in blobs.pieces(&range).ok_or_else(short)? {
                let read = match frames {
                    None => self.remote.read(*blob, &range, sink),
                    Some(frames) => {
                        let fetch = |range: &Range<u64>, sink: &mut ByteSink<'_>| self.remote.read(*blob, range, sink);
                        frames.read((blob.sha256.0, &range), &self.edges, fetch, Error::Sink, sink)
                    }
                };
                read.map_err(told)?;
            }
            Ok(())
        })
    }

    fn blob(&self, sha256: [u8; 32], bytes: u64, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
        // The layer itself proves its place, so no manifest is needed.
        self.remote.read_part(Blob { sha256: Sha256(sha256), bytes }, &range, sink).map_err(told)
    }
}
