//! What happened, in its order, for clients whose programs watch files.

use crate::{Ino, NameBuf};

/// An inode, or a name in a directory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The directory of the name; without a name the inode.
    pub ino: Ino,
    /// The name by which it was used.
    pub name: Option<NameBuf>,
}

/// One event. A [`crate::Change`] says what is no longer valid, may be published twice, and in any order. An event says
/// what happened, and is published once, after the `Change`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A name was made.
    Created {
        /// The directory.
        dir: Ino,
        /// The name.
        name: NameBuf,
        /// It refers to a directory.
        is_dir: bool,
        /// The inode, if the source knows it. Until a client has looked it up, its events are reported under this
        /// name.
        ino: Option<Ino>,
    },
    /// A name was removed.
    Removed {
        /// The directory.
        dir: Ino,
        /// The name.
        name: NameBuf,
        /// It referred to a directory.
        is_dir: bool,
        /// The inode to which it referred, if a client knows it.
        ino: Option<Ino>,
    },
    /// A name was moved, or two names were exchanged.
    Renamed {
        /// The old directory and name.
        from: (Ino, NameBuf),
        /// The new directory and name.
        to: (Ino, NameBuf),
        /// The moved inode is a directory.
        is_dir: bool,
        /// Two names were exchanged.
        exchanged: bool,
    },
    /// Data of a file were changed.
    Modified(Place),
    /// A file was closed that was open for writing.
    Closed(Place),
    /// Attributes were changed.
    Attributes(Place),
    /// Events were lost.
    Lost,
}
