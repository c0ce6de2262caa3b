//! The `virtiofs` export: a source, as a virtio-fs device for a virtual machine.
//!
//! The device speaks FUSE (protocol 7.27 to 7.45) over virtqueues (VIRTIO 1.3, section 5.11) with the guest, and
//! vhost-user with the virtual machine monitor. A READ costs, in the best case, a share of one system call. The worker
//! of its queue takes all waiting requests, copies and decodes each header once, and asks the source for the location
//! of the bytes. It lets io_uring transfer them directly into the guest's pages, and signals once. The crate
//! `ferry-serve` implements everything that is independent of virtqueues.
//!
//! ```no_run
//! # fn source() -> std::sync::Arc<dyn ferry_vfs::FileSystem> { unimplemented!() }
//! use ferry_virtiofs::{Export, Options};
//!
//! let options = Options { tag: Some("work".parse()?), ..Options::default() };
//! let export = Export::listen("/run/ferry.sock".as_ref(), source(), options)?;
//! // ... until it is time to end:
//! export.stop();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod connection_store;
mod dax;
mod device;
mod handler;

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

pub use dax::{DaxFiles, FILE_BYTES_DEFAULT, WINDOW_BYTES_DEFAULT, WINDOW_BYTES_MAX, WindowUsage};
pub use ferry_engine::{IoMode, PollLimit, RateLimiter};
pub use ferry_serve::{Acl, Cache, RestoreError, Share};
pub use ferry_state::{Geometry, KeeperConnection, KeeperError, SERVER_AWAITED, SessionStore, StoreError};
use ferry_vfs::FileSystem;
pub use ferry_vfs::IdentityScope;
pub use ferry_vhost::{EndSignal, FrontEnd};
use ferry_vhost::{Server, ServerError, Socket, SocketError};

/// Options of an export.
#[derive(Clone, Debug)]
pub struct Options {
    /// The tag that the guest mounts, for front ends that read it from the device (User-mode Linux, crosvm). QEMU and
    /// cloud-hypervisor take it from their own command line, and QEMU 7.1 to 8.0 fails if the device offers it.
    pub tag: Option<Tag>,
    /// The name of the share in the log.
    pub name: String,
    /// Refuse all changes by the guest.
    pub read_only: bool,
    /// The number of request queues; the guest may use fewer. There are at most as many workers as CPUs.
    pub queues: usize,
    /// The maximum number of additional threads for requests that block (on a disk, a network, another process),
    /// started on demand. Beyond it, such requests wait for each other; with 0 they block their queue.
    pub spare_threads: usize,
    /// The maximum time that a worker polls before it sleeps.
    pub poll: PollLimit,
    /// What the guest may keep.
    pub cache: Cache,
    /// The guest's cache timeout of names; `None`: from the cache mode.
    pub entry_timeout: Option<Duration>,
    /// The guest's cache timeout of attributes; `None`: from the cache mode.
    pub attr_timeout: Option<Duration>,
    /// The guest's cache timeout of missing names; `None`: from the cache mode.
    pub negative_timeout: Option<Duration>,
    /// Let the guest's page cache delay writes. The source must have been opened for that.
    pub writeback: bool,
    /// Files that the guest may not cache can still be mapped; mapped data stay cached until unmapped.
    pub mmap: bool,
    /// Listings include attributes if the guest may cache them.
    pub readdirplus: bool,
    /// Support extended attributes and POSIX ACLs. Without them the guest asks only once, which saves two requests per
    /// file in `ls -l`, and one at the first write to a new file.
    pub xattr: bool,
    /// Whether the guest checks permissions by POSIX ACLs, too.
    pub posix_acl: Acl,
    /// Whether new files get their security labels in the request that creates them.
    pub security_label: Acl,
    /// Locks are local to the guest: they do not conflict with others' locks, and closing a file opened for reading
    /// waits for no reply.
    pub local_locks: bool,
    /// The guest may make idmapped mounts (Linux 6.12); see [`ferry_serve::ShareOptions::allow_idmap`].
    pub allow_idmap: bool,
    /// Serve only the first virtual machine: [`Export::ended`] reports its end.
    pub once: bool,
    /// Agents in the guest are told what others do to the files that it knows. The source must publish events.
    pub events: bool,
    /// How data is moved.
    pub io: IoMode,
    /// The length of the DAX window in bytes, a multiple of 2 MiB up to [`WINDOW_BYTES_MAX`], for front ends that
    /// request one and sources that can be mapped; `None`: no window.
    pub dax_bytes: Option<u64>,
    /// The files that guests map if they leave the choice to the device.
    pub dax_files: DaxFiles,
    /// The store for the guest's session and mappings, for the next server; created with [`geometry`].
    pub kept: Option<Arc<SessionStore>>,
    /// Limits the rate of the guest's requests, but for those of the queue of FORGET. Data that the guest maps (DAX) is not
    /// limited: switch the window off.
    pub limiter: Option<Arc<RateLimiter>>,
    /// How to handle inodes that cannot be migrated, or are not found on the target.
    pub on_migration_error: OnMigrationError,
    /// How the target host finds inodes when a guest is migrated.
    pub migration: IdentityScope,
    /// Called by threads before they begin their work, which stays the same until they end.
    pub begun: ThreadHooks,
}

