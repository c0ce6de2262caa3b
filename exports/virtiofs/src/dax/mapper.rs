//! The thread that maps and unmaps parts of files in a window.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use ferry_engine::{Claim, CompletionSignal, FileId, Member, Windows};
use ferry_serve::{Mapping, MappingReply, RatelimitedLog};
use ferry_vfs::{Backing, Caller, Change, Errno, FileSystem, Ino, Piece, Result, SessionId};
use ferry_vhost::{Part, Window, WindowError};
use rustix::fs::fstat;

use super::eof_copy::{EofCopies, EofCopy, WHOLE};
use super::inherited_mappings::{IncompleteMappings, InheritedMappings};
use super::mapping_records::{MappingRecord, MappingRecords, Progress};
use super::table::{ActiveMapping, MapPlan, Table};
use super::{PAGE_BYTES, mappable, pieces};

/// What is to be done.
pub(super) enum Task {
    Map(Mapping, MappingReply),
    Unmap(SessionId, Vec<(u64, u64)>, MappingReply),
    Forget(SessionId, Ino),
    /// A file is about to be shortened to this length.
    Shorten(FileId, u64, CompletionSignal),
    Clear(MappingReply),
    /// A queue is about to start: complete the mappings of the previous server, if any.
    Resume,
}

impl Task {
    /// Replies to the waiting request with an error.
    pub(super) fn refuse(self, errno: Errno) {
        match self {
            Self::Map(_, answer) | Self::Unmap(_, _, answer) | Self::Clear(answer) => answer(Err(errno)),
            Self::Forget(..) | Self::Shorten(..) | Self::Resume => {}
        }
    }
}

/// A file with mappings in the window.
pub(super) struct Open {
    pub(super) file: Arc<Backing>,
    pub(super) for_writing: bool,
    /// Its record for the next server.
    pub(super) note: Option<MappingRecord>,
}

/// The execute bits of a mode.
const ANY_EXECUTE: u32 = 0o111;

/// Runs code that may panic (a source, a listener): the thread must survive, because others wait for it.
fn catch_panics(act: impl FnOnce() -> Result<()>) -> Result<()> {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or(Err(Errno::IO))
}

pub(super) struct Mapper {
    pub(super) window: Arc<Window>,
    source: Arc<dyn FileSystem>,
    pub(super) name: String,
    pub(super) records: MappingRecords,
    /// Mappings to complete before the first request.
    unfinished: Option<IncompleteMappings>,
    pub(super) table: Table,
    /// Files while a part of them is mapped.
    pub(super) files: HashMap<Ino, Open>,
    pub(super) eof_copies: Arc<EofCopies>,
    pub(super) windows: Windows,
    pub(super) member: Arc<Member>,
    /// The claims on mapped parts of host files, by the chunk's offset in the window.
    pub(super) claims: HashMap<u64, Claim>,
    read_only: bool,
    /// The front end has refused a read-only descriptor and accepted a copy.
    needs_writable: bool,
    ratelimited_log: RatelimitedLog,
}

impl Mapper {
    pub(super) fn new(
        window: Arc<Window>,
        source: Arc<dyn FileSystem>,
        eof_copies: Arc<EofCopies>,
        (windows, member): (Windows, Arc<Member>),
        (name, read_only, records): (String, bool, MappingRecords),
    ) -> Self {
        Self {
            table: Table::new(window.bytes()),
            files: HashMap::new(),
            claims: HashMap::new(),
            records,
            unfinished: None,
            needs_writable: false,
            ratelimited_log: RatelimitedLog::default(),
            window,
            source,
            name,
            eof_copies,
            windows,
            member,
            read_only,
        }
    }

    /// Completes the previous server's mappings, and then runs tasks until no more can come. `count` gets the number of mapped bytes
    /// whenever it may have changed.
    pub(super) fn run(mut self, mut inherited: InheritedMappings, tasks: &Receiver<Task>, count: &dyn Fn(u64)) {
        self.unfinished = Some(inherited.take_unfinished());
        inherited.placed.into_iter().for_each(|placed| self.table.insert(placed));
        (self.files, self.claims) = (inherited.files, inherited.claims);
        count(self.table.bytes());
        while let Ok(task) = tasks.recv() {
            self.carry_out(task);
            count(self.table.bytes());
        }
        // The front end is gone. Direct mappings have stored into the files; only copies must be written back.
        for (ino, error) in self.eof_copies.writeback_all() {
            self.eof_copy_lost(ino, error);
        }
    }

