//! Measures the source without any export: `cargo run --release -p ferry-dir --example rates [DIRECTORY]`.
#![allow(clippy::unwrap_used, reason = "a measurement, not a program")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use ferry_dir::{Dir, Options};
use ferry_vfs::{
    Caller, CreateArgs, DirItem, DirOutput, DirRange, Entry, FileSystem, Handle, Ino, IoRange, Name, OFlags, SessionId,
};

const FILES: usize = 10_000;
const FOR: Duration = Duration::from_millis(700);

#[derive(Default)]
struct Count {
    entries: Vec<Ino>,
    next: u64,
}

impl DirOutput for Count {
    fn fits(&self, _: &[u8]) -> bool {
        true
    }

    fn push(&mut self, item: &DirItem<'_>, entry: Option<&Entry>) {
        self.next = item.next;
        self.entries.extend(entry.map(|entry| entry.ino));
    }
}

/// Runs `step` (`per` operations) for a while and prints the rate.
fn rate(mode: &str, what: &str, per: usize, mut step: impl FnMut(usize)) {
    let start = Instant::now();
    let mut done = 0;
    while start.elapsed() < FOR {
        step(done);
        done += 1;
    }
    let nanoseconds = start.elapsed().as_secs_f64() * 1e9 / (done * per) as f64;
    println!("{mode:8} {what:36} {:>12.0} /s {nanoseconds:>9.0} ns", 1e9 / nanoseconds);
}

fn main() {
    let base = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    for file_handles in [true, false] {
        let mode = if file_handles { "handles" } else { "path" };
        let tmp = tempfile::tempdir_in(&base).unwrap();
        let names: Vec<String> = (0..FILES).map(|index| format!("file{index}")).collect();
        for name in &names {
            std::fs::File::create(tmp.path().join(name)).unwrap();
        }
        let dir = Dir::open(tmp.path(), Options { file_handles, ..Options::default() }).unwrap();
        let cx = Caller { session: SessionId::unique(), ..Caller::default() };
        let lookup =
            |index: usize| dir.lookup(&cx, Ino::ROOT, Name::new(names[index % FILES].as_bytes()).unwrap()).unwrap();
        rate(mode, "lookup and forget, new inode", 1, |index| {
            let entry = lookup(index);
            dir.forget(entry.ino, 1);
        });
        let inos: Vec<Ino> = (0..FILES).map(|index| lookup(index).ino).collect();
        rate(mode, "lookup, known inode", 1, |index| {
            lookup(index);
        });
        rate(mode, "lookup, no such name", 1, |_| {
            let _ = dir.lookup(&cx, Ino::ROOT, Name::new(b"none").unwrap());
        });
        let list = |plus: bool| {
            let handle = dir.opendir(&cx, Ino::ROOT, OFlags::RDONLY).unwrap();
            let mut out = Count::default();
            dir.readdir(&cx, &DirRange { ino: Ino::ROOT, handle, offset: 0, plus }, &mut out).unwrap();
            dir.releasedir(&cx, Ino::ROOT, handle);
            for ino in out.entries {
                dir.forget(ino, 1);
            }
        };
        rate(mode, "readdir, per name", FILES, |_| list(false));
        rate(mode, "readdirplus, per name", FILES, |_| list(true));
        rate(mode, "getattr (first ones open)", 1, |index| {
            dir.getattr(&cx, inos[index % FILES], None).unwrap();
        });
        rate(mode, "getattr, held", 1, |index| {
            dir.getattr(&cx, inos[index % FILES], None).unwrap();
        });
        rate(mode, "lookup, held inode", 1, |index| {
            lookup(index);
        });
        rate(mode, "readdirplus, per name, held", FILES, |_| list(true));
        let open = |index: usize| dir.open(&cx, inos[index % FILES], OFlags::RDWR).unwrap();
        rate(mode, "open and release", 1, |index| dir.release(&cx, inos[index % FILES], open(index)));
        let handles: Vec<Handle> = (0..1000).map(open).collect();
        rate(mode, "read, to its extent", 1, |index| {
            let (ino, handle) = (inos[index % 1000], handles[index % 1000]);
            let flags = OFlags::RDWR;
            let at = IoRange { ino, handle, offset: 0, len: 4096, flags, clear_privileges: false, owner: None };
            assert!(dir.read(&cx, &at, &mut Vec::new()).is_ok());
        });
        for (who, uid) in [("root", 0), ("another user", 1000)] {
            let cx = Caller { uid, gid: uid, ..cx };
            rate(mode, &format!("create, release, unlink, forget ({who})"), 1, |_| {
                let new = CreateArgs { mode: 0o644, umask: 0o022, rdev: 0 };
                let name = Name::new(b"made").unwrap();
                let (entry, handle) = dir.create(&cx, Ino::ROOT, name, &new, OFlags::RDWR).unwrap();
                dir.release(&cx, entry.ino, handle);
                dir.unlink(&cx, Ino::ROOT, name).unwrap();
                dir.forget(entry.ino, 1);
            });
        }
    }
}
