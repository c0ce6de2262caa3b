//! Fetches all missing objects.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::{io, thread};

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

/// After so many requests that the server has refused, a round ends. It may have lost one pack, or refuse all.
const REFUSED_MAX: usize = 16;

/// Where a round of [`Objects::fetch_round`] begins: the number of a pack and of an object in it. `None`: the first round.
pub type RoundBegin = Option<(usize, usize)>;

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
        if let Err(bad) = fetch_each(&parts, &mut None, 1, &stop, progress) {
            tracing::debug!("{bad}: it is tried again");
        }
    }

    /// Returns the incomplete packs, those first that are needed first.
    fn incomplete_packs(&self) -> Vec<(&Pack, &PartialPack)> {
        let mut absent: Vec<_> = self.packs.iter().filter_map(|pack| Some((&**pack, pack.absent.as_ref()?))).collect();
        absent.sort_by_key(|(pack, _)| !pack.ahead);
        absent
    }

    /// Fetches the pack that is needed first, and what [`Self::put_first`] has put first, with `jobs` concurrent requests, until done or
    /// until `stop` is set.
    ///
    /// # Errors
    ///
    /// The first object that could not be fetched. Fetched ones stay, and a damaged one does not stop the others.
    pub fn fetch_first(&self, jobs: usize, stop: &AtomicBool, progress: &FetchProgress<'_>) -> Result<(), ObjectError> {
        let first = self.first_parts();
        let parts: Vec<&dyn FetchableSet> = first.iter().map(|part| part as &dyn FetchableSet).collect();
        fetch_each(&parts, &mut None, jobs, &|| stop.load(Ordering::Relaxed), progress)
    }

    /// Fetches all missing objects with `jobs` concurrent requests, until done or until `stop` is set, beginning with
    /// the pack that is needed first and those of [`Self::put_first`]. Objects beyond the cache limit are skipped.
    ///
    /// # Errors
    ///
    /// The first object that could not be fetched. Fetched ones stay, and a damaged one does not stop the others.
    pub fn fetch_all(&self, jobs: usize, stop: &AtomicBool, progress: &FetchProgress<'_>) -> Result<(), ObjectError> {
        self.fetch_round(&mut None, jobs, stop, progress)
    }

    /// As [`Self::fetch_all`], for a caller that repeats it: after an error the next round begins behind the object that failed, and ends
    /// with it. So an object that always fails does not hold up the others.
    ///
    /// # Errors
    ///
    /// Those of [`Self::fetch_all`].
    pub fn fetch_round(
        &self,
        begin: &mut RoundBegin,
        jobs: usize,
        stop: &AtomicBool,
        progress: &FetchProgress<'_>,
    ) -> Result<(), ObjectError> {
        let is_over = || stop.load(Ordering::Relaxed);
        if let Some((files, absent)) = self.absent_files() {
            fetch_each(&[&(files, absent)], begin, jobs, &is_over, progress)?;
            // Including objects that others were fetching.
            return if is_over() { Ok(()) } else { files.verify_absent(absent) };
        }
        let absent = self.incomplete_packs();
        if begin.replace(begin.unwrap_or_default()).is_none() {
            let first = self.fetch_first(jobs, stop, &|_, _| {});
            if first.as_ref().is_err_and(|bad| !bad.is_of_object()) {
                return first;
            }
        }
        let parts: Vec<&dyn FetchableSet> = absent.iter().map(|part| part as &dyn FetchableSet).collect();
        fetch_each(&parts, begin, jobs, &is_over, progress)?;
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

/// Fetches objects of all parts, in order, with this many concurrent requests, until one fails or does not fit, or it is over. Objects that
/// are damaged or that the server refuses are left out, within a limit. `begin` is the first object, and after an error the one behind it.
fn fetch_each(
    parts: &[&dyn FetchableSet],
    begin: &mut RoundBegin,
    jobs: usize,
    is_over: &(dyn Fn() -> bool + Sync),
    progress: &FetchProgress<'_>,
) -> Result<(), ObjectError> {
    let bytes_of = |number: usize, range: Range<usize>| range.map(|at| parts[number].objects().bytes(at)).sum::<u64>();
    let all = parts.iter().enumerate().map(|(number, part)| bytes_of(number, 0..part.count())).sum();
    let cursor = Mutex::new(Cursor::new(begin.unwrap_or_default()));
    let missing =
        |part: &dyn FetchableSet, range: Range<usize>| range.filter(|at| !part.objects().is_here(*at)).count();
    // The first error, how many more objects may be damaged, and where the next round begins.
    let (done, failed) = (AtomicU64::new(0), Mutex::new((None, DAMAGED_MAX, *begin)));
    let work = || {
        while !is_over() && lock(&failed).1 > 0 {
            let Some((number, range)) = lock(&cursor).next(parts) else { return };
            match parts[number].fetch(range.clone()) {
                Ok(true) => {}
                Ok(false) => return,
                Err(bad) => {
                    let (first, left, next_begin) = &mut *lock(&failed);
                    *next_begin = Some((number, range.end));
                    *left = if bad.is_of_object() {
                        left.saturating_sub(missing(parts[number], range))
                    } else if is_refused(&bad) {
                        left.saturating_sub(DAMAGED_MAX / REFUSED_MAX)
                    } else {
                        0
                    };
                    first.get_or_insert(bad);
                    continue;
                }
            }
            let bytes = bytes_of(number, range);
            progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes, all);
        }
    };
    thread::scope(|scope| (0..jobs.max(1)).for_each(|_| _ = scope.spawn(work)));
    let (first, _, next_begin) = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    *begin = next_begin;
    first.map_or(Ok(()), Err)
}

