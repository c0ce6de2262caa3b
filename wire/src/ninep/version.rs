//! Version negotiation (version(5)).

use super::numbers::MSIZE_MIN;

/// The version that is spoken here.
pub const VERSION: &[u8] = b"9P2000.L";
/// The answer to every other: "the server does not understand the client's version string" (version(5)).
pub const VERSION_UNKNOWN: &[u8] = b"unknown";

/// The answer to Tversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionReply {
    /// A session begins, with messages of at most so many bytes.
    Session {
        /// The message size of the session.
        msize: u32,
    },
    /// No session: the client is to be told [`VERSION_UNKNOWN`], with its own message size.
    Unknown,
    /// The message size is below [`MSIZE_MIN`]: `MSGSIZE`` as other servers answer.
    TooSmall,
}

/// Answers a client that offers messages of `msize` bytes in this version.
///
/// A version may have a suffix behind a further period, which a server that does not know it strips (version(5));
/// so `9P2000.L.Google.12` becomes `9P2000.L`. `9P2000` and `9P2000.u` are earlier protocols with other messages, and
/// version(5) lets a server go down only to what it speaks: nothing here does, so they are unknown.
pub fn agree(msize: u32, version: &[u8], msize_max: u32) -> VersionReply {
    let suffix = version.strip_prefix(VERSION);
    match suffix {
        Some([] | [b'.', ..]) if msize < MSIZE_MIN => VersionReply::TooSmall,
        Some([] | [b'.', ..]) => VersionReply::Session { msize: msize.min(msize_max.max(MSIZE_MIN)) },
        _ => VersionReply::Unknown,
    }
}
