//! Decides who may still answer a request and access the memory of its reply: each request has a generation, which can
//! be revoked.

use std::sync::atomic::{AtomicU64, Ordering};

/// Somebody is copying into or out of the memory right now.
const HELD: u64 = 1;
/// A transfer is, which may take as long as it likes.
const MOVES: u64 = 1 << 1;
const BUSY: u64 = HELD | MOVES;
/// One more term, above these bits.
const TERM: u64 = 1 << 2;

/// One place that requests are answered from, one after another: an entry of a ring, or the thread of a reader. Each
/// request is a [`Generation`]. Whoever ends the term answers it, and from then on nobody else's access succeeds: so a
/// handler that is given up, and comes back after all, can do no harm.
///
/// A term is not ended while its memory is in use. Copies are short. A transfer whose term is to be ended all the same is
/// robbed of it ([`GenerationCell::revoke`]) by somebody who sees to it that it goes on in other memory than the next term's.
#[derive(Debug, Default)]
pub struct GenerationCell(AtomicU64);

/// One request of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation(u64);

/// Why a generation could not be revoked.
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
pub struct Hold<'a>(&'a GenerationCell);

impl GenerationCell {
    /// The term that began when the last one ended.
    pub fn current(&self) -> Generation {
        Generation(self.0.load(Ordering::Acquire) & !BUSY)
    }

    /// Whether the term has not ended.
    pub fn runs(&self, generation: Generation) -> bool {
        self.current() == generation
    }

    /// Keeps the term from being ended while memory is used. `None` once it has ended. Waits while somebody else
    /// holds it, which only happens when an answer meets its own giving up.
    pub fn hold(&self, generation: Generation) -> Option<Hold<'_>> {
        loop {
            match self.0.compare_exchange_weak(generation.0, generation.0 | HELD, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(Hold(self)),
                Err(now) if now & !BUSY != generation.0 => return None,
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    /// A transfer begins; false once the term has ended.
    #[must_use]
    pub fn begin_move(&self, generation: Generation) -> bool {
        loop {
            match self.0.compare_exchange_weak(generation.0, generation.0 | MOVES, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return true,
                Err(now) if now & !BUSY != generation.0 => return false,
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    /// Whether a transfer of the term is under way, which was not robbed of it.
    pub fn moves(&self, generation: Generation) -> bool {
        self.0.load(Ordering::Acquire) == generation.0 | MOVES
    }

    /// The transfer has ended; false if it was robbed of the term.
    #[must_use]
    pub fn end_move(&self, generation: Generation) -> bool {
        self.0.compare_exchange(generation.0 | MOVES, generation.0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Ends the term of a transfer that is under way and stays so: for whoever then answers, and takes the memory out of
    /// its reach before that is given to anybody.
    ///
    /// # Errors
    /// [`NotEnded::Over`], or [`NotEnded::Held`] where no transfer is under way.
    pub fn revoke(&self, generation: Generation) -> Result<(), NotEnded> {
        let next = generation.0.wrapping_add(TERM);
        match self.0.compare_exchange(generation.0 | MOVES, next, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(now) if now & !BUSY != generation.0 => Err(NotEnded::Over),
            Err(_) => Err(NotEnded::Held),
        }
    }

    /// Ends the term: true for exactly one caller, who then answers. Waits for whoever holds it.
    #[must_use]
    pub fn end(&self, generation: Generation) -> bool {
        loop {
            match self.try_end(generation) {
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
    pub fn try_end(&self, generation: Generation) -> Result<(), NotEnded> {
        let next = generation.0.wrapping_add(TERM);
        match self.0.compare_exchange(generation.0, next, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(now) if now & !BUSY != generation.0 => Err(NotEnded::Over),
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
        let generation_cell = GenerationCell::default();
        let generation = generation_cell.current();
        let hold = generation_cell.hold(generation).expect("it runs");
        assert_eq!(generation_cell.try_end(generation), Err(NotEnded::Held));
        assert!(generation_cell.runs(generation));
        drop(hold);
        assert!(
            generation_cell.begin_move(generation)
                && generation_cell.moves(generation)
                && generation_cell.runs(generation)
        );
        assert_eq!(generation_cell.try_end(generation), Err(NotEnded::Held));
        assert!(generation_cell.end_move(generation));
        assert!(generation_cell.end(generation));
        assert!(!generation_cell.end(generation));
        assert_eq!(generation_cell.try_end(generation), Err(NotEnded::Over));
        assert!(generation_cell.hold(generation).is_none(), "memory of an ended term is out of reach");
        let next = generation_cell.current();
        assert_ne!(next, generation);
        assert!(generation_cell.hold(next).is_some());
    }

    #[test]
    fn a_transfer_can_be_robbed_of_its_term_and_then_touches_nobody_elses() {
        let generation_cell = GenerationCell::default();
        let generation = generation_cell.current();
        assert_eq!(generation_cell.revoke(generation), Err(NotEnded::Held), "nothing moves");
        assert!(generation_cell.begin_move(generation));
        assert_eq!(generation_cell.revoke(generation), Ok(()));
        assert!(!generation_cell.runs(generation) && !generation_cell.moves(generation));
        assert_eq!(generation_cell.revoke(generation), Err(NotEnded::Over));
        let next = generation_cell.current();
        assert!(generation_cell.begin_move(next));
        assert!(!generation_cell.end_move(generation), "it is told that it was robbed");
        assert!(generation_cell.moves(next), "and leaves the next one alone");
        assert!(!generation_cell.begin_move(generation) && generation_cell.hold(generation).is_none());
        assert!(generation_cell.end_move(next) && generation_cell.end(next));
    }

    #[test]
    fn one_of_many_ends_it() {
        let generation_cell = GenerationCell::default();
        let generation = generation_cell.current();
        let winners = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..8).map(|_| scope.spawn(|| usize::from(generation_cell.end(generation)))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>()
        });
        assert_eq!(winners, 1);
    }
}
