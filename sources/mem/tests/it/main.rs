//! The integration tests, in one program, because one per file takes much longer to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../pmem_common/mod.rs"]
mod pmem_common;

mod journal;
mod limits;
mod limits_metadata;
mod memory;
mod model;
mod pmem_basic;
mod pmem_crash;
mod pmem_growth;
mod pmem_hostile;
mod pmem_kill;
mod pmem_speed;
mod pmem_sync;
mod race;
mod rules;
