//! What clients of Ferry's are told of what others do.

use crate::common;

use std::sync::Arc;
use std::time::Duration;

use common::{Client, Link, MSIZE, ROOT, Server, name};
use ferry_mem::Mem;
use ferry_ninep::{Identity, Options, Users};
use ferry_vfs::{
    Attr, Caller, Change, Changes, Entry, Errno, Event, FileSystem, Handle, Ino, Name, OFlags, Result, SessionId,
};
use ferry_wire::events::{Kind, Message, Record};
use ferry_wire::ninep::*;

/// The events of a source are kept up to this number.
const EVENTS_MAX: usize = 1 << 16;
const DIR: Fid = Fid(1);
const FILE: Fid = Fid(2);

fn serve(options: Options) -> (Server, Arc<Mem>) {
    let mem = Arc::new(Mem::new(&ferry_mem::Options { size_bytes: Some(64 << 20), ..Default::default() }).unwrap());
    (Server::of(Arc::clone(&mem) as Arc<dyn FileSystem>, options), mem)
}

fn told(options: Options) -> (Server, Arc<Mem>) {
    serve(Options { events: true, ..options })
}

/// A client of Ferry's that has attached.
fn attached(server: &Server, msize: u32) -> Client<Link> {
    let mut client = server.connect();
    client.hello_in(msize, VERSION_OF_FERRY);
    client.attach(ROOT, 0).unwrap();
    client
}

fn request(acknowledged: u64, wait_ms: u32) -> Request<'static> {
    Request::Events { fid: ROOT, acknowledged, wait_ms }
}

/// What a message tells: whether it is lossy, its events, and the number of the last one.
type Told = (bool, Vec<Event>, u64);

fn decoded(message: &[u8]) -> Result<Told> {
    match Reply::decode(message).unwrap().1 {
        Reply::Error(errno) => Err(errno),
        Reply::Events(data) => {
            let message = Message::decode(data).unwrap();
            let records: Vec<_> = message.records().map(std::result::Result::unwrap).collect();
            let last = records.last().map_or(0, |record| record.number);
            Ok((message.is_lossy(), records.iter().map(|record| record.event().unwrap()).collect(), last))
        }
        other => panic!("{other:?}"),
    }
}

fn ask(client: &mut Client<Link>, acknowledged: u64, wait_ms: u32) -> Result<Told> {
    decoded(&client.ask(&request(acknowledged, wait_ms)))
}

/// Everything until nothing more comes; checks that the first message says that what was before is not known.
fn begin(client: &mut Client<Link>) {
    assert_eq!(ask(client, 0, 60_000), Ok((true, vec![], 0)));
}

#[test]
fn events_have_the_clients_inode_numbers() {
    let (server, _mem) = told(Options::default());
    let mut other = server.attached(0);
    other.ok(&Request::Mkdir { dir: ROOT, name: name("d"), mode: 0o755, gid: 0 }).unwrap();
    other.create(Fid(5), "f", OFlags::RDWR, 0o600).unwrap();
    let mut client = attached(&server, MSIZE);
    begin(&mut client);
    let dir = Ino(client.walk(ROOT, DIR, "d").unwrap()[0].path);
    let file = Ino(client.walk(ROOT, FILE, "f").unwrap()[0].path);
    let root = Ino(client.getattr(ROOT).unwrap().qid.path);
    // Its own changes are not told, and those of the other one are, at once.
    client.ok(&Request::Mkdir { dir: DIR, name: name("own"), mode: 0o755, gid: 0 }).unwrap();
    client.send(Tag(2000), &request(0, 60_000));
    other.write(Fid(5), 0, b"text").unwrap();
    let (tag, message) = client.receive();
    let place = ferry_vfs::Place { ino: file, name: None };
    let (is_lossy, events, last) = decoded(&message).unwrap();
    assert_eq!((tag, is_lossy, &events[..]), (Tag(2000), false, &[Event::Modified(place.clone())][..]));
    // Without an acknowledgement it is told once more, before what came later.
    other.walk(ROOT, Fid(6), "d").unwrap();
    let mkdir = Request::Mkdir { dir: Fid(6), name: name("new"), mode: 0o755, gid: 0 };
    other.ok(&mkdir).unwrap();
    let is_new = |event: &Event| {
        matches!(event, Event::Created { dir: at, name: new, is_dir: true, ino: None }
        if *at == dir && new.as_name() == name("new"))
    };
    let (_, events, _) = ask(&mut client, 0, 60_000).unwrap();
    assert!(events.len() == 2 && events[0] == Event::Modified(place) && is_new(&events[1]), "{events:?}");
    let (_, events, last) = ask(&mut client, last, 60_000).unwrap();
    assert!(events.len() == 1 && is_new(&events[0]), "{events:?}");
    other.ok(&Request::Renameat { dir: ROOT, name: name("f"), new_dir: Fid(6), new_name: name("g") }).unwrap();
    other.ok(&Request::Unlinkat { dir: Fid(6), name: name("g"), is_dir: false }).unwrap();
    let (mut events, mut acknowledged) = (Vec::new(), last);
    while !events.iter().any(|event| matches!(event, Event::Removed { .. })) {
        let (_, more, last) = ask(&mut client, acknowledged, 60_000).unwrap();
        (acknowledged, events) = (last, [events, more].concat());
    }
    let (from, to) = ((root, name("f").to_buf()), (dir, name("g").to_buf()));
    let removed = Event::Removed { dir, name: name("g").to_buf(), is_dir: false, ino: Some(file) };
    let renamed = Event::Renamed { from, to, is_dir: false, exchanged: false };
    let of_names: Vec<_> = events.into_iter().filter(|event| !matches!(event, Event::Attributes(_))).collect();
    assert_eq!(of_names, [renamed, removed]);
}