    fn carry_out(&mut self, task: Task) {
        match task {
            Task::Map(mapping, answer) => {
                let outcome = catch_panics(|| self.map(&mapping));
                self.close_unused(mapping.ino);
                answer(outcome);
            }
            Task::Unmap(by, ranges, answer) => answer(catch_panics(|| self.unmap(by, &ranges))),
            Task::Forget(by, ino) => {
                // The error was logged, and no request waits for it.
                let _ = catch_panics(|| self.remove_mappings(by, &self.table.of(ino)));
            }
            Task::Shorten(file, end, done) => {
                let _ = catch_panics(|| {
                    self.shorten(file, end);
                    Ok(())
                });
                drop(done);
            }
            Task::Resume => {
                if let Some(unfinished) = self.unfinished.take() {
                    let _ = catch_panics(|| {
                        self.complete_interrupted(&unfinished);
                        Ok(())
                    });
                    let open: Vec<_> = self.files.keys().copied().collect();
                    open.into_iter().for_each(|ino| self.close_unused(ino));
                }
            }
            Task::Clear(answer) => {
                if let Some(unfinished) = self.unfinished.take() {
                    self.give_up(&unfinished);
                }
                // A mapping that cannot be removed does not exist, or the front end is gone.
                let _ = catch_panics(|| self.remove_mappings(SessionId::default(), &self.table.all()));
                self.table.all().iter().for_each(|placed| _ = self.remove_eof_copy(placed));
                self.table = Table::new(self.window.bytes());
                self.claims.clear();
                self.files.clear();
                answer(Ok(()));
            }
        }
    }

    fn map(&mut self, mapping: &Mapping) -> Result<()> {
        let gone = match self.table.plan(mapping)? {
            MapPlan::There(at) => {
                if mapping.write {
                    self.claims.get_mut(&at).into_iter().for_each(Claim::stores);
                    self.allocate(mapping)?;
                    if let Some(placed) = self.table.written(at) {
                        self.records.progress(placed, Progress::There);
                    }
                }
                return Ok(());
            }
            MapPlan::Make(gone) => gone,
        };
        let Mapping { ino, offset: file_offset, len: bytes, window_offset, .. } = *mapping;
        let part = Part { window_offset, file_offset, bytes, writable: false };
        let caller = Caller { session: mapping.by, ..Caller::default() };
        match mappable(&*self.source)?.map_pieces(&caller, ino, file_offset, bytes) {
            Err(Errno::NOSYS) => self.map_file(mapping, part, &gone),
            _ if mapping.write => Err(Errno::ROFS),
            pieces => {
                let pieces = pieces?;
                self.remove_mappings(mapping.by, &gone)?;
                let mapped = self.place_pieces(window_offset, &pieces)?;
                self.put(ActiveMapping { ino, part, mapped, written: false, note: None });
                Ok(())
            }
        }
    }

    /// Maps a part of a host file.
    fn map_file(&mut self, mapping: &Mapping, part: Part, gone: &[ActiveMapping]) -> Result<()> {
        let (file, for_writing) = self.open(mapping)?;
        let mut claim = self.claim(mapping.by, &file, part)?;
        if mapping.write {
            claim.stores();
            self.allocate(mapping)?;
        }
        self.remove_mappings(mapping.by, gone)?;
        let (ino, written) = (mapping.ino, mapping.write);
        let part = Part { writable: for_writing && mapping.may_write, ..part };
        let (mapped, note) = self.place_file(ino, part, (&file, for_writing), claim)?;
        self.put(ActiveMapping { ino, part, mapped, written, note });
        // Removing other mappings may have closed the file.
        if !self.files.contains_key(&ino) {
            self.keep_open(ino, file, for_writing);
        }
        Ok(())
    }

    /// Records a completed mapping.
    pub(super) fn put(&mut self, placed: ActiveMapping) {
        self.records.progress(&placed, Progress::There);
        self.table.insert(placed);
    }

    /// Keeps a file open for its mappings.
    fn keep_open(&mut self, ino: Ino, file: Arc<Backing>, for_writing: bool) {
        let note = self.records.open(ino, file.as_fd(), for_writing);
        if let Some(before) = self.files.insert(ino, Open { file, for_writing, note }) {
            self.records.gone(before.note);
        }
    }

    /// Claims a part of a file that is about to be mapped, against changes by others.
    pub(super) fn claim(&self, by: SessionId, file: &Backing, part: Part) -> Result<Claim> {
        let stat = fstat(file.as_fd())?;
        let id = FileId { dev: stat.st_dev, ino: stat.st_ino };
        let end = part.file_offset.saturating_add(part.bytes);
        Ok(self.windows.claim(&self.member, by, id, part.file_offset..end))
    }

