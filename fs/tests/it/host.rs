//! The examples, mounted on this host.
use crate::common;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::suites::{Fsx, Pjdfstest};
use common::{GREET, MISTAKE, Mistaken, Server, WORK, example};
use ferry_fs::fuse;
use ferry_tests::mounts::{ferry, program};
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal};
use tempfile::TempDir;

/// The maximum wait for an expected event.
const SOON: Duration = Duration::from_secs(20);

/// A directory to mount on, which is unmounted when the test ends.
struct Place(TempDir);

impl Place {
    /// `None` where mounting is not possible: it requires root and the device.
    fn new() -> Option<Self> {
        let can = rustix::process::geteuid().is_root() && std::fs::File::open("/dev/fuse").is_ok();
        if !can {
            ferry_skip::skip!("needs root and /dev/fuse");
        }
        can.then(|| Self(tempfile::tempdir().unwrap()))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn is_mounted(&self) -> bool {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        table.contains(&format!(" {} ", self.path().display()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        while self.is_mounted() && rustix::mount::unmount(self.path(), UnmountFlags::DETACH).is_ok() {}
    }
}

/// Runs a script in a directory, with a time limit: a mount that hangs must not block the tests.
#[track_caller]
fn sh(dir: &Path, script: &str) -> String {
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "60", "sh", "-euxc", script]).current_dir(dir).stdin(Stdio::null());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn hello_greets() {
    let Some(place) = Place::new() else { return };
    for path in ["auto", "devfuse"] {
        let mut server = Server::start("hello", "mount", place.path(), &["--path", path, "--tag", "t"]);
        assert!(server.line.contains("mounted on"), "{}", server.line);
        sh(place.path(), GREET);
        server.signal(Signal::TERM);
        assert_eq!(server.status(), Some(0));
        assert!(!place.is_mounted(), "the mount is left behind");
    }
}

#[test]
fn toyfs_works() {
    let Some(place) = Place::new() else { return };
    for (path, cache) in [("auto", "auto"), ("devfuse", "auto"), ("auto", "none"), ("auto", "always")] {
        let mut server = Server::start("toyfs", "mount", place.path(), &["--path", path, "--cache", cache]);
        sh(place.path(), WORK);
        server.signal(Signal::INT);
        assert_eq!(server.status(), Some(0), "{path}, cache {cache}");
    }
}

#[test]
fn toyfs_passes_public_suites() {
    let Some(place) = Place::new() else { return };
    let (pjdfstest, fsx) = (Pjdfstest::new(), Fsx::new());
    for (seed, path) in [(1, "auto"), (2, "devfuse")] {
        let mut server = Server::start("toyfs", "mount", place.path(), &["--path", path, "--allow-other"]);
        pjdfstest.check(place.path().to_str().unwrap(), |script| sh("/".as_ref(), script));
        sh(place.path(), &fsx.script(seed));
        server.signal(Signal::TERM);
        assert_eq!(server.status(), Some(0), "{path}");
    }
}

#[test]
fn a_panic_fails_only_its_caller() {
    let Some(place) = Place::new() else { return };
    for path in [fuse::Path::Auto, fuse::Path::Devfuse] {
        let options = fuse::Options { path, ..fuse::Options::default() };
        let export = fuse::Export::mount(place.path(), Arc::new(Mistaken), options).unwrap();
        sh(place.path(), MISTAKE);
        export.stop();
    }
}

#[test]
fn a_killed_program_mounts_again_on_the_same_place() {
    let Some(place) = Place::new() else { return };
    let mut killed = Server::start("hello", "mount", place.path(), &[]);
    killed.signal(Signal::KILL);
    assert_eq!(killed.status(), None, "a signal ended it");
    assert!(place.is_mounted(), "it could not unmount");
    let mut server = Server::start("hello", "mount", place.path(), &[]);
    sh(place.path(), GREET);
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    assert!(!place.is_mounted(), "the dead mount is left behind");
}

/// Creates, moves, reads and removes files until an error occurs.
const LOAD: &str = r#"
i=0
while :; do
    i=$((i + 1))
    mkdir d$0.$i
    echo text >d$0.$i/file
    mv d$0.$i/file f$0.$i
    test "$(cat f$0.$i)" = text
    ln f$0.$i l$0.$i
    ls >/dev/null
    rm f$0.$i l$0.$i
    rmdir d$0.$i
done
"#;

/// Programs of authors have no guardian: the kernel ends the requests.
#[test]
fn users_of_a_killed_program_get_errors() {
    const CLIENTS: u32 = 4;
    let Some(place) = Place::new() else { return };
    for path in ["auto", "devfuse"].repeat(4) {
        let mut killed = Server::start("toyfs", "mount", place.path(), &["--path", path, "--cache", "always"]);
        let start = |number: u32| {
            let mut command = Command::new("sh");
            command.args(["-ec", LOAD, &number.to_string()]).current_dir(place.path()).stdin(Stdio::null());
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
        };
        let mut clients: Vec<_> = (0..CLIENTS).map(start).collect();
        std::thread::sleep(Duration::from_millis(200));
        for client in &mut clients {
            assert_eq!(client.try_wait().unwrap(), None, "{path}: it works as long as there is a server");
        }
        killed.signal(Signal::KILL);
        let end = Instant::now() + SOON;
        for client in &mut clients {
            while client.try_wait().unwrap().is_none() {
                assert!(Instant::now() < end, "{path}: a client still waits for the dead program");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        assert_eq!(killed.status(), None, "a signal ended it");
        let told = || std::fs::metadata(place.path()).err().and_then(|error| error.raw_os_error());
        while told() != Some(libc::ENOTCONN) {
            assert!(Instant::now() < end, "{path}: {:?} instead of ENOTCONN", told());
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut server = Server::start("toyfs", "mount", place.path(), &["--path", path]);
        sh(place.path(), WORK);
        server.signal(Signal::TERM);
        assert_eq!(server.status(), Some(0), "{path}");
        assert!(!place.is_mounted(), "{path}: the dead mount is left behind");
    }
}

/// Sends a line to a server's control socket; returns its reply, and the connection for further lines.
fn ask(server: &Server, request: &str) -> (String, BufReader<UnixStream>) {
    let pid = u32::try_from(server.pid().as_raw_nonzero().get()).unwrap();
    let endpoint = ferry_control::sockets().into_iter().find(|endpoint| endpoint.pid == pid).expect("it has a socket");
    let mut stream = endpoint.connect().unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    writeln!(stream, "{request}").unwrap();
    let mut lines = BufReader::new(stream);
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    (line, lines)
}

/// Returns what `ferry log` prints about the level and the logged requests.
fn ferry_log(args: &[&str]) -> String {
    let output = ferry(["log"]).args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn ferry_log_shows_and_changes_its_log() {
    let Some(place) = Place::new() else { return };
    let mut server = Server::start("hello", "mount", place.path(), &["--cache", "none", "--tag", "greeting"]);
    let here = place.path().to_str().unwrap();
    let says = |level: &str, requests: &str| {
        let pid = server.pid().as_raw_nonzero();
        format!("process {pid}: level {level}, requests logged: {requests}\n  greeting mounted on {here}\n")
    };
    assert_eq!(ferry_log(&[here]), says("warn", "none"));
    assert_eq!(ferry_log(&[here, "debug"]), says("debug", "none"));
    assert_eq!(ferry_log(&[here, "default"]), says("warn", "none"));
    // Of one file, by its path, until it is ended.
    let file = place.path().join("hello");
    let mut command = Command::new("timeout");
    command.arg("30").arg(program()).arg("log").arg(&file).args(["requests", "--follow"]).stdin(Stdio::null());
    let mut follower = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let comes = |expected: &str| {
        let end = Instant::now() + SOON;
        while ferry_log(&[here]) != expected {
            assert!(Instant::now() < end, "{} instead of {expected}", ferry_log(&[here]));
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    comes(&says("warn", "hello in greeting"));
    sh(place.path(), "stat . && cat hello");
    let mut line = String::new();
    BufReader::new(follower.stdout.take().unwrap()).read_line(&mut line).unwrap();
    // Requests about the root are not logged.
    assert!(line.contains("share=\"greeting\" file=\"/hello\""), "{line:?}");
    rustix::process::kill_process(rustix::process::Pid::from_child(&follower), Signal::TERM).unwrap();
    follower.wait().unwrap();
    comes(&says("warn", "none"));
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

/// Sends the lines of `ferry log` one by one.
#[test]
fn the_log_can_be_followed_and_changed_at_run_time() {
    let Some(place) = Place::new() else { return };
    let mut server = Server::start("hello", "mount", place.path(), &["--cache", "none", "--tag", "greeting"]);
    let (status, _) = ask(&server, r#"{"do":"status"}"#);
    let mount = format!("\"mount\":\"{}\"", place.path().display());
    for word in ["\"ok\"", "\"source\":\"greeting\"", &mount, "\"log\":\"warn\"", "\"requests\":null"] {
        assert!(status.contains(word), "{word} in {status}");
    }
    let (explained, _) = ask(&server, r#"{"do":"explain","share":0}"#);
    assert!(explained.contains("passthrough"), "{explained}");
    // Of one file: its name is a list of bytes.
    let follow = r#"{"do":"log","level":"requests","share":0,"file":[104,101,108,108,111],"follow":true}"#;
    let (status, mut lines) = ask(&server, follow);
    assert!(status.contains("\"requests\":\"hello in greeting\""), "{status}");
    sh(place.path(), "stat . && cat hello");
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    // Requests about the root are not logged.
    assert!(line.contains("share=\"greeting\" file=\"/hello\""), "{line}");
    drop(lines);
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn umount_ends_the_program() {
    let Some(place) = Place::new() else { return };
    let mut server = Server::start("hello", "mount", place.path(), &[]);
    rustix::mount::unmount(place.path(), UnmountFlags::empty()).unwrap();
    assert_eq!(server.status(), Some(0));
}

#[test]
fn nothing_can_be_changed_through_a_read_only_mount() {
    let Some(place) = Place::new() else { return };
    let mut server = Server::start("toyfs", "mount", place.path(), &["--read-only"]);
    sh(place.path(), "! touch x 2>/dev/null; ! mkdir d 2>/dev/null; test -z \"$(ls)\"; df . >/dev/null");
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn mistakes_are_one_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let nowhere = directory.path().join("no/where");
    for (line, words) in [
        (["mount", nowhere.to_str().unwrap()], "hello: "),
        (["mount", file.to_str().unwrap()], "hello: "),
        (["virtiofs", nowhere.to_str().unwrap()], "does not exist; create it first"),
        (["virtiofs", file.to_str().unwrap()], "exists and is not a socket"),
    ] {
        let output = Command::new(example("hello")).args(line).stdin(Stdio::null()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), text.lines().count()), (Some(1), 1), "{line:?}: {text}");
        assert!(text.starts_with("hello: ") && text.contains(words) && text.contains(line[1]), "{text}");
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
}

/// The device of a program tells its tag to a guest that asks, and the program says so where it has none.
#[test]
fn a_program_without_a_tag_names_the_vmms_that_need_one() {
    let directory = tempfile::tempdir().unwrap();
    for (flags, lines) in [(&[][..], 2), (&["--tag", "greeting"], 1)] {
        let socket = directory.path().join("s");
        let mut command = Command::new(example("hello"));
        command.arg("virtiofs").arg(&socket).args(flags).stdin(Stdio::null()).stdout(Stdio::piped());
        let child = command.spawn().unwrap();
        let end = Instant::now() + Duration::from_secs(30);
        while !socket.exists() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        // The lines follow the socket, and a signal that comes before them ends the program after them.
        rustix::process::kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!((output.status.code(), said.lines().count()), (Some(0), lines), "{said}");
        assert_eq!(said.contains("User-mode Linux") && said.contains("--tag"), lines == 2, "{said}");
    }
}
