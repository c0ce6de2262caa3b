//! `ferry mount`: mounts a source on this host, in the background or the foreground.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use ferry_control::{Logging, Request, ServedShare, TransportReport, printable, printable_json};
use ferry_isolation::BlockedSignals;

use crate::background::{self, Terminal};
use crate::cli::{self, MountArgs};
use crate::control::{self, Target, is_in_mount};
use crate::exports::{self, RunningExports};
use crate::flags::{Kind, Share};
use crate::groups;
use crate::new_files::{NewFiles, Success};
use crate::paths::descriptor_path;
use crate::share::Start;
use crate::source::{self, Sources};

/// A log may contain names of files, so only its owner may read it.
const LOG_MODE: u32 = 0o600;

/// Mounts. `line` is the command line and `at` the index of the command in it, for the background process.
pub fn run(args: MountArgs, line: &[OsString], at: usize, logging: &Logging) -> Result<u8> {
    if args.explain {
        return explain(args).map(|()| 0);
    }
    if !args.foreground && !args.detached {
        let before = line.get(..=at).unwrap_or_default().iter().cloned();
        let after = line.get(at + 1..).unwrap_or_default().iter().cloned();
        let words: Vec<OsString> = before.chain(["--detached".into()]).chain(after).collect();
        return background::start(&words, args.json);
    }
    let log = args.log_file.as_deref().map(open_log).transpose()?;
    let words = args.options.clone();
    let (json, detached) = (args.json || args.detached, args.detached);
    let (metrics, trace) = (args.metrics.clone(), args.trace.clone());
    let share = args.into_share();
    let terminal = detached.then(Terminal::new).transpose()?;
    let new_files = NewFiles::new(Success::new()?);
    let inherited = HashMap::new();
    let start = Start {
        shares: &[share],
        words: &words,
        inherited,
        sandbox_flags: None,
        logging,
        metrics: metrics.as_ref(),
        trace: trace.as_ref(),
    };
    start.run(BlockedSignals::hold()?, new_files, |up| {
        let announce = || announce(up, json);
        match terminal {
            Some(terminal) => terminal.leave(announce, log)?,
            None => {
                announce()?;
                log.map_or(Ok(()), rustix::stdio::dup2_stderr).context("cannot write to the log file")?;
            }
        }
        Ok(true)
    })
}

/// Reports that the mount exists: to a program as JSON, to a person in the log.
fn announce(up: &[ServedShare], json: bool) -> Result<()> {
    for served in up {
        let shown = served.status();
        if json {
            let mut out = std::io::stdout().lock();
            let explain = served.explain()?.json;
            let line = serde_json::json!({
                "pid": std::process::id(), "source": shown.source, "mountpoint": shown.mount, "explain": explain,
            });
            writeln!(out, "{line}").and_then(|()| out.flush()).context("cannot write to standard output")?;
        } else {
            tracing::info!(source = shown.source, mount = shown.mount, "mounted");
        }
    }
    Ok(())
}

fn open_log(path: &Path) -> Result<File> {
    let options = OpenOptions::new().append(true).create(true).mode(LOG_MODE).open(path);
    options.with_context(|| format!("cannot write to the log file {}", path.display()))
}

/// `--explain`: reports on a running mount, or on a temporary one.
fn explain(args: MountArgs) -> Result<()> {
    let explained = match &args.mountpoint {
        None => match running(&args.share.source) {
            Some(explained) => explained?,
            None => try_mount_somewhere(&args)?,
        },
        Some(mountpoint) => try_mount(&args, mountpoint)?,
    };
    // The server may be another user's program.
    let text = match args.json {
        true => printable_json(&explained.json.to_string()),
        false => explained.text.lines().map(|line| printable(line) + "\n").collect(),
    };
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", text.trim_end()).context("cannot write to standard output")
}

