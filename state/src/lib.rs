//! What a share's client holds (inodes, open files, locks, answers that it may not have seen), where a server's end does not
//! reach it, so that the next server goes on as if nothing had happened.
//!
//! * [`SessionStore`] is a table in shared memory: a server writes down what it hands out with plain stores, without a system
//!   call. Open files are descriptors; each is passed to the keeper when it is opened: one `sendmsg`.
//! * The [`keep`]er is a process that does nothing but hold descriptors: that memory, and the files. It hands them to the
//!   next server, and to one server at a time: to that only when the one before is gone for good. One of the descriptors is the
//!   connection to the front end ([`Commit`]), so that no end of a server closes that.
//! * [`Saved`] is the same as plain data, and its form on the wire between two hosts.
//!
//! ```
//! use ferry_state::{Init, Saved};
//!
//! let saved = Saved { init: Init { minor: 45, ..Init::default() }, ..Saved::default() };
//! let mut bytes = Vec::new();
//! saved.encode(&mut bytes);
//! assert_eq!(Saved::decode(&bytes)?, saved);
//! # Ok::<(), ferry_state::DecodeError>(())
//! ```
#![deny(unsafe_code)]

mod connection;
mod folder;
mod journal;
mod keeper;
mod memory;
mod saved;
mod session_store;
mod slots;

pub use connection::{Commit, FILES_MAX, LeftConnection, Records, answer, take};
pub use folder::{Folder, FolderError};
pub use journal::{Journal, JournalEntry};
pub use keeper::{FRONT_END_AWAITED, KeeperConnection, KeeperError, SERVER_AWAITED, keep, listen};
pub use saved::{DecodeError, Init, Node, OpenFile, Saved, SavedLock};
pub use session_store::{Geometry, MappedFile, PreviousSession, SessionStore, StoreError};
pub use slots::Slot;
