//! The flags of one share, their values, and what does not go together.

mod address;
mod contradictions;
pub mod limit;
mod quota;
mod share;
mod source;
mod values;

pub use address::{Address, Users};
pub use limit::Limit;
pub use share::{JOBS_MAX, POLL_US_MAX, Share, TIMEOUT_MAX};
pub use source::{Kind, Server};
pub use values::{
    Acl, Cache, Carrier, DaxFiles, FileHandles, ImageDigest, MapUser, MigrationMode, OnMigrationError, Passthrough,
    Watch, Window, as_keys, default_tag, memory_mib, parsed, tag_from_name,
};
