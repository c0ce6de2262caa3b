//! The objects of a composefs image.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{AtFlags, CWD, Mode, StatxAttributes, StatxFlags, openat, statx};
use rustix::io::Errno;

use crate::Flaw;
use crate::format::composefs::path_of;
use crate::format::data::Data;
use crate::format::digest::Digest;
use crate::format::error::{IoContext, Result};
use crate::format::image::Image;
use crate::format::plain_file::UNTRUSTED_OPEN_FLAGS;
use crate::format::verity;
use crate::format::walk::each_file;
use crate::store::fetch::RUN_BYTES_MAX;
use crate::store::object_error::ObjectError;
use crate::store::object_list::objects_directory;
use crate::store::parallel;

/// From this length on, in bytes, the received part of an object is kept for the next attempt.
pub(crate) const LARGE_BYTES: u64 = RUN_BYTES_MAX;

/// An object of a composefs image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileObject {
    /// Its digest, which is also its name.
    pub digest: Digest,
    /// Its length.
    pub bytes: u64,
}

/// Returns the objects of a composefs image, each once, in the order of a walk.
///
/// # Errors
///
/// The image is damaged, or lacks the digest of an object.
pub fn file_objects(image: &Image) -> Result<Vec<FileObject>, ObjectError> {
    let (mut found, mut known) = (Vec::new(), HashMap::new());
    let mut wrong = None;
    each_file(image, &mut |inode, data| {
        let Data::Object { path, digest } = data else { return Ok(()) };
        match object(path, digest, inode.bytes) {
            Ok(object) => match known.insert(object.digest, object.bytes) {
                None => found.push(object),
                Some(bytes) if bytes == object.bytes => {}
                Some(_) => return Err(Flaw { what: "an object of two lengths", offset: inode.nid.0 }),
            },
            Err(bad) => drop(wrong.get_or_insert(bad)),
        }
        Ok(())
    })?;
    wrong.map_or(Ok(found), Err)
}

fn object(path: Option<&[u8]>, digest: Option<Digest>, bytes: u64) -> Result<FileObject, ObjectError> {
    let path = path.ok_or(ObjectError::NoPath)?;
    let name = || PathBuf::from(OsStr::from_bytes(path));
    let digest = digest.ok_or_else(|| ObjectError::NoDigest { path: name() })?;
    if path != path_of(digest) {
        return Err(ObjectError::Elsewhere { path: name(), digest });
    }
    let empty = digest.algorithm().of(&[]);
    if bytes == 0 && digest != empty {
        return Err(ObjectError::Changed { path: name(), digest: empty });
    }
    Ok(FileObject { digest, bytes })
}

/// Removes damaged objects of an image, so that builds and pulls replace them; returns how many. It hashes them,
/// because the length alone is only the image's claim. An unreadable object may be intact and stays; it is an error
/// after the others were checked.
pub(crate) fn remove_damaged(image: &Image, store: &Path) -> Result<usize> {
    let directory = objects_directory(store);
    let objects = file_objects(image).map_err(io::Error::other).doing("look for the image's objects in", &directory)?;
    let (removed, unread) = (AtomicUsize::new(0), OnceLock::new());
    parallel::each(objects.len(), |at| {
        let digest = objects[at].digest;
        let path = directory.join(OsStr::from_bytes(&path_of(digest)));
        let file = match openat(CWD, &path, UNTRUSTED_OPEN_FLAGS, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(()),
            opened => File::from(opened.doing("open", &path)?),
        };
        let bytes = file.metadata().doing("look at", &path)?.len();
        match measure(&file, bytes) {
            Ok(found) if found == digest => return Ok(()),
            Err(error) if !is_damage(&file, &error) => {
                // Only the first one is returned.
                let _ = unread.set(Err(error).doing("read", &path));
                return Ok(());
            }
            Ok(_) | Err(_) => {}
        }
        fs::remove_file(&path).doing("remove", &path)?;
        removed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    })?;
    unread.into_inner().unwrap_or(Ok(()))?;
    Ok(removed.into_inner())
}

/// Returns whether a read error means damage: the kernel reports it this way for a file with fs-verity.
fn is_damage(file: &File, error: &io::Error) -> bool {
    let found = || statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::empty());
    Errno::from_io_error(error) == Some(Errno::IO)
        && found().is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::VERITY))
}

/// Returns the digest of a file, computed by several threads if it is large.
pub(crate) fn measure(file: &File, bytes: u64) -> io::Result<Digest> {
    if bytes >= LARGE_BYTES { parallel::digest(file, 0, bytes) } else { Ok(verity::of_reader(file)?.0) }
}
