//! `ferry share` as a user meets it: what it says, its status, and what it leaves behind.

use crate::certificates;
use crate::common;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use certificates::Certificates;
use common::{Server, ferry, refused, run};
use rustix::process::Signal;

#[test]
fn serves_until_a_signal() {
    for signal in [Signal::TERM, Signal::INT] {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("s");
        let mut server = Server::start(ferry().arg("share").arg(directory.path()).arg("--virtiofs").arg(&socket));
        assert_eq!(server.line["shares"][0]["virtiofs"], socket.to_str().unwrap());
        assert!(socket.exists());
        server.signal(signal);
        assert_eq!(server.status(), Some(0));
        assert!(!socket.exists(), "the socket is left behind");
    }
}

/// If SIGCHLD is ignored, the kernel reaps children silently, and Ferry has children from its start.
#[test]
fn serves_also_if_its_parent_ignores_the_end_of_children() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' CHLD; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_ferry"), "share"]).stdin(Stdio::null());
    let mut server = Server::start(shell.arg(directory.path()).arg("--virtiofs").arg(&socket));
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
    let ignored = u64::from_str_radix(ignored, 16).unwrap();
    assert_eq!(ignored >> (Signal::CHILD.as_raw() - 1) & 1, 0, "{status}");
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    assert!(!socket.exists());
}

/// Only with --tag the device tells its guest what to mount.
#[test]
fn the_log_names_the_mounts_of_a_guest() {
    for (flags, words) in [(&[][..], "the device, which needs --tag NAME"), (&["--tag", "work"], "tag=\"work\"")] {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let mut share = ferry();
        share.arg("share").arg(directory.path()).arg("--virtiofs").arg(directory.path().join("s")).args(flags);
        share.stdout(Stdio::null()).stderr(fs::File::create(&log).unwrap());
        let mut server = share.spawn().unwrap();
        let said = || fs::read_to_string(&log).unwrap();
        common::place::until("it is shared", || said().contains("sharing"));
        let said = said();
        assert!(said.contains(words) && said.contains("tag=") != flags.is_empty(), "{flags:?}: {said}");
        rustix::process::kill_process(rustix::process::Pid::from_child(&server), Signal::TERM).unwrap();
        assert_eq!(common::wait(&mut server), Some(0));
    }
}

#[test]
fn a_group_may_connect_too() {
    use std::os::unix::fs::MetadataExt;
    const GROUP: u32 = 4321;
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root, to give files away");
        return;
    }
    for sockets in [&["--virtiofs", "s"][..], &["--9p", "unix:s"], &["--9p", "vhost-user:s"]] {
        let directory = tempfile::tempdir().unwrap();
        let share = || {
            let mut command = ferry();
            command.args(["share", "mem"]).args(sockets).current_dir(directory.path());
            command
        };
        let server = Server::start(share().args(["--socket-group", &GROUP.to_string()]));
        let found = fs::metadata(directory.path().join("s")).unwrap();
        let found = (found.uid(), found.gid(), found.permissions().mode() & 0o777);
        assert_eq!(found, (0, GROUP, 0o660), "{sockets:?}");
        drop(server);
        let text = refused(1, share().args(["--socket-group", "no-such-group"]));
        assert!(text.contains("no group \"no-such-group\""), "{text}");
    }
}

