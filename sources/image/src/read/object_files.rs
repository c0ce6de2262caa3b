//! composefs's object store: a file for each object, `objects/xx/yyyy...` by its fs-verity digest.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferry_vfs::Backing;
use rustix::fs::{Mode, OFlags, ResolveFlags};

use super::missing_objects::MissingObjects;
use crate::format::digest::Digest;
use crate::format::error::{IoContext, Result};
use crate::store::file_objects::measure;
use crate::store::fsverity;
use crate::store::object_error::ObjectError;
use crate::store::object_list::{self, object_path, objects_folder};

/// An object of so few bytes is proved when it is opened, which then takes a fraction of a millisecond longer: most that are opened are
/// read.
const SMALL_BYTES: u64 = 128 << 10;
/// How many objects are kept open. More are opened again when they are wanted.
const OPEN_MAX: usize = 256;

/// What a file was when its bytes were proved: device, inode, seconds and nanoseconds of its last change.
type Identity = (u64, u64, i64, i64);

fn identity(found: &fs::Metadata) -> Identity {
    (found.dev(), found.ino(), found.ctime(), found.ctime_nsec())
}

/// The objects of a store, opened as they are wanted, each proved before its bytes are seen.
#[derive(Debug)]
pub(crate) struct Files {
    folder: PathBuf,
    root: OwnedFd,
    state: Mutex<State>,
    /// How what is not here is had, if that can be.
    pub absent: Option<MissingObjects>,
}

#[derive(Debug, Default)]
struct State {
    open: HashMap<(Vec<u8>, Digest), Arc<Backing>>,
    proved: HashMap<Digest, Identity>,
}

impl Files {
    /// The objects of a store, which is seen at a place from here: mostly its own.
    pub(crate) fn open(store: &Path, seen: &Path, absent: Option<MissingObjects>) -> Result<Self> {
        let folder = match objects_folder(seen) {
            // A store without any, yet.
            none if none == *seen && absent.is_some() && !object_list::is_store(seen) => {
                let folder = seen.join("objects");
                fs::create_dir_all(&folder).doing("make", &folder)?;
                folder
            }
            folder => folder,
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&folder, flags, Mode::empty()).doing("use as an object store", &folder)?;
        // What is said of it is said to who knows its own.
        let folder = folder.strip_prefix(seen).map_or(folder.clone(), |below| store.join(below));
        Ok(Self { folder, root, state: Mutex::default(), absent })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn path(&self, digest: Digest) -> PathBuf {
        object_path(&self.folder, digest)
    }

    /// Notes that the bytes of an object that has just got its name are proved.
    pub(super) fn note(&self, digest: Digest, path: &Path) {
        if let Ok(found) = fs::symlink_metadata(path) {
            self.state().proved.insert(digest, identity(&found));
        }
    }

    /// Notes that we have changed the times of a file whose bytes are proved. What has its name by now may be another one, which
    /// is not noted.
    pub(super) fn note_again(&self, digest: Digest, path: &Path, before: &fs::Metadata) {
        let mut state = self.state();
        if state.proved.get(&digest) == Some(&identity(before))
            && let Ok(now) = fs::symlink_metadata(path)
            && (now.dev(), now.ino()) == (before.dev(), before.ino())
        {
            state.proved.insert(digest, identity(&now));
        }
    }

    /// The descriptor with a file's bytes, once they are proved; what is not here is got, if it can be.
    pub(crate) fn find(
        &self,
        path: Option<&[u8]>,
        digest: Option<Digest>,
        bytes: u64,
    ) -> Result<Arc<Backing>, ObjectError> {
        let path = path.ok_or(ObjectError::NoPath)?;
        let digest = digest.ok_or_else(|| ObjectError::NoDigest { path: self.name(path) })?;
        match (self.here(path, digest, bytes), &self.absent) {
            (Err(_), Some(absent)) => {
                let outcome = self.obtain(absent, digest);
                // Who looked just before it came may have been told that it did not.
                self.here(path, digest, bytes).map_err(|bad| outcome.err().unwrap_or(bad))
            }
            (found, _) => found,
        }
    }

    fn name(&self, path: &[u8]) -> PathBuf {
        self.folder.join(std::ffi::OsStr::from_bytes(path))
    }

    /// The same, if it is in the store.
    pub(super) fn here(&self, path: &[u8], digest: Digest, bytes: u64) -> Result<Arc<Backing>, ObjectError> {
        if let Some(known) = self.known(path, digest) {
            return Ok(known);
        }
        let (file, found) = self.open_object(path, bytes)?;
        if !self.was_proved(&found, digest) {
            let unreadable = |source| ObjectError::Object { path: self.name(path), source };
            let measured = measure(&file, bytes).map_err(unreadable)?;
            if measured != digest {
                return Err(ObjectError::Changed { path: self.name(path), digest: measured });
            }
        }
        Ok(self.keep(path, digest, file, &found))
    }

    /// The same if that costs next to nothing: the object is small, was proved before, or has fs-verity, with which the kernel proves
    /// what is read whenever it is. Nothing is said of one that is damaged, for nobody may have a use for its bytes.
    pub(crate) fn ready(&self, path: &[u8], digest: Digest, bytes: u64) -> Option<Arc<Backing>> {
        if bytes <= SMALL_BYTES {
            return self.here(path, digest, bytes).ok();
        }
        if let Some(known) = self.known(path, digest) {
            return Some(known);
        }
        let (file, found) = self.open_object(path, bytes).ok()?;
        let proved = self.was_proved(&found, digest) || fsverity::measure(&file) == Some(digest);
        proved.then(|| self.keep(path, digest, file, &found))
    }

    fn known(&self, path: &[u8], digest: Digest) -> Option<Arc<Backing>> {
        self.state().open.get(&(path.to_vec(), digest)).cloned()
    }

    /// Opens an object of this length, and tells what file it is.
    fn open_object(&self, path: &[u8], bytes: u64) -> Result<(File, fs::Metadata), ObjectError> {
        let unreadable = |source: io::Error| ObjectError::Object { path: self.name(path), source };
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let fd = rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve);
        let file = File::from(fd.map_err(|error| unreadable(error.into()))?);
        let found = file.metadata().map_err(unreadable)?;
        if !found.is_file() || found.len() != bytes {
            return Err(ObjectError::Length { path: self.name(path), found: found.len(), bytes });
        }
        Ok((file, found))
    }

    /// Whether a file's bytes were proved, and it has not changed since.
    fn was_proved(&self, found: &fs::Metadata, digest: Digest) -> bool {
        self.state().proved.get(&digest) == Some(&identity(found))
    }

    /// Keeps an object open whose bytes are proved.
    fn keep(&self, path: &[u8], digest: Digest, file: File, found: &fs::Metadata) -> Arc<Backing> {
        let backing = Arc::new(Backing::new(file.into()));
        let mut state = self.state();
        state.proved.insert(digest, identity(found));
        if state.open.len() >= OPEN_MAX {
            state.open.clear();
        }
        state.open.insert((path.to_vec(), digest), Arc::clone(&backing));
        backing
    }
}
