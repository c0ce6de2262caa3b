//! The events that a client has not received yet.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::mem::{Discriminant, discriminant};
use std::sync::Mutex;
use std::time::Instant;

use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, Event, Ino, NameBuf, Place, Result};
use ferry_wire::events::{Kind, MessageWriter, Record};

/// The most events of one client: a client that takes longer to deal with them than this forgets everything instead.
pub(crate) const EVENTS_MAX: usize = 1 << 16;

/// How far the queue is searched for what becomes of a new name. Those who make a file and move it away do so at once.
const LOOK_AHEAD: usize = 1024;

type AnswerFn = Box<dyn FnOnce(Result<Vec<u8>>) + Send>;

/// Who reads the messages.
#[derive(Clone, Copy, Debug)]
enum Reader {
    /// An agent, which announces each event before it replays it.
    Agent {
        /// The client's kernel keeps what it knows for as long as an agent asks.
        is_leased: bool,
    },
    /// A client, which acknowledges what it has dealt with.
    Client {
        /// The longest message that it takes.
        bytes_max: usize,
    },
}

struct State {
    reader: Reader,
    events: VecDeque<(u64, Event)>,
    last: u64,
    /// The last event that a client was sent.
    sent: u64,
    /// The last event that is told because others were lost.
    last_unsure: u64,
    is_lossy: bool,
    /// The thread that was told that events were lost, and has not asked since.
    told_of_loss: Option<u32>,
    /// The changes of data and attributes among the events that later ones are merged with.
    mergeable: HashSet<MergeKey>,
    /// What is not valid any more, which a client is told before the events.
    stale: HashSet<(Kind, Ino)>,
    /// New names that the client has not looked up yet, by their inodes, which it does not know.
    coming: HashMap<Ino, (Ino, NameBuf)>,
    /// Those of a client, in their order.
    coming_order: VecDeque<Ino>,
    parked: Option<Parked>,
}

/// A reader that waits.
struct Parked {
    /// Its thread in the client; 0 of a 9P client.
    pid: u32,
    until: Instant,
    answer: AnswerFn,
}

type MergeKey = (Discriminant<Event>, Place);

/// What events have in common that are merged.
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
                    // Who waits for the end of writing reads what was written before it.
                    self.mergeable.remove(&(discriminant(&Event::Closed(place.clone())), place.clone()));
                }
            }
            Event::Created { dir, name, ino, .. } => {
                self.separate(*dir, name);
                if let Some(ino) = ino {
                    self.comes(*ino, (*dir, name.clone()));
                }
            }
            Event::Removed { dir, name, .. } => {
                self.separate(*dir, name);
                self.coming.retain(|_, at| (at.0, &at.1) != (*dir, name));
            }
            Event::Renamed { from, to, exchanged, .. } => {
                self.separate(from.0, &from.1);
                self.separate(to.0, &to.1);
                // What had the new name has none any more, or the old one.
                self.coming.retain(|_, at| *exchanged || at != to);
                for at in self.coming.values_mut() {
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

    /// The client will look up an inode by this name. Agents do so when they replay the event. When a client does is not
    /// known, so its last ones are kept.
    fn comes(&mut self, ino: Ino, at: (Ino, NameBuf)) {
        if matches!(self.reader, Reader::Client { .. }) {
            self.coming_order.push_back(ino);
            if self.coming_order.len() > LOOK_AHEAD
                && let Some(oldest) = self.coming_order.pop_front()
            {
                self.coming.remove(&oldest);
            }
        }
        if self.coming.len() < LOOK_AHEAD {
            self.coming.insert(ino, at);
        }
    }

    /// A name refers to another file from now on: later changes are not those of before.
    fn separate(&mut self, dir: Ino, name: &NameBuf) {
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
        self.coming.clear();
        self.coming_order.clear();
        self.is_lossy = true;
    }

    /// Removes the first event, which is about to be replayed.
    fn take(&mut self) -> Option<Event> {
        let (_, event) = self.events.pop_front()?;
        merge_key(&event).iter().for_each(|key| _ = self.mergeable.remove(key));
        Some(event)
    }

    /// The first events as a message for a thread; they stay until they are announced or acknowledged.
    fn message(&mut self, pid: u32) -> Vec<u8> {
        if self.is_lossy {
            self.told_of_loss = Some(pid);
        }
        let message = MessageWriter::new(std::mem::take(&mut self.is_lossy));
        let (mut message, is_client) = match self.reader {
            Reader::Agent { is_leased: true } => (message.leased(), false),
            Reader::Agent { .. } => (message, false),
            Reader::Client { bytes_max } => (message.within(bytes_max), true),
        };
        // Without acknowledgement: a message that is not received loses everything.
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
                // What happens from now on, the client may deal with after this, and is told once more.
                self.sent = *number;
                merge_key(event).iter().for_each(|key| _ = self.mergeable.remove(key));
            }
        }
        message.finish()
    }
}