    /// Asks the front end to map the file, and a copy of the part after its last whole page. A file that is being
    /// shortened ends at its new length. Returns what was mapped, and its record.
    pub(super) fn place_file(
        &mut self,
        ino: Ino,
        part: Part,
        (file, for_writing): (&Arc<Backing>, bool),
        claim: Claim,
    ) -> Result<(Arc<[Part]>, Option<MappingRecord>)> {
        // Only after the claim: from here on, shortening the file asks this thread to unmap it.
        let size = u64::try_from(fstat(file.as_fd())?.st_size).unwrap_or(0).min(claim.limit());
        let whole_pages = size.saturating_sub(part.file_offset).min(part.bytes) / PAGE_BYTES * PAGE_BYTES;
        let file_bytes = if for_writing { whole_pages } else { 0 };
        let from_file = Part { bytes: file_bytes, ..part };
        let (window_offset, bytes) = (part.window_offset + file_bytes, part.bytes - file_bytes);
        let from_copy = Part { window_offset, file_offset: 0, bytes, ..part };
        let eof_copy = match bytes {
            0 => None,
            _ => Some(EofCopy::new(Arc::clone(file), part.writable, (part.file_offset + file_bytes, bytes), size)?),
        };
        let copy = eof_copy.as_ref().map(EofCopy::copy);
        let requests = [(from_file, Some(file.as_fd())), (from_copy, copy.as_ref().map(AsFd::as_fd))];
        let requests: Vec<_> = requests.into_iter().filter_map(|(part, file)| Some((part, file?))).collect();
        let requests = requests.into_iter().filter(|(part, _)| part.bytes > 0);
        let parts: Vec<_> = requests.clone().map(|(part, _)| part).collect();
        let note = self.records.placing(ino, part, &parts, copy.as_ref().map(AsFd::as_fd));
        let mapped = self.place(requests).map_err(|(part, error)| {
            self.records.gone(note);
            self.failed("mapped", part, &error)
        })?;
        if file_bytes > 0 {
            self.claims.insert(part.window_offset, claim.up_to(part.file_offset + file_bytes));
        }
        if let Some(eof_copy) = eof_copy {
            self.eof_copies.insert(ino, part.window_offset, eof_copy);
        }
        Ok((mapped, note))
    }

    /// Asks the front end to map pieces of a file, or copies of them if necessary.
    fn place_pieces(&mut self, window_offset: u64, pieces: &[Piece]) -> Result<Arc<[Part]>> {
        let place = |in_place: bool| {
            let requests = pieces::map_requests(window_offset, pieces, in_place)?;
            Ok::<_, Errno>(self.place(requests.iter().map(|request| (request.part, request.file()))))
        };
        let in_place = self.window.maps_read_only() && !self.needs_writable;
        let mut mapped = place(in_place)?;
        if in_place && matches!(mapped, Err((_, WindowError::Refused))) {
            mapped = place(false)?;
            // A request that is refused in both forms shows nothing about others.
            if mapped.is_ok() {
                self.needs_writable = true;
                self.ratelimited_log.warn(format_args!(
                    "{}: the front end refuses files that are open for reading only; from now on it gets copies, which take memory",
                    self.name
                ));
            }
        }
        mapped.map_err(|(part, error)| self.failed("mapped", part, &error))
    }

    /// Asks the front end to map parts of files: all or none.
    fn place<'a>(
        &self,
        requests: impl Iterator<Item = (Part, BorrowedFd<'a>)>,
    ) -> std::result::Result<Arc<[Part]>, (Part, WindowError)> {
        let mut mapped = Vec::new();
        for (part, file) in requests {
            if let Err(error) = self.window.map(file, part) {
                // If this fails, too, the front end is gone.
                mapped.into_iter().for_each(|part| _ = self.window.unmap(part));
                return Err((part, error));
            }
            mapped.push(part);
        }
        Ok(mapped.into())
    }

