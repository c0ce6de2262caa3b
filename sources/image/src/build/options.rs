//! How an image is built, and the result.

use std::thread;

use crate::build::filter::{Filter, Whiteouts};
use crate::build::trace::Trace;
use crate::format::digest::Digest;

/// Files up to this size are read once, hashed and kept in memory until they are stored; larger ones are read again.
pub(crate) const KEPT_BYTES_MAX: u64 = 4 << 20;

/// The layout of the metadata, and the storage of files' bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// In the order of a walk, with data in packs: mountable by the kernel alone, and fastest.
    #[default]
    Flat,
    /// As mkcomposefs does it, with a file per object: mounted by the kernel below overlayfs.
    Composefs {
        /// The layout's version: 0 and 1 are mkcomposefs's, 2 is composefs-rs's; by default 1 with whiteouts, else 0.
        version: Option<u32>,
    },
}

/// How an image is built.
#[derive(Clone, Debug)]
pub struct Options {
    /// The number of threads that read and hash.
    pub threads: usize,
    /// The layout.
    pub layout: Layout,
    /// Which image of an index to use, as `os/architecture`, optionally with a variant; by default Linux on this
    /// machine's architecture.
    pub platform: Option<String>,
    /// The files that a workload needs first: they go into a pack of their own, in this order, which a mount reads at
    /// once. Only for [`Layout::Flat`].
    pub order: Option<Trace>,
    /// What whiteouts of a single-layer archive become; without this such an archive is refused. Only for archives.
    pub whiteouts: Option<Whiteouts>,
    /// Store packs with fs-verity digests, and enable fs-verity where supported, so that the kernel can verify reads.
    /// Packs without digests are not reused. Only for [`Layout::Flat`]: composefs's objects always have fs-verity.
    pub verity: bool,
    /// Give files the identities by which mounts share their page cache (EROFS's `inode_share`). Only for [`Layout::Flat`].
    pub inode_share: bool,
    /// Packs of the store whose objects are stored again. Only for [`Layout::Flat`].
    pub unused_packs: Vec<Digest>,
    /// What is excluded or normalized.
    pub filter: Filter,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: thread::available_parallelism().map_or(1, usize::from),
            layout: Layout::default(),
            platform: None,
            order: None,
            whiteouts: None,
            verity: false,
            inode_share: false,
            unused_packs: Vec::new(),
            filter: Filter::default(),
        }
    }
}

/// The result of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildReport {
    /// The digest of the image, including the locations of files' bytes in packs: it depends on the store.
    pub digest: Digest,
    /// The digest of the tree alone. In the composefs layout it is the image's.
    pub tree: Digest,
    /// Size of the image in bytes.
    pub image_bytes: u64,
    /// The number of inodes.
    pub inodes: usize,
    /// Bytes of all files in packs, each file counted once.
    pub data_bytes: u64,
    /// Bytes that the store did not have before.
    pub new_bytes: u64,
    /// The packs that the image needs.
    pub packs: Vec<Digest>,
}

/// Receives the progress of a build: done, and total. The unit is files for a directory and bytes otherwise; for a pipe
/// the total equals what is done.
pub type Progress<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Files up to this size are stored with their inodes, as in composefs. More would slow down walks of the metadata.
pub const INLINE_BYTES_MAX: u64 = 64;
