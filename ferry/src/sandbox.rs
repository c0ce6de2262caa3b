//! The sandbox of a process that shares directories or serves disks: its parts, their order, and the messages if a part is not
//! available.
//!
//! Sockets are created before the sandbox; a process stays outside, removes their files at the end, and is the one that users
//! know. Disks, flat images and persistent memory are also opened before, and need no path afterwards: the sandbox contains their
//! descriptors, and none of a directory. Directories, and the stores of composefs images, are opened inside. No thread is started
//! before the sandbox is complete, except those that connect to servers, which have their own sandbox.

mod connector;

use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};
pub use connector::ServerAccess;
use ferry_9p_client::Connector;
use ferry_isolation::{
    Access, Action, BlockedSignals, Capabilities, Filter, LandlockRules, LandlockStatus, Role, Root, Split, Supervisor,
    View,
};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use serde::Deserialize;

use crate::flags::{FileHandles, Kind, Share, Watch};
use crate::new_files::NewFiles;
use crate::output::say;
use crate::service_manager;
use crate::size::deserialize_from_str;

/// Linux's id for users without a mapping (`/proc/sys/kernel/overflowuid`).
const NOBODY: u32 = 65_534;

/// The process that users know, if it is not this one.
static PUBLIC_PID: OnceLock<u32> = OnceLock::new();
/// Set in a user namespace that maps only this process's user.
static HAS_SINGLE_USER: OnceLock<()> = OnceLock::new();

/// The filters of threads with one task; unset without seccomp.
static THREAD_FILTERS: OnceLock<ThreadFilters> = OnceLock::new();

/// One for the threads of each of these roles.
struct ThreadFilters {
    worker: Filter,
    disk: Filter,
    mapper: Filter,
}

/// Returns the id of the process that the user started.
pub fn pid() -> u32 {
    PUBLIC_PID.get().copied().unwrap_or_else(std::process::id)
}

/// Records that the user started this process, before it forks.
pub fn set_public_pid() {
    // A process that forks again keeps the first one.
    let _ = PUBLIC_PID.set(std::process::id());
}

/// Drops all rights except those to wait and to remove socket files from directories of any owner.
pub fn confine_supervisor(sandbox_flags: &SandboxFlags) -> Result<()> {
    Capabilities::ALL_USERS.limit(Capabilities::NONE)?;
    ferry_isolation::no_new_privileges()?;
    // The process inside reports missing seccomp.
    sandbox_flags.filter(Role::Supervisor)?;
    Ok(())
}

/// Whether a peer is this user or root, which has no id in a user namespace.
pub fn may_access(peer: u32) -> bool {
    // The permissions of the directory exclude all other users.
    let unnamed = HAS_SINGLE_USER.get().is_some() && peer == NOBODY;
    peer == 0 || peer == rustix::process::geteuid().as_raw() || unnamed
}

/// What the process can see of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sandbox {
    /// Namespaces of mounts, processes and networks (and users, for users other than root), a root directory that contains only
    /// what is shared, and Landlock. For 9p:SERVER, the thread that connects stays in this host's network, and sees the directory of
    /// a unix socket, which must not be created again, or the files for host name lookups as they are at the start.
    Namespace,
    /// The only shared directory becomes the root directory; Landlock. Only for root.
    Chroot,
    /// Everything.
    None,
}

/// The action on a system call that a file server does not need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Seccomp {
    /// End the process.
    Kill,
    /// Write to the kernel's log.
    Log,
    /// Send SIGSYS, for debuggers.
    Trap,
    /// No filter.
    None,
}

/// Additional capabilities to keep or drop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Modcaps(String);

impl FromStr for Modcaps {
    type Err = String;

    fn from_str(list: &str) -> Result<Self, String> {
        Capabilities::NONE.modified(list).map(|_| Self(list.into())).map_err(|error| error.to_string())
    }
}

deserialize_from_str!(Modcaps);

impl fmt::Display for Modcaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The sandbox flags. They apply to the whole process.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Confinement")]
pub struct SandboxFlags {
    /// What the process can see of this host [default: namespace, or the available part of it].
    #[arg(long, value_enum, value_name = "KIND")]
    pub sandbox: Option<Sandbox>,

    /// The action on a system call that the process does not need [default: kill].
    #[arg(long, value_enum, value_name = "ACTION")]
    pub seccomp: Option<Seccomp>,

