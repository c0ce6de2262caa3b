//! Notifications from server to client (FUSE protocol 7.45, `fuse_notify_code`).

use ferry_vfs::{Ino, Name};
use zerocopy::IntoBytes;

use super::abi::{self, OutHeader};

/// What the client must drop from its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notification<'a> {
    /// The attributes of an inode; cached data stays.
    InvalAttr {
        /// The inode.
        ino: Ino,
    },
    /// The attributes of an inode and a range of its cached data.
    InvalData {
        /// The inode.
        ino: Ino,
        /// First byte.
        offset: u64,
        /// Length in bytes; `u64::MAX`, or any length past the maximum file offset, means "to the end".
        len: u64,
    },
    /// A dentry, and the attributes of the directory.
    InvalEntry {
        /// The directory.
        dir: Ino,
        /// The name.
        name: Name<'a>,
        /// Only revalidate the dentry at its next use ([`super::InitFlags::HAS_EXPIRE_ONLY`]). Mounts and open files
        /// below it stay.
        expire_only: bool,
    },
    /// A removed name, if it still refers to this inode. Watchers of the inode (inotify) are notified.
    Delete {
        /// The directory.
        dir: Ino,
        /// The inode.
        ino: Ino,
        /// The name.
        name: Name<'a>,
    },
}

impl Notification<'_> {
    /// Appends the message. The server writes it to the device in one call.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Self::InvalAttr { ino } => {
                // A negative offset invalidates the attributes only.
                let body = abi::NotifyInvalInodeOut { ino: ino.0, off: -1, len: 0 };
                message(out, abi::NOTIFY_INVAL_INODE, body.as_bytes(), None);
            }
            Self::InvalData { ino, offset, len } => {
                // Lengths up to 0 mean "to the end", which also stands for lengths that do not fit.
                let (off, end) = (i64::try_from(offset).unwrap_or(i64::MAX), i64::try_from(offset.saturating_add(len)));
                let len = end.map_or(0, |end| end - off);
                let body = abi::NotifyInvalInodeOut { ino: ino.0, off, len };
                message(out, abi::NOTIFY_INVAL_INODE, body.as_bytes(), None);
            }
            Self::InvalEntry { dir, name, expire_only } => {
                let flags = if expire_only { abi::EXPIRE_ONLY } else { 0 };
                let body = abi::NotifyInvalEntryOut { parent: dir.0, namelen: namelen(name), flags };
                message(out, abi::NOTIFY_INVAL_ENTRY, body.as_bytes(), Some(name));
            }
            Self::Delete { dir, ino, name } => {
                let body = abi::NotifyDeleteOut { parent: dir.0, child: ino.0, namelen: namelen(name), padding: 0 };
                message(out, abi::NOTIFY_DELETE, body.as_bytes(), Some(name));
            }
        }
    }
}

fn namelen(name: Name<'_>) -> u32 {
    u32::try_from(name.as_bytes().len()).expect("a name has at most 255 bytes")
}

/// Appends a header with `unique` 0, which marks a notification, and the code in the error field; then the body and the
/// name with its NUL.
fn message(out: &mut Vec<u8>, code: i32, body: &[u8], name: Option<Name<'_>>) {
    let name_bytes = name.map_or(0, |name| name.as_bytes().len() + 1);
    let len = size_of::<OutHeader>() + body.len() + name_bytes;
    let len = u32::try_from(len).expect("a notification is shorter than a page");
    out.extend_from_slice(OutHeader { len, error: code, unique: 0 }.as_bytes());
    out.extend_from_slice(body);
    if let Some(name) = name {
        out.extend_from_slice(name.as_bytes());
        out.push(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the message as 32-bit words, so that the tables below resemble the structures of the protocol.
    fn words(notification: Notification<'_>) -> Vec<u32> {
        let mut out = b"kept".to_vec();
        notification.encode(&mut out);
        assert_eq!(&out[..4], b"kept", "messages are appended");
        assert_eq!(out.len() % 4, 0, "the names below fill whole words");
        out[4..].chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    #[test]
    fn messages_have_the_layout_of_the_protocol() {
        let name = Name::new(b"abc").unwrap();
        let abc = u32::from_le_bytes(*b"abc\0");
        let (dir, ino) = (Ino(1), Ino(0x2_0000_0007));
        let max = u32::MAX;
        for (notification, expected) in [
            (Notification::InvalAttr { ino }, vec![40, 2, 0, 0, 7, 2, max, max, 0, 0]),
            (Notification::InvalData { ino, offset: 4096, len: 10 }, vec![40, 2, 0, 0, 7, 2, 4096, 0, 10, 0]),
            (Notification::InvalData { ino, offset: 4096, len: u64::MAX }, vec![40, 2, 0, 0, 7, 2, 4096, 0, 0, 0]),
            (Notification::InvalData { ino, offset: 0, len: 1 << 63 }, vec![40, 2, 0, 0, 7, 2, 0, 0, 0, 0]),
            (Notification::InvalData { ino, offset: u64::MAX, len: 1 }, vec![40, 2, 0, 0, 7, 2, max, max >> 1, 0, 0]),
            (Notification::InvalEntry { dir, name, expire_only: false }, vec![36, 3, 0, 0, 1, 0, 3, 0, abc]),
            (Notification::InvalEntry { dir, name, expire_only: true }, vec![36, 3, 0, 0, 1, 0, 3, 1, abc]),
            (Notification::Delete { dir, ino, name }, vec![44, 6, 0, 0, 1, 0, 7, 2, 3, 0, abc]),
        ] {
            assert_eq!(words(notification), expected, "{notification:?}");
        }
    }
}
