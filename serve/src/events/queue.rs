//! The events that a client has not processed yet.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::mem::{Discriminant, discriminant};
use std::sync::Mutex;
use std::time::Instant;

use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, Event, Ino, NameBuf, Place, Result};
use ferry_wire::events::{Kind, MessageWriter, Record};

/// The most events of one client. Beyond that all are dropped, and the client must drop its caches.
pub(crate) const EVENTS_MAX: usize = 1 << 16;

/// How many events are searched for a removal or rename of a new name: temporary files are renamed soon after they
/// are created.
const LOOK_AHEAD: usize = 1024;

type ReplyFn = Box<dyn FnOnce(Result<Vec<u8>>) + Send>;

/// The reader.
#[derive(Clone, Copy, Debug)]
enum Reader {
    /// An agent. It announces each event before it replays it.
    Agent {
        /// The client's caches stay valid only as long as an agent asks for events.
        is_leased: bool,
    },
    /// A client that acknowledges the events that it has processed.
    Client {
        /// The longest message that it accepts.
        bytes_max: usize,
    },
}

struct State {
    reader: Reader,
    events: VecDeque<(u64, Event)>,
    last: u64,
    /// The last event that was sent to a client.
    sent: u64,
    /// The last of the events that replace lost ones.
    last_unsure: u64,
    is_lossy: bool,
    /// The thread that was told of a loss and has not sent another request since.
    loss_sent_to: Option<u32>,
    /// The queued events of data and attributes with which later ones are merged.
    mergeable: HashSet<MergeKey>,
    /// Invalidations, which a client gets before the events.
    stale: HashSet<(Kind, Ino)>,
    /// New names that the client has not looked up yet, by the source's inode number.
    new_names: HashMap<Ino, (Ino, NameBuf)>,
    /// The inodes of `new_names` in order of creation, for a client.
    new_names_order: VecDeque<Ino>,
    parked: Option<Parked>,
}

/// A reader that waits.
struct Parked {
    /// Its thread in the client; 0 for a 9P client.
    pid: u32,
    until: Instant,
    reply: ReplyFn,
}

type MergeKey = (Discriminant<Event>, Place);

/// Returns what mergeable events must have in common.
fn merge_key(event: &Event) -> Option<MergeKey> {
    match event {
        Event::Modified(place) | Event::Closed(place) | Event::Attributes(place) => {
            Some((discriminant(event), place.clone()))
        }
        _ => None,
    }
}

/// The events of one client, in their order.
pub struct Queue(Mutex<State>);

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("reader", &lock(&self.0).reader).finish_non_exhaustive()
    }
}

impl State {
    fn add(&mut self, event: Event) {
        match &event {
            Event::Modified(place) | Event::Closed(place) | Event::Attributes(place) => {
                if merge_key(&event).is_some_and(|key| !self.mergeable.insert(key)) {
                    return;
                }
                if matches!(event, Event::Modified(_)) {
                    // A watcher of `Closed` must see one after the last `Modified`.
                    self.mergeable.remove(&(discriminant(&Event::Closed(place.clone())), place.clone()));
                }
            }
            Event::Created { dir, name, ino, .. } => {
                self.end_merging(*dir, name);
                if let Some(ino) = ino {
                    self.add_new_name(*ino, (*dir, name.clone()));
                }
            }
            Event::Removed { dir, name, .. } => {
                self.end_merging(*dir, name);
                self.new_names.retain(|_, at| (at.0, &at.1) != (*dir, name));
            }
            Event::Renamed { from, to, exchanged, .. } => {
                self.end_merging(from.0, &from.1);
                self.end_merging(to.0, &to.1);
                // The inode that had the new name has none any more, or has the old name after an exchange.
                self.new_names.retain(|_, at| *exchanged || at != to);
                for at in self.new_names.values_mut() {
                    match at == from {
                        true => *at = to.clone(),
                        false if at == to => *at = from.clone(),
                        false => {}
                    }
                }
            }
            _ => return self.lose(),
        }
        if self.events.len() >= EVENTS_MAX {
            return self.lose();
        }
        self.last += 1;
        self.events.push_back((self.last, event));
    }

    /// Records that the client will look up an inode by this name. Agents do so when they replay the event. For other
    /// clients the time is unknown, so their last ones are kept.
    fn add_new_name(&mut self, ino: Ino, at: (Ino, NameBuf)) {
        if matches!(self.reader, Reader::Client { .. }) {
            self.new_names_order.push_back(ino);
            if self.new_names_order.len() > LOOK_AHEAD
                && let Some(oldest) = self.new_names_order.pop_front()
            {
                self.new_names.remove(&oldest);
            }
        }
        if self.new_names.len() < LOOK_AHEAD {
            self.new_names.insert(ino, at);
        }
    }

