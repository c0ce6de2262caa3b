//! One mount: the program, its directory, its end.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{
    Cell, Emergency, NinePServer, RunningProgram, ServerVendor, Site, Source, Transport, Watchdog, WithUring, ferry,
    mount_entry, with_uring,
};
use crate::{Place, SETTLE, directory};

/// How long the program may take until it has mounted.
const START: Duration = Duration::from_secs(30);
/// How often the mount table is looked at.
const TICK: Duration = Duration::from_millis(5);
/// The size of a `pmem` file.
const PMEM_BYTES: u64 = 1 << 30;

/// What a source's file or directory is called; it lies beside the mount point.
const BELOW: &str = "below";

/// How to mount, beside the [`Cell`].
#[derive(Debug, Clone)]
pub struct MountOptions {
    /// Further arguments of `ferry mount`.
    pub args: Vec<String>,
    /// What the mount is ended after, in case something hangs.
    pub limit: Duration,
    /// The kind of file system below a `dir` source.
    pub place: Place,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self { args: Vec::new(), limit: Duration::from_secs(180), place: Place::Disk }
    }
}

/// A mount by `ferry mount` in the foreground. Everything is gone when it is dropped.
#[derive(Debug)]
pub struct Mounted {
    /// What it is.
    pub cell: Cell,
    /// Where it is, and how to run programs there.
    pub site: Site,
    /// The file or directory below, if the source has one.
    pub below: PathBuf,
    /// How to end it by force.
    pub emergency: Emergency,
    server: Arc<Mutex<RunningProgram>>,
    watchdog: Watchdog,
    /// The 9P server below, if it is one, unless it was there before.
    pub remote: Option<NinePServer>,
    directory: Option<TempDir>,
    _uring: Option<WithUring>,
}

impl Mounted {
    /// Mounts a cell of the matrix; `None`, with a word why, where that cannot be done here.
    pub fn new(cell: &Cell) -> Option<Self> {
        Self::with(cell, &MountOptions::default())
    }

    /// As [`Self::new`], with options.
    ///
    /// # Panics
    /// When the program does not mount.
    pub fn with(cell: &Cell, options: &MountOptions) -> Option<Self> {
        Self::fresh(cell, options, |path| Self::prepared(*cell, path, options))
    }

    /// As [`Self::with`], of a 9P server that is there already.
    ///
    /// # Panics
    /// When the program does not mount.
    pub fn of_server(server: &NinePServer, cell: &Cell, options: &MountOptions) -> Option<Self> {
        Self::of_address(server.address(), cell, options)
    }

    /// The same, of what stands behind `9p:`.
    ///
    /// # Panics
    /// When the program does not mount.
    pub fn of_address(address: &str, cell: &Cell, options: &MountOptions) -> Option<Self> {
        let source = format!("9p:{address}");
        Self::fresh(cell, options, |path| Some(Self::of_source(*cell, &source, path, options)))
    }

    /// The same, of a directory that is there already, and may be mounted elsewhere.
    ///
    /// # Panics
    /// When the program does not mount.
    pub fn of_dir(dir: &Path, cell: &Cell, options: &MountOptions) -> Option<Self> {
        let source = dir.to_str().unwrap();
        Self::fresh(cell, options, |path| {
            let mut mounted = Self::of_source(*cell, source, path, options);
            mounted.below = dir.into();
            Some(mounted)
        })
    }

    /// Mounts in a directory of its own, if that can be done here.
    fn fresh(cell: &Cell, options: &MountOptions, mount: impl FnOnce(&Path) -> Option<Self>) -> Option<Self> {
        let uring = match super::missing() {
            Some(missing) => Err(missing),
            None => with_uring(),
        };
        if let Err(why) = uring
            && (cell.road == Transport::Uring || super::missing().is_some())
        {
            ferry_skip::skip!("{cell}: {why}");
            return None;
        }
        let directory = directory(options.place);
        // Suites act as other users, too.
        std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let path = directory.path().join("mnt");
        std::fs::create_dir(&path).unwrap();
        let mut mounted = mount(&path)?;
        mounted.directory = Some(directory);
        mounted._uring = uring.ok();
        mounted.assert_as_asked();
        Some(mounted)
    }

    /// Mounts on an existing mount point, with what is below it beside it.
    ///
    /// # Panics
    /// When the program does not mount.
    pub fn again(cell: Cell, mountpoint: &Path, options: &MountOptions) -> Self {
        Self::prepared(cell, mountpoint, options).expect("what is below was there before")
    }

