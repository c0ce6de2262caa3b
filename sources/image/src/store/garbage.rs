//! Garbage collection of a store.

use std::collections::{BTreeSet, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, ResolveFlags, openat, openat2, statat};
use rustix::io::Errno;

use crate::format::digest::Digest;
use crate::format::error::{Error, ImageResult, IoContext, Result, error_chain};
use crate::format::image::Image;
use crate::format::index::pack_name;
use crate::format::plain_file;
use crate::store::layout::{self, DAMAGED_SUFFIX, INDEX_SUFFIX, PART_SUFFIX};
use crate::store::new_file::NEW_PREFIX;
use crate::store::object_list::{self, StoredFile};
use crate::store::packs;
use crate::store::usage::{ObjectLocation, object_locations};

/// An exclusively locked store: builds wait until this is dropped.
#[derive(Debug)]
pub struct ExclusiveStore {
    directory: PathBuf,
    _lock: File,
}

/// What images reference in a store.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct LiveSet {
    /// Packs.
    pub packs: BTreeSet<Digest>,
    /// Files in composefs's directory of objects.
    pub objects: BTreeSet<Vec<u8>>,
}

impl LiveSet {
    /// Adds what an image references.
    ///
    /// # Errors
    ///
    /// The image is damaged.
    pub fn add(&mut self, image: &Image) -> ImageResult<()> {
        self.packs.extend(image.packs().iter().map(|pack| pack.name));
        if image.is_composefs() {
            let object = |place| match place {
                ObjectLocation::Object(path) => Some(path),
                ObjectLocation::Packed(..) => None,
            };
            self.objects.extend(object_locations(image)?.into_keys().filter_map(object));
        }
        Ok(())
    }
}

/// What was removed from a store, or would be.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct GcReport {
    /// Unreferenced packs.
    pub removed: Vec<Digest>,
    /// Other files, left by killed builds, downloads and collections.
    pub leftovers: usize,
    /// The disk space of all of these in bytes.
    pub bytes: u64,
    /// Unreferenced packs within the grace period.
    pub young: Vec<Digest>,
    /// Referenced packs.
    pub kept: usize,
    /// Referenced packs that are missing.
    pub missing: Vec<Digest>,
    /// The files in composefs's directory of objects.
    pub objects: Objects,
}

/// What was removed of the files of an object store, or would be.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Objects {
    /// The number of unreferenced objects.
    pub removed: usize,
    /// The number of unreferenced objects within the grace period.
    pub young: usize,
    /// The number of referenced objects.
    pub kept: usize,
    /// Referenced objects that are missing.
    pub missing: Vec<Vec<u8>>,
}

impl ExclusiveStore {
    /// Waits until no process builds into an existing store; calls `waiting` if it is busy.
    ///
    /// # Errors
    ///
    /// There is none, or it is read-only.
    pub fn lock(directory: &Path, waiting: &dyn Fn()) -> Result<Self> {
        let (lock, path) = Self::lock_file(directory)?;
        if !Self::is_locked(&lock, &path)? {
            waiting();
            rustix::fs::flock(&lock, FlockOperation::LockExclusive).doing("lock", &path)?;
        }
        Ok(Self { directory: directory.into(), _lock: lock })
    }

    /// As [`Self::lock`], without waiting: returns `None` if another process uses the store.
    ///
    /// # Errors
    ///
    /// As for [`Self::lock`].
    pub fn try_lock(directory: &Path) -> Result<Option<Self>> {
        let (lock, path) = Self::lock_file(directory)?;
        Ok(Self::is_locked(&lock, &path)?.then(|| Self { directory: directory.into(), _lock: lock }))
    }

    fn lock_file(directory: &Path) -> Result<(File, PathBuf)> {
        packs::is_store(directory)?;
        let path = layout::lock_path(directory);
        let lock =
            layout::lockable(File::options().read(true).create(true).append(true), &path).doing("open", &path)?;
        Ok((lock, path))
    }

