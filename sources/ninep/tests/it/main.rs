//! The integration tests, in one program: one for each file would take much longer to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../../../../exports/ninep/tests/common/certificates.rs"]
#[cfg(feature = "tls")]
mod certificates;
#[path = "../common/mod.rs"]
mod common;
#[path = "../fake/mod.rs"]
mod fake;

mod cache_messages;
mod cache_model;
mod close_to_open;
mod connections;
mod events;
mod hostile;
mod listings;
mod locks;
mod lost_transfers;
mod other_files;
mod other_servers;
mod reconnect;
mod requests;
mod slow_links;
mod syncfs;
mod tls;
