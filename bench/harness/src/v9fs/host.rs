//! Our client on this host.

use std::net::IpAddr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};

use super::fio::{self, Job, Sample};
use super::messages::Messages;
use super::place::{Cpus, Files, Route, TcpServers, file_name};
use super::rows::Step;
use super::systems::{self, Programs, Server, System};
use crate::mounted::Mounted;
use crate::process;

/// How long a run may take beside its own time.
const SLACK: Duration = Duration::from_secs(60);

/// The servers, on loopback.
#[derive(Debug)]
pub struct Host {
    servers: TcpServers,
}

impl Host {
    /// Starts them.
    pub fn start(programs: &Programs, files: &Files, cpus: &Cpus) -> Result<Self> {
        let servers = TcpServers::start(IpAddr::from([127, 0, 0, 1]), None, programs, files, &cpus.all)?;
        Ok(Self { servers })
    }

    /// Runs a row. The client is new each time, so its cache is empty.
    pub fn fio(
        &mut self,
        programs: &Programs,
        files: &Files,
        (step, system, route): (Step, System, Route),
        runtime: Duration,
    ) -> Result<(Sample, Option<Messages>)> {
        let System::Client(way) = system else { bail!("{} does not run on this host", system.full_name()) };
        let address = self.servers.address(Server::Ferry, route)?;
        let dir = files.directory.join(system.full_name());
        let mut command = systems::client(programs, way, &format!("tcp:{address}"), &dir);
        command.push("--foreground".into());
        let mounted = Mounted::new(dir, Some(command))?;
        let job = Job {
            name: system.full_name(),
            file: mounted.dir().join(file_name(system)).display().to_string(),
            before: None,
            most_mib: fio::most_mib(step, system),
        };
        let mut load = Command::new(&programs.fio);
        load.args(fio::arguments(step, std::slice::from_ref(&job), runtime)).current_dir(&files.directory);
        let counting = self.servers.counting(Server::Ferry).filter(|_| route.counted);
        // What mounting took does not count.
        counting.map(super::link::Link::take);
        let output = process::run(load, &files.directory, SLACK + runtime);
        let messages = counting.and_then(super::link::Link::take);
        let output =
            output.map_err(|error| error.context(format!("the client said last: {}", mounted.last_words())))?;
        Ok((fio::parse(step, &job.name, &output)?, messages))
    }

    /// See [`TcpServers::last_words`].
    pub fn last_words(&mut self) -> String {
        self.servers.last_words()
    }
}
