//! The open packs of an image, each object verified before its bytes are used.

use std::ffi::OsStr;
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, OnceLock, Weak};
use std::{io, thread};

use ferry_vfs::{Backing, Extent, Piece};

use crate::format::composefs::path_of;
use crate::format::data::{Data, Run};
use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Error, IoContext, Result, error_chain};
use crate::format::image::Image;
use crate::format::index::Object;
use crate::format::plain_file;
use crate::read::missing_objects::MissingObjects;
use crate::read::object_files::Files;
use crate::read::pack::{Pack, Proof};
use crate::read::part_file;
use crate::read::partial::PartialPacks;
use crate::store::fetch::FetchOptions;
use crate::store::file_objects::FileObject;
use crate::store::object_error::ObjectError;
use crate::store::packs::Store;
use crate::store::parallel;
use crate::store::repair::repair_packs;

/// The maximum number of queued requests to verify ahead: more would be served too late.
const SOON_MAX: usize = 16;

/// All packs of an image, in its order.
#[derive(Debug)]
pub struct Objects {
    pub(crate) packs: Vec<Arc<Pack>>,
    /// composefs's objects.
    files: Option<Files>,
    /// Verifies what is read soon; started by the first sequential read.
    soon: OnceLock<SyncSender<(usize, usize)>>,
    /// What is fetched first: packs, and objects in them.
    pub(crate) first: OnceLock<Vec<(usize, Range<usize>)>>,
}

impl Objects {
    /// Opens the packs of an image, or its object store. Indexes are verified now, objects on use.
    ///
    /// # Errors
    ///
    /// One is missing, or is not what the image names.
    pub fn open(image: &Image, directory: &Path) -> Result<Self> {
        Self::open_with(image, directory, None)
    }

    /// As [`Self::open`]; with `missing`, packs may be missing or damaged: their indexes are fetched now, and their
    /// objects on use. Objects recorded as damaged are fetched now; those that cannot be fetched stay damaged.
    ///
    /// # Errors
    ///
    /// One is missing and cannot be fetched, or is not what the image names.
    pub fn open_with(image: &Image, directory: &Path, missing: Option<FetchOptions>) -> Result<Self> {
        // The others remain readable.
        if let Some(Err(error)) = missing.as_ref().map(|missing| repair_packs(image, directory, Some(&*missing.from))) {
            tracing::warn!("{}: damaged packs in the store are not repaired", error_chain(&error));
        }
        Self::open_repaired(image, directory, missing)
    }

    /// As [`Self::open_with`], for a caller that has just repaired the store ([`repair_packs`]).
    ///
    /// # Errors
    ///
    /// As [`Self::open_with`].
    pub fn open_repaired(image: &Image, directory: &Path, missing: Option<FetchOptions>) -> Result<Self> {
        if image.is_composefs() {
            let files = files(image, (directory, directory), missing)?;
            return Ok(Self { packs: Vec::new(), files: Some(files), soon: OnceLock::new(), first: OnceLock::new() });
        }
        let store = Store::open(directory)?;
        let common = missing.map(|missing| PartialPacks::new(directory, missing));
        let open = |(number, pack): (usize, &crate::format::data::PackRef)| {
            let index = match &common {
                Some(common) => match store.index_of_whole(pack.name) {
                    Some(index) => index,
                    None => match part_file::open(common, &store, number, pack)? {
                        Some(part) => return Ok(Arc::new(part)),
                        None => store.index(pack.name)?,
                    },
                },
                None => store.index(pack.name)?,
            };
            let path = store.pack_path(pack.name);
            let file = plain_file::open_to_read(&path).doing("open", &path)?;
            let length = file.metadata().doing("look at", &path)?.len();
            // An index may claim more blocks than can be counted in bytes.
            let claimed = index.blocks.saturating_mul(BLOCK_BYTES as u64);
            if length != claimed || index.blocks != pack.blocks {
                let reason = format!("has {length} bytes, not {}", pack.blocks * BLOCK_BYTES as u64);
                return Err(Error::Pack { store: directory.into(), pack: pack.name, reason });
            }
            let fd: OwnedFd = file.try_clone().doing("open", &path)?.into();
            Ok(Arc::new(Pack::new(file, fd, index, pack.ahead)))
        };
        let packs = image.packs().iter().enumerate().map(open).collect::<Result<Vec<_>>>()?;
        if image.expected_tree().is_some() {
            image.verify_tree_by(&packs.iter().map(|pack| &pack.index).collect::<Vec<_>>())?;
        }
        let objects = Self { packs, files: None, soon: OnceLock::new(), first: OnceLock::new() };
        objects.shrink();
        Ok(objects)
    }

