//! What clients are told of files with suid and sgid, and of files that they change without a request.

use crate::common;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Answer, Client};
use ferry_driver::fuse::{DirEntries, ReplyKind, decode_reply, reply_kind};
use ferry_serve::{Backings, Cache, HEADER_BYTES, SessionSlot, ShareOptions};
use ferry_vfs::*;
use ferry_wire::fuse::{InitFlags, OpenFlags, OpenReply, Operation, Release, Reply, Timeouts};

const FILE: Ino = Ino(2);
const REGULAR: u32 = 0o100_000;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const BY_SERVER: OpenFlags =
    OpenFlags::PASSTHROUGH.union(OpenFlags::DIRECT_IO).union(OpenFlags::PARALLEL_DIRECT_WRITES);

/// One inode, by every name.
struct One {
    mode: AtomicU32,
    changes: Changes,
    is_unwatched: AtomicBool,
    file: Arc<Backing>,
    set: Mutex<Vec<SetAttr>>,
}

impl One {
    fn new(mode: u32) -> Arc<Self> {
        let file = Arc::new(Backing::new(tempfile::tempfile().unwrap().into()));
        let (changes, is_unwatched) = (Changes::default(), AtomicBool::new(false));
        Arc::new(Self { mode: mode.into(), changes, is_unwatched, file, set: Mutex::default() })
    }

    fn attr(&self) -> Attr {
        Attr { mode: self.mode.load(Ordering::Relaxed), ..Attr::new(FILE, FileType::RegularFile, 0) }
    }

    fn entry(&self) -> Entry {
        Entry::new(FILE, self.attr())
    }
}

impl FileSystem for One {
    fn features(&self) -> Features {
        Features { backing: true, ..Features::default() }
    }
    fn changes(&self) -> Option<&Changes> {
        Some(&self.changes)
    }
    fn is_watched(&self, _: Ino) -> bool {
        !self.is_unwatched.load(Ordering::SeqCst)
    }
    fn lookup(&self, _: &Caller<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        Ok(self.entry())
    }
    fn getattr(&self, _: &Caller<'_>, _: Ino, _: Option<Handle>) -> Result<Attr> {
        Ok(self.attr())
    }
    fn setattr(&self, _: &Caller<'_>, _: Ino, _: Option<Handle>, set: &SetAttr) -> Result<Attr> {
        self.set.lock().unwrap().push(*set);
        Ok(self.attr())
    }
    fn mknod(&self, _: &Caller<'_>, _: Ino, _: Name<'_>, _: &CreateArgs) -> Result<Entry> {
        Ok(self.entry())
    }
    fn link(&self, _: &Caller<'_>, _: Ino, _: Ino, _: Name<'_>) -> Result<Entry> {
        Ok(self.entry())
    }
    fn create(&self, _: &Caller<'_>, _: Ino, _: Name<'_>, _: &CreateArgs, _: OFlags) -> Result<(Entry, Handle)> {
        Ok((self.entry(), Handle(1)))
    }
    fn tmpfile(&self, _: &Caller<'_>, _: Ino, _: &CreateArgs, _: OFlags) -> Result<(Entry, Handle)> {
        Ok((self.entry(), Handle(1)))
    }
    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(1))
    }
    fn backing(&self, _: &Caller<'_>, _: Ino, _: Handle) -> Option<Arc<Backing>> {
        Some(Arc::clone(&self.file))
    }
    fn readdir(&self, _: &Caller<'_>, _: &DirRange, out: &mut dyn DirOutput) -> Result<()> {
        for (next, name, mode) in [(1, b"one", None), (2, b"two", Some(REGULAR | 0o755)), (3, b"six", None)] {
            let attr = mode.map_or_else(|| self.attr(), |mode| Attr { mode, ..self.attr() });
            let item = DirItem { ino: FILE.0, next, kind: FileType::RegularFile, name };
            out.push(&item, Some(&Entry::new(FILE, attr)));
        }
        Ok(())
    }
}

/// A kernel that takes every backing file.
#[derive(Default)]
struct Kernel(AtomicI32);

impl Backings for Kernel {
    fn register(&self, _: BorrowedFd<'_>) -> io::Result<i32> {
        Ok(self.0.fetch_add(1, Ordering::Relaxed) + 1)
    }
    fn unregister(&self, _: i32) {}
}

fn options() -> ShareOptions {
    ShareOptions { cache: Cache::Always, ..ShareOptions::default() }
}

/// A client of it, with or without passthrough.
fn client(one: &Arc<One>, passes: bool) -> Client {
    let session = match passes {
        false => SessionSlot::default(),
        true => SessionSlot::new(|_, wanted| wanted.flags |= InitFlags::PASSTHROUGH)
            .with_backings(Arc::new(Kernel::default())),
    };
    Client::new(Arc::clone(one) as _, &options(), session)
}

