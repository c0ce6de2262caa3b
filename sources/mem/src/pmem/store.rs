//! The store of a tree in an image.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferry_vfs::sync::lock;
use ferry_vfs::{Backing, Data, Errno, FallocateFlags, Ino, Input, Output, Result, Seek, Timespec};

use super::codec::{put_map, put_record};
use super::commit_thread::CommitThread;
use super::disk::{Disk, File};
use super::format::BLOCK_BYTES;
use super::log::{Effects, Growth, SnapshotWriter};
use crate::store::{Record, Space, Store, Usage, WriteAt};
use crate::tree::{Snapshot, Tree};

/// The size of the additional attribute record of a directory or further name in a snapshot.
const ATTR_BYTES: u64 = 96;
/// Bytes that one copy moves at a time.
const COPY_BYTES: usize = 1 << 20;

/// Files and log of an image: the [`Store`] of [`super::PMem`].
#[derive(Debug)]
pub struct PStore {
    pub(crate) disk: Arc<Disk>,
    /// Inodes for whose end the log had no room.
    unfreed: Mutex<HashSet<Ino>>,
    /// Commits periodically, and moves data between tiers. `None` if read-only, and in tests that do it themselves.
    commit_thread: Option<CommitThread>,
}

/// The data of one open inode.
#[derive(Debug)]
pub struct PFile(pub(crate) Arc<File>);

impl PStore {
    /// Creates a store whose log is committed at this interval, if any.
    pub(crate) fn new(disk: Arc<Disk>, commit: Option<Duration>) -> Self {
        let commit_thread = commit.map(|every| CommitThread::start(Arc::clone(&disk), every));
        Self { disk, unfreed: Mutex::default(), commit_thread }
    }

    /// Writes a snapshot of everything to the other log area.
    pub(crate) fn compact(&self, snapshot: &Snapshot<'_, Self>) -> Result<()> {
        let _stopped = self.disk.stop();
        self.disk.log.restart(|log| {
            snapshot.for_each(&mut |record| {
                put_in_snapshot(log, record)?;
                match record {
                    Record::Make { ino, .. } => self.disk.for_each_map(*ino, |map| log.put(|to| put_map(to, map))),
                    _ => Ok(()),
                }
            })
        })?;
        self.disk.collect();
        Ok(())
    }

    /// Moves up to this many blocks of the coldest files to the second tier; returns how many. It happens automatically
    /// as the first tier fills up.
    ///
    /// # Errors
    /// `IO`.
    pub fn move_to_tier2(&self, blocks: u64) -> Result<u64> {
        self.disk.demote(blocks, self.disk.heat.files().saturating_mul(2))
    }

    /// Moves up to this many blocks of files that were read in the second tier back to the first; returns how many. It
    /// happens automatically while the first tier has room.
    ///
    /// # Errors
    /// `IO`.
    pub fn bring_back(&self, blocks: u64) -> Result<u64> {
        self.disk.promote(blocks)
    }
}

/// Writes a record of the tree to a snapshot. Attributes may be long, so each is a separate item.
fn put_in_snapshot(log: &mut SnapshotWriter<'_>, record: &Record<'_>) -> Result<()> {
    let Record::Make { ino, meta, target, xattrs, at } = *record else {
        return log.put(|to| put_record(to, record));
    };
    log.put(|to| put_record(to, &Record::Make { ino, meta, target, xattrs: &[], at }))?;
    for xattr in xattrs {
        let (name, value) = (xattr.name, Some(xattr.value));
        log.put(|to| put_record(to, &Record::Xattr { ino, name, value, meta }))?;
    }
    Ok(())
}

/// Returns the effect of a record on the next snapshot, and the additional bytes.
fn growth(record: &Record<'_>) -> (Growth, u64) {
    let is_dir = |mode: u32| ferry_vfs::FileType::from_raw_mode(mode) == ferry_vfs::FileType::Directory;
    match record {
        // Attributes become separate records, each with the inode's attributes.
        Record::Make { meta, xattrs, .. } => {
            let attrs = xattrs.len() as u64 + u64::from(is_dir(meta.mode));
            (Growth::Grows, attrs * ATTR_BYTES)
        }
        Record::Link { .. } => (Growth::Grows, ATTR_BYTES),
        Record::Rename { .. } | Record::Xattr { value: Some(_), .. } => (Growth::Grows, 0),
        Record::Unlink { .. } | Record::Attr { .. } | Record::Xattr { value: None, .. } | Record::Free { .. } => {
            (Growth::Keeps, 0)
        }
    }
}

impl Store for PStore {
    type File = PFile;

    const JOURNALED: bool = true;

