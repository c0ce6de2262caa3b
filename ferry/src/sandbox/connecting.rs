//! The threads of a confined process that connect to servers, and their own sandbox.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::mpsc;

use anyhow::{Context, Result};
use ferry_9p_client::Connector;
use ferry_isolation::{Capabilities, Filter, LandlockRules, Role};

use super::{Confinement, SandboxFlags};

/// Where the C library looks up names of hosts. It has read the last one by then.
const NAMES: [&str; 3] = ["/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf"];
/// Name servers' port: by TCP they are asked for answers that are too long for a datagram.
const DOMAIN_PORT: u16 = 53;

/// How a source reaches its server, again and again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerAccess {
    /// A TCP port.
    pub port: Option<u16>,
    /// A host whose name is looked up each time.
    pub by_name: bool,
    /// A socket in a directory of this host.
    pub by_path: bool,
}

impl ServerAccess {
    /// The files that it takes.
    pub fn files(&self) -> Vec<PathBuf> {
        let names = NAMES.iter().filter(|_| self.by_name).map(PathBuf::from);
        names.filter(|path| path.exists()).collect()
    }
}

impl Confinement {
    /// Begins the threads that connect, for those sources that need one, each behind walls of its own; they stay in the host's
    /// network when this thread leaves it. As yet they do nothing.
    pub(super) fn connectors(&self, is_fenced: bool, as_user: bool) -> Result<Vec<Option<Connector>>> {
        let begin = |reach: &Option<ServerAccess>| {
            reach.as_ref().map(|reach| self.connector(reach.clone(), is_fenced, as_user)).transpose()
        };
        self.reaches.iter().map(begin).collect()
    }

    fn connector(&self, reach: ServerAccess, is_fenced: bool, as_user: bool) -> Result<Connector> {
        // Whosever the socket is, as root can.
        let kept = if reach.by_path { Capabilities::ALL_USERS } else { Capabilities::NONE };
        let kept = self.kept(kept, as_user)?;
        let (told, outcome) = mpsc::channel();
        let sandbox_flags = self.sandbox_flags.clone();
        let begun = Connector::begin(move || {
            // Who waits for this is there until it is told.
            drop(told.send(close(&sandbox_flags, &reach, is_fenced, kept)));
        });
        let connector = begun.context("no thread can be started")?;
        outcome.recv().context("a thread that connects has ended")??;
        Ok(connector)
    }
}

/// Closes the walls of this thread, and of those that it starts. What cannot be had here the process as a whole cannot have either, and
/// says so.
fn close(sandbox_flags: &SandboxFlags, reach: &ServerAccess, is_fenced: bool, kept: Capabilities) -> Result<()> {
    let fenced = if is_fenced {
        let files = reach.files().into_iter().filter_map(|path| File::open(path).ok()).collect::<Vec<_>>();
        let files: Vec<_> = files.iter().map(|file| (file.as_fd(), true)).collect();
        let ports: Vec<u16> = reach.port.into_iter().chain(reach.by_name.then_some(DOMAIN_PORT)).collect();
        Some(ferry_isolation::restrict_landlock(LandlockRules::Below(&files), &ports)?)
    } else {
        None
    };
    kept.limit(Capabilities::NONE)?;
    ferry_isolation::no_new_privileges()?;
    if let Some(action) = sandbox_flags.action() {
        let filtered = Filter::of(Role::Connector, action).and_then(|filter| filter.apply());
        filtered.or_else(|error| sandbox_flags.seccomp.map_or(Ok(()), |_| Err(error))).context("--seccomp")?;
    }
    tracing::debug!(landlock = ?fenced, capabilities = %kept, "a thread that connects is confined");
    Ok(())
}
