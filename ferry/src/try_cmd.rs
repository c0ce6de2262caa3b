//! `ferry try`: directories, a guest and a command, in one process.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context, Result};
use ferry_fs::ShutdownSignals;
use ferry_guest::{Device, DeviceKind, Guest, Kind, Mount, Running};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::cli::TryArgs;
use crate::exports::Serving;
use crate::flags::{default_tag, tag_from_name};
use crate::socket::Bound;

/// The share of `/` that QEMU guests have their programs from. Tags of directories never begin with a dot here.
const ROOT_TAG: &str = ".root";
/// Enough CPUs for a build; more cost a guest on an emulator more than they bring.
const QEMU_CPUS_MAX: usize = 4;
/// A unix socket's path has at most 107 bytes; this is what a folder may have of it.
const FOLDER_BYTES_MAX: usize = 80;
/// What the guest's programs, which are the host's, should find as on the host.
const ENVIRONMENT: [&str; 7] = ["PATH", "HOME", "TERM", "COLORTERM", "LANG", "LC_ALL", "LC_CTYPE"];

/// Boots a guest, runs the command, and answers its status.
pub fn run(args: TryArgs) -> Result<u8> {
    let mut endings = ShutdownSignals::catch(&ShutdownSignals::ALL).context("cannot catch signals")?;
    let ending = Arc::new(Mutex::new(ShutdownTarget::default()));
    let on_signal = Arc::clone(&ending);
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            if let Some(signal) = endings.wait() {
                lock(&on_signal).came(signal);
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
    let folder = private_folder()?;
    let mut serving = Serving::default();
    let mut guest = Guest::new(ferry_guest::Cache::from_env()?, args.command.iter());
    guest.memory_mib = args.memory;
    guest.env = environment();
    let queues = if args.qemu { cpus() } else { 1 };
    if args.qemu {
        let root = Place { dir: Path::new("/"), tag: ROOT_TAG.into(), read_only: true };
        guest.devices.push(root.serve(folder.path(), queues, &args, &mut serving)?);
        guest.kind = Kind::Qemu { cpus: queues, root: Some(ROOT_TAG.into()) };
    }
    for (dir, tag) in args.dirs.iter().zip(tags(&args.dirs)) {
        let mountpoint = Path::new("/mnt").join(&tag);
        let said = format!("sharing {} as {}", dir.display(), mountpoint.display());
        // Another name than its own is not expected.
        if dir.canonicalize().is_ok_and(|dir| dir.file_name().is_none_or(|name| *name != *tag)) {
            eprintln!("ferry: {said}");
        } else {
            say(said);
        }
        let place = Place { dir, tag: tag.clone(), read_only: args.read_only };
        guest.devices.push(place.serve(folder.path(), queues, &args, &mut serving)?);
        let mut mount = Mount::virtiofs(tag, &mountpoint);
        if args.read_only {
            mount.options = "ro".into();
        }
        guest.mounts.push(mount);
    }
    guest.cwd.clone_from(&guest.mounts[0].mountpoint);

    let begin = Instant::now();
    say(format!("booting {}", if args.qemu { "a stock kernel in QEMU" } else { "User-mode Linux" }));
    say("the command is run as root of the guest; what it changes outside of /mnt is gone in the end".into());
    let running = guest.spawn()?;
    lock(ending).started(&running)?;
    say(format!("the guest is up after {:.1} s", begin.elapsed().as_secs_f64()));
    let status = running.wait();
    lock(ending).over();
    let status = status?;
    serving.stop();
    folder.close().context("cannot remove the sockets' folder")?;
    say(format!("the command ended with status {status} after {:.1} s", begin.elapsed().as_secs_f64()));
    Ok(u8::try_from(status).unwrap_or(u8::MAX))
}

/// A directory that the guest is to have.
struct Place<'a> {
    dir: &'a Path,
    tag: String,
    read_only: bool,
}

impl Place<'_> {
    fn serve(self, folder: &Path, queues: u16, args: &TryArgs, serving: &mut Serving) -> Result<Device> {
        let options = ferry_dir::Options { read_only: self.read_only, ..ferry_dir::Options::default() };
        let source = Arc::new(ferry_dir::Dir::open(self.dir, options)?);
        let socket = folder.join(&self.tag);
        let bound = Bound::bind(&socket)?;
        let options = ferry_virtiofs::Options {
            // User-mode Linux asks the device for it.
            tag: if args.qemu { None } else { Some(self.tag.parse()?) },
            queues: usize::from(queues),
            cache: args.cache.into(),
            ..ferry_virtiofs::Options::default()
        };
        serving.start(bound, source, options).with_context(|| format!("cannot share {}", self.dir.display()))?;
        Ok(Device { socket, kind: DeviceKind::Fs { tag: self.tag, queues, dax: false } })
    }
}

/// A tag for each directory, made of its name; what is there already gets a number.
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

/// A folder for sockets that only this user can enter.
fn private_folder() -> Result<tempfile::TempDir> {
    let wanted = std::env::temp_dir();
    let bytes = wanted.as_os_str().as_bytes();
    let fits = bytes.len() <= FOLDER_BYTES_MAX && !bytes.iter().any(u8::is_ascii_whitespace);
    let folder = if fits { wanted } else { PathBuf::from("/tmp") };
    tempfile::Builder::new()
        .prefix("ferry-try.")
        .tempdir_in(&folder)
        .with_context(|| format!("cannot create a folder in {}; set TMPDIR to a writable one", folder.display()))
}

fn environment() -> Vec<(OsString, OsString)> {
    ENVIRONMENT.iter().filter_map(|name| Some((name.into(), std::env::var_os(name)?))).collect()
}

fn cpus() -> u16 {
    let here = std::thread::available_parallelism().map_or(1, usize::from);
    u16::try_from(here.min(QEMU_CPUS_MAX)).unwrap_or(1)
}

/// Where a signal finds the guest that it is to end.
#[derive(Debug, Default)]
struct ShutdownTarget {
    signal: Option<i32>,
    guest: Option<Process>,
}

/// A guest's process, and its group's number.
#[derive(Debug)]
struct Process {
    pid: Pid,
    /// A name that no later process can get.
    pidfd: std::os::fd::OwnedFd,
}

impl ShutdownTarget {
    fn came(&mut self, signal: i32) {
        self.signal = Some(signal);
        if let Some(guest) = &self.guest {
            guest.kill();
        }
    }

    fn started(&mut self, running: &Running) -> Result<()> {
        let pid = i32::try_from(running.pid()).ok().and_then(Pid::from_raw).context("the guest has no process")?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).context("the guest ended at once")?;
        let guest = Process { pid, pidfd };
        if self.signal.is_some() {
            // It came while the guest was booting.
            guest.kill();
        }
        self.guest = Some(guest);
        Ok(())
    }

    fn over(&mut self) {
        self.guest = None;
    }
}

impl Process {
    fn kill(&self) {
        // While the leader lives the group's number is its own; afterwards there is nothing to kill.
        if rustix::process::pidfd_send_signal(&self.pidfd, Signal::CONT).is_ok() {
            let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
        }
    }
}

fn lock(ending: &Mutex<ShutdownTarget>) -> std::sync::MutexGuard<'_, ShutdownTarget> {
    ending.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_directory_has_a_tag_of_its_own() {
        let dirs = ["/a/src", "/b/src", "/c/src-2", "/d/.root", "/e/src", "/"].map(PathBuf::from);
        assert_eq!(tags(&dirs), ["src", "src-2", "src-2-2", "root", "src-3", "share"]);
    }
}
