//! The vhost-user front end: from the socket to running queues.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight,
    VhostUserProtocolFeatures as Protocol,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use crate::measure;
use crate::memory::{Memory, Region};
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
/// Descriptors, what is available and what is used in one ring (VIRTIO_F_RING_PACKED).
pub const F_PACKED: u64 = 1 << 34;

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
    /// The descriptor table; a packed ring's descriptors.
    pub table: u64,
    /// The available ring; a packed ring's event structure of the driver.
    pub avail: u64,
    /// The used ring; a packed ring's event structure of the device.
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
    /// What the server knows of requests in flight, kept for the server after it.
    pub(crate) inflight: Option<InFlightMemory>,
    /// The length of the shared memory region, and where the server asks for mappings.
    pub(crate) window: Option<(u64, UnixStream)>,
}

/// The memory that a server keeps account in.
pub(crate) type InFlightMemory = (VhostUserInflight, File);

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (features, protocol) = (self.features, self.protocol);
        write!(f, "Link {{ features: {features:#x}, protocol: {protocol:?} }}")
    }
}

/// Sends a message under watch, and names it when it fails.
fn tell<T>(dog: &Watchdog, what: &'static str, message: impl FnOnce() -> vhost::Result<T>) -> Result<T> {
    dog.during(message).map_err(|reason| Error::Vhost { what, reason })
}

impl Link {
    /// Connects, negotiates and shares the memory; also that of requests in flight, if there is some from before.
    pub(crate) fn open(
        path: &Path,
        config: &Config,
        memory: &Memory,
        inflight: Option<InFlightMemory>,
    ) -> Result<Self> {
        let stream = connect(path, config.connect_within)?;
        let socket = stream.try_clone()?;
        let watchdog = Watchdog::new(stream.try_clone()?, config.timeout);
        let vrings = config.vrings();
        let mut frontend = Frontend::from_stream(stream, vrings as u64);

        tell(&watchdog, "SET_OWNER", || frontend.set_owner())?;
        let offered = tell(&watchdog, "GET_FEATURES", || frontend.get_features())?;
        let features = Self::choose(offered, config)?;
        let protocol = Self::negotiate(&mut frontend, &watchdog, config)?;
        tell(&watchdog, "SET_FEATURES", || frontend.set_features(features))?;
        let mut link = Self { frontend, socket, watchdog, features, protocol, inflight, window: None };
        if config.window {
            link.open_window()?;
        }
        link.share(memory)?;
        link.share_inflight(config)?;
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
        if config.packed {
            wanted |= F_PACKED;
        }
        wanted |= config.device_features | config.optional_features & offered;
        let names = [
            (F_VERSION_1, "virtio 1"),
            (F_PROTOCOL, "vhost-user protocol features"),
            (F_EVENT_IDX, "the event index"),
            (F_INDIRECT, "indirect descriptors"),
            (F_PACKED, "packed rings"),
            (config.device_features, "the features asked for of the device"),
        ];
        match names.iter().find(|(bit, _)| wanted & !offered & bit != 0) {
            Some((_, name)) => Err(Error::NotOffered(name)),
            None => Ok(wanted),
        }
    }

