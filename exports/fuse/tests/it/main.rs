//! The integration tests, in one program: one for each file would take much longer to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../common/mod.rs"]
mod common;

mod calls;
mod channels;
mod constant;
mod durable;
mod ends;
mod faults;
mod files;
mod hand_off;
mod idle;
mod limits;
mod mountpoint;
mod notices;
mod shared;
mod single_client;
mod transfers;
