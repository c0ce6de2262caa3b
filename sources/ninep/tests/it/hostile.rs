//! Servers that lie, disconnect or are silent: the caller gets an error, and there is no panic or endless wait.
#![allow(clippy::cast_possible_truncation, reason = "bytes of a pattern")]

use crate::common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::fake::{Act, FILE, Fake, file_attr, reply};
use common::{CX, PATIENCE, name, read, write};
use ferry_9p_client::{Cache, Client, Options};
use ferry_vfs::sync::lock;
use ferry_vfs::*;
use ferry_wire::ninep::{
    DirWriter, Fid, Frame, Getattr, LockStatus, Qid, QidKind, Qids, Reply, Request, Tag, VERSION, VERSION_OF_FERRY,
    VERSION_UNKNOWN,
};

/// Not patient, and with nothing between the test and the messages.
fn hasty() -> Options {
    let (timeout, patience) = (Duration::from_millis(300), Duration::from_millis(600));
    Options { timeout, patience, cache: Cache::None, ..Options::default() }
}

#[test]
fn other_servers_are_refused_with_a_sentence() {
    type Behaviour = fn(Tag, &Request<'_>) -> Option<Act>;
    let cases: [(Behaviour, &str); 8] = [
        (
            |tag, request| match request {
                Request::Version { msize, .. } => {
                    Some(reply(tag, &Reply::Version { msize: *msize, version: b"9P2000.u" }))
                }
                _ => None,
            },
            "speaks \"9P2000.u\" and not 9P2000.L",
        ),
        (
            |tag, request| match request {
                Request::Version { .. } => Some(reply(tag, &Reply::Version { msize: 100, version: b"9P2000.L" })),
                _ => None,
            },
            "messages of 100 bytes; at least 4096",
        ),
        (|tag, _| Some(reply(tag, &Reply::Error(Errno::PERM))), "answered by the error"),
        (|_, _| Some(Act::HangUp), "the server closed the connection"),
        (|_, _| Some(Act::Silence), "has not replied to a request for 0.3 s"),
        (|_, _| Some(Act::Send(b"HTTP/1.1 400 Bad Request\r\n".to_vec())), "a reply claims to have"),
        (|_, _| Some(Act::Send(vec![3, 0, 0, 0, 0, 0, 0])), "a reply claims to have 3 bytes"),
        (
            |tag, request| match request {
                Request::Attach { .. } => Some(reply(tag, &Reply::Error(Errno::ACCESS))),
                _ => None,
            },
            "refuses user 0 the tree \"/t\"",
        ),
    ];
    for (behaviour, words) in cases {
        let fake = Fake::new(behaviour);
        let error = fake.connect(Options { uid: 0, tree: b"/t".to_vec(), ..hasty() }).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let nobody = Arc::new(ferry_9p_client::Unix("/nonexistent/s".into()));
    let error = Client::connect(nobody, hasty()).unwrap_err().to_string();
    assert!(error.contains("unix:/nonexistent/s") && error.contains("is the server running?"), "{error}");
}

/// Answers a getattr of a file (the root has fid 1) by something else.
fn instead_of_attributes(act: impl Fn(Tag) -> Act + Send + Sync + 'static) -> Fake {
    Fake::new(move |tag, request| match request {
        Request::Getattr { fid, .. } if *fid != Fid(1) => Some(act(tag)),
        _ => None,
    })
}

#[test]
fn replies_that_break_the_protocol_are_errors() {
    let lie = |found: Getattr| instead_of_attributes(move |tag| reply(tag, &Reply::Getattr(found)));
    let dir = Qid { kind: QidKind::DIR, ..FILE };
    let lies = [
        instead_of_attributes(|tag| reply(Tag(tag.0 + 999), &Reply::Getattr(file_attr()))),
        instead_of_attributes(|tag| reply(tag, &Reply::Clunk)),
        instead_of_attributes(|_| Act::Send(vec![0xff; 100])),
        instead_of_attributes(|tag| {
            let mut bytes = Vec::new();
            Reply::Getattr(file_attr()).encode(tag, &mut bytes);
            bytes.truncate(50);
            bytes[..4].copy_from_slice(&50_u32.to_le_bytes());
            assert_eq!(Frame::peek(&bytes).unwrap().bytes, 50);
            Act::Send(bytes)
        }),
        instead_of_attributes(|_| Act::HangUp),
        instead_of_attributes(|_| Act::Silence),
        lie(Getattr { qid: dir, ..file_attr() }),
        lie(Getattr { qid: Qid { path: 7, ..FILE }, ..file_attr() }),
        lie(Getattr { attr: Attr { mode: 0o600, ..file_attr().attr }, ..file_attr() }),
    ];
    for (number, fake) in lies.iter().enumerate() {
        let client = fake.connect(hasty()).unwrap();
        let begun = Instant::now();
        assert_eq!(client.lookup(&CX, Ino::ROOT, name("a")).unwrap_err(), Errno::IO, "lie {number}");
        assert!(begun.elapsed() < PATIENCE, "lie {number}");
        assert_eq!(client.usage().inodes, 0, "lie {number}");
    }
}

fn data_server(act: impl Fn(Tag, u64, u32) -> Act + Send + Sync + 'static) -> Fake {
    Fake::new(move |tag, request| match *request {
        Request::Read { offset, bytes_max, .. } => Some(act(tag, offset, bytes_max)),
        _ => None,
    })
}

fn opened(client: &Client) -> (Ino, Handle) {
    let ino = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
    (ino, client.open(&CX, ino, OFlags::RDWR).unwrap())
}

#[test]
fn short_reads_are_put_together_and_too_much_is_refused() {
    let content: Vec<u8> = (0..1000_u32).map(|n| n as u8).collect();
    for cache in [Cache::None, Cache::Auto] {
        let served = content.clone();
        let fake = data_server(move |tag, offset, bytes_max| {
            let from = usize::try_from(offset).unwrap().min(served.len());
            let to = (from + (bytes_max as usize).min(7)).min(served.len());
            reply(tag, &Reply::Read(&served[from..to]))
        });
        let client = fake.connect(Options { cache, ..hasty() }).unwrap();
        let (ino, handle) = opened(&client);
        assert_eq!(read(&client, ino, handle, 0, 5000).unwrap(), content, "{cache:?}");
        let fake = data_server(|tag, _, bytes_max| reply(tag, &Reply::Read(&vec![1; bytes_max as usize + 1])));
        let client = fake.connect(Options { cache, msize: 8192, ..hasty() }).unwrap();
        let (ino, handle) = opened(&client);
        assert_eq!(read(&client, ino, handle, 0, 100).unwrap_err(), Errno::IO, "{cache:?}");
    }
}

#[test]
fn write_replies_with_impossible_counts_are_errors() {
    for bytes in [0, 11] {
        let fake = Fake::new(move |tag, request| match request {
            Request::Write { .. } => Some(reply(tag, &Reply::Write { bytes })),
            _ => None,
        });
        let client = fake.connect(hasty()).unwrap();
        let (ino, handle) = opened(&client);
        assert_eq!(write(&client, ino, handle, 0, b"0123456789").unwrap_err(), Errno::IO);
        let client = fake.connect(Options { cache: Cache::Auto, ..hasty() }).unwrap();
        let (ino, handle) = opened(&client);
        assert_eq!(write(&client, ino, handle, 0, b"0123456789").unwrap(), 10, "it is written later");
        assert_eq!(client.fsync(&CX, ino, handle, false).unwrap_err(), Errno::IO);
        assert!(client.fsync(&CX, ino, handle, false).is_ok(), "it was told once");
    }
}

#[test]
fn endless_listings_and_invalid_names_are_ended() {
    let fake = Fake::new(|tag, request| match *request {
        Request::Readdir { offset, .. } => {
            let mut data = Vec::new();
            let mut writer = DirWriter::new(&mut data, 8192);
            for name in ["a/b", "", "good"] {
                let item = DirItem { ino: 2, next: offset + 1, kind: FileType::RegularFile, name: name.as_bytes() };
                assert!(writer.push(&item));
            }
            Some(reply(tag, &Reply::Readdir(&data)))
        }
        _ => None,
    });
    let client = fake.connect(hasty()).unwrap();
    let handle = client.opendir(&CX, Ino::ROOT, OFlags::RDONLY).unwrap();
    let mut out = common::Few::new(1);
    client.readdir(&CX, &DirRange { ino: Ino::ROOT, handle, offset: 0, plus: false }, &mut out).unwrap();
    assert_eq!(out.items.iter().map(|item| item.name.as_str()).collect::<Vec<_>>(), ["good"]);
    // One that leads back to where it began.
    let fake = Fake::new(|tag, request| match *request {
        Request::Readdir { offset, .. } => {
            let mut data = Vec::new();
            let item = DirItem { ino: 2, next: offset, kind: FileType::RegularFile, name: b"again" };
            assert!(DirWriter::new(&mut data, 8192).push(&item));
            Some(reply(tag, &Reply::Readdir(&data)))
        }
        _ => None,
    });
    let client = fake.connect(hasty()).unwrap();
    let handle = client.opendir(&CX, Ino::ROOT, OFlags::RDONLY).unwrap();
    let at = DirRange { ino: Ino::ROOT, handle, offset: 0, plus: false };
    assert_eq!(client.readdir(&CX, &at, &mut common::Few::new(9)).unwrap_err(), Errno::IO);
}

/// Other servers may serve requests in any order, and diod loses a reply when a fid is used that a walk is still making.
#[test]
fn fids_are_used_before_the_reply_to_their_walk_with_ferry_only() {
    let versions = [(VERSION, false), (VERSION_OF_FERRY, true), (VERSION_UNKNOWN, false)];
    for (first, expected) in versions {
        let seen: Arc<Mutex<Vec<&str>>> = Arc::default();
        let writing = Arc::clone(&seen);
        let fake = Fake::new(move |tag, request| {
            match request {
                Request::Version { msize, version } => {
                    let version = if *version == VERSION { VERSION } else { first };
                    return Some(reply(tag, &Reply::Version { msize: *msize, version }));
                }
                Request::Walk { .. } => lock(&writing).push("walk"),
                Request::Getattr { .. } => lock(&writing).push("getattr"),
                _ => return None,
            }
            Some(Act::Silence)
        });
        let client = fake.connect(hasty()).unwrap();
        assert_eq!(client.lookup(&CX, Ino::ROOT, name("f")).unwrap_err(), Errno::IO);
        let seen = lock(&seen);
        let begin = seen.iter().position(|&kind| kind == "walk").unwrap();
        assert_eq!(seen.get(begin + 1) == Some(&"getattr"), expected, "{seen:?}");
    }
}

#[test]
fn requests_that_may_have_been_executed_are_not_repeated() {
    for (is_mkdir, outcome) in [(true, Err(Errno::IO)), (false, Ok(()))] {
        static ASKED: AtomicUsize = AtomicUsize::new(0);
        ASKED.store(0, Ordering::Relaxed);
        let fake = Fake::new(move |_, request| {
            let is_it = match request {
                Request::Mkdir { .. } => is_mkdir,
                Request::Getattr { fid: Fid(1), .. } => !is_mkdir,
                _ => false,
            };
            // The first time the connection ends with the request.
            (is_it && ASKED.fetch_add(1, Ordering::Relaxed) == 0).then_some(Act::HangUp)
        });
        let client = fake.connect(Options { patience: PATIENCE, ..hasty() }).unwrap();
        let done = match is_mkdir {
            true => client.mkdir(&CX, Ino::ROOT, name("d"), &common::dir(0o755)).map(drop),
            false => client.getattr(&CX, Ino::ROOT, None).map(drop),
        };
        assert_eq!(done, outcome);
        assert_eq!(ASKED.load(Ordering::Relaxed), if is_mkdir { 1 } else { 2 });
    }
}

/// A server that lists forever, without one name in it, and one that lists what are no entries.
#[test]
fn listings_without_a_name_come_to_an_end() {
    for has_entries in [true, false] {
        let fake = Fake::new(move |tag, request| match *request {
            Request::Readdir { offset, .. } => {
                let mut data = vec![0xff; 10];
                if has_entries {
                    data.clear();
                    let item = DirItem { ino: 2, next: offset + 1, kind: FileType::RegularFile, name: b"a/b" };
                    assert!(DirWriter::new(&mut data, 8192).push(&item));
                }
                Some(reply(tag, &Reply::Readdir(&data)))
            }
            _ => None,
        });
        let client = fake.connect(hasty()).unwrap();
        let handle = client.opendir(&CX, Ino::ROOT, OFlags::RDONLY).unwrap();
        let at = DirRange { ino: Ino::ROOT, handle, offset: 0, plus: true };
        assert_eq!(client.readdir(&CX, &at, &mut common::Few::new(9)).unwrap_err(), Errno::IO);
        assert!(client.usage().messages < 100);
    }
}

/// More names than were asked for, an answer sent twice, an answer that stops in the middle.
#[test]
fn answers_that_are_too_many_or_too_few_end_the_connection() {
    let walks = Fake::new(|tag, request| match request {
        Request::Walk { .. } => {
            let mut qids = Qids::default();
            (0..3).for_each(|_| qids.push(FILE));
            Some(reply(tag, &Reply::Walk(qids)))
        }
        _ => None,
    });
    let client = walks.connect(hasty()).unwrap();
    assert_eq!(client.lookup(&CX, Ino::ROOT, name("a")).unwrap_err(), Errno::IO);

    let twice = instead_of_attributes(|tag| {
        let mut bytes = Vec::new();
        Reply::Getattr(file_attr()).encode(tag, &mut bytes);
        Act::Send(bytes.repeat(2))
    });
    let client = twice.connect(Options { patience: PATIENCE, ..hasty() }).unwrap();
    for round in 0..50 {
        // The first reply may complete the request before the second one arrives, which then belongs to no request.
        let _ = client.lookup(&CX, Ino::ROOT, name("a"));
        assert_eq!(client.getattr(&CX, Ino::ROOT, None).err(), None, "by the next connection, round {round}");
    }

    for cache in [Cache::None, Cache::Auto] {
        let halves = data_server(|tag, _, bytes_max| {
            let mut bytes = Vec::new();
            Reply::Read(&vec![1; bytes_max as usize]).encode(tag, &mut bytes);
            bytes.truncate(bytes.len() / 2);
            Act::Send(bytes)
        });
        let client = halves.connect(Options { cache, ..hasty() }).unwrap();
        let (ino, handle) = opened(&client);
        let begun = Instant::now();
        assert_eq!(read(&client, ino, handle, 0, 1000).unwrap_err(), Errno::IO, "{cache:?}");
        assert!(begun.elapsed() < PATIENCE, "{cache:?}");
    }
}

#[test]
fn sizes_that_cannot_be_are_borne() {
    for cache in [Cache::None, Cache::Auto] {
        let fake = Fake::new(|tag, request| match *request {
            Request::Getattr { fid, .. } if fid != Fid(1) => {
                let attr = file_attr().attr.with_size(u64::MAX);
                Some(reply(tag, &Reply::Getattr(Getattr { attr, ..file_attr() })))
            }
            Request::Read { .. } => Some(reply(tag, &Reply::Read(b""))),
            _ => None,
        });
        let client = fake.connect(Options { cache, ..hasty() }).unwrap();
        let (ino, handle) = opened(&client);
        for offset in [0, i64::MAX as u64 - 10, u64::MAX - 10] {
            let got = read(&client, ino, handle, offset, 4096);
            assert!(got.as_ref().is_ok_and(Vec::is_empty) || got.is_err(), "{cache:?} at {offset}: {got:?}");
        }
        assert!(write(&client, ino, handle, u64::MAX - 10, b"0123456789abcdef").is_err(), "{cache:?}");
    }
}

#[test]
fn attributes_that_are_longer_than_they_can_be_are_refused() {
    for (bytes, outcome) in [(u64::MAX, Errno::TOOBIG), (65_537, Errno::TOOBIG), (10, Errno::IO)] {
        let fake = Fake::new(move |tag, request| match *request {
            Request::Xattrwalk { .. } => Some(reply(tag, &Reply::Xattrwalk { bytes })),
            Request::Read { .. } => Some(reply(tag, &Reply::Read(b""))),
            _ => None,
        });
        let client = fake.connect(hasty()).unwrap();
        let ino = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
        assert_eq!(client.getxattr(&CX, ino, b"user.a").unwrap_err(), outcome, "{bytes}");
        assert_eq!(client.listxattr(&CX, ino).unwrap_err(), outcome, "{bytes}");
    }
}

/// A lock is had only where the server says so.
#[test]
fn locks_need_the_servers_grant() {
    let lock = Lock {
        kind: LockKind::Write,
        owner: LockOwner { session: CX.session, id: 1 },
        start: 0,
        end: 9,
        pid: 1,
        flock: false,
    };
    let answers = [(2, Errno::NOLCK), (1, Errno::AGAIN), (3, Errno::AGAIN), (77, Errno::IO)];
    for (status, outcome) in answers {
        let fake = Fake::new(move |tag, request| match request {
            Request::Lock { .. } => {
                let mut bytes = Vec::new();
                Reply::Lock(LockStatus::Success).encode(tag, &mut bytes);
                *bytes.last_mut().unwrap() = status;
                Some(Act::Send(bytes))
            }
            _ => None,
        });
        let client = fake.connect(hasty()).unwrap();
        let (ino, handle) = opened(&client);
        assert_eq!(client.set_lock(&CX, ino, handle, &lock, None).unwrap_err(), outcome, "{status}");
    }
}
