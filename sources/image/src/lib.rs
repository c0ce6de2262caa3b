//! Verified file system images: a tree's metadata as EROFS, which the kernel mounts, and the bytes of its files in packs, which
//! images share.
//!
//! One digest (BLAKE3's, 32 bytes) names a tree, whatever the store holds; another one names an image, with the places of its files'
//! bytes in packs. Either proves all of it: the image names its packs by the digests of their indexes, and an index has the digest of each
//! object in its pack.
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

mod build;
mod check;
mod choice;
mod composefs;
mod diff;
mod digest;
mod disk;
mod dump;
pub mod erofs;
mod error;
pub mod fetch;
mod fetch_locks;
mod flat;
mod flight;
mod fsverity;
mod garbage;
mod grow;
mod hashers;
mod image;
mod lanes;
mod limit;
mod mend;
mod meter;
mod objects;
mod oci;
mod pack;
pub mod pack_table;
mod parallel;
mod part;
mod piece;
mod places;
mod receive;
mod runs;
mod scan;
mod seal;
mod sink;
mod source;
mod store;
mod tar;
mod trace;
mod tree;
mod tree_digest;
mod usage;
mod verity;
mod walk;

pub use build::{Built, Layout, Options as BuildOptions, Progress, build};
pub use check::{Report, check};
pub use choice::{Choice, Pattern};
pub use composefs::COMPOSEFS_VERSION_MAX;
pub use composefs::lacking::{FileObject, file_objects};
pub use composefs::objects::objects_folder;
pub use diff::{Change, Digests, Kind as ChangeKind, diff};
pub use digest::{Algorithm, DIGEST_BYTES, Digest, bytes_of_hex, hex};
pub use disk::Disk;
pub use dump::{DumpError, write as dump};
pub use error::{Error, Flaw, Result, told};
pub use fetch::{Fetch, Missing};
pub use fsverity::{Verity, verity_of};
pub use garbage::{Collected, Needed, Objects as CollectedObjects, Sole};
pub use image::{Checked, Data, Entries, Entry, IMAGE_BYTES_MAX, Image, Inode, Nid, PackRef, Xattr};
pub use mend::{Mended, mend, note_damage};
pub use objects::{Bad, Objects};
pub use runs::{Pieces, Run, Runs};
pub use scan::INLINE_BYTES_MAX;
pub use seal::{PackProof, Sealed, seal, seal_image};
pub use source::Source;
pub use store::{Index, Object, Store};
pub use tar::Whiteouts;
pub use trace::Trace;
pub use usage::{Place, Share, Total, Usage, places};
pub use walk::{Step, walk};
