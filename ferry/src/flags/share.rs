//! The flags of one share: a source, and the exports that it goes through.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use ferry_idmap::{Ids, Rule, Xattrs};
use ferry_virtiofs::Tag;
use serde::{Deserialize, Deserializer};

use super::address::{Address, Users};
use super::source::Kind;
use super::values::{
    Acl, Cache, Carrier, DaxFiles, FileHandles, ImageDigest, MapUser, MigrationMode, OnMigrationError, Passthrough,
    Watch, Window, as_keys, default_tag, tag_from_name,
};
use crate::size::Size;

/// The maximum number of parallel requests to a registry.
pub const JOBS_MAX: u16 = 256;
/// More request queues than this help no guest: Linux makes at most one per CPU.
const QUEUES_MAX: u16 = 64;
/// Past a second of polling an idle share costs a whole CPU for nothing.
const POLL_US_MAX: u64 = 1_000_000;
/// A day: whoever wants to wait longer wants to wait for ever, and says 0.
const HANDLER_TIMEOUT_MAX: u64 = 86_400;
/// A hundred years: whatever is kept longer is kept for ever.
const TIMEOUT_MAX: u64 = 100 * 366 * 86_400;
/// Ten times as many threads as the largest machines have CPUs per node.
const THREADS_MAX: u16 = 1024;
/// Each entry takes a buffer as large as the longest request, for every CPU.
const DEPTH_MAX: u16 = 256;
/// Each takes a tag of its own; past this a server keeps them waiting anyway.
const IN_FLIGHT_MAX: u16 = 4096;
/// The most connections to a 9P server.
const CONNECTIONS_MAX: u16 = 16;
/// The most connections of 9P clients: each takes a descriptor, of which a process has at most a million by default.
const CLIENTS_MAX: u32 = 1 << 20;
/// The longest that 9P clients are waited for: a day.
const CLIENT_SECONDS_MAX: u64 = 86_400;
/// The longest that a 9P server is waited for: a week, for servers that are moved.
const PATIENCE_MAX: u64 = 7 * 86_400;

