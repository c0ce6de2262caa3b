//! The sandbox of a server that shares a 9P server's tree: its layers hold, and it still reaches the 9P server, even
//! after an outage.

use crate::certificates;

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::unix::fs::chown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use certificates::Certificates;
use ferry_driver::ROOT;
use ferry_isolation::Capabilities;
use ferry_tests::sandboxed::{Expected, SOON, Served, TICK, USER, UserHome, is_root};
use ferry_wire::fuse::abi::FileLock;
use rustix::process::Signal;

const O_RDWR_CREAT: u32 = 0o102;
/// The words with which a server that has only connections says what stands around it.
const ALL: &str = "confined namespaces=true landlock=Some(Full) capabilities=none seccomp=Some(Kill)";

/// A 9P server of a tree, in a home of its user's.
fn server(user: u32, address: &str) -> Served {
    let home = UserHome::of(user);
    home.make("tree", |tree| fs::create_dir(tree).unwrap());
    home.serve(&format!("share tree --9p {address} --json"))
}

/// The same once more, after it was killed.
fn again(mut server: Served, address: &str) -> Served {
    server.started.kill();
    server.home.serve(&format!("share tree --9p {address} --json"))
}

/// A port that no process uses, and that the kernel assigns to none.
fn port() -> u16 {
    static TRIED: AtomicU32 = AtomicU32::new(0);
    loop {
        // Below those that are given to who asks for any (net.ipv4.ip_local_port_range).
        let number = 10_000 + (std::process::id() + TRIED.fetch_add(1, Ordering::Relaxed)) % 20_000;
        let number = u16::try_from(number).unwrap();
        if TcpListener::bind(("127.0.0.1", number)).is_ok() {
            return number;
        }
    }
}

/// What a process of ours has of this.
fn ours(capabilities: Capabilities) -> u64 {
    capabilities.bits() & Capabilities::of_thread().unwrap().bits()
}

/// Writes and reads by a guest, on both sides of a server that goes away meanwhile and comes back by `again`; each time the sandbox is
/// inspected.
fn goes_on(client: &Served, expected: &Expected<'_>, server: Served, again: impl FnOnce(Served) -> Served) -> Served {
    let mut guest = client.guest();
    let (file, open) = guest.create(ROOT, "new", O_RDWR_CREAT, 0o100_644).unwrap();
    assert_eq!(guest.write(file.nodeid, open.fh, 0, b"before").unwrap(), 6);
    guest.fsync(file.nodeid, open.fh).unwrap();
    assert_eq!(guest.read(file.nodeid, open.fh, 0, 64).unwrap(), b"before");
    assert_eq!(fs::read(server.home.at("tree/new")).unwrap(), b"before");
    client.is_behind_walls(expected);

    let server = again(server);
    assert_eq!(guest.write(file.nodeid, open.fh, 6, b" and after").unwrap(), 10);
    guest.fsync(file.nodeid, open.fh).unwrap();
    assert_eq!(fs::read(server.home.at("tree/new")).unwrap(), b"before and after");
    let dir = guest.mkdir(ROOT, "dir", 0o755).unwrap();
    guest.rename(ROOT, "new", dir.nodeid, "moved", 0).unwrap();
    assert!(server.home.at("tree/dir/moved").is_file());
    client.says("is back");
    // The threads of the new connection stand behind the same ones.
    client.is_behind_walls(expected);
    server
}

#[track_caller]
fn ends(mut served: Served) {
    assert_eq!(served.ends_by(Signal::TERM), 0, "{}", served.said());
    assert!(!served.home.at("s").exists(), "the socket is left behind");
}

/// By a unix socket: those that connect see its directory, and can open nothing in it; all others do not see it.
fn unix_sockets_are_reached(user: u32) {
    let behind = server(user, "unix:n");
    let socket = behind.home.at("n");
    if user == 0 {
        // A socket of another user, to which root may connect as it may without a sandbox.
        chown(&socket, Some(USER), Some(USER)).unwrap();
    }
    let line = format!("share 9p:unix:{} --virtiofs s --json --log debug", socket.display());
    let client = UserHome::of(user).serve(&line);
    client.says(ALL);
    client.says("confined a thread that connects landlock=Some(Full)");
    let connector = if user == 0 { ours(Capabilities::ALL_USERS) } else { 0 };
    let expected = Expected { shares: 1, connector: Some(connector), socket: Some(0), ..Expected::default() };
    let behind = goes_on(&client, &expected, behind, |server| again(server, "unix:n"));
    assert_eq!(client.inside.has_own("user"), user != 0);
    ends(client);
    drop(behind);
}

