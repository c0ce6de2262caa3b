//! The packs of one image, open, each object proved before its bytes are seen.

use std::ffi::OsStr;
use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, OnceLock, Weak};
use std::{io, thread};

use ferry_vfs::{Backing, Extent, Piece};

use crate::format::composefs::path_of;
use crate::format::data::{Data, Run};
use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{Error, IoContext, Result, told};
use crate::format::image::Image;
use crate::format::index::Object;
use crate::read::missing_objects::MissingObjects;
use crate::read::object_files::Files;
use crate::read::pack::{Pack, Proof};
use crate::read::part_file;
use crate::read::partial::PartialPacks;
use crate::store::fetch::Missing;
use crate::store::file_objects::FileObject;
use crate::store::object_error::ObjectError;
use crate::store::packs::Store;
use crate::store::parallel;
use crate::store::repair::repair_packs;

/// How many requests to prove something ahead may wait: more come too late to be of use.
const SOON_MAX: usize = 16;

/// All packs that an image names, in its order.
#[derive(Debug)]
pub struct Objects {
    pub(crate) packs: Vec<Arc<Pack>>,
    /// composefs's objects.
    files: Option<Files>,
    /// Proves what is wanted soon, once something was read in order.
    soon: OnceLock<SyncSender<(usize, usize)>>,
}

impl Objects {
    /// Opens the packs of an image, or its object store. Their indexes are proved, their objects later.
    ///
    /// # Errors
    /// One is missing, or is not what the image names.
    pub fn open(image: &Image, folder: &Path) -> Result<Self> {
        Self::open_with(image, folder, None)
    }

    /// The same; with `missing`, packs that are not here, or of no use, need not be: their indexes are fetched now, their objects when they
    /// are wanted. What is noted as damaged is fetched now; what of that cannot be had stays damaged.
    ///
    /// # Errors
    /// One is missing and cannot be had, or is not what the image names.
    pub fn open_with(image: &Image, folder: &Path, missing: Option<Missing>) -> Result<Self> {
        // Others can be read all the same.
        if let Some(Err(error)) = missing.as_ref().map(|missing| repair_packs(image, folder, Some(&*missing.from))) {
            tracing::warn!("{}: damaged packs in the store are not repaired", told(&error));
        }
        Self::open_repaired(image, folder, missing)
    }

