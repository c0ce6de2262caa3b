//! The table of flags. Help, man page, completions and the configuration file's keys all come from it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::CommandFactory;
use clap::builder::ArgPredicate;

use ferry_control::{MetricsAddress, TraceOptions};

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
    #[arg(long, global = true, value_name = "LEVEL", display_order = 900)]
    pub log: Option<String>,

    /// Log to the system's log (/dev/log) instead of standard error.
    #[arg(long, global = true, display_order = 901)]
    pub syslog: bool,

    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Returns the global flags, for the command line of another process.
    pub fn common(&self) -> Vec<OsString> {
        let log = self.log.iter().flat_map(|level| ["--log".into(), level.into()]);
        log.chain(self.syslog.then(|| "--syslog".into())).collect()
    }
}

#[derive(Debug, clap::Subcommand)]
#[allow(clippy::large_enum_variant, reason = "a process has one")]
pub enum Command {
    /// Share directories with virtual machines and 9P clients until SIGTERM or SIGINT.
    ///
    /// Each source is followed by its own flags; one process serves all sources. A source is a directory, mem (a memory file
    /// system), pmem:PATH (a memory file system that persists in a file or DAX device), image:PATH (a verified image of a tree),
    /// layers:DIR (layers of containers, for podman), or 9p: and the address of a 9P server. If several shares name the same source, their guests and mounts share one instance
    /// of it. SIGTERM and SIGINT finish the requests under way, sync, and exit with status 0; a second signal exits at once.
    /// SIGQUIT also discards the state that --state keeps.
    #[command(after_long_help = format!("{}

{}", recipes::SHARE, recipes::TLS))]
    #[command(override_usage = "ferry share SOURCE --virtiofs SOCKET [--mount DIR] [--9p ADDRESS] [OPTIONS] \
                                [SOURCE2 --virtiofs SOCKET2 [OPTIONS]]...\n       \
                                ferry share --config FILE")]
    Share(ShareArgs),

