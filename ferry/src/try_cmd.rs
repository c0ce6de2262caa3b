//! `ferry try`: runs a command in a guest with directories of the host.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context, Result};
use ferry_dir::OwnChanges;
use ferry_fs::ShutdownSignals;
use ferry_guest::{Device, DeviceKind, Guest, Kind, Mount, Running};
use ferry_vfs::sync::lock;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::cli::TryArgs;
use crate::exports::RunningExports;
use crate::flags::{Cache, default_tag, tag_from_name};
use crate::socket::ListenSocket;

/// The tag of `/`, which has the programs of QEMU guests. Tags of directories never begin with a dot here.
const ROOT_TAG: &str = ".root";
/// Enough CPUs for a build; more slow down a guest on an emulator.
const QEMU_CPUS_MAX: usize = 4;
/// The part of a unix socket's path (at most 107 bytes) that the directory may take.
const DIR_BYTES_MAX: usize = 80;
/// The environment variables that the guest's programs share with the host.
const ENVIRONMENT: [&str; 7] = ["PATH", "HOME", "TERM", "COLORTERM", "LANG", "LC_ALL", "LC_CTYPE"];

/// Boots a guest and runs the command; returns its status.
pub fn run(args: TryArgs) -> Result<u8> {
    let mut endings = ShutdownSignals::catch(&ShutdownSignals::ALL).context("cannot catch signals")?;
    let ending = Arc::new(Mutex::new(ShutdownTarget::default()));
    let on_signal = Arc::clone(&ending);
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            if let Some(signal) = endings.wait() {
                lock(&on_signal).signal_arrived(signal);
            }
        })
        .context("cannot start a thread")?;

    let result = try_in_guest(args, &ending);
    let signal = lock(&ending).signal;
    match signal {
        Some(signal) => Ok(u8::try_from(128 + signal).unwrap_or(u8::MAX)),
        None => result,
    }
}

fn try_in_guest(args: TryArgs, ending: &Mutex<ShutdownTarget>) -> Result<u8> {
    let say = |text: String| {
        if args.verbose || std::io::stderr().is_terminal() {
            eprintln!("ferry: {text}");
        }
    };
    let directory = private_directory()?;
    let mut serving = RunningExports::default();
    let mut guest = Guest::new(ferry_guest::Cache::from_env()?, args.command.iter());
    guest.memory_mib = args.memory;
    guest.env = environment();
    let queues = if args.qemu { cpus() } else { 1 };
    if args.qemu {
        let root = SharedDir { dir: Path::new("/"), tag: ROOT_TAG.into(), read_only: true, events: false };
        guest.devices.push(root.serve(directory.path(), queues, &args, &mut serving)?);
        guest.kind = Kind::Qemu { cpus: queues, root: Some(ROOT_TAG.into()) };
    }
    let (mut agent, why_not) = (Vec::<OsString>::new(), events_conflict(&args));
    for (dir, tag) in args.dirs.iter().zip(tags(&args.dirs)) {
        let mountpoint = Path::new("/mnt").join(&tag);
        let said = format!("sharing {} as {}", dir.display(), mountpoint.display());
        // An unexpected name is always printed.
        if dir.canonicalize().is_ok_and(|dir| dir.file_name().is_none_or(|name| *name != *tag)) {
            eprintln!("ferry: {said}");
        } else {
            say(said);
        }
        let events = why_not.is_none();
        if events {
            agent.push(mountpoint.clone().into());
        }
        let place = SharedDir { dir, tag: tag.clone(), read_only: args.read_only, events };
        guest.devices.push(place.serve(directory.path(), queues, &args, &mut serving)?);
        let mut mount = Mount::virtiofs(tag, &mountpoint);
        if args.read_only {
            mount.options = "ro".into();
        }
        guest.mounts.push(mount);
    }
    guest.cwd.clone_from(&guest.mounts[0].mountpoint);
    match why_not {
        None => {
            let program = std::env::current_exe().context("cannot find this program for the guest's agent")?;
            let words = [program.into(), "--log".into(), "warn".into(), "agent".into()];
            guest.services.push(words.into_iter().chain(agent).collect());
            say("programs in the guest that watch files (inotify) see changes by this host".into());
        }
        Some(why) => say(format!("programs in the guest that watch files (inotify) miss changes by this host: {why}")),
    }

    let begin = Instant::now();
    say(format!("booting {}", if args.qemu { "a stock kernel in QEMU" } else { "User-mode Linux" }));
    say("the command runs as root of the guest; its changes outside /mnt are discarded at the end".into());
    let running = guest.spawn()?;
    lock(ending).set_guest(&running)?;
    say(format!("the guest is up after {:.1} s", begin.elapsed().as_secs_f64()));
    let status = running.wait();
    lock(ending).clear_guest();
    let status = status?;
    serving.stop();
    directory.close().context("cannot remove the sockets' directory")?;
    say(format!("the command ended with status {status} after {:.1} s", begin.elapsed().as_secs_f64()));
    Ok(u8::try_from(status).unwrap_or(u8::MAX))
}

/// A directory for the guest.
struct SharedDir<'a> {
    dir: &'a Path,
    tag: String,
    read_only: bool,
    /// Tells the guest's agent what happens.
    events: bool,
}

