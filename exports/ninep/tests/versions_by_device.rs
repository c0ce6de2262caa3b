//! The tests of `versions.rs`, with a guest's driver as the client.

#[path = "versions.rs"]
mod versions;
