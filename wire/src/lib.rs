//! Codecs of the protocols of Ferry's exports: they decode requests and encode replies, and the reverse for tests and
//! drivers.
//!
//! Codecs do no I/O, hold no state, do not allocate when decoding requests, and accept any input. The result is a
//! request whose parts are valid by construction (a [`ferry_vfs::Name`] is a valid name, a range does not wrap around),
//! or an error with the number for the reply. Only the source can check whether an inode number or a handle exists.
//!
//! # Serving one FUSE request
//!
//! ```
//! use ferry_vfs::{Attr, Entry, Errno, Ino, Name};
//! use ferry_wire::fuse::*;
//!
//! // The session begins with INIT: the client offers features, the server accepts some.
//! let offer = InitRequest { major: 7, minor: 45, max_readahead_bytes: 1 << 20, flags: InitFlags::ALL };
//! let wanted = InitOptions { flags: InitFlags::SUBMOUNTS | InitFlags::ASYNC_READ, ..InitOptions::default() };
//! let InitOutcome::Ready(session, _init_out) = negotiate(&offer, &wanted)? else { unreachable!("same major") };
//!
//! // A request as the client encodes it; a server reads the bytes from its queue.
//! let operation = Operation::Lookup { name: Name::new(b"hello")? };
//! let extensions = Extensions::default();
//! let request = Request { unique: 2, ino: Ino::ROOT, uid: 1000, gid: 1000, pid: 1, extensions, operation };
//! let mut message = Vec::new();
//! request.encode(&session, &mut message);
//!
//! // Serve it. The head is written in place; payload would follow without a copy.
//! let mut head = [0; REPLY_HEAD_BYTES_MAX];
//! let reply = match decode(&message, message.len(), &session) {
//!     Ok(Request { unique, operation: Operation::Lookup { .. }, .. }) => {
//!         let entry = Entry { ino: Ino(2), generation: 0, attr: Attr::default() };
//!         Reply::Entry { entry, timeouts: Timeouts::default(), dax: false }.encode(unique, &session, &mut head).to_vec()
//!     }
//!     Ok(request) => encode_error(request.unique, Errno::NOSYS).to_vec(),
//!     Err(error) => match error.reply_to() {
//!         Some(unique) => encode_error(unique, error.errno).to_vec(),
//!         None => Vec::new(),
//!     },
//! };
//!
//! // What the client reads.
//! let (unique, reply) = Reply::decode(ReplyKind::Entry, &reply)?;
//! assert!(unique == 2 && matches!(reply, Ok(Reply::Entry { entry, .. }) if entry.ino == Ino(2)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod blk;
mod body;
mod dirent;
pub mod events;
pub mod fuse;
pub mod ninep;
