//! Guests with a disk of every server, and fio in them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use ferry_guest::{Cache, Device, Guest, Kind};

use super::files::{self, Files};
use super::fio::{self, Engine, Sample};
use super::rows::{Client, Step};
use super::systems::{Programs, System, blockdev, comma_doubled};
use crate::agent::Agent;
use crate::cli::shell_word;
use crate::rows::Config;
use crate::server::{self, Peer, Server, Sharing};

const GUEST_MIB: u32 = 1024;
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// Entries of each queue in QEMU: what its own disk has by default.
const QUEUE_SIZE: usize = 256;
/// Says each disk's name and how many sectors it has.
const LIST_DISKS: &str = "for disk in /sys/block/vd*; do echo ${disk##*/} $(cat $disk/size); done";

/// Where a guest's CPUs and its servers are.
#[derive(Debug, Clone, Copy)]
pub struct Cpus<'a> {
    /// User-mode Linux's.
    pub guest: usize,
    /// The servers' beside it.
    pub servers: &'a str,
    /// All of them: a QEMU guest has more threads than one CPU is good for.
    pub all: &'a str,
}

/// A guest with disks. It goes before its servers.
#[derive(Debug)]
pub struct BlkGuest {
    agent: Agent,
    servers: BTreeMap<System, Server>,
    /// Of the guest's root.
    root: Option<Server>,
    disks: BTreeMap<System, String>,
    /// Its kernel.
    pub kernel: String,
}

impl BlkGuest {
    /// Boots a guest with a disk of each system that can be had; why others cannot is said when they are asked for.
    pub fn boot(
        client: Client,
        systems: &[System],
        cache: &Cache,
        programs: &Programs,
        files: &Files,
        cpus: Cpus<'_>,
    ) -> Result<Self> {
        let direct = client == Client::Qemu;
        let mut guest = Guest::new(cache.clone(), [""; 0]);
        guest.memory_mib = GUEST_MIB;
        let mut servers = BTreeMap::new();
        let mut qemu_args: Vec<OsString> = Vec::new();
        for (number, &system) in systems.iter().enumerate() {
            if let System::QemuDisk(aio) = system {
                let disk = blockdev(&format!("disk{number}"), &files.path(system), aio, direct);
                qemu_args.extend(own_disk(number, &disk));
                continue;
            }
            let server = files.serve(programs, system, direct, if direct { cpus.all } else { cpus.servers })?;
            match client {
                Client::Qemu => qemu_args.extend(vhost_disk(number, server.socket())),
                _ => guest.devices.push(Device::block(server.socket())),
            }
            servers.insert(system, server);
        }
        let root = if client == Client::Qemu { Some(root(programs, files, cpus)?) } else { None };
        match &root {
            Some(root) => {
                guest.kind = Kind::Qemu { cpus: 2, root: Some(server::TAG.into()) };
                guest.devices.push(Device::fs(root.socket(), server::TAG));
                guest.qemu_args = qemu_args;
            }
            None => guest.host_cpu = Some(cpus.guest),
        }
        let agent = Agent::start(guest, &files.directory().join("guest.log"))?;
        let mut guest = Self { agent, servers, root, disks: BTreeMap::new(), kernel: String::new() };
        guest.kernel = guest.run("uname -r")?.trim().to_owned();
        let listed = guest.run(LIST_DISKS)?;
        guest.disks = find_disks(&listed, systems);
        Ok(guest)
    }

    fn run(&mut self, line: &str) -> Result<String> {
        let (servers, root) = (&mut self.servers, &mut self.root);
        let mut alive = || servers.values_mut().chain(root.iter_mut()).all(Server::is_alive);
        match self.agent.run(line, COMMAND_TIMEOUT, &mut alive) {
            Ok(done) => Ok(done.output),
            Err(error) => {
                let ended = servers.iter_mut().find_map(|(system, server)| {
                    (!server.is_alive()).then(|| format!("{} has ended: {}", system.full_name(), server.last_words()))
                });
                Err(match ended {
                    Some(ended) => error.context(ended),
                    None => error,
                })
            }
        }
    }

    /// Runs fio on the disks of some systems, one after the other: starting it is what takes longest in a guest.
    pub fn fio(
        &mut self,
        programs: &Programs,
        systems: &[System],
        step: Step,
        runtime: Duration,
    ) -> Result<Vec<(System, Result<Sample>)>> {
        let there = |system: &System| Some((system.full_name(), Path::new("/dev").join(self.disks.get(system)?)));
        let targets: Vec<(String, PathBuf)> = systems.iter().filter_map(there).collect();
        let mut line = shell_word(&programs.fio);
        for word in fio::arguments(step, Engine::Libaio, true, &targets, runtime) {
            let _ = write!(line, " {}", shell_word(Path::new(&word)));
        }
        // A job that failed says so in the output.
        let output = self.run(&format!("cd /run; {line} || true"))?;
        let found = |&system: &System| match self.disks.contains_key(&system) {
            true => (system, fio::parse(step, &system.full_name(), &output)),
            false => (system, Err(anyhow!("the guest has no such disk"))),
        };
        Ok(systems.iter().map(found).collect())
    }
}

