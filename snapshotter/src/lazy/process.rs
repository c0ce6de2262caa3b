//! The process that mounts an image and fetches its data: `ferry image mount --from`. It outlives this process.
//!
//! The process of a new image also pulls its metadata ([`Puller`]), so that it has connections and tokens when it mounts.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

use ferry_registry::{LazyImage, LazyOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statfs, statx};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::pull_credentials::FILE;
use crate::config::LazyConfig;
use crate::erofs;
use crate::error::{Error, IoContext, Result};

/// The environment variable with the path of the file with the credentials of a pull.
pub(crate) const PULL_CREDENTIALS: &str = "FERRY_REGISTRY_PULL_CREDENTIALS";
/// The maximum time of a mount: the process sends one request to the registry.
const MOUNT_TIME: Duration = Duration::from_secs(60);
/// How long a process may take to end before it is killed.
const END_TIME: Duration = Duration::from_secs(5);
/// How long readers of missing data wait for the next process when one was killed: also if this program was killed with it, and its
/// service manager starts it again.
const RESTART_TIME: Duration = Duration::from_secs(30);
/// How often a mount is looked for in its first moments, and after these: each look may read the table of mounts.
const TICK: Duration = Duration::from_millis(2);
const LONG_TICK: Duration = Duration::from_millis(50);
const FIRST_MOMENTS: Duration = Duration::from_millis(100);
/// The maximum time in which a process that runs answers a request of its mount.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// The maximum number of threads that wait for such an answer.
const WAITING_MAX: usize = 64;
/// The maximum time of a pull, also after the caller's timeout. The process's own limits end earlier.
const PULL_TIME: Duration = Duration::from_secs(330);
/// The maximum length of a report in bytes: a manifest has up to 4 MiB, of which each may be escaped.
const REPORT_BYTES_MAX: usize = 32 << 20;

/// The state of a mount point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountState {
    /// Nothing.
    Nothing,
    /// EROFS, by the kernel.
    Erofs,
    /// FUSE, with a running process.
    Fuse,
    /// FUSE, without a process. The next one may be able to resume it.
    Dead,
}

/// Returns the state of a mount point, whose process a file names. Waits for no process that has ended.
///
/// # Errors
///
/// It cannot be inspected.
pub fn mounted(at: &Path, process: &Path) -> Result<MountState> {
    let found = match statx(CWD, at, CACHED, StatxFlags::MNT_ID) {
        Err(Errno::NOENT) => return Ok(MountState::Nothing),
        Err(Errno::NOTCONN | Errno::CONNABORTED) => return Ok(MountState::Dead),
        found => found.doing("inspect", at)?,
    };
    if !found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return Ok(MountState::Nothing);
    }
    if erofs::is_erofs(found.stx_mnt_id)? {
        return Ok(MountState::Erofs);
    }
    // A request would wait until the next process resumes the connection.
    if !runs(process) {
        return Ok(MountState::Dead);
    }
    // Each waits until its process answers, which may be never.
    static WAITING: LazyLock<Arc<()>> = LazyLock::new(Arc::default);
    let waiting = Arc::clone(&WAITING);
    if Arc::strong_count(&waiting) > WAITING_MAX {
        return Err(Errno::TIMEDOUT).doing("wait for the process that serves", at);
    }
    // Attributes can come from the kernel's cache; this cannot. If the process is killed meanwhile, the request waits for the next one.
    let (sender, answer) = channel();
    let path = at.to_owned();
    on_thread(move || {
        let _ = sender.send(statfs(&path).map(drop));
        drop(waiting);
    });
    let end = Instant::now() + ANSWER_TIME;
    loop {
        return match answer.recv_timeout(LONG_TICK) {
            Err(RecvTimeoutError::Timeout) if runs(process) && Instant::now() < end => continue,
            Err(RecvTimeoutError::Timeout) if runs(process) => {
                Err(Errno::TIMEDOUT).doing("wait for the process that serves", at)
            }
            Err(RecvTimeoutError::Timeout) | Ok(Err(Errno::NOTCONN | Errno::CONNABORTED)) => Ok(MountState::Dead),
            // No thread could be started.
            Err(RecvTimeoutError::Disconnected) => Err(Errno::AGAIN).doing("inspect", at),
            Ok(found) => found.doing("inspect", at).map(|()| MountState::Fuse),
        };
    }
}

