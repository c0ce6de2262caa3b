//! What the server before had in a window, for this one to go on with.
//!
//! The guest does not ask for its mappings again. A front end whose connection was kept has them still; one that has connected anew is asked
//! for all of them once more. What was about to come or to go when that server ended is taken away: requests that were under way are
//! made again.

use std::collections::{HashMap, HashSet};
use std::os::fd::AsFd;
use std::sync::Arc;

use ferry_state::MappedFile;
use ferry_vfs::{Backing, Caller, FileId, FileSystem, Ino, Member, SessionId, Windows};
use ferry_vhost::Window;
use rustix::fs::fstat;

use super::mapper::{Mapper, Open};
use super::noted::{Left, Notes, Progress};
use super::table::Placed;
use super::tail::{Tail, Tails};

/// What the server before had.
#[derive(Default)]
pub(super) struct Adopted {
    pub(super) placed: Vec<Placed>,
    pub(super) files: HashMap<Ino, Open>,
    pub(super) claims: HashMap<u64, ferry_vfs::Claim>,
    unfinished: Unfinished,
}

/// Mappings that are not what they should be.
#[derive(Default)]
pub(super) struct Unfinished {
    /// What is to be made once more.
    moving: Vec<Placed>,
    /// What is to go.
    unsure: Vec<Placed>,
}

/// What mappings are adopted into.
pub(super) struct Adopting<'a> {
    pub(super) source: &'a Arc<dyn FileSystem>,
    pub(super) tails: &'a Tails,
    pub(super) notes: &'a Notes,
    pub(super) windows: &'a Windows,
    pub(super) member: &'a Arc<Member>,
    pub(super) by: SessionId,
    pub(super) name: &'a str,
}

impl Adopting<'_> {
    /// Takes over what was written down. From here on nobody in this process makes these files shorter without asking.
    pub(super) fn adopt(&self, left: Vec<MappedFile>) -> Adopted {
        let mut adopted = Adopted::default();
        let mut mappings = Vec::new();
        for one in left {
            let note = one.slot;
            match Left::of(one) {
                Some(Left::File { ino, file, for_writing, note }) => {
                    let open = Open { file: Arc::new(Backing::new(file)), for_writing, note: Some(note) };
                    // One that was opened better is there beside the one before, if the server ended just then.
                    let kept = match adopted.files.remove(&ino) {
                        Some(other) => {
                            let (better, worse) = if other.for_writing { (other, open) } else { (open, other) };
                            self.notes.gone(worse.note);
                            better
                        }
                        None => open,
                    };
                    adopted.files.insert(ino, kept);
                }
                Some(Left::Mapping { placed, progress, copy }) => mappings.push((placed, progress, copy)),
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
            let tail = copy.and_then(|copy| {
                let file = self.file(&mut adopted.files, &placed)?;
                let last = placed.mapped.last()?;
                let start = placed.part.file_offset + (placed.part.bytes - last.bytes);
                Tail::adopt(file, placed.part.writable, (start, last.bytes), copy).ok()
            });
            if progress == Progress::Unsure {
                // The guest does not use it, or not any more; what it has stored is to be in the file.
                if let Some(Err(error)) = tail.map(Tail::end) {
                    tracing::warn!("{}: the end of inode {} cannot be written: {error}", self.name, placed.ino.0);
                }
                adopted.unfinished.unsure.push(placed);
                continue;
            }
            let copied = tail.as_ref().and(placed.mapped.last()).map_or(0, |last| last.bytes);
            if let Some(tail) = tail {
                self.tails.insert(placed.ino, placed.part.window_offset, tail);
            }
            self.claim(&mut adopted, &placed, placed.part.bytes - copied);
            if progress == Progress::Moving {
                adopted.unfinished.moving.push(placed.clone());
            }
            adopted.placed.push(placed);
        }
        adopted
    }

    /// The file of a mapping: as it was open, or else opened anew.
    fn file(&self, files: &mut HashMap<Ino, Open>, placed: &Placed) -> Option<Arc<Backing>> {
        if let Some(open) = files.get(&placed.ino) {
            return Some(Arc::clone(&open.file));
        }
        let caller = Caller { session: self.by, ..Caller::default() };
        let for_writing = placed.part.writable;
        let file = self.source.map(&caller, placed.ino, for_writing).inspect_err(|error| {
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
    fn claim(&self, adopted: &mut Adopted, placed: &Placed, bytes: u64) {
        let Some(stat) = adopted.files.get(&placed.ino).filter(|_| bytes > 0).and_then(|open| fstat(&*open.file).ok())
        else {
            return;
        };
        let (id, start) = (FileId { dev: stat.st_dev, ino: stat.st_ino }, placed.part.file_offset);
        let mut claim = self.windows.claim(self.member, self.by, id, start..start + bytes);
        if placed.written {
            claim.stores();
        }
        adopted.claims.insert(placed.part.window_offset, claim);
    }
}

impl Adopted {
    /// Which files there are.
    pub(super) fn inodes(&self) -> impl Iterator<Item = Ino> {
        self.placed.iter().map(|placed| placed.ino)
    }

    /// Takes out what is not what it should be.
    pub(super) fn take_unfinished(&mut self) -> Unfinished {
        std::mem::take(&mut self.unfinished)
    }

    /// Tells the window which files will come back as regions of memory, and sees what there is to be done about it.
    pub(super) fn open(&mut self, window: &Window, tails: &Tails) {
        for placed in &self.placed {
            let copy = tails.copy(placed.ino, placed.part.window_offset);
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
    pub(super) fn give_up(&self, Unfinished { unsure, .. }: &Unfinished) {
        for placed in unsure {
            if self.window.is_taken_over() {
                // If this fails the front end is gone.
                let _ = self.displace(placed);
            }
            self.notes.gone(placed.note);
        }
    }

    /// Makes of what was adopted what it should be, before anything else is done.
    pub(super) fn put_right(&mut self, Unfinished { moving, unsure }: &Unfinished) {
        if self.window.is_taken_over() {
            let unfinished = || unsure.iter().chain(moving);
            let taken_away = unfinished().try_for_each(|placed| self.displace(placed));
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
        moving.iter().for_each(|placed| self.cut(placed));
        // The host may have made files shorter while there was no server.
        self.cut_short(None);
    }
}
