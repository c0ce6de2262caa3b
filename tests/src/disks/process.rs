//! `ferry disk` in a process of its own, which can be killed and started again.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::inside::InnerProcess;
use crate::mounts::{RunningProgram, ferry};
use crate::{Place, directory};

/// How long the program may take until it listens.
const START: Duration = Duration::from_secs(60);
/// How often it is asked for a sign of life.
const TICK: Duration = Duration::from_millis(1);

/// A disk that the program offers. It is killed on drop.
#[derive(Debug)]
pub struct Process {
    /// The file.
    pub file: PathBuf,
    /// The socket.
    pub socket: PathBuf,
    args: Vec<String>,
    started: RunningProgram,
    _directory: TempDir,
}

impl Process {
    /// Offers a fresh file of so many bytes, with these further arguments.
    ///
    /// # Panics
    /// When the program does not offer it.
    pub fn new(place: Place, bytes: u64, args: &[&str]) -> Self {
        let directory = directory(place);
        let file = directory.path().join("disk");
        ferry_disk::grow(&file, bytes, &ferry_disk::Options::default()).unwrap();
        Self::of(file, directory, args)
    }

    /// Offers a file or device; the directory is where the socket goes, and is removed afterwards.
    ///
    /// # Panics
    /// When the program does not offer it.
    pub fn of(file: PathBuf, directory: TempDir, args: &[&str]) -> Self {
        let socket = directory.path().join("s");
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let started = start(&file, &socket, &args);
        Self { file, socket, args, started, _directory: directory }
    }

    /// Kills the program with SIGKILL. When this returns, it has ended, and so has its process inside the sandbox, which ends a
    /// moment later: until then that has the lock of the file.
    pub fn kill(&mut self) {
        let inside = InnerProcess::of(self.started.pid());
        self.started.kill();
        let end = Instant::now() + START;
        while !inside.is_gone() {
            assert!(Instant::now() < end, "the confined process does not end");
            std::thread::sleep(TICK);
        }
    }

    /// Starts the program again, after it was killed.
    ///
    /// # Panics
    /// When the program does not offer the disk.
    pub fn start(&mut self) {
        self.started = start(&self.file, &self.socket, &self.args);
    }

    /// What it said on standard error.
    pub fn said(&self) -> String {
        self.started.said().1
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.started.wait(Duration::ZERO).is_none()
    }

    /// What the file takes of the host's disk, in bytes.
    pub fn allocated(&self) -> u64 {
        std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&self.file).unwrap()) * 512
    }
}

fn start(file: &Path, socket: &Path, args: &[String]) -> RunningProgram {
    let mut command = ferry(["--log", "warn", "disk"]);
    command.arg(file).arg("--vhost-user").arg(socket).arg("--json").args(args);
    let mut started = RunningProgram::new(&mut command);
    let end = Instant::now() + START;
    // The line comes once the program listens; a file at the socket's place may be its predecessor's.
    while !started.said().0.ends_with('\n') {
        let ended = started.wait(Duration::ZERO);
        let in_use = ["is in use by another process", "is in use by a running server"];
        if ended.is_some() && Instant::now() < end && in_use.iter().any(|text| started.said().1.contains(text)) {
            // What the kernel still does for a killed predecessor may end later than a program waits for, on a busy machine.
            started = RunningProgram::new(&mut command);
            continue;
        }
        assert!(ended.is_none() && Instant::now() < end, "{command:?}: {ended:?}: {}", started.said().1);
        std::thread::sleep(TICK);
    }
    started
}
