//! Counts locks and waiting requests per client and in total.

use std::collections::{BTreeSet, HashMap};

use crate::{Errno, Ino, LockOwner, Result, SessionId};

/// The limits of one count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    /// The maximum of one client, for all its sessions together.
    pub(super) client_max: usize,
    /// The maximum of all clients together.
    pub(super) all_max: usize,
}

/// Owners, counted per file: each may need a descriptor of the host. Databases lock all their open files, which may be tens
/// of thousands.
pub(super) const OWNERS: Bound = Bound { client_max: 65_536, all_max: 1 << 18 };
/// Ranges of all owners: each takes about 200 bytes, here and outside this source.
pub(super) const RANGES: Bound = Bound { client_max: 1 << 20, all_max: 1 << 21 };
/// Handles with locks, counted per owner: mostly as many as owners.
pub(super) const LINKS: Bound = Bound { client_max: 1 << 18, all_max: 1 << 20 };
/// Waiting requests. A client's kernel has a waiting thread for each, so it does not need more.
pub(super) const WAITERS: Bound = Bound { client_max: 16_384, all_max: 65_536 };

/// The counts of one client, or of all clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) owners: usize,
    pub(super) ranges: usize,
    pub(super) links: usize,
    pub(super) waiters: usize,
}

/// Selects a count.
pub(super) type Field = fn(&mut Counts) -> &mut usize;

/// The counts of all clients and owners with locks or requests.
#[derive(Debug, Default)]
pub(super) struct Registry {
    /// By [`SessionId::client`].
    clients: HashMap<u64, Counts>,
    total: Counts,
    /// The number of ranges of each owner in all files.
    ranges: HashMap<LockOwner, usize>,
    /// The waiting requests of each owner, by inode and number.
    waits: HashMap<LockOwner, BTreeSet<(Ino, u64)>>,
}

impl Registry {
    /// Returns whether a session's client may have more. A client must leave as many for the others as it has itself, so
    /// that no client can take all.
    pub(super) fn has_room(&mut self, session: SessionId, bound: Bound, field: Field) -> bool {
        let used = self.clients.get_mut(&session.client()).map_or(0, |counts| *field(counts));
        used < bound.client_max.min(bound.all_max.saturating_sub(*field(&mut self.total)))
    }

    /// Adds one to a count of a session's client, within its limits.
    pub(super) fn add(&mut self, session: SessionId, bound: Bound, field: Field) -> Result<()> {
        if !self.has_room(session, bound, field) {
            return Err(Errno::NOLCK);
        }
        self.change(session, field, 0, 1);
        Ok(())
    }

    /// Replaces `before` by `now` in a count of a session's client.
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

    /// Replaces `before` by `now` in the number of ranges of an owner in a file.
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

    /// Returns whether an owner has a lock in any file.
    pub(super) fn has_locks(&self, owner: LockOwner) -> bool {
        self.ranges.contains_key(&owner)
    }

    /// Returns the waiting requests of an owner.
    pub(super) fn waits(&self, owner: LockOwner) -> impl Iterator<Item = (Ino, u64)> {
        self.waits.get(&owner).into_iter().flatten().copied()
    }

    /// Returns all waiting owners.
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
