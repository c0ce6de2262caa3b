//! Ending a mount that hangs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::mount::{UnmountFlags, unmount};

use super::{RunningProgram, mount_entry};

/// Ends a mount by force: processes that wait for it get an error.
#[derive(Debug, Clone)]
pub struct Emergency {
    mountpoint: PathBuf,
    server: Option<Arc<Mutex<RunningProgram>>>,
}

impl Emergency {
    /// For a mount point, and the program that serves it.
    pub fn new(mountpoint: &Path, server: Option<Arc<Mutex<RunningProgram>>>) -> Self {
        Self { mountpoint: mountpoint.into(), server }
    }

    /// The directory of the FUSE connection's controls, while it is mounted.
    pub fn controls(&self) -> Option<PathBuf> {
        let entry = mount_entry(&self.mountpoint)?;
        let device = entry.split(' ').nth(2)?;
        let (_, minor) = device.split_once(':')?;
        Some(Path::new("/sys/fs/fuse/connections").join(minor))
    }

    /// Aborts the connection: requests under way and those to come fail.
    pub fn abort(&self) {
        if let Some(controls) = self.controls()
            && fs::write(controls.join("abort"), "1").is_err()
        {
            // The controls need not be mounted; to unmount by force aborts, too.
            let _ = unmount(&self.mountpoint, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW);
        }
    }

    /// Ends everything: the connection, the mounts, the server.
    pub fn end(&self) {
        // Mounts may lie upon each other.
        while mount_entry(&self.mountpoint).is_some() {
            self.abort();
            let unmounted = Command::new("umount").arg("-l").arg(&self.mountpoint).status();
            if !unmounted.is_ok_and(|status| status.success()) {
                break;
            }
        }
        if let Some(server) = &self.server {
            server.lock().unwrap_or_else(PoisonError::into_inner).kill();
        }
    }
}

/// Calls an [`Emergency`] off when dropped; ends the mount when the time is over before that.
#[derive(Debug)]
pub struct Watchdog {
    dismissed: Option<Sender<()>>,
    thread: Option<JoinHandle<bool>>,
}

impl Watchdog {
    /// Watches from now on.
    pub fn new(emergency: Emergency, limit: Duration) -> Self {
        let (dismissed, wait) = channel();
        let thread = std::thread::spawn(move || {
            let expired = wait.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
            if expired {
                eprintln!("watchdog: {} after {limit:?}: ending it", emergency.mountpoint.display());
                emergency.end();
            }
            expired
        });
        Self { dismissed: Some(dismissed), thread: Some(thread) }
    }

    /// Ends watching. Returns whether the time had been over.
    pub fn dismiss(&mut self) -> bool {
        self.dismissed = None;
        self.thread.take().is_some_and(|thread| thread.join().unwrap_or(true))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.dismiss();
    }
}
