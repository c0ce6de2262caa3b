//! The DAX window: in a stock QEMU guest with a stock kernel, and with a hostile front end.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver, INIT_FLAGS, ROOT, Ticket};
use ferry_engine::requests::{Filter, watch};
use ferry_tests::window::{self, answer, next_wish, programs};
use ferry_tests::{Cache, Guest, Options, Place, Share, run};
use ferry_vfs::FileSystem;
use ferry_wire::fuse::abi::{
    ATTR_DAX, InitFlags, MINOR_MAX, Opcode, SETUPMAPPING_READ, SETUPMAPPING_WRITE, SetupmappingIn,
};
use zerocopy::IntoBytes;

const TIMEOUT: Duration = Duration::from_secs(500);
const FILE_BYTES: usize = 64 << 20;
const SHARE: &str = "dax";
/// What a line of the log of requests has before the request.
const REQUESTS: &str = "ferry_engine::requests: ";

/// What the server was asked, by operation: the log of requests, counted.
#[derive(Clone, Default)]
struct MessageLog(Arc<Mutex<String>>);

impl Write for MessageLog {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        // What goes wrong is to be seen; the requests are many.
        if !text.contains(REQUESTS) {
            eprint!("{text}");
        }
        self.0.lock().unwrap().push_str(&text);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl MessageLog {
    /// From now on, those of the share of this test's. The tests of a process have one log.
    fn begin() -> Self {
        static ONE: OnceLock<MessageLog> = OnceLock::new();
        let asked = ONE.get_or_init(Self::start).clone();
        asked.counts();
        asked
    }

    fn start() -> Self {
        let asked = Self::default();
        let writer = asked.clone();
        let filter = tracing_subscriber::EnvFilter::new("warn,ferry_engine::requests=info");
        tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(move || writer.clone()).init();
        watch(Some(Filter { share: Some(SHARE.into()), inodes: Vec::new() }));
        asked
    }

    /// How often each operation came since the last call.
    fn counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for line in std::mem::take(&mut *self.0.lock().unwrap()).lines() {
            if let Some((_, request)) = line.split_once(REQUESTS) {
                let name: String = request.chars().take_while(char::is_ascii_alphanumeric).collect();
                *counts.entry(name).or_insert(0) += 1;
            }
        }
        counts
    }
}

/// A guest with the host's programs, and a window on a share.
fn guest(programs: &Share, share: &Share, options: &str, script: &str) -> Guest {
    window::guest(programs, share, options, ["sh", "-euxc", script, "sh", env!("CARGO_BIN_EXE_ferry-window")])
}

/// Bytes that no other place of the file has.
fn pattern(bytes: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..bytes / 8).flat_map(|_| next().to_le_bytes()).collect()
}

const ALWAYS: &str = r#"
window=$1
grep ' /mnt/share virtiofs .*dax=always' /proc/mounts
sha256sum -c sums >/dev/null
# Mapped, and executed from the mapping.
[ "$($window sum big)" = "$(cat sum)" ]
# A store is in the host's file; so is what goes by write.
$window store big 5000000 'stored by the guest'
printf 'written by the guest' | dd of=big bs=1 seek=9000000 conv=notrunc 2>/dev/null
# The buffer of a WRITE (for the file grows) lies in the window.
: >copy
$window append big copy
cmp big copy
# A file that grows page by page under its mapping.
for number in 1 2 3 4 5 6 7 8 9; do dd if=big bs=5000 count=1 skip=$number 2>/dev/null >>grown; done
dd if=big bs=5000 count=9 skip=1 2>/dev/null | cmp - grown
truncate -s 12345 grown
[ "$(wc -c <grown)" = 12345 ]
sync
cd /; umount /mnt/share
"#;

