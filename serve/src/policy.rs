//! Cache policy, and the options negotiated at INIT.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferry_vfs::sync::lock;
use ferry_vfs::{Attr, ByNumber, Features, FileSystem, Ino, OFlags};
use ferry_wire::fuse::{InitFlags, InitOptions, Negotiated, OpenFlags, Timeouts};

use crate::ShareOptions;
use crate::session::Session;

/// What a client may cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// Nothing: every lookup, getattr and read is a request.
    None,
    /// Names and attributes for a second; data and size until the next open or a notified change (close-to-open).
    #[default]
    Auto,
    /// Names and attributes as for [`Self::Always`], data not at all.
    Metadata,
    /// Everything, until the client drops it or is notified of a change. Only for sources that report the changes of
    /// others.
    Always,
}

/// Whether clients check POSIX ACLs; also whether new files get security labels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Acl {
    /// Never: these attributes are like any other.
    Never,
    /// If both source and client support them.
    #[default]
    Auto,
    /// Always: clients without support are refused; all clients are if the source has none.
    Always,
}

/// How long `Auto` caches names and attributes.
const AUTO_TIMEOUT: Duration = Duration::from_secs(1);
/// How long `Always` caches them.
const ALWAYS_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);
/// The timeout while an agent holds a lease: the maximum age of cached state if both the agent and its guard die.
const LEASED_TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// The maximum timeout of names for clients without `NOTIFY_INC_EPOCH`: after missed or too many changes, they cannot
/// be told to drop all names.
const NO_EPOCH_TIMEOUT: Duration = Duration::from_secs(30);
/// The first minor version with `NOTIFY_INC_EPOCH` (Linux 6.16).
pub const EPOCH_MINOR: u32 = 44;

/// A timeout that can be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timeout {
    /// Names.
    Entry,
    /// Attributes.
    Attr,
    /// That a name does not exist.
    Negative,
}

/// The timeouts that were set; `None`: that of the cache mode.
#[derive(Clone, Copy, Debug)]
struct ChosenTimeouts {
    entry: Option<Duration>,
    attr: Option<Duration>,
    negative: Option<Duration>,
}

/// A timeout that is read per reply and may change while the share is served.
#[derive(Debug, Default)]
struct Lifetime(AtomicU64);