/// Whoever could be taken for the keeper of a guest's state would be handed its memory.
#[test]
fn state_is_kept_in_a_directory_of_this_users_own_alone() {
    /// An unused user id.
    const STRANGER: u32 = 64_321;
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let share = |program: &mut Command, socket: &str| {
        let mut command = std::mem::replace(program, Command::new(""));
        command.arg("share").arg(at("dir")).arg("--virtiofs").arg(at(socket)).arg("--state").arg(at("state"));
        command.args(["--sandbox", "none", "--seccomp", "none"]);
        command
    };
    for name in ["dir", "state", "theirs"] {
        fs::create_dir(at(name)).unwrap();
    }
    let mode = |mode: u32| fs::set_permissions(at("state"), fs::Permissions::from_mode(mode)).unwrap();
    let is_refused = |expected: &str| {
        let said = refused(1, &mut share(&mut ferry(), "s"));
        assert!(said.contains("--state ") && said.contains(expected), "{said}");
        assert!(!at("s").exists(), "the socket is left behind");
    };
    mode(0o755);
    is_refused("others may enter the directory, which has mode 0755; it must be this user's alone: chmod 0700");
    mode(0o700);
    fs::rename(at("state"), at("real")).unwrap();
    std::os::unix::fs::symlink(at("real"), at("state")).unwrap();
    is_refused("symbolic link");
    fs::remove_file(at("state")).unwrap();
    fs::rename(at("real"), at("state")).unwrap();
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root, to run a server as another user");
        return;
    }
    let owner = |uid: u32| std::os::unix::fs::chown(at("state"), Some(uid), None).unwrap();
    owner(STRANGER);
    is_refused("the directory belongs to user 64321, and this server runs as user 0");
    // The directory was theirs, and so is the keeper in it.
    std::os::unix::fs::chown(at("theirs"), Some(STRANGER), None).unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new("setpriv");
    command.args([format!("--reuid={STRANGER}"), format!("--regid={STRANGER}"), "--clear-groups".into()]);
    command.arg(ferry().get_program()).env_remove("FERRY_LOG").stdin(std::process::Stdio::null());
    let theirs = Server::start(&mut share(&mut command, "theirs/s"));
    owner(0);
    is_refused("what listens there belongs to user 64321, not to user 0");
    drop(theirs);
}

/// One that has ended before its server is no zombie until that ends.
#[test]
fn a_killed_keeper_ends_at_once() {
    for sandbox in ["namespace", "none"] {
        let directory = tempfile::tempdir().unwrap();
        let (socket, state) = (directory.path().join("s"), directory.path().join("state"));
        fs::create_dir(&state).unwrap();
        fs::set_permissions(&state, fs::Permissions::from_mode(0o700)).unwrap();
        let mut share = ferry();
        share.arg("share").arg(directory.path()).arg("--virtiofs").arg(&socket).arg("--state").arg(&state);
        let mut server = Server::start(share.args(["--sandbox", sandbox]));
        let line = [b"ferry-keeper\0", state.join("keeper").as_os_str().as_encoded_bytes(), b"\0"].concat();
        let status = |pid: &str| fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let processes =
            || fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
        let keeper = processes().find(|pid| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|found| found == line));
        let keeper = keeper.expect("a keeper");
        let parent = format!("PPid:\t{}\n", server.pid().as_raw_nonzero());
        assert!(!status(&keeper).contains(&parent), "{sandbox}: {}", status(&keeper));
        let pid = rustix::process::Pid::from_raw(keeper.parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
        common::place::until("it is gone", || !common::place::runs(pid));
        assert!(!processes().any(|pid| status(&pid).contains(&parent) && status(&pid).contains("State:\tZ")));
        server.signal(Signal::TERM);
        assert_eq!(server.status(), Some(0));
    }
}

#[test]
fn file_handles_that_are_insisted_on_and_may_not_be_opened_are_refused() {
    if !rustix::process::geteuid().is_root() {
        ferry_skip::skip!("needs root, to do without a capability");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for (when, is_refused) in [("mandatory", true), ("prefer", false)] {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-dac_read_search", "--inh-caps", "-dac_read_search"]);
        command.arg(ferry().get_program()).args(["share", ".", "--virtiofs", "s", "--inode-file-handles", when]);
        command.current_dir(directory.path()).env_remove("FERRY_LOG").stdin(std::process::Stdio::null());
        if is_refused {
            let text = refused(1, &mut command);
            assert!(text.contains("--inode-file-handles mandatory: "), "{text}");
            assert!(
                text.contains("has no file handles, or this user may not open them (CAP_DAC_READ_SEARCH)"),
                "{text}"
            );
            assert!(!directory.path().join("s").exists(), "the socket is left behind");
        } else {
            Server::start(&mut command);
        }
    }
}

/// Tversion and its answer, as Linux sends and expects them (intro(5)).
fn speaks_9p(stream: &mut (impl Read + Write)) {
    stream.write_all(b"\x15\0\0\0\x64\xff\xff\0\0\x10\0\x08\09P2000.L").expect("it listens");
    let mut answer = [0; 21];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer, b"\x15\0\0\0\x65\xff\xff\0\0\x10\0\x08\09P2000.L");
}

