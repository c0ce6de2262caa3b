//! New files in composefs's object store.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{CWD, Mode, openat};
use rustix::io::Errno;
use tempfile::TempPath;

use crate::format::digest::Digest;
use crate::format::error::{Error, IoContext, Result};
use crate::format::plain_file::UNTRUSTED_OPEN_FLAGS;
use crate::format::verity;
use crate::store::fsverity;
use crate::store::new_file::NewFile;
use crate::store::object_list::object_path;

/// An object used this recently is not marked as used again; useful grace periods are longer.
const FRESH: Duration = Duration::from_secs(60);
/// Up to this many objects are synced one by one, more by syncfs. Readers of a fetched object wait for it.
const FEW: usize = 8;
/// The size of copied pieces in bytes.
const PIECE_BYTES: usize = 1 << 20;

/// Objects that are being added. They get names when all are durable, so a killed build leaves only `.new-` files.
pub(crate) struct NewObjects {
    directory: PathBuf,
    known: HashSet<Digest>,
    added: Vec<(Digest, TempPath)>,
    /// Bytes that were not there before.
    pub new_bytes: u64,
}

impl NewObjects {
    pub(crate) fn begin(store: &Path) -> Result<Self> {
        Self::within(&store.join("objects"))
    }

    /// As [`Self::begin`], with the directory of objects itself.
    pub(crate) fn within(directory: &Path) -> Result<Self> {
        fs::create_dir_all(directory).doing("make", directory)?;
        Ok(Self { directory: directory.into(), known: HashSet::new(), added: Vec::new(), new_bytes: 0 })
    }

    /// Returns whether an object is to be added. One with another length is damaged and is replaced; a valid one is
    /// marked as used, so that it is not removed before its new image is known.
    fn wants(&mut self, digest: Digest, bytes: u64) -> bool {
        if !self.known.insert(digest) {
            return false;
        }
        let path = object_path(&self.directory, digest);
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_file() && found.len() == bytes => {
                freshen(&path, &found);
                false
            }
            _ => true,
        }
    }

    /// Adds an object in memory.
    pub(crate) fn add(&mut self, digest: Digest, bytes: &[u8]) -> Result<()> {
        if !self.wants(digest, bytes.len() as u64) {
            return Ok(());
        }
        let mut new = NewFile::begin(&self.directory)?;
        new.file.write_all(bytes).doing("write to", &*new.path)?;
        self.keep(digest, bytes.len() as u64, new);
        Ok(())
    }

    /// Adds a file that was hashed: shares its blocks if the file system can, otherwise copies it. The result is hashed
    /// again, because the file may have changed.
    pub(crate) fn add_file(&mut self, digest: Digest, bytes: u64, path: &Path) -> Result<()> {
        if !self.wants(digest, bytes) {
            return Ok(());
        }
        // By now it may be any file.
        let mut source = match openat(CWD, path, UNTRUSTED_OPEN_FLAGS, Mode::empty()) {
            Err(Errno::LOOP | Errno::NXIO) => return Err(Error::Changed(path.into())),
            opened => File::from(opened.doing("open", path)?),
        };
        if !source.metadata().doing("look at", path)?.is_file() {
            return Err(Error::Changed(path.into()));
        }
        let mut new = NewFile::begin(&self.directory)?;
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

    fn keep(&mut self, digest: Digest, bytes: u64, new: NewFile) {
        self.put(digest, bytes, new.path);
    }

    /// Adds a verified object, even if its name exists.
    pub(crate) fn put(&mut self, digest: Digest, bytes: u64, path: TempPath) {
        self.new_bytes += bytes;
        self.added.push((digest, path));
    }

    /// Makes all durable, then their names.
    pub(crate) fn finish(self) -> Result<()> {
        let path = self.directory.clone();
        let directory = File::open(&path).doing("open", &path)?;
        self.publish(|_, _| {})?;
        rustix::fs::syncfs(&directory).doing("sync", &path)
    }

    /// Makes all durable and gives them their names; `named` is called for each.
    pub(crate) fn publish(self, mut named: impl FnMut(Digest, &Path)) -> Result<()> {
        let directory = File::open(&self.directory).doing("open", &self.directory)?;
        let few = self.added.len() <= FEW;
        let mut has_verity = true;
        for (_, path) in &self.added {
            let path: &Path = path;
            // By now it may be any file.
            let file = File::from(openat(CWD, path, UNTRUSTED_OPEN_FLAGS, Mode::empty()).doing("open", path)?);
            file.set_permissions(fs::Permissions::from_mode(0o644)).doing("change", path)?;
            if few {
                file.sync_data().doing("sync", path)?;
            }
            if has_verity {
                has_verity = fsverity::enable(&file).doing("turn fs-verity on for", path)?;
            }
        }
        if !few {
            rustix::fs::syncfs(&directory).doing("sync", &self.directory)?;
        }
        for (digest, path) in self.added {
            let target = object_path(&self.directory, digest);
            let parent = crate::store::new_file::directory_of(&target);
            fs::create_dir_all(parent).doing("make", parent)?;
            path.persist(&target).map_err(|error| error.error).doing("make", &target)?;
            named(digest, &target);
        }
        Ok(())
    }
}