    fn prepared(cell: Cell, mountpoint: &Path, options: &MountOptions) -> Option<Self> {
        let (source, remote) = prepare(cell.source, &mountpoint.with_file_name(BELOW))?;
        let mut mounted = Self::of_source(cell, &source, mountpoint, options);
        mounted.remote = remote;
        Some(mounted)
    }

    fn of_source(cell: Cell, source: &str, mountpoint: &Path, options: &MountOptions) -> Self {
        let mut command = ferry(["mount", source]);
        command
            .arg(mountpoint)
            .args(["--foreground", "--json", "--allow-other"])
            .args(cell.flags())
            .args(&options.args);
        if source.starts_with("9p:") {
            // The server is ours: its devices and set-user-id programs are tried, too.
            command.args(["-o", "suid,dev"]);
        }
        let mounted = Self::of(cell, mountpoint, &mut command, options.limit);
        // The mount of a server that died may have been there before.
        mounted.line();
        mounted
    }

    /// A mount made by any program; it ends when it is unmounted.
    ///
    /// # Panics
    /// When the program does not mount.
    pub fn of(cell: Cell, mountpoint: &Path, command: &mut Command, limit: Duration) -> Self {
        let server = Arc::new(Mutex::new(RunningProgram::new(command)));
        let emergency = Emergency::new(mountpoint, Some(Arc::clone(&server)));
        let watchdog = Watchdog::new(emergency.clone(), limit);
        let site = Site::new(mountpoint, emergency.clone());
        let below = mountpoint.with_file_name(BELOW);
        let mounted =
            Self { cell, site, below, emergency, server, watchdog, remote: None, directory: None, _uring: None };
        mounted.wait_for_mount();
        mounted
    }

    fn wait_for_mount(&self) {
        let end = Instant::now() + START;
        while mount_entry(&self.site.path).is_none() {
            let ended = self.server().wait(Duration::ZERO);
            assert!(ended.is_none(), "{}: ferry ended, {ended:?}: {:?}", self.cell, self.said());
            assert!(Instant::now() < end, "{}: no mount after {START:?}: {:?}", self.cell, self.said());
            std::thread::sleep(TICK);
        }
    }

    /// What `ferry mount --json` says once the mount is there.
    ///
    /// # Panics
    /// When it says nothing.
    pub fn line(&self) -> serde_json::Value {
        let end = Instant::now() + START;
        loop {
            let (out, err) = self.server().said();
            if out.ends_with('\n') {
                return serde_json::from_str(&out).unwrap_or_else(|error| panic!("{}: {error}: {out}", self.cell));
            }
            let ended = self.server().wait(Duration::ZERO);
            assert!(ended.is_none(), "{}: ferry ended, {ended:?}: {err}", self.cell);
            assert!(Instant::now() < end, "{}: no word of the mount after {START:?}: {err}", self.cell);
            std::thread::sleep(TICK);
        }
    }

    /// Requests and data must go as the cell says, or a suite would test something else.
    fn assert_as_asked(&self) {
        let line = self.line();
        let explained = &line["explain"];
        let expected = if self.cell.road == Transport::DevFuse { "devfuse" } else { "uring" };
        let chosen = matches!(self.cell.road, Transport::Auto | Transport::Passthrough);
        let free = chosen && self._uring.is_none();
        assert!(free || explained["path"] == expected, "{}: {explained}", self.cell);
        let passthrough = &explained["passthrough"];
        assert_eq!(passthrough["used"], self.cell.passes_through(), "{}: {explained}", self.cell);
        // A program that falls back logs the reason.
        let told = passthrough["reason"].as_str().is_some_and(|reason| !reason.is_empty());
        assert_eq!(told, !self.cell.passes_through(), "{}: {explained}", self.cell);
    }

    /// The program.
    pub fn server(&self) -> MutexGuard<'_, RunningProgram> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the program has said so far, on both its outputs.
    pub fn said(&self) -> String {
        let (out, err) = self.server().said();
        out + &err
    }

    /// Unmounts as a user does, and checks that nothing is left.
    ///
    /// # Panics
    /// When anything is left, the program failed or panicked, or something had hung.
    #[track_caller]
    pub fn finish(self) {
        let cell = self.cell;
        let said = self.end();
        assert!(!said.contains("panicked"), "{cell}: {said}");
    }

