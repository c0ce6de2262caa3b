//! What an agent is told, and that what it replays reaches no source.

use crate::common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Answer, Client};
use ferry_serve::{Cache, SessionSlot, ShareOptions};
use ferry_vfs::*;
use ferry_wire::events::*;
use ferry_wire::fuse::{InitFlags, Operation, Release};

/// What the ioctl's reply has before its data.
const IOCTL_BYTES: usize = 16;

/// A directory with one file, `there`. Every change is ENOSYS, which tells that it was asked for.
#[derive(Default)]
struct Source {
    changes: Changes,
    /// Files have been removed.
    is_gone: AtomicBool,
}

fn attr(mode: u32) -> Attr {
    Attr { ino: 2, mode, nlink: 1, ..Attr::default() }
}

impl FileSystem for Source {
    fn features(&self) -> Features {
        Features { by_number: ByNumber::Host, ..Features::default() }
    }
    fn changes(&self) -> Option<&Changes> {
        Some(&self.changes)
    }
    fn lookup(&self, _: &Caller<'_>, _: Ino, name: Name<'_>) -> Result<Entry> {
        match name.as_bytes() {
            b"there" => Ok(Entry { ino: Ino(2), generation: 0, attr: attr(0o100_644) }),
            _ => Err(Errno::NOENT),
        }
    }
    fn open(&self, _: &Caller<'_>, _: Ino, flags: OFlags) -> Result<Handle> {
        if flags.is_empty() { Ok(Handle(1)) } else { Err(Errno::NOSYS) }
    }
    fn lookup_self(&self, _: &Caller<'_>, ino: Ino) -> Result<Entry> {
        Ok(Entry { ino, generation: 0, attr: attr(0o100_644) })
    }
    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        match ino {
            Ino::ROOT => Ok(attr(0o040_755)),
            _ if self.is_gone.load(Ordering::Relaxed) => Err(Errno::STALE),
            _ => Ok(attr(0o100_644)),
        }
    }
}

fn client(events: bool) -> (Client, Arc<Source>) {
    client_of(&ShareOptions { events, ..ShareOptions::default() })
}

fn client_of(options: &ShareOptions) -> (Client, Arc<Source>) {
    let source = Arc::<Source>::default();
    let mut client = Client::new(Arc::clone(&source) as Arc<dyn FileSystem>, options, SessionSlot::default());
    client.gid = REPLAY_GID;
    (client, source)
}

fn ioctl(command: u32, input: &[u8]) -> Operation<'_> {
    let out_bytes_max = (command >> 16) & 0x3fff;
    Operation::Ioctl { handle: Handle(0), flags: 0, command, argument: 0, input, out_bytes_max }
}

/// The numbers of the events that an agent is told, and whether some were lost.
fn wait(client: &mut Client) -> (bool, Vec<u64>) {
    let bytes = wait_for_message(client);
    let message = Message::decode(&bytes).unwrap();
    (message.is_lossy(), message.records().map(|record| record.unwrap().number).collect())
}

fn wait_for_message(client: &mut Client) -> Vec<u8> {
    assert_eq!(client.ask(Ino::ROOT, ioctl(WAIT, &[])), Answer::Late);
    let reply = client.late.recv_timeout(Duration::from_secs(30)).unwrap();
    let Answer::Reply(bytes) = common::answer(client.next_unique() - 2, &reply) else { panic!("{reply:?}") };
    bytes[IOCTL_BYTES..].to_vec()
}

fn announce(client: &mut Client, number: u64) -> Answer {
    client.ask(Ino::ROOT, ioctl(ANNOUNCE, &Announcement { number, mode: 0 }.encode()))
}

fn name(bytes: &[u8]) -> Name<'_> {
    Name::new(bytes).unwrap()
}

fn mknod(bytes: &[u8]) -> Operation<'_> {
    Operation::Mknod { name: name(bytes), new: CreateArgs { mode: 0o100_600, ..CreateArgs::default() } }
}

