//! The journal of non-idempotent requests.
//!
//! A request in flight when a server is killed is served again by the next server. Some requests would then fail or
//! have another effect. For those the journal records their begin, with a note that describes them, and their reply.
//! Each worker has a ring of entries, far more than it serves before the client sees the replies to the first.
//!
//! ```text
//! entry, 32 words:  state (epoch 32 | 0 | bytes 16 | kind 8) | unique | number in order | bytes, 29 words
//! ```

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::session_store::SessionStore;

/// Words of an entry.
pub(crate) const WORDS: usize = 32;
const STATE: usize = 0;
const UNIQUE: usize = 1;
const NUMBER: usize = 2;
const BYTES: usize = 3;
/// The maximum length of a stored reply in bytes; the reply to CREATE has 160 bytes.
const BYTES_MAX: usize = (WORDS - BYTES) * 8;

const BEGUN: u64 = 1;
const DONE: u64 = 2;

/// What the previous server did with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalEntry {
    /// It began the request and left this note; whether the request had an effect is unknown.
    Begun(Vec<u8>),
    /// It carried out the request, with this reply.
    Done(Vec<u8>),
}

/// The use of the entries of a worker's ring.
#[derive(Debug, Default)]
pub(crate) struct EntryUse {
    /// The sequence number of the next entry, which determines its place in the ring.
    number: u64,
    /// The sequence numbers of requests in progress.
    begun: Vec<u64>,
}

/// A worker's ring of entries, for one of its threads.
#[derive(Debug)]
pub struct Journal {
    kept: Arc<SessionStore>,
    worker: usize,
    /// The current entry; 0: none.
    number: u64,
    epoch: u32,
}

fn ring(kept: &SessionStore, worker: usize) -> &[AtomicU64] {
    let words = kept.geometry().entries * WORDS;
    kept.journals().get(worker * words..(worker + 1) * words).unwrap_or_default()
}

impl Journal {
    pub(crate) fn new(kept: Arc<SessionStore>, worker: usize) -> Self {
        if let Some(mut places) = kept.places(worker) {
            let newest =
                ring(&kept, worker).chunks_exact(WORDS).map(|entry| entry[NUMBER].load(Ordering::Relaxed)).max();
            places.number = places.number.max(newest.unwrap_or(0));
        }
        Self { kept, worker, number: 0, epoch: 0 }
    }

    fn entry(&self) -> &[AtomicU64] {
        let ring = ring(&self.kept, self.worker);
        let entries = (ring.len() / WORDS).max(1);
        let at = usize::try_from(self.number % entries as u64).unwrap_or(0) * WORDS;
        ring.get(at..at + WORDS).unwrap_or_default()
    }

    /// Ends the current entry and takes the next free one.
    fn next(&mut self) {
        let entries = self.kept.geometry().entries.max(1) as u64;
        let Some(mut places) = self.kept.places(self.worker) else { return };
        places.begun.retain(|begun| *begun != self.number);
        places.number += 1;
        // There are more entries than threads.
        for _ in 0..entries {
            let place = places.number % entries;
            if places.begun.iter().all(|begun| begun % entries != place) {
                break;
            }
            places.number += 1;
        }
        self.number = places.number;
        places.begun.push(self.number);
    }

    /// Allows reuse of the current entry.
    fn end(&self) {
        if let Some(mut places) = self.kept.places(self.worker) {
            places.begun.retain(|begun| *begun != self.number);
        }
    }

    /// Records that a request begins. The note is cut to the maximum length of a reply.
    pub fn begin(&mut self, unique: u64, note: &[u8]) {
        self.next();
        self.epoch = self.kept.epoch();
        let entry = self.entry();
        if entry.is_empty() {
            return;
        }
        entry[STATE].store(0, Ordering::Release);
        entry[UNIQUE].store(unique, Ordering::Release);
        entry[NUMBER].store(self.number, Ordering::Release);
        self.write(&note[..note.len().min(BYTES_MAX)], BEGUN);
    }

    /// Records that the current request is done, with its reply.
    pub fn done(&mut self, answer: &[u8]) {
        self.write(answer, DONE);
        self.end();
    }

    fn write(&self, bytes: &[u8], kind: u64) {
        let entry = self.entry();
        if entry.is_empty() || bytes.len() > BYTES_MAX {
            return;
        }
        for (word, chunk) in entry[BYTES..].iter().zip(bytes.chunks(8)) {
            let mut padded = [0; 8];
            padded[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(padded), Ordering::Relaxed);
        }
        entry[STATE].store(u64::from(self.epoch) << 32 | (bytes.len() as u64) << 8 | kind, Ordering::Release);
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns all entries of an epoch, by request number.
pub(crate) fn load(memory: &[AtomicU64], epoch: u32) -> HashMap<u64, JournalEntry> {
    let mut all = HashMap::new();
    for entry in memory.chunks_exact(WORDS) {
        let state = entry[STATE].load(Ordering::Acquire);
        let unique = entry[UNIQUE].load(Ordering::Relaxed);
        let length = (state >> 8 & 0xffff) as usize;
        if state >> 32 != u64::from(epoch) || length > BYTES_MAX {
            continue;
        }
        let bytes = || {
            let words = entry[BYTES..].iter().take(length.div_ceil(8));
            let mut bytes: Vec<u8> = words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
            bytes.truncate(length);
            bytes
        };
        match state & 0xff {
            // A later server may have begun a completed request again; the completed entry counts.
            BEGUN => drop(all.entry(unique).or_insert_with(|| JournalEntry::Begun(bytes()))),
            DONE => drop(all.insert(unique, JournalEntry::Done(bytes()))),
            _ => {}
        }
    }
    all
}
