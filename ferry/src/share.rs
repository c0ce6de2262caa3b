//! `ferry share`, and what it has in common with `ferry mount`: serve until there is a reason to end.

use std::collections::HashMap;
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use anyhow::{Context, Result, bail, ensure};
use ferry_control::{Control, Logging, ServedShare, ShareStatus};
use ferry_fs::ShutdownSignals;
use ferry_isolation::BlockedSignals;
use ferry_vfs::FileSystem;
use ferry_vhost::Socket;
use ferry_virtiofs::SessionStore;
use rustix::process::Signal;

use crate::cli::Share;
use crate::control::{self, OWNER};
use crate::disk;
use crate::exports::{self, Serving};
use crate::new_files::{NewFiles, Success};
use crate::ninep::Listening;
use crate::processes::{self, Report};
use crate::recipes;
use crate::sandbox::{self, Confinement, Entered, SandboxFlags};
use crate::socket::Bound;
use crate::source::{self, Kind, Sources};
use crate::state;
use crate::status::misuse;
use crate::virtiofsd;

/// What ends a share or disk. Not SIGHUP: one that was started with nohup outlives its terminal.
pub const ENDINGS: [i32; 3] = [Signal::TERM.as_raw(), Signal::INT.as_raw(), FOR_GOOD];

/// What ends a share with all that `--state` would keep for the next server.
const FOR_GOOD: i32 = Signal::QUIT.as_raw();

/// What the addresses of 9P devices begin with.
const VHOST_USER: &str = "vhost-user:";

/// Shares sources, and offers disks, until SIGTERM or SIGINT, or until nothing is left to serve. Returns the status to end with.
pub fn run(
    shares: &[Share],
    disks: &[disk::Args],
    (sandbox_flags, json): (&SandboxFlags, bool),
    logging: &Logging,
) -> Result<u8> {
    refuse_duplicates(shares, disks).map_err(misuse)?;
    let inherited = inherit(shares)?;
    if !disks.is_empty() {
        let inherited_disks = disk::inherit(disks)?;
        // None gets lost until they are caught, on whichever side.
        let signals = BlockedSignals::hold()?;
        // Clients check that the process which made the socket is the one that users know.
        let control = if shares.is_empty() { None } else { Control::bind() };
        let beside = Beside { shares, inherited, sandbox_flags, json, logging, control };
        return processes::run(Some(beside), (disks, inherited_disks), (sandbox_flags, json), signals);
    }
    let once = shares.iter().any(|share| share.once);
    let ready = |up: &[ServedShare]| {
        match json {
            true => say(&serde_json::json!({ "pid": sandbox::pid(), "shares": shown_all(up) }))?,
            false => announce(shares, up)?,
        }
        if once {
            // virtiofsd's words, for which Kata waits.
            tracing::info!("Waiting for vhost-user socket connection...");
        }
        Ok(true)
    };
    let new_files = NewFiles::until(Success::new()?);
    match sandbox::fits(sandbox_flags, shares)? {
        true => serve_confined(
            shares,
            inherited,
            (sandbox_flags, BlockedSignals::hold()?),
            (logging, None),
            new_files,
            ready,
        ),
        false => serve(shares, inherited, (&[], None), (logging, None), new_files, ready).map(|()| 0),
    }
}

/// Shares that stand in one file with disks, each of which has a process of its own, as the shares have together.
pub struct Beside<'a> {
    shares: &'a [Share],
    inherited: HashMap<u16, Bound>,
    sandbox_flags: &'a SandboxFlags,
    json: bool,
    logging: &'a Logging,
    control: Option<ferry_vhost::Socket>,
}

impl Beside<'_> {
    /// Whether there are any.
    pub fn is_empty(&self) -> bool {
        self.shares.is_empty()
    }

    /// The control socket, for the process that users know, which removes its file in the end.
    pub fn into_control(self) -> Option<ferry_vhost::Socket> {
        self.control
    }

    /// Serves them, in a process of their own. Returns the status to end with.
    pub fn serve(self, signals: BlockedSignals, report: Report) -> Result<u8> {
        let Self { shares, inherited, sandbox_flags, json, logging, mut control } = self;
        if let Some(control) = &mut control {
            control.leave_file();
        }
        let (report, new_files) = report.split()?;
        let ready = |up: &[ServedShare]| {
            let is_told = report.tell(&shown_all(up))?;
            if is_told && !json {
                announce(shares, up)?;
            }
            Ok(is_told)
        };
        match sandbox::fits(sandbox_flags, shares)? {
            true => serve_confined(shares, inherited, (sandbox_flags, signals), (logging, control), new_files, ready),
            false => serve(shares, inherited, (&[], Some(signals)), (logging, control), new_files, ready).map(|()| 0),
        }
    }
}