/// All that an agent may send, and what else could change something.
fn changes<'a>() -> Vec<Operation<'a>> {
    let (there, new) = (name(b"there"), CreateArgs { mode: 0o100_600, ..CreateArgs::default() });
    let flags = OFlags::WRONLY;
    let utime = SetAttr { mtime: Some(SetTime::Now), ..SetAttr::default() };
    vec![
        mknod(b"there"),
        Operation::Mkdir { name: there, new },
        Operation::Symlink { name: there, target: b"target" },
        Operation::Unlink { name: there },
        Operation::Rmdir { name: there },
        Operation::Rename { name: there, new_dir: Ino::ROOT, new_name: name(b"new"), flags: RenameFlags::empty() },
        Operation::Link { from: Ino(2), name: name(b"new") },
        Operation::Open { flags, clear_privileges: false },
        Operation::Create { name: there, new, flags, clear_privileges: false },
        Operation::Tmpfile { new, flags },
        Operation::Setattr { handle: None, set: utime, owner: None },
        Operation::Setxattr { name: b"user.a", value: b"", flags: XattrFlags::empty(), clear_sgid: false },
        Operation::Removexattr { name: b"user.a" },
        ioctl(0x4008_6602, &[0; 8]),
    ]
}

#[test]
fn requests_of_an_agent_change_nothing() {
    for events in [false, true] {
        let (mut client, source) = client(events);
        assert_ne!(client.ask(Ino::ROOT, Operation::Lookup { name: name(b"there") }), Answer::Error(Errno::NOENT));
        for operation in changes() {
            let answer = client.ask(Ino::ROOT, operation);
            let is_refused = matches!(answer, Answer::Error(Errno::STALE | Errno::PERM));
            assert!(is_refused, "not announced, events {events}: {operation:?}: {answer:?}");
        }
        if !events {
            assert_eq!(client.ask(Ino::ROOT, ioctl(WAIT, &[])), Answer::Error(Errno::NOTTY));
            continue;
        }
        assert_eq!(wait(&mut client), (true, vec![]));
        let (dir, other) = (Ino::ROOT, name(b"other").to_buf());
        for operation in changes() {
            source.changes.publish_event(SessionId::default(), || {
                Some(Event::Created { dir, name: other.clone(), is_dir: false, ino: None })
            });
            let number = wait(&mut client).1[0];
            assert!(matches!(announce(&mut client, number), Answer::Reply(_)));
            let answer = client.ask(Ino::ROOT, operation);
            assert_ne!(answer, Answer::Error(Errno::NOSYS), "another was announced: {operation:?}");
        }
        // The real operation of another process on the same name reaches the source, also while the replay runs.
        source.changes.publish_event(SessionId::default(), || {
            Some(Event::Created { dir, name: name(b"there").to_buf(), is_dir: false, ino: None })
        });
        let number = wait(&mut client).1[0];
        assert!(matches!(announce(&mut client, number), Answer::Reply(_)));
        assert_eq!(client.ask(dir, Operation::Lookup { name: name(b"there") }), Answer::Error(Errno::NOENT));
        client.gid = 0;
        assert_eq!(client.ask(dir, mknod(b"there")), Answer::Error(Errno::NOSYS));
        client.gid = REPLAY_GID;
        assert!(matches!(client.ask(dir, mknod(b"there")), Answer::Reply(_)));
        assert_eq!(client.ask(dir, mknod(b"there")), Answer::Error(Errno::STALE), "once");
    }
}

#[test]
fn only_root_gets_events() {
    let (mut client, _) = client(true);
    for (uid, gid) in [(1000, REPLAY_GID), (0, 0), (1000, 1000)] {
        (client.uid, client.gid) = (uid, gid);
        for command in [WAIT, INTERRUPT] {
            assert_eq!(client.ask(Ino::ROOT, ioctl(command, &[])), Answer::Error(Errno::PERM));
        }
        assert_eq!(announce(&mut client, 1), Answer::Error(Errno::PERM));
        // Nor is anything of theirs a replay.
        assert_eq!(client.ask(Ino::ROOT, mknod(b"new")), Answer::Error(Errno::NOSYS));
    }
}

