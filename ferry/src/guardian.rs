//! The guardian makes sure that a mount ends with its server, however the server ends.
//!
//! The kernel closes the connections of a process that was killed, and whoever waits for the mount gets an error. But it
//! does so only when the last thread of the process is gone, and a thread that is just telling the kernel of a change may be
//! unable to go: it waits for a directory that a caller has locked, who waits for the server. So each mount has a
//! guardian: a process of its own that holds nothing but the switch of the connection, and throws it when the server dies.
//!
//! That the server dies the guardian cannot learn from a pipe or a pidfd, which also wait for the last thread. The kernel
//! sends it a signal (`PR_SET_PDEATHSIG`) when the thread ends that started it; this is one that does nothing else, so that
//! nothing can hold it up.
//!
//! The kernel's mount of an image whose packs are not all here has one, too, for another reason: the kernel would let readers see
//! holes as zeros once nobody answers its questions any more ([`crate::image::watch`]).

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use rustix::thread::gettid;
use signal_hook::iterator::Signals;

use crate::image::watch::{self, PackHold};

/// The name that the process has in a list of processes, and by which the program knows what it is to be.
const NAME: &str = "ferry-guardian";

/// Says that the server is dead.
const DEATH: Signal = Signal::USR1;

/// What must not end a guardian before its server: who ends a group of processes sends these to all of them.
const IGNORED: [Signal; 4] = [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT];

/// What a guardian does when its server has died.
pub enum GuardianTask<'a> {
    /// It ends the connection of a mount.
    Connection {
        /// Where it is mounted, for whoever looks at a list of processes.
        mountpoint: &'a Path,
        /// What ends it.
        switch: File,
    },
    /// It answers for readers of packs ([`watch::answer_for_dead_server`]).
    Packs {
        /// Where the kernel asks.
        group: File,
        /// The packs, each by a path that this process can open it by.
        packs: Vec<PathBuf>,
    },
}

/// How a guardian is told its duty.
const CONNECTION: &str = "connection";
const PACKS: &str = "packs";

/// The guardian of one mount. Dropping it lets it go: to be done when there is no mount any more.
pub struct Guardian {
    over: Option<Sender<()>>,
    keeper: Option<JoinHandle<()>>,
}

impl Guardian {
    /// Starts one; it is on guard when this returns.
    ///
    /// # Errors
    /// No process, thread or descriptor can be had, or the guardian's own.
    pub fn start(duty: GuardianTask<'_>) -> Result<Self> {
        let (output, kind, paths) = match duty {
            GuardianTask::Connection { mountpoint, switch } => (switch, CONNECTION, vec![mountpoint.to_owned()]),
            GuardianTask::Packs { group, packs } => (group, PACKS, packs),
        };
        let mut command = Command::new("/proc/self/exe");
        command.arg0(NAME).env_clear().current_dir("/");
        command.stdin(Stdio::null()).stdout(output).stderr(Stdio::piped());
        let (told, outcome) = channel();
        let (over, wait) = channel();
        let keeper = std::thread::Builder::new().name("guardian".into());
        let keep = move || {
            command.arg(format!("/proc/{}/task/{}", std::process::id(), gettid())).arg(kind).args(paths);
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
            // It can only have panicked, which was reported.
            let _ = keeper.join();
        }
    }
}

/// What the thread does that the guardian's life hangs on: nothing, once it has started it.
fn keep(command: Command, told: &Sender<Result<()>>, over: &Receiver<()>) {
    let started = begin(command);
    let (outcome, child) = match started {
        Ok(child) => (Ok(()), Some(child)),
        Err(error) => (Err(error), None),
    };
    // Whoever started the thread waits for this.
    let _ = told.send(outcome);
    let Some(mut child) = child else { return };
    // Nothing is ever sent: the other end is dropped.
    let _ = over.recv();
    end(&mut child);
}

