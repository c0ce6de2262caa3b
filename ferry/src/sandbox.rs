//! The sandbox of a process that shares directories or offers disks: its parts, their order, and the messages where a
//! part is not available.
//!
//! Sockets are made before; a process then stays outside, removes their files in the end, and is the one that everybody knows.
//! Disks, flat images and persistent memory are opened before, too, and need nothing by its name afterwards: inside there are their
//! descriptors, and none of a directory. Directories, and the stores of composefs's images, are opened inside, where they have
//! places. No thread is started before the last wall stands, but for those that connect to servers, which have their own first.

mod connecting;

use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};
pub use connecting::ServerAccess;
use ferry_9p_client::Connector;
use ferry_isolation::{
    Access, Action, BlockedSignals, Capabilities, Filter, LandlockRules, LandlockStatus, Role, Root, Split, Supervisor,
    View,
};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use serde::Deserialize;

use crate::flags::{FileHandles, Kind, Share, Watch};
use crate::launch::ENDINGS;
use crate::new_files::NewFiles;
use crate::service_manager;
use crate::size::deserialize_from_str;

/// Linux's number for whoever cannot be named in a namespace of users (`/proc/sys/kernel/overflowuid`).
const NOBODY: u32 = 65_534;

/// The process that users know, where it is not this one.
static KNOWN: OnceLock<u32> = OnceLock::new();
/// This process is in a namespace of users in which only its own has a number.
static ALONE: OnceLock<()> = OnceLock::new();

/// The filters of threads that do one thing; none without seccomp.
static NARROWER: OnceLock<ThreadFilters> = OnceLock::new();

/// One for the threads of each of these roles.
struct ThreadFilters {
    worker: Filter,
    disk: Filter,
    mapper: Filter,
}

/// The number of the process that users know: the one that they started.
pub fn pid() -> u32 {
    KNOWN.get().copied().unwrap_or_else(std::process::id)
}

/// Notes that users know this process, before others are made of it.
pub fn set_public_pid() {
    // Unless it is one of those.
    let _ = KNOWN.set(std::process::id());
}

/// Takes from this process what it does without who only waits, and removes the files of sockets, in whosever folder they are.
pub fn confine_supervisor(sandbox_flags: &SandboxFlags) -> Result<()> {
    Capabilities::ALL_USERS.limit(Capabilities::NONE)?;
    ferry_isolation::no_new_privileges()?;
    if let Some(action) = sandbox_flags.action() {
        // Where there is no seccomp, the other side says so.
        let filtered = Filter::of(Role::Supervisor, action).and_then(|filter| filter.apply());
        filtered.or_else(|error| sandbox_flags.seccomp.map_or(Ok(()), |_| Err(error)))?;
    }
    Ok(())
}

/// Whether a peer is this user or root, who in a namespace of users has no number.
pub fn is_ours(peer: u32) -> bool {
    // The permissions of the folder let nobody else in.
    let unnamed = ALONE.get().is_some() && peer == NOBODY;
    peer == 0 || peer == rustix::process::geteuid().as_raw() || unnamed
}

/// Where a process of shares and disks may look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sandbox {
    /// Namespaces of mounts, processes and networks (for users other than root, of users, too), with a root directory
    /// in which there is nothing but what is shared; Landlock. For 9p:SERVER, the thread that connects stays in this
    /// host's network, and has the folder of a unix socket, which must not be made again, or the files by which names
    /// of hosts are looked up, as they are at the start.
    Namespace,
    /// The shared directory, of which there must be one, is the root directory; Landlock. Only for root.
    Chroot,
    /// Everywhere.
    None,
}

/// What becomes of a process that makes a system call that is not one of a server of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Seccomp {
    /// It is ended.
    Kill,
    /// The kernel's log notes it.
    Log,
    /// It gets SIGSYS, for debuggers.
    Trap,
    /// Nothing: there is no filter.
    None,
}

/// Capabilities that are kept or dropped besides.
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
    /// Where the process may look [default: namespace, or what of it can be had here].
    #[arg(long, value_enum, value_name = "KIND")]
    pub sandbox: Option<Sandbox>,

    /// What becomes of the process if it makes a system call that is none of its own [default: kill].
    #[arg(long, value_enum, value_name = "ACTION")]
    pub seccomp: Option<Seccomp>,

    /// Capabilities to keep or drop besides: +sys_admin:-mknod.
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    pub modcaps: Option<Modcaps>,
}

impl SandboxFlags {
    /// What these leave open is as others say.
    pub fn or(self, others: Self) -> Self {
        Self {
            sandbox: self.sandbox.or(others.sandbox),
            seccomp: self.seccomp.or(others.seccomp),
            modcaps: self.modcaps.or(others.modcaps),
        }
    }