    /// Mount a source on this host.
    ///
    /// A source is a directory, mem (a memory file system), pmem:PATH (a memory file system that persists in a file or DAX
    /// device), image:PATH (a verified image of a tree), layers:DIR (layers of containers, for podman), or 9p: and the address of a 9P server. A directory named mem is written
    /// as ./mem. The command returns when the mount exists. The server runs in the background until the mount is unmounted;
    /// SIGTERM and SIGINT unmount it. Users other than root mount through fusermount3.
    #[command(after_long_help = recipes::MOUNT)]
    #[command(
        override_usage = "ferry mount SOURCE MOUNTPOINT [OPTIONS]\n       ferry mount --explain [SOURCE] [MOUNTPOINT]"
    )]
    Mount(MountArgs),

    /// Serve files and block devices to virtual machines as disks, until SIGTERM or SIGINT.
    ///
    /// Each file is followed by its own flags; each disk is served by its own process. Disks are locked with QEMU's locks, so
    /// that no other program writes to them. If a file grows while it is served, the guest's disk grows.
    #[command(after_long_help = crate::disk::EXAMPLES)]
    #[command(
        override_usage = "ferry disk FILE --vhost-user SOCKET [OPTIONS] [FILE2 --vhost-user SOCKET2 [OPTIONS]]...\n       \
                                ferry disk FILE --resize SIZE"
    )]
    Disk(Box<crate::disk::Args>),

    /// Build, mount, check and list verified images.
    #[command(subcommand, after_long_help = crate::image::EXAMPLES)]
    Image(crate::image::Command),

    /// Show or change what a running share or mount logs.
    ///
    /// The target is a process id, a mount point, the socket of a share, its 9P address (unix:/run/s, tcp:HOST:PORT), or a file
    /// in a mount or shared directory, which selects the requests for this file only.
    #[command(after_long_help = recipes::LOG)]
    Log(LogArgs),

    /// Change settings of a running share, mount or disk.
    ///
    /// The target is a process id, a mount point, the socket of a share or disk, its 9P address (unix:/run/s, tcp:HOST:PORT), or a
    /// shared directory. Only its user and root may change it. What cannot be changed while it runs is refused, and nothing changes.
    #[command(after_long_help = recipes::SET)]
    Set(crate::set_cmd::Args),

    /// Add a share or disk to a running process.
    ///
    /// The process was started with ferry share --config. What is added has its own server process with its own sandbox, and ends with
    /// the others. The command returns when it is served; if it cannot be, nothing has changed. The configuration file is not changed.
    #[command(after_long_help = recipes::ADD)]
    #[command(override_usage = "ferry add TARGET share SOURCE --virtiofs SOCKET [OPTIONS]\n       \
                                ferry add TARGET disk FILE --vhost-user SOCKET [OPTIONS]")]
    Add(AddArgs),

    /// Remove a share or disk from a running process, which serves the others without a break.
    ///
    /// While clients are connected or files are open, nothing changes unless --force is given. Requests under way are finished and synced.
    #[command(after_long_help = recipes::REMOVE)]
    Remove(RemoveArgs),

    /// Read the configuration file of a running process again, and serve what it lists now.
    ///
    /// Tables that are new are served, and those that have gone are removed. limit, poll-us and the timeouts change under clients; other keys
    /// only while no client is connected, unless --force is given. If anything is wrong or cannot be changed, it is named, and nothing
    /// changes. What ferry add has added stays.
    #[command(after_long_help = recipes::RELOAD)]
    Reload(ReloadArgs),

    /// Show the shares, mounts and disks that run: who uses them, and by which paths.
    ///
    /// Users see their own, and root those of all users. The target is a process id, a mount point, the socket of a share or disk,
    /// its address for 9P (unix:/run/s, tcp:HOST:PORT), or a shared directory or file.
    #[command(after_long_help = recipes::STATUS)]
    Status(crate::status_cmd::Args),

    /// Print the metrics of running shares, mounts and disks: requests, bytes, errors and latencies by operation.
    ///
    /// The target is a process id, a mount point, the socket of a share or disk, its address for 9P, or a shared directory or file.
    /// Without one: all of yours that run, each series with the label pid; for root, those of all users.
    #[command(after_long_help = recipes::METRICS)]
    Metrics(crate::metrics_cmd::Args),

    /// Show what running shares, mounts and disks do, live: requests, bytes, latencies and errors in each interval.
    ///
    /// Ctrl-C ends it. Latencies are those from taking a request to its reply, of all operations together.
    #[command(after_long_help = recipes::TOP)]
    Top(crate::top_cmd::Args),

    /// Check what this machine offers for each export, and what it lacks.
    ///
    /// Each check says what was found and, if something is lacking, what follows from it and the command that changes it.
    /// A check is missing if an export does not work without it, and degraded if exports work less well.
    /// The command mounts mem for a moment, runs `--version` of the virtual machine monitors in PATH, and may load kernel modules, as a mount would. The status is 0 if nothing that the exports need is
    /// missing, and 1 otherwise.
    #[command(after_long_help = recipes::DOCTOR)]
    Doctor(crate::doctor::Args),

    /// Run in a guest: replay what happens to the files of shares, so that programs that watch them (inotify) see it.
    ///
    /// The shares are mounted in this guest and served by ferry share --events. The agent replays each event as the same system
    /// call on the mount; the server recognises these calls and changes nothing. Needs root. It ends when no mount has events.
    /// The small program ferry-agent does the same, with the same arguments.
    #[command(after_long_help = recipes::AGENT)]
    Agent(ferry_agent::Args),

    /// Check an unmounted persistent memory file system, and repair it.
    ///
    /// The status is 0 if the file system is clean or repaired, and 4 if damage remains or the file is not such a file system.
    #[command(after_long_help = recipes::FSCK)]
    Fsck(FsckArgs),

    /// Boot a small Linux guest with directories mounted, and run a command in it.
    ///
    /// Nothing needs to be installed: the guest is User-mode Linux, a plain process, and is downloaded at first use. Each
    /// directory is mounted at /mnt/NAME; the first one is the working directory. In NAME, characters other than A-Z, a-z, 0-9,
    /// dot, dash and underscore become dashes. If two names are equal, the second gets a number, which is printed. The command
    /// runs as root of the guest and sees this host's files. Its changes in the directories are made on this host, with your
    /// rights; its other changes stay in memory and are discarded at the end. The exit status is that of the command (128 + N if
    /// signal N ended it).
    #[command(after_long_help = recipes::TRY)]
    Try(TryArgs),

    /// Print the manual page of ferry, of one of its commands, or of its configuration file, in roff.
    Man {
        /// The command whose page to print, for example: image build; or ferry.toml, the configuration file.
        #[arg(value_name = "COMMAND")]
        command: Vec<String>,

        /// Write the pages of ferry, of all its commands, and of the configuration file to this directory.
        #[arg(long, value_name = "DIR", conflicts_with = "command")]
        all: Option<PathBuf>,
    },

    /// Print shell completions.
    Completions {
        /// The shell.
        #[arg(value_name = "SHELL")]
        shell: clap_complete::Shell,

        /// The program to complete.
        #[arg(value_name = "PROGRAM", default_value_t, value_enum)]
        program: Program,
    },
}