    /// Additional capabilities to keep or drop: +sys_admin:-mknod.
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    pub modcaps: Option<Modcaps>,
}

impl SandboxFlags {
    /// Takes unset flags from others.
    pub fn or(self, others: Self) -> Self {
        Self {
            sandbox: self.sandbox.or(others.sandbox),
            seccomp: self.seccomp.or(others.seccomp),
            modcaps: self.modcaps.or(others.modcaps),
        }
    }

    /// Returns the action of the filter of system calls, if there is one.
    fn action(&self) -> Option<Action> {
        match self.seccomp {
            None | Some(Seccomp::Kill) => Some(Action::Kill),
            Some(Seccomp::Log) => Some(Action::Log),
            Some(Seccomp::Trap) => Some(Action::Trap),
            Some(Seccomp::None) => None,
        }
    }

    /// Restricts this thread to these files and ports. `None`: it failed, and no flag requests it.
    fn fence(&self, rules: LandlockRules<'_>, ports: &[u16]) -> Result<Option<LandlockStatus>> {
        match ferry_isolation::restrict_landlock(rules, ports) {
            Err(error) if self.sandbox.is_none() => {
                tracing::warn!("files and ports are not restricted: {error}; --sandbox none accepts this");
                Ok(None)
            }
            outcome => Ok(Some(outcome?)),
        }
    }

    /// Applies the filter of a role to this thread. An error counts only if a flag requests the filter.
    fn filter(&self, role: Role) -> Result<()> {
        let Some(action) = self.action() else { return Ok(()) };
        let filtered = Filter::of(role, action).and_then(|filter| filter.apply());
        filtered.or_else(|error| self.seccomp.map_or(Ok(()), |_| Err(error))).context("--seccomp")
    }

    /// Returns the first part of the sandbox that was requested by flag.
    fn first_explicit(&self) -> Option<&'static str> {
        let sandbox = self.sandbox.is_some_and(|kind| kind != Sandbox::None).then_some("--sandbox");
        let seccomp = self.seccomp.is_some_and(|action| action != Seccomp::None).then_some("--seccomp");
        sandbox.or(seccomp).or(self.modcaps.as_ref().map(|_| "--modcaps"))
    }
}

/// The sandbox that a process enters.
#[derive(Debug)]
pub struct Confinement {
    sandbox_flags: SandboxFlags,
    /// The visible directories and files, and whether a source connects to a server.
    view: View,
    /// The index of each source's directory; `None` for sources without one.
    root_of: Vec<Option<usize>>,
    /// The access of sources to their servers; `None` for sources without one.
    reaches: Vec<Option<ServerAccess>>,
    /// Files may be opened by handles, if that is possible.
    wants_handles: bool,
    /// Memory file systems of root are separate mounts.
    mounts_memory: bool,
    needed: Capabilities,
    pins_memory: bool,
}

/// The side of the sandbox that this process is on.
pub enum SandboxSide {
    Outside(OutsideProcess),
    Inside(Box<Inside>),
}

/// The process outside, which waits for the one inside.
pub struct OutsideProcess(Supervisor);

/// The process inside, whose sandbox is not complete yet.
pub struct Inside {
    confinement: Confinement,
    /// The paths of directories inside, if they differ.
    places: Option<Vec<PathBuf>>,
    kept: Capabilities,
    is_fenced: bool,
    connectors: Vec<Option<Connector>>,
}

/// Returns why the process that serves these shares cannot be confined, if so.
fn unfit(shares: &[Share]) -> Option<String> {
    shares.iter().find_map(|share| {
        let source = share.source.display();
        match share.kind() {
            _ if share.mount.is_some() => {
                Some(format!("{source} is mounted on this host, and mounting needs the host's namespace"))
            }
            // Only mounts can be notified, so other shares are watched only on request.
            Kind::Dir(_) if share.watch == Watch::Always || share.events => {
                Some(format!("{source} is watched for changes"))
            }
            Kind::Image(_) if share.from.is_some() => Some(format!("{source} fetches data from its server (--from)")),
            Kind::Layers(_) => Some(format!("{source} fetches layers from their registries")),
            Kind::Dir(_) | Kind::Mem | Kind::Image(_) | Kind::Pmem(_) | Kind::Ninep(_) => None,
        }
    })
}

