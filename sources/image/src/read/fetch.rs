//! Packs that are not all here yet: objects are fetched when they are wanted, each proved before it is kept.
//!
//! ```text
//! STORE/packs/NAME.part         the pack with holes, and in it only objects that were proved
//! STORE/packs/NAME.part.index   its index
//! ```
//!
//! What was fetched before is found by its place in the file and proved again, so nothing has to be written down about it: whoever is
//! killed leaves what the next one uses. When all is there, the files get the names of a pack.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::format::chunk::{self, PIECE_BYTES};
use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::Result;
use crate::read::cache_limit::Limit;
use crate::read::fetch_locks::{FetchLock, FetchLocks, Progress};
use crate::read::objects::{Bad, Objects};
use crate::read::pack::{Pack, SOUND, UNKNOWN, read_object};
use crate::read::pack_receiver::Receiver;
use crate::read::part_file;
use crate::read::singleflight::{Claim, Flights, Lacking, Turn};
use crate::store::packs::{self, Object, Places, Store};
use crate::store::places::StorePlaces;

/// The most that one request of [`Objects::fetch_all`] asks for, in bytes; a larger object is asked for alone.
pub(crate) const RUN_BYTES_MAX: u64 = 4 << 20;

/// How much is asked for together where a large file is read in order, in bytes: each request costs a way to the server and back.
const ONWARD_BYTES: u64 = 1 << 20;

/// What takes bytes as they come. With an error it wants no more.
pub type Sink<'a> = dyn FnMut(&[u8]) -> io::Result<()> + 'a;

/// Where the bytes of packs come from that a store has not got. What comes is proved afterwards.
///
/// Of composefs's objects those of an image are such a pack, without an index: one behind the other, in the order of
/// [`crate::file_objects`], and its name is the image's digest.
pub trait Fetch: fmt::Debug + Send + Sync {
    /// All bytes of a pack's index.
    ///
    /// # Errors
    /// It cannot be had, or is longer than `bytes_max`.
    fn index(&self, pack: Digest, bytes_max: u64) -> io::Result<Vec<u8>>;

    /// Hands over a range of a pack, in order and each byte once.
    ///
    /// # Errors
    /// It cannot be had, or what `sink` said.
    fn read(&self, pack: Digest, range: Range<u64>, sink: &mut Sink<'_>) -> io::Result<()>;
}

/// How a store gets what it has not got.
#[derive(Clone, Debug)]
pub struct Missing {
    /// Where from.
    pub from: Arc<dyn Fetch>,
    /// How many bytes may be asked for together with an object that is read: what follows it in its pack.
    pub ahead_bytes: u64,
    /// The most that is kept of the image's incomplete packs, in bytes; what was not used for longest goes first.
    pub cache_bytes: Option<u64>,
}

/// What the packs of an image that are not all here have in common.
#[derive(Debug)]
pub(crate) struct Common {
    pub store: PathBuf,
    pub missing: Missing,
    pub limit: Option<Arc<Limit>>,
    /// What other processes fetch.
    pub locks: FetchLocks,
    /// Where other packs of the store have objects.
    elsewhere: OnceLock<StorePlaces>,
    fetched_bytes: AtomicU64,
}

impl Common {
    pub(crate) fn new(store: &Path, missing: Missing) -> Arc<Self> {
        let limit = missing.cache_bytes.map(|bytes| Arc::new(Limit::new(bytes)));
        Arc::new(Self {
            store: store.into(),
            missing,
            limit,
            locks: FetchLocks::of(store),
            elsewhere: OnceLock::new(),
            fetched_bytes: AtomicU64::new(0),
        })
    }

