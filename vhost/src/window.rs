//! The device's shared memory region: files of ours that the front end maps into the guest's address space (VIRTIO 1.3,
//! section 2.10; vhost-user, "SHMEM").
//!
//! The front end is asked over the back-end channel, and may take its time. It may also be waiting for *us* meanwhile: QEMU
//! tells every back end of each mapping (ADD_MEM_REG) before it does anything else. So whoever calls here must be a
//! thread that neither the front end's messages nor a queue's end wait for.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferry_vfs::sync::lock;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::channel::{self, ConnectionBroken, WaitLimit};

mod message;

pub use message::Part;
use message::{MAP, UNMAP};

/// How long the front end may take for an answer. One that is late is not believed any more: what it mapped is not known.
const REPLY_WITHIN: Duration = Duration::from_secs(30);
/// How long the first mapping may take to come back as a region of memory. QEMU answers before the guest sees the
/// mapping and tells of the region afterwards; a front end that does not tell has mapped when it answers.
const TOLD_WITHIN: Duration = Duration::from_secs(2);
/// QEMU ends itself when a back end is to know of more than 512 regions, of its memory and all windows.
const REGIONS_MAX: usize = 500;
/// The maximum number of mappings in one window. Front ends that do not tell of regions have no limit of their own, and some mappings
/// hold a descriptor here. A window of the maximum size has 240 chunks of 2 MiB, most of which are one mapping.
const MAPPINGS_MAX: usize = 4096;
/// More answers than servers that were killed one after another, each before it had caught up, have left unread.
const CATCH_UP: u32 = 16;
/// The least that front ends map.
const PAGE_BYTES: u64 = 4096;

/// Why nothing was mapped or unmapped.
#[derive(Debug, thiserror::Error)]
pub enum WindowError {
    /// The front end says no.
    #[error("the front end refuses")]
    Refused,
    /// There is no way to ask the front end, or it does not answer as it should.
    #[error("the front end cannot be asked any more")]
    Lost,
    /// The front end would not bear it.
    #[error("the VMM already has {0} memory regions; no more than {REGIONS_MAX} are used, because QEMU supports 512")]
    TooMany(usize),
    /// The window has too many.
    #[error("the window already has {0} mappings, the maximum")]
    Full(usize),
    /// The file.
    #[error("the file cannot be mapped: {0}")]
    File(std::io::Error),
}

#[derive(Default)]
struct State {
    /// The line to the front end.
    line: Option<Arc<UnixStream>>,
    /// The connection is over.
    ended: bool,
    /// The mapping that is to come back as a region, until it has.
    awaited: Option<AddedRegion>,
    /// Whether mappings come back; not known before the first.
    tells: Option<bool>,
    /// The front end has told of a change of its memory, and waits for the queues. It tells of nothing else meanwhile.
    waits: bool,
    /// When that was over the last time.
    heard: Option<Instant>,
    /// Regions of memory that the front end has told of.
    regions: usize,
    /// What is mapped, by window offset.
    mapped: HashMap<u64, KnownFile>,
    /// It was another server's before.
    taken_over: bool,
    /// That may have asked something whose answer it has not read.
    may_be_stale: bool,
}

/// The shared memory region of one connection.
pub struct Window {
    bytes: u64,
    reply_within: Duration,
    told_within: Duration,
    state: Mutex<State>,
    changed: Condvar,
    /// One question at a time.
    turn: Mutex<()>,
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// A region as ADD_MEM_REG tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddedRegion {
    pub(crate) file: FileId,
    pub(crate) file_offset: u64,
    pub(crate) bytes: u64,
}

/// Device and inode number of a file.
pub(crate) type FileId = (u64, u64);

