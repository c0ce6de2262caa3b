//! `ferry status`: its output for each user, and misbehaving clients of the control socket.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::common::place::{Place, until};
use crate::common::schema::Schema;
use crate::common::{Server, ferry, needs_fuse, refused, run};

/// The most clients of a control socket.
const PLACES: usize = 16;
/// An unused user id.
const STRANGER: u32 = 64_321;

/// The only server that a target means, from JSON that is checked against its schema.
fn status(target: &str) -> Value {
    let output = run(ferry().args(["status", target, "--json"]));
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    Schema::of("watch.md", "JSON of ferry status").check(&json);
    assert_eq!(json["servers"].as_array().unwrap().len(), 1, "{json}");
    json["servers"][0].clone()
}

/// An export of the first share.
fn export(server: &Value, kind: &str) -> Value {
    let exports = server["shares"][0]["exports"].as_array().unwrap();
    exports.iter().find(|export| export["kind"] == kind).unwrap_or_else(|| panic!("{server}")).clone()
}

fn shared(directory: &Path) -> Server {
    let mut command = ferry();
    command.arg("share").arg(directory).arg("--virtiofs").arg(directory.join("s"));
    Server::start(command.arg("--9p").arg(format!("unix:{}", directory.join("9p").display())))
}

#[test]
fn clients_that_come_and_go_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let mut server = shared(directory.path());
    let pid = server.pid().as_raw_nonzero().to_string();
    let count = |kind: &str| export(&status(&pid), kind)["clients"].as_u64().unwrap();
    for (kind, socket) in [("virtiofs", "s"), ("9p", "9p")] {
        assert_eq!(count(kind), 0);
        let client = UnixStream::connect(directory.path().join(socket)).unwrap();
        until("a client", || count(kind) == 1);
        drop(client);
        until("its end", || count(kind) == 0);
    }
    let shown = status(&pid);
    assert_eq!(shown["pid"].to_string(), pid);
    assert_eq!(shown["shares"][0]["cache"], "auto");
    assert!(shown["memory_bytes"].as_u64().is_some_and(|bytes| bytes > 1 << 20), "{shown}");
    // By its socket, and as text.
    let text = run(ferry().arg("status").arg(directory.path().join("s"))).stdout;
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with(&format!("process {pid} of user ")) && text.contains("0 clients"), "{text}");
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn a_mount_shows_its_path_and_its_requests() {
    needs_fuse!();
    let place = Place::new();
    let pid = place.mounted(&["--path", "devfuse", "--passthrough", "off"]);
    let requests = || export(&status(place.mnt.to_str().unwrap()), "mount")["requests"].as_u64().unwrap();
    let before = requests();
    assert_eq!(fs::read_to_string(place.mnt.join("file")).unwrap(), "from the source");
    assert!(requests() > before);
    let mount = export(&status(place.mnt.to_str().unwrap()), "mount");
    assert_eq!(mount["path"], "/dev/fuse");
    let lacks: Vec<_> = mount["lacks"].as_array().unwrap().iter().map(|lack| lack["path"].as_str().unwrap()).collect();
    assert_eq!(lacks, ["io_uring", "passthrough"], "{mount}");
    assert!(mount["lacks"][1]["reason"].as_str().unwrap().contains("turned off"), "{mount}");
    let text = String::from_utf8(run(ferry().arg("status").arg(&place.mnt)).stdout).unwrap();
    assert!(text.contains("requests by /dev/fuse") && text.contains("not passthrough: it was turned off"), "{text}");
    place.unmount(pid);
    let said = refused(1, ferry().arg("status").arg(&place.mnt));
    assert!(said.contains("not in a mount"), "{said}");
}

#[test]
fn another_users_share_is_refused() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root, to become another user");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let server = shared(directory.path());
    let pid = server.pid().as_raw_nonzero().to_string();
    let as_stranger = |args: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={STRANGER}"), format!("--regid={STRANGER}"), "--clear-groups".into()]);
        command.arg(ferry().get_program()).args(args).env_remove("FERRY_LOG").stdin(Stdio::null());
        run(&mut command)
    };
    let socket = directory.path().join("s");
    for target in [pid.as_str(), socket.to_str().unwrap(), directory.path().to_str().unwrap()] {
        for args in [&["status", target][..], &["set", target, "limit=iops=1"]] {
            let output = as_stranger(args);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{target}: {said}");
            assert_eq!(said.lines().count(), 1, "{said}");
        }
    }
    let all = as_stranger(&["status", "--json"]);
    let all: Value = serde_json::from_slice(&all.stdout).unwrap();
    assert!(!all.to_string().contains(&*directory.path().to_string_lossy()), "{all}");
    // Root sees that of a user, whose number is shown.
    assert_eq!(status(&pid)["user"], 0);
    assert_eq!(status(&pid)["shares"][0]["limit"], Value::Null, "the stranger has set none");
}