impl Lifetime {
    fn get(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    fn set(&self, time: Duration) {
        self.0.store(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// How long a client may cache names.
#[derive(Debug, Default)]
struct Names {
    entry: Lifetime,
    /// For names that do not exist.
    negative: Lifetime,
}

/// Which files need a FLUSH when they are closed. It releases locks and publishes data.
#[derive(Clone, Copy, Debug)]
enum FlushPolicy {
    Always,
    /// Files that were opened for writing.
    NotForReaders,
    Never,
}

/// The share's policy. All but the timeouts is constant.
#[derive(Debug)]
pub(crate) struct Policy {
    cache: Cache,
    chosen: Mutex<ChosenTimeouts>,
    /// The timeout of the cache mode.
    default_timeout: Duration,
    /// Clients are notified of changes.
    receives_notifications: bool,
    /// But ignore those about absent names.
    keeps_absent_names: bool,
    attr_timeout: Lifetime,
    /// Long timeouts apply only while the client has an agent; otherwise those of `Auto`.
    is_leased: bool,
    names: Names,
    /// For clients without `NOTIFY_INC_EPOCH`.
    names_without_epoch: Names,
    direct_opens: bool,
    flush_policy: FlushPolicy,
    /// OPEN checks the size if the client caches attributes.
    revalidates: bool,
    wanted: InitOptions,
    /// INIT is refused without these.
    pub(crate) required: InitFlags,
}

impl Policy {
    /// `publishes`: whether the source reports changes.
    pub(crate) fn new(options: &ShareOptions, features: Features, publishes: bool) -> Self {
        // OPEN need not revalidate files that never change.
        let cache = match options.cache {
            Cache::Auto if features.constant => Cache::Always,
            cache => cache,
        };
        let is_long = matches!(cache, Cache::Metadata | Cache::Always);
        let is_leased = options.events && is_long && !features.constant;
        let default = match cache {
            Cache::None => Duration::ZERO,
            Cache::Auto => AUTO_TIMEOUT,
            _ if is_leased => LEASED_TIMEOUT,
            Cache::Metadata | Cache::Always => ALWAYS_TIMEOUT,
        };
        let attr_timeout = options.attr_timeout.unwrap_or(default);
        let entry = options.entry_timeout.unwrap_or(default);
        let mut flags = InitFlags::ASYNC_READ
            | InitFlags::ATOMIC_O_TRUNC
            | InitFlags::BIG_WRITES
            | InitFlags::DONT_MASK
            | InitFlags::HAS_IOCTL_DIR
            | InitFlags::ASYNC_DIO
            | InitFlags::PARALLEL_DIROPS
            | InitFlags::ABORT_ERROR
            | InitFlags::HANDLE_KILLPRIV_V2
            | InitFlags::SETXATTR_EXT
            | InitFlags::CREATE_SUPP_GROUP;
        // Entries that expire at once are not worth sending. Otherwise every listing includes its inodes:
        // READDIRPLUS_AUTO would do so only for the first 4 KiB of a directory, and a walk that looks at every file
        // (find, ls -l, du, git) would send a LOOKUP for each of the others.
        if options.readdirplus && !(entry.is_zero() && attr_timeout.is_zero()) {
            flags |= InitFlags::DO_READDIRPLUS;
        }
        let are_locks_local = options.local_locks || options.single_client;
        let has_locks = (features.posix_locks || features.flock) && !are_locks_local;
        let caches_constant = features.constant && cache == Cache::Always;
        let omits_opens = caches_constant && !has_locks;
        if omits_opens {
            // Without OPEN requests the client would truncate its own view only.
            flags -= InitFlags::ATOMIC_O_TRUNC;
        }
        let acl = options.posix_acl != Acl::Never && features.posix_acl && options.xattr;
        let optional = [
            (features.posix_locks && !are_locks_local, InitFlags::POSIX_LOCKS),
            (features.flock && !are_locks_local, InitFlags::FLOCK_LOCKS),
            // Agents open directories that the client knows by file handles.
            (features.by_number == ByNumber::Any || options.events, InitFlags::EXPORT_SUPPORT),
            // File handles that fail once the client has forgotten the inode are worse than none.
            (features.by_number != ByNumber::Any && !options.events, InitFlags::NO_EXPORT_SUPPORT),
            (acl, InitFlags::POSIX_ACL),
            (options.security_label != Acl::Never && options.xattr, InitFlags::SECURITY_CTX),
            (options.mmap, InitFlags::DIRECT_IO_ALLOW_MMAP),
            // Without OPEN no error would refuse writes, and they would seem to succeed.
            (options.writeback && !omits_opens, InitFlags::WRITEBACK_CACHE),
            (options.allow_idmap, InitFlags::ALLOW_IDMAP),
            (cache == Cache::Auto || options.events, InitFlags::AUTO_INVAL_DATA),
            (is_long, InitFlags::CACHE_SYMLINKS),
            (caches_constant, InitFlags::NO_OPENDIR_SUPPORT),
            (omits_opens, InitFlags::NO_OPEN_SUPPORT),
        ];
        for (_, flag) in optional.into_iter().filter(|(wanted, _)| *wanted) {
            flags |= flag;
        }
        let wanted = InitOptions { flags, ..InitOptions::default() };
        let mandatory = [(options.posix_acl, InitFlags::POSIX_ACL), (options.security_label, InitFlags::SECURITY_CTX)];
        let mandatory = mandatory.into_iter().filter(|(when, _)| *when == Acl::Always);
        let required = mandatory.fold(InitFlags::empty(), |required, (_, flag)| required | flag);
        let direct_opens = options.direct_opens;
        // A source that waits for another server would be called at each open.
        let revalidates = (cache == Cache::Auto || is_leased) && !features.waits;
        let flush_policy = match () {
            () if options.single_client => FlushPolicy::Never,
            () if options.local_locks || features.constant && !features.posix_locks => FlushPolicy::NotForReaders,
            () => FlushPolicy::Always,
        };
        let chosen = ChosenTimeouts {
            entry: options.entry_timeout,
            attr: options.attr_timeout,
            negative: options.negative_timeout,
        };
        let policy = Self {
            cache,
            chosen: Mutex::new(chosen),
            default_timeout: default,
            receives_notifications: options.notifications && publishes,
            keeps_absent_names: options.keeps_absent_names,
            attr_timeout: Lifetime::default(),
            is_leased,
            names: Names::default(),
            names_without_epoch: Names::default(),
            direct_opens,
            flush_policy,
            revalidates,
            wanted,
            required,
        };
        policy.apply(&chosen);
        policy
    }

    /// Sets a timeout from the next reply on; `None`: that of the cache mode. Entries that clients have cached keep
    /// theirs.
    pub(crate) fn set_timeout(&self, timeout: Timeout, time: Option<Duration>) {
        let mut chosen = lock(&self.chosen);
        match timeout {
            Timeout::Entry => chosen.entry = time,
            Timeout::Attr => chosen.attr = time,
            Timeout::Negative => chosen.negative = time,
        }
        self.apply(&chosen);
    }

    fn apply(&self, chosen: &ChosenTimeouts) {
        let default = self.default_timeout;
        let entry = chosen.entry.unwrap_or(default);
        // Another client may create the name at any time, and seeing it late is worse than seeing old attributes.
        let is_cached = default > AUTO_TIMEOUT && !(self.receives_notifications && self.keeps_absent_names);
        let negative = chosen.negative.unwrap_or(if is_cached { entry } else { Duration::ZERO });
        let bound = |chosen: Option<Duration>, timeout: Duration| match chosen {
            None if self.receives_notifications => timeout.min(NO_EPOCH_TIMEOUT),
            _ => timeout,
        };
        self.attr_timeout.set(chosen.attr.unwrap_or(default));
        self.names.entry.set(entry);
        self.names.negative.set(negative);
        self.names_without_epoch.entry.set(bound(chosen.entry, entry));
        self.names_without_epoch.negative.set(bound(chosen.negative, negative));
    }

    fn names(&self, agreed: &Negotiated) -> &Names {
        if agreed.minor < EPOCH_MINOR { &self.names_without_epoch } else { &self.names }
    }

    /// Whether listings may omit inodes that the client does not look at; not if it caches names longer than
    /// attributes.
    pub(crate) fn tries_listings(&self) -> bool {
        self.attr_timeout.get() >= self.names.entry.get()
    }

    /// Whether OPEN checks the size although the client caches attributes.
    pub(crate) fn close_to_open(&self, session: &Session) -> bool {
        self.revalidates_attrs() && (!self.is_leased || self.has_lapsed(session))
    }

    /// The same without regard to leases.
    fn revalidates_attrs(&self) -> bool {
        self.revalidates && !self.attr_timeout.get().is_zero()
    }

    /// Whether long timeouts depend on agents.
    pub(crate) fn is_leased(&self) -> bool {
        self.is_leased
    }

    /// Whether the client should have an agent's lease and has none.
    fn has_lapsed(&self, session: &Session) -> bool {
        self.is_leased && !session.events.lease.is_valid()
    }

    fn timeouts_max(&self, agreed: &Negotiated) -> Timeouts {
        Timeouts { entry: self.names(agreed).entry.get(), attr: self.attr_timeout.get() }
    }

    /// Whether the long timeouts of a client do not hold for an inode: it is not told of all its changes.
    pub(crate) fn misses_changes(&self, session: &Session, source: &dyn FileSystem, ino: Ino) -> bool {
        self.has_lapsed(session) || (self.receives_notifications || self.is_leased) && !source.is_watched(ino)
    }

    /// Returns how long a client may cache names and attributes; `misses_changes`: as [`Self::misses_changes`] says of the inode.
    pub(crate) fn timeouts(&self, session: &Session, misses_changes: bool) -> Timeouts {
        let Timeouts { entry, attr } = self.timeouts_max(session.negotiated());
        let bound = if misses_changes { AUTO_TIMEOUT } else { Duration::MAX };
        Timeouts { entry: entry.min(bound), attr: attr.min(bound) }
    }

    /// Returns how long a client may cache this inode.
    pub(crate) fn timeouts_of(&self, session: &Session, misses_changes: bool, ino: Ino, attr: &Attr) -> Timeouts {
        let timeouts = self.timeouts(session, misses_changes);
        Timeouts { attr: timeouts.attr.min(Self::attr_timeout_max(session, ino, attr)), ..timeouts }
    }

    /// With `HANDLE_KILLPRIV_V2` a client's kernel does not update its cached mode when a write clears suid and sgid,
    /// and would execute the file as its owner. So it must not cache attributes of such files, and requests them
    /// before it executes one.
    fn attr_timeout_max(session: &Session, ino: Ino, attr: &Attr) -> Duration {
        match &session.passthrough {
            _ if attr.is_set_id() => Duration::ZERO,
            Some(passthrough) => passthrough.attr_timeout_max(ino),
            None => Duration::MAX,
        }
    }

    /// Returns how long a client may cache that a directory has no such name.
    pub(crate) fn negative_timeout(&self, session: &Session, source: &dyn FileSystem, dir: Ino) -> Duration {
        match self.names(session.negotiated()).negative.get() {
            negative if negative.is_zero() || self.misses_changes(session, source, dir) => Duration::ZERO,
            negative => negative,
        }
    }

    /// Returns the options that all exports of the share request at INIT; each adds its own.
    pub(crate) fn init_options(&self) -> InitOptions {
        self.wanted
    }

    /// Returns the flags of the reply to an OPEN with these flags. `in_window`: the client reads and writes the file
    /// in its DAX window.
    pub(crate) fn file_flags(
        &self,
        session: &Session,
        (source, ino): (&dyn FileSystem, Ino),
        flags: OFlags,
        in_window: bool,
    ) -> OpenFlags {
        // Linux allows opens of one inode with and without DIRECT_IO at a time: `fuse_file_io_open` counts only the
        // latter, and excludes only passthrough.
        let direct = self.direct_opens && flags.contains(OFlags::DIRECT);
        let open_flags = match self.cache {
            _ if direct => OpenFlags::DIRECT_IO | OpenFlags::PARALLEL_DIRECT_WRITES,
            Cache::None | Cache::Metadata => OpenFlags::DIRECT_IO | OpenFlags::PARALLEL_DIRECT_WRITES,
            Cache::Auto => OpenFlags::PARALLEL_DIRECT_WRITES,
            Cache::Always if self.misses_changes(session, source, ino) => OpenFlags::PARALLEL_DIRECT_WRITES,
            Cache::Always => OpenFlags::KEEP_CACHE | OpenFlags::PARALLEL_DIRECT_WRITES,
        };
        // In the window there is no page cache to bypass. With DIRECT_IO, a WRITE that extends the file would fail
        // with EBUSY: Linux cannot invalidate the window's stores where it begins (`invalidate_inode_pages2_range` in
        // `fuse_direct_io`).
        let open_flags = if in_window { open_flags - OpenFlags::DIRECT_IO } else { open_flags };
        open_flags | self.close_flags(flags)
    }

    /// Returns NOFLUSH unless closing such a file needs a FLUSH. A writable file of several clients does: FLUSH
    /// publishes stores through mappings and reports write errors.
    pub(crate) fn close_flags(&self, flags: OFlags) -> OpenFlags {
        match self.flush_policy {
            FlushPolicy::NotForReaders if flags & OFlags::ACCMODE != OFlags::RDONLY => OpenFlags::empty(),
            FlushPolicy::Always => OpenFlags::empty(),
            FlushPolicy::NotForReaders | FlushPolicy::Never => OpenFlags::NOFLUSH,
        }
    }

    /// Returns the flags of the reply to OPENDIR.
    pub(crate) fn dir_flags(&self, session: &Session, source: &dyn FileSystem, ino: Ino) -> OpenFlags {
        match self.cache {
            Cache::None | Cache::Auto => OpenFlags::empty(),
            _ if self.misses_changes(session, source, ino) => OpenFlags::empty(),
            Cache::Metadata | Cache::Always => OpenFlags::KEEP_CACHE | OpenFlags::CACHE_DIR,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the timeouts of entries, attributes and negative names, for a client of this minor version.
    fn timeouts_of(options: &ShareOptions, publishes: bool, minor: u32) -> (Duration, Duration, Duration) {
        let policy = Policy::new(options, Features::default(), publishes);
        let agreed = Negotiated { minor, ..Negotiated::BEFORE_INIT };
        let timeouts = policy.timeouts_max(&agreed);
        (timeouts.entry, timeouts.attr, policy.names(&agreed).negative.get())
    }

    #[test]
    fn caches_last_as_the_mode_or_the_option_says() {
        let zero = Duration::ZERO;
        for (cache, expected) in [
            (Cache::None, (zero, zero, zero)),
            (Cache::Auto, (AUTO_TIMEOUT, AUTO_TIMEOUT, zero)),
            (Cache::Metadata, (ALWAYS_TIMEOUT, ALWAYS_TIMEOUT, ALWAYS_TIMEOUT)),
            (Cache::Always, (ALWAYS_TIMEOUT, ALWAYS_TIMEOUT, ALWAYS_TIMEOUT)),
        ] {
            let plain = ShareOptions { cache, notifications: true, ..ShareOptions::default() };
            assert_eq!(timeouts_of(&plain, true, EPOCH_MINOR), expected, "{cache:?}");
            let [entry, attr, negative] = [70, 80, 90].map(Duration::from_secs);
            let (entry_timeout, attr_timeout, negative_timeout) = (Some(entry), Some(attr), Some(negative));
            let chosen = ShareOptions { entry_timeout, attr_timeout, negative_timeout, ..plain };
            for minor in [EPOCH_MINOR - 1, EPOCH_MINOR] {
                assert_eq!(timeouts_of(&chosen, true, minor), (entry, attr, negative), "{cache:?}");
            }
        }
    }

    /// As with FUSE mounts of Linux 6.19 to 7.1.
    #[test]
    fn absence_is_not_cached_by_a_kernel_that_keeps_absent_names() {
        let options = ShareOptions {
            cache: Cache::Always,
            notifications: true,
            keeps_absent_names: true,
            ..ShareOptions::default()
        };
        let negative = |policy: &Policy| policy.names.negative.get();
        let policy = Policy::new(&options, Features::default(), true);
        assert_eq!(negative(&policy), Duration::ZERO);
        for (time, expected) in [(Some(Duration::from_secs(9)), Duration::from_secs(9)), (None, Duration::ZERO)] {
            policy.set_timeout(Timeout::Negative, time);
            assert_eq!(negative(&policy), expected);
        }
        // A source that never changes.
        assert_eq!(negative(&Policy::new(&options, Features::default(), false)), ALWAYS_TIMEOUT);
    }

    #[test]
    fn an_agent_vouches_for_some_minutes() {
        for (cache, expected, negative) in [
            (Cache::Auto, AUTO_TIMEOUT, Duration::ZERO),
            (Cache::Metadata, LEASED_TIMEOUT, LEASED_TIMEOUT),
            (Cache::Always, LEASED_TIMEOUT, LEASED_TIMEOUT),
        ] {
            let options = ShareOptions { cache, events: true, ..ShareOptions::default() };
            assert_eq!(timeouts_of(&options, true, EPOCH_MINOR), (expected, expected, negative), "{cache:?}");
        }
    }

    #[test]
    fn times_change_while_they_are_used() {
        let options = ShareOptions { notifications: true, ..ShareOptions::default() };
        for cache in [Cache::None, Cache::Auto, Cache::Metadata, Cache::Always] {
            let policy = Policy::new(&ShareOptions { cache, ..options.clone() }, Features::default(), true);
            for minor in [EPOCH_MINOR - 1, EPOCH_MINOR] {
                let agreed = Negotiated { minor, ..Negotiated::BEFORE_INIT };
                let now = || {
                    let timeouts = policy.timeouts_max(&agreed);
                    (timeouts.entry, timeouts.attr, policy.names(&agreed).negative.get())
                };
                let before = now();
                let [entry, attr, negative] = [70, 80, 90].map(Duration::from_secs);
                policy.set_timeout(Timeout::Attr, Some(attr));
                assert_eq!(now(), (before.0, attr, before.2), "{cache:?}");
                policy.set_timeout(Timeout::Entry, Some(entry));
                policy.set_timeout(Timeout::Negative, Some(negative));
                assert_eq!(now(), (entry, attr, negative), "{cache:?}");
                assert!(policy.tries_listings() && policy.revalidates_attrs() == (cache == Cache::Auto));
                policy.set_timeout(Timeout::Attr, Some(Duration::ZERO));
                assert!(!policy.tries_listings() && !policy.revalidates_attrs());
                // The longest timeout that a flag accepts.
                let longest = Duration::from_secs(100 * 366 * 86_400);
                policy.set_timeout(Timeout::Attr, Some(longest));
                assert_eq!(now().1, longest);
                for timeout in [Timeout::Entry, Timeout::Attr, Timeout::Negative] {
                    policy.set_timeout(timeout, None);
                }
                assert_eq!(now(), before, "{cache:?}");
            }
        }
    }

    #[test]
    fn names_expire_sooner_without_complete_invalidation() {
        for (cache, notifications, publishes, expected) in [
            (Cache::Always, true, true, (NO_EPOCH_TIMEOUT, ALWAYS_TIMEOUT, NO_EPOCH_TIMEOUT)),
            (Cache::Always, true, false, (ALWAYS_TIMEOUT, ALWAYS_TIMEOUT, ALWAYS_TIMEOUT)),
            (Cache::Always, false, true, (ALWAYS_TIMEOUT, ALWAYS_TIMEOUT, ALWAYS_TIMEOUT)),
            (Cache::Auto, true, true, (AUTO_TIMEOUT, AUTO_TIMEOUT, Duration::ZERO)),
        ] {
            let options = ShareOptions { cache, notifications, ..ShareOptions::default() };
            assert_eq!(
                timeouts_of(&options, publishes, EPOCH_MINOR - 1),
                expected,
                "{cache:?} {notifications} {publishes}"
            );
        }
    }
}
