//! Requests in flight, by tag.

use std::collections::VecDeque;
use std::time::Instant;

use crate::data::SentTransfer;

/// A tag rests until so many others were used after it, so that a second answer to one request is not taken
/// for the answer to the next.
const RESTING: usize = 64;

/// Who is told the answer to a request.
pub(crate) enum Wake {
    /// A transfer of the cache, which takes no memory for it.
    Transfer(SentTransfer),
    /// Anybody else.
    Call(Box<dyn FnOnce(Answer) + Send>),
}

impl Wake {
    pub(crate) fn call(call: impl FnOnce(Answer) + Send + 'static) -> Self {
        Self::Call(Box::new(call))
    }

    /// Tells the answer.
    pub(crate) fn wake(self, answer: Answer) {
        match self {
            Self::Transfer(sent) => sent.answered(answer),
            Self::Call(call) => call(answer),
        }
    }
}

/// What became of a request.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The server replied.
    Message(Message),
    /// It did not, and will not.
    Lost {
        /// It was sent, maybe.
        sent: bool,
        /// The request's buffer.
        buffer: Option<Vec<u8>>,
    },
}

/// The longest reply that takes no memory: all that say no more than that something was done.
const SHORT_BYTES: usize = 32;

/// The bytes of a reply.
pub(crate) enum Bytes {
    Short([u8; SHORT_BYTES], usize),
    Long(Vec<u8>),
}

impl Bytes {
    /// So many, all zero.
    pub(super) fn zeros(bytes: usize) -> Self {
        if bytes <= SHORT_BYTES { Self::Short([0; SHORT_BYTES], bytes) } else { Self::Long(vec![0; bytes]) }
    }
}

impl Default for Bytes {
    fn default() -> Self {
        Self::zeros(0)
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Short(bytes, count) => &bytes[..*count],
            Self::Long(bytes) => bytes,
        }
    }
}

impl std::ops::DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Short(bytes, count) => &mut bytes[..*count],
            Self::Long(bytes) => bytes,
        }
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&**self).finish()
    }
}

/// A reply.
#[derive(Debug, Default)]
pub(crate) struct Message {
    /// The whole message; empty if it is data for the buffer, or if the request was flushed.
    pub(crate) bytes: Bytes,
    /// The request's buffer.
    pub(crate) buffer: Option<Vec<u8>>,
    /// How many bytes were read into the buffer.
    pub(crate) count: usize,
    /// The request was given up, and the server did not do it.
    pub(crate) is_flushed: bool,
}

impl Message {
    /// The data that were read, if it is not an error.
    pub(crate) fn data(&self) -> Option<&[u8]> {
        if self.bytes.is_empty() { self.buffer.as_ref()?.get(..self.count) } else { None }
    }

    pub(super) fn flushed() -> Self {
        Self { is_flushed: true, ..Self::default() }
    }
}

/// A request that is not answered yet.
pub(super) struct Pending {
    pub(super) kind: u8,
    pub(super) since: Instant,
    pub(super) buffer: Option<Vec<u8>>,
    pub(super) wake: Wake,
    counted: bool,
    /// It is still being written: its buffer comes back afterwards.
    sending: bool,
    answer: Option<Message>,
}

impl Pending {
    pub(super) fn new(kind: u8, buffer: Option<Vec<u8>>, wake: Wake, counted: bool) -> Self {
        Self { kind, since: Instant::now(), buffer, wake, counted, sending: true, answer: None }
    }
}

enum Slot {
    Free,
    Used(Pending),
    /// The reader is filling its buffer.
    Filling(Pending),
}

/// The requests of a line. Tags are places in the table.
#[derive(Default)]
pub(super) struct Table {
    slots: Vec<Slot>,
    /// Tags that are not in use, the one that has rested longest first.
    free: VecDeque<u16>,
    in_flight: usize,
    parked: usize,
    is_lost: bool,
}

impl Table {
    /// With room for so many requests under way: what they are kept in does not grow when memory is short.
    pub(super) fn new(depth: usize) -> Self {
        let tags = depth + RESTING + 1;
        Self { slots: Vec::with_capacity(tags), free: VecDeque::with_capacity(tags), ..Self::default() }
    }

    /// Those that count against the depth.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Those that do not.
    pub(super) fn parked(&self) -> usize {
        self.parked
    }

