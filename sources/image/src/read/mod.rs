//! Reads the files of an image: verification, fetching, and the image as a file system and as a disk.

pub(crate) mod cache_limit;
pub(crate) mod diff;
pub(crate) mod disk;
pub(crate) mod dump;
pub(crate) mod fetch;
pub(crate) mod fetch_all;
pub(crate) mod fetch_first;
pub(crate) mod fetch_locks;
pub(crate) mod fetch_objects;
pub(crate) mod missing_objects;
pub(crate) mod object_files;
pub(crate) mod objects;
pub(crate) mod pack;
pub(crate) mod pack_receiver;
pub(crate) mod part_file;
pub(crate) mod partial;
pub(crate) mod singleflight;
pub(crate) mod source;