    /// Asks the front end to undo [`Self::place`].
    pub(super) fn undo_placement(&self, placed: &ActiveMapping) -> std::result::Result<(), WindowError> {
        for part in &*placed.mapped {
            match self.window.unmap(*part) {
                // A mapping unknown to the front end does not exist.
                Ok(()) | Err(WindowError::Refused) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns a file of the window, and whether it is open for writing.
    pub(super) fn opened(&self, ino: Ino) -> Option<(Arc<Backing>, bool)> {
        self.files.get(&ino).map(|open| (Arc::clone(&open.file), open.for_writing))
    }

    /// Returns the file of a mapping with at least the required access; and whether it is writable.
    fn open(&mut self, mapping: &Mapping) -> Result<(Arc<Backing>, bool)> {
        if let Some(open) = self.files.get(&mapping.ino).filter(|open| open.for_writing || !mapping.write) {
            return Ok((Arc::clone(&open.file), open.for_writing));
        }
        let caller = Caller { session: mapping.by, ..Caller::default() };
        let (file, for_writing) = match mapping.may_write {
            true => match mappable(&*self.source)?.map(&caller, mapping.ino, true) {
                Err(_) if !mapping.write => (mappable(&*self.source)?.map(&caller, mapping.ino, false)?, false),
                opened => (opened?, true),
            },
            false => self.open_for_reading(&caller, mapping.ino)?,
        };
        self.keep_open(mapping.ino, Arc::clone(&file), for_writing);
        Ok((file, for_writing))
    }

    /// Opens a file for reading. QEMU maps nothing from a read-only descriptor, not even for reading. Files of
    /// read-only shares, and programs (ETXTBSY), are copied instead.
    fn open_for_reading(&self, caller: &Caller<'_>, ino: Ino) -> Result<(Arc<Backing>, bool)> {
        let source = mappable(&*self.source)?;
        let file = source.map(caller, ino, false)?;
        if self.read_only || fstat(file.as_fd())?.st_mode & ANY_EXECUTE != 0 {
            return Ok((file, false));
        }
        Ok(source.map(caller, ino, true).map_or((file, false), |file| (file, true)))
    }

    /// Allocates the file's holes where the guest will write: "no space" at a store would end the virtual machine.
    fn allocate(&self, mapping: &Mapping) -> Result<()> {
        let Some(open) = self.files.get(&mapping.ino) else { return Ok(()) };
        let size = u64::try_from(fstat(open.file.as_fd())?.st_size).unwrap_or(0);
        let bytes = mapping.len.min(size.saturating_sub(mapping.offset));
        if bytes == 0 {
            return Ok(());
        }
        Windows::allocate(open.file.as_fd(), mapping.offset..mapping.offset + bytes)
    }

    fn unmap(&mut self, by: SessionId, ranges: &[(u64, u64)]) -> Result<()> {
        for (start, len) in ranges {
            let gone = self.table.within(*start, start.saturating_add(*len))?;
            self.remove_mappings(by, &gone)?;
        }
        Ok(())
    }

    /// Removes mappings; continues after errors.
    fn remove_mappings(&mut self, by: SessionId, gone: &[ActiveMapping]) -> Result<()> {
        let mut outcome = Ok(());
        for placed in gone {
            self.records.progress(placed, Progress::Unsure);
            let displaced = self.undo_placement(placed);
            match displaced {
                Ok(()) => {
                    outcome = outcome.and(self.remove_eof_copy(placed));
                    self.table.remove(placed);
                    self.claims.remove(&placed.part.window_offset);
                    self.close_unused(placed.ino);
                    self.records.gone(placed.note);
                    let _ = catch_panics(|| {
                        self.publish(by, placed);
                        Ok(())
                    });
                }
                Err(error) => {
                    // The guest may still store there.
                    if let Err(error) = self.eof_copies.writeback(placed.ino, &WHOLE) {
                        self.eof_copy_lost(placed.ino, error);
                    }
                    outcome = Err(self.failed("taken away", placed.part, &error));
                }
            }
        }
        outcome
    }

    /// Ends the copy of a mapping that the guest no longer writes.
    fn remove_eof_copy(&self, placed: &ActiveMapping) -> Result<()> {
        let removed = self.eof_copies.remove(placed.ino, placed.part.window_offset);
        removed.inspect_err(|error| self.eof_copy_lost(placed.ino, *error))
    }

    /// Publishes the guest's stores in a mapping, which others could not see until now.
    pub(super) fn publish(&self, by: SessionId, placed: &ActiveMapping) {
        if let Some(changes) = self.source.changes().filter(|_| placed.written) {
            let ActiveMapping { ino, part: Part { file_offset: offset, bytes: len, .. }, .. } = *placed;
            changes.publish(by, || Change::Data { ino, offset, len });
        }
    }

    pub(super) fn close_unused(&mut self, ino: Ino) {
        if self.table.of(ino).is_empty()
            && let Some(open) = self.files.remove(&ino)
        {
            self.records.gone(open.note);
        }
    }

    pub(super) fn eof_copy_lost(&self, ino: Ino, error: Errno) {
        self.ratelimited_log.warn(format_args!(
            "{}: the end of inode {} cannot be written, and what the guest stored there is lost: {error}",
            self.name, ino.0
        ));
    }

    pub(super) fn failed(&self, what: &str, part: Part, error: &WindowError) -> Errno {
        self.ratelimited_log.warn(format_args!("{}: in the window, {part:x?} cannot be {what}: {error}", self.name));
        match error {
            WindowError::TooMany(_) | WindowError::Full(_) => Errno::NOMEM,
            WindowError::Refused | WindowError::Lost | WindowError::File(_) => Errno::IO,
        }
    }
}
