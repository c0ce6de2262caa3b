//! The contents of an image: inodes, names, and the origin of each file's bytes.

use std::collections::HashSet;

use ferry_vfs::{FileType, NameBuf, Timespec};

use crate::format::digest::Digest;

/// The index of an inode in [`Tree::nodes`].
pub type NodeId = usize;

/// A tree. The root is the first node, and a directory has only one name.
#[derive(Debug, Default)]
pub struct Tree {
    /// All inodes.
    pub nodes: Vec<Node>,
    /// Further hard links of inodes, each with its directory, for layouts that order inodes by their first names.
    pub links: HashSet<(NodeId, NameBuf)>,
}

impl Tree {
    /// Returns whether a name is a further hard link.
    pub fn is_link(&self, directory: NodeId, name: &NameBuf) -> bool {
        !self.links.is_empty() && self.links.contains(&(directory, name.clone()))
    }
}

/// An inode.
#[derive(Debug)]
pub struct Node {
    /// Type and permissions.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number, in the kernel's 32-bit form.
    pub rdev: u32,
    /// Time of the data.
    pub mtime: Timespec,
    /// Link count; for a directory the number of its subdirectories plus two.
    pub nlink: u32,
    /// Full names and values, by name.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Its contents.
    pub content: Content,
}

/// The contents of an inode.
#[derive(Debug)]
pub enum Content {
    /// Nothing: devices, FIFOs, sockets.
    None,
    /// Names, in the order of their bytes.
    Directory(Vec<(NameBuf, NodeId)>),
    /// The target of a symbolic link, or the bytes of a file that is stored with its inode.
    Inline(Vec<u8>),
    /// The bytes of a file that is not yet read.
    Unread {
        /// Length in bytes, never 0.
        bytes: u64,
    },
    /// The bytes of a file in packs.
    Packed {
        /// Length in bytes, never 0.
        bytes: u64,
        /// The index of its first chunk among those of all files (in the order of the build).
        first: usize,
    },
    /// The bytes of a file in the pack of a container's layer, as one run of blocks.
    Layer {
        /// Length in bytes, never 0.
        bytes: u64,
        /// The index of the pack among those of the image.
        pack: usize,
        /// The first block there.
        block: u64,
    },
    /// The bytes of a file in packs, chunk by chunk.
    Chunks {
        /// Length in bytes, never 0.
        bytes: u64,
        /// For each chunk the index of its pack among those of the image, and its first block there.
        chunks: Vec<(usize, u64)>,
    },
    /// The bytes of a file in an object store.
    Object {
        /// Length in bytes, never 0.
        bytes: u64,
        /// Their digest.
        digest: Digest,
    },
    /// The bytes of a file that the build does not read.
    Elsewhere {
        /// Length in bytes.
        bytes: u64,
        /// Their path in an object store.
        path: Option<Vec<u8>>,
        /// Their digest.
        digest: Option<Digest>,
    },
}

impl Content {
    /// Whether these are the bytes of a file in packs.
    pub(crate) fn is_in_packs(&self) -> bool {
        matches!(self, Self::Packed { .. } | Self::Layer { .. } | Self::Chunks { .. })
    }
}

impl Node {
    /// Returns the file type in the mode.
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode.into())
    }
}

/// Sets an attribute in a list sorted by name.
pub(crate) fn set_xattr(xattrs: &mut Vec<(Vec<u8>, Vec<u8>)>, name: &[u8], value: &[u8]) {
    match xattrs.binary_search_by(|(known, _)| known.as_slice().cmp(name)) {
        Ok(at) => xattrs[at].1 = value.to_vec(),
        Err(at) => xattrs.insert(at, (name.to_vec(), value.to_vec())),
    }
}
