//! Restores a session from the previous server, and saves it for the next one.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use ferry_state::{Init, JournalEntry, Node, OpenFile, PreviousSession, SavedLock, SavedSession, SessionStore};
use ferry_vfs::sync::lock;
use ferry_vfs::{Caller, Errno, IdentityScope, Ino, Lock, LockKind, LockOwner, Migrate, Name, OFlags, Result};
use ferry_wire::fuse::{InitFlags, InitOptions, InitOutcome, InitRequest, LockRequest, Negotiated, negotiate};

use super::{InodeState, Open, OpenState, Session, SessionSlot};
use crate::mappings::{MAPPING_FLAGS, Mappings};
use crate::persistence::{OpenRecord, RestoreError, SessionRecord};
use crate::share::Share;

/// The most references to one inode that are restored: more than a real client has, and later counting cannot
/// overflow.
const REFERENCES_MAX: u64 = 1 << 48;

/// Repeats the negotiation of the previous server.
fn agree(
    share: &Share,
    slot: &SessionSlot,
    mappings: Option<&Arc<dyn Mappings>>,
    init: &Init,
) -> std::result::Result<Negotiated, RestoreError> {
    let flags = InitFlags::from_bits_retain(init.offered);
    let request = InitRequest {
        major: ferry_wire::fuse::abi::MAJOR,
        minor: init.minor,
        max_readahead_bytes: init.max_readahead_bytes,
        flags,
    };
    let mut wanted: InitOptions = share.policy.init_options();
    if let Some(adjust) = &slot.adjust {
        adjust(&request, &mut wanted);
    }
    wanted.flags -= InitFlags::PASSTHROUGH;
    if mappings.is_some() {
        wanted.flags |= MAPPING_FLAGS;
    }
    match negotiate(&request, &wanted) {
        Ok(InitOutcome::Ready(negotiated, _)) if negotiated.flags.bits() == init.agreed => Ok(negotiated),
        Ok(InitOutcome::Ready(negotiated, _)) => {
            Err(RestoreError::Agreed { before: init.agreed, now: negotiated.flags.bits() })
        }
        _ => Err(RestoreError::Minor(init.minor)),
    }
}

impl SessionSlot {
    /// Restores the session that the previous server left; returns whether there was one.
    ///
    /// # Errors
    /// [`RestoreError`].
    pub fn restore_stored(&self, share: &Share) -> std::result::Result<bool, RestoreError> {
        let Some(store) = &self.store else { return Ok(false) };
        let Some(mut before) = store.take_left() else { return Ok(false) };
        let init = &before.saved.init;
        // The client had a window then.
        let had_window = InitFlags::from_bits_retain(init.agreed).contains(InitFlags::MAP_ALIGNMENT);
        let mappings = self.mappings.as_ref().filter(|_| had_window && share.source.mappable().is_some());
        let negotiated = agree(share, self, mappings, init)?;
        let mapped = std::mem::take(&mut before.mapped);
        let session = Session::from_stored(share, negotiated, (store, mappings.cloned()), before);
        if let Some(mappings) = mappings {
            mappings.adopt(session.id(), mapped);
        }
        self.set_session(Some(Arc::new(session)));
        Ok(true)
    }

    /// Restores a session that a server on another host saved, in place of the current one. Inodes are found within
    /// this scope; the state is untrusted. Returns the number of inodes that were not restored.
    ///
    /// # Errors
    /// [`RestoreError`].
    pub fn load(
        &self,
        share: &Share,
        saved: SavedSession,
        within: IdentityScope,
    ) -> std::result::Result<usize, RestoreError> {
        let negotiated = agree(share, self, None, &saved.init)?;
        // The other server was no process of this host.
        let within = if within == IdentityScope::Host { IdentityScope::Paths } else { within };
        self.end();
        let record = self.store.as_ref().map(|store| SessionRecord::begin(store, saved.init));
        let source = Arc::clone(&share.source);
        let session = Session::new(source, negotiated, None, None, (saved.init, record));
        let session = if share.events { session.without_generations() } else { session };
        let lost = session.adopt((saved, within), HashMap::new(), None);
        self.set_session(Some(Arc::new(session)));
        Ok(lost)
    }

    /// Returns the client's state for a server that finds inodes within this scope, and the number of inodes that
    /// cannot be identified.
    pub fn save(&self, within: IdentityScope) -> Option<(SavedSession, usize)> {
        self.current().map(|session| session.save(within))
    }

    /// The client migrates: releases its locks.
    pub fn release_locks_for_migration(&self) {
        if let Some(session) = self.current() {
            session.release_locks_for_migration();
        }
    }

