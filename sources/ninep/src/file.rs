//! Open files, and their bytes.
//!
//! All openers of a file share one fid for reading and one for writing. Read-ahead and write-behind belong to the file,
//! and after a lost connection there are only two fids to reopen.

use std::sync::Arc;
use std::time::Instant;

use ferry_vfs::sync::lock;
use ferry_vfs::{
    Caller, Change, Errno, Handle, Ino, Input, IoRange, OFlags, Output, Result, SessionId, SetAttr, openable,
};
use ferry_wire::ninep::{Reply, Request};

use crate::cache::CachedFile;
use crate::client::Shared;
use crate::connection::{Connection, Outcome, Outgoing, RequestError};
use crate::inode::Inode;
use crate::open_fids::OpenFile;
use crate::options::Cache;
use crate::session::{OwnedFid, Session};

/// The space that servers require beside the data: Plan 9's `IOHDRSZ`. The headers are shorter, but diod refuses
/// listings with less.
pub(crate) const HEAD_BYTES: usize = 24;
/// The unit of transfers in bytes, if the message has room for it.
const PAGE_BYTES: usize = 4096;

impl Shared {
    /// Returns the maximum data of one message, in bytes.
    pub(crate) fn message_bytes(connection: &Connection) -> usize {
        let room = connection.msize().saturating_sub(HEAD_BYTES);
        if room > PAGE_BYTES { room - room % PAGE_BYTES } else { room }
    }

    pub(crate) fn open(self: &Arc<Self>, cx: &Caller<'_>, ino: Ino, flags: OFlags) -> Result<Handle> {
        let inode = self.inodes.get(ino)?;
        openable(inode.kind)?;
        let cut = inode.cached().filter(|_| flags.contains(OFlags::TRUNC)).is_some();
        let now = if cut { flags - OFlags::TRUNC } else { flags };
        let mut opened = self.link.with_retry(|session| inode.open(self, session, now))?;
        let begun = if cut { self.truncate(&inode, 0) } else { self.revalidate(&inode) };
        begun.inspect_err(|_| inode.closed(opened.access))?;
        opened.errors = inode.cached().map(|file| file.error_cursor());
        self.keep_open(cx, opened)
    }

    /// Opens a new file by the fid that created it.
    pub(crate) fn open_made(
        self: &Arc<Self>,
        cx: &Caller<'_>,
        inode: &Arc<Inode>,
        (held, flags): (Arc<OwnedFid>, OFlags),
        size: u64,
    ) -> Result<Handle> {
        // A new file has none. If it existed already, its server removes them at the first write.
        *lock(&inode.no_capabilities) = Some((Instant::now(), Errno::NODATA));
        let mut opened = inode.add_created(held, flags);
        if flags.contains(OFlags::TRUNC) && inode.cached().is_some() {
            // It existed already, so unwritten data belong to its old contents.
            self.truncate(inode, 0).inspect_err(|_| inode.closed(opened.access))?;
        }
        opened.errors = inode.cache(self, size).map(|file| file.error_cursor());
        self.keep_open(cx, opened)
    }

    /// Assigns a handle to an open file. Closes it on failure.
    fn keep_open(&self, cx: &Caller<'_>, opened: OpenFile) -> Result<Handle> {
        let (inode, access) = (Arc::clone(&opened.inode), opened.access);
        self.files.insert(cx.session, inode.ino, opened).inspect_err(|_| inode.closed(access))
    }

    /// Drops cached data if the file has changed since they were cached (close-to-open).
    fn revalidate(self: &Arc<Self>, inode: &Arc<Inode>) -> Result<()> {
        if self.cache.is_none() {
            return Ok(());
        }
        let told = inode.stamp();
        let attr = self.getattr_of(inode)?;
        let Some(file) = inode.cache(self, attr.size) else { return Ok(()) };
        let stamp = inode.stamp();
        let before = *lock(&inode.valid);
        if self.link.options.cache == Cache::Always {
            *lock(&inode.valid) = stamp;
            return Ok(());
        }
        if told != stamp {
            // The opener must see the current size, although its kernel has just received another one.
            self.changes.publish(SessionId::default(), || Change::Attr { ino: inode.ino });
        }
        if before != stamp {
            file.invalidate(0..u64::MAX);
            // Not before: who opens it meanwhile invalidates it, too.
            *lock(&inode.valid) = stamp;
        }
        Ok(())
    }

