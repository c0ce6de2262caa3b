//! The flags of one share: a source, and its exports.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use ferry_engine::PollLimit;
use ferry_idmap::{Ids, Rule, Xattrs};
use ferry_virtiofs::Tag;
use serde::{Deserialize, Deserializer};

use super::address::{Address, Users};
use super::limit::Limit;
use super::quota::Quota;
use super::source::Kind;
use super::values::{
    Acl, Cache, Carrier, DaxFiles, FileHandles, ImageDigest, MapUser, MigrationMode, OnMigrationError, Passthrough,
    Watch, Window, as_keys, default_tag, parsed, tag_from_name,
};
use crate::size::Size;

/// The maximum number of parallel requests to a registry.
pub const JOBS_MAX: u16 = 256;
/// Linux makes at most one request queue per CPU.
const QUEUES_MAX: u16 = 64;
/// More than a second of polling costs a whole CPU.
pub const POLL_US_MAX: u64 = 1_000_000;
/// One day; 0 means no limit.
const HANDLER_TIMEOUT_MAX: u64 = 86_400;
/// A hundred years.
pub const TIMEOUT_MAX: u64 = 100 * 366 * 86_400;
/// Ten times as many threads as the largest machines have CPUs per node.
const THREADS_MAX: u16 = 1024;
/// Each entry takes a buffer as large as the longest request, for every CPU.
const DEPTH_MAX: u16 = 256;
/// Each takes a tag; servers queue more requests than this.
const IN_FLIGHT_MAX: u16 = 4096;
/// The maximum number of connections to a 9P server.
const CONNECTIONS_MAX: u16 = 16;
/// The maximum number of 9P clients. Each takes a descriptor, of which a process has at most a million by default.
const CLIENTS_MAX: u32 = 1 << 20;
/// One day: the maximum of the timeouts of 9P clients.
const CLIENT_SECONDS_MAX: u64 = 86_400;
/// One week: the maximum time to wait for a 9P server that is being moved.
const PATIENCE_MAX: u64 = 7 * 86_400;

