//! T messages.

use ferry_vfs::{LockKind, Name, OFlags, SetAttr, XattrFlags};

use super::numbers::{Fid, NO_UID, Tag};

/// Who attaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User<'a> {
    /// The user's name; Linux leaves it empty where it sends a number.
    pub name: &'a [u8],
    /// The user's number.
    pub uid: Option<u32>,
}

impl User<'_> {
    pub(super) fn raw_uid(&self) -> u32 {
        self.uid.unwrap_or(NO_UID)
    }
}

/// One step of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// `..`
    Parent,
    /// A name in the directory.
    Child(Name<'a>),
}

impl<'a> Step<'a> {
    pub(super) fn as_bytes(self) -> &'a [u8] {
        match self {
            Self::Parent => b"..",
            Self::Child(name) => name.as_bytes(),
        }
    }
}

/// The steps of a walk, at most [`super::WALK_NAMES_MAX`], as they lie in the message. Only the decoder and
/// [`Steps::write`] make them, so each is a name or `..`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steps<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) count: u16,
}

impl<'a> Steps<'a> {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.count.into()
    }

    /// Whether there is none: the walk only makes another fid of the same file.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The steps in order.
    pub fn iter(&self) -> impl Iterator<Item = Step<'a>> + use<'a> {
        let mut rest = self.bytes;
        std::iter::from_fn(move || {
            let (count, behind) = rest.split_first_chunk()?;
            let (name, behind) = behind.split_at_checked(u16::from_le_bytes(*count).into())?;
            rest = behind;
            if name == b".." { Some(Step::Parent) } else { Name::new(name).ok().map(Step::Child) }
        })
    }

    /// Writes steps into a buffer, as a client does before it walks; those past the maximum are left out.
    pub fn write(buffer: &'a mut Vec<u8>, steps: impl IntoIterator<Item = Step<'a>>) -> Self {
        buffer.clear();
        let mut count = 0;
        for step in steps.into_iter().take(super::WALK_NAMES_MAX) {
            let name = step.as_bytes();
            // A name has at most 255 bytes.
            buffer.extend_from_slice(&u16::try_from(name.len()).unwrap_or(0).to_le_bytes());
            buffer.extend_from_slice(name);
            count += 1;
        }
        Self { bytes: buffer, count }
    }
}

/// A lock that is asked for or about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRequest<'a> {
    /// What is wanted.
    pub kind: LockKind,
    /// First byte.
    pub start: u64,
    /// Last byte, inclusive; `i64::MAX` for the end of the file, wherever that is (a length of 0 in the message).
    pub end: u64,
    /// The process, as the client numbers it.
    pub pid: u32,
    /// What the client calls itself. Owners are the same if process and client are.
    pub client: &'a [u8],
}

/// A [`Request::Write`] of which only the beginning is at hand: for servers that leave the data where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteHead {
    /// Where to.
    pub fid: Fid,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Bytes of data, which follow.
    pub bytes: u32,
}

/// A [`Request::Read`], or a [`Request::Write`] without its data, for so many bytes and without a tag: for clients that take no
/// memory for it.
///
/// # Panics
/// If `kind` is that of no such request.
pub fn encode_transfer_head(kind: u8, fid: Fid, offset: u64, bytes: u32) -> [u8; super::WRITE_HEAD_BYTES] {
    let mut head = [0; super::WRITE_HEAD_BYTES];
    let size = match kind {
        super::kind::TREAD => 23,
        // No message is as long as to wrap around: the caller has the data in memory, behind this head.
        super::kind::TWRITE => bytes.saturating_add(23),
        _ => panic!("{kind} is neither Tread nor Twrite"),
    };
    head[..4].copy_from_slice(&size.to_le_bytes());
    head[4] = kind;
    head[7..11].copy_from_slice(&fid.0.to_le_bytes());
    head[11..19].copy_from_slice(&offset.to_le_bytes());
    head[19..].copy_from_slice(&bytes.to_le_bytes());
    head
}

