//! Fetches missing objects of composefs.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use rustix::fs::FlockOperation;
use tempfile::TempPath;

use crate::format::composefs::path_of;
use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Error, IoContext, Result};
use crate::format::verity::Hasher;
use crate::read::fetch_locks::{FetchLock, Progress};
use crate::read::missing_objects::MissingObjects;
use crate::read::object_files::Files;
use crate::read::singleflight::{Claim, FetchAction, FetchableSet, ObjectSet};
use crate::store::fetch::{RUN_BYTES_MAX, SERVERS_MAX};
use crate::store::file_objects::FileObject;
use crate::store::layout;
use crate::store::new_file::{NEW_PREFIX, NewFile};
use crate::store::new_objects::{NewObjects, freshen};
use crate::store::object_error::ObjectError;

/// A store, and what it lacks of an image.
pub(crate) type PartialStore<'a> = (&'a Files, &'a MissingObjects);

impl FetchableSet for PartialStore<'_> {
    fn count(&self) -> usize {
        self.1.objects.len()
    }

    fn objects(&self) -> &dyn ObjectSet {
        self.1
    }

    fn fetch(&self, range: Range<usize>) -> Result<bool, ObjectError> {
        let (files, absent) = *self;
        absent.flights.claim_all(absent, range, RUN_BYTES_MAX, |claim| files.get(absent, claim)).map(|()| true)
    }
}

impl Files {
    /// Gets a missing or damaged object with the configured read-ahead, or waits for the thread that does.
    pub(super) fn obtain(&self, absent: &MissingObjects, digest: Digest) -> Result<(), ObjectError> {
        let Some(at) = absent.places.get(&digest).copied() else {
            return Err(ObjectError::Other { pack: absent.image, digest });
        };
        // It was removed or changed.
        absent.here[at].store(false, Ordering::Release);
        match absent.flights.next_action(absent, at..absent.objects.len(), absent.missing.ahead_bytes) {
            FetchAction::Here => Ok(()),
            FetchAction::Ours(claim) => {
                let outcome = self.get(absent, &claim);
                if absent.is_here(at) { Ok(()) } else { outcome }
            }
            // The thread that fetched it has logged why.
            FetchAction::Failed => Err(ObjectError::Other { pack: absent.image, digest }),
        }
    }

    /// Verifies all objects of the image; fetches missing ones.
    pub(crate) fn verify_absent(&self, absent: &MissingObjects) -> Result<(), ObjectError> {
        let is_there = |at: usize| absent.is_here(at).then_some(()).ok_or(absent.objects[at].digest);
        (0..absent.objects.len()).try_for_each(|at| is_there(at).or_else(|digest| self.obtain(absent, digest)))
    }

    /// Returns whether every object has a file of its length, which may still be damaged.
    pub(crate) fn looks_complete(&self, absent: &MissingObjects) -> bool {
        let is_there = |object: &FileObject| {
            fs::symlink_metadata(self.path(object.digest))
                .is_ok_and(|found| found.is_file() && found.len() == object.bytes)
        };
        absent.objects.iter().all(is_there)
    }

    /// Makes the names of all fetched objects durable.
    pub(crate) fn complete(&self) -> Result<()> {
        let directory = File::open(self.directory()).doing("open", self.directory())?;
        rustix::fs::syncfs(&directory).doing("sync", self.directory())
    }

    /// Gets claimed objects: those in the store, and by fetching; a large object separately.
    fn get(&self, absent: &MissingObjects, claim: &Claim<'_>) -> Result<(), ObjectError> {
        self.get_each(absent, claim).inspect_err(|bad| {
            if bad.is_of_object() {
                claim.damaged(absent);
            }
        })
    }

    fn get_each(&self, absent: &MissingObjects, claim: &Claim<'_>) -> Result<(), ObjectError> {
        let mut run: Option<Range<usize>> = None;
        for at in claim.objects.clone() {
            let is_here = self.has_valid(absent, at);
            if is_here {
                absent.deduplicated_bytes.fetch_add(absent.objects[at].bytes, Ordering::Relaxed);
                absent.here[at].store(true, Ordering::Release);
                claim.tell();
            }
            if is_here || absent.is_large(at) {
                if let Some(run) = run.take() {
                    self.receive(absent, claim, run)?;
                }
            } else {
                run = Some(run.map_or(at, |run| run.start)..at + 1);
            }
            if !is_here && absent.is_large(at) {
                self.receive(absent, claim, at..at + 1)?;
            }
        }
        run.map_or(Ok(()), |run| self.receive(absent, claim, run))
    }

    /// Returns whether the store has a valid object, and marks it as used until the image is known.
    fn has_valid(&self, absent: &MissingObjects, at: usize) -> bool {
        let FileObject { digest, bytes } = absent.objects[at];
        let path = self.path(digest);
        let Ok(found) = fs::symlink_metadata(&path) else { return false };
        match self.here(&path_of(digest), digest, bytes) {
            Ok(_) => {
                freshen(&path, &found);
                // This changed its change time.
                self.note_own_change(digest, &path, &found);
            }
            Err(bad) => {
                tracing::warn!("{bad}; it is fetched again");
                return false;
            }
        }
        true
    }

