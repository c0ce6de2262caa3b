//! `--state`: guests' state that survives the end of their server.
//!
//! The keeper is this program under another name. It is started by the first server, holds what that hands to it, and is there for
//! the next one.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use ferry_isolation::{Action, Capabilities, Filter, Role};
use ferry_state::Folder;
use ferry_virtiofs::{KeeperConnection, KeeperError, SERVER_AWAITED, SessionStore};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};

use crate::flags::Share;

/// The name that the process has in a list of processes, and by which the program knows what it is to be.
const NAME: &str = "ferry-keeper";

/// The keeper's socket in its folder, which its list of arguments shows.
const SOCKET: &str = "keeper";

/// Has a keeper begin another one, which stays, and end.
const BEGIN: &str = "--begin";

/// How often a keeper that is just ending is found before another one is started.
const TRIES_MAX: usize = 10;

/// What is kept for each share.
pub fn open_all_stores(shares: &[Share]) -> Result<Vec<Option<Arc<SessionStore>>>> {
    shares.iter().map(|share| share.state.as_ref().map(|dir| reach(dir, share)).transpose()).collect()
}

fn reach(dir: &Path, share: &Share) -> Result<Arc<SessionStore>> {
    let what = || format!("--state {}", dir.display());
    let folder = Folder::open(dir).with_context(what)?;
    let line = line(&folder, dir).with_context(what)?;
    let geometry = ferry_virtiofs::geometry(share.queue_count());
    SessionStore::open(line, geometry).map(Arc::new).with_context(what)
}

fn line(folder: &Folder, dir: &Path) -> Result<KeeperConnection> {
    for _ in 0..TRIES_MAX {
        match KeeperConnection::reach(folder) {
            // It was just about to end.
            Err(
                KeeperError::Connect(Errno::NOENT | Errno::CONNREFUSED)
                | KeeperError::Gone(Errno::CONNRESET | Errno::PIPE),
            ) => {}
            other => return Ok(other?),
        }
        let _ = folder.clear();
        match ferry_state::listen(folder) {
            Ok(listener) => {
                let mut command = keeper(std::path::absolute(dir)?.join(SOCKET).as_os_str());
                let begun = command.arg(BEGIN).stdin(listener).status();
                let status = begun.context("cannot start the process that keeps it")?;
                ensure!(status.success(), "the process that keeps it cannot be started: {status}");
            }
            // Somebody else has just started one.
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error).with_context(|| format!("cannot make a socket in {}", dir.display())),
        }
    }
    bail!("the process that keeps it ends at once")
}

/// A keeper on a socket.
fn keeper(socket: &OsStr) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0(NAME).arg(socket).env_clear().current_dir("/").stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Says that the keeper stays when the server of a share has ended, and how it ends.
pub fn log_keeper_stays(share: &str, kept: &SessionStore) {
    let minutes = SERVER_AWAITED.as_secs() / 60;
    let end = kept.keeper().map_or_else(|| format!("end the process {NAME}"), |pid| format!("kill {pid}"));
    tracing::info!(
        "{NAME} holds what the guest of {share} has open, and its connection, for the next server, for up to {minutes} minutes; \
         to let the guest go: {end} (SIGQUIT ends a server and its {NAME})"
    );
}

/// Whether this process was started as a keeper.
pub fn is_keeper(program: &OsStr) -> bool {
    program == NAME
}

/// What a keeper does, on the socket that is its standard input. Its argument is the path of that.
pub fn run(args: &[OsString]) -> ExitCode {
    if let (Some(socket), Some(word)) = (args.get(1), args.get(2))
        && word == BEGIN
    {
        // The server is not its parent, so it is no zombie of the server's when it has ended.
        return keeper(socket).spawn().map_or(ExitCode::FAILURE, |_| ExitCode::SUCCESS);
    }
    match keep(args.get(1).and_then(|socket| Path::new(socket).parent())) {
        Ok(()) => ExitCode::SUCCESS,
        // There is nobody to be told.
        Err(_) => ExitCode::FAILURE,
    }
}

fn keep(dir: Option<&Path>) -> Result<()> {
    // Who ends a server's group of processes does not mean what it holds.
    rustix::process::setsid().context("no session can be had")?;
    close_inherited();
    // The server holds signals back when it starts this process. They are read here, so that the socket's file is removed.
    let mut ends = SigSet::empty();
    ends.extend([Signal::SIGTERM, Signal::SIGINT, Signal::SIGQUIT]);
    ends.thread_set_mask().context("signals cannot be held")?;
    let end = SignalFd::with_flags(&ends, SfdFlags::SFD_CLOEXEC).context("signals cannot be read")?;
    let end = end.as_fd().try_clone_to_owned().context("no descriptor is left")?;
    let folder = dir.map(Folder::open).transpose()?;
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    Capabilities::NONE.limit(Capabilities::NONE)?;
    ferry_isolation::no_new_privileges()?;
    let listener = std::io::stdin().as_fd().try_clone_to_owned().context("no descriptor is left")?;
    // Where there is no seccomp, it still has no capabilities, and opens nothing by itself.
    let _ = Filter::of(Role::Keeper, Action::Kill).and_then(|filter| filter.apply());
    let kept = ferry_state::keep(&listener, &end);
    if let Some(folder) = folder {
        // The next one makes its own.
        let _ = folder.clear();
    }
    Ok(kept?)
}

/// Closes what the server had inherited itself (a lock, a pipe that somebody reads to its end): it would stay open for as long as
/// the keeper is there.
fn close_inherited() {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else { return };
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<RawFd>().ok());
    let numbers: Vec<RawFd> = numbers.filter(|number| *number > rustix::stdio::raw_stderr()).collect();
    for number in numbers {
        // SAFETY: looking whether it is open harms nobody.
        let is_open = rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(number) }).is_ok();
        if is_open {
            // SAFETY: it is open, and nobody owns it: this program has just begun, and has opened nothing that it still has.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
}
