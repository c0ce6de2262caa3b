//! The header of requests, and errors of decoding.

use ferry_vfs::{Errno, Ino};
use zerocopy::FromBytes;

use super::abi::{InHeader, Opcode, WriteIn};
use super::{Extensions, Operation};

/// The bytes of a request's header (FUSE protocol 7.45, `fuse_in_header`).
pub const IN_HEADER_BYTES: usize = size_of::<InHeader>();

/// The bytes of a WRITE that [`super::decode`] needs; the payload behind them can stay where it is.
pub const WRITE_HEAD_BYTES: usize = size_of::<InHeader>() + size_of::<WriteIn>();

/// The most bytes of a request other than WRITE. The longest that Linux sends is SETXATTR with a value of 64 KiB
/// (`XATTR_SIZE_MAX`) and a name of 255 bytes; the page on top is for header, arguments and name. Input of an ioctl
/// has at most 16 KiB (the size has 14 bits), the target of a symbolic link 4 KiB, and lists of forgotten inodes
/// or unmapped ranges are cut into messages of about a page.
pub const REQUEST_HEAD_BYTES_MAX: usize = 65536 + 4096;

/// A request (FUSE protocol 7.45, `fuse_in_header` and what follows it), checked as far as that can be done without
/// knowing the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Pairs request and reply.
    pub unique: u64,
    /// The inode; for operations on names, the directory. It is the client's claim, like everything here.
    pub ino: Ino,
    /// User of the caller.
    pub uid: u32,
    /// Group of the caller.
    pub gid: u32,
    /// Process of the caller; 0 when the client's kernel asks for itself.
    pub pid: u32,
    /// What came behind the arguments.
    pub extensions: Extensions<'a>,
    /// What to do.
    pub operation: Operation<'a>,
}

/// What a request's header says, before the request is copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peek {
    /// Length of the request in bytes, as the client claims.
    pub len: u32,
    /// What to do; see [`Opcode`].
    pub opcode: u32,
    /// Pairs request and reply.
    pub unique: u64,
    /// The inode that the client names; for operations on names, the directory.
    pub ino: Ino,
    /// The thread that makes the request, as the server sees it; 0 if it cannot.
    pub pid: u32,
}

/// Looks at a header.
pub fn peek(header: &[u8; IN_HEADER_BYTES]) -> Peek {
    let InHeader { len, opcode, unique, nodeid, pid, .. } = zerocopy::transmute!(*header);
    Peek { len, opcode, unique, ino: Ino(nodeid), pid }
}

impl Peek {
    /// How many bytes of a message of `message_bytes` are to be copied for [`super::decode`].
    pub fn head_bytes(&self, message_bytes: usize) -> usize {
        let most = if self.opcode == Opcode::Write.as_raw() { WRITE_HEAD_BYTES } else { REQUEST_HEAD_BYTES_MAX };
        message_bytes.min(most)
    }

    /// Whether the request gets a reply.
    pub fn wants_reply(&self) -> bool {
        Opcode::wants_reply(self.opcode)
    }
}

/// A request that cannot be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed FUSE request (opcode {opcode}): {reason}")]
pub struct DecodeError {
    /// Pairs request and reply; `None` if there is not even a header, and so nothing to reply to.
    pub unique: Option<u64>,
    /// The opcode, 0 if there is no header.
    pub opcode: u32,
    /// The error number to answer.
    pub errno: Errno,
    /// What was wrong.
    pub reason: &'static str,
}

impl DecodeError {
    /// The request to answer, if it wants an answer at all.
    pub fn reply_to(&self) -> Option<u64> {
        self.unique.filter(|_| Opcode::wants_reply(self.opcode))
    }
}

pub(super) fn header(head: &[u8]) -> Option<(InHeader, &[u8])> {
    InHeader::read_from_prefix(head).ok()
}
