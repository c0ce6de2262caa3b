//! `ferry share`: serve until a signal comes.

use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use ferry_vfs::FileSystem;
use ferry_virtiofs::{Export, Tag};

use crate::cli::{Cache, Share};
use crate::recipes;
use crate::signals::{Endings, SIGINT, SIGTERM};
use crate::socket::Bound;

/// Shares directories until SIGTERM or SIGINT.
pub fn run(shares: &[Share], json: bool) -> Result<()> {
    refuse_doubles(shares)?;
    // Inherited descriptors first: nothing has been opened yet that could have their numbers.
    let inherited: HashMap<u16, Bound> =
        shares.iter().filter_map(|share| share.fd).map(|fd| Ok((fd, Bound::inherit(fd)?))).collect::<Result<_>>()?;
    let mut endings = Endings::catch(&[SIGTERM, SIGINT])?;

    let mut serving = Serving::default();
    start(shares, inherited, &mut serving)?;
    announce(shares, json)?;
    let signal = endings.wait();
    tracing::info!(signal, "ending: serving what is under way");
    serving.stop();
    Ok(())
}

/// A socket or descriptor can serve one share only.
fn refuse_doubles(shares: &[Share]) -> Result<()> {
    for (at, share) in shares.iter().enumerate() {
        let before = &shares[..at];
        if let Some(socket) = &share.virtiofs {
            let twice = before.iter().any(|other| other.virtiofs.as_ref() == Some(socket));
            ensure!(!twice, "the socket {} is given twice; each share needs its own", socket.display());
        }
        if let Some(fd) = share.fd {
            let twice = before.iter().any(|other| other.fd == Some(fd));
            ensure!(!twice, "descriptor {fd} is given twice; each share needs its own");
        }
    }
    Ok(())
}

/// Opens every directory and every socket before the first share is served: what is wrong shows at once.
fn start(shares: &[Share], mut inherited: HashMap<u16, Bound>, serving: &mut Serving) -> Result<()> {
    let mut sources = Sources::default();
    let opened: Vec<_> = shares.iter().map(|share| sources.open(share)).collect::<Result<_>>()?;
    let bound: Vec<Bound> = shares
        .iter()
        .map(|share| match (&share.virtiofs, share.fd) {
            (Some(socket), _) => Bound::bind(socket),
            (None, Some(fd)) => Ok(inherited.remove(&fd).expect("every descriptor was taken above, once")),
            (None, None) => bail!("{} needs --virtiofs SOCKET", share.dir.display()),
        })
        .collect::<Result<_>>()?;
    for ((share, source), bound) in shares.iter().zip(opened).zip(bound) {
        serving
            .start(bound, source, options(share))
            .with_context(|| format!("cannot share {}", share.dir.display()))?;
    }
    Ok(())
}

/// The sources by directory: one directory that several guests use is one source, so that they see each other's
/// changes and locks at once.
#[derive(Default)]
struct Sources(Vec<(PathBuf, ferry_dir::Options, Arc<dyn FileSystem>)>);

impl Sources {
    fn open(&mut self, share: &Share) -> Result<Arc<dyn FileSystem>> {
        let options = ferry_dir::Options {
            read_only: share.read_only,
            direct_io: share.allow_direct_io,
            writeback: share.writeback,
            ..ferry_dir::Options::default()
        };
        let place = share.dir.canonicalize().unwrap_or_else(|_| share.dir.clone());
        if let Some((.., source)) = self.0.iter().find(|(other, with, _)| *other == place && *with == options) {
            return Ok(Arc::clone(source));
        }
        let source: Arc<dyn FileSystem> = Arc::new(ferry_dir::Dir::open(&share.dir, options.clone())?);
        self.0.push((place, options, Arc::clone(&source)));
        Ok(source)
    }
}

/// The exports that are being served, each with the socket that goes when it ends.
#[derive(Default)]
pub struct Serving(Vec<(Export, Bound)>);

impl Serving {
    pub fn start(&mut self, bound: Bound, source: Arc<dyn FileSystem>, options: ferry_virtiofs::Options) -> Result<()> {
        let listener = bound.listener.try_clone().context("no descriptor left for the socket")?;
        self.0.push((Export::from_listener(listener, source, options)?, bound));
        Ok(())
    }

    /// Lets requests under way end, and makes what they wrote durable.
    pub fn stop(&mut self) {
        for (export, bound) in self.0.drain(..) {
            export.stop();
            drop(bound);
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop();
    }
}

fn options(share: &Share) -> ferry_virtiofs::Options {
    let mut options = ferry_virtiofs::Options {
        // Not the default: some versions of QEMU do not bear a device that tells its tag.
        tag: share.tag.clone(),
        cache: share.cache.into(),
        writeback: share.writeback,
        xattr: !share.no_xattr,
        ..ferry_virtiofs::Options::default()
    };
    if let Some(queues) = share.queues {
        options.queues = usize::from(queues);
    }
    if let Some(poll) = share.poll() {
        options.poll = poll;
    }
    options
}

impl From<Cache> for ferry_virtiofs::Cache {
    fn from(cache: Cache) -> Self {
        match cache {
            Cache::None => Self::None,
            Cache::Auto => Self::Auto,
            Cache::Always => Self::Always,
        }
    }
}

/// One share as `--json` shows it.
#[derive(serde::Serialize)]
struct Shown<'a> {
    dir: String,
    tag: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    virtiofs: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fd: Option<u16>,
    read_only: bool,
    queues: usize,
}

/// Says that every share is listening: to a program as JSON, to a person as what to give QEMU.
fn announce(shares: &[Share], json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let tags: Vec<Tag> = shares.iter().map(Share::tag_or_default).collect();
    let shares = shares.iter().zip(&tags).map(|(share, tag)| Shown {
        dir: shown(&share.dir),
        tag: tag.as_str(),
        virtiofs: share.virtiofs.as_deref().map(shown),
        fd: share.fd,
        read_only: share.read_only,
        queues: options(share).queues,
    });
    if json {
        let line = serde_json::json!({ "pid": std::process::id(), "shares": shares.collect::<Vec<_>>() });
        return writeln!(out, "{line}").and_then(|()| out.flush()).context("cannot write to standard output");
    }
    for Shown { dir, tag, virtiofs, fd, queues, .. } in shares {
        match virtiofs {
            Some(socket) if out.is_terminal() => {
                let line = recipes::qemu(&socket, tag, queues);
                writeln!(out, "{dir} as {tag}: {line}").context("cannot write to standard output")?;
            }
            socket => tracing::info!(dir, tag, socket, fd, "sharing"),
        }
    }
    Ok(())
}

/// A path as whoever reads it needs it, wherever that is.
fn shown(path: &Path) -> String {
    std::path::absolute(path).as_deref().unwrap_or(path).to_string_lossy().into_owned()
}