/// Returns the report of the server of a mount point, if it is one.
fn running(path: &Path) -> Option<Result<TransportReport>> {
    let Target { client, share, file, .. } = match Target::find(path) {
        Ok(target) => target,
        // Not a source: its server is dead, so requests to it would fail.
        Err(error) if is_in_mount(path) => return Some(Err(error)),
        Err(_) => return None,
    };
    let share = share.filter(|_| file.is_none())?;
    Some(client.ask(&Request::Explain { share }).map(|(explained, _)| explained))
}

/// The transport of a mount of `mem` on this machine, by the same trial as `ferry mount --explain`.
pub fn explain_mem() -> Result<TransportReport> {
    let invocation = groups::parse(["ferry", "mount", "--explain"].map(OsString::from))?;
    match invocation.cli.command {
        cli::Command::Mount(args) => try_mount_somewhere(&args),
        command => bail!("{command:?} is not a mount"),
    }
}

fn try_mount_somewhere(args: &MountArgs) -> Result<TransportReport> {
    let directory = tempfile::Builder::new().prefix("ferry-explain.").tempdir();
    let directory = directory.context("cannot make a mount point in the directory for temporary files")?;
    let explained = try_mount(args, directory.path())?;
    directory.close().context("cannot remove the mount point")?;
    Ok(explained)
}

/// Mounts, reads the report, and unmounts: only the kernel's answer to a mount shows the path.
fn try_mount(args: &MountArgs, mountpoint: &Path) -> Result<TransportReport> {
    let mountpoint: PathBuf = mountpoint.canonicalize().unwrap_or_else(|_| mountpoint.into());
    let mut share = Share { mount: Some(mountpoint.clone()), ..args.share.clone() };
    // The files must exist until the source is open.
    let _nameless = use_unnamed_files(&mut share)?;
    let mut sources = Sources::of(std::slice::from_ref(&share));
    let mut new_files = NewFiles::new(Success::new()?);
    sources.open(None, &mut new_files)?;
    let source = sources.begin()?.pop().context("a share has a source")?;
    let name = share.name();
    let options = exports::mount_options(&share, &name, &args.options, false);
    let mut serving = RunningExports::default();
    let seen = source::client_view(&share, std::sync::Arc::clone(&source))?;
    let export = serving.mount(&mountpoint, seen, options)?;
    let mut served = control::served_share(&share, &name, std::sync::Arc::clone(&source));
    let told = control::set_mounted(&mut served, &mountpoint, &export, source);
    let explained = told.and_then(|()| Ok(served.explain()?));
    drop((served, export));
    serving.stop();
    explained
}

/// Replaces files that opening the source would create by unnamed files, so that nothing stays behind.
fn use_unnamed_files(share: &mut Share) -> Result<Vec<File>> {
    let Kind::Pmem(image) = share.kind() else { return Ok(Vec::new()) };
    let mut files = Vec::new();
    if let Some((file, path)) = unnamed_file(&image)? {
        share.source = Kind::Pmem(path).word_in(Path::new("/"));
        files.push(file);
    }
    if let Some((file, path)) = share.tier2.as_deref().map(unnamed_file).transpose()?.flatten() {
        share.tier2 = Some(path);
        files.push(file);
    }
    Ok(files)
}

/// If the file is missing or empty: creates an unnamed file in the same directory; returns it with a path that leads to it.
fn unnamed_file(path: &Path) -> Result<Option<(File, PathBuf)>> {
    let is_new = match path.metadata() {
        Ok(found) => found.is_file() && found.len() == 0,
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    };
    if !is_new {
        return Ok(None);
    }
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::tempfile_in(directory);
    let file = file.with_context(|| format!("cannot make a file like {} for a trial", path.display()))?;
    let path = descriptor_path(&file);
    Ok(Some((file, path)))
}

/// Whether this program was started as a helper of mount(8).
pub fn is_helper(program: &OsStr) -> bool {
    let name = Path::new(program).file_name().unwrap_or_default();
    name == "mount.ferry" || name == "mount.fuse.ferry"
}
