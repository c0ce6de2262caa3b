//! Where the bytes of files go while an image is built: into packs, or into an object store.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::build::hash_pool::Hashers;
use crate::build::run::Layout;
use crate::build::trace::Trace;
use crate::format::chunk::{self, Batch, PIECE_BYTES};
use crate::format::composefs;
use crate::format::digest::{Algorithm, Digest};
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Doing, Error, Result, told};
use crate::format::flat::{self, Pack};
use crate::format::tree::{Content, Tree};
use crate::read::object_files::NewObjects;
use crate::store::packs::{Leaves, NewPack, Places, Store};
use crate::store::places::StorePlaces;

/// A file that was read for the layout composefs.
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
    Objects(Box<Loose>),
}

impl Sink {
    /// `threads` hash what comes by [`Self::add_file`]; with `has_verity` all packs of the image are for fs-verity.
    pub(crate) fn begin(store: &Arc<Store>, layout: Layout, threads: usize, has_verity: bool) -> Result<Self> {
        let kind = match layout {
            Layout::Flat => {
                let places = Arc::new(if has_verity { store.places_with_verity()? } else { store.places()? });
                let leaves = if has_verity { Leaves::OfNew(Arc::clone(&places)) } else { Leaves::No };
                let (batch, pack) = (Batch::new(leaves.clone()), store.begin(has_verity)?);
                let coming = Coming { threads, hashers: None, leaves, batch, free: Vec::new(), pieces: 0 };
                let (found, pieces) = (HashMap::new(), Vec::new());
                Kind::Packs(Box::new(Sorted { places, pack, found, pieces, coming, new_bytes: 0 }))
            }
            Layout::Composefs { .. } => {
                let objects = NewObjects::begin(store.folder())?;
                Kind::Objects(Box::new(Loose { objects, threads, hashers: None, given: 0, digests: Vec::new() }))
            }
        };
        Ok(Self { kind, store: Arc::clone(store), layout, data_bytes: 0 })
    }

    /// The folder that objects can be made in, to be added later.
    pub(crate) fn folder(&self) -> PathBuf {
        self.store.folder().join("objects")
    }

    /// Whether the image is to be a composefs image.
    pub(crate) fn is_composefs(&self) -> bool {
        self.layout != Layout::Flat
    }

    /// Adds a file to an object store; answers what its inode then holds.
    pub(crate) fn add_object(&mut self, path: &Path, hashed: &Hashed) -> Result<Content> {
        let Kind::Objects(loose) = &mut self.kind else { return Err(misplaced()) };
        self.data_bytes += hashed.bytes;
        match &hashed.kept {
            Some(bytes) => loose.objects.add(hashed.digest, bytes)?,
            None => loose.objects.add_file(hashed.digest, hashed.bytes, path)?,
        }
        Ok(Content::Object { bytes: hashed.bytes, digest: hashed.digest })
    }

    /// The same of a file that is in memory and not hashed yet; what its inode then holds becomes an object at the end.
    pub(crate) fn add_bytes(&mut self, bytes: Vec<u8>) -> Result<Content> {
        let Kind::Objects(loose) = &mut self.kind else { return Err(misplaced()) };
        let length = bytes.len() as u64;
        self.data_bytes += length;
        Ok(Content::Packed { bytes: length, first: loose.take(bytes)? })
    }

    /// Memory for pieces that [`Self::add_batch`] takes.
    pub(crate) fn new_batch(&self) -> Batch {
        Batch::new(match &self.kind {
            Kind::Packs(sorted) => sorted.coming.leaves.clone(),
            Kind::Objects(_) => Leaves::No,
        })
    }

    /// Adds pieces to packs; answers which number among all pieces the first one has.
    pub(crate) fn add_batch(&mut self, batch: &Batch) -> Result<usize> {
        let Kind::Packs(sorted) = &mut self.kind else { return Err(misplaced()) };
        sorted.flush()?;
        sorted.settle(0)?;
        sorted.coming.pieces += batch.len();
        sorted.add(batch)
    }

    /// Adds a file of so many bytes to packs; `fill` reads them, in order. Answers what its inode then holds.
    pub(crate) fn add_file(&mut self, bytes: u64, mut fill: impl FnMut(&mut [u8]) -> Result<()>) -> Result<Content> {
        let Kind::Packs(sorted) = &mut self.kind else { return Err(misplaced()) };
        self.data_bytes += bytes;
        let first = sorted.coming.pieces + sorted.coming.batch.len();
        let mut left = bytes;
        while left > 0 {
            let count = usize::try_from(left).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
            if !sorted.coming.batch.has_room(count) {
                sorted.flush()?;
            }
            sorted.coming.batch.add_unhashed(count, &mut fill)?;
            left -= count as u64;
        }
        Ok(Content::Packed { bytes, first })
    }

    /// Bytes that were not in the store before.
    pub(crate) fn new_bytes(&mut self) -> Result<u64> {
        Ok(match &mut self.kind {
            Kind::Packs(sorted) => {
                sorted.flush()?;
                sorted.settle(0)?;
                sorted.new_bytes
            }
            Kind::Objects(loose) => {
                loose.settle(0)?;
                loose.objects.new_bytes
            }
        })
    }

