//! Guests whose kernel is the client: User-mode Linux by TCP, QEMU by virtio.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, anyhow};
use ferry_guest::{Cache, Device, Guest, Kind, Tap};

use super::fio::{self, Job, Sample};
use super::messages::Messages;
use super::place::{Cpus, Files, Route, TcpServers, file_name, root_server};
use super::rows::{self, Place, Step};
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
/// Where our server is in a guest of its own, and what it shares there: memory.
const UNIX_SOCKET: &str = "/run/9p.s";
const UNIX_SHARE: &str = "/run/9p";
/// How often it is looked, each fifth of a second, whether that server listens.
const SERVER_LOOKS: u32 = 75;
/// What Debian's User-mode Linux has as modules for 9P.
const UML_MODULES: [&str; 4] = ["fs/netfs/netfs", "net/9p/9pnet", "net/9p/9pnet_fd", "fs/9p/9p"];

/// How the guest reaches what is outside.
#[derive(Debug)]
enum GuestTransport {
    /// Servers on the other end of a tap device.
    Tcp { servers: Box<TcpServers>, _tap: Tap },
    /// Our server as devices, or why they are not there.
    Virtio(Result<Vec<Process>, String>),
    /// Our server in the guest, at a unix socket.
    Unix,
}

/// A guest. It goes before its servers.
#[derive(Debug)]
pub struct V9fsGuest {
    agent: Agent,
    transport: GuestTransport,
    /// Of its root and its disk.
    servers: Vec<Process>,
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
        let setup = match place {
            Place::Qemu => virtio(&mut guest, programs, files, cpus)?,
            Place::UmlUnix => unix(&mut guest, cache, programs, files, cpus)?,
            Place::Host | Place::Uml => tcp(&mut guest, cache, programs, files, cpus)?,
        };
        let agent = Agent::start(guest, &files.directory.join("guest.log"))?;
        let GuestSetup { transport, servers, disk, prepare } = setup;
        let mut guest = Self { agent, transport, servers, disk, mounted: BTreeMap::new(), kernel: String::new() };
        guest.run(&prepare)?;
        guest.kernel = guest.run("uname -r")?.trim().to_owned();
        Ok(guest)
    }

    fn run(&mut self, line: &str) -> Result<String> {
        let servers = &mut self.servers;
        let done = self.agent.run(line, COMMAND_TIMEOUT, &mut || servers.iter_mut().all(Process::is_alive))?;
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
        match (system, &mut self.transport) {
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
                Ok(shell_line(&systems::client(programs, way, &format!("tcp:{address}"), Path::new(dir))))
            }
            (System::Kernel(Server::Ferry, cache), GuestTransport::Unix) => {
                Ok(systems::unix_mount(cache, UNIX_SOCKET, dir))
            }
            (System::Client(way), GuestTransport::Unix) => {
                Ok(shell_line(&systems::client(programs, way, &format!("unix:{UNIX_SOCKET}"), Path::new(dir))))
            }
            (System::Kernel(..), GuestTransport::Unix) => Err(anyhow!("only ferry serves in the guest")),
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
        self.take_messages(server)?;
        let output = self.run(&load(&programs.fio, step, std::slice::from_ref(&job), runtime))?;
        Ok((fio::parse(step, &job.name, &output)?, self.take_messages(server)?))
    }

    fn take_messages(&self, server: Server) -> Result<Messages> {
        let GuestTransport::Tcp { servers, .. } = &self.transport else {
            return Err(anyhow!("messages are counted by TCP only"));
        };
        let messages = servers.counting(server).and_then(super::link::Link::take);
        messages.ok_or_else(|| anyhow!("no message counter for the server {server:?}"))
    }

    /// See [`TcpServers::last_words`].
    pub fn last_words(&mut self) -> String {
        match &mut self.transport {
            GuestTransport::Tcp { servers, .. } => servers.last_words(),
            GuestTransport::Virtio(Ok(devices)) => {
                let dead = devices.iter_mut().filter_map(|device| {
                    let words = device.last_words();
                    (!device.is_alive()).then(|| format!("ferry has ended; it said last: {words}"))
                });
                dead.collect::<Vec<_>>().join("; ")
            }
            GuestTransport::Virtio(Err(_)) | GuestTransport::Unix => String::new(),
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

/// A command as a line of shell.
fn shell_line(words: &[OsString]) -> String {
    words.iter().map(|word| shell_word(Path::new(word))).collect::<Vec<_>>().join(" ")
}

/// What a guest is to have.
struct GuestSetup {
    transport: GuestTransport,
    /// Servers of its root and its disk.
    servers: Vec<Process>,
    /// Whether it has the disk, or why not.
    disk: Result<(), String>,
    /// The line of shell that prepares it.
    prepare: String,
}

/// The line of shell that loads what Debian's User-mode Linux has as modules.
fn load_modules(cache: &Cache) -> Result<String> {
    let directory = cache.uml()?.modules.canonicalize()?;
    let modules = UML_MODULES.map(|module| {
        let module = shell_word(&directory.join(format!("kernel/{module}.ko")));
        format!("/run/ferry/busybox insmod {module}")
    });
    Ok(modules.join(" && "))
}

/// A User-mode Linux guest with a tap device and our disk.
fn tcp(guest: &mut Guest, cache: &Cache, programs: &Programs, files: &Files, cpus: &Cpus) -> Result<GuestSetup> {
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
    let mut disk_servers = Vec::new();
    let disk = disk.map(|disk| {
        guest.devices.push(Device::block(disk.socket()));
        disk_servers.push(disk);
    });
    let (modules, ip) = (load_modules(cache)?, "/run/ferry/busybox ip");
    let prepare = format!("{modules} && {ip} addr add {}/30 dev vec0 && {ip} link set vec0 up", tap.guest());
    let transport = GuestTransport::Tcp { servers: Box::new(servers), _tap: tap };
    Ok(GuestSetup { transport, servers: disk_servers, disk, prepare })
}

/// A User-mode Linux guest with our server in it. A guest shares no unix socket with its host.
fn unix(guest: &mut Guest, cache: &Cache, programs: &Programs, files: &Files, cpus: &Cpus) -> Result<GuestSetup> {
    guest.host_cpu = Some(cpus.guest);
    let systems = rows::all().into_iter().filter(|step| step.place == Place::UmlUnix).flat_map(Step::systems);
    let names: BTreeSet<String> = systems.map(file_name).collect();
    let copies: Vec<String> = names.iter().map(|name| shell_word(&files.share.join(name))).collect();
    let prepare = format!(
        "{} && mkdir -p {UNIX_SHARE} && cp {} {UNIX_SHARE} && {{ {} >/run/9p.log 2>&1 & }} && \
         for i in $(seq {SERVER_LOOKS}); do [ -S {UNIX_SOCKET} ] && break; sleep 0.2; done; \
         [ -S {UNIX_SOCKET} ] || {{ cat /run/9p.log; false; }}",
        load_modules(cache)?,
        copies.join(" "),
        shell_line(&systems::ferry_unix_server(programs, Path::new(UNIX_SHARE), UNIX_SOCKET)),
    );
    let disk = Err("the disk has no part in these rows".into());
    Ok(GuestSetup { transport: GuestTransport::Unix, servers: Vec::new(), disk, prepare })
}

/// A QEMU guest with our device, QEMU's own, and QEMU's disk.
fn virtio(guest: &mut Guest, programs: &Programs, files: &Files, cpus: &Cpus) -> Result<GuestSetup> {
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
    let disk = files.disk.clone().map(|_| ());
    Ok(GuestSetup { transport: GuestTransport::Virtio(devices), servers: vec![root], disk, prepare: "true".into() })
}
