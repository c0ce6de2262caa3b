//! An open pack: nobody sees bytes of it before they are proved.
//!
//! Objects of more than one chunk (512 KiB) are proved chunk by chunk, as they are read, if the store has the hashes of the chunks, which
//! are themselves proved by the object's digest. All others are proved as wholes, and so is what a pack has that may have holes: there
//! an object is got before it is seen ([`crate::fetch`]).

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use ferry_vfs::Backing;
use rustix::fs::Advice;

use crate::erofs::BLOCK_BYTES;
use crate::fetch::Absent;
use crate::objects::Bad;
use crate::parallel;
use crate::store::{Index, Object, read_tree};
use crate::verity::{CHUNK_BYTES, ChunkHash, ChunkHasher, Digest};

/// What is known of an object, or of a chunk.
pub(crate) const UNKNOWN: u8 = 0;
pub(crate) const SOUND: u8 = 1;
const DAMAGED: u8 = 2;
/// Somebody is just finding out.
const BUSY: u8 = 3;

/// How many chunks behind one that is read in order are proved before they are wanted: enough to keep the disk busy.
pub(crate) const AHEAD_CHUNKS: u64 = 4;

/// The pieces that chunks are read in, in bytes; whole blocks.
const PIECE_BYTES: usize = 64 << 10;

thread_local! {
    /// What chunks are read into.
    static PIECE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

type Proof = std::result::Result<(), Bad>;

/// A pack, open.
#[derive(Debug)]
pub(crate) struct Pack {
    pub file: File,
    pub backing: Arc<Backing>,
    pub index: Index,
    /// Whether all of it is wanted soon, in its order.
    pub ahead: bool,
    /// For each object what is known of it. Nobody is ever busy with one of a pack that may have holes: that is told apart there.
    pub states: Vec<AtomicU8>,
    /// How what is not here is got, if the pack may have holes.
    pub absent: Option<Absent>,
    /// The larger objects, by their places in the index; none if the pack may have holes.
    large: HashMap<usize, Large>,
    /// The hashes of all their chunks, once they were wanted; nothing if the store has none.
    hashes: OnceLock<Option<Vec<ChunkHash>>>,
    tree_path: PathBuf,
    /// Who waits for what somebody else finds out.
    waiting: (Mutex<()>, Condvar),
}

/// An object of several chunks.
#[derive(Debug)]
struct Large {
    /// Where its hashes begin among all.
    first: usize,
    /// For each chunk what is known of it.
    states: Vec<AtomicU8>,
    /// Whether its hashes are those of its digest.
    proved: OnceLock<bool>,
}

/// Chunks that are wanted soon: which object's, and which of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Soon {
    pub object: usize,
    pub chunk: u64,
}

fn states(count: usize) -> Vec<AtomicU8> {
    (0..count).map(|_| AtomicU8::new(UNKNOWN)).collect()
}

fn chunks_of(bytes: u64) -> usize {
    usize::try_from(bytes.div_ceil(CHUNK_BYTES as u64)).unwrap_or(usize::MAX)
}

impl Pack {
    pub(crate) fn new(file: File, fd: OwnedFd, index: Index, ahead: bool, tree_path: PathBuf) -> Self {
        let mut first = 0;
        let mut large = HashMap::new();
        // EROFS numbers blocks with 32 bits, so there are no more than 33 million chunks in all packs.
        for (at, object) in index.objects.iter().enumerate().filter(|(_, object)| object.bytes > CHUNK_BYTES as u64) {
            let count = chunks_of(object.bytes);
            large.insert(at, Large { first, states: states(count), proved: OnceLock::new() });
            first += count;
        }
        let states = states(index.objects.len());
        let waiting = (Mutex::new(()), Condvar::new());
        let backing = Arc::new(Backing::new(fd));
        let hashes = OnceLock::new();
        Self { file, backing, index, ahead, states, absent: None, large, hashes, tree_path, waiting }
    }

    /// The same pack where it may have holes: its objects are got as wholes.
    pub(crate) fn with_holes(self, absent: Absent) -> Self {
        Self { absent: Some(absent), large: HashMap::new(), ..self }
    }

