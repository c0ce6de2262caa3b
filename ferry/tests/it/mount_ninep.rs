//! Mounts of a 9P server that goes and comes back, as a user sees them.
use crate::common;

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::place::{Place, runs, until};
use common::{Server, ferry, needs_fuse, run, wait};
use rustix::process::{Pid, Signal};

/// More than `umount` takes on a busy machine, and far less than a request waits for a server.
const AT_ONCE: Duration = Duration::from_secs(10);

/// A server of the place's source on the socket `s` of the place's folder, by relative paths.
fn serve(place: &Place) -> Server {
    let mut share = ferry();
    share.current_dir(place.folder.path()).args(["share", "source", "--9p", "unix:s"]);
    Server::start(&mut share)
}

/// The same place, with that server mounted, by relative paths, too.
fn mounted(place: &Place, flags: &[&str]) -> Pid {
    let mut mount = ferry();
    mount.current_dir(place.folder.path()).args(["mount", "9p:unix:s", "mnt"]).args(flags);
    place.mounted_by(&mut mount)
}

/// umount(8): its status, and how long it took.
fn umount(path: &Path) -> (Option<i32>, Duration) {
    let begun = Instant::now();
    let mut umount = Command::new("umount").arg(path).stderr(Stdio::null()).spawn().unwrap();
    (wait(&mut umount), begun.elapsed())
}

#[test]
fn a_server_by_a_relative_path_is_found_again() {
    needs_fuse!();
    let place = Place::new();
    let server = serve(&place);
    let pid = mounted(&place, &["--cache", "none"]);
    assert_eq!(fs::read_to_string(place.mnt.join("file")).unwrap(), "from the source");
    drop(server);
    let server = serve(&place);
    assert_eq!(fs::read_to_string(place.mnt.join("file")).unwrap(), "from the source");
    place.unmount(pid);
    drop(server);
}

#[test]
fn umount_does_not_wait_for_a_server_that_is_gone() {
    needs_fuse!();
    let place = Place::new();
    let server = serve(&place);
    // Nobody has looked at it before.
    let pid = mounted(&place, &[]);
    drop(server);
    let (status, time) = umount(&place.mnt);
    assert_eq!(status, Some(0));
    assert!(time < AT_ONCE, "{time:?}");
    until("its end", || !runs(pid));
    // One that is there and says nothing.
    let server = serve(&place);
    let pid = mounted(&place, &[]);
    server.signal(Signal::STOP);
    let (status, time) = umount(&place.mnt);
    assert_eq!(status, Some(0));
    assert!(time < AT_ONCE, "{time:?}");
    server.signal(Signal::CONT);
    until("its end", || !runs(pid));
}

/// What a memory file system of Linux's says, is said.
#[test]
fn umount_is_refused_for_open_files_alone_and_at_once() {
    needs_fuse!();
    let place = Place::new();
    let server = serve(&place);
    let pid = mounted(&place, &["--patience", "2"]);
    let tmpfs = place.at("tmpfs");
    fs::create_dir(&tmpfs).unwrap();
    assert!(Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&tmpfs).status().unwrap().success());
    let open = |at: &Path| {
        let mut file = File::create(at.join("new")).unwrap();
        file.write_all(b"not written yet").unwrap();
        file
    };
    let (file, other) = (open(&place.mnt), open(&tmpfs));
    drop(server);
    // A walk through the tree, which would wait for each of its steps.
    let mut walk = Command::new("sh");
    walk.args(["-c", "for name in 1 2 3 4 5 6 7 8 9; do stat $name; done"]).current_dir(&place.mnt);
    let mut walk = walk.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait(&mut walk);
    assert_eq!(fs::read(place.mnt.join("file")).unwrap_err().raw_os_error(), Some(5));
    let busy = umount(&tmpfs).0;
    assert_eq!(busy, Some(32));
    let (status, time) = umount(&place.mnt);
    assert_eq!(status, busy);
    assert!(time < AT_ONCE, "{time:?}");
    drop((file, other));
    let (status, time) = umount(&place.mnt);
    assert_eq!((status, umount(&tmpfs).0), (Some(0), Some(0)));
    assert!(time < AT_ONCE, "{time:?}");
    until("its end", || !runs(pid));
}

#[test]
fn images_are_mounted_by_relative_paths() {
    needs_fuse!();
    let place = Place::new();
    let in_place = |words: &[&str]| {
        let mut ferry = ferry();
        ferry.current_dir(place.folder.path()).args(words);
        ferry
    };
    let built = run(&mut in_place(&["image", "build", "source", "-o", "i.img", "--store", "store"]));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let pid = place.mounted_by(&mut in_place(&["mount", "image:./i.img", "mnt", "--store", "store"]));
    assert_eq!(fs::read_to_string(place.mnt.join("file")).unwrap(), "from the source");
    // The table of mounts says where it is from, for people in any folder.
    let source = format!(" image:{} ", place.at("i.img").display());
    assert!(place.mounts()[0].contains(&source), "{:?}", place.mounts());
    place.unmount(pid);
}

/// As those of FUSE are: names in quotes and escaped, no numbers of the client's, nothing that only Rust programmers can read.
#[test]
fn requests_of_9p_clients_are_logged_in_plain_words() {
    needs_fuse!();
    let place = Place::new();
    let (dir, log) = ("dir\u{1b}]0;title\u{7}", place.at("log"));
    fs::create_dir(place.source.join(dir)).unwrap();
    fs::write(place.source.join(dir).join("file"), "text").unwrap();
    let mut share = ferry();
    share.current_dir(place.folder.path()).args(["share", "source", "--9p", "unix:s"]);
    let mut server = Server::start(share.stderr(File::create(&log).unwrap()));
    let pid = mounted(&place, &["--cache", "none"]);
    let on = run(ferry().arg("log").arg(server.pid().as_raw_nonzero().to_string()).arg("requests"));
    assert!(on.status.success(), "{}", String::from_utf8_lossy(&on.stderr));
    assert_eq!(fs::read_to_string(place.mnt.join(dir).join("file")).unwrap(), "text");
    fs::create_dir(place.mnt.join(dir).join("made")).unwrap();
    let said = || fs::read_to_string(&log).unwrap();
    until("the requests are logged", || said().contains("Mkdir"));
    let said = said();
    for words in [r#"Walk "dir\x1b]0;title\x07""#, "bytes from byte 0", "/file", r#"Mkdir "made" mode 0755"#] {
        assert!(said.contains(words), "{words}: {said}");
    }
    for words in ["Fid(", "fid", " { ", "Steps", "OFlags", "inode "] {
        assert!(!said.contains(words), "{words}: {said}");
    }
    assert!(!said.chars().any(|c| c.is_control() && c != '\n'), "{said:?}");
    place.unmount(pid);
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}
