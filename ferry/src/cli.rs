//! The table of flags. Help, man page, completions and the configuration file's keys all come from it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ferry_virtiofs::Tag;
use serde::{Deserialize, Deserializer, Serialize};

use crate::recipes;

/// More request queues than this help no guest: Linux makes at most one per CPU.
const QUEUES_MAX: u16 = 64;
/// Past a second of polling an idle share costs a whole CPU for nothing.
const POLL_US_MAX: u64 = 1_000_000;

/// Share host directories with virtual machines.
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
    /// Each directory is followed by its own flags; several directories in one call are served by one process.
    /// A directory given several times, with a socket each, is one share that several guests use together.
    /// SIGTERM and SIGINT let the requests under way end, sync, and exit with status 0; a second signal exits at
    /// once.
    #[command(after_long_help = recipes::SHARE)]
    #[command(
        override_usage = "ferry share DIR --virtiofs SOCKET [OPTIONS] [DIR2 --virtiofs SOCKET2 [OPTIONS]]...\n       \
                                ferry share --config FILE"
    )]
    Share(ShareArgs),

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

/// One directory and the export that it goes through: a group of flags, or a `[[share]]` table.
#[derive(Clone, Debug, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Share {
    /// The directory to share.
    #[arg(value_name = "DIR", required = false, required_unless_present = "config")]
    pub dir: PathBuf,

    /// Listen for a VMM on this socket (vhost-user-fs).
    #[arg(long, value_name = "SOCKET", required_unless_present_any = ["fd", "config"])]
    pub virtiofs: Option<PathBuf>,

    /// Listen on this inherited descriptor, a listening unix socket, instead of a path.
    #[arg(long, value_name = "N", conflicts_with = "virtiofs")]
    pub fd: Option<u16>,

    /// The name by which the guest mounts the share, 1 to 36 bytes [default: the directory's own name].
    ///
    /// QEMU and cloud-hypervisor take it from their own command line; User-mode Linux and crosvm ask the device, which
    /// tells it when this flag is given. QEMU 7.1 to 8.0 fails with a device that tells it: leave the flag out there.
    #[arg(long, value_name = "NAME")]
    #[serde(default, deserialize_with = "tag")]
    pub tag: Option<Tag>,

    /// Let guests change nothing.
    #[arg(long)]
    #[serde(default)]
    pub read_only: bool,

    /// How many request queues to offer [default: as many as CPUs].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    pub queues: Option<u16>,

    /// What guests may keep in their caches.
    #[arg(long, value_name = "MODE", default_value_t, value_enum, hide_possible_values = false)]
    #[serde(default)]
    pub cache: Cache,

    /// Let guests collect writes in their page cache and send them later.
    #[arg(long)]
    #[serde(default)]
    pub writeback: bool,

    /// Poll up to this many microseconds for the next request before sleeping; 0 never polls
    /// [default: adapts].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=POLL_US_MAX))]
    pub poll_us: Option<u64>,

    /// Open files with O_DIRECT on the host where the guest does.
    #[arg(long)]
    #[serde(default)]
    pub allow_direct_io: bool,

    /// Offer no extended attributes and ACLs: spares `ls -l` two requests for each file, and a new file's first
    /// write one.
    #[arg(long)]
    #[serde(default)]
    pub no_xattr: bool,
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

impl Share {
    /// The tag that was given, or one made of the directory's own name.
    pub fn tag_or_default(&self) -> Tag {
        self.tag.clone().unwrap_or_else(|| tag_of(&self.dir))
    }

    /// How long to poll, where it was given.
    pub fn poll(&self) -> Option<Duration> {
        self.poll_us.map(Duration::from_micros)
    }

    /// What the flags' table checks for the command line, for shares from a file.
    pub fn check(&self) -> Result<(), String> {
        match (&self.virtiofs, self.fd) {
            (None, None) => return Err("it needs virtiofs = \"SOCKET\" (or fd = N)".into()),
            (Some(_), Some(_)) => return Err("it has both virtiofs and fd; keep one".into()),
            _ => {}
        }
        match (self.queues, self.poll_us) {
            (Some(queues), _) if !(1..=QUEUES_MAX).contains(&queues) => {
                Err(format!("queues = {queues} is not in 1..={QUEUES_MAX}"))
            }
            (_, Some(us)) if us > POLL_US_MAX => Err(format!("poll-us = {us} is more than {POLL_US_MAX}")),
            _ => Ok(()),
        }
    }
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
