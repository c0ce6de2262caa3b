//! The store: packs and object files, their locks, fs-verity, repair, garbage collection and usage.

pub(crate) mod batch;
pub(crate) mod fetch;
pub(crate) mod file_objects;
pub(crate) mod fsverity;
pub(crate) mod garbage;
pub(crate) mod layer_fetch;
pub(crate) mod layout;
pub(crate) mod new_file;
pub(crate) mod new_objects;
pub(crate) mod new_pack;
pub(crate) mod object_error;
pub(crate) mod object_list;
pub(crate) mod packs;
pub(crate) mod parallel;
pub(crate) mod places;
pub(crate) mod repair;
pub(crate) mod seal;
pub(crate) mod usage;
