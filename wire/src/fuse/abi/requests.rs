//! Structures of requests.

use super::{FileLock, wire};
#[cfg(doc)]
use super::{ForgetOne, InitFlags, RemovemappingOne};

wire! {
    /// FUSE protocol 7.45, `fuse_forget_in`.
    ForgetIn (8) {
        /// The number of references released.
        nlookup: u64,
    }

    /// FUSE protocol 7.45, `fuse_batch_forget_in`.
    BatchForgetIn (8) {
        /// How many [`ForgetOne`] follow.
        count: u32,
        /// Zero.
        dummy: u32,
    }

    /// FUSE protocol 7.45, `fuse_getattr_in`.
    GetattrIn (16) {
        /// `GETATTR_*`.
        getattr_flags: u32,
        /// Zero.
        dummy: u32,
        /// Open file.
        fh: u64,
    }

    /// FUSE protocol 7.45, `fuse_statx_in`.
    StatxIn (24) {
        /// `GETATTR_*`.
        getattr_flags: u32,
        /// Zero.
        reserved: u32,
        /// Open file.
        fh: u64,
        /// `AT_STATX_*`.
        sx_flags: u32,
        /// `STATX_*`: the requested fields.
        sx_mask: u32,
    }

    /// FUSE protocol 7.45, `fuse_mknod_in`.
    MknodIn (16) {
        /// Type and permission bits.
        mode: u32,
        /// Device number.
        rdev: u32,
        /// The caller's umask.
        umask: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_mkdir_in`.
    MkdirIn (8) {
        /// Permission bits.
        mode: u32,
        /// The caller's umask.
        umask: u32,
    }

    /// FUSE protocol 7.45, `fuse_rename_in`.
    RenameIn (8) {
        /// The new directory.
        newdir: u64,
    }

    /// FUSE protocol 7.45, `fuse_rename2_in`.
    Rename2In (16) {
        /// The new directory.
        newdir: u64,
        /// `RENAME_*` of renameat2.
        flags: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_link_in`.
    LinkIn (8) {
        /// The inode that is linked.
        oldnodeid: u64,
    }

    /// FUSE protocol 7.45, `fuse_setattr_in`.
    SetattrIn (88) {
        /// `FATTR_*`.
        valid: u32,
        /// Zero.
        padding: u32,
        /// Open file.
        fh: u64,
        /// Size in bytes.
        size: u64,
        /// Lock owner of the caller that truncates.
        lock_owner: u64,
        /// Last access, seconds (signed).
        atime: u64,
        /// Last change of the data, seconds (signed).
        mtime: u64,
        /// Last change of the inode, seconds (signed).
        ctime: u64,
        /// Last access, nanoseconds.
        atimensec: u32,
        /// Last change of the data, nanoseconds.
        mtimensec: u32,
        /// Last change of the inode, nanoseconds.
        ctimensec: u32,
        /// Type and permission bits.
        mode: u32,
        /// Zero.
        unused4: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
        /// Zero.
        unused5: u32,
    }

    /// FUSE protocol 7.45, `fuse_open_in`.
    OpenIn (8) {
        /// `O_*`.
        flags: u32,
        /// `OPEN_*`.
        open_flags: u32,
    }

    /// FUSE protocol 7.45, `fuse_create_in`.
    CreateIn (16) {
        /// `O_*`.
        flags: u32,
        /// Type and permission bits.
        mode: u32,
        /// The caller's umask.
        umask: u32,
        /// `OPEN_*`.
        open_flags: u32,
    }

    /// FUSE protocol 7.45, `fuse_release_in`.
    ReleaseIn (24) {
        /// The handle.
        fh: u64,
        /// `O_*`.
        flags: u32,
        /// `RELEASE_*`.
        release_flags: u32,
        /// Whose flock ends.
        lock_owner: u64,
    }

    /// FUSE protocol 7.45, `fuse_flush_in`.
    FlushIn (24) {
        /// The handle.
        fh: u64,
        /// Zero.
        unused: u32,
        /// Zero.
        padding: u32,
        /// Whose POSIX locks end.
        lock_owner: u64,
    }

    /// FUSE protocol 7.45, `fuse_read_in`.
    ReadIn (40) {
        /// The handle.
        fh: u64,
        /// First byte.
        offset: u64,
        /// Length in bytes.
        size: u32,
        /// `READ_*`.
        read_flags: u32,
        /// Lock owner of the reader.
        lock_owner: u64,
        /// `O_*`.
        flags: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_write_in`.
    WriteIn (40) {
        /// The handle.
        fh: u64,
        /// First byte.
        offset: u64,
        /// Length in bytes.
        size: u32,
        /// `WRITE_*`.
        write_flags: u32,
        /// Lock owner of the writer.
        lock_owner: u64,
        /// `O_*`.
        flags: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_fsync_in`.
    FsyncIn (16) {
        /// The handle.
        fh: u64,
        /// `FSYNC_*`.
        fsync_flags: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_setxattr_in`.
    SetxattrIn (16) {
        /// Length of the value in bytes.
        size: u32,
        /// `XATTR_*`.
        flags: u32,
        /// `SETXATTR_*`.
        setxattr_flags: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_setxattr_in` (without `FUSE_SETXATTR_EXT`).
    SetxattrInShort (8) {
        /// Length of the value in bytes.
        size: u32,
        /// `XATTR_*`.
        flags: u32,
    }

    /// FUSE protocol 7.45, `fuse_getxattr_in`.
    GetxattrIn (8) {
        /// Size of the buffer for the value in bytes; 0 returns the length only.
        size: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_lk_in`.
    LkIn (48) {
        /// The handle.
        fh: u64,
        /// The lock owner.
        owner: u64,
        /// The lock.
        lk: FileLock,
        /// `LK_*`.
        lk_flags: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_access_in`.
    AccessIn (8) {
        /// `R_OK`, `W_OK`, `X_OK`.
        mask: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_init_in`.
    InitIn (64) {
        /// Major version.
        major: u32,
        /// Minor version.
        minor: u32,
        /// The maximum read-ahead in bytes.
        max_readahead: u32,
        /// [`InitFlags`], low half.
        flags: u32,
        /// [`InitFlags`], high half.
        flags2: u32,
        /// Zero.
        unused: [u32; 11],
    }

    /// FUSE protocol 7.45, `fuse_init_in` (without `FUSE_INIT_EXT`).
    InitInShort (16) {
        /// Major version.
        major: u32,
        /// Minor version.
        minor: u32,
        /// The maximum read-ahead in bytes.
        max_readahead: u32,
        /// [`InitFlags`], low half.
        flags: u32,
    }

    /// FUSE protocol 7.45, `fuse_interrupt_in`.
    InterruptIn (8) {
        /// The request to interrupt.
        unique: u64,
    }

    /// FUSE protocol 7.45, `fuse_bmap_in`.
    BmapIn (16) {
        /// Block of the file.
        block: u64,
        /// Size of a block.
        blocksize: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_ioctl_in`.
    IoctlIn (32) {
        /// The handle.
        fh: u64,
        /// `IOCTL_*`.
        flags: u32,
        /// The command.
        cmd: u32,
        /// The argument.
        arg: u64,
        /// Length of the input that follows, in bytes.
        in_size: u32,
        /// Room for output in bytes.
        out_size: u32,
    }

    /// FUSE protocol 7.45, `fuse_poll_in`.
    PollIn (24) {
        /// The handle.
        fh: u64,
        /// The client's handle for the notification.
        kh: u64,
        /// `POLL_*`.
        flags: u32,
        /// Events of interest.
        events: u32,
    }

    /// FUSE protocol 7.45, `fuse_fallocate_in`.
    FallocateIn (32) {
        /// The handle.
        fh: u64,
        /// First byte.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// `FALLOC_FL_*`.
        mode: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_lseek_in`.
    LseekIn (24) {
        /// The handle.
        fh: u64,
        /// Where to start (signed).
        offset: u64,
        /// `SEEK_DATA` or `SEEK_HOLE`.
        whence: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_copy_file_range_in`.
    CopyFileRangeIn (56) {
        /// Handle to copy from.
        fh_in: u64,
        /// Offset to copy from.
        off_in: u64,
        /// Inode to copy to.
        nodeid_out: u64,
        /// Handle to copy to.
        fh_out: u64,
        /// Offset to copy to.
        off_out: u64,
        /// Length in bytes.
        len: u64,
        /// Zero.
        flags: u64,
    }

    /// FUSE protocol 7.45, `fuse_setupmapping_in`.
    SetupmappingIn (40) {
        /// The handle; all ones: by inode.
        fh: u64,
        /// Offset in the file.
        foffset: u64,
        /// Length in bytes.
        len: u64,
        /// `SETUPMAPPING_*`.
        flags: u64,
        /// Offset in the window.
        moffset: u64,
    }

    /// FUSE protocol 7.45, `fuse_removemapping_in`.
    RemovemappingIn (4) {
        /// How many [`RemovemappingOne`] follow.
        count: u32,
    }

    /// FUSE protocol 7.45, `fuse_syncfs_in`.
    SyncfsIn (8) {
        /// Zero.
        padding: u64,
    }
}
