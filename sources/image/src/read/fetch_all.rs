//! Fetches all missing objects.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use ferry_vfs::sync::lock;

use crate::format::error::Result;
use crate::read::objects::Objects;
use crate::read::pack::{Pack, UNKNOWN};
use crate::read::part_file;
use crate::read::partial::PartialPack;
use crate::read::singleflight::{DAMAGED_MAX, FetchableSet, ObjectSet};
use crate::store::fetch::FAR_RUN_BYTES_MAX;
use crate::store::object_error::ObjectError;

/// After readers have waited so long in total, what is fetched ahead of them is worth the requests.
const WAITED_MAX: Duration = Duration::from_millis(50);
/// If no reader has waited for this time, background requests disturb no reader.
const QUIET: Duration = Duration::from_secs(1);

/// Receives the progress of [`Objects::fetch_all`]: available bytes, and total.
pub type FetchProgress<'a> = dyn Fn(u64, u64) + Sync + 'a;

impl FetchableSet for (&Pack, &PartialPack) {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn objects(&self) -> &dyn ObjectSet {
        self.0
    }

    fn run_bytes(&self) -> u64 {
        self.1.common.requests.run_bytes()
    }

    fn fetch(&self, range: Range<usize>) -> Result<bool, ObjectError> {
        let (pack, absent) = *self;
        // Objects beyond the limit would evict those in use.
        let room = pack.index.objects[range.clone()].iter().map(|object| object.padded());
        if absent.common.limit.as_ref().is_some_and(|limit| !limit.has_room(room.sum())) {
            return Ok(false);
        }
        absent.flights.claim_all(pack, range, FAR_RUN_BYTES_MAX, |claim| pack.get(absent, claim)).map(|()| true)
    }
}

impl Objects {
    /// Returns whether nothing is missing, judged by names and lengths.
    pub fn looks_complete(&self) -> bool {
        match self.absent_files() {
            Some((files, absent)) => files.looks_complete(absent),
            None => self.incomplete().next().is_none(),
        }
    }

    /// Returns whether [`Self::fetch_all`] should begin if the server is near: readers are served faster while there are no background
    /// requests.
    pub fn should_fetch_all(&self) -> bool {
        let absent = self.packs.iter().find_map(|pack| pack.absent.as_ref());
        absent.is_none_or(|absent| {
            let (waited, quiet) = absent.common.demand.times();
            waited >= WAITED_MAX || quiet >= QUIET
        })
    }

    /// Fetches missing objects with one request at a time, in the order of [`Self::fetch_all`], until the first reader has to wait: a
    /// program that is being started leaves the network alone for a tenth of a second. What fails is fetched later.
    pub fn fetch_until_read(&self, progress: &FetchProgress<'_>) {
        let absent = self.incomplete_packs();
        let Some((_, first)) = absent.first() else { return };
        let stop = || first.common.demand.has_readers();
        let parts: Vec<&dyn FetchableSet> = absent.iter().map(|part| part as &dyn FetchableSet).collect();
        if let Err(bad) = fetch_each(&parts, 1, &stop, progress) {
            tracing::debug!("{bad}: it is tried again");
        }
    }

    /// Returns the incomplete packs, those first that are needed first.
    fn incomplete_packs(&self) -> Vec<(&Pack, &PartialPack)> {
        let mut absent: Vec<_> = self.packs.iter().filter_map(|pack| Some((&**pack, pack.absent.as_ref()?))).collect();
        absent.sort_by_key(|(pack, _)| !pack.ahead);
        absent
    }

    /// Fetches what [`Self::put_first`] has put first, with `jobs` concurrent requests, until done or until `stop` is set.
    ///
    /// # Errors
    ///
    /// The first object that could not be fetched. Fetched ones stay, and a damaged one does not stop the others.
    pub fn fetch_first(&self, jobs: usize, stop: &AtomicBool) -> Result<(), ObjectError> {
        let first = self.first_parts();
        let parts: Vec<&dyn FetchableSet> = first.iter().map(|part| part as &dyn FetchableSet).collect();
        fetch_each(&parts, jobs, &|| stop.load(Ordering::Relaxed), &|_, _| {})
    }

