//! Another file is where one was: nothing that belongs to the one goes into the other.
use crate::common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::fake::{Act, FILE, Fake, file_attr, reply};
use common::{CX, PATIENCE, name, write};
use ferry_9p_client::{Cache, Client, Options};
use ferry_vfs::*;
use ferry_wire::ninep::{Fid, Getattr, Qid, QidKind, Qids, Reply, Request, Step, VERSION};

const OTHER: Qid = Qid { path: 7, ..FILE };

#[track_caller]
fn becomes_so(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn nothing_is_left(client: &Client) {
    let usage = client.usage();
    assert_eq!((usage.inodes, usage.handles), (0, 0));
}

/// Directories of a server, which sends inode numbers without devices: `a` and `b` are two files with one number, and `c` is a
/// directory with the root's. `a` may be moved to `d`.
#[test]
fn files_with_one_number_are_told_apart() {
    let is_moved = Arc::<AtomicBool>::default();
    let (moved, dirs) = (Arc::clone(&is_moved), Mutex::<Vec<Fid>>::default());
    let fake = Fake::new(move |tag, request| match *request {
        Request::Version { msize, .. } => Some(reply(tag, &Reply::Version { msize, version: VERSION })),
        Request::Walk { new_fid, steps, .. } => {
            let step = steps.iter().last();
            let is = |text| step == Some(Step::Child(name(text)));
            dirs.lock().unwrap().retain(|fid| *fid != new_fid);
            if is("c") {
                dirs.lock().unwrap().push(new_fid);
                let mut qids = Qids::default();
                qids.push(Qid { kind: QidKind::DIR, version: 1, path: 1 });
                return Some(reply(tag, &Reply::Walk(qids)));
            }
            let is_missing = is(if moved.load(Ordering::SeqCst) { "a" } else { "d" });
            is_missing.then(|| reply(tag, &Reply::Error(Errno::NOENT)))
        }
        Request::Getattr { fid, .. } if dirs.lock().unwrap().contains(&fid) => {
            let attr = Attr::new(Ino(1), FileType::Directory, 0o755);
            let qid = Qid { kind: QidKind::DIR, version: 1, path: 1 };
            Some(reply(tag, &Reply::Getattr(Getattr { qid, attr, generation: 0 })))
        }
        _ => None,
    });
    let client = fake.connect(Options::default()).unwrap();
    let find = |text| client.lookup(&CX, Ino::ROOT, name(text)).unwrap();
    for _ in 0..2 {
        let [a, b, c] = ["a", "b", "c"].map(find);
        assert_eq!((a.ino, b.ino, c.ino), (Ino(2), Ino(3), Ino(4)));
        assert!(a.attr.ino != b.attr.ino && c.attr.ino != Ino::ROOT.0, "{a:?} {b:?} {c:?}");
    }
    is_moved.store(true, Ordering::SeqCst);
    assert_eq!(["d", "b", "d"].map(|name| find(name).ino), [Ino(2), Ino(3), Ino(2)], "another client has renamed it");
    [2, 3, 4].into_iter().for_each(|ino| client.forget(Ino(ino), 4));
    nothing_is_left(&client);
}

/// What the server says of the old place does not tell whether the file is there.
#[test]
fn files_with_one_number_are_not_confused_after_an_error() {
    let cases = [(Errno::RANGE, Ok(Ino(3))), (Errno::IO, Err(Errno::IO)), (Errno::NOMEM, Err(Errno::NOMEM))];
    for (errno, outcome) in cases {
        let asked = AtomicUsize::new(0);
        let fake = Fake::new(move |tag, request| match *request {
            Request::Version { msize, .. } => Some(reply(tag, &Reply::Version { msize, version: VERSION })),
            Request::Walk { steps, .. } if steps.iter().last() == Some(Step::Child(name("a"))) => {
                let is_second = asked.fetch_add(1, Ordering::SeqCst) == 1;
                is_second.then(|| reply(tag, &Reply::Error(errno)))
            }
            _ => None,
        });
        let client = fake.connect(Options::default()).unwrap();
        let find = |text| client.lookup(&CX, Ino::ROOT, name(text)).map(|entry| entry.ino);
        assert_eq!(find("a"), Ok(Ino(2)));
        assert_eq!(find("b"), outcome, "{errno}");
        assert_eq!([find("b"), find("a")], [Ok(Ino(3)), Ok(Ino(2))], "{errno}");
    }
}

/// Another client has renamed a file and renamed it back, and the server has no fid left to find it by.
#[test]
fn a_file_is_found_at_its_former_place_when_there_is_a_fid_again() {
    let states = Arc::<[AtomicBool; 2]>::default();
    let states_of_server = Arc::clone(&states);
    let fake = Fake::new(move |tag, request| match *request {
        Request::Version { msize, .. } => Some(reply(tag, &Reply::Version { msize, version: VERSION })),
        Request::Walk { steps, .. } => {
            let [is_moved, is_full] = &*states_of_server;
            let step = steps.iter().last();
            let is = |text| step == Some(Step::Child(name(text)));
            if (is("a") || is("none")) && is_full.swap(false, Ordering::SeqCst) {
                return Some(reply(tag, &Reply::Error(Errno::RANGE)));
            }
            let is_missing = is("none") || is(if is_moved.load(Ordering::SeqCst) { "a" } else { "d" });
            is_missing.then(|| reply(tag, &Reply::Error(Errno::NOENT)))
        }
        _ => None,
    });
    let client = fake.connect(Options::default()).unwrap();
    let find = |text| client.lookup(&CX, Ino::ROOT, name(text)).map(|entry| entry.ino);
    let [is_moved, is_full] = &*states;
    assert_eq!(find("a"), Ok(Ino(2)));
    is_moved.store(true, Ordering::SeqCst);
    assert_eq!(find("d"), Ok(Ino(2)));
    is_moved.store(false, Ordering::SeqCst);
    // The fids are released by this.
    is_full.store(true, Ordering::SeqCst);
    assert_eq!(find("none"), Err(Errno::NOENT));
    is_full.store(true, Ordering::SeqCst);
    assert_eq!(client.getattr(&CX, Ino(2), None).map(|attr| attr.size), Ok(1000));
    assert!(!is_full.load(Ordering::SeqCst));
}

/// The fids that files were made by, and those that ended.
type Fids = Arc<Mutex<(Vec<Fid>, Vec<Fid>)>>;

fn all_made_have_ended(fids: &Fids) -> bool {
    let fids = fids.lock().unwrap();
    fids.0.iter().all(|fid| fids.1.contains(fid))
}

/// Between Tlcreate and the lookup another file is moved onto the name.
#[test]
fn a_new_file_replaced_at_once_is_not_confused_with_its_successor() {
    for cache in [Cache::None, Cache::Auto] {
        let fids = Fids::default();
        let noted = Arc::clone(&fids);
        let fake = Fake::new(move |tag, request| match *request {
            Request::Create { fid, .. } => {
                noted.lock().unwrap().0.push(fid);
                Some(reply(tag, &Reply::Create { qid: OTHER, iounit: 0 }))
            }
            Request::Clunk { fid } => {
                noted.lock().unwrap().1.push(fid);
                None
            }
            _ => None,
        });
        let client = fake.connect(Options { cache, ..Options::default() }).unwrap();
        let made = client.create(&CX, Ino::ROOT, name("a"), &common::file(0o600), OFlags::RDWR);
        assert_eq!(made.unwrap_err(), Errno::STALE, "{cache:?}");
        nothing_is_left(&client);
        becomes_so("the new file stays open", || all_made_have_ended(&fids));
        assert_eq!(fids.lock().unwrap().0.len(), 1);
    }
}

/// Some servers treat a fid as a path, and another file was moved there.
#[test]
fn an_opened_file_must_be_the_one_found() {
    let fake = Fake::new(|tag, request| match *request {
        Request::Open { .. } => Some(reply(tag, &Reply::Open { qid: OTHER, iounit: 0 })),
        _ => None,
    });
    let client = fake.connect(Options::default()).unwrap();
    let ino = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
    assert_eq!(client.open(&CX, ino, OFlags::RDWR).unwrap_err(), Errno::STALE);
    client.forget(ino, 1);
    nothing_is_left(&client);
}

/// It was there already, is cached, and cannot be truncated.
#[test]
fn a_late_failure_of_a_create_leaves_nothing() {
    let fids = Fids::default();
    let noted = Arc::clone(&fids);
    let fake = Fake::new(move |tag, request| match *request {
        Request::Create { fid, .. } => {
            noted.lock().unwrap().0.push(fid);
            Some(reply(tag, &Reply::Create { qid: FILE, iounit: 0 }))
        }
        Request::Clunk { fid } => {
            noted.lock().unwrap().1.push(fid);
            None
        }
        Request::Setattr { .. } => Some(reply(tag, &Reply::Error(Errno::NOSPC))),
        _ => None,
    });
    let client = fake.connect(Options { cache: Cache::Auto, ..Options::default() }).unwrap();
    let ino = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
    let handle = client.open(&CX, ino, OFlags::RDWR).unwrap();
    let flags = OFlags::RDWR | OFlags::TRUNC;
    let made = client.create(&CX, Ino::ROOT, name("a"), &common::file(0o600), flags);
    assert_eq!(made.unwrap_err(), Errno::NOSPC);
    assert_eq!(client.usage().handles, 1);
    client.release(&CX, ino, handle);
    becomes_so("what was made stays open", || all_made_have_ended(&fids));
    client.forget(ino, 1);
    nothing_is_left(&client);
}

/// A server that is started again, and whose file of the same number may be another one then.
struct Restarted {
    fake: Fake,
    writes: Arc<AtomicUsize>,
}

impl Restarted {
    fn new(before: Getattr, after: Getattr) -> Self {
        let (is_new, writes) = (AtomicBool::new(false), Arc::<AtomicUsize>::default());
        let counted = Arc::clone(&writes);
        let fake = Fake::new(move |tag, request| match *request {
            // The connection ends by this, the first time.
            Request::Statfs { .. } if !is_new.swap(true, Ordering::SeqCst) => Some(Act::HangUp),
            Request::Getattr { fid, .. } if fid != Fid(1) => {
                let now = if is_new.load(Ordering::SeqCst) { after } else { before };
                Some(reply(tag, &Reply::Getattr(now)))
            }
            Request::Write { .. } => {
                counted.fetch_add(1, Ordering::SeqCst);
                None
            }
            _ => None,
        });
        Self { fake, writes }
    }

    fn client(&self, cache: Cache) -> Client {
        self.fake.connect(Options { cache, patience: PATIENCE, ..Options::default() }).unwrap()
    }

    /// How often was written since then.
    fn restart(&self, client: &Client) -> impl Fn() -> usize {
        let before = self.writes.load(Ordering::SeqCst);
        let _ = client.statfs(&CX, Ino::ROOT).unwrap_err();
        let writes = Arc::clone(&self.writes);
        move || writes.load(Ordering::SeqCst) - before
    }
}

fn born(sec: i64, generation: u64) -> Getattr {
    let attr = Attr { btime: (sec != 0).then_some(Timespec { sec, nsec: 5 }), ..file_attr().attr };
    Getattr { attr, generation, ..file_attr() }
}

/// Seconds, 0 for not told, and generation.
type Birth = (i64, u64);

/// What the file was, what is there after the restart, and whether that is the same.
const RESTARTS: [(Birth, Birth, bool); 6] = [
    ((0, 0), (0, 0), true),
    ((10, 1), (10, 1), true),
    ((10, 1), (11, 1), false),
    ((10, 0), (11, 0), false),
    ((0, 1), (0, 2), false),
    // The new server tells nothing.
    ((10, 1), (0, 0), true),
];

#[test]
fn data_lost_by_a_restart_are_not_written_to_another_file() {
    for (before, after, is_same) in RESTARTS {
        let server = Restarted::new(born(before.0, before.1), born(after.0, after.1));
        let client = server.client(Cache::Auto);
        let ino = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
        let handle = client.open(&CX, ino, OFlags::RDWR).unwrap();
        write(&client, ino, handle, 0, b"of the first file").unwrap();
        client.flush(&CX, ino, handle, 0).unwrap();
        let writes = server.restart(&client);
        assert_eq!(client.fsync(&CX, ino, handle, false).is_ok(), is_same, "{before:?} {after:?}");
        assert_eq!(writes() > 0, is_same, "{before:?} {after:?}");
    }
}

#[test]
fn a_lookup_after_a_restart_does_not_confuse_files() {
    for (before, after, is_same) in RESTARTS.into_iter().take(5) {
        let server = Restarted::new(born(before.0, before.1), born(after.0, after.1));
        let client = server.client(Cache::None);
        let ino = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
        let handle = client.open(&CX, ino, OFlags::RDWR).unwrap();
        let writes = server.restart(&client);
        let now = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
        assert_eq!(now == ino, is_same, "{before:?} {after:?}");
        let written = write(&client, ino, handle, 0, b"of the first file");
        assert_eq!(written.is_ok(), is_same, "{before:?} {after:?}: {written:?}");
        assert_eq!(writes() > 0, is_same, "{before:?} {after:?}");
        client.release(&CX, ino, handle);
        let handle = client.open(&CX, now, OFlags::RDWR).unwrap();
        write(&client, now, handle, 0, b"of the new one").unwrap();
        client.fsync(&CX, now, handle, false).unwrap();
        client.release(&CX, now, handle);
        client.forget(now, 1);
        client.forget(ino, 1);
        nothing_is_left(&client);
    }
}

/// A server whose fids are paths, and on which another client has renamed a file over the open one.
#[test]
fn attributes_of_an_open_file_are_not_those_of_its_successor() {
    for cache in [Cache::None, Cache::Auto] {
        let is_replaced = Arc::<AtomicBool>::default();
        let sets = Arc::<Mutex<Vec<(SetAttr, bool)>>>::default();
        let (replaced, noted, opened) = (Arc::clone(&is_replaced), Arc::clone(&sets), Mutex::new(Vec::new()));
        let fake = Fake::new(move |tag, request| match *request {
            Request::Open { fid, flags } => {
                opened.lock().unwrap().push((fid, flags.contains(OFlags::RDWR)));
                None
            }
            Request::Getattr { fid, .. } if fid != Fid(1) && replaced.load(Ordering::SeqCst) => {
                let is_open = opened.lock().unwrap().iter().any(|(open, _)| *open == fid);
                let other = Getattr { qid: OTHER, attr: file_attr().attr.with_size(5), ..file_attr() };
                Some(reply(tag, &Reply::Getattr(if is_open { file_attr() } else { other })))
            }
            Request::Setattr { fid, set, .. } => {
                let writable = opened.lock().unwrap().iter().find(|(open, _)| *open == fid).map(|open| open.1);
                noted.lock().unwrap().push((set, writable.is_some_and(|writable| writable || set.size.is_none())));
                Some(reply(tag, &Reply::Setattr))
            }
            _ => None,
        });
        let client = fake.connect(Options { cache, ..Options::default() }).unwrap();
        let ino = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
        let [reads, writes] = [OFlags::RDONLY, OFlags::RDWR].map(|flags| client.open(&CX, ino, flags).unwrap());
        is_replaced.store(true, Ordering::SeqCst);
        assert_eq!(client.getattr(&CX, ino, Some(reads)).map(|attr| attr.size), Ok(1000), "{cache:?}");
        let time = Some(SetTime::At(Timespec { sec: 7, nsec: 0 }));
        let set = SetAttr { size: Some(1000), mode: Some(0o640), mtime: time, ..SetAttr::default() };
        assert_eq!(client.setattr(&CX, ino, Some(writes), &set).map(|attr| attr.size), Ok(1000), "{cache:?}");
        let sets: Vec<_> = sets.lock().unwrap().drain(..).collect();
        assert!(sets.len() == 2 && sets.iter().all(|(_, is_right)| *is_right), "{cache:?}: {sets:?}");
        for handle in [reads, writes] {
            client.release(&CX, ino, handle);
        }
        assert_eq!(client.getattr(&CX, ino, None).unwrap_err(), Errno::STALE, "{cache:?}");
    }
}

/// The request that changed something succeeded.
#[test]
fn a_change_succeeds_though_no_attributes_come_after_it() {
    let is_failing = Arc::<AtomicBool>::default();
    let fails = Arc::clone(&is_failing);
    let fake = Fake::new(move |tag, request| match request {
        Request::Getattr { .. } if fails.load(Ordering::SeqCst) => Some(reply(tag, &Reply::Error(Errno::NOMEM))),
        Request::Setattr { .. } => Some(reply(tag, &Reply::Setattr)),
        _ => None,
    });
    let client = fake.connect(Options { cache: Cache::Auto, ..Options::default() }).unwrap();
    let ino = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
    let handle = client.open(&CX, ino, OFlags::RDWR).unwrap();
    is_failing.store(true, Ordering::SeqCst);
    let at = IoRange { flags: OFlags::RDWR | OFlags::DIRECT, ..common::range(ino, handle, 0, 4) };
    assert_eq!(client.write(&CX, &at, &mut b"text".as_slice()).map(|data| data.bytes()), Ok(Some(4)));
    let set = SetAttr { mode: Some(0o640), uid: Some(7), size: Some(10), ..SetAttr::default() };
    let attr = client.setattr(&CX, ino, Some(handle), &set).unwrap();
    assert_eq!((attr.mode, attr.uid, attr.size), (0o100_640, 7, 10));
    assert_eq!(client.getattr(&CX, ino, None).unwrap_err(), Errno::NOMEM);
}
