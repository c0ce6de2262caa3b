//! What an agent is told, and that what it replays reaches no source.

use crate::common;

use std::sync::Arc;

use common::{Answer, Client};
use ferry_serve::{SessionSlot, ShareOptions};
use ferry_vfs::*;
use ferry_wire::events::*;
use ferry_wire::fuse::{InitFlags, Operation};

/// What the ioctl's reply has before its data.
const IOCTL_BYTES: usize = 16;

/// A directory with one file, `there`. Every change is ENOSYS, which tells that it was asked for.
#[derive(Default)]
struct Source {
    changes: Changes,
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
    fn lookup_self(&self, _: &Caller<'_>, ino: Ino) -> Result<Entry> {
        Ok(Entry { ino, generation: 0, attr: attr(0o100_644) })
    }
    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        Ok(attr(if ino == Ino::ROOT { 0o040_755 } else { 0o100_644 }))
    }
}

fn client(events: bool) -> (Client, Arc<Source>) {
    let source = Arc::<Source>::default();
    let options = ShareOptions { events, ..ShareOptions::default() };
    let mut client = Client::new(Arc::clone(&source) as Arc<dyn FileSystem>, &options, SessionSlot::default());
    client.gid = REPLAY_GID;
    (client, source)
}

fn ioctl(command: u32, input: &[u8]) -> Operation<'_> {
    let out_bytes_max = (command >> 16) & 0x3fff;
    Operation::Ioctl { handle: Handle(0), flags: 0, command, argument: 0, input, out_bytes_max }
}

/// The numbers of the events that an agent is told, and whether some were lost.
fn wait(client: &mut Client) -> (bool, Vec<u64>) {
    assert_eq!(client.ask(Ino::ROOT, ioctl(WAIT, &[])), Answer::Late);
    let reply = client.late.recv_timeout(std::time::Duration::from_secs(30)).unwrap();
    let Answer::Reply(bytes) = common::answer(client.next_unique() - 2, &reply) else { panic!("{reply:?}") };
    let message = Message::decode(&bytes[IOCTL_BYTES..]).unwrap();
    (message.is_lossy(), message.records().map(|record| record.unwrap().number).collect())
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
                Some(Event::Created { dir, name: other.clone(), is_dir: false })
            });
            let number = wait(&mut client).1[0];
            assert!(matches!(announce(&mut client, number), Answer::Reply(_)));
            let answer = client.ask(Ino::ROOT, operation);
            assert_ne!(answer, Answer::Error(Errno::NOSYS), "another was announced: {operation:?}");
        }
        // The real operation of another process on the same name reaches the source, also while the replay runs.
        source.changes.publish_event(SessionId::default(), || {
            Some(Event::Created { dir, name: name(b"there").to_buf(), is_dir: false })
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
fn numbers_that_a_guest_makes_up_lead_nowhere() {
    let (mut client, _) = client(true);
    assert!(client.negotiated.has(InitFlags::EXPORT_SUPPORT));
    client.gid = 0;
    assert_eq!(client.ask(Ino(2), Operation::LookupSelf), Answer::Error(Errno::STALE));
    assert!(matches!(client.ask(Ino::ROOT, Operation::Lookup { name: name(b"there") }), Answer::Reply(_)));
    assert!(matches!(client.ask(Ino(2), Operation::LookupSelf), Answer::Reply(_)));
}

/// What a client does not know, and what it did itself, it is not told.
#[test]
fn only_what_others_do_to_what_the_client_knows_is_told() {
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
