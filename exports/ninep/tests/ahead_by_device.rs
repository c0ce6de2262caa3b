//! The tests of `ahead.rs`, with a guest's driver as the client.

#[path = "ahead.rs"]
mod ahead;
