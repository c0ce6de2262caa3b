//! The program, started by any user in a private directory, with its default sandbox.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver};
use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::inside::{InnerProcess, Thread};
use crate::mounts::{RunningProgram, program};
use crate::{Place, directory};

/// A user who is not root.
pub const USER: u32 = 1234;
/// More than any process here takes to begin or end, also on a busy machine.
pub const SOON: Duration = Duration::from_secs(60);
/// How long to wait before looking again.
pub const TICK: Duration = Duration::from_millis(10);
/// Threads that connect to servers, and those that they alone start.
const CONNECTORS: [&str; 4] = ["9p-keeper", "9p-reader", "9p-sender", "9p-lock"];
/// A thread that is started by the first thread that loses a connection: one of those above, or one that serves a guest.
const ANYBODYS: &str = "9p-again";

/// Whether this is root, which is required to change the user and to set up root's sandbox.
pub fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        ferry_skip::skip!("needs root");
    }
    is_root
}

/// A command of some user's.
pub fn as_user(user: u32, program: &Path) -> Command {
    if user == rustix::process::geteuid().as_raw() {
        return Command::new(program);
    }
    let user = user.to_string();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]).arg(program);
    command
}

/// A directory of a user, with the program where all users may start it.
#[derive(Debug)]
pub struct UserHome {
    directory: TempDir,
    user: u32,
}

impl UserHome {
    /// A new one.
    pub fn of(user: u32) -> Self {
        let home = Self { directory: directory(Place::Disk), user };
        home.program(program(), "ferry-copy");
        chown(home.directory.path(), Some(user), Some(user)).unwrap();
        home
    }

    /// Whose it is.
    pub fn user(&self) -> u32 {
        self.user
    }

    /// Copies a program to where the user may start it.
    pub fn program(&self, program: &Path, name: &str) -> PathBuf {
        let copy = self.at(name);
        crate::copy_program(program, &copy);
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
        copy
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Something in it.
    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Makes something that belongs to the user.
    pub fn make(&self, name: &str, make: impl FnOnce(&Path)) -> PathBuf {
        let path = self.at(name);
        make(&path);
        chown(&path, Some(self.user), Some(self.user)).unwrap();
        path
    }

    /// The program, started by the user here, with what stands before it.
    pub fn command(&self, before: &[&str], line: &str) -> Command {
        let program = as_user(self.user, &self.at("ferry-copy"));
        let mut command = match before {
            [] => program,
            [first, rest @ ..] => {
                let mut command = Command::new(first);
                command.args(rest).arg(program.get_program()).args(program.get_args());
                command
            }
        };
        command.args(line.split_whitespace()).current_dir(self.directory.path());
        command.env("XDG_RUNTIME_DIR", self.directory.path()).env_remove("FERRY_LOG");
        command
    }

    /// Has the program do something that comes to an end.
    pub fn run(&self, line: &str) {
        let output = self.command(&[], line).output().unwrap();
        assert!(output.status.success(), "{line}: {output:?}");
    }

    /// Starts a server, which says in JSON that it is up.
    pub fn serve(self, line: &str) -> Served {
        let command = self.command(&[], line);
        self.serve_by(command)
    }

    /// The same by a command of whatever kind.
    pub fn serve_by(self, mut command: Command) -> Served {
        let mut started = RunningProgram::new(&mut command);
        let end = Instant::now() + SOON;
        while !started.said().0.ends_with('\n') {
            let ended = started.wait(Duration::ZERO);
            assert!(ended.is_none() && Instant::now() < end, "{ended:?}: {}", started.said().1);
            std::thread::sleep(TICK);
        }
        let line: serde_json::Value = serde_json::from_str(&started.said().0).unwrap();
        assert_eq!(line["pid"], started.pid().as_raw_nonzero().get(), "the process that was started is told of");
        Served { inside: InnerProcess::of(started.pid()), started, line, home: self }
    }
}

/// The program, serving.
#[derive(Debug)]
pub struct Served {
    /// The process that was started. It is killed on drop, and the other one does not outlive it.
    pub started: RunningProgram,
    /// The one that serves.
    pub inside: InnerProcess,
    /// What it said in JSON.
    pub line: serde_json::Value,
    /// Where it was started.
    pub home: UserHome,
}

/// What a process inside the sandbox can see and do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Expected<'a> {
    /// How many directories have places.
    pub shares: usize,
    /// The files of the server's home that are open.
    pub files: &'a [&'a str],
    /// The capabilities of its threads.
    pub capabilities: u64,
    /// The same of those that connect to servers, and whether there are any: these are in our network.
    pub connector: Option<u64>,
    /// Which of the places is a socket's directory, which they alone see.
    pub socket: Option<usize>,
    /// Files of the host's that can be read, in the order of the alphabet.
    pub names: &'a [&'a str],
}

impl Served {
    /// A guest at its socket `s`, of virtio-fs.
    pub fn guest(&self) -> Driver {
        self.guest_at("s")
    }