#[test]
fn serves_9p_clients() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("a")).unwrap();
    let line = "share a --9p unix:n.sock a --9p tcp:127.0.0.1:0 mem --virtiofs v.sock --9p-users 5:6 --9p tcp:[::1]:0";
    // Not every machine has the last.
    let has_ipv6 = std::net::TcpListener::bind("[::1]:0").is_ok();
    let words = line.split(' ').take(if has_ipv6 { usize::MAX } else { 7 });
    let mut server = Server::start(ferry().current_dir(directory.path()).args(words));
    let address = |server: &Server, share: usize| server.line["shares"][share]["9p"].as_str().unwrap().to_owned();
    let socket = directory.path().join("n.sock");
    assert!(address(&server, 0).ends_with("/n.sock") && address(&server, 0).starts_with("unix:/"));
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    speaks_9p(&mut UnixStream::connect(&socket).unwrap());
    let tcp = address(&server, 1);
    speaks_9p(&mut TcpStream::connect(tcp.strip_prefix("tcp:").unwrap()).unwrap());
    if has_ipv6 {
        assert!(server.line["shares"][2]["virtiofs"].is_string());
        speaks_9p(&mut TcpStream::connect(address(&server, 2).strip_prefix("tcp:").unwrap()).unwrap());
    }
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    assert!(!socket.exists(), "the socket is left behind");
}

#[test]
fn limits_of_9p_clients_are_kept() {
    let directory = tempfile::tempdir().unwrap();
    let line = "share mem --9p unix:n.sock --9p-msize 64K --9p-connections 2 --9p-idle 1 --9p-no-read-ahead \
                mem --9p unix:slow.sock --9p-slow 1";
    let _server = Server::start(ferry().current_dir(directory.path()).args(line.split_whitespace()));
    let connect = |name: &str| {
        let stream = UnixStream::connect(directory.path().join(name)).unwrap();
        stream.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        stream
    };
    // Going on after a signal, as a process that was stopped for a while has to (signal(7)).
    let is_ended = |mut stream: UnixStream| {
        assert_eq!(stream.read_to_end(&mut Vec::new()).unwrap(), 0, "it is not ended");
    };
    let mut first = connect("n.sock");
    first.write_all(b"\x15\0\0\0\x64\xff\xff\0\0\x10\0\x08\09P2000.L").unwrap();
    let mut answer = [0; 21];
    first.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"\x15\0\0\0\x65\xff\xff\0\0\x01\0\x08\09P2000.L");
    let second = connect("n.sock");
    is_ended(connect("n.sock"));
    is_ended(first);
    is_ended(second);
    is_ended(connect("slow.sock"));
}

