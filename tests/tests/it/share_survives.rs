//! Shares whose server is killed with SIGKILL and started again under a running guest: files, locks and requests under way
//! are what they were.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver, Error, ROOT, Ticket};
use ferry_tests::Place;
use ferry_tests::disks::model::Random;
use ferry_tests::survivor::Survivor;
use ferry_wire::fuse::abi::{CreateIn, FileLock, LK_FLOCK, LinkIn, MkdirIn, Opcode, Rename2In, WriteIn};
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use zerocopy::IntoBytes;

pub(crate) const O_RDWR: u32 = 2;
const O_CREAT_EXCL: u32 = 0o300;
const O_APPEND: u32 = 0o2000;

/// Where inodes are found again by file handles (tmpfs, as root), and where by their names.
const WAYS: [(Place, &[&str]); 3] =
    [(Place::Memory, &[]), (Place::Memory, &["--inode-file-handles", "never"]), (Place::Disk, &[])];

fn lock(kind: i32, start: u64, end: u64) -> FileLock {
    FileLock { start, end, kind: kind.cast_unsigned(), pid: 77 }
}

pub(crate) fn wrlck(start: u64, end: u64) -> FileLock {
    lock(libc::F_WRLCK, start, end)
}

pub(crate) fn is_flocked(path: &Path) -> bool {
    let file = File::open(path).unwrap();
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::AGAIN)
}

fn errno<T: std::fmt::Debug>(outcome: Result<T, Error>) -> i32 {
    match outcome {
        Err(Error::Errno(errno)) => errno,
        other => panic!("no error number: {other:?}"),
    }
}

/// What a guest holds, across one end of its server after another.
fn goes_on(mut server: Survivor, mut end: impl FnMut(&mut Survivor, &mut Driver)) {
    let mut guest = server.connect();
    fs::write(server.path.join("gone"), b"still here").unwrap();
    let dir = guest.mkdir(ROOT, "dir", 0o755).unwrap().nodeid;
    let (file, open) = guest.create(dir, "file", O_RDWR, 0o644).unwrap();
    let (file, open) = (file.nodeid, open.fh);
    guest.write(file, open, 0, b"before").unwrap();
    let gone = guest.lookup(ROOT, "gone").unwrap().nodeid;
    let gone_open = guest.open(gone, O_RDWR).unwrap().fh;
    guest.unlink(ROOT, "gone").unwrap();
    let (nameless, nameless_open) = guest.tmpfile(ROOT, O_RDWR, 0o600).unwrap();
    let listing = guest.opendir(dir).unwrap().fh;
    guest.rename(ROOT, "dir", ROOT, "elsewhere", 0).unwrap();
    let locked = server.path.join("elsewhere/file");
    guest.setlk(file, open, 9, wrlck(0, 99), 0).unwrap();
    guest.setlk(file, open, 9, lock(libc::F_UNLCK, 10, 19), 0).unwrap();
    guest.setlk(nameless.nodeid, nameless_open.fh, 5, wrlck(0, 9), LK_FLOCK).unwrap();
    guest.setlk(file, open, 5, wrlck(0, 9), LK_FLOCK).unwrap();
    let second = guest.open(file, O_RDWR).unwrap().fh;
    let waits = guest.send_setlkw(file, second, 10, wrlck(30, 40), 0).unwrap();
    for round in 0..3 {
        assert!(is_flocked(&locked));
        end(&mut server, &mut guest);
        assert!(is_flocked(&locked), "round {round}");
        // The same numbers, the same files; also those that no name leads to.
        assert_eq!(guest.read(file, open, 0, 100).unwrap(), b"before");
        assert_eq!(guest.read(gone, gone_open, 0, 100).unwrap(), b"still here");
        guest.write(nameless.nodeid, nameless_open.fh, round, b"x").unwrap();
        assert_eq!(guest.getattr(nameless.nodeid).unwrap().attr.size, round + 1);
        assert_eq!(guest.lookup(dir, "file").unwrap().nodeid, file);
        assert_eq!(guest.readdir(dir, listing, 0, 4096).unwrap().len(), 3);
        assert_eq!(guest.getattr(dir).unwrap().attr.mode & 0o777, 0o755);
        // Another owner meets the same locks, and the hole in them.
        let taken = guest.getlk(file, second, 10, wrlck(0, 5)).unwrap();
        assert_eq!((taken.kind, taken.start, taken.end), (libc::F_WRLCK.cast_unsigned(), 0, 9));
        guest.setlk(file, second, 10, wrlck(10, 19), 0).unwrap();
        assert_eq!(errno(guest.setlk(file, second, 10, wrlck(19, 20), 0)), libc::EAGAIN);
        assert_eq!(errno(guest.setlk(file, second, 6, wrlck(0, 9), LK_FLOCK)), libc::EAGAIN);
    }
    // Who waits for a lock still waits for it.
    guest.setlk(file, open, 9, lock(libc::F_UNLCK, 0, 99), 0).unwrap();
    guest.receive(waits).unwrap();
    guest.setlk(file, open, 5, lock(libc::F_UNLCK, 0, 9), LK_FLOCK).unwrap();
    assert!(!is_flocked(&locked));
    for (node, open) in [(file, open), (file, second), (gone, gone_open), (nameless.nodeid, nameless_open.fh)] {
        guest.release(node, open).unwrap();
        assert_eq!(errno(guest.read(node, open, 0, 1)), libc::EBADF);
    }
    guest.releasedir(dir, listing).unwrap();
    // As many references as the guest has had answered: one, and one of each round.
    guest.forget(file, 3).unwrap();
    assert!(guest.getattr(file).is_ok());
    guest.forget(file, 1).unwrap();
    assert_eq!(errno(guest.getattr(file)), libc::ESTALE);
    // A client that goes is not waited for, nor is what it had kept.
    drop(guest);
    let again = server.connect();
    drop(again);
    assert_eq!(server.said(), "");
    server.end();
    server.wait_for_the_keeper();
}

