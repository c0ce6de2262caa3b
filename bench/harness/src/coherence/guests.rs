//! The systems of the coherence table, each with a guest of its own.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ferry_guest::{Cache, Device};

use super::trees;
use crate::agent::Agent;
use crate::line::FERRY;
use crate::server::{Server, TAG};
use crate::session;

/// The file that changes.
pub const FILE: &str = "changes";

/// The longest that a command of the guest may take: it may build crates.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Something to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum System {
    /// With an agent, to which caches are leased.
    Leased,
    /// With an agent, and names and attributes for a second.
    Events,
    /// Without.
    Auto,
    /// The reference.
    Virtiofsd,
    /// The same without a look at what the host does.
    VirtiofsdAlways,
    /// A disk of the guest's own.
    Local,
}

impl System {
    pub const ALL: [Self; 6] =
        [Self::Leased, Self::Events, Self::Auto, Self::Virtiofsd, Self::VirtiofsdAlways, Self::Local];

    pub fn name(self) -> &'static str {
        match self {
            Self::Leased => FERRY,
            Self::Events => "ferry-auto-events",
            Self::Auto => "ferry-auto",
            Self::Virtiofsd => "virtiofsd",
            Self::VirtiofsdAlways => "virtiofsd-always",
            Self::Local => "ext4",
        }
    }

    /// Whether its guest sees what the host changes, sooner or later.
    pub fn sees_changes(self) -> bool {
        !matches!(self, Self::VirtiofsdAlways | Self::Local)
    }

    /// Whether it is Ferry's.
    pub fn is_ours(self) -> bool {
        matches!(self, Self::Leased | Self::Events | Self::Auto)
    }

    fn has_agent(self) -> bool {
        matches!(self, Self::Leased | Self::Events)
    }

    fn command(self, place: &Place, socket: &Path) -> Result<Vec<OsString>> {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        let share = || OsString::from(&place.share);
        let ours = |flags: &str| {
            let mut command = vec![place.ferry.clone().into()];
            command.extend(words(&format!("--log warn share --tag {TAG} {flags}")));
            command.extend([share(), "--virtiofs".into(), socket.into()]);
            command
        };
        let theirs = |cache: &str| -> Result<_> {
            let program = place.virtiofsd.clone().context("virtiofsd is not there")?;
            let mut command = vec![program.into(), "--tag".into(), TAG.into(), "--shared-dir".into(), share()];
            command.extend(["--socket-path".into(), socket.into(), "--cache".into(), cache.into()]);
            command.extend(words("--sandbox none --seccomp none --log-level warn"));
            Ok(command)
        };
        Ok(match self {
            Self::Leased => ours("--cache always --events"),
            Self::Events => ours("--cache auto --events"),
            Self::Auto => ours("--cache auto"),
            Self::Virtiofsd => theirs("auto")?,
            Self::VirtiofsdAlways => theirs("always")?,
            Self::Local => {
                let mkfs = place.mkfs.as_ref().map_err(|reason| anyhow::anyhow!("{reason}"))?;
                let disk = place.directory.join("disk");
                trees::disk(&disk, &place.share, mkfs)?;
                let program = OsString::from(place.ferry.clone());
                vec![
                    program,
                    "--log".into(),
                    "warn".into(),
                    "disk".into(),
                    disk.into(),
                    "--vhost-user".into(),
                    socket.into(),
                ]
            }
        })
    }
}

/// Where everything is.
#[derive(Debug)]
pub struct Place {
    pub ferry: PathBuf,
    pub virtiofsd: Option<PathBuf>,
    /// The program that makes ext4, or why there is none.
    pub mkfs: Result<PathBuf, String>,
    /// What is shared.
    pub share: PathBuf,
    /// For sockets and logs.
    pub directory: PathBuf,
}

/// A guest, which goes before its server.
#[derive(Debug)]
pub struct Guest {
    agent: Agent,
    server: Server,
    socket: PathBuf,
}

impl Guest {
    pub fn start(system: System, cache: &Cache, place: &Place) -> Result<Self> {
        let (cpu, server_cpus) = session::divide_cpus()?;
        let socket = place.directory.join(system.name());
        let server = Server::spawn(system.name(), &socket, &server_cpus, system.command(place, &socket)?)?;
        let device = if system == System::Local { Device::block(&socket) } else { Device::fs(&socket, TAG) };
        let agent = Agent::boot(cache, device, cpu, &socket.with_extension("guest"))?;
        let mut guest = Self { agent, server, socket };
        if system.has_agent() {
            let ferry = crate::cli::shell_word(&place.ferry);
            guest.run(&format!("{ferry} agent . >/run/agent 2>&1 & sleep 2; kill -0 $!"))?;
        }
        if system == System::Local {
            // The copies have other inodes and times than git has noted.
            guest.run("git -C tree update-index -q --refresh")?;
        }
        // Twice: also what is looked at for the second time only.
        guest.run(&format!("for i in 1 2; do find tree -type f -size +1G; cat {FILE}; done"))?;
        Ok(guest)
    }

    /// Runs a line of shell; returns how long it took by the guest's clock.
    pub fn run(&mut self, line: &str) -> Result<Duration> {
        let server = &mut self.server;
        let done = self.agent.run(line, TIMEOUT, &mut || server.is_alive());
        done.map(|done| done.elapsed).with_context(|| self.server.last_words())
    }

    /// The requests that a line of shell makes of our server, by their names. Those of the agent, which waits for events, are left out.
    pub fn requests(&mut self, line: &str, place: &Place) -> Result<BTreeMap<String, u64>> {
        let before = self.counted(place)?;
        self.run(line)?;
        let mut after = self.counted(place)?;
        after.remove("ioctl");
        for (name, count) in &mut after {
            *count -= before.get(name).copied().unwrap_or_default();
        }
        after.retain(|_, count| *count > 0);
        Ok(after)
    }

    fn counted(&self, place: &Place) -> Result<BTreeMap<String, u64>> {
        let output = Command::new(&place.ferry).arg("metrics").arg(&self.socket).output()?;
        ensure!(output.status.success(), "ferry metrics: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(operations(&String::from_utf8_lossy(&output.stdout)))
    }
}

/// The requests of each operation in OpenMetrics text.
fn operations(text: &str) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for line in text.lines().filter(|line| line.starts_with("ferry_request_duration_seconds_count{")) {
        let name = line.split_once("operation=\"").and_then(|(_, rest)| rest.split_once('"'));
        let count = line.rsplit(' ').next().and_then(|count| count.parse::<u64>().ok());
        if let (Some((name, _)), Some(count)) = (name, count) {
            *counts.entry(name.to_owned()).or_insert(0) += count;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_from_metrics() {
        let text = "# TYPE ferry_request_duration_seconds histogram\n\
                    ferry_request_duration_seconds_bucket{operation=\"getattr\",le=\"1.0\"} 5\n\
                    ferry_request_duration_seconds_count{export=\"virtiofs\",operation=\"getattr\"} 5\n\
                    ferry_request_duration_seconds_count{export=\"virtiofs\",operation=\"lookup\"} 7\n# EOF\n";
        assert_eq!(operations(text), BTreeMap::from([("getattr".into(), 5), ("lookup".into(), 7)]));
    }
}
