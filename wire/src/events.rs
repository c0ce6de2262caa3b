//! Events for programs of a guest that watch files: messages between a server and the agent in the guest.
//!
//! They travel in ioctls on the root directory of the mount, so every VMM carries them. [`WAIT`] returns a message of
//! events when there are any. [`ANNOUNCE`] names the event whose system call the agent makes next. [`INTERRUPT`] ends
//! the wait of an agent that is to end, which the guest's kernel cannot. The numbers of the ioctls contain the lengths
//! and so the version: a server of another version returns ENOTTY. 9P clients get the same messages as data of Revents;
//! inodes are paths of qids there.
//!
//! All numbers are little-endian. A message is a header and records, each a multiple of 8 bytes long:
//!
//! ```text
//! header   0 magic "FEV1" | 4 bytes of the message u32 | 8 records u16 | 10 flags u16 (1: events were lost,
//!          2: caches are leased) | 12 zero u32
//! record   0 bytes of the record u16 | 2 kind u8 | 3 flags u8 (1: directory, 2: exchanged) | 4 bytes of the name u16
//!          | 6 bytes of the new name u16 | 8 number u64 | 16 inode or directory u64
//!          | 24 new directory, or the removed inode u64 | 32 name, new name, zeros up to a multiple of 8
//! announcement and its reply
//!          0 number of the event u64 | 8 mode of what was created u32 (reply) | 12 zero u32
//! ```
//!
//! ```
//! use ferry_vfs::{Event, Ino, Name};
//! use ferry_wire::events::*;
//!
//! let event = Event::Created { dir: Ino::ROOT, name: Name::new(b"new")?.to_buf(), is_dir: false, ino: None };
//! let record = Record::of(7, &event).ok_or("no record")?;
//! let mut message = MessageWriter::new(false);
//! assert!(message.push(&record));
//! let bytes = message.finish();
//! let message = Message::decode(&bytes)?;
//! assert!(!message.is_lossy() && message.records().eq([Ok(record)]));
//! assert_eq!(record.event(), Some(event));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use ferry_vfs::{Event, Ino, Name, NameBuf, Place};

/// The longest message: an ioctl's length has 14 bits, and records are multiples of 8 bytes.
pub const MESSAGE_BYTES_MAX: usize = 16_376;
/// The length of an announcement and of its reply, in bytes.
pub const ANNOUNCEMENT_BYTES: usize = 16;
/// Waits for events: `_IOR(0xfe, 1, MESSAGE_BYTES_MAX)`.
pub const WAIT: u32 = command(2, 1, MESSAGE_BYTES_MAX);
/// Announces a replay: `_IOWR(0xfe, 2, ANNOUNCEMENT_BYTES)`.
pub const ANNOUNCE: u32 = command(3, 2, ANNOUNCEMENT_BYTES);
/// Ends the wait of the agent of this mount, with EINTR: `_IO(0xfe, 3)`.
pub const INTERRUPT: u32 = command(0, 3, 0);
/// The filesystem group id (`setfsgid`) of an agent that replays. Requests of root with this group never change the source,
/// announced or not, also after a restart of the server. It is the text "FRP1", which no system assigns.
pub const REPLAY_GID: u32 = u32::from_be_bytes(*b"FRP1");

const MAGIC: [u8; 4] = *b"FEV1";
const HEADER_BYTES: usize = 16;
const RECORD_BYTES: usize = 32;
const LOST: u16 = 1;
const LEASED: u16 = 2;
const IS_DIR: u8 = 1;
const EXCHANGED: u8 = 2;

#[allow(clippy::cast_possible_truncation, reason = "the lengths are constants below 1 << 14")]
const fn command(direction: u32, number: u32, bytes: usize) -> u32 {
    assert!(bytes < 1 << 14, "an ioctl's length has 14 bits");
    direction << 30 | (bytes as u32) << 16 | 0xfe << 8 | number
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A name was created.
    Created,
    /// A name was removed.
    Removed,
    /// A name was moved, or two were exchanged.
    Renamed,
    /// Data was written.
    Modified,
    /// A file was closed that was open for writing.
    Closed,
    /// Attributes were changed.
    Attributes,
    /// No event: data that the client caches is not valid any more. Not sent to agents: events imply it.
    StaleData,
    /// The same of attributes.
    StaleAttributes,
}