/// Serves shares from within walls. In the end there may be two processes of it, which both return: one outside of the walls, which
/// waits, with the status of the other.
fn serve_confined(
    shares: &[Share],
    inherited: HashMap<u16, Bound>,
    (sandbox_flags, signals): (&SandboxFlags, BlockedSignals),
    (logging, control): (&Logging, Option<ferry_vhost::Socket>),
    mut new_files: NewFiles,
    ready: impl FnOnce(&[ServedShare]) -> Result<bool>,
) -> Result<u8> {
    check_places(shares)?;
    // What is wrong with a source is said before anything is made.
    let mut sources = source::prepare(shares, &mut new_files)?;
    let confinement = Confinement::of(sandbox_flags, shares, &sources, &[])?;
    let mut sockets = Sockets::make(shares, inherited)?;
    let kept = state::open_all_stores(shares)?;
    let mut control = control.or_else(Control::bind);
    let mut inside = match confinement.enter()? {
        Entered::Outside(outside) => {
            // What is kept is the other's: files that it closes are to be closed.
            drop((kept, sources, ready));
            return outside.wait(&signals, &mut new_files);
        }
        Entered::Inside(inside) => inside,
    };
    if inside.is_split() {
        sockets.take_over()?;
        new_files.take_over();
        virtiofsd::leave_pid_file();
        if let Some(control) = &mut control {
            control.leave_file();
        }
    }
    let endings = ShutdownSignals::catch(&ENDINGS).context("cannot catch signals")?;
    signals.release()?;
    for (number, source) in sources.iter_mut().enumerate() {
        let connector = inside.connector(number);
        source.arrive(inside.place(number), connector, &mut new_files)?;
    }
    inside.close(shares)?;
    let opened = source::begin(sources, &mut new_files)?;
    let mut serving = Serving::default();
    let up = start(shares, &opened, (sockets, kept), &[], &mut serving)?;
    new_files.keep();
    serve_until(endings, up, control, serving, logging, ready).map(|()| 0)
}

/// Serves shares. Calls `ready` when all are up; it returns whether the start has succeeded. `words` are those of `-o`, for mounts; `signals`
/// are the blocked ones, if any.
pub fn serve(
    shares: &[Share],
    inherited: HashMap<u16, Bound>,
    (words, signals): (&[String], Option<BlockedSignals>),
    (logging, control): (&Logging, Option<ferry_vhost::Socket>),
    mut new_files: NewFiles,
    ready: impl FnOnce(&[ServedShare]) -> Result<bool>,
) -> Result<()> {
    check_places(shares)?;
    let endings = ShutdownSignals::catch(&ENDINGS).context("cannot catch signals")?;
    signals.map_or(Ok(()), BlockedSignals::release)?;

    // Before the exports, so that they are dropped after them.
    let mut sources = Sources::beside(mount_points(shares));
    let mut serving = Serving::default();
    let opened: Vec<_> = shares.iter().map(|share| sources.open(share, &mut new_files)).collect::<Result<_>>()?;
    sources.begin();
    shares.iter().zip(&opened).try_for_each(|(share, source)| sources.watch(share, source))?;
    let sockets = Sockets::make(shares, inherited)?;
    let kept = state::open_all_stores(shares)?;
    let up = start(shares, &opened, (sockets, kept), words, &mut serving)?;
    new_files.keep();
    serve_until(endings, up, control.or_else(Control::bind), serving, logging, ready)
}

/// Inherited descriptors come first: nothing has been opened yet that could have their numbers.
fn inherit(shares: &[Share]) -> Result<HashMap<u16, Bound>> {
    shares.iter().filter_map(|share| share.fd).map(|fd| Ok((fd, Bound::inherit(fd)?))).collect()
}

/// Goes on serving until there is a reason to end.
fn serve_until(
    mut endings: ShutdownSignals,
    up: Vec<ServedShare>,
    control: Option<Socket>,
    mut serving: Serving,
    logging: &Logging,
    ready: impl FnOnce(&[ServedShare]) -> Result<bool>,
) -> Result<()> {
    let up: Arc<[ServedShare]> = up.into();
    let control = Control::start(control, Arc::clone(&up), logging.clone(), OWNER);
    let mut signal = None;
    if ready(&up)? {
        serving.when_over(endings.over())?;
        signal = endings.wait();
        match signal {
            Some(signal) => tracing::info!(signal, "ending: serving what is under way"),
            None => tracing::info!("ending: nobody is left to serve"),
        }
    }
    drop(control);
    drop(up);
    match signal {
        Some(FOR_GOOD) => serving.stop_for_good(),
        _ => serving.stop(),
    }
    Ok(())
}

