//! Disks that are being offered: opened all together, before the first one is served.

use std::collections::HashSet;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ferry_blk::Export;

use super::Args;
use crate::recipes;
use crate::share::shown;
use crate::socket::Bound;

/// How long a disk may take to open before that is said, and the others do without it: far more than any does that is well.
pub const PATIENCE: Duration = Duration::from_secs(3);
/// The time between two looks at what takes no time.
const MOMENT: Duration = Duration::from_millis(1);

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

/// The socket of a disk: inherited, or made; none for a disk that is only made larger.
pub fn bind(disk: &Args, inherited: Option<Bound>) -> Result<Option<Bound>> {
    match (inherited, &disk.vhost_user) {
        (Some(bound), _) => Ok(Some(bound)),
        (None, Some(socket)) => Bound::bind(socket).map(Some),
        (None, None) => Ok(None),
    }
}

/// Opens a disk, and says so if its storage takes long to answer.
fn named_if_slow<T>(disk: &Args, open: impl FnOnce() -> Result<T>) -> Result<T> {
    let (begun, file) = (Instant::now(), disk.path()?.display().to_string());
    let (opened, is_opened) = channel::<()>();
    let (tell, told) = channel();
    let named = file.clone();
    let wait = move || {
        let _ = tell.send(rustix::thread::gettid());
        if is_opened.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            let seconds = PATIENCE.as_secs();
            tracing::warn!(
                "{named} is not open after {seconds} s, for its storage does not answer: it is served once it does"
            );
        }
    };
    let thread =
        std::thread::Builder::new().name("disk-opening".into()).spawn(wait).context("no thread can be started")?;
    let outcome = open();
    drop(opened);
    if let (Ok(thread), Ok(())) = (told.recv(), thread.join()) {
        // Processes are split with one thread, and one that has ended is among them for a moment.
        let task = format!("/proc/self/task/{}", thread.as_raw_nonzero());
        while Path::new(&task).exists() && begun.elapsed() < 2 * PATIENCE {
            std::thread::sleep(MOMENT);
        }
    }
    if outcome.is_ok() && begun.elapsed() >= PATIENCE {
        tracing::info!("{file} is open after {} s", begun.elapsed().as_secs());
    }
    outcome
}

/// Disks that are open, and being offered once they are started.
#[derive(Default)]
pub struct Disks<'a> {
    opened: Vec<Opened<'a>>,
    /// The sockets that they are offered on, in their order.
    sockets: Vec<Bound>,
    exports: Vec<Export>,
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
    /// Opens every disk and every socket: what is wrong shows at once. Disks without a socket are only made larger.
    pub fn open(disks: &'a [Args], inherited: Vec<Option<Bound>>) -> Result<Self> {
        let mut all = Self::default();
        for (args, inherited) in disks.iter().zip(inherited) {
            let Some(bound) = bind(args, inherited)? else {
                named_if_slow(args, || args.only_resize())?;
                continue;
            };
            all.sockets.push(bound);
            let (disk, image) = named_if_slow(args, || args.open())?;
            all.opened.push(Opened { args, options: args.device_options(), disk, image });
        }
        Ok(all)
    }

    /// Leaves the disks to a process that has been made of this one, which offers them: files that it closes are to be closed.
    /// This one goes on being who removes the files of sockets.
    pub fn leave(&mut self) {
        self.opened.clear();
    }

    /// Offers them in the place of the process that opened them.
    pub fn take_over(&mut self) -> Result<()> {
        self.sockets.iter_mut().try_for_each(Bound::take_over)
    }

    /// Whether there is nothing to offer.
    pub fn is_empty(&self) -> bool {
        self.opened.is_empty()
    }

    /// Begins to serve.
    pub fn start(&mut self) -> Result<()> {
        for (one, socket) in self.opened.iter().zip(&self.sockets) {
            if let Some(image) = &one.image {
                image.begin();
            }
            self.exports.push(Export::start(socket.listener()?, Arc::clone(&one.disk), one.options.clone())?);
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
