//! What clients hold, for the metrics: counted on demand, not per request.

use std::sync::{Arc, Mutex, Weak};

use ferry_vfs::sync::lock;

/// What the clients of a share hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Inodes that they know.
    pub inodes: u64,
    /// Files and directories that they have open.
    pub open_files: u64,
    /// Locks that they wait for.
    pub parked_locks: u64,
}

/// A client, connected or not.
pub(crate) trait Client: Send + Sync {
    fn usage(&self) -> Usage;
}

/// The clients of a share.
#[derive(Default)]
pub(crate) struct Clients(Mutex<Vec<Weak<dyn Client>>>);

impl Clients {
    /// Adds a client unless it is known; drops those that are gone.
    pub(crate) fn add<C: Client + 'static>(&self, client: &Arc<C>) {
        let client: Weak<dyn Client> = Arc::downgrade(client) as _;
        let mut clients = lock(&self.0);
        clients.retain(|other| other.strong_count() > 0);
        if !clients.iter().any(|other| Weak::ptr_eq(other, &client)) {
            clients.push(client);
        }
    }

    pub(crate) fn usage(&self) -> Usage {
        let clients: Vec<_> = lock(&self.0).iter().filter_map(Weak::upgrade).collect();
        clients.iter().map(|client| client.usage()).fold(Usage::default(), |sum, one| Usage {
            inodes: sum.inodes + one.inodes,
            open_files: sum.open_files + one.open_files,
            parked_locks: sum.parked_locks + one.parked_locks,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct One;

    impl Client for One {
        fn usage(&self) -> Usage {
            Usage { inodes: 1, open_files: 2, parked_locks: 3 }
        }
    }

    #[test]
    fn each_client_is_counted_once_until_it_is_gone() {
        let (clients, first, second) = (Clients::default(), Arc::new(One), Arc::new(One));
        for client in [&first, &first, &second] {
            clients.add(client);
        }
        assert_eq!(clients.usage(), Usage { inodes: 2, open_files: 4, parked_locks: 6 });
        drop(first);
        assert_eq!(clients.usage().inodes, 1);
        clients.add(&second);
        assert_eq!(lock(&clients.0).len(), 1);
    }
}
