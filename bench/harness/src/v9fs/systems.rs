//! Clients and servers, ours and the peers, and how each is started.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use crate::cli::shell_word;
use crate::line::FERRY;

/// The longest message over TCP and unix sockets, in bytes: what Linux's client allows.
const MSIZE: u32 = 1 << 20;
/// The longest over virtio.
const MSIZE_VIRTIO: u32 = 512_000;
/// A page and the header of a message that carries it (Twrite's, 23 bytes, with a byte to spare).
const MSIZE_PAGE: u32 = 4096 + 24;

/// How our client sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// Each page in a message of its own, one message at a time: what 9P clients did when the figures were published.
    PageAtATime,
    /// Neighbours in one message, one message at a time.
    Coalesced,
    /// As it does by default.
    Pipelined,
}

impl Way {
    /// All.
    pub const ALL: [Self; 3] = [Self::PageAtATime, Self::Coalesced, Self::Pipelined];

    /// The options of `ferry mount`.
    fn flags(self) -> String {
        match self {
            Self::PageAtATime => format!("--msize {MSIZE_PAGE} --in-flight 1"),
            Self::Coalesced => format!("--msize {MSIZE} --in-flight 1"),
            Self::Pipelined => String::new(),
        }
    }
}

/// The server of the kernel's client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Server {
    /// Ours.
    Ferry,
    /// diod.
    Diod,
    /// QEMU's own device.
    Qemu,
}

/// How the kernel's client caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cache {
    /// `cache=none`, its default.
    None,
    /// `cache=loose`.
    Loose,
}

impl Cache {
    /// All.
    pub const ALL: [Self; 2] = [Self::None, Self::Loose];

    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Loose => "loose",
        }
    }
}

/// Something to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// Our client with our server.
    Client(Way),
    /// The kernel's client: in User-mode Linux by TCP or a unix socket, in QEMU by virtio.
    Kernel(Server, Cache),
    /// ext4 on a virtio disk: of ours in User-mode Linux, of QEMU's own in QEMU.
    VirtioBlk,
}

impl System {
    /// Whether a line is about it: ours, but for what only compares.
    pub fn is_ours(self) -> bool {
        matches!(self, Self::Client(Way::Coalesced | Way::Pipelined) | Self::Kernel(Server::Ferry, _))
    }

    /// Of ours: the configuration's name in the results. Of a peer: its name there.
    pub fn name(self) -> &'static str {
        match self {
            Self::Client(Way::PageAtATime) => "page-at-a-time",
            Self::Client(Way::Coalesced) => "coalesced",
            Self::Client(Way::Pipelined) => "pipelined",
            Self::Kernel(Server::Ferry, Cache::None) => "v9fs-none",
            Self::Kernel(Server::Ferry, Cache::Loose) => "v9fs-loose",
            Self::Kernel(Server::Diod, _) => "diod",
            Self::Kernel(Server::Qemu, _) => "qemu-9p",
            Self::VirtioBlk => "virtio-blk",
        }
    }

    /// A name that no other system has: for files and mount points.
    pub fn full_name(self) -> String {
        match self {
            Self::Kernel(server, cache) => {
                let server = if server == Server::Ferry { FERRY } else { self.name() };
                format!("{server}-v9fs-{}", cache.name())
            }
            _ => self.name().into(),
        }
    }

    /// What a line of ours calls `peer`.
    pub fn calls(self, peer: Self) -> Option<String> {
        match (self, peer) {
            (Self::Client(_), Self::Client(Way::PageAtATime) | Self::Kernel(Server::Ferry, _))
            | (Self::Client(_) | Self::Kernel(..), Self::VirtioBlk) => Some(peer.name().into()),
            (Self::Client(Way::Pipelined), Self::Client(Way::Coalesced)) => Some(format!("{FERRY}-{}", peer.name())),
            (Self::Kernel(_, ours), Self::Kernel(Server::Diod | Server::Qemu, theirs)) if ours == theirs => {
                Some(peer.name().into())
            }
            _ => None,
        }
    }
}

/// The programs.
#[derive(Debug, Clone)]
pub struct Programs {
    /// Ours.
    pub ferry: PathBuf,
    /// fio.
    pub fio: PathBuf,
    /// diod, or why it is not there.
    pub diod: Result<PathBuf, String>,
    /// mkfs.ext4, or why it is not there.
    pub mkfs: Result<PathBuf, String>,
}

fn words(text: &str) -> impl Iterator<Item = OsString> + '_ {
    text.split_whitespace().map(OsString::from)
}

/// Our server, on TCP.
pub fn ferry_server(programs: &Programs, dir: &Path, address: SocketAddr) -> Vec<OsString> {
    let mut command = vec![programs.ferry.clone().into()];
    command.extend(words("--log warn share"));
    command.push(dir.into());
    command.extend(words(&format!("--9p tcp:{address} --9p-remote")));
    command
}

/// Our server, at a unix socket.
pub fn ferry_unix_server(programs: &Programs, dir: &Path, socket: &str) -> Vec<OsString> {
    let mut command = vec![programs.ferry.clone().into()];
    command.extend(words("--log warn share"));
    command.push(dir.into());
    command.extend(words(&format!("--9p unix:{socket}")));
    command
}

