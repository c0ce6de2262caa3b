//! The integration tests, in one program: one for each file would take much longer to link.

#[path = "../common/certificates.rs"]
#[cfg(feature = "tls")]
mod certificates;
#[path = "../common/mod.rs"]
mod common;

mod ahead;
mod device;
mod hostile;
mod idle;
mod locks;
mod long_messages;
mod memory;
mod permissions;
mod requests;
mod tls;
mod versions;