#[test]
fn tcp_for_other_machines_needs_a_flag() {
    let text = refused(1, ferry().args(["share", "mem", "--9p", "tcp:0.0.0.0:0"]));
    assert!(text.contains("--9p-remote") && text.contains("other machines"), "{text}");
    let text = refused(2, ferry().args(["share", "mem", "--9p", "unix:s", "mem", "--9p", "unix:s"]));
    assert!(text.contains("unix:s is given twice"), "{text}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", taken.local_addr().unwrap());
    let text = refused(1, ferry().args(["share", "mem", "--9p", &address]));
    assert!(text.contains(&address) && text.contains("in use"), "{text}");
    let mut server = Server::start(ferry().args(["share", "mem", "--9p", "tcp:0.0.0.0:0", "--9p-remote"]));
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

/// 9P with TLS as a user sets it up, with OpenSSL at the other end; and what is said when the files are wrong.
#[test]
fn serves_9p_by_tls() {
    let directory = tempfile::tempdir().unwrap();
    let openssl = |line: &str| {
        let made = Command::new("openssl").args(line.split(' ')).current_dir(directory.path()).output().unwrap();
        assert!(made.status.success(), "{made:?}");
    };
    for name in ["a", "b"] {
        let key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost -extensions usr_cert";
        openssl(&format!("req -x509 {key} -keyout {name}.key -out {name}.pem"));
    }
    let line = "share mem --9p tls:127.0.0.1:0 --tls-cert a.pem --tls-key";
    let share = |more: &str| {
        let mut ferry = ferry();
        ferry.current_dir(directory.path()).args(line.split(' ')).args(more.split(' '));
        ferry
    };
    for (more, words) in [
        ("b.key", "the key in /b.key does not belong to the certificate in /a.pem"),
        ("a.pem", "/a.pem holds no private key"),
        ("gone", "cannot read /gone: No such file"),
        ("a.key --tls-client-ca a.key", "/a.key holds no certificate"),
    ] {
        let text = refused(1, &mut share(more));
        let words = words.replace('/', &format!("{}/", directory.path().display()));
        assert!(text.contains(&words), "{text}");
    }
    let output = run(ferry().args(["share", "mem", "--9p", "tls:127.0.0.1:0"]));
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("--tls-cert and --tls-key"), "{text}");

    let mut server = Server::start(&mut share("a.key --tls-client-ca b.pem"));
    let address = server.line["shares"][0]["9p"].as_str().unwrap().strip_prefix("tls:").unwrap().to_owned();
    let client = |certificate: &str| {
        let line =
            format!("s_client -quiet -connect {address} -CAfile a.pem -cert {certificate}.pem -key {certificate}.key");
        let mut client = Command::new("openssl");
        client.args(line.split(' ')).current_dir(directory.path());
        client.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        client.stderr(std::process::Stdio::null()).spawn().unwrap()
    };
    let mut friend = client("b");
    speaks_9p(&mut Both(friend.stdin.take().unwrap(), friend.stdout.take().unwrap()));
    friend.kill().unwrap();
    friend.wait().unwrap();
    let mut stranger = client("a");
    let mut answer = Vec::new();
    stranger.stdout.take().unwrap().read_to_end(&mut answer).unwrap();
    stranger.wait().unwrap();
    assert!(answer.is_empty(), "{answer:?}");
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

/// A server by TLS that is shared again, and what is said when it cannot be.
#[test]
fn uses_servers_of_9p_by_tls() {
    let certificates = Certificates::new();
    certificates.authority("ca").signed("server", "ca", 2).signed("client", "ca", 2);
    let at = |line: &str| {
        let mut ferry = ferry();
        ferry.current_dir(certificates.path("")).args(line.split(' '));
        ferry
    };
    let line = "share mem --9p tls:127.0.0.1:0 --tls-cert server.pem --tls-key server.key --tls-client-ca ca.pem";
    let mut server = Server::start(&mut at(line));
    let address = server.line["shares"][0]["9p"].as_str().unwrap().to_owned();
    let flags = "--server-ca ca.pem --client-cert client.pem --client-key client.key";
    let mut again = Server::start(&mut at(&format!("share 9p:{address} {flags} --9p unix:again")));
    speaks_9p(&mut UnixStream::connect(certificates.path("again")).unwrap());
    for (flags, words) in [
        ("--server-ca ca.pem", "wants a client's certificate"),
        ("--server-ca server.pem --client-cert client.pem --client-key client.key", "none of the authorities"),
        ("--server-ca server.key", "server.key holds no certificate"),
    ] {
        let text = refused(1, &mut at(&format!("share 9p:{address} {flags} --9p unix:never")));
        assert!(text.contains(words), "{text}");
    }
    for (source, words) in [
        (&*format!("9p:{address}"), "needs --server-ca"),
        ("9p:tcp:127.0.0.1:1 --server-ca ca.pem", "server-ca is for servers with TLS"),
        ("mem --server-ca ca.pem", "server-ca is for 9p:SERVER"),
    ] {
        let output = run(&mut at(&format!("share {source} --9p unix:never")));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && text.contains(words), "{text}");
    }
    for server in [&mut again, &mut server] {
        server.signal(Signal::TERM);
        assert_eq!(server.status(), Some(0));
    }
}

/// The two ends of a program's pipes.
struct Both<W, R>(W, R);

impl<W, R: Read> Read for Both<W, R> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.1.read(bytes)
    }
}

impl<W: Write, R> Write for Both<W, R> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