/// Places that are missing are named before a source is opened, which may make an image.
fn check_places(shares: &[Share]) -> Result<()> {
    let is_missing = |path: &Path| path.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound);
    for share in shares {
        if let Some(mount) = share.mount.as_ref().filter(|mount| is_missing(mount)) {
            return Err(ferry_fuse::MountError::Missing { path: mount.clone() }.into());
        }
        let folder = |socket: &PathBuf| socket.parent().filter(|folder| !folder.as_os_str().is_empty()).map(is_missing);
        if let Some(socket) = share.virtiofs.as_ref().filter(|socket| folder(socket) == Some(true)) {
            return Err(ferry_vhost::SocketError::NoFolder(socket.clone()).into());
        }
    }
    Ok(())
}

/// A socket, descriptor or mount point can serve one share or disk only.
fn refuse_duplicates(shares: &[Share], disks: &[disk::Args]) -> Result<()> {
    disk::refuse_duplicates(disks)?;
    for share in shares {
        let of_a_disk = |socket: &&PathBuf| disks.iter().any(|disk| disk.vhost_user.as_ref() == Some(*socket));
        if let Some(socket) = share.virtiofs.as_ref().filter(of_a_disk) {
            bail!("the socket {} is given for a share and a disk; each needs its own", socket.display());
        }
        if let Some(fd) = share.fd.filter(|fd| disks.iter().any(|disk| disk.fd == Some(*fd))) {
            bail!("descriptor {fd} is given for a share and a disk; each needs its own");
        }
    }
    for (at, share) in shares.iter().enumerate() {
        let before = &shares[..at];
        if let Some(socket) = &share.virtiofs {
            let twice = before.iter().any(|other| other.virtiofs.as_ref() == Some(socket));
            ensure!(!twice, "the socket {} is given twice; each share needs its own", socket.display());
        }
        if let Some(state) = &share.state {
            let twice = before.iter().any(|other| other.state.as_ref() == Some(state));
            ensure!(!twice, "the folder {} is given twice as --state; each share needs its own", state.display());
            let is_device = share.virtiofs.is_some() || share.fd.is_some();
            ensure!(is_device, "--state {}: it is for guests; add --virtiofs SOCKET", state.display());
            let is_dir = matches!(share.kind(), Kind::Dir(_));
            let source = share.source.display();
            ensure!(is_dir, "--state {}: {source} is no directory, and ends with its server", state.display());
        }
        if let Some(mount) = &share.mount {
            let twice = before.iter().any(|other| other.mount.as_ref() == Some(mount));
            ensure!(!twice, "the mount point {} is given twice; each share needs its own", mount.display());
        }
        if let Some(address) = share.ninep.as_ref().filter(|address| !address.is_any()) {
            let twice = before.iter().any(|other| other.ninep.as_ref() == Some(address));
            ensure!(!twice, "the address {address} is given twice; each share needs its own");
        }
        if let Some(fd) = share.fd {
            let twice = before.iter().any(|other| other.fd == Some(fd));
            ensure!(!twice, "descriptor {fd} is given twice; each share needs its own");
        }
    }
    Ok(())
}

/// Where this process mounts, in the words of the table of mounts.
fn mount_points(shares: &[Share]) -> Vec<PathBuf> {
    let given = shares.iter().filter_map(|share| share.mount.as_deref());
    given.map(|path| path.canonicalize().unwrap_or_else(|_| path.into())).collect()
}

/// The sockets of shares, in their order.
struct Sockets {
    bound: Vec<Option<Bound>>,
    ninep: Vec<Option<Listening>>,
}

impl Sockets {
    /// Makes all of them.
    fn make(shares: &[Share], mut inherited: HashMap<u16, Bound>) -> Result<Self> {
        let bound = |share: &Share| match (&share.virtiofs, share.fd) {
            (Some(socket), _) => Bound::bind_for(socket, share.socket_group.as_deref()).map(Some),
            (None, Some(fd)) => Ok(inherited.remove(&fd)),
            (None, None) => Ok(None),
        };
        Ok(Self {
            bound: shares.iter().map(bound).collect::<Result<_>>()?,
            ninep: shares.iter().map(Listening::of).collect::<Result<_>>()?,
        })
    }

    /// Serves them in the place of the process that made them, which removes their files.
    fn take_over(&mut self) -> Result<()> {
        self.bound.iter_mut().flatten().try_for_each(Bound::take_over)?;
        self.ninep.iter_mut().flatten().try_for_each(Listening::take_over)
    }
}

