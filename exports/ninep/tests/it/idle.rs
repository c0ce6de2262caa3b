//! Ten thousand clients at once that do nothing, or less.
//!
//! The clients are in a process of their own, so that each process has the descriptors of one end.

use crate::common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::{Client, ROOT, Stream};
use ferry_ninep::{Export, Limits, Options, Usage};
use ferry_wire::ninep::kind;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Half of them by unix, half by TCP.
const COUNT: usize = 10_000;
/// What the other process is to do.
const CLIENTS: &str = "FERRY_IDLE_CLIENTS";
/// What it says when all its clients are there.
const READY: &str = "all clients are there";
/// What a silent connection may take, without what the kernel has for it: twice what was measured.
const BYTES_EACH_MAX: u64 = 4096;
/// Ten thousand of anything, on a loaded machine.
const LONG: Duration = Duration::from_secs(120);

/// Each test takes most of the descriptors that there are.
static ALONE: Mutex<()> = Mutex::new(());

/// One descriptor for each connection; takes root where the limit is low.
fn has_descriptors() -> bool {
    let wanted = COUNT as u64 + 300;
    let now = getrlimit(Resource::Nofile);
    let enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= wanted);
    let maximum = if enough(now.maximum) { now.maximum } else { Some(wanted) };
    enough(now.current) || setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).is_ok()
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

struct Server {
    export: Export,
    directory: tempfile::TempDir,
    port: u16,
}

impl Server {
    fn new(limits: Limits) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let unix = UnixListener::bind(directory.path().join("s")).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = tcp.local_addr().unwrap().port();
        let source = Arc::new(ferry_mem::Mem::new(&ferry_mem::Options::default()).unwrap());
        let options = Options { limits, ..Options::default() };
        let export = Export::start(vec![unix.into(), tcp.into()], source, options).unwrap();
        Self { export, directory, port }
    }

    fn unix(&self) -> UnixStream {
        UnixStream::connect(self.directory.path().join("s")).unwrap()
    }

    fn tcp(&self) -> TcpStream {
        TcpStream::connect(("127.0.0.1", self.port)).unwrap()
    }

    #[track_caller]
    fn settles(&self, is_right: impl Fn(&Usage) -> bool) {
        let end = Instant::now() + LONG;
        while !is_right(&self.export.usage()) {
            assert!(Instant::now() < end, "it stays so: {:?}", self.export.usage());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Clients that another process has. It ends with this.
struct Clients(Child);

impl Clients {
    /// Waits until they are all there. `what`: see [`clients`].
    fn start(server: &Server, what: &str) -> Self {
        let words = format!("{what} {} {}", server.port, server.directory.path().join("s").display());
        let program = std::env::current_exe().unwrap();
        let mut command = Command::new(program);
        command.args(["--exact", "idle::clients", "--include-ignored", "--nocapture"]).env(CLIENTS, words);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
        let is_ready = said.any(|line| line.unwrap().contains(READY));
        let clients = Self(child);
        assert!(is_ready, "the clients have ended");
        clients
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        // It ends at the end of its input, too; but not where a server has hung up.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The other process: makes clients that have `attached`, or that `dawdle`, and waits for the end of its input.
#[test]
#[ignore = "long: a part of the others, which start it"]
fn clients() {
    let Ok(words) = std::env::var(CLIENTS) else { return };
    let [what, port, socket]: [&str; 3] = words.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
    let (port, socket): (u16, _) = (port.parse().unwrap(), Path::new(socket));
    assert!(has_descriptors());
    let unix = || UnixStream::connect(socket).unwrap();
    let tcp = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    let half = 0..COUNT / 2;
    let mut kept: (Vec<UnixStream>, Vec<TcpStream>) = Default::default();
    match what {
        "attached" => {
            kept.0.extend(half.clone().map(|_| attached(unix()).stream));
            kept.1.extend(half.map(|_| attached(tcp()).stream));
        }
        _ => {
            kept.0.extend(half.clone().map(|_| unix()));
            kept.1.extend(half.map(|_| {
                let mut client = attached(tcp());
                client.stream.write_all(&[50, 0, 0, 0, kind::TCLUNK, 1]).unwrap();
                client.stream
            }));
        }
    }
    println!("{READY}");
    let _ = std::io::stdin().read(&mut [0]);
    drop(kept);
}

fn attached<S: Stream>(stream: S) -> Client<S> {
    let mut client = Client::new(stream);
    client.hello(8192);
    client.attach(ROOT, 0).unwrap();
    client
}

#[test]
#[ignore = "long: make test-all"]
fn ten_thousand_are_held_for_little_and_let_go() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !ferry_alone::in_own_process() {
        return;
    }
    if !has_descriptors() {
        ferry_skip::skip!("so many connections take 10,300 descriptors, which takes root here");
        return;
    }
    let server = Server::new(Limits { connections_max: COUNT + 10, ..Limits::default() });
    let mut busy = attached(server.unix());
    let before = resident_bytes();
    let clients = Clients::start(&server, "attached");
    server.settles(|usage| usage.connections == COUNT + 1 && usage.fids == COUNT + 1 && usage.requests == 0);
    // One root fid each is included.
    let each = resident_bytes().saturating_sub(before) / COUNT as u64;
    let usage = server.export.usage();
    println!("{each} bytes for each of {COUNT} connections; {usage:?}");
    assert!(each < BYTES_EACH_MAX, "{each} bytes for each");
    assert!(usage.threads < 30, "{usage:?}");
    for _ in 0..1000 {
        busy.getattr(ROOT).unwrap();
    }
    drop(clients);
    server.settles(|usage| usage.connections == 1 && usage.fids == 1);
    busy.getattr(ROOT).unwrap();
    drop(busy);
    server.settles(|usage| usage.connections == 0 && usage.buffered_bytes == 0);
}

/// Half are silent, half send an incomplete message: all of them, and no others, are disconnected in time.
#[test]
#[ignore = "long: make test-all"]
fn ten_thousand_that_dawdle_are_sent_away() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !ferry_alone::in_own_process() {
        return;
    }
    if !has_descriptors() {
        ferry_skip::skip!("so many connections take 10,300 descriptors, which takes root here");
        return;
    }
    let slow_timeout = Duration::from_secs(10);
    let server = Server::new(Limits { connections_max: COUNT + 10, slow_timeout, ..Limits::default() });
    let mut busy = attached(server.tcp());
    let clients = Clients::start(&server, "dawdle");
    let begin = Instant::now();
    let mut served = 0;
    while server.export.usage().connections > 1 {
        busy.getattr(ROOT).unwrap();
        served += 1;
        assert!(begin.elapsed() < LONG, "still there: {:?}", server.export.usage());
    }
    println!("gone after {:?}, {served} requests of another client meanwhile", begin.elapsed());
    assert_eq!(server.export.usage().buffered_bytes, 0);
    busy.getattr(ROOT).unwrap();
    drop(clients);
}
