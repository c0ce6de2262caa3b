//! The vhost-user conversation: from the socket to running queues.

use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures as Protocol};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use crate::memory::Memory;
use crate::watchdog::Watchdog;
use crate::{Config, Error, Result};

/// Chains may be tables elsewhere in memory (VIRTIO_F_INDIRECT_DESC).
pub const F_INDIRECT: u64 = 1 << 28;
/// Both sides say at which index they want to be notified (VIRTIO_F_EVENT_IDX).
pub const F_EVENT_IDX: u64 = 1 << 29;
/// There are vhost-user protocol features (VHOST_USER_F_PROTOCOL_FEATURES).
pub const F_PROTOCOL: u64 = 1 << 30;
/// Virtio 1 (VIRTIO_F_VERSION_1).
pub const F_VERSION_1: u64 = 1 << 32;

/// How long to wait before a server that is not there yet is tried again.
const CONNECT_PAUSE: Duration = Duration::from_millis(10);

/// The configuration space of a file system device: the tag (36 bytes) and the number of request queues.
const CONFIG_BYTES: u32 = 40;
/// Bytes of it that hold the tag.
const TAG_BYTES: usize = 36;

/// Where a ring's three parts lie, as SET_VRING_ADDR says it: user addresses, which the server translates with
/// the memory table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingAddresses {
    /// The descriptor table.
    pub table: u64,
    /// The available ring.
    pub avail: u64,
    /// The used ring.
    pub used: u64,
}

/// What a server is told about a ring before it is enabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingParameters {
    /// The number of entries (SET_VRING_NUM).
    pub size: u16,
    /// The first available index (SET_VRING_BASE).
    pub base: u16,
    /// Where it lies (SET_VRING_ADDR).
    pub addresses: RingAddresses,
}

/// A connection on which features are negotiated and memory is shared; see [`crate::Driver`].
pub(crate) struct Link {
    frontend: Frontend,
    socket: UnixStream,
    watchdog: Watchdog,
    pub(crate) features: u64,
    pub(crate) protocol: Protocol,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (features, protocol) = (self.features, self.protocol);
        write!(f, "Link {{ features: {features:#x}, protocol: {protocol:?} }}")
    }
}

/// Sends a message under watch, and names it when it fails.
fn tell<T>(dog: &Watchdog, what: &'static str, message: impl FnOnce() -> vhost::Result<T>) -> Result<T> {
    dog.during(message).map_err(|source| Error::Vhost { what, source })
}

impl Link {
    /// Connects, negotiates and shares the memory.
    pub(crate) fn open(path: &Path, config: &Config, memory: &Memory) -> Result<Self> {
        let stream = connect(path, config.connect_within)?;
        let socket = stream.try_clone()?;
        let watchdog = Watchdog::new(stream.try_clone()?, config.timeout);
        let vrings = config.queues + 1;
        let mut frontend = Frontend::from_stream(stream, vrings as u64);

        tell(&watchdog, "SET_OWNER", || frontend.set_owner())?;
        let offered = tell(&watchdog, "GET_FEATURES", || frontend.get_features())?;
        let features = Self::choose(offered, config)?;
        let protocol = Self::negotiate(&mut frontend, &watchdog, vrings)?;
        tell(&watchdog, "SET_FEATURES", || frontend.set_features(features))?;
        let link = Self { frontend, socket, watchdog, features, protocol };
        link.share(memory)?;
        Ok(link)
    }

    fn choose(offered: u64, config: &Config) -> Result<u64> {
        let mut wanted = F_VERSION_1 | F_PROTOCOL;
        if config.event_idx {
            wanted |= F_EVENT_IDX;
        }
        if config.indirect {
            wanted |= F_INDIRECT;
        }
        let names = [
            (F_VERSION_1, "virtio 1"),
            (F_PROTOCOL, "vhost-user protocol features"),
            (F_EVENT_IDX, "the event index"),
            (F_INDIRECT, "indirect descriptors"),
        ];
        match names.iter().find(|(bit, _)| wanted & !offered & bit != 0) {
            Some((_, name)) => Err(Error::NotOffered(name)),
            None => Ok(wanted),
        }
    }

