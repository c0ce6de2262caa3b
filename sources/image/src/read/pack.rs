//! An open pack: its bytes are verified before use, by this process or, with fs-verity, by the kernel on every read.
//!
//! Objects are at most one chunk (64 KiB), and are verified one by one, on use. Missing objects of an incomplete pack
//! are fetched before use ([`crate::read::fetch`]).

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use ferry_vfs::Backing;
use ferry_vfs::sync::{self, lock};
use rustix::fs::{Advice, FlockOperation};

use crate::format::index::read_object;
use crate::format::index::{Index, Object};
use crate::read::partial::PartialPack;
use crate::store::fsverity;
use crate::store::object_error::ObjectError;

/// States of an object.
pub(crate) const UNKNOWN: u8 = 0;
pub(crate) const SOUND: u8 = 1;
const DAMAGED: u8 = 2;
/// A thread is verifying it.
const BUSY: u8 = 3;
/// How many objects are verified ahead of a sequential read, and how many bytes are requested from the disk before
/// that: enough to keep both busy.
pub(crate) const AHEAD_OBJECTS: usize = 64;
const AHEAD_BYTES: u64 = 8 << 20;
/// The step of disk read-ahead: the usual maximum per request to the kernel.
const AHEAD_STEP_BYTES: u64 = 128 << 10;
/// The maximum buffer that a thread keeps, in bytes.
const PIECE_BYTES_MAX: usize = 1 << 20;
/// A thread that would wait for an object verifies one of this many following ones instead.
const HELP_OBJECTS: usize = 16;

