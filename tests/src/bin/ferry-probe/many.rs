//! Several processes at once, in one guest or in several: see [`role`].

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};

use rustix::fs::{FlockOperation, flock};

use crate::Check;
use crate::sys::{Mapping, fcntl_lock};

pub const CHECKS: &[Check] = &[
    ("appending-processes", appending_processes),
    ("counting-processes", counting_processes),
    ("listing-while-it-changes", listing_while_it_changes),
    ("mapping-processes", mapping_processes),
    ("parallel-creates", parallel_creates),
];

/// Another process of this program. It is killed on drop.
pub struct Role {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Role {
    pub fn start(args: &[&str]) -> Self {
        let mut child = Command::new("/proc/self/exe")
            .arg("--role")
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    /// A process that holds the lock.
    pub fn hold(kind: &str, path: &Path) -> Self {
        let mut role = Self::start(&["hold", kind, path.to_str().unwrap()]);
        assert_eq!(role.line(), "held");
        role
    }

    /// Returns whether another process can take the lock now.
    pub fn try_lock(kind: &str, path: &Path) -> bool {
        Self::start(&["try", kind, path.to_str().unwrap()]).line() == "held"
    }

    /// What it says next.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().into()
    }

    /// Lets it end.
    pub fn finish(&mut self) {
        self.input = None;
        assert!(self.child.wait().unwrap().success());
    }