#[test]
fn files_and_locks_stay_when_the_server_is_killed() {
    for (place, flags) in WAYS {
        goes_on(Survivor::new(place, flags), Survivor::replace);
    }
}

/// The process that starts the servers owns the socket, and passes it to each.
#[test]
fn files_and_locks_stay_on_a_socket_that_is_inherited() {
    goes_on(Survivor::inheriting(Place::Memory, &[]), Survivor::replace);
    goes_on(Survivor::inheriting(Place::Memory, &[]), |server, _| server.replace_unnoticed());
}

#[test]
fn a_guest_whose_connection_stays_notices_no_end_of_its_server() {
    for (place, flags) in WAYS {
        goes_on(Survivor::new(place, flags), |server, _| server.replace_unnoticed());
    }
    goes_on(Survivor::new(Place::Memory, &[]), |server, _| {
        server.end();
        server.start();
    });
}

#[test]
fn files_and_locks_stay_when_the_server_is_ended() {
    goes_on(Survivor::new(Place::Memory, &[]), |server, guest| {
        server.end();
        guest.hang_up();
        server.start();
        guest.reattach().unwrap();
    });
}

/// A guest that changes names and files without waiting for each answer, and knows what must come out.
struct Load {
    random: Random,
    /// Regular files, with what is in them, in the root.
    files: BTreeMap<String, (u64, Vec<u8>)>,
    dirs: BTreeSet<String>,
    /// The file that is appended to.
    log: (u64, u64),
    appended: Vec<u8>,
    next: usize,
    under_way: usize,
    /// Files get further names. Where they are found again by names, one of several is remembered.
    links: bool,
}

type Expected = (Ticket, usize, Opcode);

impl Load {
    fn new(guest: &mut Driver, links: bool) -> Self {
        let (log, open) = guest.create(ROOT, "log", O_RDWR | O_APPEND, 0o644).unwrap();
        Self {
            random: Random::new(5),
            files: BTreeMap::new(),
            dirs: BTreeSet::new(),
            log: (log.nodeid, open.fh),
            appended: Vec::new(),
            next: 0,
            under_way: 0,
            links,
        }
    }

    fn name(&mut self, of: &str) -> String {
        self.next += 1;
        format!("{of}{}", self.next)
    }