#[test]
fn a_guest_reads_and_writes_through_its_window() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let asked = MessageLog::begin();
    let programs = programs();
    let options = Options {
        cache: Cache::None,
        queues: 1,
        name: SHARE.into(),
        tag: Some("d".parse().unwrap()),
        ..Options::default()
    };
    let share = Share::with(Place::Disk, options);
    let big = pattern(FILE_BYTES);
    std::fs::write(share.path.join("big"), &big).unwrap();
    let sum: u64 = big.iter().map(|byte| u64::from(*byte)).sum();
    std::fs::write(share.path.join("sum"), sum.to_string()).unwrap();
    let host = |script: &str| {
        assert!(
            Command::new("sh").args(["-euc", script]).current_dir(&share.path).status().unwrap().success(),
            "{script}"
        );
    };
    host("sha256sum big >sums");
    let ran = run(guest(&programs, &share, "dax=always", ALWAYS), TIMEOUT);
    println!("a guest with a window: {:?}", ran.took);
    ran.ok();
    let counts = asked.counts();
    println!("{counts:?}");
    assert!(counts["Setupmapping"] >= FILE_BYTES >> 21, "{counts:?}");
    assert_eq!(counts.get("Read"), None, "{counts:?}");
    let mut expected = big;
    expected[5_000_000..][..19].copy_from_slice(b"stored by the guest");
    expected[9_000_000..][..20].copy_from_slice(b"written by the guest");
    assert!(std::fs::read(share.path.join("big")).unwrap() == expected);
    assert!(std::fs::read(share.path.join("copy")).unwrap() == expected);
    assert!(std::fs::read(share.path.join("grown")).unwrap() == expected[5000..][..12345]);
    share.assert_released();
}

/// Of a share whose guest takes what it is told.
const INODE: &str = r#"
window=$1
grep ' /mnt/share virtiofs .*dax=inode' /proc/mounts
sha256sum -c sums >/dev/null
cmp big same
# READs of a file without DAX go into the window.
$window fill small big
cmp -n 100000 small big
# A program: it is a copy.
chmod +x program
./program sum small >/dev/null
# The end of a file whose last page is not whole.
$window store big 3000000 'the end of the file'
"#;

#[test]
#[ignore = "long: make test-all"]
fn only_large_files_are_mapped_where_the_guest_leaves_it_to_us() {
    if !ferry_alone::in_own_process() {
        return;
    }
    let asked = MessageLog::begin();
    let programs = programs();
    let options = Options {
        cache: Cache::None,
        queues: 1,
        name: SHARE.into(),
        tag: Some("d".parse().unwrap()),
        ..Options::default()
    };
    let share = Share::with(Place::Disk, options);
    let big = pattern(3_000_024);
    std::fs::write(share.path.join("big"), &big).unwrap();
    std::fs::write(share.path.join("same"), &big).unwrap();
    std::fs::write(share.path.join("small"), &big[1_000_000..1_100_000]).unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_ferry-window"), share.path.join("program")).unwrap();
    let sums =
        Command::new("sh").args(["-euc", "sha256sum big same small program >sums"]).current_dir(&share.path).status();
    assert!(sums.unwrap().success());
    let ran = run(guest(&programs, &share, "dax=inode", INODE), TIMEOUT);
    println!("large files only: {:?}", ran.took);
    ran.ok();
    let counts = asked.counts();
    println!("{counts:?}");
    assert!(counts["Setupmapping"] >= 4 && counts["Read"] >= 2, "{counts:?}");
    let mut expected = big;
    let small = expected[1_000_000..1_100_000].to_vec();
    expected[..100_000].copy_from_slice(&small);
    expected[3_000_000..][..19].copy_from_slice(b"the end of the file");
    assert!(std::fs::read(share.path.join("big")).unwrap() == expected);
    share.assert_released();
}

const CHUNK: u64 = 2 << 20;
/// `statx(2)`: the length is asked for.
const STATX_SIZE: u32 = 0x200;

/// A guest whose front end is ours, the line to it, and a file of 3 MiB and a bit, opened for writing.
fn native(share: &Share) -> (Driver, UnixStream, u64) {
    let (mut driver, line, node, bytes) = mounted(share);
    driver.open(node, 2).unwrap();
    assert_eq!(bytes, ferry_virtiofs::WINDOW_BYTES_DEFAULT);
    (driver, line, node)
}

