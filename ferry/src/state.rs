//! `--state`: state of guests that survives their server.
//!
//! The keeper is this program under another name. The first server starts it, hands it the state, and the next server takes it
//! over.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use ferry_isolation::{Action, Capabilities, Filter, Role};
use ferry_state::Directory;
use ferry_virtiofs::{KeeperConnection, KeeperError, SERVER_AWAITED, SessionStore};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::io::Errno;

use crate::flags::Share;
use crate::sandbox;

/// The name of the process in process lists, by which the program recognizes its role.
const NAME: &str = "ferry-keeper";

/// The keeper's socket in its directory, which process lists show.
const SOCKET: &str = "keeper";

/// Lets a keeper start another one, which stays, and exit.
const BEGIN: &str = "--begin";

/// How often a keeper that is ending may be found before giving up.
const TRIES_MAX: usize = 10;

/// Opens the store of each share with `--state`.
pub fn open_all_stores(shares: &[Share]) -> Result<Vec<Option<Arc<SessionStore>>>> {
    shares.iter().map(|share| share.state.as_ref().map(|dir| open_store(dir, share)).transpose()).collect()
}

fn open_store(dir: &Path, share: &Share) -> Result<Arc<SessionStore>> {
    let what = || format!("--state {}", dir.display());
    let directory = Directory::open(dir).with_context(what)?;
    let connection = connect(&directory, dir).with_context(what)?;
    let geometry = ferry_virtiofs::geometry(share.queue_count());
    SessionStore::open(connection, geometry).map(Arc::new).with_context(what)
}

fn connect(directory: &Directory, dir: &Path) -> Result<KeeperConnection> {
    for _ in 0..TRIES_MAX {
        match KeeperConnection::reach(directory) {
            // The keeper was ending.
            Err(
                KeeperError::Connect(Errno::NOENT | Errno::CONNREFUSED)
                | KeeperError::Gone(Errno::CONNRESET | Errno::PIPE),
            ) => {}
            other => return Ok(other?),
        }
        let _ = directory.clear();
        match ferry_state::listen(directory) {
            Ok(listener) => {
                let mut command = keeper(std::path::absolute(dir)?.join(SOCKET).as_os_str());
                let begun = command.arg(BEGIN).stdin(listener).status();
                let status = begun.with_context(|| format!("cannot start {NAME}"))?;
                ensure!(status.success(), "cannot start {NAME}: {status}");
            }
            // Another server has just started one.
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error).with_context(|| format!("cannot create a socket in {}", dir.display())),
        }
    }
    bail!("{NAME} ends at once")
}

/// Returns the command that starts a keeper on a socket.
fn keeper(socket: &OsStr) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0(NAME).arg(socket).env_clear().current_dir("/").stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Logs that the keeper stays after the end of a server, and how to end it.
pub fn log_keeper_stays(share: &str, kept: &SessionStore) {
    let minutes = SERVER_AWAITED.as_secs() / 60;
    let end = kept.keeper().map_or_else(|| format!("end the process {NAME}"), |pid| format!("kill {pid}"));
    tracing::info!(
        "{NAME} holds the open files and the connection of the guest of {share} for the next server, for up to {minutes} minutes; \
         to release the guest: {end} (SIGQUIT ends a server and its {NAME})"
    );
}

/// Whether this process was started as a keeper.
pub fn is_keeper(program: &OsStr) -> bool {
    program == NAME
}

/// Runs as a keeper, on the socket that is its standard input and whose path is its argument.
pub fn run(args: &[OsString]) -> ExitCode {
    if let (Some(socket), Some(word)) = (args.get(1), args.get(2))
        && word == BEGIN
    {
        // The server is not its parent, so it never is a zombie of the server.
        return keeper(socket).spawn().map_or(ExitCode::FAILURE, |_| ExitCode::SUCCESS);
    }
    match keep(args.get(1).and_then(|socket| Path::new(socket).parent())) {
        Ok(()) => ExitCode::SUCCESS,
        // It has no output for the error.
        Err(_) => ExitCode::FAILURE,
    }
}

fn keep(dir: Option<&Path>) -> Result<()> {
    // Leaves the server's process group, so that signals to it do not end the keeper.
    rustix::process::setsid().context("cannot create a session")?;
    close_inherited();
    // The server has blocked signals when it starts this process. They are read here, so that the socket's file is removed.
    let mut ends = SigSet::empty();
    ends.extend([Signal::SIGTERM, Signal::SIGINT, Signal::SIGQUIT]);
    ends.thread_set_mask().context("cannot block signals")?;
    let end = SignalFd::with_flags(&ends, SfdFlags::SFD_CLOEXEC).context("cannot read signals")?;
    let end = end.as_fd().try_clone_to_owned().context("no descriptor is left")?;
    let directory = dir.map(Directory::open).transpose()?;
    sandbox::raise_descriptor_limit();
    Capabilities::NONE.limit(Capabilities::NONE)?;
    ferry_isolation::no_new_privileges()?;
    let listener = std::io::stdin().as_fd().try_clone_to_owned().context("no descriptor is left")?;
    // Without seccomp, it still has no capabilities, and opens no files.
    let _ = Filter::of(Role::Keeper, Action::Kill).and_then(|filter| filter.apply());
    let kept = ferry_state::keep(&listener, &end);
    if let Some(directory) = directory {
        // The next keeper creates its own.
        let _ = directory.clear();
    }
    Ok(kept?)
}

/// Closes descriptors that the server has inherited (a lock, a pipe): a process that outlives it would hold them open. Call it at the
/// start of a program.
pub fn close_inherited() {
    let Ok(entries) = fs::read_dir("/proc/self/fd") else { return };
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<RawFd>().ok());
    let numbers: Vec<RawFd> = numbers.filter(|number| *number > rustix::stdio::raw_stderr()).collect();
    for number in numbers {
        // SAFETY: fcntl(2) on a closed number only fails.
        let is_open = rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(number) }).is_ok();
        if is_open {
            // SAFETY: it is open, and this program, which has just started, has no owner of it.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
}
