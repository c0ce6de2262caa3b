//! Headers, and structures shared by requests and replies.

use std::mem::offset_of;

#[cfg(doc)]
use super::Opcode;
use super::wire;

wire! {
    /// FUSE protocol 7.45, `fuse_attr`.
    Attr (88) {
        /// Number shown to users.
        ino: u64,
        /// Size in bytes.
        size: u64,
        /// Allocated blocks of 512 bytes.
        blocks: u64,
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
        /// Number of names.
        nlink: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
        /// Device number.
        rdev: u32,
        /// Preferred transfer size in bytes.
        blksize: u32,
        /// `ATTR_*`.
        flags: u32,
    }

    /// FUSE protocol 7.45, `fuse_sx_time`.
    SxTime (16) {
        /// Seconds.
        tv_sec: i64,
        /// Nanoseconds.
        tv_nsec: u32,
        /// Zero.
        reserved: i32,
    }

    /// FUSE protocol 7.45, `fuse_statx`.
    Statx (256) {
        /// Which fields are valid (`STATX_*`).
        mask: u32,
        /// Preferred transfer size in bytes.
        blksize: u32,
        /// `STATX_ATTR_*`.
        attributes: u64,
        /// Number of names.
        nlink: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
        /// Type and permission bits.
        mode: u16,
        /// Zero.
        spare0: u16,
        /// Number shown to users.
        ino: u64,
        /// Size in bytes.
        size: u64,
        /// Allocated blocks of 512 bytes.
        blocks: u64,
        /// Which bits of `attributes` are valid.
        attributes_mask: u64,
        /// Last access.
        atime: SxTime,
        /// Birth.
        btime: SxTime,
        /// Last change of the inode.
        ctime: SxTime,
        /// Last change of the data.
        mtime: SxTime,
        /// Device number of a node, major.
        rdev_major: u32,
        /// Device number of a node, minor.
        rdev_minor: u32,
        /// Device of the file system, major.
        dev_major: u32,
        /// Device of the file system, minor.
        dev_minor: u32,
        /// Zero.
        spare2: [u64; 14],
    }

    /// FUSE protocol 7.45, `fuse_kstatfs`.
    Kstatfs (80) {
        /// Total blocks.
        blocks: u64,
        /// Free blocks.
        bfree: u64,
        /// Free blocks for unprivileged users.
        bavail: u64,
        /// Total inodes.
        files: u64,
        /// Free inodes.
        ffree: u64,
        /// Preferred transfer size in bytes.
        bsize: u32,
        /// Longest name in bytes.
        namelen: u32,
        /// Size of a block in bytes.
        frsize: u32,
        /// Zero.
        padding: u32,
        /// Zero.
        spare: [u32; 6],
    }

    /// FUSE protocol 7.45, `fuse_file_lock`.
    FileLock (24) {
        /// First byte.
        start: u64,
        /// Last byte, inclusive.
        end: u64,
        /// `LOCK_*`.
        kind: u32,
        /// Process.
        pid: u32,
    }

    /// FUSE protocol 7.45, `fuse_in_header`.
    InHeader (40) {
        /// Bytes of the whole request.
        len: u32,
        /// See [`Opcode`].
        opcode: u32,
        /// Matches the reply to the request.
        unique: u64,
        /// The inode.
        nodeid: u64,
        /// User of the caller.
        uid: u32,
        /// Group of the caller.
        gid: u32,
        /// Process of the caller.
        pid: u32,
        /// Length of the extensions, in units of 8 bytes.
        total_extlen: u16,
        /// Zero.
        padding: u16,
    }

    /// FUSE protocol 7.45, `fuse_out_header`.
    OutHeader (16) {
        /// Bytes of the whole reply.
        len: u32,
        /// Zero, or a negative error number.
        error: i32,
        /// That of the request.
        unique: u64,
    }

    /// FUSE protocol 7.45, `fuse_forget_one`.
    ForgetOne (16) {
        /// The inode.
        nodeid: u64,
        /// The number of references released.
        nlookup: u64,
    }

    /// FUSE protocol 7.45, `fuse_dirent`.
    Dirent (24) {
        /// Number shown to users.
        ino: u64,
        /// The offset of the next entry.
        off: u64,
        /// Length of the name that follows, in bytes.
        namelen: u32,
        /// `DT_*`.
        kind: u32,
    }

    /// FUSE protocol 7.45, `fuse_removemapping_one`.
    RemovemappingOne (16) {
        /// Offset in the window.
        moffset: u64,
        /// Length in bytes.
        len: u64,
    }

    /// FUSE protocol 7.45, `fuse_secctx`.
    Secctx (8) {
        /// Length of the value that follows the name, in bytes.
        size: u32,
        /// Zero.
        padding: u32,
    }

    /// FUSE protocol 7.45, `fuse_ext_header` and `fuse_secctx_header`.
    ExtHeader (8) {
        /// Length of the extension including this header, in bytes.
        size: u32,
        /// `EXT_GROUPS`, or the count of security contexts.
        kind: u32,
    }

    /// FUSE protocol 7.45, `fuse_backing_map`.
    BackingMap (16) {
        /// The backing file.
        fd: i32,
        /// Zero.
        flags: u32,
        /// Zero.
        padding: u64,
    }

    /// FUSE protocol 7.45, `fuse_uring_ent_in_out`.
    UringEntInOut (32) {
        /// Zero.
        flags: u64,
        /// Copied into the command that sends the reply.
        commit_id: u64,
        /// Bytes of payload.
        payload_sz: u32,
        /// Zero.
        padding: u32,
        /// Zero.
        reserved: u64,
    }

    /// FUSE protocol 7.45, `fuse_uring_req_header`.
    UringReqHeader (288) {
        /// [`InHeader`] or [`OutHeader`].
        in_out: [u8; 128],
        /// The request's structure.
        op_in: [u8; 128],
        /// About the entry.
        ring_ent_in_out: UringEntInOut,
    }

    /// FUSE protocol 7.45, `fuse_uring_cmd_req`.
    UringCmdReq (24) {
        /// Zero.
        flags: u64,
        /// From [`UringEntInOut`].
        commit_id: u64,
        /// The queue.
        qid: u16,
        /// Zero.
        padding: [u8; 6],
    }
}

// The kernel accesses these outside of messages, so no codec test covers their layout.
const _: () = {
    assert!(offset_of!(BackingMap, flags) == 4 && offset_of!(BackingMap, padding) == 8);
    assert!(offset_of!(UringEntInOut, commit_id) == 8 && offset_of!(UringEntInOut, payload_sz) == 16);
    assert!(offset_of!(UringEntInOut, padding) == 20 && offset_of!(UringEntInOut, reserved) == 24);
    assert!(offset_of!(UringReqHeader, op_in) == 128 && offset_of!(UringReqHeader, ring_ent_in_out) == 256);
    assert!(offset_of!(UringCmdReq, commit_id) == 8 && offset_of!(UringCmdReq, qid) == 16);
    assert!(offset_of!(UringCmdReq, padding) == 18);
};
