//! What the server promises beyond passing calls on: durable writes, locks that can be interrupted, passthrough.

use crate::common;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use common::{Answer, Client};
use ferry_driver::fuse::{ReplyKind, decode_reply};
use ferry_serve::{Acl, Backings, Cache, SessionSlot, ShareOptions};
use ferry_vfs::*;
use ferry_wire::fuse::{InitFlags, LockRequest, OpenFlags, Operation, Release, Reply};

const FILE: Ino = Ino(2);
/// `O_DSYNC` as Linux sends it; rustix's constant of that name has the bits of `O_SYNC`.
const DSYNC: OFlags = OFlags::from_bits_retain(0o10_000);

/// One file. What it is asked for is noted.
#[derive(Default)]
struct One {
    /// Where the bytes are; without it, nowhere.
    file: Option<Arc<Backing>>,
    /// Reads and writes are left to the server.
    extents: bool,
    /// No more of a write finds room.
    room: Option<usize>,
    /// Files are opened past the page cache where clients ask for that.
    direct: bool,
    /// Nothing ever changes.
    constant: bool,
    /// What a lock request gets.
    waits: bool,
    asked: Mutex<Vec<String>>,
    waiters: Mutex<Vec<Waiter>>,
    next: Mutex<u64>,
    changes: Changes,
}

impl One {
    fn note(&self, what: impl Into<String>) {
        self.asked.lock().unwrap().push(what.into());
    }

    fn open_record(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

impl FileSystem for One {
    fn features(&self) -> Features {
        let (backing, direct, constant) = (self.file.is_some(), self.direct, self.constant);
        Features { backing, direct, constant, posix_locks: !constant, flock: !constant, ..Features::default() }
    }
    fn changes(&self) -> Option<&Changes> {
        Some(&self.changes)
    }
    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        let mut next = self.next.lock().unwrap();
        *next += 1;
        Ok(Handle(*next))
    }
    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        Ok(Attr::new(ino, FileType::RegularFile, 0o644))
    }
    fn backing(&self, _: &Caller<'_>, _: Ino, _: Handle) -> Option<Arc<Backing>> {
        self.file.clone()
    }
    fn write(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Input) -> Result<Data> {
        self.note("write");
        Ok(match (&self.file, self.extents) {
            (Some(file), true) => Data::Extent(Extent { file: Arc::clone(file), offset: at.offset }),
            _ => Data::Bytes(self.room.unwrap_or(usize::MAX).min(at.len as usize)),
        })
    }
    fn read(&self, _: &Caller<'_>, at: &IoRange, _: &mut dyn Output) -> Result<Data> {
        let file = self.file.clone().ok_or(Errno::NOSYS)?;
        Ok(Data::Extent(Extent { file, offset: at.offset }))
    }
    fn flush(&self, _: &Caller<'_>, _: Ino, _: Handle, _: u64) -> Result<()> {
        Ok(())
    }
    fn fsync(&self, _: &Caller<'_>, _: Ino, handle: Handle, data_only: bool) -> Result<Option<Arc<Backing>>> {
        self.note(format!("fsync {data_only}"));
        match handle.0 {
            1 => Ok(None),
            2 => Err(Errno::NOSYS),
            3 => Err(Errno::NOSPC),
            _ => Ok(self.file.clone()),
        }
    }
    fn set_lock(&self, _: &Caller<'_>, _: Ino, _: Handle, lock: &Lock, wait: Option<Waiter>) -> Result<LockOutcome> {
        self.note(format!("{:?}", lock.kind));
        match (wait, lock.kind) {
            (Some(waiter), _) if self.waits => {
                self.waiters.lock().unwrap().push(waiter);
                Ok(LockOutcome::Waiting)
            }
            // Dropped, not dismissed: no answer may come of it.
            (Some(_), LockKind::Read) => Err(Errno::DEADLK),
            _ => Ok(LockOutcome::Done),
        }
    }
}