/// A program with completions.
#[derive(Debug, Default, Clone, Copy, clap::ValueEnum)]
pub enum Program {
    #[default]
    Ferry,
    FerryAgent,
}

#[derive(Debug, clap::Args)]
pub struct ShareArgs {
    #[command(flatten)]
    pub share: Option<Share>,

    /// Read shares and disks from a TOML file: one `[[share]]` or `[[disk]]` table each, with the long flags of `ferry share` or
    /// `ferry disk` as keys, without their dashes.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Serve metrics over HTTP at 127.0.0.1:PORT, [::1]:PORT or unix:PATH, as /metrics; see ferry metrics.
    #[allow(rustdoc::broken_intra_doc_links, reason = "an address, in the text of the help")]
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<MetricsAddress>,

    /// Write requests as trace events, for Perfetto or Chrome, to a new file, for N seconds (1 to 600) [default: 10].
    #[arg(long, value_name = "FILE[,seconds=N]", hide_short_help = true)]
    pub trace: Option<TraceOptions>,

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

    /// The empty directory to mount on. It may be inside SOURCE, which then does not contain the mount.
    #[arg(index = 2, value_name = "MOUNTPOINT", required_unless_present = "explain")]
    pub mountpoint: Option<PathBuf>,

    /// Options in the syntax of mount(8): flags of this command (size=1G,read_only) and mount options (ro,nosuid,noatime). Mounts
    /// of 9p: and image: are nosuid and nodev, unless suid and dev are given: then set-user-id programs and device nodes of the
    /// server or image take effect on this host.
    #[arg(short = 'o', value_name = "OPTIONS")]
    pub options: Vec<String>,

    /// Stay in the foreground.
    #[arg(long)]
    pub foreground: bool,

    /// Log to this file once the mount exists [default: no log in the background; see ferry log].
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,

    /// Serve metrics over HTTP at 127.0.0.1:PORT, [::1]:PORT or unix:PATH, as /metrics; see ferry metrics.
    #[allow(rustdoc::broken_intra_doc_links, reason = "an address, in the text of the help")]
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<MetricsAddress>,

    /// Write requests as trace events, for Perfetto or Chrome, to a new file, for N seconds (1 to 600) [default: 10].
    #[arg(long, value_name = "FILE[,seconds=N]", hide_short_help = true)]
    pub trace: Option<TraceOptions>,

    /// Report the path of requests and data, and why no better one is used.
    ///
    /// With a source, this mounts for a moment, because only the kernel's answer to a mount shows the path. Without a source, it
    /// mounts mem. With only the mount point of a running ferry, this reports on that one.
    #[arg(long)]
    pub explain: bool,

    /// Print one line of JSON on standard output once the mount exists, or instead of the report.
    #[arg(long)]
    pub json: bool,

