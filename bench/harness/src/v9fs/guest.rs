//! Guests whose kernel is the client: User-mode Linux by TCP, QEMU by virtio.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, anyhow};
use ferry_guest::{Cache, Device, Guest, Kind, Tap};

use super::fio::{self, Job, Sample};
use super::messages::Messages;
use super::place::{Cpus, Files, Route, TcpServers, file_name, root_server};
use super::rows::{Place, Step};
use super::systems::{self, Cache as Caching, Programs, Server, System};
use crate::agent::Agent;
use crate::blk::systems::comma_doubled;
use crate::cli::shell_word;
use crate::server::{self, Server as Process};

const GUEST_MIB: u32 = 1024;
/// How long a command may take: fio for all systems of a row.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);
/// Where systems are mounted in the guest.
const MOUNTS: &str = "/run/bench";
/// Caches of files, names and inodes.
const DROP_CACHES: &str = "echo 3 >/proc/sys/vm/drop_caches";
/// What Debian's User-mode Linux has as modules for 9P.
const UML_MODULES: [&str; 4] = ["fs/netfs/netfs", "net/9p/9pnet", "net/9p/9pnet_fd", "fs/9p/9p"];

/// How the guest reaches what is outside.
#[derive(Debug)]
enum GuestTransport {
    /// Servers on the other end of a tap device.
    Tcp { servers: Box<TcpServers>, _tap: Tap },
    /// Our server as devices, or why they are not there.
    Virtio(Result<Vec<Process>, String>),
}

/// A guest. It goes before its servers.
#[derive(Debug)]
pub struct V9fsGuest {
    agent: Agent,
    reach: GuestTransport,
    /// Of its root and its disk.
    others: Vec<Process>,
    /// Whether it has the disk, or why not.
    disk: Result<(), String>,
    mounted: BTreeMap<(System, Route), String>,
    /// Its kernel.
    pub kernel: String,
}

impl V9fsGuest {
    /// Boots it.
    pub fn boot(place: Place, cache: &Cache, programs: &Programs, files: &Files, cpus: &Cpus) -> Result<Self> {
        let mut guest = Guest::new(cache.clone(), [""; 0]);
        guest.memory_mib = GUEST_MIB;
        let (reach, others, disk, prepare) = match place {
            Place::Qemu => virtio(&mut guest, programs, files, cpus)?,
            _ => tcp(&mut guest, cache, programs, files, cpus)?,
        };
        let agent = Agent::start(guest, &files.directory.join("guest.log"))?;
        let mut guest = Self { agent, reach, others, disk, mounted: BTreeMap::new(), kernel: String::new() };
        guest.run(&prepare)?;
        guest.kernel = guest.run("uname -r")?.trim().to_owned();
        Ok(guest)
    }

    fn run(&mut self, line: &str) -> Result<String> {
        let others = &mut self.others;
        let done = self.agent.run(line, COMMAND_TIMEOUT, &mut || others.iter_mut().all(Process::is_alive))?;
        Ok(done.output)
    }

    /// The line of shell that mounts a system.
    fn mount_line(
        &mut self,
        programs: &Programs,
        system: System,
        route: Route,
        dir: &str,
        share: &Path,
    ) -> Result<String> {
        match (system, &mut self.reach) {
            (System::VirtioBlk, _) => {
                self.disk.as_ref().map_err(|reason| anyhow!("{reason}"))?;
                let (mib, file) = (fio::FILE_MIB, file_name(system));
                Ok(format!(
                    "mount -t ext4 /dev/vda {dir} && dd if=/dev/zero of={dir}/{file} bs=1M count={mib} conv=fsync"
                ))
            }
            (System::Kernel(server, cache), GuestTransport::Tcp { servers, .. }) => {
                let address = servers.address(server, route)?;
                // Ours names what is below its source, diod what it exports.
                let share = if server == Server::Ferry { Path::new("/") } else { share };
                Ok(systems::tcp_mount(cache, share, address, dir))
            }
            (System::Client(way), GuestTransport::Tcp { servers, .. }) => {
                let address = servers.address(Server::Ferry, route)?;
                let words = systems::client(programs, way, address, Path::new(dir));
                Ok(words.iter().map(|word| shell_word(Path::new(word))).collect::<Vec<_>>().join(" "))
            }
            (System::Kernel(Server::Ferry, cache), GuestTransport::Virtio(device)) => {
                device.as_ref().map_err(|reason| anyhow!("{reason}"))?;
                Ok(systems::virtio_mount(cache, Server::Ferry, dir))
            }
            (System::Kernel(server, cache), GuestTransport::Virtio(_)) => Ok(systems::virtio_mount(cache, server, dir)),
            (System::Client(_), GuestTransport::Virtio(_)) => Err(anyhow!("the guest has no network")),
        }
    }

