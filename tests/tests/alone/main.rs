//! Tests that must not run beside others: they change settings of the machine, or measure time. They run one at a time
//! (`ferry_tests::alone`).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod limits;
mod mounts_settings;
mod qemu_migration;
mod slow_requests;
mod slow_requests_ninep;
