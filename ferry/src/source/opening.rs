//! The sources of a process: prepared before the sandbox, opened inside it, and started when it is complete.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use ferry_9p_client::Connector;
use ferry_dir::{Dir, OwnChanges, WatchError, WatchKind};
use ferry_image::{Image, Objects, objects_directory};
use ferry_isolation::{Access, Root};
use ferry_mem::pmem;
use ferry_vfs::FileSystem;

use super::{Options, give_to_process_user, is_new};
use crate::detached_mounts::DetachedMounts;
use crate::flags::{Cache, Kind, Server, Share, Watch};
use crate::image::registry;
use crate::new_files::NewFiles;
use crate::remote::PreparedServer;
use crate::sandbox::{Inside, ServerAccess};

/// The sources of one process. Shares with the same source and flags use one object, so they see each other's changes and locks
/// at once.
#[derive(Default)]
pub struct Sources {
    all: Vec<Source>,
    /// The index of each share's source.
    of_share: Vec<usize>,
    /// The mount points of this process, as in the mount table. A source that contains one does not see the mount.
    mount_points: Vec<PathBuf>,
}

/// One source. Before `begin`, its only thread is the one that connects to its server. Before the sandbox it has no descriptor of
/// a directory: that would be an escape from the sandbox.
struct Source {
    /// The source with its canonical path.
    kind: Kind,
    /// The source as the user wrote it.
    named: Kind,
    options: Options,
    stage: Stage,
    /// The copy of the mounts that the source sees, if there is one. It must live as long as the source.
    detached_mounts: Option<DetachedMounts>,
}

enum Stage {
    /// Nothing is open.
    Closed,
    /// A composefs image, which opens objects in this directory on demand.
    Composefs(Image, PathBuf),
    /// An image that opens no further files.
    Image(ferry_image::Source),
    /// A persistent memory file system that opens no further files, and whether it is new.
    Pmem(pmem::OpenedImage, bool),
    /// A server that is not connected yet.
    Server(PreparedServer),
    /// A server that is not connected yet, and the thread that will connect.
    Connecting(PreparedServer, Connector),
    Dir(Arc<Dir>),
    Open(Arc<dyn FileSystem>),
}

impl Sources {
    /// Returns the sources of shares; none of them is open.
    pub fn of(shares: &[Share]) -> Self {
        let mut all: Vec<Source> = Vec::new();
        let mut number_of = |share: &Share| {
            let (kind, options) = (share.kind().canonical(), Options::of(share));
            let same = all.iter().position(|other| other.kind == kind && other.options == options);
            same.unwrap_or_else(|| {
                let named = share.kind();
                all.push(Source { kind, named, options, stage: Stage::Closed, detached_mounts: None });
                all.len() - 1
            })
        };
        let of_share = shares.iter().map(&mut number_of).collect();
        let mount_points = shares.iter().filter_map(|share| share.mount.as_deref());
        let mount_points = mount_points.map(|path| path.canonicalize().unwrap_or_else(|_| path.into())).collect();
        Self { all, of_share, mount_points }
    }

    /// Opens what the sandbox will hide. Errors in any source appear here. New files are added to `new_files`.
    pub fn prepare(&mut self, new_files: &mut NewFiles) -> Result<()> {
        for source in &mut self.all {
            source.prepare(new_files)?;
            match &source.named {
                Kind::Dir(path) => drop(source.options.open_dir(path)?),
                Kind::Mem => drop(source.options.open_mem()?),
                Kind::Pmem(_) | Kind::Image(_) | Kind::Layers(_) | Kind::Ninep(_) => {}
            }
        }
        Ok(())
    }

    /// Returns what each source needs of the host: its directory, and access to its server.
    pub fn access(&self) -> Vec<(Option<Root>, Option<ServerAccess>)> {
        let server =
            |source: &Source| if let Stage::Server(server) = &source.stage { Some(server.reach.clone()) } else { None };
        self.all.iter().map(|source| (source.root(), server(source))).collect()
    }

