//! The table of flags. Help, man page, completions and the configuration file's keys all come from it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::CommandFactory;
use clap::builder::ArgPredicate;

use crate::flags::{Cache, Share, memory_mib};
use crate::help;
use crate::recipes;
use crate::sandbox::SandboxFlags;
use crate::status;

/// The flags without a heading that only `ferry share` has.
const SHARE_ONLY: [&str; 4] = ["virtiofs", "mount", "tag", "9p"];
/// The headings whose flags only `ferry share` has.
const SHARE_ONLY_HEADINGS: [&str; 4] =
    ["Sockets and queues", "For virtual machines", "Restart and migration", "For 9P"];

/// Share directories, memory and images with virtual machines, 9P clients and mounts, and serve disks.
#[derive(Debug, clap::Parser)]
#[command(name = "ferry", version, max_term_width = 110, propagate_version = true)]
#[command(after_long_help = format!("{}\n\n{}", recipes::OVERVIEW, status::TABLE))]
pub struct Cli {
    /// What to log on standard error: error, warn, info, debug, trace, or a list like info,ferry_virtiofs=debug
    /// [default: the environment's FERRY_LOG, or info; for try, warn; for doctor, off].
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log: Option<String>,

    /// Log to the system's log (/dev/log) instead of standard error.
    #[arg(long, global = true)]
    pub syslog: bool,

    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// The flags that all commands have, as they were given or set, for another one.
    pub fn common(&self) -> Vec<OsString> {
        let log = self.log.iter().flat_map(|level| ["--log".into(), level.into()]);
        log.chain(self.syslog.then(|| "--syslog".into())).collect()
    }
}

#[derive(Debug, clap::Subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one in a process")]
pub enum Command {
    /// Share directories with virtual machines and 9P clients until SIGTERM or SIGINT.
    ///
    /// Each source is followed by its own flags; several in one call are served by one process. A source is a
    /// directory, or mem (a memory file system), pmem:PATH (one that persists in a file or DAX device), image:PATH (a
    /// verified image of a tree), or 9p: and the address of a 9P server. A source given several times is one source that several guests and mounts use together.
    /// SIGTERM and SIGINT let the requests under way end, sync, and exit with status 0; a second signal exits at
    /// once. SIGQUIT ends what --state keeps, too.
    #[command(after_long_help = format!("{}

{}", recipes::SHARE, recipes::TLS))]
    #[command(override_usage = "ferry share SOURCE --virtiofs SOCKET [--mount DIR] [--9p ADDRESS] [OPTIONS] \
                                [SOURCE2 --virtiofs SOCKET2 [OPTIONS]]...\n       \
                                ferry share --config FILE")]
    Share(ShareArgs),

    /// Mount a source on this host.
    ///
    /// A source is a directory, or mem (a memory file system), pmem:PATH (one that persists in a file or DAX device),
    /// image:PATH (a verified image of a tree), or 9p: and the address of a 9P server; a directory of the name mem is ./mem. Returns when the mount is there; the server goes on in the
    /// background until the mount is unmounted, or SIGTERM or SIGINT comes, which unmount it. Users mount through
    /// fusermount3.
    #[command(after_long_help = recipes::MOUNT)]
    #[command(
        override_usage = "ferry mount SOURCE MOUNTPOINT [OPTIONS]\n       ferry mount --explain [SOURCE] [MOUNTPOINT]"
    )]
    Mount(MountArgs),

    /// Offer files and block devices to virtual machines as disks, until SIGTERM or SIGINT.
    ///
    /// Each file is followed by its own flags; several in one call are served by a process each. A disk is locked as QEMU
    /// locks it, so that nobody else writes to it meanwhile. A file that grows while it is offered makes the guest's
    /// disk grow.
    #[command(after_long_help = crate::disk::EXAMPLES)]
    #[command(
        override_usage = "ferry disk FILE --vhost-user SOCKET [OPTIONS] [FILE2 --vhost-user SOCKET2 [OPTIONS]]...\n       \
                                ferry disk FILE --resize SIZE"
    )]
    Disk(Box<crate::disk::Args>),

    /// Build, mount, check and show verified images.
    #[command(subcommand, after_long_help = crate::image::EXAMPLES)]
    Image(crate::image::Command),

    /// Show or change what a running share or mount logs.
    ///
    /// The target is a process id, a mount point, the socket of a share or its address for 9P (unix:/run/s, tcp:HOST:PORT),
    /// or a file in a mount or a shared directory, which means the requests about this file alone.
    #[command(after_long_help = recipes::LOG)]
    Log(LogArgs),

    /// Check what this machine offers for each export, and what it lacks.
    ///
    /// Each check says what was found and, if something is lacking, what follows from it and the command that changes it.
    /// A check is missing if an export does not work without it, and degraded if exports work less well.
    /// It mounts mem for a moment, runs `--version` of the virtual machine monitors in PATH, and may load kernel modules, as a mount would. The status is 0 if nothing that the exports need is
    /// missing, and 1 otherwise.
    #[command(after_long_help = recipes::DOCTOR)]
    Doctor(crate::doctor::Args),

    /// Check a persistent memory file system that is not mounted, and repair it.
    ///
    /// The status is 0 if nothing is wrong, or all of it is repaired; 4 if damage is left, or it is no such file system.
    #[command(after_long_help = recipes::FSCK)]
    Fsck(FsckArgs),

    /// Boot a small Linux guest with directories mounted, and run a command in it.
    ///
    /// Nothing needs to be installed: the guest is User-mode Linux, which runs as a plain process, and is fetched
    /// at first use. Each directory is mounted at /mnt/NAME, the first one is the working directory; characters of its name that are
    /// not of A-Z, a-z, 0-9, dot, dash and underscore become dashes, and of two with one name the second gets a number, which is told.
    /// The command is run as root of the guest, and sees this host's files: what it changes in the directories is changed on this host, with
    /// your rights; what it changes elsewhere is kept in memory, and gone in the end. The status of the command is the status of
    /// ferry (128 + N if signal N ended it).
    #[command(after_long_help = recipes::TRY)]
    Try(TryArgs),

    /// Print the manual page of ferry, of one of its commands, or of its configuration file, in roff.
    Man {
        /// The command whose page to print, for example: image build; or ferry.toml, the configuration file.
        #[arg(value_name = "COMMAND")]
        command: Vec<String>,

        /// Write the pages of ferry, of all its commands, and of the configuration file to this folder.
        #[arg(long, value_name = "FOLDER", conflicts_with = "command")]
        all: Option<PathBuf>,
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

    /// Take shares and disks from a TOML file: a `[[share]]` or `[[disk]]` table each, with the long flags of
    /// `ferry share` or `ferry disk` as keys, without their dashes.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Print one line of JSON on standard output once every share is listening.
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub sandbox_flags: SandboxFlags,
}

