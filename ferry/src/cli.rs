//! The table of flags. Help, man page, completions and the configuration file's keys all come from it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::CommandFactory;
use ferry_virtiofs::Tag;
use serde::{Deserialize, Deserializer, Serialize};

use crate::recipes;
use crate::size::Size;
use crate::source::Kind;

/// More request queues than this help no guest: Linux makes at most one per CPU.
const QUEUES_MAX: u16 = 64;
/// Past a second of polling an idle share costs a whole CPU for nothing.
const POLL_US_MAX: u64 = 1_000_000;
/// A day: whoever wants to wait longer wants to wait for ever, and says 0.
const HANDLER_TIMEOUT_MAX: u64 = 86_400;
/// Ten times as many threads as the largest machines have CPUs per node.
const THREADS_MAX: u16 = 1024;
/// Each entry takes a buffer as large as the longest request, for every CPU.
const DEPTH_MAX: u16 = 256;

/// What only a virtual machine's export understands; `ferry mount` has the same table without them.
const SHARE_ONLY: [&str; 6] = ["virtiofs", "fd", "mount", "tag", "queues", "poll_us"];

/// Carry file data to virtual machines and mounts.
#[derive(Debug, clap::Parser)]
#[command(name = "ferry", version, max_term_width = 110, propagate_version = true)]
#[command(after_long_help = recipes::OVERVIEW)]
pub struct Cli {
    /// What to log on standard error: error, warn, info, debug, trace, or a list like info,ferry_virtiofs=debug
    /// [default: info; for try, warn].
    #[arg(long, global = true, value_name = "LEVEL", env = "FERRY_LOG", hide_env_values = true)]
    pub log: Option<String>,

    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Share directories with virtual machines until SIGTERM or SIGINT.
    ///
    /// Each source is followed by its own flags; several in one call are served by one process. A source is a
    /// directory, or mem (a memory file system), or pmem:PATH (one that persists in a file or DAX device).
    /// A source given several times is one source that several guests and mounts use together.
    /// SIGTERM and SIGINT let the requests under way end, sync, and exit with status 0; a second signal exits at
    /// once.
    #[command(after_long_help = recipes::SHARE)]
    #[command(
        override_usage = "ferry share SOURCE --virtiofs SOCKET [--mount DIR] [OPTIONS] [SOURCE2 --virtiofs SOCKET2 \
                                [OPTIONS]]...\n       \
                                ferry share --config FILE"
    )]
    Share(ShareArgs),

    /// Mount a source on this host.
    ///
    /// A source is a directory, or mem (a memory file system), or pmem:PATH (one that persists in a file or DAX
    /// device); a directory of the name mem is ./mem. Returns when the mount is there; the server goes on in the
    /// background until the mount is unmounted, or SIGTERM or SIGINT comes, which unmount it. Users mount through
    /// fusermount3.
    #[command(after_long_help = recipes::MOUNT)]
    #[command(
        override_usage = "ferry mount SOURCE MOUNTPOINT [OPTIONS]\n       ferry mount --explain [SOURCE] [MOUNTPOINT]"
    )]
    Mount(Box<MountArgs>),

    /// Offer files and block devices to virtual machines as disks, until SIGTERM or SIGINT.
    ///
    /// Each file is followed by its own flags; several in one call are served by one process. A disk is locked as QEMU
    /// locks it, so that nobody else writes to it meanwhile. A file that grows while it is offered makes the guest's
    /// disk grow.
    #[command(after_long_help = crate::disk::EXAMPLES)]
    #[command(
        override_usage = "ferry disk FILE --vhost-user SOCKET [OPTIONS] [FILE2 --vhost-user SOCKET2 [OPTIONS]]...\n       \
                                ferry disk FILE --resize SIZE"
    )]
    Disk(Box<crate::disk::Args>),

    /// Show or change what a running share or mount logs.
    ///
    /// The target is a process id, a mount point, the socket of a share, or a file in a mount, which means the requests
    /// about this file alone.
    #[command(after_long_help = recipes::LOG)]
    Log(LogArgs),

    /// Check a persistent memory file system that is not mounted, and repair it.
    ///
    /// The status is that of fsck(8): 0 nothing is wrong, 1 repaired, 4 damage is left, 8 it cannot be looked at.
    Fsck(FsckArgs),

    /// Boot a small Linux guest with directories mounted, and run a command in it.
    ///
    /// Nothing needs to be installed: the guest is User-mode Linux, which runs as a plain process, and is fetched
    /// at first use. Each directory is mounted at /mnt/NAME, the first one is the working directory. The status
    /// of the command is the status of ferry (128 + N if signal N ended it).
    #[command(after_long_help = recipes::TRY)]
    Try(TryArgs),

    /// Print the manual page of ferry, or of one of its commands, in roff.
    Man {
        /// The command whose page to print.
        #[arg(value_name = "COMMAND")]
        command: Option<String>,
    },

    /// Print shell completions.
    Completions {
        /// The shell that is to read them.
        #[arg(value_name = "SHELL")]
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, clap::Args)]
pub struct ShareArgs {
    #[command(flatten)]
    pub share: Option<Share>,

