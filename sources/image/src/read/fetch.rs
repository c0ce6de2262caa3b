//! Incomplete packs: objects are fetched on demand, and verified before they are stored.
//!
//! ```text
//! STORE/packs/NAME.part         the pack with holes, and in it only verified objects
//! STORE/packs/NAME.part.index   its index
//! ```
//!
//! Earlier objects are found by their location in the file and verified again, so no record of them is needed, and the
//! next process continues after a crash. A complete file gets the name of a pack.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::format::chunk::{self, CHUNK_BYTES};
use crate::format::index::Object;
use crate::read::fetch_locks::{FetchLock, Progress};
use crate::read::pack::{Pack, SOUND, UNKNOWN};
use crate::read::pack_receiver::Receiver;
use crate::read::partial::PartialPack;
use crate::read::singleflight::{Claim, FetchAction, ObjectSet};
use crate::store::fetch::SERVERS_MAX;
use crate::store::layer_fetch;
use crate::store::layout;
use crate::store::object_error::ObjectError;

/// The size of requests while a large file is read in order, in bytes: each request costs a round trip.
const ONWARD_BYTES: u64 = 1 << 20;

impl ObjectSet for Pack {
    fn is_here(&self, at: usize) -> bool {
        self.states[at].load(Ordering::Acquire) == SOUND
    }

    fn bytes(&self, at: usize) -> u64 {
        self.index.objects[at].bytes
    }
}

impl Pack {
    /// Gets the first of some adjacent objects, or waits for the thread that does. Fetches it together with the others
    /// and with the configured read-ahead.
    pub(crate) fn obtain(&self, absent: &PartialPack, objects: Range<usize>) -> Result<(), ObjectError> {
        let at = objects.start;
        if self.is_here(at) {
            return Ok(());
        }
        let wanted = self.index.objects[objects].iter().map(|object| object.bytes).sum();
        let onward = if self.is_sequential(absent, at) { ONWARD_BYTES } else { 0 };
        let bytes = absent.common.missing.ahead_bytes.max(wanted).max(onward);
        absent.common.demand.wait(|| match absent.flights.next_action(self, at..self.index.objects.len(), bytes) {
            FetchAction::Here => Ok(()),
            FetchAction::Ours(claim) => {
                let outcome = self.get(absent, &claim);
                if self.is_here(at) { Ok(()) } else { outcome.and_then(|()| self.lost(at)) }
            }
            // The thread that fetched it has logged why.
            FetchAction::Failed => self.lost(at),
        })
    }

    /// Returns whether a large file is read in order, and may be cached.
    fn is_sequential(&self, absent: &PartialPack, at: usize) -> bool {
        let before = at.checked_sub(1).filter(|before| self.index.objects[*before].bytes == CHUNK_BYTES as u64);
        absent.common.limit.is_none() && before.is_some_and(|before| self.is_here(before))
    }

    /// With a limit, an object may be evicted before it is held.
    fn lost(&self, at: usize) -> Result<(), ObjectError> {
        Err(ObjectError::Other { pack: self.index.pack, digest: self.index.objects[at].digest })
    }

    /// Gets claimed objects: from the file, from other packs, or by fetching.
    pub(crate) fn get(&self, absent: &PartialPack, claim: &Claim<'_>) -> Result<(), ObjectError> {
        self.get_each(absent, claim).inspect_err(|bad| {
            if bad.is_of_object() {
                claim.damaged(self);
            }
        })
    }