/// One source and the exports that it goes through: a group of flags, or a `[[share]]` table.
#[derive(Clone, Debug, Deserialize, clap::Args)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct Share {
    /// A directory, mem, pmem:PATH, image:PATH, or 9p: with unix:PATH, tcp:HOST:PORT[/TREE], tls: or vsock:.
    #[arg(index = 1, value_name = "SOURCE", required = false)]
    #[serde(alias = "dir")]
    pub source: PathBuf,

    /// Listen for a VMM on this socket (vhost-user-fs).
    #[arg(long, value_name = "SOCKET")]
    pub virtiofs: Option<PathBuf>,

    /// Listen on this inherited descriptor, a listening unix socket, instead of a path.
    #[arg(long, value_name = "N", conflicts_with = "virtiofs", help_heading = "Sockets and queues")]
    pub fd: Option<u16>,

    /// Also let this group connect to the unix sockets (of virtiofs, 9p unix: and 9p vhost-user:).
    #[arg(long, value_name = "GROUP", help_heading = "Sockets and queues")]
    pub socket_group: Option<String>,

    /// Mount the source on this directory of the host; 9p: and image: with nosuid and nodev.
    #[arg(long, value_name = "DIR")]
    pub mount: Option<PathBuf>,

    /// Listen for 9P clients (9P2000.L): unix:PATH, tcp:HOST:PORT, tls:HOST:PORT, vsock:CID:PORT (CID: any, 2 on a host, 1
    /// for this machine alone), or vhost-user:SOCKET for a VMM.
    #[arg(id = "9p", long = "9p", value_name = "ADDRESS")]
    #[serde(rename = "9p")]
    pub ninep: Option<Address>,

    /// The name by which the guest mounts the share, 1 to 36 bytes [default: the source's own name].
    ///
    /// QEMU and cloud-hypervisor take it from their own command line; User-mode Linux and crosvm ask the device, which
    /// tells it when this flag is given. QEMU 7.1 to 8.0 fails with a device that tells it: leave the flag out there.
    #[arg(long, value_name = "NAME")]
    #[serde(default, deserialize_with = "parsed")]
    pub tag: Option<Tag>,

    /// Share read-only: refuse all changes.
    #[arg(long)]
    #[serde(default)]
    pub read_only: bool,

    /// Number of request queues [default: the number of CPUs, at least 8].
    #[arg(long, value_name = "N", help_heading = "Sockets and queues")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    pub queues: Option<u16>,

    /// What the kernel of the guest, or of this host for a mount, may cache.
    ///
    /// With 9p:SERVER it says, too, what is kept here of the server's files: with none and metadata no data; with auto data until
    /// a file is opened again and has changed; with always data until there is no room, for trees that nobody else changes.
    #[arg(long, value_name = "MODE", default_value_t, value_enum, hide_possible_values = false)]
    #[serde(default)]
    pub cache: Cache,

    /// How long clients may cache names, in seconds [default: depends on --cache].
    #[arg(long, value_name = "SECONDS", help_heading = "Caches and locks")]
    #[arg(value_parser = clap::value_parser!(u64).range(..=TIMEOUT_MAX))]
    pub entry_timeout: Option<u64>,

    /// How long clients may cache attributes, in seconds [default: depends on --cache].
    #[arg(long, value_name = "SECONDS", help_heading = "Caches and locks")]
    #[arg(value_parser = clap::value_parser!(u64).range(..=TIMEOUT_MAX))]
    pub attr_timeout: Option<u64>,

    /// How long clients may cache that a name does not exist, in seconds [default: depends on --cache; 0 with auto].
    #[arg(long, value_name = "SECONDS", help_heading = "Caches and locks")]
    #[arg(value_parser = clap::value_parser!(u64).range(..=TIMEOUT_MAX))]
    pub negative_timeout: Option<u64>,

    /// Write-back caching: collect writes in the page cache and send them later.
    ///
    /// With 9p:SERVER and --cache auto they are collected here only, as they always are: Linux would go by its own length of a
    /// file, and not see where others have ended it.
    #[arg(long)]
    #[serde(default)]
    pub writeback: bool,

    /// Keep locks in the kernel of each guest or mount, as virtiofsd does: other guests, mounts and the host do not meet them, and to take
    /// one does not bring what others have written. Who closes a file that was opened for reading then waits for no answer (Linux 5.16; not with
    /// --writeback).
    #[arg(long, help_heading = "Caches and locks")]
    #[serde(default)]
    pub local_locks: bool,

    /// Let idmapped mounts be made of it: `mount --bind -o X-mount.idmap`, containers with user namespaces (Linux 6.12).
    ///
    /// Linux then does not say who asks, unless something is made. So fallocate and copy_file_range by root clear the set-user-id and
    /// set-group-id bits of a file, and names of trusted attributes are shown to all users.
    #[arg(long, help_heading = "Users and attributes")]
    #[serde(default)]
    pub allow_idmap: bool,

    /// Poll for the next request for up to this many microseconds before sleeping; 0 disables polling [default:
    /// adaptive].
    #[arg(long, value_name = "N", help_heading = "Sockets and queues")]
    #[arg(value_parser = clap::value_parser!(u64).range(..=POLL_US_MAX))]
    pub poll_us: Option<u64>,

    /// Pass the client's O_DIRECT on to the files of a directory.
    #[arg(long, help_heading = "For directories")]
    #[serde(default)]
    pub allow_direct_io: bool,

    /// Disable extended attributes and ACLs. This saves two requests per file of `ls -l`, and one at the first write to
    /// a new file. The mode of a file with an ACL then never grants more than the ACL does.
    #[arg(long, help_heading = "Users and attributes")]
    #[serde(default)]
    pub no_xattr: bool,

    /// Whether guests check permissions by POSIX ACLs, too. To those that do not, files with ACLs are shown with modes that give
    /// nobody more than the ACL does; so they are to 9P clients, but for `always`: those have to be mounted with posixacl.
    #[arg(long, value_name = "WHEN", default_value_t, value_enum, help_heading = "For virtual machines")]
    #[serde(default)]
    pub posix_acl: Acl,

    /// Whether files get the labels of the guest's security module (SELinux) when they are made [default: never]. To set
    /// security.* on the host takes --modcaps=+sys_admin, or other names by --xattrmap.
    #[arg(long, value_name = "WHEN", value_enum, help_heading = "For virtual machines")]
    pub security_label: Option<Acl>,

    /// Exit when the first virtual machine disconnects, instead of waiting for the next one.
    #[arg(long, help_heading = "For virtual machines")]
    #[serde(default)]
    pub once: bool,

    /// Keep in this folder what the guest holds, and the connection to its VMM, so that the server can be ended, also killed, and
    /// started again with the same flags under a running guest: neither notices. It is made if it is not there; it must be this user's
    /// own, with mode 0700. A process ferry-keeper holds it meanwhile, for ten minutes at most, or until the guest has ended; SIGTERM
    /// ends it, and SIGQUIT ends a server with its keeper.
    #[arg(long, value_name = "DIR", help_heading = "Restart and migration")]
    pub state: Option<PathBuf>,

    /// When a guest is migrated, and some of its files are not found on the other side by their paths: abort, or let them be
    /// errors for the guest (guest-error).
    #[arg(long, value_name = "WHAT", default_value_t, value_enum, help_heading = "Restart and migration")]
    #[serde(default)]
    pub migration_on_error: OnMigrationError,

    /// When a guest is migrated, find its files on the other side by their paths, or, where both sides share one file system, by
    /// file handles, whatever they are called by then. Both sides must say so: whoever sends handles can name any file of
    /// that file system.
    #[arg(long, value_name = "HOW", default_value_t, value_enum, help_heading = "Restart and migration")]
    #[serde(default)]
    pub migration_mode: MigrationMode,

    /// When a guest is migrated, have the other side make sure by file handles that what is at a path is the same file. Both
    /// sides must share one file system.
    #[arg(long, help_heading = "Restart and migration")]
    #[serde(default)]
    pub migration_verify_handles: bool,

    /// Refuse shared mappings of files whose data guests may not cache (--cache none and metadata).
    #[arg(long, help_heading = "For virtual machines")]
    #[serde(default)]
    pub no_mmap: bool,

    /// Disable READDIRPLUS: faster for listings of names only, several times slower for all others.
    #[arg(long, help_heading = "For virtual machines")]
    #[serde(default)]
    pub no_readdirplus: bool,

    /// The length of the window for files that guests map into their memory (DAX): a power of two from 2M to 256M, or off.
    /// It is there where the VMM asks for it: QEMU as shown below [default: 256M].
    #[arg(long, value_name = "SIZE", help_heading = "For virtual machines")]
    pub dax: Option<Window>,

    /// Which files are mapped where the guest leaves it to us (it mounts without dax, or with dax=inode): always, never, or
    /// size>N; if it is not given, size>1M.
    #[arg(long, value_name = "WHICH", help_heading = "For virtual machines")]
    pub dax_files: Option<DaxFiles>,

    /// Show host file systems that are mounted below the directory as separate mounts, so that inode numbers are unique
    /// in each.
    #[arg(long, help_heading = "For directories")]
    #[serde(default)]
    pub announce_submounts: bool,

    /// Remember files by file handles instead of open descriptors: never, prefer, mandatory.
    #[arg(long, value_name = "WHEN", default_value_t, value_enum, help_heading = "For directories")]
    #[serde(default)]
    pub inode_file_handles: FileHandles,

    /// Notify mounts at once of changes by other processes of the host. Needs root; every change on the directory's
    /// file system costs some work.
    #[arg(long, value_name = "WHEN", default_value_t, value_enum, help_heading = "For directories")]
    #[serde(default)]
    pub watch: Watch,

    /// Give users other numbers: TYPE:FROM:TO:COUNT with TYPE one of map (a client's 0 is our 100000:
    /// map:0:100000:65536), guest, host (one direction), squash-guest, squash-host (all become TO), or
    /// forbid-guest:FROM:COUNT. May be given several times.
    #[arg(long, value_name = "RULE", help_heading = "Users and attributes")]
    #[serde(default, deserialize_with = "all_parsed")]
    pub translate_uid: Vec<Rule>,

    /// The same for groups.
    #[arg(long, value_name = "RULE", help_heading = "Users and attributes")]
    #[serde(default, deserialize_with = "all_parsed")]
    pub translate_gid: Vec<Rule>,

    /// Let everybody act as one user, whose files are root's inside: auto (whoever runs this), or UID:GID.
    #[arg(long, value_name = "WHO", help_heading = "Users and attributes")]
    #[arg(conflicts_with_all = ["translate_uid", "translate_gid"])]
    #[serde(default, deserialize_with = "parsed")]
    pub map_user: Option<MapUser>,

    /// Give extended attributes other names, by the rules of virtiofsd: :map::user.virtiofs.: puts all of them below a
    /// prefix.
    #[arg(long, value_name = "RULES", help_heading = "Users and attributes")]
    #[serde(default, deserialize_with = "parsed")]
    pub xattrmap: Option<Xattrs>,

    /// The maximum data in mem (names, links, attributes and other metadata may take as much again), or the size of a
    /// new pmem file, all of which is allocated at once: a number with K, M, G or T [default: half of the memory; the
    /// size of the file].
    #[arg(long, value_name = "SIZE", help_heading = "For mem and pmem:PATH")]
    pub size: Option<Size>,

    /// Hold the data of mem in huge pages, and map pmem with them where it is on persistent memory (DAX). On any other file or
    /// device it changes nothing, which a line says.
    #[arg(long, help_heading = "For mem and pmem:PATH")]
    #[serde(default)]
    pub huge: bool,

    /// When pmem's first tier is more than 80 % full, move files that were not used for a while to this file or block
    /// device; what is read there comes back while the first is less than 60 % full, what is written at once.
    #[arg(long, value_name = "FILE", help_heading = "For mem and pmem:PATH")]
    pub tier2: Option<PathBuf>,

    /// The size of a new second tier that is a file.
    #[arg(long, value_name = "SIZE", requires = "tier2", help_heading = "For mem and pmem:PATH")]
    pub tier2_size: Option<Size>,

    /// The folder with the bytes of an image's files.
    #[arg(long, value_name = "DIR", help_heading = "For image:PATH")]
    pub store: Option<PathBuf>,

    /// Fail unless the image has this digest, which covers the whole tree.
    #[arg(long, value_name = "DIGEST", help_heading = "For image:PATH")]
    pub digest: Option<ImageDigest>,

    /// Fetch what the store has not got from oci:HOST/NAME:TAG or s3:BUCKET/PREFIX:TAG when it is read, and the rest beside that.
    /// An image that is not there is fetched, too.
    #[arg(long, value_name = "REF", help_heading = "For image:PATH")]
    pub from: Option<String>,

    /// Parallel requests that fetch what has not been read yet; 0: fetch only what is read [default: 4].
    #[arg(long, value_name = "N", help_heading = "For image:PATH")]
    #[arg(value_parser = clap::value_parser!(u16).range(..=i64::from(JOBS_MAX)))]
    pub jobs: Option<u16>,

    /// Keep at most so much of what is fetched, and drop what was not used for longest; the packs then stay incomplete. For
    /// 9p:SERVER: keep so much of files' data in memory, from 16M on [default: all; 256M for 9p:SERVER].
    #[arg(long, value_name = "SIZE", help_heading = "For image:PATH")]
    pub cache_size: Option<Size>,

    /// Ask for so much together with a file that is read: what was built after it [default: 256K].
    #[arg(long, value_name = "SIZE", help_heading = "For image:PATH")]
    pub fetch_ahead: Option<Size>,

    /// Ask other machines than this one without encryption, too.
    #[arg(long, help_heading = "For image:PATH")]
    #[serde(default)]
    pub plain_http: bool,

    /// Let the tcp address be one that other machines reach. Whoever connects is believed to be who it says.
    #[arg(id = "9p-remote", long = "9p-remote", help_heading = "For 9P")]
    #[serde(default, rename = "9p-remote")]
    pub ninep_remote: bool,

    /// The certificate chain of a tls address, in PEM.
    #[arg(long, value_name = "FILE", help_heading = "For 9P")]
    pub tls_cert: Option<PathBuf>,

    /// The key of the certificate, in PEM.
    #[arg(long, value_name = "FILE", help_heading = "For 9P")]
    pub tls_key: Option<PathBuf>,

    /// Accept only clients whose certificate is signed by one of these authorities, in PEM. Other machines may then
    /// reach the address without --9p-remote.
    #[arg(long, value_name = "FILE", help_heading = "For 9P")]
    pub tls_client_ca: Option<PathBuf>,

    /// As whom 9P clients act: client (who they say; their kernel checks permissions), only=UID,UID... (these users of this host
    /// and no others, and the server checks what each may do), or UID:GID (all are this user, and the server checks) [default: client].
    ///
    /// The server has to be root for that, or the one user that is named.
    #[arg(id = "9p-users", long = "9p-users", value_name = "WHO", help_heading = "For 9P")]
    #[serde(rename = "9p-users")]
    pub ninep_users: Option<Users>,

    /// The longest message that 9P clients may ask for, from 4K to 16M [default: 4M].
    #[arg(id = "9p-msize", long = "9p-msize", value_name = "SIZE", help_heading = "For 9P")]
    #[serde(rename = "9p-msize")]
    pub ninep_msize: Option<Size>,

    /// How many 9P connections there may be at the same time; when there are so many, the client that has most (a user of this host,
    /// or a machine) gives one up for others [default: 1024].
    #[arg(id = "9p-connections", long = "9p-connections", value_name = "N", help_heading = "For 9P")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(CLIENTS_MAX)))]
    #[serde(rename = "9p-connections")]
    pub ninep_connections: Option<u32>,

    /// How long a 9P client may take to attach, to send the rest of a message, or to take the next bytes of a reply
    /// [default: 30].
    #[arg(id = "9p-slow", long = "9p-slow", value_name = "SECONDS", help_heading = "For 9P")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=CLIENT_SECONDS_MAX))]
    #[serde(rename = "9p-slow")]
    pub ninep_slow: Option<u64>,

    /// Disconnect a 9P client after this many seconds without a request [default: never, because unused mounts send
    /// none].
    #[arg(id = "9p-idle", long = "9p-idle", value_name = "SECONDS", help_heading = "For 9P")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=CLIENT_SECONDS_MAX))]
    #[serde(rename = "9p-idle")]
    pub ninep_idle: Option<u64>,

    /// Disable read-ahead for 9P clients that read sequentially.
    #[arg(id = "9p-no-read-ahead", long = "9p-no-read-ahead", help_heading = "For 9P")]
    #[serde(default, rename = "9p-no-read-ahead")]
    pub ninep_no_read_ahead: bool,

    /// The longest message to agree on with the server, up to 64M [default: 1M].
    #[arg(long, value_name = "SIZE", help_heading = "For 9p:SERVER")]
    pub msize: Option<Size>,

    /// Requests in flight to the server, per connection [default: 64].
    #[arg(long, value_name = "N", help_heading = "For 9p:SERVER")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(IN_FLIGHT_MAX)))]
    pub in_flight: Option<u16>,

    /// Connections to the server: more than one for networks that give each a share of their own [default: 1].
    #[arg(long, value_name = "N", help_heading = "For 9p:SERVER")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(CONNECTIONS_MAX)))]
    pub connections: Option<u16>,

    /// The number of the user that the server sees; new files belong to whoever makes them [default: yours].
    #[arg(id = "9p-user", long = "9p-user", value_name = "UID", help_heading = "For 9p:SERVER")]
    #[arg(value_parser = clap::value_parser!(u32).range(..i64::from(u32::MAX)))]
    #[serde(rename = "9p-user")]
    pub ninep_user: Option<u32>,

    /// For how many seconds after its loss requests wait for a server that has gone, before they fail with EIO; then they fail at once until it
    /// is back. Mounts give requests up after their --handler-timeout, too [default: 60].
    #[arg(long, value_name = "SECONDS", help_heading = "For 9p:SERVER")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=PATIENCE_MAX))]
    pub patience: Option<u64>,

    /// The server's tree to use, for addresses that cannot name one (unix:PATH) [default: that of the address, or the server's only one].
    #[arg(id = "9p-tree", long = "9p-tree", value_name = "TREE", help_heading = "For 9p:SERVER")]
    #[serde(rename = "9p-tree")]
    pub ninep_tree: Option<PathBuf>,

    /// The authorities that may sign the certificate of a tls server, in PEM.
    #[arg(long, value_name = "FILE", help_heading = "For 9p:SERVER")]
    pub server_ca: Option<PathBuf>,

    /// The certificate to show to a tls server, in PEM.
    #[arg(long, value_name = "FILE", requires = "client_key", help_heading = "For 9p:SERVER")]
    pub client_cert: Option<PathBuf>,

    /// The key of that certificate, in PEM.
    #[arg(long, value_name = "FILE", requires = "client_cert", help_heading = "For 9p:SERVER")]
    pub client_key: Option<PathBuf>,

    /// The transport of a mount's requests [default: auto, the best available].
    #[arg(long, value_enum, value_name = "PATH", help_heading = "For mounts")]
    pub path: Option<Carrier>,

    /// Whether the kernel may access files of the source directly (FUSE passthrough) [default: auto, if supported].
    #[arg(long, value_enum, value_name = "WHEN", help_heading = "For mounts")]
    pub passthrough: Option<Passthrough>,

    /// Let other users access the mount, subject to file permissions.
    #[arg(long, help_heading = "For mounts")]
    #[serde(default)]
    pub allow_other: bool,

    /// Allow mounting on a directory that is not empty; its contents are hidden.
    #[arg(long, help_heading = "For mounts")]
    #[serde(default)]
    pub nonempty: bool,

    /// The source that the table of mounts shows [default: the source].
    #[arg(long, value_name = "NAME", help_heading = "For mounts")]
    pub fsname: Option<String>,

    /// After this many seconds in a request that a source does not end, its caller gets EIO; 0: never
    /// [default: 120].
    #[arg(long, value_name = "SECONDS", help_heading = "For mounts")]
    #[arg(value_parser = clap::value_parser!(u64).range(..=HANDLER_TIMEOUT_MAX))]
    pub handler_timeout: Option<u64>,

    /// The minimum number of threads that read /dev/fuse [default: one, and more while requests wait].
    #[arg(long, value_name = "N", help_heading = "For mounts")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(THREADS_MAX)))]
    pub threads: Option<u16>,

    /// Entries of each CPU's ring [default: 8].
    #[arg(long, value_name = "N", help_heading = "For mounts")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(DEPTH_MAX)))]
    pub depth: Option<u16>,
}

