//! Verified file system images: a tree's metadata as EROFS, which the kernel mounts, and the bytes of its files in
//! packs, which images share.
//!
//! A BLAKE3 digest names a tree, independently of the store; another one names an image, including the locations of its
//! files' bytes in packs. Either verifies everything: the image names its packs by the digests of their indexes, and an
//! index has the digest of each object in its pack.
//!
//! ```no_run
//! use std::path::Path;
//! use ferry_image::{build, BuildOptions, Store};
//!
//! let store = Store::create(Path::new("/var/lib/ferry"))?;
//! let built = build(Path::new("rootfs"), Path::new("rootfs.img"), store, &BuildOptions::default(), &|_, _| {})?;
//! println!("{}", built.tree);
//! # Ok::<(), ferry_image::Error>(())
//! ```
#![deny(unsafe_code)]

// Each directory uses only those before it: format <- store <- read <- build.
mod build;
mod format;
mod mount;
mod read;
mod store;

pub use build::filter::{Filter, Pattern, Whiteouts};
pub use build::layer::{BuildLayersError, Layer, LayerError, LayerRef, build_layer, build_layers};
pub use build::merge::merge;
pub use build::oci::architecture_here;
pub use build::options::{BuildReport, INLINE_BYTES_MAX, Layout, Options as BuildOptions, Progress};
pub use build::run::build;
pub use build::tar::{LayerRules, LowerDirectories, LowerDirectory};
pub use build::trace::Trace;
pub use build::unpack::{UnpackReport, unpack_layer};
pub use format::check::{Report, check};
pub use format::composefs::COMPOSEFS_VERSION_MAX;
pub use format::data::{ChunkIndex, Data, PackRef, Run, Runs};
pub use format::digest::{Algorithm, DIGEST_BYTES, Digest, bytes_of_hex, hex};
pub use format::error::{Error, Flaw, ImageResult, Result, error_chain};
pub use format::image::{Entries, Entry, IMAGE_BYTES_MAX, Image, Inode, Nid, Xattr};
pub use format::index::{Index, Object};
pub use format::layer_index::{Compression, LAYER_CHUNK_BYTES_MAX, LayerBlob};
pub use format::walk::{Step, walk};
pub use format::{erofs, pack_table};
pub use mount::{InodeShare, configure_erofs, kernel_messages};
pub use read::diff::{Change, Digests, Kind as ChangeKind, diff};
pub use read::disk::Disk;
pub use read::dump::{DumpError, write as dump};
pub use read::fetch_first::FirstFiles;
pub use read::objects::Objects;
pub use read::source::Source;
pub use store::fetch::{ByteSink, Fetch, FetchOptions};
pub use store::file_objects::{FileObject, file_objects};
pub use store::fsverity::{Verity, verity_of};
pub use store::garbage::{ExclusiveStore, GcReport, LiveSet, Objects as GcObjects};
pub use store::object_error::ObjectError;
pub use store::object_list::objects_directory;
pub use store::packs::Store;
pub use store::repair::{RepairCounts, note_damage, repair_packs};
pub use store::seal::{PackProof, SealReport, seal, seal_image};
pub use store::usage::{ImageUsage, ObjectLocation, Total, Usage, object_locations, unneeded_packs};
