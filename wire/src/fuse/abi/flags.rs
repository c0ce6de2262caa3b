//! Constants of the protocol: opcodes and flags.

/// The major version of the protocol (`FUSE_KERNEL_VERSION`).
pub const MAJOR: u32 = 7;
/// The newest minor version that this codec supports (`FUSE_KERNEL_MINOR_VERSION`; Linux 6.18 to 7.2).
pub const MINOR_MAX: u32 = 45;
/// The oldest minor version that [`super::super::negotiate`] accepts (Linux 4.18). Older versions have shorter
/// structures. Linux 5.4, the first with virtio-fs, speaks 7.31.
pub const MINOR_MIN: u32 = 27;

macro_rules! opcodes {
    ($($(#[$doc:meta])* $name:ident = $value:literal,)*) => {
        /// The operation of a request (FUSE protocol 7.45, `fuse_opcode`).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        #[non_exhaustive]
        pub enum Opcode { $($(#[$doc])* $name = $value,)* }

        impl Opcode {
            /// All opcodes, in ascending order.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Returns the opcode with this number.
            pub const fn from_raw(raw: u32) -> Option<Self> {
                match raw {
                    $($value => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Returns the number on the wire.
            pub const fn as_raw(self) -> u32 {
                self as u32
            }
        }
    };
}

opcodes! {
    /// Find a name in a directory.
    Lookup = 1,
    /// Release references of an inode; no reply.
    Forget = 2,
    /// Read attributes.
    Getattr = 3,
    /// Change attributes.
    Setattr = 4,
    /// Read a symbolic link.
    Readlink = 5,
    /// Make a symbolic link.
    Symlink = 6,
    /// Create a file, device node, FIFO or socket.
    Mknod = 8,
    /// Make a directory.
    Mkdir = 9,
    /// Remove a file's name.
    Unlink = 10,
    /// Remove a directory.
    Rmdir = 11,
    /// Rename without flags.
    Rename = 12,
    /// Create a hard link.
    Link = 13,
    /// Open a file.
    Open = 14,
    /// Read data.
    Read = 15,
    /// Write data.
    Write = 16,
    /// Statistics of the file system.
    Statfs = 17,
    /// End a file handle.
    Release = 18,
    /// Make a file durable.
    Fsync = 20,
    /// Set an extended attribute.
    Setxattr = 21,
    /// Read an extended attribute.
    Getxattr = 22,
    /// List extended attributes.
    Listxattr = 23,
    /// Remove an extended attribute.
    Removexattr = 24,
    /// A descriptor was closed.
    Flush = 25,
    /// Negotiate the session.
    Init = 26,
    /// Open a directory.
    Opendir = 27,
    /// List a directory.
    Readdir = 28,
    /// End a directory handle.
    Releasedir = 29,
    /// Make a directory durable.
    Fsyncdir = 30,
    /// Test a lock.
    Getlk = 31,
    /// Set a lock, or fail if it conflicts.
    Setlk = 32,
    /// Set a lock, waiting for conflicting ones.
    Setlkw = 33,
    /// Check permissions.
    Access = 34,
    /// Create and open a file.
    Create = 35,
    /// Interrupt another request; no reply.
    Interrupt = 36,
    /// Map a block of a file to a block of the device.
    Bmap = 37,
    /// End the session.
    Destroy = 38,
    /// Device control.
    Ioctl = 39,
    /// Poll for events.
    Poll = 40,
    /// Data requested by `NOTIFY_RETRIEVE`; no reply. A mount wakes its own threads with it.
    NotifyReply = 41,
    /// Release references of many inodes; no reply.
    BatchForget = 42,
    /// Allocate or free ranges of a file.
    Fallocate = 43,
    /// List a directory with attributes.
    Readdirplus = 44,
    /// Rename with flags.
    Rename2 = 45,
    /// Find data or holes.
    Lseek = 46,
    /// Copy within the file system; the count in the reply has 32 bits.
    CopyFileRange = 47,
    /// Map a range of a file into the DAX window.
    Setupmapping = 48,
    /// Unmap ranges of the DAX window.
    Removemapping = 49,
    /// Make the whole file system durable.
    Syncfs = 50,
    /// Create and open a file without a name.
    Tmpfile = 51,
    /// Read attributes as `statx` does.
    Statx = 52,
    /// Copy within the file system; the count in the reply has 64 bits.
    CopyFileRange64 = 53,
}

impl Opcode {
    /// Returns whether a request with this raw opcode gets a reply.
    pub const fn wants_reply(raw: u32) -> bool {
        !matches!(Self::from_raw(raw), Some(Self::Forget | Self::BatchForget | Self::Interrupt | Self::NotifyReply))
    }
}

bitflags::bitflags! {
    /// Features negotiated by INIT (FUSE protocol 7.45, "INIT request/reply flags"). The low 32 bits are `flags` of
    /// `fuse_init_in` and `fuse_init_out`, the high 32 bits are `flags2`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct InitFlags: u64 {
        /// Reads may be sent concurrently and out of order.
        const ASYNC_READ = 1 << 0;
        /// The server implements POSIX locks.
        const POSIX_LOCKS = 1 << 1;
        /// Not used by any kernel.
        const FILE_OPS = 1 << 2;
        /// OPEN with `O_TRUNC` truncates.
        const ATOMIC_O_TRUNC = 1 << 3;
        /// LOOKUP accepts `.` and `..`.
        const EXPORT_SUPPORT = 1 << 4;
        /// WRITE may carry more than 4 KiB.
        const BIG_WRITES = 1 << 5;
        /// The server applies the umask.
        const DONT_MASK = 1 << 6;
        /// The device can splice writes.
        const SPLICE_WRITE = 1 << 7;
        /// The device can move spliced pages.
        const SPLICE_MOVE = 1 << 8;
        /// The device can splice reads.
        const SPLICE_READ = 1 << 9;
        /// The server implements flock locks.
        const FLOCK_LOCKS = 1 << 10;
        /// IOCTL works on directories.
        const HAS_IOCTL_DIR = 1 << 11;
        /// The client drops cached pages when size or mtime changed.
        const AUTO_INVAL_DATA = 1 << 12;
        /// READDIRPLUS instead of READDIR.
        const DO_READDIRPLUS = 1 << 13;
        /// The client uses READDIRPLUS only where it expects lookups.
        const READDIRPLUS_AUTO = 1 << 14;
        /// Direct I/O may be sent concurrently.
        const ASYNC_DIO = 1 << 15;
        /// The client caches written data, size and times, and writes them back later.
        const WRITEBACK_CACHE = 1 << 16;
        /// If OPEN fails with ENOSYS, the client sends no more OPENs.
        const NO_OPEN_SUPPORT = 1 << 17;
        /// Lookups and listings of one directory may be concurrent.
        const PARALLEL_DIROPS = 1 << 18;
        /// The server clears suid, sgid and capabilities on every write, chown and truncate.
        const HANDLE_KILLPRIV = 1 << 19;
        /// The client checks POSIX ACLs, which the server stores.
        const POSIX_ACL = 1 << 20;
        /// Reading the device after an abort gives ECONNABORTED.
        const ABORT_ERROR = 1 << 21;
        /// `fuse_init_out.max_pages` is valid.
        const MAX_PAGES = 1 << 22;
        /// READLINK replies are cached.
        const CACHE_SYMLINKS = 1 << 23;
        /// If OPENDIR fails with ENOSYS, the client sends no more OPENDIRs.
        const NO_OPENDIR_SUPPORT = 1 << 24;
        /// The client drops cached pages only on notification.
        const EXPLICIT_INVAL_DATA = 1 << 25;
        /// `fuse_init_out.map_alignment` is valid.
        const MAP_ALIGNMENT = 1 << 26;
        /// Directories may be marked as separate mounts.
        const SUBMOUNTS = 1 << 27;
        /// The server clears suid, sgid and capabilities where a request says so.
        const HANDLE_KILLPRIV_V2 = 1 << 28;
        /// SETXATTR has the long form of `fuse_setxattr_in`.
        const SETXATTR_EXT = 1 << 29;
        /// The INIT structures have `flags2`.
        const INIT_EXT = 1 << 30;
        /// Requests that create inodes carry security contexts.
        const SECURITY_CTX = 1 << 32;
        /// DAX is enabled per inode.
        const HAS_INODE_DAX = 1 << 33;
        /// Requests that create inodes carry the supplementary group of the parent directory.
        const CREATE_SUPP_GROUP = 1 << 34;
        /// The server can expire a dentry without dropping it.
        const HAS_EXPIRE_ONLY = 1 << 35;
        /// Files in direct I/O mode may be mapped with MAP_SHARED.
        const DIRECT_IO_ALLOW_MMAP = 1 << 36;
        /// Open files may use a backing file (passthrough); `fuse_init_out.max_stack_depth` is valid.
        const PASSTHROUGH = 1 << 37;
        /// The client must not export file handles to NFS.
        const NO_EXPORT_SUPPORT = 1 << 38;
        /// The client can send requests again.
        const HAS_RESEND = 1 << 39;
        /// Mounts may be idmapped.
        const ALLOW_IDMAP = 1 << 40;
        /// Requests may go through io_uring.
        const OVER_IO_URING = 1 << 41;
        /// `fuse_init_out.request_timeout` is valid.
        const REQUEST_TIMEOUT = 1 << 42;
    }
}

impl InitFlags {
    /// All features.
    pub const ALL: Self = Self::all();
}

bitflags::bitflags! {
    /// How the client may treat an open file (FUSE protocol 7.45, `fuse_open_out.open_flags`).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct OpenFlags: u32 {
        /// The client bypasses the page cache for this file.
        const DIRECT_IO = 1 << 0;
        /// Keep what is cached.
        const KEEP_CACHE = 1 << 1;
        /// The file cannot seek.
        const NONSEEKABLE = 1 << 2;
        /// The client may cache the listing.
        const CACHE_DIR = 1 << 3;
        /// The file has no position.
        const STREAM = 1 << 4;
        /// No FLUSH at close.
        const NOFLUSH = 1 << 5;
        /// Direct writes may be concurrent.
        const PARALLEL_DIRECT_WRITES = 1 << 6;
        /// The client reads and writes the backing file.
        const PASSTHROUGH = 1 << 7;
    }
}

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $kind:ty = $value:expr;)*) => { $($(#[$doc])* pub const $name: $kind = $value;)* };
}

constants! {
    /// `fuse_setattr_in.valid`: mode.
    FATTR_MODE: u32 = 1 << 0;
    /// `fuse_setattr_in.valid`: uid.
    FATTR_UID: u32 = 1 << 1;
    /// `fuse_setattr_in.valid`: gid.
    FATTR_GID: u32 = 1 << 2;
    /// `fuse_setattr_in.valid`: size.
    FATTR_SIZE: u32 = 1 << 3;
    /// `fuse_setattr_in.valid`: atime.
    FATTR_ATIME: u32 = 1 << 4;
    /// `fuse_setattr_in.valid`: mtime.
    FATTR_MTIME: u32 = 1 << 5;
    /// `fuse_setattr_in.valid`: fh.
    FATTR_FH: u32 = 1 << 6;
    /// `fuse_setattr_in.valid`: atime is the time of the call.
    FATTR_ATIME_NOW: u32 = 1 << 7;
    /// `fuse_setattr_in.valid`: mtime is the time of the call.
    FATTR_MTIME_NOW: u32 = 1 << 8;
    /// `fuse_setattr_in.valid`: lock_owner.
    FATTR_LOCKOWNER: u32 = 1 << 9;
    /// `fuse_setattr_in.valid`: ctime.
    FATTR_CTIME: u32 = 1 << 10;
    /// `fuse_setattr_in.valid`: clear suid and sgid.
    FATTR_KILL_SUIDGID: u32 = 1 << 11;

    /// `fuse_getattr_in.getattr_flags`: fh is valid.
    GETATTR_FH: u32 = 1 << 0;
    /// `fuse_open_in.open_flags`, `fuse_create_in.open_flags`: clear suid and sgid of an executable.
    OPEN_KILL_SUIDGID: u32 = 1 << 0;
    /// `fuse_release_in.release_flags`: flush first.
    RELEASE_FLUSH: u32 = 1 << 0;
    /// `fuse_release_in.release_flags`: release the flock lock of `lock_owner`.
    RELEASE_FLOCK_UNLOCK: u32 = 1 << 1;
    /// `fuse_read_in.read_flags`: lock_owner is valid.
    READ_LOCKOWNER: u32 = 1 << 1;
    /// `fuse_write_in.write_flags`: from the page cache; the handle may be any one of the inode.
    WRITE_CACHE: u32 = 1 << 0;
    /// `fuse_write_in.write_flags`: lock_owner is valid.
    WRITE_LOCKOWNER: u32 = 1 << 1;
    /// `fuse_write_in.write_flags`: clear suid and sgid.
    WRITE_KILL_SUIDGID: u32 = 1 << 2;
    /// `fuse_fsync_in.fsync_flags`: data only.
    FSYNC_FDATASYNC: u32 = 1 << 0;
    /// `fuse_setxattr_in.setxattr_flags`: clear sgid.
    SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;
    /// `fuse_lk_in.lk_flags`: a flock lock.
    LK_FLOCK: u32 = 1 << 0;
    /// `fuse_file_lock.kind`: `F_RDLCK`.
    LOCK_READ: u32 = 0;
    /// `fuse_file_lock.kind`: `F_WRLCK`.
    LOCK_WRITE: u32 = 1;
    /// `fuse_file_lock.kind`: `F_UNLCK`.
    LOCK_NONE: u32 = 2;

    /// `fuse_ioctl_in.flags`: a 32-bit caller of a 64-bit kernel.
    IOCTL_COMPAT: u32 = 1 << 0;
    /// `fuse_ioctl_in.flags`: a 32-bit ioctl.
    IOCTL_32BIT: u32 = 1 << 3;
    /// `fuse_ioctl_in.flags`: on a directory.
    IOCTL_DIR: u32 = 1 << 4;
    /// `fuse_ioctl_in.flags`: an x32 caller.
    IOCTL_COMPAT_X32: u32 = 1 << 5;

    /// `fuse_attr.flags`: the inode is the root of a mount.
    ATTR_SUBMOUNT: u32 = 1 << 0;
    /// `fuse_attr.flags`: use DAX.
    ATTR_DAX: u32 = 1 << 1;

    /// `fuse_setupmapping_in.flags`: map for writing.
    SETUPMAPPING_WRITE: u64 = 1 << 0;
    /// `fuse_setupmapping_in.flags`: map for reading.
    SETUPMAPPING_READ: u64 = 1 << 1;

    /// `fuse_ext_header.kind`: values up to this one are a count of security contexts.
    EXT_SECURITY_CONTEXTS_MAX: u32 = 31;
    /// `fuse_ext_header.kind`: supplementary groups.
    EXT_GROUPS: u32 = 32;

    /// `fuse_in_header.uid`, `gid`: the id is unknown because the mount is idmapped.
    INVALID_ID: u32 = u32::MAX;

    /// `fuse_notify_inval_entry_out.flags`: expire instead of drop.
    EXPIRE_ONLY: u32 = 1 << 0;
    /// `fuse_out_header.error` of a notification: drop attributes and data of an inode.
    NOTIFY_INVAL_INODE: i32 = 2;
    /// `fuse_out_header.error` of a notification: drop a name.
    NOTIFY_INVAL_ENTRY: i32 = 3;
    /// `fuse_out_header.error` of a notification: take data from the cache.
    NOTIFY_RETRIEVE: i32 = 5;
    /// `fuse_out_header.error` of a notification: a name was removed.
    NOTIFY_DELETE: i32 = 6;
    /// `fuse_out_header.error` of a notification: send all requests again that have no reply yet.
    NOTIFY_RESEND: i32 = 7;
    /// `fuse_out_header.error` of a notification: revalidate all dentries.
    NOTIFY_INC_EPOCH: i32 = 8;
    /// `fuse_out_header.error` of a notification: drop unused inodes.
    NOTIFY_PRUNE: i32 = 9;

    /// `fuse_uring_cmd`: register an entry and fetch.
    URING_REGISTER: u32 = 1;
    /// `fuse_uring_cmd`: reply and fetch.
    URING_COMMIT_AND_FETCH: u32 = 2;
}