    /// Requests none of which depends on another, half of them on each queue.
    fn send(&mut self, guest: &mut Driver) -> Vec<Expected> {
        let mut sent = Vec::new();
        let mut old: Vec<String> = self.files.keys().cloned().collect();
        for number in 0..24 {
            guest.select(1 + number % 2);
            let nul: &[u8] = b"\0";
            let (opcode, ticket) = match self.random.below(6) {
                0 => {
                    let name = self.name("d");
                    let args = MkdirIn { mode: 0o755, umask: 0 };
                    let ticket = guest.send(Opcode::Mkdir, ROOT, &[args.as_bytes(), name.as_bytes(), nul], &[], 128);
                    self.dirs.insert(name);
                    (Opcode::Mkdir, ticket)
                }
                1 if !self.dirs.is_empty() && number % 3 == 0 => {
                    // One of an earlier batch.
                    let name = self.dirs.iter().next().unwrap().clone();
                    if sent.iter().any(|(_, _, opcode)| *opcode == Opcode::Mkdir) {
                        continue;
                    }
                    self.dirs.remove(&name);
                    (Opcode::Rmdir, guest.send(Opcode::Rmdir, ROOT, &[name.as_bytes(), nul], &[], 0))
                }
                2 if !old.is_empty() => {
                    let name = old.swap_remove(self.random.below(old.len()));
                    let new = self.name("r");
                    let args = Rename2In { newdir: ROOT, flags: 0, padding: 0 };
                    let parts = [args.as_bytes(), name.as_bytes(), nul, new.as_bytes(), nul];
                    let ticket = guest.send(Opcode::Rename2, ROOT, &parts, &[], 0);
                    let moved = self.files.remove(&name).unwrap();
                    self.files.insert(new, moved);
                    (Opcode::Rename2, ticket)
                }
                3 if !old.is_empty() => {
                    let name = old.swap_remove(self.random.below(old.len()));
                    self.files.remove(&name);
                    (Opcode::Unlink, guest.send(Opcode::Unlink, ROOT, &[name.as_bytes(), nul], &[], 0))
                }
                4 if !old.is_empty() && self.links => {
                    let name = old.swap_remove(self.random.below(old.len()));
                    let new = self.name("l");
                    let linked = self.files[&name].clone();
                    let args = LinkIn { oldnodeid: linked.0 };
                    let ticket = guest.send(Opcode::Link, ROOT, &[args.as_bytes(), new.as_bytes(), nul], &[], 128);
                    self.files.insert(new, linked);
                    (Opcode::Link, ticket)
                }
                _ => {
                    let name = self.name("c");
                    let args = CreateIn { flags: O_RDWR | O_CREAT_EXCL, mode: 0o644, ..CreateIn::ZERO };
                    let ticket = guest.send(Opcode::Create, ROOT, &[args.as_bytes(), name.as_bytes(), nul], &[], 144);
                    // Its number comes with the answer.
                    self.files.insert(name, (0, Vec::new()));
                    (Opcode::Create, ticket)
                }
            };
            sent.push((ticket.unwrap(), 1 + number % 2, opcode));
        }
        sent.push(self.append(guest));
        sent
    }

    /// Appends to a file that is open with O_APPEND. One at a time, as Linux does.
    fn append(&mut self, guest: &mut Driver) -> Expected {
        let data = format!("{}\n", self.appended.len());
        let args = WriteIn {
            fh: self.log.1,
            offset: self.appended.len() as u64,
            size: u32::try_from(data.len()).unwrap(),
            flags: O_RDWR | O_APPEND,
            ..WriteIn::ZERO
        };
        guest.select(1);
        let ticket = guest.send(Opcode::Write, self.log.0, &[args.as_bytes()], data.as_bytes(), 8).unwrap();
        self.appended.extend(data.as_bytes());
        (ticket, 1, Opcode::Write)
    }

    /// Every request has done what it was to do, as far as the guest can tell.
    fn receive(&mut self, guest: &mut Driver, sent: Vec<Expected>) {
        for (ticket, queue, opcode) in sent {
            guest.select(queue);
            let body = guest.receive(ticket).unwrap_or_else(|error| panic!("{opcode:?}: {error}"));
            if opcode == Opcode::Create {
                assert_eq!(body.len(), 144);
            }
        }
        // The numbers of new files, by which they are linked.
        for (name, (node, _)) in &mut self.files {
            if *node == 0 {
                *node = guest.lookup(ROOT, name).unwrap().nodeid;
            }
        }
    }

    fn check(&self, path: &Path) {
        let mut there: BTreeSet<String> =
            fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert!(there.remove("log"));
        let expected: BTreeSet<String> = self.files.keys().cloned().chain(self.dirs.iter().cloned()).collect();
        assert_eq!(there, expected);
        assert_eq!(String::from_utf8(fs::read(path.join("log")).unwrap()), String::from_utf8(self.appended.clone()));
    }
}

/// The guest hangs up and connects again, or (`packed`: with packed rings) stays connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Guest {
    Reconnects,
    Stays { packed: bool },
}

const GUESTS: [Guest; 3] = [Guest::Reconnects, Guest::Stays { packed: false }, Guest::Stays { packed: true }];

fn survives(place: Place, flags: &[&str], kills: usize, kind: Guest) {
    let mut server = Survivor::new(place, flags);
    let mut guest = server.connect_with(kind == Guest::Stays { packed: true });
    let mut load = Load::new(&mut guest, place == Place::Memory && flags.is_empty());
    let mut random = Random::new(kills as u64);
    for _ in 0..kills {
        for _ in 0..random.below(4) {
            let sent = load.send(&mut guest);
            load.receive(&mut guest, sent);
        }
        let sent = load.send(&mut guest);
        let (moment, begin) = (Duration::from_micros(random.below(600) as u64), Instant::now());
        while begin.elapsed() < moment {
            std::hint::spin_loop();
        }
        server.kill();
        load.under_way += guest.request_queues().iter().map(|queue| queue.in_flight()).sum::<usize>();
        if kind == Guest::Reconnects {
            guest.hang_up();
        }
        server.start();
        if kind == Guest::Reconnects {
            guest.reattach().unwrap();
        }
        load.receive(&mut guest, sent);
        load.check(&server.path);
    }
    println!("{kind:?}: {kills} kills, {} requests, {} under way", load.next, load.under_way);
    assert!(load.under_way > 0);
    drop(guest);
    assert_eq!(server.said(), "");
}

