//! Version negotiation (version(5)).

use super::numbers::MSIZE_MIN;

/// The version for peers other than Ferry.
pub const VERSION: &[u8] = b"9P2000.L";
/// The version between two Ferrys: adds [`super::Request::Events`], and lets a client use a fid before the reply to the
/// Twalk that creates it. Other servers may lose a reply then, as diod does.
pub const VERSION_OF_FERRY: &[u8] = b"9P2000.L.ferry";
/// The reply to every other version: "the server does not understand the client's version string" (version(5)).
pub const VERSION_UNKNOWN: &[u8] = b"unknown";

/// The outcome of Tversion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionReply {
    /// A session begins.
    Session {
        /// The maximum size of a message, in bytes.
        msize: u32,
        /// [`VERSION_OF_FERRY`] if the client asked for that, or [`VERSION`].
        version: &'static [u8],
    },
    /// No session: the reply is [`VERSION_UNKNOWN`] with the client's message size.
    Unknown,
    /// The message size is below [`MSIZE_MIN`]: the reply is `MSGSIZE`, as in other servers.
    TooSmall,
}

/// Negotiates with a client that offers messages of up to `msize` bytes in this version.
///
/// A version may have a suffix after another period, which a server strips if it does not know it (version(5)):
/// `9P2000.L.Google.12` becomes `9P2000.L`. `9P2000` and `9P2000.u` are other protocols with other messages. version(5)
/// allows a server to fall back only to a version that it speaks, so both are unknown.
pub fn agree(msize: u32, version: &[u8], msize_max: u32) -> VersionReply {
    let suffix = version.strip_prefix(VERSION);
    match suffix {
        Some([] | [b'.', ..]) if msize < MSIZE_MIN => VersionReply::TooSmall,
        Some([] | [b'.', ..]) => VersionReply::Session {
            msize: msize.min(msize_max.max(MSIZE_MIN)),
            version: if version == VERSION_OF_FERRY { VERSION_OF_FERRY } else { VERSION },
        },
        _ => VersionReply::Unknown,
    }
}
