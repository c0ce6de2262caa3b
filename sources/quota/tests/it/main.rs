//! The integration tests, in one program.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../../../tests/common.rs"]
mod common;
mod tree;

mod count;
mod data;
mod names;
mod race;
mod sources;