    fn negotiate(frontend: &mut Frontend, dog: &Watchdog, config: &Config) -> Result<Protocol> {
        let vrings = config.vrings();
        let offered = tell(dog, "GET_PROTOCOL_FEATURES", || frontend.get_protocol_features())?;
        let mut wanted = Protocol::MQ | Protocol::CONFIG | Protocol::REPLY_ACK | Protocol::CONFIGURE_MEM_SLOTS;
        wanted |= Protocol::RESET_DEVICE | Protocol::DEVICE_STATE;
        wanted.set(Protocol::INFLIGHT_SHMFD, config.inflight);
        let window = Protocol::BACKEND_REQ | Protocol::BACKEND_SEND_FD | Protocol::SHMEM;
        wanted.set(window, config.window);
        let protocol = offered & wanted;
        if config.window && !protocol.contains(window) {
            return Err(Error::NotOffered("a shared memory region"));
        }
        if config.inflight && !protocol.contains(Protocol::INFLIGHT_SHMFD) {
            return Err(Error::NotOffered("memory for requests in flight"));
        }
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

    fn open_window(&mut self) -> Result<()> {
        let (frontend, dog) = (&mut self.frontend, &self.watchdog);
        let config = tell(dog, "GET_SHMEM_CONFIG", || frontend.get_shmem_config())?;
        let bytes = if config.nregions == 0 { 0 } else { config.memory_sizes[0] };
        let (ours, theirs) = UnixStream::pair()?;
        tell(dog, "SET_BACKEND_REQ_FD", || frontend.set_backend_request_fd(&theirs))?;
        self.window = Some((bytes, ours));
        Ok(())
    }

    fn share(&self, memory: &Memory) -> Result<()> {
        let table: Vec<_> = memory.regions().iter().map(|region| describe(region)).collect();
        tell(&self.watchdog, "SET_MEM_TABLE", || self.frontend.set_mem_table(&table)).map(drop)
    }

    /// Asks for new memory of requests in flight.
    pub(crate) fn renew_inflight(&mut self, config: &Config) -> Result<()> {
        self.inflight = None;
        self.share_inflight(config)
    }

    /// Asks for the memory of requests in flight, unless there is some, and hands it over.
    fn share_inflight(&mut self, config: &Config) -> Result<()> {
        if !config.inflight {
            return Ok(());
        }
        let (frontend, dog) = (&mut self.frontend, &self.watchdog);
        if self.inflight.is_none() {
            let queues = u16::try_from(config.vrings()).unwrap_or(u16::MAX);
            let asked = VhostUserInflight::new(0, 0, queues, config.queue_size);
            self.inflight = Some(tell(dog, "GET_INFLIGHT_FD", || frontend.get_inflight_fd(&asked))?);
        }
        let Some((kept, file)) = &self.inflight else { return Ok(()) };
        tell(dog, "SET_INFLIGHT_FD", || frontend.set_inflight_fd(kept, file.as_raw_fd()))
    }

    /// Adds a region to the memory that the server knows, or takes one away.
    pub(crate) fn change_region(&mut self, region: &Region, add: bool) -> Result<()> {
        let (frontend, info) = (&mut self.frontend, describe(region));
        match add {
            true => tell(&self.watchdog, "ADD_MEM_REG", || frontend.add_mem_region(&info)).map(drop),
            false => tell(&self.watchdog, "REM_MEM_REG", || frontend.remove_mem_region(&info)),
        }
    }

    /// Adds a part of a file to the memory that the server knows.
    pub(crate) fn add_file(&mut self, guest: u64, bytes: u64, file: BorrowedFd<'_>) -> Result<()> {
        let info = VhostUserMemoryRegionInfo {
            guest_phys_addr: guest,
            memory_size: bytes,
            // No address of ours is as high.
            userspace_addr: guest | 1 << 62,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        tell(&self.watchdog, "ADD_MEM_REG", || self.frontend.add_mem_region(&info)).map(drop)
    }

    /// Has a ring's driver signalled, and told of errors, by these.
    pub(crate) fn signals(&mut self, index: usize, call: &EventFd, err: &EventFd) -> Result<()> {
        tell(&self.watchdog, "SET_VRING_CALL", || self.frontend.set_vring_call(index, call))?;
        tell(&self.watchdog, "SET_VRING_ERR", || self.frontend.set_vring_err(index, err))
    }

    /// Enables or disables a ring.
    pub(crate) fn enable(&mut self, index: usize, on: bool) -> Result<()> {
        tell(&self.watchdog, "SET_VRING_ENABLE", || self.frontend.set_vring_enable(index, on))
    }

    /// Resets the device: its queues stop.
    pub(crate) fn reset(&mut self) -> Result<()> {
        tell(&self.watchdog, "RESET_DEVICE", || self.frontend.reset_device())
    }

    /// Bytes of the configuration space.
    pub(crate) fn read_config(&mut self, offset: u32, bytes: u32) -> Result<Vec<u8>> {
        let blank = vec![0; bytes as usize];
        let flags = VhostUserConfigFlags::WRITABLE;
        let (_, bytes) = tell(&self.watchdog, "GET_CONFIG", || self.frontend.get_config(offset, bytes, flags, &blank))?;
        Ok(bytes)
    }

    /// Writes to the configuration space.
    pub(crate) fn write_config(&mut self, offset: u32, bytes: &[u8]) -> Result<()> {
        let flags = VhostUserConfigFlags::WRITABLE;
        tell(&self.watchdog, "SET_CONFIG", || self.frontend.set_config(offset, flags, bytes))
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
        // A packed ring's used index stands above.
        let base = if self.features & F_PACKED == 0 { base } else { base & 0xffff };
        u16::try_from(base).map_err(|_| Error::BadReply(format!("GET_VRING_BASE answers {base}")))
    }

    /// Lets the server know that this is the end.
    pub(crate) fn close(&self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    /// Has the server write its state, while all queues are stopped.
    pub(crate) fn save(&self) -> Result<Vec<u8>> {
        let (mut ours, theirs) = std::io::pipe()?;
        self.transfer(VhostTransferStateDirection::SAVE, theirs.into())?;
        let mut state = Vec::new();
        ours.read_to_end(&mut state)?;
        tell(&self.watchdog, "CHECK_DEVICE_STATE", || self.frontend.check_device_state())?;
        Ok(state)
    }

    /// Has the server go on from a state, before any queue starts.
    pub(crate) fn load(&self, state: &[u8]) -> Result<()> {
        let (theirs, mut ours) = std::io::pipe()?;
        self.begin_load(theirs.into())?;
        ours.write_all(state)?;
        drop(ours);
        tell(&self.watchdog, "CHECK_DEVICE_STATE", || self.frontend.check_device_state())
    }

    /// Has the server begin to read a state.
    pub(crate) fn begin_load(&self, pipe: OwnedFd) -> Result<()> {
        self.transfer(VhostTransferStateDirection::LOAD, pipe)
    }

    fn transfer(&self, direction: VhostTransferStateDirection, pipe: OwnedFd) -> Result<()> {
        let stopped = VhostTransferStatePhase::STOPPED;
        let sent = || self.frontend.set_device_state_fd(direction, stopped, pipe);
        tell(&self.watchdog, "SET_DEVICE_STATE_FD", sent).map(drop)
    }

    /// The tag and the number of request queues from the configuration space.
    pub(crate) fn config_space(&mut self) -> Result<(String, u32)> {
        let bytes = self.read_config(0, CONFIG_BYTES)?;
        let (tag, queues) = bytes.split_at_checked(TAG_BYTES).unwrap_or((&bytes, &[]));
        let end = tag.iter().position(|&byte| byte == 0).unwrap_or(tag.len());
        let queues = queues.try_into().map_or(0, u32::from_le_bytes);
        Ok((String::from_utf8_lossy(&tag[..end]).into_owned(), queues))
    }

    /// A second handle of the socket, to see whether it is still connected.
    pub(crate) fn socket(&self) -> Result<UnixStream> {
        Ok(self.socket.try_clone()?)
    }

    /// The process that serves at the other end.
    pub(crate) fn peer(&self) -> Option<u32> {
        let pid = rustix::net::sockopt::socket_peercred(&self.socket).ok()?.pid;
        u32::try_from(pid.as_raw_nonzero().get()).ok().map(measure::serving)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The queues hold handles of the socket too; the server shall see the end now.
        self.close();
    }
}

fn describe(region: &Region) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: region.guest(),
        memory_size: region.len() as u64,
        userspace_addr: region.host(),
        mmap_offset: 0,
        mmap_handle: region.file().as_raw_fd(),
    }
}

/// Connects to a socket, which may not be there yet.
pub(crate) fn connect(path: &Path, within: Duration) -> Result<UnixStream> {
    let end = Instant::now() + within;
    loop {
        let reason = match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let early = matches!(reason.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused);
        if !early || Instant::now() > end {
            return Err(Error::Connect { path: path.display().to_string(), reason });
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
