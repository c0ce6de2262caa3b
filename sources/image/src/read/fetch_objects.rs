//! Fetches composefs's objects.

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
use crate::read::singleflight::{Claim, FetchableSet, ObjectSet, Turn};
use crate::store::fetch::RUN_BYTES_MAX;
use crate::store::file_objects::FileObject;
use crate::store::new_file::{NEW_PREFIX, NewFile};
use crate::store::new_objects::{NewObjects, freshen};
use crate::store::object_error::ObjectError;

/// A store and what an image lacks of it.
pub(crate) type Partial<'a> = (&'a Files, &'a MissingObjects);

impl FetchableSet for Partial<'_> {
    fn count(&self) -> usize {
        self.1.objects.len()
    }

    fn objects(&self) -> &dyn ObjectSet {
        self.1
    }

    fn fetch(&self, range: Range<usize>) -> Result<bool, ObjectError> {
        let (files, absent) = *self;
        let mut at = range.start;
        while at < range.end {
            let claim = absent.flights.claim(absent, at..range.end, RUN_BYTES_MAX);
            files.get(absent, &claim)?;
            at += claim.objects.len().max(1);
        }
        Ok(true)
    }
}

impl Files {
    /// Gets an object that is not here, or is damaged, or waits for whoever is at it. What follows it is asked for together with it.
    pub(super) fn obtain(&self, absent: &MissingObjects, digest: Digest) -> Result<(), ObjectError> {
        let Some(at) = absent.places.get(&digest).copied() else {
            return Err(ObjectError::Other { pack: absent.image, digest });
        };
        // Somebody has removed it, or changed it.
        absent.here[at].store(false, Ordering::Release);
        match absent.flights.turn(absent, at..absent.objects.len(), absent.missing.ahead_bytes) {
            Turn::Here => Ok(()),
            Turn::Ours(claim) => {
                let outcome = self.get(absent, &claim);
                if absent.is_here(at) { Ok(()) } else { outcome }
            }
            // Whoever was at it has said why in the log.
            Turn::Failed => Err(ObjectError::Other { pack: absent.image, digest }),
        }
    }

    /// Proves all objects of the image; gets what is not here.
    pub(crate) fn prove_absent(&self, absent: &MissingObjects) -> Result<(), ObjectError> {
        let is_there = |at: usize| absent.is_here(at).then_some(()).ok_or(absent.objects[at].digest);
        (0..absent.objects.len()).try_for_each(|at| is_there(at).or_else(|digest| self.obtain(absent, digest)))
    }

    /// Whether a file is there for each object, of its length. That is not to say that it is sound.
    pub(crate) fn seems_whole(&self, absent: &MissingObjects) -> bool {
        let is_there = |object: &FileObject| {
            fs::symlink_metadata(self.path(object.digest))
                .is_ok_and(|found| found.is_file() && found.len() == object.bytes)
        };
        absent.objects.iter().all(is_there)
    }

    /// Makes the names of all objects that came durable.
    pub(crate) fn complete(&self) -> Result<()> {
        let folder = File::open(self.folder()).doing("open", self.folder())?;
        rustix::fs::syncfs(&folder).doing("sync", self.folder())
    }

    /// Gets what was claimed: what is here already, and what has to be fetched; a large object by itself.
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
            let is_here = self.find_here(absent, at);
            if is_here {
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

    /// Whether the store has an object, sound. That it is used is noted, so that it is not removed before the image is known.
    fn find_here(&self, absent: &MissingObjects, at: usize) -> bool {
        let FileObject { digest, bytes } = absent.objects[at];
        let path = self.path(digest);
        let Ok(found) = fs::symlink_metadata(&path) else { return false };
        match self.here(&path_of(digest), digest, bytes) {
            Ok(_) => {
                freshen(&path, &found);
                // That has changed the time of its last change.
                self.note_again(digest, &path, &found);
            }
            Err(bad) => {
                tracing::warn!("{bad}; it is fetched again");
                return false;
            }
        }
        true
    }

    /// Waits for another process that fetches some of these objects; `None` if all of them came by it, else those that are left.
    fn lock<'a>(
        &self,
        absent: &'a MissingObjects,
        claim: &Claim<'_>,
        mut run: Range<usize>,
    ) -> Option<(FetchLock<'a>, Range<usize>)> {
        let number =
            |at: usize| fs::symlink_metadata(self.path(absent.objects[at].digest)).ok().map(|found| found.ino());
        // What is here already was found not to be sound.
        let before: Vec<_> = run.clone().map(number).collect();
        let first = run.start;
        let numbers = run.start as u64..run.end as u64;
        let lock = absent.locks.take(absent.image, numbers, || {
            while !run.is_empty() && number(run.start) != before[run.start - first] && self.find_here(absent, run.start)
            {
                absent.here[run.start].store(true, Ordering::Release);
                claim.tell();
                run.start += 1;
            }
            if run.is_empty() {
                return Progress::Done;
            }
            // Of a large object the file tells what has come.
            let coming = self.folder().join(format!("{NEW_PREFIX}{}", absent.objects[run.start].digest.hex()));
            let bytes = fs::metadata(coming).map_or(0, |found| found.len());
            Progress::Of(bytes.wrapping_add((run.start as u64) << 40))
        })?;
        Some((lock, run))
    }