    /// The migration failed: takes the released locks again.
    pub fn reclaim_locks(&self) {
        if let Some(session) = self.current() {
            session.reclaim_locks();
        }
    }
}

impl Session {
    fn from_stored(
        share: &Share,
        negotiated: Negotiated,
        (store, mappings): (&Arc<SessionStore>, Option<Arc<dyn Mappings>>),
        before: PreviousSession,
    ) -> Self {
        let PreviousSession { saved, node_slots, open_slots, lock_slots, files, in_window, journal_entries, .. } =
            before;
        let record = SessionRecord::resume(store);
        let mut session = Self::new(Arc::clone(&share.source), negotiated, None, mappings, (saved.init, Some(record)));
        for ino in in_window {
            session.shard(ino.0).in_window.insert(ino);
        }
        session.journal_entries = Mutex::new(journal_entries);
        let slots = Slots { nodes: node_slots, opens: open_slots, locks: lock_slots };
        let (nodes, opens) = (saved.nodes.len(), saved.opens.len());
        let lost = session.adopt((saved, IdentityScope::Host), files, Some(slots));
        let name = &share.name;
        tracing::info!("{name}: resuming a guest that knows {nodes} inodes and has {opens} files open");
        if lost > 0 {
            tracing::warn!("{name}: {lost} inodes or open files cannot be restored; the guest gets errors for them");
        }
        session
    }

    /// Removes and returns what the previous server recorded of a request.
    pub(crate) fn journal_entry(&self, unique: u64) -> Option<JournalEntry> {
        lock(&self.journal_entries).remove(&unique)
    }

    /// Restores inodes, open files and locks; returns how many failed.
    fn adopt(
        &self,
        (saved, within): (SavedSession, IdentityScope),
        files: HashMap<OpenFile, OwnedFd>,
        slots: Option<Slots>,
    ) -> usize {
        let mut slots = slots;
        let mut lost = self.adopt_nodes((saved.nodes, within), &files, slots.as_mut());
        lost += self.adopt_opens(saved.opens, files, slots.as_mut());
        for (number, lock) in saved.locks.into_iter().enumerate() {
            let slot = slots.as_ref().and_then(|slots| slots.locks.get(number).copied());
            match self.set_lock(&lock, lock.kind) {
                Ok(()) if slot.is_some() => self.locks.adopt(lock, slot),
                Ok(()) => self.locks.set(self.record.as_ref(), &lock, lock.kind),
                Err(error) => {
                    tracing::error!(ino = lock.ino.0, %error, "a lock of the guest was lost: another client holds it");
                    lost += 1;
                    self.remove_records(slot);
                }
            }
        }
        lost
    }

    /// Returns the source's [`Migrate`], if it has one.
    fn migrate(&self) -> Result<&dyn Migrate> {
        self.source.migrate().ok_or(Errno::NOSYS)
    }

    fn remove_records(&self, slot: Option<ferry_state::Slot>) {
        if let (Some(record), Some(slot)) = (&self.record, slot) {
            record.remove(slot);
        }
    }

    fn adopt_nodes(
        &self,
        (nodes, within): (Vec<Node>, IdentityScope),
        files: &HashMap<OpenFile, OwnedFd>,
        mut slots: Option<&mut Slots>,
    ) -> usize {
        let open: HashMap<Ino, &OwnedFd> = files.iter().map(|(open, file)| (open.ino, file)).collect();
        // Inodes with a descriptor are found even without their directories, so they come last.
        let has_file: HashSet<Ino> = files.keys().filter(|open| !open.is_dir).map(|open| open.ino).collect();
        let (with_file, without): (Vec<_>, Vec<_>) = nodes.into_iter().partition(|node| has_file.contains(&node.ino));
        let mut lost = 0;
        for mut waiting in [without, with_file] {
            // An inode may need another one that comes later.
            while !waiting.is_empty() {
                let before = waiting.len();
                waiting = self.adopt_some((waiting, within), &open, slots.as_deref_mut(), &mut lost);
                if waiting.len() == before {
                    lost += before;
                    for node in waiting {
                        self.remove_records(slots.as_mut().and_then(|slots| slots.nodes.remove(&node.ino)));
                    }
                    break;
                }
            }
        }
        lost
    }

