//! The wire formats of the protocols that Ferry's exports speak.
#![forbid(unsafe_code)]

pub mod fuse;