impl Share {
    /// What kind of source it is.
    pub fn kind(&self) -> Kind {
        Kind::of(&self.source)
    }

    /// Makes its paths absolute: `folder` is where those that are not begin. A server in the background, one with a root directory
    /// of its own, and one that connects again later all look from elsewhere.
    pub fn begin_in(&mut self, folder: &Path) {
        self.source = self.kind().word_in(folder);
        let Self { mount, state, tier2, store, tls_cert, tls_key, tls_client_ca, .. } = self;
        let of_exports = [mount, state, tier2, store, tls_cert, tls_key, tls_client_ca];
        let of_client = [&mut self.server_ca, &mut self.client_cert, &mut self.client_key];
        for path in of_exports.into_iter().chain(of_client).flatten() {
            *path = folder.join(&*path);
        }
    }

    /// The same for the sockets that it listens on. They are made before anything leaves the folder that it was started in, where a
    /// path is shorter: the addresses of unix sockets have room for 107 bytes.
    pub fn listen_in(&mut self, folder: &Path) {
        self.virtiofs = self.virtiofs.take().map(|path| folder.join(path));
        self.ninep = self.ninep.take().map(|address| address.in_folder(folder));
    }

    /// Whether there is any way to reach it.
    pub fn has_export(&self) -> bool {
        self.virtiofs.is_some() || self.fd.is_some() || self.mount.is_some() || self.ninep.is_some()
    }