    /// Restores inodes, each after the one that it needs. Counts the lost ones and returns those that may be found
    /// later.
    fn adopt_some(
        &self,
        (nodes, within): (Vec<Node>, IdentityScope),
        open: &HashMap<Ino, &OwnedFd>,
        mut slots: Option<&mut Slots>,
        lost: &mut usize,
    ) -> Vec<Node> {
        let (mut ready, mut later) = (nodes, Vec::new());
        // By the inode that they wait for. The client determines the order of the records.
        let mut blocked: HashMap<Ino, Vec<Node>> = HashMap::new();
        ready.reverse();
        while let Some(node) = ready.pop() {
            if self.shard(node.ino.0).references.contains_key(&node.ino) {
                // A duplicate: the previous server ended while it recorded a new name.
                continue;
            }
            let file = open.get(&node.ino).map(|file| file.as_fd());
            let slot = slots.as_mut().and_then(|slots| slots.nodes.remove(&node.ino));
            let adopted = match node.ino {
                // It always exists, with a fixed number.
                Ino::ROOT => Ok(()),
                _ if node.references > REFERENCES_MAX => Err(Errno::INVAL),
                ino => {
                    self.migrate().and_then(|source| source.adopt(ino, node.references, (&node.identity, within), file))
                }
            };
            match adopted {
                Ok(()) => {
                    let slot = match (&self.record, slot) {
                        (Some(record), None) => {
                            let in_window = self.shard(node.ino.0).in_window.contains(&node.ino);
                            record.node(&*self.source, node.ino, in_window)
                        }
                        (_, slot) => slot,
                    };
                    if let (Some(record), Some(slot)) = (&self.record, slot) {
                        record.references(slot, node.references);
                    }
                    let known = InodeState { references: node.references, slot, size: None, kind: None };
                    self.shard(node.ino.0).references.insert(node.ino, known);
                    ready.extend(blocked.remove(&node.ino).unwrap_or_default());
                }
                Err(Errno::AGAIN) => {
                    if let (Some(slots), Some(slot)) = (slots.as_mut(), slot) {
                        slots.nodes.insert(node.ino, slot);
                    }
                    let needed = self.migrate().ok().and_then(|source| source.adopted_after(&node.identity));
                    match needed.filter(|needed| !self.shard(needed.0).references.contains_key(needed)) {
                        Some(needed) => blocked.entry(needed).or_default().push(node),
                        None => later.push(node),
                    }
                }
                Err(error) => {
                    tracing::debug!(ino = node.ino.0, %error, "an inode cannot be restored");
                    *lost += 1;
                    self.remove_records(slot);
                }
            }
        }
        later.extend(blocked.into_values().flatten());
        later
    }

    fn adopt_opens(
        &self,
        opens: Vec<OpenFile>,
        mut files: HashMap<OpenFile, OwnedFd>,
        mut slots: Option<&mut Slots>,
    ) -> usize {
        let mut lost = 0;
        let caller = Caller { session: self.id, ..Caller::default() };
        for saved in opens {
            let OpenFile { ino, handle, is_dir, .. } = saved;
            let (flags, open) = (OFlags::from_bits_retain(saved.flags), Open { ino, handle, is_dir });
            let file = files.remove(&saved);
            let has_file = file.is_some();
            let slot = slots.as_mut().and_then(|slots| slots.opens.remove(&saved));
            let room = self.may_open();
            let source = room.and_then(|()| self.migrate());
            match source.and_then(|source| source.adopt_open(&caller, ino, handle, flags, file)) {
                Ok(()) => {
                    let open_record = match (&self.record, slot) {
                        (Some(record), Some(slot)) if !has_file && !is_dir => {
                            // The keeper had no room for the descriptor.
                            record.remove(slot);
                            record.opened(&*self.source, self.id, open, flags)
                        }
                        (Some(record), None) => record.opened(&*self.source, self.id, open, flags),
                        (_, slot) => OpenRecord { slot, has_file },
                    };
                    self.open_count.fetch_add(1, Ordering::Relaxed);
                    *self.shard(ino.0).opening(open) = OpenState { count: 1, flags, open_record };
                }
                Err(error) => {
                    tracing::debug!(ino = ino.0, %error, "an open file cannot be restored");
                    lost += 1;
                    if let (Some(record), Some(_)) = (&self.record, slot) {
                        record.closed(&OpenRecord { slot, has_file });
                    }
                }
            }
        }
        lost
    }

    /// Takes a lock, or releases it.
    fn set_lock(&self, saved: &SavedLock, kind: LockKind) -> Result<()> {
        let SavedLock { ino, handle, owner, pid, flock, start, end, .. } = *saved;
        let caller = Caller { session: self.id, pid, ..Caller::default() };
        let owner = LockOwner { session: self.id, id: owner };
        let lock = Lock { kind, owner, start, end, pid, flock };
        let first = self.source.set_lock(&caller, ino, handle, &lock, None);
        if !matches!(first, Err(Errno::BADF)) || flock {
            return first.map(drop);
        }
        // The handle through which it was taken is closed: any other handle of the owner will do.
        let others: Vec<Open> = self.shard(ino.0).opens.keys().filter(|open| open.ino == ino).copied().collect();
        let tried = others.iter().map(|open| self.source.set_lock(&caller, ino, open.handle, &lock, None));
        tried.map(|outcome| outcome.map(drop)).find(|outcome| *outcome != Err(Errno::BADF)).unwrap_or(Err(Errno::BADF))
    }

