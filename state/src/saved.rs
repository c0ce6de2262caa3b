//! A client's state as plain data, and its encoding for migration.
//!
//! ```text
//! "FERRYFS\0" | version 4 | minor 4 | read-ahead 4 | offered 8 | agreed 8 | record ... | 0
//! record: kind 1 | count 8 | length 4 | bytes
//!   inode (1):  number 8 | identity             (count: references)
//!   open  (2):  inode 8 | handle 8 | flags 4 | directory 1
//!   lock  (3):  inode 8 | handle 8 | owner 8 | process 4 | kind 1 | flock 1 | start 8 | end 8
//! ```
//!
//! All numbers are little-endian. The bytes come from another host; decoding any input ends with an error or with data
//! of about the input's size.

use ferry_vfs::{Handle, Ino, LockKind};

const MAGIC: &[u8; 8] = b"FERRYFS\0";
const VERSION: u32 = 1;
const END: u8 = 0;
pub(crate) const NODE: u8 = 1;
pub(crate) const OPEN: u8 = 2;
pub(crate) const LOCK: u8 = 3;
/// The maximum length of an identity in bytes: a path of Linux's maximum length, and other fields.
const IDENTITY_BYTES_MAX: usize = 4096 + 64;

/// The client's INIT and the outcome of the negotiation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Init {
    /// The client's minor version.
    pub minor: u32,
    /// Its most bytes of read-ahead.
    pub max_readahead_bytes: u32,
    /// The flags that it offered.
    pub offered: u64,
    /// The negotiated flags.
    pub agreed: u64,
}

/// An inode that the client references.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub ino: Ino,
    /// The number of the client's references.
    pub references: u64,
    /// How its source finds it again ([`ferry_vfs::Migrate::identify`]).
    pub identity: Vec<u8>,
}

/// An open file or directory of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpenFile {
    /// The inode.
    pub ino: Ino,
    /// The handle.
    pub handle: Handle,
    /// The flags of the open call.
    pub flags: u32,
    /// It is a directory.
    pub is_dir: bool,
}

/// A lock of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedLock {
    /// The inode.
    pub ino: Ino,
    /// The handle that acquired it.
    pub handle: Handle,
    /// The owner's number.
    pub owner: u64,
    /// The process in the client's numbering.
    pub pid: u32,
    /// Shared or not.
    pub kind: LockKind,
    /// A lock of the whole file by `flock`.
    pub flock: bool,
    /// The first byte.
    pub start: u64,
    /// The last byte.
    pub end: u64,
}

/// The state of a session: all that its client holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SavedSession {
    /// The negotiated features.
    pub init: Init,
    /// The inodes to which the client has references.
    pub nodes: Vec<Node>,
    /// The open files and directories.
    pub opens: Vec<OpenFile>,
    /// The locks.
    pub locks: Vec<SavedLock>,
}

/// Why a state cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Something else.
    #[error("this is not the state of a virtio-fs share of ferry; the other server must be ferry, too")]
    Magic,
    /// The state of another version.
    #[error("the state has version {0}, not {VERSION}; both sides must run the same version of ferry")]
    Version(u32),
    /// It does not end.
    #[error("the state ends after {0} bytes, in the middle of a record")]
    Short(usize),
    /// It cannot be.
    #[error("the state has an invalid record at byte {0}")]
    Record(usize),
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or(DecodeError::Short(self.bytes.len()))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let at = self.at;
        self.take(N)?.try_into().map_err(|_| DecodeError::Record(at))
    }

    fn u8(&mut self) -> Result<u8, DecodeError> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_le_bytes)
    }

    fn bool(&mut self) -> Result<bool, DecodeError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(DecodeError::Record(self.at - 1)),
        }
    }
}

impl Node {
    pub(crate) fn to_bytes(ino: Ino, identity: &[u8]) -> Vec<u8> {
        [&ino.0.to_le_bytes()[..], identity].concat()
    }
}

impl OpenFile {
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(21);
        bytes.extend(self.ino.0.to_le_bytes());
        bytes.extend(self.handle.0.to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        bytes.push(self.is_dir.into());
        bytes
    }
}

impl SavedLock {
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(46);
        for number in [self.ino.0, self.handle.0, self.owner] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.pid.to_le_bytes());
        bytes.push(u8::from(self.kind == LockKind::Write));
        bytes.push(self.flock.into());
        bytes.extend(self.start.to_le_bytes());
        bytes.extend(self.end.to_le_bytes());
        bytes
    }
}

