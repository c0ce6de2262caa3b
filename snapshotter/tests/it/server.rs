//! The program as a process, and mounts as containerd makes them.

use std::fs;
use std::io::Read;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ferry_snapshotter::api::Mount;
use ferry_snapshotter::{IdMaps, idmapped};
use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount, mount_bind_recursive, mount_remount, move_mount,
    unmount,
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::client::Client;

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_ferry-snapshotter");
/// On a disk: a memory file system cannot be below an EROFS.
pub const DIR: &str = "/var/tmp";
/// More than it takes in a guest without KVM.
const START_TIME: Duration = Duration::from_secs(600);

/// A running program, with its root in a directory of its own.
pub struct Server {
    pub directory: TempDir,
    child: Child,
    images: &'static str,
}

/// Whether tests can mount. Skips the test otherwise.
pub fn can_mount() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    let can = is_root && fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC).is_ok();
    if !can {
        ferry_skip::skip!("only root can mount, where the kernel has overlayfs");
    }
    can
}

impl Server {
    /// Starts with committed layers as images (`auto`, `require`), or as directories (`never`).
    pub fn start(images: &'static str) -> Self {
        Self::start_with(images, |_| {})
    }

    /// The same; a function prepares the root.
    pub fn start_with(images: &'static str, prepare: impl FnOnce(&Path)) -> Self {
        Self::start_in(DIR, images, prepare)
    }

    /// The same in another directory.
    pub fn start_in(directory: &str, images: &'static str, prepare: impl FnOnce(&Path)) -> Self {
        let directory =
            tempfile::Builder::new().prefix("ferry-snapshotter.").tempdir_in(directory).expect("it can be made");
        fs::create_dir(directory.path().join("root")).expect("it can be made");
        prepare(&directory.path().join("root"));
        let child = spawn(directory.path(), images);
        Self { directory, child, images }
    }

    pub fn root(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("s")
    }

