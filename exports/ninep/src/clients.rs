//! Limits per client. A client is everything from one source: one user of this host, one address, one virtual machine,
//! with any number of connections. The resources of each are bounded. When the total exceeds its limit, a connection of
//! the client that holds most is closed.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use ferry_vfs::SessionId;
use ferry_vfs::sync::lock;

use crate::connection::Connection;
use crate::peer::Peer;
use crate::shrink::shrink;

/// The maximum number of one client's fids (Linux keeps one per cached name), waiting locks, flushes and lock owners.
const ENTRIES_MAX: usize = 1 << 20;
/// The maximum of all clients: about 1.2 GB.
const ENTRIES_MAX_OF_ALL: usize = 4 * ENTRIES_MAX;

/// A limited resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resource {
    /// Connections.
    Connections,
    /// Bytes of unfinished messages, of unread replies, and of extended attributes.
    Bytes,
    /// Fids, waiting locks, flushes and lock owners.
    Entries,
}

const RESOURCES: [Resource; 3] = [Resource::Connections, Resource::Bytes, Resource::Entries];
/// Amounts of all resources.
type ResourceCounts = [usize; RESOURCES.len()];

/// The limit for this client is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimitReached;

/// The limits of one client, and of all.
#[derive(Clone, Copy, Debug)]
struct ResourceLimits {
    client: ResourceCounts,
    all: ResourceCounts,
}

/// The resources of one client.
#[derive(Debug)]
struct Account {
    peer: Peer,
    /// The session id in notifications to all sessions of the client.
    session: SessionId,
    held: [AtomicUsize; RESOURCES.len()],
    threads: Mutex<ClientThreads>,
}

/// The threads that serve a client.
#[derive(Debug, Default)]
struct ClientThreads {
    count: usize,
    /// Connections with something to read that wait for another thread to end, without being watched.
    waiting: VecDeque<u64>,
}

#[derive(Debug, Default)]
struct Registry {
    accounts: HashMap<Peer, Weak<Account>>,
    holders: HashMap<u64, Weak<ConnectionAccount>>,
    next: u64,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Clients {
    bounds: ResourceLimits,
    held: [AtomicUsize; RESOURCES.len()],
    registry: Mutex<Registry>,
}

/// The resources of one connection.
#[derive(Debug)]
pub(crate) struct ConnectionAccount {
    clients: Arc<Clients>,
    account: Arc<Account>,
    /// Counts holders.
    number: u64,
    state: Mutex<Registration>,
    /// The connection to close when others need the room.
    connection: OnceLock<Weak<Connection>>,
}

#[derive(Debug, Default)]
struct Registration {
    amounts: ResourceCounts,
    /// It was removed from the accounts, and takes nothing more.
    is_ended: bool,
}

/// Adds if the sum is within the bound; returns whether it is.
fn add_within(counts: &[AtomicUsize], resource: Resource, amount: usize, bound: usize) -> bool {
    let sum = |count: usize| count.checked_add(amount).filter(|sum| *sum <= bound);
    counts[resource as usize].fetch_update(Ordering::AcqRel, Ordering::Acquire, sum).is_ok()
}

fn subtract(counts: &[AtomicUsize], resource: Resource, amount: usize) {
    counts[resource as usize].fetch_sub(amount, Ordering::AcqRel);
}

impl Clients {
    /// Creates the accounts without clients.
    pub(crate) fn new(connections_max: usize, bytes_max: usize) -> Arc<Self> {
        Self::within(ResourceLimits {
            client: [usize::MAX, usize::MAX, ENTRIES_MAX],
            all: [connections_max, bytes_max, ENTRIES_MAX_OF_ALL],
        })
    }

    fn within(bounds: ResourceLimits) -> Arc<Self> {
        Arc::new(Self { bounds, held: Default::default(), registry: Mutex::default() })
    }

    /// Creates the account of a single client, which may hold as much as all of a socket's clients.
    pub(crate) fn alone() -> Arc<ConnectionAccount> {
        let all = [usize::MAX, usize::MAX, ENTRIES_MAX_OF_ALL];
        Self::within(ResourceLimits { client: all, all }).holder(Peer::Guest)
    }