    /// That its objects are not dropped again.
    ///
    /// # Errors
    /// What is kept of it is bounded.
    pub(crate) fn lasting(&self) -> Proof {
        match &self.absent {
            Some(absent) if absent.common.limit.is_some() => Err(Bad::Passing { pack: self.index.pack }),
            _ => Ok(()),
        }
    }

    /// How many objects there are.
    pub(crate) fn len(&self) -> usize {
        self.states.len()
    }

    /// Proves a part of an object, that is not empty and within it; answers what is likely to be wanted next.
    pub(crate) fn prove_part(&self, at: usize, offset: u64, bytes: u64) -> std::result::Result<Option<Soon>, Bad> {
        let Some((large, hashes)) = self.chunked(at) else { return self.prove(at).map(|()| None) };
        let chunk = CHUNK_BYTES as u64;
        let (first, last) = (offset / chunk, (offset + bytes.max(1) - 1) / chunk);
        let state = |number: u64| usize::try_from(number).ok().and_then(|number| large.states.get(number));
        let is_known = |number| state(number).is_some_and(|state| state.load(Ordering::Acquire) != UNKNOWN);
        // Who begins a file, or goes on where somebody was, reads in order.
        let is_next = !is_known(last) && (first == 0 || is_known(first - 1) || first < last);
        for number in first..=last {
            // Whoever would wait for a chunk helps with the ones behind it.
            if state(number).is_some_and(|state| state.load(Ordering::Acquire) == BUSY)
                && let Some(later) = (number + 1..=number + AHEAD_CHUNKS)
                    .find(|number| state(*number).is_some_and(|state| state.load(Ordering::Acquire) == UNKNOWN))
            {
                let _ = self.prove_chunk(at, large, hashes, later);
            }
            self.prove_chunk(at, large, hashes, number)?;
        }
        // Who is well within what was proved ahead moves that on.
        let target = last + AHEAD_CHUNKS;
        let moves = is_next || (is_known(last + 1) && !is_known(target));
        Ok((moves && state(last + 1).is_some()).then_some(Soon { object: at, chunk: last + 1 }))
    }

    /// Proves chunks that are wanted soon, as far as there are any.
    pub(crate) fn prove_soon(&self, soon: Soon) {
        let Some((large, hashes)) = self.chunked(soon.object) else { return };
        let object = &self.index.objects[soon.object];
        let from = object.block * BLOCK_BYTES as u64 + soon.chunk * CHUNK_BYTES as u64;
        // Only an advice: without it, the disk waits while we hash.
        let bytes = NonZeroU64::new(2 * AHEAD_CHUNKS * CHUNK_BYTES as u64);
        let _ = rustix::fs::fadvise(&self.file, from, bytes, Advice::WillNeed);
        for number in soon.chunk..(soon.chunk + AHEAD_CHUNKS).min(large.states.len() as u64) {
            // Who reads a damaged one is told.
            let _ = self.prove_chunk(soon.object, large, hashes, number);
        }
    }

    /// Looks once whether an object's bytes are what its digest says, and its last block ends with zeros: with them it is
    /// mapped. What is not here is got.
    pub(crate) fn prove(&self, at: usize) -> Proof {
        if let Some(absent) = &self.absent {
            return self.obtain(absent, at);
        }
        let object = &self.index.objects[at];
        self.once(&self.states[at], object, || self.is_sound(object))
    }

    /// An object's chunks and their hashes, if it has several and those are known.
    fn chunked(&self, at: usize) -> Option<(&Large, &[ChunkHash])> {
        let large = self.large.get(&at)?;
        if self.states[at].load(Ordering::Acquire) != UNKNOWN {
            return None;
        }
        let count = || self.large.values().map(|large| large.states.len()).sum();
        let all = self.hashes.get_or_init(|| read_tree(&self.tree_path, count())).as_ref()?;
        let hashes = all.get(large.first..large.first + large.states.len())?;
        let object = &self.index.objects[at];
        let is_proved = *large.proved.get_or_init(|| {
            let is_proved = Digest::of_chunks(object.bytes, hashes) == object.digest;
            if !is_proved {
                tracing::warn!("the tree of the pack {} is damaged: objects are proved as wholes", self.index.pack);
            }
            is_proved
        });
        is_proved.then_some((large, hashes))
    }

