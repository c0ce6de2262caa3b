//! `ferry share`, and the start of the servers of `ferry mount`.

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use ferry_control::{
    Control, Logging, MetricsAddress, MetricsServer, MetricsSocket, ServedShare, ShareStatus, Trace, TraceFile,
    TraceOptions,
};
use ferry_engine::RateLimiter;
use ferry_fs::ShutdownHandle;
use ferry_isolation::BlockedSignals;
use ferry_vfs::FileSystem;
use ferry_vhost::Socket;
use ferry_virtiofs::SessionStore;

use crate::control::{self, OWNER};
use crate::disk;
use crate::exports::{self, RunningExports};
use crate::flags::{Address, Kind, Share, limit};
use crate::launch::{self, SIGNAL_DISCARD_STATE, Serve};
use crate::new_files::NewFiles;
use crate::ninep::NinepSocket;
use crate::recipes;
use crate::sandbox::{self, Confinement, Inside, SandboxFlags};
use crate::service_manager;
use crate::set_cmd;
use crate::socket::ListenSocket;
use crate::source::{self, Sources};
use crate::state;
use crate::virtiofsd;

/// The prefix of the addresses of 9P devices.
const VHOST_USER: &str = "vhost-user:";

/// The input of a server of shares.
pub struct Start<'a> {
    pub shares: &'a [Share],
    /// The words of `-o`, for mounts.
    pub words: &'a [String],
    pub inherited: HashMap<u16, ListenSocket>,
    /// `None`: no sandbox.
    pub sandbox_flags: Option<&'a SandboxFlags>,
    pub logging: &'a Logging,
    /// Where metrics can be fetched.
    pub metrics: Option<&'a MetricsAddress>,
    /// The file of a trace.
    pub trace: Option<&'a TraceOptions>,
}

impl<'a> Start<'a> {
    /// Serves the shares; calls `ready` once all are up, which returns whether the start has succeeded. Returns the exit status.
    pub fn run(
        self,
        signals: BlockedSignals,
        new_files: NewFiles,
        ready: impl FnOnce(&[ServedShare]) -> Result<bool>,
    ) -> Result<u8> {
        let (shares, confinement) = self.prepare(new_files)?;
        launch::run(shares, confinement, signals, |shares| ready(&shares.up))
    }

    /// Creates all sockets, and opens what the sandbox will hide.
    fn prepare(mut self, mut new_files: NewFiles) -> Result<(Shares<'a>, Option<Confinement>)> {
        let flags = match self.sandbox_flags {
            Some(flags) if sandbox::fits(flags, self.shares)? => Some(flags),
            _ => None,
        };
        check_places(self.shares)?;
        let mut sources = Sources::of(self.shares);
        let confinement = flags.map(|flags| -> Result<Confinement> {
            // Errors in a source appear before a socket is created.
            sources.prepare(&mut new_files)?;
            Confinement::of(flags, self.shares, sources.access(), false)
        });
        let confinement = confinement.transpose()?;
        let sockets = Sockets::make(self.shares, std::mem::take(&mut self.inherited))?;
        let stores = state::open_all_stores(self.shares)?;
        // The sandbox forbids this later.
        let is_confined = confinement.is_some();
        let control = (None, is_confined.then(Control::bind).flatten());
        let metrics = (None, self.metrics.map(MetricsSocket::bind).transpose()?);
        service_manager::close_sockets();
        let trace = self.trace.map(TraceFile::create).transpose()?;
        new_files.add(trace.as_ref().map(TraceFile::try_clone).transpose()?);
        let trace = (None, trace);
        let (up, serving) = (Arc::default(), RunningExports::default());
        Ok((
            Shares {
                start: self,
                is_confined,
                control,
                metrics,
                trace,
                up,
                serving,
                sources,
                sockets: (sockets, stores),
                new_files,
            },
            confinement,
        ))
    }
}

/// The shares of a process. Fields are dropped in their order: exports before their sources.
struct Shares<'a> {
    start: Start<'a>,
    is_confined: bool,
    /// The control server, and its socket until it is started. Without a sandbox it is created then.
    control: (Option<Control>, Option<Socket>),
    /// The same for metrics.
    metrics: (Option<MetricsServer>, Option<MetricsSocket>),
    /// The trace, and its file until it is started.
    trace: (Option<Trace>, Option<TraceFile>),
    up: Arc<[ServedShare]>,
    serving: RunningExports,
    sources: Sources,
    /// With the state for the next server.
    sockets: (Sockets, Vec<Option<Arc<SessionStore>>>),
    new_files: NewFiles,
}

