//! The DAX window: the guest reads and writes files in its own memory, without requests.
//!
//! The guest names a part of a file and an offset in the window, and the device asks the front end to map it there. A
//! separate thread does this (see [`ferry_vhost::Window`]), so waiting requests block no queue. [`table`] knows the
//! mappings and plans changes; [`mapper`] is the thread.
//!
//! QEMU cannot map the last page of a file unless it is whole: that part is a synchronized copy ([`eof_copy`]). Files
//! that never change may consist of pieces ([`pieces`]).
//!
//! A mapping stays unchanged while the guest may use it: adjacent mappings are not merged, and none is split. QEMU only
//! removes whole mappings and does not overlap them, so the guest would meanwhile read garbage and lose writes. The
//! window's size bounds the number of mappings instead ([`WINDOW_BYTES_MAX`]). With QEMU there are one or two per 2 MiB
//! that Linux requests at a time. A front end that maps pieces in place has one per piece, at worst one per page of the
//! window; beyond its limit it refuses, and gets copies.

mod eof_copy;
mod inherited_mappings;
mod mapper;
mod mapping_records;
mod pieces;
mod shorten;
mod table;

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use ferry_engine::{Member, Windows};
use ferry_serve::{Mapping, MappingReply, Mappings};
use ferry_state::MappedFile;
use ferry_vfs::sync::lock;
use ferry_vfs::{Errno, FileSystem, Ino, Mappable, Result, SessionId};
use ferry_vhost::Window;

use crate::Options;
use eof_copy::EofCopies;
use inherited_mappings::{InheritedMappings, RestoreContext};
use mapper::{Mapper, Task};
use mapping_records::MappingRecords;
use shorten::MapperHandle;

/// The unit of mappings in INIT, and the minimum that QEMU maps, in bytes.
const PAGE_BYTES: u64 = 4096;

/// The size of Linux's requests in bytes.
const CHUNK_BYTES: u64 = 2 << 20;

/// The maximum length of a window in bytes. QEMU supports 512 memory regions per virtual machine, and a full window has
/// one per 2 MiB, or two where a file ends. That leaves some regions for the memory.
pub const WINDOW_BYTES_MAX: u64 = 240 * CHUNK_BYTES;

/// The default length of the window in bytes. It costs the guest a 64th of that in memory.
pub const WINDOW_BYTES_DEFAULT: u64 = 256 << 20;

/// The default size in bytes above which files are mapped: a mapping costs a round trip to the front end.
pub const FILE_BYTES_DEFAULT: u64 = 1 << 20;

/// The part of a source that maps files.
fn mappable(source: &dyn FileSystem) -> Result<&dyn Mappable> {
    source.mappable().ok_or(Errno::NOSYS)
}

/// Returns whether a window can have this length.
pub(crate) fn is_window(bytes: u64) -> bool {
    (CHUNK_BYTES..=WINDOW_BYTES_MAX).contains(&bytes) && bytes.is_multiple_of(CHUNK_BYTES)
}

/// The files for which a guest uses the window if it leaves the choice to the device (mounted with `dax=inode`, or
/// without a `dax` option). With `dax=always` it uses it for all files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DaxFiles {
    /// All.
    Always,
    /// None.
    Never,
    /// Those larger than this many bytes when the guest looks them up.
    Above(u64),
}

impl Default for DaxFiles {
    fn default() -> Self {
        Self::Above(FILE_BYTES_DEFAULT)
    }
}

impl DaxFiles {
    fn take(self, file_bytes: u64) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Above(bytes) => file_bytes > bytes,
        }
    }
}

/// How much of the current front end's window is used.
#[derive(Debug, Default)]
pub struct WindowUsage {
    bytes: AtomicU64,
    mapped_bytes: AtomicU64,
}

