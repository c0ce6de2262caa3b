//! What a service manager such as systemd gets and gives: READY=1 and STOPPING=1 from the process that it started, and
//! listening sockets that shares and disks take by their addresses.

use crate::common;

use std::fs;
use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{ferry, refused, wait};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, sockopt};
use rustix::process::{Pid, Signal};

/// Far more than a start takes.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Long enough for a message that must not come.
const MOMENT: Duration = Duration::from_millis(300);

/// A notification socket.
pub struct Manager {
    socket: UnixDatagram,
    path: std::path::PathBuf,
}

impl Manager {
    pub fn new(directory: &Path) -> Self {
        let path = directory.join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        sockopt::set_socket_passcred(&socket, true).unwrap();
        Self { socket, path }
    }

    pub fn start(&self, command: &mut Command) -> Child {
        command.env("NOTIFY_SOCKET", &self.path).stdout(Stdio::null()).spawn().unwrap()
    }

    /// The next message and who has sent it.
    pub fn next(&self, patience: Duration) -> Option<(String, i32)> {
        self.socket.set_read_timeout(Some(patience)).unwrap();
        let mut bytes = [0; 256];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut buffers = [IoSliceMut::new(&mut bytes)];
        let length = rustix::net::recvmsg(&self.socket, &mut buffers, &mut control, RecvFlags::empty()).ok()?.bytes;
        let sender = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmCredentials(who) => Some(who.pid.as_raw_nonzero().get()),
            _ => None,
        });
        let sender = sender.unwrap();
        Some((String::from_utf8(bytes[..length].to_vec()).unwrap(), sender))
    }
}

pub fn signal(child: &Child, signal: Signal) {
    rustix::process::kill_process(Pid::from_child(child), signal).unwrap();
}

/// However many processes a start makes, the one that the manager knows says both, once each, and only when all sockets are there.
#[test]
fn the_started_process_notifies_ready_and_stopping() {
    let directory = tempfile::tempdir().unwrap();
    let manager = Manager::new(directory.path());
    let tree = directory.path().join("tree");
    fs::create_dir(&tree).unwrap();
    let (one, two) = (directory.path().join("one"), directory.path().join("two"));
    for disk in [&one, &two] {
        fs::write(disk, [0; 4096]).unwrap();
    }
    let socket = |name: &str| directory.path().join(name);
    let config = directory.path().join("both.toml");
    fs::write(
        &config,
        "[[share]]\nsource = \"tree\"\nvirtiofs = \"a\"\n\n[[disk]]\nfile = \"one\"\nvhost-user = \"b\"\n",
    )
    .unwrap();
    let mut share = ferry();
    share.arg("share").arg(&tree).arg("--virtiofs").arg(socket("a"));
    let mut open_share = ferry();
    open_share.arg("share").arg(&tree).arg("--virtiofs").arg(socket("a")).args([
        "--sandbox",
        "none",
        "--seccomp",
        "none",
    ]);
    let mut disk = ferry();
    disk.arg("disk").arg(&one).arg("--vhost-user").arg(socket("a"));
    let mut disks = ferry();
    disks.arg("disk").arg(&one).arg("--vhost-user").arg(socket("a")).arg(&two).arg("--vhost-user").arg(socket("b"));
    let mut both = ferry();
    both.arg("share").arg("--config").arg(&config);
    for (command, sockets) in [(share, 1), (open_share, 1), (disk, 1), (disks, 2), (both, 2)] {
        let mut command = command;
        let mut child = manager.start(&mut command);
        let pid = i32::try_from(child.id()).unwrap();
        assert_eq!(manager.next(PATIENCE), Some(("READY=1".into(), pid)), "{command:?}");
        for name in ["a", "b"].iter().take(sockets) {
            UnixStream::connect(socket(name)).unwrap_or_else(|error| panic!("{command:?}: {name}: {error}"));
        }
        assert_eq!(manager.next(MOMENT), None, "{command:?}");
        signal(&child, Signal::TERM);
        assert_eq!(manager.next(PATIENCE), Some(("STOPPING=1".into(), pid)), "{command:?}");
        assert_eq!(wait(&mut child), Some(0), "{command:?}");
        assert_eq!(manager.next(MOMENT), None, "{command:?}");
    }
}