    fn log(&self, record: &Record<'_>) -> Result<()> {
        let mut payload = Vec::with_capacity(128);
        put_record(&mut payload, record);
        let (growth, more) = growth(record);
        let reserved = self.disk.log.reserve(payload.len(), growth);
        if let (Err(Errno::NOSPC), Record::Free { ino }) = (&reserved, record) {
            lock(&self.unfreed).insert(*ino);
        }
        self.disk.log.append(reserved?, &payload, Effects { more, ..Effects::default() });
        Ok(())
    }

    fn admit(&self, tree: &Tree<Self>) -> Result<()> {
        if self.disk.log.wants_snapshot() {
            let done = tree.checkpoint(|snapshot| match self.disk.log.wants_snapshot() {
                true => self.compact(snapshot),
                // Another thread was faster.
                false => Ok(()),
            });
            // If a snapshot does not fit, a removal may still fit into the rest of the log.
            done.or_else(|error| if error == Errno::NOSPC { Ok(()) } else { Err(error) })?;
        }
        Ok(())
    }

    fn open(&self, ino: Ino, _: (Timespec, Timespec)) -> Result<PFile> {
        Ok(PFile(self.disk.file_or_new(ino)))
    }

    fn usage(&self, ino: Ino, file: Option<&PFile>) -> Result<Usage> {
        let found = if file.is_none() { self.disk.file(ino) } else { None };
        let Some(file) = file.map(|file| &file.0).or(found.as_ref()) else { return Ok(Usage::default()) };
        let state = file.read();
        Ok(Usage { size: state.size, blocks: state.extents.blocks() * (BLOCK_BYTES / 512), times: None })
    }

    fn read(&self, file: &PFile, offset: u64, len: u32, out: &mut dyn Output) -> Result<Data> {
        self.disk.read(&file.0, offset, len, out)
    }

    fn write(&self, file: &PFile, at: WriteAt, input: &mut dyn Input) -> Result<Data> {
        self.disk.write(&file.0, at, input)
    }

    fn truncate(&self, file: &PFile, size: u64) -> Result<()> {
        self.disk.truncate(&file.0, size)
    }

    fn fallocate(&self, file: &PFile, offset: u64, len: u64, flags: FallocateFlags) -> Result<()> {
        self.disk.fallocate(&file.0, offset, len, flags)
    }

    fn seek(&self, file: &PFile, offset: u64, seek: Seek) -> Result<u64> {
        self.disk.seek(&file.0, offset, seek)
    }

    fn copy(&self, from: (&PFile, u64), to: (&PFile, u64), len: u64) -> Result<u64> {
        let ((from, from_offset), (to, to_offset)) = (from, to);
        let len = len.min(from.0.read().size.saturating_sub(from_offset));
        let apart = from_offset + len <= to_offset || to_offset + len <= from_offset;
        if Arc::ptr_eq(&from.0, &to.0) && !apart {
            return Err(Errno::INVAL);
        }
        let mut done = 0;
        while done < len {
            let mut bytes = Vec::new();
            let part = (len - done).min(COPY_BYTES as u64);
            self.disk.read_bytes(&from.0, from_offset + done, part, &mut bytes)?;
            if bytes.is_empty() {
                break;
            }
            let written = match self.disk.write_bytes(&to.0, Some(to_offset + done), &bytes) {
                Err(_) if done > 0 => break,
                outcome => outcome?,
            };
            done += written as u64;
            if written < bytes.len() {
                break;
            }
        }
        Ok(done)
    }

    fn fsync(&self, ino: Ino, file: Option<&PFile>, data_only: bool) -> Result<Option<Arc<Backing>>> {
        if self.disk.read_only {
            return Ok(None);
        }
        let found = if file.is_none() { self.disk.file(ino) } else { None };
        match file.map(|file| &file.0).or(found.as_ref()) {
            Some(file) => self.disk.sync_file(file, data_only)?,
            None => self.disk.sync_log()?,
        }
        Ok(None)
    }

    fn sync(&self) -> Result<()> {
        if self.disk.read_only { Ok(()) } else { self.disk.sync_all() }
    }

    fn end(&self, ino: Ino) {
        self.disk.end(ino);
    }

    fn remove(&self, ino: Ino) {
        self.disk.remove(ino, lock(&self.unfreed).remove(&ino));
    }

    fn space(&self) -> Result<Space> {
        let (total, free) = self.disk.space();
        Ok(Space { total: total * BLOCK_BYTES, free: free * BLOCK_BYTES })
    }
}

impl Drop for PStore {
    fn drop(&mut self) {
        drop(self.commit_thread.take());
        if !self.disk.read_only
            && let Err(error) = self.disk.sync_all()
        {
            tracing::error!("cannot make the last changes durable: {error}");
        }
    }
}
