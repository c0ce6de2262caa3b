//! The program over its socket, as containerd uses it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod client;
mod concurrent;
mod containerd;
mod control;
mod images;
mod metadata;
mod server;
mod suite;
mod survives;
mod tree;
mod unit;