/// Without a request to a server.
const CACHED: AtFlags = AtFlags::SYMLINK_NOFOLLOW.union(AtFlags::NO_AUTOMOUNT).union(AtFlags::STATX_DONT_SYNC);

/// Returns the number of the mount that a directory is on.
fn mount_id(at: &Path) -> Result<u64> {
    let found = statx(CWD, at, CACHED, StatxFlags::MNT_ID);
    found.doing("inspect", at).map(|found| found.stx_mnt_id)
}

/// An image to mount.
#[derive(Debug)]
pub struct Job<'a> {
    /// The image.
    pub image: &'a Path,
    /// Its digest.
    pub digest: &'a str,
    /// The store with its data.
    pub store: &'a Path,
    /// The source of missing data.
    pub from: &'a str,
    /// The directory with the image's manifest and credentials, if they are there.
    pub directory: &'a Path,
    /// Where it is mounted.
    pub at: &'a Path,
    /// The file that names the process.
    pub process: &'a Path,
}

/// Returns a command of `ferry` that may fetch data, without arguments.
pub(crate) fn program_command(config: &LazyConfig) -> Result<Command> {
    let program = program(config);
    let mut command = Command::new(&program);
    let failed = |error| Error::InvalidArgument(format!("hosts of {}: {error}", program.display()));
    let hosts = std::env::join_paths(&config.hosts).map_err(failed)?;
    command.env("FERRY_REGISTRY_HOSTS", hosts).env_remove("NOTIFY_SOCKET");
    if let Some(credentials) = &config.credentials {
        command.env("REGISTRY_AUTH_FILE", credentials);
    }
    // Its messages go to the log. It ignores signals of a terminal.
    command.stdin(Stdio::null()).stdout(Stdio::null()).current_dir("/").process_group(0);
    Ok(command)
}

/// Returns the command of a process for an image, its mount point, its store and its reference.
fn command(config: &LazyConfig, (image, at): (&Path, &Path), store: &Path, from: &str) -> Result<Command> {
    let mut command = program_command(config)?;
    command.args(["image", "mount"]).arg(image).arg(at).arg("--store").arg(store);
    // The kernel shows set-user-id programs and devices, as in the directories of ordinary layers: only root can enter the root.
    command.args(["--from", from, "--foreground", "-o", "suid,dev", "--jobs", &config.jobs.to_string()]);
    command.args(["--restart-time", &RESTART_TIME.as_secs().to_string()]);
    if let Some(rate) = config.fetch_rate {
        command.args(["--fetch-rate", &rate.to_string()]);
    }
    Ok(command)
}

/// Starts a process for an image, which is named in the error.
pub(crate) fn spawn(command: &mut Command, from: &str) -> Result<Child> {
    let program = PathBuf::from(command.get_program());
    let reason = |error| format!("cannot start {}: {error}", program.display());
    command.spawn().map_err(|error| Error::Lazy { image: from.into(), reason: reason(error) })
}

/// A process that pulls an image, and then waits for the request to mount it. It ends when this is dropped.
#[derive(Debug)]
pub struct Puller {
    /// `None`: it mounts.
    child: Option<Child>,
    from: String,
}