    fn get_each(&self, absent: &PartialPack, claim: &Claim<'_>) -> Result<(), ObjectError> {
        // With a limit, objects in use must not be evicted.
        let limit = absent.common.limit.as_ref();
        let _holds: Option<Vec<_>> =
            limit.map(|limit| claim.objects.clone().map(|at| limit.hold((absent.number, at))).collect());
        let mut run: Option<Range<usize>> = None;
        for at in claim.objects.clone() {
            let found = self.find_nearby(absent, at);
            if let Ok(false) = found {
                run = Some(run.map_or(at, |run| run.start)..at + 1);
                continue;
            }
            claim.tell();
            // In order: the objects after a damaged one were not tried.
            if let Some(run) = run.take() {
                self.receive(absent, claim, run)?;
            }
            found?;
        }
        run.map_or(Ok(()), |run| self.receive(absent, claim, run))
    }

    /// Fetches adjacent objects with one request, or more if servers send damaged data.
    fn receive(&self, absent: &PartialPack, claim: &Claim<'_>, run: Range<usize>) -> Result<(), ObjectError> {
        let Some((_lock, mut run)) = self.lock(absent, claim, run) else { return Ok(()) };
        let mut kept = |at: usize| {
            absent.common.fetched_bytes.fetch_add(self.index.objects[at].bytes, Ordering::Relaxed);
            self.keep(absent, at);
            claim.tell();
        };
        let mut servers = 1;
        let outcome = loop {
            let objects = &self.index.objects[run.clone()];
            let (Some(first), Some(last)) = (objects.first(), objects.last()) else { return Ok(()) };
            let range = first.begin()..last.end();
            let mut receiver = Receiver::new(self, run, &mut kept);
            let (mut wrong, mut first, mut count) = (None, None, 0);
            let begin = Instant::now();
            let outcome = layer_fetch::read(&*absent.common.missing.from, &self.index, range, &mut |bytes| {
                first.get_or_insert_with(|| begin.elapsed());
                count += bytes.len() as u64;
                receiver.take(bytes).map_err(|bad| {
                    let kind = if bad.is_of_object() { ErrorKind::InvalidData } else { ErrorKind::Other };
                    wrong = Some(bad);
                    io::Error::new(kind, "not what was asked for")
                })
            });
            if let (Ok(()), Some(first)) = (&outcome, first) {
                absent.common.requests.note(first, begin.elapsed().saturating_sub(first), count);
            }
            match (wrong, outcome) {
                // What came before is kept.
                (Some(bad), Err(error)) if error.kind() == ErrorKind::Interrupted && servers < SERVERS_MAX => {
                    tracing::debug!("{bad}: another server is asked");
                    (run, servers) = (receiver.left(), servers + 1);
                }
                (Some(bad), _) => break Err(bad),
                (None, Err(reason)) => {
                    break Err(ObjectError::Fetch { pack: self.index.pack, digest: receiver.current(), reason });
                }
                (None, Ok(())) if !receiver.is_complete() => {
                    let reason = ErrorKind::UnexpectedEof.into();
                    break Err(ObjectError::Fetch { pack: self.index.pack, digest: receiver.current(), reason });
                }
                (None, Ok(())) => break Ok(()),
            }
        };
        outcome.inspect_err(|bad| tracing::debug!("{bad}"))
    }

