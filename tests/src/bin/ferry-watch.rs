//! Watches directories and files with inotify and prints each event, in a guest or on the host; or is the agent of a
//! mount.
//!
//! `ferry-watch watch PATH...` prints `PATH EVENT NAME` until a name `end` is created in one of them, with a number for
//! the cookie of a rename. `ferry-watch agent MOUNT` replays the events of a mount. `ferry-watch exchange ONE OTHER`
//! exchanges two names.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::collections::HashMap;
use std::io::{Write, stdout};
use std::mem::MaybeUninit;
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
        _ => {
            eprintln!("ferry-watch: usage: ferry-watch watch PATH... | agent MOUNT | exchange ONE OTHER");
            ExitCode::from(2)
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
