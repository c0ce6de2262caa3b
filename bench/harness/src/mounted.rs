//! File systems mounted on this host, each with its server.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::{Pid, Signal, kill_process};

/// How long a server may take until its file system is mounted.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// How long it may take to unmount and end, before it is killed.
const END_TIMEOUT: Duration = Duration::from_secs(3);
/// How often it is looked.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// How much of a server's last words an error shows.
const LAST_WORDS_BYTES: usize = 400;

/// A mounted file system. It goes when this is dropped.
#[derive(Debug)]
pub struct Mounted {
    dir: PathBuf,
    log: PathBuf,
    server: Option<Child>,
}

impl Mounted {
    /// Has a command mount something at `dir`, which is created, and serve it; without a command, that is a tmpfs.
    pub fn new(dir: PathBuf, command: Option<Vec<OsString>>) -> Result<Self> {
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let mut mounted = Self { log: dir.with_extension("log"), dir, server: None };
        let Some(words) = command else {
            rustix::mount::mount("tmpfs", &mounted.dir, "tmpfs", MountFlags::empty(), None)
                .context("cannot mount a tmpfs")?;
            return Ok(mounted);
        };
        let log = File::create(&mounted.log).with_context(|| format!("cannot create {}", mounted.log.display()))?;
        let server = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .args(words)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start setpriv (package util-linux)")?;
        mounted.server = Some(server);
        mounted.await_mount()?;
        Ok(mounted)
    }

    fn await_mount(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        while !is_mounted(&self.dir) {
            if !self.is_alive() {
                bail!("its server ended at its start: {}", self.last_words());
            }
            ensure!(Instant::now() < deadline, "it was not mounted within {} s", START_TIMEOUT.as_secs());
            std::thread::sleep(LOOK_INTERVAL);
        }
        Ok(())
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The process of its server, if it has one.
    pub fn pid(&self) -> Option<u32> {
        self.server.as_ref().map(Child::id)
    }

    fn is_alive(&mut self) -> bool {
        self.server.as_mut().is_none_or(|server| matches!(server.try_wait(), Ok(None)))
    }

    /// The end of what its server said, on one line.
    pub fn last_words(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let tail = &text[text.len().saturating_sub(LAST_WORDS_BYTES)..];
        let words = String::from_utf8_lossy(tail).split_whitespace().collect::<Vec<_>>().join(" ");
        if words.is_empty() { "it said nothing".into() } else { words }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            // It has not been waited for, so the process id is still its own.
            let _ = kill_process(Pid::from_child(server), Signal::TERM);
            let deadline = Instant::now() + END_TIMEOUT;
            while matches!(server.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(LOOK_INTERVAL);
            }
            let _ = server.kill();
            let _ = server.wait();
        }
        // A server that was killed leaves its mount, whose calls then fail; nothing can be busy in it for long.
        if is_mounted(&self.dir) {
            let _ = rustix::mount::unmount(&self.dir, UnmountFlags::DETACH);
        }
    }
}

/// Whether something is mounted at `dir`, without asking its server.
fn is_mounted(dir: &Path) -> bool {
    places().iter().any(|place| place == dir.as_os_str().as_bytes())
}

/// Unmounts whatever is mounted below `dir`, in use or not.
pub fn unmount_below(dir: &Path) {
    for place in places().into_iter().rev().map(|place| PathBuf::from(OsString::from_vec(place))) {
        if place != dir && place.starts_with(dir) {
            let _ = rustix::mount::unmount(&place, UnmountFlags::DETACH);
        }
    }
}

/// Where file systems are mounted, in the order of their mounts.
fn places() -> Vec<Vec<u8>> {
    let table = std::fs::read("/proc/self/mounts").unwrap_or_default();
    let place = |line: &[u8]| unescape(line.split(|&byte| byte == b' ').nth(1).unwrap_or_default());
    table.split(|&byte| byte == b'\n').map(place).collect()
}

/// Blanks and the like stand as octal numbers in the mount table.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.filter(|_| first == b'\\').and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                rest = &tail[3..];
            }
            None => {
                out.push(first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_mounts_has_blanks_as_numbers() {
        assert_eq!(unescape(br"/a\040b\134c"), br"/a b\c");
        assert_eq!(unescape(br"/a\04"), br"/a\04");
        assert!(is_mounted(Path::new("/proc")) && !is_mounted(Path::new("/proc/self")));
    }
}