    /// The same for who has just repaired the store ([`repair_packs`]).
    ///
    /// # Errors
    /// One is missing and cannot be had, or is not what the image names.
    pub fn open_repaired(image: &Image, folder: &Path, missing: Option<Missing>) -> Result<Self> {
        if image.is_composefs() {
            let files = files(image, (folder, folder), missing)?;
            return Ok(Self { packs: Vec::new(), files: Some(files), soon: OnceLock::new() });
        }
        let store = Store::open(folder)?;
        let common = missing.map(|missing| PartialPacks::new(folder, missing));
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
            let file = File::open(&path).doing("open", &path)?;
            let length = file.metadata().doing("look at", &path)?.len();
            // An index may claim more blocks than there are bytes to count.
            let claimed = index.blocks.saturating_mul(BLOCK_BYTES as u64);
            if length != claimed || index.blocks != pack.blocks {
                let reason = format!("has {length} bytes, not {}", pack.blocks * BLOCK_BYTES as u64);
                return Err(Error::Pack { store: folder.into(), pack: pack.name, reason });
            }
            let fd: OwnedFd = file.try_clone().doing("open", &path)?.into();
            Ok(Arc::new(Pack::new(file, fd, index, pack.ahead)))
        };
        let packs = image.packs().iter().enumerate().map(open).collect::<Result<Vec<_>>>()?;
        if image.expected_tree().is_some() {
            image.prove_tree_by(&packs.iter().map(|pack| &pack.index).collect::<Vec<_>>())?;
        }
        let objects = Self { packs, files: None, soon: OnceLock::new() };
        objects.shrink();
        Ok(objects)
    }

    /// Proves the digest of the tree that the image says it has ([`Image::prove_tree`]).
    ///
    /// # Errors
    /// It has another one.
    pub fn prove_tree(&self, image: &Image) -> Result<()> {
        image.prove_tree_by(&self.packs.iter().map(|pack| &pack.index).collect::<Vec<_>>())
    }

    /// The object store of a composefs image, which is seen at another place from here.
    ///
    /// # Errors
    /// It cannot be opened.
    pub(crate) fn seen_at(image: &Image, folder: &Path, seen: &Path) -> Result<Self> {
        Ok(Self { packs: Vec::new(), files: Some(files(image, (folder, seen), None)?), soon: OnceLock::new() })
    }

    /// composefs's objects, if not all need be here.
    pub(crate) fn absent_files(&self) -> Option<(&Files, &MissingObjects)> {
        let files = self.files.as_ref()?;
        Some((files, files.absent.as_ref()?))
    }

    /// Begins the threads that prove what nobody waits for yet, until this is dropped: what readers in order want soon, and the packs
    /// that are wanted soon as a whole. What is not here is left to [`Self::fetch_all`], which knows how much may be asked for.
    /// Not begun by the first reader: what an export's worker begins stays on its CPU.
    pub(crate) fn prove_ahead(&self) {
        if let Some(soon) = prover(&self.packs) {
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
                    // Who reads a damaged one is told.
                    let _ = pack.prove(at);
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("image-ahead".into()).spawn(prove) {
            tracing::warn!("what is needed first is not read ahead: {error}");
        }
    }

    /// The objects that make up so many bytes from a block of a pack on: whole ones, without anything else.
    fn whole(&self, pack: usize, block: u64, bytes: u64) -> Result<Range<usize>, ObjectError> {
        let index = &self.packs[pack].index;
        let missing = ObjectError::NoObject { pack: index.pack, block, bytes };
        let from = index.objects.partition_point(|object| object.block < block);
        let end = block.checked_mul(BLOCK_BYTES as u64).and_then(|begin| begin.checked_add(bytes));
        let Some(end) = end.filter(|_| index.objects.get(from).is_some_and(|object| object.block == block)) else {
            return Err(missing);
        };
        let to = index.objects.partition_point(|object| object.block * (BLOCK_BYTES as u64) < end).max(from);
        let is_whole = |last: &Object| last.block * BLOCK_BYTES as u64 + last.bytes == end;
        if to > from && is_whole(&index.objects[to - 1]) { Ok(from..to) } else { Err(missing) }
    }

    /// Proves what objects have of a range of a pack.
    fn prove_span(&self, number: usize, offset: u64, bytes: u64) -> Result<(), ObjectError> {
        let pack = &self.packs[number];
        let objects = touched(&pack.index.objects, offset, offset.saturating_add(bytes));
        if let Some(soon) = pack.prove_all(objects)?
            && let Some(prover) = self.soon.get()
        {
            // Where too many wait, whoever wants it proves it.
            let _ = prover.try_send((number, soon));
        }
        Ok(())
    }

    /// The same for who reads: what the kernel proves is not proved before. Who maps it has it read by us, so that damage is an error
    /// there, and not a fault.
    fn prove_read(&self, number: usize, offset: u64, bytes: u64) -> Result<(), ObjectError> {
        if self.packs[number].is_sealed { Ok(()) } else { self.prove_span(number, offset, bytes) }
    }

    /// Reads bytes of a pack, once they are proved. Afterwards others may be dropped.
    fn read_span(&self, number: usize, offset: u64, out: &mut [u8]) -> Result<(), ObjectError> {
        let pack = &self.packs[number];
        let objects = touched(&pack.index.objects, offset, offset.saturating_add(out.len() as u64));
        let Some(first) = pack.index.objects.get(objects.start) else { return Ok(()) };
        let digest = first.digest;
        let limit = pack.absent.as_ref().and_then(|absent| absent.common.limit.as_ref());
        let held: Option<Vec<_>> = limit.map(|limit| objects.map(|at| limit.hold((number, at))).collect());
        let outcome = self.prove_read(number, offset, out.len() as u64).and_then(|()| {
            let unreadable = |source| ObjectError::Unreadable { pack: pack.index.pack, digest, source };
            pack.file.read_exact_at(out, offset).map_err(unreadable)
        });
        drop(held);
        self.shrink();
        outcome
    }

    /// Drops what is more than may be kept.
    pub(crate) fn shrink(&self) {
        let Some(absent) = self.packs.iter().find_map(|pack| pack.absent.as_ref()) else { return };
        let Some(limit) = &absent.common.limit else { return };
        limit.shrink(|(number, at)| {
            if let Err(error) = self.packs[number].forget(at) {
                tracing::warn!("cannot drop an object from the store: {error}");
            }
        });
    }

    /// Proves some of composefs's objects, by several threads.
    ///
    /// # Errors
    /// One is damaged, or cannot be had.
    pub fn prove_objects(&self, objects: &[FileObject]) -> Result<(), ObjectError> {
        parallel::each(objects.len(), |at| {
            let FileObject { digest, bytes } = objects[at];
            self.object(Some(&path_of(digest)), Some(digest), bytes).map(drop)
        })
    }

    /// Reads bytes of one of composefs's objects, from a place on, once all of it is proved; none at its end.
    ///
    /// # Errors
    /// It is damaged, or cannot be had.
    pub fn read_object(&self, object: &FileObject, offset: u64, out: &mut [u8]) -> Result<usize, ObjectError> {
        let path = path_of(object.digest);
        let file = self.object(Some(&path), Some(object.digest), object.bytes)?;
        let wanted = usize::try_from(object.bytes.saturating_sub(offset)).unwrap_or(usize::MAX).min(out.len());
        let unreadable =
            |error: rustix::io::Errno| ObjectError::Object { path: object.digest.hex().into(), source: error.into() };
        rustix::io::pread(&*file, &mut out[..wanted], offset).map_err(unreadable)
    }

    /// Proves every object of every pack; of composefs's objects see [`Self::prove_objects`].
    ///
    /// # Errors
    /// The first that is damaged.
    pub fn prove_all(&self) -> Result<(), ObjectError> {
        self.packs.iter().try_for_each(|pack| parallel::each(pack.len(), |at| pack.prove(at)))
    }

    /// The packs that may have holes: their places among the image's, and the files with what is here of them.
    pub fn incomplete(&self) -> impl Iterator<Item = (usize, &File)> {
        let packs = self.packs.iter().enumerate().filter(|(_, pack)| pack.absent.is_some());
        packs.map(|(number, pack)| (number, &pack.file))
    }

    /// Has a pack read and written by another descriptor of its file from now on; returns the old one, which keeps the file's lock.
    /// `None` once these are shared.
    pub fn replace_file(&mut self, number: usize, file: File) -> Option<File> {
        let pack = Arc::get_mut(self.packs.get_mut(number)?)?;
        // Who fetches it elsewhere may be asking the one who replaces it.
        if let Some(absent) = &mut pack.absent {
            absent.alone = true;
        }
        Some(std::mem::replace(&mut pack.file, file))
    }

    /// The range (offset and length in bytes) of all objects that have something of a range of a pack.
    pub fn whole_range(&self, number: usize, offset: u64, bytes: u64) -> (u64, u64) {
        let objects = &self.packs[number].index.objects;
        let touched = &objects[touched(objects, offset, offset.saturating_add(bytes))];
        let Some((first, last)) = touched.first().zip(touched.last()) else { return (offset, bytes) };
        let from = first.block * BLOCK_BYTES as u64;
        (from, (last.block + last.blocks()) * BLOCK_BYTES as u64 - from)
    }

    /// Proves what objects have of a range of a pack, in bytes, as far as that is here; returns whether all of it is. Asks no server,
    /// and waits for nobody who does.
    pub fn prove_here(&self, number: usize, offset: u64, bytes: u64) -> bool {
        let pack = &self.packs[number];
        touched(&pack.index.objects, offset, offset.saturating_add(bytes)).all(|at| pack.prove_here(at))
    }

    /// Proves what objects have of a range of a pack, in bytes; gets what is not here.
    ///
    /// # Errors
    /// One of them is damaged, or cannot be had.
    pub fn prove_range(&self, number: usize, offset: u64, bytes: u64) -> Result<(), ObjectError> {
        self.packs[number].long_lived()?;
        self.prove_span(number, offset, bytes)
    }

    /// The descriptor that a range of a pack is in, once what objects have of it is proved.
    ///
    /// # Errors
    /// One of them is damaged.
    pub(crate) fn range(&self, number: usize, offset: u64, bytes: u64) -> Result<&Arc<Backing>, ObjectError> {
        let pack = &self.packs[number];
        pack.long_lived()?;
        self.prove_read(number, offset, bytes)?;
        Ok(&pack.backing)
    }

    /// Proves all bytes of a file. Of those in the image itself nothing is left to prove.
    ///
    /// # Errors
    /// They are no objects, or not the ones that the file was made of, or the image is damaged.
    pub fn prove_file(&self, data: Data<'_>, bytes: u64) -> Result<(), ObjectError> {
        if let Data::Object { path, digest } = data {
            return self.object(path, digest, bytes).map(drop);
        }
        for run in data.runs(bytes, 0..bytes) {
            let Run { pack, at, bytes } = run?;
            self.whole(pack, at / BLOCK_BYTES as u64, bytes)?;
            self.prove_span(pack, at, bytes)?;
        }
        Ok(())
    }

    /// Where a part of a file's bytes is, once it is proved; `None` if it is in the image itself, or not in one place that lasts.
    ///
    /// # Errors
    /// There is no such object, or its bytes are not the ones it was made of.
    pub(crate) fn extent(&self, data: Data<'_>, bytes: u64, part: Range<u64>) -> Result<Option<Extent>, ObjectError> {
        if let Data::Object { .. } = data {
            return Ok(Some(Extent { file: self.file(data, bytes)?, offset: part.start }));
        }
        let mut runs = data.runs(bytes, part);
        let (Some(first), None) = (runs.next(), runs.next()) else { return Ok(None) };
        let run = first?;
        let pack = &self.packs[run.pack];
        if pack.long_lived().is_err() {
            return Ok(None);
        }
        self.check_ends(data, bytes)?;
        self.prove_read(run.pack, run.at, run.bytes)?;
        Ok(Some(Extent { file: Arc::clone(&pack.backing), offset: run.at }))
    }

    /// The places of a part of a file that begins with a page, once they are proved; what has none that lasts is read. Of a file in the
    /// image itself there are none.
    ///
    /// # Errors
    /// There is no such object, or its bytes are not the ones it was made of.
    pub(crate) fn places(&self, data: Data<'_>, bytes: u64, part: Range<u64>) -> Result<Vec<Piece>, ObjectError> {
        self.check_ends(data, bytes)?;
        let page = BLOCK_BYTES as u64;
        if let Data::Object { path, .. } = data {
            let file = self.file(data, bytes)?;
            let (whole, rest) = (part.end / page * page, part.end % page);
            let mut last = vec![0; usize::try_from(rest).unwrap_or_default()];
            // Of what is behind its end nothing is known.
            let unreadable =
                |source| ObjectError::Object { path: OsStr::from_bytes(path.unwrap_or_default()).into(), source };
            read_exact(&file, whole, &mut last).map_err(unreadable)?;
            let extent = Piece::Extent(Extent { file, offset: part.start }, whole - part.start);
            let pieces = [(whole > part.start).then_some(extent), (rest > 0).then_some(Piece::Bytes(last))];
            return Ok(pieces.into_iter().flatten().collect());
        }
        let place = |run: crate::format::error::Checked<Run>| {
            let run = run?;
            let pack = &self.packs[run.pack];
            if pack.long_lived().is_err() {
                let mut read = vec![0; usize::try_from(run.bytes).unwrap_or_default()];
                return self.read_span(run.pack, run.at, &mut read).map(|()| Piece::Bytes(read));
            }
            // Who proves an object looks for zeros behind it, up to the end of its last block.
            self.prove_span(run.pack, run.at, run.bytes)?;
            let extent = Extent { file: Arc::clone(&pack.backing), offset: run.at };
            Ok(Piece::Extent(extent, run.bytes.next_multiple_of(page)))
        };
        data.runs(bytes, part).map(place).collect()
    }

    /// Reads a part of a file's bytes, once they are proved, which are not in the image itself.
    ///
    /// # Errors
    /// There is no such object, or its bytes are not the ones it was made of.
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

    /// That the image names whole objects, as far as that is told by one look.
    fn check_ends(&self, data: Data<'_>, bytes: u64) -> Proof {
        match data {
            Data::Far { pack, block } => self.whole(pack, block, bytes).map(drop),
            _ => Ok(()),
        }
    }

    /// The descriptor that is a file as a whole, if there is one whose bytes are proved, or cost little to prove.
    pub(crate) fn whole_file(&self, data: Data<'_>, bytes: u64) -> Option<Arc<Backing>> {
        let Data::Object { path: Some(path), digest: Some(digest) } = data else { return None };
        self.files.as_ref()?.ready(path, digest, bytes)
    }

    /// The same, whatever it costs.
    fn file(&self, data: Data<'_>, bytes: u64) -> Result<Arc<Backing>, ObjectError> {
        match data {
            Data::Object { path, digest } => match self.whole_file(data, bytes) {
                Some(file) => Ok(file),
                None => self.object(path, digest, bytes),
            },
            _ => Err(ObjectError::NoPath),
        }
    }

    /// A file whose bytes we have proved ourselves.
    fn object(&self, path: Option<&[u8]>, digest: Option<Digest>, bytes: u64) -> Result<Arc<Backing>, ObjectError> {
        self.files.as_ref().ok_or(ObjectError::NoPath)?.find(path, digest, bytes)
    }

    /// Reads all packs that have a digest for fs-verity, and looks whether it is theirs. What the kernel proves by it is not read.
    ///
    /// # Errors
    /// One has another digest, or cannot be read.
    pub fn prove_packs(&self) -> Result<(), ObjectError> {
        for pack in &self.packs {
            let Some(wanted) = pack.index.verity.filter(|_| !pack.is_sealed && pack.absent.is_none()) else { continue };
            let bytes = pack.index.blocks * BLOCK_BYTES as u64;
            let unreadable = |source| ObjectError::Unreadable { pack: pack.index.pack, digest: wanted, source };
            let found = parallel::digest(&pack.file, 0, bytes).map_err(unreadable)?;
            if found != wanted {
                return Err(ObjectError::Sum { pack: pack.index.pack, wanted, found });
            }
        }
        Ok(())
    }

    /// How many packs there are of which the kernel proves what is read.
    pub fn sealed(&self) -> usize {
        self.packs.iter().filter(|pack| pack.is_sealed).count()
    }
}