#[test]
fn names_change_once_although_the_server_is_killed() {
    for (place, flags) in WAYS {
        GUESTS.into_iter().for_each(|kind| survives(place, flags, 3, kind));
    }
}

#[test]
#[ignore = "long: make test-all"]
fn names_change_once_although_the_server_is_killed_50_times() {
    for (place, flags) in WAYS {
        GUESTS.into_iter().for_each(|kind| survives(place, flags, 50, kind));
    }
}

/// The host appends to the file to which the guest appends, which does not know that yet when its server is killed.
#[test]
fn appends_of_the_host_survive_those_that_are_made_again() {
    for kind in GUESTS {
        let mut server = Survivor::new(Place::Memory, &[]);
        let mut guest = server.connect_with(kind == Guest::Stays { packed: true });
        let mut random = Random::new(3);
        let (log, open) = guest.create(ROOT, "log", O_RDWR | O_APPEND, 0o644).unwrap();
        let path = server.path.join("log");
        let mut host = File::options().append(true).open(&path).unwrap();
        let (mut expected, mut under_way) = (BTreeSet::new(), 0);
        for round in 0..20 {
            let offset = guest.getattr(log.nodeid).unwrap().attr.size;
            let mut theirs = |which| {
                let line = format!("host {round} {which} {}", "-".repeat(random.below(30)));
                host.write_all(format!("{line}\n").as_bytes()).unwrap();
                line
            };
            expected.insert(theirs(0));
            let line = format!("guest {round}");
            let data = format!("{line}\n");
            let size = u32::try_from(data.len()).unwrap();
            let args = WriteIn { fh: open.fh, offset, size, flags: O_RDWR | O_APPEND, ..WriteIn::ZERO };
            let ticket = guest.send(Opcode::Write, log.nodeid, &[args.as_bytes()], data.as_bytes(), 8).unwrap();
            expected.insert(line);
            let (moment, begin) = (Duration::from_micros(20 * round), Instant::now());
            while begin.elapsed() < moment {
                std::hint::spin_loop();
            }
            server.kill();
            expected.insert(theirs(1));
            under_way += guest.request_queues().iter().map(|queue| queue.in_flight()).sum::<usize>();
            if kind == Guest::Reconnects {
                guest.hang_up();
            }
            server.start();
            if kind == Guest::Reconnects {
                guest.reattach().unwrap();
            }
            guest.receive(ticket).unwrap();
            let there = fs::read_to_string(&path).unwrap();
            assert_eq!(there.lines().count(), expected.len(), "{there}");
            assert_eq!(there.lines().map(str::to_owned).collect::<BTreeSet<_>>(), expected, "round {round}");
        }
        println!("{kind:?}: {under_way} under way");
        assert!(under_way > 0);
    }
}

/// The front end speaks with servers of which one after another is killed: each message is answered, once, and does what it says.
fn converses(kills: u64) {
    let mut server = Survivor::new(Place::Memory, &["--tag", "t"]);
    fs::write(server.path.join("file"), b"f").unwrap();
    let timeout = Duration::from_secs(20);
    let config = Config { regions: 2, memory_bytes: 8 << 20, timeout, ..server.config() };
    let mut guest = Driver::connect(&server.socket, config).unwrap();
    let is_over = AtomicBool::new(false);
    let mut random = Random::new(kills);
    // The server ends with the thread that starts it, so that is this one.
    std::thread::scope(|scope| {
        let speaker = scope.spawn(|| {
            let mut rounds = 0;
            while !is_over.load(Ordering::Relaxed) {
                speak(&mut guest);
                rounds += 1;
            }
            rounds
        });
        for _ in 0..kills {
            std::thread::sleep(Duration::from_micros(random.below(30_000) as u64));
            if speaker.is_finished() {
                println!("the server says: {}", server.said());
                break;
            }
            server.replace_unnoticed();
        }
        is_over.store(true, Ordering::Relaxed);
        println!("{} rounds, {kills} kills", speaker.join().unwrap());
    });
    assert!(guest.is_connected());
    assert_eq!(server.said(), "");
}

/// All that a front end says while a guest lives, and what shows whether it was done.
fn speak(guest: &mut Driver) {
    guest.init().unwrap();
    let file = guest.lookup(ROOT, "file").unwrap().nodeid;
    // Rings that stop, and go on.
    for queue in 0..3 {
        let base = guest.stop(queue).unwrap();
        assert_eq!(base, if queue == 1 { 2 } else { 0 }, "of queue {queue}");
        guest.start_with(queue, guest.parameters(queue, base)).unwrap();
    }
    assert_eq!(guest.getattr(file).unwrap().attr.size, 1);
    // Memory that goes and comes: a second time, either would be refused.
    for _ in 0..3 {
        guest.share_region(1, false).unwrap();
        guest.share_region(1, true).unwrap();
    }
    let (tag, queues) = guest.config_space().unwrap();
    assert_eq!((tag.as_str(), queues), ("t", 2));
    assert_eq!(guest.getattr(file).unwrap().attr.size, 1);
    guest.reboot().unwrap();
}