impl Puller {
    /// Starts a process that creates `directory/image`. The directory may be renamed later.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn start(
        config: &LazyConfig,
        directory: &Path,
        store: &Path,
        from: &str,
        options: LazyOptions,
    ) -> Result<Self> {
        let failed = |reason: String| Error::Lazy { image: from.into(), reason };
        let options = serde_json::to_string(&options).map_err(|error| failed(error.to_string()))?;
        let mut command = command(config, (Path::new("image"), Path::new("layer")), store, from)?;
        command.args(["--pull", &options]).stdin(Stdio::piped()).stdout(Stdio::piped()).current_dir(directory);
        // The descriptor is open when the process executes another program.
        command.env("FERRY_REGISTRY_MANIFEST", "manifest").env(PULL_CREDENTIALS, FILE);
        Ok(Self { child: Some(spawn(&mut command, from)?), from: from.into() })
    }

    /// Waits until the image is pulled, and returns its description.
    ///
    /// # Errors
    ///
    /// It cannot be pulled.
    pub fn image(&mut self) -> Result<LazyImage> {
        let failed = |reason: String| Error::Lazy { image: self.from.clone(), reason };
        let lost = || failed("the process that pulls it ended; the log has its reason".into());
        let process = "the process that pulls it";
        let output = self.child.as_mut().and_then(|child| child.stdout.as_mut()).ok_or_else(lost)?;
        let (mut report, mut buffer, end) = (Vec::new(), vec![0; 64 << 10], Instant::now() + PULL_TIME);
        while report.last() != Some(&b'\n') && report.len() < REPORT_BYTES_MAX {
            let left = end.saturating_duration_since(Instant::now());
            let left = left.try_into().map_err(|_| failed("its time has no number".into()))?;
            match poll(&mut [PollFd::new(output, PollFlags::IN)], Some(&left)) {
                Err(Errno::INTR) => continue,
                Ok(0) => return Err(failed(format!("it was not pulled after {} s", PULL_TIME.as_secs()))),
                ready => drop(ready.map_err(std::io::Error::from).doing("wait for", process)?),
            }
            let bytes = output.read(&mut buffer).doing("read from", process)?;
            if bytes == 0 {
                return Err(lost());
            }
            report.extend_from_slice(&buffer[..bytes]);
        }
        let report: std::result::Result<LazyImage, String> =
            serde_json::from_slice(&report).map_err(|error| failed(error.to_string()))?;
        report.map_err(failed)
    }

    /// Requests the mount, and returns the process.
    fn go(mut self) -> Result<Child> {
        let lost = || Error::Lazy { image: self.from.clone(), reason: "the process that pulled it ended".into() };
        let input = self.child.as_mut().and_then(|child| child.stdin.take());
        input.ok_or_else(lost)?.write_all(b"mount\n").map_err(|_| lost())?;
        self.child.take().ok_or_else(lost)
    }
}

impl Drop for Puller {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts a process, or lets the one that pulled the image continue, and waits until the image is mounted. `ended` is called when the
/// process ends after that.
///
/// # Errors
///
/// It cannot be started, ends, or takes too long.
pub fn mount(
    config: &LazyConfig,
    job: &Job<'_>,
    puller: Option<Puller>,
    ended: impl FnOnce() + Send + 'static,
) -> Result<()> {
    let program = program(config);
    let failed = |reason: String| Error::Lazy { image: job.from.into(), reason };
    // It may be mounted already, by the kernel for a process that has ended.
    let before = mount_id(job.at)?;
    let mut child = match puller {
        Some(puller) => puller.go()?,
        None => {
            let mut command = command(config, (job.image, job.at), job.store, job.from)?;
            command.args(["--digest", job.digest]).env("FERRY_REGISTRY_MANIFEST", job.directory.join("manifest"));
            command.env(PULL_CREDENTIALS, job.directory.join(FILE));
            spawn(&mut command, job.from)?
        }
    };
    let named = name(child.id());
    let start = Instant::now();
    let mut wait = || {
        fs::write(job.process, &named).doing("write to", job.process)?;
        loop {
            let status = child.try_wait().doing("wait for", &program)?;
            match mounted(job.at, job.process)? {
                // Perhaps that of the last process, which this one has resumed.
                MountState::Fuse => return Ok(()),
                MountState::Erofs if mount_id(job.at)? != before => return Ok(()),
                _ => {}
            }
            if let Some(status) = status {
                return Err(failed(format!("{} ended with {status}; the log has its reason", program.display())));
            }
            if start.elapsed() > MOUNT_TIME {
                return Err(failed(format!("it was not mounted after {} s", MOUNT_TIME.as_secs())));
            }
            thread::sleep(if start.elapsed() < FIRST_MOMENTS { TICK } else { LONG_TICK });
        }
    };
    let outcome = wait();
    if outcome.is_err() {
        let _ = child.kill();
    }
    let was_mounted = outcome.is_ok();
    on_thread(move || {
        let _ = child.wait();
        if was_mounted {
            ended();
        }
    });
    outcome
}

/// Calls a function when the process that a file names, of an earlier run of this program, ends.
pub fn watch(process: &Path, ended: impl FnOnce() + Send + 'static) {
    let Some(pid) = running(process) else { return };
    let Ok(descriptor) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    // The process id may have been reused before the descriptor was open.
    if running(process) != Some(pid) {
        return;
    }
    on_thread(move || {
        while poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], None) == Err(Errno::INTR) {}
        ended();
    });
}