/// A client whose kernel sends an OPEN for each file.
fn client(one: One, options: &ShareOptions, session: SessionSlot) -> (Arc<One>, Client) {
    let (one, offered) = (Arc::new(one), InitFlags::ALL - InitFlags::NO_OPEN_SUPPORT);
    let client = Client::offering(offered, Arc::clone(&one) as Arc<dyn FileSystem>, options, session);
    (one, client.unwrap())
}

fn file() -> Option<Arc<Backing>> {
    Some(Arc::new(Backing::new(tempfile::tempfile().unwrap().into())))
}

#[test]
fn a_write_is_as_durable_as_its_flags_ask_for() {
    const WRITTEN: [u8; 8] = [3, 0, 0, 0, 0, 0, 0, 0];
    let written = || Answer::Reply(WRITTEN.to_vec());
    for (handle, flags, calls, expected) in [
        (1, OFlags::WRONLY, &["write"][..], written()),
        (1, OFlags::WRONLY | OFlags::DIRECT, &["write"], written()),
        (1, OFlags::WRONLY | DSYNC, &["write", "fsync true"], written()),
        (1, OFlags::WRONLY | OFlags::SYNC, &["write", "fsync false"], written()),
        (2, OFlags::WRONLY | OFlags::SYNC, &["write", "fsync false"], written()),
        (3, OFlags::WRONLY | OFlags::SYNC, &["write", "fsync false"], Answer::Error(Errno::NOSPC)),
        // The descriptor is synced by a transfer, and then the write is answered.
        (4, OFlags::WRONLY | DSYNC, &["write", "fsync true"], written()),
    ] {
        let (one, mut client) =
            client(One { file: file(), ..One::default() }, &ShareOptions::default(), SessionSlot::default());
        let handle = Handle(handle);
        let range = IoRange { ino: FILE, handle, offset: 5, len: 3, flags, clear_privileges: false, owner: None };
        let answer = client.ask_and_write(FILE, Operation::Write { range, cached: false }, b"abc");
        assert_eq!(
            (one.open_record(), answer),
            (calls.iter().map(ToString::to_string).collect(), expected),
            "{flags:?}"
        );
    }
}

/// A client's `O_DIRECT` goes no further than the client unless the source passes it on: then a write is a copy.
#[test]
fn a_write_waits_for_a_device_only_where_it_leads_there() {
    for (direct, flags, waits) in [
        (false, OFlags::WRONLY | OFlags::DIRECT, false),
        (true, OFlags::WRONLY | OFlags::DIRECT, true),
        (true, OFlags::WRONLY, false),
        (false, OFlags::WRONLY | DSYNC, true),
    ] {
        let one = One { file: file(), extents: true, direct, ..One::default() };
        let (_, mut client) = client(one, &ShareOptions::default(), SessionSlot::default());
        let handle = Handle(4);
        let range = IoRange { ino: FILE, handle, offset: 5, len: 3, flags, clear_privileges: false, owner: None };
        let answer = client.ask_and_write(FILE, Operation::Write { range, cached: false }, b"abc");
        assert_eq!((answer, client.waits), (Answer::Reply(vec![3, 0, 0, 0, 0, 0, 0, 0]), waits), "{direct} {flags:?}");
    }
}

/// Linux takes any success of a write from its page cache for the whole.
#[test]
fn a_short_write_from_the_page_cache_is_an_error() {
    let flags = OFlags::RDWR;
    let range =
        IoRange { ino: FILE, handle: Handle(1), offset: 5, len: 3, flags, clear_privileges: false, owner: None };
    for (room, cached, expected) in [
        (2, false, Answer::Reply(vec![2, 0, 0, 0, 0, 0, 0, 0])),
        (2, true, Answer::Error(Errno::NOSPC)),
        (3, true, Answer::Reply(vec![3, 0, 0, 0, 0, 0, 0, 0])),
    ] {
        let one = One { room: Some(room), ..One::default() };
        let (_, mut client) = client(one, &ShareOptions::default(), SessionSlot::default());
        assert_eq!(client.ask_and_write(FILE, Operation::Write { range, cached }, b"abc"), expected, "{room} {cached}");
    }
}