impl Kind {
    const ALL: [Self; 8] = [
        Self::Created,
        Self::Removed,
        Self::Renamed,
        Self::Modified,
        Self::Closed,
        Self::Attributes,
        Self::StaleData,
        Self::StaleAttributes,
    ];

    /// Returns whether the record is a cache invalidation, not an event.
    pub fn is_stale(self) -> bool {
        matches!(self, Self::StaleData | Self::StaleAttributes)
    }

    fn to_raw(self) -> u8 {
        match self {
            Self::Created => 1,
            Self::Removed => 2,
            Self::Renamed => 3,
            Self::Modified => 4,
            Self::Closed => 5,
            Self::Attributes => 6,
            Self::StaleData => 7,
            Self::StaleAttributes => 8,
        }
    }

    fn is_of_name(self) -> bool {
        matches!(self, Self::Created | Self::Removed | Self::Renamed)
    }
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// The number of the event; numbers increase.
    pub number: u64,
    /// What happened.
    pub kind: Kind,
    /// The inode is a directory.
    pub is_dir: bool,
    /// Two names were exchanged; only with [`Kind::Renamed`].
    pub exchanged: bool,
    /// The directory of the name, or the inode if there is no name.
    pub ino: Ino,
    /// The name; `None` only where no name is concerned.
    pub name: Option<Name<'a>>,
    /// The new directory and name, exactly with [`Kind::Renamed`].
    pub to: Option<(Ino, Name<'a>)>,
    /// The inode that had the name, if the client knows it; only with [`Kind::Removed`], and not for agents.
    pub removed: Option<Ino>,
}

impl<'a> Record<'a> {
    /// Returns the record of an event; `None` for those that are a flag of the message.
    pub fn of(number: u64, event: &'a Event) -> Option<Self> {
        let (kind, place) = match event {
            Event::Modified(place) => (Kind::Modified, Some(place)),
            Event::Closed(place) => (Kind::Closed, Some(place)),
            Event::Attributes(place) => (Kind::Attributes, Some(place)),
            Event::Created { .. } => (Kind::Created, None),
            Event::Removed { .. } => (Kind::Removed, None),
            Event::Renamed { .. } => (Kind::Renamed, None),
            _ => return None,
        };
        let (ino, name) = match event {
            Event::Created { dir, name, .. } | Event::Removed { dir, name, .. } => (*dir, Some(name)),
            Event::Renamed { from, .. } => (from.0, Some(&from.1)),
            _ => place.map(|place| (place.ino, place.name.as_ref()))?,
        };
        let name = name.map(NameBuf::as_name);
        let base = Self { number, kind, is_dir: false, exchanged: false, ino, name, to: None, removed: None };
        Some(match event {
            Event::Created { is_dir, .. } => Self { is_dir: *is_dir, ..base },
            Event::Removed { is_dir, ino, .. } => {
                Self { is_dir: *is_dir, removed: ino.filter(|ino| *ino != Ino(0)), ..base }
            }
            Event::Renamed { to, is_dir, exchanged, .. } => {
                Self { is_dir: *is_dir, exchanged: *exchanged, to: Some((to.0, to.1.as_name())), ..base }
            }
            _ => base,
        })
    }

    /// Returns the record that says that something of an inode is not valid any more.
    pub fn stale(kind: Kind, ino: Ino) -> Self {
        Self { number: 0, kind, is_dir: false, exchanged: false, ino, name: None, to: None, removed: None }
    }