/// Runs a function on a thread, because it waits.
pub fn on_thread(wait: impl FnOnce() + Send + 'static) {
    if let Err(error) = thread::Builder::new().name("lazy-wait".into()).spawn(wait) {
        tracing::warn!("cannot start a thread: {error}");
    }
}

/// Whether the process that a file names runs.
#[must_use]
pub fn runs(process: &Path) -> bool {
    running(process).is_some()
}

/// Returns the contents of the file that names a process.
pub(crate) fn name(pid: u32) -> String {
    format!("{pid} {}", started(pid).unwrap_or_default())
}

/// Asks the process that a file names to end; one that does not is killed.
///
/// # Errors
///
/// It cannot be signalled.
pub(crate) fn end(process: &Path) -> Result<()> {
    let Some(pid) = running(process) else { return Ok(()) };
    let descriptor = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(Errno::SRCH) => return Ok(()),
        opened => opened.doing("find the process of", process)?,
    };
    // The number may have been used again before there was a descriptor.
    if running(process) != Some(pid) {
        return Ok(());
    }
    for signal in [Signal::TERM, Signal::KILL] {
        match pidfd_send_signal(&descriptor, signal) {
            Err(Errno::SRCH) => return Ok(()),
            sent => sent.doing("end the process of", process)?,
        }
        let end = Instant::now() + END_TIME;
        loop {
            let left: Timespec = end.saturating_duration_since(Instant::now()).try_into().unwrap_or_default();
            match poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&left)) {
                Err(Errno::INTR) => {}
                Ok(0) => break,
                ended => return ended.map(drop).doing("wait for the process of", process),
            }
        }
    }
    Ok(())
}

fn running(process: &Path) -> Option<Pid> {
    let text = fs::read_to_string(process).ok()?;
    let (pid, time) = text.split_once(' ')?;
    let pid = pid.parse().ok()?;
    started(pid).filter(|found| found == time).and_then(|_| Pid::from_raw(pid.try_into().ok()?))
}

/// Returns the kernel's start time of a process, because process ids are reused, and the id of the boot since which it counts. `None`: the
/// process has ended.
fn started(pid: u32) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses can contain any characters.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let is_over = matches!(fields.next()?, "Z" | "X");
    let time = fields.nth(18).filter(|_| !is_over)?;
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(format!("{time} {}", boot.trim_end()))
}

