//! 9P servers of a directory, as separate programs: ferry and others.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{RunningProgram, program};
use crate::GuestCache;
use crate::inside::child_of;

/// How long a server may take until it listens.
const START: Duration = Duration::from_secs(30);
/// How often that is looked at.
const TICK: Duration = Duration::from_millis(5);

/// Starts a program, and again whenever it ends; a file says which process it is. A test that starts it itself while it has
/// files open that the program serves would wait for ever: the files are closed, and so flushed, in the new process
/// before that becomes the program.
const KEEPER: &str = "while :; do \"$@\" & echo $! >$0.new; mv $0.new $0; wait $! || true; sleep 0.1; done";

/// Who made a 9P server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerVendor {
    /// `ferry share DIR --9p unix:SOCKET`.
    Ferry,
    /// diod, of Lawrence Livermore National Laboratory, in C.
    Diod,
    /// `p9ufs` of the Go package `hugelgupf/p9`, gVisor's server.
    P9ufs,
}

/// A server of the directory `shared` within a directory. It is ended on drop.
#[derive(Debug)]
pub struct NinePServer {
    maker: ServerVendor,
    directory: PathBuf,
    /// What stands behind `9p:`.
    address: String,
    started: Option<RunningProgram>,
}

impl NinePServer {
    /// Serves the directory `shared` below `directory`, which is made if need be. `None`, with a word why, where the program
    /// cannot be had.
    ///
    /// # Panics
    /// When it does not listen.
    pub fn start(maker: ServerVendor, directory: &Path) -> Option<Self> {
        let shared = directory.join("shared");
        std::fs::create_dir_all(&shared).unwrap();
        let address = match maker {
            ServerVendor::Ferry | ServerVendor::P9ufs => format!("unix:{}", directory.join("s").display()),
            ServerVendor::Diod => format!("tcp:{}{}", own_address(), shared.display()),
        };
        let mut server = Self { maker, directory: directory.into(), address, started: None };
        let mut command = server.command()?;
        server.started = Some(RunningProgram::new(command.stdin(Stdio::null())));
        server.wait_until(|server| server.listens());
        Some(server)
    }

    /// What stands behind `9p:` for it.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The directory that it serves.
    pub fn shared(&self) -> PathBuf {
        self.directory.join("shared")
    }

    /// Kills it as `kill -9` does, and waits until it serves again. Ours only.
    ///
    /// # Panics
    /// When it does not.
    pub fn restart(&self) {
        let killed = self.pid();
        kill_process(killed, Signal::KILL).unwrap();
        self.wait_until(|server| server.pid() != killed && server.listens());
    }

    /// Holds it up, as `kill -STOP` does. Ours only.
    ///
    /// # Panics
    /// When it does not run.
    pub fn hold_up(&self) {
        self.processes().for_each(|pid| kill_process(pid, Signal::STOP).unwrap());
    }

    /// Lets it go on. Ours only.
    ///
    /// # Panics
    /// When it does not run.
    pub fn go_on(&self) {
        self.processes().for_each(|pid| kill_process(pid, Signal::CONT).unwrap());
    }

    /// The started process, and the one that serves inside the sandbox.
    fn processes(&self) -> impl Iterator<Item = Pid> {
        let started = self.pid();
        // It may have ended.
        let is_there = Path::new("/proc").join(started.as_raw_nonzero().to_string()).exists();
        std::iter::once(started).chain(is_there.then(|| child_of(started)).flatten())
    }

    /// The process of ours that was started.
    ///
    /// # Panics
    /// When it is somebody else's.
    pub fn pid(&self) -> Pid {
        let text = std::fs::read_to_string(self.pid_file()).unwrap();
        Pid::from_raw(text.trim_end().parse().unwrap()).unwrap()
    }

    fn pid_file(&self) -> PathBuf {
        self.directory.join("pid")
    }

