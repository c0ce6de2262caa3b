//! Files in a guest's window that another client shortens: no access goes past the end of a file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver, INIT_FLAGS, ROOT, Ticket};
use ferry_tests::confined::ConfinedShare;
use ferry_tests::guest::DeviceKind;
use ferry_tests::mounts::missing;
use ferry_tests::window::{FrontEndRequest, answer, next_wish};
use ferry_tests::{Cache, Device, Guest, Kind, Mount, Options, Place, Share, directory, guest_on, log, run_beside};
use ferry_vfs::{Caller, FileSystem, Ino, Name, OFlags, SetAttr};
use ferry_wire::fuse::abi::{
    AttrOut, CopyFileRangeIn, FATTR_SIZE, InitFlags, MINOR_MAX, Opcode, RemovemappingIn, RemovemappingOne,
    SETUPMAPPING_READ, SETUPMAPPING_WRITE, SetattrIn, SetupmappingIn,
};
use zerocopy::{FromZeros, IntoBytes};

const CHUNK: u64 = 2 << 20;
const FILE_BYTES: u64 = 3 * CHUNK;
const PAGE: u64 = 4096;
const BOTH: u64 = SETUPMAPPING_READ | SETUPMAPPING_WRITE;
/// The maximum delay of a truncation by a window without a reply.
const HELD_UP: Duration = Duration::from_secs(10);
const MAP: u32 = 9;
const UNMAP: u32 = 10;
const TIMEOUT: Duration = Duration::from_secs(900);

/// Bytes that are nowhere zero, and on each page others.
fn pattern(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| u8::try_from((at / PAGE + at % 251) % 255 + 1).unwrap()).collect()
}

fn share(name: &str) -> Share {
    share_in(Place::Disk, name)
}

fn share_in(place: Place, name: &str) -> Share {
    let share = Share::with(place, Options { queues: 1, name: name.into(), ..Options::default() });
    std::fs::write(share.path.join("file"), pattern(FILE_BYTES)).unwrap();
    share
}

/// A guest whose front end is ours.
struct Victim {
    driver: Driver,
    line: UnixStream,
    node: u64,
}

impl Victim {
    fn new(socket: &Path) -> Self {
        let config = Config { window: true, timeout: Duration::from_secs(60), ..Config::default() };
        let mut driver = Driver::connect(socket, config).unwrap();
        let (_, line) = driver.window().unwrap();
        // A request that never comes is an error.
        line.set_read_timeout(Some(TIMEOUT / 10)).unwrap();
        driver.init_with(INIT_FLAGS | InitFlags::MAP_ALIGNMENT, MINOR_MAX).unwrap();
        let node = driver.lookup(ROOT, "file").unwrap().nodeid;
        driver.open(node, 2).unwrap();
        Self { driver, line, node }
    }

    fn setup(&mut self, chunk: u64) -> Ticket {
        let (foffset, moffset) = (chunk * CHUNK, chunk * CHUNK);
        let args = SetupmappingIn { fh: u64::MAX, foffset, len: CHUNK, flags: BOTH, moffset };
        self.driver.send(Opcode::Setupmapping, self.node, &[args.as_bytes()], &[], 0).unwrap()
    }

    /// Has all of the file mapped.
    fn map(&mut self) {
        for chunk in 0..FILE_BYTES / CHUNK {
            let ticket = self.setup(chunk);
            let wish = self.next();
            assert_eq!((wish.code, wish.numbers), (MAP, [0, chunk * CHUNK, chunk * CHUNK, CHUNK, 1]));
            self.driver.receive(ticket).unwrap();
        }
    }

    /// Gives all of it back, which the front end has in so many parts.
    fn unmap(&mut self, parts: u64) {
        let count = RemovemappingIn { count: 1 };
        let one = RemovemappingOne { moffset: 0, len: FILE_BYTES };
        let args = [count.as_bytes(), one.as_bytes()];
        let ticket = self.driver.send(Opcode::Removemapping, self.node, &args, &[], 0).unwrap();
        (0..parts).for_each(|_| assert_eq!(self.next().code, UNMAP));
        self.driver.receive(ticket).unwrap();
    }