impl WindowUsage {
    /// Returns the length of the window in bytes; 0 if the front end has requested none, or there is none.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns how many bytes of it are mapped.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes.load(Ordering::Relaxed)
    }

    /// The front end has requested a window of this length, or is gone (0).
    pub(crate) fn open(&self, bytes: u64) {
        self.mapped_bytes.store(0, Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}

/// One guest's window.
pub(crate) struct Dax {
    source: Arc<dyn FileSystem>,
    name: String,
    files: DaxFiles,
    /// The guest may change nothing, so nor may the front end.
    read_only: bool,
    eof_copies: Arc<EofCopies>,
    usage: Arc<WindowUsage>,
    /// Files with mapping requests that were not forgotten; locked while the thread is sent either.
    asked: Mutex<HashSet<Ino>>,
    begun: Option<fn()>,
    thread: Mutex<Option<(MapperHandle, JoinHandle<()>)>>,
    notes: MappingRecords,
    /// The previous server's mappings, until the front end has a window.
    adopted: Mutex<Option<(MapperStart, InheritedMappings)>>,
}

/// The state before the thread starts.
struct MapperStart {
    line: MapperHandle,
    tasks: Receiver<Task>,
    member: Arc<Member>,
}

impl Dax {
    pub(crate) fn new(source: Arc<dyn FileSystem>, options: &Options, usage: Arc<WindowUsage>) -> Self {
        let Options { name, dax_files: files, read_only, begun, .. } = options;
        let (name, files, read_only, begun) = (name.clone(), *files, *read_only, begun.mapper);
        let notes = MappingRecords(options.kept.clone());
        let (eof_copies, asked, thread, adopted) = Default::default();
        Self { source, name, files, read_only, eof_copies, usage, asked, begun, thread, notes, adopted }
    }

    fn begin(&self) -> MapperStart {
        let (sender, tasks) = channel();
        let line = MapperHandle::new(sender, self.name.clone());
        let member = Windows::of_process().join(line.clone());
        MapperStart { line, tasks, member }
    }

    /// Called when the front end has a window.
    pub(crate) fn open(&self, window: &Arc<Window>) {
        let mut thread = lock(&self.thread);
        if thread.is_some() {
            return;
        }
        let adopted = lock(&self.adopted).take();
        let (beginning, mut adopted) = adopted.unwrap_or_else(|| (self.begin(), InheritedMappings::default()));
        adopted.open(window, &self.eof_copies);
        let MapperStart { line, tasks, member } = beginning;
        let about = (self.name.clone(), self.read_only, self.notes.clone());
        let members = (Windows::of_process().clone(), member);
        let mapper =
            Mapper::new(Arc::clone(window), Arc::clone(&self.source), Arc::clone(&self.eof_copies), members, about);
        let (begun, usage) = (self.begun, Arc::clone(&self.usage));
        let run = move || {
            if let Some(begun) = begun {
                begun();
            }
            mapper.run(adopted, &tasks, &|bytes| usage.mapped_bytes.store(bytes, Ordering::Relaxed));
        };
        match std::thread::Builder::new().name("virtiofs-dax".into()).spawn(run) {
            Ok(joined) => *thread = Some((line, joined)),
            Err(error) => tracing::error!("{}: no window, because a thread cannot be started: {error}", self.name),
        }
    }

    /// Called when a queue is about to start.
    pub(crate) fn resume(&self) {
        if let Some((line, _)) = &*lock(&self.thread) {
            line.send(Task::Resume);
        }
    }

    fn post(&self, task: Task) {
        let unsent = match &*lock(&self.thread) {
            Some((line, _)) => line.send(task),
            None => Some(task),
        };
        if let Some(task) = unsent {
            task.refuse(Errno::NODEV);
        }
    }
}

impl Mappings for Dax {
    fn is_open(&self) -> bool {
        lock(&self.thread).is_some()
    }

    fn takes(&self, file_bytes: u64) -> bool {
        self.files.take(file_bytes)
    }

    fn map(&self, mapping: Mapping, answer: MappingReply) {
        let mut asked = lock(&self.asked);
        asked.insert(mapping.ino);
        self.post(Task::Map(mapping, answer));
    }

    fn unmap(&self, by: SessionId, ranges: Vec<(u64, u64)>, answer: MappingReply) {
        self.post(Task::Unmap(by, ranges, answer));
    }

    fn forget(&self, by: SessionId, ino: Ino) {
        // Most forgotten inodes are not in the window, and a front end may take long for those that are.
        let mut asked = lock(&self.asked);
        if asked.remove(&ino) {
            self.post(Task::Forget(by, ino));
        }
    }

    fn sync(&self, ino: Ino, part: Range<u64>) -> ferry_vfs::Result<()> {
        self.eof_copies.sync(ino, &part)
    }

    fn sync_if_changed(&self, ino: Ino) -> ferry_vfs::Result<()> {
        self.eof_copies.sync_if_changed(ino)
    }

    fn writeback(&self, ino: Ino, part: Range<u64>) -> ferry_vfs::Result<()> {
        self.eof_copies.writeback(ino, &part)
    }

    fn writeback_all(&self) -> ferry_vfs::Result<()> {
        self.eof_copies.writeback_all().first().map_or(Ok(()), |(_, error)| Err(*error))
    }

    fn adopt(&self, by: SessionId, mapped: Vec<MappedFile>) {
        let beginning = self.begin();
        let adopting = RestoreContext {
            source: &self.source,
            eof_copies: &self.eof_copies,
            notes: &self.notes,
            windows: Windows::of_process(),
            member: &beginning.member,
            by,
            name: &self.name,
        };
        let adopted = adopting.adopt(mapped);
        lock(&self.asked).extend(adopted.inodes());
        *lock(&self.adopted) = Some((beginning, adopted));
    }

    fn clear(&self, answer: MappingReply) {
        let mut asked = lock(&self.asked);
        asked.clear();
        match self.is_open() {
            true => self.post(Task::Clear(answer)),
            false => {
                // The front end after a restart may have no window.
                let adopted = lock(&self.adopted).take();
                for placed in adopted.into_iter().flat_map(|(_, adopted)| adopted.placed) {
                    let _ = self.eof_copies.remove(placed.ino, placed.part.window_offset);
                }
                answer(Ok(()));
            }
        }
    }
}

impl Drop for Dax {
    fn drop(&mut self) {
        // The connection has ended, so the thread does not block.
        if let Some((line, thread)) = lock(&self.thread).take() {
            line.hang_up();
            if thread.join().is_err() {
                tracing::error!("{}: the thread of the window panicked", self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl FileSystem for Nothing {}

    #[test]
    fn unmapped_inodes_are_forgotten_without_the_thread() {
        let dax = Dax::new(Arc::new(Nothing), &Options::default(), Arc::default());
        let (sender, tasks) = channel();
        *lock(&dax.thread) = Some((MapperHandle::new(sender, String::new()), std::thread::spawn(|| ())));
        let by = SessionId::unique();
        let posted = || tasks.try_iter().map(|task| matches!(task, Task::Forget(..))).collect::<Vec<_>>();
        dax.forget(by, Ino(7));
        assert!(posted().is_empty());
        let (ino, write, may_write) = (Ino(7), false, false);
        let mapping = Mapping { by, ino, offset: 0, len: PAGE_BYTES, window_offset: 0, write, may_write };
        dax.map(mapping, Box::new(|_| ()));
        dax.forget(by, Ino(8));
        assert_eq!(posted(), [false], "the mapping");
        dax.forget(by, Ino(7));
        dax.forget(by, Ino(7));
        assert_eq!(posted(), [true]);
        // The end of the session ends all its mappings.
        dax.map(mapping, Box::new(|_| ()));
        dax.clear(Box::new(|_| ()));
        dax.forget(by, Ino(7));
        assert_eq!(posted(), [false, false]);
    }
}
