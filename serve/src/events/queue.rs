//! The events that an agent has not replayed yet.

use std::collections::{HashMap, HashSet, VecDeque};
use std::mem::discriminant;
use std::sync::Mutex;
use std::time::Instant;

use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, Event, Ino, NameBuf, Place, Result};
use ferry_wire::events::{Kind, MessageWriter, Record};

/// The most events of one client: a guest that takes longer to replay them than this forgets everything instead.
pub(crate) const EVENTS_MAX: usize = 1 << 16;

/// How far the queue is searched for what becomes of a new name. Those who make a file and move it away do so at once.
const LOOK_AHEAD: usize = 1024;

type AnswerFn = Box<dyn FnOnce(Result<Vec<u8>>) + Send>;

#[derive(Default)]
struct State {
    events: VecDeque<(u64, Event)>,
    last: u64,
    is_lossy: bool,
    /// The client's kernel keeps what it knows for as long as an agent asks.
    is_leased: bool,
    /// The agent was told that events were lost, and has not asked since.
    has_dropped: bool,
    /// The changes of data and attributes among the events that later ones are merged with.
    mergeable: HashSet<(std::mem::Discriminant<Event>, Place)>,
    /// New names that the agent has not replayed yet, by their inodes, which the client does not know.
    coming: HashMap<Ino, (Ino, NameBuf)>,
    parked: Option<(Instant, AnswerFn)>,
}

/// The events of one client, in their order.
pub(crate) struct Queue(Mutex<State>);

impl State {
    fn add(&mut self, event: Event) {
        match &event {
            Event::Modified(place) | Event::Closed(place) | Event::Attributes(place) => {
                if !self.mergeable.insert((discriminant(&event), place.clone())) {
                    return;
                }
            }
            Event::Created { dir, name, ino, .. } => {
                self.separate(*dir, name);
                if let Some(ino) = ino
                    && self.coming.len() < LOOK_AHEAD
                {
                    self.coming.insert(*ino, (*dir, name.clone()));
                }
            }
            Event::Removed { dir, name, .. } => {
                self.separate(*dir, name);
                self.coming.retain(|_, at| (at.0, &at.1) != (*dir, name));
            }
            Event::Renamed { from, to, .. } => {
                self.separate(from.0, &from.1);
                self.separate(to.0, &to.1);
                self.coming.values_mut().filter(|at| *at == from).for_each(|at| *at = to.clone());
            }
            _ => return self.lose(),
        }
        if self.events.len() == EVENTS_MAX {
            return self.lose();
        }
        self.last += 1;
        self.events.push_back((self.last, event));
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
        self.mergeable.clear();
        self.coming.clear();
        self.is_lossy = true;
    }

    /// Removes the first event, which is about to be replayed.
    fn take(&mut self) -> Option<Event> {
        let (_, event) = self.events.pop_front()?;
        if let Event::Modified(place) | Event::Closed(place) | Event::Attributes(place) = &event {
            self.mergeable.remove(&(discriminant(&event), place.clone()));
        }
        Some(event)
    }

    /// The first events as a message; they stay until they are announced.
    fn message(&mut self) -> Vec<u8> {
        self.has_dropped |= self.is_lossy;
        let mut message = MessageWriter::new(std::mem::take(&mut self.is_lossy));
        if self.is_leased {
            message = message.leased();
        }
        let mut events = self.events.iter();
        while events.next().is_some_and(|(number, event)| record(*number, event).is_some_and(|it| message.push(&it))) {}
        message.finish()
    }
}