    /// Verifies the digest of the tree in the image ([`Image::verify_tree`]).
    ///
    /// # Errors
    ///
    /// It differs.
    pub fn verify_tree(&self, image: &Image) -> Result<()> {
        image.verify_tree_by(&self.packs.iter().map(|pack| &pack.index).collect::<Vec<_>>())
    }

    /// Opens the object store of a composefs image, which this process sees at another path.
    ///
    /// # Errors
    ///
    /// It cannot be opened.
    pub(crate) fn open_at(image: &Image, directory: &Path, seen: &Path) -> Result<Self> {
        Ok(Self {
            packs: Vec::new(),
            files: Some(files(image, (directory, seen), None)?),
            soon: OnceLock::new(),
            first: OnceLock::new(),
        })
    }

    /// Returns composefs's objects, if some may be missing.
    pub(crate) fn absent_files(&self) -> Option<(&Files, &MissingObjects)> {
        let files = self.files.as_ref()?;
        Some((files, files.absent.as_ref()?))
    }

    /// Starts the threads that verify ahead, which end when this is dropped: for sequential readers, and for packs that
    /// are needed first. They do not fetch; [`Self::fetch_all`] does, within its limit. Not started by the first
    /// reader, because a thread started by an export's worker stays on its CPU.
    pub(crate) fn verify_ahead(&self) {
        if let Some(soon) = verifier(&self.packs) {
            let _ = self.soon.set(soon);
        }
        let is_wanted = |pack: &&Arc<Pack>| pack.ahead && pack.absent.is_none();
        let packs: Vec<Weak<Pack>> = self.packs.iter().filter(is_wanted).take(1).map(Arc::downgrade).collect();
        if packs.is_empty() {
            return;
        }
        let prove = move || {
            for pack in packs {
                for at in 0.. {
                    let Some(pack) = pack.upgrade().filter(|pack| at < pack.len()) else { break };
                    // Readers get the error.
                    let _ = pack.verify(at);
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("image-ahead".into()).spawn(prove) {
            tracing::warn!("the first pack is not read ahead: {error}");
        }
    }

    /// Returns what was counted since this was opened, see [`ferry_vfs::FileSystem::counts`].
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (verified, deduplicated) = match &self.files {
            Some(files) => {
                let deduplicated = files.absent.as_ref().map(|absent| value(&absent.deduplicated_bytes));
                (value(&files.verified_bytes), deduplicated)
            }
            None => {
                let absent = self.packs.iter().find_map(|pack| pack.absent.as_ref());
                let deduplicated = absent.map(|absent| value(&absent.common.deduplicated_bytes));
                (self.packs.iter().map(|pack| value(&pack.verified_bytes)).sum(), deduplicated)
            }
        };
        vec![
            ("image_fetched_bytes_total", self.fetched_bytes()),
            ("image_verified_bytes_total", verified),
            ("image_deduplicated_bytes_total", deduplicated.unwrap_or(0)),
        ]
    }

    /// Returns the objects that exactly cover this range of a pack.
    fn covering(&self, pack: usize, block: u64, bytes: u64) -> Result<Range<usize>, ObjectError> {
        let index = &self.packs[pack].index;
        let missing = ObjectError::NoObject { pack: index.pack, block, bytes };
        let from = index.objects.partition_point(|object| object.block < block);
        let end = block.checked_mul(BLOCK_BYTES as u64).and_then(|begin| begin.checked_add(bytes));
        let Some(end) =
            end.filter(|_| index.objects.get(from).is_some_and(|object| (object.block, object.skip) == (block, 0)))
        else {
            return Err(missing);
        };
        let to = index.objects.partition_point(|object| object.begin() < end).max(from);
        let is_whole = |last: &Object| last.end() == end;
        if to > from && is_whole(&index.objects[to - 1]) { Ok(from..to) } else { Err(missing) }
    }

    /// Verifies the objects in a range of a pack.
    fn verify_span(&self, number: usize, offset: u64, bytes: u64) -> Result<(), ObjectError> {
        let pack = &self.packs[number];
        let objects = touched(&pack.index.objects, offset, offset.saturating_add(bytes));
        if let Some(soon) = pack.verify_all(objects)?
            && let Some(verifier) = self.soon.get()
        {
            // If the queue is full, the reader verifies it.
            let _ = verifier.try_send((number, soon));
        }
        Ok(())
    }

    /// As [`Self::verify_span`], for a read: what the kernel verifies is not verified before. A mapping is verified by
    /// reading, so that damage is an error, and not a fault.
    fn verify_read(&self, number: usize, offset: u64, bytes: u64) -> Result<(), ObjectError> {
        if self.packs[number].is_sealed { Ok(()) } else { self.verify_span(number, offset, bytes) }
    }

    /// Reads verified bytes of a pack. Other objects may be evicted afterwards.
    fn read_span(&self, number: usize, offset: u64, out: &mut [u8]) -> Result<(), ObjectError> {
        let pack = &self.packs[number];
        let objects = touched(&pack.index.objects, offset, offset.saturating_add(out.len() as u64));
        let Some(first) = pack.index.objects.get(objects.start) else { return Ok(()) };
        let digest = first.digest;
        let limit = pack.absent.as_ref().and_then(|absent| absent.common.limit.as_ref());
        let held: Option<Vec<_>> = limit.map(|limit| objects.map(|at| limit.hold((number, at))).collect());
        let outcome = self.verify_read(number, offset, out.len() as u64).and_then(|()| {
            let unreadable = |reason| ObjectError::Unreadable { pack: pack.index.pack, digest, reason };
            pack.file.read_exact_at(out, offset).map_err(unreadable)
        });
        drop(held);
        self.shrink();
        outcome
    }

    /// Evicts objects beyond the limit.
    pub(crate) fn shrink(&self) {
        let Some(absent) = self.packs.iter().find_map(|pack| pack.absent.as_ref()) else { return };
        let Some(limit) = &absent.common.limit else { return };
        limit.shrink(|(number, at)| {
            if let Err(error) = self.packs[number].forget(at) {
                tracing::warn!("cannot drop an object from the store: {error}");
            }
        });
    }

    /// Verifies some of composefs's objects, with several threads.
    ///
    /// # Errors
    ///
    /// One is damaged, or cannot be fetched.
    pub fn verify_objects(&self, objects: &[FileObject]) -> Result<(), ObjectError> {
        parallel::each(objects.len(), |at| {
            let FileObject { digest, bytes } = objects[at];
            self.object(Some(&path_of(digest)), Some(digest), bytes).map(drop)
        })
    }

    /// Reads bytes at an offset of one of composefs's objects, once all of it is verified; none at its end.
    ///
    /// # Errors
    ///
    /// It is damaged, or cannot be fetched.
    pub fn read_object(&self, object: &FileObject, offset: u64, out: &mut [u8]) -> Result<usize, ObjectError> {
        let path = path_of(object.digest);
        let file = self.object(Some(&path), Some(object.digest), object.bytes)?;
        let wanted = usize::try_from(object.bytes.saturating_sub(offset)).unwrap_or(usize::MAX).min(out.len());
        let unreadable =
            |error: rustix::io::Errno| ObjectError::Object { path: object.digest.hex().into(), reason: error.into() };
        rustix::io::pread(&*file, &mut out[..wanted], offset).map_err(unreadable)
    }

    /// Verifies every object of every pack; for composefs's objects see [`Self::verify_objects`].
    ///
    /// # Errors
    ///
    /// The first damaged object.
    pub fn verify_all(&self) -> Result<(), ObjectError> {
        self.packs.iter().try_for_each(|pack| parallel::each(pack.len(), |at| pack.verify(at)))
    }

    /// Returns the packs that may have holes: their indexes in the image, and their files.
    pub fn incomplete(&self) -> impl Iterator<Item = (usize, &File)> {
        let packs = self.packs.iter().enumerate().filter(|(_, pack)| pack.absent.is_some());
        packs.map(|(number, pack)| (number, &pack.file))
    }

    /// Returns whether a block of an incomplete pack can have bytes of two objects, of which one may be missing: then a
    /// block that is not a hole is not proved.
    pub fn shares_blocks(&self) -> bool {
        let incomplete = self.packs.iter().filter(|pack| pack.absent.is_some());
        incomplete.flat_map(|pack| &pack.index.objects).any(|object| object.skip > 0)
    }

    /// Replaces the descriptor of a pack's file; returns the old one, which has the lock; `None` once packs are shared.
    pub fn replace_file(&mut self, number: usize, file: File) -> Option<File> {
        let pack = Arc::get_mut(self.packs.get_mut(number)?)?;
        // A process that fetches it may be requesting it from the one that replaces it.
        if let Some(absent) = &mut pack.absent {
            absent.alone = true;
        }
        Some(std::mem::replace(&mut pack.file, file))
    }

    /// Returns the range (offset and length in bytes) of all objects that overlap a range of a pack.
    pub fn whole_range(&self, number: usize, offset: u64, bytes: u64) -> (u64, u64) {
        let objects = &self.packs[number].index.objects;
        let touched = &objects[touched(objects, offset, offset.saturating_add(bytes))];
        let Some((first, last)) = touched.first().zip(touched.last()) else { return (offset, bytes) };
        let from = first.block * BLOCK_BYTES as u64;
        (from, (last.block + last.blocks()) * BLOCK_BYTES as u64 - from)
    }

    /// Verifies the available objects in a byte range of a pack; returns whether all are. Neither fetches nor waits.
    pub fn verify_here(&self, number: usize, offset: u64, bytes: u64) -> bool {
        let pack = &self.packs[number];
        touched(&pack.index.objects, offset, offset.saturating_add(bytes)).all(|at| pack.verify_here(at))
    }

    /// Verifies the objects in a byte range of a pack; fetches missing ones.
    ///
    /// # Errors
    ///
    /// One of them is damaged, or cannot be fetched.
    pub fn verify_range(&self, number: usize, offset: u64, bytes: u64) -> Result<(), ObjectError> {
        self.packs[number].check_permanent()?;
        self.verify_span(number, offset, bytes)
    }

    /// Returns the descriptor of a range of a pack, once its objects are verified.
    ///
    /// # Errors
    ///
    /// One of them is damaged.
    pub(crate) fn range(&self, number: usize, offset: u64, bytes: u64) -> Result<&Arc<Backing>, ObjectError> {
        let pack = &self.packs[number];
        pack.check_permanent()?;
        self.verify_read(number, offset, bytes)?;
        Ok(&pack.backing)
    }

    /// Verifies all bytes of a file; those in the image itself are already verified.
    ///
    /// # Errors
    ///
    /// They are not objects, or have another digest, or the image is damaged.
    pub fn verify_file(&self, data: Data<'_>, bytes: u64) -> Result<(), ObjectError> {
        if let Data::Object { path, digest } = data {
            return self.object(path, digest, bytes).map(drop);
        }
        for run in data.runs(bytes, 0..bytes) {
            let Run { pack, at, bytes } = run?;
            self.covering(pack, at / BLOCK_BYTES as u64, bytes)?;
            self.verify_span(pack, at, bytes)?;
        }
        Ok(())
    }

    /// Returns the verified location of a part of a file; `None` in the image itself, or if not contiguous and
    /// permanent.
    ///
    /// # Errors
    ///
    /// There is no such object, or it is damaged.
    pub(crate) fn extent(&self, data: Data<'_>, bytes: u64, part: Range<u64>) -> Result<Option<Extent>, ObjectError> {
        if let Data::Object { .. } = data {
            return Ok(Some(Extent { file: self.file(data, bytes)?, offset: part.start }));
        }
        let mut runs = data.runs(bytes, part);
        let (Some(first), None) = (runs.next(), runs.next()) else { return Ok(None) };
        let run = first?;
        let pack = &self.packs[run.pack];
        if pack.check_permanent().is_err() {
            return Ok(None);
        }
        self.check_ends(data, bytes)?;
        self.verify_read(run.pack, run.at, run.bytes)?;
        Ok(Some(Extent { file: Arc::clone(&pack.backing), offset: run.at }))
    }

    /// Returns the locations of a page-aligned part of a file, once verified; bytes without a permanent location are
    /// read. None for a file in the image itself.
    ///
    /// # Errors
    ///
    /// There is no such object, or it is damaged.
    pub(crate) fn places(&self, data: Data<'_>, bytes: u64, part: Range<u64>) -> Result<Vec<Piece>, ObjectError> {
        self.check_ends(data, bytes)?;
        let page = BLOCK_BYTES as u64;
        if let Data::Object { path, .. } = data {
            let file = self.file(data, bytes)?;
            let (whole, rest) = (part.end / page * page, part.end % page);
            let mut last = vec![0; usize::try_from(rest).unwrap_or_default()];
            // What follows the end is unknown.
            let unreadable =
                |reason| ObjectError::Object { path: OsStr::from_bytes(path.unwrap_or_default()).into(), reason };
            read_exact(&file, whole, &mut last).map_err(unreadable)?;
            let extent = Piece::Extent(Extent { file, offset: part.start }, whole - part.start);
            let pieces = [(whole > part.start).then_some(extent), (rest > 0).then_some(Piece::Bytes(last))];
            return Ok(pieces.into_iter().flatten().collect());
        }
        let place = |run: crate::format::error::ImageResult<Run>| {
            let run = run?;
            let pack = &self.packs[run.pack];
            if pack.check_permanent().is_err() {
                let mut read = vec![0; usize::try_from(run.bytes).unwrap_or_default()];
                return self.read_span(run.pack, run.at, &mut read).map(|()| Piece::Bytes(read));
            }
            // Verification of an object includes its zero padding.
            self.verify_span(run.pack, run.at, run.bytes)?;
            let extent = Extent { file: Arc::clone(&pack.backing), offset: run.at };
            Ok(Piece::Extent(extent, run.bytes.next_multiple_of(page)))
        };
        data.runs(bytes, part).map(place).collect()
    }

    /// Reads a part of a file outside of the image itself, once verified.
    ///
    /// # Errors
    ///
    /// There is no such object, or it is damaged.
    pub(crate) fn read(&self, data: Data<'_>, bytes: u64, offset: u64, mut out: &mut [u8]) -> Result<(), ObjectError> {
        self.check_ends(data, bytes)?;
        for run in data.runs(bytes, offset..offset + out.len() as u64) {
            let run = run?;
            let (now, later) = out.split_at_mut(usize::try_from(run.bytes).unwrap_or(usize::MAX).min(out.len()));
            self.read_span(run.pack, run.at, now)?;
            out = later;
        }
        Ok(())
    }

    /// Verifies that the image names whole objects, judged by the first and last one.
    fn check_ends(&self, data: Data<'_>, bytes: u64) -> Proof {
        match data {
            Data::Far { pack, block } => self.covering(pack, block, bytes).map(drop),
            _ => Ok(()),
        }
    }

    /// Returns the descriptor of a whole file, if there is one whose bytes are verified, or cheap to verify.
    pub(crate) fn whole_file(&self, data: Data<'_>, bytes: u64) -> Option<Arc<Backing>> {
        let Data::Object { path: Some(path), digest: Some(digest) } = data else { return None };
        self.files.as_ref()?.ready(path, digest, bytes)
    }

    /// As [`Self::whole_file`], at any cost.
    fn file(&self, data: Data<'_>, bytes: u64) -> Result<Arc<Backing>, ObjectError> {
        match data {
            Data::Object { path, digest } => match self.whole_file(data, bytes) {
                Some(file) => Ok(file),
                None => self.object(path, digest, bytes),
            },
            _ => Err(ObjectError::NoPath),
        }
    }

    /// Returns a file whose bytes this process has verified.
    fn object(&self, path: Option<&[u8]>, digest: Option<Digest>, bytes: u64) -> Result<Arc<Backing>, ObjectError> {
        self.files.as_ref().ok_or(ObjectError::NoPath)?.find(path, digest, bytes)
    }

    /// Reads all packs with an fs-verity digest, and verifies it. Packs that the kernel verifies are not read.
    ///
    /// # Errors
    ///
    /// One has another digest, or cannot be read.
    pub fn verify_packs(&self) -> Result<(), ObjectError> {
        for pack in &self.packs {
            let Some(wanted) = pack.index.verity.filter(|_| !pack.is_sealed && pack.absent.is_none()) else { continue };
            let bytes = pack.index.blocks * BLOCK_BYTES as u64;
            let unreadable = |reason| ObjectError::Unreadable { pack: pack.index.pack, digest: wanted, reason };
            let found = parallel::digest(&pack.file, 0, bytes).map_err(unreadable)?;
            if found != wanted {
                return Err(ObjectError::Sum { pack: pack.index.pack, wanted, found });
            }
        }
        Ok(())
    }

    /// Returns the number of packs that the kernel verifies.
    pub fn sealed(&self) -> usize {
        self.packs.iter().filter(|pack| pack.is_sealed).count()
    }
}

/// Opens the object store of a composefs image.
fn files(image: &Image, (directory, seen): (&Path, &Path), missing: Option<FetchOptions>) -> Result<Files> {
    if missing.as_ref().is_some_and(|missing| missing.cache_bytes.is_some()) {
        return Err(Error::NoLimit);
    }
    let damaged =
        |bad: ObjectError| Error::Fetch { what: "the objects of the image".into(), source: io::Error::other(bad) };
    let absent = missing.map(|missing| MissingObjects::new(image, directory, missing)).transpose().map_err(damaged)?;
    Files::open(directory, seen, absent)
}

/// Returns the objects that overlap a range of a pack.
pub(crate) fn touched(objects: &[Object], offset: u64, end: u64) -> Range<usize> {
    let (first, last) = (offset / BLOCK_BYTES as u64, end.div_ceil(BLOCK_BYTES as u64));
    let from = objects.partition_point(|object| object.block + object.blocks() <= first);
    from..objects.partition_point(|object| object.block < last).max(from)
}

/// Starts a thread that verifies ahead, until the sender is dropped.
fn verifier(packs: &[Arc<Pack>]) -> Option<SyncSender<(usize, usize)>> {
    // composefs has no packs, and a single CPU gains nothing.
    packs.first()?;
    thread::available_parallelism().ok().filter(|count| count.get() > 1)?;
    let packs: Vec<Weak<Pack>> = packs.iter().map(Arc::downgrade).collect();
    let (sender, receiver) = sync_channel::<(usize, usize)>(SOON_MAX);
    let prove = move || {
        for (number, soon) in receiver {
            if let Some(pack) = packs.get(number).and_then(Weak::upgrade) {
                pack.verify_soon(soon);
            }
        }
    };
    let begun = thread::Builder::new().name("image-verifier".into()).spawn(prove);
    begun.map(|_| sender).map_err(|error| tracing::warn!("objects are not verified ahead: {error}")).ok()
}

/// Reads verified bytes.
pub(crate) fn read_exact(file: &Backing, offset: u64, mut bytes: &mut [u8]) -> std::io::Result<()> {
    let mut at = offset;
    while !bytes.is_empty() {
        let count = rustix::io::pread(file, &mut *bytes, at)?;
        if count == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        at += count as u64;
        bytes = &mut bytes[count..];
    }
    Ok(())
}
