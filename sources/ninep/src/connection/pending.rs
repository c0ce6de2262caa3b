//! Requests in flight, by tag.

use std::collections::VecDeque;
use std::time::Instant;

use crate::data::SentTransfer;

/// A freed tag is not reused until this many others were used, so that a second reply to a request is not mistaken.
const RESTING: usize = 64;

/// Receives the reply to a request.
pub(crate) enum Wake {
    /// A transfer of the cache, without an allocation.
    Transfer(SentTransfer),
    /// Anybody else.
    Call(Box<dyn FnOnce(RequestEnd) + Send>),
}

impl Wake {
    pub(crate) fn call(call: impl FnOnce(RequestEnd) + Send + 'static) -> Self {
        Self::Call(Box::new(call))
    }

    /// Delivers the reply.
    pub(crate) fn wake(self, answer: RequestEnd) {
        match self {
            Self::Transfer(sent) => sent.answered(answer),
            Self::Call(call) => call(answer),
        }
    }
}

/// What became of a request.
#[derive(Debug)]
pub(crate) enum RequestEnd {
    /// The server replied.
    Message(Message),
    /// There is no reply, and there will be none.
    Lost {
        /// It was sent, maybe.
        sent: bool,
        /// The request's buffer.
        buffer: Option<Vec<u8>>,
    },
}

/// The longest reply stored without an allocation: all replies without data.
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
    /// The whole message; empty if its data went to the buffer, or if the request was cancelled.
    pub(crate) bytes: Bytes,
    /// The request's buffer.
    pub(crate) buffer: Option<Vec<u8>>,
    /// The number of bytes read into the buffer.
    pub(crate) count: usize,
    /// The request was cancelled, and the server did not carry it out.
    pub(crate) is_flushed: bool,
}

impl Message {
    /// Returns the data that were read, unless it is an error.
    pub(crate) fn data(&self) -> Option<&[u8]> {
        if self.bytes.is_empty() { self.buffer.as_ref()?.get(..self.count) } else { None }
    }

    pub(super) fn flushed() -> Self {
        Self { is_flushed: true, ..Self::default() }
    }
}

/// A request without a reply yet.
pub(super) struct Pending {
    pub(super) kind: u8,
    pub(super) since: Instant,
    pub(super) buffer: Option<Vec<u8>>,
    pub(super) wake: Wake,
    counted: bool,
    /// Distinguishes it from other requests with the same tag.
    number: u64,
    /// A Tflush of it was queued.
    flushing: bool,
    /// It is still being written: its buffer returns afterwards.
    sending: bool,
    answer: Option<Message>,
}

impl Pending {
    pub(super) fn new(kind: u8, buffer: Option<Vec<u8>>, wake: Wake, counted: bool) -> Self {
        let (since, number, flushing) = (Instant::now(), 0, false);
        Self { kind, since, buffer, wake, counted, number, flushing, sending: true, answer: None }
    }
}

enum Slot {
    Free,
    Used(Pending),
    /// The reader is filling its buffer.
    Filling(Pending),
    /// It has ended, and its flush has not: the tag is not reused before.
    Flushing,
}

/// The requests of a connection. Tags are indexes of the table.
#[derive(Default)]
pub(super) struct Table {
    slots: Vec<Slot>,
    /// Unused tags, the longest unused first.
    free: VecDeque<u16>,
    in_flight: usize,
    parked: usize,
    last_number: u64,
    is_lost: bool,
}

impl Table {
    /// Creates a table for this many requests in flight, so that it does not allocate when memory is short.
    pub(super) fn new(depth: usize) -> Self {
        let tags = depth + RESTING + 1;
        Self { slots: Vec::with_capacity(tags), free: VecDeque::with_capacity(tags), ..Self::default() }
    }

    /// Returns the number of requests that count against the depth.
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Those that do not.
    pub(super) fn parked(&self) -> usize {
        self.parked
    }

    /// Adds a request; returns its tag and its number. The connection keeps the number of requests far below that of tags.
    pub(super) fn insert(&mut self, mut pending: Pending) -> (u16, u64) {
        self.last_number += 1;
        pending.number = self.last_number;
        if pending.counted {
            self.in_flight += 1;
        } else {
            self.parked += 1;
        }
        let rested = if self.free.len() > RESTING { self.free.pop_front() } else { None };
        let tag = rested.unwrap_or_else(|| {
            self.slots.push(Slot::Free);
            u16::try_from(self.slots.len() - 1).expect("there are fewer requests in flight than tags")
        });
        self.slots[usize::from(tag)] = Slot::Used(pending);
        (tag, self.last_number)
    }

