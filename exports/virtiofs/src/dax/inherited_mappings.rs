//! Takes over the mappings of the previous server.
//!
//! The guest does not ask for its mappings again. A front end whose connection was kept has them still; one that has
//! connected again is asked for all of them once more. What was about to come or to go when that server ended is taken
//! away: requests that were under way are made again.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;
use std::sync::Arc;

use ferry_state::MappedFile;
use ferry_vfs::{Backing, Caller, FileId, FileSystem, Ino, Member, SessionId, Windows};
use ferry_vhost::Window;
use rustix::fs::fstat;

use super::eof_copy::{EofCopies, EofCopy};
use super::mappable;
use super::mapper::{Mapper, Open};
use super::mapping_records::{MappingRecords, Progress, RecordedMapping};
use super::table::ActiveMapping;

/// What the server before had.
#[derive(Default)]
pub(super) struct InheritedMappings {
    pub(super) placed: Vec<ActiveMapping>,
    pub(super) files: HashMap<Ino, Open>,
    pub(super) claims: HashMap<u64, ferry_vfs::Claim>,
    unfinished: IncompleteMappings,
}

/// Mappings that are not what they should be.
#[derive(Default)]
pub(super) struct IncompleteMappings {
    /// What is to be made once more.
    moving: Vec<ActiveMapping>,
    /// What is to go.
    unsure: Vec<ActiveMapping>,
}

/// What mappings are adopted into.
pub(super) struct RestoreContext<'a> {
    pub(super) source: &'a Arc<dyn FileSystem>,
    pub(super) eof_copies: &'a EofCopies,
    pub(super) notes: &'a MappingRecords,
    pub(super) windows: &'a Windows,
    pub(super) member: &'a Arc<Member>,
    pub(super) by: SessionId,
    pub(super) name: &'a str,
}

impl RestoreContext<'_> {
    /// Takes over what was written down. From here on nobody in this process makes these files shorter without asking.
    pub(super) fn adopt(&self, left: Vec<MappedFile>) -> InheritedMappings {
        let mut inherited = InheritedMappings::default();
        let mut mappings = Vec::new();
        for one in left {
            let note = one.slot;
            match RecordedMapping::of(one) {
                Some(RecordedMapping::File { ino, file, for_writing, note }) => {
                    let open = Open { file: Arc::new(Backing::new(file)), for_writing, note: Some(note) };
                    // One that was opened better is there beside the one before, if the server ended just then.
                    let kept = match inherited.files.remove(&ino) {
                        Some(other) => {
                            let (better, worse) = if other.for_writing { (other, open) } else { (open, other) };
                            self.notes.gone(worse.note);
                            better
                        }
                        None => open,
                    };
                    inherited.files.insert(ino, kept);
                }
                Some(RecordedMapping::Mapping { placed, progress, copy }) => mappings.push((placed, progress, copy)),
                None => tracing::debug!("{}: what was noted of the window at {note:?} makes no sense", self.name),
            }
        }
        let there: HashSet<u64> = mappings
            .iter()
            .filter(|(_, progress, _)| *progress == Progress::There)
            .map(|(placed, ..)| placed.part.window_offset)
            .collect();
        for (placed, progress, copy) in mappings {
            if progress == Progress::Moving && there.contains(&placed.part.window_offset) {
                // Its successor is there already.
                self.notes.gone(placed.note);
                continue;
            }
            let eof_copy = copy.and_then(|copy| {
                let file = self.file(&mut inherited.files, &placed)?;
                let last = placed.mapped.last()?;
                let start = placed.part.file_offset + (placed.part.bytes - last.bytes);
                EofCopy::adopt(file, placed.part.writable, (start, last.bytes), copy).ok()
            });
            if progress == Progress::Unsure {
                // The guest does not use it, or not any more; what it has stored is to be in the file.
                if let Some(Err(error)) = eof_copy.map(EofCopy::end) {
                    tracing::warn!("{}: the end of inode {} cannot be written: {error}", self.name, placed.ino.0);
                }
                inherited.unfinished.unsure.push(placed);
                continue;
            }
            let copied = eof_copy.as_ref().and(placed.mapped.last()).map_or(0, |last| last.bytes);
            if let Some(eof_copy) = eof_copy {
                self.eof_copies.insert(placed.ino, placed.part.window_offset, eof_copy);
            }
            self.claim(&mut inherited, &placed, placed.part.bytes - copied);
            if progress == Progress::Moving {
                inherited.unfinished.moving.push(placed.clone());
            }
            inherited.placed.push(placed);
        }
        inherited
    }

    /// The file of a mapping: as it was open, or else opened again.
    fn file(&self, files: &mut HashMap<Ino, Open>, placed: &ActiveMapping) -> Option<Arc<Backing>> {
        if let Some(open) = files.get(&placed.ino) {
            return Some(Arc::clone(&open.file));
        }
        let caller = Caller { session: self.by, ..Caller::default() };
        let for_writing = placed.part.writable;
        let file = mappable(&**self.source).and_then(|source| source.map(&caller, placed.ino, for_writing));
        let file = file.inspect_err(|error| {
            tracing::error!(
                "{}: what the guest stores at the end of inode {} is lost: {error}",
                self.name,
                placed.ino.0
            );
        });
        let file = file.ok()?;
        let note = self.notes.open(placed.ino, file.as_fd(), for_writing);
        files.insert(placed.ino, Open { file: Arc::clone(&file), for_writing, note });
        Some(file)
    }

    /// Tells whoever changes the file what of it is in the window.
    fn claim(&self, inherited: &mut InheritedMappings, placed: &ActiveMapping, bytes: u64) {
        let Some(stat) =
            inherited.files.get(&placed.ino).filter(|_| bytes > 0).and_then(|open| fstat(&*open.file).ok())
        else {
            return;
        };
        let (id, start) = (FileId { dev: stat.st_dev, ino: stat.st_ino }, placed.part.file_offset);
        let mut claim = self.windows.claim(self.member, self.by, id, start..start + bytes);
        if placed.written {
            claim.stores();
        }
        inherited.claims.insert(placed.part.window_offset, claim);
    }
}