#[test]
fn extents_are_transferred_and_published() {
    let one = One { file: file(), extents: true, ..One::default() };
    let (one, mut client) = client(one, &ShareOptions::default(), SessionSlot::default());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&seen);
    let _subscription = one.changes.subscribe(move |change, by| list.lock().unwrap().push((change.clone(), by)));
    let flags = OFlags::RDWR | OFlags::SYNC;
    let range =
        IoRange { ino: FILE, handle: Handle(1), offset: 5, len: 3, flags, clear_privileges: false, owner: None };
    let answer = client.ask_and_write(FILE, Operation::Write { range, cached: false }, b"abc");
    assert_eq!(answer, Answer::Reply(vec![3, 0, 0, 0, 0, 0, 0, 0]));
    assert_eq!(one.open_record(), ["write"], "the descriptor was opened with the flag: that is the source's promise");
    let by = client.session.current().unwrap().id();
    assert_eq!(*seen.lock().unwrap(), [(Change::Data { ino: FILE, offset: 5, len: 3 }, by)]);
    let range = IoRange { offset: 4, len: 100, ..range };
    assert_eq!(client.ask(FILE, Operation::Read(range)), Answer::Reply(b"\0abc".to_vec()));
}

fn set_lock(kind: LockKind) -> Operation<'static> {
    let lock = LockRequest { handle: Handle(1), owner: 9, kind, start: 0, end: 99, pid: 1, flock: false };
    Operation::SetLock { lock, wait: true }
}

#[test]
fn a_lock_that_waits_can_be_interrupted() {
    let (one, mut client) =
        client(One { waits: true, ..One::default() }, &ShareOptions::default(), SessionSlot::default());
    let unique = client.next_unique();
    assert_eq!(client.ask(FILE, set_lock(LockKind::Write)), Answer::Late);
    assert!(one.waiters.lock().unwrap()[0].is_waiting() && client.late.try_recv().is_err());
    assert_eq!(client.ask(FILE, Operation::Interrupt { unique }), Answer::NoReply);
    assert_eq!(common::answer(unique, &client.late.try_recv().unwrap()), Answer::Error(Errno::INTR));
    let waiter = one.waiters.lock().unwrap().pop().unwrap();
    assert!(!waiter.is_waiting());
    // The source had granted it already: it is given back, on another thread.
    one.open_record();
    waiter.wake(Ok(()));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while one.asked.lock().unwrap().is_empty() && std::time::Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(one.open_record(), ["Unlock"]);
    assert!(client.late.try_recv().is_err(), "answered once");
    // An INTERRUPT that overtakes its request.
    let unique = client.next_unique() + 2;
    assert_eq!(client.ask(FILE, Operation::Interrupt { unique }), Answer::NoReply);
    assert_eq!(client.ask(FILE, set_lock(LockKind::Write)), Answer::Late);
    assert_eq!(common::answer(unique, &client.late.try_recv().unwrap()), Answer::Error(Errno::INTR));
}

#[test]
fn a_lock_that_does_not_wait_is_answered_once() {
    let (_, mut client) = client(One::default(), &ShareOptions::default(), SessionSlot::default());
    assert_eq!(client.ask(FILE, set_lock(LockKind::Write)), Answer::Reply(vec![]));
    assert_eq!(client.ask(FILE, set_lock(LockKind::Read)), Answer::Error(Errno::DEADLK));
    assert!(client.late.try_recv().is_err());
}

/// A kernel that takes backing files, or refuses.
#[derive(Default)]
struct Kernel {
    refuses: Option<Errno>,
    readers_only: bool,
    asked: Mutex<u32>,
    registered: Mutex<BTreeMap<i32, ()>>,
}

