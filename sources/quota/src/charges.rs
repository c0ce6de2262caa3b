//! The charges of inodes in use.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use ferry_vfs::sync::{CacheAligned, lock, read, write};
use ferry_vfs::{Ino, Result};

use crate::account::{Account, Reservation};

/// Enough that workers on as many CPUs rarely contend.
const SHARDS: u64 = 64;

/// The charge of one inode, while it is open or a request changes it.
#[derive(Debug)]
pub(crate) struct Charge {
    /// The bytes that the account holds for it.
    bytes: AtomicI64,
    /// The bytes at which the charge began.
    first: AtomicI64,
    /// The account does not hold those yet; see [`Charges::born`].
    is_new: AtomicBool,
    /// Finished requests whose growth is not measured yet, and what they reserved.
    unsettled: AtomicUsize,
    reserved: AtomicI64,
    /// Open files and directories of it.
    opens: AtomicUsize,
    /// References that clients have dropped; see [`Self::give_back`]. Held while `opens` grows.
    forgets: Mutex<u64>,
    /// It has no name: only its users keep it.
    orphan: AtomicBool,
    /// Its removal waits for births ([`Births::late`]).
    is_late: AtomicBool,
    /// Held while a write relies on what the file has allocated, and while a request frees a part of it.
    pub(crate) layout: Mutex<()>,
}

impl Charge {
    pub(crate) fn bytes(&self) -> i64 {
        self.bytes.load(Ordering::SeqCst)
    }

    /// Whether the inode has changed since the charge began.
    pub(crate) fn has_changed(&self) -> bool {
        self.bytes() != self.first.load(Ordering::SeqCst)
    }

    pub(crate) fn add_open(&self) {
        let _forgets = lock(&self.forgets);
        self.opens.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn remove_open(&self) {
        // A handle that this layer did not open was not counted.
        let _ = self.opens.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |opens| opens.checked_sub(1));
    }

    pub(crate) fn is_open(&self) -> bool {
        self.opens.load(Ordering::SeqCst) > 0
    }

    /// A client drops references.
    pub(crate) fn forget(&self, count: u64) {
        let mut forgets = lock(&self.forgets);
        *forgets = forgets.saturating_add(count);
    }

    /// Drops the references by `forget`, but not those of an inode that is open or being measured: otherwise a source
    /// may find the same inode under another number, with another charge.
    pub(crate) fn give_back(&self, forget: impl FnOnce(u64)) {
        if self.is_open() {
            return;
        }
        let mut forgets = lock(&self.forgets);
        if *forgets > 0 && !self.is_open() && self.is_settled() {
            forget(std::mem::take(&mut *forgets));
        }
    }

    pub(crate) fn set_orphan(&self, orphan: bool) {
        self.orphan.store(orphan, Ordering::SeqCst);
    }

    pub(crate) fn is_orphan(&self) -> bool {
        self.orphan.load(Ordering::SeqCst)
    }

    /// Whether all finished requests are in [`Self::bytes`].
    pub(crate) fn is_settled(&self) -> bool {
        self.unsettled.load(Ordering::SeqCst) == 0
    }

    /// A request has ended: replaces its reservation by the growth that `measure` finds. Of several threads that
    /// finish at once, one measures for all, and none waits.
    pub(crate) fn settle(
        &self,
        account: &Account,
        reservation: Option<Reservation<'_>>,
        measure: impl Fn() -> Result<i64>,
    ) {
        self.reserved.fetch_add(reservation.map_or(0, Reservation::take), Ordering::SeqCst);
        if self.unsettled.fetch_add(1, Ordering::SeqCst) > 0 {
            return;
        }
        loop {
            let requests = self.unsettled.load(Ordering::SeqCst);
            let reserved = self.reserved.swap(0, Ordering::SeqCst);
            let mut before = self.bytes();
            if self.is_new.swap(false, Ordering::SeqCst) {
                before -= self.first.swap(0, Ordering::SeqCst);
            }
            // If it cannot be measured, it grew by as much as it could.
            let after = measure().unwrap_or(before + reserved);
            self.bytes.store(after, Ordering::SeqCst);
            account.settle(reserved, after - before);
            if self.unsettled.fetch_sub(requests, Ordering::SeqCst) == requests {
                return;
            }
        }
    }
}

