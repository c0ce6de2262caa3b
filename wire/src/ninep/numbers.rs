//! The constants of the protocol.

use ferry_vfs::FileType;

/// Bytes of `size[4] type[1] tag[2]`, the start of every message.
pub const HEADER_BYTES: usize = 7;
/// Bytes of a Twrite before its data: header, fid, offset, count.
pub const WRITE_HEAD_BYTES: usize = HEADER_BYTES + 4 + 8 + 4;
/// Bytes of an Rread or Rreaddir before its data: header and count.
pub const READ_HEAD_BYTES: usize = HEADER_BYTES + 4;
/// The maximum number of names in one Twalk (intro(5): MAXWELEM).
pub const WALK_NAMES_MAX: usize = 16;
/// The minimum message size, which is also Linux's. A symbolic link whose target has more than 4087 bytes cannot be read then:
/// an Rreadlink has 9 bytes before the target.
pub const MSIZE_MIN: u32 = 4096;
/// "No user number": the name is used instead (`P9_NONUNAME`).
pub const NO_UID: u32 = u32::MAX;

/// Identifies a request until its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u16);

impl Tag {
    /// The tag of Tversion (`NOTAG`); no other message uses it.
    pub const NONE: Self = Self(u16::MAX);
}

/// Identifies a file on the server; the client chooses the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fid(pub u32);

impl Fid {
    /// "No fid" (`NOFID`): an attach without authentication.
    pub const NONE: Self = Self(u32::MAX);
}

/// The type of a file in a [`Qid`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct QidKind(pub u8);

impl QidKind {
    /// A directory (`QTDIR`).
    pub const DIR: Self = Self(0x80);
    /// A symbolic link (`QTSYMLINK`).
    pub const SYMLINK: Self = Self(0x02);
    /// Anything else (`QTFILE`).
    pub const FILE: Self = Self(0);

    /// Returns the kind of a file type.
    pub fn of(kind: FileType) -> Self {
        match kind {
            FileType::Directory => Self::DIR,
            FileType::Symlink => Self::SYMLINK,
            _ => Self::FILE,
        }
    }
}

/// The server's identification of a file (intro(5)). Two files are the same if their paths are equal, and unchanged if
/// their versions are equal. Linux's client never caches a file of version 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Qid {
    /// What it is.
    pub kind: QidKind,
    /// Changes with every change of the file.
    pub version: u32,
    /// Unique among the files of the server.
    pub path: u64,
}

impl Qid {
    /// Bytes on the wire.
    pub const BYTES: usize = 13;
}

/// How a message begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Length of the whole message in bytes, including these seven.
    pub bytes: u32,
    /// One of [`kind`].
    pub kind: u8,
    /// Which request.
    pub tag: Tag,
}

impl Frame {
    /// Returns the length of a message from its first four bytes.
    pub fn bytes(head: [u8; 4]) -> u32 {
        u32::from_le_bytes(head)
    }

    /// Reads the start of a message; returns `None` if it is incomplete.
    pub fn peek(message: &[u8]) -> Option<Self> {
        let [a, b, c, d, kind, e, f]: [u8; HEADER_BYTES] = *message.first_chunk()?;
        Some(Self { bytes: Self::bytes([a, b, c, d]), kind, tag: Tag(u16::from_le_bytes([e, f])) })
    }
}

/// The types of messages. A reply's type is that of its request plus 1.
#[allow(missing_docs, reason = "the protocol's own names")]
pub mod kind {
    pub const RLERROR: u8 = 7;

    macro_rules! requests {
        ($($name:ident = $value:literal,)*) => {
            $(pub const $name: u8 = $value;)*

            /// All T messages.
            pub const ALL: [u8; 29] = [$($name,)*];
        };
    }

    requests! {
        TSTATFS = 8,
        TLOPEN = 12,
        TLCREATE = 14,
        TSYMLINK = 16,
        TMKNOD = 18,
        TRENAME = 20,
        TREADLINK = 22,
        TGETATTR = 24,
        TSETATTR = 26,
        TXATTRWALK = 30,
        TXATTRCREATE = 32,
        TREADDIR = 40,
        TFSYNC = 50,
        TLOCK = 52,
        TGETLOCK = 54,
        TLINK = 70,
        TMKDIR = 72,
        TRENAMEAT = 74,
        TUNLINKAT = 76,
        // Only in `super::VERSION_OF_FERRY`.
        TEVENTS = 78,
        TVERSION = 100,
        TAUTH = 102,
        TATTACH = 104,
        TFLUSH = 108,
        TWALK = 110,
        TREAD = 116,
        TWRITE = 118,
        TCLUNK = 120,
        TREMOVE = 122,
    }
}

/// The valid attributes of an Rgetattr (`P9_STATS_*`).
pub mod valid {
    /// All fields of `struct stat`.
    pub const BASIC: u64 = 0x7ff;
    /// The time of birth.
    pub const BTIME: u64 = 0x800;
    /// The generation.
    pub const GENERATION: u64 = 0x1000;
}

/// Bits of Tsetattr (`P9_ATTR_*`).
pub(super) mod set {
    pub(crate) const MODE: u32 = 1;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const ATIME: u32 = 1 << 4;
    pub(crate) const MTIME: u32 = 1 << 5;
    pub(crate) const CTIME: u32 = 1 << 6;
    pub(crate) const ATIME_SET: u32 = 1 << 7;
    pub(crate) const MTIME_SET: u32 = 1 << 8;
    pub(crate) const ALL: u32 = (1 << 9) - 1;
}

/// Bits and types of locks (`P9_LOCK_*`).
pub(super) mod lock {
    pub(crate) const READ: u8 = 0;
    pub(crate) const WRITE: u8 = 1;
    pub(crate) const UNLOCK: u8 = 2;
    pub(crate) const BLOCK: u32 = 1;
    pub(crate) const RECLAIM: u32 = 2;
}

/// The flag of Tunlinkat (`P9_DOTL_AT_REMOVEDIR`).
pub(super) const AT_REMOVEDIR: u32 = 0x200;
/// `f_type` of 9P file systems (Linux `V9FS_MAGIC`).
pub(super) const V9FS_MAGIC: u32 = 0x0102_1997;
