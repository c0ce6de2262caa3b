//! System calls and voluntary context switches of a server per request: `calls FERRY [REQUESTS [TRANSPORT...]]`, as root, with perf.
//!
//! One request is in flight at a time: a read of 4 KiB or a getattr. It follows the reply to the request before at once ("busy"), or 1 ms
//! later ("paused"), when the server sleeps. Prints a table of medians of 5 runs.

use std::error::Error;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferry_driver::measure::{Counter, Counting, Snapshot, serving};
use ferry_driver::{Config, Driver, ROOT};
use ferry_vfs::{Name, OFlags};
use ferry_wire::ninep::{Fid, Frame, Reply, Request, Step, Steps, Tag, User, VERSION, valid};

type Outcome<T> = Result<T, Box<dyn Error>>;

const RUNS: usize = 5;
const BYTES: u32 = 4096;
const FILE_BYTES: u64 = 1 << 20;
const PAUSE: Duration = Duration::from_millis(1);
/// How long a server may take to be ready, and to reply.
const PATIENCE: Duration = Duration::from_secs(20);
/// The open file of a 9P client.
const FILE: Fid = Fid(1);

#[derive(Clone, Copy, Debug)]
enum Op {
    Read,
    Stat,
}

const TRANSPORTS: [&str; 5] = ["virtiofs", "9p device", "9p socket", "devfuse", "uring"];

/// A client of a server, with an open file.
trait Client {
    /// Sends one request and waits for its reply.
    fn request(&mut self, op: Op, offset: u64) -> Outcome<()>;
}

struct VirtioFs {
    driver: Driver,
    node: u64,
    handle: u64,
}

impl VirtioFs {
    fn connect(socket: &Path) -> Outcome<Self> {
        let mut driver = Driver::connect(socket, Config { queues: 1, ..Config::default() })?;
        driver.init()?;
        let node = driver.lookup(ROOT, "file")?.nodeid;
        let handle = driver.open(node, 0)?.fh;
        Ok(Self { driver, node, handle })
    }
}

impl Client for VirtioFs {
    fn request(&mut self, op: Op, offset: u64) -> Outcome<()> {
        match op {
            Op::Read => _ = self.driver.read(self.node, self.handle, offset, BYTES)?,
            Op::Stat => _ = self.driver.getattr(self.node)?,
        }
        Ok(())
    }
}

enum NineP {
    Socket(UnixStream),
    Device(Box<Driver>),
}

impl NineP {
    fn attach(mut self) -> Outcome<Self> {
        self.message(Tag::NONE, &Request::Version { msize: 64 << 10, version: VERSION })?;
        let user = User { name: b"", uid: Some(0) };
        self.message(Tag(0), &Request::Attach { fid: Fid(0), afid: Fid::NONE, user, tree: b"" })?;
        let mut buffer = Vec::new();
        let steps = Steps::write(&mut buffer, [Step::Child(Name::new(b"file")?)]);
        self.message(Tag(0), &Request::Walk { fid: Fid(0), new_fid: FILE, steps })?;
        self.message(Tag(0), &Request::Open { fid: FILE, flags: OFlags::RDONLY })?;
        Ok(self)
    }

    fn message(&mut self, tag: Tag, request: &Request<'_>) -> Outcome<()> {
        let mut message = Vec::new();
        request.encode(tag, &mut message);
        let reply = match self {
            Self::Socket(stream) => {
                stream.write_all(&message)?;
                let mut reply = vec![0; 4];
                stream.read_exact(&mut reply)?;
                reply.resize(usize::try_from(Frame::bytes(*reply.first_chunk().ok_or("short")?))?, 0);
                stream.read_exact(&mut reply[4..])?;
                reply
            }
            Self::Device(driver) => {
                let queue = driver.queue(0);
                let ticket = queue.submit(&[&message], &[2 * BYTES as usize])?;
                queue.wait_for(ticket, PATIENCE)?.reply
            }
        };
        match Reply::decode(&reply) {
            Ok((_, Reply::Error(errno))) => Err(format!("{request:?}: {errno}").into()),
            Ok(_) => Ok(()),
            Err(_) => Err("the reply is malformed".into()),
        }
    }
}

impl Client for NineP {
    fn request(&mut self, op: Op, offset: u64) -> Outcome<()> {
        self.message(
            Tag(1),
            &match op {
                Op::Read => Request::Read { fid: FILE, offset, bytes_max: BYTES },
                Op::Stat => Request::Getattr { fid: FILE, mask: valid::BASIC },
            },
        )
    }
}

struct Mounted(fs::File);

impl Client for Mounted {
    fn request(&mut self, op: Op, offset: u64) -> Outcome<()> {
        match op {
            Op::Read => self.0.read_exact_at(&mut [0; BYTES as usize], offset)?,
            Op::Stat => _ = self.0.metadata()?,
        }
        Ok(())
    }
}

/// A server, which is ended when this is dropped.
struct Server {
    child: Child,
    mounted: Option<PathBuf>,
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(path) = &self.mounted {
            let _ = Command::new("umount").arg(path).status();
        }
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
    }
}

