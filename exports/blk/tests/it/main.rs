//! The integration tests, in one program: one for each file would take much longer to link.

#[path = "../common/mod.rs"]
mod common;

mod costs;
mod memory;
mod slow;