#[test]
fn unix_sockets_are_reached_for_root() {
    if is_root() {
        unix_sockets_are_reached(0);
    }
}

#[test]
fn unix_sockets_are_reached_for_others() {
    if is_root() {
        unix_sockets_are_reached(USER);
    }
}

/// By a number: nothing of the host can be seen.
fn ports_are_reached(user: u32) {
    let port = port();
    let address = format!("tcp:127.0.0.1:{port}");
    let behind = server(user, &address);
    let client = UserHome::of(user).serve(&format!("share 9p:{address} --virtiofs s --json --log debug"));
    client.says(ALL);
    let expected = Expected { connector: Some(0), ..Expected::default() };
    let behind = goes_on(&client, &expected, behind, |server| again(server, &address));
    ends(client);
    drop(behind);
}

#[test]
fn ports_are_reached_for_root() {
    if is_root() {
        ports_are_reached(0);
    }
}

#[test]
fn ports_are_reached_for_others() {
    if is_root() {
        ports_are_reached(USER);
    }
}

/// By a name, which is looked up again inside each time; with TLS, whose files are gone by then.
#[test]
fn names_are_resolved_in_the_sandbox() {
    if !is_root() {
        return;
    }
    let certificates = Certificates::new();
    certificates.authority("ca").signed("server", "ca", 2);
    let port = port();
    let flags = |ip: &str| {
        let [chain, key] = ["server.pem", "server.key"].map(|file| certificates.path(file).display().to_string());
        format!("tls:{ip}:{port} --tls-cert {chain} --tls-key {key}")
    };
    let behind = server(0, &flags("127.0.0.1"));
    // A table of hosts of its own.
    const SCRIPT: &str = "mount --bind hosts /etc/hosts && exec \"$@\"";
    let home = UserHome::of(0);
    fs::write(home.at("hosts"), "127.0.0.1 localhost\n").unwrap();
    fs::copy(certificates.path("ca.pem"), home.at("ca.pem")).unwrap();
    let line = format!("share 9p:tls:localhost:{port} --server-ca ca.pem --virtiofs s --json --log debug");
    let command = home.command(&["unshare", "--mount", "sh", "-c", SCRIPT, "sh"], &line);
    let client = home.serve_by(command);
    client.says(ALL);
    fs::remove_file(client.home.at("ca.pem")).unwrap();
    let names = files_of_names();
    let expected = Expected { connector: Some(0), names: &names, ..Expected::default() };
    let behind = goes_on(&client, &expected, behind, |server| {
        // The same file, with other words.
        fs::write(client.home.at("hosts"), "127.0.0.2 localhost\n").unwrap();
        again(server, &flags("127.0.0.2"))
    });
    ends(client);
    drop(behind);
}

/// By a name that a name server knows, with two addresses. Which of them is better the C library asks the kernel by a socket of its own kind,
/// is told no, and goes on.
#[test]
fn name_servers_are_queried_in_the_sandbox() {
    if !is_root() {
        return;
    }
    /// Nobody else's on a machine that has one.
    const NAME_SERVER: &str = "127.0.0.77";
    let socket = match UdpSocket::bind((NAME_SERVER, 53)) {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            ferry_skip::skip!("somebody else is the name server of all addresses here");
            return;
        }
        socket => socket.unwrap(),
    };
    let questions = Arc::new(AtomicUsize::new(0));
    let counts = Arc::clone(&questions);
    std::thread::spawn(move || name_server(&socket, &[[127, 0, 0, 1], [127, 0, 0, 2]], &counts));
    let port = port();
    let behind = server(0, &format!("tcp:127.0.0.1:{port}"));
    const SCRIPT: &str = "mount --bind hosts /etc/hosts && mount --bind resolv.conf /etc/resolv.conf && exec \"$@\"";
    let home = UserHome::of(0);
    fs::write(home.at("hosts"), "").unwrap();
    fs::write(home.at("resolv.conf"), format!("nameserver {NAME_SERVER}\n")).unwrap();
    let line = format!("share 9p:tcp:files.test:{port} --virtiofs s --json --log debug");
    let command = home.command(&["unshare", "--mount", "sh", "-c", SCRIPT, "sh"], &line);
    let client = home.serve_by(command);
    let asked = questions.load(Ordering::Relaxed);
    let names = files_of_names();
    let expected = Expected { connector: Some(0), names: &names, ..Expected::default() };
    let behind = goes_on(&client, &expected, behind, |server| again(server, &format!("tcp:127.0.0.2:{port}")));
    assert!(questions.load(Ordering::Relaxed) > asked, "it was not asked again");
    ends(client);
    drop(behind);
}