    /// Waits for another process that fetches some of these objects; `None` if it fetched all, else the rest's lock.
    fn lock<'a>(
        &self,
        absent: &'a MissingObjects,
        claim: &Claim<'_>,
        mut run: Range<usize>,
    ) -> Option<(FetchLock<'a>, Range<usize>)> {
        let number =
            |at: usize| fs::symlink_metadata(self.path(absent.objects[at].digest)).ok().map(|found| found.ino());
        // Existing files were found to be damaged.
        let before: Vec<_> = run.clone().map(number).collect();
        let first = run.start;
        let numbers = run.start as u64..run.end as u64;
        let lock = absent.locks.take(absent.image, numbers, || {
            while !run.is_empty() && number(run.start) != before[run.start - first] && self.has_valid(absent, run.start)
            {
                absent.here[run.start].store(true, Ordering::Release);
                claim.tell();
                run.start += 1;
            }
            if run.is_empty() {
                return Progress::Done;
            }
            // The file of a large object shows its progress.
            let coming = self.directory().join(format!("{NEW_PREFIX}{}", absent.objects[run.start].digest.hex()));
            let bytes = fs::metadata(coming).map_or(0, |found| found.len());
            Progress::Of(bytes.wrapping_add((run.start as u64) << 40))
        })?;
        Some((lock, run))
    }

    /// Fetches adjacent objects with one request for each server that is asked.
    fn receive(&self, absent: &MissingObjects, claim: &Claim<'_>, run: Range<usize>) -> Result<(), ObjectError> {
        let mut left = Some(run);
        for server in 1.. {
            let Some(run) = left.take() else { break };
            left = self.receive_from(absent, claim, run, server < SERVERS_MAX)?;
        }
        Ok(())
    }

    /// Fetches adjacent objects with one request; returns those that another server may have undamaged.
    fn receive_from(
        &self,
        absent: &MissingObjects,
        claim: &Claim<'_>,
        run: Range<usize>,
        may_ask_another: bool,
    ) -> Result<Option<Range<usize>>, ObjectError> {
        let keep = |error: Error| ObjectError::Keep { pack: absent.image, reason: of_store(error) };
        let Some((_lock, run)) = self.lock(absent, claim, run) else { return Ok(None) };
        let mut receiver = Receiver::begin(self, absent, run.clone()).map_err(keep)?;
        let from = absent.begins[run.start] + receiver.had_bytes();
        let end = absent.begins[run.end - 1] + absent.objects[run.end - 1].bytes;
        let mut wrong = None;
        let fetched = if from < end {
            absent.missing.from.read(absent.image, from..end, &mut |bytes| {
                receiver.take(bytes).map_err(|bad| {
                    let kind = if bad.is_of_object() { io::ErrorKind::InvalidData } else { io::ErrorKind::Other };
                    wrong = Some(bad);
                    io::Error::new(kind, "not what was asked for")
                })
            })
        } else {
            Ok(())
        };
        let current = receiver.current();
        let (new, came_to, of_empty) = receiver.finish();
        let outcome = match (wrong, fetched) {
            (Some(bad), Err(error)) if error.kind() == io::ErrorKind::Interrupted && may_ask_another => {
                tracing::debug!("{bad}: another server is asked");
                Ok(Some(came_to..run.end))
            }
            (Some(bad), _) => Err(bad),
            (None, Err(reason)) => Err(ObjectError::Fetch { pack: absent.image, digest: current, reason }),
            (None, Ok(())) if of_empty.is_ok() && came_to < run.end => {
                let reason = io::ErrorKind::UnexpectedEof.into();
                Err(ObjectError::Fetch { pack: absent.image, digest: current, reason })
            }
            (None, Ok(())) => of_empty.map(|()| None),
        };
        // Complete objects are kept, whatever became of the rest.
        let fetched_bytes = new.new_bytes;
        let published = new.publish(|digest, path| self.note(digest, path)).map_err(keep);
        let published = published.map(|()| {
            absent.fetched_bytes.fetch_add(fetched_bytes, Ordering::Relaxed);
            self.verified_bytes.fetch_add(fetched_bytes, Ordering::Relaxed);
            (run.start..came_to).for_each(|at| absent.here[at].store(true, Ordering::Release));
            claim.tell();
        });
        outcome.and_then(|left| published.map(|()| left)).inspect_err(|bad| tracing::debug!("{bad}"))
    }
}

/// Returns an error of the store as a system error.
fn of_store(error: Error) -> io::Error {
    match error {
        Error::Io { what, path, source } => {
            io::Error::new(source.kind(), format!("cannot {what} {}: {source}", path.display()))
        }
        error => io::Error::other(error),
    }
}

/// What becomes of an incomplete object.
enum PartFile {
    /// It is removed.
    Temporary(TempPath),
    /// It is resumed later.
    Resumable(PathBuf),
}

/// An object that is being received.
struct Incoming {
    file: File,
    place: PartFile,
    hasher: Hasher,
    got: u64,
}

