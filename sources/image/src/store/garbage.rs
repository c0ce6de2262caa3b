//! What nobody needs in a store, and how it goes.

use std::collections::{BTreeSet, HashSet};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::format::digest::Digest;
use crate::format::error::{Checked, IoContext, Result};
use crate::format::image::Image;
use crate::format::index::pack_name;
use crate::store::layout::{self, DAMAGED_SUFFIX, INDEX_SUFFIX, PART_SUFFIX};
use crate::store::new_file::NEW_PREFIX;
use crate::store::object_list::{self, Stored};
use crate::store::packs;
use crate::store::usage::{Place, places};

/// A store that nobody builds into, as long as this lives: builds wait.
#[derive(Debug)]
pub struct ExclusiveStore {
    folder: PathBuf,
    _lock: File,
}

/// What images need of a store.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Needed {
    /// Packs.
    pub packs: BTreeSet<Digest>,
    /// Files below composefs's folder of objects.
    pub objects: BTreeSet<Vec<u8>>,
}

impl Needed {
    /// Adds what an image needs.
    ///
    /// # Errors
    /// The image is damaged.
    pub fn add(&mut self, image: &Image) -> Checked<()> {
        self.packs.extend(image.packs().iter().map(|pack| pack.name));
        if image.is_composefs() {
            let object = |place| match place {
                Place::Object(path) => Some(path),
                Place::Packed(..) => None,
            };
            self.objects.extend(places(image)?.into_keys().filter_map(object));
        }
        Ok(())
    }
}

/// What was removed of a store, or would be.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Collected {
    /// Packs that no image needs.
    pub removed: Vec<Digest>,
    /// Other files: what killed builds and killed collections have left.
    pub leftovers: usize,
    /// What all of these take on the disk, in bytes.
    pub bytes: u64,
    /// Packs that no image needs, but that were made or used too short a time ago.
    pub young: Vec<Digest>,
    /// Packs that images need.
    pub kept: usize,
    /// Packs that images need and that are not there.
    pub missing: Vec<Digest>,
    /// What became of files of composefs's folder of objects.
    pub objects: Objects,
}

/// What was removed of the files of an object store, or would be.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Objects {
    /// How many no image needs.
    pub removed: usize,
    /// How many no image needs that were made or used too short a time ago.
    pub young: usize,
    /// How many images need.
    pub kept: usize,
    /// Those that images need and that are not there.
    pub missing: Vec<Vec<u8>>,
}

