//! A source, a mount point, and its mounts.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::mount::UnmountFlags;
use rustix::process::Pid;

use super::{ferry, run};

/// The maximum time of each step, far more than needed.
const PATIENCE: Duration = Duration::from_secs(60);

/// A source and a mount point. Dropping it unmounts everything and ends the servers, also after a panic.
pub struct Place {
    pub directory: tempfile::TempDir,
    pub source: PathBuf,
    pub mnt: PathBuf,
}

impl Place {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| {
            let path = directory.path().canonicalize().unwrap().join(name);
            fs::create_dir(&path).unwrap();
            path
        };
        let (source, mnt) = (at("source"), at("mnt"));
        fs::write(source.join("file"), "from the source").unwrap();
        fs::write(source.join("other"), "another").unwrap();
        Self { directory, source, mnt }
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// `ferry mount` of the source, with further arguments.
    pub fn mount(&self, args: &[&str]) -> Command {
        let mut command = ferry();
        command.arg("mount").arg(&self.source).arg(&self.mnt).args(args);
        command
    }

    /// Mounts in the background; returns the server's process id.
    pub fn mounted(&self, args: &[&str]) -> Pid {
        self.mounted_by(&mut self.mount(args))
    }

    /// As [`Self::mounted`], with another command line.
    pub fn mounted_by(&self, command: &mut Command) -> Pid {
        let output = run(command.arg("--json"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        let line: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(line["mountpoint"], self.mnt.to_str().unwrap());
        Pid::from_raw(line["pid"].as_i64().unwrap().try_into().unwrap()).unwrap()
    }

    pub fn mounts(&self) -> Vec<String> {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let path = format!(" {} ", self.mnt.display());
        table.lines().filter(|line| line.contains(&path)).map(str::to_owned).collect()
    }

    /// Unmounts, and waits for the server's end.
    pub fn unmount(&self, pid: Pid) {
        self.unmount_alone();
        until("its end after umount", || !runs(pid));
    }

    /// Unmounts without waiting for a server.
    pub fn unmount_alone(&self) {
        unmount(&self.mnt);
    }

    pub fn is_free(&self) -> bool {
        self.mounts().is_empty()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        detach(&self.mnt);
    }
}

/// Removes all mounts on a directory, also while they are used. Servers end with their mounts.
pub fn detach(mountpoint: &Path) {
    while rustix::mount::unmount(mountpoint, UnmountFlags::DETACH).is_ok() {}
}

/// Unmounts an unused mount.
pub fn unmount(mountpoint: &Path) {
    // A child of another test has copies of this process's open files until its exec.
    until("umount", || match rustix::mount::unmount(mountpoint, UnmountFlags::empty()) {
        Err(rustix::io::Errno::BUSY) => false,
        outcome => outcome.map(|()| true).unwrap(),
    });
}

pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < PATIENCE, "{what} does not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn runs(pid: Pid) -> bool {
    // No parent reaps a background server, so a zombie counts as ended.
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
}