    /// Returns the event; `None` if it is none ([`Kind::is_stale`]).
    pub fn event(&self) -> Option<Event> {
        let (is_dir, name) = (self.is_dir, self.name.map(|name| name.to_buf()));
        let place = |name| Place { ino: self.ino, name };
        Some(match self.kind {
            Kind::Created => Event::Created { dir: self.ino, name: name?, is_dir, ino: None },
            Kind::Removed => Event::Removed { dir: self.ino, name: name?, is_dir, ino: self.removed },
            Kind::Renamed => {
                let (dir, new) = self.to?;
                Event::Renamed { from: (self.ino, name?), to: (dir, new.to_buf()), is_dir, exchanged: self.exchanged }
            }
            Kind::Modified => Event::Modified(place(name)),
            Kind::Closed => Event::Closed(place(name)),
            Kind::Attributes => Event::Attributes(place(name)),
            Kind::StaleData | Kind::StaleAttributes => return None,
        })
    }

    fn is_valid(&self) -> bool {
        (self.name.is_some() || !self.kind.is_of_name())
            && (self.name.is_none() || !self.kind.is_stale())
            && self.to.is_some() == (self.kind == Kind::Renamed)
            && (!self.exchanged || self.kind == Kind::Renamed)
            && self.removed.is_none_or(|ino| ino != Ino(0) && self.kind == Kind::Removed)
    }

    /// Returns the length in a message.
    pub fn bytes(&self) -> usize {
        let names = self.name.map_or(0, |name| name.as_bytes().len());
        let new = self.to.map_or(0, |(_, name)| name.as_bytes().len());
        (RECORD_BYTES + names + new).next_multiple_of(8)
    }
}

/// Why a message or an announcement was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// It has no header, or of another version.
    #[error("not an event message of this version ({0} bytes)")]
    Header(usize),
    /// Its length is not what the header says.
    #[error("event message: the header says {said} bytes, the buffer has {bytes}")]
    Length {
        /// In the header.
        said: u32,
        /// In fact.
        bytes: usize,
    },
    /// A record is cut off, or its parts contradict each other.
    #[error("event message: the record at byte {0} is malformed")]
    Record(usize),
    /// An announcement has another length.
    #[error("an announcement of {0} bytes; expected {ANNOUNCEMENT_BYTES}")]
    Announcement(usize),
    /// Its reserved bytes are in use.
    #[error("the reserved bytes of an announcement are not zero")]
    Reserved,
}

fn part<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// Writes a message.
#[derive(Debug)]
pub struct MessageWriter {
    bytes: Vec<u8>,
    bytes_max: usize,
    records: u16,
    flags: u16,
}

impl MessageWriter {
    /// Begins a message. `is_lossy`: events before these were lost.
    pub fn new(is_lossy: bool) -> Self {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(MAGIC);
        bytes.extend([0; HEADER_BYTES - MAGIC.len()]);
        Self { bytes, bytes_max: MESSAGE_BYTES_MAX, records: 0, flags: if is_lossy { LOST } else { 0 } }
    }

    /// Limits the message to `bytes_max` bytes, and never more than [`MESSAGE_BYTES_MAX`].
    #[must_use]
    pub fn within(mut self, bytes_max: usize) -> Self {
        self.bytes_max = self.bytes_max.min(bytes_max);
        self
    }

    /// Says that the client keeps what it knows for as long as an agent asks for events.
    #[must_use]
    pub fn leased(mut self) -> Self {
        self.flags |= LEASED;
        self
    }

    /// Adds a record; returns false, and adds nothing, if there is no room or the record contradicts itself.
    pub fn push(&mut self, record: &Record<'_>) -> bool {
        let bytes = record.bytes();
        if !record.is_valid() || self.bytes.len() + bytes > self.bytes_max {
            return false;
        }
        let name = record.name.map_or(&[][..], |name| name.as_bytes());
        let removed = record.removed.map_or(0, |ino| ino.0);
        let (new_dir, new_name) = record.to.map_or((removed, &[][..]), |(dir, name)| (dir.0, name.as_bytes()));
        // Names are at most 255 bytes long.
        let short = |bytes: usize| u16::try_from(bytes).unwrap_or(u16::MAX).to_le_bytes();
        let flags = if record.is_dir { IS_DIR } else { 0 } | if record.exchanged { EXCHANGED } else { 0 };
        let end = self.bytes.len() + bytes;
        self.bytes.extend(short(bytes));
        self.bytes.extend([record.kind.to_raw(), flags]);
        self.bytes.extend(short(name.len()));
        self.bytes.extend(short(new_name.len()));
        for word in [record.number, record.ino.0, new_dir] {
            self.bytes.extend(word.to_le_bytes());
        }
        self.bytes.extend(name);
        self.bytes.extend(new_name);
        self.bytes.resize(end, 0);
        self.records += 1;
        true
    }