/// How long what an answer tells of attributes holds, and what was opened.
fn told(client: &mut Client, ino: Ino, operation: Operation<'_>) -> (Vec<Duration>, Option<OpenReply>) {
    let kind = reply_kind(&operation).unwrap();
    let Answer::Reply(body) = client.ask(ino, operation) else { panic!("refused") };
    if kind == ReplyKind::Bytes {
        let entries = DirEntries::new(&body, true).map(|entry| entry.unwrap().entry.unwrap().1.attr);
        return (entries.collect(), None);
    }
    let mut message = u32::try_from(HEADER_BYTES + body.len()).unwrap().to_le_bytes().to_vec();
    message.extend_from_slice(&[0; HEADER_BYTES - 4]);
    message.extend_from_slice(&body);
    match decode_reply(kind, &message).unwrap().1.unwrap() {
        Reply::Entry { timeouts: Timeouts { attr, .. }, .. } => (vec![attr], None),
        Reply::Created { timeouts: Timeouts { attr, .. }, opened, .. } => (vec![attr], Some(opened)),
        Reply::Attr { timeout, .. } | Reply::Statx { timeout, .. } => (vec![timeout], None),
        Reply::Open(opened) => (vec![], Some(opened)),
        other => panic!("{other:?}"),
    }
}

fn open(client: &mut Client, flags: OFlags) -> OpenFlags {
    told(client, FILE, Operation::Open { flags, clear_privileges: false }).1.unwrap().flags
}

fn close(client: &mut Client) {
    let release = Release { handle: Handle(1), flags: OFlags::empty(), flush: false, unlock_flock: false, owner: 0 };
    assert_eq!(client.ask(FILE, Operation::Release(release)), Answer::Reply(vec![]));
}

fn stat(client: &mut Client) -> Duration {
    told(client, FILE, Operation::Getattr { handle: None }).0[0]
}

/// Clients of a source that watches some directories only are not told of all changes.
#[test]
fn what_is_not_watched_is_cached_for_a_second() {
    const SECOND: Duration = Duration::from_secs(1);
    let name = Name::new(b"one").unwrap();
    for (notifications, is_unwatched, lifetime) in
        [(true, false, DAY), (true, true, SECOND), (false, true, DAY), (false, false, DAY)]
    {
        let one = One::new(REGULAR | 0o644);
        one.is_unwatched.store(is_unwatched, Ordering::SeqCst);
        let options = ShareOptions { notifications, ..options() };
        let client = &mut Client::new(Arc::clone(&one) as _, &options, SessionSlot::default());
        assert_eq!(stat(client), lifetime);
        assert_eq!(told(client, Ino::ROOT, Operation::Lookup { name }).0, [lifetime]);
        let flags = open(client, OFlags::RDONLY);
        assert_eq!(flags.contains(OpenFlags::KEEP_CACHE), lifetime == DAY, "{flags:?}");
        close(client);
    }
}

/// A client's kernel that executes a file by the mode that it keeps would go on to honour bits that a write has cleared.
#[test]
fn attributes_of_set_id_files_are_never_cached() {
    let name = Name::new(b"one").unwrap();
    let new = CreateArgs { mode: REGULAR | 0o755, ..CreateArgs::default() };
    for (mode, expected) in [
        (REGULAR | 0o755, DAY),
        (REGULAR | 0o1755, DAY),
        (0o042_755, DAY),
        (REGULAR | 0o4755, Duration::ZERO),
        (REGULAR | 0o2755, Duration::ZERO),
        (REGULAR | 0o2644, Duration::ZERO),
        (REGULAR | 0o6777, Duration::ZERO),
    ] {
        let one = One::new(mode);
        let is_file = mode & 0o170_000 == REGULAR;
        let client = &mut client(&one, false);
        let mut is_told = |ino, operation: Operation<'_>, expected: &[Duration]| {
            let what = format!("{operation:?} of {mode:o}");
            assert_eq!(told(client, ino, operation).0, expected, "{what}");
        };
        is_told(Ino::ROOT, Operation::Lookup { name }, &[expected]);
        is_told(FILE, Operation::Getattr { handle: None }, &[expected]);
        is_told(FILE, Operation::Statx { handle: None, flags: 0, mask: 0xfff }, &[expected]);
        let set = SetAttr { mode: Some(mode & 0o7777), ..SetAttr::default() };
        is_told(FILE, Operation::Setattr { handle: None, owner: None, set }, &[expected]);
        is_told(Ino::ROOT, Operation::Mknod { name, new }, &[expected]);
        is_told(Ino::ROOT, Operation::Link { from: FILE, name }, &[expected]);
        if is_file {
            let (flags, clear_privileges) = (OFlags::WRONLY, false);
            is_told(Ino::ROOT, Operation::Create { name, new, flags, clear_privileges }, &[expected]);
            is_told(Ino::ROOT, Operation::Tmpfile { new, flags }, &[expected]);
            let at = DirRange { ino: Ino::ROOT, handle: Handle(1), offset: 1, plus: true };
            is_told(Ino::ROOT, Operation::Readdir { at, bytes_max: 4096 }, &[expected, DAY, expected]);
        }
    }
}

