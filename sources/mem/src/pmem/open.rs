//! Opening and making images.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferry_vfs::{Backing, Errno, Ino};
use rustix::fs::FlockOperation;

use super::PMem;
use super::codec::Item;
use super::device::{Device, reserve};
use super::disk::{Disk, File as DataFile, Tier};
use super::error::{DamageError, OnDamage, OpenError};
use super::extents::Extents;
use super::format::{BLOCK, BLOCK_BYTES, FormatError, IMAGE_BYTES_MIN, Layout, Superblock, decode_tier2, encode_tier2};
use super::grace::Grace;
use super::load::{Files, LoadedImage, SuperblockCopies};
use super::log::{Log, random_u32, write_superblocks};
use super::mapped::{MapOptions, MappedMemory, size_of};
use super::medium::Medium;
use super::store::PStore;
use crate::machine::release_free_memory;
use crate::store::Record;
use crate::tree::{Limits, Replay, Tree};

/// The maximum time a change stays in memory without a sync: as ext4's `commit=`.
pub const COMMIT_INTERVAL: Duration = Duration::from_secs(5);

/// How many bytes at the start must be zero for a file or device to count as empty: no file system, partition table or
/// archive leaves as many blank.
const BLANK_BYTES: u64 = 1 << 20;
/// The minimum log space of an inode in bytes, which bounds the number of inodes.
const INODE_BYTES_MIN: u64 = 96;

/// The program's options for the sizes of new files.
const SIZE: &str = "--size";
const TIER2_SIZE: &str = "--tier2-size";

/// How long to wait for an image that is in use, and the time between two attempts. A server that ends writes everything that it
/// has, which takes as long as the disk does.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);

/// How to open an image.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The size of a new image in bytes; `None` if the image must exist, or the file already has its size.
    pub size_bytes: Option<u64>,
    /// File or device of the second tier.
    pub tier2: Option<PathBuf>,
    /// The size of a new second tier in bytes.
    pub tier2_bytes: Option<u64>,
    /// Change nothing.
    pub read_only: bool,
    /// Map an image on persistent memory with huge pages where available. On other media a warning is logged.
    pub huge: bool,
    /// The interval of commits; `None` for [`COMMIT_INTERVAL`], zero to commit only on request.
    pub commit: Option<Duration>,
}

/// The media of an image, for callers with their own [`Medium`].
#[derive(Clone, Debug)]
pub struct Media {
    /// The image.
    pub image: Arc<dyn Medium>,
    /// Its second tier.
    pub tier2: Option<Arc<dyn Medium>>,
}

/// Opened and locked files and devices of an image, before it is read.
#[derive(Debug)]
pub struct OpenedImage {
    path: PathBuf,
    media: Media,
    made: Vec<CreatedFile>,
}

/// A created file, and a descriptor that holds its lock.
pub type CreatedFile = (PathBuf, File);

/// Opens the image in a file or device. An empty one gets `size_bytes` and becomes an image.
///
/// # Errors
///
/// [`OpenError`]; nothing is changed then, except that a damaged copy of the superblock may have been rewritten.
pub fn open(path: &Path, options: &Options) -> Result<PMem, OpenError> {
    let mut opened = open_files(path, options)?;
    let made = opened.take_created();
    let mut new: Vec<_> = made.iter().map(|(path, _)| NewFile(Some(path))).collect();
    let tree = opened.load(options)?;
    new.iter_mut().for_each(NewFile::keep);
    Ok(tree)
}

/// Opens the files and devices of an image, for a process that cannot open them afterwards. A forked process may load
/// the image instead, if this one only drops what it has.
///
/// # Errors
///
/// [`OpenError`]: they cannot be opened, or are in use.
pub fn open_files(path: &Path, options: &Options) -> Result<OpenedImage, OpenError> {
    let (image, made_image) = open_image(path, options)?;
    let mut new = NewFile(made_image.as_ref().map(|_| path));
    let (tier2, made_tier2) = match &options.tier2 {
        Some(tier2) => {
            open_tier2(tier2, options).map(|(medium, made)| (Some(medium), made.map(|made| (tier2, made))))?
        }
        None => (None, None),
    };
    new.keep();
    let made_image = made_image.map(|made| (path.into(), made));
    let made = made_image.into_iter().chain(made_tier2.map(|(path, made)| (path.clone(), made))).collect();
    Ok(OpenedImage { path: path.into(), media: Media { image, tier2 }, made })
}