    /// Returns the total of all clients.
    pub(crate) fn held(&self, resource: Resource) -> usize {
        self.held[resource as usize].load(Ordering::Relaxed)
    }

    /// Adds a connection of a client, if there is room.
    pub(crate) fn welcome(self: &Arc<Self>, peer: Peer) -> Result<Arc<ConnectionAccount>, LimitReached> {
        let holder = self.holder(peer);
        holder.take(Resource::Connections, 1)?;
        Ok(holder)
    }

    fn holder(self: &Arc<Self>, peer: Peer) -> Arc<ConnectionAccount> {
        let mut registry = lock(&self.registry);
        let account = registry.accounts.get(&peer).and_then(Weak::upgrade).unwrap_or_else(|| {
            let (session, held, threads) = (SessionId::unique(), Default::default(), Mutex::default());
            let account = Arc::new(Account { peer, session, held, threads });
            registry.accounts.insert(peer, Arc::downgrade(&account));
            account
        });
        let number = registry.next;
        registry.next += 1;
        let clients = Arc::clone(self);
        let holder =
            ConnectionAccount { clients, account, number, state: Mutex::default(), connection: OnceLock::new() };
        let holder = Arc::new(holder);
        registry.holders.insert(number, Arc::downgrade(&holder));
        drop(registry);
        holder
    }

    /// Closes connections of the clients that hold most until the amount fits, and adds it to the total; returns
    /// whether it does, which it does not if the asker would hold most.
    fn make_room(&self, resource: Resource, amount: usize, asker: &ConnectionAccount) -> bool {
        // Dropped after the lock.
        let (mut holders, mut ended): (Vec<Arc<ConnectionAccount>>, Vec<Arc<Connection>>) = Default::default();
        let registry = lock(&self.registry);
        holders.extend(registry.holders.values().filter_map(Weak::upgrade));
        let of_client = |holder: &ConnectionAccount| holder.account.held[resource as usize].load(Ordering::Acquire);
        let mut tries = holders.len();
        let room = loop {
            if add_within(&self.held, resource, amount, self.bounds.all[resource as usize]) {
                break true;
            }
            // The last one of those with the maximum; of one client, the newest connection.
            let most = holders.iter().max_by_key(|holder| (of_client(holder), holder.holds(resource), holder.number));
            let of_asker = of_client(asker).saturating_add(amount);
            let Some(most) = most.filter(|most| of_client(most) > of_asker) else { break false };
            match most.end(resource) {
                Some(connection) => ended.extend(connection),
                // It has ended, or has released its resources.
                None if tries > 0 => tries -= 1,
                None => break false,
            }
        };
        drop(registry);
        room
    }
}

impl ConnectionAccount {
    /// Sets the connection to close when others need its room; returns false if they needed it before.
    #[must_use]
    pub(crate) fn is_of(&self, connection: &Arc<Connection>) -> bool {
        let state = lock(&self.state);
        // A connection has one holder.
        let _ = self.connection.set(Arc::downgrade(connection));
        !state.is_ended
    }

    pub(crate) fn peer(&self) -> Peer {
        self.account.peer
    }

    /// Returns the session id for another session of this client.
    pub(crate) fn session(&self) -> SessionId {
        self.account.session.same_client()
    }

    /// Counts a thread that begins to serve a connection; if `most` serve the client, the connection waits for one.
    pub(crate) fn begin_thread(&self, connection: u64, most: usize) -> bool {
        let mut threads = lock(&self.account.threads);
        let has_room = threads.count < most;
        if has_room {
            threads.count += 1;
            threads.waiting.retain(|waiting| *waiting != connection);
        } else if !threads.waiting.contains(&connection) {
            threads.waiting.push_back(connection);
        }
        has_room
    }

    /// Called by a counted thread when it has served a connection; returns what [`Self::next_waiting`] does.
    pub(crate) fn end_thread(&self) -> Option<u64> {
        let mut threads = lock(&self.account.threads);
        threads.count -= 1;
        threads.waiting.pop_front()
    }