thread_local! {
    /// The buffer for objects.
    static PIECE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

pub(crate) type Proof = Result<(), ObjectError>;

/// An open pack.
#[derive(Debug)]
pub(crate) struct Pack {
    pub file: File,
    pub backing: Arc<Backing>,
    pub index: Index,
    /// Whether all of it is needed soon, in order.
    pub ahead: bool,
    /// Whether the kernel verifies each block on read by the digest in the index: readers get those bytes, or EIO.
    pub is_sealed: bool,
    /// The state of each object. In an incomplete pack none is ever busy: [`PartialPack`] tracks that.
    pub states: Vec<AtomicU8>,
    /// How missing objects are fetched, if the pack is incomplete.
    pub absent: Option<PartialPack>,
    /// Bytes of objects that this process has verified.
    pub verified_bytes: AtomicU64,
    /// Waits for other threads' verifications.
    waiting: (Mutex<()>, Condvar),
}

impl Drop for Pack {
    fn drop(&mut self) {
        if self.absent.is_some() {
            // A child process has a copy of the descriptor until its exec, so closing does not release the lock.
            let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
        }
    }
}

impl Pack {
    pub(crate) fn new(file: File, fd: OwnedFd, index: Index, ahead: bool) -> Self {
        let states = index.objects.iter().map(|_| AtomicU8::new(UNKNOWN)).collect();
        let waiting = (Mutex::new(()), Condvar::new());
        let is_sealed = index.verity.is_some_and(|wanted| fsverity::measure(&file) == Some(wanted));
        let (backing, verified_bytes) = (Arc::new(Backing::new(fd)), AtomicU64::new(0));
        Self { file, backing, index, ahead, is_sealed, states, absent: None, verified_bytes, waiting }
    }

    /// Makes the pack incomplete.
    pub(crate) fn with_holes(mut self, absent: PartialPack) -> Self {
        self.absent = Some(absent);
        self.is_sealed = false;
        self
    }

    /// Returns an error unless the pack's objects are permanent.
    ///
    /// # Errors
    ///
    /// The pack has a cache limit.
    pub(crate) fn check_permanent(&self) -> Proof {
        match &self.absent {
            Some(absent) if absent.common.limit.is_some() => Err(ObjectError::Passing { pack: self.index.pack }),
            _ => Ok(()),
        }
    }

    /// Returns the number of objects.
    pub(crate) fn len(&self) -> usize {
        self.states.len()
    }

    fn is_unknown(&self, at: usize) -> bool {
        self.states.get(at).is_some_and(|state| state.load(Ordering::Acquire) == UNKNOWN)
    }

    /// Verifies adjacent objects; returns the index from which more are likely to be read next.
    pub(crate) fn verify_all(&self, objects: Range<usize>) -> Result<Option<usize>, ObjectError> {
        let Some(last) = objects.clone().last() else { return Ok(None) };
        if let Some(absent) = &self.absent {
            return objects.clone().try_for_each(|at| self.obtain(absent, at..objects.end)).map(|()| None);
        }
        // A read that continues an earlier one is sequential.
        let is_next = objects.start > 0 && !self.is_unknown(objects.start - 1);
        for at in objects {
            // Instead of waiting for an object, this thread verifies following ones.
            if self.states[at].load(Ordering::Acquire) == BUSY
                && let Some(later) = (at + 1..at + HELP_OBJECTS).find(|later| self.is_unknown(*later))
            {
                let _ = self.verify(later);
            }
            self.verify(at)?;
        }
        let is_short = self.is_unknown((last + AHEAD_OBJECTS / 2).min(self.len() - 1));
        Ok((is_next && is_short).then_some(last + 1).filter(|next| *next < self.len()))
    }

    /// Verifies objects that are read soon.
    pub(crate) fn verify_soon(&self, from: usize) {
        let objects = &self.index.objects;
        let Some(first) = (from..objects.len().min(from + AHEAD_OBJECTS)).find(|at| self.is_unknown(*at)) else {
            return;
        };
        // Only advice: without it, the disk is idle while objects are hashed.
        let begin = objects[first].begin();
        for step in (begin..begin + AHEAD_BYTES).step_by(usize::try_from(AHEAD_STEP_BYTES).unwrap_or(usize::MAX)) {
            let _ = rustix::fs::fadvise(&self.file, step, NonZeroU64::new(AHEAD_STEP_BYTES), Advice::WillNeed);
        }
        let mut bytes = 0;
        for (at, object) in objects.iter().enumerate().skip(first).take(AHEAD_OBJECTS) {
            // Chunks of layers can be much larger than others.
            bytes += object.bytes;
            if bytes > AHEAD_BYTES {
                break;
            }
            // Readers get the error.
            let _ = self.verify(at);
        }
    }

    /// Verifies an object once, with the padding of its last block, which may be mapped. Fetches a missing one.
    pub(crate) fn verify(&self, at: usize) -> Proof {
        if let Some(absent) = &self.absent {
            return self.obtain(absent, at..at + 1);
        }
        let object = &self.index.objects[at];
        self.verify_once(&self.states[at], object, || self.is_sound(object))
    }

    /// Lets one of several concurrent callers find out, and stores the result; a failed read may be retried.
    fn verify_once(&self, state: &AtomicU8, object: &Object, find_out: impl FnOnce() -> io::Result<bool>) -> Proof {
        let (pack, digest) = (self.index.pack, object.digest);
        loop {
            match state.compare_exchange(UNKNOWN, BUSY, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(SOUND) => return Ok(()),
                Err(BUSY) => {
                    let guard = lock(&self.waiting.0);
                    // Checked under the lock, so that the notification cannot be missed.
                    if state.load(Ordering::Acquire) == BUSY {
                        drop(sync::wait(&self.waiting.1, guard));
                    }
                }
                Err(_) => return Err(ObjectError::Damaged { pack, digest }),
            }
        }
        let outcome = find_out();
        let known = match &outcome {
            Ok(true) => SOUND,
            Ok(false) => DAMAGED,
            Err(_) => UNKNOWN,
        };
        if known == SOUND {
            self.verified_bytes.fetch_add(object.bytes, Ordering::Relaxed);
        }
        state.store(known, Ordering::Release);
        drop(lock(&self.waiting.0));
        self.waiting.1.notify_all();
        match outcome {
            Ok(true) => Ok(()),
            Ok(false) => Err(ObjectError::Damaged { pack, digest }),
            Err(reason) => Err(ObjectError::Unreadable { pack, digest, reason }),
        }
    }

    /// Verifies an object with a buffer per thread.
    pub(crate) fn is_sound(&self, object: &Object) -> io::Result<bool> {
        PIECE.with_borrow_mut(|memory| {
            let found = read_object(&self.file, object.begin(), object, memory);
            // Chunks of layers can be much larger than others.
            if memory.capacity() > PIECE_BYTES_MAX {
                *memory = Vec::new();
            }
            found
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::format::chunk::{self, CHUNK_BLOCKS, CHUNK_BYTES};

    const OBJECTS: u64 = 1000;

    /// A pack of so many pieces, all the same.
    fn pack() -> Pack {
        let (mut file, piece) = (tempfile::tempfile().expect("a file"), vec![7; CHUNK_BYTES]);
        (0..OBJECTS).for_each(|_| file.write_all(&piece).expect("room"));
        let digest = chunk::digest(&piece);
        let object = |at: u64| Object::aligned(at * CHUNK_BLOCKS, CHUNK_BYTES as u64, digest);
        let index = Index {
            pack: digest,
            blocks: OBJECTS * CHUNK_BLOCKS,
            objects: (0..OBJECTS).map(object).collect(),
            verity: None,
            layer: None,
        };
        let fd = file.try_clone().expect("a descriptor").into();
        Pack::new(file, fd, index, false)
    }

    #[test]
    fn only_sequential_readers_prove_ahead() {
        let pack = pack();
        for at in [300, 900, 20, 640, 0] {
            assert_eq!(pack.verify_all(at..at + 2).expect("it is sound"), None, "{at}");
        }
        assert_eq!(pack.verify_all(302..318).expect("it is sound"), Some(318));
        pack.verify_soon(318);
        let known = |range: Range<usize>| range.filter(|at| !pack.is_unknown(*at)).count();
        assert_eq!((known(300..382), known(382..900)), (82, 2), "what follows, and two of 640");
        // What is known is enough for a while.
        assert_eq!(pack.verify_all(318..334).expect("it is sound"), None);
        assert_eq!(pack.verify_all(350..366).expect("it is sound"), Some(366));
    }
}