impl Backings for Kernel {
    fn register(&self, _: BorrowedFd<'_>) -> io::Result<i32> {
        *self.asked.lock().unwrap() += 1;
        if let Some(errno) = self.refuses {
            return Err(errno.into());
        }
        let id = i32::try_from(*self.asked.lock().unwrap()).unwrap();
        self.registered.lock().unwrap().insert(id, ());
        Ok(id)
    }
    fn unregister(&self, id: i32) {
        self.registered.lock().unwrap().remove(&id).expect("registered once, unregistered once");
    }
    fn takes_writers(&self) -> bool {
        !self.readers_only
    }
}

/// A mount that offers passthrough.
fn passing(kernel: &Arc<Kernel>, options: &ShareOptions, flags: InitFlags) -> (Arc<One>, Client) {
    let session = SessionSlot::new(move |_, wanted| wanted.flags |= flags);
    let session = session.with_backings(Arc::clone(kernel) as Arc<dyn Backings>);
    client(One { file: file(), ..One::default() }, options, session)
}

/// Opens and answers handle, flags and registration.
fn open(client: &mut Client, flags: OFlags) -> (Handle, OpenFlags, i32) {
    let Answer::Reply(reply) = client.ask(FILE, Operation::Open { flags, clear_privileges: false }) else {
        panic!("refused")
    };
    let mut message = u32::to_le_bytes(16 + 16).to_vec();
    message.extend_from_slice(&[0; 12]);
    message.extend_from_slice(&reply);
    let Ok((_, Ok(Reply::Open(opened)))) = decode_reply(ReplyKind::Open, &message) else { panic!("no reply") };
    (opened.handle, opened.flags, opened.backing_id)
}

fn close(client: &mut Client, handle: Handle) {
    let release = Release { handle, flags: OFlags::empty(), flush: false, unlock_flock: false, owner: 0 };
    assert_eq!(client.ask(FILE, Operation::Release(release)), Answer::Reply(vec![]));
}

#[test]
fn all_opens_of_an_inode_share_one_backing_file() {
    let kernel = Arc::new(Kernel::default());
    let (one, mut client) = passing(&kernel, &ShareOptions::default(), InitFlags::PASSTHROUGH);
    let first = open(&mut client, OFlags::RDONLY);
    let second = open(&mut client, OFlags::RDWR | OFlags::DIRECT);
    assert_eq!((first.1, first.2, second.1, second.2), (OpenFlags::PASSTHROUGH, 1, OpenFlags::PASSTHROUGH, 1));
    // What the client's kernel wrote by itself is told when the writer is done, and only then.
    let seen = Arc::new(Mutex::new(0));
    let count = Arc::clone(&seen);
    let _subscription = one.changes.subscribe(move |change, by| {
        assert_eq!(*change, Change::Data { ino: FILE, offset: 0, len: u64::MAX });
        assert_ne!(by, SessionId::default());
        *count.lock().unwrap() += 1;
    });
    client.ask(FILE, Operation::Flush { handle: first.0, owner: 1 });
    close(&mut client, first.0);
    assert_eq!((*seen.lock().unwrap(), kernel.registered.lock().unwrap().len()), (0, 1));
    client.ask(FILE, Operation::Flush { handle: second.0, owner: 1 });
    assert_eq!(*seen.lock().unwrap(), 1);
    close(&mut client, second.0);
    assert!(kernel.registered.lock().unwrap().is_empty());
    assert_eq!(open(&mut client, OFlags::RDONLY).2, 2, "registered anew");
    // The client vanishes.
    client.session.end();
    client.server.end_batch();
    assert!(kernel.registered.lock().unwrap().is_empty());
}

