//! The tests of `memory.rs`, with guests' drivers as the clients.

#[path = "memory.rs"]
mod memory;
