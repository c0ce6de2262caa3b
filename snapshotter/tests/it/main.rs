//! The program over its socket, as containerd uses it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../../../registry/tests/common/mod.rs"]
mod fake;
#[path = "../../../ferry/tests/common/servers.rs"]
#[allow(dead_code, missing_docs, reason = "a test uses a part")]
mod servers;
#[path = "../../../sources/image/tests/common/toc_layers.rs"]
mod toc_layers;

mod client;
mod clocks;
mod concurrent;
mod containerd;
mod control;
mod cri;
mod cri_guest;
mod diff;
mod diff_containerd;
mod full_disk;
mod image_service;
mod images;
mod inode_share;
mod kata;
mod lazy;
mod lazy_containerd;
mod lazy_credentials;
mod lazy_kills;
mod lazy_order;
mod lazy_place;
mod merged;
mod metadata;
mod oddities;
mod removed;
mod restarted;
mod server;
mod suite;
mod survives;
mod tree;
mod unit;
mod virtiofs;
