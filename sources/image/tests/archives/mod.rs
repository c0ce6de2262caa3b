//! Archives and OCI image directories of tests.
#![allow(dead_code, reason = "each test uses its part")]

pub mod bundle;
pub mod model;
pub mod random;
