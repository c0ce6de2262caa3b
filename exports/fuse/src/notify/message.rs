//! Notifications as bytes (FUSE protocol 7.45, `fuse_notify_code`).

use ferry_vfs::{Ino, Name};
use ferry_wire::fuse::abi::{
    self, NotifyDeleteOut, NotifyInvalEntryOut, NotifyInvalInodeOut, NotifyPruneOut, OutHeader,
};
use zerocopy::{Immutable, IntoBytes};

/// The longest notification.
const BYTES_MAX: usize = size_of::<OutHeader>() + size_of::<NotifyDeleteOut>() + Name::BYTES_MAX + 1;

/// A notification.
#[derive(Clone, Copy, Debug)]
pub(super) enum Message<'a> {
    /// The attributes of an inode.
    Attributes(Ino),
    /// Bytes of a file or listings of a directory, and the attributes. The end is exclusive.
    Data(Ino, (u64, u64)),
    /// A name in a directory.
    Entry(Ino, Name<'a>),
    /// A dentry, which is revalidated before its next use. Kernels before 6.2 drop it.
    Expired(Ino, Name<'a>),
    /// A removed name in a directory, and its inode.
    Deleted(Ino, Name<'a>, Ino),
    /// All names.
    Epoch,
    /// Everything about an unused inode (Linux 6.18).
    Prune(Ino),
}

impl Message<'_> {
    /// Calls `with` with the encoded message.
    pub(super) fn with_bytes<T>(&self, with: impl FnOnce(&[u8]) -> T) -> T {
        let mut out = Writer { bytes: [0; BYTES_MAX], len: size_of::<OutHeader>() };
        let code = match *self {
            Self::Attributes(ino) => {
                // A negative offset keeps the data.
                out.put(&NotifyInvalInodeOut { ino: ino.0, off: -1, len: 0 });
                abi::NOTIFY_INVAL_INODE
            }
            Self::Data(ino, (start, end)) => {
                // Nothing is cached at offsets that do not fit; a length of zero means to the end.
                let off = i64::try_from(start).unwrap_or(i64::MAX);
                let len = i64::try_from(end).map_or(0, |end| end.saturating_sub(off));
                out.put(&NotifyInvalInodeOut { ino: ino.0, off, len });
                abi::NOTIFY_INVAL_INODE
            }
            Self::Entry(dir, name) | Self::Expired(dir, name) => {
                let flags = if matches!(self, Self::Expired(..)) { abi::EXPIRE_ONLY } else { 0 };
                out.put(&NotifyInvalEntryOut { parent: dir.0, namelen: bytes_of(name), flags });
                out.put_name(name);
                abi::NOTIFY_INVAL_ENTRY
            }
            Self::Deleted(dir, name, child) => {
                let namelen = bytes_of(name);
                out.put(&NotifyDeleteOut { parent: dir.0, child: child.0, namelen, padding: 0 });
                out.put_name(name);
                abi::NOTIFY_DELETE
            }
            Self::Epoch => abi::NOTIFY_INC_EPOCH,
            Self::Prune(ino) => {
                out.put(&NotifyPruneOut { count: 1, padding: 0, spare: 0 });
                out.put(&ino.0);
                abi::NOTIFY_PRUNE
            }
        };
        let len = out.len;
        let header = OutHeader { len: u32::try_from(len).unwrap_or(0), error: code, unique: 0 };
        out.bytes[..size_of::<OutHeader>()].copy_from_slice(header.as_bytes());
        with(&out.bytes[..len])
    }
}

fn bytes_of(name: Name<'_>) -> u32 {
    u32::try_from(name.as_bytes().len()).unwrap_or(0)
}

struct Writer {
    bytes: [u8; BYTES_MAX],
    len: usize,
}

impl Writer {
    fn put_bytes(&mut self, bytes: &[u8]) {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    fn put(&mut self, part: &(impl IntoBytes + Immutable)) {
        self.put_bytes(part.as_bytes());
    }

    fn put_name(&mut self, name: Name<'_>) {
        self.put_bytes(name.as_bytes());
        // And a NUL, which is there already.
        self.len += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_layout_of_the_kernel() {
        let longest = [b'x'; Name::BYTES_MAX];
        let (short, long) = (Name::new(b"ab").unwrap(), Name::new(&longest).unwrap());
        for (message, bytes, code) in [
            (Message::Attributes(Ino(2)), 16 + 24, 2),
            (Message::Data(Ino(2), (0, 1)), 16 + 24, 2),
            (Message::Entry(Ino(1), short), 16 + 16 + 3, 3),
            (Message::Entry(Ino(1), long), 16 + 16 + 256, 3),
            (Message::Expired(Ino(1), short), 16 + 16 + 3, 3),
            (Message::Deleted(Ino(1), long, Ino(2)), 16 + 24 + 256, 6),
            (Message::Epoch, 16, 8),
            (Message::Prune(Ino(3)), 16 + 16 + 8, 9),
        ] {
            message.with_bytes(|out| {
                assert_eq!(out.len(), bytes, "{message:?}");
                assert_eq!(out[..4], u32::try_from(bytes).unwrap().to_ne_bytes());
                assert_eq!(out[4..8], i32::to_ne_bytes(code));
                assert_eq!(out[8..16], [0; 8], "a notification has no number");
            });
        }
        let flags = |message: Message<'_>| {
            message.with_bytes(|out| u32::from_ne_bytes(out[16 + 12..16 + 16].try_into().unwrap()))
        };
        assert_eq!((flags(Message::Entry(Ino(1), short)), flags(Message::Expired(Ino(1), short))), (0, 1));
        let range = |message: Message<'_>| {
            message.with_bytes(|out| {
                let at = |at: usize| i64::from_ne_bytes(out[at..at + 8].try_into().unwrap());
                (at(24), at(32))
            })
        };
        assert_eq!(range(Message::Attributes(Ino(2))), (-1, 0));
        assert_eq!(range(Message::Data(Ino(2), (10, 30))), (10, 20));
        assert_eq!(range(Message::Data(Ino(2), (10, u64::MAX))), (10, 0), "to the end");
        assert_eq!(range(Message::Data(Ino(2), (u64::MAX, u64::MAX))), (i64::MAX, 0));
    }
}
