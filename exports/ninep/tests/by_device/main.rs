//! Tests of `it` once more, with a guest's driver as the client (`common::is_by_device`), and those that only a driver can run.
//! They are a program of their own because the name of the program chooses the client.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../it/ahead.rs"]
mod ahead;
#[path = "../common/mod.rs"]
mod common;
#[path = "../it/events.rs"]
mod events;
#[path = "../it/locks.rs"]
mod locks;
mod long_messages_by_device;
#[path = "../it/memory.rs"]
mod memory;
#[path = "../it/requests.rs"]
mod requests;
#[path = "../it/slow.rs"]
mod slow;
#[path = "../it/versions.rs"]
mod versions;