/// Functions that threads of the device call before they begin.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThreadHooks {
    /// Called by a thread that serves a guest's requests, or starts threads for slow ones.
    pub worker: Option<fn()>,
    /// Called by the thread that maps files in a guest's window.
    pub mapper: Option<fn()>,
}

/// How to handle inodes that cannot be migrated, or are not found on the target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnMigrationError {
    /// The migration fails.
    #[default]
    Abort,
    /// They are errors for the guest.
    GuestError,
}

/// How much is to be kept for an export with so many request queues ([`Options::kept`]).
pub fn geometry(queues: usize) -> Geometry {
    /// A batch of each queue, which the guest may not have seen yet, and as many again, for the server after.
    const ENTRIES_EACH: usize = 2 * 64;
    let queues = handler::HIGH_PRIORITY_QUEUES + queues.min(QUEUES_MAX);
    Geometry { workers: queues, entries: ENTRIES_EACH * queues }
}

/// The default of [`Options::poll`]: a little more than the time between a guest's requests.
const POLL_DEFAULT: Duration = Duration::from_micros(100);

/// Twice as many as programs of a guest commonly have under way on a file system that has stopped to answer.
pub const SPARE_THREADS_DEFAULT: usize = 128;

/// The maximum number of request queues. A guest with more CPUs shares them.
const QUEUES_MAX: usize = 64;

/// The fewest queues that are offered by default: as many as VMMs are usually told to ask for, however few CPUs this machine has. Those
/// that the guest does not start have neither a worker nor memory.
const QUEUES_DEFAULT_MIN: usize = 8;

impl Default for Options {
    fn default() -> Self {
        Self {
            tag: None,
            name: String::new(),
            read_only: false,
            queues: std::thread::available_parallelism().map_or(1, usize::from).clamp(QUEUES_DEFAULT_MIN, QUEUES_MAX),
            spare_threads: SPARE_THREADS_DEFAULT,
            poll: POLL_DEFAULT.into(),
            cache: Cache::Auto,
            entry_timeout: None,
            attr_timeout: None,
            negative_timeout: None,
            writeback: false,
            mmap: true,
            readdirplus: true,
            xattr: true,
            posix_acl: Acl::Auto,
            security_label: Acl::Never,
            local_locks: false,
            allow_idmap: false,
            once: false,
            events: false,
            io: IoMode::Auto,
            dax_bytes: Some(WINDOW_BYTES_DEFAULT),
            dax_files: DaxFiles::default(),
            kept: None,
            limiter: None,
            on_migration_error: OnMigrationError::default(),
            migration: IdentityScope::Paths,
            begun: ThreadHooks::default(),
        }
    }
}

/// The name of a virtio-fs device (VIRTIO 1.3, section 5.11.4): 1 to 36 bytes without NUL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag(String);

impl Tag {
    /// The longest tag, in bytes.
    pub const BYTES_MAX: usize = 36;

    /// The tag as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Tag {
    type Err = TagError;

