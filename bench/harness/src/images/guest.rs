//! A tree in a guest: the image over ferry's virtio-fs device, and the kernel's mount over virtiofsd's.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferry_guest::{Cache, Device};

use super::made::{BuiltImage, Programs};
use super::mounts::Tree;
use super::rows::Walk;
use super::systems::System;
use super::walk::Found;
use crate::agent::Agent;
use crate::rows::Config;
use crate::server::{Peer, Server, Sharing, TAG};

/// What both servers let the guest keep: images do not change.
const CONFIG: Config = Config::AlwaysNoXattr;
/// How long a walk may take.
const TIMEOUT: Duration = Duration::from_secs(120);
/// What reads the programs of the guest before anything is measured.
const READ_PROGRAMS: &str = "ls -lR /run >/dev/null; find /run -printf '%s\\n' | wc -l >/dev/null";

/// Where guests come from, and where they and the servers run.
#[derive(Debug, Clone)]
pub struct Place {
    /// The guest's parts.
    pub cache: Cache,
    /// virtiofsd.
    pub virtiofsd: Option<PathBuf>,
    /// The CPU of the guest.
    pub guest_cpu: usize,
    /// Those of the servers, as `taskset -c` takes them.
    pub server_cpus: String,
}

/// A guest with the tree. It is dropped before its server, and the server before the files.
#[derive(Debug)]
pub struct GuestWalk {
    agent: Agent,
    server: Server,
    _tree: Option<Tree>,
}

impl GuestWalk {
    /// Mounts and serves an image, and boots a guest with it.
    pub fn begin(
        system: System,
        made: &BuiltImage,
        directory: &Path,
        programs: &Programs,
        place: &Place,
    ) -> Result<Self> {
        let socket = directory.join("guest.socket");
        let (server, tree) = match system.served() {
            Some(mounted) => {
                let tree = Tree::mount(mounted, made, directory, programs)?;
                let servers =
                    crate::server::Programs { ferry: programs.ferry.clone(), virtiofsd: place.virtiofsd.clone() };
                let cpus = &place.server_cpus;
                let sharing = Sharing { dir: tree.dir(), socket, config: CONFIG, queues: None, cpus, logs: false };
                (Server::start(Peer::Virtiofsd, &servers, &sharing)?, Some(tree))
            }
            None => {
                let mut words: Vec<OsString> = vec![programs.ferry.clone().into()];
                let options = format!("--log warn share --tag {TAG} {}", CONFIG.ferry_flags());
                words.extend(options.split(' ').map(OsString::from));
                let mut source = OsString::from("image:");
                source.push(made.image());
                words.extend([source, "--store".into(), made.data().into(), "--virtiofs".into(), (&*socket).into()]);
                (Server::spawn(Peer::Ferry.name(), &socket, &place.server_cpus, words)?, None)
            }
        };
        // Beside the server's, which is guest.log.
        let log = directory.join("console.log");
        let agent = Agent::boot(&place.cache, Device::fs(server.socket(), TAG), place.guest_cpu, &log);
        let mut visit = Self { agent: agent.context("no guest")?, server, _tree: tree };
        visit.run(READ_PROGRAMS)?;
        Ok(visit)
    }

    fn run(&mut self, line: &str) -> Result<crate::agent::Done> {
        let server = &mut self.server;
        let done = self.agent.run(line, TIMEOUT, &mut || server.is_alive());
        done.with_context(|| format!("the server said last: {}", self.server.last_words()))
    }

    /// Walks once; returns milliseconds, by the guest's clock.
    pub fn walk(&mut self, walk: Walk, found: Found) -> Result<f64> {
        let line = match walk {
            Walk::Ls => "ls -lR . >/dev/null",
            // Of each name the length, which has to be asked for.
            Walk::Stat => "find . -printf '%s\\n' | wc -l",
        };
        let done = self.run(line)?;
        if walk == Walk::Stat {
            let names: usize = done.output.trim().parse().context("wc says no number")?;
            ensure!(names == found.inodes, "{names} names were found, not {}", found.inodes);
        }
        Ok(done.elapsed.as_secs_f64() * 1000.0)
    }
}
