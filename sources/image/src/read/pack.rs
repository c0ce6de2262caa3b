//! An open pack: nobody sees bytes of it before they are proved, by us, or, where the pack has fs-verity, by the kernel when it reads them.
//!
//! Objects are no longer than a piece (64 KiB), and are proved one by one, as they are read. What a pack has that may have holes is got
//! before it is seen ([`crate::read::fetch`]).

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use ferry_vfs::Backing;
use rustix::fs::{Advice, FlockOperation};

use crate::format::erofs::BLOCK_BYTES;
use crate::format::index::read_object;
use crate::format::index::{Index, Object};
use crate::read::partial::PartialPack;
use crate::store::fsverity;
use crate::store::object_error::ObjectError;

/// What is known of an object.
pub(crate) const UNKNOWN: u8 = 0;
pub(crate) const SOUND: u8 = 1;
const DAMAGED: u8 = 2;
/// Somebody is just finding out.
const BUSY: u8 = 3;
/// How many objects behind one that is read in order are proved before they are wanted, and how many bytes the disk is asked for before
/// that: enough to keep both busy.
pub(crate) const AHEAD_OBJECTS: usize = 64;
const AHEAD_BYTES: u64 = 8 << 20;
/// In which steps: the usual read-ahead of a disk, of which the kernel does not take more at once.
const AHEAD_STEP_BYTES: u64 = 128 << 10;
/// Who would wait for an object looks at so many behind it for one to prove meanwhile.
const HELP_OBJECTS: usize = 16;

