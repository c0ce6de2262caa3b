//! composefs's object store: a file for each object, `objects/xx/yyyy...` by its fs-verity digest.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use ferry_vfs::Backing;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat};
use rustix::io::Errno;
use tempfile::TempPath;

use super::missing_objects::{Absent, measure};
use crate::build::scan::FOUND_FLAGS;
use crate::format::composefs::path_of;
use crate::format::digest::Digest;
use crate::format::error::{Doing, Error, Result};
use crate::format::verity;
use crate::read::objects::Bad;
use crate::store::fsverity;
use crate::store::object_list;
use crate::store::packs::New;

/// An object of so few bytes is proved when it is opened, which then takes a fraction of a millisecond longer: most that are opened are
/// read.
const SMALL_BYTES: u64 = 128 << 10;
/// How many objects are kept open. More are opened again when they are wanted.
const OPEN_MAX: usize = 256;
/// An object that was used so short a time ago need not be noted again; any time of grace that makes sense is longer.
const FRESH: Duration = Duration::from_secs(60);
/// So few objects are made durable one by one; with more of them, all that the file system has not written yet is. Readers of an
/// object that is being fetched wait for that, too.
const FEW: usize = 8;
/// The pieces that files are copied in, in bytes.
const PIECE_BYTES: usize = 1 << 20;

/// The folder with the objects of a store: `objects` in it, or the store itself, as `mkcomposefs --digest-store` fills it.
pub fn objects_folder(store: &Path) -> PathBuf {
    let objects = store.join("objects");
    if objects.is_dir() { objects } else { store.into() }
}

/// Objects that are being added. None has its name before all are durable, so that a build that is killed leaves nothing but
/// files that begin with `.new-`.
pub(crate) struct NewObjects {
    folder: PathBuf,
    known: HashSet<Digest>,
    added: Vec<(Digest, TempPath)>,
    /// Bytes that were not there before.
    pub new_bytes: u64,
}

impl NewObjects {
    pub(crate) fn begin(store: &Path) -> Result<Self> {
        Self::within(&store.join("objects"))
    }

    /// The same, in the folder of objects itself.
    pub(super) fn within(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).doing("make", folder)?;
        Ok(Self { folder: folder.into(), known: HashSet::new(), added: Vec::new(), new_bytes: 0 })
    }

    /// Whether this object is still to be added. One that is there with another length is damaged and is replaced; of one that is
    /// sound it is noted that it is used now, so that it is not removed before its new image is known.
    fn wants(&mut self, digest: Digest, bytes: u64) -> bool {
        if !self.known.insert(digest) {
            return false;
        }
        let path = object_path(&self.folder, digest);
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_file() && found.len() == bytes => {
                freshen(&path, &found);
                false
            }
            _ => true,
        }
    }

    /// Adds an object that is in memory.
    pub(crate) fn add(&mut self, digest: Digest, bytes: &[u8]) -> Result<()> {
        if !self.wants(digest, bytes.len() as u64) {
            return Ok(());
        }
        let mut new = New::begin(&self.folder)?;
        new.file.write_all(bytes).doing("write to", &*new.path)?;
        self.keep(digest, bytes.len() as u64, new);
        Ok(())
    }

    /// Adds a file that was hashed: its blocks are shared where the file system can, and copied elsewhere. What was taken is
    /// hashed again, for the file may have changed in between.
    pub(crate) fn add_file(&mut self, digest: Digest, bytes: u64, path: &Path) -> Result<()> {
        if !self.wants(digest, bytes) {
            return Ok(());
        }
        // What stands there by now may be anything.
        let mut source = match openat(CWD, path, FOUND_FLAGS, Mode::empty()) {
            Err(Errno::LOOP | Errno::NXIO) => return Err(Error::Changed(path.into())),
            opened => File::from(opened.doing("open", path)?),
        };
        if !source.metadata().doing("look at", path)?.is_file() {
            return Err(Error::Changed(path.into()));
        }
        let mut new = New::begin(&self.folder)?;
        if rustix::fs::ioctl_ficlone(&new.file, &source).is_err() {
            copy(&mut source, &mut new.file, bytes).doing("copy", path)?;
        }
        new.file.rewind().doing("read", &*new.path)?;
        let (found, length) = verity::of_reader(&new.file).doing("read", &*new.path)?;
        if (found, length) != (digest, bytes) {
            return Err(Error::Changed(path.into()));
        }
        self.keep(digest, bytes, new);
        Ok(())
    }

    fn keep(&mut self, digest: Digest, bytes: u64, new: New) {
        self.put(digest, bytes, new.path);
    }

    /// Adds an object that was proved, whatever is there under its name.
    pub(super) fn put(&mut self, digest: Digest, bytes: u64, path: TempPath) {
        self.new_bytes += bytes;
        self.added.push((digest, path));
    }

    /// Makes all durable and gives them their names, which are durable, too.
    pub(crate) fn finish(self) -> Result<()> {
        let path = self.folder.clone();
        let folder = File::open(&path).doing("open", &path)?;
        self.publish(|_, _| {})?;
        rustix::fs::syncfs(&folder).doing("sync", &path)
    }

    /// Makes all durable and gives them their names; `named` is told of each.
    pub(super) fn publish(self, mut named: impl FnMut(Digest, &Path)) -> Result<()> {
        let folder = File::open(&self.folder).doing("open", &self.folder)?;
        let few = self.added.len() <= FEW;
        let mut has_verity = true;
        for (_, path) in &self.added {
            let path: &Path = path;
            // What stands there by now may be anything.
            let file = File::from(openat(CWD, path, FOUND_FLAGS, Mode::empty()).doing("open", path)?);
            file.set_permissions(fs::Permissions::from_mode(0o644)).doing("change", path)?;
            if few {
                file.sync_data().doing("sync", path)?;
            }
            if has_verity {
                has_verity = fsverity::enable(&file).doing("turn fs-verity on for", path)?;
            }
        }
        if !few {
            rustix::fs::syncfs(&folder).doing("sync", &self.folder)?;
        }
        for (digest, path) in self.added {
            let target = object_path(&self.folder, digest);
            let parent = crate::store::packs::folder_of(&target);
            fs::create_dir_all(parent).doing("make", parent)?;
            path.persist(&target).map_err(|error| error.error).doing("make", &target)?;
            named(digest, &target);
        }
        Ok(())
    }
}

