//! The command line of every file system program.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use ferry_vfs::FileSystem;

use crate::serve;

/// Runs a file system as a program: parses the command line, serves, and returns the exit status.
///
/// Ends the process for `--help` and for an invalid command line.
#[must_use = "this is the program's status"]
pub fn run(fs: impl FileSystem + 'static) -> ExitCode {
    <Cli as clap::Parser>::parse().command.run(fs)
}

/// Mount a file system on this host, or share it with virtual machines.
#[derive(Debug, clap::Parser)]
#[command(max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// How to mount or share a file system: a subcommand for a [`clap`] parser.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum Command {
    /// Mount on a directory of this host, until it is unmounted or a signal arrives.
    Mount(MountArgs),
    /// Serve a virtio-fs device for a virtual machine, until a signal arrives.
    ///
    /// The machine's memory must be shared with this process. For QEMU:
    ///   -object memory-backend-memfd,id=mem,size=4G,share=on -numa node,memdev=mem
    ///   -chardev socket,id=fs,path=SOCKET
    ///   -device vhost-user-fs-pci,chardev=fs,tag=NAME,queue-size=1024
    /// and in the guest:
    ///   mount -t virtiofs NAME /mnt
    #[command(verbatim_doc_comment)]
    Virtiofs(VirtiofsArgs),
}

/// The command line of `mount`.
#[derive(Clone, Debug, clap::Args)]
pub struct MountArgs {
    /// The directory to mount on.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,

    /// The common flags.
    #[command(flatten)]
    pub common: CommonArgs,

    /// The transport of requests between the kernel and this program.
    #[arg(long, value_name = "PATH", default_value = "auto", value_parser = ["auto", "uring", "devfuse"])]
    pub path: String,

    /// Allow access by users other than the one who mounts.
    #[arg(long)]
    pub allow_other: bool,

    /// Print the transport of requests, and why no faster one is used.
    #[arg(long)]
    pub explain: bool,
}

/// The command line of `virtiofs`.
#[derive(Clone, Debug, clap::Args)]
pub struct VirtiofsArgs {
    /// The socket to listen on for a VMM.
    #[arg(value_name = "SOCKET")]
    pub socket: PathBuf,

    /// Tell the agents in guests (ferry agent) what others change, for programs there that watch files.
    #[arg(long)]
    pub events: bool,

    /// The common flags.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// The flags of every command.
#[derive(Clone, Debug, clap::Args)]
pub struct CommonArgs {
    /// The name of the file system: in the host's mount table [default: the program's name], or in the guest, where mount takes it
    /// [default: none].
    ///
    /// User-mode Linux and crosvm read it from the device, and cannot mount without it. QEMU has it on its own command
    /// line, and QEMU 7.1 to 8.0 fails with a device that offers it: omit the flag there.
    #[arg(long, value_name = "NAME")]
    pub tag: Option<String>,

    /// What clients may cache.
    #[arg(long, value_name = "MODE", default_value_t, value_enum)]
    pub cache: Cache,

    /// Let clients change nothing.
    #[arg(long)]
    pub read_only: bool,

    /// What to log on standard error: error, warn, info, debug, trace, or a list like info,ferry_serve=debug.
    #[arg(long, value_name = "LEVEL", default_value = "warn")]
    pub log: String,
}

/// How long clients may cache names, attributes and data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Cache {
    /// Not at all: every lookup, getattr and read is a request.
    None,
    /// Names and attributes for a second, data until the next open or a visible change.
    #[default]
    Auto,
    /// Until a notification: the file system publishes every change that its clients did not make.
    Always,
}

impl From<Cache> for ferry_fuse::Cache {
    fn from(cache: Cache) -> Self {
        match cache {
            Cache::None => Self::None,
            Cache::Auto => Self::Auto,
            Cache::Always => Self::Always,
        }
    }
}

impl Command {
    /// Serves the file system until it is unmounted or SIGINT, SIGTERM or SIGHUP arrives; returns the exit status. A
    /// second signal ends the process at once. Errors are printed on standard error.
    #[must_use = "this is the program's status"]
    pub fn run(self, fs: impl FileSystem + 'static) -> ExitCode {
        match serve::serve_until_signal(&self, Arc::new(fs)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{}: {error}", serve::program());
                ExitCode::FAILURE
            }
        }
    }

    pub(crate) fn common(&self) -> &CommonArgs {
        match self {
            Self::Mount(args) => &args.common,
            Self::Virtiofs(args) => &args.common,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[test]
    fn the_table_of_flags_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn example_lines_are_not_wrapped() {
        for columns in [80, 100] {
            let table = Cli::command().term_width(columns);
            let error = table.try_get_matches_from(["hello", "virtiofs", "--help"]).unwrap_err();
            let help = error.to_string();
            for line in [
                "-object memory-backend-memfd,id=mem,size=4G,share=on -numa node,memdev=mem",
                "-chardev socket,id=fs,path=SOCKET",
                "-device vhost-user-fs-pci,chardev=fs,tag=NAME,queue-size=1024",
                "mount -t virtiofs NAME /mnt",
            ] {
                assert!(help.lines().any(|found| found.trim() == line), "{help}");
            }
        }
    }

    #[test]
    fn the_subcommand_selects_host_or_guest() {
        for word in ["mount", "virtiofs"] {
            let line = ["hello", word, "/mnt/x", "--tag", "greeting", "--cache", "always", "--read-only"];
            let command = Cli::try_parse_from(line).unwrap().command;
            let common = command.common();
            assert_eq!(
                (common.tag.as_deref(), common.cache, common.read_only),
                (Some("greeting"), Cache::Always, true)
            );
        }
    }

    #[test]
    fn invalid_command_lines_are_refused() {
        for line in [&["hello"][..], &["hello", "mount"], &["hello", "mount", "/x", "--path", "fast"]] {
            assert_eq!(Cli::try_parse_from(line).unwrap_err().exit_code(), 2, "{line:?}");
        }
    }
}