    /// The next request of the server's, granted.
    fn next(&self) -> FrontEndRequest {
        let wish = next_wish(&self.line).unwrap();
        answer(&self.line, wish.code, 0);
        wish
    }

    /// What is asked of the front end while the file is made as short as `end`, which is not a page's. It must be as long as it was
    /// until the last page behind that is unmapped.
    fn shortened(&self, end: u64, path: &Path) {
        for chunk in end / CHUNK..FILE_BYTES / CHUNK {
            let at = chunk * CHUNK;
            let wish = next_wish(&self.line).unwrap();
            assert_eq!((wish.code, wish.numbers), (UNMAP, [0, at, at, CHUNK, 1]));
            // So that a truncation without a wait is detected.
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(std::fs::metadata(path).unwrap().len(), FILE_BYTES, "it is short already");
            answer(&self.line, wish.code, 0);
            let whole = end.saturating_sub(at) / PAGE * PAGE;
            if whole > 0 {
                let wish = self.next();
                assert_eq!((wish.code, wish.numbers), (MAP, [0, at, at, whole, 1]), "what is left of the file itself");
            }
            let wish = self.next();
            assert_eq!((wish.code, wish.numbers), (MAP, [0, 0, at + whole, CHUNK - whole, 1]), "a copy of the rest");
            is_cut(&wish.file.unwrap(), at + whole, CHUNK - whole, end);
        }
    }
}

/// Whether a copy has what the file has up to its new end, and zeros from there on.
fn is_cut(copy: &File, start: u64, bytes: u64, end: u64) {
    let mut has = vec![1; usize::try_from(bytes).unwrap()];
    copy.read_exact_at(&mut has, 0).unwrap();
    let mut expected = pattern(end).split_off(usize::try_from(start.min(end)).unwrap());
    expected.resize(has.len(), 0);
    assert!(has == expected, "{bytes} bytes from {start} on");
}

/// A guest without a window, which waits for replies longer than a server for a front end that does not answer.
fn patient(socket: &Path) -> Driver {
    let mut driver = Driver::connect(socket, Config { timeout: TIMEOUT, ..Config::default() }).unwrap();
    driver.init().unwrap();
    driver
}

/// Such a guest, and the number of `file`.
fn other(socket: &Path) -> (Driver, u64) {
    let mut driver = patient(socket);
    let node = driver.lookup(ROOT, "file").unwrap().nodeid;
    (driver, node)
}

/// The same file by 9P; what carries it does not matter, so it is a client of ours.
fn by_9p(share: &Share) -> (ferry_ninep::Export, ferry_9p_client::Client, Ino) {
    let socket = share.socket.with_extension("9p");
    let listener = UnixListener::bind(&socket).unwrap();
    let source = Arc::clone(&share.dir) as Arc<dyn FileSystem>;
    let export = ferry_ninep::Export::start(vec![listener.into()], source, ferry_ninep::Options::default()).unwrap();
    let client =
        ferry_9p_client::Client::connect(Arc::new(ferry_9p_client::Unix(socket)), ferry_9p_client::Options::default())
            .unwrap();
    let ino = client.lookup(&Caller::default(), Ino::ROOT, Name::new(b"file").unwrap()).unwrap().ino;
    (export, client, ino)
}

/// The file is mapped again, made as short as `end` in this way, and given back.
fn is_seen_to(what: &str, victim: &mut Victim, (file, end): (&Path, u64), cut: impl FnOnce() + Send) {
    println!("{what}");
    // By the host, where nothing is mapped now.
    std::fs::write(file, pattern(FILE_BYTES)).unwrap();
    victim.map();
    std::thread::scope(|scope| {
        let cut = scope.spawn(cut);
        victim.shortened(end, file);
        cut.join().unwrap();
    });
    assert_eq!(std::fs::metadata(file).unwrap().len(), end, "{what}");
    // The guest sees the file as it is, and what it has mapped is there still.
    assert_eq!(victim.driver.getattr(victim.node).unwrap().attr.size, end);
    let ticket = victim.setup(FILE_BYTES / CHUNK - 1);
    victim.driver.receive(ticket).unwrap();
    victim.unmap(FILE_BYTES / CHUNK + u64::from(end % CHUNK != 0));
}