/// The same before the file is opened.
fn mounted(share: &Share) -> (Driver, UnixStream, u64, u64) {
    let config = Config { window: true, timeout: Duration::from_secs(60), ..Config::default() };
    let mut driver = Driver::connect(&share.socket, config).unwrap();
    let (bytes, line) = driver.window().unwrap();
    let reply = driver.init_with(INIT_FLAGS | InitFlags::MAP_ALIGNMENT | InitFlags::HAS_INODE_DAX, MINOR_MAX).unwrap();
    assert_eq!(reply.map_alignment, 12);
    let entry = driver.lookup(ROOT, "file").unwrap();
    assert_ne!(entry.attr.flags & ATTR_DAX, 0);
    (driver, line, entry.nodeid, bytes)
}

fn setup(node: u64, offset: u64, window_offset: u64, flags: u64) -> (Opcode, u64, Vec<u8>) {
    let args = SetupmappingIn { fh: u64::MAX, foffset: offset, len: CHUNK, flags, moffset: window_offset };
    (Opcode::Setupmapping, node, args.as_bytes().to_vec())
}

fn send(driver: &mut Driver, (code, node, args): &(Opcode, u64, Vec<u8>)) -> Ticket {
    driver.send(*code, *node, &[args], &[], 0).unwrap()
}

fn share_with_file(name: &str) -> Share {
    let share = Share::with(Place::Disk, Options { queues: 1, name: name.into(), ..Options::default() });
    std::fs::write(share.path.join("file"), pattern(3_200_000)).unwrap();
    share
}

/// Maps the last chunk of that file for writing; returns the copy of its end, and where that begins in the file.
fn map_end(driver: &mut Driver, line: &UnixStream, node: u64) -> (File, u64) {
    let ticket = send(driver, &setup(node, CHUNK, 0, SETUPMAPPING_READ | SETUPMAPPING_WRITE));
    answer(line, next_wish(line).unwrap().code, 0);
    let wish = next_wish(line).unwrap();
    answer(line, wish.code, 0);
    driver.receive(ticket).unwrap();
    (wish.file.unwrap(), CHUNK + wish.numbers[2])
}