impl OpenedImage {
    /// Returns the created files, for a caller that removes them if a later step fails. While it holds their
    /// descriptors no other process can open them.
    pub fn take_created(&mut self) -> Vec<CreatedFile> {
        std::mem::take(&mut self.made)
    }

    /// Loads the image in them, with the same options.
    ///
    /// # Errors
    /// As for [`open`].
    pub fn load(self, options: &Options) -> Result<PMem, OpenError> {
        assemble(&self.path, &self.media, options, &mut Err)
    }
}

/// Opens the image on a medium; one that begins with zeros becomes an image.
///
/// # Errors
/// As for [`open`].
pub fn open_media(media: &Media, options: &Options) -> Result<PMem, OpenError> {
    assemble(Path::new("the image"), media, options, &mut Err)
}

fn io_error(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> OpenError {
    move |source| OpenError::Io { path: path.into(), what, source }
}

/// A locked file that was empty. It is removed when dropped, unless it is kept.
struct NewFile<'a>(Option<&'a Path>);

impl NewFile<'_> {
    fn keep(&mut self) {
        self.0 = None;
    }
}

impl Drop for NewFile<'_> {
    fn drop(&mut self) {
        if let Some(path) = self.0 {
            // No other process has it open.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The size of a new file, and the program's option for it.
type Size = (Option<u64>, &'static str);

/// Opens and locks a file, and sets its size if it has none. Also returns a second descriptor if the file was created.
fn open_locked(path: &Path, read_only: bool, (size_bytes, option): Size) -> Result<(File, Option<File>), OpenError> {
    let fail = |what| io_error(path, what);
    let creates = !read_only && size_bytes.is_some();
    let existed = path.exists();
    let mut how = OpenOptions::new();
    how.read(true).write(!read_only).create(creates).mode(0o600);
    let open = || {
        let file = how.open(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound if !creates && !read_only => OpenError::Missing { path: path.into(), option },
            _ => fail("open")(error),
        })?;
        lock(&file, path, read_only).map(|()| file)
    };
    let mut file = open()?;
    // The previous holder of the lock may have removed it.
    while !is_at(path, &file) {
        file = open()?;
    }
    let kind = file.metadata().map_err(fail("look at"))?.file_type();
    if !(kind.is_file() || kind.is_block_device() || kind.is_char_device()) {
        return Err(fail("use")(io::Error::other("the path is neither a file nor a device")));
    }
    let is_empty = size_of(&file).map_err(fail("measure"))? == 0;
    // Only now no other process can create the same image.
    let is_new = !existed && is_empty;
    let mut new = NewFile(is_new.then_some(path));
    if is_empty {
        let bytes = size_bytes.filter(|_| !read_only).ok_or_else(|| OpenError::NoSize { path: path.into(), option })?;
        if bytes < IMAGE_BYTES_MIN {
            return Err(OpenError::TooSmall { path: path.into(), bytes });
        }
        reserve(&file, bytes / BLOCK_BYTES * BLOCK_BYTES).map_err(fail("give its size to"))?;
        file.sync_all().map_err(fail("write"))?;
        tracing::info!("{} is new: all of its {bytes} bytes are allocated", path.display());
    }
    if !existed {
        // The name must survive, too.
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(parent).and_then(|parent| parent.sync_all()).map_err(fail("make the name durable of"))?;
    }
    let made = is_new.then(|| file.try_clone()).transpose().map_err(fail("open"))?;
    new.keep();
    Ok((file, made))
}

/// Returns whether a path leads to this file.
fn is_at(path: &Path, file: &File) -> bool {
    let identity = |found: Metadata| (found.dev(), found.ino());
    match (path.metadata(), file.metadata()) {
        (Ok(there), Ok(here)) => identity(there) == identity(here),
        (Err(error), _) => error.kind() != io::ErrorKind::NotFound,
        (Ok(_), Err(_)) => true,
    }
}

/// Locks a file, exclusively if it will be written.
fn lock(file: &File, path: &Path, read_only: bool) -> Result<(), OpenError> {
    let lock = if read_only { FlockOperation::NonBlockingLockShared } else { FlockOperation::NonBlockingLockExclusive };
    let begun = Instant::now();
    let mut outcome = rustix::fs::flock(file, lock);
    // A mount disappears before its server has released everything.
    while outcome == Err(Errno::WOULDBLOCK) && begun.elapsed() < PATIENCE {
        std::thread::sleep(PAUSE);
        outcome = rustix::fs::flock(file, lock);
    }
    match outcome {
        Ok(()) => Ok(()),
        Err(Errno::WOULDBLOCK) => Err(OpenError::Busy { path: path.into() }),
        Err(error) => Err(io_error(path, "lock")(error.into())),
    }
}

/// Opens the medium of an image: mapped memory if possible, otherwise a file or device. Also returns a second
/// descriptor if the file was created.
pub(super) fn open_image(path: &Path, options: &Options) -> Result<(Arc<dyn Medium>, Option<File>), OpenError> {
    let (file, made) = open_locked(path, options.read_only, (options.size_bytes, SIZE))?;
    let map = MapOptions { read_only: options.read_only, huge: options.huge };
    match MappedMemory::new(&file, map).map_err(io_error(path, "map"))? {
        Some(mapped) => {
            tracing::debug!(path = %path.display(), dax = true, "image opened");
            Ok((Arc::new(mapped), made))
        }
        None => {
            if options.huge {
                tracing::warn!(
                    "huge pages are for persistent memory (DAX), and {} is none: it is used without them",
                    path.display()
                );
            }
            Ok((Arc::new(Device::new(file).map_err(io_error(path, "open"))?), made))
        }
    }
}

/// As [`open_image`], for a second tier.
pub(super) fn open_tier2(path: &Path, options: &Options) -> Result<(Arc<dyn Medium>, Option<File>), OpenError> {
    let (file, made) = open_locked(path, options.read_only, (options.tier2_bytes, TIER2_SIZE))?;
    if file.metadata().is_ok_and(|meta| meta.file_type().is_char_device()) {
        let reason = "a second tier is a file or block device; a DAX device can only hold the image";
        return Err(io_error(path, "use")(io::Error::other(reason)));
    }
    Ok((Arc::new(Device::new(file).map_err(io_error(path, "open"))?), made))
}

/// Assembles a mounted image from its media.
pub(super) fn assemble(
    path: &Path,
    media: &Media,
    options: &Options,
    on_damage: &mut OnDamage<'_>,
) -> Result<PMem, OpenError> {
    let superblock = match superblock(path, &*media.image)? {
        Some(superblock) => superblock,
        None if options.read_only => return Err(OpenError::NoSize { path: path.into(), option: SIZE }),
        None => format(path, media, options)?,
    };
    let Superblock { image_bytes: expected, .. } = superblock;
    let found = media.image.bytes();
    if found < expected {
        return Err(OpenError::Shrunk { path: path.into(), found, expected });
    }
    check_tier2(path, media, options, &superblock)?;
    let damaged = |source| OpenError::Damaged { path: path.into(), source };
    let tree = load(media, options, &superblock, on_damage).map_err(damaged)?;
    if !options.read_only {
        renew_superblocks(&*media.image, &superblock).map_err(io_error(path, "write"))?;
        restart(path, &tree)?;
    }
    release_free_memory();
    Ok(tree)
}

/// Reads the log, and creates its tree and files.
fn load(
    media: &Media,
    options: &Options,
    superblock: &Superblock,
    on_damage: &mut OnDamage<'_>,
) -> Result<PMem, DamageError> {
    let (found, in_use) = LoadedImage::find(&*media.image, superblock, on_damage)?;
    let log = Log::new(Arc::clone(&media.image), in_use, found.len(), found.bytes);
    let disk = Arc::new(empty_disk(media, options, superblock, log));
    let commit = options.commit.unwrap_or(COMMIT_INTERVAL);
    let keeps = !options.read_only && !commit.is_zero();
    let store = PStore::new(Arc::clone(&disk), keeps.then_some(commit));
    let inodes_max = superblock.layout.log_bytes() / INODE_BYTES_MIN;
    // The size of the log bounds them all.
    let limits = Limits { inodes_max, metadata_bytes_max: u64::MAX, read_only: options.read_only };
    let mut replay = Replay::new(store, limits);
    let mut files = Files::default();
    found.for_each(on_damage, |on_damage, index, item| match item {
        Item::Map(map) if !replay.is_file(map.ino) => on_damage(DamageError::NoFile { ino: map.ino.0 }),
        Item::Map(map) => files.apply(index, map).or_else(on_damage),
        Item::Tree(record) => match replay.apply(record) {
            Err(reason) => on_damage(DamageError::Replay { index, reason }),
            Ok(()) => {
                if let Record::Free { ino } = record {
                    files.remove(*ino);
                }
                Ok(())
            }
        },
    })?;
    for (ino, (size, extents)) in files {
        let extents = take_blocks(&disk, ino, extents, on_damage)?;
        disk.insert(DataFile::new(ino, size, extents));
    }
    replay.finish().map_err(|reason| DamageError::Replay { index: found.len(), reason })
}

/// Returns the disk of an image with all blocks free.
fn empty_disk(media: &Media, options: &Options, superblock: &Superblock, log: Log) -> Disk {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let tier1 = Tier::first(Arc::clone(&media.image), superblock.layout, cpus);
    let tier2 = media.tier2.as_ref().map(|tier2| Tier::second(Arc::clone(tier2), superblock.tier2_blocks));
    let backing = |medium: &Arc<dyn Medium>| medium.descriptor().map(Backing::new);
    let grace = Grace::new([backing(&media.image), media.tier2.as_ref().and_then(backing)]);
    Disk::new(tier1, tier2, log, grace, options.read_only)
}

/// Takes the blocks of a file; returns those that exist and belong to no other file.
fn take_blocks(disk: &Disk, ino: Ino, extents: Extents, on_damage: &mut OnDamage<'_>) -> Result<Extents, DamageError> {
    let mut owned = Extents::default();
    for piece in extents.all() {
        if disk.tier(piece.block).is_ok_and(|(tier, _)| tier.blocks.take_exactly(piece.run())) {
            owned.insert(piece);
        } else {
            on_damage(DamageError::Blocks { ino: ino.0, block: piece.block, count: piece.count })?;
        }
    }
    Ok(owned)
}

/// Writes both copies of the superblock. A stale copy refers to the log area that the next snapshot overwrites, so it
/// must not become active when the other copy is damaged.
fn renew_superblocks(image: &dyn Medium, superblock: &Superblock) -> io::Result<()> {
    for (copy, at) in SuperblockCopies::read(image).0.iter().zip([0, BLOCK_BYTES]) {
        if copy.as_ref() != Ok(superblock) {
            image.write(at, &superblock.encode())?;
        }
    }
    // Syncs the good copy, too: after a crash of the program it may only be in the page cache.
    image.persist(std::slice::from_ref(&(0..2 * BLOCK_BYTES)))
}

/// Each mount begins a new log, because stale data may follow the last valid record.
fn restart(path: &Path, tree: &Tree<PStore>) -> Result<(), OpenError> {
    let done = tree.checkpoint(|snapshot| tree.store().compact(snapshot));
    done.map_err(|error| io_error(path, "write a snapshot to")(error.into()))
}

/// Returns the active superblock; `None` if the medium is blank.
fn superblock(path: &Path, image: &dyn Medium) -> Result<Option<Superblock>, OpenError> {
    let path = || path.to_path_buf();
    let copies = SuperblockCopies::read(image);
    if let Some(best) = copies.best() {
        for (index, copy) in copies.0.iter().enumerate() {
            if let Err(error) = copy {
                tracing::warn!(path = %path().display(), "superblock {index} is damaged ({error}); the other one is used");
            }
        }
        return Ok(Some(*best));
    }
    match copies.0 {
        [Err(FormatError::Magic), Err(FormatError::Magic)] if is_blank(image) => Ok(None),
        [Err(reason @ (FormatError::Magic | FormatError::Version(_))), Err(FormatError::Magic)]
        | [_, Err(reason @ FormatError::Version(_))]
        | [Err(reason @ FormatError::Version(_)), _] => Err(OpenError::Foreign { path: path(), reason }),
        _ if image.bytes() < IMAGE_BYTES_MIN => Err(OpenError::TooSmall { path: path(), bytes: image.bytes() }),
        [Err(first), Err(second)] => Err(OpenError::Superblocks { path: path(), first, second }),
        _ => unreachable!("a good copy would have been the best"),
    }
}

fn is_blank(image: &dyn Medium) -> bool {
    let bytes = usize::try_from(image.bytes().min(BLANK_BYTES)).unwrap_or(0);
    let mut blank = false;
    let looked = image.look(0, bytes, &mut |seen| blank = seen.iter().all(|byte| *byte == 0));
    looked.is_ok() && blank
}

fn format(path: &Path, media: &Media, options: &Options) -> Result<Superblock, OpenError> {
    let bytes = media.image.bytes() / BLOCK_BYTES * BLOCK_BYTES;
    let layout = Layout::for_bytes(bytes).ok_or_else(|| OpenError::TooSmall { path: path.into(), bytes })?;
    let mut uuid = [0; 16];
    uuid.chunks_mut(4).for_each(|part| part.copy_from_slice(&random_u32().to_le_bytes()));
    // Version 4 (random), variant 1: RFC 9562, section 5.4.
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    let mut tier2_blocks = 0;
    if let Some(tier2) = &media.tier2 {
        let name = options.tier2.as_deref().unwrap_or(path);
        let (wrong, bytes) =
            (|reason: &str| OpenError::Tier2 { path: name.into(), reason: reason.into() }, tier2.bytes());
        if !is_blank(&**tier2) {
            return Err(wrong("it is not empty, but the image is new; empty it first (truncate -s 0)"));
        }
        tier2_blocks = (bytes / BLOCK_BYTES).saturating_sub(1);
        if tier2_blocks == 0 {
            return Err(wrong("it is too small for a second tier"));
        }
        let header = encode_tier2(uuid, tier2_blocks);
        tier2.write(0, &header).map_err(io_error(name, "write"))?;
        tier2.persist(std::slice::from_ref(&(0..BLOCK_BYTES))).map_err(io_error(name, "write"))?;
    }
    let superblock = Superblock {
        salt: random_u32(),
        uuid,
        generation: 1,
        image_bytes: bytes,
        layout,
        snapshot_records: 0,
        tier2_blocks,
        previous_records: 0,
        previous_salt: 0,
    };
    write_superblocks(&*media.image, &superblock).map_err(io_error(path, "write"))?;
    Ok(superblock)
}

fn check_tier2(path: &Path, media: &Media, options: &Options, superblock: &Superblock) -> Result<(), OpenError> {
    let name = options.tier2.as_deref().unwrap_or(path);
    let wrong = |reason: String| Err(OpenError::Tier2 { path: name.into(), reason });
    match (&media.tier2, superblock.tier2_blocks) {
        (None, 0) => Ok(()),
        (None, _) => wrong("part of its data is in a second tier; say where (tier2=FILE)".into()),
        (Some(_), 0) => wrong("the image was made without a second tier; leave tier2 out".into()),
        (Some(tier2), blocks) => {
            let mut block = [0; BLOCK];
            tier2.read(0, &mut block).map_err(io_error(name, "read"))?;
            match decode_tier2(&block) {
                Err(error) => wrong(format!("it is not a second tier: {error}")),
                Ok((uuid, _)) if uuid != superblock.uuid => wrong("it belongs to another image".into()),
                Ok((_, found)) if found != blocks || tier2.bytes() / BLOCK_BYTES <= blocks => {
                    wrong(format!("it has {} bytes and should have {} blocks and a header", tier2.bytes(), blocks))
                }
                Ok(_) => Ok(()),
            }
        }
    }
}
