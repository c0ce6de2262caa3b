//! Disks that are being offered: opened all together, before the first one is served.

use std::collections::HashSet;
use std::fs;
use std::io::{IsTerminal, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferry_blk::Export;
use ferry_isolation::BlockedSignals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::Args;
use crate::launch::{ENDINGS, Serve};
use crate::new_files::NewFiles;
use crate::paths::absolute;
use crate::recipes;
use crate::socket::Bound;

/// How long a disk may take to open before that is said, and the others do without it: far more than any does that is well.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// A socket or descriptor can serve one disk only. Files are kept apart by their locks.
pub fn refuse_duplicates(disks: &[Args]) -> Result<()> {
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

/// The socket of a disk: inherited, or made; none for a disk that is only made larger.
pub fn bind(disk: &Args, inherited: Option<Bound>) -> Result<Option<Bound>> {
    match (inherited, &disk.vhost_user) {
        (Some(bound), _) => Ok(Some(bound)),
        (None, Some(socket)) => Bound::bind(socket).map(Some),
        (None, None) => Ok(None),
    }
}

/// From when on it is worth a word that storage has not answered.
const SLOW: Duration = Duration::from_secs(1);

/// Waits until the storage of a disk answers, and says so if it takes long; whether it did before a signal came that ends this process.
///
/// Another process asks it: one that waits for storage can, with some, not even be killed, and this one is to end at once.
fn answers(disk: &Args, signals: &BlockedSignals) -> Result<bool> {
    let begun = Instant::now();
    let file = disk.path()?.display();
    let Some(child) = ferry_isolation::begin_child()? else { ask(disk) };
    let arrives = signals.descriptor()?;
    let mut left = Some(Timespec { tv_sec: PATIENCE.as_secs().cast_signed(), tv_nsec: 0 });
    while child.end()?.is_none() {
        let mut polled = [PollFd::new(&arrives, PollFlags::IN)];
        match poll(&mut polled, left.as_ref()) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno).context("it cannot be waited for a disk to open"),
            Ok(0) => {
                left = None;
                let seconds = PATIENCE.as_secs();
                tracing::warn!(
                    "{file} is not open after {seconds} s, for its storage does not answer: it is served once it does"
                );
            }
            // The child's end is among the signals.
            Ok(_) => {
                let signal = signals.next()?.map(|arrival| arrival.signal.as_raw());
                if let Some(signal) = signal.filter(|signal| ENDINGS.contains(signal)) {
                    // A start that another disk has failed ends all others, which are no slower than usual.
                    if begun.elapsed() >= SLOW {
                        tracing::warn!("{file} is not served: its storage had not answered when signal {signal} came");
                    }
                    return Ok(false);
                }
            }
        }
    }
    if begun.elapsed() >= PATIENCE {
        tracing::info!("{file} answers after {} s", begun.elapsed().as_secs());
    }
    Ok(true)
}

/// Does with a disk's file, and with the folders that it needs, what waits if their storage does not answer. What is wrong with them shows when they
/// are opened.
fn ask(disk: &Args) -> ! {
    let (file, folders) = disk.places();
    // Opening others may wait, or do things.
    let is_plain = |found: fs::Metadata| found.is_file() || found.file_type().is_block_device();
    if let Some(file) = file
        && fs::metadata(file).is_ok_and(is_plain)
    {
        let _ = fs::File::open(file).and_then(|mut file| file.read(&mut [0; 512]));
    }
    for folder in folders {
        let _ = fs::read_dir(folder).map(|mut entries| entries.next());
    }
    // Nothing of the process that this was made of is to be done here.
    std::process::exit(0)
}

/// Disks that are open, and being offered once they are started.
pub struct Disks<'a> {
    opened: Vec<Opened<'a>>,
    /// The sockets that they are offered on, in their order.
    sockets: Vec<Bound>,
    exports: Vec<Export>,
    /// What opening them has made.
    new_files: NewFiles,
}

/// A disk.
struct Opened<'a> {
    args: &'a Args,
    /// How it is to be offered, found while this process sees all of its machine.
    options: ferry_blk::Options,
    disk: Arc<dyn ferry_vfs::Disk>,
    /// The same, if it is an image.
    image: Option<Arc<ferry_image::Disk>>,
}

impl<'a> Disks<'a> {
    /// Opens every disk and every socket: what is wrong shows at once. Disks without a socket are only made larger. `None`: there is nothing to
    /// offer, or a signal came that ends this process.
    pub fn open(
        disks: &'a [Args],
        inherited: Vec<Option<Bound>>,
        signals: &BlockedSignals,
        new_files: NewFiles,
    ) -> Result<Option<Self>> {
        let mut all = Self { opened: Vec::new(), sockets: Vec::new(), exports: Vec::new(), new_files };
        for (args, inherited) in disks.iter().zip(inherited) {
            let bound = bind(args, inherited)?;
            let is_offered = bound.is_some();
            all.sockets.extend(bound);
            if !answers(args, signals)? {
                return Ok(None);
            }
            if !is_offered {
                args.only_resize()?;
                continue;
            }
            let (disk, image, made) = args.open()?;
            all.new_files.add(made);
            all.opened.push(Opened { args, options: args.device_options(), disk, image });
        }
        Ok(Some(all).filter(|all| !all.opened.is_empty()))
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
                    let line = recipes::qemu_disk(&absolute(socket));
                    writeln!(out, "{path}: {line}").context("cannot write to standard output")?;
                }
                socket => tracing::info!(%path, bytes, socket = socket.as_deref().map(absolute), "offering a disk"),
            }
        }
        Ok(())
    }
}

impl Serve for Disks<'_> {
    fn leave(&mut self) -> &mut NewFiles {
        self.opened.clear();
        &mut self.new_files
    }

    fn take_over(&mut self) -> Result<()> {
        self.new_files.leave();
        self.sockets.iter_mut().try_for_each(Bound::take_over)
    }

    fn start(&mut self) -> Result<()> {
        for (one, socket) in self.opened.iter().zip(&self.sockets) {
            if let Some(image) = &one.image {
                image.begin();
            }
            self.exports.push(Export::start(socket.listener()?, Arc::clone(&one.disk), one.options.clone())?);
        }
        self.new_files.keep();
        Ok(())
    }

    fn stop(&mut self, _signal: Option<i32>) {
        self.exports.drain(..).for_each(Export::stop);
    }
}

impl Drop for Disks<'_> {
    fn drop(&mut self) {
        self.stop(None);
    }
}

impl Opened<'_> {
    fn described(&self) -> serde_json::Value {
        let (geometry, features) = (self.disk.geometry(), self.disk.features());
        serde_json::json!({
            "file": self.args.path().ok().map(absolute),
            "vhost_user": self.args.vhost_user.as_deref().map(absolute),
            "fd": self.args.fd,
            "bytes": geometry.bytes,
            "block_bytes": geometry.logical_block_bytes,
            "read_only": features.read_only,
            "discard": features.discard,
            "serial": self.disk.serial(),
        })
    }
}
