//! The integration tests, in one program: one for each file would take much longer to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../../../exports/ninep/tests/common/certificates.rs"]
#[allow(dead_code, missing_docs, reason = "a test uses a part")]
mod certificates;
#[path = "../common/mod.rs"]
mod common;
#[path = "../../../sources/image/tests/common/toc_layers.rs"]
mod toc_layers;

mod credentials;
mod hostile;
mod hosts;
mod layers;
mod lazy;
mod parallel;
mod referrers;
