//! Lets one thread fetch an object while others that need it wait and share the outcome. Objects that were only claimed
//! together with a damaged one have no outcome: their waiters fetch them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};

use ferry_vfs::sync::{self, lock};

use crate::store::fetch::RUN_BYTES_MAX;
use crate::store::object_error::ObjectError;

/// After so many damaged objects nothing more is fetched, because the server may damage everything.
pub(crate) const DAMAGED_MAX: usize = 256;

/// The objects being fetched, by number.
#[derive(Debug, Default)]
pub(crate) struct Singleflight(Mutex<HashMap<usize, Arc<Flight>>>);

/// Objects that one thread fetches, and others wait for.
#[derive(Debug, Default)]
struct Flight {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    ended: bool,
    /// The first object that was not tried.
    untried: Option<usize>,
}

/// The objects that this thread is to fetch. Dropping it releases the waiters.
pub(crate) struct Claim<'a> {
    flights: &'a Singleflight,
    flight: Arc<Flight>,
    /// Adjacent objects, in order.
    pub objects: Range<usize>,
}

/// What a caller must do for an object.
pub(crate) enum FetchAction<'a> {
    /// Nothing: it is available.
    Here,
    /// Fetch these.
    Ours(Claim<'a>),
    /// Nothing: another thread has just failed. All waiters share the failure instead of retrying in turn, because the
    /// server may be silent for minutes.
    Failed,
}

/// Objects as their fetchers see them.
pub(crate) trait ObjectSet {
    /// Returns whether an object is available and verified.
    fn is_here(&self, at: usize) -> bool;
    /// Returns the length of an object in bytes.
    fn bytes(&self, at: usize) -> u64;
}

impl Flight {
    fn tell(&self, ended: bool) {
        lock(&self.state).ended |= ended;
        self.news.notify_all();
    }

    /// Waits until the flight has ended, or a condition holds; returns whether an object was tried.
    fn wait(&self, at: usize, is_so: impl Fn() -> bool) -> bool {
        let mut state = lock(&self.state);
        while !state.ended && !is_so() {
            state = sync::wait(&self.news, state);
        }
        state.untried.is_none_or(|untried| at < untried)
    }
}

impl Claim<'_> {
    /// Notifies waiters that more is available.
    pub(crate) fn tell(&self) {
        self.flight.tell(false);
    }

    /// Records that the first missing object is damaged, so those after it were not tried.
    pub(crate) fn damaged(&self, objects: &dyn ObjectSet) {
        lock(&self.flight.state).untried = self.first_missing(objects).map(|at| at + 1);
    }

    fn first_missing(&self, objects: &dyn ObjectSet) -> Option<usize> {
        self.objects.clone().find(|at| !objects.is_here(*at))
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut flights = lock(&self.flights.0);
        self.objects.clone().for_each(|at| drop(flights.remove(&at)));
        drop(flights);
        self.flight.tell(true);
    }
}

impl Singleflight {
    /// Waits for the thread that fetches the first object of a range; if there is none, claims it and the missing ones
    /// after it, up to this many bytes.
    pub(crate) fn next_action(&self, objects: &dyn ObjectSet, range: Range<usize>, bytes_max: u64) -> FetchAction<'_> {
        let at = range.start;
        let mut failed = false;
        loop {
            let mut flights = lock(&self.0);
            if objects.is_here(at) {
                return FetchAction::Here;
            }
            let Some(flight) = flights.get(&at).cloned() else {
                if failed {
                    return FetchAction::Failed;
                }
                return FetchAction::Ours(self.claim_in(&mut flights, objects, range, bytes_max));
            };
            drop(flights);
            failed = flight.wait(at, || objects.is_here(at));
        }
    }

    /// Claims the missing and unclaimed objects at the beginning of a range, up to this many bytes.
    pub(crate) fn claim(&self, objects: &dyn ObjectSet, range: Range<usize>, bytes_max: u64) -> Claim<'_> {
        self.claim_in(&mut lock(&self.0), objects, range, bytes_max)
    }

    /// Gets the missing and unclaimed objects of a range, in claims of up to this many bytes. Damaged objects do not stop those behind
    /// them, within a limit. Returns the first error.
    pub(crate) fn claim_all(
        &self,
        objects: &dyn ObjectSet,
        range: Range<usize>,
        bytes_max: u64,
        get: impl Fn(&Claim<'_>) -> Result<(), ObjectError>,
    ) -> Result<(), ObjectError> {
        let (mut at, mut outcome, mut damaged) = (range.start, Ok(()), 0);
        while at < range.end {
            let claim = self.claim(objects, at..range.end, bytes_max);
            let end = at + claim.objects.len().max(1);
            let got = get(&claim);
            at = match &got {
                Ok(()) => end,
                Err(bad) if bad.is_of_object() && damaged < DAMAGED_MAX => {
                    damaged += 1;
                    claim.first_missing(objects).map_or(end, |missing| missing + 1)
                }
                Err(_) => return outcome.and(got),
            };
            outcome = outcome.and(got);
        }
        outcome
    }

    fn claim_in(
        &self,
        flights: &mut HashMap<usize, Arc<Flight>>,
        objects: &dyn ObjectSet,
        range: Range<usize>,
        bytes_max: u64,
    ) -> Claim<'_> {
        let flight = Arc::new(Flight::default());
        let mut to = range.start;
        let mut bytes = 0_u64;
        for at in range.clone() {
            bytes = bytes.saturating_add(objects.bytes(at));
            if to > range.start && bytes > bytes_max || objects.is_here(at) || flights.contains_key(&at) {
                break;
            }
            flights.insert(at, Arc::clone(&flight));
            to = at + 1;
        }
        Claim { flights: self, flight, objects: range.start..to }
    }
}

/// Objects that are fetched in order, in either layout.
pub(crate) trait FetchableSet: Sync {
    /// Returns the number of objects.
    fn count(&self) -> usize;
    fn objects(&self) -> &dyn ObjectSet;
    /// Returns the maximum size of a request, in bytes.
    fn run_bytes(&self) -> u64 {
        RUN_BYTES_MAX
    }
    /// Gets the missing and unclaimed objects of a range, also behind a damaged one; returns whether there was room for them.
    fn fetch(&self, range: Range<usize>) -> Result<bool, ObjectError>;
}