/// A server of the host's root, from which the guest's programs come.
fn root(programs: &Programs, files: &Files, cpus: Cpus<'_>) -> Result<Server> {
    let sharing = Sharing {
        dir: Path::new("/"),
        socket: files.directory().join("root"),
        config: Config::Auto,
        queues: None,
        cpus: cpus.all,
        logs: false,
    };
    let servers = server::Programs { ferry: programs.ferry.clone(), virtiofsd: None };
    Server::start(Peer::Ferry, &servers, &sharing).context("the guest's root has no server")
}

/// A disk that QEMU itself serves, in a thread of its own.
fn own_disk(number: usize, blockdev: &str) -> Vec<OsString> {
    let device =
        format!("virtio-blk-pci,drive=disk{number},iothread=thread{number},num-queues=1,queue-size={QUEUE_SIZE}");
    ["-object", &format!("iothread,id=thread{number}"), "-blockdev", blockdev, "-device", &device]
        .map(OsString::from)
        .to_vec()
}

/// A disk from a socket.
fn vhost_disk(number: usize, socket: &Path) -> Vec<OsString> {
    let chardev = format!("socket,id=socket{number},path={}", comma_doubled(socket));
    let device = format!("vhost-user-blk-pci,chardev=socket{number},num-queues=1,queue-size={QUEUE_SIZE}");
    ["-chardev", &chardev, "-device", &device].map(OsString::from).to_vec()
}

/// Disks are told apart by their sizes: no two systems have the same.
fn find_disks(listed: &str, systems: &[System]) -> BTreeMap<System, String> {
    let find = |line: &str| {
        let (name, sectors) = line.trim().split_once(' ')?;
        let bytes = sectors.parse::<u64>().ok()? * 512;
        let system = systems.iter().find(|system| files::bytes(**system) == bytes)?;
        Some((*system, name.to_owned()))
    };
    listed.lines().filter_map(find).collect()
}

/// The client whose guest it is; nothing for those without one.
pub fn is_guest(client: Client) -> bool {
    matches!(client, Client::Uml | Client::Qemu)
}

/// The guests of a run, booted when they are first needed; one that failed is not tried again.
#[derive(Debug, Default)]
pub struct Guests {
    running: Option<(Client, Result<BlkGuest, String>)>,
    /// Kernels of those that ran.
    pub kernels: BTreeMap<Client, String>,
}

impl Guests {
    /// Ends the guest that runs.
    pub fn end(&mut self) {
        self.running = None;
    }

    /// Ends the guest that runs because it failed; one that did not even boot is not tried again.
    pub fn lose(&mut self) {
        if matches!(self.running, Some((_, Ok(_)))) {
            self.running = None;
        }
    }

    /// The guest of a client, made by `boot`.
    pub fn get(&mut self, client: Client, boot: impl FnOnce() -> Result<BlkGuest>) -> Result<&mut BlkGuest> {
        if self.running.as_ref().is_none_or(|(of, _)| *of != client) {
            // Before the next one boots: two at once are too many for a small machine.
            self.running = None;
            let booted = boot().map_err(|error| format!("{error:#}"));
            if let Ok(guest) = &booted {
                self.kernels.insert(client, guest.kernel.clone());
            }
            self.running = Some((client, booted));
        }
        match &mut self.running {
            Some((_, Ok(guest))) => Ok(guest),
            Some((_, Err(reason))) => bail!("no guest: {reason}"),
            None => bail!("no guest"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::systems::{ALL, Aio, Way};
    use super::*;

    #[test]
    fn disks_are_found_by_their_sizes() {
        let (ours, theirs) = (System::Ferry(Way::Sleep), System::QemuDisk(Aio::Native));
        let sectors = |system| files::bytes(system) / 512;
        let listed = format!("vda {}\nvdb {}\nvdc 77\nvdd\n", sectors(theirs), sectors(ours));
        let disks = find_disks(&listed, &ALL);
        assert_eq!(disks, [(ours, "vdb".to_owned()), (theirs, "vda".to_owned())].into());
    }

    #[test]
    fn each_disk_of_qemus_has_its_thread() {
        let words = own_disk(3, "driver=file").join(std::ffi::OsStr::new(" ")).into_string().unwrap();
        assert!(words.contains("iothread,id=thread3") && words.contains("drive=disk3,iothread=thread3"), "{words}");
        let words = vhost_disk(0, Path::new("/a,b")).join(std::ffi::OsStr::new(" ")).into_string().unwrap();
        assert!(words.contains("path=/a,,b") && words.contains("vhost-user-blk-pci,chardev=socket0"), "{words}");
    }
}