#[derive(Debug, clap::Args)]
pub struct MountArgs {
    #[command(flatten)]
    pub share: Share,

    /// An empty directory to mount on. It may be inside SOURCE, which then does not see the mount.
    #[arg(index = 2, value_name = "MOUNTPOINT", required_unless_present = "explain")]
    pub mountpoint: Option<PathBuf>,

    /// Options as mount(8) has them: flags of this command (size=1G,read_only) and of mounts (ro,nosuid,noatime). Mounts of 9p: and
    /// image: have nosuid and nodev, unless suid and dev are given: then set-user-id programs and device nodes of the server or the
    /// image count on this host.
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub options: Vec<String>,

    /// Stay in the foreground.
    #[arg(long)]
    pub foreground: bool,

    /// Log to this file once the mount is there [default: in the background nowhere; see ferry log].
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,

    /// Report which path requests and data take, and why no better one is used.
    ///
    /// With a source and a mount point, or a source alone, this mounts for a moment, because only the kernel's answer
    /// to a mount tells; without a source, it mounts mem. With the mount point of a running ferry alone, this says what that one does.
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
    /// A process id, a mount point, the socket of a share or its address for 9P, or a file in a mount or a shared
    /// directory. Without one: list all shares and mounts of yours that run.
    #[arg(value_name = "TARGET")]
    pub target: Option<PathBuf>,

    /// error, warn, info, debug, trace, a list like info,ferry_fuse=debug; requests: every request with its outcome;
    /// off: nothing; default: as it was started. Without a level: show what is on.
    #[arg(value_name = "LEVEL")]
    pub level: Option<String>,

    /// Show the log here until Ctrl-C, and log as before then.
    #[arg(long, short, requires = "level")]
    pub follow: bool,

    /// Answer in JSON: an object, or, without a target, an array of them.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, clap::Args)]
pub struct FsckArgs {
    /// The file or device, with pmem: before it or without.
    #[arg(value_name = "PATH")]
    pub image: PathBuf,

    /// The second tier, if it was mounted with one.
    #[arg(long, value_name = "FILE")]
    pub tier2: Option<PathBuf>,

    /// Repair: write back what could be read.
    #[arg(long)]
    pub repair: bool,

    /// Answer in JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, clap::Args)]
pub struct TryArgs {
    /// The directories to mount in the guest.
    #[arg(value_name = "DIR", required = true)]
    pub dirs: Vec<PathBuf>,

    /// Mount the directories read-only in the guest.
    #[arg(long)]
    pub read_only: bool,

    /// The guest's memory: a number with M or G.
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = memory_mib)]
    pub memory: u32,

    /// What the guest may cache.
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

impl Command {
    /// Makes the paths absolute that are used by a server in the background: `folder` is where those that are not begin.
    pub fn begin_in(&mut self, folder: &Path) {
        match self {
            Self::Share(args) => args.share.iter_mut().for_each(|share| share.begin_in(folder)),
            Self::Mount(args) => {
                args.share.begin_in(folder);
                args.mountpoint = args.mountpoint.take().map(|path| folder.join(path));
            }
            Self::Image(crate::image::Command::Mount(args)) => args.begin_in(folder),
            _ => {}
        }
    }
}

impl MountArgs {
    /// The share that this mount is, or a flag that no mount has.
    pub fn into_share(self) -> Share {
        Share { mount: self.mountpoint, ..self.share }
    }
}

/// Whether only `ferry share` has this flag.
pub fn is_share_only(flag: &clap::Arg) -> bool {
    SHARE_ONLY.contains(&flag.get_id().as_str())
        || flag.get_help_heading().is_some_and(|at| SHARE_ONLY_HEADINGS.contains(&at))
}

/// The whole table, with what differs between commands that have flags in common.
pub fn table() -> clap::Command {
    Cli::command()
        .mut_subcommand("share", |share| {
            share.mut_arg("source", |arg| arg.required_unless_present("config")).arg(help_all())
        })
        .mut_subcommand("mount", |mount| {
            let mount = mount.arg(help_all());
            let mount = mount.mut_arg("source", |arg| arg.default_value_if("explain", ArgPredicate::IsPresent, "mem"));
            let mount = mount.mut_arg("source", |arg| arg.required_unless_present("explain"));
            mount.mut_args(|arg| {
                let is_hidden = arg.is_hide_set() || is_share_only(&arg);
                arg.hide(is_hidden)
            })
        })
}

/// Of a command with many flags, whose plain help shows those without a heading only.
fn help_all() -> clap::Arg {
    let help = "Print help with all options, also those of the groups";
    clap::Arg::new(help::ALL).long(help::ALL).action(clap::ArgAction::HelpLong).help(help)
}