    /// The same at another socket.
    pub fn guest_at(&self, socket: &str) -> Driver {
        let config = Config { queues: 2, timeout: SOON, ..Config::default() };
        let mut driver = Driver::connect(self.home.at(socket), config).unwrap();
        driver.init().unwrap();
        driver
    }

    /// On standard error.
    pub fn said(&self) -> String {
        self.started.said().1
    }

    /// That it says so soon.
    #[track_caller]
    pub fn says(&self, words: &str) {
        let end = Instant::now() + SOON;
        while !self.said().contains(words) {
            assert!(Instant::now() < end, "it does not say {words:?}: {}", self.said());
            std::thread::sleep(TICK);
        }
    }

    /// The status with which it ends after a signal to the process that was started.
    #[track_caller]
    pub fn ends_by(&mut self, signal: Signal) -> i32 {
        kill_process(self.started.pid(), signal).unwrap();
        self.ends()
    }

    /// The status with which it ends.
    #[track_caller]
    pub fn ends(&mut self) -> i32 {
        let status = self.started.wait(SOON).unwrap_or_else(|| panic!("it does not end: {}", self.said()));
        status.code().unwrap_or_else(|| panic!("{status}: {}", self.said()))
    }

    /// Checks the whole sandbox: these directories are visible, these files of its home are open, and nothing else is
    /// reachable.
    #[track_caller]
    pub fn is_confined(&self, shares: usize, files: &[&str], capabilities: u64) {
        self.is_behind_walls(&Expected { shares, files, capabilities, ..Expected::default() });
    }

    /// The same, also of a server that connects to others.
    #[track_caller]
    pub fn is_behind_walls(&self, Expected { shares, files, capabilities, connector, socket, names }: &Expected<'_>) {
        let (shares, inside) = (*shares, self.inside);
        inside.all_are("NoNewPrivs", "1");
        inside.all_are("Seccomp", "2");
        for namespace in ["mnt", "pid"] {
            assert!(inside.has_own(namespace), "{namespace}");
        }
        let threads = inside.threads();
        let known = threads.iter().filter(|thread| thread.name() != ANYBODYS);
        let (connect, others): (Vec<_>, Vec<_>) =
            known.partition(|thread| connector.is_some() && CONNECTORS.contains(&thread.name()));
        let with_socket = socket.map(|number| format!("/share/{number}"));
        let socket_flags =
            |thread: &Thread| with_socket.as_ref().and_then(|place| thread.mounted(place)).map(str::to_owned);
        for thread in others {
            assert!(thread.has_own_network, "{}", thread.name());
            assert_eq!(socket_flags(thread), None, "{}", thread.name());
            thread.has_capabilities(*capabilities);
        }
        for thread in &connect {
            assert!(!thread.has_own_network, "{}", thread.name());
            let flags = socket_flags(thread);
            let is_as_expected = |flags: &String| flags.starts_with("ro,nosuid,nodev,noexec");
            assert_eq!(
                flags.as_ref().is_some_and(is_as_expected),
                with_socket.is_some(),
                "{}: {flags:?}",
                thread.name()
            );
            thread.has_capabilities(connector.unwrap_or_default());
            assert_eq!(thread.status("Seccomp_filters"), "3", "{}", thread.name());
        }
        assert!(connector.is_none() || connect.len() >= 3, "{threads:?}");
        let etc = (!names.is_empty()).then_some("etc");
        assert_eq!(inside.sees(""), etc.into_iter().chain(["proc", "share"]).collect::<Vec<_>>());
        let places: Vec<String> = (0..shares).map(|number| number.to_string()).collect();
        assert_eq!(inside.sees("share"), places);
        let names = names.iter().map(|name| (*name).to_owned());
        let mounts = ["/proc/self/fd", "/proc/self/uid_map"].map(str::to_owned);
        let mounts = std::iter::once("/".to_owned()).chain(names).chain(mounts);
        let shared = places.iter().map(|at| format!("/share/{at}")).filter(|place| Some(place) != with_socket.as_ref());
        let mounts: Vec<String> = mounts.chain(shared).collect();
        assert_eq!(inside.mounts(), mounts);
        assert_eq!(fs::read_link(inside.file("cwd")).unwrap(), Path::new("/"));
        // In another mount namespace they have the names that they have there. The host's table of descriptors would be
        // named by the process id.
        let dirs = inside.open_directories();
        let is_inside = |dir: &PathBuf| dir == Path::new("/proc/self/fd") || shares > 0 && dir.starts_with("/share/");
        assert!(dirs.iter().all(is_inside), "{dirs:?}");
        let mut expected: Vec<PathBuf> = files.iter().map(|name| self.home.at(name)).collect();
        expected.sort_unstable();
        let found: Vec<_> = inside.open_files().into_iter().filter(|path| path.starts_with(self.home.path())).collect();
        assert_eq!(found, expected);
        // Of the process that stays outside, none of them is.
        let outside = self.started.pid().as_raw_nonzero();
        for entry in fs::read_dir(format!("/proc/{outside}/fd")).unwrap() {
            let open = fs::read_link(entry.unwrap().path()).unwrap();
            assert!(!open.starts_with(self.home.path()), "{}", open.display());
        }
    }
}
