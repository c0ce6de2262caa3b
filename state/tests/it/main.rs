//! The integration tests, in one program, because one per file takes much longer to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod connection;
mod directory;
mod full;
mod room;