thread_local! {
    /// What objects are read into.
    static PIECE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

pub(crate) type Proof = Result<(), ObjectError>;

/// A pack, open.
#[derive(Debug)]
pub(crate) struct Pack {
    pub file: File,
    pub backing: Arc<Backing>,
    pub index: Index,
    /// Whether all of it is wanted soon, in its order.
    pub ahead: bool,
    /// Whether the kernel proves each block that is read, by the digest that the index names: readers then get that, or EIO.
    pub is_sealed: bool,
    /// For each object what is known of it. Nobody is ever busy with one of a pack that may have holes: that is told apart there.
    pub states: Vec<AtomicU8>,
    /// How what is not here is got, if the pack may have holes.
    pub absent: Option<PartialPack>,
    /// Who waits for what somebody else finds out.
    waiting: (Mutex<()>, Condvar),
}

impl Drop for Pack {
    fn drop(&mut self) {
        if self.absent.is_some() {
            // Closing alone keeps the lock for as long as a child process has a copy of the descriptor, which it has until its exec.
            let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
        }
    }
}

impl Pack {
    pub(crate) fn new(file: File, fd: OwnedFd, index: Index, ahead: bool) -> Self {
        let states = index.objects.iter().map(|_| AtomicU8::new(UNKNOWN)).collect();
        let waiting = (Mutex::new(()), Condvar::new());
        let is_sealed = index.verity.is_some_and(|wanted| fsverity::measure(&file) == Some(wanted));
        Self { file, backing: Arc::new(Backing::new(fd)), index, ahead, is_sealed, states, absent: None, waiting }
    }

    /// The same pack where it may have holes.
    pub(crate) fn with_holes(mut self, absent: PartialPack) -> Self {
        self.absent = Some(absent);
        self.is_sealed = false;
        self
    }

    /// That its objects are not dropped again.
    ///
    /// # Errors
    /// What is kept of it is bounded.
    pub(crate) fn long_lived(&self) -> Proof {
        match &self.absent {
            Some(absent) if absent.common.limit.is_some() => Err(ObjectError::Passing { pack: self.index.pack }),
            _ => Ok(()),
        }
    }

    /// How many objects there are.
    pub(crate) fn len(&self) -> usize {
        self.states.len()
    }

    fn is_unknown(&self, at: usize) -> bool {
        self.states.get(at).is_some_and(|state| state.load(Ordering::Acquire) == UNKNOWN)
    }

    /// Proves neighbouring objects; returns from which one on more are likely to be wanted next.
    pub(crate) fn prove_all(&self, objects: Range<usize>) -> Result<Option<usize>, ObjectError> {
        let Some(last) = objects.clone().last() else { return Ok(None) };
        if let Some(absent) = &self.absent {
            return objects.clone().try_for_each(|at| self.obtain(absent, at..objects.end)).map(|()| None);
        }
        // Who goes on where somebody was reads in order.
        let is_next = objects.start > 0 && !self.is_unknown(objects.start - 1);
        for at in objects {
            // Whoever would wait for an object helps with the ones behind it.
            if self.states[at].load(Ordering::Acquire) == BUSY
                && let Some(later) = (at + 1..at + HELP_OBJECTS).find(|later| self.is_unknown(*later))
            {
                let _ = self.prove(later);
            }
            self.prove(at)?;
        }
        let is_short = self.is_unknown((last + AHEAD_OBJECTS / 2).min(self.len() - 1));
        Ok((is_next && is_short).then_some(last + 1).filter(|next| *next < self.len()))
    }

    /// Proves objects that are wanted soon.
    pub(crate) fn prove_soon(&self, from: usize) {
        let objects = &self.index.objects;
        let Some(first) = (from..objects.len().min(from + AHEAD_OBJECTS)).find(|at| self.is_unknown(*at)) else {
            return;
        };
        // Only an advice: without it, the disk waits while we hash.
        let begin = objects[first].block * BLOCK_BYTES as u64;
        for step in (begin..begin + AHEAD_BYTES).step_by(usize::try_from(AHEAD_STEP_BYTES).unwrap_or(usize::MAX)) {
            let _ = rustix::fs::fadvise(&self.file, step, NonZeroU64::new(AHEAD_STEP_BYTES), Advice::WillNeed);
        }
        for at in first..objects.len().min(first + AHEAD_OBJECTS) {
            // Who reads a damaged one is told.
            let _ = self.prove(at);
        }
    }

    /// Looks once whether an object's bytes are what its digest says, and its last block ends with zeros: with them it is
    /// mapped. What is not here is got.
    pub(crate) fn prove(&self, at: usize) -> Proof {
        if let Some(absent) = &self.absent {
            return self.obtain(absent, at..at + 1);
        }
        let object = &self.index.objects[at];
        self.once(&self.states[at], object, || self.is_sound(object))
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
                Err(_) => return Err(ObjectError::Damaged { pack, digest }),
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
            Ok(false) => Err(ObjectError::Damaged { pack, digest }),
            Err(source) => Err(ObjectError::Unreadable { pack, digest, source }),
        }
    }

    /// Whether an object is what its digest says, in memory that each thread keeps.
    pub(crate) fn is_sound(&self, object: &Object) -> io::Result<bool> {
        PIECE.with_borrow_mut(|memory| read_object(&self.file, object.block, object, memory))
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
        let object = |at: u64| Object { block: at * CHUNK_BLOCKS, bytes: CHUNK_BYTES as u64, digest };
        let index = Index {
            pack: digest,
            blocks: OBJECTS * CHUNK_BLOCKS,
            objects: (0..OBJECTS).map(object).collect(),
            verity: None,
        };
        let fd = file.try_clone().expect("a descriptor").into();
        Pack::new(file, fd, index, false)
    }

    #[test]
    fn who_reads_in_order_has_more_proved_and_who_does_not_has_not() {
        let pack = pack();
        for at in [300, 900, 20, 640, 0] {
            assert_eq!(pack.prove_all(at..at + 2).expect("it is sound"), None, "{at}");
        }
        assert_eq!(pack.prove_all(302..318).expect("it is sound"), Some(318));
        pack.prove_soon(318);
        let known = |range: Range<usize>| range.filter(|at| !pack.is_unknown(*at)).count();
        assert_eq!((known(300..382), known(382..900)), (82, 2), "what follows, and two of 640");
        // What is known is enough for a while.
        assert_eq!(pack.prove_all(318..334).expect("it is sound"), None);
        assert_eq!(pack.prove_all(350..366).expect("it is sound"), Some(366));
    }
}
