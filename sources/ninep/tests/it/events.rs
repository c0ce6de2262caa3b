//! What a server of Ferry's tells of what others do: it is published, and what is cached of it is asked for again.
#![allow(clippy::cast_possible_truncation, reason = "bytes of a pattern")]

use crate::common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::fake::{Act, FILE, Fake, reply};
use common::{CX, PATIENCE, Served, name, read, write};
use ferry_9p_client::{Cache, Client, Options};
use ferry_vfs::*;
use ferry_wire::events::{Kind, MessageWriter, Record};
use ferry_wire::ninep::{Reply, Request, Tag};

/// What a source publishes.
#[derive(Default)]
struct Seen {
    changes: Mutex<Vec<(Change, SessionId)>>,
    events: Mutex<Vec<(Event, SessionId)>>,
}

struct Listening(Arc<Seen>);

impl Listener for Listening {
    fn changed(&self, change: &Change, by: SessionId) {
        self.0.changes.lock().unwrap().push((change.clone(), by));
    }

    fn happened(&self, event: &Event, by: SessionId) {
        self.0.events.lock().unwrap().push((event.clone(), by));
    }

    fn wants_events(&self) -> bool {
        true
    }

    fn is_behind(&self) -> bool {
        false
    }

    fn when_delivered(&self, _: DeliveryGuard) {}
}

fn listen(client: &Client) -> (Arc<Seen>, Subscription) {
    let seen = Arc::<Seen>::default();
    let subscription = client.changes().unwrap().listen(Listening(Arc::clone(&seen)));
    (seen, subscription)
}

#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what} does not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Seen {
    /// Waits for an event that no client of this process caused.
    #[track_caller]
    fn has_event(&self, event: &Event) {
        until(&format!("{event:?}"), || self.events.lock().unwrap().contains(&(event.clone(), SessionId::default())));
    }

    #[track_caller]
    fn has_change(&self, change: &Change) {
        until(&format!("{change:?}"), || {
            self.changes.lock().unwrap().contains(&(change.clone(), SessionId::default()))
        });
    }

    fn count(&self, is_it: impl Fn(&Event) -> bool) -> usize {
        self.events.lock().unwrap().iter().filter(|(event, _)| is_it(event)).count()
    }
}

fn options(cache: Cache) -> Options {
    Options { cache, ..Options::default() }
}

fn make(client: &Client, dir: Ino, text: &str) -> (Ino, Handle) {
    let (entry, handle) = client.create(&CX, dir, name(text), &common::file(0o600), OFlags::RDWR).unwrap();
    (entry.ino, handle)
}

fn place(ino: Ino) -> Place {
    Place { ino, name: None }
}

/// Even where everything is kept for ever.
#[test]
fn writes_of_others_are_visible_without_a_new_open() {
    for cache in [Cache::Auto, Cache::Always] {
        let served = Served::with_events();
        let [one, two] = [(); 2].map(|()| served.connect(options(cache)));
        assert!(one.features().events);
        let (made, writer) = make(&two, Ino::ROOT, "f");
        write(&two, made, writer, 0, b"by the two").unwrap();
        two.flush(&CX, made, writer, 0).unwrap();
        let found = one.lookup(&CX, Ino::ROOT, name("f")).unwrap();
        let reader = one.open(&CX, found.ino, OFlags::RDONLY).unwrap();
        assert_eq!(read(&one, found.ino, reader, 0, 99).unwrap(), b"by the two");
        let (seen, _listening) = listen(&one);
        for text in [&b"once again"[..], b"and longer than before", b"short"] {
            seen.events.lock().unwrap().clear();
            seen.changes.lock().unwrap().clear();
            two.setattr(&CX, made, None, &SetAttr { size: Some(0), ..SetAttr::default() }).unwrap();
            write(&two, made, writer, 0, text).unwrap();
            two.flush(&CX, made, writer, 0).unwrap();
            seen.has_event(&Event::Modified(place(found.ino)));
            seen.has_change(&Change::Data { ino: found.ino, offset: 0, len: u64::MAX });
            until("the new text", || read(&one, found.ino, reader, 0, 99).unwrap() == text);
        }
    }
}

