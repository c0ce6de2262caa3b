//! The guest, with a device of each system.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use ferry_guest::{Cache, Device, DeviceKind, Guest, Kind};

use super::systems::System;
use super::{FILE_MIB, Files};
use crate::agent::Agent;
use crate::blk::systems::comma_doubled;
use crate::fio;
use crate::rows::{Config, Job};
use crate::server::{Peer, Programs, Server, Sharing};

/// How long a command may take beside fio's own time.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);
/// Twice what the files of a multi job take, and what the guest's kernel wants for the pages of a window.
const GUEST_MIB: u32 = 1024;
const GUEST_CPUS: u16 = 2;
/// The request queues of each device: virtiofsd has no more, and QEMU gives no more unless it is told to.
const QUEUES: u16 = 1;
/// Where systems are mounted.
const MOUNTS: &str = "/run/bench";
/// The tag of the guest's own root.
const ROOT_TAG: &str = "root";

/// The guest. It goes before its servers.
#[derive(Debug)]
pub struct DaxGuest {
    agent: Agent,
    servers: Vec<(System, Server)>,
    root: Server,
    /// What could not be mounted, and why.
    unable: BTreeMap<System, String>,
    /// Its kernel.
    pub kernel: String,
}

impl DaxGuest {
    /// Starts the servers, boots the guest, and mounts everything.
    pub fn boot(cache: &Cache, programs: &Programs, files: &Files, cpus: &str, systems: &[System]) -> Result<Self> {
        let serve = |peer, dir: &Path, name: &str, config| {
            let sharing = Sharing {
                dir,
                socket: files.directory.join(name),
                config,
                queues: Some(QUEUES.into()),
                cpus,
                logs: false,
            };
            Server::start(peer, programs, &sharing)
        };
        let root =
            serve(Peer::Ferry, Path::new("/"), "root", Config::Auto).context("the guest's root has no server")?;
        let mut guest = Guest::new(cache.clone(), [""; 0]);
        guest.kind = Kind::Qemu { cpus: GUEST_CPUS, root: Some(ROOT_TAG.into()) };
        guest.memory_mib = GUEST_MIB;
        guest.devices = vec![Device::fs(root.socket(), ROOT_TAG)];
        let (mut servers, mut unable) = (Vec::new(), BTreeMap::new());
        for system in by_interrupts(systems) {
            let Some((peer, config)) = system.server() else {
                let (tag, share) = (system.tag(), comma_doubled(&files.share));
                let words = format!(
                    "-fsdev|local,id={tag},path={share},security_model=none|-device|virtio-9p-pci,fsdev={tag},mount_tag={tag}"
                );
                guest.qemu_args.extend(words.split('|').map(Into::into));
                continue;
            };
            match serve(peer, &files.share, &system.name(), config) {
                Ok(server) => {
                    let kind = DeviceKind::Fs { tag: system.tag(), queues: QUEUES, dax: config == Config::NoneDax };
                    guest.devices.push(Device { socket: server.socket().to_owned(), kind });
                    servers.push((system, server));
                }
                Err(error) => _ = unable.insert(system, format!("{error:#}")),
            }
        }
        let agent = Agent::start(guest, &files.directory.join("guest.log"))?;
        let mut guest = Self { agent, servers, root, unable, kernel: String::new() };
        guest.kernel = guest.run("uname -r", COMMAND_TIMEOUT)?.trim().to_owned();
        for &system in systems {
            if !guest.unable.contains_key(&system)
                && let Err(error) = guest.run(&system.mount_line(&dir(system)), COMMAND_TIMEOUT)
            {
                guest.unable.insert(system, format!("cannot be mounted: {error:#}"));
            }
        }
        Ok(guest)
    }

    fn run(&mut self, line: &str, timeout: Duration) -> Result<String> {
        let (servers, root) = (&mut self.servers, &mut self.root);
        let mut alive = || root.is_alive() && servers.iter_mut().all(|(_, server)| server.is_alive());
        let done = self.agent.run(line, timeout, &mut alive)?;
        Ok(done.output)
    }

    /// Runs a job on systems, one after the other: starting fio is what takes longest in such a guest. An error of the whole
    /// is one of the guest's.
    pub fn fio(
        &mut self,
        program: &Path,
        job: Job,
        systems: &[System],
        runtime: Duration,
    ) -> Result<Vec<(System, Result<f64>)>> {
        let able = systems.iter().filter(|system| !self.unable.contains_key(system));
        let dirs: Vec<(String, String)> = able.map(|system| (system.name(), dir(*system))).collect();
        let mut output = String::new();
        if !dirs.is_empty() {
            // A part that failed says so in the output.
            let line = format!("cd /run; {} || true", fio::once(program, job, &dirs, FILE_MIB, runtime));
            output = self.run(&line, COMMAND_TIMEOUT)?;
        }
        let found = |system: System| match self.unable.get(&system) {
            Some(reason) => Err(anyhow!("{reason}")),
            None => fio::bandwidth_of(job, &system.name(), &output),
        };
        Ok(systems.iter().map(|system| (*system, found(*system))).collect())
    }

    /// Why something may have failed: servers that are gone.
    pub fn last_words(&mut self) -> String {
        let named = |(system, server): &mut (System, Server)| {
            (!server.is_alive()).then(|| format!("{} has ended; it said last: {}", system.name(), server.last_words()))
        };
        self.servers.iter_mut().filter_map(named).collect::<Vec<_>>().join("; ")
    }
}

/// The order of the devices. The guest's kernel gives the interrupts of one device to one CPU and those of the next to another, and
/// whether that is the CPU of the caller makes up to 2.5 times: so virtiofsd and `none` are two apart.
fn by_interrupts(systems: &[System]) -> Vec<System> {
    let mut ordered = systems.to_vec();
    ordered.sort_by_key(|system| match system {
        System::Qemu9p | System::Virtiofsd => 0,
        System::Ferry(Config::Auto) => 1,
        System::Ferry(_) => 2,
    });
    ordered
}

fn dir(system: System) -> String {
    format!("{MOUNTS}/{}", system.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtiofsd_and_none_have_interrupts_on_one_cpu() {
        let systems = System::ALL;
        let devices: Vec<System> =
            by_interrupts(&systems).into_iter().filter(|system| system.server().is_some()).collect();
        let at = |wanted: System| devices.iter().position(|system| *system == wanted).expect("it has a device");
        let (virtiofsd, none) = (at(System::Virtiofsd), at(System::Ferry(Config::None)));
        assert_eq!((none - virtiofsd) % usize::from(GUEST_CPUS), 0, "{devices:?}");
    }
}
