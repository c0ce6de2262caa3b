//! Fetches everything that is missing.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::format::error::Result;
use crate::read::objects::Objects;
use crate::read::pack::{Pack, UNKNOWN};
use crate::read::part_file;
use crate::read::partial::PartialPack;
use crate::read::singleflight::{FetchableSet, ObjectSet};
use crate::store::fetch::RUN_BYTES_MAX;
use crate::store::object_error::ObjectError;

/// What [`Objects::fetch_all`] tells: bytes that are here, and bytes in all.
pub type Fetched<'a> = dyn Fn(u64, u64) + Sync + 'a;

impl FetchableSet for (&Pack, &PartialPack) {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn objects(&self) -> &dyn ObjectSet {
        self.0
    }

    fn fetch(&self, range: Range<usize>) -> Result<bool, ObjectError> {
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
    pub fn fetch_all(&self, jobs: usize, stop: &AtomicBool, progress: &Fetched<'_>) -> Result<(), ObjectError> {
        if let Some((files, absent)) = self.absent_files() {
            fetch_each(&[&(files, absent)], jobs, stop, progress)?;
            // What others were fetching, too.
            return if stop.load(Ordering::Relaxed) { Ok(()) } else { files.prove_absent(absent) };
        }
        let mut absent: Vec<_> = self.packs.iter().filter_map(|pack| Some((&**pack, pack.absent.as_ref()?))).collect();
        absent.sort_by_key(|(pack, _)| !pack.ahead);
        let parts: Vec<&dyn FetchableSet> = absent.iter().map(|part| part as &dyn FetchableSet).collect();
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
    parts: &[&dyn FetchableSet],
    jobs: usize,
    stop: &AtomicBool,
    progress: &Fetched<'_>,
) -> Result<(), ObjectError> {
    let bytes_of = |number: usize, range: Range<usize>| range.map(|at| parts[number].objects().bytes(at)).sum::<u64>();
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
fn next(parts: &[&dyn FetchableSet], cursor: &mut (usize, usize)) -> Option<(usize, Range<usize>)> {
    loop {
        let (number, from) = *cursor;
        let part = parts.get(number)?;
        if from == part.count() {
            *cursor = (number + 1, 0);
            continue;
        }
        let (mut to, mut bytes) = (from, 0_u64);
        while to < part.count() && (to == from || bytes.saturating_add(part.objects().bytes(to)) <= RUN_BYTES_MAX) {
            bytes = bytes.saturating_add(part.objects().bytes(to));
            to += 1;
        }
        *cursor = (number, to);
        return Some((number, from..to));
    }
}