    /// Take shares from a TOML file: a `[[share]]` table each, with the long flags as keys, without their dashes.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Print one line of JSON on standard output once every share is listening.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, clap::Args)]
pub struct MountArgs {
    #[command(flatten)]
    pub share: Share,

    /// The directory to mount on.
    #[arg(index = 2, value_name = "MOUNTPOINT", required_unless_present = "explain")]
    pub mountpoint: Option<PathBuf>,

    /// Options as mount(8) has them: flags of this command (size=1G,read_only) and of mounts (ro,nosuid,noatime).
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub options: Vec<String>,

    /// Do not go to the background.
    #[arg(long)]
    pub foreground: bool,

    /// Log to this file once the mount is there; in the background, nowhere by default: see ferry log.
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,

    /// Say by which paths requests and data would travel, and why not by better ones.
    ///
    /// With a source and a mount point, or a source alone, this mounts for a moment, because only the kernel's answer
    /// to a mount tells. With the mount point of a running ferry alone, this says what that one does.
    #[arg(long)]
    pub explain: bool,

    /// Print one line of JSON on standard output once the mount is there, or instead of the explanation.
    #[arg(long)]
    pub json: bool,

    /// This process is the one in the background.
    #[arg(long, hide = true)]
    pub detached: bool,
}

#[derive(Debug, clap::Args)]
pub struct LogArgs {
    /// A process id, a mount point, the socket of a share, or a file in a mount.
    #[arg(value_name = "TARGET")]
    pub target: PathBuf,

    /// error, warn, info, debug, trace, a list like info,ferry_fuse=debug; requests: every request with its outcome;
    /// off: nothing; default: as it was started. Without a level: show what is on.
    #[arg(value_name = "LEVEL")]
    pub level: Option<String>,

    /// Show the log here until Ctrl-C, and log as before then.
    #[arg(long, short, requires = "level")]
    pub follow: bool,

    /// Answer in JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, clap::Args)]
pub struct FsckArgs {
    /// The file or device, with pmem: before it or without.
    #[arg(value_name = "PATH")]
    pub image: PathBuf,

    /// Its second tier.
    #[arg(long, value_name = "FILE")]
    pub tier2: Option<PathBuf>,

    /// Write back what could be read.
    #[arg(long)]
    pub repair: bool,

    /// Answer in JSON.
    #[arg(long)]
    pub json: bool,
}

/// One source and the exports that it goes through: a group of flags, or a `[[share]]` table.
#[derive(Clone, Debug, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct Share {
    /// A directory, or mem, or pmem:PATH.
    #[arg(index = 1, value_name = "SOURCE", required = false)]
    #[serde(alias = "dir")]
    pub source: PathBuf,

    /// Listen for a VMM on this socket (vhost-user-fs).
    #[arg(long, value_name = "SOCKET")]
    pub virtiofs: Option<PathBuf>,

    /// Listen on this inherited descriptor, a listening unix socket, instead of a path.
    #[arg(long, value_name = "N", conflicts_with = "virtiofs")]
    pub fd: Option<u16>,

    /// Mount the source on this directory of the host.
    #[arg(long, value_name = "DIR")]
    pub mount: Option<PathBuf>,

