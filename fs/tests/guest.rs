//! The examples in a real guest, over virtio-fs.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{GREET, Server, WORK};
use ferry_fs::virtiofs::{Export, Options};
use ferry_fs::{Attr, Caller, Data, Entry, Errno, FileSystem, FileType, Handle, Ino, IoRange, Name, Output, Result};
use ferry_tests::{MOUNTPOINT, Place, TIMEOUT, folder, guest_on, run, suites};
use rustix::process::Signal;

/// Serves an example to a guest that runs a shell script in it.
fn in_guest(name: &str, flags: &[&str], script: &str, timeout: Duration) -> ferry_tests::Ran {
    let folder = folder(Place::Memory);
    let socket = folder.path().join("s");
    let mut server = Server::start(name, "virtiofs", &socket, &[&["--tag", "t"], flags].concat());
    let ran = run(guest_on(&socket, ["sh", "-euc", script]), timeout);
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    assert!(!socket.exists(), "the socket is left behind");
    ran
}

#[test]
fn hello_greets() {
    in_guest("hello", &[], GREET, TIMEOUT).ok();
}

#[test]
fn toyfs_works() {
    for cache in ["none", "auto", "always"] {
        in_guest("toyfs", &["--cache", cache], WORK, TIMEOUT).ok();
    }
}

/// Cases of pjdfstest that toyfs does not pass, and why.
const FAILING: &[(&str, &str)] =
    &[("open::interact_2gb", "writes behind a hole of 2 GiB; a toy has no holes, and 256 MiB in all")];

#[test]
fn toyfs_passes_pjdfstest() {
    let program = suites::tool("pjdfstest", "0.2.2");
    let files = folder(Place::Disk);
    let config = files.path().join("pjdfstest.toml");
    let text = "[features]\nposix_fallocate = {}\nrename_ctime = {}\nutime_now = {}\nutimensat = {}\n\
                [settings]\nnaptime = 0.02\n[dummy_auth]\nentries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]\n";
    std::fs::write(&config, text).unwrap();
    let script = format!("{} -c {} -p {MOUNTPOINT} -s /dev/shm || :", program.display(), config.display());
    let ran = in_guest("toyfs", &[], &script, TIMEOUT);
    let outcome = |wanted: &str| -> Vec<&str> {
        let lines = ran.out.lines().filter_map(|line| line.split_once(' '));
        lines.filter(|(_, outcome)| outcome.trim() == wanted).map(|(name, _)| name).collect()
    };
    let (passed, failed) = (outcome("ok"), outcome("FAILED"));
    let known: Vec<_> = FAILING.iter().map(|(name, _)| *name).collect();
    assert_eq!(failed, known, "other cases fail than are known to:\n{}", ran.out);
    assert!(passed.len() > 370, "the suite did not come to its end:\n{}\n{}", ran.out, ran.err);
    println!("pjdfstest on toyfs: {} passed", passed.len());
}

#[test]
fn toyfs_passes_fsx() {
    let program = suites::tool("fsx", "0.3.2");
    let files = folder(Place::Disk);
    let config = files.path().join("fsx.toml");
    let weights = "[weights]\nclose_open = 1\nread = 10\nwrite = 10\nmapread = 10\nmapwrite = 10\ninvalidate = 1\n\
                   truncate = 5\nfsync = 1\nposix_fallocate = 2\npunch_hole = 3\nposix_fadvise = 1\n";
    std::fs::write(&config, format!("flen = 1048576\n[opsize]\nmin = 1\nmax = 65536\n{weights}")).unwrap();
    for (seed, cache) in [(1, "none"), (2, "auto"), (3, "always")] {
        let script = format!("{} -q -f {} -P /tmp -N 3000 -S {seed} file", program.display(), config.display());
        in_guest("toyfs", &["--cache", cache], &script, TIMEOUT).ok();
    }
}

/// A file system with one file that can be read and one that cannot, by a mistake of its author.
struct Mistaken;

const GOOD: Ino = Ino(2);
const BAD: Ino = Ino(3);

impl FileSystem for Mistaken {
    fn lookup(&self, cx: &Caller<'_>, _dir: Ino, name: Name<'_>) -> Result<Entry> {
        let ino = match name.as_bytes() {
            b"good" => GOOD,
            b"bad" => BAD,
            _ => return Err(Errno::NOENT),
        };
        Ok(Entry::new(ino, self.getattr(cx, ino, None)?))
    }

    fn getattr(&self, _: &Caller<'_>, ino: Ino, _: Option<Handle>) -> Result<Attr> {
        match ino {
            Ino::ROOT => Ok(Attr::new(ino, FileType::Directory, 0o755)),
            _ => Ok(Attr::new(ino, FileType::RegularFile, 0o644).with_size(5)),
        }
    }

    fn read(&self, _: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<Data> {
        assert!(at.ino == GOOD, "the mistake");
        Ok(at.read_from(b"fine\n", out))
    }
}

#[test]
fn a_panic_is_its_callers_error_alone() {
    let folder = folder(Place::Memory);
    let socket = folder.path().join("s");
    let options = Options { tag: Some("t".parse().unwrap()), queues: 1, ..Options::default() };
    let export = Export::listen(&socket, Arc::new(Mistaken), options).unwrap();
    let script = "for i in 1 2 3; do cat bad 2>&1 | grep 'Input/output error'; test \"$(cat good)\" = fine; done";
    run(guest_on(&socket, ["sh", "-euc", script]), TIMEOUT).ok();
    export.stop();
}
