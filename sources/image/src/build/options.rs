//! How an image is built, and the result.

use std::thread;

use crate::build::filter::{Filter, Whiteouts};
use crate::build::trace::Trace;
use crate::format::digest::Digest;

/// Files up to this size are read once, hashed and kept in memory until their turn comes; larger ones are read again.
pub(crate) const KEPT_BYTES_MAX: u64 = 4 << 20;

/// How the metadata is laid out, and the bytes of files are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// In the order of a walk, with data in packs: what the kernel mounts alone, and fastest.
    #[default]
    Flat,
    /// As mkcomposefs does it, with a file for each object: what the kernel mounts below overlayfs.
    Composefs {
        /// The version of the layout: 0 or 1 as mkcomposefs has them, 2 as composefs-rs; without one 1 if there are whiteouts, 0 otherwise.
        version: Option<u32>,
    },
}

/// How an image is built.
#[derive(Clone, Debug)]
pub struct Options {
    /// How many threads read and hash.
    pub threads: usize,
    /// The layout.
    pub layout: Layout,
    /// Which image of an index to take, as `os/architecture`, with a variant or without; without one Linux's for this machine.
    pub platform: Option<String>,
    /// What a workload needs first: these files are put into a pack of their own, in this order, which is read at once by whoever
    /// mounts the image. Of [`Layout::Flat`] only.
    pub order: Option<Trace>,
    /// What an archive that is a layer has for what is gone; without this it is refused. Of archives only.
    pub whiteouts: Option<Whiteouts>,
    /// Name the fs-verity digests of packs, and turn fs-verity on for what is written where the file system has it, so that the kernel can
    /// prove what it reads of them. Packs without such digests are not used then. Of [`Layout::Flat`] only: composefs's objects have it always.
    pub verity: bool,
    /// What is left out, and what is the same for everything.
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
            filter: Filter::default(),
        }
    }
}

/// What was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// The digest of the image, with the places of files' bytes in packs: it depends on what the store held.
    pub digest: Digest,
    /// The digest of the tree alone. It is the image's in the layout composefs.
    pub tree: Digest,
    /// Size of the image, in bytes.
    pub image_bytes: u64,
    /// How many inodes there are.
    pub inodes: usize,
    /// Bytes of all files that are kept in packs, each file counted once.
    pub data_bytes: u64,
    /// Bytes that were not in the store before.
    pub new_bytes: u64,
    /// The packs that the image needs.
    pub packs: Vec<Digest>,
}

/// What is told while an image is built: how much is done, and of how much. Of a directory these are files, of anything else bytes; of a
/// pipe nobody knows how many there will be, and both are the same.
pub type Progress<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Files up to this size are kept with their inodes, where whoever looks at the inode has them already. More would make
/// walks of the metadata slower; composefs keeps as many.
pub const INLINE_BYTES_MAX: u64 = 64;