/// An event as it is sent; `None` for those that are a flag of the message.
fn record(number: u64, event: &Event) -> Option<Record<'_>> {
    let ((kind, ino, name), is_dir, exchanged, to) = match event {
        Event::Created { dir, name, is_dir, .. } => ((Kind::Created, *dir, Some(name)), *is_dir, false, None),
        Event::Removed { dir, name, is_dir, .. } => ((Kind::Removed, *dir, Some(name)), *is_dir, false, None),
        Event::Renamed { from, to, is_dir, exchanged } => {
            let new = Some((to.0, to.1.as_name()));
            ((Kind::Renamed, from.0, Some(&from.1)), *is_dir, *exchanged, new)
        }
        Event::Modified(place) => ((Kind::Modified, place.ino, place.name.as_ref()), false, false, None),
        Event::Closed(place) => ((Kind::Closed, place.ino, place.name.as_ref()), false, false, None),
        Event::Attributes(place) => ((Kind::Attributes, place.ino, place.name.as_ref()), false, false, None),
        _ => return None,
    };
    Some(Record { number, kind, is_dir, exchanged, ino, name: name.map(NameBuf::as_name), to })
}

impl Queue {
    /// What happened before is not known.
    pub(crate) fn new(is_leased: bool) -> Self {
        Self(Mutex::new(State { is_lossy: true, is_leased, ..State::default() }))
    }