    /// Locks the file, unless another process has.
    fn is_locked(lock: &File, path: &Path) -> Result<bool> {
        match rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Ok(false),
            outcome => outcome.doing("lock", path).map(|()| true),
        }
    }

    /// Removes everything except referenced packs and objects, and those made or used within the grace period: their
    /// image may not be known yet. With `dry`, only reports.
    ///
    /// A pack's index is removed first, so that a killed collection leaves no index without its pack.
    ///
    /// # Errors
    ///
    /// The directory cannot be read, or something cannot be removed.
    pub fn collect(&self, needed: &LiveSet, grace: Duration, dry: bool) -> Result<GcReport> {
        let mut collected = self.collect_packs(&needed.packs, grace, dry)?;
        self.collect_objects(&needed.objects, grace, dry, &mut collected)?;
        Ok(collected)
    }

    /// Only the grace period protects new objects of other programs, which do not use the lock.
    fn collect_objects(
        &self,
        needed: &BTreeSet<Vec<u8>>,
        grace: Duration,
        dry: bool,
        collected: &mut GcReport,
    ) -> Result<()> {
        let mut missing = needed.clone();
        for StoredFile { name, path, metadata } in object_list::list(&self.directory)? {
            let objects = &mut collected.objects;
            if name.as_ref().is_some_and(|name| missing.remove(name)) {
                objects.kept += 1;
                continue;
            }
            if metadata.modified().is_ok_and(|time| is_within(time, grace)) {
                objects.young += usize::from(name.is_some());
                continue;
            }
            // A server resumes a large object, whatever its age.
            if name.is_none() && is_locked(&path) {
                continue;
            }
            if !dry && !remove(&path)? {
                continue;
            }
            collected.bytes += disk_bytes(&metadata);
            match name {
                Some(_) => objects.removed += 1,
                None => collected.leftovers += 1,
            }
        }
        collected.objects.missing = missing.into_iter().collect();
        Ok(())
    }

    fn collect_packs(&self, needed: &BTreeSet<Digest>, grace: Duration, dry: bool) -> Result<GcReport> {
        let directory = layout::packs_directory(&self.directory);
        let mut collected = GcReport::default();
        if !directory.is_dir() {
            collected.missing = needed.iter().copied().collect();
            return Ok(collected);
        }
        let (mut old, mut indexes) = (Vec::new(), HashSet::new());
        let mut young: BTreeSet<Digest> = BTreeSet::new();
        for entry in fs::read_dir(&directory).doing("list", &directory)? {
            let name = entry.doing("list", &directory)?.file_name();
            let Some(kind) = Kind::of(&name) else { continue };
            let path = directory.join(&name);
            let metadata = match fs::symlink_metadata(&path) {
                // Removed or renamed by a program without the lock.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                metadata => metadata.doing("look at", &path)?,
            };
            if let Kind::Index(pack) = kind {
                indexes.insert(pack);
            }
            let is_young = metadata.modified().is_ok_and(|time| is_within(time, grace));
            match kind {
                Kind::Index(pack) | Kind::Pack(pack) | Kind::Part(pack) if is_young => {
                    young.insert(pack);
                }
                Kind::New if is_young => {}
                _ => old.push((kind, path, metadata)),
            }
        }
        collected.kept = needed.intersection(&indexes.iter().copied().collect()).count();
        collected.missing = needed.iter().filter(|pack| !indexes.contains(pack)).copied().collect();
        collected.young =
            young.iter().filter(|pack| indexes.contains(pack) && !needed.contains(pack)).copied().collect();
        // Only the file of a pack in use is locked; its index is needed, too.
        let used: HashSet<Digest> = old.iter().filter_map(|(kind, path, _)| kind.used_part(path)).collect();
        old.retain(|(kind, ..)| !matches!(kind, Kind::Part(pack) if used.contains(pack)));
        let spared = |pack: &Digest| needed.contains(pack) || young.contains(pack);
        old.retain(
            |(kind, ..)| !matches!(kind, Kind::Index(pack) | Kind::Pack(pack) | Kind::Note(pack) if spared(pack)),
        );
        // The fetched part of a complete pack is not needed.
        old.retain(|(kind, ..)| !matches!(kind, Kind::Part(pack) if spared(pack) && !indexes.contains(pack)));
        // Indexes come first in this order.
        old.sort_unstable_by_key(|(kind, ..)| *kind);
        for (kind, path, metadata) in old {
            let below = if metadata.is_dir() { tree_bytes(&path) } else { 0 };
            match if dry { Ok(true) } else { remove(&path) } {
                Ok(true) => {}
                Ok(false) => continue,
                Err(error) if metadata.is_dir() && is_refused(&error) => {
                    // Of another user's download: that user or root removes it.
                    tracing::warn!("{}: it is left", error_chain(&error));
                    continue;
                }
                Err(error) => return Err(error),
            }
            collected.bytes += disk_bytes(&metadata) + below;
            match kind {
                Kind::Index(pack) => collected.removed.push(pack),
                Kind::Pack(pack) | Kind::Note(pack) if indexes.contains(&pack) => {}
                Kind::Pack(_) | Kind::Note(_) | Kind::Part(_) | Kind::New => collected.leftovers += 1,
            }
        }
        if !dry {
            File::open(&directory).and_then(|directory| directory.sync_all()).doing("sync", &directory)?;
        }
        Ok(collected)
    }
}

