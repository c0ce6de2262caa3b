//! The program `ferry-snapshotter`: it reads the command line and the configuration file, and serves.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use ferry_control::{Logging, printable};
use ferry_snapshotter::{Config, Snapshotter, Socket, serve};

/// The exit status for a wrong command line or configuration file, as in `ferry`.
const MISUSED: u8 = 2;

/// Keep the layers of container images for containerd: each file once, mounted by the kernel.
///
/// Serves containerd's Snapshots API on a unix socket until SIGTERM or SIGINT. Mounts stay, and are used on by the next start, so
/// containers do not notice a restart. Needs root: layers have files of all owners, device nodes and set-user-id programs, and the
/// kernel mounts them.
#[derive(Debug, Parser)]
#[command(name = "ferry-snapshotter", version, max_term_width = 110)]
#[command(after_long_help = EXAMPLES)]
struct Args {
    /// The configuration file [default: /etc/ferry/snapshotter.toml, if it exists].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The directory of all snapshots; overrides the file [default: /var/lib/ferry-snapshotter].
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// The unix socket on which containerd connects; overrides the file [default: /run/ferry-snapshotter/snapshotter.sock].
    #[arg(long, value_name = "SOCKET")]
    address: Option<PathBuf>,
    /// What to log on standard error: error, warn, info, debug, trace [default: the environment's FERRY_LOG, or info].
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
}

const EXAMPLES: &str = "\
Configuration file, with the defaults:
  root = \"/var/lib/ferry-snapshotter\"
  address = \"/run/ferry-snapshotter/snapshotter.sock\"
  images = \"auto\"      # or \"never\": committed layers stay directories; or \"require\"

In /etc/containerd/config.toml:
  [proxy_plugins.ferry]
    type = \"snapshot\"
    address = \"/run/ferry-snapshotter/snapshotter.sock\"

Exit status:
  0  ended by SIGTERM or SIGINT
  1  failure, with the reason on standard error
  2  the command line or the configuration file is invalid";

fn main() -> ExitCode {
    let args = Args::parse();
    let mut level = args.log.clone().or_else(|| std::env::var("FERRY_LOG").ok()).unwrap_or_else(|| "info".into());
    if level == "debug" {
        // Each frame of HTTP/2 would be a line.
        level.push_str(",h2=info");
    }
    if let Err(error) = Logging::start(&level, false, None) {
        return report(&error.into(), MISUSED);
    }
    let config = match config(&args) {
        Ok(config) => config,
        Err(error) => return report(&error, MISUSED),
    };
    match run(&config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error, 1),
    }
}

fn report(error: &anyhow::Error, status: u8) -> ExitCode {
    eprintln!("ferry-snapshotter: {}", printable(&format!("{error:#}")));
    ExitCode::from(status)
}

/// Returns what the file and the command line set.
fn config(args: &Args) -> Result<Config> {
    let path = args.config.as_deref().unwrap_or(Path::new(Config::PATH));
    let mut config = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound && args.config.is_none() => Config::default(),
        text => {
            let text = text.with_context(|| format!("cannot read the configuration file {}", path.display()))?;
            let folder = std::path::absolute(path).context("cannot find the configuration file")?;
            let folder = folder.parent().unwrap_or(Path::new("/"));
            let wrong = || format!("the configuration file {} is wrong", path.display());
            Config::parse(&text, folder).with_context(wrong)?
        }
    };
    for (flag, path) in [(&args.root, &mut config.root), (&args.address, &mut config.address)] {
        if let Some(flag) = flag {
            *path = std::path::absolute(flag).with_context(|| format!("cannot find {}", flag.display()))?;
        }
    }
    Ok(config)
}

fn run(config: &Config) -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "only root can run this: the kernel mounts layers, and they have files of all owners"
    );
    let snapshotter = Snapshotter::open(config).with_context(|| format!("cannot use {}", config.root.display()))?;
    let socket = Socket::bind(&config.address)?;
    tracing::info!("serving {} on {}", config.root.display(), config.address.display());
    serve(snapshotter, socket)
}
