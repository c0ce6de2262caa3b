//! The launch of all servers: prepare, confine, open, export.
//!
//! Shares, mounts, disks and virtiofsd use it, confined or not. The caller of [`run`] has prepared already.

use anyhow::{Context, Result};
use ferry_fs::{ShutdownHandle, ShutdownSignals};
use ferry_isolation::BlockedSignals;
use rustix::process::Signal;

use crate::new_files::NewFiles;
use crate::sandbox::{Confinement, Inside, SandboxSide};
use crate::service_manager;

/// The signals that end a server. SIGHUP is not among them: nohup works.
pub const SHUTDOWN_SIGNALS: [i32; 3] = [Signal::TERM.as_raw(), Signal::INT.as_raw(), SIGNAL_DISCARD_STATE];

/// The signal that also discards the state of `--state`.
pub const SIGNAL_DISCARD_STATE: i32 = Signal::QUIT.as_raw();

/// The prepared exports of a process: their sockets exist, and files that the sandbox will hide are open.
pub trait Serve {
    /// Keeps only the socket files, in the process outside the sandbox. That process waits, removes those files at the end, and
    /// removes the returned new files if the start fails.
    fn leave(&mut self) -> &mut NewFiles;

    /// Takes over inside the sandbox. The process outside removes the socket files.
    fn take_over(&mut self) -> Result<()>;

    /// Opens the rest, inside the sandbox if there is one.
    fn open(&mut self, _sandbox: Option<&mut Inside>) -> Result<()> {
        Ok(())
    }

    /// Starts threads and serves. The sandbox is complete.
    fn start(&mut self) -> Result<()>;

    /// Notifies `over` once nothing is left to serve, if that can happen.
    fn notify_when_done(&self, _over: ShutdownHandle) -> Result<()> {
        Ok(())
    }

    /// Finishes requests under way and syncs their writes. `signal` is the signal that ended the server, if any.
    fn stop(&mut self, signal: Option<i32>);
}

/// Serves until a signal, or until nothing is left to serve. Calls `ready` once everything is served; it returns whether the start
/// succeeded. Returns the exit status. With namespaces this returns in two processes: the one outside the sandbox returns the
/// status of the other.
pub fn run<S: Serve>(
    mut server: S,
    confinement: Option<Confinement>,
    signals: BlockedSignals,
    ready: impl FnOnce(&S) -> Result<bool>,
) -> Result<u8> {
    let mut sandbox = match confinement.map(Confinement::enter).transpose()? {
        Some(SandboxSide::Outside(outside)) => {
            // Closes this process's copies of descriptors that the other process will close.
            drop(ready);
            return outside.wait(&signals, server.leave(), |signal| {
                if SHUTDOWN_SIGNALS.contains(&signal.as_raw()) {
                    service_manager::stopping();
                }
            });
        }
        Some(SandboxSide::Inside(inside)) => Some(inside),
        None => None,
    };
    if sandbox.as_ref().is_some_and(|inside| inside.is_split()) {
        server.take_over()?;
        service_manager::leave();
    }
    ferry_control::open_descriptor_table();
    let mut endings = ShutdownSignals::catch(&SHUTDOWN_SIGNALS).context("cannot catch signals")?;
    signals.release()?;
    server.open(sandbox.as_deref_mut())?;
    sandbox.map_or(Ok(()), |inside| inside.close())?;
    server.start()?;
    let mut signal = None;
    if ready(&server)? {
        server.notify_when_done(endings.handle())?;
        service_manager::ready();
        signal = endings.wait();
        service_manager::stopping();
        match signal {
            Some(signal) => tracing::info!(signal, "ending: finishing requests under way"),
            None => tracing::info!("ending: nothing is left to serve"),
        }
    }
    server.stop(signal);
    Ok(0)
}
