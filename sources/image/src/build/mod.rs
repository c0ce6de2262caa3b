//! Builds an image from a directory, a tar archive, an OCI image directory or a dump file.

pub(crate) mod content_writer;
pub(crate) mod directory;
pub(crate) mod dump;
pub(crate) mod filter;
pub(crate) mod hash_pool;
pub(crate) mod layer;
pub(crate) mod merge;
pub(crate) mod meter;
pub(crate) mod object_writer;
pub(crate) mod oci;
pub(crate) mod options;
pub(crate) mod pack_writer;
pub(crate) mod run;
pub(crate) mod scan;
pub(crate) mod tar;
pub(crate) mod trace;
pub(crate) mod tree_builder;
pub(crate) mod unpack;
