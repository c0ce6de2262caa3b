//! One lock table for all exports of a source: a mount on this host, a 9P client and a guest exclude each other and
//! wait for each other, even with equal owner numbers.

use std::fs::{self, File};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferry_9p_client::{Client, Options, Unix};
use ferry_driver::{Config, Driver, ROOT};
use ferry_tests::mounts::{Emergency, RunningProgram, Watchdog, assert_nothing_left, ferry, missing};
use ferry_tests::{Place, directory};
use ferry_vfs::{
    Caller, Errno, FileSystem, Handle, Ino, Lock, LockKind, LockOutcome, LockOwner, Name, OFlags, SessionId, Waiter,
};
use ferry_wire::fuse::OpenFlags;
use ferry_wire::fuse::abi::FileLock;
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::{Signal, kill_process};

/// Longer than anything here takes that does not hang.
const SOON: Duration = Duration::from_secs(30);
/// What the whole test may take.
const LIMIT: Duration = Duration::from_secs(120);
/// Long enough for a lock that should not be had.
const MOMENT: Duration = Duration::from_millis(200);
/// Whoever locks by 9P or in the guest has this number there.
const OWNER: u32 = 7;
const O_RDWR: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientKind {
    Mount,
    NineP,
    Guest,
}

const ALL: [ClientKind; 3] = [ClientKind::Mount, ClientKind::NineP, ClientKind::Guest];

/// All of them, with one file open.
struct Parties {
    mounted: File,
    client: Client,
    session: SessionId,
    remote: (Ino, Handle),
    guest: Driver,
    node: (u64, u64),
}

impl Parties {
    fn of(directory: &Path) -> Self {
        fs::write(directory.join("mnt/file"), "text").unwrap();
        let mounted = File::options().read(true).write(true).open(directory.join("mnt/file")).unwrap();
        let client = Client::connect(Arc::new(Unix(directory.join("n"))), Options::default()).unwrap();
        let session = SessionId::unique();
        let cx = Caller { session, ..Caller::default() };
        let ino = client.lookup(&cx, Ino::ROOT, Name::new(b"file").unwrap()).unwrap().ino;
        let handle = client.open(&cx, ino, OFlags::RDWR).unwrap();
        let config = Config { queues: 2, timeout: SOON, ..Config::default() };
        let mut guest = Driver::connect(directory.join("v"), config).unwrap();
        guest.init().unwrap();
        let node = guest.lookup(ROOT, "file").unwrap().nodeid;
        let fh = guest.open(node, O_RDWR).unwrap().fh;
        Self { mounted, client, session, remote: (ino, handle), guest, node: (node, fh) }
    }

    /// Of the whole file, by the 9P client.
    fn remote_lock(&self, kind: LockKind, wait: Option<Waiter>) -> Result<LockOutcome, Errno> {
        let cx = Caller { session: self.session, ..Caller::default() };
        let owner = LockOwner { session: self.session, id: OWNER.into() };
        let lock = Lock { kind, owner, start: 0, end: i64::MAX.cast_unsigned(), pid: OWNER, flock: false };
        self.client.set_lock(&cx, self.remote.0, self.remote.1, &lock, wait)
    }

    /// Takes or gives up the lock of the whole file, without waiting; whether it could be had.
    fn set(&mut self, who: ClientKind, kind: LockKind) -> bool {
        match who {
            ClientKind::Mount => match fcntl_lock(&self.mounted, operation(kind)) {
                Ok(()) => true,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS) => false,
                Err(error) => panic!("{kind:?}: {error}"),
            },
            ClientKind::NineP => match self.remote_lock(kind, None) {
                Ok(locked) => locked == LockOutcome::Done,
                Err(Errno::AGAIN) => false,
                Err(error) => panic!("{kind:?}: {error}"),
            },
            ClientKind::Guest => match self.guest.setlk(self.node.0, self.node.1, OWNER.into(), guests(kind), 0) {
                Ok(()) => true,
                Err(error) if error.errno() == Some(libc::EAGAIN) => false,
                Err(error) => panic!("{kind:?}: {error}"),
            },
        }
    }
}