    /// Prevents merging across a change of a name: it refers to another file from now on.
    fn end_merging(&mut self, dir: Ino, name: &NameBuf) {
        if self.mergeable.is_empty() {
            return;
        }
        let place = Place { ino: dir, name: Some(name.clone()) };
        for kind in [Event::Modified, Event::Closed, Event::Attributes] {
            let kind = discriminant(&kind(place.clone()));
            self.mergeable.remove(&(kind, place.clone()));
        }
    }

    fn lose(&mut self) {
        self.events.clear();
        self.stale.clear();
        self.mergeable.clear();
        self.new_names.clear();
        self.new_names_order.clear();
        self.is_lossy = true;
    }

    /// Removes the first event, which is about to be replayed.
    fn take(&mut self) -> Option<Event> {
        let (_, event) = self.events.pop_front()?;
        merge_key(&event).iter().for_each(|key| _ = self.mergeable.remove(key));
        Some(event)
    }

    /// Encodes the first events as a message for a thread. They stay queued until they are announced or acknowledged.
    fn message(&mut self, pid: u32) -> Vec<u8> {
        if self.is_lossy {
            self.loss_sent_to = Some(pid);
        }
        let message = MessageWriter::new(std::mem::take(&mut self.is_lossy));
        let (mut message, is_client) = match self.reader {
            Reader::Agent { is_leased: true } => (message.leased(), false),
            Reader::Agent { .. } => (message, false),
            Reader::Client { bytes_max } => (message.within(bytes_max), true),
        };
        // Invalidations are not acknowledged: if a message is not received, the queue is reset (`lose`).
        self.stale.retain(|(kind, ino)| !message.push(&Record::stale(*kind, *ino)));
        for (number, event) in self.events.iter().filter(|_| self.stale.is_empty()) {
            let record = Record::of(*number, event).map(|record| match is_client {
                true => record,
                false => Record { removed: None, ..record },
            });
            if !record.is_some_and(|record| message.push(&record)) {
                break;
            }
            if is_client {
                // Later changes are not merged with this event: the client may have processed it before them.
                self.sent = *number;
                merge_key(event).iter().for_each(|key| _ = self.mergeable.remove(key));
            }
        }
        message.finish()
    }
}

impl Queue {
    /// Creates the queue of an agent. Earlier events are reported as lost.
    pub(crate) fn new(is_leased: bool) -> Self {
        Self::of(Reader::Agent { is_leased })
    }

    /// Creates the queue of a client that acknowledges events ([`Self::acknowledge`]) and accepts messages of up to
    /// `bytes_max` bytes. Earlier events are reported as lost.
    pub fn of_client(bytes_max: usize) -> Self {
        Self::of(Reader::Client { bytes_max })
    }

    fn of(reader: Reader) -> Self {
        Self(Mutex::new(State {
            reader,
            events: VecDeque::new(),
            last: 0,
            sent: 0,
            is_lossy: true,
            last_unsure: 0,
            loss_sent_to: None,
            mergeable: HashSet::new(),
            stale: HashSet::new(),
            new_names: HashMap::new(),
            new_names_order: VecDeque::new(),
            parked: None,
        }))
    }

    /// Removes the events that the client has processed, up to this number; only events that were sent.
    pub fn acknowledge(&self, number: u64) {
        let state = &mut *lock(&self.0);
        let number = number.min(state.sent);
        while state.events.front().is_some_and(|(first, _)| *first <= number) {
            state.events.pop_front();
        }
    }

    /// Makes the client drop its caches, because it has not received a message.
    pub fn lose(&self) {
        lock(&self.0).lose();
    }

    /// Whether the client waits.
    pub fn is_waiting(&self) -> bool {
        lock(&self.0).parked.is_some()
    }

    /// Adds an event and replies to the waiting reader.
    pub(crate) fn push(&self, event: Event) {
        self.change(|state| state.add(event));
    }

