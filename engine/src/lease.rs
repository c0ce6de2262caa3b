//! Who may still answer a request, and touch the memory that its answer goes to.

use std::sync::atomic::{AtomicU64, Ordering};

/// Somebody is copying into or out of the memory right now.
const HELD: u64 = 1;
/// A transfer is, which may take as long as it likes.
const MOVES: u64 = 1 << 1;
const BUSY: u64 = HELD | MOVES;
/// One more term, above these bits.
const TERM: u64 = 1 << 2;

/// One place that requests are answered from, one after another: an entry of a ring, or the thread of a reader. Each
/// request is a [`Term`]. Whoever ends the term answers it, and from then on nobody else's access succeeds: so a
/// handler that is given up, and comes back after all, can do no harm.
///
/// A term is not ended while its memory is in use. Copies are short. A transfer whose term is to be ended all the same is
/// robbed of it ([`Lease::seize`]) by somebody who sees to it that it goes on in other memory than the next term's.
#[derive(Debug, Default)]
pub struct Lease(AtomicU64);

/// One request of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term(u64);

/// Why a term was not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotEnded {
    /// It has ended before.
    Over,
    /// Its memory is in use by a copy or a transfer.
    Held,
}

/// Access to the memory for as long as it lives.
#[derive(Debug)]
#[must_use]
pub struct Hold<'a>(&'a Lease);

impl Lease {
    /// The term that began when the last one ended.
    pub fn term(&self) -> Term {
        Term(self.0.load(Ordering::Acquire) & !BUSY)
    }

    /// Whether the term has not ended.
    pub fn runs(&self, term: Term) -> bool {
        self.term() == term
    }

    /// Keeps the term from being ended while memory is used. `None` once it has ended. Waits while somebody else
    /// holds it, which only happens when an answer meets its own giving up.
    pub fn hold(&self, term: Term) -> Option<Hold<'_>> {
        loop {
            match self.0.compare_exchange_weak(term.0, term.0 | HELD, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(Hold(self)),
                Err(now) if now & !BUSY != term.0 => return None,
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    /// A transfer begins; false once the term has ended.
    #[must_use]
    pub fn begin_move(&self, term: Term) -> bool {
        loop {
            match self.0.compare_exchange_weak(term.0, term.0 | MOVES, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) if now & !BUSY != term.0 => return false,
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    /// Whether a transfer of the term is under way, which was not robbed of it.
    pub fn moves(&self, term: Term) -> bool {
        self.0.load(Ordering::Acquire) == term.0 | MOVES
    }

    /// The transfer has ended; false if it was robbed of the term.
    #[must_use]
    pub fn end_move(&self, term: Term) -> bool {
        self.0.compare_exchange(term.0 | MOVES, term.0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Ends the term of a transfer that is under way and stays so: for whoever then answers, and takes the memory out of
    /// its reach before that is given to anybody.
    ///
    /// # Errors
    /// [`NotEnded::Over`], or [`NotEnded::Held`] where no transfer is under way.
    pub fn seize(&self, term: Term) -> Result<(), NotEnded> {
        let next = term.0.wrapping_add(TERM);
        match self.0.compare_exchange(term.0 | MOVES, next, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(now) if now & !BUSY != term.0 => Err(NotEnded::Over),
            Err(_) => Err(NotEnded::Held),
        }
    }

    /// Ends the term: true for exactly one caller, who then answers. Waits for whoever holds it.
    #[must_use]
    pub fn end(&self, term: Term) -> bool {
        loop {
            match self.try_end(term) {
                Ok(()) => return true,
                Err(NotEnded::Over) => return false,
                Err(NotEnded::Held) => std::thread::yield_now(),
            }
        }
    }

    /// [`Self::end`], without waiting.
    ///
    /// # Errors
    /// [`NotEnded`].
    pub fn try_end(&self, term: Term) -> Result<(), NotEnded> {
        let next = term.0.wrapping_add(TERM);
        match self.0.compare_exchange(term.0, next, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(now) if now & !BUSY != term.0 => Err(NotEnded::Over),
            Err(_) => Err(NotEnded::Held),
        }
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_and(!HELD, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_term_is_ended_once_and_not_while_it_is_held() {
        let lease = Lease::default();
        let term = lease.term();
        let hold = lease.hold(term).expect("it runs");
        assert_eq!(lease.try_end(term), Err(NotEnded::Held));
        assert!(lease.runs(term));
        drop(hold);
        assert!(lease.begin_move(term) && lease.moves(term) && lease.runs(term));
        assert_eq!(lease.try_end(term), Err(NotEnded::Held));
        assert!(lease.end_move(term));
        assert!(lease.end(term));
        assert!(!lease.end(term));
        assert_eq!(lease.try_end(term), Err(NotEnded::Over));
        assert!(lease.hold(term).is_none(), "memory of an ended term is out of reach");
        let next = lease.term();
        assert_ne!(next, term);
        assert!(lease.hold(next).is_some());
    }

    #[test]
    fn a_transfer_can_be_robbed_of_its_term_and_then_touches_nobody_elses() {
        let lease = Lease::default();
        let term = lease.term();
        assert_eq!(lease.seize(term), Err(NotEnded::Held), "nothing moves");
        assert!(lease.begin_move(term));
        assert_eq!(lease.seize(term), Ok(()));
        assert!(!lease.runs(term) && !lease.moves(term));
        assert_eq!(lease.seize(term), Err(NotEnded::Over));
        let next = lease.term();
        assert!(lease.begin_move(next));
        assert!(!lease.end_move(term), "it is told that it was robbed");
        assert!(lease.moves(next), "and leaves the next one alone");
        assert!(!lease.begin_move(term) && lease.hold(term).is_none());
        assert!(lease.end_move(next) && lease.end(next));
    }

    #[test]
    fn one_of_many_ends_it() {
        let lease = Lease::default();
        let term = lease.term();
        let winners = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| usize::from(lease.end(term)))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>()
        });
        assert_eq!(winners, 1);
    }
}
