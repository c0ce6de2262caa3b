//! A guest's window whose server is killed with SIGKILL and started again: what was mapped stays, and what the guest has stored is in the files.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver, INIT_FLAGS, ROOT, Ticket};
use ferry_tests::Place;
use ferry_tests::disks::model::Random;
use ferry_tests::survivor::Survivor;
use ferry_tests::window::{FrontEndRequest, answer, next_wish};
use ferry_wire::fuse::abi::{
    InitFlags, MINOR_MAX, Opcode, RemovemappingIn, RemovemappingOne, SETUPMAPPING_READ, SETUPMAPPING_WRITE,
    SetupmappingIn,
};
use zerocopy::IntoBytes;

const CHUNK: u64 = 2 << 20;
const PAGE: u64 = 4096;
const O_RDWR: u32 = 2;
const MAP: u32 = 9;
const UNMAP: u32 = 10;
/// Two chunks of the file itself, and an end that is a copy.
const FILE_BYTES: u64 = 2 * CHUNK + 3 * PAGE + 1000;
const CHUNKS: u64 = 3;
const REFUSED: u64 = 1;
/// One of high priority, and two for requests.
const QUEUES: usize = 3;
const TIMEOUT: Duration = Duration::from_secs(60);

fn pattern() -> Vec<u8> {
    (0..FILE_BYTES).map(|at| u8::try_from((at / PAGE + at % 251) % 255 + 1).unwrap()).collect()
}

/// What a front end has mapped: a file, the offset there, and the length, by the place in the window.
type Mapped = BTreeMap<u64, (File, u64, u64)>;

/// Does what is asked, and returns what it comes to.
fn carry_out(mapped: &mut Mapped, wish: FrontEndRequest) -> u64 {
    let [_, file_offset, window_offset, bytes, _] = wish.numbers;
    match wish.code {
        MAP => {
            let overlaps =
                mapped.iter().any(|(at, (_, _, len))| *at < window_offset + bytes && window_offset < at + len);
            if overlaps {
                return REFUSED;
            }
            mapped.insert(window_offset, (wish.file.unwrap(), file_offset, bytes));
            0
        }
        UNMAP if mapped.get(&window_offset).is_some_and(|(_, _, len)| *len == bytes) => {
            mapped.remove(&window_offset);
            0
        }
        UNMAP => REFUSED,
        other => panic!("request {other}"),
    }
}

/// A guest with a window, and its front end.
struct WindowGuest {
    server: Survivor,
    guest: Driver,
    line: UnixStream,
    path: PathBuf,
    node: u64,
    open: u64,
}

impl WindowGuest {
    fn new(packed: bool) -> Self {
        Self::with(&["--dax", "64M"], packed)
    }

    fn with(flags: &[&str], packed: bool) -> Self {
        let server = Survivor::new(Place::Disk, flags);
        let path = server.path.join("file");
        fs::write(&path, pattern()).unwrap();
        let config = Config { window: true, packed, timeout: TIMEOUT, ..server.config() };
        let mut guest = Driver::connect(&server.socket, config).unwrap();
        let (_, line) = guest.window().unwrap();
        line.set_read_timeout(Some(TIMEOUT)).unwrap();
        let (node, open) = begin(&mut guest);
        Self { server, guest, line, path, node, open }
    }

    fn setup(&mut self, chunk: u64) -> Ticket {
        let at = chunk * CHUNK;
        let flags = SETUPMAPPING_READ | SETUPMAPPING_WRITE;
        let args = SetupmappingIn { fh: u64::MAX, foffset: at, len: CHUNK, flags, moffset: at };
        self.guest.send(Opcode::Setupmapping, self.node, &[args.as_bytes()], &[], 0).unwrap()
    }

    fn remove(&mut self, chunk: u64) -> Ticket {
        let args = [RemovemappingIn { count: 1 }.as_bytes().to_vec(), remove_one(chunk).as_bytes().to_vec()];
        self.guest.send(Opcode::Removemapping, self.node, &[&args[0], &args[1]], &[], 0).unwrap()
    }

    /// The next request of the server's, carried out.
    fn next(&self, mapped: &mut Mapped) -> (u32, u64) {
        let wish = next_wish(&self.line).unwrap();
        let (code, at) = (wish.code, wish.numbers[2]);
        answer(&self.line, code, carry_out(mapped, wish));
        (code, at)
    }