#[test]
fn serves_several_directories() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        fs::create_dir(directory.path().join(name)).unwrap();
    }
    let mut server =
        Server::start(
            ferry()
                .current_dir(directory.path())
                .args(["share", "a", "--virtiofs", "a.sock", "--tag", "first"])
                .args(["b", "--virtiofs", "b.sock", "--read-only", "--queues", "3"]),
        );
    let shares = server.line["shares"].as_array().unwrap();
    assert_eq!(shares.len(), 2);
    assert_eq!((&shares[0]["tag"], &shares[0]["read_only"]), (&"first".into(), &false.into()));
    assert_eq!((&shares[1]["tag"], &shares[1]["read_only"]), (&"b".into(), &true.into()));
    assert_eq!(shares[1]["queues"], 3);
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn serves_the_shares_of_a_file() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("data")).unwrap();
    let file = directory.path().join("ferry.toml");
    fs::write(&file, "[[share]]\ndir = \"data\"\nvirtiofs = \"s\"\ncache = \"always\"\n").unwrap();
    let mut server = Server::start(ferry().arg("share").arg("--config").arg(&file));
    assert_eq!(server.line["shares"][0]["tag"], "data");
    assert!(directory.path().join("s").exists(), "paths are relative to the file");
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn serves_an_inherited_socket() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("s")).unwrap();
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&listener).to_string();
    let mut server = Server::start(ferry().arg("share").arg(directory.path()).args(["--fd", &number]));
    assert_eq!(server.line["shares"][0]["fd"].to_string(), number);
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
    assert!(directory.path().join("s").exists(), "an inherited socket's file is its maker's");
}

#[test]
fn replaces_a_stale_socket() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let mut killed = Server::start(ferry().arg("share").arg(directory.path()).arg("--virtiofs").arg(&socket));
    killed.signal(Signal::KILL);
    killed.status();
    assert!(socket.exists(), "a killed server cannot remove its socket");
    let mut server = Server::start(ferry().arg("share").arg(directory.path()).arg("--virtiofs").arg(&socket));
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn refuses_a_socket_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let mut server = Server::start(ferry().arg("share").arg(directory.path()).arg("--virtiofs").arg(&socket));
    let text = refused(1, ferry().arg("share").arg(directory.path()).arg("--virtiofs").arg(&socket));
    assert!(text.contains(socket.to_str().unwrap()) && text.contains("in use"), "{text}");
    assert!(socket.exists());
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

#[test]
fn refuses_unshareable_paths() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    let good = directory.path().to_str().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let cases: [(&[&str], &[&str]); 7] = [
        (&[&at("missing"), "--virtiofs", &at("s")], &["missing"]),
        (&[&at("file"), "--virtiofs", &at("s")], &["file", "directory"]),
        (&[good, "--virtiofs", &at("file")], &["file", "not a socket"]),
        (&[good, "--virtiofs", &at("no/s")], &["no/s", "does not exist"]),
        (&[good, "--virtiofs", &at("s"), good, "--virtiofs", &at("s")], &["given twice"]),
        (&[good, "--fd", "77"], &["descriptor 77 is not open"]),
        (&["--config", &at("missing.toml")], &["missing.toml"]),
    ];
    for (args, words) in cases {
        let status = if words.contains(&"given twice") { 2 } else { 1 };
        let text = refused(status, ferry().arg("share").args(args));
        for word in words {
            assert!(text.contains(word), "{args:?}: {text}");
        }
        assert!(!directory.path().join("s").exists(), "{args:?} leaves a socket behind");
    }
}

#[test]
fn refuses_a_directory_without_permission() {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let closed = directory.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
    // A copy that anybody may start, wherever the build directory is. Made by another process: a descriptor of ours that
    // writes to it could leak into a child of another test, and a program that is being written cannot be started.
    let program = directory.path().join("ferry");
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_ferry")).arg(&program).status().unwrap().success());
    let mut command = Command::new(&program);
    if rustix::process::geteuid().is_root() {
        command.uid(65534).gid(65534);
    }
    let text = refused(1, command.arg("share").arg(&closed).arg("--virtiofs").arg(directory.path().join("s")));
    assert!(text.contains("closed") && text.contains("may not"), "{text}");
}

#[test]
fn usage_hides_flags_set_by_the_environment() {
    for args in [&["mount"][..], &["log", "--follow"], &["share"]] {
        let output = run(ferry().env("FERRY_LOG", "debug").args(args));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && text.contains("Usage: "), "{text}");
        assert!(!text.contains("--log "), "{text}");
    }
    // It is unchanged nevertheless.
    let wrong = run(ferry().env("FERRY_LOG", "debgu").args(["share", "mem", "--virtiofs", "/no/such/directory/s"]));
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("did you mean debug?"), "{wrong:?}");
}