#[test]
fn every_message_gets_one_reply_across_kills() {
    converses(20);
}

#[test]
#[ignore = "long: make test-all"]
fn every_message_gets_one_reply_across_300_kills() {
    converses(300);
}

#[test]
fn the_state_of_a_guest_ends_with_it_after_a_kill() {
    let mut server = Survivor::new(Place::Memory, &[]);
    let mut guest = server.connect();
    let (file, open) = guest.create(ROOT, "file", O_RDWR, 0o644).unwrap();
    guest.setlk(file.nodeid, open.fh, 5, wrlck(0, 9), LK_FLOCK).unwrap();
    server.replace_unnoticed();
    assert!(is_flocked(&server.path.join("file")));
    // One that hangs up before the next server has taken it over may come again; so that is waited for.
    guest.getattr(ROOT).unwrap();
    drop(guest);
    let end = Instant::now() + Duration::from_secs(60);
    while is_flocked(&server.path.join("file")) {
        assert!(Instant::now() < end, "the lock stays");
        std::thread::sleep(Duration::from_millis(1));
    }
    // No client is left.
    server.end();
    server.wait_for_the_keeper();
}

/// The first name goes with its directory: the server that comes next finds the file by the other one.
#[test]
fn a_file_with_two_names_outlives_the_directory_of_the_first() {
    for (place, flags) in WAYS {
        for is_open in [false, true] {
            let mut server = Survivor::new(place, flags);
            let mut guest = server.connect();
            let [one, other] = ["one", "other"].map(|name| guest.mkdir(ROOT, name, 0o755).unwrap().nodeid);
            let (file, open) = guest.create(one, "f", O_RDWR, 0o644).unwrap();
            guest.write(file.nodeid, open.fh, 0, b"kept").unwrap();
            guest.link(file.nodeid, other, "g").unwrap();
            guest.unlink(one, "f").unwrap();
            guest.rmdir(ROOT, "one").unwrap();
            if !is_open {
                guest.release(file.nodeid, open.fh).unwrap();
            }
            server.replace(&mut guest);
            assert_eq!(guest.getattr(file.nodeid).unwrap().attr.nlink, 1, "{place:?} {flags:?} {is_open}");
            let open = if is_open { open.fh } else { guest.open(file.nodeid, O_RDWR).unwrap().fh };
            assert_eq!(guest.read(file.nodeid, open, 0, 9).unwrap(), b"kept");
        }
    }
}

/// A server elsewhere: another process with another socket, and the same tree.
fn elsewhere(path: &Path, flags: &[&str]) -> (Survivor, std::path::PathBuf) {
    let mut all = vec!["--tag", "t"];
    all.extend(flags);
    let there = Survivor::of(path, &all);
    let socket = there.socket.clone();
    (there, socket)
}

#[test]
fn a_guest_migrates_with_its_files_and_locks() {
    for (place, flags) in WAYS {
        let mut here = Survivor::new(place, flags);
        let mut guest = here.connect();
        let dir = guest.mkdir(ROOT, "dir", 0o755).unwrap().nodeid;
        let (file, open) = guest.create(dir, "file", O_RDWR, 0o644).unwrap();
        let (file, open) = (file.nodeid, open.fh);
        guest.write(file, open, 0, b"before").unwrap();
        guest.rename(ROOT, "dir", ROOT, "elsewhere", 0).unwrap();
        guest.setlk(file, open, 9, wrlck(3, 5), 0).unwrap();
        let listing = guest.opendir(dir).unwrap().fh;
        let state = guest.save().unwrap();
        // Its locks go with it.
        here.kill();
        let (mut there, socket) = elsewhere(&here.path, flags);
        guest.migrate(&socket, &state).unwrap();
        for _ in 0..2 {
            assert_eq!(guest.read(file, open, 0, 100).unwrap(), b"before");
            assert_eq!(guest.lookup(dir, "file").unwrap().nodeid, file);
            assert_eq!(guest.readdir(dir, listing, 0, 4096).unwrap().len(), 3);
            let taken = guest.getlk(file, open, 10, wrlck(0, 9)).unwrap();
            assert_eq!((taken.kind, taken.start, taken.end), (libc::F_WRLCK.cast_unsigned(), 3, 5));
            // What came from elsewhere is kept here, too, where there are file handles.
            if place == Place::Disk || !flags.is_empty() {
                break;
            }
            there.replace(&mut guest);
        }
        drop(guest);
        assert_eq!(there.said(), "");
    }
}

/// Returns whether a part of a file is locked.
fn is_locked(path: &Path) -> bool {
    let file = File::options().write(true).open(path).unwrap();
    rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).is_err()
}

