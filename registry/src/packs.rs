//! Fetches objects for ferry-image.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use ferry_image::{ByteSink, Digest, Fetch};

use crate::error::{Error, Result};
use crate::manifest::PackBlobs;
use crate::remote::Remote;

/// Returns the error kind: whether only the requested object is missing, or another error.
fn kind(error: &Error) -> io::ErrorKind {
    match error {
        Error::Status { status: 404, .. } => io::ErrorKind::NotFound,
        Error::Status { status: 401 | 403, .. } => io::ErrorKind::PermissionDenied,
        _ => io::ErrorKind::Other,
    }
}

/// The packs of a manifest.
type PackMap = Arc<HashMap<Digest, PackBlobs>>;

/// The packs of one image on a server. The manifest is fetched on demand.
#[derive(Debug)]
pub struct Packs {
    remote: Arc<Remote>,
    packs: Mutex<Option<PackMap>>,
}

impl Packs {
    /// Creates the packs of a manifest.
    pub(crate) fn new(remote: Arc<Remote>, packs: HashMap<Digest, PackBlobs>) -> Self {
        Self { remote, packs: Mutex::new(Some(Arc::new(packs))) }
    }

    /// Creates packs whose manifest is fetched on demand.
    pub(crate) fn on_demand(remote: Arc<Remote>) -> Self {
        Self { remote, packs: Mutex::new(None) }
    }

    /// Fetches the manifest now, so that an unreachable server is reported early.
    ///
    /// # Errors
    ///
    /// The server is not reachable, or its response is invalid.
    pub fn fetch_manifest(&self) -> Result<()> {
        self.packs().map(drop)
    }

    fn packs(&self) -> Result<PackMap> {
        let mut packs = self.packs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*packs {
            return Ok(Arc::clone(known));
        }
        let known = Arc::new(self.remote.manifest()?.0.packs);
        *packs = Some(Arc::clone(&known));
        Ok(known)
    }

    /// Calls `work` with the server's blobs of a pack.
    fn with_pack<T>(&self, pack: Digest, work: impl FnOnce(&PackBlobs) -> io::Result<T>) -> io::Result<T> {
        let known = self.packs().map_err(io::Error::other)?;
        let reason = || format!("{} has no such pack", self.remote.reference());
        work(known.get(&pack).ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, reason()))?)
    }
}

impl Fetch for Packs {
    fn index(&self, pack: Digest, bytes_max: u64) -> io::Result<Vec<u8>> {
        let index = self.with_pack(pack, |blobs| blobs.index.ok_or_else(|| io::ErrorKind::NotFound.into()))?;
        self.remote.read_all(index, bytes_max).map_err(io::Error::other)
    }

    fn read(&self, pack: Digest, range: Range<u64>, sink: &mut ByteSink<'_>) -> io::Result<()> {
        let pieces = self.with_pack(pack, |blobs| {
            blobs.pieces(&range).ok_or_else(|| io::Error::other("its parts on the server are shorter than the pack"))
        })?;
        for (part, range) in pieces {
            self.remote.read(part, &range, sink).map_err(|error| match error {
                Error::Sink(error) => error,
                error => io::Error::new(kind(&error), error),
            })?;
        }
        Ok(())
    }
}
