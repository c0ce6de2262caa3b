//! The state of a share's client (inodes, open files, locks, recent replies), stored where it survives the end of a
//! server, so that the next server continues the session.
//!
//! * [`SessionStore`] is a table in shared memory: a server records what it hands out with plain stores, without a
//!   system call. It passes the descriptor of each opened file to the keeper: one `sendmsg`.
//! * The [`keep`]er is a process that only holds descriptors: of that memory, and of the files. It passes them to one
//!   server at a time, after the previous one has ended completely. One of the descriptors is the connection to the
//!   front end ([`Commit`]), so the end of a server does not close it.
//! * [`SavedSession`] is the same state as plain data, with its encoding for migration between hosts.
//!
//! ```
//! use ferry_state::{Init, SavedSession};
//!
//! let saved = SavedSession { init: Init { minor: 45, ..Init::default() }, ..SavedSession::default() };
//! let mut bytes = Vec::new();
//! saved.encode(&mut bytes);
//! assert_eq!(SavedSession::decode(&bytes)?, saved);
//! # Ok::<(), ferry_state::DecodeError>(())
//! ```
#![deny(unsafe_code)]

mod connection;
mod directory;
mod journal;
mod keeper;
mod memory;
mod saved;
mod session_store;
mod slots;

pub use connection::{Commit, InheritedConnection, Records};
pub use directory::{Directory, DirectoryError};
pub use journal::{Journal, JournalEntry};
pub use keeper::{FRONT_END_AWAITED, KeeperConnection, KeeperError, SERVER_AWAITED, keep, listen};
pub use memory::Memory;
pub use saved::{DecodeError, Init, Node, OpenFile, SavedLock, SavedSession};
pub use session_store::{Geometry, MappedFile, PreviousSession, SessionStore, StoreError};
pub use slots::Slot;