/// Returns whether the process that serves these shares can be confined. Fails if it cannot and a flag requests it.
pub fn fits(sandbox_flags: &SandboxFlags, shares: &[Share]) -> Result<bool> {
    let Some(why) = unfit(shares) else { return Ok(true) };
    if let Some(flag) = sandbox_flags.first_explicit() {
        bail!("{flag}: this process cannot be confined: {why}; omit {flag}, or use separate processes");
    }
    tracing::debug!("not confined: {why}");
    Ok(false)
}

impl Confinement {
    /// Returns the sandbox for these shares, with what each source needs of the host. `pins_memory`: guest memory will be pinned.
    pub fn of(
        sandbox_flags: &SandboxFlags,
        shares: &[Share],
        access: Vec<(Option<Root>, Option<ServerAccess>)>,
        pins_memory: bool,
    ) -> Result<Self> {
        let mut roots: Vec<Root> = Vec::new();
        let mut number_of = |root: Root| {
            roots.iter().position(|other| *other == root).unwrap_or_else(|| {
                roots.push(root);
                roots.len() - 1
            })
        };
        let (of_sources, reaches): (Vec<_>, Vec<_>) = access.into_iter().unzip();
        let root_of: Vec<_> = of_sources.into_iter().map(|root| root.map(&mut number_of)).collect();
        let is_used = |root: &Root| root.access != Access::Sockets;
        let is_one = roots.len() == 1 && roots.iter().all(is_used) && !root_of.contains(&None);
        if sandbox_flags.sandbox == Some(Sandbox::Chroot) && !is_one {
            bail!("--sandbox chroot: there must be one shared directory, which becomes the root directory");
        }
        let wants_handles = shares.iter().any(wants_handles);
        let is_tree = |share: &Share| matches!(share.kind(), Kind::Dir(_) | Kind::Mem);
        let needed = match (shares.iter().any(is_tree), !roots.iter().any(is_used)) {
            (true, _) => Capabilities::of_server(wants_handles),
            // Objects of images may have any owner.
            (false, false) => Capabilities::ALL_USERS,
            // Open descriptors allow everything that a disk, an image, persistent memory or a connection needs.
            (false, true) => Capabilities::NONE,
        };
        let mut files: Vec<_> = reaches.iter().flatten().flat_map(ServerAccess::files).collect();
        files.sort_unstable();
        files.dedup();
        let view = View { roots, files, network: reaches.iter().any(Option::is_some) };
        Ok(Self {
            sandbox_flags: sandbox_flags.clone(),
            view,
            root_of,
            reaches,
            wants_handles,
            mounts_memory: shares.iter().any(|share| share.kind() == Kind::Mem),
            needed,
            pins_memory,
        })
    }

    /// Enters the sandbox, except for the parts that opening sources does not allow.
    pub fn enter(mut self) -> Result<SandboxSide> {
        ferry_engine::count_cpus();
        let had = Capabilities::of_thread()?;
        if self.pins_memory && !may_lock_memory() {
            self.needed = self.needed.and_lock_memory();
        }
        let mut is_fenced = true;
        match self.sandbox_flags.sandbox {
            Some(Sandbox::None) => is_fenced = false,
            Some(Sandbox::Chroot) if !had.can_change_root() => {
                bail!("--sandbox chroot: only root may change the root directory; use --sandbox namespace")
            }
            Some(Sandbox::Chroot) => {}
            asked => match self.namespaces_are_possible(had) {
                Ok(()) => return self.split(had),
                Err(error) if asked.is_some() => return Err(error).context("--sandbox namespace"),
                Err(error) => tracing::warn!(
                    "the server can access all files of its user on this host, because namespaces are not available: {error}; \
                     --sandbox none accepts this"
                ),
            },
        }
        self.inside(None, is_fenced, false)
    }

    /// Checks that namespaces are possible, and do not take capabilities that the server needs.
    fn namespaces_are_possible(&self, had: Capabilities) -> Result<()> {
        let lost = self.needed.and(had);
        if !had.can_mount() && lost != Capabilities::NONE {
            bail!(
                "without CAP_SYS_ADMIN, namespaces contain a single user, so the server could not act as other users \
                 ({lost}): add CAP_SYS_ADMIN, or drop these capabilities and share files of one user"
            );
        }
        Ok(ferry_isolation::is_possible(&self.view)?)
    }