    /// Changes the size of a file.
    pub(crate) fn truncate(&self, inode: &Inode, size: u64) -> Result<()> {
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        let at_server = || {
            self.link.with_retry(|session| {
                self.by_open_fid(session, inode, true, |fid| {
                    session.tell(&Request::Setattr { fid: fid.fid(), set, ctime: false })
                })
            })
        };
        let truncated = match inode.cached() {
            Some(file) => file.truncate(size, at_server),
            None => at_server(),
        };
        inode.change();
        truncated
    }

    /// Returns the cache of an open file, unless it must be bypassed; its data are written then.
    fn cached<'a>(&self, opened: &'a OpenFile, at: &IoRange) -> Option<&'a Arc<CachedFile>> {
        let file = opened.inode.cached()?;
        if at.flags.contains(OFlags::DIRECT) {
            file.write_out();
            return None;
        }
        Some(file)
    }

    pub(crate) fn release(&self, cx: &Caller<'_>, ino: Ino, handle: Handle) {
        if let Ok(opened) = self.files.remove(cx.session, ino, handle) {
            self.write_back(&opened);
            self.release_locks(&opened, handle);
            opened.inode.closed(opened.access);
        }
    }

    /// Writes unwritten data; clients have flushed before, unless they have disappeared.
    fn write_back(&self, opened: &OpenFile) {
        if let Some(file) = opened.inode.cached().filter(|file| file.is_dirty())
            && let Some(errors) = &opened.errors
            && let Err(errno) = file.flush(errors)
        {
            tracing::error!("cannot write data of a closed file: {errno}");
        }
    }

    /// Writes the data of a handle, and returns their errors.
    pub(crate) fn flush(&self, opened: &OpenFile) -> Result<()> {
        match (opened.inode.cached(), &opened.errors) {
            (Some(file), Some(errors)) => file.flush(errors),
            _ => Ok(()),
        }
    }

    fn opened(&self, cx: &Caller<'_>, at: &IoRange) -> Result<Arc<OpenFile>> {
        let opened = self.files.get(cx.session, at.ino, at.handle)?;
        if lock(&opened.inode.io).lost_locks { Err(Errno::IO) } else { Ok(opened) }
    }

    pub(crate) fn read(&self, cx: &Caller<'_>, at: &IoRange, out: &mut dyn Output) -> Result<usize> {
        let opened = self.opened(cx, at)?;
        if let Some(file) = self.cached(&opened, at) {
            return file.read(at.offset, at.len as usize, out);
        }
        let end = at.offset.saturating_add(at.len.into());
        let mut done = at.offset;
        while done < end {
            let read = self.link.with_retry(|session| self.read_some(session, &opened.inode, done, end))?;
            let mut put = 0;
            let mut ended = false;
            for (buffer, count) in &read {
                put += out.put(buffer.get(..*count).unwrap_or_default());
                ended |= *count == 0;
                if *count < buffer.len() {
                    break;
                }
            }
            done += put as u64;
            if ended || put == 0 || self.ends_at(&opened.inode, done) {
                break;
            }
        }
        usize::try_from(done - at.offset).map_err(|_| Errno::IO)
    }

    /// Returns whether the file ends here according to the server, so that a short read needs no second one.
    fn ends_at(&self, inode: &Inode, offset: u64) -> bool {
        matches!(&*lock(&inode.seen), Some((_, attr)) if attr.size == offset)
    }

    /// Reads a range by several concurrent messages.
    fn read_some(
        &self,
        session: &Arc<Session>,
        inode: &Arc<Inode>,
        from: u64,
        to: u64,
    ) -> Outcome<Vec<(Vec<u8>, usize)>> {
        let held = inode.reading(self, session)?;
        let bytes = usize::try_from(to - from).unwrap_or(usize::MAX);
        let held = inode.extra_fid(session, true, bytes).unwrap_or(held);
        let connection = held.connection();
        let piece = Self::message_bytes(session) as u64;
        let starts = std::iter::successors(Some(from), |at| at.checked_add(piece)).take_while(|at| *at < to);
        let requests = starts.map(|at| {
            let bytes = usize::try_from(piece.min(to - at)).unwrap_or(0);
            Outgoing::read(held.fid(), at, vec![0; bytes])
        });
        let mut read = Vec::new();
        let mut failed = None;
        for ticket in connection.send(requests.collect()) {
            let message = ticket.wait(connection).and_then(|message| match message.buffer {
                Some(buffer) if message.bytes.is_empty() => Ok((buffer, message.count)),
                _ => connection.take(&message, |_| None),
            });
            match message {
                Ok(piece) if failed.is_none() => read.push(piece),
                Err(fail) => failed = failed.or(Some(fail)),
                Ok(_) => {}
            }
        }
        match failed {
            // The bytes before the error are returned first.
            Some(fail) if read.is_empty() => Err(fail),
            _ => Ok(read),
        }
    }

    pub(crate) fn write(&self, cx: &Caller<'_>, at: &IoRange, input: &mut dyn Input) -> Result<usize> {
        let opened = self.opened(cx, at)?;
        at.end()?;
        let written = self.write_opened(cx, &opened, at, input);
        // Also for unwritten data: the server will report another time and size.
        opened.inode.change();
        written
    }

    fn write_opened(&self, cx: &Caller<'_>, opened: &OpenFile, at: &IoRange, input: &mut dyn Input) -> Result<usize> {
        let inode = &opened.inode;
        if at.clear_privileges {
            self.clear_privileges(cx, inode)?;
        }
        if let Some(file) = self.cached(opened, at) {
            return file.write(at.offset, at.len as usize, input);
        }
        let mut data = vec![0; at.len as usize];
        let count = input.take(&mut data);
        data.truncate(count);
        let mut done = 0;
        while done < data.len() {
            let offset = at.offset + done as u64;
            match self.link.with_retry(|session| self.write_some(session, inode, offset, &data[done..])) {
                Ok(0) if done == 0 => return Err(Errno::IO),
                Ok(0) => break,
                Ok(count) => done += count,
                Err(errno) if done == 0 => return Err(errno),
                // The written part is reported; the client retries the rest and gets the error then.
                Err(_) => break,
            }
        }
        if let Some(file) = inode.cached() {
            file.invalidate(at.offset..at.offset + done as u64);
            // For the size; the data is written, whatever comes of this.
            let _ = self.getattr_of(inode);
        }
        Ok(done)
    }

    /// Writes by several concurrent messages; returns how many bytes were written from the start.
    fn write_some(&self, session: &Arc<Session>, inode: &Arc<Inode>, offset: u64, data: &[u8]) -> Outcome<usize> {
        let held = inode.writing(self, session)?;
        let held = inode.extra_fid(session, false, data.len()).unwrap_or(held);
        let connection = held.connection();
        {
            let mut io = lock(&inode.io);
            if io.lost_locks {
                return Err(RequestError::Errno(Errno::IO));
            }
            io.unsynced.get_or_insert(session.serial);
            io.written += 1;
        }
        let pieces = data.chunks(Self::message_bytes(session));
        let lengths: Vec<usize> = pieces.clone().map(<[u8]>::len).collect();
        let mut at = offset;
        let requests = pieces.map(|piece| {
            let request = Outgoing::write(held.fid(), at, piece.to_vec());
            at += piece.len() as u64;
            request
        });
        let (mut done, mut failed, mut goes_on) = (0, None, true);
        for (ticket, length) in connection.send(requests.collect()).into_iter().zip(lengths) {
            let count = ticket.wait(connection).and_then(|message| {
                connection.take(&message, |reply| match reply {
                    Reply::Write { bytes } => usize::try_from(bytes).ok().filter(|count| *count <= length),
                    _ => None,
                })
            });
            match count {
                Ok(count) if goes_on => {
                    done += count;
                    goes_on = count == length;
                }
                Ok(_) => {}
                Err(fail) => {
                    goes_on = false;
                    failed = failed.or(Some(fail));
                }
            }
        }
        {
            // An fsync meanwhile may have been served before it.
            let mut io = lock(&inode.io);
            io.unsynced.get_or_insert(session.serial);
            io.written += 1;
        }
        match failed {
            Some(fail) if done == 0 => Err(fail),
            _ => Ok(done),
        }
    }

    pub(crate) fn fsync(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<()> {
        let opened = self.files.get(cx.session, ino, handle)?;
        if let (Some(file), Some(errors)) = (opened.inode.cached(), &opened.errors) {
            file.fsync(errors)?;
            // Some data may have been written past the cache.
            if lock(&opened.inode.io).unsynced.is_none() {
                return Ok(());
            }
        }
        self.sync(&opened.inode, data_only)
    }

    /// Syncs written data. Data written on an earlier connection may be lost with its server.
    pub(crate) fn sync(&self, inode: &Inode, data_only: bool) -> Result<()> {
        let (unsynced, written) = {
            let io = lock(&inode.io);
            (io.unsynced, io.written)
        };
        let outcome = self.link.with_retry(|session| {
            let held = inode.open_fid(self, session)?;
            session.tell(&Request::Fsync { fid: held.fid(), data_only })?;
            Ok(session.serial)
        });
        let now = outcome?;
        let mut io = lock(&inode.io);
        // All who sync at the same time are told of data that were lost.
        io.unsynced = if io.written == written { None } else { io.unsynced.map(|then| then.max(now)) };
        drop(io);
        if unsynced.is_some_and(|then| then < now) {
            tracing::error!("a file's data may be lost: its server was restarted before they were durable");
            return Err(Errno::IO);
        }
        Ok(())
    }

    /// Syncs the names in a directory.
    pub(crate) fn fsyncdir(&self, cx: &Caller<'_>, ino: Ino, handle: Handle, data_only: bool) -> Result<()> {
        let dir = self.dirs.get(cx.session, ino, handle)?;
        self.link.with_retry(|session| {
            let fid = dir.fid(self, session)?;
            session.tell(&Request::Fsync { fid: fid.fid(), data_only })
        })
    }

    /// Syncs all written data, including those of closed files.
    pub(crate) fn syncfs(&self, _: &Caller<'_>, _: Ino) -> Result<()> {
        let mut outcome = self.inodes.has_all_unsynced();
        for inode in self.inodes.all().into_iter().filter(|inode| inode.is_unsynced()) {
            if outcome.is_err() && self.link.current().is_broken() {
                // Each would wait for the server.
                break;
            }
            outcome = outcome.and(self.sync_written(&inode));
        }
        self.inodes.drop_synced();
        let cached = self.cache.as_ref().map_or(Ok(()), |cache| cache.sync_all());
        outcome.and(cached)
    }

    /// Syncs the data of a file, which is opened for that if necessary.
    fn sync_written(&self, inode: &Arc<Inode>) -> Result<()> {
        let open = || {
            self.link.with_retry(|session| match inode.open_fid(self, session) {
                Err(RequestError::Errno(Errno::ACCESS | Errno::PERM)) => inode.writing(self, session),
                other => other,
            })
        };
        let is_gone = |ready: &Result<_>| matches!(ready, Err(Errno::NOENT | Errno::STALE));
        let mut ready = open();
        if is_gone(&ready) {
            // This client may be renaming it.
            self.inodes.wait_for_removals();
            ready = open();
        }
        let outcome = match ready {
            Ok(_) => {
                if let Some(file) = inode.cached().filter(|file| file.is_unkept()) {
                    file.sync();
                }
                let is_past_cache = lock(&inode.io).unsynced.is_some();
                if is_past_cache { self.sync(inode, false) } else { Ok(()) }
            }
            ref gone if is_gone(gone) && lock(&inode.io).is_closed() => {
                lock(&inode.io).unsynced = None;
                if let Some(file) = inode.cached() {
                    file.mark_removed();
                }
                if self.inodes.is_removed(inode) {
                    Ok(())
                } else {
                    tracing::error!("a file may not be durable: another client has renamed or removed it");
                    Err(Errno::IO)
                }
            }
            Err(errno) => Err(errno),
        };
        inode.close_unused();
        outcome
    }
}