impl Queue {
    /// Of an agent. What happened before is not known.
    pub(crate) fn new(is_leased: bool) -> Self {
        Self::of(Reader::Agent { is_leased })
    }

    /// Of a client that acknowledges events ([`Self::acknowledge`]) and takes messages of up to `bytes_max` bytes. What
    /// happened before is not known.
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
            told_of_loss: None,
            mergeable: HashSet::new(),
            stale: HashSet::new(),
            coming: HashMap::new(),
            coming_order: VecDeque::new(),
            parked: None,
        }))
    }

    /// Removes what the client has dealt with: events that it was sent, up to this number.
    pub fn acknowledge(&self, number: u64) {
        let state = &mut *lock(&self.0);
        let number = number.min(state.sent);
        while state.events.front().is_some_and(|(first, _)| *first <= number) {
            state.events.pop_front();
        }
    }

    /// Has the client forget everything: it has not received a message.
    pub fn lose(&self) {
        lock(&self.0).lose();
    }

    /// Whether the client waits.
    pub fn is_waiting(&self) -> bool {
        lock(&self.0).parked.is_some()
    }

    /// Adds an event, and answers the reader that waits.
    pub(crate) fn push(&self, event: Event) {
        self.change(|state| state.add(event));
    }

    /// Something that the client has of an inode is not valid any more.
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
        if let Some(Parked { pid, answer, .. }) = state.parked.take() {
            let message = state.message(pid);
            drop(state);
            answer(Ok(message));
        }
    }

    /// Adds what the client is told of because events were lost.
    pub(crate) fn refresh(&self, events: impl Iterator<Item = Event>) {
        events.for_each(|event| self.push(event));
        let state = &mut *lock(&self.0);
        state.last_unsure = state.last;
    }

    /// Whether events were lost before this one.
    pub(crate) fn is_unsure(&self, number: u64) -> bool {
        number <= lock(&self.0).last_unsure
    }

    /// An event of an inode that the client does not know yet, by the name that will make it known.
    pub(crate) fn by_new_name(&self, event: &Event) -> Option<Event> {
        let (Event::Modified(place) | Event::Closed(place) | Event::Attributes(place)) = event else { return None };
        let at = place.name.is_none().then(|| lock(&self.0).coming.get(&place.ino).cloned())?;
        let place = at.map(|(dir, name)| Place { ino: dir, name: Some(name) })?;
        Some(match event {
            Event::Modified(_) => Event::Modified(place),
            Event::Closed(_) => Event::Closed(place),
            _ => Event::Attributes(place),
        })
    }

    /// Whether this thread has just had the client's kernel drop what it could. Another one, which was killed, may not have:
    /// the loss is told again.
    pub(crate) fn take_dropped(&self, pid: u32) -> bool {
        let state = &mut *lock(&self.0);
        let told = state.told_of_loss.take();
        state.is_lossy |= told.is_some_and(|told| told != pid);
        told == Some(pid)
    }

    /// Calls `answer` with a message for a thread once there is something to tell; with an empty one when `until` has passed, if a
    /// [`super::Timer`] watches the queue. A reader that waits already is told that another has come (`BUSY`).
    pub fn wait(&self, pid: u32, until: Instant, answer: impl FnOnce(Result<Vec<u8>>) + Send + 'static) {
        let mut state = lock(&self.0);
        let before = state.parked.take();
        if state.events.is_empty() && matches!(state.reader, Reader::Agent { .. }) {
            // Everything was replayed.
            state.coming.clear();
        }
        if state.events.is_empty() && state.stale.is_empty() && !state.is_lossy {
            state.parked = Some(Parked { pid, until, answer: Box::new(answer) });
            drop(state);
        } else {
            let message = state.message(pid);
            drop(state);
            answer(Ok(message));
        }
        if let Some(before) = before {
            (before.answer)(Err(Errno::BUSY));
        }
    }

    /// Replies to an agent that has waited long enough; returns when the one that waits has.
    pub(crate) fn expire(&self, now: Instant) -> Option<Instant> {
        let mut state = lock(&self.0);
        match state.parked.take() {
            Some(Parked { pid, until, answer }) if until <= now => {
                let message = state.message(pid);
                drop(state);
                answer(Ok(message));
                None
            }
            parked => {
                state.parked = parked;
                state.parked.as_ref().map(|parked| parked.until)
            }
        }
    }

    /// Has the agent ask again.
    pub(crate) fn interrupt(&self) {
        let parked = lock(&self.0).parked.take();
        if let Some(parked) = parked {
            (parked.answer)(Err(Errno::INTR));
        }
    }

    /// Adds the first event again: the agent that has announced it was killed.
    pub(crate) fn put_back(&self, number: u64, event: Event) {
        let state = &mut *lock(&self.0);
        if state.events.len() >= EVENTS_MAX {
            return state.lose();
        }
        state.mergeable.extend(merge_key(&event));
        state.events.push_front((number, event));
    }

    /// The agent is about to replay an event: it and those before it are done. Returns it, and whether what it made has
    /// gone from its name since.
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
