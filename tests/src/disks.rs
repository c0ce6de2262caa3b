//! What tests of disks share: a file being offered, guests that use it, and other people's clients.

mod load;
pub mod model;
mod process;

pub use load::{FEATURES, FEATURES_WITHOUT_CACHE, Load};
pub use process::Process;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_vfs::Disk;
use ferry_vhost::Socket;
use tempfile::TempDir;

use crate::{Device, Guest, GuestCache, GuestResult, Input, Place, directory, guest, run};

/// Where a guest has its first disk.
pub const GUEST_DISK: &str = "/dev/vda";

/// How long the kernel may hold a lock for a process that was killed, on a machine with much to do.
const LOCK_PATIENCE: Duration = Duration::from_secs(60);

/// A disk and the server that offers it.
#[derive(Debug)]
pub struct DiskServer {
    /// The file.
    pub file: PathBuf,
    /// The server's socket.
    pub socket: PathBuf,
    export: Option<ferry_blk::Export>,
    _socket: Socket,
    _directory: TempDir,
}

impl DiskServer {
    /// Offers a fresh file of so many bytes.
    pub fn new(place: Place, bytes: u64, options: &ferry_disk::Options) -> Self {
        let directory = directory(place);
        let file = directory.path().join("disk");
        ferry_disk::grow(&file, bytes, &ferry_disk::Options::default()).unwrap();
        Self::of(file, directory, options)
    }

    /// Offers a file within a directory, which is removed afterwards.
    pub fn of(file: PathBuf, directory: TempDir, options: &ferry_disk::Options) -> Self {
        let disk = ferry_disk::open(&file, options).unwrap();
        let writeback = options.cache != Some(ferry_disk::Cache::Writethrough);
        Self::with(file, directory, disk, writeback)
    }

    /// Offers any disk.
    pub fn with(file: PathBuf, directory: TempDir, disk: Arc<dyn Disk>, writeback: bool) -> Self {
        crate::log();
        let socket = directory.path().join("s");
        let bound = Socket::bind(&socket).unwrap();
        let options = ferry_blk::Options { writeback, ..ferry_blk::Options::default() };
        let export = ferry_blk::Export::start(bound.listener().unwrap(), disk, options).unwrap();
        Self { file, socket, export: Some(export), _socket: bound, _directory: directory }
    }

    /// What the file takes of the host's disk, in bytes.
    pub fn allocated(&self) -> u64 {
        std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&self.file).unwrap()) * 512
    }

    /// Runs `qemu-io` with these commands, through libblkio.
    pub fn qemu_io(&self, commands: &[&str]) -> Output {
        let image = format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", self.socket.display());
        let mut program = Command::new(tool("qemu-io"));
        program.args(["--image-opts", &image]);
        program.args(commands.iter().flat_map(|command| ["-c", command]));
        program.output().unwrap()
    }

    /// Runs a script in a User-mode Linux guest that has the disk as [`GUEST_DISK`].
    pub fn guest(&self, script: &str, timeout: Duration) -> GuestResult {
        run(guest_with(&self.socket, script), timeout)
    }
}

impl Drop for DiskServer {
    fn drop(&mut self) {
        if let Some(export) = self.export.take() {
            export.stop();
        }
    }
}

/// The shell's words for what `fio` is in scripts that run in guests: this host may have none.
///
/// # Panics
/// When it cannot be fetched.
pub fn fio_of_the_cache() -> String {
    format!("fio() {{ {} \"$@\"; }}\n", GuestCache::from_env().unwrap().peer("fio").unwrap().display())
}

/// A guest with a disk, and a script to run.
pub fn guest_with(socket: &Path, script: &str) -> Guest {
    let script = fio_of_the_cache() + script;
    let mut guest = Guest::new(GuestCache::from_env().unwrap(), ["sh", "-euxc", &script]);
    guest.devices = vec![Device::block(socket)];
    guest.stdin = Input::Null;
    guest.stdout = guest::Output::Piped;
    guest.stderr = guest::Output::Piped;
    guest
}

/// Runs `qemu-img check` on an image in qcow2 format, once the kernel does nothing for a killed server any more: that holds the lock,
/// for which qemu-img does not wait.
pub fn check_image(image: &Path) -> Output {
    let end = Instant::now() + LOCK_PATIENCE;
    loop {
        let checked = Command::new(tool("qemu-img")).args(["check", "-f", "qcow2"]).arg(image).output().unwrap();
        let is_locked = String::from_utf8_lossy(&checked.stderr).contains("Failed to get shared \"write\" lock");
        if !is_locked || Instant::now() >= end {
            return checked;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A program of the sets `disk` and `xfs` of `guest/fetch`.
///
/// # Panics
/// When it is not there.
pub fn tool(name: &str) -> PathBuf {
    let set = if name.contains("xfs") { "xfs" } else { "disk" };
    let path = GuestCache::from_env().unwrap().path().join(set).join("bin").join(name);
    assert!(path.exists(), "{} is missing; guest/fetch {set} fetches it", path.display());
    path
}