    /// Returns the message.
    pub fn finish(mut self) -> Vec<u8> {
        let bytes = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        self.bytes[4..8].copy_from_slice(&bytes.to_le_bytes());
        self.bytes[8..10].copy_from_slice(&self.records.to_le_bytes());
        self.bytes[10..12].copy_from_slice(&self.flags.to_le_bytes());
        self.bytes
    }
}

/// A message that was received.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    bytes: &'a [u8],
    records: u16,
    flags: u16,
}

impl<'a> Message<'a> {
    /// Decodes a message at the beginning of a buffer, which may be longer.
    ///
    /// # Errors
    /// [`EventError`] says what is wrong with the header. Records are checked when they are read.
    pub fn decode(buffer: &'a [u8]) -> Result<Self, EventError> {
        let header = || {
            let (magic, said) = (part::<4>(buffer, 0)?, part(buffer, 4)?);
            let (records, flags, zero) = (part(buffer, 8)?, part(buffer, 10)?, part::<4>(buffer, 12)?);
            let (records, flags) = (u16::from_le_bytes(records), u16::from_le_bytes(flags));
            let is_known = magic == MAGIC && flags & !(LOST | LEASED) == 0 && zero == [0; 4];
            is_known.then_some((u32::from_le_bytes(said), records, flags))
        };
        let (said, records, flags) = header().ok_or(EventError::Header(buffer.len()))?;
        let wrong = EventError::Length { said, bytes: buffer.len() };
        let bytes = usize::try_from(said).ok().filter(|said| (HEADER_BYTES..=MESSAGE_BYTES_MAX).contains(said));
        let bytes = bytes.and_then(|bytes| buffer.get(..bytes)).ok_or(wrong)?;
        Ok(Self { bytes, records, flags })
    }

    /// Whether events before these were lost: the client must forget everything that it has cached.
    pub fn is_lossy(&self) -> bool {
        self.flags & LOST != 0
    }

    /// Whether the client keeps what it knows for as long as an agent asks for events: it must forget that when there is
    /// no agent any more.
    pub fn is_leased(&self) -> bool {
        self.flags & LEASED != 0
    }

    /// Returns the records; the first error ends them.
    pub fn records(&self) -> impl Iterator<Item = Result<Record<'a>, EventError>> + use<'a> {
        let (bytes, mut left, mut at) = (self.bytes, self.records, HEADER_BYTES);
        std::iter::from_fn(move || {
            if left == 0 {
                let rest = std::mem::replace(&mut at, bytes.len());
                return (rest != bytes.len()).then_some(Err(EventError::Record(rest)));
            }
            let begin = at;
            match record(bytes, begin) {
                Some((record, end)) => {
                    (left, at) = (left - 1, end);
                    Some(Ok(record))
                }
                None => {
                    (left, at) = (0, bytes.len());
                    Some(Err(EventError::Record(begin)))
                }
            }
        })
    }
}