#[test]
fn nothing_past_the_new_end_is_mapped_when_a_file_shrinks() {
    const PART: u64 = CHUNK + 5000;
    const O_TRUNC: u32 = libc::O_TRUNC.cast_unsigned();
    const COLLAPSE: u32 = libc::FALLOC_FL_COLLAPSE_RANGE.cast_unsigned();
    let share = share("shortened");
    let file = share.path.join("file");
    let (socket, _beside) = share.beside(Cache::None, 1);
    let mut victim = Victim::new(&share.socket);
    let (part, none) = ((&*file, PART), (&*file, 0));
    let (mut near, node) = other(&socket);
    is_seen_to("SETATTR", &mut victim, part, || assert_eq!(near.truncate(node, PART).unwrap().attr.size, PART));
    is_seen_to("OPEN", &mut victim, none, || assert!(near.open(node, 2 | O_TRUNC).is_ok()));
    // It never opens what is there, and so cuts nothing.
    assert_eq!(near.create(ROOT, "file", 2 | O_TRUNC, 0o600).unwrap_err().errno(), Some(libc::ESTALE));
    let handle = near.open(node, 2).unwrap().fh;
    is_seen_to("FALLOCATE", &mut victim, (&file, FILE_BYTES - CHUNK), || {
        near.fallocate(node, handle, COLLAPSE, CHUNK, CHUNK).unwrap();
    });
    // Its own source: all that it has in common with the other is the host's file.
    let (socket, _far) = share.again(Cache::None);
    let (mut far, node) = other(&socket);
    is_seen_to("another source", &mut victim, part, || assert_eq!(far.truncate(node, PART).unwrap().attr.size, PART));
    let (ninep, client, ino) = by_9p(&share);
    let cx = Caller::default();
    let set = SetAttr { size: Some(PART), ..SetAttr::default() };
    is_seen_to("Tsetattr", &mut victim, part, || assert!(client.setattr(&cx, ino, None, &set).is_ok()));
    is_seen_to("Tlopen", &mut victim, none, || {
        let handle = client.open(&cx, ino, OFlags::RDWR | OFlags::TRUNC).unwrap();
        client.release(&cx, ino, handle);
    });
    if let Some(why) = missing() {
        ferry_skip::skip!("a mount on this host: {why}");
    } else {
        let at = share.socket.with_extension("mnt");
        std::fs::create_dir(&at).unwrap();
        let source = Arc::clone(&share.dir) as Arc<dyn FileSystem>;
        let mount = ferry_fuse::Export::mount(&at, source, ferry_fuse::Options::default()).unwrap();
        let path = at.join("file");
        is_seen_to("mount, ftruncate", &mut victim, part, || {
            File::options().write(true).open(&path).unwrap().set_len(PART).unwrap();
        });
        is_seen_to("mount, O_TRUNC", &mut victim, none, || drop(File::create(&path).unwrap()));
        mount.stop();
    }
    // Any other export asks the source.
    let dir = &share.dir;
    let ino = dir.lookup(&cx, Ino::ROOT, Name::new(b"file").unwrap()).unwrap().ino;
    is_seen_to("open", &mut victim, none, || {
        dir.release(&cx, ino, dir.open(&cx, ino, OFlags::WRONLY | OFlags::TRUNC).unwrap());
    });
    dir.forget(ino, 1);
    drop(client);
    ninep.stop();
    drop((victim, near));
    share_is_released(&share, far);
}

/// The program in its sandbox, each thread with what it needs and no more: a call that it must not make would end it.
#[test]
fn a_server_that_confines_itself_sees_to_it_too() {
    const PART: u64 = CHUNK + 5000;
    let directory = directory(Place::Disk);
    let socket = directory.path().join("9p");
    let address = format!("unix:{}", socket.display());
    let mut server = ConfinedShare::start(&["--dax", "256M", "--queues", "1", "--9p", &address]);
    let file = server.path.join("file");
    std::fs::write(&file, pattern(FILE_BYTES)).unwrap();
    let mut victim = Victim::new(&server.socket);
    let remote = ferry_9p_client::Unix(socket);
    let client = ferry_9p_client::Client::connect(Arc::new(remote), ferry_9p_client::Options::default()).unwrap();
    let cx = Caller::default();
    let ino = client.lookup(&cx, Ino::ROOT, Name::new(b"file").unwrap()).unwrap().ino;
    let set = SetAttr { size: Some(PART), ..SetAttr::default() };
    is_seen_to("confined", &mut victim, (&file, PART), || assert!(client.setattr(&cx, ino, None, &set).is_ok()));
    assert!(server.is_alive(), "{}", server.said());
}

