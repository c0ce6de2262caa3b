//! The device's shared memory region: files of this server that the front end maps into the guest's address space
//! (VIRTIO 1.3, section 2.10; vhost-user, "SHMEM").
//!
//! Requests to the front end use the back-end channel and may take long. The front end may be waiting for this server
//! at that time: QEMU sends each mapping to every back end (ADD_MEM_REG) before it does anything else. So callers
//! must be threads that neither the front end's messages nor the stop of a queue wait for.

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

/// How long the front end may take for a reply. A late one is an error: the state of the mapping is unknown.
const REPLY_WITHIN: Duration = Duration::from_secs(30);
/// How long the first mapping may take to return as a memory region. QEMU replies before the guest sees the mapping
/// and sends the region afterwards; other front ends have mapped when they reply. One that has added memory region by
/// region, as QEMU does, may take [`REPLY_WITHIN`]: a busy host delays it, and the guest would see zeros meanwhile.
const REGION_WITHIN: Duration = Duration::from_secs(2);
/// The most memory regions, of memory and all windows: QEMU aborts beyond 512.
const REGIONS_MAX: usize = 500;
/// The most mappings in one window. Front ends that send no regions have no limit of their own, and some mappings
/// hold a descriptor here. A window of the maximum size has 240 chunks of 2 MiB, most of which are one mapping.
const MAPPINGS_MAX: usize = 4096;
/// More replies than killed servers can have left unread, one after another, each before [`Window::catch_up`].
const CATCH_UP: u32 = 16;
/// The smallest mapping of front ends.
const PAGE_BYTES: u64 = 4096;

/// Why nothing was mapped or unmapped.
#[derive(Debug, thiserror::Error)]
pub enum WindowError {
    /// The front end refused.
    #[error("the front end refused")]
    Refused,
    /// There is no back-end channel, or the front end does not reply correctly.
    #[error("the back-end channel is closed")]
    Lost,
    /// Too many regions for the front end.
    #[error("the VMM already has {0} memory regions; no more than {REGIONS_MAX} are used, because QEMU supports 512")]
    TooMany(usize),
    /// Too many mappings in the window.
    #[error("the window already has {0} mappings, the maximum")]
    Full(usize),
    /// The file cannot be used.
    #[error("the file cannot be mapped: {0}")]
    File(std::io::Error),
}

#[derive(Default)]
struct State {
    /// The back-end channel.
    line: Option<Arc<UnixStream>>,
    /// The connection has ended.
    ended: bool,
    /// The mapping that must return as a region, until it has.
    awaited: Option<AddedRegion>,
    /// Whether the front end sends regions for mappings; unknown before the first mapping.
    sends_regions: Option<bool>,
    /// The front end adds memory region by region (ADD_MEM_REG).
    adds_regions: bool,
    /// The front end has sent a change of its memory and waits for the queues. It sends nothing else during that
    /// time.
    waits: bool,
    /// When the last change of memory was finished.
    heard: Option<Instant>,
    /// The number of memory regions that the front end has sent.
    regions: usize,
    /// The mappings by window offset.
    mapped: HashMap<u64, KnownFile>,
    /// The previous server used it.
    taken_over: bool,
    /// The previous server may have left replies unread.
    may_be_stale: bool,
}

/// The shared memory region of one connection.
pub struct Window {
    bytes: u64,
    reply_within: Duration,
    region_within: Duration,
    state: Mutex<State>,
    changed: Condvar,
    /// Held during a request: one at a time.
    turn: Mutex<()>,
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Window").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// A region of ADD_MEM_REG.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AddedRegion {
    pub(crate) file: FileId,
    pub(crate) file_offset: u64,
    pub(crate) bytes: u64,
}

/// Device and inode number of a file.
pub(crate) type FileId = (u64, u64);