    fn map_all(&mut self, mapped: &mut Mapped) {
        for chunk in 0..CHUNKS {
            let ticket = self.setup(chunk);
            for _ in 0..if chunk + 1 == CHUNKS { 2 } else { 1 } {
                assert_eq!(self.next(mapped).0, MAP);
            }
            self.guest.receive(ticket).unwrap();
        }
    }

    /// Kills the server over a question, and starts it again. Its answer comes when it is said to.
    fn replace_over(&mut self, question: u32, outcome: u64, answered: LastReply) {
        if answered == LastReply::Before {
            // It may be killed before it reads this, or after.
            answer(&self.line, question, outcome);
        }
        self.server.kill();
        if answered == LastReply::Meanwhile {
            answer(&self.line, question, outcome);
        }
        self.server.start();
        if answered == LastReply::After {
            answer(&self.line, question, outcome);
        }
    }

    /// Nothing is left of what was kept.
    fn end(mut self) {
        drop((self.guest, self.line));
        assert_eq!(self.server.said(), "");
        self.server.end();
        self.server.wait_for_the_keeper();
    }
}

/// Has the guest mount it, and open the file.
fn begin(guest: &mut Driver) -> (u64, u64) {
    guest.init_with(INIT_FLAGS | InitFlags::MAP_ALIGNMENT | InitFlags::HAS_INODE_DAX, MINOR_MAX).unwrap();
    let node = guest.lookup(ROOT, "file").unwrap().nodeid;
    (node, guest.open(node, O_RDWR).unwrap().fh)
}

fn remove_one(chunk: u64) -> RemovemappingOne {
    RemovemappingOne { moffset: chunk * CHUNK, len: CHUNK }
}

/// What the guest does to its own memory.
fn store(mapped: &Mapped, at: u64, bytes: &[u8]) {
    let (start, (file, offset, len)) = mapped.range(..=at).next_back().expect("something is mapped there");
    assert!(at + bytes.len() as u64 <= start + len, "nothing is mapped there");
    file.write_all_at(bytes, offset + (at - start)).unwrap();
}

fn load(mapped: &Mapped, at: u64, bytes: u64) -> Vec<u8> {
    let (start, (file, offset, _)) = mapped.range(..=at).next_back().expect("something is mapped there");
    let mut out = vec![0; usize::try_from(bytes).unwrap()];
    file.read_exact_at(&mut out, offset + (at - start)).unwrap();
    out
}

/// The end of a file is a copy, which is brought into the file by the server after the one that made it.
#[test]
fn mappings_survive_a_kill_of_the_server() {
    for packed in [false, true] {
        let (mut windowed, mut mapped, mut expected) = (WindowGuest::new(packed), Mapped::new(), pattern());
        windowed.map_all(&mut mapped);
        let put = |expected: &mut [u8], mapped: &Mapped, at: u64, bytes: &[u8]| {
            store(mapped, at, bytes);
            let at = usize::try_from(at).unwrap();
            expected[at..at + bytes.len()].copy_from_slice(bytes);
        };
        for round in 0..3u64 {
            put(&mut expected, &mapped, round, b"whole");
            put(&mut expected, &mapped, FILE_BYTES - 500 + 10 * round, b"before");
            windowed.server.kill();
            put(&mut expected, &mapped, FILE_BYTES - 300 + 10 * round, b"meanwhile");
            windowed.server.start();
            put(&mut expected, &mapped, FILE_BYTES - 100 + 10 * round, b"after");
            assert_eq!(windowed.guest.getattr(windowed.node).unwrap().attr.size, FILE_BYTES);
            windowed.guest.fsync(windowed.node, windowed.open).unwrap();
            assert!(expected_of(&put_back(&mapped)) == expected, "round {round}: what the guest sees");
            assert!(fs::read(&windowed.path).unwrap() == expected, "round {round}: what the host sees");
        }
        // It knows what is where: asked again, nobody is asked.
        let again = windowed.setup(1);
        windowed.guest.receive(again).unwrap();
        // What the host has changed meanwhile is in the copy when the guest may know.
        windowed.server.kill();
        let host = File::options().write(true).open(&windowed.path).unwrap();
        host.write_all_at(b"host", FILE_BYTES - 700).unwrap();
        windowed.server.start();
        windowed.guest.read(windowed.node, windowed.open, FILE_BYTES - 700, 4).unwrap();
        assert_eq!(load(&mapped, FILE_BYTES - 700, 4), b"host");
        // Stored last, and never asked for: it is there when the mapping ends.
        store(&mapped, FILE_BYTES - 5, b"last!");
        windowed.server.kill();
        windowed.server.start();
        for chunk in 0..CHUNKS {
            let ticket = windowed.remove(chunk);
            for _ in 0..if chunk + 1 == CHUNKS { 2 } else { 1 } {
                assert_eq!(windowed.next(&mut mapped).0, UNMAP);
            }
            windowed.guest.receive(ticket).unwrap();
        }
        assert!(mapped.is_empty());
        assert!(fs::read(&windowed.path).unwrap().ends_with(b"last!"));
        windowed.end();
    }
}