    fn elsewhere(&self) -> &StorePlaces {
        self.elsewhere.get_or_init(|| {
            let found = Store::open(&self.store).and_then(|store| store.places());
            found.unwrap_or_else(|error| {
                tracing::warn!("{error}: what other packs have is fetched all the same");
                StorePlaces::known(Places::new())
            })
        })
    }
}

/// What a pack that is not all here has beside the others.
#[derive(Debug)]
pub(crate) struct Absent {
    pub common: Arc<Common>,
    /// Which of the image's packs.
    pub number: usize,
    /// Whether others that fetch the same are not waited for.
    pub alone: bool,
    flights: Flights,
}

impl Absent {
    pub(crate) fn new(common: &Arc<Common>, number: usize) -> Self {
        Self { common: Arc::clone(common), number, alone: common.limit.is_some(), flights: Flights::default() }
    }
}

impl Lacking for Pack {
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
    pub(crate) fn obtain(&self, absent: &Absent, objects: Range<usize>) -> std::result::Result<(), Bad> {
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
    fn goes_on(&self, absent: &Absent, at: usize) -> bool {
        let before = at.checked_sub(1).filter(|before| self.index.objects[*before].bytes == PIECE_BYTES as u64);
        absent.common.limit.is_none() && before.is_some_and(|before| self.is_here(before))
    }

    /// With a limit, an object may go again before anybody has held it.
    fn lost(&self, at: usize) -> std::result::Result<(), Bad> {
        Err(Bad::Other { pack: self.index.pack, digest: self.index.objects[at].digest })
    }

    /// Gets what was claimed: what is in the file already, what other packs have, and what has to be fetched.
    fn get(&self, absent: &Absent, claim: &Claim<'_>) -> std::result::Result<(), Bad> {
        self.get_each(absent, claim).inspect_err(|bad| {
            if bad.is_of_object() {
                claim.damaged(self);
            }
        })
    }

    fn get_each(&self, absent: &Absent, claim: &Claim<'_>) -> std::result::Result<(), Bad> {
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
    fn receive(&self, absent: &Absent, claim: &Claim<'_>, run: Range<usize>) -> std::result::Result<(), Bad> {
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
            (None, Err(source)) => Err(Bad::Fetch { pack: self.index.pack, digest: receiver.current(), source }),
            (None, Ok(())) if !receiver.is_complete() => {
                let source = io::ErrorKind::UnexpectedEof.into();
                Err(Bad::Fetch { pack: self.index.pack, digest: receiver.current(), source })
            }
            (None, Ok(())) => Ok(()),
        };
        outcome.inspect_err(|bad| tracing::debug!("{bad}"))
    }

    /// Waits for another process that fetches some of these objects; `None` if all of them came by it, else those that are left.
    fn lock<'a>(
        &self,
        absent: &'a Absent,
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
    fn keep(&self, absent: &Absent, at: usize) {
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
    fn find_nearby(&self, absent: &Absent, at: usize) -> std::result::Result<bool, Bad> {
        let object = &self.index.objects[at];
        let (pack, digest) = (self.index.pack, object.digest);
        let unreadable = |source| Bad::Unreadable { pack, digest, source };
        if object.bytes == 0 {
            if digest != chunk::digest(&[]) {
                return Err(Bad::Damaged { pack, digest });
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

    /// Proves an object that was fetched before; answers whether it is here. Asks nobody and waits for nobody.
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

    /// Copies an object that another pack of the store has; answers whether there is one.
    fn copy(&self, absent: &Absent, at: usize) -> std::result::Result<bool, Bad> {
        let object = &self.index.objects[at];
        let Some((pack, block)) = absent.common.elsewhere().get(&object.digest) else { return Ok(false) };
        let path = packs::packs_folder(&absent.common.store).join(pack.hex());
        let mut memory = Vec::new();
        let proved = File::open(path).and_then(|file| read_object(&file, block, object, &mut memory));
        if !matches!(proved, Ok(true)) {
            return Ok(false);
        }
        let copied = self.put(at, &memory);
        copied.map(|()| true).map_err(|source| Bad::Keep { pack: self.index.pack, source })
    }

    /// Puts bytes that were proved into their place, with the zeros that fill their last block: something else may be there already.
    pub(crate) fn put(&self, at: usize, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.index.objects[at].block * BLOCK_BYTES as u64)
    }
}

/// What [`Objects::fetch_all`] tells: bytes that are here, and bytes in all.
pub type Fetched<'a> = dyn Fn(u64, u64) + Sync + 'a;

/// Objects that are fetched in their order, whatever they are kept in.
pub(crate) trait Fetching: Lacking + Sync {
    /// How many there are.
    fn count(&self) -> usize;
    /// Gets those of a range that nobody has or is getting; answers whether there was room for them.
    fn fetch(&self, range: Range<usize>) -> std::result::Result<bool, Bad>;
}

impl Fetching for (&Pack, &Absent) {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn fetch(&self, range: Range<usize>) -> std::result::Result<bool, Bad> {
        let (pack, absent) = *self;
        // What does not fit would push out what was read.
        let room = pack.index.objects[range.clone()].iter().map(|object| object.padded());
        if absent.common.limit.as_ref().is_some_and(|limit| !limit.has_room(room.sum())) {
            return Ok(false);
        }
        let mut at = range.start;
        while at < range.end {
            let claim = absent.flights.claim(pack, at..range.end, RUN_BYTES_MAX);
            pack.get(absent, &claim)?;
            at += claim.objects.len().max(1);
        }
        Ok(true)
    }
}

impl Lacking for (&Pack, &Absent) {
    fn is_here(&self, at: usize) -> bool {
        self.0.is_here(at)
    }

    fn bytes(&self, at: usize) -> u64 {
        self.0.bytes(at)
    }
}

impl Objects {
    /// Whether nothing is missing, as far as names and lengths tell.
    pub fn seems_whole(&self) -> bool {
        match self.absent_files() {
            Some((files, absent)) => files.seems_whole(absent),
            None => self.incomplete().next().is_none(),
        }
    }

    /// Fetches all that is missing, so many requests at a time, until that is done or `stop` is set: first the pack that is wanted
    /// soon. What fits no more under the limit is left.
    ///
    /// # Errors
    /// The first thing that could not be had; what was had before stays.
    pub fn fetch_all(&self, jobs: usize, stop: &AtomicBool, progress: &Fetched<'_>) -> std::result::Result<(), Bad> {
        if let Some((files, absent)) = self.absent_files() {
            fetch_each(&[&(files, absent)], jobs, stop, progress)?;
            // What others were fetching, too.
            return if stop.load(Ordering::Relaxed) { Ok(()) } else { files.prove_absent(absent) };
        }
        let mut absent: Vec<_> = self.packs.iter().filter_map(|pack| Some((&**pack, pack.absent.as_ref()?))).collect();
        absent.sort_by_key(|(pack, _)| !pack.ahead);
        let parts: Vec<&dyn Fetching> = absent.iter().map(|part| part as &dyn Fetching).collect();
        fetch_each(&parts, jobs, stop, progress)?;
        self.shrink();
        let limit = absent.first().and_then(|(_, absent)| absent.common.limit.as_ref());
        if stop.load(Ordering::Relaxed) || limit.is_some() {
            return Ok(());
        }
        absent.iter().try_for_each(|(pack, _)| (0..pack.len()).try_for_each(|at| pack.prove(at)))
    }

    /// Gives the packs that are whole now their places in the store; composefs's objects have theirs, which are made durable.
    ///
    /// # Errors
    /// They cannot be made durable. Then nobody knows what of a pack came to the disk: all of it is proved again when it is read.
    pub fn complete(&self) -> Result<()> {
        if let Some((files, _)) = self.absent_files() {
            return files.complete();
        }
        for pack in &self.packs {
            let Some(absent) = pack.absent.as_ref().filter(|absent| absent.common.limit.is_none()) else { continue };
            if (0..pack.len()).all(|at| pack.is_here(at)) {
                part_file::complete(pack, &absent.common)
                    .inspect_err(|_| pack.states.iter().for_each(|state| state.store(UNKNOWN, Ordering::Release)))?;
            }
        }
        Ok(())
    }

    /// How many bytes of objects were fetched.
    pub fn fetched_bytes(&self) -> u64 {
        if let Some((_, absent)) = self.absent_files() {
            return absent.fetched_bytes();
        }
        let common = self.packs.iter().find_map(|pack| pack.absent.as_ref());
        common.map_or(0, |absent| absent.common.fetched_bytes.load(Ordering::Relaxed))
    }
}

/// Fetches objects of all parts, in order, so many requests at a time, until one fails or has no room.
fn fetch_each(
    parts: &[&dyn Fetching],
    jobs: usize,
    stop: &AtomicBool,
    progress: &Fetched<'_>,
) -> std::result::Result<(), Bad> {
    let bytes_of = |number: usize, range: Range<usize>| range.map(|at| parts[number].bytes(at)).sum::<u64>();
    let all = parts.iter().enumerate().map(|(number, part)| bytes_of(number, 0..part.count())).sum();
    let cursor = Mutex::new((0, 0));
    let (done, failed) = (AtomicU64::new(0), Mutex::new(None));
    let work = || {
        while !stop.load(Ordering::Relaxed) && lock(&failed).is_none() {
            let Some((number, range)) = next(parts, &mut lock(&cursor)) else { return };
            match parts[number].fetch(range.clone()) {
                Ok(true) => {}
                Ok(false) => return,
                Err(bad) => {
                    lock(&failed).get_or_insert(bad);
                    return;
                }
            }
            let bytes = bytes_of(number, range);
            progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes, all);
        }
    };
    thread::scope(|scope| (0..jobs.max(1)).for_each(|_| _ = scope.spawn(work)));
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The next objects that are worth a request, from a place on.
fn next(parts: &[&dyn Fetching], cursor: &mut (usize, usize)) -> Option<(usize, Range<usize>)> {
    loop {
        let (number, from) = *cursor;
        let part = parts.get(number)?;
        if from == part.count() {
            *cursor = (number + 1, 0);
            continue;
        }
        let (mut to, mut bytes) = (from, 0_u64);
        while to < part.count() && (to == from || bytes.saturating_add(part.bytes(to)) <= RUN_BYTES_MAX) {
            bytes = bytes.saturating_add(part.bytes(to));
            to += 1;
        }
        *cursor = (number, to);
        return Some((number, from..to));
    }
}