#[test]
fn writes_with_notification_go_through_the_server() {
    let kernel = Arc::new(Kernel { readers_only: true, ..Kernel::default() });
    let (_, mut client) = passing(&kernel, &ShareOptions::default(), InitFlags::PASSTHROUGH);
    let by_server = OpenFlags::PASSTHROUGH | OpenFlags::DIRECT_IO | OpenFlags::PARALLEL_DIRECT_WRITES;
    // Whoever opens for writing while a reader's reads are passed through: the same file, by the server.
    let reader = open(&mut client, OFlags::RDONLY);
    let writer = open(&mut client, OFlags::RDWR);
    let another = open(&mut client, OFlags::RDONLY);
    assert_eq!([reader.1, writer.1, another.1], [OpenFlags::PASSTHROUGH, by_server, OpenFlags::PASSTHROUGH]);
    assert_eq!([reader.2, writer.2, another.2], [1, 1, 1]);
    for handle in [reader.0, writer.0, another.0] {
        close(&mut client, handle);
    }
    // The other way round nothing is passed through.
    let writer = open(&mut client, OFlags::WRONLY);
    let reader = open(&mut client, OFlags::RDONLY);
    assert!(!writer.1.contains(OpenFlags::PASSTHROUGH) && !reader.1.contains(OpenFlags::PASSTHROUGH));
    close(&mut client, writer.0);
    close(&mut client, reader.0);
    assert_eq!(open(&mut client, OFlags::RDONLY).1, OpenFlags::PASSTHROUGH, "the last close has freed the choice");
}

/// FLUSH gives locks back, and tells what became of what was stored through a mapping.
#[test]
fn flush_is_sent_only_where_it_matters() {
    for (constant, local_locks) in [(false, false), (false, true), (true, false), (true, true)] {
        let options = ShareOptions { local_locks, ..ShareOptions::default() };
        let kernel = Arc::new(Kernel::default());
        let passes = SessionSlot::new(|_, wanted| wanted.flags |= InitFlags::PASSTHROUGH).with_backings(kernel);
        for (session, file) in [(SessionSlot::default(), None), (passes, file())] {
            let passed = if file.is_some() { OpenFlags::PASSTHROUGH } else { OpenFlags::empty() };
            let (_, mut client) = client(One { file, constant, ..One::default() }, &options, session);
            for flag in [InitFlags::POSIX_LOCKS, InitFlags::FLOCK_LOCKS] {
                assert_eq!(client.negotiated.has(flag), !(constant || local_locks), "{constant} {local_locks}");
            }
            for (flags, is_told) in
                [(OFlags::RDONLY, !(constant || local_locks)), (OFlags::RDWR, true), (OFlags::WRONLY, true)]
            {
                let opened = open(&mut client, flags);
                assert_eq!(!opened.1.contains(OpenFlags::NOFLUSH), is_told, "{constant} {local_locks} {flags:?}");
                assert!(opened.1.contains(passed));
                close(&mut client, opened.0);
            }
        }
    }
}

/// Then locks of other clients cannot conflict, and no client needs notifications of data.
#[test]
fn a_single_client_keeps_its_locks_and_closes_alone() {
    let options = ShareOptions { single_client: true, ..ShareOptions::default() };
    let (_, mut client) = client(One::default(), &options, SessionSlot::default());
    for flag in [InitFlags::POSIX_LOCKS, InitFlags::FLOCK_LOCKS] {
        assert!(!client.negotiated.has(flag));
    }
    for flags in [OFlags::RDONLY, OFlags::RDWR, OFlags::WRONLY] {
        let opened = open(&mut client, flags);
        assert!(opened.1.contains(OpenFlags::NOFLUSH), "{flags:?}");
        close(&mut client, opened.0);
    }
}

#[test]
fn features_that_the_kernel_refuses_are_not_used() {
    // Whether the kernel is asked again for the next file.
    for (errno, again) in
        [(Errno::PERM, false), (Errno::OPNOTSUPP, false), (Errno::LOOP, true), (Errno::OVERFLOW, true)]
    {
        let kernel = Arc::new(Kernel { refuses: Some(errno), ..Kernel::default() });
        let (_, mut client) = passing(&kernel, &ShareOptions::default(), InitFlags::PASSTHROUGH);
        let first = open(&mut client, OFlags::RDONLY);
        let second = open(&mut client, OFlags::RDONLY);
        assert!(!first.1.contains(OpenFlags::PASSTHROUGH) && !second.1.contains(OpenFlags::PASSTHROUGH));
        assert_eq!(*kernel.asked.lock().unwrap(), 1, "the first open decides for all of them");
        close(&mut client, first.0);
        close(&mut client, second.0);
        open(&mut client, OFlags::RDONLY);
        assert_eq!(*kernel.asked.lock().unwrap(), if again { 2 } else { 1 }, "{errno}");
    }
}