    fn wait_until(&self, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + START;
        while !is_so(self) {
            let said = self.started.as_ref().map(RunningProgram::said);
            assert!(Instant::now() < end, "{:?} does not listen at {}: {said:?}", self.maker, self.address);
            std::thread::sleep(TICK);
        }
    }

    fn listens(&self) -> bool {
        match self.address.strip_prefix("unix:") {
            Some(path) => UnixStream::connect(path).is_ok(),
            None => TcpStream::connect(self.listening()).is_ok(),
        }
    }

    /// The part of a TCP address that a server listens on.
    fn listening(&self) -> &str {
        let address = self.address.trim_start_matches("tcp:");
        address.split_once('/').map_or(address, |(address, _)| address)
    }

    fn command(&self) -> Option<Command> {
        let shared = self.shared();
        Some(match self.maker {
            ServerVendor::Ferry => {
                let mut command = Command::new("setpriv");
                command.args(["--pdeathsig", "KILL", "sh", "-uc", KEEPER]).arg(self.pid_file());
                command.args(["setpriv", "--pdeathsig", "TERM"]).arg(program()).arg("share").arg(shared);
                // The capability is for trusted.*, which clients may then have.
                command.args(["--9p", &self.address, "--modcaps", "+sys_admin"]).env_remove("FERRY_LOG");
                command
            }
            ServerVendor::Diod => {
                let mut command = diod("diod")?;
                command.args(["-f", "-n", "-N", "-c", "/dev/null", "-L", "stderr", "-l", self.listening(), "-e"]);
                command.arg(shared);
                command
            }
            ServerVendor::P9ufs => {
                let mut command = Command::new(go_program("p9ufs", "github.com/hugelgupf/p9/cmd/p9ufs")?);
                command.arg("-root").arg(shared).args(["-unix", self.address.trim_start_matches("unix:")]);
                command
            }
        })
    }
}

impl Drop for NinePServer {
    fn drop(&mut self) {
        if self.maker == ServerVendor::Ferry && self.pid_file().exists() {
            // A test that has failed may have stopped it, and then it does not hear that it is to end.
            for pid in self.processes() {
                let _ = kill_process(pid, Signal::CONT);
            }
        }
    }
}

/// An address of this host that no other process uses. A free port of 127.0.0.1 can be assigned at any time: a process that connects
/// to it before a server listens may get the port itself, and connect to itself.
fn own_address() -> SocketAddr {
    static COUNT: AtomicU8 = AtomicU8::new(1);
    let [.., high, middle, low] = std::process::id().to_be_bytes();
    let host = Ipv4Addr::new(127, 64 | (high ^ middle) & 0x3f, low, COUNT.fetch_add(1, Ordering::Relaxed));
    SocketAddr::from((host, 5640))
}

fn cache() -> GuestCache {
    GuestCache::from_env().unwrap()
}

/// A program of the set `diod` of guest/fetch; `None`, with a word why, where that is not.
pub fn diod(program: &str) -> Option<Command> {
    let root = cache().path().join("diod/root");
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let path = root.join("usr/sbin").join(program);
    if !path.exists() {
        ferry_skip::skip!("no {program}: guest/fetch diod brings it");
        return None;
    }
    let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
    command.arg("--library-path").arg(libraries).arg(path);
    Some(command)
}

/// A Go program, built into the cache by what `tests/clients/go` depends on; `None`, with a word why, where there is no
/// Go, or its modules cannot be fetched.
pub fn go_program(name: &str, package: &str) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients/go");
    let built = cache().path().join(name);
    if Command::new("go").arg("version").stdout(Stdio::null()).status().is_err() {
        ferry_skip::skip!("no Go here: apt-get install golang-go");
        return None;
    }
    // Go detects whether it must rebuild.
    let output =
        Command::new("go").args(["build", "-o"]).arg(&built).arg(package).current_dir(source).output().unwrap();
    if !output.status.success() {
        ferry_skip::skip!("{package} cannot be built: {}", String::from_utf8_lossy(&output.stderr));
        return None;
    }
    Some(built)
}
