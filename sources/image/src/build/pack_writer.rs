//! Stores the bytes of files in packs, and writes an image of the flat layout.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::build::content_writer::{Buffer, ContentWriter, Stop, WriterOutput, take_hashed};
use crate::build::hash_pool::Hashers;
use crate::build::options::Options;
use crate::build::scan::{FoundFile, unreadable};
use crate::build::trace::Trace;
use crate::format::chunk::{self, CHUNK_BYTES};
use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Error, IoContext, Result, error_chain};
use crate::format::flat::{self, Pack};
use crate::format::index::Places;
use crate::format::plain_file::UNTRUSTED_OPEN_FLAGS;
use crate::format::tree::{Content, NodeId, Tree};
use crate::store::batch::Batch;
use crate::store::new_pack::NewPack;
use crate::store::packs::Store;
use crate::store::places::StorePlaces;

/// The number of buffers per reading thread; with their size it bounds the memory.
const BUFFERS_PER_THREAD: usize = 4;

/// Stores the chunks that the store does not have in a new pack.
pub(crate) struct PackWriter {
    store: Arc<Store>,
    has_verity: bool,
    /// Whether files get identities.
    identities: bool,
    /// The locations of the store's objects.
    places: Arc<StorePlaces>,
    pack: NewPack,
    found: HashMap<Digest, ObjectSource>,
    /// The chunks of all files, in order.
    chunks: Vec<Digest>,
    input: Input,
    data_bytes: u64,
    new_bytes: u64,
}

/// Chunks of [`ContentWriter::add_file`] that are not yet stored.
struct Input {
    threads: usize,
    /// Started with the first batch.
    hashers: Option<Hashers<Batch>>,
    /// The chunks that batches also hash for fs-verity.
    hashes_unless_in: Option<Arc<StorePlaces>>,
    batch: Batch,
    /// Empty batches.
    free: Vec<Batch>,
    /// The number of chunks added before those in the batch.
    chunks: usize,
}

impl PackWriter {
    /// Creates a writer. Its threads hash the files of [`ContentWriter::add_file`].
    pub(crate) fn begin(store: &Arc<Store>, options: &Options) -> Result<Self> {
        let (threads, has_verity) = (options.threads, options.verity);
        let places = Arc::new(store.places(has_verity)?.without(&options.unused_packs));
        let hashes_unless_in = has_verity.then(|| Arc::clone(&places));
        let (batch, pack) = (Batch::new(hashes_unless_in.clone()), NewPack::begin(store, has_verity)?);
        let input = Input { threads, hashers: None, hashes_unless_in, batch, free: Vec::new(), chunks: 0 };
        let (store, found, chunks) = (Arc::clone(store), HashMap::new(), Vec::new());
        let identities = options.inode_share;
        Ok(Self { store, has_verity, identities, places, pack, found, chunks, input, data_bytes: 0, new_bytes: 0 })
    }

    /// Keeps new objects in the page cache, for files that are read next.
    pub(crate) fn keep_cached(&mut self) -> Result<()> {
        self.pack.keep_cached()
    }

    /// Stores the new chunks of a hashed batch. Returns the number of the first chunk.
    fn store_batch(&mut self, batch: &Batch) -> Result<usize> {
        let first = self.chunks.len();
        self.chunks.extend(batch.chunks().map(|chunk| chunk.digest));
        self.pack.add(batch, |digest, bytes, block| {
            let Entry::Vacant(new) = self.found.entry(digest) else { return false };
            if let Some(place) = self.places.get(&digest) {
                new.insert(ObjectSource::Known(place));
                return false;
            }
            new.insert(ObjectSource::New(block));
            self.new_bytes += bytes as u64;
            true
        })?;
        Ok(first)
    }

    /// Passes the current batch to the hashers, and stores hashed batches.
    fn flush(&mut self) -> Result<()> {
        let Input { threads, hashers, hashes_unless_in, batch, free, chunks } = &mut self.input;
        if batch.len() == 0 {
            return Ok(());
        }
        let hashers = match hashers {
            Some(hashers) => hashers,
            None => hashers.insert(Hashers::begin(*threads, Batch::hash)?),
        };
        *chunks += batch.len();
        let next = free.pop().unwrap_or_else(|| Batch::new(hashes_unless_in.clone()));
        hashers.give(std::mem::replace(batch, next));
        let room = hashers.room();
        self.store_hashed(room)
    }

