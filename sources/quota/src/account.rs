//! The usage of a tree, in bytes or files, and its limit.

use std::sync::atomic::{AtomicI64, Ordering};

/// One limit and its usage. Amounts are signed: until the next count, a tree that the host changed may seem to have a
/// negative usage.
#[derive(Debug)]
pub(crate) struct Account {
    limit: i64,
    /// The usage, with the reservations of active requests.
    used: AtomicI64,
    /// The sums of all growth and all shrinkage so far.
    grown: AtomicI64,
    shrunk: AtomicI64,
}

/// An account at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Balance {
    pub(crate) used: i64,
    grown: i64,
    shrunk: i64,
}

impl Balance {
    /// The usage, without reservations.
    fn charged(self) -> i64 {
        self.grown - self.shrunk
    }
}

impl Account {
    /// An empty account. No tree holds 2^63 bytes, so a larger limit is the same.
    pub(crate) fn new(limit: u64) -> Self {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        Self { limit, used: AtomicI64::new(0), grown: AtomicI64::new(0), shrunk: AtomicI64::new(0) }
    }

    /// Returns how much the tree may grow.
    pub(crate) fn room(&self) -> i64 {
        self.limit.saturating_sub(self.used.load(Ordering::SeqCst)).max(0)
    }

    /// Reserves an amount, or returns `None` if there is less room. A reservation of 0 always succeeds.
    pub(crate) fn reserve(&self, amount: i64) -> Option<Reservation<'_>> {
        let reserved = |used: i64| used.checked_add(amount).filter(|used| amount == 0 || *used <= self.limit);
        self.used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, reserved).ok()?;
        Some(Reservation { account: self, amount })
    }

    /// Replaces a reservation by the growth that was found.
    pub(crate) fn settle(&self, reserved: i64, growth: i64) {
        // Before `used`: so a count that runs meanwhile sees at least one of the two.
        if growth > 0 {
            self.grown.fetch_add(growth, Ordering::SeqCst);
        } else if growth < 0 {
            self.shrunk.fetch_sub(growth, Ordering::SeqCst);
        }
        if growth != reserved {
            self.used.fetch_add(growth - reserved, Ordering::SeqCst);
        }
    }

    /// Returns the account's present state.
    pub(crate) fn balance(&self) -> Balance {
        // In this order; see `settle`.
        let used = self.used.load(Ordering::SeqCst);
        let grown = self.grown.load(Ordering::SeqCst);
        Balance { used, grown, shrunk: self.shrunk.load(Ordering::SeqCst) }
    }

    /// Corrects the account after a count of the tree that began at `before`, and returns by how much. Requests that
    /// ran meanwhile may be in the count or not, so only what none of them explains is corrected.
    pub(crate) fn correct(&self, before: Balance, counted: i64) -> i64 {
        let now = self.balance();
        let reserved = (now.used - now.charged()).max(0);
        let most = before.charged() + (now.grown - before.grown) + reserved;
        let least = before.charged() - (now.shrunk - before.shrunk);
        let correction = (counted - most).max(0) + (counted - least).min(0);
        self.settle(0, correction);
        correction
    }
}

/// A reservation of an active request, released when dropped.
#[derive(Debug)]
pub(crate) struct Reservation<'a> {
    account: &'a Account,
    amount: i64,
}

impl Reservation<'_> {
    /// Gives the reservation to the caller, who settles it.
    pub(crate) fn take(mut self) -> i64 {
        std::mem::take(&mut self.amount)
    }

    /// The request added this much.
    pub(crate) fn settle(self, growth: i64) {
        let account = self.account;
        account.settle(self.take(), growth);
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.amount != 0 {
            self.account.settle(self.amount, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_never_pass_the_limit() {
        let account = Account::new(1000);
        let taken = std::sync::atomic::AtomicI64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        if let Some(reservation) = account.reserve(3) {
                            reservation.settle(3);
                            taken.fetch_add(3, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert_eq!(taken.into_inner(), 999);
        assert_eq!((account.room(), account.balance().charged()), (1, 999));
        drop(account.reserve(1).unwrap());
        assert_eq!(account.room(), 1);
        assert!(account.reserve(2).is_none() && account.reserve(i64::MAX).is_none());
    }

    #[test]
    fn a_full_or_overfull_account_grants_nothing_but_nothing() {
        let account = Account::new(0);
        assert!(account.reserve(1).is_none() && account.reserve(0).is_some());
        account.settle(0, 50);
        assert!(account.reserve(1).is_none() && account.reserve(0).is_some());
        assert_eq!(account.room(), 0);
        let endless = Account::new(u64::MAX);
        assert!(endless.reserve(i64::MAX).is_some() && endless.room() == i64::MAX);
        assert!(endless.reserve(i64::MAX).is_some_and(|first| endless.reserve(1).is_none() && first.take() > 0));
    }

    #[test]
    fn a_count_corrects_unexplained_differences() {
        let account = Account::new(1000);
        account.settle(0, 100);
        let before = account.balance();
        assert_eq!(account.correct(before, 100), 0);
        // The host added and removed something.
        assert_eq!(account.correct(before, 130), 30);
        assert_eq!(account.correct(account.balance(), 80), -50);
        assert_eq!(account.balance().used, 80);
        // A request grows the tree during the count: it may be in the count or not.
        let before = account.balance();
        account.reserve(20).unwrap().settle(10);
        assert_eq!((account.correct(before, 80), account.correct(before, 90)), (0, 0));
        // It is not settled yet.
        let before = account.balance();
        let reservation = account.reserve(20).unwrap();
        assert_eq!((account.correct(before, 110), account.correct(before, 115)), (0, 5));
        reservation.settle(20);
        assert_eq!(account.balance().used, 115);
    }
}
