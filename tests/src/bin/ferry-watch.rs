//! Watches directories and files with inotify and prints each event, in a guest or on the host; or is the agent of a
//! mount.
//!
//! `ferry-watch watch PATH...` prints `PATH EVENT NAME` until a name `end` is created in one of them, with a number for
//! the cookie of a rename. `ferry-watch agent MOUNT` replays the events of a mount. `ferry-watch exchange ONE OTHER`
//! exchanges two names. `ferry-watch contend DIR COUNT` makes and removes a few names as often as that, and prints how
//! many more it has made than removed. `ferry-watch churn DIR COUNT SEED` does random operations, with fresh names.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::collections::HashMap;
use std::fs;
use std::io::{Write, stdout};
use std::mem::MaybeUninit;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

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
        ["agent", mount] => {
            let filter = tracing_subscriber::EnvFilter::new("debug");
            tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(std::io::stderr).init();
            let Err(error) = ferry_agent::Agent::open(mount.as_ref()).unwrap().run();
            eprintln!("ferry-watch: {error}");
            ExitCode::FAILURE
        }
        ["watch", ref paths @ ..] => {
            watch(paths);
            ExitCode::SUCCESS
        }
        ["exchange", one, other] => {
            let flags = rustix::fs::RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(rustix::fs::CWD, one, rustix::fs::CWD, other, flags).unwrap();
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
        _ => {
            eprintln!("ferry-watch: usage: ferry-watch watch PATH... | agent MOUNT | exchange ONE OTHER");
            ExitCode::from(2)
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

/// Makes and removes names that others make and remove, too.
fn contend(dir: &Path, count: usize) -> i64 {
    let (mut random, mut more) = (Random(std::process::id().into()), 0);
    for _ in 0..count {
        let path = dir.join(format!("n{}", random.below(4)));
        match random.below(2) {
            0 => more += i64::from(fs::File::options().write(true).create_new(true).open(path).is_ok()),
            _ => more -= i64::from(fs::remove_file(path).is_ok()),
        }
    }
    more
}

/// Random operations; no name is used for two files.
fn churn(dir: &Path, count: usize, mut random: Random) {
    let mut files: Vec<PathBuf> = Vec::new();
    let dirs = [dir.to_path_buf(), dir.join("sub")];
    for number in 0..count {
        let fresh = dirs[random.below(2)].join(format!("f{number}"));
        if files.is_empty() {
            fs::write(&fresh, "first").unwrap();
            files.push(fresh);
            continue;
        }
        let index = random.below(files.len());
        let file = files[index].clone();
        match random.below(8) {
            0 | 1 => fs::write(&fresh, "new").unwrap(),
            2 => std::os::unix::fs::symlink("target", &fresh).unwrap(),
            3 => fs::create_dir(&fresh).and_then(|()| fs::remove_dir(&fresh)).unwrap(),
            4 => fs::remove_file(&file).unwrap(),
            5 => fs::rename(&file, &fresh).unwrap(),
            6 => fs::File::options().append(true).open(&file).unwrap().write_all(b"more").unwrap(),
            _ => fs::set_permissions(&file, fs::Permissions::from_mode(0o600 + u32::try_from(number % 64).unwrap()))
                .unwrap(),
        }
        match fs::symlink_metadata(&fresh) {
            Ok(found) if found.is_file() => files.push(fresh.clone()),
            _ => {}
        }
        if !file.exists() {
            files.retain(|other| *other != file);
        }
    }
}

fn watch(paths: &[&str]) {
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
    }
}