    /// Opens the sources: inside the sandbox that they were prepared for, or without one.
    pub fn open(&mut self, mut sandbox: Option<&mut Inside>, new_files: &mut NewFiles) -> Result<()> {
        for (number, source) in self.all.iter_mut().enumerate() {
            let connector = sandbox.as_mut().and_then(|inside| inside.connector(number));
            match &sandbox {
                Some(inside) => source.open(inside.place(number), connector, &self.mount_points)?,
                None => {
                    source.prepare(new_files)?;
                    source.open(None, None, &self.mount_points)?;
                }
            }
        }
        Ok(())
    }

    /// Starts the threads of the open sources; returns the source of each share.
    pub fn begin(&mut self) -> Result<Vec<Arc<dyn FileSystem>>> {
        let begun = self.all.iter_mut().map(Source::begin).collect::<Result<Vec<_>>>()?;
        Ok(self.of_share.iter().map(|number| Arc::clone(&begun[*number])).collect())
    }

    /// Watches directories for changes by other processes, for shares that ask for it. Call this after [`Self::begin`].
    pub fn watch(&self, shares: &[Share]) -> Result<()> {
        shares.iter().zip(&self.of_share).try_for_each(|(share, number)| self.watch_one(share, *number))
    }

    fn watch_one(&self, share: &Share, number: usize) -> Result<()> {
        let (Stage::Dir(dir), Kind::Dir(path)) = (&self.all[number].stage, &self.all[number].kind) else {
            return Ok(());
        };
        // With a write-back cache, Linux uses its own length of a file until it is notified.
        let keeps_long = matches!(share.cache, Cache::Always | Cache::Metadata) || share.writeback;
        let keeps_long = share.mount.is_some() && keeps_long;
        let keeps = share.mount.is_some() && share.cache != Cache::None;
        let overlaps = self.all.iter().enumerate().any(|(at, other)| match &other.kind {
            Kind::Dir(other) => at != number && (other.starts_with(path) || path.starts_with(other)),
            _ => false,
        });
        // Changes by this process are seen at once.
        let is_useful = keeps_long || keeps && overlaps;
        let shown = share.source.display();
        if share.events && overlaps {
            bail!(
                "--events: {shown} overlaps with another shared directory: share one of them, or share them from two processes"
            );
        }
        if share.watch == Watch::Never || share.watch == Watch::Auto && !(is_useful || share.events) {
            return Ok(());
        }
        // Sources that overlap do not see each other's changes.
        match dir.watch(if overlaps { OwnChanges::Tell } else { OwnChanges::Skip }) {
            Ok(WatchKind::FileSystem) => tracing::info!(source = %shown, "watching for changes by other processes"),
            Ok(WatchKind::Directories) if share.events && matches!(share.cache, Cache::Always | Cache::Metadata) => {
                bail!(
                    "--events with --cache {}: {shown} cannot be watched by fanotify, which alone tells who changed what: run as \
                 root, on a file system with file handles and Linux 5.17 or later, or use --cache auto",
                    if share.cache == Cache::Always { "always" } else { "metadata" }
                )
            }
            Ok(WatchKind::Directories) if share.events => {
                dir.tell_events();
                tracing::info!(
                    source = %shown,
                    "agents are told of changes in directories that guests use; not all of it is exact without root"
                );
            }
            Ok(WatchKind::Directories) => {
                tracing::info!(source = %shown, "watching for changes by other processes in directories that are in use");
            }
            Err(error) if share.watch == Watch::Always => {
                return Err(error).with_context(|| format!("--watch always: {shown}"));
            }
            Err(error) if share.events => return Err(error).with_context(|| format!("--events: {shown}")),
            // Caches then expire after a second.
            Err(error) if !keeps_long => tracing::debug!(source = %shown, %error, "not watching"),
            Err(error) => {
                let why = match error {
                    WatchError::Host(errno) => format!("{error}: {errno}"),
                    error => error.to_string(),
                };
                tracing::warn!(
                    "{shown}: changes by other processes appear only when the mount's caches expire: {why}; \
                     --watch never accepts that, --cache auto caches for a second"
                );
            }
        }
        Ok(())
    }
}