/// All that a guest sees in its window, up to the end of the file.
fn put_back(mapped: &Mapped) -> Vec<u8> {
    mapped.keys().flat_map(|at| load(mapped, *at, mapped[at].2)).collect()
}

fn expected_of(window: &[u8]) -> &[u8] {
    &window[..usize::try_from(FILE_BYTES).unwrap()]
}

/// Which answer of the front end's the server before has still had, when it was killed over a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastReply {
    Before,
    Meanwhile,
    After,
}

#[test]
fn killed_while_the_front_end_maps_or_unmaps() {
    for answered in [LastReply::Before, LastReply::Meanwhile, LastReply::After] {
        let (mut windowed, mut mapped) = (WindowGuest::new(false), Mapped::new());
        windowed.map_all(&mut mapped);
        let old = put_back(&mapped);
        for (question, chunk) in [(UNMAP, 2), (MAP, 2), (UNMAP, 1), (MAP, 1)] {
            if question == UNMAP && chunk == 2 {
                store(&mapped, FILE_BYTES - 8, b"unmapped");
            }
            let ticket = if question == MAP { windowed.setup(chunk) } else { windowed.remove(chunk) };
            let wish = next_wish(&windowed.line).unwrap();
            assert_eq!((wish.code, wish.numbers[2]), (question, chunk * CHUNK));
            let outcome = carry_out(&mut mapped, wish);
            assert_eq!(outcome, 0);
            windowed.replace_over(question, outcome, answered);
            // Whatever it asks, until the guest has its answer; then the mappings are what the guest believes.
            let front_end = FrontEnd::start(&windowed.line, mapped);
            windowed.guest.receive(ticket).unwrap();
            mapped = front_end.stop();
            let is_mapped = mapped.range(chunk * CHUNK..(chunk + 1) * CHUNK).next().is_some();
            assert_eq!(is_mapped, question == MAP, "{answered:?} {chunk}");
        }
        let new = put_back(&mapped);
        let at = usize::try_from(FILE_BYTES - 8).unwrap();
        assert_eq!(&new[at..at + 8], b"unmapped");
        assert!(new[..at] == old[..at]);
        // Questions and answers are in step.
        let ticket = windowed.remove(0);
        assert_eq!(windowed.next(&mut mapped), (UNMAP, 0));
        windowed.guest.receive(ticket).unwrap();
        windowed.guest.fsync(windowed.node, windowed.open).unwrap();
        windowed.end();
    }
}

/// A guest that is reset before the next server has gone on with anything has nothing in its window: neither what was mapped nor what
/// the server before was about to map or had begun to take away.
#[test]
fn a_reset_ends_interrupted_mappings() {
    let ways = [LastReply::Before, LastReply::Meanwhile, LastReply::After];
    for (question, answered) in [MAP, UNMAP].into_iter().flat_map(|question| ways.map(|answered| (question, answered)))
    {
        let (mut windowed, mut mapped) = (WindowGuest::new(false), Mapped::new());
        windowed.map_all(&mut mapped);
        if question == MAP {
            let ticket = windowed.remove(1);
            assert_eq!(windowed.next(&mut mapped), (UNMAP, CHUNK));
            windowed.guest.receive(ticket).unwrap();
        }
        store(&mapped, FILE_BYTES - 6, b"stored");
        let _never_received = if question == MAP { windowed.setup(1) } else { windowed.remove(1) };
        let wish = next_wish(&windowed.line).unwrap();
        assert_eq!((wish.code, wish.numbers[2]), (question, CHUNK));
        let outcome = carry_out(&mut mapped, wish);
        for queue in 0..QUEUES {
            windowed.guest.stop(queue).unwrap();
        }
        windowed.replace_over(question, outcome, answered);
        let front_end = FrontEnd::start(&windowed.line, mapped);
        windowed.guest.reboot().unwrap();
        (windowed.node, windowed.open) = begin(&mut windowed.guest);
        let ticket = windowed.setup(0);
        windowed.guest.receive(ticket).unwrap();
        mapped = front_end.stop();
        let left: Vec<u64> = mapped.keys().copied().collect();
        assert_eq!(left, [0], "{question} {answered:?}: what the guest of before had");
        assert!(fs::read(&windowed.path).unwrap().ends_with(b"stored"));
        // Questions and answers are in step.
        let ticket = windowed.remove(0);
        assert_eq!(windowed.next(&mut mapped), (UNMAP, 0));
        windowed.guest.receive(ticket).unwrap();
        windowed.end();
    }
}

