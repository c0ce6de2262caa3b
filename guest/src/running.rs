//! A running guest: its process, its control line and its end.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, BufRead, BufReader, PipeWriter, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal};
use tempfile::TempDir;

use crate::stdio::{self, RawTerminal};
use crate::{Arch, Context, Error, Guest, Input, Kind, Output, Result, machine};

/// How long a guest may take to power off after it has reported its status.
const POWER_OFF_TIMEOUT: Duration = Duration::from_secs(10);

/// The length of the kernel's log in an error, in bytes.
const LOG_TAIL_BYTES: u64 = 4096;

/// The status that a shell reports for a command whose reader has gone (128 + SIGPIPE).
const STATUS_SIGPIPE: i32 = 141;

/// Hands its own descriptors 0 to 2 on as 3 to 5. The machine dies with the thread that started it.
const START: &str = r#"log=$1; shift; exec setpriv --pdeathsig KILL "$@" 3<&0 4>&1 5>&2 </dev/null >>"$log" 2>&1"#;

/// What Linux logs when it cannot go on, or not as before.
const KERNEL_FAILURES: [&str; 3] = ["Kernel panic - not syncing", "Oops:", "BUG: "];

/// Such a line that only says that the machine is slow ("BUG: soft lockup - CPU#0 stuck for 22s!").
const KERNEL_LOCKUP: &str = "lockup";

/// How often the log of a booting guest is searched for [`KERNEL_FAILURES`].
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// The prefix of the directories of guests.
const DIR_PREFIX: &str = "ferry-guest.";

/// A message of the guest on its control line.
#[derive(Debug)]
enum ControlMessage {
    Ready,
    Status(i32),
    Failed(String),
    Nothing,
}

/// A running guest. It is killed when this is dropped.
#[derive(Debug)]
pub struct Running {
    /// The command's standard input, if piped. Drop it to close it.
    pub stdin: Option<PipeWriter>,
    /// The command's standard output, if piped; it ends with the guest.
    pub stdout: Option<UnixStream>,
    /// The command's standard error, if piped; it ends with the guest.
    pub stderr: Option<UnixStream>,
    process: Arc<Process>,
    messages: Receiver<ControlMessage>,
    ended: Receiver<io::Result<ExitStatus>>,
    relays: Vec<JoinHandle<io::Result<()>>>,
    log: File,
    raw_terminal: Option<RawTerminal>,
}

#[derive(Debug)]
struct Process {
    pid: Pid,
    /// Identifies the process even after its id is reused.
    pidfd: OwnedFd,
}

impl Process {
    fn kill(&self) {
        // While the leader lives the group's id is not reused; afterwards there is nothing to kill.
        if pidfd_send_signal(&self.pidfd, Signal::CONT).is_ok() {
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
    }
}

impl Running {
    pub(crate) fn start(guest: Guest) -> Result<Self> {
        Self::start_with(guest, None)
    }

    /// As [`Guest::spawn`]; `kvm` overrides the cached check of KVM.
    pub(crate) fn start_with(guest: Guest, kvm: Option<bool>) -> Result<Self> {
        let kvm = match (&guest.kind, kvm) {
            (Kind::Uml, _) => false,
            (Kind::Qemu { .. }, Some(kvm)) => kvm,
            (Kind::Qemu { .. }, None) => guest.arch == Arch::HOST && guest.cache.kvm_works()?,
        };
        let inherited = matches!((&guest.stdin, &guest.stdout), (Input::Inherit, Output::Inherit));
        let terminal = if inherited { stdio::terminal_size() } else { None };
        remove_stale(guest.boot_timeout);
        let is_emulated = !kvm && matches!(guest.kind, Kind::Qemu { .. });
        let (mut running, mut lines, mut dir) = Self::boot(&guest, terminal, kvm)?;
        let mut ready = running.await_ready(guest.boot_timeout, is_emulated);
        // Linux patches its code at boot; an emulated CPU may run a half-written instruction. Boot once more.
        if is_emulated && running.has_kernel_failed() {
            running.kill();
            let _ = running.ended.recv_timeout(POWER_OFF_TIMEOUT);
            (running, lines, dir) = Self::boot(&guest, terminal, kvm)?;
            ready = running.await_ready(guest.boot_timeout, false);
        }
        ready?;
        // The guest has read everything that it needs, so the directory can be removed.
        drop(dir);
        running.connect(guest, terminal, lines)?;
        Ok(running)
    }

