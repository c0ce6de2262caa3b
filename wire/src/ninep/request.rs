//! T messages (9P2000, intro(5); 9P2000.L).

use ferry_vfs::{LockKind, Name, OFlags, SetAttr, XattrFlags};

use super::numbers::{Fid, NO_UID, Tag};

/// The user of an attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User<'a> {
    /// The user's name; Linux leaves it empty when it sends a number.
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

/// The steps of a walk, at most [`super::WALK_NAMES_MAX`], in the encoding of the message. Only the decoder and
/// [`Steps::write`] create them, so each step is a valid name or `..`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steps<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) count: u16,
}

impl<'a> Steps<'a> {
    /// Returns the number of steps.
    pub fn len(&self) -> usize {
        self.count.into()
    }

    /// Returns whether there are no steps: the walk then only clones the fid.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Iterates over the steps.
    pub fn iter(&self) -> impl Iterator<Item = Step<'a>> + use<'a> {
        let mut rest = self.bytes;
        std::iter::from_fn(move || {
            let (count, behind) = rest.split_first_chunk()?;
            let (name, behind) = behind.split_at_checked(u16::from_le_bytes(*count).into())?;
            rest = behind;
            if name == b".." { Some(Step::Parent) } else { Name::new(name).ok().map(Step::Child) }
        })
    }

    /// Writes steps into a buffer for a client's walk; steps past the maximum are left out.
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

/// A lock to set or test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRequest<'a> {
    /// The requested type.
    pub kind: LockKind,
    /// First byte.
    pub start: u64,
    /// Last byte, inclusive; `i64::MAX` stands for the end of the file (a length of 0 in the message).
    pub end: u64,
    /// The process id on the client.
    pub pid: u32,
    /// The client's name for itself. The owner of a lock is the pair of process and client.
    pub client: &'a [u8],
}

/// A [`Request::Write`] without its data, for servers that leave the data in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteHead {
    /// The file to write to.
    pub fid: Fid,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Length of the data that follows, in bytes.
    pub bytes: u32,
}

