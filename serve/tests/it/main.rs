//! The integration tests, in one program: one for each file would take much longer to link.

#[path = "../common/mod.rs"]
mod common;

mod bounds;
mod lengths;
mod lies;
mod promises;
mod replays;
mod set_id;
