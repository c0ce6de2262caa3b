//! Starting the program and seeing what becomes of it.
#![allow(dead_code, missing_docs, reason = "each test file uses a part")]

pub mod images;
pub mod place;
pub mod schema;
pub mod servers;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// Far more than anything here takes, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub fn ferry() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferry"));
    command.env_remove("FERRY_LOG").stdin(Stdio::null());
    command
}

pub fn run(command: &mut Command) -> Output {
    command.output().expect("the program starts")
}

/// Runs what must fail with a status and one sentence, which it answers.
pub fn refused(status: i32, command: &mut Command) -> String {
    let output = run(command);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{command:?}: {text}");
    assert_eq!(text.lines().count(), 1, "not one sentence: {text}");
    assert!(text.starts_with("ferry: "), "{text}");
    text
}

/// A running `ferry share --json`.
pub struct Server {
    child: Child,
    /// What it said once it was listening.
    pub line: serde_json::Value,
}

impl Server {
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.arg("--json").stdout(Stdio::piped()).spawn().expect("the program starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("it is piped");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        let line = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        Self { child, line }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("it runs");
    }

    /// Waits for the end; the exit status, unless a signal ended it.
    pub fn status(&mut self) -> Option<i32> {
        wait(&mut self.child)
    }
}

impl Drop for Server {
    /// A server that is only killed leaves its mount behind.
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = rustix::process::kill_process(self.pid(), Signal::TERM);
        }
        let end = Instant::now() + Duration::from_secs(5);
        while let Ok(None) = self.child.try_wait() {
            if Instant::now() > end {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Waits for a child with a bound.
pub fn wait(child: &mut Child) -> Option<i32> {
    let begin = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a child of ours") {
            return status.code();
        }
        assert!(begin.elapsed() < PATIENCE, "it does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Mounting needs root and the device; without them there is nothing to test.
#[allow(unused_macros, reason = "each test file uses a part")]
macro_rules! needs_fuse {
    () => {
        if !rustix::process::geteuid().is_root() || std::fs::File::open("/dev/fuse").is_err() {
            ferry_skip::skip!("needs root and /dev/fuse");
            return;
        }
    };
}
#[allow(unused_imports, reason = "each test file uses a part")]
pub(crate) use needs_fuse;
