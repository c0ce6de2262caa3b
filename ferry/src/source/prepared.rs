//! Sources of a confined server: what is opened before the sandbox, what inside by its new path, and what after the
//! sandbox is complete.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use ferry_9p_client::Connector;
use ferry_dir::Dir;
use ferry_image::{Image, Objects, Source, objects_folder};
use ferry_isolation::{Access, Root};
use ferry_mem::pmem;
use ferry_vfs::FileSystem;

use super::{Kind, Options, Sources};
use crate::cli::Share;
use crate::new_files::NewFiles;
use crate::remote::{PreparedServer, Server};
use crate::sandbox::ServerAccess;

/// The source of a share on its way behind walls. Until it is begun it has no thread, but for one that waits to connect to its server, and until it has arrived no descriptor of a
/// directory: one of the host's would be a way out.
pub struct Prepared {
    kind: Kind,
    options: Options,
    stage: Stage,
}

enum Stage {
    /// All of it is opened inside.
    Outside,
    /// An image of composefs's, which looks for its objects in this folder as they are wanted.
    Image(Image, PathBuf),
    /// An image, of which nothing is opened any more.
    Source(Source),
    /// A persistent memory file system, of which nothing is opened any more, and whether it is made just now.
    Pmem(pmem::Opened, bool),
    /// A server, which has not been connected to yet.
    Server(PreparedServer),
    /// The same, and the thread that is going to do that.
    Reaching(PreparedServer, Connector),
    /// A directory, open.
    Dir(Arc<Dir>),
    /// It is open, and needs nothing else.
    Open(Arc<dyn FileSystem>),
    /// The one of an earlier share.
    Same(usize),
}

/// Opens what of the sources of shares is opened outside of walls. What is wrong with a source shows here. What is made for it is added to
/// `new_files`.
pub fn prepare(shares: &[Share], new_files: &mut NewFiles) -> Result<Vec<Prepared>> {
    let mut all: Vec<Prepared> = Vec::new();
    for share in shares {
        let (kind, options) = (Kind::as_clients_see(share), Options::of(share));
        let same = all.iter().position(|other| other.kind == kind && other.options == options);
        let stage = match (&kind, same) {
            (_, Some(at)) => Stage::Same(at),
            (Kind::Image(path), _) => {
                let store = options.image_store()?;
                let image = Image::open(path, options.digest)?;
                if image.is_composefs() {
                    drop(Objects::open(&image, store)?);
                    Stage::Image(image, objects_folder(store))
                } else {
                    Stage::Source(Source::at_rest(image, store)?)
                }
            }
            (Kind::Pmem(path), _) => {
                let (opened, is_new) = options.open_pmem(path, new_files)?;
                Stage::Pmem(opened, is_new)
            }
            (Kind::Ninep(address), _) => {
                let server = Server::of(address).map_err(anyhow::Error::msg)?;
                Stage::Server(options.remote.prepare(server)?)
            }
            (Kind::Dir(_) | Kind::Mem, _) => {
                drop(Sources::default().open(share, new_files)?);
                Stage::Outside
            }
        };
        all.push(Prepared { kind, options, stage });
    }
    Ok(all)
}

impl Prepared {
    /// What has to stay visible for it.
    pub fn root(&self) -> Option<Root> {
        match (&self.kind, &self.stage) {
            (Kind::Dir(path), _) => {
                let access = if self.options.dir.read_only { Access::ReadOnly } else { Access::ReadWrite };
                Some(Root { path: path.clone(), access })
            }
            (_, Stage::Server(server)) => {
                server.folder().map(|folder| Root { path: folder.into(), access: Access::Sockets })
            }
            (_, Stage::Image(_, folder)) => {
                let path = folder.canonicalize().unwrap_or_else(|_| folder.clone());
                Some(Root { path, access: Access::ReadOnly })
            }
            _ => None,
        }
    }

    /// How it reaches its server, if it has one.
    pub fn reach(&self) -> Option<ServerAccess> {
        if let Stage::Server(server) = &self.stage { Some(server.reach()) } else { None }
    }

    /// Opens, inside, what has a place there; without one it is where it always was. `connector` is for those that reach for a server.
    pub fn arrive(
        &mut self,
        place: Option<&Path>,
        connector: Option<Connector>,
        new_files: &mut NewFiles,
    ) -> Result<()> {
        let stage = std::mem::replace(&mut self.stage, Stage::Outside);
        self.stage = match stage {
            Stage::Outside => match &self.kind {
                Kind::Dir(path) => Stage::Dir(self.options.open_dir(place.unwrap_or(path))?),
                other => Stage::Open(self.options.open(other, new_files)?),
            },
            Stage::Image(image, folder) => {
                Stage::Source(Source::at_rest_seen(image, &folder, place.unwrap_or(&folder))?)
            }
            Stage::Server(server) => {
                let connector = connector.context("no thread was begun to connect to the server")?;
                Stage::Reaching(server.seen_at(place), connector)
            }
            other => other,
        };
        Ok(())
    }
}

/// Begins what has arrived, with the threads that it has.
pub fn begin(prepared: Vec<Prepared>, new_files: &mut NewFiles) -> Result<Vec<Arc<dyn FileSystem>>> {
    let mut begun: Vec<Arc<dyn FileSystem>> = Vec::new();
    for Prepared { kind, options, stage } in prepared {
        let source = match stage {
            Stage::Dir(dir) => {
                dir.begin();
                dir
            }
            Stage::Open(source) => source,
            Stage::Reaching(server, connector) => server.connect(connector)?,
            Stage::Source(source) => {
                source.begin();
                Arc::new(source)
            }
            Stage::Pmem(opened, is_new) => options.load_pmem((opened, is_new))?,
            Stage::Same(at) => Arc::clone(begun.get(at).context("an earlier share has no source")?),
            Stage::Outside | Stage::Image(..) | Stage::Server(_) => options.open(&kind, new_files)?,
        };
        begun.push(source);
    }
    Ok(begun)
}