    /// Makes all durable; returns the image, the digest of its tree if the image's own is another, and the packs that it needs.
    pub(crate) fn finish(
        self,
        mut tree: Tree,
        order: Option<&Trace>,
    ) -> Result<(Vec<u8>, Option<Digest>, Vec<Digest>)> {
        let version = match self.layout {
            Layout::Flat => None,
            Layout::Composefs { version } => version,
        };
        match self.kind {
            Kind::Objects(loose) => {
                let objects = loose.finish(&mut tree)?;
                // What cannot be laid out leaves nothing in the store.
                let bytes = composefs::write(tree, version)?;
                objects.finish()?;
                Ok((bytes, None, Vec::new()))
            }
            Kind::Packs(sorted) => {
                let has_verity = matches!(sorted.coming.leaves, Leaves::OfNew(_));
                let noted = sorted.places.noted().to_vec();
                let (mut places, pieces) = sorted.finish()?;
                // What it has stored may be what another pack lacks.
                if !noted.is_empty()
                    && let Err(error) = self.store.mend_each(noted, None)
                {
                    tracing::warn!("{}: what is damaged in the store stays so", told(&error));
                }
                let pack = order.map(|_| self.store.begin(has_verity)).transpose()?;
                let gather = |(order, pack)| gather(&self.store, pack, &mut places, (&tree, &pieces), order);
                let ahead = order.zip(pack).map(gather).transpose()?.flatten();
                keep_used(&tree, &pieces, &mut places);
                let names: BTreeSet<Digest> = places.values().map(|(pack, _)| *pack).collect();
                let used = names
                    .into_iter()
                    .map(|name| {
                        self.store.freshen(name);
                        let ahead = ahead == Some(name);
                        self.store.index(name).map(|index| Pack { name, blocks: index.blocks, ahead })
                    })
                    .collect::<Result<Vec<_>>>()?;
                let (bytes, digest) = flat::write(&tree, &used, &pieces, &places)?;
                Ok((bytes, Some(digest), used.iter().map(|pack| pack.name).collect()))
            }
        }
    }
}

/// Forgets the places of pieces that no file has: those of members that later ones of an archive have replaced.
fn keep_used(tree: &Tree, pieces: &[Digest], places: &mut Places) {
    let files = || {
        tree.nodes.iter().filter_map(|node| match node.content {
            Content::Packed { bytes, first } => {
                Some((first, usize::try_from(chunk::count(bytes)).unwrap_or(usize::MAX)))
            }
            _ => None,
        })
    };
    if files().map(|(_, count)| count).sum::<usize>() == pieces.len() {
        return;
    }
    let used: HashSet<&Digest> = files().flat_map(|(first, count)| &pieces[first..][..count]).collect();
    places.retain(|digest, _| used.contains(digest));
}

/// A mistake of ours: what is of one layout was to go to the other's place.
fn misplaced() -> Error {
    Error::Input { path: "files".into(), at: "a build".into(), reason: "their bytes are of another layout".into() }
}

/// Copies the objects that a workload needs first into a pack of their own, in its order, and has the image take them from there.
/// The same objects in the same order are the same pack, so images that begin alike share it.
fn gather(
    store: &Arc<Store>,
    mut pack: NewPack,
    places: &mut Places,
    (tree, pieces): (&Tree, &[Digest]),
    order: &Trace,
) -> Result<Option<Digest>> {
    let mut gathered = HashMap::new();
    let mut files: HashMap<Digest, File> = HashMap::new();
    let mut batch = Batch::new(Leaves::No);
    for id in order.nodes(tree) {
        let Content::Packed { bytes, first } = tree.nodes[id].content else { continue };
        let pieces = &pieces[first..][..usize::try_from(chunk::count(bytes)).unwrap_or(usize::MAX)];
        for (number, wanted) in pieces.iter().enumerate() {
            let Some((from, block)) = places.get(wanted).copied() else { continue };
            let path = store.pack_path(from);
            let file = match files.entry(from) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(File::open(&path).doing("open", &path)?),
            };
            let left = bytes - number as u64 * PIECE_BYTES as u64;
            let count = usize::try_from(left).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
            if !batch.has_room(count) {
                append(&mut pack, &mut batch, &mut gathered)?;
            }
            let found = batch.add(count, |bytes| file.read_exact_at(bytes, block * BLOCK_BYTES as u64));
            // Somebody may have changed what is in the store.
            if found.doing("read", &path)? != *wanted {
                let reason = format!("the object {wanted} in it is damaged");
                return Err(Error::Pack { store: store.folder().into(), pack: from, reason });
            }
        }
    }
    append(&mut pack, &mut batch, &mut gathered)?;
    let name = pack.finish()?;
    if let Some(name) = name {
        places.extend(gathered.into_iter().map(|(digest, block)| (digest, (name, block))));
    }
    Ok(name)
}