    /// Fetches neighbouring objects by one request.
    fn receive(&self, absent: &MissingObjects, claim: &Claim<'_>, run: Range<usize>) -> Result<(), ObjectError> {
        let keep = |error: Error| ObjectError::Keep { pack: absent.image, source: of_store(error) };
        let Some((_lock, run)) = self.lock(absent, claim, run) else { return Ok(()) };
        let mut receiver = Receiver::begin(self, absent, run.clone()).map_err(keep)?;
        let from = absent.begins[run.start] + receiver.had_bytes();
        let end = absent.begins[run.end - 1] + absent.objects[run.end - 1].bytes;
        let mut wrong = None;
        let fetched = if from < end {
            absent.missing.from.read(absent.image, from..end, &mut |bytes| {
                receiver.take(bytes).map_err(|bad| {
                    wrong = Some(bad);
                    io::Error::other("not what was asked for")
                })
            })
        } else {
            Ok(())
        };
        let current = receiver.current();
        let (new, came_to, of_empty) = receiver.finish();
        let outcome = match (wrong, fetched) {
            (Some(bad), _) => Err(bad),
            (None, Err(source)) => Err(ObjectError::Fetch { pack: absent.image, digest: current, source }),
            (None, Ok(())) if of_empty.is_ok() && came_to < run.end => {
                let source = io::ErrorKind::UnexpectedEof.into();
                Err(ObjectError::Fetch { pack: absent.image, digest: current, source })
            }
            (None, Ok(())) => of_empty,
        };
        // What came whole is kept, whatever became of the rest.
        let fetched_bytes = new.new_bytes;
        let published = new.publish(|digest, path| self.note(digest, path)).map_err(keep);
        let published = published.map(|()| {
            absent.fetched_bytes.fetch_add(fetched_bytes, Ordering::Relaxed);
            (run.start..came_to).for_each(|at| absent.here[at].store(true, Ordering::Release));
            claim.tell();
        });
        outcome.and(published).inspect_err(|bad| tracing::debug!("{bad}"))
    }
}

/// What went wrong with the store, as an error of the system.
fn of_store(error: Error) -> io::Error {
    match error {
        Error::Io { what, path, source } => {
            io::Error::new(source.kind(), format!("cannot {what} {}: {source}", path.display()))
        }
        error => io::Error::other(error),
    }
}

/// What becomes of what has come when the rest does not.
enum Where {
    /// It goes.
    Passing(TempPath),
    /// It is gone on with.
    Staying(PathBuf),
}

/// An object that is coming.
struct Incoming {
    file: File,
    place: Where,
    hasher: Hasher,
    got: u64,
}

/// Takes the bytes of neighbouring objects as they come, and keeps each when it is proved.
struct Receiver<'a> {
    files: &'a Files,
    absent: &'a MissingObjects,
    /// The object whose bytes come now, and those after it.
    left: Range<usize>,
    current: Option<Incoming>,
    new: NewObjects,
}

impl<'a> Receiver<'a> {
    fn begin(files: &'a Files, absent: &'a MissingObjects, run: Range<usize>) -> Result<Self> {
        let new = NewObjects::within(files.folder())?;
        let mut receiver = Self { files, absent, left: run.clone(), current: None, new };
        if absent.is_large(run.start) {
            receiver.current = receiver.resume(run.start)?;
        }
        Ok(receiver)
    }

    /// How much of the first object was here.
    fn had_bytes(&self) -> u64 {
        self.current.as_ref().map_or(0, |incoming| incoming.got)
    }

    /// The object whose turn it is.
    fn current(&self) -> Digest {
        self.absent.objects[self.left.start.min(self.absent.objects.len() - 1)].digest
    }

    /// What there is of a large object; `None` if another process is at it.
    fn resume(&self, at: usize) -> Result<Option<Incoming>> {
        let FileObject { digest, bytes } = self.absent.objects[at];
        let path = self.files.folder().join(format!("{NEW_PREFIX}{}", digest.hex()));
        let options = File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = options.doing("open", &path)?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(None);
        }
        let ours = file.metadata().doing("look at", &path)?;
        // Whoever had it before us may just have given it its name.
        if !fs::metadata(&path).is_ok_and(|found| (found.dev(), found.ino()) == (ours.dev(), ours.ino())) {
            return Ok(None);
        }
        let length = ours.len();
        // The last block may not have come to the disk as it was; nothing is lost by asking again.
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
        Ok(Some(Incoming { file, place: Where::Staying(path), hasher, got }))
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
            outcome.map_err(|source| ObjectError::Keep { pack: self.absent.image, source })?;
            bytes = later;
        }
        Ok(())
    }

    fn incoming(&mut self) -> io::Result<&mut Incoming> {
        if self.current.is_none() {
            let NewFile { file, path } = NewFile::begin(self.files.folder()).map_err(of_store)?;
            let hasher = Hasher::default();
            self.current = Some(Incoming { file, place: Where::Passing(path), hasher, got: 0 });
        }
        self.current.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// All bytes of an object have come.
    fn end(&mut self, digest: Digest, bytes: u64) -> Result<(), ObjectError> {
        let pack = self.absent.image;
        let keep = |source| ObjectError::Keep { pack, source };
        self.incoming().map_err(keep)?;
        let Some(Incoming { file, place, mut hasher, .. }) = self.current.take() else { return Ok(()) };
        // From here on it goes, unless it gets its name.
        let path = match place {
            Where::Passing(path) => path,
            Where::Staying(path) => {
                let new = NewFile::begin(self.files.folder()).map_err(|error| keep(of_store(error)))?;
                fs::rename(&path, &new.path).map_err(keep)?;
                new.path
            }
        };
        // Until now nobody else could go on with it.
        drop(file);
        if hasher.finish() != digest {
            return Err(ObjectError::Received { pack, digest });
        }
        self.new.put(digest, bytes, path);
        self.left.start += 1;
        Ok(())
    }

    /// What came whole, up to where, and what went wrong with the objects without bytes behind it, of which nothing could come.
    fn finish(mut self) -> (NewObjects, usize, Result<(), ObjectError>) {
        let outcome = self.take(&[]);
        (self.new, self.left.start, outcome)
    }
}
