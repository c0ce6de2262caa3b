//! The guardian ends a mount when its server ends, however that happens.
//!
//! The kernel closes the connection of a killed process, and waiting callers get errors. But it does so only after the last
//! thread of the process has exited. A thread that is notifying the kernel of a change may be unable to exit: it waits for the
//! lock of a directory, and its holder waits for the server. So each mount has a guardian: a process that holds only the file
//! that aborts the connection, and writes to it when the server dies.
//!
//! A pipe or a pidfd would not report the server's death, because they also wait for the last thread. Instead the kernel sends a
//! signal (`PR_SET_PDEATHSIG`) when the thread that started the guardian exits. That thread does nothing else, so nothing can
//! block it.
//!
//! Where a next server is expected, the guardian also holds the connection itself, and aborts it only if that server does not come
//! ([`WaitingGuardians`]).
//!
//! The kernel's mount of an incomplete image has a guardian as well: without a process that responds to its events, readers would
//! see holes as zeros ([`crate::image::watch`]).

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use ferry_fuse::Resumable;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open, pidfd_send_signal};
use rustix::thread::gettid;
use signal_hook::iterator::Signals;

use crate::image::watch::GuardianFiles;
use crate::image::watch::dead_server::DeadServer;
use crate::state;

/// The name of the process in process lists, by which the program recognizes its role.
const NAME: &str = "ferry-guardian";

/// How often the end of a killed server is looked for: all of its threads close its files.
const EXIT_TICK: Duration = Duration::from_millis(1);

/// The signal on the server's death.
const SERVER_DEATH: Signal = Signal::USR1;

/// Signals that must not end a guardian before its server: they are often sent to a whole process group.
const IGNORED: [Signal; 4] = [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT];

/// What a guardian does when its server has died.
pub enum GuardianTask<'a> {
    /// Abort the connection of a mount.
    Connection {
        /// The mount point, for process lists.
        mountpoint: &'a Path,
        /// The file that aborts it.
        switch: File,
        /// For the next server, and how long to wait for it.
        resumable: Option<(Resumable, Duration)>,
    },
    /// Respond to readers of packs ([`DeadServer`]).
    Packs {
        /// The server's files.
        files: GuardianFiles,
        /// How long readers wait for the next server.
        restart_time: Duration,
        /// Whether a block may have bytes of two objects.
        shares_blocks: bool,
    },
}

/// The words for the tasks.
const CONNECTION: &str = "connection";
const CONNECTION_WORD: &[u8] = CONNECTION.as_bytes();
const PACKS: &str = "packs";

/// The guardian of one mount. Drop it when the mount is gone.
pub struct Guardian {
    over: Option<Sender<()>>,
    keeper: Option<JoinHandle<()>>,
}

impl Guardian {
    /// Starts a guardian, which is ready when this returns.
    ///
    /// The process or its thread cannot be started, or the guardian reports an error.
    pub fn start(duty: GuardianTask<'_>) -> Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0(NAME).env_clear().current_dir("/").stderr(Stdio::piped());
        let args: Vec<OsString> = match duty {
            GuardianTask::Connection { mountpoint, switch, resumable: None } => {
                command.stdin(Stdio::null()).stdout(switch);
                vec![CONNECTION.into(), mountpoint.into()]
            }
            GuardianTask::Connection { mountpoint, switch, resumable: Some((resumable, restart_time)) } => {
                command.stdin(resumable.device).stdout(switch);
                let words =
                    [restart_time.as_secs().to_string(), resumable.connection.to_string(), hex(&resumable.init)];
                [CONNECTION.into(), mountpoint.into()].into_iter().chain(words.map(OsString::from)).collect()
            }
            GuardianTask::Packs { files: GuardianFiles { group, log, packs }, restart_time, shares_blocks } => {
                command.stdin(log).stdout(group);
                let args = [PACKS.into(), restart_time.as_secs().to_string(), shares_blocks.to_string()];
                args.map(OsString::from).into_iter().chain(packs.into_iter().map(OsString::from)).collect()
            }
        };
        let (told, outcome) = channel();
        let (over, wait) = channel();
        let keeper = std::thread::Builder::new().name("guardian".into());
        let keep = move || {
            command.arg(format!("/proc/{}/task/{}", std::process::id(), gettid())).args(args);
            keep(command, &told, &wait);
        };
        let keeper = keeper.spawn(keep).context("cannot start a thread")?;
        let guardian = Self { over: Some(over), keeper: Some(keeper) };
        outcome.recv().context("its thread has ended")??;
        Ok(guardian)
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        self.over = None;
        if let Some(keeper) = self.keeper.take() {
            // A panic was already reported.
            let _ = keeper.join();
        }
    }
}