    /// Starts the machine. Returns the host's ends of its sockets, too, and the directory that it boots from.
    fn boot(guest: &Guest, terminal: Option<(u16, u16)>, kvm: bool) -> Result<(Self, [UnixStream; 3], TempDir)> {
        let dir = tempfile::Builder::new()
            .prefix(DIR_PREFIX)
            .tempdir()
            .context(|| "create a temporary directory for the guest".into())?;
        let setup = machine::Setup { dir: dir.path(), terminal, kvm };
        let args = machine::build(guest, &setup)?;

        let log_path = dir.path().join("log");
        let log = File::options().read(true).append(true).create(true).open(&log_path);
        let log = log.context(|| format!("create {}", log_path.display()))?;
        let pair = || UnixStream::pair().context(|| "create a socket pair".into());
        let ((control, control_end), (out, out_end), (err, err_end)) = (pair()?, pair()?, pair()?);
        let (process, ended) = launch(&args, &log_path, guest, [control_end, out_end, err_end])?;

        let reader = control.try_clone().context(|| "use the guest's control line".into())?;
        let running = Self {
            stdin: None,
            stdout: None,
            stderr: None,
            process: Arc::new(process),
            messages: listen(reader),
            ended,
            relays: Vec::new(),
            log,
            raw_terminal: None,
        };
        Ok((running, [control, out, err], dir))
    }

    /// Waits until the kernel has come up, but no longer than until it has failed, if so asked.
    fn await_ready(&mut self, timeout: Duration, ends_with_kernel: bool) -> Result<()> {
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.messages.recv_timeout(left.min(LOG_INTERVAL)) {
                Ok(ControlMessage::Ready) => return Ok(()),
                Ok(message) => return Err(self.failure(message)),
                Err(RecvTimeoutError::Disconnected) => return Err(self.failure(ControlMessage::Nothing)),
                Err(RecvTimeoutError::Timeout) if left > LOG_INTERVAL => {
                    if ends_with_kernel && self.has_kernel_failed() {
                        return Err(self.failure(ControlMessage::Nothing));
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    let message = format!("did not come up within {} s", timeout.as_secs());
                    return Err(Error::Guest { message, log: self.log_tail() });
                }
            }
        }
    }

    fn connect(
        &mut self,
        guest: Guest,
        terminal: Option<(u16, u16)>,
        [control, out, err]: [UnixStream; 3],
    ) -> Result<()> {
        let failed = || "connect the command's input and output".to_owned();
        if let Some(size) = terminal {
            self.raw_terminal = Some(RawTerminal::new().context(failed)?);
            let line = out.try_clone().context(failed)?;
            spawn_relay(move || stdio::send_keys(size, line, control));
            self.stdout = self.relay(out, Output::Inherit, stdio::own(io::stdout()))?;
            return Ok(());
        }
        let input = match guest.stdin {
            Input::Null => None,
            Input::Inherit => Some(stdio::own(io::stdin()).context(failed)?),
            Input::File(file) => Some(file),
            Input::Piped => {
                let (reader, writer) = io::pipe().context(failed)?;
                self.stdin = Some(writer);
                Some(OwnedFd::from(reader).into())
            }
        };
        match input {
            // It may wait for input that never comes, so it is not joined.
            Some(input) => drop(spawn_relay(move || stdio::send_input(input, control))),
            // The control line stays open: the listener holds it.
            None => drop(control),
        }
        self.stdout = self.relay(out, guest.stdout, stdio::own(io::stdout()))?;
        self.stderr = self.relay(err, guest.stderr, stdio::own(io::stderr()))?;
        Ok(())
    }