    /// As [`Self::finish`], for programs that may panic; returns what they said.
    #[track_caller]
    pub fn end(mut self) -> String {
        let (cell, at) = (self.cell, self.site.path.clone());
        unmount(&at);
        let status = self.server().wait(SETTLE);
        let said = self.said();
        assert!(!self.watchdog.dismiss(), "{cell}: it took too long: {said}");
        let Some(status) = status else {
            panic!("{cell}: the server runs on after the unmount (kept by {:?}): {said}", kept_by(&at))
        };
        assert!(status.success(), "{cell}: the server ended with {status}: {said}");
        assert_nothing_left(&at);
        said
    }
}

/// Unmounts as a user does.
///
/// # Panics
/// If a process keeps using the mount.
#[track_caller]
pub fn unmount(mountpoint: &Path) {
    let end = Instant::now() + SETTLE;
    // The kernel may still count a process that has just ended.
    loop {
        let output = Command::new("umount").arg(mountpoint).output().unwrap();
        if output.status.success() {
            return;
        }
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(Instant::now() < end, "umount {}: {text}", mountpoint.display());
        std::thread::sleep(TICK);
    }
}

/// Checks that of what was mounted there nothing is left: no mount, no file, no process.
///
/// # Panics
/// When something is.
#[track_caller]
pub fn assert_nothing_left(mountpoint: &Path) {
    let at = mountpoint.display();
    assert_eq!(mount_entry(mountpoint), None, "{at} is still mounted");
    assert_eq!(std::fs::read_dir(mountpoint).unwrap().count(), 0, "files in the mount point {at}");
    let beside: Vec<_> = std::fs::read_dir(mountpoint.parent().unwrap()).unwrap().flatten().collect();
    let strange = |entry: &&std::fs::DirEntry| entry.path() != mountpoint && entry.file_name() != BELOW;
    let strange: Vec<_> = beside.iter().filter(strange).collect();
    assert!(strange.is_empty(), "files beside the mount point {at}: {strange:?}");
    let end = Instant::now() + SETTLE;
    loop {
        let processes = processes_that_name(mountpoint);
        if processes.is_empty() {
            return;
        }
        assert!(Instant::now() < end, "processes of {at} still run: {processes:?}");
        std::thread::sleep(TICK);
    }
}

/// The command lines of processes, other than this one, that have a path among their arguments.
fn processes_that_name(path: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(line) = std::fs::read(entry.path().join("cmdline")) else { continue };
        let mut words = line.split(|&byte| byte == 0);
        if words.any(|word| word == path.as_os_str().as_encoded_bytes()) {
            found.push(String::from_utf8_lossy(&line).replace('\0', " "));
        }
    }
    found
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.emergency.end();
    }
}

/// Makes what a source needs below `path`, and returns its name for the program and, if it is to be served by another
/// one, that. `None`, with a word why, where it cannot be had.
pub(super) fn prepare(source: Source, path: &Path) -> Option<(String, Option<NinePServer>)> {
    Some(match source {
        Source::Dir => {
            std::fs::create_dir_all(path).unwrap();
            (path.to_str().unwrap().into(), None)
        }
        Source::Mem => ("mem".into(), None),
        Source::Pmem => {
            let file = std::fs::File::options().create(true).truncate(false).write(true).open(path).unwrap();
            if file.metadata().unwrap().len() == 0 {
                file.set_len(PMEM_BYTES).unwrap();
            }
            (format!("pmem:{}", path.display()), None)
        }
        Source::NineP(maker) => {
            let socket = path.join("s");
            if maker == ServerVendor::Ferry && std::os::unix::net::UnixStream::connect(&socket).is_ok() {
                return Some((format!("9p:unix:{}", socket.display()), None));
            }
            let server = NinePServer::start(maker, path)?;
            (format!("9p:{}", server.address()), Some(server))
        }
    })
}

/// Processes in mount namespaces of their own that have copies of a mount, and so keep its server, as the kernel has it.
fn kept_by(at: &Path) -> Vec<String> {
    let place = format!(" {} ", at.display());
    let keeps = |process: &std::fs::DirEntry| {
        std::fs::read_to_string(process.path().join("mounts")).is_ok_and(|mounts| mounts.contains(&place))
    };
    let name = |process: std::fs::DirEntry| std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
    std::fs::read_dir("/proc").into_iter().flatten().flatten().filter(keeps).map(name).collect()
}
