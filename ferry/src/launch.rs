//! The one launch of all that is served: prepare, confine, open, export.
//!
//! Shares, mounts, disks and virtiofsd's options all come here, confined or not. Whoever calls [`run`] has prepared already.

use anyhow::{Context, Result};
use ferry_fs::{ShutdownHandle, ShutdownSignals};
use ferry_isolation::BlockedSignals;
use rustix::process::Signal;

use crate::new_files::NewFiles;
use crate::sandbox::{Confinement, Entered, Inside};
use crate::service_manager;

/// The signals that end a server. SIGHUP is none of them: a server that was started with nohup outlives its terminal.
pub const ENDINGS: [i32; 3] = [Signal::TERM.as_raw(), Signal::INT.as_raw(), FOR_GOOD];

/// The signal that also ends what `--state` keeps for the next server.
pub const FOR_GOOD: i32 = Signal::QUIT.as_raw();

/// What a process serves. It is prepared: its sockets exist, and what a sandbox would hide is open.
pub trait Serve {
    /// Leaves all but the files of sockets to the process inside the sandbox. This one waits, and removes those files in the end, and
    /// the new files that are returned if the start fails.
    fn leave(&mut self) -> &mut NewFiles;

    /// Takes over from the process outside of the sandbox, which removes the files of sockets.
    fn take_over(&mut self) -> Result<()>;

    /// Opens the rest, inside the sandbox if there is one.
    fn open(&mut self, _sandbox: Option<&mut Inside>) -> Result<()> {
        Ok(())
    }

    /// Starts threads and serves. The sandbox is complete.
    fn start(&mut self) -> Result<()>;

    /// Calls `over` once nothing is left to serve, if that can happen.
    fn when_over(&self, _over: ShutdownHandle) -> Result<()> {
        Ok(())
    }

    /// Ends requests under way and makes their writes durable. `signal` is why, if it was a signal.
    fn stop(&mut self, signal: Option<i32>);
}

/// Serves until there is a reason to end; calls `ready` once all is up, which returns whether the start has succeeded. Returns the status to
/// end with. With namespaces this returns in two processes: the one outside of the sandbox has the status of the other.
pub fn run<S: Serve>(
    mut server: S,
    confinement: Option<Confinement>,
    signals: BlockedSignals,
    ready: impl FnOnce(&S) -> Result<bool>,
) -> Result<u8> {
    let mut sandbox = match confinement.map(Confinement::enter).transpose()? {
        Some(Entered::Outside(outside)) => {
            // Files that the other process closes are to be closed.
            drop(ready);
            return outside.wait(&signals, server.leave());
        }
        Some(Entered::Inside(inside)) => Some(inside),
        None => None,
    };
    if sandbox.as_ref().is_some_and(|inside| inside.is_split()) {
        server.take_over()?;
        service_manager::leave();
    }
    let mut endings = ShutdownSignals::catch(&ENDINGS).context("cannot catch signals")?;
    signals.release()?;
    server.open(sandbox.as_deref_mut())?;
    sandbox.map_or(Ok(()), |inside| inside.close())?;
    server.start()?;
    let mut signal = None;
    if ready(&server)? {
        server.when_over(endings.over())?;
        service_manager::ready();
        signal = endings.wait();
        service_manager::stopping();
        match signal {
            Some(signal) => tracing::info!(signal, "ending: serving what is under way"),
            None => tracing::info!("ending: nobody is left to serve"),
        }
    }
    server.stop(signal);
    Ok(0)
}