/// One source and its exports: a group of flags, or a `[[share]]` table.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct Share {
    /// A directory, mem, pmem:PATH, image:PATH, layers:DIR, or 9p: with unix:PATH, tcp:HOST:PORT[/TREE], tls: or vsock:.
    #[arg(index = 1, value_name = "SOURCE", required = false)]
    #[serde(alias = "dir")]
    pub source: PathBuf,

    /// Listen for a VMM on this socket (vhost-user-fs).
    #[arg(long, value_name = "SOCKET")]
    pub virtiofs: Option<PathBuf>,

    /// Listen on this inherited descriptor, a listening unix socket, instead of a path.
    #[arg(long, value_name = "N", conflicts_with = "virtiofs", help_heading = "Sockets and queues")]
    pub fd: Option<u16>,

    /// Let this group connect to the unix sockets (of virtiofs, 9p unix: and 9p vhost-user:) as well.
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
    /// QEMU and cloud-hypervisor take the tag from their own command line. User-mode Linux and crosvm read it from the device,
    /// which offers it only with this flag. QEMU 7.1 to 8.0 fails with a device that offers it: omit the flag there.
    #[arg(long, value_name = "NAME")]
    #[serde(deserialize_with = "parsed")]
    pub tag: Option<Tag>,

    /// Share read-only: refuse all changes.
    #[arg(long)]
    pub read_only: bool,

    /// Limit requests per second (iops=N, up to 1000000000), bytes per second (bps=SIZE, up to 1T), or both: iops=2000,bps=100M.
    ///
    /// Requests over the limit wait. Unused rate accumulates for up to burst=SECONDS (1 to 60) [default: a
    /// twentieth of a second]. Shares of this process with the same group=NAME use one limit together and get equal parts of
    /// it. The data of a request are what it asks to read or write; requests that only release something are free. With a
    /// limit there is no passthrough and no DAX window, because those bypass the limit. `ferry set` changes it.
    #[arg(long, value_name = "RATES")]
    #[serde(deserialize_with = "parsed")]
    pub limit: Option<Limit>,

    /// Number of request queues [default: the number of CPUs, at least 8].
    #[arg(long, value_name = "N", help_heading = "Sockets and queues")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    pub queues: Option<u16>,

    /// What the kernel of the guest, or of this host for a mount, may cache.
    ///
    /// With 9p:SERVER, the mode also selects what is cached of the server's data: with none and metadata nothing; with auto,
    /// until a file is opened again and has changed; with always, until memory runs out (for trees that no other client changes).
    #[arg(long, value_name = "MODE", default_value_t, value_enum, hide_possible_values = false)]
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
    /// With 9p:SERVER and --cache auto, only the client collects writes, as it always does: Linux would use its own length of a
    /// file and miss truncation by other clients.
    #[arg(long)]
    pub writeback: bool,

    /// Keep locks in the kernel of each guest or mount, as virtiofsd does: they do not conflict with locks of other guests, other
    /// mounts or the host, and taking one does not revalidate data. Closing a file that was opened for reading then does not wait
    /// for a reply (Linux 5.16; not with --writeback).
    #[arg(long, help_heading = "Caches and locks")]
    pub local_locks: bool,

    /// Allow idmapped mounts: `mount --bind -o X-mount.idmap`, containers with user namespaces (Linux 6.12).
    ///
    /// Linux then sends the caller's identity only with requests that create files. So fallocate and copy_file_range by root
    /// clear the set-user-id and set-group-id bits of a file, and names of trusted attributes are visible to all users.
    #[arg(long, help_heading = "Users and attributes")]
    pub allow_idmap: bool,

    /// Poll for the next request for up to this many microseconds before sleeping; 0 disables polling [default:
    /// adaptive].
    #[arg(long, value_name = "N", help_heading = "Sockets and queues")]
    #[arg(value_parser = clap::value_parser!(u64).range(..=POLL_US_MAX))]
    pub poll_us: Option<u64>,

    /// The maximum size of the directory's tree, a number with K, M, G or T, and of its number of files: 10G,files=100000.
    ///
    /// What does not fit fails with ENOSPC, and `df` shows the quota as the size of the file system. Space counts as allocated
    /// (as `du` counts), and each file, directory, link and the root as one file. The tree is counted at start, so that may take
    /// a while. A tree that already exceeds the quota cannot grow. With a quota there is no passthrough and no DAX window,
    /// because those bypass it. A background scan counts changes by other processes.
    #[arg(long, value_name = "SIZE[,files=N]", help_heading = "For directories")]
    #[serde(deserialize_with = "parsed")]
    pub quota: Option<Quota>,

    /// Pass the client's O_DIRECT on to the files of a directory.
    #[arg(long, help_heading = "For directories")]
    pub allow_direct_io: bool,

    /// Disable extended attributes and ACLs. This saves two requests per file of `ls -l`, and one at the first write to a new
    /// file. The mode of a file with an ACL then never grants more than the ACL.
    #[arg(long, help_heading = "Users and attributes")]
    pub no_xattr: bool,

    /// Send events to `ferry agent` in guests, so that inotify works there, and to Ferry's 9P clients, so that their caches stay
    /// valid. A server that runs as root adds work to every change on
    /// the file system of the directory; for other users, events are less exact.
    #[arg(long, help_heading = "For virtual machines")]
    pub events: bool,

    /// Whether guests check POSIX ACLs. Guests that do not check them see the mode of a file with an ACL reduced to what the ACL
    /// grants everybody. 9P clients see that mode, too, except with `always`: then they must mount with posixacl.
    #[arg(long, value_name = "WHEN", default_value_t, value_enum, help_heading = "For virtual machines")]
    pub posix_acl: Acl,

    /// Whether new files get the labels of the guest's security module (SELinux) [default: never]. Setting security.* on the host
    /// requires --modcaps=+sys_admin, or other names with --xattrmap.
    #[arg(long, value_name = "WHEN", value_enum, help_heading = "For virtual machines")]
    pub security_label: Option<Acl>,

    /// Exit when the first virtual machine disconnects, instead of waiting for the next one.
    #[arg(long, help_heading = "For virtual machines")]
    pub once: bool,

    /// Keep the guest's open files and the connection to its VMM in this directory, so that the server can end (or be killed) and
    /// restart with the same flags while the guest runs. The directory is created if needed; it must belong to this user, with mode
    /// 0700. A process ferry-keeper holds the state until the guest ends, or for ten minutes without a server. SIGTERM ends the
    /// server; SIGQUIT ends the server and its keeper.
    #[arg(long, value_name = "DIR", help_heading = "Restart and migration")]
    pub state: Option<PathBuf>,

    /// If the destination of a migration cannot find some of the guest's files by their paths: abort, or return errors to the
    /// guest for these files (guest-error).
    #[arg(long, value_name = "WHAT", default_value_t, value_enum, help_heading = "Restart and migration")]
    pub migration_on_error: OnMigrationError,

    /// How the destination of a migration finds the guest's files: by path, or, if both hosts share one file system, by file
    /// handle, whatever their current names. Both hosts must use the same mode: the sender of handles can name any file of that
    /// file system.
    #[arg(long, value_name = "HOW", default_value_t, value_enum, help_heading = "Restart and migration")]
    pub migration_mode: MigrationMode,

    /// Let the destination of a migration verify by file handle that each path leads to the same file. Both hosts must share one
    /// file system.
    #[arg(long, help_heading = "Restart and migration")]
    pub migration_verify_handles: bool,

    /// Refuse shared mappings of files whose data guests may not cache (--cache none and metadata).
    #[arg(long, help_heading = "For virtual machines")]
    pub no_mmap: bool,

    /// Disable READDIRPLUS: faster for listings of names only, several times slower for all others.
    #[arg(long, help_heading = "For virtual machines")]
    pub no_readdirplus: bool,

    /// The size of the DAX window, in which guests map files: a power of two from 2M to 256M, or off. The VMM must ask for the
    /// window: see "A DAX window" in the guide [default: 256M].
    #[arg(long, value_name = "SIZE", help_heading = "For virtual machines")]
    pub dax: Option<Window>,

    /// Which files are mapped if the guest leaves the choice to the server (mounts without dax, or with dax=inode): always,
    /// never, or size>N; without this flag, size>1M.
    #[arg(long, value_name = "WHICH", help_heading = "For virtual machines")]
    pub dax_files: Option<DaxFiles>,

    /// Show host file systems below the directory as separate mounts, each with its own inode numbers.
    #[arg(long, help_heading = "For directories")]
    pub announce_submounts: bool,

    /// Refer to files by file handles instead of open descriptors: never, prefer, mandatory.
    #[arg(long, value_name = "WHEN", default_value_t, value_enum, help_heading = "For directories")]
    pub inode_file_handles: FileHandles,

    /// Notify mounts at once of changes by other processes of the host. As root it adds work to every change on the
    /// directory's file system; other users watch the directories that the mount knows, up to 65,536 of them.
    #[arg(long, value_name = "WHEN", default_value_t, value_enum, help_heading = "For directories")]
    pub watch: Watch,

    /// Translate user ids: TYPE:FROM:TO:COUNT with TYPE one of map (client id 0 becomes host id 100000: map:0:100000:65536),
    /// guest, host (one direction), squash-guest, squash-host (all become TO), or forbid-guest:FROM:COUNT. Can be repeated.
    #[arg(long, value_name = "RULE", help_heading = "Users and attributes")]
    #[serde(deserialize_with = "all_parsed")]
    pub translate_uid: Vec<Rule>,

    /// Translate group ids, in the same way.
    #[arg(long, value_name = "RULE", help_heading = "Users and attributes")]
    #[serde(deserialize_with = "all_parsed")]
    pub translate_gid: Vec<Rule>,

    /// Let all clients act as one user, whose files they see as root's: auto (the user of this process), or UID:GID.
    #[arg(long, value_name = "WHO", help_heading = "Users and attributes")]
    #[arg(conflicts_with_all = ["translate_uid", "translate_gid"])]
    #[serde(deserialize_with = "parsed")]
    pub map_user: Option<MapUser>,

    /// Rename extended attributes, with the rules of virtiofsd: :map::user.virtiofs.: puts all of them below a prefix.
    #[arg(long, value_name = "RULES", help_heading = "Users and attributes")]
    #[serde(deserialize_with = "parsed")]
    pub xattrmap: Option<Xattrs>,

    /// The maximum size of the data in mem (metadata may take as much again), or the size of a new pmem file, which is allocated
    /// at once: a number with K, M, G or T [default: half of the memory; the size of the file].
    #[arg(long, value_name = "SIZE", help_heading = "For mem and pmem:PATH")]
    pub size: Option<Size>,

    /// Hold the data of mem in huge pages, and map pmem with them on persistent memory (DAX). It has no effect on other files and
    /// devices, which is logged.
    #[arg(long, help_heading = "For mem and pmem:PATH")]
    pub huge: bool,

    /// The second tier of pmem, a file or block device: when the first tier is more than 80 % full, files that were not used
    /// recently move there. Data that is read there moves back while the first tier is at most 60 % full; data that is written
    /// moves back at once.
    #[arg(long, value_name = "FILE", help_heading = "For mem and pmem:PATH")]
    pub tier2: Option<PathBuf>,

    /// The size of a new second tier, if it is a file.
    #[arg(long, value_name = "SIZE", requires = "tier2", help_heading = "For mem and pmem:PATH")]
    pub tier2_size: Option<Size>,

    /// The directory with the data of image files.
    #[arg(long, value_name = "DIR", help_heading = "For image:PATH")]
    pub store: Option<PathBuf>,

    /// Fail unless the image has this digest, which covers the whole tree.
    #[arg(long, value_name = "DIGEST", help_heading = "For image:PATH")]
    pub digest: Option<ImageDigest>,

    /// Fetch data that the store lacks from oci:HOST/NAME:TAG or s3:BUCKET/PREFIX:TAG when it is read, and the rest in the
    /// background. An image file that does not exist is fetched, too.
    #[arg(long, value_name = "REF", help_heading = "For image:PATH")]
    pub from: Option<String>,

    /// The maximum of parallel background requests; 0: fetch only what is read [default: 4].
    #[arg(long, value_name = "N", help_heading = "For image:PATH")]
    #[arg(value_parser = clap::value_parser!(u16).range(..=i64::from(JOBS_MAX)))]
    pub jobs: Option<u16>,

    /// Keep at most this much fetched data, and evict the least recently used; packs then stay incomplete. For 9p:SERVER: keep at
    /// most this much data in memory, from 16M [default: all; 256M for 9p:SERVER].
    #[arg(long, value_name = "SIZE", help_heading = "For image:PATH")]
    pub cache_size: Option<Size>,

    /// Fetch this much beyond each read, in build order. Also for layers:DIR [default: 256K, and for images up to 2M from a server that answers slowly].
    #[arg(long, value_name = "SIZE", help_heading = "For image:PATH")]
    pub fetch_ahead: Option<Size>,

    /// Limit background fetches so that all fetches stay below this many bytes per second; reads are never delayed.
    #[arg(long, value_name = "SIZE", help_heading = "For image:PATH")]
    pub fetch_rate: Option<Size>,

    /// Allow unencrypted HTTP to other machines. Also for layers:DIR.
    #[arg(long, help_heading = "For image:PATH")]
    pub plain_http: bool,

    /// Allow a tcp address that other machines can reach. The identity that clients claim is not verified.
    #[arg(id = "9p-remote", long = "9p-remote", help_heading = "For 9P")]
    #[serde(rename = "9p-remote")]
    pub ninep_remote: bool,

    /// The certificate chain of a tls address, in PEM.
    #[arg(long, value_name = "FILE", help_heading = "For 9P")]
    pub tls_cert: Option<PathBuf>,

    /// The key of the certificate, in PEM.
    #[arg(long, value_name = "FILE", help_heading = "For 9P")]
    pub tls_key: Option<PathBuf>,

    /// Accept only clients whose certificate is signed by one of these authorities, in PEM. Other machines can then reach the
    /// address without --9p-remote.
    #[arg(long, value_name = "FILE", help_heading = "For 9P")]
    pub tls_client_ca: Option<PathBuf>,

    /// The user that 9P clients act as: client (the user that they claim; their kernel checks permissions), only=UID,UID... (only
    /// these users of this host; the server checks permissions), or UID:GID (always this user; the server checks permissions)
    /// [default: client].
    ///
    /// The server must be root, or the only user that is named.
    #[arg(id = "9p-users", long = "9p-users", value_name = "WHO", help_heading = "For 9P")]
    #[serde(rename = "9p-users")]
    pub ninep_users: Option<Users>,

    /// The maximum message size that 9P clients can negotiate, from 4K to 16M [default: 4M].
    #[arg(id = "9p-msize", long = "9p-msize", value_name = "SIZE", help_heading = "For 9P")]
    #[serde(rename = "9p-msize")]
    pub ninep_msize: Option<Size>,

    /// The maximum number of 9P connections. At the limit, the client with the most connections (a user of this host, or a
    /// machine) loses one to a new client [default: 1024].
    #[arg(id = "9p-connections", long = "9p-connections", value_name = "N", help_heading = "For 9P")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(CLIENTS_MAX)))]
    #[serde(rename = "9p-connections")]
    pub ninep_connections: Option<u32>,

    /// Seconds in which a 9P client must attach, complete a message, or accept more bytes of a reply [default: 30].
    #[arg(id = "9p-slow", long = "9p-slow", value_name = "SECONDS", help_heading = "For 9P")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=CLIENT_SECONDS_MAX))]
    #[serde(rename = "9p-slow")]
    pub ninep_slow: Option<u64>,

    /// Disconnect a 9P client after this many seconds without a request [default: never, because unused mounts send none].
    #[arg(id = "9p-idle", long = "9p-idle", value_name = "SECONDS", help_heading = "For 9P")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=CLIENT_SECONDS_MAX))]
    #[serde(rename = "9p-idle")]
    pub ninep_idle: Option<u64>,

    /// Disable read-ahead for 9P clients that read sequentially.
    #[arg(id = "9p-no-read-ahead", long = "9p-no-read-ahead", help_heading = "For 9P")]
    #[serde(rename = "9p-no-read-ahead")]
    pub ninep_no_read_ahead: bool,

    /// The maximum message size to negotiate with the server, up to 64M [default: 1M].
    #[arg(long, value_name = "SIZE", help_heading = "For 9p:SERVER")]
    pub msize: Option<Size>,

    /// Requests in flight to the server, per connection [default: 64].
    #[arg(long, value_name = "N", help_heading = "For 9p:SERVER")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(IN_FLIGHT_MAX)))]
    pub in_flight: Option<u16>,

    /// Connections to the server: more than one for networks that limit each connection [default: 1].
    #[arg(long, value_name = "N", help_heading = "For 9p:SERVER")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=i64::from(CONNECTIONS_MAX)))]
    pub connections: Option<u16>,

    /// The user id that the server sees; new files belong to the user that creates them [default: yours].
    #[arg(id = "9p-user", long = "9p-user", value_name = "UID", help_heading = "For 9p:SERVER")]
    #[arg(value_parser = clap::value_parser!(u32).range(..i64::from(u32::MAX)))]
    #[serde(rename = "9p-user")]
    pub ninep_user: Option<u32>,

    /// Seconds for which requests wait for a lost server before they fail with EIO; after that they fail at once until the server
    /// is back. Requests of mounts also fail after --handler-timeout [default: 60].
    #[arg(long, value_name = "SECONDS", help_heading = "For 9p:SERVER")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=PATIENCE_MAX))]
    pub patience: Option<u64>,

    /// The tree of the server, for addresses that cannot name one (unix:PATH) [default: that of the address, or the server's only
    /// one].
    #[arg(id = "9p-tree", long = "9p-tree", value_name = "TREE", help_heading = "For 9p:SERVER")]
    #[serde(rename = "9p-tree")]
    pub ninep_tree: Option<PathBuf>,

    /// The authorities that sign the certificate of a tls server, in PEM.
    #[arg(long, value_name = "FILE", help_heading = "For 9p:SERVER")]
    pub server_ca: Option<PathBuf>,

    /// The client certificate for a tls server, in PEM.
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
    pub allow_other: bool,

    /// Allow mounting on a directory that is not empty; its contents are hidden.
    #[arg(long, help_heading = "For mounts")]
    pub nonempty: bool,

    /// The source in the mount table [default: the source].
    #[arg(long, value_name = "NAME", help_heading = "For mounts")]
    pub fsname: Option<String>,

    /// Fail requests with EIO after this many seconds; 0: never [default: 120].
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
    /// Returns the kind of its source.
    pub fn kind(&self) -> Kind {
        Kind::of(&self.source)
    }

    /// Makes its paths absolute, relative to `directory`: background servers, servers with another root directory and reconnecting
    /// clients run in another directory.
    pub fn resolve_paths(&mut self, directory: &Path) {
        self.source = self.kind().word_in(directory);
        let Self { mount, state, tier2, store, tls_cert, tls_key, tls_client_ca, .. } = self;
        let of_exports = [mount, state, tier2, store, tls_cert, tls_key, tls_client_ca];
        let of_client = [&mut self.server_ca, &mut self.client_cert, &mut self.client_key];
        for path in of_exports.into_iter().chain(of_client).flatten() {
            *path = directory.join(&*path);
        }
    }

    /// The same for its listening sockets. The command line leaves them relative, because a unix socket address holds only 107
    /// bytes and the sockets are created before the process changes directory.
    pub fn resolve_sockets(&mut self, directory: &Path) {
        self.virtiofs = self.virtiofs.take().map(|path| directory.join(path));
        self.ninep = self.ninep.take().map(|address| address.in_directory(directory));
    }

    /// Whether it has an export.
    pub fn has_export(&self) -> bool {
        self.virtiofs.is_some() || self.fd.is_some() || self.mount.is_some() || self.ninep.is_some()
    }

    /// Returns the given tag, or one made from the name of the source.
    pub fn tag_or_default(&self) -> Tag {
        self.tag.clone().unwrap_or_else(|| match self.kind() {
            Kind::Dir(path) | Kind::Pmem(path) | Kind::Image(path) | Kind::Layers(path) => default_tag(&path),
            Kind::Mem => tag_from_name("mem"),
            Kind::Ninep(_) => tag_from_name("9p"),
        })
    }

    /// Returns the name in the mount table and in the log.
    pub fn name(&self) -> String {
        self.fsname.clone().unwrap_or_else(|| self.source.to_string_lossy().into_owned())
    }

    /// Returns the number of queues of its device.
    pub fn queue_count(&self) -> usize {
        self.queues.map_or_else(|| ferry_virtiofs::Options::default().queues, usize::from)
    }

    /// Returns the limit of polling of its devices.
    pub fn poll(&self) -> PollLimit {
        let default = || ferry_virtiofs::Options::default().poll;
        self.poll_us.map_or_else(default, |us| Duration::from_micros(us).into())
    }

    /// Checks that a share of a configuration file is complete and has no conflicting flags.
    pub fn check(&self) -> Result<(), String> {
        match (&self.virtiofs, self.fd) {
            _ if self.source.as_os_str().is_empty() => Err("it needs source = \"SOURCE\"".into()),
            _ if !self.has_export() => {
                Err("it needs virtiofs = \"SOCKET\" (or fd = N, or mount = \"DIR\", or 9p = \"ADDRESS\")".into())
            }
            (Some(_), Some(_)) => Err("it has both virtiofs and fd; keep one".into()),
            _ => self.contradiction().map_or(Ok(()), |why| Err(as_keys(&why))),
        }
    }

    /// Returns the translations of user ids and group ids.
    pub fn ids(&self) -> Result<(Ids, Ids), String> {
        if let Some(MapUser { uid, gid }) = self.map_user {
            return Ok((Ids::of_one(uid), Ids::of_one(gid)));
        }
        let ids = |rules: &[Rule], flag| Ids::new(rules).map_err(|error| format!("--{flag}: {error}"));
        Ok((ids(&self.translate_uid, "translate-uid")?, ids(&self.translate_gid, "translate-gid")?))
    }
}

fn all_parsed<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(input: D) -> Result<Vec<T>, D::Error> {
    let words = Vec::<String>::deserialize(input)?;
    words.iter().map(|word| word.parse()).collect::<Result<_, _>>().map_err(serde::de::Error::custom)
}
