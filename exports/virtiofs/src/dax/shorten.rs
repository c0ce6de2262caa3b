//! Files that others shorten: the part past the new end leaves the window before the file shrinks.
//!
//! Access to a page past a file's end raises SIGBUS in the virtual machine monitor. A guest does not notice that
//! another client shortens a file, and believes that the range is mapped. So the range is replaced by a copy of the
//! rest, as at the end of any file ([`super::eof_copy`]): zeros past the end, and room to grow. An unmapped range would
//! be worse: KVM cannot emulate all instructions on missing memory.
//!
//! For a moment neither is mapped, because QEMU does not overlap mappings. This only affects the 2 MiB chunk with the
//! new end.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use ferry_engine::{CompletionSignal, FileId, Window};
use ferry_vfs::sync::lock;
use rustix::fs::fstat;

use super::PAGE_BYTES;
use super::mapper::{Mapper, Task};
use super::mapping_records::Progress;
use super::table::ActiveMapping;

/// The channel to the mapper thread, while it exists.
#[derive(Clone)]
pub(super) struct MapperHandle {
    sender: Arc<Mutex<Option<Sender<Task>>>>,
    name: String,
}

impl MapperHandle {
    pub(super) fn new(sender: Sender<Task>, name: String) -> Self {
        Self { sender: Arc::new(Mutex::new(Some(sender))), name }
    }

    /// Sends the thread a task; returns the task if there is no thread.
    pub(super) fn send(&self, task: Task) -> Option<Task> {
        match &*lock(&self.sender) {
            Some(sender) => sender.send(task).err().map(|unsent| unsent.0),
            None => Some(task),
        }
    }

    /// Nothing comes any more.
    pub(super) fn hang_up(&self) {
        lock(&self.sender).take();
    }
}

impl Window for MapperHandle {
    fn shorten(&self, file: FileId, end: u64, done: CompletionSignal) {
        // The thread lives as long as the front end, whose end also ends all mappings.
        drop(self.send(Task::Shorten(file, end, done)));
    }

    fn late(&self) {
        tracing::warn!(
            "{}: the front end did not unmap the range past the new end of a file in time; it is truncated anyway, and an access there ends the virtual machine (SIGBUS)",
            self.name
        );
    }
}

impl Mapper {
    /// Unmaps a file past `end`.
    pub(super) fn shorten(&mut self, file: FileId, end: u64) {
        if self.member.take_missed() {
            self.truncate_mappings(None);
        }
        self.truncate_mappings(Some((file, end)));
    }

    /// As [`Self::shorten`] for a file that is about to end there, or for all files that have become shorter.
    pub(super) fn truncate_mappings(&mut self, about_to_end: Option<(FileId, u64)>) {
        for placed in self.table.all() {
            let Some(claim) = self.claims.get(&placed.part.window_offset) else { continue };
            let end = match about_to_end {
                Some((file, end)) if claim.file() == file => end,
                Some(_) => continue,
                None => u64::MAX,
            };
            let Some(open) = self.files.get(&placed.ino) else { continue };
            let size = fstat(&*open.file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
            let end = end.min(size).min(self.windows.limit(claim.file()));
            if claim.end() > end.next_multiple_of(PAGE_BYTES) {
                self.remap_truncated(&placed);
            }
        }
    }

    /// Remaps a mapping up to the file's end, and a copy of the rest.
    pub(super) fn remap_truncated(&mut self, placed: &ActiveMapping) {
        let at = placed.part.window_offset;
        self.records.progress(placed, Progress::Moving);
        if let Err(error) = self.undo_placement(placed) {
            self.failed("taken away", placed.part, &error);
            return;
        }
        if let Err(error) = self.eof_copies.remove(placed.ino, at) {
            self.eof_copy_lost(placed.ino, error);
        }
        let by = self.claims.remove(&at).map(|claim| claim.by()).unwrap_or_default();
        let Some((file, for_writing)) = self.opened(placed.ino) else { return };
        let placing = self.claim(by, &file, placed.part).and_then(|mut claim| {
            if placed.written {
                claim.stores();
            }
            self.place_file(placed.ino, placed.part, (&file, for_writing), claim)
        });
        match placing {
            Ok((mapped, note)) => self.put(ActiveMapping { mapped, note, ..placed.clone() }),
            // The guest's next request finds no mapping and creates one.
            Err(_) => {
                self.table.remove(placed);
                self.close_unused(placed.ino);
            }
        }
        self.records.gone(placed.note);
    }
}
