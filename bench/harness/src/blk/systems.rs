//! The disk servers, ferry and its peers, and how each is started.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::line::FERRY;

/// Queues that every server offers: as many as the widest row has.
pub const QUEUES: usize = 4;

/// How a server of vhost-user-blk waits for requests, and over which rings they come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// Looks for more for a while, as it does by default.
    Poll,
    /// Sleeps at once.
    Sleep,
    /// As `Poll`, with packed rings.
    Packed,
}

/// How QEMU makes its transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Aio {
    /// io_uring.
    Uring,
    /// Linux's older interface.
    Native,
}

/// Something to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// Ours.
    Ferry(Way),
    /// qemu-storage-daemon's export.
    StorageDaemon(Way),
    /// QEMU's own virtio-blk, with a thread of its own (in its guest).
    QemuDisk(Aio),
    /// No disk at all: fio with io_uring on the file.
    BareFile,
}

/// Those that have a disk of their own: each its own file, for servers lock what they serve.
pub const ALL: [System; 8] = [
    System::Ferry(Way::Poll),
    System::Ferry(Way::Sleep),
    System::Ferry(Way::Packed),
    System::StorageDaemon(Way::Poll),
    System::StorageDaemon(Way::Sleep),
    System::QemuDisk(Aio::Uring),
    System::QemuDisk(Aio::Native),
    System::BareFile,
];

impl System {
    /// Whether it is ours.
    pub fn is_ours(self) -> bool {
        matches!(self, Self::Ferry(_))
    }

    /// Of ours: the configuration's name in the results. Of a peer: its name there.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ferry(Way::Poll) => "poll",
            Self::Ferry(Way::Sleep) => "no-poll",
            Self::Ferry(Way::Packed) => "packed",
            Self::StorageDaemon(Way::Sleep) => "qemu-storage-daemon-no-poll",
            Self::StorageDaemon(_) => "qemu-storage-daemon",
            Self::QemuDisk(Aio::Uring) => "qemu-virtio-blk",
            Self::QemuDisk(Aio::Native) => "qemu-virtio-blk-native",
            Self::BareFile => "io_uring-file",
        }
    }

    /// A name that no other system has: for files, and where all stand in one list.
    pub fn full_name(self) -> String {
        if self.is_ours() { format!("{FERRY}-{}", self.name()) } else { self.name().into() }
    }

    /// What a line of ours calls `peer`; our own first configuration is the baseline of the others.
    pub fn calls(self, peer: Self) -> Option<String> {
        match peer {
            Self::Ferry(Way::Poll) if self != peer => Some(peer.full_name()),
            Self::Ferry(_) => None,
            _ => Some(peer.name().into()),
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
    /// qemu-storage-daemon and qemu-img, in this directory; nothing where they could not be fetched.
    pub disk_tools: Option<PathBuf>,
}

impl Programs {
    /// A program that comes with QEMU.
    pub fn tool(&self, name: &str) -> Result<PathBuf> {
        match &self.disk_tools {
            Some(directory) => Ok(directory.join(name)),
            None => bail!("{name} is not there"),
        }
    }

    /// The command that offers `file` at `socket`.
    pub fn server(&self, system: System, file: &Path, socket: &Path, direct: bool) -> Result<Vec<OsString>> {
        let mut command: Vec<OsString> = Vec::new();
        match system {
            System::Ferry(way) => {
                command.extend([self.ferry.clone().into(), "--log".into(), "warn".into(), "disk".into(), file.into()]);
                command.extend(["--vhost-user".into(), socket.into()]);
                let cache = if direct { "none" } else { "writeback" };
                command.push(format!("--cache={cache}").into());
                command.push(format!("--queues={QUEUES}").into());
                if way == Way::Sleep {
                    command.push("--poll-us=0".into());
                }
            }
            System::StorageDaemon(way) => {
                command.push(self.tool("qemu-storage-daemon")?.into());
                let poll = if way == Way::Sleep { ",poll-max-ns=0" } else { "" };
                command.extend(["--object".into(), format!("iothread,id=io{poll}").into()]);
                command.extend(["--blockdev".into(), blockdev("disk", file, Aio::Uring, direct).into()]);
                let export = format!(
                    "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},writable=on,\
                     num-queues={QUEUES},iothread=io",
                    comma_doubled(socket)
                );
                command.extend(["--export".into(), export.into()]);
            }
            System::QemuDisk(_) | System::BareFile => bail!("{} is no server", system.name()),
        }
        Ok(command)
    }
}

/// A disk of QEMU's, as its options describe it. The file alone, without a format above it, is the shortest way.
pub fn blockdev(node: &str, file: &Path, aio: Aio, direct: bool) -> String {
    let aio = if aio == Aio::Native { "native" } else { "io_uring" };
    let cache = if direct { "on" } else { "off" };
    format!("driver=file,node-name={node},filename={},aio={aio},cache.direct={cache}", comma_doubled(file))
}

/// A path within an option of QEMU's.
pub fn comma_doubled(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(system: System, direct: bool) -> String {
        let programs = Programs { ferry: "ferry".into(), fio: "fio".into(), disk_tools: Some("/t".into()) };
        let words = programs.server(system, Path::new("/a,b"), Path::new("/s"), direct).unwrap();
        words.iter().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join("|")
    }

    #[test]
    fn each_server_gets_its_options() {
        assert_eq!(
            text(System::Ferry(Way::Sleep), true),
            "ferry|--log|warn|disk|/a,b|--vhost-user|/s|--cache=none|--queues=4|--poll-us=0"
        );
        assert!(text(System::Ferry(Way::Packed), false).ends_with("--cache=writeback|--queues=4"));
        let daemon = text(System::StorageDaemon(Way::Poll), false);
        assert!(daemon.contains("filename=/a,,b,aio=io_uring,cache.direct=off"), "{daemon}");
        assert!(daemon.contains("iothread,id=io|") && daemon.contains("num-queues=4,iothread=io"), "{daemon}");
        assert!(text(System::StorageDaemon(Way::Sleep), true).contains("id=io,poll-max-ns=0|"));
    }

    #[test]
    fn systems_without_a_server_have_no_command() {
        let programs = Programs { ferry: "ferry".into(), fio: "fio".into(), disk_tools: None };
        for system in [System::BareFile, System::QemuDisk(Aio::Native), System::StorageDaemon(Way::Poll)] {
            assert!(programs.server(system, Path::new("/a"), Path::new("/s"), true).is_err());
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = ALL.iter().map(|system| system.full_name()).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), ALL.len());
        let packed = System::Ferry(Way::Packed);
        let peers: Vec<_> = ALL.iter().filter_map(|peer| packed.calls(*peer)).collect();
        assert_eq!(peers[0], "ferry-poll");
        assert_eq!((peers.len(), System::Ferry(Way::Poll).calls(packed)), (6, None));
    }
}
