//! Watches directories and files with inotify and prints each event, in a guest or on the host; or is the agent of a
//! mount.
//!
//! `ferry-watch watch [--answer] PATH...` prints `PATH EVENT NAME` until a name `end` is created in one of them, with a
//! number for the cookie of a rename; with `--answer` it creates `seen.NAME` for each new name that begins with `ping.`.
//! `ferry-watch fanotify DIR` is the same with fanotify, without the directory. `ferry-watch agent
//! [--wait] MOUNT...` replays the events of mounts. `ferry-watch exchange ONE OTHER`
//! exchanges two names. `ferry-watch contend DIR COUNT` makes, moves and removes a few names as often as that, and prints
//! how many more it has made than removed. `ferry-watch churn DIR COUNT SEED` does random operations, with fresh names.
//! `ferry-watch count FILE` counts in a file until there is a file `stop` or `failed`, and `ferry-watch read FILE COUNT SEEN` reads it
//! so often, fails if it goes backwards, and writes what it sees to another file.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::collections::HashMap;
use std::fs;
use std::io::{Read, Write, stdout};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{CWD, RenameFlags};

/// How long a guest has for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(180);

const EVENTS: [(ReadFlags, &str); 9] = [
    (ReadFlags::CREATE, "CREATE"),
    (ReadFlags::DELETE, "DELETE"),
    (ReadFlags::MOVED_FROM, "MOVED_FROM"),
    (ReadFlags::MOVED_TO, "MOVED_TO"),
    (ReadFlags::MODIFY, "MODIFY"),
    (ReadFlags::ATTRIB, "ATTRIB"),
    (ReadFlags::CLOSE_WRITE, "CLOSE_WRITE"),
    (ReadFlags::DELETE_SELF, "DELETE_SELF"),
    (ReadFlags::MOVE_SELF, "MOVE_SELF"),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["agent", ref words @ ..] => {
            let filter = tracing_subscriber::EnvFilter::new("debug");
            tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(std::io::stderr).init();
            ExitCode::from(agent(words))
        }
        ["watch", "--answer", ref paths @ ..] => {
            watch(paths, true);
            ExitCode::SUCCESS
        }
        ["watch", ref paths @ ..] => {
            watch(paths, false);
            ExitCode::SUCCESS
        }
        ["fanotify", dir] => {
            fanotify(dir.as_ref());
            ExitCode::SUCCESS
        }
        ["exchange", one, other] => {
            rustix::fs::renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).unwrap();
            ExitCode::SUCCESS
        }
        ["contend", dir, count] => {
            println!("{}", contend(dir.as_ref(), count.parse().unwrap()));
            ExitCode::SUCCESS
        }
        ["churn", dir, count, seed] => {
            churn(dir.as_ref(), count.parse().unwrap(), Random(seed.parse().unwrap()));
            ExitCode::SUCCESS
        }
        ["count", file] => {
            count(file.as_ref());
            ExitCode::SUCCESS
        }
        ["read", file, reads, seen] => {
            println!("{}", read(file.as_ref(), reads.parse().unwrap(), seen.as_ref()));
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("ferry-watch: the comment at the beginning of its source says how it is used");
            ExitCode::from(2)
        }
    }
}

fn agent(words: &[&str]) -> u8 {
    let mounts = words.iter().filter(|word| **word != "--wait").map(Into::into).collect();
    ferry_agent::run("ferry-watch", &ferry_agent::Args { mounts, wait: words.contains(&"--wait") })
}

