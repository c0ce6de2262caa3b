//! A mounted source.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferry_serve::Share;
use ferry_vfs::{Errno, Features, FileSystem};
use ferry_wire::fuse::WRITE_BYTES_MAX;
use rustix::fs::{AtFlags, StatxFlags};
use rustix::mount::UnmountFlags;

use crate::connection::{Connection, ConnectionEnd};
use crate::control::{AbortSwitch, read_ahead};
use crate::devfuse::Readers;
use crate::device::Device;
use crate::explain::{Explanation, Verdict};
use crate::handshake::{RequestedOptions, negotiate_init, share_options};
use crate::interrupted::Interrupted;
use crate::mountpoint::Mountpoint;
use crate::notify::Notifier;
use crate::resume::{self, Resumable};
use crate::stats::{AllCounters, Stats};
use crate::uring::Rings;
use crate::{Cache, MountError, MountOptions, Options, Path};
use ferry_engine::{Monitor, MonitorHandle};
use ferry_vfs::sync::lock;

/// With io_uring, /dev/fuse only carries FORGET and INTERRUPT; another reader is started if this one is blocked.
const READERS_BESIDE_RINGS: usize = 1;

/// Descriptors that must be left for files once the mount is complete.
const DESCRIPTORS_SPARE: usize = 4;

/// How long users of open files have to finish when a mount is stopped.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// The interval of unmount attempts meanwhile.
const STOP_AGAIN: Duration = Duration::from_millis(20);

/// How long threads have to return after the end of the connection. A thread blocked in the source may never return.
const THREADS_PATIENCE: Duration = Duration::from_secs(5);

/// Why a source cannot be mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of the mount point, or missing permission to mount.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// [`Path::Uring`] was required.
    #[error("FUSE over io_uring was requested but is not available: {reason}")]
    NoUring {
        /// Why, and what would help.
        reason: String,
    },
    /// [`Options::passthrough`] was required.
    #[error("passthrough was requested but is not available: {reason}")]
    NoPassthrough {
        /// Why, and what would help.
        reason: String,
    },
    /// The first messages.
    #[error("FUSE INIT failed: {0}")]
    Handshake(std::io::Error),
    /// Threads.
    #[error(
        "cannot start the threads of the mount: {0}; raise the limits of threads and descriptors (ulimit -u, ulimit -n)"
    )]
    Threads(std::io::Error),
}

/// A mounted source, until this is dropped or the mount is unmounted.
pub struct Export {
    connection: Arc<Connection>,
    source: Arc<dyn FileSystem>,
    mountpoint: Mutex<Mountpoint>,
    rings: Option<Rings>,
    explanation: Explanation,
    notifier: Mutex<Option<Notifier>>,
    monitor: Mutex<Option<Monitor>>,
    device_number: u32,
    /// Opened at the start: it may require a private mount, whose unmount waits while clients keep all CPUs busy.
    switch: Option<AbortSwitch>,
    stopped: AtomicBool,
    /// INIT, if the next server can resume the connection.
    init: Option<Vec<u8>>,
    /// The machine, not an option, is why requests go through /dev/fuse.
    lacks_ring: bool,
}

/// Threads that read /dev/fuse for a source with blocking calls: starting one first delays a request by milliseconds.
const READERS_WAITING: usize = 8;

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Export").field("mountpoint", &self.mountpoint).field("path", &self.explanation.path).finish()
    }
}

impl Export {
    /// Mounts a source, and serves it on separate threads.
    ///
    /// # Errors
    ///
    /// [`Error`]; nothing stays mounted.
    pub fn mount(mountpoint: &std::path::Path, source: Arc<dyn FileSystem>, options: Options) -> Result<Self, Error> {
        Self::mount_with(mountpoint, source, &options, WRITE_BYTES_MAX as usize)
    }