#[test]
fn invented_inode_numbers_are_refused() {
    let (mut client, _) = client(true);
    assert!(client.negotiated.has(InitFlags::EXPORT_SUPPORT));
    client.gid = 0;
    assert_eq!(client.ask(Ino(2), Operation::LookupSelf), Answer::Error(Errno::STALE));
    assert!(matches!(client.ask(Ino::ROOT, Operation::Lookup { name: name(b"there") }), Answer::Reply(_)));
    assert!(matches!(client.ask(Ino(2), Operation::LookupSelf), Answer::Reply(_)));
}

/// What a client does not know, and what it did itself, it is not told.
#[test]
fn events_cover_other_clients_changes_of_known_inodes() {
    let (mut client, source) = client(true);
    assert_eq!(wait(&mut client), (true, vec![]));
    let own = client.session.current().unwrap().id();
    let modified = |ino| Some(Event::Modified(Place { ino, name: None }));
    source.changes.publish_event(SessionId::default(), || modified(Ino(2)));
    source.changes.publish_event(own, || modified(Ino::ROOT));
    // Of an agent that lies, only its own events are lost.
    assert_eq!(announce(&mut client, u64::MAX), Answer::Error(Errno::NOENT));
    source.changes.publish(SessionId::unique(), || Change::Data { ino: Ino::ROOT, offset: 0, len: 1 });
    assert_eq!(wait(&mut client), (false, vec![1]));
}

/// An agent that is to end does not wait until something happens.
#[test]
fn a_wait_can_be_interrupted() {
    let (mut client, _source) = client(true);
    assert!(matches!(client.ask(Ino::ROOT, ioctl(INTERRUPT, &[])), Answer::Reply(_)), "nobody waits");
    assert_eq!(wait(&mut client), (true, vec![]));
    assert_eq!(client.ask(Ino::ROOT, ioctl(WAIT, &[])), Answer::Late);
    assert!(matches!(client.ask(Ino::ROOT, ioctl(INTERRUPT, &[])), Answer::Reply(_)));
    let reply = client.late.recv_timeout(std::time::Duration::from_secs(30)).unwrap();
    assert_eq!(common::answer(client.next_unique() - 4, &reply), Answer::Error(Errno::INTR));
}

/// Events of a file that was removed since are replayed, too: the client's kernel requests attributes, which must not fail.
#[test]
fn events_of_a_removed_file_are_replayed() {
    let (mut client, source) = client(true);
    assert_eq!(wait(&mut client), (true, vec![]));
    assert!(matches!(client.ask(Ino::ROOT, Operation::Lookup { name: name(b"there") }), Answer::Reply(_)));
    let getattr = || Operation::Getattr { handle: None };
    source.is_gone.store(true, Ordering::Relaxed);
    assert_eq!(client.ask(Ino(2), getattr()), Answer::Error(Errno::STALE), "not announced");
    for event in [Event::Attributes, Event::Modified, Event::Closed] {
        for by_name in [false, true] {
            let name = by_name.then(|| name(b"there").to_buf());
            let place = Place { ino: if by_name { Ino::ROOT } else { Ino(2) }, name };
            source.changes.publish_event(SessionId::default(), || Some(event(place)));
            let number = wait(&mut client).1[0];
            assert!(matches!(announce(&mut client, number), Answer::Reply(_)));
            assert!(matches!(client.ask(Ino::ROOT, getattr()), Answer::Reply(_)));
            assert!(matches!(client.ask(Ino(2), getattr()), Answer::Reply(_)), "{event:?}, by name {by_name}");
        }
    }
}