/// The guest's own virtual machine monitor is its own matter: its kernel keeps away from what it cuts.
#[test]
fn a_client_that_shortens_a_file_keeps_its_mappings() {
    let share = share("own");
    let mut victim = Victim::new(&share.socket);
    victim.map();
    assert_eq!(victim.driver.truncate(victim.node, 100).unwrap().attr.size, 100);
    // A longer or equal length, and a shorter one within a page, need no request.
    let (socket, _beside) = share.beside(Cache::None, 1);
    let (mut other, node) = other(&socket);
    std::fs::write(share.path.join("file"), pattern(FILE_BYTES)).unwrap();
    let begun = Instant::now();
    for size in [FILE_BYTES, FILE_BYTES + 1, FILE_BYTES - 1, FILE_BYTES - PAGE + 1] {
        assert_eq!(other.truncate(node, size).unwrap().attr.size, size);
    }
    // Who may not do it asks in vain.
    let options = Options { read_only: true, queues: 1, ..Options::default() };
    let (socket, _read_only) = share.beside_with(options, 2);
    let mut reader = Driver::connect(&socket, Config::default()).unwrap();
    reader.init().unwrap();
    let node = reader.lookup(ROOT, "file").unwrap().nodeid;
    assert_eq!(reader.truncate(node, 0).unwrap_err().errno(), Some(libc::EROFS));
    assert_eq!(reader.open(node, libc::O_TRUNC.cast_unsigned()).unwrap_err().errno(), Some(libc::EROFS));
    assert!(begun.elapsed() < HELD_UP / 2, "{:?}", begun.elapsed());
    drop((victim, reader));
    share_is_released(&share, other);
}

/// Whatever finds no room is a SIGBUS in the virtual machine monitor: the blocks of what a guest may store to stay the file's own.
#[test]
fn holes_and_copies_leave_blocks_under_windows() {
    leave_blocks_under_windows(Place::Disk, "punched");
}

/// tmpfs cannot set a range to zero and keep its blocks (`FALLOC_FL_ZERO_RANGE`).
#[test]
fn holes_and_copies_leave_blocks_under_windows_in_memory() {
    leave_blocks_under_windows(Place::Memory, "punched-in-memory");
}

fn leave_blocks_under_windows(place: Place, name: &str) {
    const PUNCH: u32 = libc::FALLOC_FL_PUNCH_HOLE.cast_unsigned() | libc::FALLOC_FL_KEEP_SIZE.cast_unsigned();
    let share = share_in(place, name);
    let (socket, _beside) = share.beside(Cache::None, 1);
    let path = share.path.join("file");
    let blocks = || {
        let file = File::open(&path).unwrap();
        std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512
    };
    File::open(&path).unwrap().sync_all().unwrap();
    let all = blocks();
    assert!(all >= FILE_BYTES);
    let mut victim = Victim::new(&share.socket);
    victim.map();
    let (mut driver, node) = other(&socket);
    let fh = driver.open(node, 2).unwrap().fh;
    // The front end is asked for nothing, and every byte is 0.
    driver.fallocate(node, fh, PUNCH, PAGE, FILE_BYTES - 2 * PAGE).unwrap();
    let mut expected = pattern(FILE_BYTES);
    expected[usize::try_from(PAGE).unwrap()..usize::try_from(FILE_BYTES - PAGE).unwrap()].fill(0);
    assert!(std::fs::read(&path).unwrap() == expected);
    assert!(blocks() >= FILE_BYTES, "{} bytes are left", blocks());
    // A hole that is copied there is filled.
    let hole = File::create(share.path.join("hole")).unwrap();
    hole.set_len(FILE_BYTES).unwrap();
    let (from, out) = (driver.lookup(ROOT, "hole").unwrap().nodeid, driver.open(node, 2).unwrap().fh);
    let fh_in = driver.open(from, 0).unwrap().fh;
    let args =
        CopyFileRangeIn { fh_in, off_in: 0, nodeid_out: node, fh_out: out, off_out: 0, len: FILE_BYTES, flags: 0 };
    let ticket = driver.send(Opcode::CopyFileRange, from, &[args.as_bytes()], &[], 8).unwrap();
    driver.receive(ticket).unwrap();
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
    assert!(blocks() >= FILE_BYTES, "{} bytes are left", blocks());
    // What is not mapped any more can be given back.
    victim.unmap(FILE_BYTES / CHUNK);
    driver.fallocate(node, fh, PUNCH, 0, FILE_BYTES).unwrap();
    assert!(blocks() < CHUNK, "{} bytes are left", blocks());
    drop(driver);
    share_is_released(&share, victim.driver);
}