impl ExclusiveStore {
    /// Waits until nobody builds into a store, which must be there; `waiting` is called if that is not at once.
    ///
    /// # Errors
    /// There is none, or it may not be written to.
    pub fn lock(folder: &Path, waiting: &dyn Fn()) -> Result<Self> {
        packs::is_store(folder)?;
        let path = layout::lock_path(folder);
        let lock = File::options().create(true).append(true).open(&path).doing("open", &path)?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => {
                waiting();
                rustix::fs::flock(&lock, FlockOperation::LockExclusive).doing("lock", &path)?;
            }
            outcome => outcome.doing("lock", &path)?,
        }
        Ok(Self { folder: folder.into(), _lock: lock })
    }

    /// Removes everything but the packs and objects that are needed and what was made or used within the time of grace: somebody may
    /// have built an image that they have not told us of yet. With `dry`, only tells.
    ///
    /// A pack's index goes first, so that a collection that is killed leaves no index without its pack.
    ///
    /// # Errors
    /// The folder cannot be read, or something cannot be removed.
    pub fn collect(&self, needed: &Needed, grace: Duration, dry: bool) -> Result<Collected> {
        let mut collected = self.collect_packs(&needed.packs, grace, dry)?;
        self.collect_objects(&needed.objects, grace, dry, &mut collected)?;
        Ok(collected)
    }

    /// Objects that other programs have just put there are protected by the time of grace only: they know no lock.
    fn collect_objects(
        &self,
        needed: &BTreeSet<Vec<u8>>,
        grace: Duration,
        dry: bool,
        collected: &mut Collected,
    ) -> Result<()> {
        let mut missing = needed.clone();
        for Stored { name, path, metadata } in object_list::list(&self.folder)? {
            let objects = &mut collected.objects;
            if name.as_ref().is_some_and(|name| missing.remove(name)) {
                objects.kept += 1;
                continue;
            }
            if metadata.modified().is_ok_and(|time| is_within(time, grace)) {
                objects.young += usize::from(name.is_some());
                continue;
            }
            // A server goes on with what has come of a large object, whatever its age.
            if name.is_none() && is_locked(&path) {
                continue;
            }
            if !dry && !remove(&path)? {
                continue;
            }
            collected.bytes += metadata.blocks() * 512;
            match name {
                Some(_) => objects.removed += 1,
                None => collected.leftovers += 1,
            }
        }
        collected.objects.missing = missing.into_iter().collect();
        Ok(())
    }

    fn collect_packs(&self, needed: &BTreeSet<Digest>, grace: Duration, dry: bool) -> Result<Collected> {
        let folder = layout::packs_folder(&self.folder);
        let mut collected = Collected::default();
        if !folder.is_dir() {
            collected.missing = needed.iter().copied().collect();
            return Ok(collected);
        }
        let (mut old, mut indexes) = (Vec::new(), HashSet::new());
        let mut young: BTreeSet<Digest> = BTreeSet::new();
        for entry in fs::read_dir(&folder).doing("list", &folder)? {
            let name = entry.doing("list", &folder)?.file_name();
            let Some(kind) = Kind::of(&name) else { continue };
            let path = folder.join(&name);
            let metadata = match fs::symlink_metadata(&path) {
                // Somebody else has removed or renamed it: not everybody knows the lock.
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
                _ => old.push((kind, path, metadata.blocks() * 512)),
            }
        }
        collected.kept = needed.intersection(&indexes.iter().copied().collect()).count();
        collected.missing = needed.iter().filter(|pack| !indexes.contains(pack)).copied().collect();
        collected.young =
            young.iter().filter(|pack| indexes.contains(pack) && !needed.contains(pack)).copied().collect();
        // Of those that servers use, the file alone is locked; its index is needed with it.
        let used: HashSet<Digest> = old.iter().filter_map(|(kind, path, _)| kind.used_part(path)).collect();
        old.retain(|(kind, ..)| !matches!(kind, Kind::Part(pack) if used.contains(pack)));
        let spared = |pack: &Digest| needed.contains(pack) || young.contains(pack);
        old.retain(
            |(kind, ..)| !matches!(kind, Kind::Index(pack) | Kind::Pack(pack) | Kind::Note(pack) if spared(pack)),
        );
        // What is left of fetching a pack that is whole goes.
        old.retain(|(kind, ..)| !matches!(kind, Kind::Part(pack) if spared(pack) && !indexes.contains(pack)));
        // Indexes come first in this order.
        old.sort_unstable_by_key(|(kind, ..)| *kind);
        for (kind, path, bytes) in old {
            if !dry && !remove(&path)? {
                continue;
            }
            collected.bytes += bytes;
            match kind {
                Kind::Index(pack) => collected.removed.push(pack),
                Kind::Pack(pack) | Kind::Note(pack) if indexes.contains(&pack) => {}
                Kind::Pack(_) | Kind::Note(_) | Kind::Part(_) | Kind::New => collected.leftovers += 1,
            }
        }
        if !dry {
            File::open(&folder).and_then(|folder| folder.sync_all()).doing("sync", &folder)?;
        }
        Ok(collected)
    }
}

/// Removes a file; returns whether it was still there.
fn remove(path: &Path) -> Result<bool> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        outcome => outcome.doing("remove", path).map(|()| true),
    }
}

/// What a file in the folder of packs is; in the order in which they are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Index(Digest),
    Pack(Digest),
    /// What is damaged in a pack.
    Note(Digest),
    /// What was fetched of a pack, or its index.
    Part(Digest),
    /// What a build had begun.
    New,
}

impl Kind {
    /// By its name; nothing of a file that is none of ours.
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

    /// The pack whose part this is, if a server uses it. Nobody begins to while nobody else has the store.
    fn used_part(self, path: &Path) -> Option<Digest> {
        let Self::Part(pack) = self else { return None };
        is_locked(path).then_some(pack)
    }
}

/// Whether somebody has a lock on a file. What cannot be opened is used by nobody that we could see.
fn is_locked(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
}

fn is_within(time: SystemTime, grace: Duration) -> bool {
    // What lies in the future is young, too.
    !grace.is_zero() && time.elapsed().map_or(true, |age| age < grace)
}