impl SavedSession {
    /// Adds a record.
    pub(crate) fn add(&mut self, kind: u8, count: u64, bytes: &[u8]) -> Result<(), DecodeError> {
        let mut reader = Reader { bytes, at: 0 };
        match kind {
            NODE => {
                let ino = Ino(reader.u64()?);
                let identity = reader.take(bytes.len() - reader.at)?;
                if identity.len() > IDENTITY_BYTES_MAX {
                    return Err(DecodeError::Record(0));
                }
                self.nodes.push(Node { ino, references: count, identity: identity.to_vec() });
            }
            OPEN => self.opens.push(OpenFile {
                ino: Ino(reader.u64()?),
                handle: Handle(reader.u64()?),
                flags: reader.u32()?,
                is_dir: reader.bool()?,
            }),
            LOCK => self.locks.push(SavedLock {
                ino: Ino(reader.u64()?),
                handle: Handle(reader.u64()?),
                owner: reader.u64()?,
                pid: reader.u32()?,
                kind: if reader.bool()? { LockKind::Write } else { LockKind::Read },
                flock: reader.bool()?,
                start: reader.u64()?,
                end: reader.u64()?,
            }),
            _ => return Err(DecodeError::Record(0)),
        }
        if reader.at == bytes.len() { Ok(()) } else { Err(DecodeError::Record(reader.at)) }
    }

    /// Writes all of it.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let Init { minor, max_readahead_bytes, offered, agreed } = self.init;
        out.extend(MAGIC);
        out.extend([VERSION, minor, max_readahead_bytes].into_iter().flat_map(u32::to_le_bytes));
        out.extend([offered, agreed].into_iter().flat_map(u64::to_le_bytes));
        let mut record = |kind: u8, count: u64, bytes: Vec<u8>| {
            out.push(kind);
            out.extend(count.to_le_bytes());
            out.extend(u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
            out.extend(bytes);
        };
        self.nodes.iter().for_each(|node| record(NODE, node.references, Node::to_bytes(node.ino, &node.identity)));
        self.opens.iter().for_each(|open| record(OPEN, 1, open.to_bytes()));
        self.locks.iter().for_each(|lock| record(LOCK, 1, lock.to_bytes()));
        out.push(END);
    }

    /// Reads all of it.
    ///
    /// # Errors
    /// [`DecodeError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader { bytes, at: 0 };
        if reader.take(MAGIC.len()).ok() != Some(MAGIC) {
            return Err(DecodeError::Magic);
        }
        let version = reader.u32()?;
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let (minor, max_readahead_bytes) = (reader.u32()?, reader.u32()?);
        let init = Init { minor, max_readahead_bytes, offered: reader.u64()?, agreed: reader.u64()? };
        let mut saved = Self { init, ..Self::default() };
        loop {
            let at = reader.at;
            let kind = reader.u8()?;
            if kind == END {
                break;
            }
            let (count, length) = (reader.u64()?, reader.u32()?);
            let record = reader.take(usize::try_from(length).unwrap_or(usize::MAX))?;
            saved.add(kind, count, record).map_err(|_| DecodeError::Record(at))?;
        }
        if reader.at == bytes.len() { Ok(saved) } else { Err(DecodeError::Record(reader.at)) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> SavedSession {
        let open = OpenFile { ino: Ino(5), handle: Handle(1 << 40), flags: 2, is_dir: false };
        let lock = SavedLock {
            ino: Ino(5),
            handle: open.handle,
            owner: 9,
            pid: 10,
            kind: LockKind::Write,
            flock: false,
            start: 1,
            end: u64::MAX,
        };
        SavedSession {
            init: Init { minor: 45, max_readahead_bytes: 1 << 20, offered: 7, agreed: 3 },
            nodes: vec![
                Node { ino: Ino(5), references: 2, identity: b"one".to_vec() },
                Node { ino: Ino(6), references: 1, identity: Vec::new() },
            ],
            opens: vec![open, OpenFile { is_dir: true, ino: Ino(1), ..open }],
            locks: vec![lock, SavedLock { flock: true, kind: LockKind::Read, ..lock }],
        }
    }

    #[test]
    fn a_state_round_trips_and_a_truncated_one_is_refused() {
        let (saved, mut bytes) = (sample(), Vec::new());
        saved.encode(&mut bytes);
        assert_eq!(SavedSession::decode(&bytes).as_ref(), Ok(&saved));
        assert!((0..bytes.len()).all(|length| SavedSession::decode(&bytes[..length]).is_err()));
        assert!(SavedSession::decode(&[&bytes[..], &[0]].concat()).is_err());
        let mut newer = bytes.clone();
        newer[8] = 2;
        assert_eq!(SavedSession::decode(&newer), Err(DecodeError::Version(2)));
    }

    proptest! {
        #[test]
        fn changed_bytes_decode_or_are_an_error(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
            let mut bytes = Vec::new();
            sample().encode(&mut bytes);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Ok(saved) = SavedSession::decode(&bytes) {
                let mut again = Vec::new();
                saved.encode(&mut again);
                prop_assert_eq!(SavedSession::decode(&again), Ok(saved));
            }
        }
    }
}