/// Prints the events of a directory's names, with fanotify.
fn fanotify(dir: &Path) {
    const KINDS: [(u64, &str); 7] = [
        (libc::FAN_CREATE, "CREATE"),
        (libc::FAN_ATTRIB, "ATTRIB"),
        (libc::FAN_MODIFY, "MODIFY"),
        (libc::FAN_CLOSE_WRITE, "CLOSE_WRITE"),
        (libc::FAN_MOVED_FROM, "MOVED_FROM"),
        (libc::FAN_MOVED_TO, "MOVED_TO"),
        (libc::FAN_DELETE, "DELETE"),
    ];
    let dir = fs::File::open(dir).unwrap();
    let flags = libc::FAN_CLASS_NOTIF | libc::FAN_REPORT_DFID_NAME | libc::FAN_CLOEXEC;
    // SAFETY: it takes two numbers.
    let group = unsafe { libc::fanotify_init(flags, libc::O_RDONLY.cast_unsigned()) };
    assert!(group >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the call has returned a new descriptor.
    let group = unsafe { OwnedFd::from_raw_fd(group) };
    let mask = KINDS.iter().fold(libc::FAN_EVENT_ON_CHILD | libc::FAN_ONDIR, |mask, (flag, _)| mask | flag);
    let (group_fd, dir_fd) = (group.as_raw_fd(), dir.as_raw_fd());
    // SAFETY: the descriptors are open, and no path is given.
    let marked = unsafe { libc::fanotify_mark(group_fd, libc::FAN_MARK_ADD, mask, dir_fd, std::ptr::null()) };
    assert_eq!(marked, 0, "{}", std::io::Error::last_os_error());
    let (mut group, mut buffer, mut out) = (fs::File::from(group), vec![0; 1 << 16], stdout().lock());
    loop {
        let len = group.read(&mut buffer).unwrap();
        let mut rest = &buffer[..len];
        while let Some(event) = rest.get(..4) {
            let bytes = u32::from_ne_bytes(event.try_into().unwrap()) as usize;
            let (event, next) = rest.split_at(bytes);
            rest = next;
            let events = u64::from_ne_bytes(event[8..16].try_into().unwrap());
            // An information record: type, length, file system, handle, name.
            let handle_bytes = u32::from_ne_bytes(event[36..40].try_into().unwrap()) as usize;
            let name = event[44 + handle_bytes..].split(|byte| *byte == 0).next().unwrap();
            let name = String::from_utf8_lossy(name);
            for (_, kind) in KINDS.iter().filter(|(flag, _)| events & flag != 0) {
                writeln!(out, "{kind} {name}").unwrap();
            }
            out.flush().unwrap();
            if name == "end" && events & libc::FAN_CREATE != 0 {
                return;
            }
        }
    }
}

/// A linear congruential generator (Knuth's MMIX).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % end
    }
}

/// Makes, moves and removes names that others make, move and remove, too.
fn contend(dir: &Path, count: usize) -> i64 {
    let (mut random, mut more) = (Random(std::process::id().into()), 0);
    for _ in 0..count {
        let [path, other] = [random.below(4), random.below(4)].map(|number| dir.join(format!("n{number}")));
        match random.below(3) {
            0 => more += i64::from(fs::File::options().write(true).create_new(true).open(path).is_ok()),
            1 => more -= i64::from(fs::remove_file(path).is_ok()),
            _ => {
                let _ = rustix::fs::renameat_with(CWD, &path, CWD, &other, RenameFlags::NOREPLACE);
            }
        }
    }
    more
}

/// How many operations of [`churn`] a guest may be behind: fewer than a server's queue has events.
const BEHIND_MAX: usize = 5000;

