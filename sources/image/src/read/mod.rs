//! Reading the files of an image: proof, fetching of missing objects, and the image as a file system and as a disk.

pub(crate) mod cache_limit;
pub(crate) mod diff;
pub(crate) mod disk;
pub mod fetch;
mod fetch_locks;
pub(crate) mod missing_objects;
pub(crate) mod object_files;
pub(crate) mod objects;
pub(crate) mod pack;
mod pack_receiver;
mod part_file;
mod singleflight;
pub(crate) mod source;