    fn negotiate(frontend: &mut Frontend, dog: &Watchdog, vrings: usize) -> Result<Protocol> {
        let offered = tell(dog, "GET_PROTOCOL_FEATURES", || frontend.get_protocol_features())?;
        let protocol = offered & (Protocol::MQ | Protocol::CONFIG | Protocol::REPLY_ACK);
        tell(dog, "SET_PROTOCOL_FEATURES", || frontend.set_protocol_features(protocol))?;
        if protocol.contains(Protocol::REPLY_ACK) {
            frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        let available = match protocol.contains(Protocol::MQ) {
            true => tell(dog, "GET_QUEUE_NUM", || frontend.get_queue_num())?,
            false => 1,
        };
        if available < vrings as u64 {
            return Err(Error::Queues { asked: vrings, offered: available });
        }
        Ok(protocol)
    }

    fn share(&self, memory: &Memory) -> Result<()> {
        let describe = |region: &std::sync::Arc<crate::memory::Region>| VhostUserMemoryRegionInfo {
            guest_phys_addr: region.guest(),
            memory_size: region.len() as u64,
            userspace_addr: region.host(),
            mmap_offset: 0,
            mmap_handle: region.file().as_raw_fd(),
        };
        let table: Vec<_> = memory.regions().iter().map(describe).collect();
        tell(&self.watchdog, "SET_MEM_TABLE", || self.frontend.set_mem_table(&table)).map(drop)
    }

    /// Sets a ring up from index `base` and enables it.
    pub(crate) fn start(&mut self, index: usize, ring: &RingSetup<'_>) -> Result<()> {
        let (frontend, dog) = (&mut self.frontend, &self.watchdog);
        let RingParameters { size, base, addresses } = ring.parameters;
        let data = VringConfigData {
            queue_max_size: size,
            queue_size: size,
            flags: 0,
            desc_table_addr: addresses.table,
            used_ring_addr: addresses.used,
            avail_ring_addr: addresses.avail,
            log_addr: None,
        };
        tell(dog, "SET_VRING_NUM", || frontend.set_vring_num(index, size))?;
        tell(dog, "SET_VRING_BASE", || frontend.set_vring_base(index, base))?;
        tell(dog, "SET_VRING_ADDR", || frontend.set_vring_addr(index, &data))?;
        tell(dog, "SET_VRING_CALL", || frontend.set_vring_call(index, ring.call))?;
        tell(dog, "SET_VRING_ERR", || frontend.set_vring_err(index, ring.err))?;
        tell(dog, "SET_VRING_KICK", || frontend.set_vring_kick(index, ring.kick))?;
        tell(dog, "SET_VRING_ENABLE", || frontend.set_vring_enable(index, true))
    }

    /// Disables and stops a ring; returns the available index at which the server stopped.
    pub(crate) fn stop(&mut self, index: usize) -> Result<u16> {
        tell(&self.watchdog, "SET_VRING_ENABLE", || self.frontend.set_vring_enable(index, false))?;
        let base = tell(&self.watchdog, "GET_VRING_BASE", || self.frontend.get_vring_base(index))?;
        u16::try_from(base).map_err(|_| Error::BadReply(format!("GET_VRING_BASE answers {base}")))
    }

    /// The tag and the number of request queues from the configuration space.
    pub(crate) fn config_space(&mut self) -> Result<(String, u32)> {
        let blank = [0; CONFIG_BYTES as usize];
        let flags = VhostUserConfigFlags::WRITABLE;
        let (_, bytes) =
            tell(&self.watchdog, "GET_CONFIG", || self.frontend.get_config(0, CONFIG_BYTES, flags, &blank))?;
        let (tag, queues) = bytes.split_at_checked(TAG_BYTES).unwrap_or((&bytes, &[]));
        let end = tag.iter().position(|&byte| byte == 0).unwrap_or(tag.len());
        let queues = queues.try_into().map_or(0, u32::from_le_bytes);
        Ok((String::from_utf8_lossy(&tag[..end]).into_owned(), queues))
    }

    /// A second handle of the socket, to see whether it is still connected.
    pub(crate) fn socket(&self) -> Result<UnixStream> {
        Ok(self.socket.try_clone()?)
    }

    /// The process that listens at the other end.
    pub(crate) fn peer(&self) -> Option<u32> {
        let pid = rustix::net::sockopt::socket_peercred(&self.socket).ok()?.pid;
        u32::try_from(pid.as_raw_nonzero().get()).ok()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The queues hold handles of the socket too; the server shall see the end now.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

/// Connects to a socket, which may not be there yet.
pub(crate) fn connect(path: &Path, within: Duration) -> Result<UnixStream> {
    let end = Instant::now() + within;
    loop {
        let source = match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let early = matches!(source.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused);
        if !early || Instant::now() > end {
            return Err(Error::Connect { path: path.display().to_string(), source });
        }
        std::thread::sleep(CONNECT_PAUSE);
    }
}

/// What a ring is started with.
#[derive(Debug)]
pub(crate) struct RingSetup<'a> {
    pub(crate) parameters: RingParameters,
    pub(crate) kick: &'a EventFd,
    pub(crate) call: &'a EventFd,
    pub(crate) err: &'a EventFd,
}

/// Whether the other end of `socket` is still there.
pub(crate) fn is_connected(socket: &UnixStream) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut fds, Some(&now)), Ok(0))
}
