//! Servers of other projects, with their limits.

use crate::common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::fake::{FILE, Fake, file_attr, reply};
use common::{CX, Few, name};
use ferry_9p_client::{Cache, Options};
use ferry_vfs::*;
use ferry_wire::ninep::{Fid, Getattr, LockStatus, Qid, QidKind, Qids, Reply, Request, Step, VERSION};

/// Fids below this number.
const FIDS: u32 = 20;

/// ganesha has a table of fids, and an error for the others.
#[test]
fn more_files_are_known_than_the_server_has_fids() {
    let files = Mutex::<HashMap<Fid, u64>>::default();
    let fake = Fake::new(move |tag, request| {
        let mut files = files.lock().unwrap();
        let qid = |path| Qid { kind: QidKind::FILE, version: 1, path };
        match *request {
            Request::Version { msize, .. } => Some(reply(tag, &Reply::Version { msize, version: VERSION })),
            Request::Walk { new_fid, .. } if new_fid.0 >= FIDS => Some(reply(tag, &Reply::Error(Errno::RANGE))),
            Request::Walk { fid, new_fid, steps } => {
                let mut qids = Qids::default();
                let path = match steps.iter().last() {
                    Some(Step::Child(name)) => 1 + name.as_bytes().len() as u64,
                    _ => files.get(&fid).copied().unwrap_or(1),
                };
                (0..steps.len()).for_each(|_| qids.push(qid(path)));
                files.insert(new_fid, path);
                Some(reply(tag, &Reply::Walk(qids)))
            }
            Request::Getattr { fid, .. } if fid != Fid(1) => {
                Some(reply(tag, &Reply::Getattr(Getattr { qid: qid(files[&fid]), ..file_attr() })))
            }
            Request::Open { fid, .. } => Some(reply(tag, &Reply::Open { qid: qid(files[&fid]), iounit: 0 })),
            _ => None,
        }
    });
    let client = fake.connect(Options::default()).unwrap();
    let find = |number: u32| client.lookup(&CX, Ino::ROOT, name(&"x".repeat(1 + number as usize))).unwrap().ino;
    let inodes: Vec<Ino> = (0..100).map(find).collect();
    for ino in inodes {
        let handle = client.open(&CX, ino, OFlags::RDONLY).unwrap();
        assert!(client.getattr(&CX, ino, None).is_ok());
        client.release(&CX, ino, handle);
    }
}

/// A server that has no fid left for the first request of this kind, and the number of those.
fn refusing_one(is_it: fn(&Request<'_>) -> bool) -> (Fake, Arc<AtomicUsize>) {
    let asked = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&asked);
    let fake = Fake::new(move |tag, request| match *request {
        _ if is_it(request) && counted.fetch_add(1, Ordering::SeqCst) == 0 => {
            Some(reply(tag, &Reply::Error(Errno::RANGE)))
        }
        Request::Version { msize, .. } => Some(reply(tag, &Reply::Version { msize, version: VERSION })),
        Request::Xattrwalk { .. } => Some(reply(tag, &Reply::Xattrwalk { bytes: 0 })),
        _ => None,
    });
    (fake, asked)
}