impl SharedDir<'_> {
    fn serve(self, directory: &Path, queues: u16, args: &TryArgs, serving: &mut RunningExports) -> Result<Device> {
        let options = ferry_dir::Options { read_only: self.read_only, ..ferry_dir::Options::default() };
        let source = Arc::new(ferry_dir::Dir::open(self.dir, options)?);
        if self.events {
            source.watch(OwnChanges::Skip).with_context(|| format!("cannot watch {}", self.dir.display()))?;
            source.tell_events();
        }
        let socket = directory.join(&self.tag);
        let bound = ListenSocket::bind(&socket)?;
        let options = ferry_virtiofs::Options {
            // User-mode Linux reads the tag from the device.
            tag: if args.qemu { None } else { Some(self.tag.parse()?) },
            queues: usize::from(queues),
            cache: args.cache.into(),
            events: self.events,
            ..ferry_virtiofs::Options::default()
        };
        serving.start(bound, source, options).with_context(|| format!("cannot share {}", self.dir.display()))?;
        Ok(Device { socket, kind: DeviceKind::Fs { tag: self.tag, queues, dax: false } })
    }
}

/// Returns why no agent in the guest can replay what happens in the directories.
fn events_conflict(args: &TryArgs) -> Option<String> {
    if args.read_only {
        return Some("they are mounted read-only".into());
    }
    let paths: Vec<_> = args.dirs.iter().filter_map(|dir| dir.canonicalize().ok()).collect();
    let overlaps = |(at, path): (usize, &PathBuf)| {
        paths.iter().enumerate().any(|(other_at, other)| at != other_at && path.starts_with(other))
    };
    if paths.iter().enumerate().any(overlaps) {
        return Some("one of the directories is within another".into());
    }
    // Without fanotify, changes may be missed, which such caches do not forgive.
    if !matches!(args.cache, Cache::Always | Cache::Metadata) {
        return None;
    }
    // What cannot be opened is an error later.
    let opened = paths.iter().filter_map(|path| std::fs::File::open(path).ok());
    opened.filter_map(|dir| ferry_dir::can_watch(dir.as_fd()).err()).map(|error| error.to_string()).next()
}

/// Returns a tag for each directory, from its name; repeated names get a number.
fn tags(dirs: &[PathBuf]) -> Vec<String> {
    let mut tags: Vec<String> = Vec::new();
    for dir in dirs {
        let tag = default_tag(dir).as_str().trim_start_matches('.').to_owned();
        let tag = tag_from_name(&tag).as_str().to_owned();
        let stem: String = tag.chars().take(30).collect();
        let numbered = (2..).map(|number| format!("{stem}-{number}"));
        let free = std::iter::once(tag).chain(numbered).find(|tag| !tags.contains(tag));
        tags.extend(free);
    }
    tags
}

/// Creates a directory for sockets that only this user can enter.
fn private_directory() -> Result<tempfile::TempDir> {
    let wanted = std::env::temp_dir();
    let bytes = wanted.as_os_str().as_bytes();
    let fits = bytes.len() <= DIR_BYTES_MAX && !bytes.iter().any(u8::is_ascii_whitespace);
    let directory = if fits { wanted } else { PathBuf::from("/tmp") };
    tempfile::Builder::new()
        .prefix("ferry-try.")
        .tempdir_in(&directory)
        .with_context(|| format!("cannot create a directory in {}; set TMPDIR to a writable one", directory.display()))
}

fn environment() -> Vec<(OsString, OsString)> {
    ENVIRONMENT.iter().filter_map(|name| Some((name.into(), std::env::var_os(name)?))).collect()
}

fn cpus() -> u16 {
    let here = std::thread::available_parallelism().map_or(1, usize::from);
    u16::try_from(here.min(QEMU_CPUS_MAX)).unwrap_or(1)
}

/// The guest that a signal ends.
#[derive(Debug, Default)]
struct ShutdownTarget {
    signal: Option<i32>,
    guest: Option<Process>,
}

/// The process of a guest, which leads a process group.
#[derive(Debug)]
struct Process {
    pid: Pid,
    /// A reference that no later process can get.
    pidfd: std::os::fd::OwnedFd,
}

impl ShutdownTarget {
    fn signal_arrived(&mut self, signal: i32) {
        self.signal = Some(signal);
        if let Some(guest) = &self.guest {
            guest.kill();
        }
    }

    fn set_guest(&mut self, running: &Running) -> Result<()> {
        let pid = i32::try_from(running.pid()).ok().and_then(Pid::from_raw).context("the guest has no process")?;
        let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            // A quick guest has ended before this thread runs again. Its status is that of its command, as always.
            Err(rustix::io::Errno::SRCH) => return Ok(()),
            pidfd => pidfd.context("cannot watch the guest")?,
        };
        let guest = Process { pid, pidfd };
        if self.signal.is_some() {
            // The signal arrived while the guest was booting.
            guest.kill();
        }
        self.guest = Some(guest);
        Ok(())
    }

    fn clear_guest(&mut self) {
        self.guest = None;
    }
}

impl Process {
    fn kill(&self) {
        // While the leader exists, so does its group; afterwards there is nothing to kill.
        if rustix::process::pidfd_send_signal(&self.pidfd, Signal::CONT).is_ok() {
            let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_directory_has_its_own_tag() {
        let dirs = ["/a/src", "/b/src", "/c/src-2", "/d/.root", "/e/src", "/"].map(PathBuf::from);
        assert_eq!(tags(&dirs), ["src", "src-2", "src-2-2", "root", "src-3", "share"]);
    }
}