    /// Adds an event, and answers the agent that waits.
    pub(crate) fn push(&self, event: Event) {
        let mut state = lock(&self.0);
        state.add(event);
        if let Some((_, answer)) = state.parked.take() {
            let message = state.message();
            drop(state);
            answer(Ok(message));
        }
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

    /// Whether the agent has just had the client's kernel drop what it could.
    pub(crate) fn take_dropped(&self) -> bool {
        std::mem::take(&mut lock(&self.0).has_dropped)
    }

    /// Calls `answer` with a message once there is something to tell; with an empty one when `until` has passed and
    /// [`Self::expire`] is called. An agent that waits already is told that another has come.
    pub(crate) fn wait(&self, until: Instant, answer: impl FnOnce(Result<Vec<u8>>) + Send + 'static) {
        let mut state = lock(&self.0);
        let before = state.parked.take();
        if state.events.is_empty() {
            // Everything was replayed.
            state.coming.clear();
        }
        if state.events.is_empty() && !state.is_lossy {
            state.parked = Some((until, Box::new(answer)));
            drop(state);
        } else {
            let message = state.message();
            drop(state);
            answer(Ok(message));
        }
        if let Some((_, answer)) = before {
            answer(Err(Errno::BUSY));
        }
    }

    /// Answers an agent that has waited long enough; returns when the one that waits has.
    pub(crate) fn expire(&self, now: Instant) -> Option<Instant> {
        let mut state = lock(&self.0);
        match state.parked.take() {
            Some((until, answer)) if until <= now => {
                let message = state.message();
                drop(state);
                answer(Ok(message));
                None
            }
            parked => {
                state.parked = parked;
                state.parked.as_ref().map(|(until, _)| *until)
            }
        }
    }

    /// Has the agent ask again.
    pub(crate) fn interrupt(&self) {
        let parked = lock(&self.0).parked.take();
        if let Some((_, answer)) = parked {
            answer(Err(Errno::INTR));
        }
    }

    /// Adds the first event again: the agent that has announced it was killed.
    pub(crate) fn put_back(&self, number: u64, event: Event) {
        let state = &mut *lock(&self.0);
        if let Event::Modified(place) | Event::Closed(place) | Event::Attributes(place) = &event {
            state.mergeable.insert((discriminant(&event), place.clone()));
        }
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
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use ferry_vfs::Name;
    use ferry_wire::events::Message;

    use super::*;

    type Answers = Arc<Mutex<Vec<Result<Vec<u8>>>>>;

    fn wait(queue: &Queue, until: Instant) -> Answers {
        let answers = Answers::default();
        let seen = Arc::clone(&answers);
        queue.wait(until, move |answer| seen.lock().unwrap().push(answer));
        answers
    }

    fn place(name: &str) -> Place {
        Place { ino: Ino(2), name: Some(Name::new(name.as_bytes()).unwrap().to_buf()) }
    }

    fn created(name: &str) -> Event {
        let Place { ino: dir, name } = place(name);
        Event::Created { dir, name: name.unwrap(), is_dir: false, ino: None }
    }

    /// The kinds and numbers of a message, and whether it is lossy.
    fn told(answers: &Answers) -> (bool, Vec<(u64, Kind)>) {
        let answers = answers.lock().unwrap();
        let [Ok(bytes)] = &answers[..] else { panic!("one message: {answers:?}") };
        let message = Message::decode(bytes).unwrap();
        let records = message.records().map(std::result::Result::unwrap);
        (message.is_lossy(), records.map(|record| (record.number, record.kind)).collect())
    }

    #[test]
    fn events_stay_until_they_are_announced() {
        let (queue, never) = (Queue::new(false), Instant::now() + Duration::from_secs(1000));
        assert_eq!(told(&wait(&queue, never)), (true, vec![]), "the first message");
        let parked = wait(&queue, never);
        assert!(parked.lock().unwrap().is_empty());
        queue.push(created("a"));
        queue.push(created("b"));
        assert_eq!(told(&parked), (false, vec![(1, Kind::Created)]));
        let both = vec![(1, Kind::Created), (2, Kind::Created)];
        assert_eq!(told(&wait(&queue, never)), (false, both), "an agent that was started again");
        assert_eq!(queue.announce(2), Some((created("b"), false)));
        assert_eq!(queue.announce(2), None);
        assert!(wait(&queue, never).lock().unwrap().is_empty());
    }

    #[test]
    fn writes_are_merged_until_a_name_changes() {
        let (queue, never) = (Queue::new(false), Instant::now() + Duration::from_secs(1000));
        let _ = wait(&queue, never);
        for _ in 0..1000 {
            queue.push(Event::Modified(place("a")));
            queue.push(Event::Modified(place("b")));
        }
        queue.push(created("a"));
        queue.push(Event::Modified(place("a")));
        queue.push(Event::Modified(place("b")));
        let kinds: Vec<_> = told(&wait(&queue, never)).1.into_iter().map(|(_, kind)| kind).collect();
        assert_eq!(kinds, [Kind::Modified, Kind::Modified, Kind::Created, Kind::Modified]);
        // What is being replayed is not merged with what comes now.
        queue.announce(2);
        queue.push(Event::Modified(place("b")));
        assert_eq!(told(&wait(&queue, never)).1.len(), 3);
    }

    #[test]
    fn too_many_events_are_lost_together() {
        let (queue, never) = (Queue::new(false), Instant::now() + Duration::from_secs(1000));
        let _ = wait(&queue, never);
        for number in 0..=EVENTS_MAX {
            queue.push(created(&number.to_string()));
        }
        assert_eq!(told(&wait(&queue, never)), (true, vec![]));
        queue.push(created("after"));
        let (is_lossy, records) = told(&wait(&queue, never));
        assert!(!is_lossy && records.len() == 1, "{records:?}");
        queue.push(Event::Lost);
        assert_eq!(told(&wait(&queue, never)), (true, vec![]));
    }

    #[test]
    fn an_agent_waits_no_longer_than_it_may_and_for_the_next_agent() {
        let (queue, now) = (Queue::new(false), Instant::now());
        let _ = wait(&queue, now);
        let first = wait(&queue, now + Duration::from_secs(1));
        assert_eq!(queue.expire(now), Some(now + Duration::from_secs(1)));
        let second = wait(&queue, now + Duration::from_secs(2));
        assert_eq!(*first.lock().unwrap(), [Err(Errno::BUSY)]);
        assert_eq!(queue.expire(now + Duration::from_secs(2)), None);
        assert_eq!(told(&second), (false, vec![]));
        let third = wait(&queue, now);
        queue.interrupt();
        assert_eq!(*third.lock().unwrap(), [Err(Errno::INTR)]);
    }

    #[test]
    fn what_has_gone_from_its_name_is_known() {
        let (queue, never) = (Queue::new(false), Instant::now() + Duration::from_secs(1000));
        let _ = wait(&queue, never);
        let name = |text| place(text).name.unwrap();
        queue.push(created("a"));
        queue.push(created("b"));
        let (from, to) = ((Ino(2), name("a")), (Ino(2), name("c")));
        queue.push(Event::Renamed { from, to, is_dir: false, exchanged: false });
        assert_eq!(queue.announce(1), Some((created("a"), true)));
        assert_eq!(queue.announce(2), Some((created("b"), false)));
    }
}
