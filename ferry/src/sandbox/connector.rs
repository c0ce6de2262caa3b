//! The threads of a confined process that connect to servers, and their sandbox.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::mpsc;

use anyhow::{Context, Result};
use ferry_9p_client::Connector;
use ferry_isolation::{Capabilities, LandlockRules, Role};

use super::{Confinement, SandboxFlags};

/// The files that the C library reads for host name lookups. It has already read the last one.
const NAMES: [&str; 3] = ["/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf"];
/// The port of name servers, for long answers over TCP.
const DOMAIN_PORT: u16 = 53;

/// What a source needs to connect to its server repeatedly.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerAccess {
    /// A TCP port.
    pub port: Option<u16>,
    /// A host name, which is looked up each time.
    pub by_name: bool,
    /// A socket in a directory of this host.
    pub by_path: bool,
}

impl ServerAccess {
    /// Returns the files that it needs.
    pub fn files(&self) -> Vec<PathBuf> {
        let names = NAMES.iter().filter(|_| self.by_name).map(PathBuf::from);
        names.filter(|path| path.exists()).collect()
    }
}

impl Confinement {
    /// Starts the threads that connect, each in its own sandbox, for sources that need one. They stay in the host's network when
    /// this thread leaves it, and wait for work.
    pub(super) fn connectors(&self, is_fenced: bool, as_user: bool) -> Result<Vec<Option<Connector>>> {
        let begin = |reach: &Option<ServerAccess>| {
            reach.as_ref().map(|reach| self.connector(reach.clone(), is_fenced, as_user)).transpose()
        };
        self.reaches.iter().map(begin).collect()
    }

    fn connector(&self, reach: ServerAccess, is_fenced: bool, as_user: bool) -> Result<Connector> {
        // The socket may have any owner, as for root.
        let kept = if reach.by_path { Capabilities::ALL_USERS } else { Capabilities::NONE };
        let kept = self.kept(kept, as_user)?;
        let (told, outcome) = mpsc::channel();
        let sandbox_flags = self.sandbox_flags.clone();
        let begun = Connector::begin(move || {
            // The receiver waits for this.
            drop(told.send(close(&sandbox_flags, &reach, is_fenced, kept)));
        });
        let connector = begun.context("cannot start a thread")?;
        outcome.recv().context("a thread that connects has ended")??;
        Ok(connector)
    }
}

/// Confines this thread and its later threads. If a part is not available, the process as a whole reports it.
fn close(sandbox_flags: &SandboxFlags, reach: &ServerAccess, is_fenced: bool, kept: Capabilities) -> Result<()> {
    let fenced = if is_fenced {
        let files = reach.files().into_iter().filter_map(|path| File::open(path).ok()).collect::<Vec<_>>();
        let files: Vec<_> = files.iter().map(|file| (file.as_fd(), true)).collect();
        let ports: Vec<u16> = reach.port.into_iter().chain(reach.by_name.then_some(DOMAIN_PORT)).collect();
        sandbox_flags.fence(LandlockRules::Below(&files), &ports)?
    } else {
        None
    };
    kept.limit(Capabilities::NONE)?;
    ferry_isolation::no_new_privileges()?;
    sandbox_flags.filter(Role::Connector)?;
    tracing::debug!(landlock = ?fenced, capabilities = %kept, "confined a thread that connects");
    Ok(())
}
