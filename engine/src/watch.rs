//! Tracks whether a worker is inside a handler, and which thread owns its queue.

use std::sync::atomic::{AtomicU64, Ordering};

/// The handler's bit.
const INSIDE: u64 = 1;
/// One handler call, above the flag of the handler.
const CALL: u64 = 1 << 1;
/// Bits of the call counter; it may wrap around, because only a change between two looks matters.
const CALL_BITS: u32 = 40;
/// One owner, above the call counter.
const OWNER: u64 = 1 << (1 + CALL_BITS);
const CALLS: u64 = OWNER - CALL;

/// A word that holds the owner of a queue, a counter of handler calls, and whether a call is in progress. The owner
/// writes it twice per call, without reading a clock. The monitor reads it every few milliseconds; an unchanged word
/// means a blocked handler.
#[derive(Debug, Default)]
pub struct Watch(AtomicU64);

/// The right to work on a queue, until the monitor passes it on.
#[derive(Debug)]
pub struct Ownership(u64);

/// A handler call that the monitor saw in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallSnapshot(u64);

impl Watch {
    /// Returns the right of the first owner. Call it once.
    pub fn first_owner(&self) -> Ownership {
        Ownership(self.0.load(Ordering::Acquire))
    }

    /// A handler call begins.
    pub fn enter(&self, owner: &mut Ownership) {
        owner.0 = (owner.0 & !(CALLS | INSIDE)) | (owner.0.wrapping_add(CALL) & CALLS) | INSIDE;
        // No other thread writes while the flag is clear.
        self.0.store(owner.0, Ordering::Release);
    }

    /// Ends the call. Returns whether the caller still owns the queue.
    #[must_use]
    pub fn leave(&self, owner: &mut Ownership) -> bool {
        let outside = owner.0 & !INSIDE;
        let stays = self.0.compare_exchange(owner.0, outside, Ordering::AcqRel, Ordering::Acquire).is_ok();
        owner.0 = outside;
        stays
    }

    /// The monitor looks.
    pub fn look(&self) -> CallSnapshot {
        CallSnapshot(self.0.load(Ordering::Acquire))
    }

    /// Takes the queue from an owner that is still inside the call that was seen. `None` if the call has ended.
    pub fn take(&self, seen: CallSnapshot) -> Option<Ownership> {
        let next = seen.0.wrapping_add(OWNER) & !INSIDE;
        self.0.compare_exchange(seen.0, next, Ordering::AcqRel, Ordering::Acquire).ok().map(|_| Ownership(next))
    }
}

impl Ownership {
    /// Returns the call in progress, for the monitor.
    pub fn call(&self) -> CallSnapshot {
        CallSnapshot(self.0)
    }
}

impl CallSnapshot {
    /// Returns the number of calls begun since an earlier look; `None` if the owner has changed.
    pub fn calls_since(self, earlier: Self) -> Option<u64> {
        let same = (self.0 ^ earlier.0) & !(CALLS | INSIDE) == 0;
        same.then(|| (self.0.wrapping_sub(earlier.0) & CALLS) >> 1)
    }

    /// Returns whether a call was in progress.
    pub fn is_inside(self) -> bool {
        self.0 & INSIDE != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_call_in_progress_can_be_taken_over() {
        let watch = Watch::default();
        let mut first = watch.first_owner();
        assert!(!watch.look().is_inside());
        watch.enter(&mut first);
        let seen = watch.look();
        assert!(seen.is_inside());
        assert_eq!(first.call(), seen);
        assert!(watch.leave(&mut first));
        assert!(watch.take(seen).is_none(), "it has ended");
        watch.enter(&mut first);
        assert!(watch.take(seen).is_none(), "it is another call");
        let before = watch.look();
        let mut second = watch.take(watch.look()).expect("the call is in progress");
        assert!(!watch.leave(&mut first), "the queue is the second's now");
        watch.enter(&mut second);
        assert_eq!(watch.look().calls_since(before), None, "another owner's");
        assert!(watch.leave(&mut second));
    }

    #[test]
    fn the_number_of_calls_wraps_without_touching_the_owner() {
        let watch = Watch(AtomicU64::new(CALLS));
        let mut owner = watch.first_owner();
        watch.enter(&mut owner);
        assert_eq!(watch.look(), CallSnapshot(INSIDE));
        assert_eq!(watch.look().calls_since(CallSnapshot(CALLS)), Some(1));
        assert!(watch.leave(&mut owner));
    }
}