/// Whether the server has answered that it does not have the object, or does not give it out. It may give out others.
fn is_refused(bad: &ObjectError) -> bool {
    let ObjectError::Fetch { reason, .. } = bad else { return false };
    matches!(reason.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied)
}

/// The numbers of a part and of an object in it.
type Position = (usize, usize);

/// Goes through the objects of all parts once, from any of them on.
struct Cursor {
    at: Position,
    end: Position,
    /// What is left from the beginning up to here.
    rest: Option<Position>,
}

impl Cursor {
    fn new(begin: Position) -> Self {
        Self { at: begin, end: (usize::MAX, 0), rest: Some(begin) }
    }

    /// Returns the next objects for a request.
    fn next(&mut self, parts: &[&dyn FetchableSet]) -> Option<(usize, Range<usize>)> {
        loop {
            let (number, from) = self.at;
            let Some(part) = parts.get(number).filter(|_| self.at < self.end) else {
                (self.at, self.end) = ((0, 0), self.rest.take()?);
                continue;
            };
            let end = if number == self.end.0 { self.end.1.min(part.count()) } else { part.count() };
            if from >= end {
                self.at = (number + 1, 0);
                continue;
            }
            let (mut to, mut bytes, most) = (from, 0_u64, part.run_bytes());
            while to < end && (to == from || bytes.saturating_add(part.objects().bytes(to)) <= most) {
                bytes = bytes.saturating_add(part.objects().bytes(to));
                to += 1;
            }
            self.at = (number, to);
            return Some((number, from..to));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::digest::{Algorithm, Digest};

    /// Objects of one byte, of which the server refuses some, and requests for one each.
    #[derive(Default)]
    struct Refused {
        objects: usize,
        refused: Vec<usize>,
        error: Option<io::ErrorKind>,
        asked: Mutex<Vec<usize>>,
    }

    impl ObjectSet for Refused {
        fn is_here(&self, _: usize) -> bool {
            false
        }

        fn bytes(&self, _: usize) -> u64 {
            1
        }
    }

    impl FetchableSet for Refused {
        fn count(&self) -> usize {
            self.objects
        }

        fn objects(&self) -> &dyn ObjectSet {
            self
        }

        fn run_bytes(&self) -> u64 {
            1
        }

        fn fetch(&self, range: Range<usize>) -> Result<bool, ObjectError> {
            lock(&self.asked).push(range.start);
            let error = self.error.filter(|_| self.refused.contains(&range.start));
            let zero = Digest::new(Algorithm::Blake3, [0; 32]);
            error.map_or(Ok(true), |error| Err(ObjectError::Fetch { pack: zero, digest: zero, reason: error.into() }))
        }
    }

    fn rounds(set: &Refused, rounds: usize) -> Vec<Vec<usize>> {
        let other = Refused { objects: 1, ..Refused::default() };
        let mut begin = None;
        let mut round = || {
            let fetched = fetch_each(&[set, &other], &mut begin, 1, &|| false, &|_, _| {});
            assert_eq!(fetched.is_err(), !set.refused.is_empty());
            std::mem::take(&mut *lock(&set.asked))
        };
        (0..rounds).map(|_| round()).collect()
    }

    #[test]
    fn an_object_that_always_fails_does_not_hold_up_others() {
        let (objects, refused, error) = (4, vec![1], Some(io::ErrorKind::NotFound));
        let set = Refused { objects, refused, error, ..Refused::default() };
        assert_eq!(rounds(&set, 2), [[0, 1, 2, 3], [2, 3, 0, 1]]);
        // An error of the server ends the round.
        let set = Refused { error: Some(io::ErrorKind::Other), ..set };
        assert_eq!(rounds(&set, 3), [vec![0, 1], vec![2, 3, 0, 1], vec![2, 3, 0, 1]]);
        let set = Refused { objects: 40, refused: (0..40).collect(), error: Some(io::ErrorKind::NotFound), ..set };
        let asked = rounds(&set, 3);
        assert_eq!((asked[0].len(), asked[1][0], asked[2][0]), (REFUSED_MAX, 16, 32));
        let set = Refused { refused: Vec::new(), ..set };
        assert_eq!(rounds(&set, 1), [(0..40).collect::<Vec<_>>()]);
    }
}