    fn split(self, had: Capabilities) -> Result<SandboxSide> {
        set_public_pid();
        match ferry_isolation::split(&self.view).context("--sandbox namespace")? {
            Split::Supervisor(outside) => {
                confine_supervisor(&self.sandbox_flags)?;
                Ok(SandboxSide::Outside(OutsideProcess(outside)))
            }
            Split::Server(places) => {
                let as_user = !had.can_mount();
                if as_user {
                    let _ = HAS_SINGLE_USER.set(());
                }
                self.inside(Some(places), true, as_user)
            }
        }
    }

    /// Drops capabilities, except those that opening sources needs. A user in a user namespace drops all: their effect there
    /// would surprise a user who has none outside.
    fn inside(self, places: Option<Vec<PathBuf>>, is_fenced: bool, as_user: bool) -> Result<SandboxSide> {
        self.check_modcaps()?;
        let kept = self.kept(self.needed, as_user)?;
        let connectors = self.connectors(is_fenced, as_user)?;
        if let Some(places) = &places {
            // Later threads are in an empty network and see no sockets.
            if self.view.network {
                ferry_isolation::leave_network().context("--sandbox namespace")?;
            }
            let roots = self.view.roots.iter().zip(places);
            let sockets: Vec<&Path> =
                roots.filter(|(root, _)| root.access == Access::Sockets).map(|(_, place)| place.as_path()).collect();
            if !sockets.is_empty() {
                ferry_isolation::hide_directories(&sockets).context("--sandbox namespace")?;
            }
        }
        kept.limit(if as_user { Capabilities::NONE } else { Capabilities::MOUNTS })?;
        Ok(SandboxSide::Inside(Box::new(Inside { confinement: self, places, kept, is_fenced, connectors })))
    }

    /// Checks that this process has the capabilities to keep. In a user namespace, it has all of those of the namespace.
    fn check_modcaps(&self) -> Result<()> {
        let Some(list) = &self.sandbox_flags.modcaps else { return Ok(()) };
        let missing = Capabilities::NONE.modified(&list.0)?.without(Capabilities::of_thread()?);
        ensure!(
            missing == Capabilities::NONE,
            "--modcaps: this process lacks {missing}: add it to CapabilityBoundingSet= of the service, start ferry as root, or omit it"
        );
        Ok(())
    }

    /// Returns the needed capabilities that stay.
    fn kept(&self, needed: Capabilities, as_user: bool) -> ferry_isolation::Result<Capabilities> {
        let kept = if as_user { Capabilities::NONE } else { needed };
        self.sandbox_flags.modcaps.as_ref().map_or(Ok(kept), |list| kept.modified(&list.0))
    }
}

impl OutsideProcess {
    /// Waits for the process inside; returns its status. Holds the new files until that process serves; calls
    /// `arrived` with each signal first.
    pub fn wait(
        self,
        signals: &BlockedSignals,
        new_files: &mut NewFiles,
        arrived: impl Fn(Signal) + Copy,
    ) -> Result<u8> {
        let failed = self.0.wait_for(new_files.event(), signals, arrived)?;
        let has_started = new_files.release();
        let end = match failed {
            Some(end) => end,
            None => {
                if has_started {
                    service_manager::ready();
                }
                self.0.wait(signals, arrived)?
            }
        };
        if let ferry_isolation::End::Signal(_) = end {
            say(format_args!("the server was ended by {end}"));
        }
        Ok(end.status())
    }
}

impl Inside {
    /// Whether there is a process outside.
    pub fn is_split(&self) -> bool {
        self.places.is_some()
    }

    /// Returns the path of a source's directory inside, if it differs.
    pub fn place(&self, number: usize) -> Option<&Path> {
        let at = self.confinement.root_of.get(number).copied().flatten()?;
        self.places.as_ref()?.get(at).map(PathBuf::as_path)
    }

    /// Returns the thread that connects to the server of a source, if it needs one.
    pub fn connector(&mut self, number: usize) -> Option<Connector> {
        self.connectors.get_mut(number).and_then(Option::take)
    }

