//! What ferry-image fetches objects by.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use ferry_image::{Digest, Fetch, fetch::Sink};

use crate::error::Error;
use crate::manifest::PackBlobs;
use crate::remote::Remote;

/// The packs of one image, on a server.
#[derive(Debug)]
pub struct Packs {
    remote: Arc<Remote>,
    packs: HashMap<Digest, PackBlobs>,
}

impl Packs {
    pub(crate) fn new(remote: Arc<Remote>, packs: HashMap<Digest, PackBlobs>) -> Self {
        Self { remote, packs }
    }

    fn pack(&self, pack: Digest) -> io::Result<&PackBlobs> {
        let why = || format!("{} has no such pack", self.remote.reference());
        self.packs.get(&pack).ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, why()))
    }
}

impl Fetch for Packs {
    fn index(&self, pack: Digest, bytes_max: u64) -> io::Result<Vec<u8>> {
        let index = self.pack(pack)?.index.ok_or(io::ErrorKind::NotFound)?;
        self.remote.all(index, bytes_max).map_err(io::Error::other)
    }

    fn read(&self, pack: Digest, range: Range<u64>, sink: &mut Sink<'_>) -> io::Result<()> {
        let pieces = self.pack(pack)?.pieces(&range);
        let pieces = pieces.ok_or_else(|| io::Error::other("its parts on the server are shorter than the pack"))?;
        for (part, range) in pieces {
            self.remote.read(part, &range, sink).map_err(|error| match error {
                Error::Sink(error) => error,
                error => io::Error::other(error),
            })?;
        }
        Ok(())
    }
}
