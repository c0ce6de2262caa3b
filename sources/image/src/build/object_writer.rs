//! Stores the bytes of files as objects, and writes a composefs image.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use rustix::fs::{CWD, Mode, openat};

use crate::build::content_writer::{Buffer, ContentWriter, Stop, WriterOutput, take_hashed};
use crate::build::hash_pool::Hashers;
use crate::build::options::KEPT_BYTES_MAX;
use crate::build::scan::{FoundFile, unreadable};
use crate::build::trace::Trace;
use crate::format::composefs;
use crate::format::digest::{Algorithm, Digest};
use crate::format::error::{IoContext, Result};
use crate::format::plain_file::UNTRUSTED_OPEN_FLAGS;
use crate::format::tree::{Content, NodeId, Tree};
use crate::format::verity::Hasher;
use crate::store::new_file::NewFile;
use crate::store::new_objects::NewObjects;
use crate::store::packs::Store;
use crate::store::parallel;

/// The maximum number of files that are read before they are stored; with [`KEPT_BYTES_MAX`] it bounds the memory.
const AHEAD_FILES_MAX: usize = 32;
/// The size of the parts in which large files are copied, in bytes.
const COPY_BYTES: u64 = 1 << 20;

/// Stores files as objects.
pub(crate) struct ObjectWriter {
    objects: NewObjects,
    version: Option<u32>,
    directory: PathBuf,
    threads: usize,
    /// Started with the first file.
    hashers: Option<Hashers<(Vec<u8>, Option<Digest>)>>,
    /// The number of files given to the hashers.
    given: usize,
    /// Their digests, in the same order.
    digests: Vec<Digest>,
    data_bytes: u64,
}

impl ObjectWriter {
    /// Creates a writer whose `threads` hash the files of [`ContentWriter::add_file`]. `version` is the image's.
    pub(crate) fn begin(store: &Store, version: Option<u32>, threads: usize) -> Result<Self> {
        let (objects, directory) = (NewObjects::begin(store.directory())?, store.directory().join("objects"));
        let (hashers, digests) = (None, Vec::new());
        Ok(Self { objects, version, directory, threads, hashers, given: 0, digests, data_bytes: 0 })
    }

    /// Stores hashed files until only `left` remain in the pool.
    fn store_hashed(&mut self, left: usize) -> Result<()> {
        while let Some((bytes, digest)) = take_hashed(&mut self.hashers, left) {
            let digest = digest.unwrap_or_else(|| Algorithm::Verity.of(&bytes));
            self.objects.add(digest, &bytes)?;
            self.digests.push(digest);
        }
        Ok(())
    }
}

impl ContentWriter for ObjectWriter {
    const IS_COMPOSEFS: bool = true;
    const GROUP_FILES_MAX: usize = 1;
    type Buffer = ObjectBuffer;

    fn new_buffer(&self) -> ObjectBuffer {
        ObjectBuffer(None)
    }

    fn buffers_per_thread(threads: usize) -> usize {
        AHEAD_FILES_MAX.div_ceil(threads)
    }

    fn add_buffer(&mut self, buffer: &mut ObjectBuffer) -> Result<Vec<(NodeId, Content)>> {
        let Some(HashedFile { node, path, bytes, digest, kept }) = buffer.0.take() else { return Ok(Vec::new()) };
        self.data_bytes += bytes;
        match kept {
            Some(kept) => self.objects.add(digest, &kept)?,
            None => self.objects.add_file(digest, bytes, &path)?,
        }
        Ok(vec![(node, Content::Object { bytes, digest })])
    }

    /// Threads hash small files, whose digests are known at the end; large files are written to a file first.
    fn add_file(&mut self, bytes: u64, fill: &mut dyn FnMut(&mut [u8]) -> Result<()>) -> Result<Content> {
        self.data_bytes += bytes;
        if bytes <= KEPT_BYTES_MAX {
            let mut kept = vec![0; usize::try_from(bytes).unwrap_or_default()];
            fill(&mut kept)?;
            let hash = |file: &mut (Vec<u8>, Option<Digest>)| file.1 = Some(Algorithm::Verity.of(&file.0));
            let hashers = match &mut self.hashers {
                Some(hashers) => hashers,
                None => self.hashers.insert(Hashers::begin(self.threads, hash)?),
            };
            hashers.give((kept, None));
            self.given += 1;
            let room = hashers.room();
            self.store_hashed(room)?;
            return Ok(Content::Packed { bytes, first: self.given - 1 });
        }
        let mut new = NewFile::begin(&self.directory)?;
        let (mut hasher, mut left) = (Hasher::default(), bytes);
        let mut memory = vec![0; usize::try_from(COPY_BYTES).unwrap_or_default()];
        while left > 0 {
            let part = &mut memory[..usize::try_from(left.min(COPY_BYTES)).unwrap_or_default()];
            fill(part)?;
            hasher.update(part);
            if part.iter().all(|byte| *byte == 0) {
                let count = i64::try_from(part.len()).unwrap_or(i64::MAX);
                new.file.seek(SeekFrom::Current(count)).doing("write to", &*new.path)?;
            } else {
                new.file.write_all(part).doing("write to", &*new.path)?;
            }
            left -= part.len() as u64;
        }
        new.file.set_len(bytes).doing("write to", &*new.path)?;
        let digest = hasher.finish();
        self.objects.add_file(digest, bytes, &new.path)?;
        Ok(Content::Object { bytes, digest })
    }

    fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    fn new_bytes(&mut self) -> Result<u64> {
        self.store_hashed(0)?;
        Ok(self.objects.new_bytes)
    }

    fn finish(mut self, mut tree: Tree, _: Option<&Trace>) -> Result<WriterOutput> {
        self.store_hashed(0)?;
        for node in &mut tree.nodes {
            if let Content::Packed { bytes, first } = node.content {
                node.content = Content::Object { bytes, digest: self.digests[first] };
            }
        }
        // A tree that does not fit the layout must leave nothing in the store.
        let bytes = composefs::write(tree, self.version)?;
        self.objects.finish()?;
        Ok(WriterOutput { bytes, tree: None, packs: Vec::new() })
    }
}

/// A file that was read and hashed.
struct HashedFile {
    node: NodeId,
    path: PathBuf,
    bytes: u64,
    digest: Digest,
    /// The bytes of a small file; others are read again.
    kept: Option<Vec<u8>>,
}

/// Holds one file.
pub(crate) struct ObjectBuffer(Option<HashedFile>);

impl Buffer for ObjectBuffer {
    fn read(
        &mut self,
        FoundFile { node, seen, path }: &FoundFile,
        flush: &mut dyn FnMut(&mut Self) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        if self.0.is_some() {
            flush(self)?;
        }
        let bytes = seen.bytes;
        let mut file = seen.file(openat(CWD, path, UNTRUSTED_OPEN_FLAGS, Mode::empty()), path)?;
        let (digest, kept) = if bytes > KEPT_BYTES_MAX {
            (parallel::digest(&file, 0, bytes).map_err(|error| unreadable(error, path))?, None)
        } else {
            let mut kept = vec![0; usize::try_from(bytes).unwrap_or_default()];
            file.read_exact(&mut kept).map_err(|error| unreadable(error, path))?;
            (Algorithm::Verity.of(&kept), Some(kept))
        };
        seen.check(&file, path)?;
        self.0 = Some(HashedFile { node: *node, path: path.clone(), bytes, digest, kept });
        Ok(())
    }
}
