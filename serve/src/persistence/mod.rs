//! What is written down as a client's state changes, so that the next server resumes it. `session/save_restore.rs` reads it
//! back.

mod reply_cache;
mod session_store;

pub use session_store::RestoreError;
pub(crate) use session_store::{HeldLocks, OpenRecord, SessionRecord};
