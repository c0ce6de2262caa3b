//! Tests of the FUSE codec, with the client of `ferry-driver` on the other side.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod fuse;
