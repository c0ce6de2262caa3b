//! The operations of FUSE requests.

use ferry_vfs::{
    CopyRange, CreateArgs, DirRange, FallocateFlags, Handle, Ino, IoRange, Lock, LockKind, LockOwner, Name, OFlags,
    RenameFlags, Seek, SessionId, SetAttr, XattrFlags,
};

use super::abi::{ForgetOne, Opcode, RemovemappingOne};
use super::{InitRequest, Records};

/// The operation of a request (`fuse_*_in` of linux/fuse.h): one variant per opcode, except where two opcodes differ only in a field. Inode numbers
/// inside (as in [`IoRange`]) that refer to the request's inode equal [`super::Request::ino`].
///
/// `O_*` flags are those that the client's kernel sent, with the values of the guest's architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation<'a> {
    /// Find a name in a directory.
    Lookup {
        /// The name.
        name: Name<'a>,
    },
    /// Find an inode by its own number (the name `.`, used by nfsd).
    LookupSelf,
    /// Find the parent of a directory (the name `..`, used by nfsd).
    LookupParent,
    /// Release references of an inode; no reply.
    Forget {
        /// The number of references.
        count: u64,
    },
    /// Release references of many inodes; no reply.
    BatchForget {
        /// Inodes and counts.
        forgets: Records<'a, ForgetOne>,
    },
    /// Read attributes.
    Getattr {
        /// Through this open file.
        handle: Option<Handle>,
    },
    /// Read attributes as `statx` does.
    Statx {
        /// Through this open file.
        handle: Option<Handle>,
        /// `AT_STATX_*`.
        flags: u32,
        /// `STATX_*`: the requested fields.
        mask: u32,
    },
    /// Change attributes.
    Setattr {
        /// Through this open file.
        handle: Option<Handle>,
        /// Lock owner of the caller that truncates.
        owner: Option<u64>,
        /// The attributes to change. Permission bits are without file type; owner and group are never `u32::MAX`.
        set: SetAttr,
    },
    /// Read a symbolic link.
    Readlink,
    /// Create a symbolic link.
    Symlink {
        /// The name.
        name: Name<'a>,
        /// The target: 1 to 4095 bytes without NUL.
        target: &'a [u8],
    },
    /// Create a file, device node, FIFO or socket.
    Mknod {
        /// The name.
        name: Name<'a>,
        /// Type (never directory or symbolic link), permissions and device number.
        new: CreateArgs,
    },
    /// Create a directory.
    Mkdir {
        /// The name.
        name: Name<'a>,
        /// Permissions, with the type of a directory.
        new: CreateArgs,
    },
    /// Remove a file's name.
    Unlink {
        /// The name.
        name: Name<'a>,
    },
    /// Remove a directory.
    Rmdir {
        /// The name.
        name: Name<'a>,
    },
    /// Rename (RENAME, RENAME2).
    Rename {
        /// The name.
        name: Name<'a>,
        /// The new directory.
        new_dir: Ino,
        /// The new name.
        new_name: Name<'a>,
        /// A combination that `renameat2` supports.
        flags: RenameFlags,
    },
    /// Create a hard link in the directory of the request.
    Link {
        /// The inode.
        from: Ino,
        /// The new name.
        name: Name<'a>,
    },
    /// Open a file.
    Open {
        /// Without `O_CREAT`, `O_EXCL`, `O_TMPFILE` and `O_PATH`.
        flags: OFlags,
        /// Clear suid and sgid, with `O_TRUNC`.
        clear_privileges: bool,
    },
    /// Open a directory.
    Opendir {
        /// Without `O_CREAT`, `O_EXCL`, `O_TMPFILE` and `O_PATH`.
        flags: OFlags,
    },
    /// Create and open a file.
    Create {
        /// The name.
        name: Name<'a>,
        /// Permissions, with the type of a regular file.
        new: CreateArgs,
        /// Open flags; they may include `O_EXCL` and `O_TRUNC`.
        flags: OFlags,
        /// Clear suid and sgid, with `O_TRUNC`.
        clear_privileges: bool,
    },
    /// Create and open a file without a name in the directory of the request.
    Tmpfile {
        /// Permissions, with the type of a regular file.
        new: CreateArgs,
        /// Flags.
        flags: OFlags,
    },
    /// Read data. The range ends at `i64::MAX` at most.
    Read(IoRange),
    /// Write data of the length of the range. It follows the first [`super::WRITE_HEAD_BYTES`] of the message. The
    /// range ends at `i64::MAX` at most.
    Write {
        /// The handle, offset and length.
        range: IoRange,
        /// From the client's page cache; the handle may be any one of the inode.
        cached: bool,
    },
    /// Copy within the file system (COPY_FILE_RANGE): the count in the reply has 32 bits.
    CopyFileRange(CopyRange),
    /// Copy within the file system (COPY_FILE_RANGE_64): the count in the reply has 64 bits.
    CopyFileRange64(CopyRange),
    /// Allocate or free ranges of a file.
    Fallocate {
        /// The handle.
        handle: Handle,
        /// First byte.
        offset: u64,
        /// Length in bytes, not 0; the range ends at `i64::MAX` at most.
        len: u64,
        /// The mode; only flags of Linux.
        flags: FallocateFlags,
    },
    /// Find data or holes.
    Lseek {
        /// The handle.
        handle: Handle,
        /// Where to start; a value past `i64::MAX` was negative.
        offset: u64,
        /// Data or a hole.
        seek: Seek,
    },
    /// A descriptor was closed.
    Flush {
        /// The handle.
        handle: Handle,
        /// The lock owner whose POSIX locks end.
        owner: u64,
    },
    /// End a file handle.
    Release(Release),
    /// Make a file durable.
    Fsync {
        /// The handle.
        handle: Handle,
        /// Whether attributes may be synced later.
        data_only: bool,
    },
    /// List a directory (READDIR, and with [`DirRange::plus`] READDIRPLUS).
    Readdir {
        /// The directory, position and form.
        at: DirRange,
        /// The maximum size of the listing in bytes.
        bytes_max: u32,
    },
    /// End a directory handle.
    Releasedir(Release),
    /// Make a directory durable.
    Fsyncdir {
        /// The handle.
        handle: Handle,
        /// Whether attributes may be synced later.
        data_only: bool,
    },
    /// Make the whole file system durable.
    Syncfs,
    /// Statistics of the file system.
    Statfs,
    /// Set an extended attribute.
    Setxattr {
        /// The name: 1 to 255 bytes without NUL.
        name: &'a [u8],
        /// The value: at most 64 KiB.
        value: &'a [u8],
        /// `XATTR_CREATE` or `XATTR_REPLACE`.
        flags: XattrFlags,
        /// Clear sgid.
        clear_sgid: bool,
    },
    /// Read an extended attribute.
    Getxattr {
        /// The name: 1 to 255 bytes without NUL.
        name: &'a [u8],
        /// Size of the buffer for the value in bytes; 0 returns the length only.
        bytes_max: u32,
    },
    /// List extended attributes.
    Listxattr {
        /// Size of the buffer for the list in bytes; 0 returns the length only.
        bytes_max: u32,
    },
    /// Remove an extended attribute.
    Removexattr {
        /// The name: 1 to 255 bytes without NUL.
        name: &'a [u8],
    },
    /// Check permissions.
    Access {
        /// `R_OK`, `W_OK`, `X_OK`.
        mask: u32,
    },
    /// Test a lock, whose type is never [`LockKind::Unlock`].
    GetLock(LockRequest),
    /// Set a lock (SETLK, SETLKW).
    SetLock {
        /// The lock.
        lock: LockRequest,
        /// Whether to wait for it.
        wait: bool,
    },
    /// Map a block of a file to a block of the device.
    Bmap {
        /// Block of the file.
        block: u64,
        /// Size of a block in bytes.
        block_bytes: u32,
    },
    /// Device control.
    Ioctl {
        /// The handle.
        handle: Handle,
        /// `FUSE_IOCTL_*`.
        flags: u32,
        /// The command.
        command: u32,
        /// The argument itself, usually an address in the client.
        argument: u64,
        /// The data at the argument's address.
        input: &'a [u8],
        /// The maximum size of the output in bytes.
        out_bytes_max: u32,
    },
    /// Poll for events.
    Poll {
        /// The handle.
        handle: Handle,
        /// The client's handle for the notification.
        client_handle: u64,
        /// `FUSE_POLL_*`.
        flags: u32,
        /// Events of interest.
        events: u32,
    },
    /// Map a range of a file into the DAX window.
    Setupmapping {
        /// The handle; `None`: any, by inode.
        handle: Option<Handle>,
        /// First byte in the file.
        offset: u64,
        /// Length in bytes, not 0; neither range wraps around.
        len: u64,
        /// First byte in the window.
        window_offset: u64,
        /// For reading.
        read: bool,
        /// For writing.
        write: bool,
    },
    /// Unmap ranges of the DAX window.
    Removemapping {
        /// Offsets and lengths in the window, in bytes.
        ranges: Records<'a, RemovemappingOne>,
    },
    /// Interrupt another request; no reply.
    Interrupt {
        /// That request's number.
        unique: u64,
    },
    /// Begin the session.
    Init(InitRequest),
    /// End the session.
    Destroy,
}