    /// Relays a line to its destination, or returns it to the caller.
    fn relay(&mut self, line: UnixStream, to: Output, inherited: io::Result<File>) -> Result<Option<UnixStream>> {
        let failed = || "open the command's output".to_owned();
        let to = match to {
            Output::Piped => return Ok(Some(line)),
            Output::Inherit => inherited.context(failed)?,
            Output::Null => File::options().write(true).open("/dev/null").context(failed)?,
            Output::File(file) => file,
        };
        let process = Arc::clone(&self.process);
        self.relays.push(spawn_relay(move || {
            // A command whose output has no reader is killed.
            stdio::copy_out(line, to).inspect_err(|_| process.kill())
        }));
        Ok(None)
    }

    /// The process that carries the guest.
    pub fn pid(&self) -> u32 {
        self.process.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Ends the guest at once, like a power failure.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// Waits until the command and its guest have ended, and returns the command's exit status (128 and the signal's
    /// number when a signal ended it). Its writes to the shares are then on the host.
    pub fn wait(self) -> Result<i32> {
        let message = Self::last_message(|| self.messages.recv().map_err(|_| RecvTimeoutError::Disconnected));
        let message = message.unwrap_or(ControlMessage::Nothing);
        self.finish(message)
    }

    /// Returns the guest's last message. A guest that reboots reports again that it is ready.
    fn last_message(
        next: impl Fn() -> std::result::Result<ControlMessage, RecvTimeoutError>,
    ) -> std::result::Result<ControlMessage, RecvTimeoutError> {
        loop {
            match next() {
                Ok(ControlMessage::Ready) => {}
                message => return message,
            }
        }
    }

    /// Like [`Running::wait`] with a bound; a guest that takes longer is killed.
    pub fn wait_timeout(self, timeout: Duration) -> Result<i32> {
        let end = Instant::now() + timeout;
        match Self::last_message(|| self.messages.recv_timeout(end.saturating_duration_since(Instant::now()))) {
            Ok(message) => self.finish(message),
            Err(RecvTimeoutError::Disconnected) => self.finish(ControlMessage::Nothing),
            Err(RecvTimeoutError::Timeout) => {
                let message = format!("did not end within {} s", timeout.as_secs());
                Err(Error::Guest { message, log: self.log_tail() })
            }
        }
    }

    fn finish(mut self, message: ControlMessage) -> Result<i32> {
        if self.ended.recv_timeout(POWER_OFF_TIMEOUT).is_err() {
            self.process.kill();
        }
        let mut reader_gone = false;
        for relay in std::mem::take(&mut self.relays) {
            match relay.join().unwrap_or(Ok(())) {
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => reader_gone = true,
                result => result.context(|| "pass on the command's output".into())?,
            }
        }
        match message {
            ControlMessage::Status(status) => Ok(status),
            _ if reader_gone => Ok(STATUS_SIGPIPE),
            message => Err(self.failure(message)),
        }
    }

    fn failure(&self, message: ControlMessage) -> Error {
        let message = match message {
            ControlMessage::Failed(reason) => format!("could not start the command: {reason}"),
            _ => {
                // Its last lines may still be on their way to the log.
                let _ = self.ended.recv_timeout(Duration::from_secs(1));
                "ended without a status of the command".into()
            }
        };
        Error::Guest { message, log: self.log_tail() }
    }

    /// Returns the log of the guest's console. It can be read after the guest's end, too.
    ///
    /// # Errors
    /// [`Error::Host`] if this process has no descriptor left.
    pub fn console(&self) -> Result<File> {
        self.log.try_clone().context(|| "keep the guest's log".into())
    }

    fn log_tail(&self) -> String {
        self.read_log(LOG_TAIL_BYTES).unwrap_or_else(|error| format!("(unreadable: {error})"))
    }

    /// Returns the end of the log.
    fn read_log(&self, bytes_max: u64) -> io::Result<String> {
        let (mut log, mut bytes) = (&self.log, Vec::new());
        let end = log.seek(SeekFrom::End(0))?;
        log.seek(SeekFrom::Start(end.saturating_sub(bytes_max)))?;
        log.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns whether the kernel's log has one of [`KERNEL_FAILURES`].
    fn has_kernel_failed(&self) -> bool {
        self.read_log(u64::MAX).is_ok_and(|log| has_kernel_failed(&log))
    }
}

fn has_kernel_failed(log: &str) -> bool {
    let is_failure = |line: &str| KERNEL_FAILURES.iter().any(|failure| line.contains(failure));
    log.lines().any(|line| is_failure(line) && !line.contains(KERNEL_LOCKUP))
}

impl Drop for Running {
    fn drop(&mut self) {
        self.process.kill();
        self.raw_terminal = None;
    }
}

/// Removes the directories of guests whose program was killed during the boot; no boot takes that long.
fn remove_stale(boot_timeout: Duration) {
    let limit = boot_timeout * 2 + Duration::from_secs(60);
    for entry in std::fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten() {
        let old = || entry.metadata().ok()?.modified().ok()?.elapsed().ok().filter(|age| *age > limit);
        if entry.file_name().as_encoded_bytes().starts_with(DIR_PREFIX.as_bytes()) && old().is_some() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

fn spawn_relay(relay: impl FnOnce() -> io::Result<()> + Send + 'static) -> JoinHandle<io::Result<()>> {
    std::thread::spawn(relay)
}

/// Starts the machine from a thread that lives as long as it does.
fn launch(
    args: &[OsString],
    log: &Path,
    guest: &Guest,
    ends: [UnixStream; 3],
) -> Result<(Process, Receiver<io::Result<ExitStatus>>)> {
    let [control, out, err] = ends.map(OwnedFd::from);
    let mut command = Command::new("sh");
    command
        .args([OsStr::new("-c"), OsStr::new(START), OsStr::new("ferry-guest"), log.as_os_str()])
        .args(args)
        .env("TMPDIR", machine::memory_directory(guest.memory_mib))
        .stdin(control)
        .stdout(out)
        .stderr(err)
        .process_group(0);
    let (to_started, started) = channel();
    let (to_ended, ended) = channel();
    std::thread::spawn(move || {
        let spawned = command.spawn();
        // The command holds the machine's ends of the lines; only the machine may.
        drop(command);
        let wait = |child: Child| {
            let pid = Pid::from_child(&child);
            let process = pidfd_open(pid, PidfdFlags::empty()).map(|pidfd| Process { pid, pidfd });
            let _ = to_started.send(process.map_err(io::Error::from));
            child
        };
        match spawned.map(wait) {
            Ok(mut child) => drop(to_ended.send(child.wait())),
            Err(error) => drop(to_started.send(Err(error))),
        }
    });
    let process = started.recv().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()));
    Ok((process.context(|| "start the guest".into())?, ended))
}

/// Reads the control line until the guest has gone.
fn listen(control: UnixStream) -> Receiver<ControlMessage> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(control).lines().map_while(io::Result::ok) {
            let message = match line.trim_end().split_once(' ') {
                None if line.trim_end() == "ready" => ControlMessage::Ready,
                Some(("status", status)) => status.parse().map_or(ControlMessage::Nothing, ControlMessage::Status),
                Some(("error", reason)) => ControlMessage::Failed(reason.to_owned()),
                _ => continue,
            };
            if sender.send(message).is_err() {
                return;
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_a_kernel_are_found_in_its_log() {
        for (line, expected) in [
            ("Kernel panic - not syncing: Attempted to kill init!", true),
            ("Oops: 0002 [#1] PREEMPT SMP NOPTI", true),
            ("Internal error: Oops: 0000000096000004 [#1] SMP", true),
            ("BUG: kernel NULL pointer dereference, address: 0000000000000008", true),
            ("watchdog: BUG: soft lockup - CPU#0 stuck for 22s! [swapper/0:1]", false),
            ("Kernel command line: console=ttyS0 oops=panic", false),
        ] {
            let log = format!("[    0.000000] Linux version 7.2\r\n[    1.500000] {line}\r\n[    1.600000] end");
            assert_eq!(has_kernel_failed(&log), expected, "{line}");
        }
    }
}
