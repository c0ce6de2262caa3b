//! What all places have in common: the files, the servers on them, the links.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use rustix::mount::{MountFlags, UnmountFlags};

use super::fio::FILE_MIB;
use super::link::Link;
use super::rows;
use super::systems::{self, Programs, System};
use crate::data::write_noise;
use crate::server::Server as Process;

/// The servers' ports.
const FERRY_PORT: u16 = 5640;
const DIOD_PORT: u16 = 5641;
/// The delay of the link on which messages are counted: as many are under way as the client has sent without an answer,
/// not as few as a fast server leaves.
const COUNTED_DELAY_MS: u64 = 1;
/// The disk: the file and ext4's own.
const DISK_MIB: u64 = 2 * FILE_MIB;

/// The CPUs: of guests, of servers beside them, all.
#[derive(Debug, Clone)]
pub struct Cpus {
    /// User-mode Linux's.
    pub guest: usize,
    /// The servers' beside it.
    pub servers: String,
    /// All of them.
    pub all: String,
}

/// The files, in memory: what disks are capable of is not what is to be compared.
#[derive(Debug)]
pub struct Files {
    /// Sockets, logs, mount points.
    pub directory: PathBuf,
    /// What is shared.
    pub share: PathBuf,
    /// A disk with ext4 on it, or why there is none.
    pub disk: Result<PathBuf, String>,
}

impl Files {
    /// Makes a file for each system, on a tmpfs of its own below `directory`.
    pub fn make(directory: PathBuf, programs: &Programs) -> Result<Self> {
        let memory = directory.join("memory");
        std::fs::create_dir_all(&memory).with_context(|| format!("cannot create {}", memory.display()))?;
        rustix::mount::mount("tmpfs", &memory, "tmpfs", MountFlags::empty(), None).context("cannot mount a tmpfs")?;
        let mut files = Self { directory, share: memory.join("share"), disk: Err("it was not made".into()) };
        std::fs::create_dir_all(&files.share)?;
        let mut systems: Vec<System> = rows::all().into_iter().flat_map(rows::Step::systems).collect();
        systems.sort();
        systems.dedup();
        for system in systems.into_iter().filter(|system| *system != System::VirtioBlk) {
            write_noise(&files.share.join(file_name(system)), FILE_MIB << 20)?;
        }
        files.disk = make_disk(memory.join("disk"), programs).map_err(|error| format!("{error:#}"));
        Ok(files)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.directory.join("memory"), UnmountFlags::DETACH);
    }
}

fn make_disk(path: PathBuf, programs: &Programs) -> Result<PathBuf> {
    let mkfs = programs.mkfs.as_ref().map_err(|reason| anyhow!("{reason}"))?;
    std::fs::File::create(&path)?.set_len(DISK_MIB << 20)?;
    let output = Command::new(mkfs).args(["-q", "-F"]).arg(&path).stdin(Stdio::null()).output()?;
    ensure!(output.status.success(), "mkfs.ext4: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(path)
}

/// The file of a system, in whatever it is mounted.
pub fn file_name(system: System) -> String {
    format!("{}.data", system.full_name())
}

/// How a mount reaches its server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// The delay each way.
    pub delay_ms: u64,
    /// Whether messages are counted on it.
    pub counted: bool,
}

impl Route {
    /// Where messages are counted.
    pub const COUNTED: Self = Self { delay_ms: COUNTED_DELAY_MS, counted: true };

    /// With a delay.
    pub fn delayed(delay_ms: u64) -> Self {
        Self { delay_ms, counted: false }
    }
}

/// TCP servers at one address of this host, and links to them.
#[derive(Debug)]
pub struct TcpServers {
    host: IpAddr,
    ferry: Process,
    diod: Result<Process, String>,
    links: BTreeMap<(systems::Server, Route), Link>,
}

impl TcpServers {
    /// Starts ours, and diod for a client at another address.
    pub fn start(host: IpAddr, diod: Option<IpAddr>, programs: &Programs, files: &Files, cpus: &str) -> Result<Self> {
        let start = |name: &'static str, port: u16, command: &dyn Fn(SocketAddr) -> Vec<OsString>| {
            let address = SocketAddr::new(host, port);
            Process::spawn_tcp(name, address, files.directory.join(name), cpus, command(address))
        };
        let ferry = start("ferry", FERRY_PORT, &|address| systems::ferry_server(programs, &files.share, address))?;
        let diod = match (&programs.diod, diod) {
            (Ok(program), Some(client)) => {
                let hosts = files.directory.join("hosts");
                std::fs::write(&hosts, format!("{client} guest\n{host} host\n"))?;
                start("diod", DIOD_PORT, &|address| systems::diod_server(program, &files.share, address, &hosts))
                    .map_err(|error| format!("{error:#}"))
            }
            (Ok(_), None) => Err("it has no part in these rows".into()),
            (Err(reason), _) => Err(reason.clone()),
        };
        Ok(Self { host, ferry, diod, links: BTreeMap::new() })
    }

    /// Where a server is reached.
    pub fn address(&mut self, server: systems::Server, route: Route) -> Result<SocketAddr> {
        let port = match server {
            systems::Server::Ferry => FERRY_PORT,
            systems::Server::Diod => {
                self.diod.as_ref().map_err(|reason| anyhow!("{reason}"))?;
                DIOD_PORT
            }
            systems::Server::Qemu => return Err(anyhow!("QEMU has no server for TCP")),
        };
        let direct = SocketAddr::new(self.host, port);
        if route == Route::delayed(0) {
            return Ok(direct);
        }
        if let Some(link) = self.links.get(&(server, route)) {
            return Ok(link.address());
        }
        let link = Link::new(direct, Duration::from_millis(route.delay_ms), route.counted)?;
        let address = link.address();
        self.links.insert((server, route), link);
        Ok(address)
    }

    /// The link on which a server's messages are counted.
    pub fn counting(&self, server: systems::Server) -> Option<&Link> {
        self.links.get(&(server, Route::COUNTED))
    }

    /// Why something may have failed: a server that is gone, or what ours said last.
    pub fn last_words(&mut self) -> String {
        let mut servers: Vec<(&str, &mut Process)> = vec![("ferry", &mut self.ferry)];
        servers.extend(self.diod.as_mut().ok().map(|server| ("diod", server)));
        let said = servers.into_iter().filter_map(|(name, server)| {
            let words = server.last_words();
            (!server.is_alive()).then(|| format!("{name} has ended; it said last: {words}"))
        });
        said.collect::<Vec<_>>().join("; ")
    }
}

/// A server of this host's root, from which a QEMU guest's programs come.
pub fn root_server(programs: &Programs, directory: &Path, cpus: &str) -> Result<Process> {
    let sharing = crate::server::Sharing {
        dir: Path::new("/"),
        socket: directory.join("root"),
        config: crate::rows::Config::Auto,
        queues: None,
        cpus,
        logs: false,
    };
    let servers = crate::server::Programs { ferry: programs.ferry.clone(), virtiofsd: None };
    Process::start(crate::server::Peer::Ferry, &servers, &sharing).context("the guest's root has no server")
}