#[test]
fn errors_name_flags_as_they_are_typed() {
    for (args, words) in [
        (&["share", "/", "--virtiofs", "s", "--size", "1G"][..], "--size is for the sources mem"),
        (&["mount", "mem", "/mnt", "--patience", "5"], "--patience is for 9p:SERVER"),
        (&["share", "image:i", "--virtiofs", "s"], "needs --store,"),
        (&["disk", "image:i", "--vhost-user", "s"], "needs --store,"),
        (&["disk", "f", "--vhost-user", "s", "--store", "d"], "--store is for image:PATH"),
    ] {
        let output = run(ferry().args(args));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && text.contains(words), "{text}");
    }
}

/// The lines for OpenSSL in docs/guide/tls.md, which --help has, too: what they make is taken on both sides.
#[test]
fn the_recipe_for_certificates_works() {
    let docs = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/tls.md")).unwrap();
    let recipe = docs.split("```").nth(1).unwrap().strip_prefix("sh\n").unwrap();
    let help = String::from_utf8(run(ferry().args(["share", "--help"])).stdout).unwrap();
    let indented: String = recipe.lines().map(|line| format!("  {line}\n")).collect();
    assert!(help.contains(indented.trim_end()), "{help}");
    let directory = tempfile::tempdir().unwrap();
    let (making, using) = recipe.split_once("ferry share ").unwrap();
    let making = making.replace("HOST", "localhost");
    let made = Command::new("sh").args(["-euc", &making]).current_dir(directory.path()).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let (share, mount) = using.split_once("ferry mount ").unwrap();
    let words = |line: &str| line.split_whitespace().filter(|word| *word != "\\").map(String::from).collect::<Vec<_>>();
    let in_directory = |words: &[String]| {
        let mut ferry = ferry();
        ferry.current_dir(directory.path()).args(words);
        ferry
    };
    let replaced = share.replace("/srv/src", "mem").replace("0.0.0.0:564", "127.0.0.1:0");
    let mut server = Server::start(&mut in_directory(&[vec!["share".into()], words(&replaced)].concat()));
    let address = server.line["shares"][0]["9p"].as_str().unwrap().to_owned();
    let port = address.rsplit_once(':').unwrap().1;
    // What mounts does, shares do: they connect, and need no right to mount.
    let replaced = mount.replace("HOST:564", &format!("localhost:{port}")).replace("/mnt", "--9p unix:again");
    let mut again = Server::start(&mut in_directory(&[vec!["share".into()], words(&replaced)].concat()));
    speaks_9p(&mut UnixStream::connect(directory.path().join("again")).unwrap());
    // Without extensions the same tools make what is refused, with the file and the remedy.
    let old = "openssl x509 -req -in me.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 9 -out me.pem";
    let old = Command::new("sh").args(["-euc", old]).current_dir(directory.path()).output().unwrap();
    assert!(old.status.success(), "{}", String::from_utf8_lossy(&old.stderr));
    let text =
        refused(1, &mut in_directory(&[vec!["share".into()], words(&replaced.replace("again", "never"))].concat()));
    assert!(text.contains("/me.pem cannot be used") && text.contains("-copy_extensions copy"), "{text}");
    for server in [&mut again, &mut server] {
        server.signal(Signal::TERM);
        assert_eq!(server.status(), Some(0));
    }
}

#[test]
fn refuses_unknown_keys_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("f.toml");
    fs::write(&file, "[[share]]\ndir = \"/tmp\"\nvirtiofs = \"s\"\nreadonly = true\n").unwrap();
    let text = refused(2, ferry().arg("share").arg("--config").arg(&file));
    assert!(text.contains("f.toml") && text.contains("line 4") && text.contains("`readonly`"), "{text}");
}