/// Runs on the thread whose exit the guardian watches; it does nothing after the start.
fn keep(command: Command, told: &Sender<Result<()>>, over: &Receiver<()>) {
    // The receiver of the outcome waits for it.
    match begin(command) {
        Err(error) => drop(told.send(Err(error))),
        Ok(mut child) => {
            drop(told.send(Ok(())));
            // Returns when the sender is dropped.
            let _ = over.recv();
            end(&mut child);
        }
    }
}

/// Starts the process, and waits until it is ready.
fn begin(mut command: Command) -> Result<Child> {
    let mut child = command.spawn().context("cannot start its process")?;
    // Closes this process's copy of the task's file.
    drop(command);
    let mut said = String::new();
    let stderr = child.stderr.take().expect("it is piped");
    // The guardian closes it when it is ready, or writes an error.
    let read = stderr.take(TEXT_BYTES_MAX).read_to_string(&mut said);
    let error = match read.context("cannot read the state of its process") {
        Ok(_) if said.is_empty() => return Ok(child),
        Ok(_) => anyhow!("{}", said.trim_end()),
        Err(error) => error,
    };
    end(&mut child);
    Err(error)
}

/// Longer than any error.
const TEXT_BYTES_MAX: u64 = 4096;

/// Longer than the arguments of any guardian with a connection; those of other processes may have megabytes.
const LINE_BYTES_MAX: u64 = 16 << 10;

fn end(child: &mut Child) {
    if let Err(error) = child.kill().and_then(|()| child.wait()) {
        tracing::debug!("cannot end the guardian of a mount: {error}");
    }
}

/// Whether this process was started as a guardian.
pub fn is_guardian(program: &OsStr) -> bool {
    program == NAME
}