type Shard = CacheAligned<RwLock<HashMap<u64, Arc<Charge>>>>;

/// The charges of all inodes that are open, without a name, or being changed.
#[derive(Debug)]
pub(crate) struct Charges {
    shards: Box<[Shard]>,
    /// Requests that create an inode.
    births: Mutex<Births>,
    births_active: AtomicUsize,
}

#[derive(Debug, Default)]
struct Births {
    last: u64,
    active: BTreeSet<u64>,
    /// Charges to be removed once this birth and those before it have ended, in their order: until then they may
    /// belong to a new inode.
    late: VecDeque<(u64, Ino)>,
}

impl Default for Charges {
    fn default() -> Self {
        let shards = (0..SHARDS).map(|_| Shard::default()).collect();
        Self { shards, births: Mutex::default(), births_active: AtomicUsize::new(0) }
    }
}

impl Charges {
    #[allow(clippy::cast_possible_truncation, reason = "the remainder is below SHARDS")]
    fn shard(&self, ino: Ino) -> &Shard {
        // The numbers of a source may be multiples of something.
        &self.shards[(ino.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % SHARDS as usize]
    }

    /// Returns the charge of an inode, if it has one.
    pub(crate) fn get(&self, ino: Ino) -> Option<Held<'_>> {
        let charge = read(self.shard(ino)).get(&ino.0).cloned()?;
        Some(Held { charges: self, ino, charge: Some(charge) })
    }

    /// As [`Self::get`]. Without a charge, runs `otherwise` before one can begin.
    pub(crate) fn get_or(&self, ino: Ino, otherwise: impl FnOnce()) -> Option<Held<'_>> {
        let shard = read(self.shard(ino));
        let charge = shard.get(&ino.0).cloned();
        if charge.is_none() {
            otherwise();
        }
        Some(Held { charges: self, ino, charge: Some(charge?) })
    }

    /// Returns whether an inode has a charge and no name.
    pub(crate) fn is_orphan(&self, ino: Ino) -> bool {
        read(self.shard(ino)).get(&ino.0).is_some_and(|charge| charge.is_orphan())
    }

    /// Returns the charge of an inode. A new one begins with what `measure` finds, before the caller changes the inode.
    pub(crate) fn begin(&self, ino: Ino, measure: impl FnOnce() -> Result<i64>) -> Result<Held<'_>> {
        if let Some(held) = self.get(ino) {
            return Ok(held);
        }
        let mut shard = write(self.shard(ino));
        let charge = match shard.get(&ino.0) {
            Some(charge) => Arc::clone(charge),
            None => {
                // Under the lock: no other request changes the inode before this charge exists.
                let bytes = measure()?;
                let charge = Arc::new(Charge {
                    bytes: AtomicI64::new(bytes),
                    first: AtomicI64::new(bytes),
                    is_new: AtomicBool::new(false),
                    unsettled: AtomicUsize::new(0),
                    reserved: AtomicI64::new(0),
                    opens: AtomicUsize::new(0),
                    forgets: Mutex::default(),
                    orphan: AtomicBool::new(false),
                    is_late: AtomicBool::new(false),
                    layout: Mutex::default(),
                });
                shard.insert(ino.0, Arc::clone(&charge));
                charge
            }
        };
        drop(shard);
        Ok(Held { charges: self, ino, charge: Some(charge) })
    }

    /// Call this before an inode is created, and keep the result until [`Self::born`].
    pub(crate) fn birth(&self) -> Birth<'_> {
        let births = &mut *lock(&self.births);
        self.births_active.fetch_add(1, Ordering::SeqCst);
        births.last += 1;
        births.active.insert(births.last);
        Birth { charges: self, number: births.last }
    }

    /// Begins the charge of an inode that was created, of which the account holds nothing before the next
    /// [`Charge::settle`]. Another client may have found its name already, and have begun its charge.
    pub(crate) fn born(&self, _: &Birth<'_>, ino: Ino) -> Option<Held<'_>> {
        let held = self.begin(ino, || Ok(0)).ok()?;
        held.charge().is_new.store(true, Ordering::SeqCst);
        Some(held)
    }

    /// Returns all charges.
    pub(crate) fn all(&self) -> Vec<Held<'_>> {
        let held = |(ino, charge): (&u64, &Arc<Charge>)| Held {
            charges: self,
            ino: Ino(*ino),
            charge: Some(Arc::clone(charge)),
        };
        self.shards.iter().flat_map(|shard| read(shard).iter().map(held).collect::<Vec<_>>()).collect()
    }

    /// Calls `f` for all charges.
    pub(crate) fn for_each(&self, mut f: impl FnMut(&Charge)) {
        for shard in &self.shards {
            read(shard).values().for_each(|charge| f(charge));
        }
    }

    /// Removes the charge of an inode if no request uses it and `is_over` says that it is not needed.
    pub(crate) fn remove(&self, ino: Ino, is_over: impl FnOnce(&Charge) -> bool) -> Option<Arc<Charge>> {
        let mut shard = write(self.shard(ino));
        let is_unused = |charge: &&Arc<Charge>| Arc::strong_count(charge) == 1 && charge.is_settled();
        let over = shard.get(&ino.0).filter(is_unused).is_some_and(|charge| is_over(charge));
        over.then(|| shard.remove(&ino.0)).flatten()
    }

    /// Removes the charge of an inode that has a name and no users.
    pub(crate) fn tidy(&self, ino: Ino) {
        if self.births_active.load(Ordering::SeqCst) > 0 && self.postpone(ino) {
            return;
        }
        self.remove(ino, |charge| !charge.is_open() && !charge.is_orphan());
    }

    /// Removes a charge once the active births have ended; returns whether there are any.
    fn postpone(&self, ino: Ino) -> bool {
        let births = &mut *lock(&self.births);
        if births.active.is_empty() {
            return false;
        }
        let charge = read(self.shard(ino)).get(&ino.0).cloned();
        if charge.is_some_and(|charge| !charge.is_late.swap(true, Ordering::SeqCst)) {
            births.late.push_back((births.last, ino));
        }
        true
    }

    fn end_birth(&self, number: u64) {
        let births = &mut *lock(&self.births);
        births.active.remove(&number);
        self.births_active.fetch_sub(1, Ordering::SeqCst);
        let oldest = births.active.first().copied().unwrap_or(u64::MAX);
        let due = births.late.partition_point(|(number, _)| *number < oldest);
        for (_, ino) in births.late.drain(..due) {
            // Under the lock, so that no other request postpones it.
            if let Some(charge) = read(self.shard(ino)).get(&ino.0) {
                charge.is_late.store(false, Ordering::SeqCst);
            }
            self.remove(ino, |charge| !charge.is_open() && !charge.is_orphan());
        }
    }
}