fn operation(kind: LockKind) -> FlockOperation {
    match kind {
        LockKind::Read => FlockOperation::NonBlockingLockShared,
        LockKind::Write => FlockOperation::NonBlockingLockExclusive,
        LockKind::Unlock => FlockOperation::NonBlockingUnlock,
    }
}

fn guests(kind: LockKind) -> FileLock {
    let kind = match kind {
        LockKind::Read => libc::F_RDLCK,
        LockKind::Write => libc::F_WRLCK,
        LockKind::Unlock => libc::F_UNLCK,
    };
    FileLock { start: 0, end: i64::MAX.cast_unsigned(), kind: kind.cast_unsigned(), pid: OWNER }
}

/// Serves a source in all three ways, and ends that also when the test fails.
struct Served {
    emergency: Emergency,
    watchdog: Watchdog,
    server: Arc<Mutex<RunningProgram>>,
}

impl Served {
    fn of(source: &str, flags: &[&str], directory: &Path) -> Self {
        let mountpoint = directory.join("mnt");
        fs::create_dir(&mountpoint).unwrap();
        let words = ["--size", "16M", "--mount", "mnt", "--9p", "unix:n", "--virtiofs", "v", "--json"];
        let mut command = ferry(["share", source]);
        let server = Arc::new(Mutex::new(RunningProgram::new(command.args(words).args(flags).current_dir(directory))));
        let emergency = Emergency::new(&mountpoint, Some(Arc::clone(&server)));
        let watchdog = Watchdog::new(emergency.clone(), LIMIT);
        let served = Self { emergency, watchdog, server };
        let end = Instant::now() + SOON;
        while !served.said().0.ends_with('\n') {
            assert!(Instant::now() < end, "it does not serve: {:?}", served.said());
            std::thread::sleep(Duration::from_millis(5));
        }
        served
    }

    fn said(&self) -> (String, String) {
        self.server.lock().unwrap().said()
    }

    /// Ends it, and looks that nothing is left.
    fn end(&mut self, directory: &Path) {
        let pid = self.server.lock().unwrap().pid();
        kill_process(pid, Signal::TERM).unwrap();
        let status = self.server.lock().unwrap().wait(SOON);
        assert!(status.is_some_and(|status| status.success()), "{status:?}: {:?}", self.said());
        assert!(!self.watchdog.dismiss(), "it took too long");
        fs::remove_file(directory.join("p")).ok();
        assert_nothing_left(&directory.join("mnt"));
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.emergency.end();
    }
}

fn exclude(parties: &mut Parties) {
    for holder in ALL {
        assert!(parties.set(holder, LockKind::Write), "{holder:?}");
        for other in ALL.into_iter().filter(|other| *other != holder) {
            for kind in [LockKind::Read, LockKind::Write] {
                assert!(!parties.set(other, kind), "{other:?} has {kind:?} beside {holder:?}");
            }
        }
        assert!(parties.set(holder, LockKind::Unlock));
    }
    assert!(ALL.iter().all(|who| parties.set(*who, LockKind::Read)));
    assert!(ALL.iter().all(|who| !parties.set(*who, LockKind::Write)), "others read");
    assert!(ALL.iter().all(|who| parties.set(*who, LockKind::Unlock)));
}