/// A directory on the way to a file whose data changed is shown with its own times, and the file with others, once.
#[test]
fn the_file_itself_is_shown_as_changed() {
    let (mut client, source) = client(true);
    assert_eq!(wait(&mut client), (true, vec![]));
    assert!(matches!(client.ask(Ino::ROOT, Operation::Lookup { name: name(b"there") }), Answer::Reply(_)));
    let getattr = |client: &mut Client, ino| match client.ask(ino, Operation::Getattr { handle: None }) {
        // Without the time for which it is valid.
        Answer::Reply(bytes) => bytes[16..].to_vec(),
        other => panic!("{other:?}"),
    };
    let (dir, file) = (getattr(&mut client, Ino::ROOT), getattr(&mut client, Ino(2)));
    let place = Place { ino: Ino::ROOT, name: Some(name(b"there").to_buf()) };
    source.changes.publish_event(SessionId::default(), || Some(Event::Modified(place)));
    let number = wait(&mut client).1[0];
    assert!(matches!(announce(&mut client, number), Answer::Reply(_)));
    assert_eq!(getattr(&mut client, Ino::ROOT), dir);
    assert_ne!(getattr(&mut client, Ino(2)), file);
    assert_eq!(getattr(&mut client, Ino(2)), file);
}

/// How long a client may keep a name and its attributes, and the data of files that it opens (`FOPEN_KEEP_CACHE`).
fn kept(client: &mut Client) -> (u64, u64, bool) {
    client.gid = 0;
    let Answer::Reply(entry) = client.ask(Ino::ROOT, Operation::Lookup { name: name(b"there") }) else {
        panic!("entry")
    };
    let open = Operation::Open { flags: OFlags::RDONLY, clear_privileges: false };
    let Answer::Reply(opened) = client.ask(Ino(2), open) else { panic!("opened") };
    client.gid = REPLAY_GID;
    let word = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().unwrap());
    (word(16), word(24), opened[8] & 2 != 0)
}

#[test]
fn caches_last_while_an_agent_asks() {
    let (short, long) = ((1, 1, false), (600, 600, true));
    let (mut client, _source) =
        client_of(&ShareOptions { events: true, cache: Cache::Always, ..ShareOptions::default() });
    assert_eq!(kept(&mut client), short, "before there is an agent");
    assert_eq!(wait(&mut client), (true, vec![]));
    assert_eq!(kept(&mut client), long);
    // What the client may still know is told of, for it to ask again.
    assert_eq!(wait(&mut client), (false, vec![1, 2]));
    assert!(matches!(announce(&mut client, 1), Answer::Reply(_)));
    // The client's kernel may have an old name of it, which it looks up again for this error.
    assert_eq!(client.ask(Ino(2), Operation::Getattr { handle: None }), Answer::Error(Errno::STALE));
    assert!(matches!(client.ask(Ino(2), Operation::Getattr { handle: None }), Answer::Reply(_)));
    assert!(matches!(announce(&mut client, 2), Answer::Reply(_)));
    // The wait of an agent ends in time to renew the lease. The machine may be busy during some of the rounds.
    let is_in_time = |client: &mut Client| {
        let start = Instant::now();
        assert_eq!(wait(client), (false, vec![]));
        start.elapsed() < Duration::from_millis(1900) && kept(client) == long
    };
    assert!((0..5).any(|_| is_in_time(&mut client)));
    std::thread::sleep(Duration::from_millis(2100));
    assert_eq!(kept(&mut client), short, "the agent hangs");
    assert_eq!(announce(&mut client, 7), Answer::Error(Errno::NOENT));
    assert_eq!(kept(&mut client), long, "it goes on");
    let release = Release { handle: Handle(0), flags: OFlags::empty(), flush: false, unlock_flock: false, owner: 0 };
    let _ = client.ask(Ino::ROOT, Operation::Releasedir(release));
    assert_eq!(kept(&mut client), short, "its kernel has closed its root directory");
}

