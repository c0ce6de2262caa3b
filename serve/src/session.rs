//! A client's session, from INIT to DESTROY.

use std::sync::{Arc, PoisonError, RwLock};

use ferry_state::Kept;
use ferry_wire::fuse::{InitOptions, InitRequest};

use crate::mappings::Mappings;
use crate::mount::Mount;
use crate::passthrough::Backings;

/// Changes what is wanted of a session, given what the client offers.
type Adjust = dyn Fn(&InitRequest, &mut InitOptions) + Send + Sync;

/// What the servers of one client share: what was agreed on, once INIT came.
#[derive(Default)]
pub struct Session {
    mount: RwLock<Option<Arc<Mount>>>,
    pub(crate) adjust: Option<Box<Adjust>>,
    pub(crate) backings: Option<Arc<dyn Backings>>,
    pub(crate) mappings: Option<Arc<dyn Mappings>>,
    /// Where what the client holds is written down.
    pub(crate) kept: Option<Arc<Kept>>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("mount", &self.mount).finish_non_exhaustive()
    }
}

impl Session {
    /// A session whose INIT asks for what the share's policy wants, changed by `adjust`: an export adds and removes
    /// flags there, and sets limits.
    #[must_use]
    pub fn new(adjust: impl Fn(&InitRequest, &mut InitOptions) + Send + Sync + 'static) -> Self {
        Self { adjust: Some(Box::new(adjust)), ..Self::default() }
    }

    /// Offers passthrough, if the client, the source and the policy allow it. It is agreed on only if `adjust` also
    /// wants [`ferry_wire::fuse::InitFlags::PASSTHROUGH`].
    #[must_use]
    pub fn with_backings(self, backings: Arc<dyn Backings>) -> Self {
        Self { backings: Some(backings), ..self }
    }

    /// Offers to map files into the client's memory, if the source allows it and the window is open at INIT.
    #[must_use]
    pub fn with_mappings(self, mappings: Arc<dyn Mappings>) -> Self {
        Self { mappings: Some(mappings), ..self }
    }

    /// Writes down what the client holds, for the server after this one.
    #[must_use]
    pub fn with_kept(self, kept: Arc<Kept>) -> Self {
        Self { kept: Some(kept), ..self }
    }

    /// What the client holds, between INIT and DESTROY.
    pub fn mount(&self) -> Option<Arc<Mount>> {
        self.mount.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the session, as DESTROY does: for a client that vanished. What it held is given back when no batch of
    /// requests uses it any more.
    pub fn end(&self) {
        if let Some(kept) = &self.kept {
            kept.begin(None);
        }
        self.set_mount(None);
    }

    pub(crate) fn set_mount(&self, mount: Option<Arc<Mount>>) {
        let last = std::mem::replace(&mut *self.mount.write().unwrap_or_else(PoisonError::into_inner), mount);
        drop(last);
    }
}
