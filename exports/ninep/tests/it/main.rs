//! The integration tests, in one program: one for each file would take much longer to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../common/certificates.rs"]
#[cfg(feature = "tls")]
mod certificates;
#[path = "../common/mod.rs"]
mod common;

mod ahead;
mod device;
mod events;
mod hostile;
mod idle;
mod limits;
mod locks;
mod long_messages;
mod memory;
mod permissions;
mod requests;
mod slow;
mod tls;
mod together;
mod versions;