    /// Returns the connection of the client that waits longest for a thread; it does not wait any more.
    pub(crate) fn next_waiting(&self) -> Option<u64> {
        lock(&self.account.threads).waiting.pop_front()
    }

    /// A connection that ends does not wait for a thread.
    pub(crate) fn stop_waiting(&self, connection: u64) {
        lock(&self.account.threads).waiting.retain(|waiting| *waiting != connection);
    }

    /// Returns whether there is room for more.
    pub(crate) fn has_room(&self, resource: Resource) -> bool {
        self.account.held[resource as usize].load(Ordering::Relaxed) < self.clients.bounds.client[resource as usize]
    }

    /// Returns the charged amount.
    pub(crate) fn holds(&self, resource: Resource) -> usize {
        lock(&self.state).amounts[resource as usize]
    }

    /// Adds to the account; without room it adds nothing.
    pub(crate) fn take(&self, resource: Resource, amount: usize) -> Result<(), LimitReached> {
        let Clients { bounds, held, .. } = &*self.clients;
        let (of_client, of_all) = (bounds.client[resource as usize], bounds.all[resource as usize]);
        // An amount beyond the client's own limit must not close other connections.
        let before = self.account.held[resource as usize].load(Ordering::Acquire);
        if before.saturating_add(amount) > of_client || lock(&self.state).is_ended {
            return Err(LimitReached);
        }
        if !add_within(held, resource, amount, of_all) && !self.clients.make_room(resource, amount, self) {
            return Err(LimitReached);
        }
        let mut state = lock(&self.state);
        if state.is_ended || !add_within(&self.account.held, resource, amount, of_client) {
            subtract(held, resource, amount);
            return Err(LimitReached);
        }
        state.amounts[resource as usize] += amount;
        Ok(())
    }

    /// As [`Self::take`], until the charge is dropped.
    pub(crate) fn charge(self: &Arc<Self>, resource: Resource, amount: usize) -> Result<Charge, LimitReached> {
        self.take(resource, amount).map(|()| Charge { holder: Arc::clone(self), resource, amount })
    }

    /// Subtracts from the account.
    pub(crate) fn release(&self, resource: Resource, amount: usize) {
        let mut state = lock(&self.state);
        if !state.is_ended {
            state.amounts[resource as usize] -= amount;
            subtract(&self.account.held, resource, amount);
            subtract(&self.clients.held, resource, amount);
        }
    }

    /// Removes all its resources from the accounts, and returns its connection, if any, for the caller to drop.
    fn end(&self, resource: Resource) -> Option<Option<Arc<Connection>>> {
        let mut state = lock(&self.state);
        if state.is_ended || state.amounts[resource as usize] == 0 {
            return None;
        }
        self.close(&mut state);
        drop(state);
        let connection = self.connection.get().and_then(Weak::upgrade);
        if let Some(connection) = &connection {
            connection.evict();
        }
        Some(connection)
    }

    fn close(&self, state: &mut Registration) {
        state.is_ended = true;
        let amounts = std::mem::take(&mut state.amounts);
        for (resource, amount) in RESOURCES.into_iter().zip(amounts) {
            subtract(&self.account.held, resource, amount);
            subtract(&self.clients.held, resource, amount);
        }
    }
}

impl Drop for ConnectionAccount {
    fn drop(&mut self) {
        let mut state = std::mem::take(self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner));
        if !state.is_ended {
            self.close(&mut state);
        }
        let mut registry = lock(&self.clients.registry);
        registry.holders.remove(&self.number);
        shrink(&mut registry.holders);
        // No other thread can find the account while this lock is held.
        if Arc::strong_count(&self.account) == 1 {
            registry.accounts.remove(&self.account.peer);
            shrink(&mut registry.accounts);
        }
    }
}

