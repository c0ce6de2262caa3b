//! The command `ferry agent`, which is also a program of its own, for guests.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use clap::CommandFactory;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::agent::{Agent, AgentEnd, AgentError};
use crate::mounts::MountTable;
use crate::notify::Readiness;
use crate::shutdown::Shutdown;

/// The exit status of failures.
const FAILED: u8 = 1;
/// The exit status where the next attempt would fail, too.
const MISUSED: u8 = 2;

/// The arguments of `ferry agent`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Mount points of shares in this guest.
    #[arg(value_name = "MOUNT", required = true)]
    pub mounts: Vec<PathBuf>,

    /// Wait for mounts that are not there, at the start and after an unmount [default: end].
    #[arg(long)]
    pub wait: bool,
}

/// The command line of `ferry-agent`.
#[derive(Debug, clap::Parser)]
#[command(name = "ferry-agent", version, max_term_width = 110)]
#[command(
    about = "Replay in a guest what happens to the files of shares, so that programs that watch them (inotify) see it."
)]
struct Program {
    /// What to log on standard error: off, error, warn, info, debug or trace.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log: tracing::level_filters::LevelFilter,

    #[command(flatten)]
    args: Args,
}

/// Returns the table of flags of `ferry-agent`.
pub fn table() -> clap::Command {
    Program::command()
}

/// Runs the program `ferry-agent`; returns its exit status.
pub fn main() -> u8 {
    let Program { log, args } = <Program as clap::Parser>::parse();
    tracing_subscriber::fmt().with_max_level(log).with_ansi(false).with_writer(std::io::stderr).init();
    run("ferry-agent", &args)
}

/// Runs an agent for each mount until SIGTERM, SIGINT or SIGHUP, or until none can go on; returns the exit status.
/// `program` begins messages on standard error.
pub fn run(program: &'static str, args: &Args) -> u8 {
    match start(program, args) {
        Ok(threads) => {
            // The panic was logged.
            threads.into_iter().map(|thread| thread.join().unwrap_or(FAILED)).max().unwrap_or_default()
        }
        Err(error) => {
            eprintln!("{program}: cannot start: {error}");
            FAILED
        }
    }
}

fn start(program: &'static str, args: &Args) -> std::io::Result<Vec<JoinHandle<u8>>> {
    let shutdown = Arc::new(Shutdown::new()?);
    let readiness = Arc::new(Readiness::new(args.mounts.len()));
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let (ends, manager) = (Arc::clone(&shutdown), Arc::clone(&readiness));
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if signals.forever().next().is_some() {
            manager.stopping();
            // Those that cannot be interrupted end after their wait.
            let _ = ends.end();
        }
    })?;
    let serve = |path: &PathBuf| {
        let place = Place { path: path.clone(), waits: args.wait, shutdown: Arc::clone(&shutdown) };
        let readiness = Arc::clone(&readiness);
        std::thread::Builder::new().name("agent".into()).spawn(move || {
            let mut is_ready = false;
            let outcome = place.serve(&mut || {
                if !std::mem::replace(&mut is_ready, true) {
                    tracing::debug!("{}: ready", place.path.display());
                    readiness.mount_ready();
                }
            });
            match outcome {
                Ok(()) => 0,
                Err(error) => {
                    eprintln!("{program}: {}", text(&error));
                    if error.is_misuse() { MISUSED } else { FAILED }
                }
            }
        })
    };
    args.mounts.iter().map(serve).collect()
}

/// An error and its sources, without control characters.
fn text(error: &AgentError) -> String {
    let mut text = error.to_string();
    let mut next = std::error::Error::source(error);
    while let Some(source) = next {
        text.push_str(&format!(": {source}"));
        next = source.source();
    }
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Where a share is mounted, or will be.
struct Place {
    path: PathBuf,
    waits: bool,
    shutdown: Arc<Shutdown>,
}

impl Place {
    /// Serves the mounts that are there, one after the other.
    fn serve(&self, ready: &mut dyn FnMut()) -> Result<(), AgentError> {
        let path: &Path = &self.path;
        let failed = |source| AgentError::Wait { path: path.into(), source };
        // Opened at first, so that no change is missed.
        let table = MountTable::open()
            .map_err(|error| failed(rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO)))?;
        loop {
            match Agent::open(path, &self.shutdown).and_then(|agent| agent.run(ready)) {
                Ok(AgentEnd::Stopped) => return Ok(()),
                Ok(AgentEnd::Unmounted) => tracing::info!("{} has been unmounted", path.display()),
                Err(error) if self.waits && error.is_missing() => {
                    tracing::debug!("waiting: {error}");
                }
                Err(error) => return Err(error),
            }
            if !self.waits {
                return Ok(());
            }
            // The service that mounts may wait for this one to be ready.
            ready();
            if !table.wait(&self.shutdown).map_err(failed)? {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_flags_is_consistent() {
        table().debug_assert();
    }

    #[test]
    fn an_unmounted_directory_is_an_error() {
        let directory = tempfile::tempdir().expect("a directory");
        let place =
            |path: PathBuf| Place { path, waits: false, shutdown: Arc::new(Shutdown::new().expect("a descriptor")) };
        let error = place(directory.path().join("none\n")).serve(&mut || ()).expect_err("no such path");
        assert!(error.is_missing() && !error.is_misuse());
        assert!(text(&error).ends_with("none?: No such file or directory (os error 2)"), "{}", text(&error));
        if rustix::process::geteuid().is_root() {
            let error = place(directory.path().into()).serve(&mut || ()).expect_err("nothing mounted");
            assert!(matches!(error, AgentError::NotMounted { .. }), "{error:?}");
            let error = place("/proc".into()).serve(&mut || ()).expect_err("another file system");
            assert!(matches!(error, AgentError::NoEvents { .. }) && error.is_misuse(), "{error:?}");
        }
    }

    #[test]
    fn a_waiting_agent_is_ready_and_ends_on_a_signal() {
        let directory = tempfile::tempdir().expect("a directory");
        let shutdown = Arc::new(Shutdown::new().expect("a descriptor"));
        let place = Place { path: directory.path().join("later"), waits: true, shutdown: Arc::clone(&shutdown) };
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || place.serve(&mut || ready.send(()).expect("a receiver")).is_ok());
        is_ready.recv().expect("ready");
        let _ = shutdown.end();
        assert!(thread.join().expect("no panic"));
    }
}