    /// The name by which the guest mounts the share, 1 to 36 bytes [default: the source's own name].
    ///
    /// QEMU and cloud-hypervisor take it from their own command line; User-mode Linux and crosvm ask the device, which
    /// tells it when this flag is given. QEMU 7.1 to 8.0 fails with a device that tells it: leave the flag out there.
    #[arg(long, value_name = "NAME")]
    #[serde(default, deserialize_with = "tag")]
    pub tag: Option<Tag>,

    /// Let nobody change anything.
    #[arg(long)]
    #[serde(default)]
    pub read_only: bool,

    /// How many request queues to offer [default: as many as CPUs].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    pub queues: Option<u16>,

    /// What the guest's kernel, or this host's, may keep in its caches.
    #[arg(long, value_name = "MODE", default_value_t, value_enum, hide_possible_values = false)]
    #[serde(default)]
    pub cache: Cache,

    /// Let writes be collected in the page cache and sent later.
    #[arg(long)]
    #[serde(default)]
    pub writeback: bool,

    /// Poll up to this many microseconds for the next request before sleeping; 0 never polls
    /// [default: adapts].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=POLL_US_MAX))]
    pub poll_us: Option<u64>,

    /// Open the files of a directory with O_DIRECT where the client does.
    #[arg(long)]
    #[serde(default)]
    pub allow_direct_io: bool,

    /// Offer no extended attributes and ACLs: spares `ls -l` two requests for each file, and a new file's first
    /// write one.
    #[arg(long)]
    #[serde(default)]
    pub no_xattr: bool,

    /// The most that mem may hold, or the size of a new pmem file: a number with K, M, G or T
    /// [default: half of the memory; the size of the file].
    #[arg(long, value_name = "SIZE", help_heading = "For mem and pmem:PATH")]
    pub size: Option<Size>,

    /// Hold the data in huge pages.
    #[arg(long, help_heading = "For mem and pmem:PATH")]
    #[serde(default)]
    pub huge: bool,

    /// Move what pmem has not used for long to this file or block device, and back when it is used.
    #[arg(long, value_name = "FILE", help_heading = "For mem and pmem:PATH")]
    pub tier2: Option<PathBuf>,

    /// The size of a new second tier that is a file.
    #[arg(long, value_name = "SIZE", requires = "tier2", help_heading = "For mem and pmem:PATH")]
    pub tier2_size: Option<Size>,

    /// How requests of a mount travel [default: auto, the best that can be had].
    #[arg(long, value_enum, value_name = "PATH", help_heading = "For mounts")]
    pub path: Option<Carrier>,

    /// Whether the kernel may read and write whole files of the source by itself [default: auto, if it can].
    #[arg(long, value_enum, value_name = "WHEN", help_heading = "For mounts")]
    pub passthrough: Option<Passthrough>,

    /// Let users other than the one who mounts in, as permissions say.
    #[arg(long, help_heading = "For mounts")]
    #[serde(default)]
    pub allow_other: bool,

    /// Mount also on a directory that is not empty, and hide what is in it.
    #[arg(long, help_heading = "For mounts")]
    #[serde(default)]
    pub nonempty: bool,

    /// What the table of mounts shows as the source [default: the source].
    #[arg(long, value_name = "NAME", help_heading = "For mounts")]
    pub fsname: Option<String>,

    /// After this many seconds in a request that a source does not end, its caller gets EIO; 0: never
    /// [default: 120].
    #[arg(long, value_name = "SECONDS", help_heading = "For mounts")]
    #[arg(value_parser = clap::value_parser!(u64).range(..=HANDLER_TIMEOUT_MAX))]
    pub handler_timeout: Option<u64>,

    /// Threads that read /dev/fuse [default: as many as CPUs].
    #[arg(long, value_name = "N", help_heading = "For mounts")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(THREADS_MAX)))]
    pub threads: Option<u16>,

    /// Requests that each CPU's ring can hold [default: 8].
    #[arg(long, value_name = "N", help_heading = "For mounts")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(DEPTH_MAX)))]
    pub depth: Option<u16>,
}

#[derive(Debug, clap::Args)]
pub struct TryArgs {
    /// The directories to mount in the guest.
    #[arg(value_name = "DIR", required = true)]
    pub dirs: Vec<PathBuf>,

    /// Let the guest change nothing.
    #[arg(long)]
    pub read_only: bool,

