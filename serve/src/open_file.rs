//! Identifies an open file.

use ferry_vfs::{Handle, Ino};

/// An open file or directory. The inode is part of the key: a source may use one handle for all its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Open {
    pub(crate) ino: Ino,
    pub(crate) handle: Handle,
    pub(crate) is_dir: bool,
}
