//! composefs's object store: a file per object, `objects/xx/yyyy...` by its fs-verity digest.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ferry_vfs::Backing;
use ferry_vfs::sync::lock;
use rustix::fs::{Mode, OFlags, ResolveFlags, fcntl_setfl};

use super::missing_objects::MissingObjects;
use crate::format::digest::Digest;
use crate::format::error::{IoContext, Result};
use crate::store::file_objects::measure;
use crate::store::fsverity;
use crate::store::object_error::ObjectError;
use crate::store::object_list::{self, object_path, objects_directory};

/// Objects up to this size are verified on open, in a fraction of a millisecond: most opened files are read.
const SMALL_BYTES: u64 = 128 << 10;
/// The maximum number of objects that are kept open.
const OPEN_MAX: usize = 256;

/// The identity of a verified file: device, inode, seconds and nanoseconds of its last change.
type Identity = (u64, u64, i64, i64);

fn identity(found: &fs::Metadata) -> Identity {
    (found.dev(), found.ino(), found.ctime(), found.ctime_nsec())
}

/// The objects of a store, opened on demand, each verified before its bytes are used.
#[derive(Debug)]
pub(crate) struct Files {
    directory: PathBuf,
    root: OwnedFd,
    state: Mutex<State>,
    /// How missing objects are fetched, if they can be.
    pub absent: Option<MissingObjects>,
    /// Bytes of objects that this process has verified.
    pub verified_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// By path, digest and length: images may have several lengths for one object.
    open: HashMap<(Vec<u8>, Digest, u64), Arc<Backing>>,
    proved: HashMap<Digest, Identity>,
}

impl Files {
    /// Opens the objects of a store, which this process sees at the path `seen`.
    pub(crate) fn open(store: &Path, seen: &Path, absent: Option<MissingObjects>) -> Result<Self> {
        let directory = match objects_directory(seen) {
            // A store without objects yet.
            none if none == *seen && absent.is_some() && !object_list::is_store(seen) => {
                let directory = seen.join("objects");
                fs::create_dir_all(&directory).doing("make", &directory)?;
                directory
            }
            directory => directory,
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&directory, flags, Mode::empty()).doing("use as an object store", &directory)?;
        // Error messages use the store's own path.
        let directory = directory.strip_prefix(seen).map_or(directory.clone(), |below| store.join(below));
        Ok(Self { directory, root, state: Mutex::default(), absent, verified_bytes: AtomicU64::new(0) })
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn path(&self, digest: Digest) -> PathBuf {
        object_path(&self.directory, digest)
    }

    /// Records that the bytes of a new object are verified.
    pub(super) fn note(&self, digest: Digest, path: &Path) {
        if let Ok(found) = fs::symlink_metadata(path) {
            lock(&self.state).proved.insert(digest, identity(&found));
        }
    }

    /// Records that this process changed a verified file's times, unless another file has the name by now.
    pub(super) fn note_own_change(&self, digest: Digest, path: &Path, before: &fs::Metadata) {
        let mut state = lock(&self.state);
        if state.proved.get(&digest) == Some(&identity(before))
            && let Ok(now) = fs::symlink_metadata(path)
            && (now.dev(), now.ino()) == (before.dev(), before.ino())
        {
            state.proved.insert(digest, identity(&now));
        }
    }

    /// Returns the descriptor of a file, once its bytes are verified; fetches a missing one if possible.
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
                // Before it arrived, waiters may have been told that it failed.
                self.here(path, digest, bytes).map_err(|bad| outcome.err().unwrap_or(bad))
            }
            (found, _) => found,
        }
    }

    fn name(&self, path: &[u8]) -> PathBuf {
        self.directory.join(std::ffi::OsStr::from_bytes(path))
    }

    /// As [`Self::find`], if it is in the store.
    pub(super) fn here(&self, path: &[u8], digest: Digest, bytes: u64) -> Result<Arc<Backing>, ObjectError> {
        if let Some(known) = self.known(path, digest, bytes) {
            return Ok(known);
        }
        let (file, found) = self.open_object(path, bytes)?;
        if !self.was_proved(&found, digest) {
            let unreadable = |reason| ObjectError::Object { path: self.name(path), reason };
            let measured = measure(&file, bytes).map_err(unreadable)?;
            if measured != digest {
                return Err(ObjectError::Changed { path: self.name(path), digest: measured });
            }
            self.verified_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        Ok(self.keep(path, digest, file, &found))
    }

    /// As [`Self::here`] if that is cheap: the object is small, was verified before, or has fs-verity, with which the
    /// kernel verifies reads. Damage is not reported, because the bytes may never be read.
    pub(crate) fn ready(&self, path: &[u8], digest: Digest, bytes: u64) -> Option<Arc<Backing>> {
        if bytes <= SMALL_BYTES {
            return self.here(path, digest, bytes).ok();
        }
        if let Some(known) = self.known(path, digest, bytes) {
            return Some(known);
        }
        let (file, found) = self.open_object(path, bytes).ok()?;
        let proved = self.was_proved(&found, digest) || fsverity::measure(&file) == Some(digest);
        proved.then(|| self.keep(path, digest, file, &found))
    }

    fn known(&self, path: &[u8], digest: Digest, bytes: u64) -> Option<Arc<Backing>> {
        lock(&self.state).open.get(&(path.to_vec(), digest, bytes)).cloned()
    }

    /// Opens an object of this length, and returns its identity.
    fn open_object(&self, path: &[u8], bytes: u64) -> Result<(File, fs::Metadata), ObjectError> {
        let unreadable = |reason: io::Error| ObjectError::Object { path: self.name(path), reason };
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let fd = rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve);
        let file = File::from(fd.map_err(|error| unreadable(error.into()))?);
        let found = file.metadata().map_err(unreadable)?;
        if !found.is_file() || found.len() != bytes {
            return Err(ObjectError::Length { path: self.name(path), found: found.len(), bytes });
        }
        // io_uring of older kernels does not wait for a file with it.
        fcntl_setfl(&file, flags - OFlags::NONBLOCK).map_err(|error| unreadable(error.into()))?;
        Ok((file, found))
    }

    /// Returns whether a file's bytes were verified, and it has not changed since.
    fn was_proved(&self, found: &fs::Metadata, digest: Digest) -> bool {
        lock(&self.state).proved.get(&digest) == Some(&identity(found))
    }

    /// Keeps a verified object open.
    fn keep(&self, path: &[u8], digest: Digest, file: File, found: &fs::Metadata) -> Arc<Backing> {
        let backing = Arc::new(Backing::new(file.into()));
        let mut state = lock(&self.state);
        state.proved.insert(digest, identity(found));
        if state.open.len() >= OPEN_MAX {
            state.open.clear();
        }
        state.open.insert((path.to_vec(), digest, found.len()), Arc::clone(&backing));
        backing
    }
}