#[test]
fn names_are_published_with_the_numbers_of_the_client() {
    let served = Served::with_events();
    let [one, two] = [(); 2].map(|()| served.connect(options(Cache::Auto)));
    let there = two.mkdir(&CX, Ino::ROOT, name("d"), &common::dir(0o755)).unwrap().ino;
    let (moved, _) = make(&two, Ino::ROOT, "f");
    let dir = one.lookup(&CX, Ino::ROOT, name("d")).unwrap().ino;
    let file = one.lookup(&CX, Ino::ROOT, name("f")).unwrap().ino;
    let (seen, _listening) = listen(&one);
    // Its own, by its session.
    one.mkdir(&CX, dir, name("own"), &common::dir(0o755)).unwrap();
    two.mkdir(&CX, there, name("new"), &common::dir(0o755)).unwrap();
    let [new, from, to] = ["new", "f", "g"].map(|text| name(text).to_buf());
    seen.has_event(&Event::Created { dir, name: new.clone(), is_dir: true, ino: None });
    seen.has_change(&Change::Unsure { dir, name: new });
    two.rename(&CX, (Ino::ROOT, name("f")), (there, name("g")), RenameFlags::empty()).unwrap();
    let renamed =
        Event::Renamed { from: (Ino::ROOT, from.clone()), to: (dir, to.clone()), is_dir: false, exchanged: false };
    seen.has_event(&renamed);
    seen.has_change(&Change::Entry { dir: Ino::ROOT, name: from });
    two.setattr(&CX, moved, None, &SetAttr { mode: Some(0o640), ..SetAttr::default() }).unwrap();
    seen.has_event(&Event::Attributes(place(file)));
    seen.has_change(&Change::Attr { ino: file });
    two.unlink(&CX, there, name("g")).unwrap();
    seen.has_event(&Event::Removed { dir, name: to.clone(), is_dir: false, ino: Some(file) });
    seen.has_change(&Change::Removed { dir, name: to, ino: file });
    let own = |event: &Event| matches!(event, Event::Created { name: new, .. } if new.as_name() == name("own"));
    let by: Vec<_> = seen.events.lock().unwrap().iter().filter(|(event, _)| own(event)).map(|(_, by)| *by).collect();
    assert_eq!(by, [CX.session], "once, by who did it");
}

/// An event of a new file without a lookup has its name.
#[test]
fn changes_of_a_new_file_are_reported_by_name() {
    let served = Served::with_events();
    let [one, two] = [(); 2].map(|()| served.connect(options(Cache::Auto)));
    let (seen, _listening) = listen(&one);
    let (made, handle) = make(&two, Ino::ROOT, "f");
    let text = name("f").to_buf();
    seen.has_event(&Event::Created { dir: Ino::ROOT, name: text.clone(), is_dir: false, ino: None });
    // Also after a while.
    std::thread::sleep(Duration::from_millis(50));
    write(&two, made, handle, 0, b"text").unwrap();
    two.flush(&CX, made, handle, 0).unwrap();
    seen.has_event(&Event::Modified(Place { ino: Ino::ROOT, name: Some(text) }));
}

/// Many writes are few events, and the last is in what is read.
#[test]
fn a_flood_is_merged() {
    const WRITES: u32 = 20_000;
    let served = Served::with_events();
    let (one, two) = (served.connect(options(Cache::Always)), served.connect(options(Cache::None)));
    let (made, writer) = make(&two, Ino::ROOT, "f");
    let found = one.lookup(&CX, Ino::ROOT, name("f")).unwrap();
    let reader = one.open(&CX, found.ino, OFlags::RDONLY).unwrap();
    let (seen, _listening) = listen(&one);
    let begin = Instant::now();
    for number in 1..=WRITES {
        write(&two, made, writer, 0, &number.to_le_bytes()).unwrap();
    }
    until("the last write", || read(&one, found.ino, reader, 0, 4).unwrap() == WRITES.to_le_bytes());
    // The pause after each message lets the server merge.
    let (events, elapsed) = (seen.count(|event| matches!(event, Event::Modified(_))) as u128, begin.elapsed());
    assert!((1..=elapsed.as_millis() / 5 + 2).contains(&events), "{events} events in {elapsed:?}");
}

/// With the connection, everything that was cached is in doubt, at once and without an end of the client's patience.
#[test]
fn a_lost_connection_drops_all_caches() {
    let served = Served::with_events();
    let one = served.connect(options(Cache::Always));
    let (made, handle) = make(&one, Ino::ROOT, "f");
    write(&one, made, handle, 0, b"old").unwrap();
    one.fsync(&CX, made, handle, false).unwrap();
    assert_eq!(read(&one, made, handle, 0, 99).unwrap(), b"old");
    let (seen, _listening) = listen(&one);
    served.stop();
    seen.has_change(&Change::All);
    seen.has_event(&Event::Lost);
    // While it is away.
    let source = &served.source;
    let root = Caller { session: SessionId::unique(), ..Caller::default() };
    let entry = source.lookup(&root, Ino::ROOT, name("f")).unwrap();
    source.setattr(&root, entry.ino, None, &SetAttr { size: Some(1), ..SetAttr::default() }).unwrap();
    served.restart(true);
    until("the new length", || read(&one, made, handle, 0, 99).unwrap() == b"o");
    // And it is told of what happens from then on.
    seen.changes.lock().unwrap().clear();
    source.setattr(&root, entry.ino, None, &SetAttr { mode: Some(0o640), ..SetAttr::default() }).unwrap();
    source.forget(entry.ino, 1);
    seen.has_event(&Event::Attributes(place(made)));
}

