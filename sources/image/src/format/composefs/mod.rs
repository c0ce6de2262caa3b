//! The layout `composefs`: EROFS metadata exactly as `mkcomposefs` 1.0.8 writes it, for the kernel to mount below overlayfs.
//!
//! ```text
//! 0          composefs's header
//! 1024       superblock, then the inodes, breadth first, each followed by its attributes and a small file's bytes
//! 32-aligned attributes that several inodes share
//! aligned    whole blocks: directories and long links, in the order of the inodes
//! ```
//!
//! A larger file is all hole. Its attributes `trusted.overlay.redirect` and `trusted.overlay.metacopy` tell overlayfs where its
//! bytes are in the object store, and their fs-verity digest.
//!
//! Source: composefs-dump(5), Documentation/filesystems/overlayfs.rst and erofs.rst of Linux; the rest (orders, padding, which
//! part of an inode may cross a block) was found by comparing images with what they were made of.

mod filter;
mod header;
mod native;
mod place;
mod prepare;
mod shared_xattrs;
pub(crate) mod view;
mod writer;

pub use header::COMPOSEFS_VERSION_MAX;
pub(crate) use header::{Header, MAGIC};
pub(crate) use prepare::{fits, path_of};
pub(crate) use writer::write;
