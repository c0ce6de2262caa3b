//! The protocol 9P2000.L, for servers and (for tests and clients) the client side.
//!
//! * [`Frame`]: the seven bytes at the start of every message;
//! * [`Request`]: T messages, checked and typed: names are valid, ranges do not wrap around, flags are known;
//! * [`Reply`]: R messages;
//! * [`agree`]: the reply to the version and message size of a client;
//! * [`DirWriter`] and [`DirEntries`]: directory listings.
//!
//! Two documents describe the protocol: intro(5) of Plan 9 (framing, tags, fids, version, flush, walk), and
//! `protocol.md` of the server diod (the additions of `.L`). Where both are silent, Linux's client (`net/9p`, `fs/9p`)
//! decides. All numbers are little-endian. This module does no I/O, and no function panics on any input.
//!
//! ```
//! use ferry_wire::ninep::*;
//!
//! let mut message = Vec::new();
//! Request::Readlink { fid: Fid(7) }.encode(Tag(1), &mut message);
//!
//! // A server reads four bytes to learn the length, then the rest.
//! let (tag, request) = Request::decode(&message)?;
//! assert_eq!((tag, request), (Tag(1), Request::Readlink { fid: Fid(7) }));
//!
//! let mut answer = Vec::new();
//! Reply::Readlink { target: b"over/there" }.encode(tag, &mut answer);
//! assert_eq!(Reply::decode(&answer)?, (Tag(1), Reply::Readlink { target: b"over/there" }));
//! # Ok::<(), DecodeError>(())
//! ```

mod body;
mod decode;
mod dir;
mod encode;
mod numbers;
mod reply;
mod reply_decode;
mod request;
mod version;

pub use body::DecodeError;
pub use dir::{DirEntries, DirEntry, DirWriter, dirent_bytes};
pub use numbers::{
    Fid, Frame, HEADER_BYTES, MSIZE_MIN, NO_UID, Qid, QidKind, READ_HEAD_BYTES, Tag, WALK_NAMES_MAX, WRITE_HEAD_BYTES,
    kind, valid,
};
pub use reply::{Getattr, LockStatus, Qids, Reply, encode_data_head};
pub use request::{LockRequest, Request, Step, Steps, User, WriteHead, encode_transfer_head};
pub use version::{VERSION, VERSION_OF_FERRY, VERSION_UNKNOWN, VersionReply, agree};

#[cfg(test)]
mod tests;