impl Serve for Shares<'_> {
    fn leave(&mut self) -> &mut NewFiles {
        self.sockets.1.clear();
        self.sources = Sources::default();
        self.trace.1 = None;
        &mut self.new_files
    }

    fn take_over(&mut self) -> Result<()> {
        self.sockets.0.take_over()?;
        self.new_files.leave();
        virtiofsd::leave_pid_file();
        self.control.1.iter_mut().for_each(Socket::leave_file);
        self.metrics.1.iter_mut().for_each(MetricsSocket::leave_file);
        Ok(())
    }

    fn open(&mut self, sandbox: Option<&mut Inside>) -> Result<()> {
        self.sources.open(sandbox, &mut self.new_files)
    }

    fn start(&mut self) -> Result<()> {
        let opened = self.sources.begin()?;
        self.sources.watch(self.start.shares)?;
        if let Some((share, _)) =
            self.start.shares.iter().zip(&opened).find(|(share, source)| share.events && !source.features().events)
        {
            bail!(
                "--events: {} sends no events: its server must be Ferry with --events, and there must be one \
                 connection to it",
                share.source.display()
            );
        }
        let sockets = std::mem::take(&mut self.sockets);
        self.up = start(self.start.shares, &opened, sockets, self.start.words, &mut self.serving)?.into();
        self.trace.0 = self.trace.1.take().map(|file| Trace::start(file, &self.up)).transpose()?;
        self.new_files.keep();
        if let Some(socket) = self.metrics.1.take() {
            self.metrics.0 = Some(MetricsServer::start(socket, Arc::clone(&self.up), OWNER.pid)?);
        }
        let (up, logging) = (Arc::clone(&self.up), self.start.logging.clone());
        let socket = if self.is_confined { self.control.1.take() } else { Control::bind() };
        self.control.0 = Control::start(socket, up, logging, OWNER);
        Ok(())
    }

    fn notify_when_done(&self, over: ShutdownHandle) -> Result<()> {
        self.serving.notify_when_done(over)
    }

    fn stop(&mut self, signal: Option<i32>) {
        (self.control, self.metrics) = ((None, None), (None, None));
        self.up = Arc::default();
        match signal {
            Some(SIGNAL_DISCARD_STATE) => self.serving.end(ferry_virtiofs::Export::stop_for_good),
            _ => self.serving.stop(),
        }
        // Requests until here are part of it.
        self.trace = (None, None);
    }
}

/// Takes inherited descriptors first: files that this process opens could have their numbers.
pub fn inherit(shares: &[Share]) -> Result<HashMap<u16, ListenSocket>> {
    shares.iter().filter_map(|share| share.fd).map(|fd| Ok((fd, ListenSocket::inherit(fd)?))).collect()
}

/// Reports missing places before a source is opened, which may create a file.
fn check_places(shares: &[Share]) -> Result<()> {
    let is_missing = |path: &Path| path.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound);
    for share in shares {
        if let Some(mount) = share.mount.as_ref().filter(|mount| is_missing(mount)) {
            return Err(ferry_fuse::MountError::Missing(mount.clone()).into());
        }
        let directory =
            |socket: &PathBuf| socket.parent().filter(|directory| !directory.as_os_str().is_empty()).map(is_missing);
        if let Some(socket) = share.virtiofs.as_ref().filter(|socket| directory(socket) == Some(true)) {
            return Err(ferry_vhost::SocketError::NoDirectory(socket.clone()).into());
        }
    }
    Ok(())
}

/// A socket, descriptor or mount point serves only one share or disk.
pub fn refuse_duplicates(shares: &[Share], disks: &[disk::Args]) -> Result<()> {
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
    let conflict = limit::group_conflict(shares.iter().filter_map(|share| share.limit.as_ref()));
    if let Some(why) = conflict.or_else(|| source::quota_conflict(shares)) {
        bail!(why);
    }
    let mut given = HashSet::new();
    for share in shares {
        let of_path = |what, path: &Option<PathBuf>, how| path.clone().map(|path| (what, path.into_os_string(), how));
        let address = share.ninep.as_ref().filter(|address| !address.is_any());
        let places = [
            of_path("the socket", &share.virtiofs, "twice"),
            of_path("the directory", &share.state, "twice as --state"),
            of_path("the mount point", &share.mount, "twice"),
            address.map(|address| ("the address", address.to_string().into(), "twice")),
            share.fd.map(|fd| ("descriptor", fd.to_string().into(), "twice")),
        ];
        for (what, place, how) in places.into_iter().flatten() {
            let shown = place.display().to_string();
            ensure!(given.insert((what, place)), "{what} {shown} is given {how}; each share needs its own");
        }
        if let Some(state) = &share.state {
            let is_device = share.virtiofs.is_some() || share.fd.is_some();
            ensure!(is_device, "--state {}: it is for guests; add --virtiofs SOCKET", state.display());
            let is_dir = matches!(share.kind(), Kind::Dir(_));
            let source = share.source.display();
            ensure!(is_dir, "--state {}: {source} is not a directory, and ends with its server", state.display());
        }
    }
    Ok(())
}

/// The sockets of shares, in their order.
#[derive(Default)]
struct Sockets {
    bound: Vec<Option<ListenSocket>>,
    ninep: Vec<Option<NinepSocket>>,
}

