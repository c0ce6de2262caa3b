//! Disks that are served: all are opened before the first one is served.

use std::collections::HashSet;
use std::fs;
use std::io::{IsTerminal, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferry_blk::Export;
use ferry_control::{Control, Logging, MetricsServer, MetricsSocket, ServedShare, ShareStatus, Trace, TraceFile};
use ferry_engine::TokenBucket;
use ferry_isolation::BlockedSignals;
use ferry_vhost::Socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::Args;
use crate::control::{self, OWNER};
use crate::launch::{self, SHUTDOWN_SIGNALS, Serve};
use crate::new_files::NewFiles;
use crate::paths::absolute;
use crate::recipes;
use crate::sandbox::{Confinement, SandboxFlags};
use crate::set_cmd;
use crate::socket::ListenSocket;

/// The time in which a disk should open; then its delay is logged, and the others start without it. Working storage is much
/// faster.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// A socket or descriptor serves only one disk. Locks protect the files.
pub fn refuse_duplicates(disks: &[Args]) -> Result<()> {
    let mut sockets = HashSet::new();
    let mut descriptors = HashSet::new();
    for disk in disks {
        if let Some(socket) = &disk.vhost_user {
            ensure!(sockets.insert(socket), "the socket {} is given twice; each disk needs its own", socket.display());
        }
        if let Some(fd) = disk.fd {
            ensure!(descriptors.insert(fd), "descriptor {fd} is given twice; each disk needs its own");
        }
    }
    Ok(())
}

/// Takes over the inherited sockets of disks. Call this before this process opens descriptors, which could get their numbers.
pub fn inherit(disks: &[Args]) -> Result<Vec<Option<ListenSocket>>> {
    disks.iter().map(|disk| disk.fd.map(ListenSocket::inherit).transpose()).collect()
}

/// Returns the socket of a disk: inherited or created; `None` for a disk that is only grown.
pub fn bind(disk: &Args, inherited: Option<ListenSocket>) -> Result<Option<ListenSocket>> {
    match (inherited, &disk.vhost_user) {
        (Some(bound), _) => Ok(Some(bound)),
        (None, Some(socket)) => ListenSocket::bind(socket).map(Some),
        (None, None) => Ok(None),
    }
}

/// The delay of storage from which an end is logged.
const SLOW: Duration = Duration::from_secs(1);

/// Waits until the storage of a disk responds; returns `false` if a signal to end arrives first.
///
/// A child process accesses the storage: a process that waits for storage cannot always be killed, and this one must end at once.
fn wait_for_storage(disk: &Args, signals: &BlockedSignals) -> Result<bool> {
    let begun = Instant::now();
    let file = disk.path()?.display();
    let Some(child) = ferry_isolation::begin_child()? else { probe_storage(disk) };
    let arrives = signals.descriptor()?;
    let mut left = Some(Timespec { tv_sec: PATIENCE.as_secs().cast_signed(), tv_nsec: 0 });
    while child.end()?.is_none() {
        let mut polled = [PollFd::new(&arrives, PollFlags::IN)];
        match poll(&mut polled, left.as_ref()) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno).context("cannot wait for a disk to open"),
            Ok(0) => {
                left = None;
                let seconds = PATIENCE.as_secs();
                tracing::warn!(
                    "{file} is not open after {seconds} s: its storage does not respond; the disk is served once it does"
                );
            }
            // The end of the child is a signal, too.
            Ok(_) => {
                let signal = signals.next()?.map(|arrival| arrival.signal.as_raw());
                if let Some(signal) = signal.filter(|signal| SHUTDOWN_SIGNALS.contains(signal)) {
                    // If another disk fails to start, the others are as fast as usual.
                    if begun.elapsed() >= SLOW {
                        tracing::warn!("{file} is not served: its storage had not responded before signal {signal}");
                    }
                    return Ok(false);
                }
            }
        }
    }
    if begun.elapsed() >= PATIENCE {
        tracing::info!("{file} responded after {} s", begun.elapsed().as_secs());
    }
    Ok(true)
}