/// The kernel of the caller has the names as they were, too.
#[test]
fn names_are_looked_up_again_when_it_is_unknown_whether_they_were_changed() {
    type Act9p = fn(&Client, Ino) -> Result<()>;
    let acts: [(&str, Act9p, &[&str]); 7] = [
        ("mkdir", |client, _| client.mkdir(&CX, Ino::ROOT, name("d"), &common::dir(0o755)).map(drop), &["d"]),
        ("mknod", |client, _| client.mknod(&CX, Ino::ROOT, name("n"), &common::file(0o644)).map(drop), &["n"]),
        ("symlink", |client, _| client.symlink(&CX, Ino::ROOT, name("s"), b"to").map(drop), &["s"]),
        (
            "create",
            |client, _| client.create(&CX, Ino::ROOT, name("c"), &common::file(0o644), OFlags::RDWR).map(drop),
            &["c"],
        ),
        ("link", |client, file| client.link(&CX, file, Ino::ROOT, name("l")).map(drop), &["l"]),
        ("unlink", |client, _| client.unlink(&CX, Ino::ROOT, name("f")), &["f"]),
        (
            "rename",
            |client, _| {
                let [from, to] = ["f", "g"].map(|text| (Ino::ROOT, name(text)));
                client.rename(&CX, from, to, RenameFlags::empty())
            },
            &["f", "g"],
        ),
    ];
    for (what, act, names) in acts {
        let fake = Fake::new(|_, request| {
            let changes_names = matches!(
                request,
                Request::Mkdir { .. }
                    | Request::Mknod { .. }
                    | Request::Symlink { .. }
                    | Request::Create { .. }
                    | Request::Link { .. }
                    | Request::Unlinkat { .. }
                    | Request::Renameat { .. }
            );
            changes_names.then_some(Act::HangUp)
        });
        let client = fake.connect(options(Cache::Auto)).unwrap();
        let file = client.lookup(&CX, Ino::ROOT, name("f")).unwrap().ino;
        let (seen, _listening) = listen(&client);
        assert_eq!(act(&client, file), Err(Errno::IO), "{what}");
        for text in names {
            seen.has_change(&Change::Unsure { dir: Ino::ROOT, name: name(text).to_buf() });
        }
    }
}

#[test]
fn servers_without_events_are_as_before() {
    let served = Served::new();
    let [one, two] = [(); 2].map(|()| served.connect(options(Cache::Auto)));
    assert!(!one.features().events);
    let (seen, _listening) = listen(&one);
    make(&two, Ino::ROOT, "f");
    make(&one, Ino::ROOT, "g");
    assert!(one.lookup(&CX, Ino::ROOT, name("f")).is_ok());
    assert!(seen.events.lock().unwrap().is_empty(), "what it does itself is a change only");
    assert!(seen.changes.lock().unwrap().iter().all(|(_, by)| *by == CX.session));
    // One that had none does not begin to, and one that had some may end that.
    served.restart(true);
    assert!(one.lookup(&CX, Ino::ROOT, name("f")).is_ok() && !one.features().events);
    let told = served.connect(options(Cache::Auto));
    let (seen, _listening) = listen(&told);
    served.restart(false);
    seen.has_event(&Event::Lost);
    assert!(told.lookup(&CX, Ino::ROOT, name("f")).is_ok());
    // Further connections write, too, and would be taken for others.
    served.restart(true);
    assert!(!served.connect(Options { connections: 2, ..Options::default() }).features().events);
}

/// A server that tells what a test says. The first answer says that it tells anything.
fn telling(tell: impl Fn(u64, u64) -> Option<Vec<u8>> + Send + Sync + 'static) -> Fake {
    let asked = AtomicU64::new(0);
    Fake::new(move |tag: Tag, request: &Request<'_>| match *request {
        Request::Events { acknowledged, .. } => {
            let number = asked.fetch_add(1, Ordering::Relaxed);
            let first = || MessageWriter::new(true).finish();
            let message = if number == 0 { Some(first()) } else { tell(number, acknowledged) };
            Some(message.map_or(Act::Silence, |message| reply(tag, &Reply::Events(&message))))
        }
        _ => None,
    })
}

