//! The integration tests, in one program: one for each file would take much longer to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod connection;
mod folder;
mod full;
mod room;