/// What a server answers to bytes on its control socket.
fn answer(pid: &str, bytes: &[u8]) -> String {
    let mut client = UnixStream::connect(format!("/run/ferry/{pid}")).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // A server that has read enough closes the connection, which ends the write.
    let _ = client.write_all(bytes);
    let _ = client.shutdown(std::net::Shutdown::Write);
    let mut said = String::new();
    let _ = client.read_to_string(&mut said);
    said
}

#[test]
fn invalid_requests_on_the_control_socket_get_errors() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root, whose sockets are in /run/ferry");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = shared(directory.path());
    let pid = server.pid().as_raw_nonzero().to_string();
    let megabyte = [vec![b'x'; 1 << 20], vec![b'\n']].concat();
    let deep = [vec![b'['; 20_000], vec![b'\n']].concat();
    for bytes in [
        &megabyte[..],
        &deep,
        b"\x00\x1b[2J\n",
        b"\xff\xfe\n",
        b"\n",
        b"{\"do\":\"report\"}\n",
        b"{\"do\":\"report\",\"version\":-1}\n",
        b"{\"do\":\"report\",\"version\":18446744073709551616}\n",
        b"{\"do\":\"report\",\"version\":1,\"more\":2}\n",
        b"{\"do\":\"report\",\"version\":2}\n",
    ] {
        let said = answer(&pid, bytes);
        assert!(said.starts_with("{\"error\":") && said.lines().count() == 1 && said.len() < 1000, "{said:?}");
    }
    assert!(answer(&pid, b"{\"do\":\"report\",\"version\":2}\n").contains("version 1"), "the version is named");
    // Clients that say nothing and stay.
    let silent: Vec<_> = (0..8).map(|_| UnixStream::connect(format!("/run/ferry/{pid}")).unwrap()).collect();
    assert_eq!(status(&pid)["shares"].as_array().unwrap().len(), 1);
    drop(silent);
}

#[test]
fn clients_that_send_drop_by_drop_lose_their_places() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root, whose sockets are in /run/ferry");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = shared(directory.path());
    let pid = server.pid().as_raw_nonzero().to_string();
    let path = format!("/run/ferry/{pid}");
    let mut slow: Vec<_> = (0..PLACES).map(|_| UnixStream::connect(&path).unwrap()).collect();
    until("the places are taken", || answer(&pid, b"{\"do\":\"status\"}\n").contains("16 clients are connected"));
    // Each byte comes in time, and the request never ends.
    until("they have lost their places", || {
        slow.iter_mut().for_each(|client| drop(client.write_all(b" ")));
        answer(&pid, b"{\"do\":\"status\"}\n").starts_with("{\"ok\":")
    });
}

#[test]
fn a_server_that_runs_and_does_not_answer_is_named() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root, whose sockets are in /run/ferry");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let server = shared(directory.path());
    // This process in the place of a server: it accepts and hangs up.
    let pid = std::process::id();
    let path = Path::new("/run/ferry").join(pid.to_string());
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let output = run(ferry().args(["status", "--json"]));
    fs::remove_file(&path).unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.lines().any(|line| line.starts_with(&format!("ferry: process {pid} "))), "{said}");
    // The others are shown.
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let own = i64::from(server.pid().as_raw_nonzero().get());
    assert!(json["servers"].as_array().unwrap().iter().any(|server| server["pid"] == own), "{json}");
}

#[test]
fn names_do_nothing_to_a_terminal() {
    let directory = tempfile::tempdir().unwrap();
    let hostile = directory.path().join("\x1b]0;title\x07\nprocess 1 of user 0");
    fs::create_dir(&hostile).unwrap();
    let server = shared(&hostile);
    let pid = server.pid().as_raw_nonzero().to_string();
    for args in [&[pid.as_str()][..], &[&pid, "--json"]] {
        let said = String::from_utf8(run(ferry().arg("status").args(args)).stdout).unwrap();
        assert!(said.contains("title"), "{said:?}");
        assert!(!said.chars().any(|c| c.is_control() && c != '\n'), "{said:?}");
        assert!(!said.lines().any(|line| line.starts_with("process 1 of")), "{said:?}");
    }
}