    /// What fio is to do to a system, which is mounted now; it empties the client's cache, also that of ours, which is a
    /// process.
    fn job(&mut self, programs: &Programs, (step, system): (Step, System), route: Route, share: &Path) -> Result<Job> {
        let counted = if route.counted { "-counted" } else { "" };
        let dir = format!("{MOUNTS}/{}-{}ms{counted}", system.full_name(), route.delay_ms);
        let mount = self.mount_line(programs, system, route, &dir, share)?;
        if !self.mounted.contains_key(&(system, route)) {
            self.run(&format!("mkdir -p {dir} && {mount}"))?;
            self.mounted.insert((system, route), dir.clone());
        }
        let before = match system {
            System::Client(_) => format!("{DROP_CACHES}; umount {dir}; {mount}"),
            _ => DROP_CACHES.into(),
        };
        let file = format!("{dir}/{}", file_name(system));
        Ok(Job { name: system.full_name(), file, before: Some(before), most_mib: fio::most_mib(step, system) })
    }

    /// Runs a row on systems, one after the other: starting fio is what takes longest in a guest.
    pub fn fio(
        &mut self,
        programs: &Programs,
        share: &Path,
        (step, systems, route): (Step, &[System], Route),
        runtime: Duration,
    ) -> Result<Vec<(System, Result<Sample>)>> {
        let jobs: Vec<(System, Result<Job>)> =
            systems.iter().map(|&system| (system, self.job(programs, (step, system), route, share))).collect();
        let able: Vec<Job> = jobs.iter().filter_map(|(_, job)| job.as_ref().ok().cloned()).collect();
        if able.is_empty() {
            return Ok(jobs.into_iter().filter_map(|(system, job)| Some((system, Err(job.err()?)))).collect());
        }
        // A job that failed says so in the output.
        let output = self.run(&load(&programs.fio, step, &able, runtime))?;
        let found =
            |(system, job): (System, Result<Job>)| (system, job.and_then(|job| fio::parse(step, &job.name, &output)));
        Ok(jobs.into_iter().map(found).collect())
    }

    /// Runs a row on one system, and counts its messages.
    pub fn count(
        &mut self,
        programs: &Programs,
        share: &Path,
        (step, system): (Step, System),
        runtime: Duration,
    ) -> Result<(Sample, Messages)> {
        let mut job = self.job(programs, (step, system), Route::COUNTED, share)?;
        // What is done before does not count.
        if let Some(before) = job.before.take() {
            self.run(&before)?;
        }
        let server = if let System::Kernel(server, _) = system { server } else { Server::Ferry };
        self.take(server)?;
        let output = self.run(&load(&programs.fio, step, std::slice::from_ref(&job), runtime))?;
        Ok((fio::parse(step, &job.name, &output)?, self.take(server)?))
    }

    fn take(&self, server: Server) -> Result<Messages> {
        let link = if let GuestTransport::Tcp { servers, .. } = &self.reach { servers.counting(server) } else { None };
        link.and_then(super::link::Link::take).ok_or_else(|| anyhow!("nothing counts its messages"))
    }

    /// See [`TcpServers::last_words`].
    pub fn last_words(&mut self) -> String {
        match &mut self.reach {
            GuestTransport::Tcp { servers, .. } => servers.last_words(),
            GuestTransport::Virtio(Ok(devices)) => {
                let dead = devices.iter_mut().filter_map(|device| {
                    let words = device.last_words();
                    (!device.is_alive()).then(|| format!("ferry has ended; it said last: {words}"))
                });
                dead.collect::<Vec<_>>().join("; ")
            }
            GuestTransport::Virtio(Err(_)) => String::new(),
        }
    }
}

