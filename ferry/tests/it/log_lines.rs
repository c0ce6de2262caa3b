//! Lines that others can cause, or write: how many there are, and what they do to a terminal.
#![allow(missing_docs, clippy::unwrap_used, reason = "a test that cannot go on ends")]

use crate::common;

use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::{Command, Stdio};

use common::{Server, ferry, needs_fuse, run};
use rustix::process::Signal;

/// An unused user id.
const STRANGER: u32 = 64_321;

#[test]
fn readers_of_a_damaged_image_do_not_fill_the_log() {
    needs_fuse!();
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for name in ["tree", "mnt"] {
        fs::create_dir(at(name)).unwrap();
    }
    fs::write(at("tree/file"), vec![7; 100_000]).unwrap();
    let mut build = ferry();
    build.args(["image", "build"]).arg(at("tree")).arg("-o").arg(at("image")).arg("--store").arg(at("store"));
    let output = run(&mut build);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let packs = fs::read_dir(at("store/packs")).unwrap().map(|entry| entry.unwrap().path());
    // A pack is named by its digest alone.
    for pack in packs.filter(|path| path.is_file() && path.extension().is_none()) {
        fs::set_permissions(&pack, Permissions::from_mode(0o644)).unwrap();
        fs::File::options().write(true).open(pack).unwrap().write_all_at(b"damaged", 50_000).unwrap();
    }
    let mut mount = ferry();
    mount.arg("mount").arg(format!("image:{}", at("image").display())).arg(at("mnt")).arg("--store").arg(at("store"));
    let mut mounted =
        mount.args(["--foreground", "--json"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut byte = [0];
    mounted.stdout.take().unwrap().read_exact(&mut byte).unwrap();
    for _ in 0..200 {
        fs::read(at("mnt/file")).unwrap_err();
    }
    common::place::unmount(&at("mnt"));
    common::wait(&mut mounted);
    let mut log = String::new();
    mounted.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    let lines = log.lines().filter(|line| line.contains("its readers get EIO")).count();
    // Ten in ten seconds, and reading took no longer.
    assert!((1..=20).contains(&lines), "{lines} lines:\n{log}");
}

#[test]
fn log_lines_of_other_users_are_escaped_for_root() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root, to run a server as another user");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
    // Sets the title of a terminal, clears it, and pretends to be another server's line.
    let hostile = directory.path().join("\x1b]0;title\x07\u{9b}2J\nprocess 1: level off");
    fs::create_dir(&hostile).unwrap();
    std::os::unix::fs::chown(&hostile, Some(STRANGER), None).unwrap();
    let mut command = Command::new("setpriv");
    command.args([format!("--reuid={STRANGER}"), format!("--regid={STRANGER}"), "--clear-groups".into()]);
    command.arg(ferry().get_program()).env_remove("FERRY_LOG").env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null());
    command.arg("share").arg(&hostile).arg("--virtiofs").arg(hostile.join("s"));
    let mut server = Server::start(command.args(["--sandbox", "none", "--seccomp", "none"]));
    let pid = server.pid().as_raw_nonzero().to_string();
    for args in [&[][..], &["--json"], &[&pid], &[&pid, "--json"], &[&pid, "info"]] {
        let output = run(ferry().arg("log").args(args));
        let said = String::from_utf8(output.stdout).unwrap() + std::str::from_utf8(&output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert!(said.contains("title") && said.contains(&pid), "{args:?}: {said:?}");
        assert!(!said.chars().any(|c| c.is_control() && c != '\n'), "{args:?}: {said:?}");
        assert!(!said.lines().any(|line| line.starts_with("process 1:")), "{args:?}: {said:?}");
        if args.contains(&"--json") {
            let json: serde_json::Value = serde_json::from_str(&said).unwrap();
            assert!(json.to_string().contains("title"), "{json}");
        }
    }
    // Its socket is that user's, as the kernel says; of a directory only the server says what it serves.
    assert_eq!(run(ferry().arg("log").arg(hostile.join("s"))).status.code(), Some(0));
    let output = run(ferry().arg("log").arg(&hostile));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.contains("by their process ids"), "{said:?}");
    let output = run(ferry().arg("log").arg(hostile.join("none")));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.lines().count() == 1, "{said:?}");
    assert!(!said.trim_end().chars().any(char::is_control), "{said:?}");
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}
