//! The formats of images and packs: bytes on disk, digests, and code that reads and writes them in memory.

pub(crate) mod check;
pub(crate) mod chunk;
pub(crate) mod composefs;
pub(crate) mod data;
pub(crate) mod digest;
pub mod erofs;
pub(crate) mod error;
pub(crate) mod flat;
pub(crate) mod identity;
pub(crate) mod image;
pub(crate) mod index;
pub(crate) mod layer_index;
pub(crate) mod object;
pub mod pack_table;
pub(crate) mod plain_file;
pub(crate) mod tree;
pub(crate) mod tree_digest;
pub(crate) mod verity;
pub(crate) mod walk;