/// The object store of a composefs image, and where it is seen.
fn files(image: &Image, (folder, seen): (&Path, &Path), missing: Option<Missing>) -> Result<Files> {
    if missing.as_ref().is_some_and(|missing| missing.cache_bytes.is_some()) {
        return Err(Error::NoLimit);
    }
    let damaged =
        |bad: ObjectError| Error::Fetch { what: "the objects of the image".into(), source: io::Error::other(bad) };
    let absent = missing.map(|missing| MissingObjects::new(image, folder, missing)).transpose().map_err(damaged)?;
    Files::open(folder, seen, absent)
}

/// The objects that have something of a range of a pack.
fn touched(objects: &[Object], offset: u64, end: u64) -> Range<usize> {
    let (first, last) = (offset / BLOCK_BYTES as u64, end.div_ceil(BLOCK_BYTES as u64));
    let from = objects.partition_point(|object| object.block + object.blocks() <= first);
    from..objects.partition_point(|object| object.block < last).max(from)
}

/// Begins a thread that proves what is wanted soon, as long as somebody may ask it to.
fn prover(packs: &[Arc<Pack>]) -> Option<SyncSender<(usize, usize)>> {
    // composefs has none, and one processor has nothing to do it with.
    packs.first()?;
    thread::available_parallelism().ok().filter(|count| count.get() > 1)?;
    let packs: Vec<Weak<Pack>> = packs.iter().map(Arc::downgrade).collect();
    let (sender, receiver) = sync_channel::<(usize, usize)>(SOON_MAX);
    let prove = move || {
        for (number, soon) in receiver {
            if let Some(pack) = packs.get(number).and_then(Weak::upgrade) {
                pack.prove_soon(soon);
            }
        }
    };
    let begun = thread::Builder::new().name("image-prover".into()).spawn(prove);
    begun.map(|_| sender).map_err(|error| tracing::warn!("nothing is proved before it is read: {error}")).ok()
}

/// Reads bytes that were proved.
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
