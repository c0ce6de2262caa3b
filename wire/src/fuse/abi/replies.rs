//! Structures of replies and notifications.

use super::{Attr, FileLock, Statx, wire};
#[cfg(doc)]
use super::{InitFlags, OpenFlags};

wire! {
    /// FUSE protocol 7.45, `fuse_entry_out`.
    EntryOut (128) {
        /// The inode; 0 for a negative dentry.
        nodeid: u64,
        /// Distinguishes inodes that had the same number.
        generation: u64,
        /// Cache timeout of the name, seconds.
        entry_valid: u64,
        /// Cache timeout of the attributes, seconds.
        attr_valid: u64,
        /// Cache timeout of the name, nanoseconds.
        entry_valid_nsec: u32,
        /// Cache timeout of the attributes, nanoseconds.
        attr_valid_nsec: u32,
        /// The attributes.
        attr: Attr,
    }

    /// FUSE protocol 7.45, `fuse_attr_out`.
    AttrOut (104) {
        /// Cache timeout of the attributes, seconds.
        attr_valid: u64,
        /// The same, nanoseconds.
        attr_valid_nsec: u32,
        /// Zero.
        dummy: u32,
        /// The attributes.
        attr: Attr,
    }

    /// FUSE protocol 7.45, `fuse_statx_out`.
    StatxOut (288) {
        /// Cache timeout of the attributes, seconds.
        attr_valid: u64,
        /// The same, nanoseconds.
        attr_valid_nsec: u32,
        /// Zero.
        flags: u32,
        /// Zero.
        spare: [u64; 2],
        /// The attributes.
        stat: Statx,
    }

    /// FUSE protocol 7.45, `fuse_open_out`.
    OpenOut (16) {
        /// The handle.
        fh: u64,
        /// See [`OpenFlags`].
        open_flags: u32,
        /// The backing file of a passthrough.
        backing_id: i32,
    }

    /// FUSE protocol 7.45, `fuse_write_out`.
    WriteOut (8) {
        /// Bytes written or copied.
        size: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_getxattr_out`.
    GetxattrOut (8) {
        /// Length of the value in bytes.
        size: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_lk_out`.
    LkOut (24) {
        /// The lock.
        lk: FileLock,
    }

    /// FUSE protocol 7.45, `fuse_init_out`.
    InitOut (64) {
        /// Major version.
        major: u32,
        /// Minor version.
        minor: u32,
        /// The maximum read-ahead in bytes.
        max_readahead: u32,
        /// [`InitFlags`], low half.
        flags: u32,
        /// Most background requests.
        max_background: u16,
        /// Number of background requests at which the client is congested.
        congestion_threshold: u16,
        /// Maximum payload of a WRITE, in bytes.
        max_write: u32,
        /// Granularity of times, nanoseconds.
        time_gran: u32,
        /// Maximum size of a request, in pages.
        max_pages: u16,
        /// log2 of the alignment of DAX mappings.
        map_alignment: u16,
        /// [`InitFlags`], high half.
        flags2: u32,
        /// Maximum depth of stacked backing files.
        max_stack_depth: u32,
        /// Request timeout of the client, in seconds.
        request_timeout: u16,
        /// Zero.
        unused: [u16; 11],
    }

    /// FUSE protocol 7.45, `fuse_bmap_out`.
    BmapOut (8) {
        /// Block of the device.
        block: u64,
    }

    /// FUSE protocol 7.45, `fuse_ioctl_out`.
    IoctlOut (16) {
        /// What ioctl returns.
        result: i32,
        /// `IOCTL_*`.
        flags: u32,
        /// Input vectors that follow.
        in_iovs: u32,
        /// Output vectors that follow.
        out_iovs: u32,
    }

    /// FUSE protocol 7.45, `fuse_poll_out`.
    PollOut (8) {
        /// Events that are ready.
        revents: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_lseek_out`.
    LseekOut (8) {
        /// The offset found, in bytes.
        offset: u64,
    }

    /// FUSE protocol 7.45, `fuse_copy_file_range_out`.
    CopyFileRangeOut (8) {
        /// Bytes copied.
        bytes_copied: u64,
    }

    /// FUSE protocol 7.45, `fuse_notify_inval_inode_out`.
    NotifyInvalInodeOut (24) {
        /// The inode.
        ino: u64,
        /// First byte; negative: invalidate the attributes only.
        off: i64,
        /// Length in bytes; 0: to the end of the file.
        len: i64,
    }

    /// FUSE protocol 7.45, `fuse_notify_inval_entry_out`.
    NotifyInvalEntryOut (16) {
        /// The directory.
        parent: u64,
        /// Length of the name that follows without its NUL, in bytes.
        namelen: u32,
        /// `EXPIRE_ONLY`.
        flags: u32,
    }

    /// FUSE protocol 7.45, `fuse_notify_delete_out`.
    NotifyDeleteOut (24) {
        /// The directory.
        parent: u64,
        /// The inode.
        child: u64,
        /// Length of the name that follows without its NUL, in bytes.
        namelen: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_notify_retrieve_out`.
    NotifyRetrieveOut (32) {
        /// Pairs with the reply.
        notify_unique: u64,
        /// The inode.
        nodeid: u64,
        /// First byte.
        offset: u64,
        /// Length in bytes.
        size: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_notify_prune_out`.
    NotifyPruneOut (16) {
        /// Number of inode numbers that follow.
        count: u32,
        /// Zero.
        padding: u32,
        /// Zero.
        spare: u64,
    }
}
