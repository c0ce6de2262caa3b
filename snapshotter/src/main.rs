//! The program `ferry-snapshotter`: it reads the command line and the configuration file, and serves.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use clap::builder::Resettable;
use clap::{CommandFactory, Parser};
use clap_complete::Shell;
use ferry_control::{Control, Logging, Owner, printable};
use ferry_snapshotter::{Config, Snapshotter, Socket, serve, served};

mod install;

/// The exit status for a wrong command line or configuration file, as in `ferry`.
const MISUSED: u8 = 2;

/// Keep the layers of container images for containerd: each file once, mounted by the kernel.
///
/// Serves containerd's Snapshots API on a unix socket until SIGTERM or SIGINT. Mounts stay, and are used on by the next start, so
/// containers do not notice a restart. Needs root: layers have files of all owners, device nodes and set-user-id programs, and the
/// kernel mounts them.
#[derive(Debug, Parser)]
#[command(name = NAME, version, max_term_width = 110)]
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
    /// Copy this program, the ferry beside it and the systemd unit to the system whose root is DIR, start the unit there, and end:
    /// for the DaemonSet of Kubernetes, whose container has the node's root as a volume.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["config", "root", "address"])]
    install_to: Option<PathBuf>,
    /// Print a document for packages: man (the manual page), or completions for bash, zsh or fish.
    #[arg(long, value_name = "DOCUMENT", hide = true, value_parser = ["man", "bash", "zsh", "fish"])]
    print: Option<String>,
}

const NAME: &str = "ferry-snapshotter";

const EXAMPLES: &str = "\
Configuration file, with the defaults:
  root = \"/var/lib/ferry-snapshotter\"
  address = \"/run/ferry-snapshotter/snapshotter.sock\"
  images = \"auto\"      # or \"never\": committed layers stay directories; or \"require\"
  merge = true         # one image of all layers below a container; false: overlayfs stacks them
  inode-share = false  # true: equal files of images share memory (Linux 7.0)
  containerd-root = \"/var/lib/containerd\"
  [lazy]
  from = []            # whose images start before their layers are downloaded
  [virtiofs]
  # socket-directory = \"DIR\"   # sockets of views that virtual machines read

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
    if let Some(document) = &args.print {
        return print(document).map_or_else(|error| report(&error, 1), |()| ExitCode::SUCCESS);
    }
    if let Some(node) = &args.install_to {
        return install::install(node).map_or_else(|error| report(&error, 1), |()| ExitCode::SUCCESS);
    }
    let mut level = args.log.clone().or_else(|| std::env::var("FERRY_LOG").ok()).unwrap_or_else(|| "info".into());
    if level == "debug" {
        // Each frame of HTTP/2 would be a line.
        level.push_str(",h2=info");
    }
    let logging = match Logging::start(&level, false, None) {
        Ok(logging) => logging,
        Err(error) => return report(&error.into(), MISUSED),
    };
    let config = match config(&args) {
        Ok(config) => config,
        Err(error) => return report(&error, MISUSED),
    };
    match run(&config, logging) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error, 1),
    }
}

fn report(error: &anyhow::Error, status: u8) -> ExitCode {
    eprintln!("ferry-snapshotter: {}", printable(&format!("{error:#}")));
    ExitCode::from(status)
}

/// Returns the configuration of the file and the command line.
fn config(args: &Args) -> Result<Config> {
    let path = args.config.as_deref().unwrap_or(Path::new(Config::PATH));
    let mut config = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound && args.config.is_none() => Config::default(),
        text => {
            let text = text.with_context(|| format!("cannot read the configuration file {}", path.display()))?;
            let directory = std::path::absolute(path).context("cannot find the configuration file")?;
            let directory = directory.parent().unwrap_or(Path::new("/"));
            let wrong = || format!("the configuration file {} is wrong", path.display());
            Config::parse(&text, directory).with_context(wrong)?
        }
    };
    for (flag, path) in [(&args.root, &mut config.root), (&args.address, &mut config.address)] {
        if let Some(flag) = flag {
            *path = std::path::absolute(flag).with_context(|| format!("cannot find {}", flag.display()))?;
        }
    }
    Ok(config)
}

/// Prints the manual page, or the completions of a shell.
fn print(document: &str) -> Result<()> {
    let mut text = Vec::new();
    match document.parse::<Shell>() {
        Ok(shell) => clap_complete::generate(shell, &mut Args::command(), NAME, &mut text),
        Err(_) => {
            let page = clap_mangen::Man::new(Args::command().after_long_help(Resettable::Reset));
            // The generator's title has no quotes around the date, and it fills lines of examples.
            writeln!(text, ".TH \"{NAME}\" \"8\" \"\" \"ferry {}\" \"Ferry\"", env!("CARGO_PKG_VERSION"))?;
            page.render_name_section(&mut text)?;
            page.render_synopsis_section(&mut text)?;
            page.render_description_section(&mut text)?;
            page.render_options_section(&mut text)?;
            let examples = EXAMPLES.replace('\\', "\\e").replace('-', "\\-").replace('\n', "\n\\&");
            write!(text, ".SH EXAMPLES\n.nf\n\\&{examples}\n.fi\n")?;
        }
    }
    std::io::stdout().write_all(&text).context("cannot write to standard output")
}

fn run(config: &Config, logging: Logging) -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "only root can run this: the kernel mounts layers, and they have files of all owners"
    );
    let control = Control::bind();
    let snapshotter = Snapshotter::open(config).with_context(|| format!("cannot use {}", config.root.display()))?;
    let socket = Socket::bind(&config.address)?;
    let snapshotter = Arc::new(snapshotter);
    snapshotter.convert_in_background();
    snapshotter.revive_shares();
    let _control = Control::start(control, vec![served(config, &snapshotter)].into(), logging, Owner::default());
    tracing::info!("serving {} on {}", config.root.display(), config.address.display());
    tracing::info!(
        "layers that are pulled whole are not verified when they are read; lazy ones are verified when they are fetched"
    );
    serve(&snapshotter, socket)
}