    /// Stores hashed batches until only `left` remain in the pool.
    fn store_hashed(&mut self, left: usize) -> Result<()> {
        while let Some(mut batch) = take_hashed(&mut self.input.hashers, left) {
            self.store_batch(&batch)?;
            batch.clear();
            self.input.free.push(batch);
        }
        Ok(())
    }
}

impl ContentWriter for PackWriter {
    const IS_COMPOSEFS: bool = false;
    const GROUP_FILES_MAX: usize = 256;
    type Buffer = PackBuffer;

    fn new_buffer(&self) -> PackBuffer {
        PackBuffer { batch: Batch::new(self.input.hashes_unless_in.clone()), begun: Vec::new(), directory: None }
    }

    fn buffers_per_thread(_: usize) -> usize {
        BUFFERS_PER_THREAD
    }

    fn add_buffer(&mut self, buffer: &mut PackBuffer) -> Result<Vec<(NodeId, Content)>> {
        self.flush()?;
        self.store_hashed(0)?;
        self.input.chunks += buffer.batch.len();
        let first = self.store_batch(&buffer.batch)?;
        buffer.batch.clear();
        buffer.directory = None;
        self.data_bytes += buffer.begun.iter().map(|(_, bytes, _)| bytes).sum::<u64>();
        let content = |(node, bytes, at)| (node, Content::Packed { bytes, first: first + at });
        Ok(buffer.begun.drain(..).map(content).collect())
    }

    fn add_file(&mut self, bytes: u64, fill: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<Content> {
        self.data_bytes += bytes;
        let first = self.input.chunks + self.input.batch.len();
        let mut left = bytes;
        while left > 0 {
            let count = usize::try_from(left).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            if !self.input.batch.has_room(count) {
                self.flush()?;
            }
            self.input.batch.add_unhashed(count, &mut *fill)?;
            left -= count as u64;
        }
        Ok(Content::Packed { bytes, first })
    }

    fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    fn new_bytes(&mut self) -> Result<u64> {
        self.flush()?;
        self.store_hashed(0)?;
        Ok(self.new_bytes)
    }

    fn finish(mut self, tree: Tree, order: Option<&Trace>) -> Result<WriterOutput> {
        self.flush()?;
        self.store_hashed(0)?;
        let Self { store, has_verity, identities, places: known, pack, found, chunks, .. } = self;
        let new = pack.finish()?;
        let place = |(digest, at)| match (at, new) {
            (ObjectSource::Known(place), _) => Some((digest, place)),
            (ObjectSource::New(block), Some(pack)) => Some((digest, (pack, block))),
            // A pack with an object is not empty.
            (ObjectSource::New(_), None) => None,
        };
        let mut places: Places = found.into_iter().filter_map(place).collect();
        // The new pack may contain objects that are damaged in other packs.
        let noted = known.noted().to_vec();
        if !noted.is_empty()
            && let Err(error) = store.repair_each(noted, None)
        {
            tracing::warn!("{}: damaged packs in the store are not repaired", error_chain(&error));
        }
        let pack = order.map(|_| NewPack::begin(&store, has_verity)).transpose()?;
        let gather = |(order, pack)| gather(&store, pack, &mut places, (&tree, &chunks), order);
        let ahead = order.zip(pack).map(gather).transpose()?.flatten();
        keep_used(&tree, &chunks, &mut places);
        let names: BTreeSet<Digest> = places.values().map(|(pack, _)| *pack).collect();
        let used = names
            .into_iter()
            .map(|name| {
                store.freshen(name);
                let ahead = ahead == Some(name);
                store.index(name).map(|index| Pack { name, blocks: index.blocks, ahead })
            })
            .collect::<Result<Vec<_>>>()?;
        let (bytes, tree) = flat::write(&tree, &used, &chunks, &places, identities)?;
        Ok(WriterOutput { bytes, tree: Some(tree), packs: used.iter().map(|pack| pack.name).collect() })
    }
}

/// Chunks of files, and the files that begin in it.
pub(crate) struct PackBuffer {
    batch: Batch,
    /// Node and length of each file that begins here, and the number of its first chunk in the batch.
    begun: Vec<(NodeId, u64, usize)>,
    /// The directory of the last file: the next one is often in it, too, and resolving its path again is expensive.
    directory: Option<(PathBuf, OwnedFd)>,
}

impl PackBuffer {
    fn open(&mut self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let whole = || openat(CWD, path, UNTRUSTED_OPEN_FLAGS, Mode::empty());
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return whole() };
        if self.directory.as_ref().is_none_or(|(known, _)| known != parent) {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            self.directory = Some((parent.into(), openat(CWD, parent, flags, Mode::empty())?));
        }
        let Some((_, directory)) = &self.directory else { return whole() };
        openat(directory, name, UNTRUSTED_OPEN_FLAGS, Mode::empty())
    }
}