    fn from_str(text: &str) -> Result<Self, TagError> {
        match text.len() {
            1..=Self::BYTES_MAX if !text.contains('\0') => Ok(Self(text.into())),
            _ => Err(TagError(text.into())),
        }
    }
}

/// Text that cannot be a [`Tag`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the tag {0:?} has {len} bytes; a virtio-fs tag has 1 to {max}, none of them NUL", len = .0.len(), max = Tag::BYTES_MAX)]
pub struct TagError(String);

/// Why a share cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The server.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The number of queues.
    #[error("{0} request queues; choose 1 to {QUEUES_MAX}")]
    Queues(usize),
    /// The state that the previous server left.
    #[error(transparent)]
    TakeUp(#[from] RestoreError),
    /// The source's inodes cannot be identified by the next server.
    #[error("restarts need a source whose inodes the next server can identify: a directory")]
    NoIdentities,
    /// Memory for requests in flight.
    #[error("cannot allocate memory for requests in flight: {0}")]
    InFlight(std::io::Error),
    /// The stored state.
    #[error(transparent)]
    Kept(#[from] StoreError),
    /// The window.
    #[error("a DAX window of {0} bytes; it is a multiple of 2M, from 2M to {max}M", max = WINDOW_BYTES_MAX >> 20)]
    Window(u64),
}

/// A source that is exported on a socket.
pub struct Export {
    server: Server,
    share: Arc<Share>,
    source: Arc<dyn FileSystem>,
    window: Arc<WindowUsage>,
    /// Its file is removed when this is dropped.
    socket: Option<Socket>,
}

impl std::fmt::Debug for Export {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Export").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl Export {
    /// Creates the socket, private to this user, and serves it on separate threads, one front end after another.
    ///
    /// # Errors
    /// [`Error`]: the socket cannot be created, or the options are invalid.
    pub fn listen(socket: &Path, source: Arc<dyn FileSystem>, options: Options) -> Result<Self, Error> {
        let socket = Socket::bind(socket)?;
        let export = Self::from_listener(socket.listener()?, source, options)?;
        Ok(Self { socket: Some(socket), ..export })
    }

    /// Serves an existing socket.
    ///
    /// # Errors
    /// [`Error`].
    pub fn from_listener(listener: UnixListener, source: Arc<dyn FileSystem>, options: Options) -> Result<Self, Error> {
        if !(1..=QUEUES_MAX).contains(&options.queues) {
            return Err(Error::Queues(options.queues));
        }
        if let Some(bytes) = options.dax_bytes.filter(|bytes| !dax::is_window(*bytes)) {
            return Err(Error::Window(bytes));
        }
        let window = Arc::default();
        let device = device::VirtioFs::new(Arc::clone(&source), options, Arc::clone(&window))?;
        let share = Arc::clone(device.share());
        let server = Server::start(listener, device, "ferry-virtiofs")?;
        Ok(Self { server, share, source, window, socket: None })
    }

    /// Returns a value to wait for the end of the only guest, see [`Options::once`].
    pub fn ended(&self) -> EndSignal {
        self.server.ended()
    }

    /// Returns a value that tells whether a front end is connected.
    pub fn front_end(&self) -> FrontEnd {
        self.server.front_end()
    }

    /// Returns the share, which counts its requests and what the guest holds.
    pub fn share(&self) -> &Arc<Share> {
        &self.share
    }

    /// Returns a value that tells whether the guest may map files, and how much it has mapped.
    pub fn window(&self) -> Arc<WindowUsage> {
        Arc::clone(&self.window)
    }

    /// Stops accepting requests, completes those in flight, syncs everything and removes the socket. The guest's session
    /// is kept for the next server, see [`Options::kept`].
    pub fn stop(self) {
        self.end(Server::stop);
    }

    /// As [`Self::stop`], without a next server: the guest loses the device, and its session is not kept.
    pub fn stop_for_good(self) {
        self.end(Server::stop_for_good);
    }

    fn end(self, stop: impl FnOnce(Server)) {
        let Self { server, source, socket, .. } = self;
        stop(server);
        ferry_engine::sync_on_stop(&*source);
        drop(socket);
    }
}