    /// Fetches all missing objects with `jobs` concurrent requests, until done or until `stop` is set, beginning with
    /// those of [`Self::put_first`] and the pack that is needed first. Objects beyond the cache limit are skipped.
    ///
    /// # Errors
    ///
    /// The first object that could not be fetched. Fetched ones stay, and a damaged one does not stop the others.
    pub fn fetch_all(&self, jobs: usize, stop: &AtomicBool, progress: &FetchProgress<'_>) -> Result<(), ObjectError> {
        let is_over = || stop.load(Ordering::Relaxed);
        if let Some((files, absent)) = self.absent_files() {
            fetch_each(&[&(files, absent)], jobs, &is_over, progress)?;
            // Including objects that others were fetching.
            return if is_over() { Ok(()) } else { files.verify_absent(absent) };
        }
        let absent = self.incomplete_packs();
        let first = self.fetch_first(jobs, stop);
        if first.as_ref().is_err_and(|bad| !bad.is_of_object()) {
            return first;
        }
        let parts: Vec<&dyn FetchableSet> = absent.iter().map(|part| part as &dyn FetchableSet).collect();
        fetch_each(&parts, jobs, &is_over, progress)?;
        self.shrink();
        let limit = absent.first().and_then(|(_, absent)| absent.common.limit.as_ref());
        if is_over() || limit.is_some() {
            return Ok(());
        }
        absent.iter().try_for_each(|(pack, _)| (0..pack.len()).try_for_each(|at| pack.verify(at)))
    }

    /// Moves complete packs to their place in the store, and makes composefs's objects durable.
    ///
    /// # Errors
    ///
    /// They cannot be made durable. Then a pack may be incomplete on disk, and all of it is verified again on use.
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

    /// Returns the bytes of objects that were fetched.
    pub fn fetched_bytes(&self) -> u64 {
        if let Some((_, absent)) = self.absent_files() {
            return absent.fetched_bytes();
        }
        let common = self.packs.iter().find_map(|pack| pack.absent.as_ref());
        common.map_or(0, |absent| absent.common.fetched_bytes.load(Ordering::Relaxed))
    }
}

/// Fetches objects of all parts, in order, with this many concurrent requests, until one fails or does not fit, or it is over. Damaged
/// objects are left out, within a limit.
fn fetch_each(
    parts: &[&dyn FetchableSet],
    jobs: usize,
    is_over: &(dyn Fn() -> bool + Sync),
    progress: &FetchProgress<'_>,
) -> Result<(), ObjectError> {
    let bytes_of = |number: usize, range: Range<usize>| range.map(|at| parts[number].objects().bytes(at)).sum::<u64>();
    let all = parts.iter().enumerate().map(|(number, part)| bytes_of(number, 0..part.count())).sum();
    let cursor = Mutex::new((0, 0));
    let missing =
        |part: &dyn FetchableSet, range: Range<usize>| range.filter(|at| !part.objects().is_here(*at)).count();
    // The first error, and how many more objects may be damaged.
    let (done, failed) = (AtomicU64::new(0), Mutex::new((None, DAMAGED_MAX)));
    let work = || {
        while !is_over() && lock(&failed).1 > 0 {
            let Some((number, range)) = next(parts, &mut lock(&cursor)) else { return };
            match parts[number].fetch(range.clone()) {
                Ok(true) => {}
                Ok(false) => return,
                Err(bad) => {
                    let (first, left) = &mut *lock(&failed);
                    *left = if bad.is_of_object() { left.saturating_sub(missing(parts[number], range)) } else { 0 };
                    first.get_or_insert(bad);
                    continue;
                }
            }
            let bytes = bytes_of(number, range);
            progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes, all);
        }
    };
    thread::scope(|scope| (0..jobs.max(1)).for_each(|_| _ = scope.spawn(work)));
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).0.map_or(Ok(()), Err)
}

/// Returns the next objects for a request, from a position on.
fn next(parts: &[&dyn FetchableSet], cursor: &mut (usize, usize)) -> Option<(usize, Range<usize>)> {
    loop {
        let (number, from) = *cursor;
        let part = parts.get(number)?;
        if from == part.count() {
            *cursor = (number + 1, 0);
            continue;
        }
        let (mut to, mut bytes, most) = (from, 0_u64, part.run_bytes());
        while to < part.count() && (to == from || bytes.saturating_add(part.objects().bytes(to)) <= most) {
            bytes = bytes.saturating_add(part.objects().bytes(to));
            to += 1;
        }
        *cursor = (number, to);
        return Some((number, from..to));
    }
}
