//! Lists the objects in a store.

use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::format::composefs::path_of;
use crate::format::digest::Digest;
use crate::format::error::{IoContext, Result};
use crate::store::new_file::NEW_PREFIX;

/// A file of an object store.
pub(crate) struct StoredFile {
    /// Its name in the store's directory of objects, `xx/yyyy...`; `None` for an incomplete file.
    pub name: Option<Vec<u8>>,
    pub path: PathBuf,
    pub metadata: Metadata,
}

fn is_hex(name: &[u8], digits: usize) -> bool {
    name.len() == digits && name.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns whether a directory is an object store.
pub(crate) fn is_store(store: &Path) -> bool {
    store.join("objects").is_dir()
        || fs::read_dir(store).is_ok_and(|mut entries| {
            entries.any(|entry| entry.is_ok_and(|entry| is_hex(entry.file_name().as_bytes(), 2)))
        })
}

/// Returns all objects, and incomplete files of builds. Other files, and files removed meanwhile, are omitted.
pub(crate) fn list(store: &Path) -> Result<Vec<StoredFile>> {
    let directory = objects_directory(store);
    let mut found = Vec::new();
    each(&directory, &mut |name, path| {
        if name.starts_with(NEW_PREFIX.as_bytes()) {
            return add(&mut found, None, path);
        }
        if !is_hex(name, 2) {
            return Ok(());
        }
        each(&path, &mut |rest, path| {
            let name = [name, b"/", rest].concat();
            if is_hex(rest, 62) { add(&mut found, Some(name), path) } else { Ok(()) }
        })
    })?;
    Ok(found)
}

/// Calls `call` with each name in a directory; a missing directory has none.
fn each(directory: &Path, call: &mut dyn FnMut(&[u8], PathBuf) -> Result<()>) -> Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(()),
        entries => entries.doing("list", directory)?,
    };
    for entry in entries {
        let entry = entry.doing("list", directory)?;
        call(entry.file_name().as_bytes(), entry.path())?;
    }
    Ok(())
}

fn add(found: &mut Vec<StoredFile>, name: Option<Vec<u8>>, path: PathBuf) -> Result<()> {
    match fs::symlink_metadata(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        metadata => {
            let metadata = metadata.doing("look at", &path)?;
            if metadata.is_file() {
                found.push(StoredFile { name, path, metadata });
            }
        }
    }
    Ok(())
}

/// Returns the directory of a store's objects: `objects`, or the store itself, as of `mkcomposefs --digest-store`.
pub fn objects_directory(store: &Path) -> PathBuf {
    let objects = store.join("objects");
    if objects.is_dir() { objects } else { store.into() }
}

pub(crate) fn object_path(directory: &Path, digest: Digest) -> PathBuf {
    directory.join(std::ffi::OsStr::from_bytes(&path_of(digest)))
}