    /// The guest's memory: a number with M or G.
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = memory_mib)]
    pub memory: u32,

    /// What the guest may keep in its caches.
    #[arg(long, value_name = "MODE", default_value_t, value_enum)]
    pub cache: Cache,

    /// Boot a stock kernel in QEMU instead of User-mode Linux.
    #[arg(long)]
    pub qemu: bool,

    /// Say what is being done, also where standard error is no terminal.
    #[arg(long, short)]
    pub verbose: bool,

    /// The command to run in the guest [default: a shell].
    #[arg(value_name = "COMMAND", last = true)]
    pub command: Vec<std::ffi::OsString>,
}

/// What a guest may keep, and for how long.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// Nothing: every read and every look-up asks the host.
    None,
    /// Names and attributes for a second, data while a file is open.
    #[default]
    Auto,
    /// Everything, for as long as the guest likes: for directories that nobody else changes.
    Always,
}

/// How requests of a mount travel between the kernel and this process.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Carrier {
    /// The best that can be had here.
    Auto,
    /// FUSE over io_uring, or an error that says why not.
    Uring,
    /// /dev/fuse.
    Devfuse,
}

/// Whether the kernel may read and write files of the source by itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Passthrough {
    /// If it can.
    Auto,
    /// Or an error that says why not.
    On,
    /// Never.
    Off,
}

impl Share {
    /// What kind of source it is.
    pub fn kind(&self) -> Kind {
        Kind::of(&self.source)
    }

    /// The tag that was given, or one made of the source's own name.
    pub fn tag_or_default(&self) -> Tag {
        self.tag.clone().unwrap_or_else(|| match self.kind() {
            Kind::Dir(path) | Kind::Pmem(path) => tag_of(&path),
            Kind::Mem => made_tag("mem"),
        })
    }

    /// How long to poll, where it was given.
    pub fn poll(&self) -> Option<Duration> {
        self.poll_us.map(Duration::from_micros)
    }

