//! The servers: ours and the peers, as processes.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ferry_driver::measure;

use crate::rows::Config;

/// The tag of every share.
pub const TAG: &str = "share";

/// How long a server may take until it listens.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// The flags of a listening socket in the kernel's table.
const LISTENING: &str = "00010000";

/// How much of a server's last words an error shows.
const LAST_WORDS_BYTES: usize = 400;

/// A server to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Ours.
    Ferry,
    /// The reference.
    Virtiofsd,
    /// Ferry without its sandbox.
    FerryOpen,
    /// Ferry without metrics.
    FerryUncounted,
    /// Ferry with a limit that is never reached.
    FerryLimited,
}

impl Peer {
    /// Its name in the results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ferry => crate::line::FERRY,
            Self::Virtiofsd => "virtiofsd",
            Self::FerryOpen => "without-sandbox",
            Self::FerryUncounted => "without-metrics",
            Self::FerryLimited => "with-limit",
        }
    }
}

/// The programs.
#[derive(Debug, Clone)]
pub struct Programs {
    /// Ours.
    pub ferry: PathBuf,
    /// The reference.
    pub virtiofsd: Option<PathBuf>,
}

/// What to share and how.
#[derive(Debug, Clone)]
pub struct Sharing<'a> {
    /// The directory.
    pub dir: &'a Path,
    /// Where to listen; what the server says goes beside it.
    pub socket: PathBuf,
    /// What the guest may cache.
    pub config: Config,
    /// How many request queues to offer, where it matters.
    pub queues: Option<usize>,
    /// The CPUs to run on, as `taskset -c` takes them.
    pub cpus: &'a str,
    /// Whether it is to log each request: see [`Server::requests`].
    pub logs: bool,
}

/// Where Ferry says that it is ready, as it says it to a service manager (sd_notify(3)): it listens before the process that
/// serves is there. Peers say nothing.
struct Notices(Option<UnixDatagram>);

impl Notices {
    fn new(socket: &Path, command: &[OsString]) -> Result<Self> {
        let path = socket.with_extension("notify");
        let _ = std::fs::remove_file(&path);
        let is_ferry =
            command.first().and_then(|program| Path::new(program).file_name()).is_some_and(|name| name == "ferry");
        let socket = is_ferry.then(|| UnixDatagram::bind(&path)).transpose();
        let socket = socket.with_context(|| format!("cannot listen at {}", path.display()))?;
        socket.iter().try_for_each(|socket| socket.set_nonblocking(true))?;
        Ok(Self(socket))
    }

    /// Whether it says so now, or never does.
    fn say_ready(&self) -> bool {
        let mut notice = [0; 64];
        self.0.as_ref().is_none_or(|socket| {
            std::iter::from_fn(|| socket.recv(&mut notice).ok().map(|len| notice[..len].starts_with(b"READY=1")))
                .any(|ready| ready)
        })
    }
}

/// A server that listens. It is killed when this is dropped, or when the program ends in any other way.
#[derive(Debug)]
pub struct Server {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
    name: &'static str,
}

impl Server {
    /// Starts a server and waits until it listens.
    pub fn start(peer: Peer, programs: &Programs, sharing: &Sharing<'_>) -> Result<Self> {
        let server = Self::spawn(peer.name(), &sharing.socket, sharing.cpus, command(peer, programs, sharing)?)?;
        if sharing.logs && peer == Peer::Ferry {
            log_requests(programs, &sharing.socket)?;
        }
        Ok(server)
    }

    /// How much it has logged.
    pub fn logged_bytes(&self) -> u64 {
        std::fs::metadata(&self.log).map_or(0, |log| log.len())
    }

    /// The requests that it has logged behind so many bytes, by their names.
    pub fn requests(&self, from: u64) -> Result<BTreeMap<String, u64>> {
        let mut log = File::open(&self.log).with_context(|| format!("cannot read {}", self.log.display()))?;
        log.seek(SeekFrom::Start(from))?;
        let mut counts = BTreeMap::new();
        for line in BufReader::new(log).split(b'\n') {
            if let Some(name) = request(&String::from_utf8_lossy(&line?)) {
                *counts.entry(name).or_insert(0) += 1;
            }
        }
        Ok(counts)
    }

    /// Starts any command that listens at `socket`, on these CPUs; what it says goes beside the socket.
    pub fn spawn(name: &'static str, socket: &Path, cpus: &str, command: Vec<OsString>) -> Result<Self> {
        let _ = std::fs::remove_file(socket);
        Self::launch(name, socket.to_owned(), cpus, command, || is_listening(socket))
    }

    /// The same for one that listens at a TCP port; `place` is where what it says goes, with the ending `log`.
    pub fn spawn_tcp(
        name: &'static str,
        address: SocketAddr,
        place: PathBuf,
        cpus: &str,
        command: Vec<OsString>,
    ) -> Result<Self> {
        Self::launch(name, place, cpus, command, || TcpStream::connect(address).is_ok())
    }