    /// What the filter of system calls does, if there is one.
    fn action(&self) -> Option<Action> {
        match self.seccomp {
            None | Some(Seccomp::Kill) => Some(Action::Kill),
            Some(Seccomp::Log) => Some(Action::Log),
            Some(Seccomp::Trap) => Some(Action::Trap),
            Some(Seccomp::None) => None,
        }
    }

    /// The first wall that was asked for by name.
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
    /// What stays visible, each once, and whether a source connects to a server.
    view: View,
    /// Which of them is whose; none for sources that need none.
    root_of: Vec<Option<usize>>,
    /// How sources reach their servers; none for those that have none.
    reaches: Vec<Option<ServerAccess>>,
    /// Files may be opened by handles, where that is possible.
    wants_handles: bool,
    /// Root's memory file systems are mounts of their own.
    mounts_memory: bool,
    /// What carrying the files of these sources takes of root.
    needed: Capabilities,
    /// Memory of guests is going to be pinned.
    pins_memory: bool,
}

/// Whether this process is inside or outside of the sandbox.
pub enum Entered {
    Outside(Waiting),
    Inside(Box<Inside>),
}

/// This process waits for the one inside.
pub struct Waiting(Supervisor);

/// This process is inside, and the last walls are still to be closed.
pub struct Inside {
    confinement: Confinement,
    /// Where directories are now, if that is another place.
    places: Option<Vec<PathBuf>>,
    kept: Capabilities,
    is_fenced: bool,
    /// The threads that connect, of the sources that need one.
    connectors: Vec<Option<Connector>>,
}

/// Why the process that serves these cannot be confined, if it cannot.
fn unfit(shares: &[Share]) -> Option<String> {
    shares.iter().find_map(|share| {
        let source = share.source.display();
        match share.kind() {
            _ if share.mount.is_some() => {
                Some(format!("{source} is mounted on this host, where mounts are made and ended"))
            }
            // Only mounts can be told, so nobody else is watched for unless that is asked for.
            Kind::Dir(_) if share.watch == Watch::Always => Some(format!("{source} is watched for changes")),
            Kind::Image(_) if share.from.is_some() => {
                Some(format!("{source} asks its server for what its store lacks (--from)"))
            }
            Kind::Dir(_) | Kind::Mem | Kind::Image(_) | Kind::Pmem(_) | Kind::Ninep(_) => None,
        }
    })
}

/// Whether the process that serves these is to be confined.
///
/// # Errors
/// It cannot be, and somebody has insisted.
pub fn fits(sandbox_flags: &SandboxFlags, shares: &[Share]) -> Result<bool> {
    let Some(why) = unfit(shares) else { return Ok(true) };
    if let Some(flag) = sandbox_flags.first_explicit() {
        bail!("{flag}: this process cannot be confined: {why}; leave {flag} out, or serve it apart");
    }
    tracing::debug!("not confined: {why}");
    Ok(false)
}

impl Confinement {
    /// The walls for these shares, with the source of each, and for these disks.
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
            // Objects of images, whosever they are.
            (false, false) => Capabilities::ALL_USERS,
            // All that is done with a disk, an image, a file of persistent memory or a connection, its open descriptors allow.
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

    /// Goes inside, as far as it is possible without having opened the sources.
    pub fn enter(mut self) -> Result<Entered> {
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
                    "the server sees all files of this host that its user may, for it has no namespaces of its own: {error}; \
                     --sandbox none says that this is meant"
                ),
            },
        }
        self.inside(None, is_fenced, false)
    }

    /// Whether the server can have namespaces, and do there what it can do here.
    fn namespaces_are_possible(&self, had: Capabilities) -> Result<()> {
        let lost = self.needed.and(had);
        if !had.can_mount() && lost != Capabilities::NONE {
            bail!(
                "without CAP_SYS_ADMIN there are only namespaces with one user, in which it could not act for others any more \
                 ({lost}): add CAP_SYS_ADMIN, or drop those and share files of one user"
            );
        }
        Ok(ferry_isolation::is_possible(&self.view)?)
    }

    fn split(self, had: Capabilities) -> Result<Entered> {
        set_public_pid();
        match ferry_isolation::split(&self.view).context("--sandbox namespace")? {
            Split::Supervisor(outside) => {
                confine_supervisor(&self.sandbox_flags)?;
                Ok(Entered::Outside(Waiting(outside)))
            }
            Split::Server(places) => {
                let as_user = !had.can_mount();
                if as_user {
                    let _ = ALONE.set(());
                }
                self.inside(Some(places), true, as_user)
            }
        }
    }

    /// Drops capabilities, but for those that opening sources takes. A user in a namespace of its own has none: what they
    /// would be worth there, nobody expects who has none outside.
    fn inside(self, places: Option<Vec<PathBuf>>, is_fenced: bool, as_user: bool) -> Result<Entered> {
        let kept = self.kept(self.needed, as_user)?;
        let connectors = self.connectors(is_fenced, as_user)?;
        if let Some(places) = &places {
            // All threads that are begun from now on are where nobody else is, and see no sockets.
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
        Ok(Entered::Inside(Box::new(Inside { confinement: self, places, kept, is_fenced, connectors })))
    }

    /// The capabilities that stay of those that are needed.
    fn kept(&self, needed: Capabilities, as_user: bool) -> ferry_isolation::Result<Capabilities> {
        let kept = if as_user { Capabilities::NONE } else { needed };
        self.sandbox_flags.modcaps.as_ref().map_or(Ok(kept), |list| kept.modified(&list.0))
    }
}

