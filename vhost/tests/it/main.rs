//! The integration tests, in one program: one for each file would take much longer to link.

#[path = "../toy/mod.rs"]
mod toy;

mod blocked;
mod descriptors;
mod server;