/// Accesses a disk's file and directories, which blocks if their storage does not respond. Errors appear when the disk is opened.
fn probe_storage(disk: &Args) -> ! {
    let (file, directories) = disk.places();
    // Opening other kinds of files may block or have effects.
    let is_plain = |found: fs::Metadata| found.is_file() || found.file_type().is_block_device();
    if let Some(file) = file
        && fs::metadata(file).is_ok_and(is_plain)
    {
        let _ = fs::File::open(file).and_then(|mut file| file.read(&mut [0; 512]));
    }
    for directory in directories {
        let _ = fs::read_dir(directory).map(|mut entries| entries.next());
    }
    // Exits without the destructors of the parent's state.
    std::process::exit(0)
}

/// Opens and serves disks, confined; calls `ready` once they are up, which returns whether the start has succeeded. Returns the
/// exit status.
pub fn serve(
    disks: &[Args],
    sockets: Vec<Option<ListenSocket>>,
    (sandbox_flags, signals, logging): (&SandboxFlags, BlockedSignals, &Logging),
    new_files: NewFiles,
    ready: impl FnOnce(&Disks<'_>) -> Result<bool>,
) -> Result<u8> {
    let confinement = Confinement::of(sandbox_flags, &[], Vec::new(), disks.iter().any(|disk| disk.pin_memory))?;
    match Disks::open(disks, sockets, (&signals, logging), new_files)? {
        Some(opened) => launch::run(opened, Some(confinement), signals, ready),
        None => Ok(0),
    }
}

/// Open disks, which are served once they are started.
pub struct Disks<'a> {
    opened: Vec<OpenDisk<'a>>,
    sockets: Vec<ListenSocket>,
    exports: Vec<Export>,
    /// The control server, and its socket until it is started.
    control: (Option<Control>, Option<Socket>),
    /// The same for metrics.
    metrics: (Option<MetricsServer>, Option<MetricsSocket>),
    /// The trace, and its file until it is started.
    trace: (Option<Trace>, Option<TraceFile>),
    logging: Logging,
    /// The files that opening them has created.
    new_files: NewFiles,
}
struct OpenDisk<'a> {
    args: &'a Args,
    /// The options of its device, computed before the sandbox hides the machine.
    options: ferry_blk::Options,
    /// What limits its rates.
    bucket: Arc<TokenBucket>,
    disk: Arc<dyn ferry_vfs::Disk>,
    /// The same disk, if it is an image.
    image: Option<Arc<ferry_image::Disk>>,
}

impl<'a> Disks<'a> {
    /// Opens every disk and every socket, so that errors appear at once. Disks without a socket are only grown. Returns `None` if
    /// there is nothing to serve, or after a signal to end.
    pub fn open(
        disks: &'a [Args],
        inherited: Vec<Option<ListenSocket>>,
        (signals, logging): (&BlockedSignals, &Logging),
        new_files: NewFiles,
    ) -> Result<Option<Self>> {
        let mut all = Self {
            opened: Vec::new(),
            sockets: Vec::new(),
            exports: Vec::new(),
            control: (None, None),
            metrics: (None, None),
            trace: (None, None),
            logging: logging.clone(),
            new_files,
        };
        for (args, inherited) in disks.iter().zip(inherited) {
            let bound = bind(args, inherited)?;
            let is_offered = bound.is_some();
            all.sockets.extend(bound);
            if !wait_for_storage(args, signals)? {
                return Ok(None);
            }
            if !is_offered {
                args.only_resize()?;
                continue;
            }
            let (disk, image, made) = args.open()?;
            all.new_files.add(made);
            let bucket = TokenBucket::new(args.limit.as_ref().map(|limit| limit.rates));
            all.opened.push(OpenDisk { args, options: args.device_options(&bucket), bucket, disk, image });
            // The sandbox forbids this later. A process that serves several disks has one address.
            if let (Some(address), None) = (&args.metrics, &all.metrics.1) {
                all.metrics.1 = Some(MetricsSocket::bind(address)?);
            }
            if let (Some(options), None) = (&args.trace, &all.trace.1) {
                let file = TraceFile::create(options)?;
                all.new_files.add([file.try_clone()?]);
                all.trace.1 = Some(file);
            }
        }
        if all.opened.is_empty() {
            return Ok(None);
        }
        all.control.1 = Control::bind();
        Ok(Some(all))
    }