    pub fn client(&mut self) -> Client {
        let end = Instant::now() + START_TIME;
        loop {
            match Client::connect(&self.socket()) {
                Ok(client) => return client,
                Err(error) if Instant::now() > end => panic!("it does not serve: {error}"),
                Err(_) => {}
            }
            if let Some(status) = self.child.try_wait().expect("it is a child") {
                panic!("it ended: {status}");
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn signal(&mut self, signal: Signal) -> std::process::ExitStatus {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("it runs");
        self.child.wait().expect("it is a child")
    }

    /// Adds lines to the configuration of the next start.
    pub fn configure(&self, more: &str) {
        fs::write(self.directory.path().join("more.toml"), more).expect("it can be written");
    }

    /// Ends it with `kill -9`.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
    }

    /// Ends it with SIGTERM.
    pub fn stop(&mut self) {
        let status = self.signal(Signal::TERM);
        assert!(status.success(), "{status}");
    }

    /// Starts it again after [`Self::kill`] or [`Self::stop`].
    pub fn start_again(&mut self) -> Client {
        self.child = spawn(self.directory.path(), self.images);
        self.client()
    }

    /// The mount points below the root.
    pub fn mount_points(&self) -> Vec<PathBuf> {
        mount_points(&self.root())
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Resident memory in KiB.
    pub fn resident_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has memory");
        line.trim().trim_end_matches(" kB").parse().expect("it is a number")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Those that share views outlive it.
        for entry in fs::read_dir(self.root().join("snapshots")).into_iter().flatten().flatten() {
            let text = fs::read_to_string(entry.path().join("share")).unwrap_or_default();
            let pid = text.split(' ').next().and_then(|pid| Pid::from_raw(pid.parse().ok()?));
            // The number of one that has ended may be another's.
            let is_share = |pid: &Pid| {
                let line = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
                line.windows(5).any(|word| word == b"share")
            };
            if let Some(pid) = pid.filter(is_share) {
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        for at in mount_points(self.directory.path()).iter().rev() {
            let _ = unmount(at, UnmountFlags::DETACH);
        }
    }
}

fn mount_points(directory: &Path) -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("there is a mount table");
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    points.filter(|point| point.starts_with(directory)).collect()
}

fn command(directory: &Path, images: &str) -> Command {
    let config = directory.join("config.toml");
    let more = fs::read_to_string(directory.join("more.toml")).unwrap_or_default();
    fs::write(&config, format!("root = \"root\"\naddress = \"s\"\nimages = \"{images}\"\n{more}"))
        .expect("it can be written");
    let mut command = Command::new(PROGRAM);
    command.arg("--config").arg(config).stdin(Stdio::null());
    command
}

fn spawn(directory: &Path, images: &str) -> Child {
    command(directory, images).env("FERRY_LOG", "warn").spawn().expect("the program can be started")
}

/// Runs the program on a directory, where it must fail; returns what it says.
pub fn refused(directory: &Path, images: &str) -> String {
    let mut child = command(directory, images).stderr(Stdio::piped()).spawn().expect("the program can be started");
    let mut said = String::new();
    child.stderr.take().expect("it is piped").read_to_string(&mut said).expect("it is text");
    let status = child.wait().expect("it is a child");
    assert!(!status.success(), "it starts: {said}");
    said
}

/// Puts a small memory file system on a root.
pub fn in_memory(root: &Path) {
    mount("tmpfs", root, "tmpfs", MountFlags::empty(), c"size=64m").expect("root may mount");
}

/// Puts a small ext4 on a root; whether that is possible.
pub fn on_small_disk(root: &Path) -> bool {
    let image = root.with_file_name("disk");
    fs::File::create(&image).and_then(|file| file.set_len(64 << 20)).expect("it can be made");
    let run = |program: &str, words: &[&str], at: &[&Path]| {
        let status = Command::new(program).args(words).args(at).stdout(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    let is_mounted = run("mkfs.ext4", &["-q", "-m", "0"], &[&image]) && run("mount", &["-o", "loop"], &[&image, root]);
    if !is_mounted {
        ferry_skip::skip!("no ext4 can be mounted here (root, mkfs.ext4, loop devices)");
    }
    is_mounted
}

/// A mount that ends when this is dropped.
pub struct Mounted(pub TempDir);

impl Mounted {
    /// Makes mounts as containerd does.
    pub fn of(mounts: &[Mount]) -> Self {
        Self::on(tempfile::Builder::new().prefix("ferry-mounted.").tempdir_in(DIR).expect("it can be made"), mounts)
    }

    /// The same on a directory of this name.
    pub fn named(name: &str, mounts: &[Mount]) -> Self {
        let directory = tempfile::Builder::new().prefix(name).rand_bytes(0).tempdir_in(DIR);
        Self::on(directory.expect("it can be made"), mounts)
    }

    fn on(directory: TempDir, mounts: &[Mount]) -> Self {
        let [mount] = mounts else { panic!("one mount is enough: {mounts:?}") };
        match &*mount.r#type {
            "bind" => bind(mount, directory.path()),
            "overlay" => overlay(mount, directory.path()),
            other => panic!("containerd mounts {other}"),
        }
        Self(directory)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = unmount(self.0.path(), UnmountFlags::empty()) {
            eprintln!("{} is still in use: {error}", self.0.path().display());
            let _ = unmount(self.0.path(), UnmountFlags::DETACH);
        }
    }
}

fn bind(mount: &Mount, at: &Path) {
    mount_bind_recursive(&mount.source, at).expect("it can be mounted");
    if mount.options.iter().any(|option| option == "ro") {
        mount_remount(at, MountFlags::BIND | MountFlags::RDONLY, "").expect("it can be mounted read-only");
    }
}

/// By fsconfig(2): containerd shortens the paths instead, when there are many layers.
fn overlay(mount: &Mount, at: &Path) {
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC).expect("there is overlayfs");
    let fs = context.as_fd();
    fsconfig_set_string(fs, "source", &*mount.source).expect("overlayfs takes it");
    let mapped = Mapped::of(mount);
    for option in &mount.options {
        let set = match option.split_once('=') {
            Some(("lowerdir", _)) if mapped.is_some() => {
                let layer = mapped.as_ref().map_or(Path::new(""), |mapped| mapped.0.path());
                fsconfig_set_string(fs, "lowerdir+", layer)
            }
            Some(("lowerdir", layers)) => {
                layers.split(':').try_for_each(|layer| fsconfig_set_string(fs, "lowerdir+", layer))
            }
            // Those are for the engine.
            Some(("uidmap" | "gidmap", _)) => Ok(()),
            Some((name, value)) => fsconfig_set_string(fs, name, value),
            None => fsconfig_set_flag(fs, &**option),
        };
        set.unwrap_or_else(|error| panic!("{option}: {error}"));
    }
    fsconfig_create(fs).unwrap_or_else(|error| panic!("{mount:?}: {error}"));
    let mounted = fsmount(fs, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).expect("it can be mounted");
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(mounted.as_fd(), "", CWD, at, flags).expect("it can be mounted");
}

/// The layer below a mount with mapped ids, while the mount is made.
struct Mapped(TempDir);

impl Mapped {
    /// Maps the ids as containerd does, if the mount says so.
    fn of(mount: &Mount) -> Option<Self> {
        let value = |name: &str| {
            mount.options.iter().find_map(|option| option.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
        };
        let maps = IdMaps { users: value("uidmap")?, groups: value("gidmap")?, root: (0, 0) };
        let layer = value("lowerdir").expect("it has a layer below");
        assert!(layer.ends_with('/') && !layer.contains(':'), "containerd would clone the directory above: {mount:?}");
        let at = tempfile::tempdir_in(DIR).expect("it can be made");
        let namespace = idmapped::user_namespace(&maps).expect("there are user namespaces");
        idmapped::mount(Path::new(&layer), namespace.as_fd(), at.path()).expect("it can be idmapped");
        Some(Self(at))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        unmount(self.0.path(), UnmountFlags::DETACH).expect("it is mounted");
    }
}
