//! The integration tests, in one program, because one per file takes much longer to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../common/mod.rs"]
mod common;

mod complaints;
mod costs;
mod counts;
mod fallback;
mod limits;
mod log;
mod memory;
mod slow;
