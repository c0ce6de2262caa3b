//! Codecs of the protocols of Ferry's exports: they decode requests and encode replies. For 9P also the reverse, for the
//! client in `ferry-9p-client`.
//!
//! Codecs do no I/O, hold no state, do not allocate when decoding requests, and accept any input. The result is a
//! request whose parts are valid by construction (a [`ferry_vfs::Name`] is a valid name, a range does not wrap around),
//! or an error with the number for the reply. Only the source can check whether an inode number or a handle exists.
//!
//! # Serving one FUSE request
//!
//! ```
//! use ferry_vfs::{Attr, Entry, Errno, Ino};
//! use ferry_wire::fuse::abi::InHeader;
//! use ferry_wire::fuse::*;
//! use zerocopy::IntoBytes;
//!
//! // The session begins with INIT: the client offers features, the server accepts some.
//! let offer = InitRequest { major: 7, minor: 45, max_readahead_bytes: 1 << 20, flags: InitFlags::ALL };
//! let wanted = InitOptions { flags: InitFlags::SUBMOUNTS | InitFlags::ASYNC_READ, ..InitOptions::default() };
//! let InitOutcome::Ready(session, _init_out) = negotiate(&offer, &wanted)? else { unreachable!("same major") };
//!
//! // A request as the client sends it; a server reads the bytes from its queue.
//! let header = InHeader { len: 46, opcode: Opcode::Lookup.as_raw(), unique: 2, nodeid: 1, ..InHeader::ZERO };
//! let message = [header.as_bytes(), b"hello\0"].concat();
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
//! // What the client reads: the length, no error, and the number of the request; then the inode.
//! assert_eq!(reply.len(), 144);
//! assert_eq!(reply[..24], [144_u64, 2, 2].map(u64::to_le_bytes).concat());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod blk;
mod body;
mod dirent;
pub mod events;
pub mod fuse;
pub mod ninep;
