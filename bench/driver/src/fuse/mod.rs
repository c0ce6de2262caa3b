//! The client's side of `ferry_wire::fuse`: encodes requests, decodes replies and directory listings.

mod body;
mod encode;
mod listing;
mod reply;

pub use body::Malformed;
pub use encode::{append_security_context, encode};
pub use listing::{DirEntries, DirEntry};
pub use reply::{ReplyKind, decode_reply, negotiated, reply_kind};
