//! Writes a pack.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use rustix::fs::OFlags;
use tempfile::TempPath;

use crate::format::chunk;
use crate::format::digest::{Algorithm, Digest};
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{IoContext, Result};
use crate::format::index::WHOLE_PACK;
use crate::format::object::record;
use crate::format::verity::{Hasher, hash_block};
use crate::store::batch::{Batch, Chunk};
use crate::store::layout::packs_directory;
use crate::store::new_file::NewFile;
use crate::store::packs::Store;

/// The number of bytes in the page cache after which they are written back: few, so that the disk is busy while others unpack.
const WRITEBACK_BYTES: usize = 16 << 20;

/// Switches a file to direct I/O or back; returns whether it is direct.
fn set_direct(file: &File, is_direct: bool) -> bool {
    let flags = if is_direct { OFlags::DIRECT } else { OFlags::empty() };
    rustix::fs::fcntl_setfl(file, flags).is_ok() && is_direct
}

/// A pack that is being written. It has no name until it is finished.
///
/// It is written with direct I/O if possible: writing back the page cache would take longer than everything else. A pack whose files
/// are read next ([`Self::keep_cached`]) is written through the page cache, and back by a thread meanwhile.
pub(crate) struct NewPack {
    store: Arc<Store>,
    file: File,
    path: TempPath,
    index: Vec<u8>,
    blocks: u64,
    /// Computes the digest of all blocks, if the index is to contain it.
    verity: Option<Hasher>,
    is_direct: bool,
    writeback: Option<Writeback>,
}

/// A thread that makes durable what is in the page cache.
struct Writeback {
    wanted: SyncSender<()>,
    thread: JoinHandle<io::Result<()>>,
    /// Bytes since it was last asked.
    bytes: usize,
}

impl Writeback {
    fn begin(file: File) -> io::Result<Self> {
        let (wanted, given) = sync_channel(1);
        let work = move || given.iter().try_for_each(|()| file.sync_data());
        let thread = thread::Builder::new().name("image-writeback".into()).spawn(work)?;
        Ok(Self { wanted, thread, bytes: 0 })
    }

    fn wrote(&mut self, bytes: usize) {
        self.bytes += bytes;
        if self.bytes >= WRITEBACK_BYTES && self.wanted.try_send(()).is_ok() {
            self.bytes = 0;
        }
    }

    /// Waits for its end. The kernel tells a failure to write back once: another fsync(2) would report success.
    fn end(self) -> io::Result<()> {
        drop(self.wanted);
        self.thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread panicked")))
    }
}

impl NewPack {
    /// Begins a pack, with its fs-verity digest in the index or not.
    pub(crate) fn begin(store: &Arc<Store>, has_verity: bool) -> Result<Self> {
        let directory = packs_directory(store.directory());
        let NewFile { file, path } = NewFile::begin(&directory)?;
        let is_direct = set_direct(&file, true);
        let (store, index, verity) = (Arc::clone(store), Vec::new(), has_verity.then(Hasher::default));
        Ok(Self { store, file, path, index, blocks: 0, verity, is_direct, writeback: None })
    }

    /// Writes what follows through the page cache.
    pub(crate) fn keep_cached(&mut self) -> Result<()> {
        self.is_direct = set_direct(&self.file, false);
        let file = self.file.try_clone().doing("use", &*self.path)?;
        self.writeback = Some(Writeback::begin(file).doing("begin", "a thread that writes back")?);
        Ok(())
    }

    /// Appends the chunks of a batch that `wants` accepts; `wants` gets their location. Zeros become a hole.
    pub(crate) fn add(&mut self, batch: &Batch, mut wants: impl FnMut(Digest, usize, u64) -> bool) -> Result<()> {
        // Adjacent chunks are written together.
        let mut run = Run { at: self.blocks, from: 0, to: 0 };
        let bytes = batch.as_bytes();
        let mut from = 0;
        for Chunk { padded, bytes: length, digest, leaves } in batch.chunks() {
            let to = from + padded.len();
            if wants(digest, length, self.blocks) {
                let blocks = (padded.len() / BLOCK_BYTES) as u64;
                if chunk::is_zero(padded) {
                    self.write(&bytes[run.from..run.to], run.at)?;
                    run = Run { at: self.blocks + blocks, from: to, to };
                } else if run.to == from {
                    run.to = to;
                } else {
                    self.write(&bytes[run.from..run.to], run.at)?;
                    run = Run { at: self.blocks, from, to };
                }
                match (&mut self.verity, leaves) {
                    (None, _) => {}
                    (Some(verity), Some(leaves)) => leaves.iter().for_each(|leaf| verity.add_block(leaf)),
                    (Some(verity), None) => {
                        padded.chunks(BLOCK_BYTES).for_each(|block| verity.add_block(&hash_block(block)));
                    }
                }
                self.index.extend_from_slice(&record(length as u64, digest));
                self.blocks += blocks;
            }
            from = to;
        }
        self.write(&bytes[run.from..run.to], run.at)
    }

    fn write(&mut self, bytes: &[u8], block: u64) -> Result<()> {
        let at = block * BLOCK_BYTES as u64;
        if let Some(writeback) = &mut self.writeback {
            writeback.wrote(bytes.len());
        }
        match self.file.write_all_at(bytes, at) {
            // Some file systems accept the flag and then refuse the writes.
            Err(error) if self.is_direct && error.kind() == std::io::ErrorKind::InvalidInput => {
                self.is_direct = set_direct(&self.file, false);
                self.file.write_all_at(bytes, at).doing("write to", &*self.path)
            }
            outcome => outcome.doing("write to", &*self.path),
        }
    }

    /// Makes it durable and gives it its name; `None` if it is empty. The index is last: with it, the pack is complete.
    pub(crate) fn finish(mut self) -> Result<Option<Digest>> {
        if self.blocks == 0 {
            return Ok(None);
        }
        self.writeback.take().map_or(Ok(()), Writeback::end).doing("sync", &*self.path)?;
        let verity = self.verity.as_mut().map(Hasher::finish);
        self.index.extend(verity.iter().flat_map(|digest| record(WHOLE_PACK, *digest)));
        let pack = Algorithm::Blake3.of(&self.index);
        let (store, path, file) = (self.store, self.path, self.file);
        file.set_len(self.blocks * BLOCK_BYTES as u64).doing("write to", &*path)?;
        NewFile { file, path }.keep_sealed(&store.pack_path(pack), verity)?;
        let mut index = NewFile::begin(&packs_directory(&store.directory))?;
        index.file.write_all(&self.index).doing("write to", &*index.path)?;
        index.keep(&store.index_path(pack))?;
        Ok(Some(pack))
    }
}

/// Adjacent chunks of a batch, and their block in the pack.
struct Run {
    at: u64,
    from: usize,
    to: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_to_write_back_is_not_forgotten() {
        for (path, is_synced) in [("/dev/null", false), ("/proc/self/exe", true)] {
            let mut writeback =
                Writeback::begin(File::open(path).expect("it is there")).expect("threads can be started");
            writeback.wrote(WRITEBACK_BYTES);
            assert_eq!(writeback.end().is_ok(), is_synced, "{path}");
        }
    }
}
