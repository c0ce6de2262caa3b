//! Records a client's state as it changes, for the next server. `session/save_restore.rs` restores it.

mod repeated_append;
mod reply_cache;
mod session_store;

pub(crate) use repeated_append::{PriorAppend, prior_append};
pub use session_store::RestoreError;
pub(crate) use session_store::{HeldLocks, OpenRecord, SessionRecord};