fn hasty() -> Options {
    Options { timeout: Duration::from_millis(300), patience: PATIENCE, ..Options::default() }
}

#[test]
fn an_invalid_message_ends_only_the_connection() {
    let record = |event: &Event| {
        let mut message = MessageWriter::new(false);
        assert!(message.push(&Record::of(1, event).unwrap()));
        message.finish()
    };
    let good = record(&Event::Modified(place(Ino(FILE.path))));
    let cut = good[..good.len() - 8].to_vec();
    let mut unknown = good.clone();
    unknown[18] = 77;
    for nonsense in [vec![], b"FEV1".to_vec(), vec![0xff; 4000], cut, unknown] {
        let text = nonsense.clone();
        let server =
            telling(move |number, _| Some(if number == 1 { text.clone() } else { MessageWriter::new(true).finish() }));
        let client = server.connect(Options { timeout: PATIENCE, ..hasty() }).unwrap();
        let (seen, _listening) = listen(&client);
        seen.has_event(&Event::Lost);
        let found = client.lookup(&CX, Ino::ROOT, name("f")).unwrap();
        assert_eq!(client.getattr(&CX, found.ino, None).unwrap().size, 1000, "{nonsense:?}");
        assert!(client.features().events);
    }
}

/// Unknown inodes, files as directories and decreasing sequence numbers are ignored.
#[test]
fn events_of_unknown_inodes_are_ignored() {
    let text = name("x").to_buf();
    let (file, absent) = (Ino(FILE.path), Ino(u64::MAX));
    let strange = [
        Event::Created { dir: file, name: text.clone(), is_dir: false, ino: None },
        Event::Created { dir: absent, name: text.clone(), is_dir: true, ino: None },
        Event::Removed { dir: file, name: text.clone(), is_dir: false, ino: Some(file) },
        Event::Renamed { from: (absent, text.clone()), to: (file, text.clone()), is_dir: true, exchanged: true },
        Event::Modified(place(absent)),
        Event::Closed(Place { ino: file, name: Some(text.clone()) }),
        Event::Attributes(place(Ino(0))),
        Event::Modified(place(file)),
    ];
    let told = strange.clone();
    let server = telling(move |number, acknowledged| {
        let mut message = MessageWriter::new(false);
        for event in &told {
            assert!(message.push(&Record::of(if number % 2 == 0 { 0 } else { u64::MAX }, event).unwrap()));
        }
        for kind in [Kind::StaleData, Kind::StaleAttributes] {
            assert!(message.push(&Record::stale(kind, absent)));
        }
        assert!(matches!(acknowledged, 0 | u64::MAX));
        Some(message.finish())
    });
    let client = server.connect(Options { timeout: PATIENCE, ..hasty() }).unwrap();
    let found = client.lookup(&CX, Ino::ROOT, name("f")).unwrap();
    let (seen, _listening) = listen(&client);
    seen.has_event(&Event::Modified(place(found.ino)));
    until("another message", || seen.count(|event| matches!(event, Event::Modified(_))) > 3);
    assert_eq!(seen.count(|event| !matches!(event, Event::Modified(_))), 0, "{:?}", seen.events.lock().unwrap());
}

/// A server that answers at once with nothing is asked no more often than another one.
#[test]
fn a_server_that_replies_at_once_is_polled_slowly() {
    let begin = Instant::now();
    let asked = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&asked);
    let server = telling(move |_, _| {
        count.fetch_add(1, Ordering::Relaxed);
        Some(MessageWriter::new(false).finish())
    });
    let client = server.connect(hasty()).unwrap();
    until("some requests", || asked.load(Ordering::Relaxed) > 50);
    let (asked, elapsed) = (asked.load(Ordering::Relaxed), begin.elapsed());
    assert!(u128::from(asked) <= elapsed.as_millis() / 5 + 2, "{asked} requests in {elapsed:?}");
    drop(client);
}

/// A server that keeps a request longer than it may has gone.
#[test]
fn a_silent_server_is_detected() {
    let server = telling(|number, _| (number % 2 == 0).then(|| MessageWriter::new(true).finish()));
    let client = server.connect(hasty()).unwrap();
    let (seen, _listening) = listen(&client);
    seen.has_event(&Event::Lost);
    assert!(client.lookup(&CX, Ino::ROOT, name("f")).is_ok());
}
