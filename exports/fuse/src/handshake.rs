//! The start of a connection: requested options, negotiation, and the choice of transport.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use ferry_serve::{SessionSlot, ShareOptions};
use ferry_vfs::sync::lock;
use ferry_vfs::{ByNumber, Features};
use ferry_wire::fuse::{InitFlags, InitOptions, InitRequest, Negotiated, Operation, Request, decode};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::CapabilitySet;

use crate::backings::DeviceBackings;
use crate::connection::Connection;
use crate::device::Device;
use crate::explain::Verdict;
use crate::export::Error;
use crate::machine::{NoUring, has_capability, keeps_absent_names, page_bytes, uring_allowed};
use crate::uring::Rings;
use crate::{Cache, Options, Path, devfuse};

/// How long the kernel may take to send INIT, which it does right after the mount.
const INIT_PATIENCE: Duration = Duration::from_secs(10);

/// The maximum stacking depth of backing files. Linux stacks at most two file systems (`FILESYSTEM_MAX_STACK_DEPTH`),
/// and a mount with passthrough counts as one more than its backing files. So either files of an overlayfs can be
/// backing files, or an overlayfs can be put on the mount, as containers do, but not both.
const STACK_DEPTH: u32 = 1;
/// As above, for a source whose files are on an overlayfs.
const STACK_DEPTH_STACKED: u32 = 2;

/// The maximum number of concurrent background requests: enough for several files on several CPUs.
const MAX_BACKGROUND: u16 = 128;

/// Options beyond the share's own policy. The transport is chosen when INIT has arrived, before the reply.
#[derive(Debug)]
pub(crate) struct RequestedOptions {
    uring: Mutex<Result<(), NoUring>>,
    passthrough: Result<(), String>,
    /// Whether files opened for writing use passthrough.
    pass_writers: bool,
    /// Whether the kernel checks permissions. If not, only `open` of the source can.
    default_permissions: bool,
    by_number: ByNumber,
    stack_depth: u32,
    outlives_server: bool,
    /// INIT, once it has arrived.
    init: OnceLock<Vec<u8>>,
}

impl RequestedOptions {
    /// Determines the available options, as far as possible before the mount.
    /// It fails if io_uring or passthrough is required but not available.
    pub(crate) fn new(options: &Options, features: Features) -> Result<Self, Error> {
        let uring = match options.path {
            // The kernel fails the requests of rings that their process leaves.
            _ if options.outlives_server => Err(NoUring::Unwanted),
            Path::Devfuse => Err(NoUring::Unwanted),
            Path::Auto if features.waits => Err(NoUring::Waits),
            Path::Auto => uring_allowed(),
            Path::Uring => Ok(uring_allowed().map_err(|reason| Error::NoUring { reason: reason.to_string() })?),
        };
        let passthrough = passthrough_allowed(options, features);
        if let (Some(true), Err(reason)) = (options.passthrough, &passthrough) {
            return Err(Error::NoPassthrough { reason: reason.clone() });
        }
        Ok(Self {
            uring: Mutex::new(uring),
            passthrough,
            // Others that trust their caches are notified of a write only if it goes through this server.
            pass_writers: !(options.shared && options.cache == Cache::Always),
            default_permissions: options.default_permissions,
            by_number: features.by_number,
            stack_depth: if options.stacked_source { STACK_DEPTH_STACKED } else { STACK_DEPTH },
            outlives_server: options.outlives_server,
            init: OnceLock::new(),
        })
    }

    fn uring(&self) -> Result<(), NoUring> {
        lock(&self.uring).clone()
    }

    fn no_uring(&self, reason: NoUring) {
        *lock(&self.uring) = Err(reason);
    }

    fn adjust(&self, wanted: &mut InitOptions) {
        if self.by_number == ByNumber::Host {
            wanted.flags = (wanted.flags - InitFlags::NO_EXPORT_SUPPORT) | InitFlags::EXPORT_SUPPORT;
        }
        if !self.default_permissions {
            // With POSIX_ACL the kernel checks permissions itself.
            wanted.flags -= InitFlags::NO_OPEN_SUPPORT | InitFlags::POSIX_ACL;
        }
        if self.outlives_server {
            wanted.flags |= InitFlags::HAS_RESEND;
        }
        if self.uring().is_ok() {
            wanted.flags |= InitFlags::OVER_IO_URING;
        }
        if self.passthrough.is_ok() {
            wanted.flags |= InitFlags::PASSTHROUGH;
            wanted.max_stack_depth = self.stack_depth;
        }
        wanted.max_background = MAX_BACKGROUND;
        wanted.page_bytes = u32::try_from(page_bytes()).unwrap_or(u32::MAX);
    }

    /// Creates a session with these options.
    pub(crate) fn session(self: &Arc<Self>, device: &Arc<Device>) -> SessionSlot {
        let requested = Arc::clone(self);
        let session = SessionSlot::new(move |_: &InitRequest, wanted: &mut InitOptions| requested.adjust(wanted));
        match self.passthrough {
            Ok(()) => session.with_backings(Arc::new(DeviceBackings::new(device, self.pass_writers))),
            Err(_) => session,
        }
    }