#[test]
fn passthrough_is_agreed_on_only_where_it_works() {
    let write_back = ShareOptions { writeback: true, ..ShareOptions::default() };
    for (options, flags, agreed) in [
        (ShareOptions::default(), InitFlags::PASSTHROUGH, true),
        (ShareOptions::default(), InitFlags::empty(), false),
        (write_back, InitFlags::PASSTHROUGH, false),
    ] {
        let (_, client) = passing(&Arc::default(), &options, flags);
        assert_eq!(client.negotiated.has(InitFlags::PASSTHROUGH), agreed, "{options:?} {flags:?}");
    }
    let session = SessionSlot::new(|_, wanted| wanted.flags |= InitFlags::PASSTHROUGH);
    let (_, without) = client(One { file: file(), ..One::default() }, &ShareOptions::default(), session);
    assert!(!without.negotiated.has(InitFlags::PASSTHROUGH), "nobody registers");
    let session = SessionSlot::new(|_, wanted| wanted.flags |= InitFlags::PASSTHROUGH);
    let session = session.with_backings(Arc::new(Kernel::default()));
    let (_, without) = client(One::default(), &ShareOptions::default(), session);
    assert!(!without.negotiated.has(InitFlags::PASSTHROUGH), "the source has no descriptors");
}

#[test]
fn direct_opens_leave_the_cache_out_where_the_export_wants_it() {
    let direct = OpenFlags::DIRECT_IO | OpenFlags::PARALLEL_DIRECT_WRITES;
    let plain = OpenFlags::PARALLEL_DIRECT_WRITES;
    for (cache, direct_opens, flags, expected) in [
        (Cache::Auto, true, OFlags::RDWR, plain),
        (Cache::Auto, true, OFlags::RDWR | OFlags::DIRECT, direct),
        (Cache::Auto, false, OFlags::RDWR | OFlags::DIRECT, plain),
        (Cache::Always, true, OFlags::RDWR | OFlags::DIRECT, direct),
        (Cache::Always, true, OFlags::RDWR, plain | OpenFlags::KEEP_CACHE),
        (Cache::None, false, OFlags::RDWR, direct),
        (Cache::Metadata, false, OFlags::RDWR, direct),
    ] {
        let options = ShareOptions { cache, direct_opens, ..ShareOptions::default() };
        let (_, mut client) = client(One::default(), &options, SessionSlot::default());
        assert_eq!(open(&mut client, flags).1, expected, "{cache:?} {direct_opens} {flags:?}");
    }
}

/// A source that knows its one inode by number.
struct Numbered(ByNumber);

impl FileSystem for Numbered {
    fn features(&self) -> Features {
        Features { by_number: self.0, ..Features::default() }
    }
    fn lookup_self(&self, _: &Caller<'_>, ino: Ino) -> Result<Entry> {
        let attr = Attr::new(ino, FileType::RegularFile, 0o644);
        if ino == Ino(7) { Ok(Entry::new(ino, attr)) } else { Err(Errno::STALE) }
    }
}

