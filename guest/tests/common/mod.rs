//! Shared by the tests of both kinds of guest.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]
#![allow(dead_code, reason = "each test program uses a part")]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use ferry_guest::{Cache, Guest, Input, Output, Result};

/// Longer than any step takes on a slow, busy machine: it only ends what hangs.
pub const TIMEOUT: Duration = Duration::from_secs(600);

/// A guest whose output is collected.
pub fn guest(command: &[&str]) -> Guest {
    let mut guest = Guest::new(Cache::from_env().unwrap(), command);
    guest.stdin = Input::Null;
    guest.stdout = Output::Piped;
    guest.stderr = Output::Piped;
    guest
}

/// Runs it to the end: status, standard output, standard error.
pub fn run(guest: Guest) -> Result<(i32, Vec<u8>, Vec<u8>)> {
    let mut running = guest.spawn()?;
    let [out, err] = [running.stdout.take(), running.stderr.take()].map(|line| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            line.unwrap().read_to_end(&mut bytes).unwrap();
            bytes
        })
    });
    let status = running.wait_timeout(TIMEOUT)?;
    Ok((status, out.join().unwrap(), err.join().unwrap()))
}

/// virtiofsd 1.14 on a directory. It ends with its client, or with this.
pub struct Virtiofsd {
    child: Child,
    pub socket: PathBuf,
}

impl Virtiofsd {
    pub fn new(shared: &Path, socket: PathBuf, tag: &str) -> Self {
        let child = Command::new(Cache::from_env().unwrap().peer("virtiofsd").unwrap())
            .args(["--sandbox", "none", "--tag", tag, "--shared-dir"])
            .arg(shared)
            .arg("--socket-path")
            .arg(&socket)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self { child, socket };
        for _ in 0..500 {
            if server.socket.exists() {
                return server;
            }
            sleep(Duration::from_millis(10));
        }
        panic!("virtiofsd does not listen on {}", server.socket.display());
    }
}

impl Drop for Virtiofsd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