#[test]
fn a_mount_is_ready_when_it_can_be_used() {
    common::needs_fuse!();
    let directory = tempfile::tempdir().unwrap();
    let manager = Manager::new(directory.path());
    let mountpoint = directory.path().join("mnt");
    fs::create_dir(&mountpoint).unwrap();
    let mut child = manager.start(ferry().args(["mount", "mem", "--foreground"]).arg(&mountpoint));
    let pid = i32::try_from(child.id()).unwrap();
    assert_eq!(manager.next(PATIENCE), Some(("READY=1".into(), pid)));
    fs::write(mountpoint.join("file"), "there").unwrap();
    signal(&child, Signal::TERM);
    assert_eq!(manager.next(PATIENCE), Some(("STOPPING=1".into(), pid)));
    assert_eq!(wait(&mut child), Some(0));
    assert!(!mountpoint.join("file").exists());
}

/// A start that fails is never ready, and a manager that cannot be reached is no reason to fail.
#[test]
fn only_a_start_that_succeeds_is_ready() {
    let directory = tempfile::tempdir().unwrap();
    let manager = Manager::new(directory.path());
    let missing = directory.path().join("missing");
    let mut child = manager.start(
        ferry().arg("share").arg(&missing).arg("--virtiofs").arg(directory.path().join("s")).stderr(Stdio::null()),
    );
    assert_eq!(wait(&mut child), Some(1));
    assert_eq!(manager.next(MOMENT), None);
    for name in ["/no/such/socket", "vsock:2:1"] {
        let mut command = ferry();
        command
            .env("NOTIFY_SOCKET", name)
            .arg("share")
            .arg(directory.path())
            .arg("--virtiofs")
            .arg(directory.path().join("s"));
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        common::place::until("it serves", || UnixStream::connect(directory.path().join("s")).is_ok());
        signal(&child, Signal::TERM);
        assert_eq!(wait(&mut child), Some(0));
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains("cannot tell the service manager") && said.contains(name), "{said}");
    }
}

/// Passes listening sockets from descriptor 3 on, as sd_listen_fds(3) says.
fn pass(command: &mut Command, sockets: &[&dyn AsRawFd]) {
    let numbers: Vec<i32> = sockets.iter().map(|socket| socket.as_raw_fd()).collect();
    let count = numbers.len();
    // The shell has the number of the process in the end.
    let program = command.get_program().to_owned();
    let args: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    let mut shell = Command::new("sh");
    shell
        .arg("-c")
        .arg(format!("export LISTEN_PID=$$ LISTEN_FDS={count}; exec \"$@\""))
        .arg("sh")
        .arg(program)
        .args(args);
    shell.env_remove("FERRY_LOG").stdin(Stdio::null());
    // SAFETY: dup2 and fcntl are async-signal-safe, and the closure allocates nothing.
    unsafe {
        shell.pre_exec(move || {
            // Out of the way first: a source may have the number of a target.
            for (at, number) in numbers.iter().enumerate() {
                let target = 100 + i32::try_from(at).unwrap_or_default();
                nix::libc::dup2(*number, target);
            }
            for at in 0..i32::try_from(numbers.len()).unwrap_or_default() {
                nix::libc::dup2(100 + at, 3 + at);
                nix::libc::close(100 + at);
            }
            Ok(())
        });
    }
    *command = shell;
}