#[test]
fn forgotten_inodes_are_found_by_their_numbers() {
    let on_host = || {
        SessionSlot::new(|_, wanted| {
            wanted.flags = (wanted.flags - InitFlags::NO_EXPORT_SUPPORT) | InitFlags::EXPORT_SUPPORT
        })
    };
    for (by_number, session, finds) in [
        (ByNumber::Any, SessionSlot::default(), true),
        (ByNumber::Host, on_host(), true),
        (ByNumber::Host, SessionSlot::default(), false),
        (ByNumber::No, SessionSlot::default(), false),
    ] {
        let mut client = Client::new(Arc::new(Numbered(by_number)), &ShareOptions::default(), session);
        assert_eq!(client.negotiated.has(InitFlags::EXPORT_SUPPORT), finds);
        assert_eq!(client.negotiated.has(InitFlags::NO_EXPORT_SUPPORT), !finds);
        assert_eq!(client.ask(Ino(8), Operation::LookupSelf), Answer::Error(Errno::STALE));
        if !finds {
            // Whatever the client says that it was told.
            assert_eq!(client.ask(Ino(7), Operation::LookupSelf), Answer::Error(Errno::STALE));
            continue;
        }
        let mut answer = || match client.ask(Ino(7), Operation::LookupSelf) {
            Answer::Reply(bytes) => bytes,
            other => panic!("{other:?}"),
        };
        let bytes = answer();
        assert_eq!(bytes[..8], 7_u64.to_le_bytes(), "the inode itself");
        // The kernel detects invented inode numbers by the generation.
        assert_eq!(bytes[8..16] != [0; 8], by_number == ByNumber::Host);
        assert_eq!(bytes[12..16], [0; 4], "the kernel has 32 bits for it");
        assert_eq!(bytes[8..16], answer()[8..16]);
        // What was told is a reference of the client's.
        let session = client.session.current().expect("INIT was answered");
        assert_eq!(session.inodes(), [Ino(7)]);
    }
}

/// A source with POSIX ACLs, or without.
struct Listed(bool);

impl FileSystem for Listed {
    fn features(&self) -> Features {
        Features { posix_acl: self.0, ..Features::default() }
    }
}

#[test]
fn negotiation_follows_the_options() {
    let plain = ShareOptions::default();
    let agreed =
        |options: ShareOptions| Client::new(Arc::new(Listed(true)), &options, SessionSlot::default()).negotiated;
    let has = |options: ShareOptions, flag| agreed(options).has(flag);
    for (flag, options) in [
        (InitFlags::POSIX_ACL, ShareOptions { posix_acl: Acl::Never, ..plain.clone() }),
        (InitFlags::POSIX_ACL, ShareOptions { xattr: false, ..plain.clone() }),
        (InitFlags::DIRECT_IO_ALLOW_MMAP, ShareOptions { mmap: false, ..plain.clone() }),
        (InitFlags::DO_READDIRPLUS, ShareOptions { readdirplus: false, ..plain.clone() }),
        (InitFlags::DO_READDIRPLUS, ShareOptions { cache: Cache::None, ..plain.clone() }),
    ] {
        assert!(has(plain.clone(), flag) && !has(options.clone(), flag), "{flag:?} {options:?}");
    }
    assert!(has(ShareOptions { cache: Cache::Metadata, ..plain.clone() }, InitFlags::CACHE_SYMLINKS));
    assert!(has(ShareOptions { posix_acl: Acl::Always, ..plain }, InitFlags::POSIX_ACL));
}

#[test]
fn required_acls_prevent_mounts_without_them() {
    let options = ShareOptions { posix_acl: Acl::Always, ..ShareOptions::default() };
    let session = |has_acls, flags| {
        let client = Client::offering(flags, Arc::new(Listed(has_acls)), &options, SessionSlot::default());
        client.map(|client| client.negotiated.has(InitFlags::POSIX_ACL))
    };
    let refused = Err(Answer::Error(Errno::PROTO));
    assert_eq!(session(true, InitFlags::ALL), Ok(true));
    assert_eq!(session(true, InitFlags::ALL - InitFlags::POSIX_ACL), refused);
    assert_eq!(session(false, InitFlags::ALL), refused);
}

/// A source whose directories never change, or may.
struct Constant(bool);

impl FileSystem for Constant {
    fn features(&self) -> Features {
        Features { constant: self.0, ..Features::default() }
    }
    fn opendir(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(3))
    }
}

