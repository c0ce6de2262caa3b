//! Layers from a registry in memory, through the file system's own methods, through the kernel, and by podman's libraries.

#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../../../../registry/tests/common/mod.rs"]
mod common;
#[path = "../../../image/tests/common/toc_layers.rs"]
mod toc_layers;

mod engines;
mod mounts;
mod place;
mod tree;