/// The front end of a guest with two shares tells both of what it maps, and waits for both: also for the one whose request waits for it.
#[test]
fn a_guest_cuts_a_file_that_it_has_mapped_in_another_share() {
    let share = share("two");
    let mut victim = Victim::new(&share.socket);
    victim.map();
    let (socket, _beside) = share.beside(Cache::None, 1);
    let mut other = Driver::connect(&socket, Config { regions: 2, ..Config::default() }).unwrap();
    other.init().unwrap();
    let node = other.lookup(ROOT, "file").unwrap().nodeid;
    let begun = Instant::now();
    let args = SetattrIn { valid: FATTR_SIZE, size: 0, ..SetattrIn::new_zeroed() };
    let ticket = other.send(Opcode::Setattr, node, &[args.as_bytes()], &[], size_of::<AttrOut>()).unwrap();
    for _ in 0..FILE_BYTES / CHUNK {
        for (code, is_there) in [(UNMAP, false), (MAP, true)] {
            let wish = next_wish(&victim.line).unwrap();
            assert_eq!(wish.code, code);
            other.share_region(1, is_there).unwrap();
            answer(&victim.line, code, 0);
        }
    }
    other.receive(ticket).unwrap();
    assert!(begun.elapsed() < HELD_UP / 2, "{:?}", begun.elapsed());
    assert_eq!(std::fs::metadata(share.path.join("file")).unwrap().len(), 0);
    drop(victim);
    share_is_released(&share, other);
}

fn share_is_released(share: &Share, driver: Driver) {
    drop(driver);
    share.assert_released();
}

#[test]
fn a_front_end_that_does_not_answer_holds_others_up_for_a_bounded_time() {
    let share = share("silent");
    let file = share.path.join("file");
    let mut silent = Victim::new(&share.socket);
    silent.map();
    let (socket, _beside) = share.beside(Cache::None, 1);
    let (mut other, node) = other(&socket);
    let (third, _export) = share.beside(Cache::None, 2);
    let begun = Instant::now();
    let args = SetattrIn { valid: FATTR_SIZE, size: 5000, ..SetattrIn::new_zeroed() };
    let ticket = other.send(Opcode::Setattr, node, &[args.as_bytes()], &[], size_of::<AttrOut>()).unwrap();
    let unanswered = next_wish(&silent.line).unwrap();
    assert_eq!((unanswered.code, unanswered.numbers), (UNMAP, [0, 0, 0, CHUNK, 1]));
    // The silent one's own requests go on.
    silent.driver.getattr(silent.node).unwrap();
    // Who maps it now gets nothing of what is about to go.
    let mut late = Victim::new(&third);
    let mapping = late.setup(0);
    let wish = late.next();
    assert_eq!((wish.code, wish.numbers), (MAP, [0, 0, 0, PAGE, 1]));
    let wish = late.next();
    assert_eq!((wish.code, wish.numbers), (MAP, [0, 0, PAGE, CHUNK - PAGE, 1]));
    is_cut(&wish.file.unwrap(), PAGE, CHUNK - PAGE, 5000);
    late.driver.receive(mapping).unwrap();
    assert_eq!(std::fs::metadata(&file).unwrap().len(), FILE_BYTES);
    other.receive(ticket).unwrap();
    let took = begun.elapsed();
    assert!((HELD_UP..2 * HELD_UP).contains(&took), "{took:?}");
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 5000);
    // The next one does not wait.
    let begun = Instant::now();
    other.truncate(node, 4096).unwrap();
    assert!(begun.elapsed() < HELD_UP / 2, "{:?}", begun.elapsed());
    // Back again, it is asked for all that it has missed.
    answer(&silent.line, unanswered.code, 0);
    let mut unmapped = 1;
    let mut mapped = 0;
    while unmapped < 3 || mapped < 4 {
        match silent.next().code {
            UNMAP => unmapped += 1,
            _ => mapped += 1,
        }
    }
    drop((silent, late));
    share_is_released(&share, other);
}