/// Marks an object as used. Without permission the owner must do so.
pub(crate) fn freshen(path: &Path, found: &fs::Metadata) {
    let age = found.modified().ok().and_then(|time| time.elapsed().ok());
    if age.is_some_and(|age| age < FRESH) {
        return;
    }
    let touched = File::open(path).and_then(|object| object.set_modified(SystemTime::now()));
    if let Err(error) = touched {
        tracing::debug!("cannot note that {} is used: {error}", path.display());
    }
}

/// Copies this many bytes; blocks of zeros become holes.
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

#[cfg(test)]
mod tests {
    use rustix::fs::{FileType, mknodat};

    use super::*;
    use crate::format::digest::Algorithm;

    #[test]
    fn a_replacement_of_a_hashed_file_is_not_opened() {
        let directory = tempfile::tempdir().expect("directories can be made");
        let at = |name: &str| directory.path().join(name);
        fs::write(at("file"), "bytes").expect("files can be made");
        std::os::unix::fs::symlink("file", at("link")).expect("links can be made");
        mknodat(rustix::fs::CWD, at("pipe"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("pipes can be made");
        let mut objects = NewObjects::within(&at("objects")).expect("directories can be made");
        for name in ["link", "pipe"] {
            let digest = Algorithm::Verity.of(name.as_bytes());
            let outcome = objects.add_file(digest, 5, &at(name));
            assert!(matches!(outcome, Err(Error::Changed(_))), "{name}");
        }
        objects.add_file(Algorithm::Verity.of(b"bytes"), 5, &at("file")).expect("it is the same");
    }

    /// Whoever may write to the directory must not have the mode of another file changed.
    #[test]
    fn a_replaced_temporary_object_keeps_its_mode() {
        let directory = tempfile::tempdir().expect("directories can be made");
        let at = |name: &str| directory.path().join(name);
        fs::write(at("secret"), "bytes").expect("files can be made");
        fs::set_permissions(at("secret"), fs::Permissions::from_mode(0o600)).expect("modes can be changed");
        let mut objects = NewObjects::within(&at("objects")).expect("directories can be made");
        objects.add(Algorithm::Verity.of(b"bytes"), b"bytes").expect("it can be written");
        let new = objects.added[0].1.to_path_buf();
        fs::remove_file(&new).and_then(|()| std::os::unix::fs::symlink(at("secret"), &new)).expect("links can be made");
        objects.publish(|_, _| {}).expect_err("it is another file");
        assert_eq!(fs::metadata(at("secret")).expect("it is there").permissions().mode() & 0o777, 0o600);
    }
}