fn is_refused(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.kind() == ErrorKind::PermissionDenied)
}

/// Removes a file, or a directory with all that is in it; returns whether it existed.
fn remove(path: &Path) -> Result<bool> {
    let removed = match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::IsADirectory => fs::remove_dir_all(path),
        removed => removed,
    };
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        outcome => outcome.doing("remove", path).map(|()| true),
    }
}

fn disk_bytes(metadata: &Metadata) -> u64 {
    metadata.blocks() * 512
}

/// Returns the disk space of what is in a directory, in bytes, as far as it can be looked at. Other users may change it meanwhile.
fn tree_bytes(directory: &Path) -> u64 {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(top) = openat(CWD, directory, flags, Mode::empty()) else { return 0 };
    let (mut bytes, mut directories) = (0, vec![PathBuf::from(".")]);
    while let Some(directory) = directories.pop() {
        // No link is followed.
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let entries = openat2(&top, &directory, flags, Mode::empty(), resolve).and_then(Dir::new);
        let entries = entries.into_iter().flatten().flatten();
        for name in entries.map(|entry| entry.file_name().to_owned()).filter(|name| ![c".", c".."].contains(&&**name)) {
            let path = directory.join(OsStr::from_bytes(name.to_bytes()));
            let Ok(found) = statat(&top, &path, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            bytes += found.st_blocks.cast_unsigned() * 512;
            if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
                directories.push(path);
            }
        }
    }
    bytes
}

/// The type of a file in the directory of packs; in the order of removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Index(Digest),
    Pack(Digest),
    /// The record of damage in a pack.
    Note(Digest),
    /// The fetched part of a pack, or its index.
    Part(Digest),
    /// An unfinished file of a build, or the directory of an unfinished download.
    New,
}

impl Kind {
    /// Returns the type by the name; `None` for other files.
    fn of(name: &OsString) -> Option<Self> {
        let name = name.as_bytes();
        let part = name.strip_suffix(INDEX_SUFFIX.as_bytes()).unwrap_or(name).strip_suffix(PART_SUFFIX.as_bytes());
        if let Some(pack) = part.and_then(pack_name) {
            return Some(Self::Part(pack));
        }
        if let Some(pack) = name.strip_suffix(DAMAGED_SUFFIX.as_bytes()).and_then(pack_name) {
            return Some(Self::Note(pack));
        }
        match name.strip_suffix(b".index") {
            Some(pack) => pack_name(pack).map(Self::Index),
            None if name.starts_with(NEW_PREFIX.as_bytes()) => Some(Self::New),
            None => pack_name(name).map(Self::Pack),
        }
    }

    /// Returns the pack whose part this is, if a server uses it. With the store locked, no server begins to.
    fn used_part(self, path: &Path) -> Option<Digest> {
        let Self::Part(pack) = self else { return None };
        // Everybody may lock its index.
        let is_part = path.extension().is_some_and(|end| *end == *PART_SUFFIX.trim_start_matches('.'));
        (is_part && is_locked(path)).then_some(pack)
    }
}

/// Returns whether a file is locked, or cannot be. A file that cannot be opened counts as unlocked.
fn is_locked(path: &Path) -> bool {
    // To write, too: NFS takes an exclusive lock only then.
    let opened = plain_file::open(File::options().read(true).write(true), path);
    let Ok(file) = opened.or_else(|_| plain_file::open_to_read(path)) else { return false };
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err()
}

fn is_within(time: SystemTime, grace: Duration) -> bool {
    // A time in the future counts as recent.
    !grace.is_zero() && time.elapsed().map_or(true, |age| age < grace)
}
