//! A server with the guest that has its share mounted.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use ferry_guest::{Cache, Device};

use crate::agent::{Agent, Done, Failed};
use crate::cli::{self, Cli};
use crate::data::Data;
use crate::rows::Config;
use crate::server::{Peer, Programs, Server, Sharing, TAG};

/// What all sessions have in common.
#[derive(Debug)]
pub struct Place {
    /// The guest's parts.
    pub cache: Cache,
    /// The servers' programs.
    pub programs: Programs,
    /// What is shared.
    pub share: PathBuf,
    /// Sockets and logs.
    pub directory: PathBuf,
    /// The CPU of the guests and of the native driver.
    pub guest_cpu: usize,
    /// The CPUs of the servers, as `taskset -c` takes them.
    pub server_cpus: String,
}

impl Place {
    /// Starts a server.
    pub fn serve(&self, peer: Peer, config: Config, name: &str, queues: Option<usize>) -> Result<Server> {
        self.serve_as(peer, config, name, queues, false)
    }

    fn serve_as(&self, peer: Peer, config: Config, name: &str, queues: Option<usize>, logs: bool) -> Result<Server> {
        let socket = self.directory.join(format!("{}-{name}", peer.name()));
        // What several queues are for shows only with more than one CPU.
        let all_cpus = format!("{},{}", self.guest_cpu, self.server_cpus);
        let cpus = if queues.is_some_and(|queues| queues > 1) { &all_cpus } else { &self.server_cpus };
        let sharing = Sharing { dir: &self.share, socket, config, queues, cpus, logs };
        Server::start(peer, &self.programs, &sharing)
    }
}

/// A session. The guest goes before its server.
#[derive(Debug)]
pub struct Session {
    agent: Agent,
    server: Server,
}

impl Session {
    /// Starts the server and boots the guest.
    pub fn start(place: &Place, peer: Peer, config: Config) -> Result<Self> {
        Self::start_as(place, peer, config, false)
    }

    /// The same, with a server that logs each request.
    pub fn start_logging(place: &Place, peer: Peer, config: Config) -> Result<Self> {
        Self::start_as(place, peer, config, true)
    }

    fn start_as(place: &Place, peer: Peer, config: Config, logs: bool) -> Result<Self> {
        let mut server = place.serve_as(peer, config, config.name(), None, logs)?;
        let log = place.directory.join(format!("{}-{}.guest", peer.name(), config.name()));
        let agent = match Agent::boot(&place.cache, Device::fs(server.socket(), TAG), place.guest_cpu, &log) {
            Ok(agent) => agent,
            Err(error) => return Err(blame(error, &mut server)),
        };
        Ok(Self { agent, server })
    }

    /// Runs a command in the guest.
    pub fn run(&mut self, line: &str, timeout: Duration) -> Result<Done> {
        let server = &mut self.server;
        let result = self.agent.run(line, timeout, &mut || server.is_alive());
        result.map_err(|error| if is_failed(&error) { error } else { blame(error, server) })
    }
}

impl Session {
    /// The server's.
    pub fn server(&self) -> &Server {
        &self.server
    }
}

/// Whether the command failed, rather than the guest or the server.
pub fn is_failed(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Failed>().is_some()
}

/// A guest hangs or dies when its server does: then that is what there is to say.
fn blame(error: anyhow::Error, server: &mut Server) -> anyhow::Error {
    let said = server.last_words();
    if server.is_alive() {
        error.context(format!("the server still runs and said last: {said}"))
    } else {
        error.context(format!("the server has ended; it said last: {said}"))
    }
}

/// Divides this process's CPUs: the first for guest and driver, the others for servers.
pub fn divide_cpus() -> Result<(usize, String)> {
    Ok(divide(&cpus()?))
}

/// This process's CPUs, as `taskset -c` takes them.
pub fn all_cpus() -> Result<String> {
    Ok(list(&cpus()?))
}

fn cpus() -> Result<Vec<usize>> {
    let set = rustix::thread::sched_getaffinity(None).context("cannot read the CPUs of this process")?;
    Ok((0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

fn list(cpus: &[usize]) -> String {
    cpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

fn divide(cpus: &[usize]) -> (usize, String) {
    let first = cpus.first().copied().unwrap_or(0);
    let others = if cpus.len() > 1 { &cpus[1..] } else { &[first] };
    (first, list(others))
}

/// Where the servers and guests of a run are.
pub fn place(cli: &Cli, cache: Cache, virtiofsd: Option<PathBuf>, data: &Data) -> Result<Place> {
    let directory = cli.work.join("run");
    std::fs::create_dir_all(&directory)?;
    let ferry = cli::program("ferry")?;
    let (guest_cpu, server_cpus) = divide_cpus()?;
    let programs = Programs { ferry, virtiofsd };
    Ok(Place { cache, programs, share: data.share.clone(), directory, guest_cpu, server_cpus })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_and_server_have_cpus_of_their_own_where_there_are_two() {
        assert_eq!(divide(&[0, 1]), (0, "1".into()));
        assert_eq!(divide(&[4, 5, 9]), (4, "5,9".into()));
        assert_eq!(divide(&[3]), (3, "3".into()));
    }
}
