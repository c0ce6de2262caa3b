//! What goes into an image: inodes, names, and where each file's bytes come from.

use std::collections::HashSet;

use ferry_vfs::{FileType, NameBuf, Timespec};

use crate::format::digest::Digest;

/// An inode, by its place in [`Tree::nodes`].
pub type NodeId = usize;

/// A whole tree. The root is the first node, and a directory is the content of one name only.
#[derive(Debug, Default)]
pub struct Tree {
    /// All inodes.
    pub nodes: Vec<Node>,
    /// The names that are further hard links of an inode whose first name is elsewhere, each with its directory. Only layouts
    /// that order inodes by their first names want to know.
    pub links: HashSet<(NodeId, NameBuf)>,
}

impl Tree {
    /// Whether a name is a further hard link.
    pub fn is_link(&self, directory: NodeId, name: &NameBuf) -> bool {
        !self.links.is_empty() && self.links.contains(&(directory, name.clone()))
    }
}

/// One inode.
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
    /// Number of names; for a directory the number of directories in it, and two.
    pub nlink: u32,
    /// Full names and values, by name.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// What it holds.
    pub content: Content,
}

/// What an inode holds.
#[derive(Debug)]
pub enum Content {
    /// Nothing: devices, FIFOs, sockets.
    None,
    /// Names, in the order of their bytes.
    Directory(Vec<(NameBuf, NodeId)>),
    /// The target of a symbolic link, or the bytes of a file that is kept with its inode.
    Inline(Vec<u8>),
    /// The bytes of a file that are still to be read.
    Unread {
        /// Length in bytes, never 0.
        bytes: u64,
    },
    /// The bytes of a file that are kept in packs.
    Packed {
        /// Length in bytes, never 0.
        bytes: u64,
        /// The first of its pieces among those of all files (in the order of the build).
        first: usize,
    },
    /// The bytes of a file that are kept in an object store.
    Object {
        /// Length in bytes, never 0.
        bytes: u64,
        /// What they are.
        digest: Digest,
    },
    /// The bytes of a file that the build does not see.
    Elsewhere {
        /// Length in bytes.
        bytes: u64,
        /// Where they are, below an object store.
        path: Option<Vec<u8>>,
        /// What they are.
        digest: Option<Digest>,
    },
}

impl Node {
    /// The file type in the mode.
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode.into())
    }
}

/// Sets an attribute in a list that is sorted by name.
pub(crate) fn set_xattr(xattrs: &mut Vec<(Vec<u8>, Vec<u8>)>, name: &[u8], value: &[u8]) {
    match xattrs.binary_search_by(|(known, _)| known.as_slice().cmp(name)) {
        Ok(at) => xattrs[at].1 = value.to_vec(),
        Err(at) => xattrs.insert(at, (name.to_vec(), value.to_vec())),
    }
}
