//! Disks that are being offered: opened all together, before the first one is served.

use std::collections::HashSet;
use std::io::{IsTerminal, Write};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ferry_blk::Export;

use super::Args;
use crate::recipes;
use crate::share::shown;
use crate::socket::Bound;

/// A socket or descriptor can serve one disk only. Files are kept apart by their locks.
pub fn refuse_doubles(disks: &[Args]) -> Result<()> {
    let mut sockets = HashSet::new();
    let mut descriptors = HashSet::new();
    for disk in disks {
        if let Some(socket) = &disk.vhost_user {
            ensure!(sockets.insert(socket), "the socket {} is given twice; each disk needs its own", socket.display());
        }
        if let Some(fd) = disk.fd {
            ensure!(descriptors.insert(fd), "descriptor {fd} is given twice; each disk needs its own");
        }
    }
    Ok(())
}

/// Takes over the inherited sockets of disks. To be called before this process opens descriptors of its own, which could
/// get their numbers.
pub fn inherit(disks: &[Args]) -> Result<Vec<Option<Bound>>> {
    disks.iter().map(|disk| disk.fd.map(Bound::inherit).transpose()).collect()
}

/// Disks that are open, and being offered once they are started.
#[derive(Default)]
pub struct Disks<'a> {
    opened: Vec<Opened<'a>>,
    exports: Vec<Export>,
}

/// A disk and the socket that it is offered on.
struct Opened<'a> {
    args: &'a Args,
    bound: Bound,
    disk: Arc<dyn ferry_vfs::Disk>,
}

impl<'a> Disks<'a> {
    /// Opens every disk and every socket: what is wrong shows at once. Disks without a socket are only made larger.
    pub fn open(disks: &'a [Args], inherited: Vec<Option<Bound>>) -> Result<Self> {
        let mut opened = Vec::new();
        for (args, inherited) in disks.iter().zip(inherited) {
            let bound = match (inherited, &args.vhost_user) {
                (Some(bound), _) => bound,
                (None, Some(socket)) => Bound::bind(socket)?,
                (None, None) => {
                    args.only_resize()?;
                    continue;
                }
            };
            opened.push(Opened { args, bound, disk: args.open()? });
        }
        Ok(Self { opened, exports: Vec::new() })
    }

    /// Whether there is nothing to offer.
    pub fn is_empty(&self) -> bool {
        self.opened.is_empty()
    }

    /// Begins to serve.
    pub fn start(&mut self) -> Result<()> {
        for one in &self.opened {
            let listener = one.bound.listener()?;
            self.exports.push(Export::start(listener, Arc::clone(&one.disk), one.args.device_options())?);
        }
        Ok(())
    }

    /// Lets requests under way end, and makes what they wrote durable.
    pub fn stop(&mut self) {
        self.exports.drain(..).for_each(Export::stop);
    }

    /// What a program is told of them.
    pub fn described(&self) -> Vec<serde_json::Value> {
        self.opened.iter().map(Opened::described).collect()
    }

    /// Says that every disk is up: to a person as what to give QEMU.
    pub fn announce(&self) -> Result<()> {
        let mut out = std::io::stdout().lock();
        for one in &self.opened {
            let (path, bytes) = (one.args.path()?.display(), one.disk.geometry().bytes);
            match &one.args.vhost_user {
                Some(socket) if out.is_terminal() => {
                    let line = recipes::qemu_disk(&shown(socket));
                    writeln!(out, "{path}: {line}").context("cannot write to standard output")?;
                }
                socket => tracing::info!(%path, bytes, socket = socket.as_deref().map(shown), "offering a disk"),
            }
        }
        Ok(())
    }
}

impl Drop for Disks<'_> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Opened<'_> {
    fn described(&self) -> serde_json::Value {
        let (geometry, features) = (self.disk.geometry(), self.disk.features());
        serde_json::json!({
            "file": self.args.path().ok().map(shown),
            "vhost_user": self.args.vhost_user.as_deref().map(shown),
            "fd": self.args.fd,
            "bytes": geometry.bytes,
            "block_bytes": geometry.logical_block_bytes,
            "read_only": features.read_only,
            "discard": features.discard,
            "serial": self.disk.serial(),
        })
    }
}
