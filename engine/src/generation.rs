//! Decides who may reply to a request and access the memory of its reply: each request has a generation, which can be
//! revoked.

use std::sync::atomic::{AtomicU64, Ordering};

/// A thread is copying into or out of the memory.
const HELD: u64 = 1;
/// A transfer is using the memory, for an unlimited time.
const MOVES: u64 = 1 << 1;
const BUSY: u64 = HELD | MOVES;
/// One generation, above these bits.
const GENERATION_ONE: u64 = 1 << 2;

/// The generation of a place that serves one request after another: an entry of a ring, or a reader thread. The thread
/// that ends a generation sends the reply. Afterwards every access of that generation fails, so a handler that returns
/// after its request was aborted does no harm.
///
/// A generation does not end while its memory is in use. Copies are short. A transfer may take long, so its generation
/// can be revoked ([`GenerationCell::revoke`]). The next request must then use other memory.
#[derive(Debug, Default)]
pub struct GenerationCell(AtomicU64);

/// One generation: the time of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation(u64);

/// Why a generation could not be revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotEnded {
    /// It has ended before.
    Over,
    /// A copy or a transfer is using the memory.
    Held,
}

/// Access to the memory, until dropped.
#[derive(Debug)]
#[must_use]
pub struct Hold<'a>(&'a GenerationCell);

impl GenerationCell {
    /// Returns the current generation.
    pub fn current(&self) -> Generation {
        Generation(self.0.load(Ordering::Acquire) & !BUSY)
    }

    /// Returns whether the generation has not ended.
    pub fn runs(&self, generation: Generation) -> bool {
        self.current() == generation
    }

    /// Keeps the generation from ending while its memory is used. Returns `None` if it has ended. Waits for another
    /// holder; two only meet when a reply coincides with the abort of its request.
    pub fn hold(&self, generation: Generation) -> Option<Hold<'_>> {
        loop {
            match self.0.compare_exchange_weak(generation.0, generation.0 | HELD, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(Hold(self)),
                Err(now) if now & !BUSY != generation.0 => return None,
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    /// Begins a transfer; returns false if the generation has ended.
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

    /// Returns whether a transfer of the generation is in flight and was not revoked.
    pub fn moves(&self, generation: Generation) -> bool {
        self.0.load(Ordering::Acquire) == generation.0 | MOVES
    }

    /// Ends the transfer; returns false if its generation was revoked.
    #[must_use]
    pub fn end_move(&self, generation: Generation) -> bool {
        self.0.compare_exchange(generation.0 | MOVES, generation.0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Ends the generation of a transfer that stays in flight. The caller then sends the reply, and ensures that no
    /// other request gets the memory.
    ///
    /// # Errors
    ///
    /// [`NotEnded::Over`], or [`NotEnded::Held`] if no transfer is in flight.
    pub fn revoke(&self, generation: Generation) -> Result<(), NotEnded> {
        let next = generation.0.wrapping_add(GENERATION_ONE);
        match self.0.compare_exchange(generation.0 | MOVES, next, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(now) if now & !BUSY != generation.0 => Err(NotEnded::Over),
            Err(_) => Err(NotEnded::Held),
        }
    }

    /// Ends the generation: returns true to exactly one caller, which then sends the reply. Waits for a holder.
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
        let next = generation.0.wrapping_add(GENERATION_ONE);
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
    fn a_generation_ends_once_and_not_while_it_is_held() {
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
        assert!(generation_cell.hold(generation).is_none(), "memory of an ended generation is out of reach");
        let next = generation_cell.current();
        assert_ne!(next, generation);
        assert!(generation_cell.hold(next).is_some());
    }

    #[test]
    fn a_revoked_transfer_cannot_end_the_next_generation() {
        let generation_cell = GenerationCell::default();
        let generation = generation_cell.current();
        assert_eq!(generation_cell.revoke(generation), Err(NotEnded::Held), "nothing moves");
        assert!(generation_cell.begin_move(generation));
        assert_eq!(generation_cell.revoke(generation), Ok(()));
        assert!(!generation_cell.runs(generation) && !generation_cell.moves(generation));
        assert_eq!(generation_cell.revoke(generation), Err(NotEnded::Over));
        let next = generation_cell.current();
        assert!(generation_cell.begin_move(next));
        assert!(!generation_cell.end_move(generation), "its generation was revoked");
        assert!(generation_cell.moves(next), "and leaves the next one alone");
        assert!(!generation_cell.begin_move(generation) && generation_cell.hold(generation).is_none());
        assert!(generation_cell.end_move(next) && generation_cell.end(next));
    }

    #[test]
    fn one_of_many_threads_ends_a_generation() {
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
