//! Builds the image of one layer of a container from its blob while that is read, without files in between.
//!
//! One thread decompresses and one hashes the archive; the writer's threads hash files; the caller's thread reads members.

use std::io::{self, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;

use sha2::{Digest as _, Sha256};

use super::{oci, tar};
use crate::build::options::{BuildReport, Options};
use crate::build::pack_writer::PackWriter;
use crate::build::run::store_tree;
use crate::format::digest::DIGEST_BYTES;
use crate::format::error::{Error, IoContext, Result};
use crate::store::packs::Store;

/// The size of the buffers that threads exchange, in bytes.
const PIECE_BYTES: usize = 1 << 18;
/// The number of pieces that wait for a thread at most; they limit memory.
const PIECES_MAX: usize = 8;
/// The size of reads of the blob in bytes.
const READ_BYTES: usize = 1 << 18;

/// The result of [`unpack_layer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnpackReport {
    /// The image.
    pub image: BuildReport,
    /// The SHA-256 digest of the archive, unpacked: the layer's diff ID.
    pub sha256: [u8; DIGEST_BYTES],
    /// The size of the archive in bytes.
    pub bytes: u64,
}

/// Builds an image of a layer: a tar archive, plain or packed by gzip or zstd. Errors name it `source`.
///
/// # Errors
///
/// As [`crate::build()`]; [`crate::Error::Input`]: the archive is invalid, tar readers disagree on it, or it cannot be unpacked.
pub fn unpack_layer(
    blob: impl Read + Send,
    source: &Path,
    image: &Path,
    store: Store,
    rules: &tar::LayerRules<'_>,
) -> Result<UnpackReport> {
    let options = Options { inode_share: rules.inode_share, ..Options::default() };
    let mut writer = PackWriter::begin(&Arc::new(store), &options)?;
    // A container that starts next reads some of the new files.
    writer.keep_cached()?;
    thread::scope(|scope| {
        let (archive, pieces) = sync_channel(PIECES_MAX);
        let (hashed, to_hash) = sync_channel::<Arc<Vec<u8>>>(PIECES_MAX);
        // The channel can hold all pieces.
        let (free, reusable) = sync_channel(4 * PIECES_MAX);
        let recycle = free.clone();
        let hasher = thread::Builder::new().name("layer-hasher".into());
        let hasher = hasher.spawn_scoped(scope, move || {
            let (mut hash, mut bytes) = (Sha256::new(), 0);
            for piece in to_hash {
                hash.update(&*piece);
                bytes += piece.len() as u64;
                release(piece, &recycle);
            }
            (hash.finalize().into(), bytes)
        });
        let hasher = hasher.doing("begin", "a thread that hashes")?;
        let unpacker = thread::Builder::new().name("layer-unpacker".into());
        let unpacker = unpacker.spawn_scoped(scope, move || unpack(blob, &archive, &hashed, &reusable));
        let unpacker = unpacker.doing("begin", "a thread that unpacks")?;
        let pieces = Pieces { pieces, free, piece: Arc::default(), at: 0 };
        let tree = tar::read_layer(pieces, source, rules, &mut writer).map_err(|error| match error {
            // Another program may be able to unpack it.
            Error::Io { path, source, .. } if source.kind() == io::ErrorKind::InvalidData => {
                Error::Input { path, at: "unpacking".into(), reason: source.to_string() }
            }
            error => error,
        });
        unpacker.join().expect("an unpacker does not panic");
        let (sha256, bytes) = hasher.join().expect("a hasher does not panic");
        Ok(UnpackReport { image: store_tree(writer, tree?, image, &options)?, sha256, bytes })
    })
}

/// Unpacks a blob into pieces, until the receivers are gone.
fn unpack(
    blob: impl Read,
    archive: &SyncSender<io::Result<Arc<Vec<u8>>>>,
    hashed: &SyncSender<Arc<Vec<u8>>>,
    reusable: &Receiver<Vec<u8>>,
) {
    let all = || -> io::Result<()> {
        let mut input = oci::unpacked(BufReader::with_capacity(READ_BYTES, blob))?;
        loop {
            let mut piece = reusable.try_recv().unwrap_or_default();
            piece.clear();
            input.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut piece)?;
            if piece.is_empty() {
                return Ok(());
            }
            let piece = Arc::new(piece);
            if hashed.send(Arc::clone(&piece)).is_err() || archive.send(Ok(piece)).is_err() {
                return Ok(());
            }
        }
    };
    if let Err(error) = all() {
        // The reader may be gone after another failure.
        let _ = archive.send(Err(error));
    }
}

/// Reuses the memory of a piece that has no other users.
fn release(piece: Arc<Vec<u8>>, free: &SyncSender<Vec<u8>>) {
    if let Some(piece) = Arc::into_inner(piece)
        && let Err(TrySendError::Full(piece)) = free.try_send(piece)
    {
        drop(piece);
    }
}

/// Reads pieces as one archive.
struct Pieces {
    pieces: Receiver<io::Result<Arc<Vec<u8>>>>,
    free: SyncSender<Vec<u8>>,
    piece: Arc<Vec<u8>>,
    at: usize,
}

impl Read for Pieces {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.at == self.piece.len() {
            release(std::mem::take(&mut self.piece), &self.free);
            self.at = 0;
            match self.pieces.recv() {
                Ok(piece) => self.piece = piece?,
                Err(_) => return Ok(0),
            }
        }
        let count = bytes.len().min(self.piece.len() - self.at);
        bytes[..count].copy_from_slice(&self.piece[self.at..][..count]);
        self.at += count;
        Ok(count)
    }
}