/// A source that publishes changes and no events: what they say is told.
#[test]
fn changes_are_reported_as_events() {
    let (mut client, source) = client(true);
    assert_eq!(wait(&mut client), (true, vec![]));
    assert!(matches!(client.ask(Ino::ROOT, Operation::Lookup { name: name(b"there") }), Answer::Reply(_)));
    let own = client.session.current().unwrap().id();
    let (dir, ino) = (Ino::ROOT, Ino(2));
    let entry = |bytes| Change::Entry { dir, name: name(bytes).to_buf() };
    source.changes.publish(own, || entry(b"there"));
    for change in [
        entry(b"there"),
        entry(b"absent"),
        Change::Entry { dir: Ino(9), name: name(b"there").to_buf() },
        Change::Removed { dir, name: name(b"there").to_buf(), ino },
        Change::Data { ino, offset: 0, len: 1 },
        Change::Attr { ino },
    ] {
        source.changes.publish(SessionId::default(), || change);
    }
    let message = wait_for_message(&mut client);
    let message = Message::decode(&message).unwrap();
    let kinds: Vec<_> = message.records().map(|record| record.unwrap().kind).collect();
    assert_eq!(kinds, [Kind::Created, Kind::Removed, Kind::Removed, Kind::Modified, Kind::Attributes]);
    source.changes.publish(SessionId::default(), || Change::All);
    assert_eq!(wait(&mut client), (true, vec![]));
}

/// An agent that is killed between the announcement and the call leaves the event to the next one.
#[test]
fn the_next_agent_replays_what_a_killed_one_left() {
    let (mut client, source) = client(true);
    assert_eq!(wait(&mut client), (true, vec![]));
    let dir = Ino::ROOT;
    for bytes in [b"there", b"later"] {
        let name = name(bytes).to_buf();
        source
            .changes
            .publish_event(SessionId::default(), || Some(Event::Created { dir, name, is_dir: false, ino: None }));
    }
    assert_eq!(wait(&mut client), (false, vec![1, 2]));
    assert!(matches!(announce(&mut client, 1), Answer::Reply(_)));
    client.pid += 1;
    assert_eq!(wait(&mut client), (false, vec![1, 2]));
    assert!(matches!(announce(&mut client, 1), Answer::Reply(_)));
    assert!(matches!(client.ask(dir, mknod(b"there")), Answer::Reply(_)));
    client.pid += 1;
    assert_eq!(wait(&mut client), (false, vec![2]), "the call was made");
}

/// What happens to a new file before the agent has replayed its name is told by the name; the client does not know the inode.
#[test]
fn events_of_a_new_file_wait_for_its_name() {
    let (mut client, source) = client(true);
    assert_eq!(wait(&mut client), (true, vec![]));
    let (dir, new, other) = (Ino::ROOT, name(b"there").to_buf(), SessionId::unique());
    let created = || Event::Created { dir, name: new.clone(), is_dir: false, ino: Some(Ino(2)) };
    source.changes.publish_event(other, || Some(created()));
    source.changes.publish(other, || Change::Data { ino: Ino(2), offset: 0, len: 1 });
    source.changes.publish(other, || Change::Data { ino: Ino(3), offset: 0, len: 1 });
    let moved = || Event::Renamed {
        from: (dir, new.clone()),
        to: (dir, name(b"moved").to_buf()),
        is_dir: false,
        exchanged: false,
    };
    source.changes.publish_event(other, || Some(moved()));
    source.changes.publish(other, || Change::Attr { ino: Ino(2) });
    let message = wait_for_message(&mut client);
    let message = Message::decode(&message).unwrap();
    let told: Vec<_> =
        message.records().map(|record| record.unwrap()).map(|record| (record.kind, record.ino, record.name)).collect();
    let (new, moved) = (Some(name(b"there")), Some(name(b"moved")));
    let names = [(Kind::Created, new), (Kind::Modified, new), (Kind::Renamed, new), (Kind::Attributes, moved)];
    assert_eq!(told, names.map(|(kind, name)| (kind, dir, name)));
    assert!(matches!(announce(&mut client, 4), Answer::Reply(_)));
    // All was replayed, and the client does not know the inode: it has forgotten it.
    assert_eq!(wait(&mut client), (false, vec![]));
    source.changes.publish(other, || Change::Attr { ino: Ino(2) });
    assert_eq!(wait(&mut client), (false, vec![]));
}