impl Source {
    /// Opens files that need no directory afterwards.
    fn prepare(&mut self, new_files: &mut NewFiles) -> Result<()> {
        self.stage = match &self.named {
            Kind::Dir(_) | Kind::Mem => Stage::Closed,
            Kind::Image(path) => self.options.open_image(path)?,
            Kind::Layers(path) => Stage::Open(registry::open_layers(path, self.options.layers)?),
            Kind::Pmem(path) => {
                let is_new = is_new(path);
                let mut opened = pmem::open_files(path, &self.options.pmem())?;
                new_files.add(opened.take_created());
                Stage::Pmem(opened, is_new)
            }
            Kind::Ninep(address) => {
                Stage::Server(self.options.remote.prepare(Server::of(address).map_err(anyhow::Error::msg)?)?)
            }
        };
        Ok(())
    }

    /// Returns the directory that must stay visible.
    fn root(&self) -> Option<Root> {
        match (&self.kind, &self.stage) {
            (Kind::Dir(path), _) => {
                let access = if self.options.dir.read_only { Access::ReadOnly } else { Access::ReadWrite };
                Some(Root { path: path.clone(), access })
            }
            (_, Stage::Server(server)) => {
                server.directory().map(|directory| Root { path: directory.into(), access: Access::Sockets })
            }
            (_, Stage::Composefs(_, directory)) => {
                let path = directory.canonicalize().unwrap_or_else(|_| directory.clone());
                Some(Root { path, access: Access::ReadOnly })
            }
            _ => None,
        }
    }

    /// Opens the rest, at `place` if the sandbox has moved it. `connector` is the confined thread that connects to its server.
    fn open(&mut self, place: Option<&Path>, connector: Option<Connector>, mount_points: &[PathBuf]) -> Result<()> {
        self.stage = match std::mem::replace(&mut self.stage, Stage::Closed) {
            Stage::Closed => match &self.kind {
                Kind::Dir(path) => {
                    self.detached_mounts = DetachedMounts::of(path, mount_points)?;
                    let detached = self.detached_mounts.as_ref().map(DetachedMounts::path);
                    let named = if let Kind::Dir(named) = &self.named { named } else { path };
                    Stage::Dir(self.options.open_dir(place.or(detached.as_deref()).unwrap_or(named))?)
                }
                _ => Stage::Open(self.options.open_mem()?),
            },
            Stage::Composefs(image, directory) => {
                let seen = place.unwrap_or(&directory);
                Stage::Image(ferry_image::Source::open_idle_at(image, &directory, seen)?)
            }
            Stage::Server(server) => {
                let begin = || Connector::begin(|| ()).context("cannot start a thread");
                Stage::Connecting(server.seen_at(place), connector.map_or_else(begin, Ok)?)
            }
            other => other,
        };
        Ok(())
    }

    /// Starts its threads.
    fn begin(&mut self) -> Result<Arc<dyn FileSystem>> {
        if let (Stage::Dir(dir), Kind::Dir(path)) = (&self.stage, &self.named) {
            dir.begin();
            return self.options.with_quota(Arc::clone(dir), path);
        }
        Ok(match std::mem::replace(&mut self.stage, Stage::Closed) {
            Stage::Image(source) => {
                source.begin();
                Arc::new(source)
            }
            Stage::Pmem(opened, is_new) => {
                let source = Arc::new(opened.load(&self.options.pmem())?);
                if is_new { give_to_process_user(source)? } else { source }
            }
            Stage::Connecting(server, connector) => server.connect(connector)?,
            Stage::Open(source) => source,
            _ => bail!("the source {:?} is not open", self.named),
        })
    }
}

impl Options {
    fn open_image(&self, path: &Path) -> Result<Stage> {
        let store =
            self.store.as_deref().context("image:PATH needs --store DIR, the directory with the data of its files")?;
        if let Some(from) = &self.from {
            return Ok(Stage::Open(Arc::new(registry::open(path, store, self.digest, from)?)));
        }
        let image = Image::open(path, self.digest)?;
        if image.is_composefs() {
            // Errors appear before the sandbox exists.
            drop(Objects::open(&image, store)?);
            return Ok(Stage::Composefs(image, objects_directory(store)));
        }
        Ok(Stage::Image(ferry_image::Source::open_idle(image, store)?))
    }
}