/// Runs as a guardian: waits until its server dies, and does its task with the file on standard output. The arguments are the
/// /proc directory of the thread that started it, the task, and the paths of the task.
pub fn run(args: &[OsString]) -> ExitCode {
    match guard(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn guard(args: &[OsString]) -> Result<()> {
    // Here and not between fork and exec: then the server, which may have much memory and rings, would be forked.
    state::close_inherited();
    let keeper = args.get(1).map(Path::new).filter(|keeper| keeper.starts_with("/proc"));
    let keeper = keeper.context("only ferry starts guardians: the thread of a server is missing")?;
    let server = match args.get(2).and_then(|kind| kind.to_str()) {
        Some(PACKS) => Some(packs(&args[3..])?),
        _ => None,
    };
    let mut signals = catch().context("cannot catch signals")?;
    // Leaves the terminal and the server's process group.
    rustix::process::setsid().context("cannot create a session")?;
    rustix::process::set_parent_process_death_signal(Some(SERVER_DEATH)).context("cannot watch the server")?;
    // Exits are signalled from now on, but not those that have already begun. (The process may still exist, and be our parent,
    // because of another blocked thread.)
    let lives = fs::read(keeper.join("stat")).is_ok_and(|stat| !is_exiting(&stat));
    let null = OpenOptions::new().write(true).open("/dev/null").context("cannot open /dev/null")?;
    rustix::stdio::dup2_stderr(null).context("cannot replace standard error")?;
    if lives {
        signals.forever().find(|signal| *signal == SERVER_DEATH.as_raw());
    }
    if let Some(server) = server {
        // Its locks still say that it serves, and readers that a guardian lets go on then would read holes.
        while is_ending(keeper) {
            std::thread::sleep(EXIT_TICK);
        }
        server.respond();
        return Ok(());
    }
    if let Some(restart_time) = args.get(4) {
        let seconds = restart_time.to_str().and_then(|seconds| seconds.parse().ok());
        // The next server kills this process once it has the connection.
        std::thread::sleep(Duration::from_secs(seconds.context("the time is not a number")?));
    }
    let mut switch = io::stdout().lock();
    switch.write_all(b"1").and_then(|()| switch.flush()).context("cannot abort the connection")
}

/// The guardians that wait for the next server of a mount: several if a server was killed before it had ended that of the last one.
pub struct WaitingGuardians(Vec<OwnedFd>);

impl WaitingGuardians {
    /// Returns the guardians of killed servers of the mount at `mountpoint`, if there are any, with the connection.
    pub fn find(mountpoint: &Path) -> Option<(Self, Resumable)> {
        let pids = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let found = pids.filter_map(|pid| WaitingTask::find(Pid::from_raw(pid)?, mountpoint));
        let (mut processes, mut resumable) = (Vec::new(), None);
        for (process, task) in found {
            resumable = resumable.or_else(|| task.resumable(&process));
            processes.push(process);
        }
        Some((Self(processes), resumable?))
    }

    /// Ends them: another process has the connection.
    pub fn end(self) {
        for process in self.0 {
            if let Err(error) = pidfd_send_signal(&process, Signal::KILL) {
                tracing::debug!("cannot end the guardian of a killed server: {error}");
            }
        }
    }
}

/// Whether a process is in the namespaces of this one. Processes of containers, which may have any name, are not.
fn is_of_this_host(pid: Pid) -> bool {
    ["mnt", "pid", "user"].iter().all(|name| {
        let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/{name}")).ok();
        let own = namespace("self");
        own.is_some() && namespace(&pid.as_raw_nonzero().to_string()) == own
    })
}

/// The arguments of a guardian that would wait for the next server.
#[derive(PartialEq, Eq)]
struct WaitingTask {
    keeper: PathBuf,
    mountpoint: PathBuf,
    connection: u32,
    init: Vec<u8>,
}

impl WaitingTask {
    /// Returns the process if it is such a guardian of `mountpoint`, of this user, and its server has ended.
    fn find(pid: Pid, mountpoint: &Path) -> Option<(OwnedFd, Self)> {
        let task = Self::of(pid).filter(|task| task.mountpoint == mountpoint)?;
        let own = rustix::process::geteuid().as_raw();
        let is_own = fs::metadata(format!("/proc/{}", pid.as_raw_nonzero())).is_ok_and(|found| found.uid() == own);
        if !is_own || fs::read(task.keeper.join("stat")).is_ok_and(|stat| !is_exiting(&stat)) {
            return None;
        }
        let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // The number may have been used again before there was a descriptor.
        Self::of(pid).filter(|again| *again == task && is_of_this_host(pid))?;
        Some((process, task))
    }

    fn resumable(self, process: &OwnedFd) -> Option<Resumable> {
        match pidfd_getfd(process, 0, PidfdGetfdFlags::empty()) {
            Ok(device) => Some(Resumable { device, init: self.init, connection: self.connection }),
            Err(error) => {
                tracing::warn!(
                    "{} cannot be resumed: its connection cannot be taken over: {error}",
                    self.mountpoint.display()
                );
                None
            }
        }
    }

    fn of(pid: Pid) -> Option<Self> {
        let mut line = Vec::new();
        let file = File::open(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).ok()?;
        file.take(LINE_BYTES_MAX).read_to_end(&mut line).ok()?;
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        let [name, keeper, CONNECTION_WORD, mountpoint, _, connection, init, ..] = words[..] else { return None };
        let path = |word| PathBuf::from(OsStr::from_bytes(word));
        let connection = str::from_utf8(connection).ok()?.parse().ok()?;
        (name == NAME.as_bytes()).then_some(())?;
        Some(Self { keeper: path(keeper), mountpoint: path(mountpoint), connection, init: unhex(init)? })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn unhex(text: &[u8]) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_chunks::<2>();
    let digit = |digit: u8| char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let byte = |[high, low]: &[u8; 2]| Some(digit(*high)? << 4 | digit(*low)?);
    pairs.iter().map(byte).collect::<Option<_>>().filter(|_| rest.is_empty())
}

/// Takes what a server of packs leaves: the fanotify group on standard output, its log on standard input, and the rest in the arguments.
fn packs(args: &[OsString]) -> Result<DeadServer> {
    let words: Option<Vec<&str>> = args.iter().take(2).map(|word| word.to_str()).collect();
    let Some([seconds, shares_blocks]) = words.as_deref() else { bail!("arguments are missing") };
    let restart_time = Duration::from_secs(seconds.parse().context("the time is not a number")?);
    let packs: Vec<PathBuf> = args[2..].iter().map(PathBuf::from).collect();
    let group = io::stdout().as_fd().try_clone_to_owned().context("cannot duplicate the fanotify group")?;
    let log = io::stdin().as_fd().try_clone_to_owned().context("cannot duplicate the log of events")?;
    DeadServer::new(group, &log.into(), &packs, restart_time, *shares_blocks == "true")
}

/// Whether a process with this thread still has threads that may have files open.
fn is_ending(keeper: &Path) -> bool {
    let Some(tasks) = keeper.parent() else { return false };
    // A zombie has only its first thread, which has ended.
    let has_ended = |stat: &[u8]| {
        let after_name = stat.rsplit(|byte| *byte == b')').next().unwrap_or_default();
        matches!(after_name.trim_ascii_start().first(), None | Some(b'Z' | b'X'))
    };
    let threads = fs::read_dir(tasks).into_iter().flatten().flatten();
    threads.map(|thread| fs::read(thread.path().join("stat"))).any(|stat| stat.is_ok_and(|stat| !has_ended(&stat)))
}

/// Whether a thread has begun to exit, by its `stat` (proc(5)); invalid contents count as exiting.
fn is_exiting(stat: &[u8]) -> bool {
    /// Of `include/linux/sched.h`: set before the kernel notifies children.
    const PF_EXITING: u64 = 4;
    /// The field "flags", counted after the name, which may contain any characters.
    const FLAGS: usize = 6;
    let after_name = stat.rsplit(|byte| *byte == b')').next().unwrap_or_default();
    let flags =
        String::from_utf8_lossy(after_name).split_ascii_whitespace().nth(FLAGS).and_then(|flags| flags.parse().ok());
    flags.is_none_or(|flags: u64| flags & PF_EXITING != 0)
}

fn catch() -> io::Result<Signals> {
    Signals::new(IGNORED.into_iter().chain([SERVER_DEATH]).map(Signal::as_raw))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// A container can give its processes any name and arguments, and must not get a connection of the host resumed as its own.
    #[test]
    fn only_processes_of_this_host_are_taken_for_guardians() {
        if !rustix::process::geteuid().is_root() {
            return ferry_skip::skip!("needs root, for a namespace of mounts");
        }
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        std::os::unix::fs::symlink("/bin/cat", at(NAME)).expect("a link");
        // It never gets a writer, so whoever reads it waits.
        let fifo = Mode::RUSR | Mode::WUSR;
        mknodat(CWD, at("fifo"), FileType::Fifo, fifo, 0).expect("a pipe");
        let forge = |words: &[&str], mountpoint: &str| {
            let (name, rest) = words.split_first().expect("a program");
            let mut command = Command::new(name);
            command
                .args(rest)
                .arg(at("fifo"))
                .args([CONNECTION, mountpoint, "30", "7", "00ff"])
                .env("PATH", directory.path());
            command.stdin(Stdio::null()).spawn().expect("it starts")
        };
        let own = forge(&[NAME], "/own");
        let foreign = forge(&["/usr/bin/unshare", "-m", NAME], "/foreign");
        let is_so = |mountpoint: &str, child: &Child| {
            let pid = Pid::from_child(child);
            let end = Instant::now() + Duration::from_secs(10);
            while WaitingTask::of(pid).is_none() {
                assert!(Instant::now() < end, "it is not there");
                std::thread::sleep(EXIT_TICK);
            }
            WaitingGuardians::find(Path::new(mountpoint)).map(|(_, found)| (found.connection, found.init))
        };
        let found = [is_so("/own", &own), is_so("/foreign", &foreign), is_so("/none", &own)];
        for mut child in [own, foreign] {
            end(&mut child);
        }
        assert_eq!(found, [Some((7, b"\x00\xff".to_vec())), None, None]);
    }

    #[test]
    fn ended_threads_are_known() {
        let own_stat = format!("/proc/self/task/{}/stat", gettid());
        assert!(!is_exiting(&fs::read(own_stat).expect("a thread")));
        assert!(is_exiting(b"4297 (a) b) c) Z 2197 2193 31546 0 -1 4228364 581 0"));
        assert!(!is_exiting(b"4297 (a) b) c) S 2197 2193 31546 0 -1 4228360 581 0"));
        assert!(is_of_this_host(rustix::process::getpid()));
        assert_eq!(unhex(hex(b"\x00\x7f\xff").as_bytes()).expect("hex"), b"\x00\x7f\xff");
        assert!([&b"0"[..], b"xx", b"+1", b"\xff\xff"].iter().all(|text| unhex(text).is_none()));
        for nonsense in [&b""[..], b"1 (a) S 1", b"1 (a) S 1 1 1 1 1 x", b"\xff"] {
            assert!(is_exiting(nonsense));
        }
    }
}