fn program(config: &LazyConfig) -> PathBuf {
    config.program.clone().unwrap_or_else(|| {
        let own = std::env::current_exe().ok();
        let beside = own.and_then(|own| Some(own.parent()?.join("ferry")));
        beside.filter(|beside| beside.is_file()).unwrap_or_else(|| "ferry".into())
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_process_is_identified_by_its_id_start_time_and_boot() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("process");
        assert!(!runs(&file));
        let own = std::process::id();
        let found = started(own).unwrap();
        let (time, boot) = found.split_once(' ').unwrap();
        for (text, expected) in [
            (format!("{own} {found}"), true),
            (format!("{own} 1 {boot}"), false),
            // Of another boot, and of a version that did not record it.
            (format!("{own} {time} 0"), false),
            (format!("{own} {time}"), false),
            (String::new(), false),
            ("x y".into(), false),
        ] {
            fs::write(&file, &text).unwrap();
            assert_eq!(runs(&file), expected, "{text}");
        }
        let mut child = Command::new("true").spawn().unwrap();
        fs::write(&file, format!("{} {}", child.id(), started(child.id()).unwrap_or_default())).unwrap();
        child.wait().unwrap();
        assert!(!runs(&file));
    }

    #[test]
    fn a_mount_whose_process_never_answers_is_an_error() {
        use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
        let directory = tempfile::tempdir().unwrap();
        let (at, process) = (directory.path().join("mount"), directory.path().join("process"));
        fs::create_dir(&at).unwrap();
        fs::write(&process, name(std::process::id())).unwrap();
        let Ok(device) = fs::File::options().read(true).write(true).open("/dev/fuse") else {
            return ferry_skip::skip!("no /dev/fuse");
        };
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let options = std::ffi::CString::new(options).unwrap();
        if mount("test", &at, "fuse", MountFlags::empty(), options.as_c_str()).is_err() {
            return ferry_skip::skip!("only root can mount without a program");
        }
        let refusal = || mounted(&at, &process).map_err(|error| error.to_string());
        let (waited, at_once) = thread::scope(|scope| {
            let start = Instant::now();
            let calls: Vec<_> = (0..WAITING_MAX).map(|_| scope.spawn(refusal)).collect();
            thread::sleep(ANSWER_TIME / 2);
            let at_once = (refusal(), start.elapsed());
            (calls.into_iter().map(|call| call.join().unwrap()).collect::<Vec<_>>(), at_once)
        });
        drop(device);
        // The threads that wait end soon after.
        let end = Instant::now() + 6 * ANSWER_TIME;
        let dead = loop {
            let found = mounted(&at, &process);
            if found.is_ok() || Instant::now() >= end {
                break found;
            }
            thread::sleep(ANSWER_TIME / 1000);
        };
        unmount(&at, UnmountFlags::DETACH).unwrap();
        let is_timeout = |found: &std::result::Result<MountState, String>| {
            found.as_ref().is_err_and(|error| error.contains("wait for the process that serves"))
        };
        assert!(waited.iter().all(is_timeout), "{waited:?}");
        assert!(is_timeout(&at_once.0) && at_once.1 < ANSWER_TIME, "no more threads wait: {at_once:?}");
        assert!(matches!(dead, Ok(MountState::Dead)), "{dead:?}");
    }

    #[test]
    fn a_process_that_fails_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let (image, process) = (at.join("image"), at.join("process"));
        let job =
            Job { image: &image, digest: "d", store: at, from: "oci:h/a:1", directory: at, at, process: &process };
        for (program, expected) in [("/nowhere/ferry", "cannot start /nowhere/ferry"), ("/bin/false", "ended with")] {
            let config = LazyConfig { program: Some(program.into()), ..LazyConfig::default() };
            let error = mount(&config, &job, None, || panic!("it was not mounted")).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("oci:h/a:1"), "{error}");
        }
        assert_eq!(mounted(at, &process).unwrap(), MountState::Nothing);
    }

    /// As on a full disk: the process could not be found later.
    #[test]
    fn a_process_that_cannot_be_recorded_is_ended() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let (program, own) = (at.join("program"), at.join("own"));
        fs::write(&program, format!("#!/bin/sh\necho $$ >{}; exec sleep 600\n", own.display())).unwrap();
        fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let process = at.join("no/such/directory");
        let job = Job { image: at, digest: "d", store: at, from: "oci:h/a:1", directory: at, at, process: &process };
        let config = LazyConfig { program: Some(program), ..LazyConfig::default() };
        mount(&config, &job, None, || panic!("it was not mounted")).unwrap_err();
        // It may have been killed before it wrote its id.
        let pid = fs::read_to_string(&own).ok().and_then(|text| text.trim().parse().ok());
        let end = Instant::now() + Duration::from_secs(60);
        while pid.is_some_and(|pid: u32| started(pid).is_some()) {
            assert!(Instant::now() < end, "it goes on");
            thread::sleep(TICK);
        }
    }
}
