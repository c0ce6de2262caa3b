//! The tests of `slow.rs`, with a guest's driver as the client.

#[path = "slow.rs"]
mod slow;