    /// Kills it without waiting for its end.
    pub fn signal(&mut self) {
        self.child.kill().unwrap();
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The role of a process.
pub fn role(args: &[String]) -> ExitCode {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["hold", kind, path] => {
            let file = open(path);
            lock(kind, &file, true).unwrap();
            println!("held");
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
        }
        ["try", kind, path] => match lock(kind, &open(path), false) {
            Ok(()) => println!("held"),
            Err(_) => println!("taken"),
        },
        ["get-lock", path] => {
            let found = fcntl_lock(&open(path), libc::F_GETLK, libc::F_WRLCK, 0, 0).unwrap();
            println!("{} {}", found.l_type, found.l_pid);
        }
        // Connects, and becomes a program that is told the connection's number.
        ["vsock", cid, port, program, ref words @ ..] => {
            use std::os::unix::process::CommandExt;
            let socket = crate::sys::vsock(cid.parse().unwrap(), port.parse().unwrap()).unwrap();
            let number = socket.as_raw_fd().to_string();
            let words = words.iter().map(|word| word.replace("SOCKET", &number));
            let error = std::process::Command::new(program).args(words).exec();
            panic!("cannot start {program}: {error}");
        }
        ["euid"] => println!("{}", rustix::process::geteuid().as_raw()),
        ["forward", path, address] => forward(path, address),
        ["range-free", path, start, len] => {
            let (start, len) = (start.parse().unwrap(), len.parse().unwrap());
            let free = fcntl_lock(&open(path), libc::F_SETLK, libc::F_WRLCK, start, len).is_ok();
            println!("{}", if free { "free" } else { "taken" });
        }
        ["hold-then-wait", path] => {
            let file = open(path);
            fcntl_lock(&file, libc::F_SETLK, libc::F_WRLCK, 1, 1).unwrap();
            println!("held");
            fcntl_lock(&file, libc::F_SETLKW, libc::F_WRLCK, 0, 1).unwrap();
            println!("got");
        }
        ["append", path, name, count] => append(path, name, count.parse().unwrap()),
        ["count", kind, directory, count] => count_up(kind, Path::new(directory), count.parse().unwrap()),
        ["churn", directory, seconds] => churn(Path::new(directory), seconds.parse().unwrap()),
        ["map-write", path, at, text] => {
            let mut map = Mapping::new(&open(path), 65_536).unwrap();
            map.write(at.parse().unwrap(), text.as_bytes());
            map.sync();
        }
        ["mapped-times", path] => mapped_times(Path::new(path)),
        ["create", directory, name, count] => {
            for number in 0..count.parse::<u32>().unwrap() {
                let path = Path::new(directory).join(format!("{name}{number}"));
                fs::write(&path, name).unwrap();
                fs::rename(&path, Path::new(directory).join(format!("{name}-{number}"))).unwrap();
            }
        }
        ["storm", directory, seed, seconds] => {
            crate::storms::storm(Path::new(directory), seed.parse().unwrap(), seconds.parse().unwrap());
        }
        ["mixed", path, way, zone] => crate::storms::mixed(path, way, zone.parse().unwrap()),
        _ => {
            eprintln!("ferry-probe: no role {args:?}");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

/// Listens on a unix socket, and relays its connections to an address, until it is killed.
fn forward(path: &str, address: &str) {
    let carry = |mut from: Box<dyn Read + Send>, mut to: Box<dyn Write + Send>, end: Box<dyn Fn() + Send>| {
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            end();
        });
    };
    for client in UnixListener::bind(path).unwrap().incoming() {
        let client = client.unwrap();
        let server = TcpStream::connect(address).unwrap();
        server.set_nodelay(true).unwrap();
        let (own, other) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        carry(
            Box::new(client.try_clone().unwrap()),
            Box::new(server.try_clone().unwrap()),
            Box::new(move || drop(other.shutdown(Shutdown::Write))),
        );
        carry(Box::new(server), Box::new(client), Box::new(move || drop(own.shutdown(Shutdown::Write))));
    }
}

fn open(path: &str) -> File {
    File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

fn lock(kind: &str, file: &File, wait: bool) -> std::io::Result<()> {
    let pick = |waits, not| if wait { waits } else { not };
    match kind {
        "posix" => fcntl_lock(file, pick(libc::F_SETLKW, libc::F_SETLK), libc::F_WRLCK, 0, 0).map(drop),
        "ofd" => fcntl_lock(file, pick(libc::F_OFD_SETLKW, libc::F_OFD_SETLK), libc::F_WRLCK, 0, 0).map(drop),
        "flock" => {
            let operation = if wait { FlockOperation::LockExclusive } else { FlockOperation::NonBlockingLockExclusive };
            Ok(flock(file, operation)?)
        }
        _ => panic!("no kind of lock {kind}"),
    }
}

/// Lines of different lengths, each in one write.
fn append(path: &str, name: &str, count: usize) {
    let mut file = File::options().append(true).create(true).open(path).unwrap();
    for number in 0..count {
        let line = format!("{name} {number} {}\n", name.repeat(number % 50));
        file.write_all(line.as_bytes()).unwrap();
    }
}

/// Stores through a mapping, of a file that is open and of one that was closed: its times are new.
fn mapped_times(path: &Path) {
    use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
    /// Longer than clocks of file systems stand still.
    const TICK: std::time::Duration = std::time::Duration::from_millis(20);
    /// So late what is stored in a file that was closed is seen.
    const LATE: std::time::Duration = std::time::Duration::from_millis(1500);
    // Programs that want these ask for nothing else, so that a kernel answers with what it keeps.
    let times = || {
        let found = statx(CWD, path, AtFlags::empty(), StatxFlags::MTIME | StatxFlags::CTIME).unwrap();
        [found.stx_mtime, found.stx_ctime].map(|time| (time.tv_sec, time.tv_nsec))
    };
    std::fs::write(path, [1; 3 * 4096]).unwrap();
    let mut before = times();
    let mut are_new = |when: &str| {
        let now = times();
        assert!(before[0] < now[0] && before[1] < now[1], "{when}: {before:?}, {now:?}");
        before = now;
    };
    std::thread::sleep(TICK);
    let file = open(path.to_str().unwrap());
    let mut map = Mapping::new(&file, 3 * 4096).unwrap();
    for page in [0, 1] {
        map.write(page * 4096, b"stored");
        map.sync();
        are_new("in a file that is open");
        std::thread::sleep(TICK);
    }
    drop(file);
    map.write(2 * 4096, b"stored");
    map.sync();
    std::thread::sleep(LATE);
    are_new("in a file that is closed");
}

/// What [`append`] by several has left.
fn check_appended(path: &Path, names: &[&str], count: usize) {
    let text = fs::read_to_string(path).unwrap();
    let lines: BTreeSet<&str> = text.lines().collect();
    assert_eq!(text.lines().count(), names.len() * count, "lines were lost or torn");
    for name in names {
        for number in 0..count {
            let line = format!("{name} {number} {}", name.repeat(number % 50));
            assert!(lines.contains(line.as_str()), "a line of {name} is missing");
        }
    }
}

/// Adds one to a number in a file, under a lock, over and over. The file is opened again each time: caches that promise
/// close-to-open see what the last one wrote.
fn count_up(kind: &str, directory: &Path, count: u32) {
    let guard = open(directory.join("lock").to_str().unwrap());
    for _ in 0..count {
        lock(kind, &guard, true).unwrap();
        let file = open(directory.join("number").to_str().unwrap());
        let mut bytes = [0; 8];
        let read = file.read_at(&mut bytes, 0).unwrap();
        let number = if read == 8 { u64::from_le_bytes(bytes) } else { 0 };
        file.write_all_at(&(number + 1).to_le_bytes(), 0).unwrap();
        drop(file);
        match kind {
            "flock" => flock(&guard, FlockOperation::Unlock).unwrap(),
            "ofd" => drop(fcntl_lock(&guard, libc::F_OFD_SETLK, libc::F_UNLCK, 0, 0).unwrap()),
            _ => drop(fcntl_lock(&guard, libc::F_SETLK, libc::F_UNLCK, 0, 0).unwrap()),
        }
    }
}

/// Makes and removes files whose names begin with `c`.
fn churn(directory: &Path, seconds: f64) {
    let start = std::time::Instant::now();
    let mut number = 0_u64;
    while start.elapsed().as_secs_f64() < seconds {
        fs::write(directory.join(format!("c{number}")), "").unwrap();
        if number >= 100 {
            fs::remove_file(directory.join(format!("c{}", number - 100))).unwrap();
        }
        number += 1;
    }
}

fn appending_processes(dir: &Path) {
    let path = dir.join("file");
    let names = ["a", "bb", "ccc"];
    let mut roles = names.map(|name| Role::start(&["append", path.to_str().unwrap(), name, "200"]));
    roles.iter_mut().for_each(Role::finish);
    check_appended(&path, &names, 200);
}

fn counting_processes(dir: &Path) {
    for kind in ["posix", "flock", "ofd"] {
        let directory = dir.join(kind);
        fs::create_dir(&directory).unwrap();
        let mut roles: Vec<_> =
            (0..3).map(|_| Role::start(&["count", kind, directory.to_str().unwrap(), "50"])).collect();
        roles.iter_mut().for_each(Role::finish);
        assert_eq!(fs::read(directory.join("number")).unwrap(), 150_u64.to_le_bytes(), "{kind}");
    }
}

/// How many files stand still while others come and go; `FERRY_PROBE_ENTRIES` has it otherwise.
const ENTRIES: usize = 2000;

fn listing_while_it_changes(dir: &Path) {
    let entries = std::env::var("FERRY_PROBE_ENTRIES").map_or(ENTRIES, |number| number.parse().unwrap());
    for number in 0..entries {
        fs::write(dir.join(format!("s{number}")), "").unwrap();
    }
    let seconds = if entries > ENTRIES { "20" } else { "3" };
    let mut other = Role::start(&["churn", dir.to_str().unwrap(), seconds]);
    for round in 0..5 {
        let names: Vec<OsString> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        let still: Vec<_> = names.iter().filter(|name| name.as_encoded_bytes().starts_with(b"s")).collect();
        let unique: BTreeSet<_> = still.iter().collect();
        assert_eq!((still.len(), unique.len()), (entries, entries), "listing {round}: entries are missing or doubled");
    }
    other.finish();
}

fn mapping_processes(dir: &Path) {
    let path = dir.join("file");
    let file = open(path.to_str().unwrap());
    file.set_len(65_536).unwrap();
    let map = Mapping::new(&file, 65_536).unwrap();
    assert_eq!(map.read(40_000, 3), [0; 3]);
    Role::start(&["map-write", path.to_str().unwrap(), "40000", "abc"]).finish();
    assert_eq!(map.read(40_000, 3), b"abc");
}

fn parallel_creates(dir: &Path) {
    let names = ["a", "b", "c", "d"];
    let mut roles = names.map(|name| Role::start(&["create", dir.to_str().unwrap(), name, "100"]));
    roles.iter_mut().for_each(Role::finish);
    let found: BTreeSet<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let expected: BTreeSet<_> =
        names.iter().flat_map(|name| (0..100).map(move |number| format!("{name}-{number}"))).collect();
    assert_eq!(found, expected);
}