/// The tag of a server's device that is mounted in this way.
pub fn tag(server: Server, cache: Cache) -> String {
    System::Kernel(server, cache).full_name()
}

/// Our server, as a device.
pub fn ferry_device(programs: &Programs, dir: &Path, socket: &Path, tag: &str) -> Vec<OsString> {
    let mut command = vec![programs.ferry.clone().into()];
    command.extend(words("--log warn share"));
    command.push(dir.into());
    let mut address = OsString::from("vhost-user:");
    address.push(socket);
    command.extend(["--9p".into(), address]);
    command.extend(words(&format!("--tag {tag}")));
    command
}

/// Runs what follows with another table of hosts.
const WITH_HOSTS: &str = r#"mount --bind "$1" /etc/hosts && shift && exec "$@""#;

/// diod, without the authentication that only its own clients have. It serves nobody whose address has no name, so it gets a
/// table of hosts, in a mount namespace of its own.
pub fn diod_server(program: &Path, dir: &Path, address: SocketAddr, hosts: &Path) -> Vec<OsString> {
    let mut command: Vec<OsString> = words("unshare --mount -- sh -c").collect();
    command.extend([WITH_HOSTS.into(), "sh".into(), hosts.into(), program.into()]);
    command.extend(words("--foreground --no-auth --logdest stderr --export"));
    command.push(dir.into());
    command.extend(words(&format!("--listen {address}")));
    command
}

/// The words that mount our client, of a server at `tcp:HOST:PORT` or `unix:PATH`.
pub fn client(programs: &Programs, way: Way, address: &str, dir: &Path) -> Vec<OsString> {
    let mut command = vec![programs.ferry.clone().into()];
    command.extend(words(&format!("--log warn mount 9p:{address}")));
    command.push(dir.into());
    command.extend(words(way.flags().as_str()));
    command
}

/// The line of shell that has the kernel mount `tree` of a server at `dir` by TCP. It would attach as nobody, whom diod does not
/// let into the directory of the run.
pub fn tcp_mount(cache: Cache, tree: &Path, address: SocketAddr, dir: &str) -> String {
    let (aname, host, port) = (shell_word(tree), address.ip(), address.port());
    let cache = cache.name();
    format!(
        "mount -i -t 9p -o trans=tcp,version=9p2000.L,port={port},msize={MSIZE},cache={cache},uname=root,aname={aname} {host} {dir}"
    )
}

/// The same by a unix socket.
pub fn unix_mount(cache: Cache, socket: &str, dir: &str) -> String {
    let cache = cache.name();
    format!(
        "mount -i -t 9p -o trans=unix,version=9p2000.L,msize={MSIZE},cache={cache},uname=root,aname=/ {socket} {dir}"
    )
}

/// The same of a device.
pub fn virtio_mount(cache: Cache, server: Server, dir: &str) -> String {
    let (tag, cache) = (tag(server, cache), cache.name());
    format!("mount -i -t 9p -o trans=virtio,version=9p2000.L,msize={MSIZE_VIRTIO},cache={cache} {tag} {dir}")
}

#[cfg(test)]
mod tests {
    use super::super::rows;
    use super::*;

    #[test]
    fn names_are_unique_in_each_row() {
        for step in rows::all() {
            let systems = step.systems();
            let mut names: Vec<_> = systems.iter().map(|system| system.full_name()).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), systems.len(), "{}", step.name());
            for ours in systems.iter().filter(|system| system.is_ours()) {
                let mut peers: Vec<_> = systems.iter().filter_map(|peer| ours.calls(*peer)).collect();
                let count = peers.len();
                peers.sort();
                peers.dedup();
                assert_eq!(peers.len(), count, "{}", step.name());
            }
        }
    }

    #[test]
    fn each_compares_with_its_like() {
        let ours = System::Kernel(Server::Ferry, Cache::Loose);
        assert_eq!(ours.calls(System::Kernel(Server::Diod, Cache::Loose)), Some("diod".into()));
        assert_eq!(ours.calls(System::Kernel(Server::Diod, Cache::None)), None);
        assert_eq!(System::Client(Way::Pipelined).calls(ours), Some("v9fs-loose".into()));
        assert_eq!(System::Client(Way::Coalesced).calls(System::Client(Way::Pipelined)), None);
    }

    #[test]
    fn both_clients_reach_a_unix_socket() {
        let programs =
            Programs { ferry: "ferry".into(), fio: "fio".into(), diod: Err("no".into()), mkfs: Err("no".into()) };
        let text = |words: Vec<OsString>| words.join(&OsString::from(" ")).into_string().unwrap();
        let ours = client(&programs, Way::Pipelined, "unix:/s", Path::new("/m"));
        assert_eq!(text(ours), "ferry --log warn mount 9p:unix:/s /m");
        let server = ferry_unix_server(&programs, Path::new("/t"), "/s");
        assert_eq!(text(server), "ferry --log warn share /t --9p unix:/s");
        let line = unix_mount(Cache::Loose, "/s", "/m");
        assert!(line.contains("trans=unix,") && line.contains("cache=loose") && line.ends_with(" /s /m"), "{line}");
    }
}