#[test]
fn directories_that_never_change_need_not_be_opened() {
    let without = InitFlags::ALL - InitFlags::NO_OPENDIR_SUPPORT;
    for (constant, cache, offered, expected) in [
        (true, Cache::Always, InitFlags::ALL, true),
        (true, Cache::Always, without, false),
        (true, Cache::Auto, InitFlags::ALL, true),
        (true, Cache::Metadata, InitFlags::ALL, false),
        (false, Cache::Always, InitFlags::ALL, false),
    ] {
        let options = ShareOptions { cache, ..ShareOptions::default() };
        let client = Client::offering(offered, Arc::new(Constant(constant)), &options, SessionSlot::default());
        let answer = client.unwrap().ask(Ino::ROOT, Operation::Opendir { flags: OFlags::RDONLY });
        assert_eq!(answer == Answer::Error(Errno::NOSYS), expected, "{constant} {cache:?} {offered:?}: {answer:?}");
    }
}

#[test]
fn files_that_never_change_need_not_be_opened_or_closed() {
    let (all, without) = (InitFlags::ALL, InitFlags::ALL - InitFlags::NO_OPEN_SUPPORT);
    let constant = Features { constant: true, ..Features::default() };
    let locks = Features { posix_locks: true, ..constant };
    let flock = Features { flock: true, ..constant };
    let options = |cache| ShareOptions { cache, writeback: true, ..ShareOptions::default() };
    let local_locks = ShareOptions { local_locks: true, ..options(Cache::Auto) };
    for (features, options, offered, expected) in [
        (constant, options(Cache::Auto), all, true),
        (constant, options(Cache::Always), all, true),
        (constant, options(Cache::Metadata), all, false),
        (constant, options(Cache::None), all, false),
        (constant, options(Cache::Always), without, false),
        (Features::default(), options(Cache::Always), all, false),
        // A close gives locks back.
        (locks, options(Cache::Always), all, false),
        (flock, options(Cache::Always), all, false),
        (locks, local_locks, all, true),
    ] {
        let case = format!("{features:?} {options:?} {offered:?}");
        let mut client =
            Client::offering(offered, Arc::new(Plain(features)), &options, SessionSlot::default()).unwrap();
        let opened = client.ask(FILE, Operation::Open { flags: OFlags::RDONLY, clear_privileges: false });
        assert_eq!(opened == Answer::Error(Errno::NOSYS), expected, "{case}: {opened:?}");
        let flushed = client.ask(FILE, Operation::Flush { handle: Handle(0), owner: 1 });
        assert_eq!(flushed == Answer::Error(Errno::NOSYS), expected, "{case}: {flushed:?}");
        // Such a client opens for writing without a request. It must not believe that it has written or truncated the file.
        for flag in [InitFlags::ATOMIC_O_TRUNC, InitFlags::WRITEBACK_CACHE] {
            assert!(!(expected && client.negotiated.has(flag)), "{case}: {flag:?}");
        }
    }
}

/// A source with these features, of which every file can be opened.
struct Plain(Features);

impl FileSystem for Plain {
    fn features(&self) -> Features {
        self.0
    }
    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(3))
    }
    fn flush(&self, _: &Caller<'_>, _: Ino, _: Handle, _: u64) -> Result<()> {
        Ok(())
    }
}

/// What opens a file for the kernel to read on its own is the reply to OPEN.
#[test]
fn files_that_are_passed_through_are_opened() {
    let features = Features { constant: true, backing: true, ..Features::default() };
    for (offered, expected) in [(InitFlags::ALL, false), (InitFlags::ALL - InitFlags::PASSTHROUGH, true)] {
        let kernel = Arc::new(Kernel::default());
        let passes = SessionSlot::new(|_, wanted| wanted.flags |= InitFlags::PASSTHROUGH).with_backings(kernel);
        let client = Client::offering(offered, Arc::new(Plain(features)), &ShareOptions::default(), passes).unwrap();
        assert_eq!(client.negotiated.has(InitFlags::NO_OPEN_SUPPORT), expected);
    }
}