/// Which file a descriptor is.
pub(crate) fn file_id(file: impl AsFd) -> std::io::Result<FileId> {
    let stat = rustix::fs::fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Files that are in some window of this process, and how often: all devices of a guest are told of its regions.
static KNOWN: Mutex<BTreeMap<FileId, usize>> = Mutex::new(BTreeMap::new());

/// Whether a file is in a window.
pub(crate) fn is_known(file: FileId) -> bool {
    lock(&KNOWN).contains_key(&file)
}

/// A file's being known.
struct KnownFile(FileId);

impl KnownFile {
    fn new(file: FileId) -> Self {
        *lock(&KNOWN).entry(file).or_insert(0) += 1;
        Self(file)
    }
}

impl Drop for KnownFile {
    fn drop(&mut self) {
        let mut known = lock(&KNOWN);
        if let Some(count) = known.get_mut(&self.0) {
            *count -= 1;
            if *count == 0 {
                known.remove(&self.0);
            }
        }
    }
}

fn empty_page() -> rustix::io::Result<OwnedFd> {
    let memory = memfd_create("ferry-dax", MemfdFlags::CLOEXEC)?;
    ftruncate(&memory, PAGE_BYTES)?;
    Ok(memory)
}

impl Window {
    pub(crate) fn new(bytes: u64) -> Self {
        Self::with_timeouts(bytes, REPLY_WITHIN, TOLD_WITHIN)
    }

    fn with_timeouts(bytes: u64, reply_within: Duration, told_within: Duration) -> Self {
        Self {
            bytes,
            reply_within,
            told_within,
            state: Mutex::default(),
            changed: Condvar::new(),
            turn: Mutex::default(),
        }
    }

    /// The length of the window.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the front end maps files that are open for reading only. QEMU does not, and neither does it map them so that the guest
    /// cannot write; it is known by telling of what it maps, so not before the first mapping.
    pub fn maps_read_only(&self) -> bool {
        lock(&self.state).tells == Some(false)
    }

    /// Has the front end map a part of a file, where nothing is mapped yet. When this comes back, the guest sees it.
    /// Waits for the front end: see the module's page for who may.
    ///
    /// # Errors
    /// [`WindowError`].
    pub fn map(&self, file: BorrowedFd<'_>, part: Part) -> Result<(), WindowError> {
        let id = file_id(file).map_err(WindowError::File)?;
        let _turn = lock(&self.turn);
        let told = AddedRegion { file: id, file_offset: part.file_offset, bytes: part.bytes };
        let line = {
            let mut state = lock(&self.state);
            if state.regions >= REGIONS_MAX {
                return Err(WindowError::TooMany(state.regions));
            }
            if state.mapped.len() >= MAPPINGS_MAX {
                return Err(WindowError::Full(state.mapped.len()));
            }
            let line = state.line()?;
            // Before the front end hears of it, for it may tell of the region before it answers.
            state.mapped.insert(part.window_offset, KnownFile::new(id));
            state.awaited = (state.tells != Some(false)).then_some(told);
            line
        };
        let outcome = self.ask(&line, (MAP, part), Some(file));
        let mut state = lock(&self.state);
        if let Err(error) = state.check(outcome) {
            state.awaited = None;
            state.mapped.remove(&part.window_offset);
            return Err(error);
        }
        let is_told = self.wait_for_region(state)?;
        if !is_told {
            tracing::error!("the front end acknowledged a mapping, but did not send the memory region for it");
            // Whatever it has done: nobody is to count on it.
            self.undo(part)?;
            return Err(WindowError::Lost);
        }
        Ok(())
    }

    /// Waits until the mapping has come back as a region of memory, where front ends tell. Returns whether it has.
    fn wait_for_region(&self, mut state: MutexGuard<'_, State>) -> Result<bool, WindowError> {
        let within = if state.tells.is_some() { self.reply_within } else { self.told_within };
        let begun = Instant::now();
        while state.awaited.is_some() && !state.ended {
            let since = state.heard.map_or(begun, |heard| heard.max(begun));
            // What we make the front end wait for does not count.
            let left = if state.waits { within } else { within.saturating_sub(since.elapsed()) };
            if left.is_zero() {
                break;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.ended {
            return Err(WindowError::Lost);
        }
        if state.awaited.take().is_none() {
            return Ok(true);
        }
        if state.tells.is_none() {
            tracing::debug!("the front end does not tell of what it maps");
            state.tells = Some(false);
        }
        Ok(state.tells == Some(false))
    }

    /// Has the front end undo a mapping, which must be the very part that was mapped. The rest is as for [`Self::map`].
    ///
    /// # Errors
    /// [`WindowError`].
    pub fn unmap(&self, part: Part) -> Result<(), WindowError> {
        let _turn = lock(&self.turn);
        self.undo(part)
    }

    /// The same for whoever has the turn.
    fn undo(&self, part: Part) -> Result<(), WindowError> {
        let line = lock(&self.state).line()?;
        let outcome = self.ask(&line, (UNMAP, part), None);
        let mut state = lock(&self.state);
        state.check(outcome)?;
        state.mapped.remove(&part.window_offset);
        Ok(())
    }

    fn ask(
        &self,
        line: &UnixStream,
        (code, part): (u32, Part),
        file: Option<BorrowedFd<'_>>,
    ) -> Result<u64, ConnectionBroken> {
        let may_be_stale = lock(&self.state).may_be_stale;
        let with_timeouts = WaitLimit { within: self.reply_within, is_over: &|| lock(&self.state).ended };
        channel::ask(line, (code, &message::body(part)), file, &with_timeouts, may_be_stale)
    }

    /// The front end has mapped what the server before this one has asked it for.
    pub(crate) fn take_over(&self) {
        let mut state = lock(&self.state);
        (state.taken_over, state.may_be_stale) = (true, true);
    }

    /// Whether the front end has mapped what a server before this one has asked it for.
    pub fn is_taken_over(&self) -> bool {
        lock(&self.state).taken_over
    }

    /// The server before had a part of this file mapped at this place of the window.
    ///
    /// # Errors
    /// Those of `fstat(2)`.
    pub fn adopt(&self, window_offset: u64, file: BorrowedFd<'_>) -> std::io::Result<()> {
        let known = KnownFile::new(file_id(file)?);
        lock(&self.state).mapped.insert(window_offset, known);
        Ok(())
    }

    /// To be called once by whoever takes a window over. If the server before may have ended while it waited for an answer, after that mapping was
    /// undone: it was at this place, where nothing is now. Answers of the other kind than expected are passed over here: so after enough questions of
    /// one kind, whatever they come to, the first answer to one of the other kind is its own. A page is mapped for that, and taken away again.
    ///
    /// # Errors
    /// [`WindowError`].
    pub fn catch_up(&self, window_offset: Option<u64>) -> Result<(), WindowError> {
        if let Some(window_offset) = window_offset {
            // QEMU maps only what it could write to.
            let memory = empty_page().map_err(|error| WindowError::File(error.into()))?;
            let part = Part { window_offset, file_offset: 0, bytes: PAGE_BYTES, writable: false };
            // More than there can be answers to others of this kind: so all that is left unread then are answers to these. And a server
            // that was killed just here has left a page of its own.
            for _ in 0..CATCH_UP {
                match self.unmap(part) {
                    Ok(()) | Err(WindowError::Refused) => {}
                    Err(error) => return Err(error),
                }
            }
            self.map(memory.as_fd(), part)?;
            self.unmap(part)?;
        }
        lock(&self.state).may_be_stale = false;
        Ok(())
    }

    /// The front end can be asked here.
    pub(crate) fn attach(&self, socket: OwnedFd) {
        let stream = UnixStream::from(socket);
        // The front end may have sent any descriptor.
        if let Err(error) = stream.local_addr().and_then(|_| stream.set_nonblocking(true)) {
            tracing::error!("the front end's channel for the window cannot be used: {error}");
            return;
        }
        let mut state = lock(&self.state);
        if !state.ended {
            state.line = Some(Arc::new(stream));
        }
    }

    /// The front end tells of a change of its memory. Until [`Self::memory_changed`] it is made to wait.
    pub(crate) fn memory_change_begins(&self) {
        lock(&self.state).waits = true;
    }

    /// The front end has told of its regions of memory, `added` being the new one.
    pub(crate) fn memory_changed(&self, regions: usize, added: Option<AddedRegion>) {
        let mut state = lock(&self.state);
        state.regions = regions;
        state.waits = false;
        state.heard = Some(Instant::now());
        if added.is_some() && state.awaited == added {
            state.awaited = None;
            state.tells = Some(true);
        }
        // It had to wait for something for so long that it was taken for one that does not tell.
        let is_late = |told: AddedRegion| state.mapped.values().any(|known| known.0 == told.file);
        if state.tells == Some(false) && added.is_some_and(is_late) {
            tracing::debug!("the front end tells of what it maps, if late");
            state.tells = Some(true);
        }
        self.changed.notify_all();
    }

    /// The connection is over: nobody waits any longer. The socket is not shut down, for the next server may have it
    /// (`--state`), and User-mode Linux gives up a device whose socket is.
    pub(crate) fn end(&self) {
        let mut state = lock(&self.state);
        state.ended = true;
        state.line = None;
        state.mapped.clear();
        self.changed.notify_all();
    }
}

impl State {
    fn line(&self) -> Result<Arc<UnixStream>, WindowError> {
        self.line.clone().ok_or(WindowError::Lost)
    }

    /// What the outcome of a question means; after some of them the line is of no use any more.
    fn check(&mut self, outcome: Result<u64, ConnectionBroken>) -> Result<(), WindowError> {
        match outcome {
            Ok(0) => Ok(()),
            Ok(_) => Err(WindowError::Refused),
            Err(error) => {
                if !self.ended && self.line.is_some() {
                    tracing::error!("the window is not served any more: {error}");
                }
                self.line = None;
                Err(WindowError::Lost)
            }
        }
    }
}

#[cfg(test)]
mod tests;