    fn prove_chunk(&self, at: usize, large: &Large, hashes: &[ChunkHash], number: u64) -> Proof {
        let object = &self.index.objects[at];
        let missing = Bad::NoObject { pack: self.index.pack, block: object.block, bytes: object.bytes };
        let place = usize::try_from(number).ok().and_then(|at| Some((large.states.get(at)?, hashes.get(at)?)));
        let (state, hash) = place.ok_or(missing)?;
        self.once(state, object, || {
            let from = number * CHUNK_BYTES as u64;
            let bytes = (object.bytes - from).min(CHUNK_BYTES as u64);
            let found = self.hash(object.block * BLOCK_BYTES as u64 + from, bytes)?;
            Ok(found == *hash && (from + bytes < object.bytes || self.is_padded(object)?))
        })
    }

    /// The hash of a chunk, in pieces that the processor's cache has room for, in memory that each thread keeps.
    fn hash(&self, offset: u64, bytes: u64) -> io::Result<ChunkHash> {
        PIECE.with_borrow_mut(|piece| {
            piece.resize(PIECE_BYTES, 0);
            let mut hasher = ChunkHasher::default();
            let mut done = 0;
            while done < bytes {
                let count = usize::try_from(bytes - done).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
                self.file.read_exact_at(&mut piece[..count], offset + done)?;
                hasher.update(&piece[..count]);
                done += count as u64;
            }
            Ok(hasher.finish())
        })
    }

    /// Has one of all who ask at once find out, and keeps the answer; what cannot be read may be asked again.
    fn once(&self, state: &AtomicU8, object: &Object, find_out: impl FnOnce() -> io::Result<bool>) -> Proof {
        let (pack, digest) = (self.index.pack, object.digest);
        loop {
            match state.compare_exchange(UNKNOWN, BUSY, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(SOUND) => return Ok(()),
                Err(BUSY) => {
                    let (lock, done) = &self.waiting;
                    let held = lock.lock().unwrap_or_else(PoisonError::into_inner);
                    // Looked at under the lock, or the word that it is done may come in between.
                    if state.load(Ordering::Acquire) == BUSY {
                        drop(done.wait(held).unwrap_or_else(PoisonError::into_inner));
                    }
                }
                Err(_) => return Err(Bad::Damaged { pack, digest }),
            }
        }
        let outcome = find_out();
        let known = match &outcome {
            Ok(true) => SOUND,
            Ok(false) => DAMAGED,
            Err(_) => UNKNOWN,
        };
        state.store(known, Ordering::Release);
        let (lock, done) = &self.waiting;
        drop(lock.lock().unwrap_or_else(PoisonError::into_inner));
        done.notify_all();
        match outcome {
            Ok(true) => Ok(()),
            Ok(false) => Err(Bad::Damaged { pack, digest }),
            Err(source) => Err(Bad::Unreadable { pack, digest, source }),
        }
    }

    pub(crate) fn is_sound(&self, object: &Object) -> io::Result<bool> {
        Ok(self.sound_chunks(object)?.is_some())
    }

    /// The hashes of an object's chunks, if its bytes are what its digest says; none if it is no longer than one.
    pub(crate) fn sound_chunks(&self, object: &Object) -> io::Result<Option<Vec<ChunkHash>>> {
        if !self.is_padded(object)? {
            return Ok(None);
        }
        let (found, chunks) = parallel::digest(&self.file, object.block * BLOCK_BYTES as u64, object.bytes)?;
        Ok((found == object.digest).then_some(chunks))
    }

    /// Whether the last block of an object ends with zeros.
    fn is_padded(&self, object: &Object) -> io::Result<bool> {
        let past = object.blocks() * BLOCK_BYTES as u64 - object.bytes;
        let mut padding = vec![0; usize::try_from(past).unwrap_or_default()];
        self.file.read_exact_at(&mut padding, object.block * BLOCK_BYTES as u64 + object.bytes)?;
        Ok(padding.iter().all(|byte| *byte == 0))
    }
}
