//! The FUSE protocol, 7.27 to 7.45 (`linux/fuse.h`), the server's side.
//!
//! * [`abi`]: the structures and constants in memory layout;
//! * [`decode`] and [`Request`]: requests, checked and typed;
//! * [`negotiate`]: the reply to INIT and the parameters of the session ([`Negotiated`]);
//! * [`Reply`] and [`encode_error`]: replies;
//! * [`Notification`]: messages from the server without a request;
//! * [`DirWriter`]: directory listings.
//!
//! This module does no I/O, and no function panics on any input.

pub mod abi;
mod body;
mod decode;
mod dir;
mod ext;
mod init;
mod notify;
mod operation;
mod reply;
mod request;

pub use abi::{InitFlags, Opcode, OpenFlags};
pub use decode::decode;
pub use dir::DirWriter;
pub use ext::{Extensions, Groups, Records, SecurityContexts};
pub use init::{InitError, InitOptions, InitOutcome, InitRequest, Negotiated, WRITE_BYTES_MAX, negotiate};
pub use notify::Notification;
pub use operation::{LockRequest, Operation, Release};
pub use reply::{OpenReply, REPLY_HEAD_BYTES_MAX, Reply, SHORT_HEAD_BYTES_MAX, Timeouts, encode_error};
pub use request::{
    BATCH_FORGET_BYTES_MAX, DecodeError, IN_HEADER_BYTES, Peek, REQUEST_HEAD_BYTES_MAX, Request, WRITE_HEAD_BYTES, peek,
};