    /// Completes the sandbox once sources are open.
    pub fn close(self) -> Result<()> {
        let Self {
            confinement: Confinement { sandbox_flags, view, wants_handles, mounts_memory, .. },
            places,
            kept,
            is_fenced,
            ..
        } = self;
        let roots = view.roots;
        if sandbox_flags.sandbox == Some(Sandbox::Chroot) {
            ferry_isolation::change_root(&roots[0].path).context("--sandbox chroot")?;
        }
        let had = Capabilities::of_thread()?;
        let (fenced, rules) = if is_fenced {
            let by_handles = had.can_open_handles() && wants_handles;
            let by_mounts = had.can_mount() && mounts_memory;
            let is_root = sandbox_flags.sandbox == Some(Sandbox::Chroot);
            // Directories of sockets need no files.
            let used = roots.iter().enumerate().filter(|(_, root)| root.access != Access::Sockets);
            let paths = used.map(|(at, root)| match (&places, root.access == Access::ReadOnly) {
                (Some(places), read_only) => (places[at].clone(), read_only),
                (None, read_only) if is_root => ("/".into(), read_only),
                (None, read_only) => (root.path.clone(), read_only),
            });
            let open = |(path, read_only): (PathBuf, bool)| {
                let dir = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
                Ok((dir, read_only))
            };
            let dirs = paths.map(open).collect::<Result<Vec<_>>>()?;
            let dirs: Vec<_> = dirs.iter().map(|(dir, read_only)| (dir.as_fd(), *read_only)).collect();
            let (fence, rules) = match by_handles || by_mounts {
                true => (LandlockRules::AllFiles, "all but files".to_owned()),
                false => (LandlockRules::Below(&dirs), format!("files below {} directories", dirs.len())),
            };
            (sandbox_flags.fence(fence, &[])?, rules)
        } else {
            (None, "none".to_owned())
        };
        match fenced {
            Some(LandlockStatus::None) => tracing::warn!(
                "no Landlock: this kernel lacks it, or it is not enabled (CONFIG_SECURITY_LANDLOCK, lsm=landlock,...)"
            ),
            Some(LandlockStatus::Partial) => tracing::debug!("this kernel supports only a part of Landlock's rules"),
            Some(LandlockStatus::Full) | None => {}
        }
        kept.limit(Capabilities::NONE)?;
        ferry_isolation::no_new_privileges()?;
        let action = sandbox_flags.action();
        let namespaces = places.is_some();
        tracing::debug!(namespaces, landlock = ?fenced, capabilities = %kept, seccomp = ?action, %rules, "confined");
        if let Some(action) = action {
            match filter(action) {
                Err(error) if sandbox_flags.seccomp.is_some() => return Err(error).context("--seccomp"),
                Err(error) => {
                    tracing::warn!("system calls are not filtered: {error}; --seccomp none accepts this")
                }
                Ok(()) => {}
            }
        }
        Ok(())
    }
}

/// Applies the filter of a server to this process and its later threads, and prepares narrower filters for some threads.
fn filter(action: Action) -> ferry_isolation::Result<()> {
    Filter::of(Role::Server, action)?.apply()?;
    let narrower = ThreadFilters {
        worker: Filter::of(Role::Worker, action)?,
        disk: Filter::of(Role::Disk, action)?,
        mapper: Filter::of(Role::Mapper, action)?,
    };
    // A process has one server.
    let _ = THREAD_FILTERS.set(narrower);
    Ok(())
}

/// Returns the functions that threads of devices call first: each narrows the filter.
pub fn thread_hooks() -> ferry_virtiofs::ThreadHooks {
    ferry_virtiofs::ThreadHooks {
        worker: Some(|| narrow(|filters| &filters.worker)),
        mapper: Some(|| narrow(|filters| &filters.mapper)),
    }
}

/// The same for the workers of disks.
pub fn confine_disk_thread() {
    narrow(|filters| &filters.disk);
}

fn narrow(which: fn(&ThreadFilters) -> &Filter) {
    // On an error, the filter of the process still applies.
    if let Some(Err(error)) = THREAD_FILTERS.get().map(|filters| which(filters).apply()) {
        tracing::warn!("cannot narrow the system calls of a thread: {error}");
    }
}

/// Removes the limit of locked memory, as root may, before capabilities are dropped. Returns whether that was possible.
pub fn may_lock_memory() -> bool {
    let limit = getrlimit(Resource::Memlock);
    let is_root = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None }).is_ok();
    if !is_root {
        // Any user may raise the soft limit.
        let _ = setrlimit(Resource::Memlock, Rlimit { current: limit.maximum, ..limit });
    }
    is_root
}

/// Raises the limit of open descriptors as far as any user may.
pub fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Whether a share may open files by handles.
fn wants_handles(share: &Share) -> bool {
    share.inode_file_handles != FileHandles::Never && matches!(share.kind(), Kind::Dir(_))
}
