//! Takes over the mappings of the previous server.
//!
//! The guest does not request its mappings again. A front end whose connection survived still has them; one that has
//! reconnected is asked to map all of them again. Mappings that were in progress when the server ended are removed,
//! because the guest's requests are served again.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;
use std::sync::Arc;

use ferry_engine::{FileId, Member, Windows};
use ferry_state::MappedFile;
use ferry_vfs::{Backing, Caller, FileSystem, Ino, SessionId};
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
    pub(super) claims: HashMap<u64, ferry_engine::Claim>,
    unfinished: IncompleteMappings,
}

/// Incomplete mappings.
#[derive(Default)]
pub(super) struct IncompleteMappings {
    /// Those to map again.
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
    /// Adopts the recorded mappings. From here on this process shortens no such file without asking.
    pub(super) fn adopt(&self, left: Vec<MappedFile>) -> InheritedMappings {
        let mut inherited = InheritedMappings::default();
        let mut mappings = Vec::new();
        for one in left {
            let note = one.slot;
            match RecordedMapping::of(one) {
                Some(RecordedMapping::File { ino, file, for_writing, note }) => {
                    let open = Open { file: Arc::new(Backing::new(file)), for_writing, note: Some(note) };
                    // A writable descriptor may exist beside the read-only one, if the server ended between the two.
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
                None => tracing::debug!("{}: the record of the window at {note:?} is invalid", self.name),
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
                // The guest no longer uses it; its stores must reach the file.
                if let Some(Err(error)) = eof_copy.map(EofCopy::end) {
                    tracing::warn!("{}: cannot write the end of inode {}: {error}", self.name, placed.ino.0);
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

    /// Returns the file of a mapping: the inherited descriptor, or a reopened one.
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

    /// Claims the mapped part of a file against changes by others.
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

    /// Takes the incomplete mappings.
    pub(super) fn take_unfinished(&mut self) -> IncompleteMappings {
        std::mem::take(&mut self.unfinished)
    }

    /// Tells the window which files will return as memory regions, and prepares the rest.
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
                    tracing::debug!("cannot find a file of the window: {error}");
                }
            }
        }
        if !window.is_taken_over() {
            self.unfinished.moving.clone_from(&self.placed);
        }
    }
}

impl Mapper {
    /// Removes all mappings before any was completed.
    pub(super) fn give_up(&self, IncompleteMappings { unsure, .. }: &IncompleteMappings) {
        for placed in unsure {
            if self.window.is_taken_over() {
                // If this fails the front end is gone.
                let _ = self.undo_placement(placed);
            }
            self.records.gone(placed.note);
        }
    }

    /// Completes the interrupted mappings, before any request is served.
    pub(super) fn complete_interrupted(&mut self, IncompleteMappings { moving, unsure }: &IncompleteMappings) {
        if self.window.is_taken_over() {
            let unfinished = || unsure.iter().chain(moving);
            let taken_away = unfinished().try_for_each(|placed| self.undo_placement(placed));
            let free = unfinished().map(|placed| placed.part.window_offset).next();
            if let Err(error) = taken_away.and_then(|()| self.window.catch_up(free)) {
                tracing::error!("{}: cannot continue with the window of the previous server: {error}", self.name);
                return;
            }
        }
        for placed in unsure {
            self.records.gone(placed.note);
            self.publish(SessionId::default(), placed);
        }
        moving.iter().for_each(|placed| self.remap_truncated(placed));
        // The host may have shortened files while there was no server.
        self.truncate_mappings(None);
    }
}