impl InheritedMappings {
    /// Which files there are.
    pub(super) fn inodes(&self) -> impl Iterator<Item = Ino> {
        self.placed.iter().map(|placed| placed.ino)
    }

    /// Takes out what is not what it should be.
    pub(super) fn take_unfinished(&mut self) -> IncompleteMappings {
        std::mem::take(&mut self.unfinished)
    }

    /// Tells the window which files will come back as regions of memory, and sees what there is to be done about it.
    pub(super) fn open(&mut self, window: &Window, eof_copies: &EofCopies) {
        for placed in &self.placed {
            let copy = eof_copies.copy(placed.ino, placed.part.window_offset);
            let file = self.files.get(&placed.ino).map(|open| Arc::clone(&open.file));
            for part in &*placed.mapped {
                let is_file = self.claims.contains_key(&placed.part.window_offset)
                    && part.window_offset == placed.part.window_offset;
                let fd = if is_file {
                    file.as_ref().map(|file| file.as_fd())
                } else {
                    copy.as_ref().map(|copy| copy.as_fd())
                };
                if let Some(Err(error)) = fd.map(|fd| window.adopt(part.window_offset, fd)) {
                    tracing::debug!("a file in the window is not known: {error}");
                }
            }
        }
        if !window.is_taken_over() {
            self.unfinished.moving.clone_from(&self.placed);
        }
    }
}

impl Mapper {
    /// All mappings end before any of them was gone on with: what is not among them is to go, too.
    pub(super) fn give_up(&self, IncompleteMappings { unsure, .. }: &IncompleteMappings) {
        for placed in unsure {
            if self.window.is_taken_over() {
                // If this fails the front end is gone.
                let _ = self.undo_placement(placed);
            }
            self.notes.gone(placed.note);
        }
    }

    /// Makes of what was adopted what it should be, before anything else is done.
    pub(super) fn complete_interrupted(&mut self, IncompleteMappings { moving, unsure }: &IncompleteMappings) {
        if self.window.is_taken_over() {
            let unfinished = || unsure.iter().chain(moving);
            let taken_away = unfinished().try_for_each(|placed| self.undo_placement(placed));
            let free = unfinished().map(|placed| placed.part.window_offset).next();
            if let Err(error) = taken_away.and_then(|()| self.window.catch_up(free)) {
                tracing::error!("{}: the window of the server before cannot be gone on with: {error}", self.name);
                return;
            }
        }
        for placed in unsure {
            self.notes.gone(placed.note);
            self.publish(SessionId::default(), placed);
        }
        moving.iter().for_each(|placed| self.remap_truncated(placed));
        // The host may have made files shorter while there was no server.
        self.truncate_mappings(None);
    }
}
