//! The integration tests, in one program: one for each file would take much longer to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../../../exports/ninep/tests/common/certificates.rs"]
#[allow(dead_code, missing_docs, reason = "a test uses a part")]
mod certificates;
#[path = "../common/mod.rs"]
mod common;
#[path = "../../../sources/image/tests/common/toc_layers.rs"]
mod toc_layers;

mod composefs;
mod disk;
mod doctor;
mod foreign;
mod image;
mod image_store;
mod image_trace;
mod image_upper;
mod limits;
mod log_followers;
mod log_lines;
mod manual;
mod metrics;
mod mount;
mod mount_ninep;
mod places;
mod pmem;
mod quota;
mod registry;
mod registry_layers;
mod registry_tls;
mod registry_verity;
mod service_manager;
mod share;
mod status;
mod trace;
mod trial;
mod units;
mod units_systemd;