/// Encodes a [`Request::Read`], or a [`Request::Write`] without its data, of `bytes` bytes and without a tag. It does
/// not allocate.
///
/// # Panics
///
/// If `kind` is neither Tread nor Twrite.
pub fn encode_transfer_head(kind: u8, fid: Fid, offset: u64, bytes: u32) -> [u8; super::WRITE_HEAD_BYTES] {
    let mut head = [0; super::WRITE_HEAD_BYTES];
    let size = match kind {
        super::kind::TREAD => 23,
        // This cannot overflow: the caller has the data in memory after this head.
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

/// A request (intro(5) for the messages of 9P2000, `protocol.md` of diod for those of 9P2000.L). Offsets, lengths and
/// `bytes_max` are in bytes. The decoder translates flags to the values of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields shared by several variants are documented here")]
pub enum Request<'a> {
    /// Tversion: begins a session and ends the previous one.
    Version {
        /// The longest message that the client accepts, in bytes.
        msize: u32,
        /// The client's version, such as `9P2000.L`.
        version: &'a [u8],
    },
    /// Tauth: begins an authentication.
    Auth { afid: Fid, user: User<'a>, tree: &'a [u8] },
    /// Tattach: makes `fid` the root of a tree for a user.
    Attach {
        fid: Fid,
        /// The authentication, or [`Fid::NONE`].
        afid: Fid,
        user: User<'a>,
        /// The path of the tree; empty for the default.
        tree: &'a [u8],
    },
    /// Tflush: cancels a request of the client.
    Flush {
        /// That request.
        old: Tag,
    },
    /// Twalk: makes `new_fid` the file at the end of the steps from `fid`.
    Walk { fid: Fid, new_fid: Fid, steps: Steps<'a> },
    /// Tread: reads from an open file, or the value of an extended attribute.
    Read { fid: Fid, offset: u64, bytes_max: u32 },
    /// Twrite: writes to an open file, or to the value of an extended attribute.
    Write { fid: Fid, offset: u64, data: &'a [u8] },
    /// Tclunk: releases a fid.
    Clunk { fid: Fid },
    /// Tremove: removes the file and releases the fid, even if the removal fails.
    Remove { fid: Fid },
    /// Tstatfs: returns the statistics of the file system.
    Statfs { fid: Fid },
    /// Tlopen: opens.
    Open {
        fid: Fid,
        /// Never `O_CREAT` or `O_EXCL`.
        flags: OFlags,
    },
    /// Tlcreate: creates a file in the directory `fid` and opens it; `fid` becomes that file.
    Create { fid: Fid, name: Name<'a>, flags: OFlags, mode: u32, gid: u32 },
    /// Tsymlink: creates a symbolic link.
    Symlink { dir: Fid, name: Name<'a>, target: &'a [u8], gid: u32 },
    /// Tmknod: creates a node: neither a directory nor a symbolic link.
    Mknod {
        dir: Fid,
        name: Name<'a>,
        /// File type and permission bits.
        mode: u32,
        /// As in [`ferry_vfs::Attr::rdev`].
        rdev: u32,
        gid: u32,
    },
    /// Trename: renames the file of a fid.
    Rename { fid: Fid, dir: Fid, name: Name<'a> },
    /// Treadlink: reads a symbolic link.
    Readlink { fid: Fid },
    /// Tgetattr: asks for attributes.
    Getattr {
        fid: Fid,
        /// The requested attributes: [`super::valid`].
        mask: u64,
    },
    /// Tsetattr: changes attributes. With `ctime` only the change time is set.
    Setattr { fid: Fid, set: SetAttr, ctime: bool },
    /// Txattrwalk: makes `new_fid` readable as the value of an extended attribute, or as the list of names if the name is empty.
    Xattrwalk { fid: Fid, new_fid: Fid, name: &'a [u8] },
    /// Txattrcreate: makes `fid` writable as the new value of an extended attribute, which is set when the fid is released.
    Xattrcreate {
        fid: Fid,
        name: &'a [u8],
        /// Length of the new value in bytes; 0 with `XATTR_REPLACE` removes the attribute, as Linux's client does.
        bytes: u64,
        flags: XattrFlags,
    },
    /// Treaddir: lists an open directory, starting at an offset.
    Readdir { fid: Fid, offset: u64, bytes_max: u32 },
    /// Tfsync: makes a file durable.
    Fsync { fid: Fid, data_only: bool },
    /// Tlock: acquires, converts or releases a lock.
    Lock {
        fid: Fid,
        lock: LockRequest<'a>,
        /// Wait for it.
        wait: bool,
        /// The client held it before the server restarted.
        reclaim: bool,
    },
    /// Tgetlock: returns a conflicting lock. Linux sends the type [`LockKind::Unlock`] for each test.
    Getlock { fid: Fid, lock: LockRequest<'a> },
    /// Tlink: creates a hard link to `fid` in `dir`.
    Link { dir: Fid, fid: Fid, name: Name<'a> },
    /// Tmkdir: creates a directory.
    Mkdir { dir: Fid, name: Name<'a>, mode: u32, gid: u32 },
    /// Trenameat: renames.
    Renameat { dir: Fid, name: Name<'a>, new_dir: Fid, new_name: Name<'a> },
    /// Tunlinkat: removes a name, of a directory or of another file.
    Unlinkat { dir: Fid, name: Name<'a>, is_dir: bool },
    /// Tevents: waits for changes that others make to files for which this client has fids. Only in [`super::VERSION_OF_FERRY`]; see
    /// docs/design/events.md.
    Events {
        /// The root, as a user who may see everything.
        fid: Fid,
        /// The number of the last event that the client has received, or 0. Later ones are repeated.
        acknowledged: u64,
        /// How long the reply may take, if nothing happens.
        wait_ms: u32,
    },
}
