//! The slot that holds a client's session between INIT and DESTROY.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use ferry_state::SessionStore;
use ferry_vfs::sync::lock;
use ferry_wire::fuse::{InitOptions, InitRequest};

use super::Session;
use crate::mappings::Mappings;
use crate::passthrough::Backings;
use crate::usage::{Client, Usage};

/// Adjusts the requested options to the client's offer.
type Adjust = dyn Fn(&InitRequest, &mut InitOptions) + Send + Sync;

/// Shared by all workers of a client: its session, after INIT.
#[derive(Default)]
pub struct SessionSlot {
    /// Held while a session ends and another one begins: a client may send INIT on several queues at once.
    beginning: Mutex<()>,
    session: RwLock<Option<Arc<Session>>>,
    pub(crate) adjust: Option<Box<Adjust>>,
    pub(crate) backings: Option<Arc<dyn Backings>>,
    pub(crate) mappings: Option<Arc<dyn Mappings>>,
    /// Records the session for the next server.
    pub(crate) store: Option<Arc<SessionStore>>,
}

impl std::fmt::Debug for SessionSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionSlot").field("session", &self.session).finish_non_exhaustive()
    }
}

impl SessionSlot {
    /// Creates a slot whose sessions request the options of the share's policy, adjusted by the export's `adjust`.
    #[must_use]
    pub fn new(adjust: impl Fn(&InitRequest, &mut InitOptions) + Send + Sync + 'static) -> Self {
        Self { adjust: Some(Box::new(adjust)), ..Self::default() }
    }

    /// Offers passthrough if the client, the source and the policy allow it. It is negotiated only if `adjust` also
    /// requests [`ferry_wire::fuse::InitFlags::PASSTHROUGH`].
    #[must_use]
    pub fn with_backings(self, backings: Arc<dyn Backings>) -> Self {
        Self { backings: Some(backings), ..self }
    }

    /// Offers to map files into the client's memory if the source allows it and the window is open at INIT.
    #[must_use]
    pub fn with_mappings(self, mappings: Arc<dyn Mappings>) -> Self {
        Self { mappings: Some(mappings), ..self }
    }

    /// Records the session for the next server.
    #[must_use]
    pub fn with_store(self, store: Arc<SessionStore>) -> Self {
        Self { store: Some(store), ..self }
    }

    /// Returns the session, between INIT and DESTROY.
    pub fn current(&self) -> Option<Arc<Session>> {
        self.session.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the session, as DESTROY does. What it held is released when no batch of requests uses it.
    pub fn end(&self) {
        drop(self.end_before_next());
    }

    /// Ends the session before another one begins. No other session begins or ends while the guard is held.
    pub(crate) fn end_before_next(&self) -> MutexGuard<'_, ()> {
        let beginning = lock(&self.beginning);
        if let Some(store) = &self.store {
            store.begin(None);
        }
        self.set_session(None);
        beginning
    }

    pub(crate) fn set_session(&self, session: Option<Arc<Session>>) {
        let last = std::mem::replace(&mut *self.session.write().unwrap_or_else(PoisonError::into_inner), session);
        drop(last);
    }
}

impl Client for SessionSlot {
    fn usage(&self) -> Usage {
        // Under the lock: dropping the last reference to a session releases what it holds, which may take long.
        let session = self.session.read().unwrap_or_else(PoisonError::into_inner);
        session.as_ref().map_or_else(Usage::default, |session| session.usage())
    }
}