    /// Mounts with this payload size in the entries of rings.
    fn mount_with(
        mountpoint: &std::path::Path,
        source: Arc<dyn FileSystem>,
        options: &Options,
        ring_payload_bytes: usize,
    ) -> Result<Self, Error> {
        let requested = Arc::new(RequestedOptions::new(options, source.features())?);
        let (fd, mountpoint) = match &options.resumed {
            Some(resumed) => {
                let device = resumed.device.try_clone().map_err(Error::Threads)?;
                (device, Mountpoint::resumed(mountpoint, resumed.connection)?)
            }
            None => Mountpoint::mount(mountpoint, &mount_options(options, source.features()))?,
        };
        let device = Arc::new(Device::new(fd));
        let connection = Arc::new(Connection {
            share: Arc::new(Share::new(Arc::clone(&source), &share_options(options))),
            session: Arc::new(requested.session(&device)),
            mountpoint: mountpoint.path().to_owned(),
            device,
            counters: AllCounters::default(),
            interrupted: Arc::new(Interrupted::default()),
            monitor_handle: MonitorHandle::default(),
            ring_payload_bytes,
            outlives_server: options.outlives_server,
            end: Arc::new(ConnectionEnd::default()),
        });
        // Before the first reply, because the kernel must be notified of changes after it.
        let notifier = if keeps(options) { Notifier::start(&connection).map_err(Error::Threads)? } else { None };
        let (agreed, rings) = match negotiate_init(&connection, &requested, options) {
            Ok(agreed) => agreed,
            Err(error) => {
                drop((notifier, mountpoint));
                connection.end.mark_ended();
                connection.session.end();
                // Their resources are free before the caller gets the error.
                connection.end.wait_for_threads(THREADS_PATIENCE);
                return Err(error);
            }
        };
        let lack = rings.as_ref().err().filter(|reason| reason.is_of_this_machine()).map(ToString::to_string);
        // Linux splits a random read of a megabyte into eight read-ahead requests, partly sequential.
        if source.features().waits
            && let Err(error) = read_ahead(mountpoint.connection(), agreed.max_write_bytes)
        {
            tracing::debug!(%error, "the kernel keeps requesting 128 KiB at a time");
        }
        let mut export = Self {
            switch: AbortSwitch::of(mountpoint.connection()).ok(),
            device_number: mountpoint.connection(),
            explanation: Explanation {
                path: if rings.is_ok() { Path::Uring } else { Path::Devfuse },
                uring: rings.as_ref().map_or_else(Verdict::no_uring, |_| Verdict::used()),
                passthrough: requested.passthrough(&agreed),
                notifications: match &notifier {
                    Some(_) => Verdict::used(),
                    None if keeps(options) => Verdict::not("the source does not say what changes"),
                    None => Verdict::not("it keeps nothing"),
                },
                rings: rings.as_ref().map_or(0, Rings::count),
                ring_depth: if rings.is_ok() { options.ring_depth } else { 0 },
                readers: match options.threads {
                    _ if rings.is_ok() => READERS_BESIDE_RINGS,
                    0 if source.features().waits => READERS_WAITING,
                    threads => threads.max(1),
                },
                max_write_bytes: agreed.max_write_bytes,
            },
            connection,
            source,
            mountpoint: Mutex::new(mountpoint),
            rings: rings.ok(),
            notifier: Mutex::new(notifier),
            monitor: Mutex::default(),
            stopped: AtomicBool::new(false),
            init: requested.init_of_resumable(&agreed),
            lacks_ring: lack.is_some(),
        };
        if let Err(error) = export.start(options) {
            // No thread reads that the kernel could notify of the end.
            export.connection.end.mark_ended();
            return Err(Error::Threads(error));
        }
        if let Some(reason) = lack {
            tracing::info!("requests go through /dev/fuse, not io_uring: {reason}");
        }
        Ok(export)
    }