    /// Run as the background process.
    #[arg(long, hide = true)]
    pub detached: bool,
}

#[derive(Debug, clap::Args)]
pub struct AddArgs {
    /// The process of ferry share --config, by its id, or by the socket, mount point, 9P address or directory of anything that it
    /// serves.
    #[arg(value_name = "TARGET")]
    pub target: PathBuf,

    /// share or disk, and what follows it on the command line of ferry share or ferry disk.
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

#[derive(Debug, clap::Args)]
pub struct RemoveArgs {
    /// The socket, mount point, 9P address or directory of a share, or the socket of a disk.
    #[arg(value_name = "TARGET")]
    pub target: PathBuf,

    /// Remove it also while clients are connected or files are open.
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, clap::Args)]
pub struct ReloadArgs {
    /// The process of ferry share --config, by its id, or by anything that it serves.
    #[arg(value_name = "TARGET")]
    pub target: PathBuf,

    /// Remove and replace servers also while clients are connected or files are open.
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, clap::Args)]
pub struct LogArgs {
    /// A process id, a mount point, the socket of a share, its 9P address, or a file in a mount or shared directory. Without a
    /// target: list all of your running shares and mounts.
    #[arg(value_name = "TARGET")]
    pub target: Option<PathBuf>,

    /// error, warn, info, debug, trace, a list such as info,ferry_fuse=debug; requests: log every request with its result; off:
    /// log nothing; default: the level at the start. Without a level: show the current one.
    #[arg(value_name = "LEVEL")]
    pub level: Option<String>,

    /// Show the log until Ctrl-C, and then restore the previous level.
    #[arg(long, short, requires = "level")]
    pub follow: bool,

    /// Print JSON: an object, or an array of objects without a target.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, clap::Args)]
pub struct FsckArgs {
    /// The file or device, with or without pmem: before it.
    #[arg(value_name = "PATH")]
    pub image: PathBuf,

    /// The second tier, if the file system has one.
    #[arg(long, value_name = "FILE")]
    pub tier2: Option<PathBuf>,

    /// Repair: write back what is readable.
    #[arg(long)]
    pub repair: bool,

    /// Print JSON.
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

    /// Print progress messages, also if standard error is not a terminal.
    #[arg(long, short)]
    pub verbose: bool,

    /// The command to run in the guest [default: a shell].
    #[arg(value_name = "COMMAND", last = true)]
    pub command: Vec<std::ffi::OsString>,
}

impl Command {
    /// Makes the paths of a background server absolute, relative to `directory`.
    pub fn resolve_paths(&mut self, directory: &Path) {
        match self {
            Self::Share(args) => args.share.iter_mut().for_each(|share| share.resolve_paths(directory)),
            Self::Mount(args) => {
                args.share.resolve_paths(directory);
                args.mountpoint = args.mountpoint.take().map(|path| directory.join(path));
                args.metrics.iter_mut().for_each(|metrics| metrics.resolve(directory));
                args.trace.iter_mut().for_each(|trace| trace.resolve(directory));
            }
            Self::Image(crate::image::Command::Mount(args)) => args.resolve_paths(directory),
            _ => {}
        }
    }
}

impl MountArgs {
    /// Returns the share for this mount.
    pub fn into_share(self) -> Share {
        Share { mount: self.mountpoint, ..self.share }
    }
}

/// Whether only `ferry share` has this flag.
pub fn is_share_only(flag: &clap::Arg) -> bool {
    SHARE_ONLY.contains(&flag.get_id().as_str())
        || flag.get_help_heading().is_some_and(|at| SHARE_ONLY_HEADINGS.contains(&at))
}

/// Returns the table of flags, with the differences between commands that share flags.
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

/// The flag of commands with many flags, whose plain help shows only those without a heading.
fn help_all() -> clap::Arg {
    let help = "Print help with the options of all groups";
    clap::Arg::new(help::ALL).long(help::ALL).action(clap::ArgAction::HelpLong).help(help)
}