impl Buffer for PackBuffer {
    fn read(
        &mut self,
        FoundFile { node, seen, path }: &FoundFile,
        flush: &mut dyn FnMut(&mut Self) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let mut file = seen.file(self.open(path), path)?;
        let mut left = seen.bytes;
        while left > 0 {
            let count = usize::try_from(left).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            if !self.batch.has_room(count) {
                flush(self)?;
            }
            if left == seen.bytes {
                self.begun.push((*node, seen.bytes, self.batch.len()));
            }
            self.batch.add(count, |chunk| file.read_exact(chunk)).map_err(|error| unreadable(error, path))?;
            left -= count as u64;
        }
        seen.check(&file, path)?;
        Ok(())
    }
}

/// Removes the locations of chunks without a file: those of archive members that later members replaced.
fn keep_used(tree: &Tree, chunks: &[Digest], places: &mut Places) {
    let files = || {
        tree.nodes.iter().filter_map(|node| match node.content {
            Content::Packed { bytes, first } => {
                Some((first, usize::try_from(chunk::count(bytes)).unwrap_or(usize::MAX)))
            }
            _ => None,
        })
    };
    if files().map(|(_, count)| count).sum::<usize>() == chunks.len() {
        return;
    }
    let used: HashSet<&Digest> = files().flat_map(|(first, count)| &chunks[first..][..count]).collect();
    places.retain(|digest, _| used.contains(digest));
}

/// Copies the objects that a workload needs first into a pack of their own, in its order, and uses their locations
/// there. The same objects in the same order produce the same pack, so images with the same beginning share it.
fn gather(
    store: &Arc<Store>,
    mut pack: NewPack,
    places: &mut Places,
    (tree, chunks): (&Tree, &[Digest]),
    order: &Trace,
) -> Result<Option<Digest>> {
    let mut gathered = HashMap::new();
    let mut files: HashMap<Digest, File> = HashMap::new();
    let mut batch = Batch::new(None);
    for id in order.nodes(tree) {
        let Content::Packed { bytes, first } = tree.nodes[id].content else { continue };
        let chunks = &chunks[first..][..usize::try_from(chunk::count(bytes)).unwrap_or(usize::MAX)];
        for (number, wanted) in chunks.iter().enumerate() {
            let Some((from, block)) = places.get(wanted).copied() else { continue };
            let path = store.pack_path(from);
            let file = match files.entry(from) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(File::open(&path).doing("open", &path)?),
            };
            let left = bytes - number as u64 * CHUNK_BYTES as u64;
            let count = usize::try_from(left).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            if !batch.has_room(count) {
                append(&mut pack, &mut batch, &mut gathered)?;
            }
            let found = batch.add(count, |bytes| file.read_exact_at(bytes, block * BLOCK_BYTES as u64));
            // The store may have changed meanwhile.
            if found.doing("read", &path)? != *wanted {
                let reason = format!("the object {wanted} in it is damaged");
                return Err(Error::Pack { store: store.directory().into(), pack: from, reason });
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

/// Appends the chunks of a batch that a pack does not yet have, and records their locations.
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

/// The location of an object of this image.
#[derive(Clone, Copy)]
enum ObjectSource {
    /// In this existing pack, at this block.
    Known((Digest, u64)),
    /// In the new pack, at this block.
    New(u64),
}