/// Those of the files by which names are looked up that there are here.
fn files_of_names() -> Vec<&'static str> {
    let names = ["/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf"];
    names.into_iter().filter(|name| Path::new(name).exists()).collect()
}

/// Replies to every query for an IPv4 address with these (RFC 1035, section 4.1).
fn name_server(socket: &UdpSocket, addresses: &[[u8; 4]], questions: &AtomicUsize) {
    const HEADER_BYTES: usize = 12;
    let mut question = [0; 512];
    while let Ok((bytes, from)) = socket.recv_from(&mut question) {
        questions.fetch_add(1, Ordering::Relaxed);
        // The name's labels, an empty one, type and class.
        let name_bytes = question[HEADER_BYTES..bytes].iter().position(|byte| *byte == 0).unwrap() + 1;
        let asked = &question[HEADER_BYTES..HEADER_BYTES + name_bytes + 4];
        let wants_a = asked[name_bytes..name_bytes + 2] == [0, 1];
        let answers = if wants_a { addresses } else { &[] };
        let count = u8::try_from(answers.len()).unwrap();
        // A recursive answer without an error: one question, so many answers.
        let mut answer = [&question[..2], &[0x81, 0x80, 0, 1, 0, count, 0, 0, 0, 0], asked].concat();
        for address in answers {
            // The name is the question's; type A, class IN, for no time, four bytes.
            answer.extend([0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
            answer.extend(address);
        }
        let _ = socket.send_to(&answer, from);
    }
}

/// Beside a directory: its threads are in no network, and each kind has the capabilities that it needs.
#[test]
fn a_directory_beside_it_has_its_own_sandbox() {
    if !is_root() {
        return;
    }
    let behind = server(0, "unix:n");
    let home = UserHome::of(0);
    fs::create_dir(home.at("dir")).unwrap();
    let line = format!("share dir --virtiofs d 9p:unix:{} --virtiofs s --json", behind.home.at("n").display());
    let client = home.serve(&line);
    let mut guest = client.guest_at("d");
    guest.mkdir(ROOT, "made", 0o755).unwrap();
    assert!(client.home.at("dir/made").is_dir());
    let expected = Expected {
        shares: 2,
        capabilities: ours(Capabilities::of_server(true)),
        connector: Some(ours(Capabilities::ALL_USERS)),
        socket: Some(1),
        ..Expected::default()
    };
    let behind = goes_on(&client, &expected, behind, |server| again(server, "unix:n"));
    ends(client);
    drop(behind);
}

/// A waiting lock request is completed by a thread that the connection's reader starts.
#[test]
fn locks_are_waited_for_in_the_sandbox() {
    let behind = server(rustix::process::geteuid().as_raw(), "unix:n");
    let line = format!("share 9p:unix:{} --virtiofs s --json", behind.home.at("n").display());
    let client = UserHome::of(rustix::process::geteuid().as_raw()).serve(&line);
    let mut guest = client.guest();
    let (file, open) = guest.create(ROOT, "new", O_RDWR_CREAT, 0o100_644).unwrap();
    let lock = |kind: i32| FileLock { start: 0, end: u64::MAX >> 1, kind: kind.cast_unsigned(), pid: 77 };
    guest.setlk(file.nodeid, open.fh, 1, lock(libc::F_WRLCK), 0).unwrap();
    let waits = guest.send_setlkw(file.nodeid, open.fh, 2, lock(libc::F_WRLCK), 0).unwrap();
    assert!(guest.queue(1).wait_for(waits, Duration::from_millis(100)).is_err(), "it has the lock");
    // By the other queue, for an answer to the first one is still to come.
    guest.select(2);
    guest.setlk(file.nodeid, open.fh, 1, lock(libc::F_UNLCK), 0).unwrap();
    let reply = guest.queue(1).wait_for(waits, SOON).unwrap().reply;
    assert_eq!(reply[4..8], [0; 4], "the lock was not granted: {reply:?}");
    drop(guest);
    ends(client);
}

/// A server that answers nonsense loses its connection by whoever has read that, which is a guest's thread; the next one is made, and the
/// share goes on.
#[test]
fn connections_are_closed_in_the_sandbox() {
    let behind = server(rustix::process::geteuid().as_raw(), "unix:n");
    let lies = Arc::new(AtomicBool::new(false));
    forward(UnixListener::bind(behind.home.at("between")).unwrap(), behind.home.at("n").as_path(), &lies);
    let between = behind.home.at("between");
    let line = format!("share 9p:unix:{} --virtiofs s --json --cache none", between.display());
    let client = UserHome::of(rustix::process::geteuid().as_raw()).serve(&line);
    let mut guest = client.guest();
    // The root's attributes are told from memory when the server fails.
    let first = guest.mkdir(ROOT, "first", 0o755).unwrap().nodeid;
    lies.store(true, Ordering::Relaxed);
    assert!(guest.getattr(first).is_err());
    assert!(!lies.load(Ordering::Relaxed), "nobody was lied to");
    guest.mkdir(ROOT, "dir", 0o755).unwrap();
    client.says("is back");
    assert!(behind.home.at("tree/dir").is_dir());
    drop(guest);
    ends(client);
}

/// Carries what comes for a server to it, and its answers back. When it `lies`, once, the attributes that are asked for are left out of an
/// answer.
fn forward(listener: UnixListener, server: &Path, lies: &Arc<AtomicBool>) {
    let (server, lies) = (server.to_owned(), Arc::clone(lies));
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), UnixStream::connect(&server).unwrap());
            let (mut from_client, mut to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from_client, &mut to_server);
                let _ = to_server.shutdown(std::net::Shutdown::Both);
            });
            let lies = Arc::clone(&lies);
            std::thread::spawn(move || answer(server, client, &lies));
        }
    });
}

