//! `ferry share --state` in a separate process, which can be killed and restarted under its guest.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ferry_driver::{Config, Driver};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::mounts::{RunningProgram, ferry};
use crate::{Place, directory};

/// Longer than anything takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);
/// How often the program is asked for a sign of life.
const TICK: Duration = Duration::from_millis(1);

/// A shared directory that outlives its servers.
#[derive(Debug)]
pub struct Survivor {
    /// The shared directory.
    pub path: PathBuf,
    /// The socket.
    pub socket: PathBuf,
    /// What the next server logs.
    pub log: &'static str,
    args: Vec<String>,
    /// The socket, if each server gets it from us.
    listener: Option<UnixListener>,
    started: Option<RunningProgram>,
    directory: TempDir,
}

impl Survivor {
    /// Shares a fresh directory with these further flags.
    pub fn new(place: Place, args: &[&str]) -> Self {
        let directory = directory(place);
        let path = directory.path().join("shared");
        fs::create_dir(&path).unwrap();
        Self::begin(path, directory, args, None)
    }

    /// The same on a socket that each server inherits, open and listening.
    pub fn inheriting(place: Place, args: &[&str]) -> Self {
        let directory = directory(place);
        let path = directory.path().join("shared");
        fs::create_dir(&path).unwrap();
        let listener = UnixListener::bind(directory.path().join("s")).unwrap();
        rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).unwrap();
        Self::begin(path, directory, args, Some(listener))
    }

    fn begin(path: PathBuf, directory: TempDir, args: &[&str], listener: Option<UnixListener>) -> Self {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        let mut survivor =
            Self { path, socket: directory.path().join("s"), log: "warn", args, listener, started: None, directory };
        survivor.start();
        survivor
    }

    /// Shares a directory of another user.
    pub fn of(path: &Path, args: &[&str]) -> Self {
        Self::begin(path.into(), directory(Place::Memory), args, None)
    }

    /// The directory of its state.
    pub fn state(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    /// Starts the program, and waits until it listens.
    pub fn start(&mut self) {
        let mut command = ferry(["--log", self.log, "share"]);
        command.arg(&self.path).arg("--state").arg(self.state());
        match &self.listener {
            Some(listener) => command.arg("--fd").arg(listener.as_raw_fd().to_string()),
            None => command.arg("--virtiofs").arg(&self.socket),
        };
        command.args(["--json", "--queues", "2"]).args(&self.args);
        let mut started = RunningProgram::new(&mut command);
        let end = Instant::now() + LIMIT;
        while !started.said().0.ends_with('\n') {
            let ended = started.wait(Duration::ZERO);
            assert!(ended.is_none() && Instant::now() < end, "{command:?}: {ended:?}: {}", started.said().1);
            std::thread::sleep(TICK);
        }
        self.started = Some(started);
    }

    /// Kills the program with SIGKILL.
    pub fn kill(&mut self) {
        self.started.take().unwrap().kill();
    }

    /// Ends the program with SIGTERM, and waits for it.
    pub fn end(&mut self) {
        self.end_by(Signal::TERM);
    }

    /// Ends the program with a signal that it catches, and waits for it. Returns what it said on standard error.
    pub fn end_by(&mut self, signal: Signal) -> String {
        let mut started = self.started.take().unwrap();
        kill_process(started.pid(), signal).unwrap();
        let status = started.wait(LIMIT).expect("it ends");
        let said = started.said().1;
        assert!(status.success(), "{status}: {said}");
        said
    }

    /// Kills the program and starts it again; the guest, which hangs up meanwhile, goes on with the next one.
    pub fn replace(&mut self, driver: &mut Driver) {
        self.kill();
        driver.hang_up();
        self.start();
        driver.reattach().unwrap();
    }

    /// Kills the program and starts it again; the guest is not notified.
    pub fn replace_unnoticed(&mut self) {
        self.kill();
        self.start();
    }

    /// What the program said on standard error.
    pub fn said(&self) -> String {
        self.started.as_ref().unwrap().said().1
    }

    /// How guests connect.
    pub fn config(&self) -> Config {
        Config { queues: 2, memory_bytes: 32 << 20, timeout: LIMIT, connect_within: LIMIT, ..Config::default() }
    }

    /// A guest that has mounted it.
    pub fn connect(&self) -> Driver {
        self.connect_with(false)
    }

    /// A guest that has mounted it, with packed rings or split ones.
    pub fn connect_with(&self, packed: bool) -> Driver {
        let mut driver = Driver::connect(&self.socket, Config { packed, ..self.config() }).unwrap();
        driver.init().unwrap();
        driver
    }

    /// The process that keeps its state.
    pub fn keeper(&self) -> Option<Pid> {
        let socket = self.state().join("keeper").into_os_string().into_encoded_bytes();
        let line = [&b"ferry-keeper\0"[..], &socket, b"\0"].concat();
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let mut keepers =
            numbers.filter(|pid| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|found| found == line));
        keepers.next().and_then(Pid::from_raw)
    }

    /// Waits until nothing is kept any more.
    pub fn wait_for_the_keeper(&self) {
        let end = Instant::now() + LIMIT;
        while self.keeper().is_some() {
            assert!(Instant::now() < end, "the keeper stays");
            std::thread::sleep(TICK);
        }
    }
}

impl Drop for Survivor {
    fn drop(&mut self) {
        drop(self.started.take());
        if let Some(keeper) = self.keeper() {
            let _ = kill_process(keeper, Signal::KILL);
        }
    }
}