/// Every source was opened, and every socket made, before the first share is served: what is wrong shows at once.
fn start(
    shares: &[Share],
    opened: &[Arc<dyn FileSystem>],
    (Sockets { bound, ninep }, kept): (Sockets, Vec<Option<Arc<SessionStore>>>),
    words: &[String],
    serving: &mut Serving,
) -> Result<Vec<ServedShare>> {
    let mut up = Vec::new();
    let sockets = bound.into_iter().zip(ninep).zip(kept).zip(exports::names(shares));
    for ((share, opened_source), (((bound, listening), kept), name)) in shares.iter().zip(opened).zip(sockets) {
        let mut served = control::served(share, &name, Arc::clone(opened_source));
        let source = source::as_clients_see(share, Arc::clone(opened_source))?;
        if let Some(listening) = listening {
            served.listens(listening.address());
            serving
                .serve_9p(listening, Arc::clone(&source), share, &name)
                .with_context(|| format!("cannot share {}", share.source.display()))?;
        }
        if let Some(bound) = bound {
            let options = ferry_virtiofs::Options { kept, name: name.clone(), ..exports::device_options(share) };
            serving
                .start(bound, Arc::clone(&source), options)
                .with_context(|| format!("cannot share {}", share.source.display()))?;
        }
        if let Some(mountpoint) = &share.mount {
            let options = exports::mount_options(share, &name, words, is_shared(shares, opened, opened_source));
            // Before it is covered, and in the words of the table of mounts.
            let mountpoint = mountpoint.canonicalize().unwrap_or_else(|_| mountpoint.clone());
            let export = serving.mount(&mountpoint, source, options)?;
            control::mounted(&mut served, &mountpoint, &export)?;
        }
        up.push(served);
    }
    Ok(up)
}

/// Whether a source goes through several exports.
fn is_shared(shares: &[Share], opened: &[Arc<dyn FileSystem>], source: &Arc<dyn FileSystem>) -> bool {
    let exports = shares.iter().zip(opened).filter(|(_, other)| Arc::ptr_eq(other, source)).map(|(share, _)| {
        let is_device = share.virtiofs.is_some() || share.fd.is_some();
        [share.mount.is_some(), is_device, share.ninep.is_some()].into_iter().map(usize::from).sum::<usize>()
    });
    exports.sum::<usize>() > 1
}

/// What a guest mounts, where the device does not tell it.
const NO_TAG: &str = "sharing: its guest mounts the tag that the VMM's command line gives (QEMU, cloud-hypervisor); User-mode Linux and crosvm \
     ask the device, and can mount it only with --tag NAME";

/// What a program is told of shares.
fn shown_all(up: &[ServedShare]) -> serde_json::Value {
    serde_json::json!(up.iter().map(ServedShare::status).collect::<Vec<_>>())
}

/// Says a line to a program.
pub fn say(line: &serde_json::Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("cannot write to standard output")
}

/// Says to a person that every share is up, as what to give QEMU.
fn announce(shares: &[Share], up: &[ServedShare]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let shown = up.iter().map(ServedShare::status);
    for (share, ShareStatus { source, tag, virtiofs, fd, mount, queues, ninep, .. }) in shares.iter().zip(shown) {
        if let Some(mount) = mount {
            tracing::info!(source, mount, "mounted");
        }
        match (ninep.as_deref(), tag) {
            (Some(address), Some(tag)) if out.is_terminal() && address.starts_with(VHOST_USER) => {
                let line = recipes::qemu_9p(&address[VHOST_USER.len()..], tag);
                writeln!(out, "{source} as {tag}, by 9P: {line}").context("cannot write to standard output")?;
            }
            (Some(address), _) => tracing::info!(source, address, "serving 9P"),
            (None, _) => {}
        }
        match (virtiofs, tag, queues) {
            (Some(socket), Some(tag), Some(queues)) if out.is_terminal() => {
                let line = recipes::qemu(socket, tag, *queues);
                writeln!(out, "{source} as {tag}: {line}").context("cannot write to standard output")?;
            }
            (None, ..) if fd.is_none() => {}
            (socket, tag, _) if share.tag.is_some() => tracing::info!(source, tag, socket, fd, "sharing"),
            (socket, ..) => tracing::info!(source, socket, fd, "{NO_TAG}"),
        }
    }
    Ok(())
}

/// Where this process was started.
static HERE: LazyLock<PathBuf> = LazyLock::new(|| std::env::current_dir().unwrap_or_default());

/// Where this process was started, also after it has left that folder; empty if that has no path any more. The command line is
/// read with it, before anything else.
pub fn here() -> &'static Path {
    &HERE
}

/// A path as whoever reads it needs it, wherever that is.
pub fn shown(path: &Path) -> String {
    let path = here().join(path);
    std::path::absolute(&path).unwrap_or(path).to_string_lossy().into_owned()
}
