//! Mounts of a 9P server that goes and comes back, as a user sees them.
use crate::common;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::place::{Place, runs, until};
use common::{Server, ferry, needs_fuse, run, wait};
use rustix::process::{Pid, Signal};

/// More than `umount` takes on a busy machine, and far less than a request waits for a server.
const AT_ONCE: Duration = Duration::from_secs(10);

/// A server of the place's source on the socket `s` of the place's directory, by relative paths.
fn serve(place: &Place) -> Server {
    let mut share = ferry();
    share.current_dir(place.directory.path()).args(["share", "source", "--9p", "unix:s"]);
    Server::start(&mut share)
}

/// The same place, with that server mounted, by relative paths, too.
fn mounted(place: &Place, flags: &[&str]) -> Pid {
    let mut mount = ferry();
    mount.current_dir(place.directory.path()).args(["mount", "9p:unix:s", "mnt"]).args(flags);
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
fn umount_does_not_wait_for_an_ended_server() {
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

/// What the host does is seen in a mount that would keep what it has seen for a day, at once, and also what it did while the
/// server was away.
#[test]
fn a_mount_of_a_server_with_events_sees_host_changes() {
    needs_fuse!();
    let place = Place::new();
    let serve = || {
        let mut share = ferry();
        share.current_dir(place.directory.path()).args(["share", "source", "--9p", "unix:s", "--events"]);
        Server::start(&mut share)
    };
    let server = serve();
    let pid = mounted(&place, &["--cache", "always"]);
    let (there, here) = (|name: &str| place.source.join(name), |name: &str| place.mnt.join(name));
    let names = || {
        let names = fs::read_dir(&place.mnt).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort_unstable();
        names
    };
    let file = File::open(here("file")).unwrap();
    let look = |name: &str| {
        let _ = fs::metadata(here(name));
        fs::read_to_string(here(name)).ok()
    };
    assert_eq!(
        (look("file").as_deref(), look("new"), names()),
        (Some("from the source"), None, vec!["file".into(), "other".into()])
    );
    // Programs on the mount that watch, too.
    let mut watch = Command::new("sh");
    let script = "until [ ! -e other ]; do sleep 0.05; done";
    let mut watch = watch.args(["-c", script]).current_dir(&place.mnt).spawn().unwrap();
    fs::write(there("file"), "by the host").unwrap();
    until("the new text", || look("file").as_deref() == Some("by the host"));
    until("the new length of an open file", || file.metadata().unwrap().len() == 11);
    fs::write(there("new"), "new").unwrap();
    until("the new file", || look("new").as_deref() == Some("new"));
    fs::rename(there("new"), there("moved")).unwrap();
    until("the new name", || look("new").is_none() && look("moved").as_deref() == Some("new"));
    fs::remove_file(there("other")).unwrap();
    assert_eq!(wait(&mut watch), Some(0));
    until("the new listing", || names() == ["file", "moved"]);
    fs::set_permissions(there("file"), fs::Permissions::from_mode(0o640)).unwrap();
    until("the new mode", || fs::metadata(here("file")).unwrap().mode() & 0o777 == 0o640);
    // A change without an event: the server is down.
    drop(server);
    fs::write(there("file"), "meanwhile").unwrap();
    fs::remove_file(there("moved")).unwrap();
    let server = serve();
    until("what happened meanwhile", || look("file").as_deref() == Some("meanwhile") && look("moved").is_none());
    fs::write(there("file"), "afterwards").unwrap();
    until("what happens afterwards", || look("file").as_deref() == Some("afterwards"));
    drop(file);
    place.unmount(pid);
    drop(server);
}

/// A server of a server's files, in its sandbox, passes on what it is told.
#[test]
fn a_chain_of_servers_reports_host_changes() {
    needs_fuse!();
    let place = Place::new();
    let serve = |source: &str, address: &str| {
        let mut share = ferry();
        share.current_dir(place.directory.path()).args(["share", source, "--9p", address, "--events"]);
        Server::start(&mut share)
    };
    let servers = [serve("source", "unix:s"), serve("9p:unix:s", "unix:t")];
    let mut mount = ferry();
    mount.current_dir(place.directory.path()).args(["mount", "9p:unix:t", "mnt", "--cache", "always"]);
    let pid = place.mounted_by(&mut mount);
    let text = |name: &str| fs::read_to_string(place.mnt.join(name)).ok();
    assert_eq!((text("file").as_deref(), text("new")), (Some("from the source"), None));
    fs::write(place.source.join("file"), "by the host").unwrap();
    until("the new text", || text("file").as_deref() == Some("by the host"));
    fs::rename(place.source.join("file"), place.source.join("new")).unwrap();
    until("the new name", || text("file").is_none() && text("new").as_deref() == Some("by the host"));
    place.unmount(pid);
    drop(servers);
}

/// What users of other mounts report: stale bytes under a new length, files that are replaced, empty, removed and made once
/// more, and readers that keep a file open. In no mode is anything old seen once the new length or name is.
#[test]
fn mounts_of_servers_with_events_miss_nothing() {
    needs_fuse!();
    // Without file handles the host is watched as without root.
    for (cache, handles) in [("auto", "prefer"), ("always", "prefer"), ("always", "never")] {
        let place = Place::new();
        let mut share = ferry();
        share.current_dir(place.directory.path()).args(["share", "source", "--9p", "unix:s", "--events"]);
        share.args(["--inode-file-handles", handles]);
        let server = Server::start(&mut share);
        let pid = mounted(&place, &["--cache", cache]);
        let (there, here) = (|name: &str| place.source.join(name), |name: &str| place.mnt.join(name));
        let text = |name: &str| fs::read_to_string(here(name));
        // It grows, and keeps its length: once it is known to be another, all of it is.
        let grown = File::open(here("file")).unwrap();
        for number in 0..20 {
            let new = format!("{number}").repeat(5000 + number % 2);
            fs::write(there("file"), &new).unwrap();
            until("the new bytes", || text("file").unwrap() == new);
            let mut bytes = vec![0; new.len()];
            assert_eq!(grown.read_at(&mut bytes, 0).unwrap(), new.len(), "{cache}");
            assert!(bytes == new.as_bytes(), "{cache}: by an open file");
        }
        // Editors replace a file; who looks at it at that time finds the one or the other.
        for number in 0..50 {
            fs::write(there("replacing"), format!("version {number}")).unwrap();
            fs::rename(there("replacing"), there("file")).unwrap();
            until("the new version", || text("file").unwrap() == format!("version {number}"));
        }
        if handles != "never" {
            until("that the first one has no name", || grown.metadata().unwrap().nlink() == 0);
        }
        File::create(there("empty")).unwrap();
        until("the empty file", || text("empty").is_ok_and(|text| text.is_empty()));
        fs::write(there("empty"), "not any more").unwrap();
        until("what is in it", || text("empty").unwrap() == "not any more");
        // Removed by the host, and made by the mount.
        fs::remove_file(there("empty")).unwrap();
        until("its end", || text("empty").is_err());
        fs::write(here("empty"), "by the mount").unwrap();
        assert_eq!(fs::read_to_string(there("empty")).unwrap(), "by the mount");
        // What follows the end of a log.
        let log = File::open(here("other")).unwrap();
        let mut end = log.metadata().unwrap().len();
        for number in 0..20 {
            let mut file = File::options().append(true).open(there("other")).unwrap();
            file.write_all(format!("line {number}\n").as_bytes()).unwrap();
            let mut line = vec![0; 100];
            let mut bytes = 0;
            until("the next line", || {
                bytes = log.read_at(&mut line, end).unwrap();
                bytes != 0
            });
            assert_eq!(&line[..bytes], format!("line {number}\n").as_bytes(), "{cache}");
            end += bytes as u64;
        }
        drop((grown, log));
        place.unmount(pid);
        drop(server);
    }
}

#[test]
fn images_are_mounted_by_relative_paths() {
    needs_fuse!();
    let place = Place::new();
    let in_place = |words: &[&str]| {
        let mut ferry = ferry();
        ferry.current_dir(place.directory.path()).args(words);
        ferry
    };
    let built = run(&mut in_place(&["image", "build", "source", "-o", "i.img", "--store", "store"]));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let pid = place.mounted_by(&mut in_place(&["mount", "image:./i.img", "mnt", "--store", "store"]));
    assert_eq!(fs::read_to_string(place.mnt.join("file")).unwrap(), "from the source");
    // The mount table says where it is from, for people in any directory.
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
    share.current_dir(place.directory.path()).args(["share", "source", "--9p", "unix:s"]);
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