/// However often an agent asks, one of its requests waits.
#[test]
fn an_agent_that_floods_the_server_has_one_request() {
    let (mut client, _source) = client(true);
    assert_eq!(wait(&mut client), (true, vec![]));
    for _ in 0..10_000 {
        assert_eq!(client.ask(Ino::ROOT, ioctl(WAIT, &[])), Answer::Late);
        assert_eq!(announce(&mut client, 1), Answer::Error(Errno::NOENT));
    }
    assert_eq!(client.late.try_iter().count(), 9_999, "all but the last are answered");
    assert!(matches!(client.ask(Ino::ROOT, ioctl(INTERRUPT, &[])), Answer::Reply(_)));
    assert_eq!(client.late.try_iter().count(), 1);
}

/// A million events, of which an agent takes none: it is told that they are lost, and all is told again from then on.
#[test]
fn an_agent_that_never_announces_loses_excess_events() {
    let (mut client, source) = client(true);
    assert_eq!(wait(&mut client), (true, vec![]));
    let create = |number: u32| {
        let name = name(number.to_string().as_bytes()).to_buf();
        source.changes.publish_event(SessionId::default(), || {
            Some(Event::Created { dir: Ino::ROOT, name, is_dir: false, ino: Some(Ino(number.into())) })
        });
    };
    (0..1_000).for_each(create);
    let (_, first) = wait(&mut client);
    assert_eq!(wait(&mut client), (false, first.clone()), "they stay until they are announced");
    (1_000..1_000_000).for_each(create);
    assert_eq!(announce(&mut client, first[0]), Answer::Error(Errno::NOENT));
    let (is_lossy, numbers) = wait(&mut client);
    assert!(is_lossy && numbers[0] > 900_000, "{is_lossy}, {:?}", numbers.first());
    assert!(matches!(announce(&mut client, numbers[0]), Answer::Reply(_)));
    assert!(!wait(&mut client).0, "once");
}

/// Whatever an agent announces and asks for, in whatever order, reaches no source; and whatever others ask for does.
#[test]
fn no_lie_of_an_agent_reaches_a_source() {
    let (mut client, source) = client(true);
    assert_eq!(wait(&mut client), (true, vec![]));
    let (mut state, agent) = (7_u64, client.pid);
    let mut below = |end: usize| {
        // A linear congruential generator (Knuth's MMIX).
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % end
    };
    let (all, names, mut done) = (changes(), [&b"there"[..], b"new", b"other"], 0);
    for _ in 0..50_000 {
        let [one, other] = [below(3), below(3)].map(|at| name(names[at]).to_buf());
        let (dir, is_dir, ino) = ([Ino::ROOT, Ino(2)][below(2)], below(2) == 0, Some(Ino(2)));
        client.pid = agent + u32::try_from(below(8) / 7).unwrap();
        match below(4) {
            0 => {
                let event = match below(5) {
                    0 => Event::Created { dir, name: one, is_dir, ino },
                    1 => Event::Removed { dir, name: one, is_dir, ino },
                    2 => Event::Renamed { from: (dir, one), to: (dir, other), is_dir, exchanged: below(2) == 0 },
                    3 => Event::Modified(Place { ino: dir, name: Some(one) }),
                    _ => Event::Attributes(Place { ino: Ino(2), name: None }),
                };
                source.changes.publish_event(SessionId::default(), || Some(event));
            }
            1 => {
                source.changes.publish_event(SessionId::default(), || {
                    Some(Event::Created { dir: Ino::ROOT, name: one, is_dir, ino })
                });
                let (_, numbers) = wait(&mut client);
                let lie = u64::from(below(8) == 0) * 1000;
                drop(announce(&mut client, lie + numbers[below(numbers.len().min(6))]));
            }
            2 => drop(client.ask(dir, Operation::Lookup { name: one.as_name() })),
            _ => {
                let answer = client.ask(dir, all[below(all.len())]);
                assert!(!matches!(answer, Answer::Error(Errno::NOSYS)), "it has reached the source");
                done += usize::from(matches!(answer, Answer::Reply(_)));
                client.gid = 0;
                let answer = client.ask(dir, mknod(b"there"));
                assert_eq!(answer, Answer::Error(Errno::NOSYS), "it has not reached the source");
                client.gid = REPLAY_GID;
            }
        }
    }
    assert!(done > 100, "only {done} replays were right");
}
