//! Doing what the command line says.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;

use ferry_vfs::FileSystem;
use tracing_subscriber::EnvFilter;

use crate::command::{Command, MountArgs, VirtiofsArgs};
use crate::endings::Endings;
use crate::{Error, fuse, virtiofs};

/// Shows the file system until a signal comes or it is unmounted.
pub(crate) fn until_told(command: &Command, fs: Arc<dyn FileSystem>) -> Result<(), Error> {
    start_log(&command.place().log)?;
    // Before anything is there that would have to be cleaned up.
    let mut endings = Endings::catch(&Endings::ALL).map_err(Error::Signals)?;
    match command {
        Command::Mount(args) => mount(args, fs, &mut endings),
        Command::Virtiofs(args) => offer(args, fs, &mut endings),
    }
}

/// What the program is called: the name of a mount, unless the user has one, and the beginning of messages.
pub(crate) fn program() -> String {
    let path = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&path).file_name().unwrap_or_default().to_string_lossy();
    if name.is_empty() { "ferry-fs".into() } else { name.into_owned() }
}

fn mount(args: &MountArgs, fs: Arc<dyn FileSystem>, endings: &mut Endings) -> Result<(), Error> {
    let name = program();
    let options = fuse::Options {
        path: args.path.parse()?,
        cache: args.place.cache.into(),
        allow_other: args.allow_other,
        read_only: args.place.read_only,
        fsname: args.place.tag.clone().unwrap_or_else(|| name.clone()),
        subtype: name,
        ..fuse::Options::default()
    };
    let export = Arc::new(fuse::Export::mount(&args.dir, fs, options)?);
    let (watched, over) = (Arc::clone(&export), endings.over());
    let watch = move || {
        watched.wait();
        over.say();
    };
    std::thread::Builder::new().name("mount".into()).spawn(watch).map_err(fuse::Error::Threads)?;
    let shown = args.dir.display();
    say(&format!("mounted on {shown}; end with Ctrl-C or `umount {shown}`"));
    if args.explain {
        say(&format!("\n{}", export.explain()));
    }
    endings.wait();
    export.stop();
    Ok(())
}

fn offer(args: &VirtiofsArgs, fs: Arc<dyn FileSystem>, endings: &mut Endings) -> Result<(), Error> {
    let tag = args.place.tag.as_deref().map(str::parse).transpose()?;
    let options = virtiofs::Options {
        tag,
        name: program(),
        cache: args.place.cache.into(),
        read_only: args.place.read_only,
        ..virtiofs::Options::default()
    };
    let socket = ferry_vhost::Socket::bind(&args.socket)?;
    let export = virtiofs::Export::from_listener(socket.listener()?, fs, options)?;
    say(&format!("waiting for virtual machines on {}; end with Ctrl-C", args.socket.display()));
    endings.wait();
    export.stop();
    Ok(())
}

/// Tells whoever started the program that clients may come. That standard output is closed is no reason to end.
fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{}: {text}", program()).and_then(|()| out.flush());
}

fn start_log(level: &str) -> Result<(), Error> {
    let filter = EnvFilter::builder().parse(level).map_err(|_| Error::Log(level.into()))?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let log = log.with_ansi(std::io::stderr().is_terminal()).with_target(false).without_time();
    // An author who has started a log already keeps it.
    let _ = log.try_init();
    Ok(())
}
