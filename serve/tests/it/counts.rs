//! What a share counts: requests that cannot be decoded, INIT, and what clients hold.

use crate::common;

use std::sync::{Arc, Mutex, mpsc};

use common::Message;
use ferry_driver::fuse::encode;
use ferry_engine::metrics::Snapshot;
use ferry_serve::{Server, SessionSlot, Share, ShareOptions, Usage};
use ferry_vfs::*;
use ferry_wire::fuse::{Extensions, InitFlags, InitRequest, LockRequest, Negotiated, Operation, Release, Request};

const FILE: Ino = Ino(2);

/// One file, whose locks have to be waited for.
#[derive(Default)]
struct One(Mutex<Vec<Waiter>>);

impl FileSystem for One {
    fn features(&self) -> Features {
        Features { posix_locks: true, ..Features::default() }
    }
    fn lookup(&self, _: &Caller<'_>, _: Ino, _: Name<'_>) -> Result<Entry> {
        Ok(Entry::new(FILE, Attr::new(FILE, FileType::RegularFile, 0o644)))
    }
    fn open(&self, _: &Caller<'_>, _: Ino, _: OFlags) -> Result<Handle> {
        Ok(Handle(1))
    }
    fn set_lock(&self, _: &Caller<'_>, _: Ino, _: Handle, _: &Lock, waiter: Option<Waiter>) -> Result<LockOutcome> {
        self.0.lock().unwrap().extend(waiter);
        Ok(LockOutcome::Waiting)
    }
}

/// A client of a share that sends bytes of its choice.
struct Sender {
    share: Arc<Share>,
    slot: Arc<SessionSlot>,
    server: Server,
    /// Where replies that come later go.
    late: (mpsc::Sender<Vec<u8>>, mpsc::Receiver<Vec<u8>>),
    unique: u64,
}

impl Sender {
    fn new(source: Arc<dyn FileSystem>) -> Self {
        let share = Arc::new(Share::new(source, &ShareOptions::default()));
        let slot = Arc::new(SessionSlot::default());
        let server = Server::new(Arc::clone(&share), Arc::clone(&slot));
        Self { share, slot, server, late: mpsc::channel(), unique: 0 }
    }

    fn send(&mut self, request: Vec<u8>) {
        let reply = vec![0; 1 << 17];
        let (revoked, again, waits, late) = (false, false, false, self.late.0.clone());
        let mut message = Message { request, reply, revoked, again, transfer: None, waits, late };
        // What is to be counted does not depend on it.
        let _ = self.server.serve_caught(&mut message);
        self.server.end_batch();
    }

    fn ask(&mut self, operation: Operation<'_>) {
        self.unique += 2;
        let negotiated = self.slot.current().map_or(Negotiated::BEFORE_INIT, |session| *session.negotiated());
        let (unique, extensions) = (self.unique, Extensions::default());
        let request = Request { unique, ino: FILE, uid: 0, gid: 0, pid: 1, extensions, operation };
        let mut bytes = Vec::new();
        encode(&request, &negotiated, &mut bytes);
        self.send(bytes);
    }

    fn init(&mut self, minor: u32) {
        let offer = InitRequest { major: 7, minor, max_readahead_bytes: 1 << 20, flags: InitFlags::ALL };
        self.ask(Operation::Init(offer));
    }

    fn snapshot(&self) -> Snapshot {
        self.share.metrics().snapshot()
    }
}

#[test]
fn invalid_requests_are_counted_separately() {
    let mut sender = Sender::new(Arc::new(One::default()));
    for (count, request) in [(1, vec![]), (2, vec![1; 3]), (3, vec![0xff; 40]), (4, vec![0; 4096])] {
        sender.send(request);
        let seen = sender.snapshot();
        assert_eq!((seen.invalid, seen.requests()), (count, 0), "{seen:?}");
    }
}

#[test]
fn an_init_is_counted_with_its_outcome() {
    let mut sender = Sender::new(Arc::new(One::default()));
    // Too old, and then one that is served.
    for (minor, requests, errors) in [(3, 1, 1), (45, 2, 1)] {
        sender.init(minor);
        let seen = sender.snapshot();
        let init = seen.operations.iter().find(|operation| operation.name == "init").unwrap();
        let failed: u64 = init.errors.iter().map(|(_, count)| count).sum();
        assert_eq!((init.requests(), failed, seen.in_flight(), seen.invalid), (requests, errors, 0, 0), "{seen:?}");
    }
}

#[test]
fn held_resources_are_counted_until_release() {
    let source = Arc::new(One::default());
    let mut sender = Sender::new(Arc::clone(&source) as Arc<dyn FileSystem>);
    assert_eq!(sender.share.usage(), Usage::default());
    sender.init(45);
    let usage = |sender: &Sender| {
        let Usage { inodes, open_files, parked_locks } = sender.share.usage();
        (inodes, open_files, parked_locks)
    };
    sender.ask(Operation::Lookup { name: Name::new(b"file").unwrap() });
    assert_eq!(usage(&sender), (1, 0, 0));
    sender.ask(Operation::Open { flags: OFlags::RDWR, clear_privileges: false });
    assert_eq!(usage(&sender), (1, 1, 0));
    let (handle, end) = (Handle(1), i64::MAX as u64);
    let lock = LockRequest { handle, owner: 1, start: 0, end, kind: LockKind::Write, pid: 1, flock: false };
    sender.ask(Operation::SetLock { lock, wait: true });
    assert_eq!(usage(&sender), (1, 1, 1));
    source.0.lock().unwrap().drain(..).for_each(|waiter| waiter.wake(Ok(())));
    assert!(!sender.late.1.recv().unwrap().is_empty());
    assert_eq!(usage(&sender), (1, 1, 0));
    let flags = OFlags::RDWR;
    sender.ask(Operation::Release(Release { handle, flags, flush: false, unlock_flock: false, owner: 0 }));
    assert_eq!(usage(&sender), (1, 0, 0));
    sender.ask(Operation::Forget { count: 1 });
    assert_eq!(usage(&sender), (0, 0, 0));
    // Nor does a client that is gone hold anything.
    sender.ask(Operation::Lookup { name: Name::new(b"file").unwrap() });
    sender.ask(Operation::Destroy);
    assert_eq!(usage(&sender), (0, 0, 0));
}
