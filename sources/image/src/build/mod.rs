//! Building an image of a directory, a tar archive, an OCI image directory or a dump file.

pub(crate) mod content_writer;
mod directory;
pub(crate) mod dump;
pub(crate) mod filter;
mod hash_pool;
mod meter;
mod oci;
pub(crate) mod run;
pub(crate) mod scan;
pub(crate) mod tar;
pub(crate) mod trace;
mod tree_builder;