/// A file that the guest has open twice, and of which it has one part locked.
fn locked(guest: &mut Driver) -> (u64, u64, u64) {
    let (file, open) = guest.create(ROOT, "file", O_RDWR, 0o644).unwrap();
    let (file, open) = (file.nodeid, open.fh);
    let second = guest.open(file, O_RDWR).unwrap().fh;
    guest.setlk(file, open, 9, wrlck(0, 9), 0).unwrap();
    (file, open, second)
}

#[test]
fn a_lock_is_waited_for_on_the_other_host() {
    for flags in [&[][..], &["--inode-file-handles", "never"]] {
        let mut here = Survivor::new(Place::Memory, flags);
        let mut guest = here.connect();
        let (file, open, second) = locked(&mut guest);
        // Two wait for the guest itself, one, in the other queue, for a process of the host.
        let on_host = File::options().write(true).open(here.path.join("file")).unwrap();
        rustix::fs::flock(&on_host, FlockOperation::LockExclusive).unwrap();
        guest.setlk(file, open, 9, wrlck(20, 29), 0).unwrap();
        let own = [(10, 5), (11, 25)]
            .map(|(owner, at)| guest.send_setlkw(file, second, owner, wrlck(at, at + 2), 0).unwrap());
        assert!(guest.getattr(file).is_ok(), "the locks were asked for before");
        guest.select(2);
        let other = guest.send_setlkw(file, second, 6, wrlck(0, 9), LK_FLOCK).unwrap();
        assert!(guest.getattr(file).is_ok(), "the lock was asked for before");
        guest.select(1);
        let state = guest.save().unwrap();
        let (mut there, socket) = elsewhere(&here.path, flags);
        guest.migrate(&socket, &state).unwrap();
        here.kill();
        let taken = guest.getlk(file, second, 10, wrlck(0, 9)).unwrap();
        assert_eq!((taken.start, taken.end), (0, 9), "nobody has got anything");
        if flags.is_empty() {
            // What came from elsewhere outlives its server here.
            there.replace(&mut guest);
        }
        guest.setlk(file, open, 9, lock(libc::F_UNLCK, 0, 99), 0).unwrap();
        own.into_iter().for_each(|ticket| _ = guest.receive(ticket).unwrap());
        for (start, end) in [(5, 7), (25, 27)] {
            let taken = guest.getlk(file, open, 9, wrlck(start, end)).unwrap();
            assert_eq!((taken.start, taken.end), (start, end));
        }
        rustix::fs::flock(&on_host, FlockOperation::Unlock).unwrap();
        guest.select(2);
        guest.receive(other).unwrap();
        assert!(is_flocked(&here.path.join("file")));
        // Requests that come now are taken where they are.
        (0..300).for_each(|_| _ = guest.getattr(file).unwrap());
        drop(guest);
        assert_eq!(there.said(), "");
    }
}

/// The server there is killed before the first queue starts.
#[test]
fn a_lock_is_waited_for_by_the_next_server_of_the_other_host() {
    let mut here = Survivor::new(Place::Memory, &[]);
    let mut guest = here.connect();
    let (file, open, second) = locked(&mut guest);
    let waits = guest.send_setlkw(file, second, 10, wrlck(5, 7), 0).unwrap();
    assert!(guest.getattr(file).is_ok(), "the lock was asked for before");
    let (state, _) = guest.save().unwrap();
    let (mut there, socket) = elsewhere(&here.path, &[]);
    guest.migrate(&socket, &(state, Vec::new())).unwrap();
    here.kill();
    there.replace(&mut guest);
    let taken = guest.getlk(file, second, 10, wrlck(0, 9)).unwrap();
    assert_eq!((taken.start, taken.end), (0, 9), "nobody has got anything");
    guest.setlk(file, open, 9, lock(libc::F_UNLCK, 0, 9), 0).unwrap();
    guest.receive(waits).unwrap();
    drop(guest);
    assert_eq!(there.said(), "");
}

/// The other host cannot be reached after all: the guest goes on where it was.
#[test]
fn a_lock_is_waited_for_here_if_the_guest_stays() {
    let here = Survivor::new(Place::Memory, &[]);
    let mut guest = here.connect();
    let (file, open, second) = locked(&mut guest);
    let waits = guest.send_setlkw(file, second, 10, wrlck(5, 7), 0).unwrap();
    assert!(guest.getattr(file).is_ok(), "the lock was asked for before");
    for _ in 0..3 {
        let (_, stopped) = guest.save().unwrap();
        assert!(!is_locked(&here.path.join("file")), "the other host can have all of its locks");
        for (index, base) in stopped.into_iter().enumerate() {
            guest.start(index, base).unwrap();
        }
        let taken = guest.getlk(file, second, 10, wrlck(0, 9)).unwrap();
        assert_eq!((taken.start, taken.end), (0, 9));
    }
    guest.setlk(file, open, 9, lock(libc::F_UNLCK, 0, 9), 0).unwrap();
    guest.receive(waits).unwrap();
}