/// Tries to connect until it succeeds or [`PATIENCE`] is over.
fn retry<C>(connect: impl Fn() -> Outcome<C>) -> Outcome<C> {
    let end = Instant::now() + PATIENCE;
    loop {
        match connect() {
            Ok(client) => return Ok(client),
            Err(error) if Instant::now() > end => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn start(ferry: &str, transport: &str, directory: &Path) -> Outcome<(Server, Box<dyn Client>)> {
    let (data, at, mount) = (directory.join("data"), directory.join("s"), directory.join("mount"));
    let _ = fs::remove_file(&at);
    let socket = at.display().to_string();
    let mut command = Command::new(ferry);
    let mounts = matches!(transport, "devfuse" | "uring");
    match transport {
        "virtiofs" => command.arg("share").arg(&data).args(["--virtiofs", &socket]),
        "9p socket" => command.arg("share").arg(&data).args(["--9p", &format!("unix:{socket}")]),
        "9p device" => command.arg("share").arg(&data).args(["--9p", &format!("vhost-user:{socket}")]),
        _ => command.arg("mount").arg(&data).arg(&mount).args([
            "--foreground",
            "--passthrough",
            "off",
            "--path",
            transport,
        ]),
    };
    if mounts {
        command.args(["--cache", "none"]);
    } else {
        command.args(["--sandbox", "none", "--seccomp", "none"]);
    }
    let child = command.stdout(Stdio::null()).spawn()?;
    let server = Server { child, mounted: mounts.then(|| mount.clone()) };
    let client: Box<dyn Client> = match transport {
        "virtiofs" => Box::new(retry(|| VirtioFs::connect(&at))?),
        "9p socket" => Box::new(retry(|| Ok(UnixStream::connect(&at)?)).map(NineP::Socket)?.attach()?),
        "9p device" => {
            let config = Config { first_queues: 0, queues: 1, device_features: 1, ..Config::default() };
            let connect = || Ok(Driver::connect(&at, config.clone())?);
            Box::new(NineP::Device(Box::new(retry(connect)?)).attach()?)
        }
        _ => Box::new(Mounted(retry(|| Ok(fs::File::open(mount.join("file"))?))?)),
    };
    Ok((server, client))
}

#[allow(clippy::cast_precision_loss, reason = "a ratio")]
fn each(count: u64, requests: u64) -> f64 {
    count as f64 / requests as f64
}

/// System calls and voluntary context switches per request, in one run.
fn run(client: &mut dyn Client, pid: u32, op: Op, pause: Duration, requests: u64) -> Outcome<(f64, f64)> {
    let mut offset = 0;
    let mut next = || {
        offset = (offset + 7 * u64::from(BYTES)) % FILE_BYTES;
        offset
    };
    for _ in 0..100 {
        client.request(op, next())?;
    }
    let (before, counting) = (Snapshot::take(pid)?, Counting::start(pid, Counter::Perf)?);
    for _ in 0..requests {
        client.request(op, next())?;
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
    let (calls, used) = (counting.finish()?, Snapshot::take(pid)?.since(&before));
    Ok((each(calls.total, requests), each(used.voluntary_switches, requests)))
}

fn main() -> Outcome<()> {
    let mut args = std::env::args().skip(1);
    let ferry = args.next().ok_or("usage: calls FERRY [REQUESTS [TRANSPORT...]]")?;
    let requests: u64 = args.next().map_or(Ok(20_000), |text| text.parse())?;
    let mut transports: Vec<String> = args.collect();
    if transports.is_empty() {
        transports.extend(TRANSPORTS.map(String::from));
    }
    let directory = std::env::temp_dir().join(format!("calls.{}", std::process::id()));
    fs::create_dir_all(directory.join("data"))?;
    fs::create_dir_all(directory.join("mount"))?;
    fs::write(directory.join("data/file"), vec![7; usize::try_from(FILE_BYTES)?])?;
    println!("| transport | requests | system calls each | switches each |\n| --- | --- | --- | --- |");
    for transport in transports {
        let (server, mut client) = start(&ferry, &transport, &directory)?;
        let pid = serving(server.child.id());
        for (load, pause, requests) in [("busy", Duration::ZERO, requests), ("paused", PAUSE, requests / 20)] {
            for op in [Op::Read, Op::Stat] {
                let mut runs = Vec::new();
                for _ in 0..RUNS {
                    runs.push(run(&mut *client, pid, op, pause, requests)?);
                }
                let median = |pick: fn(&(f64, f64)) -> f64| {
                    let mut all: Vec<f64> = runs.iter().map(pick).collect();
                    all.sort_by(f64::total_cmp);
                    all[RUNS / 2]
                };
                let (calls, sleeps) = (median(|run| run.0), median(|run| run.1));
                println!("| {transport} | {op:?}, {load} | {calls:.2} | {sleeps:.3} |");
            }
        }
        drop(client);
    }
    fs::remove_dir_all(&directory)?;
    Ok(())
}