/// Only of what a client has fids of, it is told.
#[test]
fn events_cover_only_inodes_with_fids() {
    let (server, _mem) = told(Options::default());
    let mut other = server.attached(0);
    other.ok(&Request::Mkdir { dir: ROOT, name: name("d"), mode: 0o755, gid: 0 }).unwrap();
    other.walk(ROOT, DIR, "d").unwrap();
    let mut client = attached(&server, MSIZE);
    begin(&mut client);
    other.ok(&Request::Mkdir { dir: DIR, name: name("unseen"), mode: 0o755, gid: 0 }).unwrap();
    client.walk(ROOT, DIR, "d").unwrap();
    other.ok(&Request::Mkdir { dir: DIR, name: name("seen"), mode: 0o755, gid: 0 }).unwrap();
    client.ok(&Request::Clunk { fid: DIR }).unwrap();
    other.ok(&Request::Mkdir { dir: DIR, name: name("later"), mode: 0o755, gid: 0 }).unwrap();
    other.ok(&Request::Mkdir { dir: ROOT, name: name("last"), mode: 0o755, gid: 0 }).unwrap();
    let (_, events, _) = ask(&mut client, 0, 60_000).unwrap();
    let names: Vec<_> = events
        .iter()
        .filter_map(|event| if let Event::Created { name, .. } = event { Some(name.as_name()) } else { None })
        .collect();
    assert_eq!(names, [name("seen"), name("last")]);
}

#[test]
fn others_are_refused_with_a_plain_error_and_are_served_as_before() {
    let bound = Users::Only(vec![Identity::default(), Identity { uid: 7, gid: 7, groups: vec![] }]);
    let cases = [
        // Neither stock clients nor clients of a server without events, nor users who may not see every name.
        (Options { events: true, ..Options::default() }, VERSION, 0, Err(Errno::OPNOTSUPP)),
        (Options::default(), VERSION_OF_FERRY, 0, Err(Errno::OPNOTSUPP)),
        (Options { events: true, users: bound.clone(), ..Options::default() }, VERSION_OF_FERRY, 7, Err(Errno::ACCESS)),
        (Options { events: true, users: bound, ..Options::default() }, VERSION_OF_FERRY, 0, Ok((true, vec![], 0))),
    ];
    for (options, version, uid, expected) in cases {
        let (server, mem) = serve(options);
        mem.setattr(
            &Caller::default(),
            Ino::ROOT,
            None,
            &ferry_vfs::SetAttr { mode: Some(0o755), ..Default::default() },
        )
        .unwrap();
        let mut client = server.connect();
        client.hello_in(MSIZE, version);
        client.attach(ROOT, uid).unwrap();
        assert_eq!(ask(&mut client, 0, 60_000), expected);
        assert!(client.getattr(ROOT).is_ok() && server.invalid() == 0);
        assert_eq!(
            decoded(&client.ask(&Request::Events { fid: Fid(9), acknowledged: 0, wait_ms: 0 })),
            Err(Errno::BADF)
        );
    }
}