/// Decodes the record at an offset; returns it and its end.
fn record(bytes: &[u8], at: usize) -> Option<(Record<'_>, usize)> {
    let len = usize::from(u16::from_le_bytes(part(bytes, at)?));
    let end = at.checked_add(len)?;
    let bytes = bytes.get(at..end)?;
    let [raw_kind, flags] = part(bytes, 2)?;
    let short = |at| Some(usize::from(u16::from_le_bytes(part(bytes, at)?)));
    let word = |at| Some(u64::from_le_bytes(part(bytes, at)?));
    let (name_bytes, new_bytes) = (short(4)?, short(6)?);
    let (number, ino, new_dir) = (word(8)?, Ino(word(16)?), Ino(word(24)?));
    let (name, rest) = bytes.get(RECORD_BYTES..)?.split_at_checked(name_bytes)?;
    let (new_name, padding) = rest.split_at_checked(new_bytes)?;
    let kind = Kind::ALL.into_iter().find(|kind| kind.to_raw() == raw_kind)?;
    let name = if name.is_empty() { None } else { Some(Name::new(name).ok()?) };
    let (to, removed) = match kind {
        Kind::Renamed => (Some((new_dir, Name::new(new_name).ok()?)), None),
        _ if !new_name.is_empty() => return None,
        _ => (None, (new_dir != Ino(0)).then_some(new_dir)),
    };
    let (is_dir, exchanged) = (flags & IS_DIR != 0, flags & EXCHANGED != 0);
    let record = Record { number, kind, is_dir, exchanged, ino, name, to, removed };
    let is_valid = record.is_valid()
        && record.bytes() == len
        && flags & !(IS_DIR | EXCHANGED) == 0
        && padding.iter().all(|byte| *byte == 0);
    is_valid.then_some((record, end))
}

/// An announcement, or its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The event that is replayed next.
    pub number: u64,
    /// In the reply: type and permissions of what was created.
    pub mode: u32,
}

