use std::sync::Arc;
use std::time::Duration;

use ferry_vfs::Name;
use ferry_wire::events::Message;

use super::*;

type Answers = Arc<Mutex<Vec<Result<Vec<u8>>>>>;

fn wait(queue: &Queue, until: Instant) -> Answers {
    let answers = Answers::default();
    let seen = Arc::clone(&answers);
    queue.wait(7, until, move |answer| seen.lock().unwrap().push(answer));
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
    // An event that is being replayed is not merged with later ones.
    queue.announce(2);
    queue.push(Event::Modified(place("b")));
    assert_eq!(told(&wait(&queue, never)).1.len(), 3);
}

/// A program that watches only `Closed` must not miss the last write.
#[test]
fn close_write_events_follow_their_writes() {
    let (queue, never) = (Queue::new(false), Instant::now() + Duration::from_secs(1000));
    let _ = wait(&queue, never);
    let write = || [Event::Modified, Event::Closed].into_iter().for_each(|event| queue.push(event(place("a"))));
    write();
    assert!(queue.announce(1).is_some());
    // The first is being replayed: its `Closed` is sent before the second `Modified`.
    (0..10).for_each(|_| write());
    let kinds: Vec<_> = told(&wait(&queue, never)).1.into_iter().map(|(_, kind)| kind).collect();
    assert_eq!(kinds, [Kind::Closed, Kind::Modified, Kind::Closed]);
}

