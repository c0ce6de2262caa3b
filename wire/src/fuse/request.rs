//! The header of requests, and decoding errors.

use ferry_vfs::{Errno, Ino};
use zerocopy::FromBytes;

use super::abi::{InHeader, Opcode, WriteIn};
use super::{Extensions, Operation, WRITE_BYTES_MAX};

/// The length of a request's header in bytes (FUSE protocol 7.45, `fuse_in_header`).
pub const IN_HEADER_BYTES: usize = size_of::<InHeader>();

/// The number of bytes of a WRITE that [`super::decode`] needs (`fuse_in_header` and `fuse_write_in`); the payload can stay in place.
pub const WRITE_HEAD_BYTES: usize = size_of::<InHeader>() + size_of::<WriteIn>();

/// The maximum size of a request other than WRITE and BATCH_FORGET, in bytes. The longest one of Linux is SETXATTR,
/// with a value of 64 KiB (`XATTR_SIZE_MAX`) and a name of 255 bytes; the extra page holds header, arguments and name.
/// The input of an ioctl has at most 16 KiB (a size of 14 bits) and the target of a symbolic link 4 KiB. Linux sends
/// unmapped ranges in messages of about a page.
pub const REQUEST_HEAD_BYTES_MAX: usize = 65536 + 4096;

/// The maximum size of a BATCH_FORGET in bytes. Linux fills the buffer of who reads /dev/fuse
/// (`fuse_read_batch_forget`), which has room for a WRITE of [`WRITE_BYTES_MAX`].
pub const BATCH_FORGET_BYTES_MAX: usize = WRITE_HEAD_BYTES + WRITE_BYTES_MAX as usize;

/// A request (FUSE protocol 7.45, `fuse_in_header` and its arguments), checked as far as possible without the file
/// system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Pairs request and reply.
    pub unique: u64,
    /// The inode; for operations on names, the directory. The client may send any number.
    pub ino: Ino,
    /// User of the caller.
    pub uid: u32,
    /// Group of the caller.
    pub gid: u32,
    /// The calling thread, in the pid namespace of the mount (virtio-fs: the guest's); 0 if it is not visible there, or
    /// the kernel itself sends the request.
    pub pid: u32,
    /// The extensions after the arguments.
    pub extensions: Extensions<'a>,
    /// What to do.
    pub operation: Operation<'a>,
}

/// The header of a request (`fuse_in_header`), read before the request is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peek {
    /// Length of the request in bytes, as sent by the client.
    pub len: u32,
    /// The operation; see [`Opcode`].
    pub opcode: u32,
    /// Pairs request and reply.
    pub unique: u64,
    /// The inode that the client sent; for operations on names, the directory.
    pub ino: Ino,
    /// The calling thread; see [`Request::pid`].
    pub pid: u32,
}

/// Looks at a header.
pub fn peek(header: &[u8; IN_HEADER_BYTES]) -> Peek {
    let InHeader { len, opcode, unique, nodeid, pid, .. } = zerocopy::transmute!(*header);
    Peek { len, opcode, unique, ino: Ino(nodeid), pid }
}

impl Peek {
    /// Returns how many bytes of a message of `message_bytes` [`super::decode`] needs.
    pub fn head_bytes(&self, message_bytes: usize) -> usize {
        let bytes_max = match Opcode::from_raw(self.opcode) {
            Some(Opcode::Write) => WRITE_HEAD_BYTES,
            Some(Opcode::BatchForget) => BATCH_FORGET_BYTES_MAX,
            _ => REQUEST_HEAD_BYTES_MAX,
        };
        message_bytes.min(bytes_max)
    }

    /// Returns whether the request gets a reply.
    pub fn wants_reply(&self) -> bool {
        Opcode::wants_reply(self.opcode)
    }
}

/// A request that cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed FUSE request (opcode {opcode}): {reason}")]
pub struct DecodeError {
    /// Matches the reply to the request; `None` if the header is incomplete, so no reply is possible.
    pub unique: Option<u64>,
    /// The opcode; 0 without a header.
    pub opcode: u32,
    /// The error number of the reply.
    pub errno: Errno,
    /// What was wrong.
    pub reason: &'static str,
}

impl DecodeError {
    /// Returns the request to reply to, if it gets a reply.
    pub fn reply_to(&self) -> Option<u64> {
        self.unique.filter(|_| Opcode::wants_reply(self.opcode))
    }
}

pub(super) fn header(head: &[u8]) -> Option<(InHeader, &[u8])> {
    InHeader::read_from_prefix(head).ok()
}