    /// Describes the disks, for programs.
    pub fn to_json(&self) -> Vec<serde_json::Value> {
        self.opened.iter().map(OpenDisk::to_json).collect()
    }

    /// Reports to a person that every disk is up, with QEMU's options.
    pub fn announce(&self) -> Result<()> {
        let mut out = std::io::stdout().lock();
        for one in &self.opened {
            let (path, bytes) = (one.args.path()?.display(), one.disk.geometry().bytes);
            match &one.args.vhost_user {
                Some(socket) if out.is_terminal() => {
                    let line = recipes::qemu_disk(&absolute(socket));
                    writeln!(out, "{path}: {line}").context("cannot write to standard output")?;
                }
                socket => tracing::info!(%path, bytes, socket = socket.as_deref().map(absolute), "serving a disk"),
            }
        }
        Ok(())
    }
}

impl Serve for Disks<'_> {
    fn leave(&mut self) -> &mut NewFiles {
        self.opened.clear();
        self.trace.1 = None;
        &mut self.new_files
    }

    fn take_over(&mut self) -> Result<()> {
        self.new_files.leave();
        self.control.1.iter_mut().for_each(Socket::leave_file);
        self.metrics.1.iter_mut().for_each(MetricsSocket::leave_file);
        self.sockets.iter_mut().try_for_each(ListenSocket::take_over)
    }

    fn start(&mut self) -> Result<()> {
        let mut served = Vec::new();
        for (one, socket) in self.opened.iter().zip(&self.sockets) {
            if let Some(image) = &one.image {
                image.begin();
            }
            let export = Export::start(socket.listener()?, Arc::clone(&one.disk), one.options.clone())?;
            served.push(one.served(&export));
            self.exports.push(export);
        }
        self.new_files.keep();
        let served: Arc<[ServedShare]> = served.into();
        self.trace.0 = self.trace.1.take().map(|file| Trace::start(file, &served)).transpose()?;
        if let Some(socket) = self.metrics.1.take() {
            self.metrics.0 = Some(MetricsServer::start(socket, Arc::clone(&served), OWNER.pid)?);
        }
        self.control.0 = Control::start(self.control.1.take(), served, self.logging.clone(), OWNER);
        Ok(())
    }

    fn stop(&mut self, _signal: Option<i32>) {
        (self.control, self.metrics) = ((None, None), (None, None));
        self.exports.drain(..).for_each(Export::stop);
        self.trace = (None, None);
    }
}

impl Drop for Disks<'_> {
    fn drop(&mut self) {
        self.stop(None);
    }
}

/// A disk has no files for `ferry log` to find.
struct NoFiles;

impl ferry_vfs::FileSystem for NoFiles {}

impl OpenDisk<'_> {
    /// What the control socket reports of it.
    fn served(&self, export: &Export) -> ServedShare {
        let file = self.args.name();
        let shown = ShareStatus {
            source: file.clone(),
            disk: self.args.vhost_user.as_deref().map(absolute),
            fd: self.args.fd,
            read_only: self.disk.features().read_only,
            queues: Some(self.options.queues),
            ..ShareStatus::default()
        };
        let mut served = ServedShare::new(shown, file, Arc::new(NoFiles));
        let (image, limiter) = (self.image.clone(), self.options.limiter.clone());
        let counts = move || {
            let mut counts: Vec<_> = image.as_ref().map(|image| image.counts()).unwrap_or_default();
            counts.extend(limiter.as_deref().map(control::waits));
            counts
        };
        control::offered_disk(&mut served, export, self.options.io, counts);
        let limit = self.args.limit.as_ref();
        set_cmd::limited(&mut served, limit, Arc::clone(&self.bucket), set_cmd::Bypass::default());
        set_cmd::polls(&mut served, self.options.poll.clone());
        served
    }

    fn to_json(&self) -> serde_json::Value {
        let (geometry, features) = (self.disk.geometry(), self.disk.features());
        serde_json::json!({
            "file": self.args.path().ok().map(absolute),
            "vhost_user": self.args.vhost_user.as_deref().map(absolute),
            "fd": self.args.fd,
            "bytes": geometry.bytes,
            "block_bytes": geometry.logical_block_bytes,
            "read_only": features.read_only,
            "discard": features.discard,
            "serial": self.disk.serial(),
        })
    }
}