impl Sockets {
    fn make(shares: &[Share], mut inherited: HashMap<u16, ListenSocket>) -> Result<Self> {
        let bound = |share: &Share| match (&share.virtiofs, share.fd) {
            (Some(socket), _) => ListenSocket::bind_for(socket, share.socket_group.as_deref()).map(Some),
            (None, Some(fd)) => Ok(inherited.remove(&fd)),
            (None, None) => Ok(None),
        };
        Ok(Self {
            bound: shares.iter().map(bound).collect::<Result<_>>()?,
            ninep: shares.iter().map(NinepSocket::of).collect::<Result<_>>()?,
        })
    }

    /// Serves them in place of the process that created them, which removes their files.
    fn take_over(&mut self) -> Result<()> {
        let ninep = self.ninep.iter_mut().flatten().filter_map(|socket| socket.bound.as_mut());
        ninep.chain(self.bound.iter_mut().flatten()).try_for_each(ListenSocket::take_over)
    }
}

/// Starts the exports. Every source is open and every socket exists already, so errors appear before the first share is served.
fn start(
    shares: &[Share],
    opened: &[Arc<dyn FileSystem>],
    (Sockets { bound, ninep }, kept): (Sockets, Vec<Option<Arc<SessionStore>>>),
    words: &[String],
    serving: &mut RunningExports,
) -> Result<Vec<ServedShare>> {
    let mut up = Vec::new();
    let sockets = bound
        .into_iter()
        .zip(ninep)
        .zip(kept)
        .zip(exports::names(shares))
        .zip(limit::buckets(shares.iter().map(|share| share.limit.as_ref())));
    for ((share, opened_source), ((((bound, listening), kept), name), bucket)) in shares.iter().zip(opened).zip(sockets)
    {
        // Each export is a member of the bucket.
        let limiter = || RateLimiter::new(&bucket);
        let mut bypass = set_cmd::Bypass::default();
        let mut cached = Vec::new();
        // That of all its devices.
        let poll = share.poll();
        let polls = bound.is_some() || share.ninep.is_some();
        let mut served = control::served_share(share, &name, Arc::clone(opened_source));
        let source = source::client_view(share, Arc::clone(opened_source))?;
        if let Some(listening) = listening {
            served.listens(&listening.address);
            let limiter = limiter();
            let export = serving
                .serve_9p(listening, Arc::clone(&source), share, (&name, Arc::clone(&limiter), poll.clone()))
                .with_context(|| format!("cannot share {}", share.source.display()))?;
            let is_device = matches!(share.ninep, Some(Address::VhostUser(_)));
            control::offered_9p(&mut served, export, (Arc::clone(opened_source), limiter), is_device);
        }
        if let Some(bound) = bound {
            let limiter = Some(limiter());
            let store = kept.clone();
            let options = ferry_virtiofs::Options {
                kept,
                limiter,
                poll: poll.clone(),
                name: name.clone(),
                ..exports::device_options(share)
            };
            let export = serving
                .start(bound, Arc::clone(&source), options)
                .with_context(|| format!("cannot share {}", share.source.display()))?;
            control::offered(&mut served, export, Arc::clone(opened_source), store);
            bypass.window = Some(export.window());
            cached.push(Arc::downgrade(export.share()));
        }
        if let Some(mountpoint) = &share.mount {
            let options = exports::mount_options(share, &name, words, is_shared(shares, opened, opened_source));
            let options = ferry_fuse::Options { limiter: Some(limiter()), ..options };
            // Before the mount covers it, and as the mount table has it.
            let mountpoint = mountpoint.canonicalize().unwrap_or_else(|_| mountpoint.clone());
            let export = serving.mount(&mountpoint, source, options)?;
            control::set_mounted(&mut served, &mountpoint, &export, Arc::clone(opened_source))?;
            bypass.passthrough = export.explain().passthrough.used;
            cached.push(Arc::downgrade(export.share()));
        }
        set_cmd::limited(&mut served, share.limit.as_ref(), bucket, bypass);
        if !cached.is_empty() {
            set_cmd::keeps(&mut served, &cached);
        }
        if polls {
            set_cmd::polls(&mut served, poll);
        }
        up.push(served);
    }
    Ok(up)
}

/// Whether a source has several exports.
fn is_shared(shares: &[Share], opened: &[Arc<dyn FileSystem>], source: &Arc<dyn FileSystem>) -> bool {
    let exports = shares.iter().zip(opened).filter(|(_, other)| Arc::ptr_eq(other, source)).map(|(share, _)| {
        let is_device = share.virtiofs.is_some() || share.fd.is_some();
        [share.mount.is_some(), is_device, share.ninep.is_some()].into_iter().map(usize::from).sum::<usize>()
    });
    exports.sum::<usize>() > 1
}

/// Logged if the device does not offer its tag.
const NO_TAG: &str = "sharing: the guest mounts the tag of the VMM's command line (QEMU, cloud-hypervisor); User-mode Linux and crosvm \
     read the tag from the device, which needs --tag NAME";

/// Returns the status of shares, for programs.
pub fn statuses(up: &[ServedShare]) -> serde_json::Value {
    serde_json::json!(up.iter().map(ServedShare::status).collect::<Vec<_>>())
}

/// Reports to a person that every share is up, with QEMU's options.
pub fn announce(shares: &[Share], up: &[ServedShare]) -> Result<()> {
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
