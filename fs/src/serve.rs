//! Runs the subcommands.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use ferry_control::{Control, Logging, Owner, ServedShare, ShareStatus, TransportReport};
use ferry_vfs::FileSystem;

use crate::command::{Command, MountArgs, VirtiofsArgs};
use crate::shutdown::ShutdownSignals;
use crate::{Error, fuse, virtiofs};

/// Serves the file system until a signal arrives or it is unmounted.
pub(crate) fn serve_until_signal(command: &Command, fs: Arc<dyn FileSystem>) -> Result<(), Error> {
    let logging = start_log(&command.common().log)?;
    // Before anything exists that a signal would leave behind.
    let mut signals = ShutdownSignals::catch(&ShutdownSignals::ALL).map_err(Error::Signals)?;
    match command {
        Command::Mount(args) => mount(args, fs, &mut signals, logging),
        Command::Virtiofs(args) => offer(args, fs, &mut signals, logging),
    }
}

/// Returns the program's name: the default name of a mount, and the prefix of messages.
pub(crate) fn program() -> String {
    let path = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&path).file_name().unwrap_or_default().to_string_lossy();
    if name.is_empty() { "ferry-fs".into() } else { name.into_owned() }
}

/// Lets `ferry log` show and change the log settings, if this process has installed the logger.
fn control(logging: Option<Logging>, served: ServedShare) -> Option<Control> {
    // Without a logger there is nothing to control, so no socket is created.
    let logging = logging?;
    Control::start(Control::bind(), vec![served].into(), logging, Owner::default())
}

fn mount(
    args: &MountArgs,
    fs: Arc<dyn FileSystem>,
    signals: &mut ShutdownSignals,
    logging: Option<Logging>,
) -> Result<(), Error> {
    let name = program();
    let source = args.common.tag.clone().unwrap_or_else(|| name.clone());
    let options = fuse::Options {
        path: args.path.parse()?,
        cache: args.common.cache.into(),
        allow_other: args.allow_other,
        read_only: args.common.read_only,
        fsname: source.clone(),
        subtype: name,
        ..fuse::Options::default()
    };
    // Before the mount covers it, and in the form of the mount table.
    let dir = args.dir.canonicalize().unwrap_or_else(|_| args.dir.clone());
    let export = Arc::new(fuse::Export::mount(&dir, Arc::clone(&fs), options)?);
    let shown = ShareStatus { source: source.clone(), read_only: args.common.read_only, ..ShareStatus::default() };
    let mut served = ServedShare::new(shown, source, fs);
    let text = export.explain().to_string();
    let json = serde_json::to_value(export.explain()).unwrap_or_default();
    let seen = Arc::downgrade(&export);
    let is_there = move || seen.upgrade().is_some_and(|export| !export.has_ended());
    served.mounted(dir.to_string_lossy().into_owned(), TransportReport { text, json }, is_there);
    let control = control(logging, served);
    let (watched, handle) = (Arc::clone(&export), signals.handle());
    let watch = move || {
        watched.wait();
        handle.shutdown();
    };
    std::thread::Builder::new().name("mount".into()).spawn(watch).map_err(fuse::Error::Threads)?;
    let shown = args.dir.display();
    say(&format!("mounted on {shown}; end with Ctrl-C or `umount {shown}`"));
    if args.explain {
        say(&format!("\n{}", export.explain()));
    }
    signals.wait();
    drop(control);
    export.stop();
    Ok(())
}

fn offer(
    args: &VirtiofsArgs,
    fs: Arc<dyn FileSystem>,
    signals: &mut ShutdownSignals,
    logging: Option<Logging>,
) -> Result<(), Error> {
    let tag = args.common.tag.as_deref().map(str::parse).transpose()?;
    let options = virtiofs::Options {
        tag,
        name: program(),
        cache: args.common.cache.into(),
        read_only: args.common.read_only,
        events: args.events,
        ..virtiofs::Options::default()
    };
    let socket = ferry_vhost::Socket::bind(&args.socket)?;
    let (queues, name) = (options.queues, options.name.clone());
    let export = virtiofs::Export::from_listener(socket.listener()?, Arc::clone(&fs), options)?;
    let path = std::path::absolute(&args.socket).unwrap_or_else(|_| args.socket.clone());
    let shown = ShareStatus {
        source: name.clone(),
        tag: args.common.tag.clone(),
        virtiofs: Some(path.to_string_lossy().into_owned()),
        read_only: args.common.read_only,
        queues: Some(queues),
        ..ShareStatus::default()
    };
    let control = control(logging, ServedShare::new(shown, name, fs));
    say(&format!("waiting for virtual machines on {}; end with Ctrl-C", args.socket.display()));
    if args.common.tag.is_none() {
        say("no --tag: QEMU sets the tag itself; User-mode Linux and crosvm need --tag NAME");
    }
    signals.wait();
    drop(control);
    export.stop();
    Ok(())
}

/// Reports on standard output that clients may connect. A closed standard output is not an error.
fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{}: {text}", program()).and_then(|()| out.flush());
}

/// An author's own logger takes precedence.
fn start_log(level: &str) -> Result<Option<Logging>, Error> {
    match Logging::start(level, false, None) {
        Ok(logging) => Ok(Some(logging)),
        Err(ferry_control::Error::Start(_)) => {
            tracing::debug!("ferry log is not available: the program has its own logger");
            Ok(None)
        }
        Err(error) => Err(Error::Log(error)),
    }
}