    /// Records that a request will be flushed; returns false if it has ended.
    pub(super) fn begin_flush(&mut self, tag: u16, number: u64) -> bool {
        match self.slots.get_mut(usize::from(tag)) {
            Some(Slot::Used(pending) | Slot::Filling(pending)) if pending.number == number => {
                pending.flushing = true;
                true
            }
            _ => false,
        }
    }

    /// Records that the flush of a tag has ended, and takes its request out, if that has not ended before.
    pub(super) fn end_flush(&mut self, tag: u16) -> Option<Pending> {
        let pending = self.remove(tag);
        if let Some(slot @ Slot::Flushing) = self.slots.get_mut(usize::from(tag)) {
            *slot = Slot::Free;
            self.free.push_back(tag);
        }
        pending
    }

    /// Returns the type of the request with this tag.
    pub(super) fn kind(&self, tag: u16) -> Option<u8> {
        match self.slots.get(usize::from(tag)) {
            Some(Slot::Used(pending)) if pending.answer.is_none() => Some(pending.kind),
            _ => None,
        }
    }

    /// Takes the buffer for a fill; [`Self::answer`] returns it.
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

    /// Records a reply. Returns the waker, unless its request is still being written.
    pub(super) fn answer(&mut self, tag: u16, message: Message) -> Option<(Wake, RequestEnd)> {
        let slot = self.slots.get_mut(usize::from(tag))?;
        match std::mem::replace(slot, Slot::Free) {
            Slot::Used(mut pending) | Slot::Filling(mut pending) => {
                pending.answer = Some(message);
                *slot = Slot::Used(pending);
            }
            unused => {
                *slot = unused;
                return None;
            }
        }
        self.complete(tag)
    }

    /// Records that a request is written completely; its buffer returns.
    pub(super) fn sent(&mut self, tag: u16, buffer: Option<Vec<u8>>) -> Option<(Wake, RequestEnd)> {
        let (Slot::Used(pending) | Slot::Filling(pending)) = self.slots.get_mut(usize::from(tag))? else {
            return None;
        };
        pending.sending = false;
        // Over a slow link writing takes a while, in which the server cannot reply.
        pending.since = Instant::now();
        if buffer.is_some() {
            pending.buffer = buffer;
        }
        if self.is_lost {
            let Pending { wake, buffer, .. } = self.remove(tag)?;
            return Some((wake, RequestEnd::Lost { sent: true, buffer }));
        }
        self.complete(tag)
    }

    fn complete(&mut self, tag: u16) -> Option<(Wake, RequestEnd)> {
        match self.slots.get(usize::from(tag)) {
            Some(Slot::Used(pending)) if pending.answer.is_some() && !pending.sending => {}
            _ => return None,
        }
        let mut pending = self.remove(tag)?;
        let mut message = pending.answer.take().unwrap_or_default();
        message.buffer = message.buffer.or(pending.buffer);
        Some((pending.wake, RequestEnd::Message(message)))
    }

    /// Takes a request out.
    pub(super) fn remove(&mut self, tag: u16) -> Option<Pending> {
        let slot = self.slots.get_mut(usize::from(tag))?;
        let pending = match std::mem::replace(slot, Slot::Free) {
            Slot::Used(pending) | Slot::Filling(pending) => pending,
            unused => {
                *slot = unused;
                return None;
            }
        };
        if pending.counted {
            self.in_flight -= 1;
        } else {
            self.parked -= 1;
        }
        if pending.flushing {
            *slot = Slot::Flushing;
        } else {
            self.free.push_back(tag);
        }
        Some(pending)
    }

    /// Removes all requests of a lost connection, except those still being written, which [`Self::sent`] removes.
    pub(super) fn fail_all(&mut self) -> Vec<Pending> {
        self.is_lost = true;
        let tags = 0..u16::try_from(self.slots.len()).unwrap_or(u16::MAX);
        let is_sent = |slot: &Slot| matches!(slot, Slot::Used(pending) | Slot::Filling(pending) if !pending.sending);
        tags.filter_map(|tag| if is_sent(&self.slots[usize::from(tag)]) { self.remove(tag) } else { None }).collect()
    }

    /// Returns since when the server has had the oldest request that needs a prompt reply. A request that it does not
    /// accept ends by the time limit of the write.
    pub(super) fn oldest(&self) -> Option<Instant> {
        let used = self.slots.iter().filter_map(|slot| match slot {
            Slot::Used(pending) | Slot::Filling(pending) if pending.counted && !pending.sending => Some(pending.since),
            _ => None,
        });
        used.min()
    }
}