fn wait_for_each_other(parties: &mut Parties) {
    let nobody = || Err(RecvTimeoutError::Timeout);
    // The mount for the guest.
    assert!(parties.set(ClientKind::Guest, LockKind::Write));
    let (told, outcome) = mpsc::channel();
    let file = parties.mounted.try_clone().unwrap();
    let waits = std::thread::spawn(move || {
        while fcntl_lock(&file, FlockOperation::LockExclusive) == Err(rustix::io::Errno::INTR) {}
        told.send(Ok(())).unwrap();
        file
    });
    assert_eq!(outcome.recv_timeout(MOMENT), nobody(), "the mount has the guest's lock");
    assert!(parties.set(ClientKind::Guest, LockKind::Unlock));
    assert_eq!(outcome.recv_timeout(SOON), Ok(Ok::<(), Errno>(())));
    // Any close would give up the locks of this process.
    let _open = waits.join().unwrap();
    // The 9P client for the mount.
    let (told, outcome) = mpsc::channel();
    let waiter = Waiter::new(move |outcome| told.send(outcome).unwrap());
    assert_eq!(parties.remote_lock(LockKind::Write, Some(waiter)), Ok(LockOutcome::Waiting));
    assert_eq!(outcome.recv_timeout(MOMENT), nobody(), "the 9P client has the mount's lock");
    assert!(parties.set(ClientKind::Mount, LockKind::Unlock));
    assert_eq!(outcome.recv_timeout(SOON), Ok(Ok(())));
    // The guest for the 9P client of the same number.
    let (node, fh) = parties.node;
    let parked = parties.guest.send_setlkw(node, fh, OWNER.into(), guests(LockKind::Write), 0).unwrap();
    // A round trip on the same queue: it was taken.
    parties.guest.getattr(ROOT).unwrap();
    assert!(!parties.set(ClientKind::Mount, LockKind::Write), "the 9P client has it");
    assert!(parties.set(ClientKind::NineP, LockKind::Unlock));
    parties.guest.receive(parked).unwrap();
    assert!(!parties.set(ClientKind::NineP, LockKind::Write), "the guest has it");
    assert!(parties.set(ClientKind::Guest, LockKind::Unlock));
}

fn locks_are_shared(source: &str) {
    if let Some(why) = missing() {
        ferry_skip::skip!("{why}");
        return;
    }
    let directory = directory(Place::Disk);
    let mut served = Served::of(source, &[], directory.path());
    let mut parties = Parties::of(directory.path());
    exclude(&mut parties);
    wait_for_each_other(&mut parties);
    // Who goes gives up what he has.
    assert!(parties.set(ClientKind::NineP, LockKind::Write));
    let Parties { client, mounted, .. } = parties;
    drop(client);
    let end = Instant::now() + SOON;
    while fcntl_lock(&mounted, operation(LockKind::Write)).is_err() {
        assert!(Instant::now() < end, "the lock of a client that has gone stays");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(mounted);
    served.end(directory.path());
}

/// The kernel keeps the mount's locks, and would the guest's; so it has not to be told of each close.
#[test]
fn local_locks_conflict_with_no_others() {
    const O_RDONLY: u32 = 0;
    if let Some(why) = missing() {
        ferry_skip::skip!("{why}");
        return;
    }
    for (flags, are_local) in [(&[][..], false), (&["--local-locks"][..], true)] {
        let directory = directory(Place::Disk);
        let mut served = Served::of("mem", flags, directory.path());
        let mut parties = Parties::of(directory.path());
        assert!(parties.set(ClientKind::Mount, LockKind::Write));
        assert_eq!(parties.set(ClientKind::NineP, LockKind::Write), are_local);
        // Of the other kind, which this process can be in its own way with.
        let again = File::open(directory.path().join("mnt/file")).unwrap();
        parties.mounted.try_lock().unwrap();
        assert!(again.try_lock_shared().is_err(), "the mount's own meet each other");
        drop(again);
        let node = parties.node.0;
        for (mode, is_told) in [(O_RDONLY, !are_local), (O_RDWR, true)] {
            let open = parties.guest.open(node, mode).unwrap();
            assert_eq!(open.open_flags & OpenFlags::NOFLUSH.bits() == 0, is_told, "{flags:?} {mode}");
        }
        drop(parties);
        served.end(directory.path());
    }
}

#[test]
fn of_memory() {
    locks_are_shared("mem");
}

#[test]
fn of_persistent_memory() {
    locks_are_shared("pmem:p");
}