    /// Releases the client's locks, so that the next server can take them. They stay recorded. Waiting requests end
    /// with EINTR.
    fn release_locks_for_migration(&self) {
        self.locks_released.store(true, Ordering::Relaxed);
        self.blocked_locks.interrupt_all();
        self.events.interrupt_agent();
        for lock in self.locks.list() {
            if let Err(error) = self.set_lock(&lock, LockKind::Unlock) {
                tracing::debug!(ino = lock.ino.0, %error, "cannot release a lock of the guest for migration");
            }
        }
    }

    /// Takes the client's locks again after a failed migration.
    fn reclaim_locks(&self) {
        if !self.locks_released.swap(false, Ordering::Relaxed) {
            return;
        }
        for lock in self.locks.list() {
            if let Err(error) = self.set_lock(&lock, lock.kind) {
                tracing::error!(ino = lock.ino.0, %error, "a lock of the guest was lost: another client holds it");
                self.locks.set(self.record.as_ref(), &lock, LockKind::Unlock);
            }
        }
    }

    /// Returns the client's state, and how many inodes cannot be identified to another host.
    fn save(&self, within: IdentityScope) -> (SavedSession, usize) {
        let mut saved = SavedSession { init: self.init, locks: self.locks.list(), ..SavedSession::default() };
        let mut missing: HashMap<Ino, u64> = HashMap::new();
        for shard in &self.shards {
            let shard = lock(shard);
            for (open, opening) in &shard.opens {
                saved.opens.push(OpenFile { flags: opening.flags.bits(), ..OpenFile::from(*open) });
            }
            for (ino, known) in shard.references.iter() {
                let identity = match *ino {
                    Ino::ROOT => Ok(Vec::new()),
                    ino => self.migrate().and_then(|source| source.identify(ino, within)),
                };
                match identity {
                    Ok(identity) => saved.nodes.push(Node { ino: *ino, references: known.references, identity }),
                    Err(error) => {
                        tracing::debug!(ino = ino.0, %error, "an inode cannot be identified to another host");
                        missing.insert(*ino, known.references);
                    }
                }
            }
        }
        if !missing.is_empty() {
            let inos: Vec<Ino> = missing.keys().copied().collect();
            tracing::info!("{} inodes of the guest have moved; searching the whole share for them", inos.len());
            let found = self.migrate().map(|source| source.search(&inos, within)).unwrap_or_default();
            for (ino, identity) in found {
                saved.nodes.extend(missing.remove(&ino).map(|references| Node { ino, references, identity }));
            }
        }
        (saved, missing.len())
    }

    /// Records a lock that the client got or released.
    pub(crate) fn locked(&self, ino: Ino, request: &LockRequest) {
        let LockRequest { handle, owner, kind, start, end, pid, flock } = *request;
        let kind_now = if kind == LockKind::Write { LockKind::Write } else { LockKind::Read };
        let lock = SavedLock { ino, handle, owner, pid, kind: kind_now, flock, start, end };
        self.locks.set(self.record.as_ref(), &lock, kind);
    }

    /// Records that a lock owner has closed a descriptor.
    pub(crate) fn unlocked_all(&self, ino: Ino, owner: u64) {
        self.locks.flushed(self.record.as_ref(), ino, owner);
    }

    /// Updates the records of renamed inodes, if the source finds them by name.
    pub(crate) fn renamed(&self, caller: &Caller<'_>, names: &[(Ino, Name<'_>)]) {
        let Some(record) = &self.record else { return };
        for (dir, name) in names {
            if !self.migrate().is_ok_and(|source| source.follows_names(*dir)) {
                continue;
            }
            let Ok(entry) = self.source.lookup(caller, *dir, *name) else { continue };
            let mut shard = self.shard(entry.ino.0);
            let in_window = shard.in_window.contains(&entry.ino);
            if let Some(known) = shard.references.get_mut(&entry.ino)
                && let Some(new) = record.node(&*self.source, entry.ino, in_window)
            {
                record.references(new, known.references);
                if let Some(old) = known.slot.replace(new) {
                    record.remove(old);
                }
            }
            drop(shard);
            self.source.forget(entry.ino, 1);
        }
    }
}

/// The existing records of restored state.
struct Slots {
    nodes: HashMap<Ino, ferry_state::Slot>,
    opens: HashMap<OpenFile, ferry_state::Slot>,
    locks: Vec<ferry_state::Slot>,
}