/// Returns the identity of a descriptor's file.
pub(crate) fn file_id(file: impl AsFd) -> std::io::Result<FileId> {
    let stat = rustix::fs::fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Files in any window of this process, with counts: all devices of a guest receive its regions.
static KNOWN: Mutex<BTreeMap<FileId, usize>> = Mutex::new(BTreeMap::new());

/// Whether a file is in a window.
pub(crate) fn is_known(file: FileId) -> bool {
    lock(&KNOWN).contains_key(&file)
}

/// An entry in [`KNOWN`].
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
        Self::with_timeouts(bytes, REPLY_WITHIN, REGION_WITHIN)
    }

    fn with_timeouts(bytes: u64, reply_within: Duration, region_within: Duration) -> Self {
        Self {
            bytes,
            reply_within,
            region_within,
            state: Mutex::default(),
            changed: Condvar::new(),
            turn: Mutex::default(),
        }
    }

    /// Returns the length of the window.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the front end maps files that are open for reading only. QEMU does not, and cannot map files read-only
    /// for the guest; it is recognized by the regions that it sends, so only after the first mapping.
    pub fn maps_read_only(&self) -> bool {
        lock(&self.state).sends_regions == Some(false)
    }

    /// Maps a part of a file where nothing is mapped yet. The guest sees it when this returns. Waits for the front
    /// end: see the module's page for who may call.
    ///
    /// # Errors
    /// [`WindowError`].
    pub fn map(&self, file: BorrowedFd<'_>, part: Part) -> Result<(), WindowError> {
        let id = file_id(file).map_err(WindowError::File)?;
        let _turn = lock(&self.turn);
        let region = AddedRegion { file: id, file_offset: part.file_offset, bytes: part.bytes };
        let line = {
            let mut state = lock(&self.state);
            if state.regions >= REGIONS_MAX {
                return Err(WindowError::TooMany(state.regions));
            }
            if state.mapped.len() >= MAPPINGS_MAX {
                return Err(WindowError::Full(state.mapped.len()));
            }
            let line = state.line()?;
            // Before the request: the front end may send the region before it replies.
            state.mapped.insert(part.window_offset, KnownFile::new(id));
            state.awaited = (state.sends_regions != Some(false)).then_some(region);
            line
        };
        let outcome = self.request(&line, (MAP, part), Some(file));
        let mut state = lock(&self.state);
        if let Err(error) = state.check(outcome) {
            state.awaited = None;
            state.mapped.remove(&part.window_offset);
            return Err(error);
        }
        let is_mapped = self.wait_for_region(state)?;
        if !is_mapped {
            tracing::error!("the front end acknowledged a mapping, but did not send the memory region for it");
            // The state of the mapping is unknown, so it is removed.
            self.undo(part)?;
            return Err(WindowError::Lost);
        }
        Ok(())
    }

    /// Waits until the mapping has returned as a memory region, for front ends that send regions. Returns whether it
    /// is complete.
    fn wait_for_region(&self, mut state: MutexGuard<'_, State>) -> Result<bool, WindowError> {
        let may_come = state.sends_regions.is_some() || state.adds_regions;
        let within = if may_come { self.reply_within } else { self.region_within };
        let begun = Instant::now();
        while state.awaited.is_some() && !state.ended {
            let since = state.heard.map_or(begun, |heard| heard.max(begun));
            // Time that the front end waits for our queues does not count.
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
        if state.sends_regions.is_none() {
            tracing::debug!(adds_regions = state.adds_regions, "the front end sends no memory regions for mappings");
            state.sends_regions = Some(false);
        }
        Ok(state.sends_regions == Some(false))
    }

    /// Removes a mapping, which must be exactly a mapped part. Otherwise like [`Self::map`].
    ///
    /// # Errors
    /// [`WindowError`].
    pub fn unmap(&self, part: Part) -> Result<(), WindowError> {
        let _turn = lock(&self.turn);
        self.undo(part)
    }

    /// Removes a mapping while the caller holds `turn`.
    fn undo(&self, part: Part) -> Result<(), WindowError> {
        let line = lock(&self.state).line()?;
        let outcome = self.request(&line, (UNMAP, part), None);
        let mut state = lock(&self.state);
        state.check(outcome)?;
        state.mapped.remove(&part.window_offset);
        Ok(())
    }

    fn request(
        &self,
        line: &UnixStream,
        (code, part): (u32, Part),
        file: Option<BorrowedFd<'_>>,
    ) -> Result<u64, ConnectionBroken> {
        let may_be_stale = lock(&self.state).may_be_stale;
        let with_timeouts = WaitLimit { within: self.reply_within, is_over: &|| lock(&self.state).ended };
        channel::request_reply(line, (code, &message::body(part)), file, &with_timeouts, may_be_stale)
    }

    /// Marks the window as taken over from the previous server.
    pub(crate) fn take_over(&self) {
        let mut state = lock(&self.state);
        (state.taken_over, state.may_be_stale) = (true, true);
    }

    /// Whether the window was taken over from a previous server, whose mappings may exist.
    pub fn is_taken_over(&self) -> bool {
        lock(&self.state).taken_over
    }

    /// Records a mapping of the previous server at this offset of the window.
    ///
    /// # Errors
    /// Those of `fstat(2)`.
    pub fn adopt(&self, window_offset: u64, file: BorrowedFd<'_>) -> std::io::Result<()> {
        let known = KnownFile::new(file_id(file)?);
        lock(&self.state).mapped.insert(window_offset, known);
        Ok(())
    }

    /// Drains replies that the previous server did not read; must be called once after a takeover. If that server may
    /// have ended during a request, its mapping at `window_offset` was removed before. Repeats UNMAP more often than
    /// replies can be outstanding, then maps and unmaps one page, so that the next reply read belongs to that
    /// request.
    ///
    /// # Errors
    /// [`WindowError`].
    pub fn catch_up(&self, window_offset: Option<u64>) -> Result<(), WindowError> {
        if let Some(window_offset) = window_offset {
            // QEMU maps only writable files.
            let memory = empty_page().map_err(|error| WindowError::File(error.into()))?;
            let part = Part { window_offset, file_offset: 0, bytes: PAGE_BYTES, writable: false };
            // More than there can be stale replies to UNMAP, so that only replies to these requests stay unread. A
            // server that was killed here may have left a page mapped.
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

    /// Sets the back-end channel.
    pub(crate) fn attach(&self, socket: OwnedFd) {
        let stream = UnixStream::from(socket);
        // The front end may have sent any descriptor.
        if let Err(error) = stream.local_addr().and_then(|_| stream.set_nonblocking(true)) {
            tracing::error!("cannot use the front end's back-end channel: {error}");
            return;
        }
        let mut state = lock(&self.state);
        if !state.ended {
            state.line = Some(Arc::new(stream));
        }
    }

    /// Begins a change of the front end's memory; it waits until [`Self::memory_changed`].
    pub(crate) fn memory_change_begins(&self) {
        lock(&self.state).waits = true;
    }

    /// Ends a change of the front end's memory; `added` is the new region.
    pub(crate) fn memory_changed(&self, regions: usize, added: Option<AddedRegion>) {
        let mut state = lock(&self.state);
        state.regions = regions;
        state.waits = false;
        state.adds_regions |= added.is_some();
        state.heard = Some(Instant::now());
        if added.is_some() && state.awaited == added {
            state.awaited = None;
            state.sends_regions = Some(true);
        }
        // It was delayed, and taken for a front end that sends no regions.
        let is_late = |region: AddedRegion| state.mapped.values().any(|known| known.0 == region.file);
        if state.sends_regions == Some(false) && added.is_some_and(is_late) {
            tracing::debug!("the front end sends memory regions for mappings, but late");
            state.sends_regions = Some(true);
        }
        self.changed.notify_all();
    }

    /// Ends all waits: the connection has ended. The socket is not shut down: the next server may have it
    /// (`--state`), and User-mode Linux drops a device whose socket is shut down.
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

    /// Interprets the outcome of a request; some errors close the channel.
    fn check(&mut self, outcome: Result<u64, ConnectionBroken>) -> Result<(), WindowError> {
        match outcome {
            Ok(0) => Ok(()),
            Ok(_) => Err(WindowError::Refused),
            Err(error) => {
                if !self.ended && self.line.is_some() {
                    tracing::error!("the window can no longer be changed: {error}");
                }
                self.line = None;
                Err(WindowError::Lost)
            }
        }
    }
}

#[cfg(test)]
mod tests;