/// The line of shell that runs fio.
fn load(program: &Path, step: Step, jobs: &[Job], runtime: Duration) -> String {
    let mut line = format!("cd /run; {}", shell_word(program));
    for word in fio::arguments(step, jobs, runtime) {
        let _ = write!(line, " {}", shell_word(Path::new(&word)));
    }
    line.push_str(" || true");
    line
}

/// How a guest reaches servers, what else it has, whether it has the disk, and the line that prepares it.
type Equipped = (GuestTransport, Vec<Process>, Result<(), String>, String);

/// Equips a User-mode Linux guest: a tap device, our disk.
fn tcp(guest: &mut Guest, cache: &Cache, programs: &Programs, files: &Files, cpus: &Cpus) -> Result<Equipped> {
    let tap = Tap::new()?;
    let servers = TcpServers::start(tap.host().parse()?, Some(tap.guest().parse()?), programs, files, &cpus.servers)?;
    guest.host_cpu = Some(cpus.guest);
    guest.kernel_args = vec![tap.kernel_arg()];
    let disk = files.disk.clone().and_then(|file| {
        let socket = files.directory.join("disk.s");
        let mut command = vec![OsString::from(&programs.ferry), "--log".into(), "warn".into(), "disk".into()];
        command.extend([file.into(), "--vhost-user".into(), socket.clone().into()]);
        Process::spawn("ferry disk", &socket, &cpus.servers, command).map_err(|error| format!("{error:#}"))
    });
    let mut others = Vec::new();
    let disk = disk.map(|disk| {
        guest.devices.push(Device::block(disk.socket()));
        others.push(disk);
    });
    let directory = cache.uml()?.modules.canonicalize()?;
    let mut prepare = String::from("set -e; b=/run/ferry/busybox; ");
    for module in UML_MODULES {
        let module = shell_word(&directory.join(format!("kernel/{module}.ko")));
        let _ = write!(prepare, "$b insmod {module}; ");
    }
    let _ = write!(prepare, "$b ip addr add {}/30 dev vec0; $b ip link set vec0 up; set +e", tap.guest());
    Ok((GuestTransport::Tcp { servers: Box::new(servers), _tap: tap }, others, disk, prepare))
}

/// Equips a QEMU guest: our device, QEMU's own, QEMU's disk.
fn virtio(guest: &mut Guest, programs: &Programs, files: &Files, cpus: &Cpus) -> Result<Equipped> {
    let root = root_server(programs, &files.directory, &cpus.all)?;
    guest.kind = Kind::Qemu { cpus: 2, root: Some(server::TAG.into()) };
    guest.devices = vec![Device::fs(root.socket(), server::TAG)];
    let mut words: Vec<String> = Vec::new();
    let share = comma_doubled(&files.share);
    // A guest mounts a device once at a time, so there is one for each way to mount it.
    for cache in Caching::ALL {
        let tag = systems::tag(Server::Qemu, cache);
        words.extend(["-fsdev".into(), format!("local,id={tag},path={share},security_model=none")]);
        words.extend(["-device".into(), format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}")]);
    }
    let devices = Caching::ALL.map(|cache| {
        let tag = systems::tag(Server::Ferry, cache);
        let socket = files.directory.join(format!("{tag}.s"));
        let command = systems::ferry_device(programs, &files.share, &socket, &tag);
        let device = Process::spawn("ferry", &socket, &cpus.all, command).map_err(|error| format!("{error:#}"))?;
        Ok((device, tag))
    });
    let devices: Result<Vec<(Process, String)>, String> = devices.into_iter().collect();
    let devices = devices.map(|devices| {
        guest.devices.extend(devices.iter().map(|(device, tag)| Device::ninep(device.socket(), tag)));
        devices.into_iter().map(|(device, _)| device).collect()
    });
    if let Ok(file) = &files.disk {
        words.extend(["-object".into(), "iothread,id=disk".into(), "-blockdev".into()]);
        words.push(crate::blk::systems::blockdev("disk", file, crate::blk::systems::Aio::Uring, false));
        words.extend(["-device".into(), "virtio-blk-pci,drive=disk,iothread=disk".into()]);
    }
    guest.qemu_args = words.into_iter().map(OsString::from).collect();
    Ok((GuestTransport::Virtio(devices), vec![root], files.disk.clone().map(|_| ()), "true".into()))
}