/// A request that creates an inode.
#[derive(Debug)]
pub(crate) struct Birth<'a> {
    charges: &'a Charges,
    number: u64,
}

impl Drop for Birth<'_> {
    fn drop(&mut self) {
        self.charges.end_birth(self.number);
    }
}

/// A charge that a request uses.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    charges: &'a Charges,
    pub(crate) ino: Ino,
    charge: Option<Arc<Charge>>,
}

impl Held<'_> {
    pub(crate) fn charge(&self) -> &Charge {
        self.charge.as_ref().expect("it is taken only when dropped")
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let is_needed = self.charge.take().is_some_and(|charge| charge.is_open() || charge.is_orphan());
        if !is_needed {
            self.charges.tidy(self.ino);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(charges: &Charges) -> usize {
        let mut count = 0;
        charges.for_each(|_| count += 1);
        count
    }

    /// With a birth always active, as when several clients make files.
    #[test]
    fn charges_end_despite_constant_creation() {
        let charges = Charges::default();
        let mut birth = charges.birth();
        for number in 0..1000 {
            for ino in 0..10 {
                drop(charges.begin(Ino(1000 * ino + number), || Ok(1)).unwrap());
            }
            birth = charges.birth();
            assert!(count(&charges) <= 10, "{} after {number}", count(&charges));
        }
        drop(charges.begin(Ino(7), || Ok(1)).unwrap());
        assert_eq!(count(&charges), 1, "it may be the new one's");
        let of_new = charges.born(&birth, Ino(7)).unwrap();
        of_new.charge().add_open();
        drop((of_new, birth));
        assert_eq!((count(&charges), charges.births.lock().unwrap().late.len()), (1, 0), "it is open");
        let held = charges.get(Ino(7)).unwrap();
        held.charge().remove_open();
        drop(held);
        assert_eq!(count(&charges), 0);
    }
}