/// Two requests at a time, and one that is flushed: nothing is lost without a word.
#[test]
fn a_second_request_ends_the_first_and_a_flush_loses_events() {
    let (server, _mem) = told(Options::default());
    let (mut client, mut other) = (attached(&server, MSIZE), server.attached(0));
    begin(&mut client);
    client.send(Tag(2000), &request(0, 60_000));
    server.settles(|usage| usage.requests == 1 && usage.parked_locks == 0);
    client.send(Tag(2001), &request(0, 60_000));
    let (tag, message) = client.receive();
    assert_eq!((tag, decoded(&message)), (Tag(2000), Err(Errno::BUSY)));
    client.send(Tag(2002), &Request::Flush { old: Tag(2001) });
    let (tag, message) = client.receive();
    assert_eq!((tag, Reply::decode(&message).unwrap().1), (Tag(2002), Reply::Flush));
    server.settles(|usage| usage.requests == 0);
    other.ok(&Request::Mkdir { dir: ROOT, name: name("d"), mode: 0o755, gid: 0 }).unwrap();
    assert_eq!(ask(&mut client, 0, 60_000), Ok((true, vec![], 0)), "it was told to a request that was flushed");
    other.ok(&Request::Mkdir { dir: ROOT, name: name("e"), mode: 0o755, gid: 0 }).unwrap();
    let (is_lossy, events, _) = ask(&mut client, 0, 60_000).unwrap();
    assert!(!is_lossy && matches!(events[0], Event::Created { .. }), "{events:?}");
    assert!(client.getattr(ROOT).is_ok());
}

#[test]
fn a_request_waits_no_longer_than_it_may() {
    let (server, _mem) = told(Options::default());
    let mut client = attached(&server, MSIZE);
    begin(&mut client);
    for wait_ms in [0, 1, 300] {
        assert_eq!(ask(&mut client, u64::MAX, wait_ms), Ok((false, vec![], 0)));
    }
    // No thread waits for it, and its end is that of its connection.
    client.send(Tag(2000), &request(0, u32::MAX));
    server.settles(|usage| usage.requests == 1);
    assert!(client.is_silent(Duration::from_millis(100)));
    drop(client);
    server.settles(|usage| usage.requests == 0 && usage.fids == 0);
}

/// A session that ends has its events ended, too.
#[test]
fn a_new_session_has_no_fids() {
    let (server, _mem) = told(Options::default());
    let (mut client, mut other) = (attached(&server, MSIZE), server.attached(0));
    begin(&mut client);
    client.send(Tag(2000), &request(0, 60_000));
    server.settles(|usage| usage.requests == 1);
    client.hello_in(MSIZE, VERSION_OF_FERRY);
    client.attach(ROOT, 0).unwrap();
    other.ok(&Request::Mkdir { dir: ROOT, name: name("d"), mode: 0o755, gid: 0 }).unwrap();
    begin(&mut client);
}

/// Messages are as short as was agreed on, whatever the names.
#[test]
fn messages_fit() {
    let (server, _mem) = told(Options::default());
    let (mut client, mut other) = (attached(&server, MSIZE_MIN), server.attached(0));
    begin(&mut client);
    let names: Vec<String> = (0..100).map(|number| format!("{number:0>255}")).collect();
    for long in &names {
        other.ok(&Request::Mkdir { dir: ROOT, name: name(long), mode: 0o755, gid: 0 }).unwrap();
    }
    let (mut seen, mut acknowledged) = (Vec::new(), 0);
    while seen.len() < names.len() {
        let message = client.ask(&request(acknowledged, 60_000));
        assert!(message.len() <= MSIZE_MIN as usize, "{}", message.len());
        let (is_lossy, events, last) = decoded(&message).unwrap();
        assert!(!is_lossy && last > acknowledged);
        acknowledged = last;
        seen.extend(events.into_iter().filter_map(|event| match event {
            Event::Created { name, .. } => Some(String::from_utf8(name.as_name().as_bytes().to_vec()).unwrap()),
            _ => None,
        }));
    }
    assert_eq!(seen, names);
}

/// Floods: what is done to one file is one event, and of too many events everything is forgotten.
#[test]
fn floods_are_merged_or_forgotten() {
    let (server, mem) = told(Options::default());
    let mut other = server.attached(0);
    other.create(Fid(5), "f", OFlags::RDWR, 0o600).unwrap();
    let mut client = attached(&server, MSIZE);
    begin(&mut client);
    client.walk(ROOT, FILE, "f").unwrap();
    let by = SessionId::default();
    let found = mem.lookup(&Caller::default(), Ino::ROOT, name("f")).unwrap();
    let changes = mem.changes().unwrap();
    let publish = |event: Event| changes.publish_event(by, || Some(event));
    for _ in 0..1_000_000 {
        publish(Event::Modified(ferry_vfs::Place { ino: found.ino, name: None }));
    }
    let (is_lossy, events, last) = ask(&mut client, 0, 60_000).unwrap();
    assert_eq!((is_lossy, events.len()), (false, 1));
    // From a client that does not ask for a while.
    for number in 0..=EVENTS_MAX {
        let name = name(&number.to_string()).to_buf();
        publish(Event::Created { dir: Ino::ROOT, name, is_dir: false, ino: None });
    }
    // The first one was not acknowledged when the last one came.
    let (is_lossy, events, last) = ask(&mut client, last, 60_000).unwrap();
    assert_eq!((is_lossy, events.len()), (true, 1));
    publish(Event::Modified(ferry_vfs::Place { ino: found.ino, name: None }));
    let (is_lossy, events, _) = ask(&mut client, last, 60_000).unwrap();
    assert_eq!((is_lossy, events.len()), (false, 1));
    mem.forget(found.ino, 1);
}