/// Release of a handle (FUSE protocol 7.45, `fuse_release_in`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// The handle.
    pub handle: Handle,
    /// The flags of the open call.
    pub flags: OFlags,
    /// Whether to flush first.
    pub flush: bool,
    /// Whether to release the flock lock of `owner`.
    pub unlock_flock: bool,
    /// The lock owner of the flock lock.
    pub owner: u64,
}

/// A lock to test or set (FUSE protocol 7.45, `fuse_lk_in`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRequest {
    /// The handle.
    pub handle: Handle,
    /// The lock owner within the client.
    pub owner: u64,
    /// The type of the lock.
    pub kind: LockKind,
    /// First byte.
    pub start: u64,
    /// Last byte, inclusive; not before `start`, and `i64::MAX` at most.
    pub end: u64,
    /// The process id of the caller.
    pub pid: u32,
    /// A flock lock.
    pub flock: bool,
}

impl LockRequest {
    /// Returns the lock for this client.
    pub fn lock(&self, session: SessionId) -> Lock {
        let Self { owner, kind, start, end, pid, flock, .. } = *self;
        Lock { kind, owner: LockOwner { session, id: owner }, start, end, pid, flock }
    }
}

impl Operation<'_> {
    /// Returns the opcode of this operation.
    pub fn opcode(&self) -> Opcode {
        match self {
            Self::Lookup { .. } | Self::LookupSelf | Self::LookupParent => Opcode::Lookup,
            Self::Forget { .. } => Opcode::Forget,
            Self::BatchForget { .. } => Opcode::BatchForget,
            Self::Getattr { .. } => Opcode::Getattr,
            Self::Statx { .. } => Opcode::Statx,
            Self::Setattr { .. } => Opcode::Setattr,
            Self::Readlink => Opcode::Readlink,
            Self::Symlink { .. } => Opcode::Symlink,
            Self::Mknod { .. } => Opcode::Mknod,
            Self::Mkdir { .. } => Opcode::Mkdir,
            Self::Unlink { .. } => Opcode::Unlink,
            Self::Rmdir { .. } => Opcode::Rmdir,
            Self::Rename { flags, .. } if flags.is_empty() => Opcode::Rename,
            Self::Rename { .. } => Opcode::Rename2,
            Self::Link { .. } => Opcode::Link,
            Self::Open { .. } => Opcode::Open,
            Self::Opendir { .. } => Opcode::Opendir,
            Self::Create { .. } => Opcode::Create,
            Self::Tmpfile { .. } => Opcode::Tmpfile,
            Self::Read(_) => Opcode::Read,
            Self::Write { .. } => Opcode::Write,
            Self::CopyFileRange(_) => Opcode::CopyFileRange,
            Self::CopyFileRange64(_) => Opcode::CopyFileRange64,
            Self::Fallocate { .. } => Opcode::Fallocate,
            Self::Lseek { .. } => Opcode::Lseek,
            Self::Flush { .. } => Opcode::Flush,
            Self::Release(_) => Opcode::Release,
            Self::Fsync { .. } => Opcode::Fsync,
            Self::Readdir { at, .. } if at.plus => Opcode::Readdirplus,
            Self::Readdir { .. } => Opcode::Readdir,
            Self::Releasedir(_) => Opcode::Releasedir,
            Self::Fsyncdir { .. } => Opcode::Fsyncdir,
            Self::Syncfs => Opcode::Syncfs,
            Self::Statfs => Opcode::Statfs,
            Self::Setxattr { .. } => Opcode::Setxattr,
            Self::Getxattr { .. } => Opcode::Getxattr,
            Self::Listxattr { .. } => Opcode::Listxattr,
            Self::Removexattr { .. } => Opcode::Removexattr,
            Self::Access { .. } => Opcode::Access,
            Self::GetLock(_) => Opcode::Getlk,
            Self::SetLock { wait: false, .. } => Opcode::Setlk,
            Self::SetLock { wait: true, .. } => Opcode::Setlkw,
            Self::Bmap { .. } => Opcode::Bmap,
            Self::Ioctl { .. } => Opcode::Ioctl,
            Self::Poll { .. } => Opcode::Poll,
            Self::Setupmapping { .. } => Opcode::Setupmapping,
            Self::Removemapping { .. } => Opcode::Removemapping,
            Self::Interrupt { .. } => Opcode::Interrupt,
            Self::Init(_) => Opcode::Init,
            Self::Destroy => Opcode::Destroy,
        }
    }

    /// Returns whether this operation gets a reply.
    pub const fn wants_reply(&self) -> bool {
        !matches!(self, Self::Forget { .. } | Self::BatchForget { .. } | Self::Interrupt { .. })
    }
}
