//! Where the bytes of files go while an image is built: into packs, or into an object store.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::build::Layout;
use crate::composefs;
use crate::composefs::objects::NewObjects;
use crate::error::{Doing, Error, Result};
use crate::flat::{self, Pack};
use crate::store::{NewPack, Places, Store};
use crate::tree::{Content, Tree};
use crate::verity::{Digest, Hasher};

/// The pieces that larger files are read in.
const PIECE_BYTES: usize = 1 << 20;

/// A file that was read.
pub(crate) struct Hashed {
    pub bytes: u64,
    pub digest: Digest,
    /// Its bytes, if they are not too many.
    pub kept: Option<Vec<u8>>,
}

/// Where the bytes of files go.
pub(crate) struct Sink {
    kind: Kind,
    store: Arc<Store>,
    layout: Layout,
    /// Bytes of all files that went in.
    pub data_bytes: u64,
}

enum Kind {
    Packs(Box<Sorted>),
    Objects(NewObjects),
}

impl Sink {
    pub(crate) fn begin(store: &Arc<Store>, layout: Layout) -> Result<Self> {
        let kind = match layout {
            Layout::Flat => {
                let (places, pack) = (store.places()?, store.begin()?);
                Kind::Packs(Box::new(Sorted { places, pack, found: BTreeMap::new(), new_bytes: 0 }))
            }
            Layout::Composefs { .. } => Kind::Objects(NewObjects::begin(store.folder())?),
        };
        Ok(Self { kind, store: Arc::clone(store), layout, data_bytes: 0 })
    }

    /// The folder that files can be made in, to be added later.
    pub(crate) fn folder(&self) -> PathBuf {
        self.store.folder().join(if self.layout == Layout::Flat { "packs" } else { "objects" })
    }

    /// Whether the image is to be a composefs image.
    pub(crate) fn is_composefs(&self) -> bool {
        self.layout != Layout::Flat
    }

    /// Adds a file; answers what its inode then holds.
    pub(crate) fn add(&mut self, path: &Path, hashed: &Hashed) -> Result<Content> {
        self.data_bytes += hashed.bytes;
        match (&mut self.kind, &hashed.kept) {
            (Kind::Packs(sorted), _) => sorted.add(path, hashed)?,
            (Kind::Objects(objects), Some(bytes)) => objects.add(hashed.digest, bytes)?,
            (Kind::Objects(objects), None) => objects.add_file(hashed.digest, hashed.bytes, path)?,
        }
        Ok(Content::Object { bytes: hashed.bytes, digest: hashed.digest })
    }

    /// Bytes that were not in the store before.
    pub(crate) fn new_bytes(&self) -> u64 {
        match &self.kind {
            Kind::Packs(sorted) => sorted.new_bytes,
            Kind::Objects(objects) => objects.new_bytes,
        }
    }

    /// Makes all durable; answers the image, and the packs that it needs.
    pub(crate) fn finish(self, tree: Tree) -> Result<(Vec<u8>, Vec<Digest>)> {
        let version = match self.layout {
            Layout::Flat => None,
            Layout::Composefs { version } => version,
        };
        match self.kind {
            Kind::Objects(objects) => {
                // What cannot be laid out leaves nothing in the store.
                let bytes = composefs::write(tree, version)?;
                objects.finish()?;
                Ok((bytes, Vec::new()))
            }
            Kind::Packs(sorted) => {
                let places = sorted.finish()?;
                let names: BTreeSet<Digest> = places.values().map(|(pack, _)| *pack).collect();
                let used = names
                    .into_iter()
                    .map(|name| {
                        self.store.freshen(name);
                        self.store.index(name).map(|index| Pack { name, blocks: index.blocks })
                    })
                    .collect::<Result<Vec<_>>>()?;
                let bytes = flat::write(&tree, &used, &places)?;
                Ok((bytes, used.iter().map(|pack| pack.name).collect()))
            }
        }
    }
}

/// Where an object of this image is.
#[derive(Clone, Copy)]
enum Found {
    /// In the store already: in this pack, at this block.
    Known((Digest, u64)),
    /// In the new pack, from this block on.
    New(u64),
}

/// Tells known objects from new ones.
struct Sorted {
    places: Places,
    pack: NewPack,
    found: BTreeMap<Digest, Found>,
    new_bytes: u64,
}

impl Sorted {
    fn add(&mut self, path: &Path, hashed: &Hashed) -> Result<()> {
        if self.found.contains_key(&hashed.digest) {
            return Ok(());
        }
        if let Some(place) = self.places.get(&hashed.digest) {
            self.found.insert(hashed.digest, Found::Known(*place));
            return Ok(());
        }
        self.found.insert(hashed.digest, Found::New(self.pack.blocks()));
        self.new_bytes += hashed.bytes;
        match &hashed.kept {
            Some(bytes) => self.pack.write(bytes)?,
            None => self.copy(path, hashed)?,
        }
        self.pack.end(hashed.bytes, hashed.digest)
    }

    /// Completes the new pack; answers where each object is.
    fn finish(self) -> Result<Places> {
        let new = self.pack.finish()?;
        let place = |(digest, at)| match (at, new) {
            (Found::Known(place), _) => Some((digest, place)),
            (Found::New(block), Some(pack)) => Some((digest, (pack, block))),
            // A pack that something was put into is not empty.
            (Found::New(_), None) => None,
        };
        Ok(self.found.into_iter().filter_map(place).collect())
    }

    /// Copies a file that was hashed, and hashes what is copied, for it may have changed in between.
    fn copy(&mut self, path: &Path, hashed: &Hashed) -> Result<()> {
        let mut file = File::open(path).doing("open", path)?.take(hashed.bytes);
        let mut hasher = Hasher::default();
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        loop {
            piece.clear();
            file.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut piece).doing("read", path)?;
            if piece.is_empty() {
                break;
            }
            hasher.update(&piece);
            self.pack.write(&piece)?;
        }
        if hasher.finish() == hashed.digest { Ok(()) } else { Err(Error::Changed(path.into())) }
    }
}
