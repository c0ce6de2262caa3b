//! Who fetches which objects: one thread gets an object, all others that want it wait and share its fate.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Objects, by their numbers, that somebody is fetching.
#[derive(Debug, Default)]
pub(crate) struct Flights(Mutex<HashMap<usize, Arc<Flight>>>);

/// Objects that one thread is fetching, and others wait for.
#[derive(Debug, Default)]
struct Flight {
    ended: Mutex<bool>,
    news: Condvar,
}

/// Objects that this thread is to fetch. However that ends, others can go on.
pub(crate) struct Claim<'a> {
    flights: &'a Flights,
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
    /// Nothing: somebody has just tried without success. All who waited share that instead of asking again, each in turn.
    Failed,
}

/// Objects as those see them who fetch them.
pub(crate) trait Lacking {
    /// Whether an object is here, and proved.
    fn is_here(&self, at: usize) -> bool;
    /// The length of an object in bytes.
    fn bytes(&self, at: usize) -> u64;
}

impl Flight {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, ended: bool) {
        *self.lock() |= ended;
        self.news.notify_all();
    }

    /// Waits until the flight has ended, or something is so.
    fn wait(&self, is_so: impl Fn() -> bool) {
        let mut ended = self.lock();
        while !*ended && !is_so() {
            ended = self.news.wait(ended).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Claim<'_> {
    /// Says that something more is here.
    pub(crate) fn tell(&self) {
        self.flight.tell(false);
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

impl Flights {
    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Arc<Flight>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for whoever is at the first object of a range; if nobody is, claims it and those behind it that are not here, up to so
    /// many bytes.
    pub(crate) fn turn(&self, objects: &dyn Lacking, range: Range<usize>, bytes_max: u64) -> Turn<'_> {
        let at = range.start;
        let mut waited = false;
        loop {
            let mut flights = self.lock();
            if objects.is_here(at) {
                return Turn::Here;
            }
            let Some(flight) = flights.get(&at).cloned() else {
                if waited {
                    return Turn::Failed;
                }
                return Turn::Ours(self.claim_in(&mut flights, objects, range, bytes_max));
            };
            drop(flights);
            flight.wait(|| objects.is_here(at));
            waited = true;
        }
    }

    /// Claims the objects of a range that are neither here nor claimed, up to the first that is, and up to so many bytes.
    pub(crate) fn claim(&self, objects: &dyn Lacking, range: Range<usize>, bytes_max: u64) -> Claim<'_> {
        self.claim_in(&mut self.lock(), objects, range, bytes_max)
    }

    fn claim_in(
        &self,
        flights: &mut HashMap<usize, Arc<Flight>>,
        objects: &dyn Lacking,
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