/// Files that the guest has in its window are opened without DIRECT_IO, whatever the cache: which ones these are it was told by the server before.
#[test]
fn the_next_server_knows_which_files_are_in_the_window() {
    const DIRECT_IO: u32 = 1;
    let mut windowed = WindowGuest::with(&["--dax", "64M", "--cache", "none"], false);
    fs::write(windowed.server.path.join("small"), "small").unwrap();
    let small = windowed.guest.lookup(ROOT, "small").unwrap().nodeid;
    for _ in 0..2 {
        for (node, is_direct) in [(windowed.node, false), (small, true)] {
            let open = windowed.guest.open(node, O_RDWR).unwrap();
            assert_eq!(open.open_flags & DIRECT_IO != 0, is_direct);
            windowed.guest.release(node, open.fh).unwrap();
        }
        windowed.server.replace_unnoticed();
    }
    // One that hangs up before the next server has taken it over may come again; so that is waited for.
    windowed.guest.getattr(ROOT).unwrap();
    windowed.end();
}

/// Servers that are killed while they put right what others have left leave a row of unread answers.
#[test]
fn killed_again_while_it_continues() {
    let (mut windowed, mut mapped) = (WindowGuest::new(false), Mapped::new());
    windowed.map_all(&mut mapped);
    let ticket = windowed.remove(2);
    for answered in [0, 1, 18, 3, 10, 4, 0, 10] {
        // As many questions as it gets answered, and one that it does not.
        for _ in 0..answered {
            windowed.next(&mut mapped);
        }
        let wish = next_wish(&windowed.line).unwrap();
        windowed.server.kill();
        let code = wish.code;
        answer(&windowed.line, code, carry_out(&mut mapped, wish));
        windowed.server.start();
    }
    let front_end = FrontEnd::start(&windowed.line, mapped);
    windowed.guest.receive(ticket).unwrap();
    let again = windowed.setup(2);
    windowed.guest.receive(again).unwrap();
    mapped = front_end.stop();
    assert!(expected_of(&put_back(&mapped)) == pattern());
    windowed.end();
}

/// A front end that hangs up and comes again has nothing mapped: it is asked for all of it once more.
#[test]
fn a_reconnected_front_end_maps_everything_again() {
    let (mut windowed, mut mapped) = (WindowGuest::new(false), Mapped::new());
    windowed.map_all(&mut mapped);
    store(&mapped, FILE_BYTES - 5, b"first");
    let before = put_back(&mapped);
    windowed.server.kill();
    windowed.guest.hang_up();
    windowed.server.start();
    windowed.guest.reattach().unwrap();
    let (_, line) = windowed.guest.window().unwrap();
    line.set_read_timeout(Some(TIMEOUT)).unwrap();
    windowed.line = line;
    mapped.clear();
    while mapped.len() < 4 {
        windowed.next(&mut mapped);
    }
    assert!(expected_of(&put_back(&mapped)) == expected_of(&before));
    assert!(fs::read(&windowed.path).unwrap().ends_with(b"first"));
    store(&mapped, FILE_BYTES - 5, b"again");
    let ticket = windowed.remove(2);
    assert_eq!((windowed.next(&mut mapped).0, windowed.next(&mut mapped).0), (UNMAP, UNMAP));
    windowed.guest.receive(ticket).unwrap();
    assert!(fs::read(&windowed.path).unwrap().ends_with(b"again"));
    windowed.end();
}

/// A front end on a thread of its own.
struct FrontEnd {
    ends: Arc<AtomicBool>,
    mapped: Arc<Mutex<Mapped>>,
    line: UnixStream,
    thread: JoinHandle<()>,
}

