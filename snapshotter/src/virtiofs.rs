//! Views that virtual machines read by virtio-fs, if a label asks for it: a process `ferry share` per view, which outlives this one.
//!
//! ```text
//! ROOT/snapshots/ID/share     the process
//! SOCKET-DIRECTORY/ID.sock    where the monitor of a virtual machine connects
//! ```
//!
//! The image itself is shared, not its mount on this host, so that the machine can map it (DAX).

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::api::Mount;
use crate::config::{LazyConfig, VirtiofsConfig};
use crate::error::{Error, IoContext, Result, log_failure};
use crate::keys::Keys;
use crate::lazy::{SharedImage, process, pull_credentials};

/// The label that asks for a share, with any value: containerd hands labels with this beginning to snapshotters.
pub const VIRTIOFS_LABEL: &str = "containerd.io/snapshot/ferry.virtiofs";
/// The name of the file that names the process.
const SHARE: &str = "share";
/// How long a start may take: an image whose data are in a registry asks it once.
const START_TIME: Duration = Duration::from_secs(60);
/// The maximum length of the path of a socket in bytes, as the kernel has it.
const SOCKET_BYTES_MAX: usize = 107;

/// The processes of shares.
#[derive(Debug)]
pub(crate) struct Shares {
    config: VirtiofsConfig,
    lazy: LazyConfig,
    /// The names of sockets that are being made.
    held: Keys,
}

impl Shares {
    /// Creates the directory of sockets, if there is to be one.
    pub(crate) fn new(config: VirtiofsConfig, lazy: LazyConfig) -> Result<Self> {
        let shares = Self { config, lazy, held: Keys::default() };
        if let Some(directory) = &shares.config.socket_directory {
            crate::directories::create_dir(directory, 0o700)?;
        }
        Ok(shares)
    }

    /// Returns the socket of a view, whether or not it is there.
    pub(crate) fn socket(&self, id: u64) -> Result<PathBuf> {
        let directory = self.config.socket_directory.as_ref().ok_or_else(|| {
            let why = "the configuration file names no socket-directory in [virtiofs]";
            Error::FailedPrecondition(format!("the label {VIRTIOFS_LABEL}: {why}"))
        })?;
        let socket = directory.join(format!("{id}.sock"));
        if socket.as_os_str().len() > SOCKET_BYTES_MAX {
            let why = format!("the path of the socket {} is longer than {SOCKET_BYTES_MAX} bytes", socket.display());
            return Err(Error::FailedPrecondition(why));
        }
        Ok(socket)
    }

    /// Starts the process of a view, unless it runs; returns the mount by which a virtual machine has it.
    pub(crate) fn serve(&self, (id, directory): (u64, &Path), store: &Path, image: &SharedImage) -> Result<Mount> {
        let (socket, tag) = (self.socket(id)?, format!("ferry-{id}"));
        let _held = self.held.hold(&tag);
        let process = directory.join(SHARE);
        if !process::runs(&process) || !socket.exists() {
            self.end(id, directory);
            self.start(&process, (&socket, &tag), store, image)?;
        }
        let options = ["ro".into(), format!("socket={}", socket.display())].into();
        Ok(Mount { r#type: "virtiofs".into(), source: tag, target: String::new(), options })
    }

    fn start(&self, process: &Path, (socket, tag): (&Path, &str), store: &Path, image: &SharedImage) -> Result<()> {
        let mut source = std::ffi::OsString::from("image:");
        source.push(&image.path);
        let mut command = process::program_command(&self.lazy)?;
        command.arg("share").arg(source).args(["--digest", &image.digest, "--tag", tag, "--json"]);
        command.arg("--store").arg(store).arg("--virtiofs").arg(socket).stdout(Stdio::piped());
        if let Some((from, directory)) = &image.from {
            command.args(["--from", from, "--jobs", &self.lazy.jobs.to_string()]);
            command.env("FERRY_REGISTRY_MANIFEST", directory.join("manifest"));
            command.env(process::PULL_CREDENTIALS, directory.join(pull_credentials::FILE));
        }
        let shown = image.path.display().to_string();
        let mut child = process::spawn(&mut command, &shown)?;
        let named = process::name(child.id());
        let started = fs::write(process, named).doing("write to", process).and_then(|()| listens(&mut child, &shown));
        if started.is_err() {
            let _ = child.kill();
        }
        let tag = tag.to_owned();
        process::on_thread(move || {
            if let Ok(status) = child.wait() {
                tracing::info!("the process that shares {tag} ended: {status}");
            }
        });
        started
    }

    /// Ends the process of a view, if there is one, and removes its socket.
    pub(crate) fn end(&self, id: u64, directory: &Path) {
        let process = directory.join(SHARE);
        if !process.exists() {
            return;
        }
        log_failure(process::end(&process));
        if let Ok(socket) = self.socket(id)
            && let Err(error) = fs::remove_file(&socket)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!("cannot remove {}: {error}", socket.display());
        }
        if let Err(error) = fs::remove_file(&process) {
            tracing::warn!("cannot remove {}: {error}", process.display());
        }
    }
}

/// Waits until a process says that it listens, which is a line of its output.
fn listens(child: &mut Child, image: &str) -> Result<()> {
    let failed = |reason: String| Error::Lazy { image: image.into(), reason };
    let output = child.stdout.as_mut().ok_or_else(|| failed("its process has no output".into()))?;
    let end = Instant::now() + START_TIME;
    let mut byte = [0];
    while byte != *b"\n" {
        let left = end.saturating_duration_since(Instant::now());
        let left = left.try_into().map_err(|_| failed("its time has no number".into()))?;
        match poll(&mut [PollFd::new(output, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => continue,
            Ok(0) => return Err(failed(format!("it was not shared after {} s", START_TIME.as_secs()))),
            ready => drop(ready.map_err(std::io::Error::from).doing("wait for", image)?),
        }
        if output.read(&mut byte).doing("read from", image)? == 0 {
            return Err(failed("the process that shares it ended; the log has its reason".into()));
        }
    }
    Ok(())
}