#[test]
fn attaches_and_attributes_get_a_fid_when_others_are_released() {
    let options = || Options { uid: 0, ..Options::default() };
    let joe = Caller { uid: 1000, gid: 100, ..*CX };
    let (fake, asked) =
        refusing_one(|request| matches!(request, Request::Attach { user, .. } if user.uid == Some(1000)));
    let client = fake.connect(options()).unwrap();
    assert!(client.mkdir(&joe, Ino::ROOT, name("d"), &common::dir(0o755)).is_ok());
    assert_eq!(asked.load(Ordering::SeqCst), 2);

    let (fake, asked) = refusing_one(|request| matches!(request, Request::Xattrwalk { .. }));
    let client = fake.connect(options()).unwrap();
    let ino = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
    assert_eq!(client.getxattr(&CX, ino, b"user.a").as_deref(), Ok(&b""[..]));
    assert_eq!(asked.load(Ordering::SeqCst), 2);

    // ganesha has this error for long lists as well.
    let (fake, asked) = refusing_one(|request| matches!(request, Request::Xattrwalk { .. }));
    let client = fake.connect(options()).unwrap();
    let ino = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
    assert_eq!(client.listxattr(&CX, ino).unwrap_err(), Errno::RANGE);
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

/// The server has no fid left to find a new file by: once, or from then on.
#[test]
fn a_file_is_created_once_although_there_is_no_fid_to_find_it_by() {
    for (refusals, outcome) in [(1, Ok(())), (usize::MAX, Err(Errno::IO))] {
        let created = Arc::<AtomicUsize>::default();
        let (counted, refused) = (Arc::clone(&created), AtomicUsize::default());
        let fake = Fake::new(move |tag, request| match *request {
            Request::Version { msize, .. } => Some(reply(tag, &Reply::Version { msize, version: VERSION })),
            Request::Create { .. } => Some(match counted.fetch_add(1, Ordering::SeqCst) {
                0 => reply(tag, &Reply::Create { qid: FILE, iounit: 0 }),
                _ => reply(tag, &Reply::Error(Errno::EXIST)),
            }),
            Request::Walk { steps, .. } if steps.len() == 1 && counted.load(Ordering::SeqCst) > 0 => {
                let is_refused = refused.fetch_add(1, Ordering::SeqCst) < refusals;
                is_refused.then(|| reply(tag, &Reply::Error(Errno::RANGE)))
            }
            _ => None,
        });
        let client = fake.connect(Options { cache: Cache::None, ..Options::default() }).unwrap();
        let flags = OFlags::RDWR | OFlags::EXCL;
        let made = client.create(&CX, Ino::ROOT, name("a"), &common::file(0o600), flags);
        assert_eq!((made.map(drop), created.load(Ordering::SeqCst)), (outcome, 1));
    }
}

/// ganesha resolves the client's name in a lock.
#[test]
fn locks_have_the_name_of_a_host_where_the_server_wants_that() {
    let owners = Arc::<Mutex<Vec<(u32, Vec<u8>)>>>::default();
    let noted = Arc::clone(&owners);
    let fake = Fake::new(move |tag, request| match *request {
        Request::Lock { lock, .. } if lock.client.starts_with(b"ferry-") => {
            Some(reply(tag, &Reply::Error(Errno::INVAL)))
        }
        Request::Lock { lock, .. } => {
            noted.lock().unwrap().push((lock.pid, lock.client.to_vec()));
            Some(reply(tag, &Reply::Lock(LockStatus::Success)))
        }
        _ => None,
    });
    let client = fake.connect(Options::default()).unwrap();
    let ino = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
    let handle = client.open(&CX, ino, OFlags::RDWR).unwrap();
    for (kind, id) in [(LockKind::Unlock, 1), (LockKind::Read, 1), (LockKind::Read, 2), (LockKind::Unlock, 1)] {
        let owner = LockOwner { session: CX.session, id };
        let lock = Lock { kind, owner, start: 0, end: 9, pid: 42, flock: false };
        assert_eq!(client.set_lock(&CX, ino, handle, &lock, None), Ok(LockOutcome::Done));
    }
    let owners = owners.lock().unwrap();
    assert!(owners.iter().all(|(_, client)| client == rustix::system::uname().nodename().to_bytes()), "{owners:?}");
    assert!(owners[1] != owners[2] && owners[0] == owners[1] && owners[1] == owners[3], "{owners:?}");
}

/// In FUSE it would mean that this client opens and syncs no files at all.
#[test]
fn what_a_server_does_not_implement_is_not_implemented_for_that_file() {
    for cache in [Cache::None, Cache::Auto] {
        let is_opened = Arc::<Mutex<bool>>::default();
        let opened = Arc::clone(&is_opened);
        let fake = Fake::new(move |tag, request| match *request {
            Request::Open { .. } if !*opened.lock().unwrap() => Some(reply(tag, &Reply::Error(Errno::NOSYS))),
            Request::Create { .. } | Request::Fsync { .. } => Some(reply(tag, &Reply::Error(Errno::NOSYS))),
            _ => None,
        });
        let client = fake.connect(Options { cache, ..Options::default() }).unwrap();
        let made = client.create(&CX, Ino::ROOT, name("a"), &common::file(0o600), OFlags::RDWR);
        assert_eq!(made.unwrap_err(), Errno::OPNOTSUPP);
        let ino = client.lookup(&CX, Ino::ROOT, name("a")).unwrap().ino;
        assert_eq!(client.open(&CX, ino, OFlags::RDWR).unwrap_err(), Errno::OPNOTSUPP);
        *is_opened.lock().unwrap() = true;
        let handle = client.open(&CX, ino, OFlags::RDWR).unwrap();
        common::write(&client, ino, handle, 0, b"text").unwrap();
        assert_eq!(client.fsync(&CX, ino, handle, false).unwrap_err(), Errno::OPNOTSUPP, "{cache:?}");
    }
}

/// p9ufs takes the size for a number of names.
#[test]
fn a_listing_is_requested_by_a_whole_message() {
    let sizes = Arc::<Mutex<Vec<u32>>>::default();
    let noted = Arc::clone(&sizes);
    let fake = Fake::new(move |tag, request| match *request {
        Request::Version { .. } => Some(reply(tag, &Reply::Version { msize: 1 << 18, version: VERSION })),
        Request::Readdir { bytes_max, .. } => {
            noted.lock().unwrap().push(bytes_max);
            Some(reply(tag, &Reply::Readdir(b"")))
        }
        _ => None,
    });
    let client = fake.connect(Options::default()).unwrap();
    let handle = client.opendir(&CX, Ino::ROOT, OFlags::RDONLY).unwrap();
    let at = DirRange { ino: Ino::ROOT, handle, offset: 0, plus: false };
    client.readdir(&CX, &at, &mut Few::new(10)).unwrap();
    assert_eq!(*sizes.lock().unwrap(), [(1 << 18) - 24]);
}