/// A request. Flags have the values of this host; the decoder translates them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields that several have in common are said here")]
pub enum Request<'a> {
    /// Begins a session, and ends the one before it.
    Version {
        /// The longest message that the client takes, in bytes.
        msize: u32,
        /// The version it speaks, such as `9P2000.L`.
        version: &'a [u8],
    },
    /// Begins an authentication.
    Auth { afid: Fid, user: User<'a>, tree: &'a [u8] },
    /// Makes `fid` the root of a tree, for a user.
    Attach {
        fid: Fid,
        /// The authentication, or [`Fid::NONE`].
        afid: Fid,
        user: User<'a>,
        /// Which tree; empty for the only one.
        tree: &'a [u8],
    },
    /// The client does not want the answer to a request any more.
    Flush {
        /// That request.
        old: Tag,
    },
    /// Makes `new_fid` what the steps lead to from `fid`.
    Walk { fid: Fid, new_fid: Fid, steps: Steps<'a> },
    /// Reads from an open file, or the value of an extended attribute.
    Read { fid: Fid, offset: u64, bytes_max: u32 },
    /// Writes to an open file, or to the value of an extended attribute.
    Write { fid: Fid, offset: u64, data: &'a [u8] },
    /// Ends a fid.
    Clunk { fid: Fid },
    /// Removes the file and ends the fid, whether the first works or not.
    Remove { fid: Fid },
    /// Asks for the totals of the file system.
    Statfs { fid: Fid },
    /// Opens.
    Open {
        fid: Fid,
        /// Never `O_CREAT` or `O_EXCL`.
        flags: OFlags,
    },
    /// Makes a file in the directory `fid` and opens it: `fid` is the file then.
    Create { fid: Fid, name: Name<'a>, flags: OFlags, mode: u32, gid: u32 },
    /// Makes a symbolic link.
    Symlink { dir: Fid, name: Name<'a>, target: &'a [u8], gid: u32 },
    /// Makes a file that is no directory and no symbolic link.
    Mknod {
        dir: Fid,
        name: Name<'a>,
        /// File type and permission bits.
        mode: u32,
        /// As in [`ferry_vfs::Attr::rdev`].
        rdev: u32,
        gid: u32,
    },
    /// Renames the file of a fid.
    Rename { fid: Fid, dir: Fid, name: Name<'a> },
    /// Reads a symbolic link.
    Readlink { fid: Fid },
    /// Asks for attributes.
    Getattr {
        fid: Fid,
        /// Which are wanted: [`super::valid`].
        mask: u64,
    },
    /// Changes attributes. `ctime`: only the time of the change is to be set.
    Setattr { fid: Fid, set: SetAttr, ctime: bool },
    /// Makes `new_fid` the value of an extended attribute, or with an empty name the list of names, to be read.
    Xattrwalk { fid: Fid, new_fid: Fid, name: &'a [u8] },
    /// Makes `fid` the new value of an extended attribute, to be written and set when the fid is ended.
    Xattrcreate {
        fid: Fid,
        name: &'a [u8],
        /// How many bytes will be written; 0 with `XATTR_REPLACE` removes the attribute, as Linux's client does.
        bytes: u64,
        flags: XattrFlags,
    },
    /// Lists an open directory from an offset on.
    Readdir { fid: Fid, offset: u64, bytes_max: u32 },
    /// Makes a file durable.
    Fsync { fid: Fid, data_only: bool },
    /// Takes, changes or gives up a lock.
    Lock {
        fid: Fid,
        lock: LockRequest<'a>,
        /// Wait for it.
        wait: bool,
        /// The client had it before the server was started again.
        reclaim: bool,
    },
    /// Asks for a lock that is in the way.
    Getlock { fid: Fid, lock: LockRequest<'a> },
    /// Gives the file of `fid` a name in `dir`.
    Link { dir: Fid, fid: Fid, name: Name<'a> },
    /// Makes a directory.
    Mkdir { dir: Fid, name: Name<'a>, mode: u32, gid: u32 },
    /// Renames.
    Renameat { dir: Fid, name: Name<'a>, new_dir: Fid, new_name: Name<'a> },
    /// Removes a name: of a directory, or of anything else.
    Unlinkat { dir: Fid, name: Name<'a>, is_dir: bool },
}