    /// The tag that was given, or one made of the source's own name.
    pub fn tag_or_default(&self) -> Tag {
        self.tag.clone().unwrap_or_else(|| match self.kind() {
            Kind::Dir(path) | Kind::Pmem(path) | Kind::Image(path) => default_tag(&path),
            Kind::Mem => tag_from_name("mem"),
            Kind::Ninep(_) => tag_from_name("9p"),
        })
    }

    /// Returns the name in the table of mounts and in the log.
    pub fn name(&self) -> String {
        self.fsname.clone().unwrap_or_else(|| self.source.to_string_lossy().into_owned())
    }

    /// Returns the number of queues of its device.
    pub fn queue_count(&self) -> usize {
        self.queues.map_or_else(|| ferry_virtiofs::Options::default().queues, usize::from)
    }

    /// How long to poll, where it was given.
    pub fn poll(&self) -> Option<Duration> {
        self.poll_us.map(Duration::from_micros)
    }

    /// What is wrong with a share from a file: there, the table of flags has checked no value.
    pub fn check(&self) -> Result<(), String> {
        /// A value, its key, and its bounds.
        type Bounded = (Option<u64>, &'static str, u64, u64);
        let bounded: [Bounded; 16] = [
            (self.jobs.map(Into::into), "jobs", 0, JOBS_MAX.into()),
            (self.queues.map(Into::into), "queues", 1, QUEUES_MAX.into()),
            (self.poll_us, "poll-us", 0, POLL_US_MAX),
            (self.handler_timeout, "handler-timeout", 0, HANDLER_TIMEOUT_MAX),
            (self.entry_timeout, "entry-timeout", 0, TIMEOUT_MAX),
            (self.attr_timeout, "attr-timeout", 0, TIMEOUT_MAX),
            (self.negative_timeout, "negative-timeout", 0, TIMEOUT_MAX),
            (self.threads.map(Into::into), "threads", 1, THREADS_MAX.into()),
            (self.depth.map(Into::into), "depth", 1, DEPTH_MAX.into()),
            (self.in_flight.map(Into::into), "in-flight", 1, IN_FLIGHT_MAX.into()),
            (self.connections.map(Into::into), "connections", 1, CONNECTIONS_MAX.into()),
            (self.ninep_user.map(Into::into), "9p-user", 0, u64::from(u32::MAX) - 1),
            (self.patience, "patience", 1, PATIENCE_MAX),
            (self.ninep_connections.map(Into::into), "9p-connections", 1, CLIENTS_MAX.into()),
            (self.ninep_slow, "9p-slow", 1, CLIENT_SECONDS_MAX),
            (self.ninep_idle, "9p-idle", 1, CLIENT_SECONDS_MAX),
        ];
        for (value, key, min, max) in bounded {
            if let Some(value) = value.filter(|value| !(min..=max).contains(value)) {
                return Err(format!("{key} = {value} is not in {min}..={max}"));
            }
        }
        match (&self.virtiofs, self.fd) {
            _ if !self.has_export() => {
                Err("it needs virtiofs = \"SOCKET\" (or fd = N, or mount = \"DIR\", or 9p = \"ADDRESS\")".into())
            }
            (Some(_), Some(_)) => Err("it has both virtiofs and fd; keep one".into()),
            _ => self.contradiction().map_or(Ok(()), |why| Err(as_keys(&why))),
        }
    }

    /// The numbers of users and of groups on both sides.
    pub fn ids(&self) -> Result<(Ids, Ids), String> {
        if let Some(MapUser { uid, gid }) = self.map_user {
            return Ok((Ids::of_one(uid), Ids::of_one(gid)));
        }
        let ids = |rules: &[Rule], flag| Ids::new(rules).map_err(|error| format!("--{flag}: {error}"));
        Ok((ids(&self.translate_uid, "translate-uid")?, ids(&self.translate_gid, "translate-gid")?))
    }
}

fn parsed<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(input: D) -> Result<Option<T>, D::Error> {
    String::deserialize(input)?.parse().map(Some).map_err(serde::de::Error::custom)
}

fn all_parsed<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(input: D) -> Result<Vec<T>, D::Error> {
    let words = Vec::<String>::deserialize(input)?;
    words.iter().map(|word| word.parse()).collect::<Result<_, _>>().map_err(serde::de::Error::custom)
}
