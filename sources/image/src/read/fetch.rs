//! Packs that are not all here yet: objects are fetched when they are wanted, each proved before it is kept.
//!
//! ```text
//! STORE/packs/NAME.part         the pack with holes, and in it only objects that were proved
//! STORE/packs/NAME.part.index   its index
//! ```
//!
//! What was fetched before is found by its place in the file and proved again, so nothing has to be written down about it: whoever is
//! killed leaves what the next one uses. When all is there, the files get the names of a pack.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::format::chunk::{self, CHUNK_BYTES};
use crate::format::erofs::BLOCK_BYTES;
use crate::format::index::Object;
use crate::format::index::read_object;
use crate::read::fetch_locks::{FetchLock, Progress};
use crate::read::pack::{Pack, SOUND, UNKNOWN};
use crate::read::pack_receiver::Receiver;
use crate::read::partial::PartialPack;
use crate::read::singleflight::{Claim, ObjectSet, Turn};
use crate::store::layout;
use crate::store::object_error::ObjectError;

/// How much is asked for together where a large file is read in order, in bytes: each request costs a way to the server and back.
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
    /// Gets the first of some neighbouring objects, or waits for whoever is at it. What follows it is asked for together with it: the other
    /// ones, and what may be asked for ahead.
    pub(crate) fn obtain(&self, absent: &PartialPack, objects: Range<usize>) -> Result<(), ObjectError> {
        let at = objects.start;
        if self.is_here(at) {
            return Ok(());
        }
        let wanted = self.index.objects[objects].iter().map(|object| object.bytes).sum();
        let onward = if self.goes_on(absent, at) { ONWARD_BYTES } else { 0 };
        let bytes = absent.common.missing.ahead_bytes.max(wanted).max(onward);
        match absent.flights.turn(self, at..self.index.objects.len(), bytes) {
            Turn::Here => Ok(()),
            Turn::Ours(claim) => {
                let outcome = self.get(absent, &claim);
                if self.is_here(at) { Ok(()) } else { outcome.and_then(|()| self.lost(at)) }
            }
            // Whoever was at it has said why in the log.
            Turn::Failed => self.lost(at),
        }
    }

    /// Whether a large file is read in order, and may be kept.
    fn goes_on(&self, absent: &PartialPack, at: usize) -> bool {
        let before = at.checked_sub(1).filter(|before| self.index.objects[*before].bytes == CHUNK_BYTES as u64);
        absent.common.limit.is_none() && before.is_some_and(|before| self.is_here(before))
    }

    /// With a limit, an object may go again before anybody has held it.
    fn lost(&self, at: usize) -> Result<(), ObjectError> {
        Err(ObjectError::Other { pack: self.index.pack, digest: self.index.objects[at].digest })
    }

    /// Gets what was claimed: what is in the file already, what other packs have, and what has to be fetched.
    pub(crate) fn get(&self, absent: &PartialPack, claim: &Claim<'_>) -> Result<(), ObjectError> {
        self.get_each(absent, claim).inspect_err(|bad| {
            if bad.is_of_object() {
                claim.damaged(self);
            }
        })
    }

    fn get_each(&self, absent: &PartialPack, claim: &Claim<'_>) -> Result<(), ObjectError> {
        // With a limit, nobody drops what is being looked at or written.
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
            // In their order: what is not here behind one that is damaged was not tried.
            if let Some(run) = run.take() {
                self.receive(absent, claim, run)?;
            }
            found?;
        }
        run.map_or(Ok(()), |run| self.receive(absent, claim, run))
    }

    /// Fetches neighbouring objects by one request.
    fn receive(&self, absent: &PartialPack, claim: &Claim<'_>, run: Range<usize>) -> Result<(), ObjectError> {
        let Some((_lock, run)) = self.lock(absent, claim, run) else { return Ok(()) };
        let objects = &self.index.objects[run.clone()];
        let (Some(first), Some(last)) = (objects.first(), objects.last()) else { return Ok(()) };
        let from = first.block * BLOCK_BYTES as u64;
        let range = from..last.block * BLOCK_BYTES as u64 + last.bytes;
        let mut kept = |at: usize| {
            absent.common.fetched_bytes.fetch_add(self.index.objects[at].bytes, Ordering::Relaxed);
            self.keep(absent, at);
            claim.tell();
        };
        let mut receiver = Receiver::new(self, run, &mut kept);
        let mut wrong = None;
        let outcome = absent.common.missing.from.read(self.index.pack, range, &mut |bytes| {
            receiver.take(bytes).map_err(|bad| {
                wrong = Some(bad);
                io::Error::other("not what was asked for")
            })
        });
        let outcome = match (wrong, outcome) {
            (Some(bad), _) => Err(bad),
            (None, Err(source)) => {
                Err(ObjectError::Fetch { pack: self.index.pack, digest: receiver.current(), source })
            }
            (None, Ok(())) if !receiver.is_complete() => {
                let source = io::ErrorKind::UnexpectedEof.into();
                Err(ObjectError::Fetch { pack: self.index.pack, digest: receiver.current(), source })
            }
            (None, Ok(())) => Ok(()),
        };
        outcome.inspect_err(|bad| tracing::debug!("{bad}"))
    }

    /// Waits for another process that fetches some of these objects; `None` if all of them came by it, else those that are left.
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

    /// Notes that an object is here and proved.
    fn keep(&self, absent: &PartialPack, at: usize) {
        let state = &self.states[at];
        match &absent.common.limit {
            None => state.store(SOUND, Ordering::Release),
            Some(limit) => limit.keep((absent.number, at), self.index.objects[at].padded(), || {
                state.store(SOUND, Ordering::Release);
            }),
        }
    }

    /// Forgets an object and gives its blocks back.
    pub(crate) fn forget(&self, at: usize) -> io::Result<()> {
        let object = &self.index.objects[at];
        self.states[at].store(UNKNOWN, Ordering::Release);
        let (from, bytes) = (object.block * BLOCK_BYTES as u64, object.padded());
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, flags, from, bytes)?)
    }

    /// Whether an object was fetched before, or is in another pack.
    fn find_nearby(&self, absent: &PartialPack, at: usize) -> Result<bool, ObjectError> {
        let object = &self.index.objects[at];
        let (pack, digest) = (self.index.pack, object.digest);
        let unreadable = |source| ObjectError::Unreadable { pack, digest, source };
        if object.bytes == 0 {
            if digest != chunk::digest(&[]) {
                return Err(ObjectError::Damaged { pack, digest });
            }
            self.keep(absent, at);
            return Ok(true);
        }
        if self.is_in_file(object).map_err(unreadable)? || self.copy(absent, at)? {
            self.keep(absent, at);
            return Ok(true);
        }
        Ok(false)
    }

    /// Whether an object was fetched before.
    fn is_in_file(&self, object: &Object) -> io::Result<bool> {
        let from = object.block * BLOCK_BYTES as u64;
        match rustix::fs::seek(&self.file, SeekFrom::Data(from)) {
            Ok(data) if data >= from + object.bytes => Ok(false),
            Err(Errno::NXIO) => Ok(false),
            // Or a file system that cannot tell.
            Ok(_) | Err(_) => self.is_sound(object),
        }
    }

    /// Proves an object that was fetched before; returns whether it is here. Asks nobody and waits for nobody.
    pub(crate) fn prove_here(&self, at: usize) -> bool {
        let Some(absent) = &self.absent else { return self.prove(at).is_ok() };
        if self.is_here(at) {
            return true;
        }
        // What may be dropped again is for those who hold it.
        let found = absent.common.limit.is_none() && self.is_in_file(&self.index.objects[at]).unwrap_or(false);
        if found {
            self.keep(absent, at);
        }
        found
    }

    /// Copies an object that another pack of the store has; returns whether there is one.
    fn copy(&self, absent: &PartialPack, at: usize) -> Result<bool, ObjectError> {
        let object = &self.index.objects[at];
        let Some((pack, block)) = absent.common.elsewhere().get(&object.digest) else { return Ok(false) };
        let path = layout::packs_folder(&absent.common.store).join(pack.hex());
        let mut memory = Vec::new();
        let proved = File::open(path).and_then(|file| read_object(&file, block, object, &mut memory));
        if !matches!(proved, Ok(true)) {
            return Ok(false);
        }
        let copied = self.put(at, &memory);
        copied.map(|()| true).map_err(|source| ObjectError::Keep { pack: self.index.pack, source })
    }

    /// Puts bytes that were proved into their place, with the zeros that fill their last block: something else may be there already.
    pub(crate) fn put(&self, at: usize, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.index.objects[at].block * BLOCK_BYTES as u64)
    }
}