#[test]
fn passed_sockets_are_taken_by_their_addresses() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::create_dir(path("tree")).unwrap();
    fs::write(path("disk"), [0; 4096]).unwrap();
    let [virtiofs, ninep, disk] = ["v", "n", "d"].map(|name| UnixListener::bind(path(name)).unwrap());
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port();
    fs::write(
        path("all.toml"),
        format!(
            "[[share]]\nsource = \"tree\"\nvirtiofs = \"v\"\n9p = \"unix:n\"\n\n[[share]]\nsource = \"tree\"\n9p = \"tcp:127.0.0.1:{port}\"\n\n\
             [[disk]]\nfile = \"disk\"\nvhost-user = \"d\"\n"
        ),
    )
    .unwrap();
    let manager = Manager::new(directory.path());
    // In an order that is not that of the file; and once more, as when the service is started again.
    for _ in 0..2 {
        let mut command = ferry();
        command.arg("share").arg("--config").arg(path("all.toml"));
        pass(&mut command, &[&disk, &tcp, &ninep, &virtiofs]);
        let mut child = manager.start(&mut command);
        assert!(manager.next(PATIENCE).is_some_and(|(said, _)| said == "READY=1"));
        // A 9P server replies to Tversion on both.
        let version = |mut stream: Box<dyn ReadWrite>| {
            stream.write_all(b"\x15\0\0\0\x64\xff\xff\0\0\x10\0\x08\x009P2000.L").unwrap();
            let mut reply = [0; 21];
            stream.read_exact(&mut reply).unwrap();
            assert_eq!(&reply[13..], b"9P2000.L");
        };
        version(Box::new(UnixStream::connect(path("n")).unwrap()));
        version(Box::new(std::net::TcpStream::connect(("127.0.0.1", port)).unwrap()));
        for name in ["v", "d"] {
            vhost_user_features(&path(name));
        }
        signal(&child, Signal::TERM);
        assert!(manager.next(PATIENCE).is_some_and(|(said, _)| said == "STOPPING=1"));
        assert_eq!(wait(&mut child), Some(0));
        assert!(["v", "n", "d"].iter().all(|name| path(name).exists()), "sockets of the manager are removed");
    }
}

trait ReadWrite: Read + std::io::Write {}
impl<T: Read + std::io::Write> ReadWrite for T {}

/// Asks a device for its features (VHOST_USER_GET_FEATURES), which only a server that accepts the connection answers.
fn vhost_user_features(socket: &Path) {
    let begin = Instant::now();
    let mut stream = loop {
        match UnixStream::connect(socket) {
            // systemd-socket-activate makes the file before it listens.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused && begin.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            stream => break stream.unwrap(),
        }
    };
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    std::io::Write::write_all(&mut stream, &[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let mut reply = [0; 20];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..12], [1, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0]);
}

/// Sockets that nothing listens on, or that are of no use, are named; those of another process are not ours.
#[test]
fn passed_sockets_that_are_of_no_use_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let listener = UnixListener::bind(path("other")).unwrap();
    let datagram = UnixDatagram::bind(path("datagram")).unwrap();
    let share = || {
        let mut command = ferry();
        command.arg("share").arg(directory.path()).arg("--virtiofs").arg(path("s"));
        command
    };
    let mut command = share();
    pass(&mut command, &[&listener]);
    let said = refused(2, &mut command);
    assert!(said.contains("/other (descriptor 3)") && said.contains("fd = 3"), "{said}");
    let mut command = share();
    pass(&mut command, &[&datagram]);
    let said = refused(1, &mut command);
    assert!(said.contains("descriptor 3 of the service manager is not a listening socket"), "{said}");
    let mut command = ferry();
    command.arg("share").arg(directory.path()).arg("--virtiofs").arg(path("other")).args(["--socket-group", "0"]);
    pass(&mut command, &[&listener]);
    let said = refused(1, &mut command);
    assert!(said.contains("SocketGroup="), "{said}");
    // By its number, as without a manager.
    let mut command = ferry();
    command.arg("share").arg(directory.path()).args(["--fd", "3"]);
    pass(&mut command, &[&listener]);
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    vhost_user_features(&path("other"));
    signal(&child, Signal::TERM);
    assert_eq!(wait(&mut child), Some(0));
    // Of a process that has started this one.
    let mut command = share();
    command.env("LISTEN_PID", "1").env("LISTEN_FDS", "5");
    let mut server = common::Server::start(&mut command);
    server.signal(Signal::TERM);
    assert_eq!(server.status(), Some(0));
}

/// The real thing, where it is installed: the first client starts the server, which has its connection.
#[test]
fn systemd_socket_activate_starts_a_share_for_its_first_client() {
    let program = "systemd-socket-activate";
    if Command::new(program).arg("--version").stdout(Stdio::null()).status().is_err() {
        return ferry_skip::skip!("no {program}: apt-get install systemd");
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let mut command = Command::new(program);
    command.arg("--listen").arg(&socket).arg(env!("CARGO_BIN_EXE_ferry"));
    command.arg("share").arg(directory.path()).arg("--virtiofs").arg(&socket).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    common::place::until("it listens", || socket.exists());
    vhost_user_features(&socket);
    signal(&child, Signal::TERM);
    assert_eq!(wait(&mut child), Some(0));
}
