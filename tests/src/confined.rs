//! The program, sharing a directory from its default sandbox.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::{Place, directory};

/// `ferry share` in its default sandbox, with a fresh directory.
#[derive(Debug)]
pub struct ConfinedShare {
    child: Child,
    /// Its socket; the tag is `t`.
    pub socket: PathBuf,
    /// The shared directory.
    pub path: PathBuf,
    directory: TempDir,
}

impl ConfinedShare {
    /// Starts it with further flags, and waits until it listens.
    pub fn start(flags: &[&str]) -> Self {
        let directory = directory(Place::Disk);
        let (socket, path) = (directory.path().join("s"), directory.path().join("shared"));
        fs::create_dir(&path).unwrap();
        let mut command = Command::new(crate::mounts::program());
        command.arg("share").arg(&path).arg("--virtiofs").arg(&socket).args(["--tag", "t", "--json"]).args(flags);
        command.args(["--sandbox", "namespace", "--seccomp", "kill"]);
        let stderr = fs::File::create(directory.path().join("stderr")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr).env_remove("FERRY_LOG");
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let confined = Self { child, socket, path, directory };
        assert!(!line.is_empty(), "it does not start: {}", confined.said());
        confined
    }

    /// Returns its standard error.
    pub fn said(&self) -> String {
        fs::read_to_string(self.directory.path().join("stderr")).unwrap()
    }

    /// Returns whether it still serves: a forbidden system call would have ended it.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for ConfinedShare {
    fn drop(&mut self) {
        // The one inside does not outlive it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
