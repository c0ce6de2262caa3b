//! The integration tests, in one program, because one per file takes much longer to link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

#[path = "../../../exports/ninep/tests/common/certificates.rs"]
mod certificates;
#[path = "../../../sources/image/tests/common/mod.rs"]
mod common;
#[path = "../../../ferry/tests/common/servers.rs"]
#[allow(dead_code, missing_docs, reason = "a test uses a part")]
mod servers;
#[path = "../../../sources/image/tests/common/toc_layers.rs"]
mod toc_layers;

mod aarch64;
mod architecture;
mod changes;
mod coherence;
mod conformance;
mod cycles;
mod dax;
mod dax_files;
mod dax_mem;
mod dax_shortened;
mod dax_suites;
mod disk;
mod disk_faults;
mod disk_guest;
mod disk_image;
mod disk_load;
mod disk_qcow2;
mod disk_qemu;
mod disk_requests;
mod disk_survives;
mod drop_in;
mod error_causes;
mod events;
mod events_agent;
mod events_beside;
mod events_faults;
mod events_programs;
mod file_handles;
mod fsx;
mod guests;
mod guests_coherence;
mod hostile;
mod hostile_lengths;
mod idle;
mod image_exports;
mod image_inode_share;
mod image_verity;
mod isolation;
mod isolation_disks;
mod isolation_ninep;
mod isolation_sources;
mod libvirt;
mod locks_between_exports;
mod mounts_coherence;
mod mounts_faults;
mod mounts_guest;
mod mounts_handlers;
mod mounts_killed;
mod mounts_ninep;
mod mounts_suites;
mod mounts_times;
mod native;
mod ninep;
mod ninep_clients;
mod ninep_flags;
mod ninep_links;
mod ninep_qemu;
mod ninep_servers;
mod packages;
mod pjdfstest;
mod pmem_dax;
mod podman;
mod programs;
mod qemu;
mod recipes;
mod restrictions;
mod semantics;
mod share_keeper;
mod share_migrates;
mod share_survives;
mod share_survives_guest;
mod share_survives_window;
mod strangers;
mod test_files;
mod threat_model;