impl FrontEnd {
    fn start(line: &UnixStream, mapped: Mapped) -> Self {
        let (ends, mapped) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(mapped)));
        let line = line.try_clone().unwrap();
        // So that it sees when it is to end.
        line.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let (its, its_mapped, its_line) = (Arc::clone(&ends), Arc::clone(&mapped), line.try_clone().unwrap());
        let thread = std::thread::spawn(move || {
            while !its.load(Ordering::SeqCst) {
                let Some(wish) = next_wish(&its_line) else { continue };
                let code = wish.code;
                // About as long as a front end takes, so that servers are killed meanwhile, too.
                std::thread::sleep(Duration::from_micros(200));
                let outcome = carry_out(&mut its_mapped.lock().unwrap(), wish);
                answer(&its_line, code, outcome);
            }
        });
        Self { ends, mapped, line, thread }
    }

    fn stop(self) -> Mapped {
        self.ends.store(true, Ordering::SeqCst);
        self.thread.join().unwrap();
        self.line.set_read_timeout(Some(TIMEOUT)).unwrap();
        std::mem::take(&mut *self.mapped.lock().unwrap())
    }
}

/// At any moment of mapping, storing and unmapping.
fn survives(kills: usize) {
    let mut windowed = WindowGuest::new(false);
    let front_end = FrontEnd::start(&windowed.line, Mapped::new());
    let mapped = Arc::clone(&front_end.mapped);
    let mut expected = pattern();
    let mut random = Random::new(kills as u64);
    let mut is_there = [false; 3];
    for number in 0..kills {
        let mut tickets = Vec::new();
        let mut changes = Vec::new();
        for chunk in 0..CHUNKS {
            let index = usize::try_from(chunk).unwrap();
            if random.below(3) == 0 {
                tickets.push(if is_there[index] { windowed.remove(chunk) } else { windowed.setup(chunk) });
                changes.push(index);
            } else if is_there[index] {
                let last = if chunk + 1 == CHUNKS { FILE_BYTES % CHUNK } else { CHUNK };
                let at = chunk * CHUNK + random.below(usize::try_from(last - 8).unwrap()) as u64;
                let bytes = (number as u64 | 1 << 40).to_le_bytes();
                store(&mapped.lock().unwrap(), at, &bytes);
                let at = usize::try_from(at).unwrap();
                expected[at..at + 8].copy_from_slice(&bytes);
            }
        }
        let (moment, begin) = (Duration::from_micros(random.below(2500) as u64), Instant::now());
        while begin.elapsed() < moment {
            std::hint::spin_loop();
        }
        windowed.server.kill();
        windowed.server.start();
        tickets.into_iter().for_each(|ticket| drop(windowed.guest.receive(ticket).unwrap()));
        changes.into_iter().for_each(|index| is_there[index] = !is_there[index]);
        for (chunk, is_there) in (0..CHUNKS).zip(is_there) {
            let mapped = mapped.lock().unwrap();
            let has: u64 = mapped.range(chunk * CHUNK..(chunk + 1) * CHUNK).map(|(_, (_, _, bytes))| bytes).sum();
            assert_eq!(has, if is_there { CHUNK } else { 0 }, "kill {number}, chunk {chunk}");
            if is_there {
                let start = usize::try_from(chunk * CHUNK).unwrap();
                let end = expected.len().min(start + usize::try_from(CHUNK).unwrap());
                let seen = load_all(&mapped, chunk * CHUNK, end - start);
                assert!(seen == expected[start..end], "kill {number}, chunk {chunk}: what the guest sees");
            }
        }
        windowed.guest.fsync(windowed.node, windowed.open).unwrap();
        assert!(fs::read(&windowed.path).unwrap() == expected, "kill {number}: what the host sees");
    }
    front_end.stop();
    windowed.end();
}

/// So many bytes from this place on, from whatever is mapped there.
fn load_all(mapped: &Mapped, start: u64, bytes: usize) -> Vec<u8> {
    let mut all = Vec::new();
    for (at, (_, _, len)) in mapped.range(start..) {
        if all.len() < bytes {
            all.extend(load(mapped, *at, *len));
        }
    }
    all.truncate(bytes);
    all
}

#[test]
fn killed_at_any_moment() {
    survives(8);
}

#[test]
#[ignore = "long: make test-all"]
fn killed_at_any_moment_many_times() {
    survives(400);
}
