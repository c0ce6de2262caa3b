//! The integration tests, in one program: one for each file would take much longer to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../common/mod.rs"]
mod common;

mod adopts;
mod bounds;
mod counts;
mod events;
mod lengths;
mod lies;
mod promises;
mod replays;
mod set_id;