/// Receives the bytes of adjacent objects, and stores each when it is verified.
struct Receiver<'a> {
    files: &'a Files,
    absent: &'a MissingObjects,
    /// The current object, and those after it.
    left: Range<usize>,
    current: Option<Incoming>,
    new: NewObjects,
}

impl<'a> Receiver<'a> {
    fn begin(files: &'a Files, absent: &'a MissingObjects, run: Range<usize>) -> Result<Self> {
        let new = NewObjects::within(files.directory())?;
        let mut receiver = Self { files, absent, left: run.clone(), current: None, new };
        if absent.is_large(run.start) {
            receiver.current = receiver.resume(run.start)?;
        }
        Ok(receiver)
    }

    /// Returns how much of the first object was already available.
    fn had_bytes(&self) -> u64 {
        self.current.as_ref().map_or(0, |incoming| incoming.got)
    }

    /// Returns the current object.
    fn current(&self) -> Digest {
        self.absent.objects[self.left.start.min(self.absent.objects.len() - 1)].digest
    }

    /// Opens the received part of a large object; `None` if another process is fetching it.
    fn resume(&self, at: usize) -> Result<Option<Incoming>> {
        let FileObject { digest, bytes } = self.absent.objects[at];
        let path = self.files.directory().join(format!("{NEW_PREFIX}{}", digest.hex()));
        let mut file = match layout::lockable_part(&path) {
            // Another user has begun it.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(None),
            opened => opened.doing("open", &path)?,
        };
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(None);
        }
        let ours = file.metadata().doing("look at", &path)?;
        if ours.uid() != rustix::process::geteuid().as_raw() {
            // Another user has begun it, and alone can change its mode in the end.
            return Ok(None);
        }
        // Its previous owner may just have renamed it.
        if !fs::metadata(&path).is_ok_and(|found| (found.dev(), found.ino()) == (ours.dev(), ours.ino())) {
            return Ok(None);
        }
        let length = ours.len();
        // The last block may be incomplete after a crash; requesting it again is harmless.
        let got = length.min(bytes).saturating_sub(1) / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        file.set_len(got).doing("write to", &path)?;
        let mut hasher = Hasher::default();
        let mut piece = vec![0; 256 << 10];
        let mut left = got;
        while left > 0 {
            let count = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
            file.read_exact(&mut piece[..count]).doing("read", &path)?;
            hasher.update(&piece[..count]);
            left -= count as u64;
        }
        file.seek(SeekFrom::Start(got)).doing("read", &path)?;
        Ok(Some(Incoming { file, place: PartFile::Resumable(path), hasher, got }))
    }

    fn take(&mut self, mut bytes: &[u8]) -> Result<(), ObjectError> {
        while !self.left.is_empty() {
            let FileObject { digest, bytes: length } = self.absent.objects[self.left.start];
            let got = self.had_bytes();
            if got == length && (self.current.is_some() || length == 0) {
                self.end(digest, length)?;
                continue;
            }
            if bytes.is_empty() {
                return Ok(());
            }
            let count = usize::try_from(length - got).unwrap_or(usize::MAX).min(bytes.len());
            let (now, later) = bytes.split_at(count);
            let outcome = self.incoming().and_then(|incoming| {
                incoming.file.write_all(now)?;
                incoming.hasher.update(now);
                incoming.got += now.len() as u64;
                Ok(())
            });
            outcome.map_err(|reason| ObjectError::Keep { pack: self.absent.image, reason })?;
            bytes = later;
        }
        Ok(())
    }

    fn incoming(&mut self) -> io::Result<&mut Incoming> {
        if self.current.is_none() {
            let NewFile { file, path } = NewFile::begin(self.files.directory()).map_err(of_store)?;
            let hasher = Hasher::default();
            self.current = Some(Incoming { file, place: PartFile::Temporary(path), hasher, got: 0 });
        }
        self.current.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Completes an object.
    fn end(&mut self, digest: Digest, bytes: u64) -> Result<(), ObjectError> {
        let pack = self.absent.image;
        let keep = |reason| ObjectError::Keep { pack, reason };
        self.incoming().map_err(keep)?;
        let Some(Incoming { file, place, mut hasher, .. }) = self.current.take() else { return Ok(()) };
        // From here on it is removed, unless it gets its name.
        let path = match place {
            PartFile::Temporary(path) => path,
            PartFile::Resumable(path) => {
                let new = NewFile::begin(self.files.directory()).map_err(|error| keep(of_store(error)))?;
                fs::rename(&path, &new.path).map_err(keep)?;
                new.path
            }
        };
        // Until now no other process could resume it.
        drop(file);
        if hasher.finish() != digest {
            return Err(ObjectError::Received { pack, digest });
        }
        self.new.put(digest, bytes, path);
        self.left.start += 1;
        Ok(())
    }

    /// Returns the complete objects, the index after the last, and the error of empty ones at the end.
    fn finish(mut self) -> (NewObjects, usize, Result<(), ObjectError>) {
        let outcome = self.take(&[]);
        (self.new, self.left.start, outcome)
    }
}