/// Starts the process, and waits until it is on guard.
fn begin(mut command: Command) -> Result<Child> {
    let mut child = command.spawn().context("cannot start its process")?;
    // The switch; the process has its own.
    drop(command);
    let mut said = String::new();
    let stderr = child.stderr.take().expect("it is piped");
    // It lets go of this when it is on guard, and says here what keeps it from that.
    let read = stderr.take(TEXT_BYTES_MAX).read_to_string(&mut said);
    if let Err(error) = read.context("its process does not say whether it is on guard") {
        end(&mut child);
        return Err(error);
    }
    if !said.is_empty() {
        end(&mut child);
        bail!("{}", said.trim_end());
    }
    Ok(child)
}

/// More than it ever says.
const TEXT_BYTES_MAX: u64 = 4096;

fn end(child: &mut Child) {
    if let Err(error) = child.kill().and_then(|()| child.wait()) {
        tracing::debug!("the guardian of a mount cannot be ended: {error}");
    }
}

/// Whether this process was started as a guardian.
pub fn is_one(program: &OsStr) -> bool {
    program == NAME
}

/// What a guardian does: waits until its server dies, and does its duty on its standard output. Its arguments are the folder
/// below /proc of the thread that has started it, which duty it has, and the paths of that.
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
    let keeper = args.get(1).map(Path::new).filter(|keeper| keeper.starts_with("/proc"));
    let keeper = keeper.context("ferry starts its guardians itself: the thread of a server is missing")?;
    let held = match args.get(2).and_then(|kind| kind.to_str()) {
        Some(PACKS) => Some(args[3..].iter().map(|pack| PackHold::open(Path::new(pack))).collect::<Result<Vec<_>>>()?),
        _ => None,
    };
    let mut signals = catch().context("signals cannot be caught")?;
    // Not one of the terminal's, nor of the server's group.
    rustix::process::setsid().context("no session can be had")?;
    rustix::process::set_parent_process_death_signal(Some(DEATH)).context("the server's death cannot be learnt")?;
    // From now on the signal comes, but not from a thread that is already on its way out. (The process may still be there,
    // and our parent, by another thread that cannot go.)
    let lives = fs::read(keeper.join("stat")).is_ok_and(|stat| !is_exiting(&stat));
    let null = OpenOptions::new().write(true).open("/dev/null").context("cannot open /dev/null")?;
    rustix::stdio::dup2_stderr(null).context("cannot let go of standard error")?;
    if lives {
        signals.forever().find(|signal| *signal == DEATH.as_raw());
    }
    if let Some(held) = held {
        return watch::answer_for_dead_server(io::stdout(), &held).context("the kernel cannot be answered");
    }
    let mut switch = io::stdout().lock();
    switch.write_all(b"1").and_then(|()| switch.flush()).context("the connection cannot be ended")
}

/// Whether a thread has begun to end, by its `stat` (proc(5)). What cannot be understood has.
fn is_exiting(stat: &[u8]) -> bool {
    /// Of `include/linux/sched.h`: set before the kernel looks for children to tell.
    const PF_EXITING: u64 = 4;
    /// The field "flags", counted from the one after the name, which may hold anything.
    const FLAGS: usize = 6;
    let after_name = stat.rsplit(|byte| *byte == b')').next().unwrap_or_default();
    let flags =
        String::from_utf8_lossy(after_name).split_ascii_whitespace().nth(FLAGS).and_then(|flags| flags.parse().ok());
    flags.is_none_or(|flags: u64| flags & PF_EXITING != 0)
}

fn catch() -> io::Result<Signals> {
    Signals::new(IGNORED.into_iter().chain([DEATH]).map(Signal::as_raw))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_end_are_known() {
        let ours = format!("/proc/self/task/{}/stat", gettid());
        assert!(!is_exiting(&fs::read(ours).expect("a thread")));
        assert!(is_exiting(b"4297 (a) b) c) Z 2197 2193 31546 0 -1 4228364 581 0"));
        assert!(!is_exiting(b"4297 (a) b) c) S 2197 2193 31546 0 -1 4228360 581 0"));
        for nonsense in [&b""[..], b"1 (a) S 1", b"1 (a) S 1 1 1 1 1 x", b"\xff"] {
            assert!(is_exiting(nonsense));
        }
    }
}
