//! The integration tests, in one program, because one per file takes much longer to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../common/mod.rs"]
mod common;

mod acls;
mod basic;
mod idle;
mod limits;
mod locks;
mod locks_like_linux;
mod model;
mod mounts;
mod open_flags;
mod privileges;
mod race;
mod search;
mod syscalls;
mod watch;