#[test]
fn a_loss_is_reported_until_the_same_thread_asks_again() {
    let (queue, now) = (Queue::new(false), Instant::now());
    let told_to = |pid| {
        let answers = Answers::default();
        let (seen, has_dropped) = (Arc::clone(&answers), queue.take_dropped(pid));
        queue.wait(pid, now, move |answer| seen.lock().unwrap().push(answer));
        queue.expire(now);
        (has_dropped, told(&answers).0)
    };
    assert_eq!([1, 2, 2, 3].map(told_to), [(false, true), (false, true), (true, false), (false, false)]);
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
fn renamed_and_removed_names_are_known() {
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

#[test]
fn sent_events_are_not_merged_before_acknowledgement() {
    let (queue, never) = (Queue::of_client(4096), Instant::now() + Duration::from_secs(1000));
    let _ = wait(&queue, never);
    queue.acknowledge(u64::MAX);
    queue.push(Event::Modified(place("a")));
    queue.push(Event::Modified(place("a")));
    assert_eq!(told(&wait(&queue, never)).1, [(1, Kind::Modified)]);
    // While the client processes the first.
    queue.push(Event::Modified(place("a")));
    queue.push(Event::Modified(place("a")));
    queue.acknowledge(0);
    assert_eq!(told(&wait(&queue, never)).1, [(1, Kind::Modified), (2, Kind::Modified)], "a reply was lost");
    queue.push(created("b"));
    queue.acknowledge(u64::MAX);
    assert_eq!(told(&wait(&queue, never)).1, [(3, Kind::Created)], "only what was sent");
    queue.acknowledge(3);
    assert!(wait(&queue, never).lock().unwrap().is_empty() && queue.is_waiting());
    queue.lose();
    queue.push(created("c"));
    assert!(!queue.is_waiting());
}

#[test]
fn an_event_that_is_put_back_counts() {
    let (queue, never) = (Queue::new(false), Instant::now() + Duration::from_secs(1000));
    let _ = wait(&queue, never);
    (0..EVENTS_MAX).for_each(|number| queue.push(created(&number.to_string())));
    let (first, _) = queue.announce(1).unwrap();
    queue.push(created("more"));
    queue.put_back(1, first);
    assert!(lock(&queue.0).events.len() <= EVENTS_MAX);
    assert!(told(&wait(&queue, never)).0, "all are lost");
}

#[test]
fn messages_for_a_client_are_as_short_as_it_wants() {
    let (queue, never) = (Queue::of_client(100), Instant::now() + Duration::from_secs(1000));
    let _ = wait(&queue, never);
    (0..100).for_each(|number| queue.push(created(&number.to_string())));
    let mut numbers = Vec::new();
    while numbers.len() < 100 {
        let answers = wait(&queue, never);
        assert!(answers.lock().unwrap()[0].as_ref().unwrap().len() <= 100);
        numbers.extend(told(&answers).1.iter().map(|(number, _)| *number));
        queue.acknowledge(*numbers.last().unwrap());
    }
    assert!(numbers.into_iter().eq(1..=100));
}

#[test]
fn stale_inodes_are_reported_before_events() {
    let (queue, never) = (Queue::of_client(100), Instant::now() + Duration::from_secs(1000));
    let _ = wait(&queue, never);
    let parked = wait(&queue, never);
    queue.stale(Kind::StaleData, Ino(1));
    assert_eq!(told(&parked).1, [(0, Kind::StaleData)]);
    assert!(wait(&queue, never).lock().unwrap().is_empty(), "once");
    queue.push(Event::Modified(place("a")));
    for round in 0..1000 {
        queue.stale(Kind::StaleAttributes, Ino(round % 7));
    }
    let (mut stale, mut messages) = (0, Vec::new());
    while stale < 7 {
        let (is_lossy, records) = told(&wait(&queue, never));
        assert!(!is_lossy);
        stale += records.iter().filter(|(_, kind)| kind.is_stale()).count();
        messages.push(records);
    }
    let last = messages.pop().unwrap();
    assert!(messages.iter().flatten().all(|(_, kind)| kind.is_stale()), "{messages:?}");
    assert_eq!((stale, last.last()), (7, Some(&(1, Kind::Modified))));
    (0..=EVENTS_MAX as u64).for_each(|number| queue.stale(Kind::StaleData, Ino(number)));
    assert!(told(&wait(&queue, never)).0, "too much");
}

/// A new file with a number for its name; its inode is 1000 more.
fn new(number: u64) -> Event {
    let Event::Created { dir, name, is_dir, .. } = created(&number.to_string()) else { unreachable!() };
    Event::Created { dir, name, is_dir, ino: Some(Ino(1000 + number)) }
}

#[test]
fn new_files_are_known_by_where_they_were_moved() {
    let queue = Queue::of_client(4096);
    let at = |name: u64| place(&name.to_string());
    let entry = |name: u64| (at(name).ino, at(name).name.unwrap());
    let renamed = |from, to, exchanged| Event::Renamed { from: entry(from), to: entry(to), is_dir: false, exchanged };
    let by_name = |number: u64| queue.by_new_name(&Event::Modified(Place { ino: Ino(1000 + number), name: None }));
    (1..=3).for_each(|number| queue.push(new(number)));
    queue.push(renamed(1, 2, true));
    assert_eq!([by_name(1), by_name(2)], [2, 1].map(|name| Some(Event::Modified(at(name)))));
    queue.push(renamed(3, 2, false));
    assert_eq!([by_name(1), by_name(3)], [None, Some(Event::Modified(at(2)))]);
}

#[test]
fn new_files_of_a_client_have_their_names_for_long() {
    let (queue, never) = (Queue::of_client(4096), Instant::now() + Duration::from_secs(1000));
    let by_name = |number| queue.by_new_name(&Event::Modified(Place { ino: Ino(1000 + number), name: None }));
    for number in 0..2 * LOOK_AHEAD as u64 {
        queue.push(new(number));
        let _ = wait(&queue, never);
        queue.acknowledge(number + 1);
        assert_eq!(by_name(number), Some(Event::Modified(place(&number.to_string()))));
    }
    assert_eq!((by_name(0), by_name(LOOK_AHEAD as u64).is_some()), (None, true));
    assert!(lock(&queue.0).new_names.len() <= LOOK_AHEAD);
}