/// Events name files by their directories, so which inode has changed is told beside them.
#[test]
fn changes_on_the_host_make_caches_stale() {
    let (server, mem) = told(Options::default());
    let mut other = server.attached(0);
    other.create(Fid(5), "f", OFlags::RDWR, 0o600).unwrap();
    let mut client = attached(&server, MSIZE);
    begin(&mut client);
    let path = Ino(client.walk(ROOT, FILE, "f").unwrap()[0].path);
    let (by, changes) = (SessionId::default(), mem.changes().unwrap());
    let ino = mem.lookup(&Caller::default(), Ino::ROOT, name("f")).unwrap().ino;
    let place = ferry_vfs::Place { ino: Ino::ROOT, name: Some(name("f").to_buf()) };
    changes.publish(by, || Change::Data { ino, offset: 0, len: 1 });
    changes.publish(by, || Change::Attr { ino: Ino(12345) });
    changes.publish_event(by, || Some(Event::Modified(place)));
    let message = client.ask(&request(0, 60_000));
    let Reply::Events(data) = Reply::decode(&message).unwrap().1 else { panic!("{message:?}") };
    let records: Vec<_> = Message::decode(data).unwrap().records().map(std::result::Result::unwrap).collect();
    assert_eq!(records[0], Record::stale(Kind::StaleData, path));
    assert_eq!((records.len(), records[1].kind, records[1].number), (2, Kind::Modified, 1));
    changes.publish(by, || Change::All);
    assert_eq!(ask(&mut client, 1, 60_000), Ok((true, vec![], 0)));
    mem.forget(ino, 1);
}

/// A source without events of its own: its changes tell as much as they do.
#[test]
fn changes_are_reported_without_event_support() {
    struct Plain(Arc<Mem>);
    impl FileSystem for Plain {
        ferry_vfs::delegate!(self => self.0; lookup, getattr);

        fn forget(&self, ino: Ino, count: u64) {
            self.0.forget(ino, count);
        }

        fn changes(&self) -> Option<&Changes> {
            self.0.changes()
        }
    }
    let mem = Arc::new(Mem::new(&ferry_mem::Options { size_bytes: Some(64 << 20), ..Default::default() }).unwrap());
    let server = Server::of(Arc::new(Plain(Arc::clone(&mem))), Options { events: true, ..Options::default() });
    let mut client = attached(&server, MSIZE);
    begin(&mut client);
    let changes = mem.changes().unwrap();
    changes.publish(SessionId::default(), || Change::Entry { dir: Ino::ROOT, name: name("f").to_buf() });
    let (_, events, last) = ask(&mut client, 0, 60_000).unwrap();
    assert!(matches!(events[..], [Event::Removed { .. }]), "{events:?}");
    changes.publish(SessionId::default(), || Change::All);
    assert_eq!(ask(&mut client, last, 60_000), Ok((true, vec![], 0)));
}

/// Kinds that the queue merges are told of again once a message had them, whether or not it was acknowledged.
#[test]
fn a_change_after_a_message_is_reported_again() {
    let (server, _mem) = told(Options::default());
    let mut other = server.attached(0);
    other.create(Fid(5), "f", OFlags::RDWR, 0o600).unwrap();
    let mut client = attached(&server, MSIZE);
    begin(&mut client);
    client.walk(ROOT, FILE, "f").unwrap();
    let mut acknowledged = 0;
    for round in 0..100_u8 {
        other.write(Fid(5), 0, &[round]).unwrap();
        let (is_lossy, events, last) = ask(&mut client, acknowledged, 60_000).unwrap();
        assert!(!is_lossy && !events.is_empty());
        // While the client deals with the message.
        other.write(Fid(5), 1, &[round]).unwrap();
        let (_, events, last) = ask(&mut client, last, 60_000).unwrap();
        assert!(events.iter().any(|event| matches!(event, Event::Modified(_))), "{round}: {events:?}");
        acknowledged = last;
    }
}