fn answer(mut server: UnixStream, mut client: UnixStream, lies: &AtomicBool) {
    /// Rgetattr, of 9P2000.L.
    const GETATTR: u8 = 25;
    loop {
        // Length, type, tag.
        let mut head = [0; 7];
        if server.read_exact(&mut head).is_err() {
            return;
        }
        let bytes = u32::from_le_bytes(head[..4].try_into().unwrap());
        let mut rest = vec![0; usize::try_from(bytes).unwrap() - head.len()];
        server.read_exact(&mut rest).unwrap();
        if head[4] == GETATTR && lies.swap(false, Ordering::Relaxed) {
            head[..4].copy_from_slice(&7_u32.to_le_bytes());
            rest.clear();
        }
        if client.write_all(&[&head[..], &rest].concat()).is_err() {
            return;
        }
    }
}

/// What is said when the server is not there, and that nothing is left behind: the process inside has found out.
#[test]
fn a_missing_server_is_reported() {
    let home = UserHome::of(rustix::process::geteuid().as_raw());
    let port = port();
    let line = format!("share 9p:tcp:127.0.0.1:{port} --virtiofs s --json");
    let begun = Instant::now();
    let output = home.command(&[], &line).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let words = format!("cannot reach the 9P server at tcp:127.0.0.1:{port}");
    assert!(output.status.code() == Some(1) && said.contains(&words), "{said}");
    assert!(!home.at("s").exists() && begun.elapsed() < SOON);
}

/// Without namespaces the other layers of the sandbox hold, and the server is still reachable.
#[test]
fn the_sandbox_follows_the_flags() {
    if !is_root() {
        return;
    }
    let behind = server(0, "unix:n");
    let line = format!("share 9p:unix:{} --virtiofs s --json --sandbox none", behind.home.at("n").display());
    let client = UserHome::of(0).serve(&line);
    let mut guest = client.guest();
    assert!(client.inside.pid() == client.started.pid() && !client.inside.has_own("mnt"));
    client.inside.all_are("Seccomp", "2");
    client.inside.all_are("NoNewPrivs", "1");
    let behind = again(behind, "unix:n");
    // It may take a moment until it is missed.
    let end = Instant::now() + SOON;
    while guest.mkdir(ROOT, "dir", 0o755).is_err() {
        assert!(Instant::now() < end, "{}", client.said());
        std::thread::sleep(TICK);
    }
    assert!(behind.home.at("tree/dir").is_dir());
    ends(client);
}
