//! The tests of `locks.rs`, with a guest's driver as the client.

#[path = "locks.rs"]
mod locks;