/// In packed rings others may have written over what waits.
#[test]
fn a_guest_with_packed_rings_that_waits_for_a_lock_stays_where_it_is() {
    let here = Survivor::new(Place::Memory, &[]);
    let mut guest = here.connect_with(true);
    let (file, open, second) = locked(&mut guest);
    let waits = guest.send_setlkw(file, second, 10, wrlck(5, 7), 0).unwrap();
    assert!(guest.getattr(file).is_ok(), "the lock was asked for before");
    assert!(guest.save().is_err());
    assert!(here.said().contains("1 requests of the guest wait for locks in packed rings;"), "{}", here.said());
    guest.setlk(file, open, 9, lock(libc::F_UNLCK, 0, 9), 0).unwrap();
    guest.receive(waits).unwrap();
}

/// VMMs of one host: the server there takes the locks while the one here has its guest still.
#[test]
fn a_guest_with_locks_migrates_to_another_server_of_this_host() {
    for (place, flags) in WAYS {
        let here = Survivor::new(place, flags);
        let mut guest = here.connect();
        let (file, open) = guest.create(ROOT, "file", O_RDWR, 0o644).unwrap();
        let (file, open) = (file.nodeid, open.fh);
        guest.setlk(file, open, 9, wrlck(3, 5), 0).unwrap();
        guest.setlk(file, open, 9, wrlck(0, 0), LK_FLOCK).unwrap();
        let path = here.path.join("file");
        let is_locked = || {
            let taken = is_locked_for_the_host(&path, 3, 5);
            assert_eq!(is_flocked(&path), taken);
            taken
        };
        assert!(is_locked());
        let state = guest.save().unwrap();
        assert!(!is_locked());
        // It stays after all.
        guest.stay(&state.1).unwrap();
        assert!(is_locked());
        let state = guest.save().unwrap();
        let (there, socket) = elsewhere(&here.path, flags);
        guest.migrate(&socket, &state).unwrap();
        assert!(is_locked());
        let taken = guest.getlk(file, open, 10, wrlck(0, 9)).unwrap();
        assert_eq!((taken.start, taken.end), (3, 5));
        drop(guest);
        assert_eq!((here.said(), there.said()), (String::new(), String::new()));
    }
}

/// Whether a process of the host would have to wait for a lock.
fn is_locked_for_the_host(path: &Path, start: i64, end: i64) -> bool {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    let (kind, whence) = (libc::F_WRLCK, libc::SEEK_SET);
    let mut lock = libc::flock {
        l_type: i16::try_from(kind).unwrap(),
        l_whence: i16::try_from(whence).unwrap(),
        l_start: start,
        l_len: end - start + 1,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the lock is one that the kernel may write to.
    let asked = unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&file), libc::F_OFD_GETLK, &raw mut lock) };
    assert_eq!(asked, 0, "{}", std::io::Error::last_os_error());
    lock.l_type != i16::try_from(libc::F_UNLCK).unwrap()
}

#[test]
fn files_that_are_lost_by_a_migration_are_an_error_of_it_or_of_the_guest() {
    for (flags, fails) in [(&[][..], true), (&["--migration-on-error", "guest-error"][..], false)] {
        let mut here = Survivor::new(Place::Memory, flags);
        let mut guest = here.connect();
        fs::write(here.path.join("moved"), b"m").unwrap();
        fs::write(here.path.join("stays"), b"s").unwrap();
        let (moved, stays) = (guest.lookup(ROOT, "moved").unwrap().nodeid, guest.lookup(ROOT, "stays").unwrap().nodeid);
        let state = guest.save().unwrap();
        fs::remove_file(here.path.join("moved")).unwrap();
        here.kill();
        let (there, socket) = elsewhere(&here.path, flags);
        let outcome = guest.migrate(&socket, &state);
        assert_eq!(outcome.is_err(), fails, "{outcome:?}");
        if !fails {
            assert_eq!(errno(guest.getattr(moved)), libc::ESTALE);
            assert!(guest.getattr(stays).is_ok());
        }
        assert!(there.said().contains("not found here under the same name"), "{}", there.said());
    }
}

/// Moves a guest; what the host does while it is nowhere, and what then becomes of a file that it knows.
fn migrates(here: &[&str], there: &[&str], meanwhile: impl Fn(&Path)) -> (Result<Vec<u8>, String>, String) {
    let mut before = Survivor::new(Place::Memory, here);
    let mut guest = before.connect();
    fs::create_dir(before.path.join("dir")).unwrap();
    fs::write(before.path.join("dir/file"), b"the same").unwrap();
    let dir = guest.lookup(ROOT, "dir").unwrap().nodeid;
    let file = guest.lookup(dir, "file").unwrap().nodeid;
    let open = guest.open(file, O_RDWR).unwrap().fh;
    let state = guest.save().unwrap();
    meanwhile(&before.path);
    before.kill();
    let (after, socket) = elsewhere(&before.path, there);
    let outcome = guest.migrate(&socket, &state).map_err(|error| error.to_string());
    let outcome = outcome.map(|()| guest.read(file, open, 0, 100).unwrap());
    drop(guest);
    let said = after.said();
    (outcome, said)
}

