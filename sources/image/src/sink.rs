//! Where the bytes of files go while an image is built: into packs, or into an object store.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::build::Layout;
use crate::composefs;
use crate::composefs::objects::NewObjects;
use crate::erofs::BLOCK_BYTES;
use crate::error::{Doing, Error, Result};
use crate::flat::{self, Pack};
use crate::store::{NewPack, Places, Store};
use crate::trace::Trace;
use crate::tree::{Content, Tree};
use crate::verity::{ChunkHash, Digest, Hasher};

/// The pieces that larger files are read in.
const PIECE_BYTES: usize = 1 << 20;

/// A file that was read.
pub(crate) struct Hashed {
    pub bytes: u64,
    pub digest: Digest,
    /// The hashes of its chunks, if it has several.
    pub chunks: Vec<ChunkHash>,
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
    pub(crate) fn finish(self, tree: Tree, order: Option<&Trace>) -> Result<(Vec<u8>, Vec<Digest>)> {
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
                let mut places = sorted.finish()?;
                let ahead = order.map(|order| gather(&self.store, &mut places, &tree, order)).transpose()?.flatten();
                let names: BTreeSet<Digest> = places.values().map(|(pack, _)| *pack).collect();
                let used = names
                    .into_iter()
                    .map(|name| {
                        self.store.freshen(name);
                        let ahead = ahead == Some(name);
                        self.store.index(name).map(|index| Pack { name, blocks: index.blocks, ahead })
                    })
                    .collect::<Result<Vec<_>>>()?;
                let bytes = flat::write(&tree, &used, &places)?;
                Ok((bytes, used.iter().map(|pack| pack.name).collect()))
            }
        }
    }
}

/// Copies the objects that a workload needs first into a pack of their own, in its order, and has the image take them from there.
/// The same objects in the same order are the same pack, so images that begin alike share it.
fn gather(store: &Arc<Store>, places: &mut Places, tree: &Tree, order: &Trace) -> Result<Option<Digest>> {
    let mut pack = store.begin()?;
    let mut gathered = HashMap::new();
    let mut files: HashMap<Digest, File> = HashMap::new();
    for id in order.nodes(tree) {
        let Content::Object { bytes, digest } = &tree.nodes[id].content else { continue };
        let Some((from, block)) = places.get(digest).copied().filter(|_| !gathered.contains_key(digest)) else {
            continue;
        };
        let path = store.pack_path(from);
        let file = match files.entry(from) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(File::open(&path).doing("open", &path)?),
        };
        let first = pack.blocks();
        // Somebody may have changed what is in the store.
        let (found, chunks) = copy_object(file, block, *bytes, &mut pack).doing("read", &path)??;
        if found != *digest {
            let reason = format!("the object {digest} in it is damaged");
            return Err(Error::Pack { store: store.folder().into(), pack: from, reason });
        }
        pack.end(*bytes, *digest, &chunks)?;
        gathered.insert(*digest, first);
    }
    let name = pack.finish()?;
    if let Some(name) = name {
        places.extend(gathered.into_iter().map(|(digest, block)| (digest, (name, block))));
    }
    Ok(name)
}

/// What was copied: its digest, and the hashes of its chunks.
type Copied = (Digest, Vec<ChunkHash>);

/// Copies an object to a pack. The outer error is of reading.
fn copy_object(file: &File, block: u64, bytes: u64, pack: &mut NewPack) -> io::Result<Result<Copied>> {
    let mut hasher = Hasher::default();
    let mut piece = vec![0; PIECE_BYTES.min(usize::try_from(bytes).unwrap_or(PIECE_BYTES))];
    let mut done = 0;
    while done < bytes {
        let count = usize::try_from(bytes - done).unwrap_or(PIECE_BYTES).min(piece.len());
        file.read_exact_at(&mut piece[..count], block * BLOCK_BYTES as u64 + done)?;
        hasher.update(&piece[..count]);
        if let Err(error) = pack.write(&piece[..count]) {
            return Ok(Err(error));
        }
        done += count as u64;
    }
    Ok(Ok(hasher.finish_with_chunks()))
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
        self.pack.end(hashed.bytes, hashed.digest, &hashed.chunks)
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
