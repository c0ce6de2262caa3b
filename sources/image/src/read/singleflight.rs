//! Who fetches which objects: one thread gets an object, all others that want it wait and share its fate. An object that was only
//! claimed together with one that is damaged has none: who waited for it asks for it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::store::object_error::ObjectError;

/// Objects, by their numbers, that somebody is fetching.
#[derive(Debug, Default)]
pub(crate) struct Singleflight(Mutex<HashMap<usize, Arc<Flight>>>);

/// Objects that one thread is fetching, and others wait for.
#[derive(Debug, Default)]
struct Flight {
    state: Mutex<State>,
    news: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    ended: bool,
    /// From which object on nothing was tried.
    untried: Option<usize>,
}

/// Objects that this thread is to fetch. However that ends, others can go on.
pub(crate) struct Claim<'a> {
    flights: &'a Singleflight,
    flight: Arc<Flight>,
    /// Neighbours, in their order.
    pub objects: Range<usize>,
}

/// What there is to be done for an object.
pub(crate) enum Turn<'a> {
    /// Nothing: it is here.
    Here,
    /// To fetch these.
    Ours(Claim<'a>),
    /// Nothing: somebody has just tried without success. All who waited share that instead of asking again, each in turn: the server
    /// may be one that says nothing for minutes.
    Failed,
}

/// Objects as those see them who fetch them.
pub(crate) trait ObjectSet {
    /// Whether an object is here, and proved.
    fn is_here(&self, at: usize) -> bool;
    /// The length of an object in bytes.
    fn bytes(&self, at: usize) -> u64;
}

impl Flight {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, ended: bool) {
        self.lock().ended |= ended;
        self.news.notify_all();
    }

    /// Waits until the flight has ended, or something is so; returns whether an object was tried.
    fn wait(&self, at: usize, is_so: impl Fn() -> bool) -> bool {
        let mut state = self.lock();
        while !state.ended && !is_so() {
            state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.untried.is_none_or(|untried| at < untried)
    }
}

impl Claim<'_> {
    /// Says that something more is here.
    pub(crate) fn tell(&self) {
        self.flight.tell(false);
    }

    /// Says that the first of the objects that is not here is damaged, so that those behind it were not tried.
    pub(crate) fn damaged(&self, objects: &dyn ObjectSet) {
        let damaged = self.objects.clone().find(|at| !objects.is_here(*at));
        self.flight.lock().untried = damaged.map(|at| at + 1);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut flights = self.flights.lock();
        self.objects.clone().for_each(|at| drop(flights.remove(&at)));
        drop(flights);
        self.flight.tell(true);
    }
}

impl Singleflight {
    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Arc<Flight>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for whoever is at the first object of a range; if nobody is, claims it and those behind it that are not here, up to so
    /// many bytes.
    pub(crate) fn turn(&self, objects: &dyn ObjectSet, range: Range<usize>, bytes_max: u64) -> Turn<'_> {
        let at = range.start;
        let mut failed = false;
        loop {
            let mut flights = self.lock();
            if objects.is_here(at) {
                return Turn::Here;
            }
            let Some(flight) = flights.get(&at).cloned() else {
                if failed {
                    return Turn::Failed;
                }
                return Turn::Ours(self.claim_in(&mut flights, objects, range, bytes_max));
            };
            drop(flights);
            failed = flight.wait(at, || objects.is_here(at));
        }
    }

    /// Claims the objects of a range that are neither here nor claimed, up to the first that is, and up to so many bytes.
    pub(crate) fn claim(&self, objects: &dyn ObjectSet, range: Range<usize>, bytes_max: u64) -> Claim<'_> {
        self.claim_in(&mut self.lock(), objects, range, bytes_max)
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

/// Objects that are fetched in their order, whatever they are kept in.
pub(crate) trait FetchableSet: Sync {
    /// How many there are.
    fn count(&self) -> usize;
    /// The objects.
    fn objects(&self) -> &dyn ObjectSet;
    /// Gets those of a range that nobody has or is getting; returns whether there was room for them.
    fn fetch(&self, range: Range<usize>) -> Result<bool, ObjectError>;
}