impl Announcement {
    /// Returns its bytes.
    pub fn encode(&self) -> [u8; ANNOUNCEMENT_BYTES] {
        let mut bytes = [0; ANNOUNCEMENT_BYTES];
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.mode.to_le_bytes());
        bytes
    }

    /// Decodes it.
    ///
    /// # Errors
    /// It has another length, or the reserved bytes are not zero.
    pub fn decode(bytes: &[u8]) -> Result<Self, EventError> {
        let whole: [u8; ANNOUNCEMENT_BYTES] = bytes.try_into().map_err(|_| EventError::Announcement(bytes.len()))?;
        let parts = (part(&whole, 0), part(&whole, 8), part(&whole, 12));
        match parts {
            (Some(number), Some(mode), Some([0, 0, 0, 0])) => {
                Ok(Self { number: u64::from_le_bytes(number), mode: u32::from_le_bytes(mode) })
            }
            _ => Err(EventError::Reserved),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(bytes: &[u8]) -> Name<'_> {
        Name::new(bytes).unwrap()
    }

    /// All shapes of records, with names of all lengths.
    fn records(names: &[Vec<u8>]) -> Vec<Record<'_>> {
        let mut all = Vec::new();
        for (number, bytes) in names.iter().enumerate() {
            for kind in Kind::ALL {
                let number = number as u64;
                let to = (kind == Kind::Renamed).then(|| (Ino(u64::MAX - number), name(bytes)));
                let record = Record {
                    number,
                    kind,
                    is_dir: number.is_multiple_of(2),
                    exchanged: to.is_some() && number.is_multiple_of(3),
                    ino: Ino(number + 1),
                    name: (!kind.is_stale()).then(|| name(bytes)),
                    to,
                    removed: None,
                };
                all.push(record);
                if kind == Kind::Removed {
                    all.push(Record { removed: Some(Ino(u64::MAX - number)), ..record });
                }
                if !kind.is_of_name() {
                    all.push(Record { name: None, ..record });
                }
            }
        }
        all
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        let names: Vec<_> = (1..=255_u8).map(|len| (0..len).map(|at| at % 46 + 1).collect()).collect();
        let mut message = MessageWriter::new(true);
        let (mut written, mut messages) = (Vec::new(), 0);
        let mut check = |message: MessageWriter, written: &mut Vec<Record<'_>>| {
            let mut bytes = message.finish();
            assert!(bytes.len() <= MESSAGE_BYTES_MAX && bytes.len().is_multiple_of(8));
            // Buffers of ioctls are longer than what is in them.
            bytes.resize(MESSAGE_BYTES_MAX, 0xff);
            let message = Message::decode(&bytes).unwrap();
            assert!(message.is_lossy() && message.records().map(Result::unwrap).eq(written.drain(..)));
            messages += 1;
        };
        for record in records(&names) {
            if !message.push(&record) {
                check(std::mem::replace(&mut message, MessageWriter::new(true)), &mut written);
                assert!(message.push(&record));
            }
            written.push(record);
        }
        check(message, &mut written);
        assert!(messages > 10);
    }

    #[test]
    fn records_are_events_and_back() {
        let names = [b"one".to_vec(), b"another".to_vec()];
        for record in records(&names) {
            assert_eq!(record.event().is_none(), record.kind.is_stale());
            let Some(event) = record.event() else { continue };
            let is_dir = record.is_dir && record.kind.is_of_name();
            assert_eq!(Record::of(record.number, &event), Some(Record { is_dir, ..record }));
        }
        assert_eq!(Record::of(1, &Event::Lost), None);
    }

    #[test]
    fn short_messages_hold_fewer_records() {
        let long = vec![b'x'; Name::BYTES_MAX];
        let event = Event::Modified(Place { ino: Ino(1), name: Some(name(&long).to_buf()) });
        let mut message = MessageWriter::new(false).within(1000);
        let pushed = (1..).take_while(|number| message.push(&Record::of(*number, &event).unwrap())).count();
        assert_eq!((pushed, message.finish().len()), (3, HEADER_BYTES + 3 * 288));
    }

    #[test]
    fn contradictions_are_not_written() {
        let base = Record {
            number: 1,
            kind: Kind::Created,
            is_dir: false,
            exchanged: false,
            ino: Ino(1),
            name: Some(name(b"a")),
            to: None,
            removed: None,
        };
        let to = Some((Ino(1), name(b"b")));
        for wrong in [
            Record { name: None, ..base },
            Record { to, ..base },
            Record { exchanged: true, ..base },
            Record { kind: Kind::Renamed, ..base },
            Record { removed: Some(Ino(1)), ..base },
            Record { kind: Kind::StaleData, ..base },
            Record { kind: Kind::Removed, removed: Some(Ino(0)), ..base },
        ] {
            assert!(!MessageWriter::new(false).push(&wrong), "{wrong:?}");
        }
    }

    #[test]
    fn changed_messages_are_refused_or_read_without_a_panic() {
        let names = [b"one".to_vec(), b"another".to_vec()];
        let mut message = MessageWriter::new(false);
        records(&names).iter().for_each(|record| assert!(message.push(record)));
        let bytes = message.finish();
        for len in 0..bytes.len() {
            assert!(Message::decode(&bytes[..len]).is_err(), "{len}");
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 0x2f, 0x7f, 0xff] {
                let mut changed = bytes.clone();
                changed[at] = value;
                let Ok(message) = Message::decode(&changed) else { continue };
                let read: Result<Vec<_>, _> = message.records().collect();
                let Ok(read) = read else { continue };
                let mut again = MessageWriter::new(message.is_lossy());
                if message.is_leased() {
                    again = again.leased();
                }
                read.iter().for_each(|record| assert!(again.push(record)));
                assert_eq!(again.finish(), changed, "byte {at}: nothing is read that is not written");
            }
        }
    }

    #[test]
    fn announcements_are_read_as_they_were_written() {
        let announcement = Announcement { number: u64::MAX - 1, mode: 0o100_644 };
        let bytes = announcement.encode();
        assert_eq!(Announcement::decode(&bytes), Ok(announcement));
        assert_eq!(Announcement::decode(&bytes[1..]), Err(EventError::Announcement(15)));
        let mut changed = bytes;
        changed[15] = 1;
        assert!(Announcement::decode(&changed).is_err());
        assert_eq!((WAIT, ANNOUNCE, INTERRUPT), (0xbff8_fe01, 0xc010_fe02, 0xfe03));
    }
}