    fn launch(
        name: &'static str,
        socket: PathBuf,
        cpus: &str,
        command: Vec<OsString>,
        is_ready: impl Fn() -> bool,
    ) -> Result<Self> {
        let log = socket.with_extension("log");
        let output = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let notices = Notices::new(&socket, &command)?;
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "taskset", "-c", cpus])
            .args(command)
            .env("NOTIFY_SOCKET", socket.with_extension("notify"))
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .context("cannot start setpriv (package util-linux)")?;
        let mut server = Self { child, socket, log, name };
        let deadline = Instant::now() + START_TIMEOUT;
        while !is_ready() || !notices.say_ready() {
            if !server.is_alive() {
                bail!("{} ended at its start: {}", server.name, server.last_words());
            }
            if Instant::now() > deadline {
                bail!("{} did not listen within {} s", server.name, START_TIMEOUT.as_secs());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }

    /// Its socket, if it has one.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The process that serves: each wrapper replaces itself by the next.
    pub fn pid(&self) -> u32 {
        measure::serving(self.child.id())
    }

    /// The process that was started, which may be another one than that which serves.
    pub fn started(&self) -> u32 {
        self.child.id()
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Returns the end of its output, on one line.
    pub fn last_words(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let tail = &text[text.len().saturating_sub(LAST_WORDS_BYTES)..];
        let words = String::from_utf8_lossy(tail).split_whitespace().collect::<Vec<_>>().join(" ");
        if words.is_empty() { "it said nothing".into() } else { words }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Whether somebody listens at a socket's path: the file is there a moment earlier, and not everybody who connects tries
/// again.
pub fn is_listening(socket: &Path) -> bool {
    let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    socket.exists() && table.lines().any(|line| is_listener(line, socket))
}

/// Whether a line of `/proc/net/unix` is of one that listens at this path, which our servers bind by a descriptor of its directory.
fn is_listener(line: &str, socket: &Path) -> bool {
    let mut fields = line.splitn(8, ' ');
    let listens = fields.nth(3) == Some(LISTENING);
    let bound = fields.nth(3).map(|rest| Path::new(rest.trim_start_matches(|letter| letter != '/')));
    let by_directory = |bound: &Path| {
        bound.starts_with("/proc/self/fd") && bound.components().count() == 6 && bound.file_name() == socket.file_name()
    };
    listens && bound.is_some_and(|bound| bound == socket || by_directory(bound))
}

/// Has ours log each request. It can be told to a moment after it listens.
fn log_requests(programs: &Programs, socket: &Path) -> Result<()> {
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        let mut log = Command::new(&programs.ferry);
        log.arg("log").arg(socket).arg("requests").stdin(Stdio::null());
        let output = log.output().context("cannot start ferry log")?;
        if output.status.success() {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("ferry log: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The name of the request that a line of a log is about: of ours, or of virtiofsd's at level debug.
fn request(line: &str) -> Option<String> {
    let ours = line.trim_start().strip_prefix("INFO ").filter(|text| text.contains(" share="));
    let text = ours.or_else(|| Some(line.split_once("Received request: opcode=")?.1))?;
    let name: String = text.chars().take_while(char::is_ascii_alphanumeric).collect();
    (!name.is_empty()).then(|| name.to_lowercase())
}

fn command(peer: Peer, programs: &Programs, sharing: &Sharing<'_>) -> Result<Vec<OsString>> {
    let mut words: Vec<OsString> = Vec::new();
    let mut add = |text: &str| words.extend(text.split(' ').map(OsString::from));
    match peer {
        Peer::Ferry | Peer::FerryOpen | Peer::FerryUncounted | Peer::FerryLimited => {
            add(&format!("--log warn share --tag {TAG} {}", sharing.config.ferry_flags()));
            if peer == Peer::FerryOpen {
                add("--sandbox none --seccomp none");
            }
            if peer == Peer::FerryLimited {
                add("--limit iops=1000000000,bps=1T");
            }
            if let Some(queues) = sharing.queues {
                add(&format!("--queues {queues}"));
            }
            words.splice(0..0, [programs.ferry.clone().into()]);
            if peer == Peer::FerryUncounted {
                words.splice(0..0, ["env".into(), "FERRY_METRICS=off".into()]);
            }
            words.extend([sharing.dir.into(), "--virtiofs".into(), sharing.socket.clone().into()]);
        }
        Peer::Virtiofsd => {
            let program = programs.virtiofsd.clone().context("virtiofsd is not there")?;
            // Without its sandbox and its filter of system calls, which only cost it time.
            let flags = sharing.config.virtiofsd_flags();
            let level = if sharing.logs { "debug" } else { "warn" };
            add(&format!("--tag {TAG} --sandbox none --seccomp none --log-level {level} {flags}"));
            words.splice(0..0, [program.into()]);
            words.extend(["--shared-dir".into(), sharing.dir.into()]);
            words.extend(["--socket-path".into(), sharing.socket.clone().into()]);
        }
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_servers_are_detected() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        assert!(!is_listening(&socket));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert!(is_listening(&socket));
    }

    #[test]
    fn logs_of_both_servers_are_parsed() {
        let ours = " INFO Lookup { name: \"x\" } share=\"a\" ino=1 pid=1 bytes=144 us=20";
        let theirs = "[2026-11-22T21:00:00Z DEBUG virtiofsd::server] Received request: opcode=Lookup (1), inode=1";
        assert_eq!([ours, theirs].map(request), [Some("lookup".into()), Some("lookup".into())]);
        assert_eq!((request("[2026 INFO virtiofsd] Waiting"), request(" INFO serving")), (None, None));
    }

    #[test]
    fn both_share_the_same_way() {
        let programs = Programs { ferry: "ferry".into(), virtiofsd: Some("virtiofsd".into()) };
        let sharing = Sharing {
            dir: Path::new("/a b"),
            socket: "/s".into(),
            config: Config::None,
            queues: Some(4),
            cpus: "1",
            logs: false,
        };
        let text = |peer| {
            let words = command(peer, &programs, &sharing).unwrap();
            words.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join("|")
        };
        assert_eq!(text(Peer::Ferry), "ferry|--log|warn|share|--tag|share|--cache|none|--queues|4|/a b|--virtiofs|/s");
        assert!(text(Peer::FerryUncounted).starts_with("env|FERRY_METRICS=off|ferry|--log|warn|share|"));
        assert!(text(Peer::Virtiofsd).contains("|--cache|never|--allow-mmap|--shared-dir|/a b|--socket-path|/s"));
    }
}