    /// Returns INIT, if the next server can resume the connection.
    pub(crate) fn init_of_resumable(&self, agreed: &Negotiated) -> Option<Vec<u8>> {
        self.init.get().filter(|_| self.outlives_server && agreed.has(InitFlags::HAS_RESEND)).cloned()
    }

    /// Whether passthrough was agreed on.
    pub(crate) fn passthrough(&self, agreed: &Negotiated) -> Verdict {
        match &self.passthrough {
            Err(reason) => Verdict::not(reason),
            Ok(()) if agreed.has(InitFlags::PASSTHROUGH) => Verdict::used(),
            Ok(()) => Verdict::not("this kernel has no FUSE passthrough; Linux 6.9 and later have"),
        }
    }
}

fn passthrough_allowed(options: &Options, features: Features) -> Result<(), String> {
    let no = |reason: &str| Err(reason.into());
    if options.passthrough == Some(false) {
        no("it was turned off")
    } else if !features.backing {
        no("the source's files are not whole files of this host")
    } else if options.outlives_server {
        no("the next server could not find the files again")
    } else if options.writeback {
        no("the kernel allows it only without the write-back cache")
    } else if !has_capability(CapabilitySet::SYS_ADMIN) {
        no("it needs CAP_SYS_ADMIN")
    } else {
        Ok(())
    }
}

/// Returns the options of the share.
pub(crate) fn share_options(options: &Options) -> ShareOptions {
    ShareOptions {
        name: options.name.clone().unwrap_or_else(|| options.fsname.clone()),
        cache: options.cache,
        entry_timeout: options.entry_timeout,
        attr_timeout: options.attr_timeout,
        negative_timeout: options.negative_timeout,
        writeback: options.writeback,
        xattr: options.xattr,
        direct_opens: options.direct_opens,
        local_locks: options.local_locks,
        single_client: options.single_client,
        // The kernel refuses a connection with idmapped mounts unless it checks permissions itself.
        allow_idmap: options.allow_idmap && options.default_permissions,
        notifications: true,
        keeps_absent_names: keeps_absent_names(),
        limiter: options.limiter.clone(),
        ..ShareOptions::default()
    }
}

/// Serves INIT; returns the negotiated parameters, and the rings, or why they are not used.
pub(crate) fn negotiate_init(
    connection: &Arc<Connection>,
    requested: &RequestedOptions,
    options: &Options,
) -> Result<(Negotiated, Result<Rings, NoUring>), Error> {
    let mut rings = None;
    if let Some(resumed) = &options.resumed {
        let agreed = devfuse::serve_init_again(connection, &resumed.init).map_err(Error::Handshake)?;
        let _ = requested.init.set(resumed.init.clone());
        return Ok((agreed, Err(NoUring::Unwanted)));
    }
    let agreed = devfuse::serve_first(connection, &mut |message| {
        look_at(message, requested, &mut rings, connection, options);
    })
    .map_err(Error::Handshake)?;
    let rings = match (requested.uring(), rings) {
        (Ok(()), Some(rings)) => rings,
        (Err(reason), _) => return forced(options, reason).map(|reason| (agreed, Err(reason))),
        (Ok(()), None) => return forced(options, NoUring::NotOffered).map(|reason| (agreed, Err(reason))),
    };
    match rings.begin() {
        Ok(()) => Ok((agreed, Ok(rings))),
        Err(reason) => forced(options, reason).map(|reason| (agreed, Err(reason))),
    }
}

/// Returns an error if rings are required.
fn forced(options: &Options, reason: NoUring) -> Result<NoUring, Error> {
    match options.path {
        Path::Uring => Err(Error::NoUring { reason: reason.to_string() }),
        _ => Ok(reason),
    }
}

/// Looks at a message before it is served: the rings must exist before the reply to INIT.
fn look_at(
    message: &[u8],
    requested: &RequestedOptions,
    rings: &mut Option<Rings>,
    connection: &Arc<Connection>,
    options: &Options,
) {
    let Ok(Request { operation: Operation::Init(init), .. }) = decode(message, message.len(), &Negotiated::BEFORE_INIT)
    else {
        return;
    };
    let _ = requested.init.set(message.to_vec());
    if requested.uring().is_err() || rings.is_some() {
        return;
    }
    if !init.flags.contains(InitFlags::OVER_IO_URING) {
        return requested.no_uring(NoUring::NotOffered);
    }
    match Rings::prepare(connection, options.ring_depth.clamp(1, RING_DEPTH_MAX)) {
        Ok(made) => *rings = Some(made),
        Err(reason) => requested.no_uring(reason),
    }
}

/// More entries than the kernel has background requests per CPU are useless.
const RING_DEPTH_MAX: usize = 256;

/// Waits until the kernel has sent a request, which it must soon.
pub(crate) fn await_message(device: &Device) -> io::Result<()> {
    let mut fds = [PollFd::from_borrowed_fd(device.as_fd(), PollFlags::IN)];
    let patience = Timespec { tv_sec: INIT_PATIENCE.as_secs().cast_signed(), tv_nsec: 0 };
    match poll(&mut fds, Some(&patience))? {
        0 => Err(io::Error::new(io::ErrorKind::TimedOut, format!("the kernel sent no INIT within {INIT_PATIENCE:?}"))),
        _ => Ok(()),
    }
}
