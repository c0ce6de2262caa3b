//! Programs that run in a directory, each with a time limit.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::Emergency;
use super::program::{text, wait};
use crate::{GuestResult, Place, directory};

/// How long something that was killed may take to be gone.
const DEATH: Duration = Duration::from_secs(10);

/// A directory to try, and what to do should a program hang in it.
#[derive(Debug, Clone)]
pub struct Site {
    /// The directory.
    pub path: PathBuf,
    emergency: Option<Emergency>,
}

impl Site {
    /// A directory that is on a mount.
    pub fn new(path: &Path, emergency: Emergency) -> Self {
        Self { path: path.into(), emergency: Some(emergency) }
    }

    /// A directory of the host's own, as a reference: what fails there is not Ferry's fault.
    pub fn on_host(path: &Path) -> Self {
        Self { path: path.into(), emergency: None }
    }

    /// Runs a shell script in the directory. `SCRATCH` is a directory outside of it.
    #[track_caller]
    pub fn sh(&self, script: &str, limit: Duration) -> GuestResult {
        let scratch = directory(Place::Disk);
        let mut command = Command::new("sh");
        command.args(["-euc", script]).env("SCRATCH", scratch.path());
        self.run(&mut command, limit)
    }

    /// Runs a program in the directory.
    ///
    /// # Panics
    /// When it takes longer than `limit`; the mount is ended then.
    #[track_caller]
    pub fn run(&self, command: &mut Command, limit: Duration) -> GuestResult {
        let begin = Instant::now();
        let [out, err] = [(); 2].map(|()| tempfile::tempfile().unwrap());
        command.stdin(Stdio::null()).stdout(out.try_clone().unwrap()).stderr(err.try_clone().unwrap());
        let mut child = self.spawn(command);
        let status = wait(&mut child, limit);
        if status.is_none() {
            self.stop(&mut child);
        }
        let (out, err) = (text(&out), text(&err));
        let Some(status) = status else {
            panic!("it did not end within {limit:?}: {command:?}\n{out}\n{err}");
        };
        let status = status.code().unwrap_or(-1);
        GuestResult { status, out, err, took: begin.elapsed(), console: String::new() }
    }

    /// Starts a program in the directory, in a process group of its own.
    #[track_caller]
    pub fn spawn(&self, command: &mut Command) -> Child {
        command.current_dir(&self.path).process_group(0);
        command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    /// Ends a program and its children; they may be waiting for the mount.
    pub fn stop(&self, child: &mut Child) {
        let group = Pid::from_child(child);
        let _ = kill_process_group(group, Signal::KILL);
        if wait(child, Duration::from_millis(500)).is_none() {
            if let Some(emergency) = &self.emergency {
                emergency.end();
            }
            let _ = kill_process_group(group, Signal::KILL);
            wait(child, DEATH);
        }
    }
}