#[test]
fn writes_to_set_id_files_come_to_the_server() {
    for (mode, is_set_id) in [(0o755, false), (0o4755, true), (0o2755, true), (0o2644, true)] {
        let one = One::new(REGULAR | mode);
        let client = &mut client(&one, true);
        // A first open for writing decides against passthrough.
        let first = open(client, OFlags::RDWR);
        assert_eq!(first.contains(OpenFlags::PASSTHROUGH), !is_set_id, "{mode:o}");
        close(client);
        // After a reader's the server writes.
        assert_eq!(open(client, OFlags::RDONLY), OpenFlags::PASSTHROUGH);
        let expected = if is_set_id { BY_SERVER } else { OpenFlags::PASSTHROUGH };
        for flags in [OFlags::RDWR, OFlags::WRONLY] {
            assert_eq!(open(client, flags), expected, "{mode:o} {flags:?}");
        }
        // Also of one that has become one since it was opened.
        one.mode.store(REGULAR | 0o4711, Ordering::Relaxed);
        assert_eq!(open(client, OFlags::RDWR), BY_SERVER);
    }
}

/// The kernel opens the backing file with the client's flags, and `fcntl` changes only the client's file.
#[test]
fn appends_are_written_by_the_server() {
    let one = One::new(REGULAR | 0o644);
    let client = &mut client(&one, true);
    assert_eq!(open(client, OFlags::WRONLY | OFlags::APPEND), BY_SERVER);
    assert_eq!(open(client, OFlags::RDWR), OpenFlags::PASSTHROUGH);
    assert_eq!(open(client, OFlags::RDWR | OFlags::APPEND), BY_SERVER);
    assert_eq!(open(client, OFlags::RDONLY | OFlags::APPEND), OpenFlags::PASSTHROUGH);
}

/// What is stored through a mapping of a backing file changes its times without a request.
#[test]
fn attributes_of_files_that_may_be_mapped_to_write_are_not_kept() {
    let one = One::new(REGULAR | 0o644);
    let notices = Arc::new(AtomicU32::new(0));
    let open_record = Arc::clone(&notices);
    let _subscription = one.changes.subscribe(move |change, by| {
        if by == SessionId::default() {
            assert_eq!(*change, Change::Attr { ino: FILE });
            open_record.fetch_add(1, Ordering::Relaxed);
        }
    });
    let count = || notices.swap(0, Ordering::Relaxed);
    let name = Name::new(b"one").unwrap();
    let client = &mut client(&one, true);
    told(client, Ino::ROOT, Operation::Lookup { name });
    // These cannot be mapped so.
    for flags in [OFlags::RDONLY, OFlags::WRONLY] {
        open(client, flags);
        assert_eq!((stat(client), count()), (DAY, 0), "{flags:?}");
        close(client);
    }
    // The client is to forget what it keeps, once.
    for expected in [1, 0] {
        open(client, OFlags::RDWR);
        assert_eq!((stat(client), count()), (Duration::ZERO, expected));
    }
    close(client);
    assert_eq!(stat(client), Duration::ZERO);
    close(client);
    assert_eq!(stat(client), Duration::from_secs(1), "a mapping outlives what it was made of");
    client.ask(FILE, Operation::Forget { count: 1 });
    assert_eq!(stat(client), DAY);
    // One that is made for it.
    let new = CreateArgs { mode: REGULAR | 0o644, ..CreateArgs::default() };
    let create = Operation::Create { name, new, flags: OFlags::RDWR, clear_privileges: false };
    assert_eq!(told(client, Ino::ROOT, create).0, [Duration::ZERO]);
}

/// Linux clears suid and sgid this way if no other request implies it, and for a chown without a change.
#[test]
fn a_setattr_that_sets_nothing_clears_suid_and_sgid() {
    let one = One::new(REGULAR | 0o6755);
    let client = &mut client(&one, false);
    let none = SetAttr::default();
    let ctime = Some(Timespec { sec: 1, nsec: 0 });
    for (set, clears) in [
        (none, true),
        (SetAttr { ctime, ..none }, true),
        (SetAttr { mode: Some(0o4755), ..none }, false),
        (SetAttr { size: Some(0), ..none }, false),
        (SetAttr { mtime: Some(SetTime::Now), ctime, ..none }, false),
    ] {
        client.ask(FILE, Operation::Setattr { handle: None, owner: None, set });
        let asked = one.set.lock().unwrap().pop().unwrap();
        assert_eq!(asked, SetAttr { clear_privileges: clears, ..set });
    }
}

#[test]
fn callers_are_named_unless_idmapped_mounts_are_allowed() {
    for allow_idmap in [false, true] {
        let options = ShareOptions { allow_idmap, ..options() };
        let client = Client::new(One::new(REGULAR) as _, &options, SessionSlot::default());
        assert_eq!(client.negotiated.has(InitFlags::ALLOW_IDMAP), allow_idmap);
    }
}