/// Appends those pieces of a batch to a pack that are not in it yet, and notes where they are.
fn append(pack: &mut NewPack, batch: &mut Batch, gathered: &mut HashMap<Digest, u64>) -> Result<()> {
    pack.add(batch, |digest, _, block| match gathered.entry(digest) {
        Entry::Occupied(_) => false,
        Entry::Vacant(new) => {
            new.insert(block);
            true
        }
    })?;
    batch.clear();
    Ok(())
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
    places: Arc<StorePlaces>,
    pack: NewPack,
    found: HashMap<Digest, Found>,
    /// The pieces of all files, each file's in order.
    pieces: Vec<Digest>,
    coming: Coming,
    new_bytes: u64,
}

/// What has come of files that one thread reads, and is still to be hashed or added.
struct Coming {
    threads: usize,
    /// Begun when there is something to hash.
    hashers: Option<Hashers<Batch>>,
    /// What batches hash for fs-verity.
    leaves: Leaves,
    batch: Batch,
    /// Memory for the next ones.
    free: Vec<Batch>,
    /// How many pieces have come before those in the batch.
    pieces: usize,
}

impl Sorted {
    fn add(&mut self, batch: &Batch) -> Result<usize> {
        let first = self.pieces.len();
        self.pieces.extend(batch.pieces().map(|piece| piece.digest));
        self.pack.add(batch, |digest, bytes, block| {
            let Entry::Vacant(new) = self.found.entry(digest) else { return false };
            if let Some(place) = self.places.get(&digest) {
                new.insert(Found::Known(place));
                return false;
            }
            new.insert(Found::New(block));
            self.new_bytes += bytes as u64;
            true
        })?;
        Ok(first)
    }

    /// Has what is in the batch hashed, and adds what is.
    fn flush(&mut self) -> Result<()> {
        let Coming { threads, hashers, leaves, batch, free, pieces } = &mut self.coming;
        if batch.len() == 0 {
            return Ok(());
        }
        let hashers = match hashers {
            Some(hashers) => hashers,
            None => hashers.insert(Hashers::begin(*threads, Batch::hash)?),
        };
        *pieces += batch.len();
        let next = free.pop().unwrap_or_else(|| Batch::new(leaves.clone()));
        hashers.give(std::mem::replace(batch, next));
        let room = hashers.room();
        self.settle(room)
    }

    /// Adds what was hashed, until only so many batches are out.
    fn settle(&mut self, left: usize) -> Result<()> {
        while let Some(mut batch) = taken(&mut self.coming.hashers, left) {
            self.add(&batch)?;
            batch.clear();
            self.coming.free.push(batch);
        }
        Ok(())
    }

    /// Completes the new pack; answers where each object is, and the pieces of all files.
    fn finish(mut self) -> Result<(Places, Vec<Digest>)> {
        self.flush()?;
        self.settle(0)?;
        let new = self.pack.finish()?;
        let place = |(digest, at)| match (at, new) {
            (Found::Known(place), _) => Some((digest, place)),
            (Found::New(block), Some(pack)) => Some((digest, (pack, block))),
            // A pack that something was put into is not empty.
            (Found::New(_), None) => None,
        };
        Ok((self.found.into_iter().filter_map(place).collect(), self.pieces))
    }
}

/// The first of more than so many that are being hashed.
fn taken<T: Send + 'static>(hashers: &mut Option<Hashers<T>>, left: usize) -> Option<T> {
    hashers.as_mut().filter(|hashers| hashers.len() > left)?.take()
}

/// Objects that are files of their own.
struct Loose {
    objects: NewObjects,
    threads: usize,
    /// Begun when there is something to hash.
    hashers: Option<Hashers<Unnamed>>,
    /// How many were given to them.
    given: usize,
    /// The digests of those.
    digests: Vec<Digest>,
}

/// A file that is in memory.
struct Unnamed {
    bytes: Vec<u8>,
    digest: Option<Digest>,
}

impl Loose {
    /// Has a file hashed; answers which one it is of those.
    fn take(&mut self, bytes: Vec<u8>) -> Result<usize> {
        let hash = |file: &mut Unnamed| file.digest = Some(Algorithm::Verity.of(&file.bytes));
        let hashers = match &mut self.hashers {
            Some(hashers) => hashers,
            None => self.hashers.insert(Hashers::begin(self.threads, hash)?),
        };
        hashers.give(Unnamed { bytes, digest: None });
        self.given += 1;
        let room = hashers.room();
        self.settle(room)?;
        Ok(self.given - 1)
    }

    /// Adds what was hashed, until only so many files are out.
    fn settle(&mut self, left: usize) -> Result<()> {
        while let Some(Unnamed { bytes, digest }) = taken(&mut self.hashers, left) {
            let digest = digest.ok_or_else(misplaced)?;
            self.objects.add(digest, &bytes)?;
            self.digests.push(digest);
        }
        Ok(())
    }

    /// Tells the inodes what they hold.
    fn finish(mut self, tree: &mut Tree) -> Result<NewObjects> {
        self.settle(0)?;
        for node in &mut tree.nodes {
            if let Content::Packed { bytes, first } = node.content {
                let digest = *self.digests.get(first).ok_or_else(misplaced)?;
                node.content = Content::Object { bytes, digest };
            }
        }
        Ok(self.objects)
    }
}