    /// What is wrong with a share from a file: there, the table of flags has checked no value.
    pub fn check(&self) -> Result<(), String> {
        /// A value, its key, and its bounds.
        type Bounded = (Option<u64>, &'static str, u64, u64);
        let bounded: [Bounded; 5] = [
            (self.queues.map(Into::into), "queues", 1, QUEUES_MAX.into()),
            (self.poll_us, "poll-us", 0, POLL_US_MAX),
            (self.handler_timeout, "handler-timeout", 0, HANDLER_TIMEOUT_MAX),
            (self.threads.map(Into::into), "threads", 1, THREADS_MAX.into()),
            (self.depth.map(Into::into), "depth", 1, DEPTH_MAX.into()),
        ];
        for (value, key, min, max) in bounded {
            if let Some(value) = value.filter(|value| !(min..=max).contains(value)) {
                return Err(format!("{key} = {value} is not in {min}..={max}"));
            }
        }
        match (&self.virtiofs, self.fd, &self.mount) {
            (None, None, None) => Err("it needs virtiofs = \"SOCKET\" (or fd = N, or mount = \"DIR\")".into()),
            (Some(_), Some(_), _) => Err("it has both virtiofs and fd; keep one".into()),
            _ => self.contradiction().map_or(Ok(()), Err),
        }
    }

    /// Flags that do not go together, or not with this source or these exports.
    pub fn contradiction(&self) -> Option<String> {
        let source = self.source.display();
        let kind = self.kind();
        let of_memory = [
            (self.size.is_some(), "size"),
            (self.huge, "huge"),
            (self.tier2.is_some(), "tier2"),
            (self.tier2_size.is_some(), "tier2-size"),
        ];
        let of_mounts = [
            (self.path.is_some(), "path"),
            (self.passthrough.is_some(), "passthrough"),
            (self.allow_other, "allow-other"),
            (self.nonempty, "nonempty"),
            (self.fsname.is_some(), "fsname"),
            (self.handler_timeout.is_some(), "handler-timeout"),
            (self.threads.is_some(), "threads"),
            (self.depth.is_some(), "depth"),
        ];
        let given = |flags: &[(bool, &'static str)]| flags.iter().find(|(on, _)| *on).map(|(_, flag)| *flag);
        if let (Kind::Dir(_), Some(flag)) = (&kind, given(&of_memory)) {
            return Some(format!("{flag} is for the sources mem and pmem:PATH, and {source} is a directory"));
        }
        match kind {
            Kind::Mem if self.tier2.is_some() => Some("tier2 is for pmem:PATH; mem has one tier".into()),
            _ if self.tier2_size.is_some() && self.tier2.is_none() => Some("tier2-size needs tier2".into()),
            _ if self.writeback && self.passthrough == Some(Passthrough::On) => {
                Some("writeback and passthrough exclude each other; leave one out".into())
            }
            _ if self.mount.is_none() => given(&of_mounts)
                .map(|flag| format!("{flag} is for mounts, and {source} is not mounted: add mount, or leave it out")),
            _ => None,
        }
    }
}

impl MountArgs {
    /// The share that this mount is, or a flag that no mount has.
    pub fn into_share(self) -> Share {
        Share { mount: self.mountpoint, ..self.share }
    }

    /// The first flag that was given and is for virtual machines only.
    pub fn share_only(&self) -> Option<&'static str> {
        let Share { virtiofs, fd, mount, tag, queues, poll_us, .. } = &self.share;
        let given =
            [virtiofs.is_some(), fd.is_some(), mount.is_some(), tag.is_some(), queues.is_some(), poll_us.is_some()];
        given.iter().zip(SHARE_ONLY).find(|(given, _)| **given).map(|(_, name)| name)
    }
}

/// The whole table, with what differs between commands that have flags in common.
pub fn table() -> clap::Command {
    Cli::command()
        .mut_subcommand("share", |share| share.mut_arg("source", |arg| arg.required_unless_present("config")))
        .mut_subcommand("mount", |mount| {
            let mount = mount.mut_arg("source", |arg| arg.required(true));
            SHARE_ONLY.into_iter().fold(mount, |mount, id| mount.mut_arg(id, |arg| arg.hide(true)))
        })
}

/// A tag made of a directory's own name, also for `.` and `..`.
pub fn tag_of(dir: &Path) -> Tag {
    let absolute = dir.canonicalize();
    let name = absolute.as_deref().unwrap_or(dir).file_name();
    made_tag(&name.unwrap_or_default().to_string_lossy())
}

/// A tag made of any name: what shells, `fstab` and VMM options would trip over becomes a dash.
pub fn made_tag(name: &str) -> Tag {
    let safe = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' };
    let tag: String = name.chars().map(safe).take(Tag::BYTES_MAX).collect();
    let tag = if tag.chars().any(|c| c.is_ascii_alphanumeric()) { &tag } else { "share" };
    tag.parse().expect("1 to 36 bytes of ASCII")
}

fn tag<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Tag>, D::Error> {
    String::deserialize(input)?.parse().map(Some).map_err(serde::de::Error::custom)
}

/// Mebibytes out of `512M` or `2G`.
fn memory_mib(text: &str) -> Result<u32, String> {
    /// Below this a stock kernel does not boot.
    const MIB_MIN: u32 = 64;
    let (digits, factor) = match text.as_bytes().last().map(u8::to_ascii_uppercase) {
        Some(b'M') => (&text[..text.len() - 1], 1),
        Some(b'G') => (&text[..text.len() - 1], 1024),
        _ => return Err("write it like 512M or 2G".into()),
    };
    let mib = digits.parse::<u32>().ok().and_then(|n| n.checked_mul(factor));
    match mib {
        Some(mib) if mib >= MIB_MIN => Ok(mib),
        Some(_) => Err(format!("a guest needs at least {MIB_MIN}M")),
        None => Err("write it like 512M or 2G".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_made_of_any_name() {
        for (name, tag) in [
            ("src", "src"),
            ("my files, 2024", "my-files--2024"),
            ("été", "-t-"),
            ("", "share"),
            ("数据", "share"),
            ("0123456789012345678901234567890123456789", "012345678901234567890123456789012345"),
        ] {
            assert_eq!(made_tag(name).as_str(), tag, "{name}");
        }
    }

    #[test]
    fn memory_has_a_unit() {
        assert_eq!(memory_mib("512M"), Ok(512));
        assert_eq!(memory_mib("2g"), Ok(2048));
        for wrong in ["", "512", "M", "1M", "-1G", "99999999999G", "5000000G"] {
            assert!(memory_mib(wrong).is_err(), "{wrong}");
        }
    }
}