fn object_path(folder: &Path, digest: Digest) -> PathBuf {
    folder.join(std::ffi::OsStr::from_bytes(&path_of(digest)))
}

/// Notes that an object is used. Who may not do that uses what others look after.
pub(super) fn freshen(path: &Path, found: &fs::Metadata) {
    let age = found.modified().ok().and_then(|time| time.elapsed().ok());
    if age.is_some_and(|age| age < FRESH) {
        return;
    }
    let touched = File::open(path).and_then(|object| object.set_modified(SystemTime::now()));
    if let Err(error) = touched {
        tracing::debug!("cannot note that {} is used: {error}", path.display());
    }
}

/// Copies so many bytes; blocks of zeros become holes.
fn copy(from: &mut File, to: &mut File, bytes: u64) -> io::Result<()> {
    let mut piece = Vec::with_capacity(PIECE_BYTES);
    let mut left = bytes;
    loop {
        piece.clear();
        from.take(left.min(PIECE_BYTES as u64)).read_to_end(&mut piece)?;
        if piece.is_empty() {
            return to.set_len(bytes - left);
        }
        left -= piece.len() as u64;
        if piece.iter().all(|byte| *byte == 0) {
            to.seek(io::SeekFrom::Current(i64::try_from(piece.len()).unwrap_or(i64::MAX)))?;
        } else {
            to.write_all(&piece)?;
        }
    }
}

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
    pub absent: Option<Absent>,
}

#[derive(Debug, Default)]
struct State {
    open: HashMap<(Vec<u8>, Digest), Arc<Backing>>,
    proved: HashMap<Digest, Identity>,
}

impl Files {
    /// The objects of a store, which is seen at a place from here: mostly its own.
    pub(crate) fn open(store: &Path, seen: &Path, absent: Option<Absent>) -> Result<Self> {
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
    ) -> std::result::Result<Arc<Backing>, Bad> {
        let path = path.ok_or(Bad::NoPath)?;
        let digest = digest.ok_or_else(|| Bad::NoDigest { path: self.name(path) })?;
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
    pub(super) fn here(&self, path: &[u8], digest: Digest, bytes: u64) -> std::result::Result<Arc<Backing>, Bad> {
        if let Some(known) = self.known(path, digest) {
            return Ok(known);
        }
        let (file, found) = self.open_object(path, bytes)?;
        if !self.was_proved(&found, digest) {
            let unreadable = |source| Bad::Object { path: self.name(path), source };
            let measured = measure(&file, bytes).map_err(unreadable)?;
            if measured != digest {
                return Err(Bad::Changed { path: self.name(path), digest: measured });
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
    fn open_object(&self, path: &[u8], bytes: u64) -> std::result::Result<(File, fs::Metadata), Bad> {
        let unreadable = |source: io::Error| Bad::Object { path: self.name(path), source };
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let fd = rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve);
        let file = File::from(fd.map_err(|error| unreadable(error.into()))?);
        let found = file.metadata().map_err(unreadable)?;
        if !found.is_file() || found.len() != bytes {
            return Err(Bad::Length { path: self.name(path), found: found.len(), bytes });
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

#[cfg(test)]
mod tests {
    use rustix::fs::{FileType, mknodat};

    use super::*;
    use crate::format::digest::Algorithm;

    #[test]
    fn what_replaces_a_file_that_was_hashed_is_not_followed_nor_waited_for() {
        let folder = tempfile::tempdir().expect("folders can be made");
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "bytes").expect("files can be made");
        std::os::unix::fs::symlink("file", at("link")).expect("links can be made");
        mknodat(rustix::fs::CWD, at("pipe"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("pipes can be made");
        let mut objects = NewObjects::within(&at("objects")).expect("folders can be made");
        for name in ["link", "pipe"] {
            let digest = Algorithm::Verity.of(name.as_bytes());
            let outcome = objects.add_file(digest, 5, &at(name));
            assert!(matches!(outcome, Err(Error::Changed(_))), "{name}");
        }
        objects.add_file(Algorithm::Verity.of(b"bytes"), 5, &at("file")).expect("it is the same");
    }

    /// Whoever may write to the folder must not have the mode of another file changed.
    #[test]
    fn what_replaces_an_object_before_it_is_named_keeps_its_mode() {
        let folder = tempfile::tempdir().expect("folders can be made");
        let at = |name: &str| folder.path().join(name);
        fs::write(at("secret"), "bytes").expect("files can be made");
        fs::set_permissions(at("secret"), fs::Permissions::from_mode(0o600)).expect("modes can be changed");
        let mut objects = NewObjects::within(&at("objects")).expect("folders can be made");
        objects.add(Algorithm::Verity.of(b"bytes"), b"bytes").expect("it can be written");
        let new = objects.added[0].1.to_path_buf();
        fs::remove_file(&new).and_then(|()| std::os::unix::fs::symlink(at("secret"), &new)).expect("links can be made");
        objects.publish(|_, _| {}).expect_err("it is another file");
        assert_eq!(fs::metadata(at("secret")).expect("it is there").permissions().mode() & 0o777, 0o600);
    }
}