/// Maps a file, and goes on when it was cut. What its own kernel knows of that by then decides whether the program sees zeros, or is ended by
/// its own SIGBUS (128 + 7); everything else is not to be.
const CUT: &str = r#"
window=$1
grep ' /mnt/share virtiofs .*dax=always' /proc/mounts
for round in part whole; do
    code=0
    $window keep $round $round.ready $round.go >/tmp/said || code=$?
    case $code in
    0) cat /tmp/said ;;
    135) echo 'a signal of its own' ;;
    *) exit $code ;;
    esac
done
# It lives, and sees the files as they are.
[ "$(wc -c <part) $(wc -c <whole)" = '3000000 0' ]
cmp other same
"#;

#[test]
fn a_qemu_guest_outlives_the_truncation_of_a_file_that_it_has_mapped() {
    log();
    let dir = ferry_dir::Options { read_only: true, ..ferry_dir::Options::default() };
    let options = Options { cache: Cache::Auto, queues: 1, tag: Some("t".parse().unwrap()), ..Options::default() };
    let programs = Share::of(Path::new("/"), directory(Place::Disk), dir, options);
    let options = Options { cache: Cache::None, queues: 1, tag: Some("d".parse().unwrap()), ..Options::default() };
    let share = Share::with(Place::Disk, options);
    for name in ["part", "whole", "other", "same"] {
        std::fs::write(share.path.join(name), pattern(8 << 20)).unwrap();
    }
    let words = ["sh", "-euxc", CUT, "sh", env!("CARGO_BIN_EXE_ferry-window")];
    let mut guest: Guest = guest_on(&programs.socket, words);
    guest.kind = Kind::Qemu { cpus: 2, root: Some("t".into()) };
    let window = DeviceKind::Fs { tag: "d".into(), queues: 1, dax: true };
    guest.devices.push(Device { socket: share.socket.clone(), kind: window });
    guest.mounts = vec![Mount::virtiofs("d", "/mnt/share")];
    guest.mounts[0].options = "dax=always".into();
    guest.cwd = "/mnt/share".into();
    let (socket, beside) = share.beside(Cache::None, 1);
    let directory = share.path.clone();
    let ran = run_beside(guest, TIMEOUT, || {
        for (name, size) in [("part", 3_000_000), ("whole", 0)] {
            let end = Instant::now() + TIMEOUT;
            while std::fs::metadata(directory.join(format!("{name}.ready"))).is_err() {
                assert!(Instant::now() < end, "the guest does not map {name}");
                std::thread::sleep(Duration::from_millis(50));
            }
            let mut driver = patient(&socket);
            let node = driver.lookup(ROOT, name).unwrap().nodeid;
            let begun = Instant::now();
            driver.truncate(node, size).unwrap();
            println!("{name}: cut in {:?}", begun.elapsed());
            File::create(directory.join(format!("{name}.go"))).unwrap();
        }
    });
    let said = ran.ok();
    println!("{said}");
    // A program that its own signal ends may have stored nothing.
    if said.lines().nth(1) != Some("a signal of its own") {
        // What the program has stored before the new end is there.
        let mut expected = pattern(3_000_000);
        expected.iter_mut().step_by(4096).for_each(|byte| *byte = 7);
        assert!(std::fs::read(share.path.join("part")).unwrap() == expected);
    }
    drop(beside);
    share.assert_released();
}