/// Random operations; no name is used for two files.
fn churn(dir: &Path, count: usize, mut random: Random) {
    let mut files: Vec<PathBuf> = Vec::new();
    let dirs = [dir.to_path_buf(), dir.join("sub")];
    for number in 0..count {
        if number % BEHIND_MAX == BEHIND_MAX - 1 {
            let (ping, seen) = (format!("ping.{number}"), dir.join("..").join(format!("seen.ping.{number}")));
            fs::write(dir.join(ping), "").unwrap();
            let begin = Instant::now();
            while !seen.exists() {
                assert!(begin.elapsed() < ANSWER_MAX, "the guest does not answer");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        let fresh = dirs[random.below(2)].join(format!("f{number}"));
        if files.is_empty() {
            fs::write(&fresh, "first").unwrap();
            files.push(fresh);
            continue;
        }
        let index = random.below(files.len());
        let file = &files[index];
        match random.below(8) {
            0 | 1 => fs::write(&fresh, "new").unwrap(),
            2 => std::os::unix::fs::symlink("target", &fresh).unwrap(),
            3 => fs::create_dir(&fresh).and_then(|()| fs::remove_dir(&fresh)).unwrap(),
            4 => fs::remove_file(file).unwrap(),
            5 => fs::rename(file, &fresh).unwrap(),
            6 => fs::File::options().append(true).open(file).unwrap().write_all(b"more").unwrap(),
            _ => fs::set_permissions(file, fs::Permissions::from_mode(0o600 + u32::try_from(number % 64).unwrap()))
                .unwrap(),
        }
        if !file.exists() {
            files.swap_remove(index);
        }
        if fs::symlink_metadata(&fresh).is_ok_and(|found| found.is_file()) {
            files.push(fresh);
        }
    }
}

/// The length of the numbers in a file that counts.
const DIGITS: usize = 8;

/// Counts in a file, one number in the place of the other.
fn count(file: &Path) {
    let file = fs::File::options().write(true).open(file).unwrap();
    for number in 1.. {
        if ["stop", "failed"].iter().any(|name| Path::new(name).exists()) {
            return;
        }
        file.write_all_at(format!("{number:0DIGITS$}").as_bytes(), 0).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads a file that counts, by a descriptor that stays and by others; returns the last number.
fn read(path: &Path, reads: usize, seen: &Path) -> usize {
    let (file, seen) = (fs::File::open(path).unwrap(), fs::File::create(seen).unwrap());
    let mut last = 0;
    for read in 0..reads {
        let (mut digits, opened) = ([0; DIGITS], (!read.is_multiple_of(8)).then_some(&file));
        match opened {
            Some(file) => file.read_exact_at(&mut digits, 0).unwrap(),
            None => fs::File::open(path).unwrap().read_exact_at(&mut digits, 0).unwrap(),
        }
        let number: usize = std::str::from_utf8(&digits).unwrap().parse().unwrap();
        assert!(number >= last, "read {read}, of a file that stays open {}: {number} after {last}", opened.is_some());
        if number > last {
            last = number;
            seen.write_all_at(&digits, 0).unwrap();
        }
    }
    last
}

/// Prints events with inotify.
fn watch(paths: &[&str], answers: bool) {
    let inotify = inotify::init(CreateFlags::CLOEXEC).unwrap();
    let mask =
        EVENTS.iter().fold(WatchFlags::empty(), |mask, (flag, _)| mask | WatchFlags::from_bits_retain(flag.bits()));
    let watched: HashMap<i32, &str> =
        paths.iter().map(|path| (inotify::add_watch(&inotify, *path, mask).unwrap(), *path)).collect();
    let mut buffer = vec![MaybeUninit::uninit(); 1 << 16];
    let mut reader = Reader::new(&inotify, &mut buffer);
    let (mut cookies, mut out) = (Vec::new(), stdout().lock());
    loop {
        let event = reader.next().unwrap();
        if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
            writeln!(out, "OVERFLOW").unwrap();
        }
        let name = event.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let Some((_, kind)) = EVENTS.iter().find(|(flag, _)| event.events().contains(*flag)) else { continue };
        let cookie = event.cookie();
        let number = match cookie {
            0 => String::new(),
            cookie => {
                if !cookies.contains(&cookie) {
                    cookies.push(cookie);
                }
                format!(" {}", cookies.iter().position(|known| *known == cookie).unwrap())
            }
        };
        let dir = if event.events().contains(ReadFlags::ISDIR) { "/" } else { "" };
        let path = watched.get(&event.wd()).copied().unwrap_or("?");
        writeln!(out, "{path} {kind} {name}{dir}{number}").unwrap();
        out.flush().unwrap();
        if *kind == "CREATE" && name == "end" {
            return;
        }
        if answers && *kind == "CREATE" && name.starts_with("ping.") {
            fs::write(format!("seen.{name}"), "").unwrap();
        }
    }
}