/// A charged amount.
#[derive(Debug)]
pub(crate) struct Charge {
    holder: Arc<ConnectionAccount>,
    resource: Resource,
    amount: usize,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.holder.release(self.resource, self.amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: Resource = Resource::Bytes;

    fn small() -> Arc<Clients> {
        Clients::within(ResourceLimits { client: [9, 90, 5], all: [9, 100, 8] })
    }

    #[test]
    fn the_client_that_holds_most_is_closed() {
        let clients = small();
        let [one, two, other] =
            [Peer::User(1), Peer::User(1), Peer::User(2)].map(|peer| clients.welcome(peer).unwrap());
        assert_eq!((one.take(BYTES, 50), two.take(BYTES, 30), other.take(BYTES, 20)), (Ok(()), Ok(()), Ok(())));
        // The client that holds most gets no more.
        assert_eq!(two.take(BYTES, 1), Err(LimitReached));
        assert_eq!(clients.held(BYTES), 100);
        // Of its connections the one that holds most is closed for others.
        assert_eq!(other.take(BYTES, 10), Ok(()));
        assert_eq!((one.holds(BYTES), two.holds(BYTES), clients.held(BYTES)), (0, 30, 60));
        assert_eq!(one.take(BYTES, 1), Err(LimitReached));
        one.release(BYTES, 50);
        assert_eq!(clients.held(BYTES), 60);
        // Now the other client holds most.
        assert_eq!(other.take(BYTES, 41), Err(LimitReached));
        assert_eq!(two.take(BYTES, 40), Ok(()));
        assert_eq!(two.take(BYTES, 25), Err(LimitReached), "more than one client may hold");
        drop((one, two, other));
        assert_eq!(clients.held.each_ref().map(|count| count.load(Ordering::Relaxed)), [0; 3]);
        let registry = lock(&clients.registry);
        assert!(registry.accounts.is_empty() && registry.holders.is_empty(), "{registry:?}");
    }

    #[test]
    fn clients_with_fewer_connections_are_preferred() {
        let clients = small();
        let come = |user| clients.welcome(Peer::User(user));
        let greedy: Vec<_> = (0..9).map(|_| come(1).unwrap()).collect();
        assert!(come(1).is_err());
        let others: Vec<_> = (2..6).map(|user| come(user).unwrap()).collect();
        assert_eq!(greedy.iter().filter(|holder| lock(&holder.state).is_ended).count(), 4);
        assert!(!lock(&greedy[0].state).is_ended, "the last ones that came go first");
        assert!(others.iter().all(|holder| !lock(&holder.state).is_ended));
    }

    #[test]
    fn entries_are_bounded_per_client_and_in_total() {
        let clients = small();
        let [one, other] = [1, 2].map(|user| clients.welcome(Peer::User(user)).unwrap());
        let charges: Vec<_> = (0..5).map(|_| one.charge(Resource::Entries, 1).unwrap()).collect();
        assert!(!one.has_room(Resource::Entries) && one.charge(Resource::Entries, 1).is_err());
        (0..4).for_each(|_| other.take(Resource::Entries, 1).unwrap());
        assert!(lock(&one.state).is_ended);
        drop(charges);
        assert_eq!(clients.held(Resource::Entries), 4);
    }

    #[test]
    fn a_single_client_may_hold_as_much_as_all() {
        let guest = Clients::alone();
        assert_eq!(guest.take(Resource::Entries, ENTRIES_MAX_OF_ALL), Ok(()));
        assert_eq!(guest.take(Resource::Entries, 1), Err(LimitReached));
    }

    #[test]
    fn many_threads_keep_the_sums() {
        let clients = Clients::within(ResourceLimits { client: [100; 3], all: [100, 60, 100] });
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let clients = &clients;
                scope.spawn(move || {
                    for round in 0..2000 {
                        let Ok(holder) = clients.welcome(Peer::User(thread / 2)) else { continue };
                        let charges: Vec<_> = (0..round % 7).map(|part| holder.charge(BYTES, part + 1)).collect();
                        assert!(clients.held(BYTES) <= 60);
                        drop(charges);
                    }
                });
            }
        });
        assert_eq!(clients.held.each_ref().map(|count| count.load(Ordering::Relaxed)), [0; 3]);
    }
}