#[test]
fn mappings_are_created_and_removed() {
    if !ferry_alone::in_own_process() {
        return;
    }
    // Before the usual log is made: there is one for all tests of a process.
    MessageLog::begin();
    let share = share_with_file("native");
    let (mut driver, line, node) = native(&share);
    // A whole chunk: the file itself.
    let ticket = send(&mut driver, &setup(node, 0, 4 * CHUNK, SETUPMAPPING_READ));
    let wish = next_wish(&line).unwrap();
    assert_eq!((wish.code, wish.numbers), (9, [0, 0, 4 * CHUNK, CHUNK, 1]));
    let mut bytes = vec![0; 4096];
    wish.file.unwrap().read_exact_at(&mut bytes, 4096).unwrap();
    assert!(bytes == pattern(8192)[4096..]);
    answer(&line, 9, 0);
    driver.receive(ticket).unwrap();
    // Once more, and for writing: it is there.
    for flags in [SETUPMAPPING_READ, SETUPMAPPING_READ | SETUPMAPPING_WRITE] {
        let ticket = send(&mut driver, &setup(node, 0, 4 * CHUNK, flags));
        driver.receive(ticket).unwrap();
    }
    // The last chunk: whole pages, and a copy of the rest, stores into which are in the file after an fsync.
    let ticket = send(&mut driver, &setup(node, CHUNK, 0, SETUPMAPPING_READ | SETUPMAPPING_WRITE));
    let whole = (3_200_000 - CHUNK) / 4096 * 4096;
    let wish = next_wish(&line).unwrap();
    assert_eq!((wish.code, wish.numbers), (9, [0, CHUNK, 0, whole, 1]));
    answer(&line, 9, 0);
    let wish = next_wish(&line).unwrap();
    assert_eq!((wish.code, wish.numbers), (9, [0, 0, whole, CHUNK - whole, 1]));
    answer(&line, 9, 0);
    driver.receive(ticket).unwrap();
    settles(&share, (ferry_virtiofs::WINDOW_BYTES_DEFAULT, 2 * CHUNK));
    let copy = wish.file.unwrap();
    copy.write_all_at(b"stored", 10).unwrap();
    let handle = driver.open(node, 2).unwrap().fh;
    driver.fsync(node, handle).unwrap();
    let at = usize::try_from(CHUNK + whole + 10).unwrap();
    assert_eq!(&std::fs::read(share.path.join("file")).unwrap()[at..at + 6], b"stored");
    // What cannot be.
    for (bad, errno) in [
        (setup(node, 0, CHUNK / 2, SETUPMAPPING_READ), libc::EINVAL),
        (setup(node, 1, 0, SETUPMAPPING_READ), libc::EINVAL),
        (setup(node, 0, 1 << 40, SETUPMAPPING_READ), libc::EINVAL),
        (setup(node, 0, 8 * CHUNK, 0), libc::EINVAL),
        (setup(ROOT, 0, 8 * CHUNK, SETUPMAPPING_READ), libc::EISDIR),
        (setup(77_777, 0, 8 * CHUNK, SETUPMAPPING_READ), libc::ESTALE),
    ] {
        let ticket = send(&mut driver, &bad);
        assert_eq!(driver.receive(ticket).unwrap_err().errno(), Some(errno), "{bad:?}");
    }
    // A front end that refuses.
    let ticket = send(&mut driver, &setup(node, 0, 8 * CHUNK, SETUPMAPPING_READ));
    answer(&line, next_wish(&line).unwrap().code, 1);
    assert_eq!(driver.receive(ticket).unwrap_err().errno(), Some(libc::EIO));
    // At the end all that was mapped is taken away, each just as it was mapped.
    let ticket = driver.send(Opcode::Destroy, 0, &[], &[], 0).unwrap();
    for part in [[0, CHUNK, 0, whole, 1], [0, 0, whole, CHUNK - whole, 1], [0, 0, 4 * CHUNK, CHUNK, 1]] {
        let wish = next_wish(&line).unwrap();
        assert_eq!((wish.code, wish.numbers), (10, part));
        answer(&line, 10, 0);
    }
    driver.receive(ticket).unwrap();
    settles(&share, (ferry_virtiofs::WINDOW_BYTES_DEFAULT, 0));
    drop(driver);
    settles(&share, (0, 0));
    share.assert_released();
}