impl Waiting {
    /// Waits for the process inside; returns its status. Holds the new files until that process serves.
    pub fn wait(self, signals: &BlockedSignals, new_files: &mut NewFiles) -> Result<u8> {
        let arrived = |signal: Signal| {
            if ENDINGS.contains(&signal.as_raw()) {
                service_manager::stopping();
            }
        };
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
            eprintln!("ferry: the server was ended by {end}");
        }
        Ok(end.status())
    }
}

impl Inside {
    /// Whether there is another process outside.
    pub fn is_split(&self) -> bool {
        self.places.is_some()
    }

    /// Where what a source needs is seen from here, if it was another place.
    pub fn place(&self, number: usize) -> Option<&Path> {
        let at = self.confinement.root_of.get(number).copied().flatten()?;
        self.places.as_ref()?.get(at).map(PathBuf::as_path)
    }

    /// The thread that connects to the server of a source, if it needs one.
    pub fn connector(&mut self, number: usize) -> Option<Connector> {
        self.connectors.get_mut(number).and_then(Option::take)
    }

    /// Closes the last walls, once sources are open.
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
            // Who connects to sockets opens no files.
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
            (Some(ferry_isolation::restrict_landlock(fence, &[])?), rules)
        } else {
            (None, "none".to_owned())
        };
        match fenced {
            Some(LandlockStatus::None) => tracing::warn!(
                "no Landlock: this kernel has none, or it is not turned on (CONFIG_SECURITY_LANDLOCK, lsm=landlock,...)"
            ),
            Some(LandlockStatus::Partial) => tracing::debug!("this kernel knows a part of Landlock's rules"),
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
                    tracing::warn!("system calls are not filtered: {error}; --seccomp none says that this is meant")
                }
                Ok(()) => {}
            }
        }
        Ok(())
    }
}

/// Has this process, and all threads that it starts, make no other calls than a server does. Some threads will make fewer.
fn filter(action: Action) -> ferry_isolation::Result<()> {
    Filter::of(Role::Server, action)?.apply()?;
    let narrower = ThreadFilters {
        worker: Filter::of(Role::Worker, action)?,
        disk: Filter::of(Role::Disk, action)?,
        mapper: Filter::of(Role::Mapper, action)?,
    };
    // There is one server in a process.
    let _ = NARROWER.set(narrower);
    Ok(())
}

/// What the threads of devices are to call before they begin: each needs less than the process.
pub fn begun() -> ferry_virtiofs::Begun {
    ferry_virtiofs::Begun {
        worker: Some(|| narrow(|filters| &filters.worker)),
        mapper: Some(|| narrow(|filters| &filters.mapper)),
    }
}

/// The same for the workers of disks.
pub fn disk_begun() {
    narrow(|filters| &filters.disk);
}

fn narrow(which: fn(&ThreadFilters) -> &Filter) {
    // It still has the filter of the process, if there is one.
    if let Some(Err(error)) = NARROWER.get().map(|filters| which(filters).apply()) {
        tracing::warn!("a thread's system calls are not filtered further: {error}");
    }
}

/// Has the limit of locked memory not stand in the way of who pins a guest's, as it does not stand in root's, who will
/// not be root any more. Returns whether that was possible.
pub fn may_lock_memory() -> bool {
    let limit = getrlimit(Resource::Memlock);
    let is_root = setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None }).is_ok();
    if !is_root {
        // As far as everybody may.
        let _ = setrlimit(Resource::Memlock, Rlimit { current: limit.maximum, ..limit });
    }
    is_root
}

/// Whether a share may open files by handles.
fn wants_handles(share: &Share) -> bool {
    share.inode_file_handles != FileHandles::Never && matches!(share.kind(), Kind::Dir(_))
}