#[test]
fn usage_errors_have_a_status_of_their_own() {
    for args in [
        vec![],
        vec!["share"],
        vec!["share", "/tmp"],
        vec!["share", "/tmp", "--virtiofs", "s", "--tag", "a", "--tag", "b"],
        vec!["share", "/tmp", "--virtiofs", "s", "--tag", "0123456789012345678901234567890123456"],
        vec!["share", "/tmp", "--virtiofs", "s", "--cache", "some"],
        vec!["share", "--tag", "a", "/tmp", "/var", "--virtiofs", "s"],
        vec!["sail"],
        vec!["try"],
        vec!["try", "/tmp", "--memory", "much"],
    ] {
        let output = run(ferry().args(&args));
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn help_has_lines_to_copy() {
    let output = run(ferry().args(["share", "--help"]));
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    for line in ["share=on -numa node,memdev=mem", "<source socket=", "--memory size=4G,shared=on", "mount -t virtiofs"]
    {
        assert!(text.contains(line), "{line}");
    }
}

#[test]
fn documents_come_from_the_same_table() {
    let page = String::from_utf8(run(ferry().args(["man", "share"])).stdout).unwrap();
    assert!(page.contains("\\-\\-read\\-only") && page.contains("vhost\\-user\\-fs\\-pci"), "{page}");
    for shell in ["bash", "zsh", "fish"] {
        let script = String::from_utf8(run(ferry().args(["completions", shell])).stdout).unwrap();
        assert!(script.contains("read-only"), "{shell}");
    }
    let unknown = refused(2, ferry().args(["man", "sail"]));
    assert!(unknown.contains("has no command \"sail\"; its commands are ") && unknown.contains("share"), "{unknown}");
    refused(2, ferry().args(["man", "image", "sail"]));
    refused(2, ferry().args(["man", "share", "sail"]));
}

#[test]
fn each_page_that_a_page_refers_to_exists() {
    let directory = tempfile::tempdir().unwrap();
    assert!(run(ferry().args(["man", "--all"]).arg(directory.path())).status.success());
    let build = run(ferry().args(["man", "image", "build"])).stdout;
    assert_eq!(build, fs::read(directory.path().join("ferry-image-build.1")).unwrap());
    let mut references = 0;
    for file in fs::read_dir(directory.path()).unwrap() {
        let page = fs::read_to_string(file.unwrap().path()).unwrap().replace('\\', "");
        for (before, _) in page.match_indices("(1)").map(|(at, _)| page.split_at(at)) {
            let name = before.rsplit([' ', '\n']).next().unwrap();
            assert!(directory.path().join(format!("{name}.1")).exists(), "{name}");
            references += 1;
        }
    }
    assert!(references > 10, "{references}");
}

#[test]
fn events_without_a_watch_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (dir, socket) = (directory.path().join("d"), directory.path().join("s"));
    fs::create_dir_all(dir.join("below")).unwrap();
    let share = |source: &Path, flags: &[&str]| {
        let mut command = ferry();
        command.arg("share").arg(source).arg("--events").args(flags);
        command
    };
    let said = |command: &mut Command| {
        let output = run(command);
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for (flags, why) in [
        (&["--writeback"][..], "--events and --writeback exclude each other"),
        (&["--watch", "never"], "--events needs to watch the directory"),
    ] {
        let said = said(share(&dir, flags).arg("--virtiofs").arg(&socket));
        assert!(said.contains(why), "{flags:?}: {said}");
    }
    let device = said(share(&dir, &["--9p"]).arg(format!("vhost-user:{}", socket.display())));
    assert!(device.contains("--events is for virtual machines and for 9P clients that are Ferry"), "{device}");
    // Of another server's files only Ferry's tells what happens, and only if it is to.
    let of_server = said(share(Path::new("9p:unix:/absent"), &["--cache", "always", "--virtiofs"]).arg(&socket));
    assert!(of_server.contains("--events with --cache always or metadata is for files of this host"), "{of_server}");
    let plain = directory.path().join("p");
    let address = format!("unix:{}", plain.display());
    let server = Server::start(ferry().arg("share").arg(&dir).args(["--9p", &address]));
    let output = run(share(Path::new(&format!("9p:{address}")), &["--virtiofs"]).arg(&socket));
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && why.contains("sends no events"), "{why}");
    drop(server);
    // Files in memory are served: there is a server to be found.
    let memory = directory.path().join("m");
    let mut child = share(Path::new("mem"), &["--virtiofs"]).arg(&memory).spawn().unwrap();
    let start = std::time::Instant::now();
    while !memory.exists() {
        assert!(
            start.elapsed().as_secs() < 30 && child.try_wait().unwrap().is_none(),
            "mem with --events does not listen"
        );
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // Without file handles, as without root, inotify reports changes without their author.
    let trusting = &["--inode-file-handles", "never", "--cache", "always", "--virtiofs"];
    let output = run(share(&dir, trusting).arg(&socket));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("--events with --cache always"), "{said}");
    let mut both = share(&dir, &["--virtiofs"]);
    let output = run(both.arg(&socket).arg(dir.join("below")).arg("--virtiofs").arg(directory.path().join("t")));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("overlaps with another shared directory"), "{said}");
    assert!(!socket.exists());
}