    /// Adds a request. The line keeps their number far below that of tags.
    pub(super) fn insert(&mut self, pending: Pending) -> u16 {
        if pending.counted {
            self.in_flight += 1;
        } else {
            self.parked += 1;
        }
        let rested = if self.free.len() > RESTING { self.free.pop_front() } else { None };
        let tag = rested.unwrap_or_else(|| {
            self.slots.push(Slot::Free);
            u16::try_from(self.slots.len() - 1).expect("there are fewer requests under way than tags")
        });
        self.slots[usize::from(tag)] = Slot::Used(pending);
        tag
    }

    /// The type of the request with this tag.
    pub(super) fn kind(&self, tag: u16) -> Option<u8> {
        match self.slots.get(usize::from(tag)) {
            Some(Slot::Used(pending)) if pending.answer.is_none() => Some(pending.kind),
            _ => None,
        }
    }

    /// Takes the buffer to fill it; it comes back with [`Self::answer`].
    pub(super) fn fill(&mut self, tag: u16) -> Option<Vec<u8>> {
        let slot = self.slots.get_mut(usize::from(tag))?;
        match std::mem::replace(slot, Slot::Free) {
            Slot::Used(mut pending) => {
                let buffer = pending.buffer.take();
                *slot = Slot::Filling(pending);
                buffer
            }
            other => {
                *slot = other;
                None
            }
        }
    }

    /// A reply is there: whom to wake with it, unless its request is still being written.
    pub(super) fn answer(&mut self, tag: u16, message: Message) -> Option<(Wake, Answer)> {
        let slot = self.slots.get_mut(usize::from(tag))?;
        match std::mem::replace(slot, Slot::Free) {
            Slot::Used(mut pending) | Slot::Filling(mut pending) => {
                pending.answer = Some(message);
                *slot = Slot::Used(pending);
            }
            Slot::Free => return None,
        }
        self.complete(tag)
    }

    /// A request is written as a whole; its buffer comes back.
    pub(super) fn sent(&mut self, tag: u16, buffer: Option<Vec<u8>>) -> Option<(Wake, Answer)> {
        let (Slot::Used(pending) | Slot::Filling(pending)) = self.slots.get_mut(usize::from(tag))? else {
            return None;
        };
        pending.sending = false;
        // Over a slow link that took a while, in which there was nothing to be answered.
        pending.since = Instant::now();
        if buffer.is_some() {
            pending.buffer = buffer;
        }
        if self.is_lost {
            let Pending { wake, buffer, .. } = self.remove(tag)?;
            return Some((wake, Answer::Lost { sent: true, buffer }));
        }
        self.complete(tag)
    }

    fn complete(&mut self, tag: u16) -> Option<(Wake, Answer)> {
        match self.slots.get(usize::from(tag)) {
            Some(Slot::Used(pending)) if pending.answer.is_some() && !pending.sending => {}
            _ => return None,
        }
        let mut pending = self.remove(tag)?;
        let mut message = pending.answer.take().unwrap_or_default();
        message.buffer = message.buffer.or(pending.buffer);
        Some((pending.wake, Answer::Message(message)))
    }

    /// Takes a request out.
    pub(super) fn remove(&mut self, tag: u16) -> Option<Pending> {
        let slot = self.slots.get_mut(usize::from(tag))?;
        let (Slot::Used(pending) | Slot::Filling(pending)) = std::mem::replace(slot, Slot::Free) else { return None };
        if pending.counted {
            self.in_flight -= 1;
        } else {
            self.parked -= 1;
        }
        self.free.push_back(tag);
        Some(pending)
    }

    /// The connection is lost: takes all requests out but those that are still being written, which
    /// [`Self::sent`] will.
    pub(super) fn fail_all(&mut self) -> Vec<Pending> {
        self.is_lost = true;
        let tags = 0..u16::try_from(self.slots.len()).unwrap_or(u16::MAX);
        let is_sent = |slot: &Slot| matches!(slot, Slot::Used(pending) | Slot::Filling(pending) if !pending.sending);
        tags.filter_map(|tag| if is_sent(&self.slots[usize::from(tag)]) { self.remove(tag) } else { None }).collect()
    }

    /// Since when the server has had the oldest request that should be answered soon. One that it does not take ends by the
    /// time limit of the write.
    pub(super) fn oldest(&self) -> Option<Instant> {
        let used = self.slots.iter().filter_map(|slot| match slot {
            Slot::Used(pending) | Slot::Filling(pending) if pending.counted && !pending.sending => Some(pending.since),
            _ => None,
        });
        used.min()
    }
}