    /// Starts the threads beside the rings. On failure, dropping the export undoes everything.
    fn start(&mut self, options: &Options) -> std::io::Result<()> {
        let connection = &self.connection;
        let interrupted = Arc::clone(&connection.interrupted);
        self.monitor = Mutex::new(Some(Monitor::start(
            "fuse-monitor",
            connection.monitor_handle.clone(),
            interrupted.verdict(options.handler_timeout),
        )?));
        if options.resumed.is_some() {
            resume::request_again(&connection.device)?;
        }
        Readers::start(connection, self.explanation.readers)?;
        // A mount on which no file can be opened is useless.
        let spare = || rustix::io::fcntl_dupfd_cloexec(&*connection.device, 0);
        (0..DESCRIPTORS_SPARE).map(|_| spare()).collect::<Result<Vec<_>, Errno>>()?;
        Ok(())
    }

    /// Reports the transport of requests and data, and why a faster one is not used.
    pub fn explain(&self) -> &Explanation {
        &self.explanation
    }

    /// Returns the share, which counts its requests and what the kernel holds.
    pub fn share(&self) -> &Arc<Share> {
        &self.connection.share
    }

    /// Returns how often this mount wanted a ring and did without.
    pub fn ring_fallbacks(&self) -> u64 {
        self.lacks_ring.into()
    }

    /// Returns what was served so far.
    pub fn stats(&self) -> Stats {
        self.connection.counters.sum()
    }

    /// Returns the connection's number in `/sys/fs/fuse/connections`, the minor device number of files on the mount.
    pub fn connection_number(&self) -> u32 {
        self.device_number
    }

    /// Returns what the next server needs to resume the connection ([`Options::outlives_server`]); `None` if the kernel
    /// cannot send requests again.
    ///
    /// # Errors
    ///
    /// No descriptor is left.
    pub fn resumable(&self) -> std::io::Result<Option<Resumable>> {
        let Some(init) = &self.init else { return Ok(None) };
        let device = self.connection.device.as_fd().try_clone_to_owned()?;
        Ok(Some(Resumable { device, init: init.clone(), connection: self.device_number }))
    }

    /// Returns a switch that ends the connection even if this process cannot, for another process that ensures that the
    /// mount ends with this one. The kernel closes the connection of a killed process only when its last thread has
    /// ended. A thread that is notifying the kernel only ends after a caller that waits for the dead server.
    ///
    /// # Errors
    ///
    /// The connection has ended, or its controls are not accessible (containers of users other than root).
    pub fn switch(&self) -> std::io::Result<AbortSwitch> {
        self.switch.as_ref().map_or_else(|| AbortSwitch::of(self.device_number), AbortSwitch::try_clone)
    }

    /// Waits until the mount is unmounted, or the connection is aborted.
    pub fn wait(&self) {
        self.connection.end.wait();
    }

    /// Whether it was unmounted.
    pub fn has_ended(&self) -> bool {
        self.connection.end.is_ended()
    }

    /// Unmounts, completes requests in flight, and syncs everything. Users with open files are cut off after a short
    /// time. Another thread may be in [`Self::wait`], which then returns.
    pub fn stop(&self) {
        self.end();
    }

    fn end(&self) {
        if self.stopped.swap(true, Ordering::AcqRel) {
            return;
        }
        let notifier = lock(&self.notifier).take();
        drop(notifier);
        self.unmount();
        let left = self.connection.end.wait_for_threads(THREADS_PATIENCE);
        if left > 0 {
            tracing::warn!("{left} threads of a mount are still blocked in the source; they are abandoned");
        }
        let monitor = lock(&self.monitor).take();
        drop(monitor);
        self.connection.session.end();
        ferry_engine::sync_on_stop(&*self.source);
    }