    /// Waits for another process that fetches some of these objects; `None` if it fetched all, else the rest's lock.
    fn lock<'a>(
        &self,
        absent: &'a PartialPack,
        claim: &Claim<'_>,
        mut run: Range<usize>,
    ) -> Option<(Option<FetchLock<'a>>, Range<usize>)> {
        if absent.alone {
            return Some((None, run));
        }
        let numbers = run.start as u64..run.end as u64;
        let lock = absent.common.locks.take(self.index.pack, numbers, || {
            while !run.is_empty() && self.is_in_file(&self.index.objects[run.start]).unwrap_or(false) {
                self.keep(absent, run.start);
                claim.tell();
                run.start += 1;
            }
            if run.is_empty() { Progress::Done } else { Progress::Of(run.start as u64) }
        })?;
        Some((Some(lock), run))
    }

    /// Records that an object is stored and verified.
    fn keep(&self, absent: &PartialPack, at: usize) {
        self.verified_bytes.fetch_add(self.index.objects[at].bytes, Ordering::Relaxed);
        let state = &self.states[at];
        match &absent.common.limit {
            None => state.store(SOUND, Ordering::Release),
            Some(limit) => limit.keep((absent.number, at), self.index.objects[at].padded(), || {
                state.store(SOUND, Ordering::Release);
            }),
        }
    }

    /// Evicts an object and frees its blocks.
    pub(crate) fn forget(&self, at: usize) -> io::Result<()> {
        let object = &self.index.objects[at];
        self.states[at].store(UNKNOWN, Ordering::Release);
        let (from, bytes) = (object.begin(), object.padded());
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, from, bytes)?)
    }

    /// Returns whether an object was fetched before, or could be copied from another pack.
    fn find_nearby(&self, absent: &PartialPack, at: usize) -> Result<bool, ObjectError> {
        let object = &self.index.objects[at];
        let (pack, digest) = (self.index.pack, object.digest);
        let unreadable = |reason| ObjectError::Unreadable { pack, digest, reason };
        let is_here = if object.bytes == 0 {
            if digest != chunk::digest(&[]) {
                return Err(ObjectError::Damaged { pack, digest });
            }
            true
        } else if self.is_in_file(object).map_err(unreadable)? {
            true
        } else if object.is_zeros() {
            let zeros = vec![0; usize::try_from(object.padded()).unwrap_or_default()];
            self.put(at, &zeros).map_err(|reason| ObjectError::Keep { pack, reason })?;
            true
        } else {
            self.copy(absent, at)?
        };
        if is_here {
            self.keep(absent, at);
        }
        Ok(is_here)
    }

    /// Returns whether an object was fetched before.
    fn is_in_file(&self, object: &Object) -> io::Result<bool> {
        let (from, bytes) = (object.begin(), object.padded());
        match rustix::fs::seek(&self.file, SeekFrom::Data(from)) {
            // A hole has zeros.
            Ok(data) if data >= from + bytes => Ok(object.is_zeros()),
            Err(Errno::NXIO) => Ok(object.is_zeros()),
            // Or the file system does not report holes.
            Ok(_) | Err(_) => self.is_sound(object),
        }
    }

    /// Verifies an object that was fetched before; returns whether it is available. Neither fetches nor waits.
    pub(crate) fn verify_here(&self, at: usize) -> bool {
        let Some(absent) = &self.absent else { return self.verify(at).is_ok() };
        if self.is_here(at) {
            return true;
        }
        // Without a hold, an object with a limit may be evicted again.
        let found = absent.common.limit.is_none() && self.is_in_file(&self.index.objects[at]).unwrap_or(false);
        if found {
            self.keep(absent, at);
        }
        found
    }

    /// Copies an object from another pack of the store; returns whether there was one.
    fn copy(&self, absent: &PartialPack, at: usize) -> Result<bool, ObjectError> {
        let object = &self.index.objects[at];
        let Some((pack, from)) = absent.common.elsewhere().find(&object.digest) else { return Ok(false) };
        let path = layout::packs_directory(&absent.common.store).join(pack.hex());
        let mut memory = vec![0; usize::try_from(object.bytes).unwrap_or_default()];
        let read = File::open(path).and_then(|file| file.read_exact_at(&mut memory, from));
        if read.is_err() || !object.proves(&memory) {
            return Ok(false);
        }
        memory.resize(memory.len() + usize::from(object.padding), 0);
        let copied = self.put(at, &memory);
        if copied.is_ok() {
            absent.common.deduplicated_bytes.fetch_add(object.bytes, Ordering::Relaxed);
        }
        copied.map(|()| true).map_err(|reason| ObjectError::Keep { pack: self.index.pack, reason })
    }

    /// Writes verified bytes at their location, with zero padding, because other bytes may be there.
    pub(crate) fn put(&self, at: usize, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.index.objects[at].begin())
    }
}
