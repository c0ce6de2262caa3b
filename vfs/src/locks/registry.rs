//! Counts locks and waiting requests per client and in total.

use std::collections::{BTreeSet, HashMap};

use crate::{Errno, Ino, LockOwner, Result, SessionId};

/// How many of something there may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    /// One client's, of all its sessions.
    pub(super) client_max: usize,
    /// All clients'.
    pub(super) all_max: usize,
}

/// Owners, counted once for each file: each may take a descriptor of the host's. Databases lock every file that they have
/// open, and have tens of thousands.
pub(super) const OWNERS: Bound = Bound { client_max: 65_536, all_max: 1 << 18 };
/// Ranges, of all owners: each takes about 200 bytes, here and in whoever must agree.
pub(super) const RANGES: Bound = Bound { client_max: 1 << 20, all_max: 1 << 21 };
/// Handles that owners locked through, counted once for each owner: mostly as many as owners.
pub(super) const LINKS: Bound = Bound { client_max: 1 << 18, all_max: 1 << 20 };
/// Requests that wait. A client's kernel has a thread waiting for each, so it will not need more.
pub(super) const WAITERS: Bound = Bound { client_max: 16_384, all_max: 65_536 };

/// A count of one client's, and of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) owners: usize,
    pub(super) ranges: usize,
    pub(super) links: usize,
    pub(super) waiters: usize,
}

/// What is counted.
pub(super) type Field = fn(&mut Counts) -> &mut usize;

/// What the clients and their owners have that have anything.
#[derive(Debug, Default)]
pub(super) struct Registry {
    /// By [`SessionId::client`].
    clients: HashMap<u64, Counts>,
    total: Counts,
    /// Ranges of an owner in all files.
    ranges: HashMap<LockOwner, usize>,
    /// The requests of an owner that wait, by inode and number.
    waits: HashMap<LockOwner, BTreeSet<(Ino, u64)>>,
}

impl Registry {
    /// Whether a session's client may have more. As many are left for the others as it has itself, so that no client can leave
    /// them without any.
    pub(super) fn has_room(&mut self, session: SessionId, bound: Bound, field: Field) -> bool {
        let used = self.clients.get_mut(&session.client()).map_or(0, |counts| *field(counts));
        used < bound.client_max.min(bound.all_max.saturating_sub(*field(&mut self.total)))
    }

    /// Counts one more of a session's, if it may have it.
    pub(super) fn add(&mut self, session: SessionId, bound: Bound, field: Field) -> Result<()> {
        if !self.has_room(session, bound, field) {
            return Err(Errno::NOLCK);
        }
        self.change(session, field, 0, 1);
        Ok(())
    }

    /// A session has so many now, instead of so many.
    pub(super) fn change(&mut self, session: SessionId, field: Field, before: usize, now: usize) {
        let counts = self.clients.entry(session.client()).or_default();
        let of_client = field(counts);
        *of_client = *of_client + now - before;
        if *counts == Counts::default() {
            self.clients.remove(&session.client());
        }
        let total = field(&mut self.total);
        *total = *total + now - before;
    }

    /// An owner has so many ranges now in a file, instead of so many.
    pub(super) fn ranges_changed(&mut self, owner: LockOwner, before: usize, now: usize) {
        if before == now {
            return;
        }
        self.change(owner.session, |counts| &mut counts.ranges, before, now);
        let ranges = self.ranges.entry(owner).or_default();
        *ranges = *ranges + now - before;
        if *ranges == 0 {
            self.ranges.remove(&owner);
        }
    }

    pub(super) fn begin_wait(&mut self, owner: LockOwner, wait: (Ino, u64)) {
        self.waits.entry(owner).or_default().insert(wait);
    }

    pub(super) fn end_wait(&mut self, owner: LockOwner, wait: (Ino, u64)) {
        if let Some(waits) = self.waits.get_mut(&owner) {
            waits.remove(&wait);
            if waits.is_empty() {
                self.waits.remove(&owner);
            }
        }
    }

    /// Whether an owner has a lock in any file.
    pub(super) fn has_locks(&self, owner: LockOwner) -> bool {
        self.ranges.contains_key(&owner)
    }

    /// What an owner waits for.
    pub(super) fn waits(&self, owner: LockOwner) -> impl Iterator<Item = (Ino, u64)> {
        self.waits.get(&owner).into_iter().flatten().copied()
    }

    /// Owners that wait.
    pub(super) fn waiting_owners(&self) -> impl Iterator<Item = LockOwner> {
        self.waits.keys().copied()
    }

    pub(super) fn total(&self) -> Counts {
        self.total
    }

    #[cfg(test)]
    pub(super) fn of(&self, session: SessionId) -> Counts {
        self.clients.get(&session.client()).copied().unwrap_or_default()
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        let none = Counts::default();
        self.clients.is_empty() && self.total == none && self.ranges.is_empty() && self.waits.is_empty()
    }
}