    /// Unmounts. Users of files on the mount have a moment to finish, and are then cut off.
    fn unmount(&self) {
        let mut mountpoint = lock(&self.mountpoint);
        let until = Instant::now() + STOP_PATIENCE;
        while let Err(error) = mountpoint.unmount() {
            if matches!(error, MountError::Busy(_)) && Instant::now() < until {
                std::thread::sleep(STOP_AGAIN);
                continue;
            }
            tracing::warn!("{error}; its users are cut off");
            self.abort(mountpoint.path());
            if let Err(error) = mountpoint.detach() {
                tracing::warn!("{error}");
            }
            break;
        }
        // It may have been detached before, with files still open.
        if !self.connection.end.wait_for(STOP_PATIENCE) {
            self.abort(mountpoint.path());
            self.connection.end.wait_for(STOP_PATIENCE);
        }
    }

    /// Ends the connection to the kernel, whatever its users do.
    fn abort(&self, mountpoint: &std::path::Path) {
        let Err(error) = self.switch().and_then(|switch| switch.abort()) else { return };
        // A forced unmount aborts the connection, too, if permitted and still mounted.
        let flags = UnmountFlags::FORCE | UnmountFlags::NOFOLLOW;
        let is_there = stat_number(mountpoint) == Some(self.device_number);
        if !is_there || !matches!(rustix::mount::unmount(mountpoint, flags), Ok(()) | Err(Errno::BUSY)) {
            tracing::warn!("the connection to the kernel stays until its last file is closed: {error}");
        }
    }
}

/// Returns the connection of the mount on a path, without a request to its server.
fn stat_number(path: &std::path::Path) -> Option<u32> {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    rustix::fs::statx(rustix::fs::CWD, path, flags, StatxFlags::empty()).ok().map(|seen| seen.stx_dev_minor)
}

impl Drop for Export {
    fn drop(&mut self) {
        self.end();
        self.connection.end.mark_ended();
        self.rings = None;
    }
}

/// Returns whether the kernel caches anything, and so needs notifications.
fn keeps(options: &Options) -> bool {
    let timeouts = [options.entry_timeout, options.attr_timeout, options.negative_timeout];
    options.cache != Cache::None
        || options.writeback
        || timeouts.into_iter().flatten().any(|timeout| !timeout.is_zero())
}

fn mount_options(options: &Options, features: Features) -> MountOptions {
    MountOptions {
        // On a read-only mount the kernel keeps access times, which it otherwise requests after each listing.
        read_only: options.read_only || options.mount.read_only || features.read_only,
        allow_other: options.allow_other,
        default_permissions: options.default_permissions,
        fsname: options.fsname.clone(),
        subtype: options.subtype.clone(),
        ..options.mount.clone()
    }
}

#[cfg(test)]
#[path = "../tests/common/sources.rs"]
mod sources;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn rings_that_the_kernel_refuses_are_not_used() {
        let allowed = crate::machine::uring_allowed().is_ok();
        if !allowed || !std::path::Path::new("/dev/fuse").exists() {
            ferry_skip::skip!("needs FUSE-over-io_uring");
            return;
        }
        let tmp = tempfile::tempdir().unwrap();
        // The kernel requires entries of the negotiated size: it refuses to register smaller ones.
        let mount = |path| {
            let options = Options { path, cache: Cache::None, ..Options::default() };
            Export::mount_with(tmp.path(), Arc::new(sources::Null::default()), &options, 4096)
        };
        let export = mount(Path::Auto).unwrap();
        assert_eq!((export.explain().path, export.ring_fallbacks()), (Path::Devfuse, 1));
        let text = export.explain().to_string();
        assert!(text.contains("the kernel refused a ring of CPU"), "{text}");
        for _ in 0..10 {
            let file = std::fs::File::open(tmp.path().join("file")).unwrap();
            assert_eq!(file.read_at(&mut [0; 512], 0).unwrap(), 512);
        }
        export.stop();
        let error = mount(Path::Uring).unwrap_err().to_string();
        assert!(error.contains("requested") && error.contains("refused"), "{error}");
        assert_ne!(stat_number(tmp.path()), None, "it is an ordinary directory again");
        assert!(std::fs::read_dir(tmp.path()).unwrap().next().is_none());
    }
}