    /// Adds an invalidation of an inode's data or attributes.
    pub(crate) fn stale(&self, kind: Kind, ino: Ino) {
        self.change(|state| {
            state.stale.insert((kind, ino));
            if state.stale.len() > EVENTS_MAX {
                state.lose();
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = lock(&self.0);
        change(&mut state);
        if let Some(Parked { pid, reply, .. }) = state.parked.take() {
            let message = state.message(pid);
            drop(state);
            reply(Ok(message));
        }
    }

    /// Adds events that replace lost ones.
    pub(crate) fn refresh(&self, events: impl Iterator<Item = Event>) {
        events.for_each(|event| self.push(event));
        let state = &mut *lock(&self.0);
        state.last_unsure = state.last;
    }

    /// Whether this event replaces a lost one.
    pub(crate) fn is_unsure(&self, number: u64) -> bool {
        number <= lock(&self.0).last_unsure
    }

    /// Returns an event of an inode that the client does not know yet, with the name by which it will look the inode
    /// up.
    pub(crate) fn by_new_name(&self, event: &Event) -> Option<Event> {
        let (Event::Modified(place) | Event::Closed(place) | Event::Attributes(place)) = event else { return None };
        let at = place.name.is_none().then(|| lock(&self.0).new_names.get(&place.ino).cloned())?;
        let place = at.map(|(dir, name)| Place { ino: dir, name: Some(name) })?;
        Some(match event {
            Event::Modified(_) => Event::Modified(place),
            Event::Closed(_) => Event::Closed(place),
            _ => Event::Attributes(place),
        })
    }

    /// Whether this thread was told of a loss, so that it has made its kernel drop its caches. If it was another
    /// thread, which may have been killed before that, the loss is reported again.
    pub(crate) fn take_dropped(&self, pid: u32) -> bool {
        let state = &mut *lock(&self.0);
        let thread = state.loss_sent_to.take();
        state.is_lossy |= thread.is_some_and(|thread| thread != pid);
        thread == Some(pid)
    }

    /// Calls `reply` with a message for a thread as soon as there are events; with an empty message when `until` has
    /// passed, if a [`super::Timer`] watches the queue. A reader that waits already gets `BUSY`.
    pub fn wait(&self, pid: u32, until: Instant, reply: impl FnOnce(Result<Vec<u8>>) + Send + 'static) {
        let mut state = lock(&self.0);
        let before = state.parked.take();
        if state.events.is_empty() && matches!(state.reader, Reader::Agent { .. }) {
            // All events were replayed.
            state.new_names.clear();
        }
        if state.events.is_empty() && state.stale.is_empty() && !state.is_lossy {
            state.parked = Some(Parked { pid, until, reply: Box::new(reply) });
            drop(state);
        } else {
            let message = state.message(pid);
            drop(state);
            reply(Ok(message));
        }
        if let Some(before) = before {
            (before.reply)(Err(Errno::BUSY));
        }
    }

    /// Replies to a reader whose deadline has passed; otherwise returns the deadline of the waiting reader.
    pub(crate) fn expire(&self, now: Instant) -> Option<Instant> {
        let mut state = lock(&self.0);
        match state.parked.take() {
            Some(Parked { pid, until, reply }) if until <= now => {
                let message = state.message(pid);
                drop(state);
                reply(Ok(message));
                None
            }
            parked => {
                state.parked = parked;
                state.parked.as_ref().map(|parked| parked.until)
            }
        }
    }

    /// Ends the wait with EINTR, so that the agent repeats its request.
    pub(crate) fn interrupt(&self) {
        let parked = lock(&self.0).parked.take();
        if let Some(parked) = parked {
            (parked.reply)(Err(Errno::INTR));
        }
    }

    /// Puts back the event at the front: the agent that announced it was killed.
    pub(crate) fn put_back(&self, number: u64, event: Event) {
        let state = &mut *lock(&self.0);
        if state.events.len() >= EVENTS_MAX {
            return state.lose();
        }
        state.mergeable.extend(merge_key(&event));
        state.events.push_front((number, event));
    }

    /// Removes an event that the agent is about to replay, and those before it. Returns the event, and whether a
    /// later event removes the name that it creates.
    pub(crate) fn announce(&self, number: u64) -> Option<(Event, bool)> {
        let state = &mut *lock(&self.0);
        while state.events.front().is_some_and(|(first, _)| *first < number) {
            state.take();
        }
        state.events.front().filter(|(first, _)| *first == number)?;
        let event = state.take()?;
        let Event::Created { dir, name, .. } = &event else { return Some((event, false)) };
        let has_gone = state.events.iter().take(LOOK_AHEAD).any(|(_, later)| match later {
            Event::Removed { dir: from, name: old, .. } => (from, old) == (dir, name),
            Event::Renamed { from, .. } => (&from.0, &from.1) == (dir, name),
            _ => false,
        });
        Some((event, has_gone))
    }
}

#[cfg(test)]
mod tests;