/// Waits until the window is counted so: the reply to a request may come before the count.
fn settles(share: &Share, expected: (u64, u64)) {
    let end = Instant::now() + Duration::from_secs(20);
    while share.window() != expected {
        assert!(Instant::now() < end, "{:?}, not {expected:?}", share.window());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A write across the end of a file Linux sends as a whole, also what lies before the end. It has stored bytes there, maybe, of which nobody was
/// told; and programs that map the last page may have stored some behind the end, which are to be lost.
#[test]
fn a_write_across_the_end_follows_earlier_stores() {
    if !ferry_alone::in_own_process() {
        return;
    }
    MessageLog::begin();
    let share = share_with_file("across");
    let (mut driver, line, node) = native(&share);
    let (copy, start) = map_end(&mut driver, &line, node);
    let handle = driver.open(node, 2).unwrap().fh;
    let mut expected = pattern(3_200_000);
    let end = expected.len() as u64;
    copy.write_all_at(b"AAAA", end - 4 - start).unwrap();
    assert_eq!(driver.write(node, handle, end - 4, b"BBBBBBBB").unwrap(), 8);
    expected.truncate(expected.len() - 4);
    expected.extend(b"BBBBBBBB");
    let is = |driver: &mut Driver, expected: &[u8]| {
        let mut has = vec![0; expected.len() - usize::try_from(start).unwrap()];
        copy.read_exact_at(&mut has, 0).unwrap();
        assert!(has == expected[expected.len() - has.len()..], "the copy ends with {:?}", &has[has.len() - 24..]);
        driver.fsync(node, handle).unwrap();
        let has = std::fs::read(share.path.join("file")).unwrap();
        assert!(has == expected, "{} bytes, the file ends with {:?}", has.len(), &has[has.len() - 24..]);
    };
    is(&mut driver, &expected);
    // Behind the end: what is appended there counts, and zeros where the file is made longer.
    copy.write_all_at(b"XXXX", end + 4 - start).unwrap();
    assert_eq!(driver.write(node, handle, end + 4, b"YY").unwrap(), 2);
    expected.extend(b"YY");
    is(&mut driver, &expected);
    driver.truncate(node, end + 16).unwrap();
    expected.resize(expected.len() + 10, 0);
    is(&mut driver, &expected);
    // The guest stores where somebody else has made the file longer, once it was told.
    let host = File::options().write(true).open(share.path.join("file")).unwrap();
    host.write_all_at(b"by the host", end + 16).unwrap();
    driver.statx(node, STATX_SIZE).unwrap();
    copy.write_all_at(b"BY", end + 16 - start).unwrap();
    expected.extend(b"BY the host");
    is(&mut driver, &expected);
    drop((driver, line));
    share.assert_released();
}

/// In whole pages a store is in the file itself. So it is to be in the last one when the guest syncs, and when its virtual machine ends.
#[test]
fn the_end_of_a_file_is_not_left_behind() {
    if !ferry_alone::in_own_process() {
        return;
    }
    MessageLog::begin();
    let share = share_with_file("behind");
    let (mut driver, line, node) = native(&share);
    let (copy, start) = map_end(&mut driver, &line, node);
    let has = |stored: &[u8]| {
        let file = std::fs::read(share.path.join("file")).unwrap();
        &file[usize::try_from(start).unwrap()..][..stored.len()] == stored
    };
    copy.write_all_at(b"before sync", 0).unwrap();
    driver.syncfs().unwrap();
    assert!(has(b"before sync"));
    copy.write_all_at(b"at the end", 0).unwrap();
    assert!(!has(b"at the end"), "nobody was told of it");
    drop((driver, line));
    share.assert_released();
    let until = Instant::now() + Duration::from_secs(10);
    while !has(b"at the end") {
        assert!(Instant::now() < until, "what was stored is lost");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What this process has read so far, by whichever system call.
fn bytes_read() -> u64 {
    let said = std::fs::read_to_string("/proc/self/io").unwrap();
    said.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

/// A copy is compared with its file by reading both, as far as that may tell a difference.
#[test]
fn a_copy_is_not_read_for_every_request() {
    if !ferry_alone::in_own_process() {
        return;
    }
    const REQUESTS: u64 = 50;
    MessageLog::begin();
    let options = Options { read_only: true, queues: 1, name: "copied".into(), ..Options::default() };
    let share = Share::with(Place::Disk, options);
    let path = share.path.join("file");
    std::fs::write(&path, pattern(2 << 20)).unwrap();
    let (mut driver, line, node, _) = mounted(&share);
    let ticket = send(&mut driver, &setup(node, 0, 0, SETUPMAPPING_READ));
    let wish = next_wish(&line).unwrap();
    assert_eq!(wish.numbers, [0, 0, 0, CHUNK, 0]);
    answer(&line, wish.code, 0);
    driver.receive(ticket).unwrap();
    let copy = wish.file.unwrap();
    let has = |at: u64, expected: &[u8]| {
        let mut has = vec![0; expected.len()];
        copy.read_exact_at(&mut has, at).unwrap();
        has == expected
    };
    driver.getattr(node).unwrap();
    let before = bytes_read();
    (0..REQUESTS).for_each(|_| assert_eq!(driver.getattr(node).unwrap().attr.size, CHUNK));
    let read = bytes_read() - before;
    assert!(read < REQUESTS * CHUNK / 10, "{read} bytes for {REQUESTS} questions for attributes");
    // What the host changes shows with the attributes of that, and in any case when the file is opened.
    let host = File::options().write(true).open(&path).unwrap();
    host.write_all_at(b"changed", 5000).unwrap();
    driver.getattr(node).unwrap();
    assert!(has(5000, b"changed"));
    host.write_all_at(b"again", 6000).unwrap();
    let handle = driver.open(node, 0).unwrap().fh;
    assert!(has(6000, b"again"));
    let before = bytes_read();
    for _ in 0..REQUESTS {
        driver.read(node, handle, 0, 4096).unwrap();
        driver.flush(node, handle, 0).unwrap();
    }
    let read = bytes_read() - before;
    assert!(read < REQUESTS * CHUNK / 10, "{read} bytes for {REQUESTS} READs and FLUSHes");
    drop((driver, line));
    share.assert_released();
}

/// Of what a guest may have stored, others are told when it gives a mapping back.
#[test]
fn a_panic_in_a_listener_keeps_the_window() {
    if !ferry_alone::in_own_process() {
        return;
    }
    MessageLog::begin();
    let share = share_with_file("panics");
    let (mut driver, line, node) = native(&share);
    // A request that never comes is an error.
    line.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let told = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&told);
    let _listens = share.dir.changes().unwrap().subscribe(move |_, _| {
        count.fetch_add(1, Ordering::SeqCst);
        panic!("as somebody's code may");
    });
    for round in 1..=2 {
        let ticket = send(&mut driver, &setup(node, 0, 0, SETUPMAPPING_READ | SETUPMAPPING_WRITE));
        answer(&line, next_wish(&line).unwrap().code, 0);
        driver.receive(ticket).unwrap();
        let args = [1u32.to_le_bytes().as_slice(), &0u64.to_le_bytes(), &CHUNK.to_le_bytes()].concat();
        let ticket = driver.send(Opcode::Removemapping, node, &[&args], &[], 0).unwrap();
        answer(&line, next_wish(&line).unwrap().code, 0);
        driver.receive(ticket).unwrap();
        assert_eq!(told.load(Ordering::SeqCst), round);
    }
    drop((driver, line));
    share.assert_released();
}

/// What a guest stores into a hole takes room when the host writes it out, which nobody could tell the guest of.
#[test]
fn holes_are_filled_before_the_guest_writes() {
    if !ferry_alone::in_own_process() {
        return;
    }
    MessageLog::begin();
    let share = share_with_file("native-holes");
    let file = File::create(share.path.join("file")).unwrap();
    file.set_len(2 * CHUNK).unwrap();
    // What is reserved behind the end fills no hole.
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::KEEP_SIZE, 4 * CHUNK, 4 * CHUNK).unwrap();
    let bytes = || file.metadata().unwrap().blocks() * 512;
    let before = bytes();
    let (mut driver, line, node) = native(&share);
    for (flags, filled) in [(SETUPMAPPING_READ, 0), (SETUPMAPPING_READ | SETUPMAPPING_WRITE, CHUNK)] {
        let ticket = send(&mut driver, &setup(node, CHUNK, 0, flags));
        if flags == SETUPMAPPING_READ {
            answer(&line, next_wish(&line).unwrap().code, 0);
        }
        driver.receive(ticket).unwrap();
        assert!((bytes() - before).abs_diff(filled) < 1 << 16, "{} of {filled}", bytes() - before);
    }
    // The guest that has it mapped makes it shorter, and then as long as it was.
    driver.truncate(node, 0).unwrap();
    assert!(bytes() < 1 << 16);
    driver.truncate(node, 2 * CHUNK).unwrap();
    assert!(bytes().abs_diff(CHUNK) < 1 << 16, "{} of {CHUNK}", bytes());
    let handle = driver.open(node, 2).unwrap().fh;
    driver.fallocate(node, handle, rustix::fs::FallocateFlags::INSERT_RANGE.bits(), CHUNK, CHUNK).unwrap();
    assert!(bytes().abs_diff(2 * CHUNK) < 1 << 16, "{} of {}", bytes(), 2 * CHUNK);
    drop((driver, line));
    share.assert_released();
}

#[test]
fn a_silent_front_end_blocks_no_request() {
    if !ferry_alone::in_own_process() {
        return;
    }
    // Before the usual log is made: there is one for all tests of a process.
    MessageLog::begin();
    let share = share_with_file("silent");
    let (mut driver, line, node) = native(&share);
    let ticket = send(&mut driver, &setup(node, 0, 0, SETUPMAPPING_READ));
    let _unanswered = next_wish(&line).unwrap();
    // Requests are served, queues stop and go on, and memory comes and goes.
    driver.getattr(node).unwrap();
    let base = driver.stop(1).unwrap();
    driver.start(1, base).unwrap();
    driver.getattr(node).unwrap();
    // The line is cut: an error for the one that waited, and for those after it.
    drop(line);
    assert_eq!(driver.receive(ticket).unwrap_err().errno(), Some(libc::EIO));
    let ticket = send(&mut driver, &setup(node, 0, 0, SETUPMAPPING_READ));
    assert_eq!(driver.receive(ticket).unwrap_err().errno(), Some(libc::EIO));
    driver.getattr(node).unwrap();
    // Nonsense, and a guest that is gone while it waits.
    let (mut driver, line, node) = {
        drop(driver);
        native(&share)
    };
    let ticket = send(&mut driver, &setup(node, 0, 0, SETUPMAPPING_READ));
    let _unanswered = next_wish(&line).unwrap();
    (&line).write_all(&[0xff; 64]).unwrap();
    assert_eq!(driver.receive(ticket).unwrap_err().errno(), Some(libc::EIO));
    drop(driver);
    let (mut driver, line, node) = native(&share);
    send(&mut driver, &setup(node, 0, 0, SETUPMAPPING_READ));
    let _unanswered = next_wish(&line).unwrap();
    drop(driver);
    share.assert_released();
}

/// What a guest's front end does with a mapping of which the host took the file away, is its own business; the server goes on.
#[test]
fn a_file_truncated_by_the_host_ends_no_process() {
    if !ferry_alone::in_own_process() {
        return;
    }
    MessageLog::begin();
    let share = share_with_file("truncated");
    let (mut driver, line, node) = native(&share);
    let handle = driver.open(node, 2).unwrap().fh;
    let ticket = send(&mut driver, &setup(node, 0, 0, SETUPMAPPING_READ | SETUPMAPPING_WRITE));
    answer(&line, next_wish(&line).unwrap().code, 0);
    driver.receive(ticket).unwrap();
    // The last chunk: whole pages, and a copy of the rest.
    let ticket = send(&mut driver, &setup(node, CHUNK, CHUNK, SETUPMAPPING_READ | SETUPMAPPING_WRITE));
    answer(&line, next_wish(&line).unwrap().code, 0);
    let copy = next_wish(&line).unwrap();
    answer(&line, copy.code, 0);
    driver.receive(ticket).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(share.path.join("file")).unwrap();
    file.set_len(100).unwrap();
    // All requests see the new length, and bytes past it belong to no file.
    assert_eq!(driver.getattr(node).unwrap().attr.size, 100);
    assert_eq!(driver.read(node, handle, 0, 4096).unwrap(), pattern(4096)[..100]);
    assert_eq!(driver.read(node, handle, CHUNK, 4096).unwrap(), b"");
    driver.fsync(node, handle).unwrap();
    assert_eq!(std::fs::metadata(share.path.join("file")).unwrap().len(), 100, "the copy brings nothing back");
    // It cannot be mapped behind its end. What was mapped goes as it came.
    let ticket = send(&mut driver, &setup(node, 0, 4 * CHUNK, SETUPMAPPING_READ));
    let wish = next_wish(&line).unwrap();
    assert_eq!(
        (wish.code, wish.numbers[1..4].to_vec()),
        (9, vec![0, 4 * CHUNK, CHUNK]),
        "a copy from the first page on"
    );
    answer(&line, wish.code, 0);
    driver.receive(ticket).unwrap();
    let ticket = driver.send(Opcode::Destroy, 0, &[], &[], 0).unwrap();
    let mut gone = 0;
    while gone < 4 {
        answer(&line, next_wish(&line).unwrap().code, 0);
        gone += 1;
    }
    driver.receive(ticket).unwrap();
    drop(driver);
    share.assert_released();
}