#[test]
fn files_are_found_by_handles_wherever_they_are() {
    let handles = &["--migration-mode", "file-handles"][..];
    let moved = |dir: &Path| fs::rename(dir.join("dir"), dir.join("elsewhere")).unwrap();
    assert_eq!(migrates(handles, handles, moved), (Ok(b"the same".to_vec()), String::new()));
    // By their paths they are not.
    let (outcome, said) = migrates(&[], &[], moved);
    assert!(outcome.is_err() && said.contains("not found here under the same name"), "{said}");
    // Without the option, file handles are not trusted.
    let (outcome, said) = migrates(handles, &[], |_| ());
    assert!(outcome.is_err() && said.contains("not found here"), "{said}");
}

/// The name by which the guest found a file is gone, and nobody has told the server of another one.
#[test]
fn files_that_have_other_names_by_then_are_looked_for() {
    for (place, flags) in WAYS {
        let mut here = Survivor::new(place, flags);
        let mut guest = here.connect();
        fs::create_dir_all(here.path.join("deep/down")).unwrap();
        fs::write(here.path.join("name"), b"the same").unwrap();
        let file = guest.lookup(ROOT, "name").unwrap().nodeid;
        let open = guest.open(file, O_RDWR).unwrap().fh;
        fs::hard_link(here.path.join("name"), here.path.join("deep/down/other")).unwrap();
        fs::remove_file(here.path.join("name")).unwrap();
        let state = guest.save().unwrap();
        here.kill();
        let (there, socket) = elsewhere(&here.path, flags);
        guest.migrate(&socket, &state).unwrap();
        assert_eq!(guest.read(file, open, 0, 100).unwrap(), b"the same");
        assert_eq!(there.said(), "");
    }
}

#[test]
fn a_replaced_file_is_detected_on_request() {
    let replaced = |dir: &Path| {
        // The old one stays, so that the new one cannot have its number.
        fs::rename(dir.join("dir/file"), dir.join("old")).unwrap();
        fs::write(dir.join("dir/file"), b"another").unwrap();
    };
    assert_eq!(migrates(&[], &[], replaced).0, Ok(b"another".to_vec()));
    let verify = &["--migration-verify-handles"][..];
    let (outcome, said) = migrates(verify, &[], replaced);
    assert!(outcome.is_err() && said.contains("not found here"), "{said}");
    assert_eq!(migrates(verify, verify, |_| ()), (Ok(b"the same".to_vec()), String::new()));
}

#[test]
fn an_invalid_state_is_refused_without_harm() {
    let here = Survivor::new(Place::Memory, &[]);
    let mut guest = here.connect();
    fs::write(here.path.join("file"), b"f").unwrap();
    let file = guest.lookup(ROOT, "file").unwrap().nodeid;
    guest.open(file, O_RDWR).unwrap();
    let (state, stopped) = guest.save().unwrap();
    let mut random = Random::new(1);
    for round in 0..60 {
        let mut changed = state.clone();
        match round % 3 {
            0 => changed.truncate(1 + random.below(changed.len() - 1)),
            1 => changed[random.below(12)] ^= 0x40,
            _ => {
                // It may still be a state: of a guest that knows other inodes.
                let at = random.below(changed.len());
                changed[at] = u8::try_from(random.below(256)).unwrap();
            }
        }
        let outcome = guest.migrate(&here.socket, &(changed, stopped.clone()));
        assert!(round % 3 == 2 || outcome.is_err(), "round {round}");
    }
    drop(guest);
    let mut again = here.connect();
    assert!(again.lookup(ROOT, "file").is_ok());
}

#[test]
fn unsupported_state_is_refused_with_a_reason() {
    let mut server = Survivor::new(Place::Memory, &[]);
    let guest = server.connect();
    let socket = server.socket.clone();
    let run = |source: &Path, more: &[&str]| {
        let mut command = ferry_tests::mounts::ferry(["share"]);
        command.arg(source).arg("--virtiofs").arg(&socket).args(more);
        let output = command.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let state = server.state();
    let state = state.to_str().unwrap();
    assert!(run(Path::new("mem"), &["--state", state]).contains("is not a directory, and ends with its server"));
    // Another number of queues would find other requests.
    server.kill();
    let said = run(&server.path, &["--state", state, "--queues", "1"]);
    assert!(said.contains("another number of queues"), "{said}");
    server.start();
    let mut guest = guest;
    assert!(guest.getattr(ROOT).is_ok());
}
