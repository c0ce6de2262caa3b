//! The names and paths of the files in a store.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{IoContext, Result};
use crate::format::index::Index;
use crate::format::plain_file;

/// The maximum size of an index, to limit memory: an image cannot have more blocks.
pub(crate) const INDEX_BYTES_MAX: u64 = 1 << 32;
/// The maximum size of a record of damage.
const DAMAGED_BYTES_MAX: u64 = 256 << 20;
/// The suffix of a pack's index.
pub(crate) const INDEX_SUFFIX: &str = ".index";
/// The suffix of an incomplete pack.
pub(crate) const PART_SUFFIX: &str = ".part";
/// The suffix of a pack's record of damage.
pub(crate) const DAMAGED_SUFFIX: &str = ".damaged";

/// Returns the path of the store's lock.
pub(crate) fn lock_path(directory: &Path) -> PathBuf {
    directory.join("lock")
}

/// Opens or creates a lock file. Only users with write permission for its directory may open it, because a lock of another user would
/// block all processes.
pub(crate) fn lockable(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let writers = fs::metadata(path.parent().unwrap_or(Path::new(".")))?.mode() & 0o022;
    let mode = 0o600 | writers | writers << 1;
    let file = plain_file::open(options.mode(mode), path)?;
    let found = file.metadata()?;
    // The file is of an earlier version, or the umask has removed a permission. A hard link to another file is not changed.
    if found.mode() & 0o777 != mode && found.nlink() == 1 && found.uid() == rustix::process::geteuid().as_raw() {
        let _ = file.set_permissions(fs::Permissions::from_mode(mode));
    }
    Ok(file)
}

/// As [`lockable`], for a file that is written to: it must have no other name.
pub(crate) fn lockable_part(path: &Path) -> io::Result<File> {
    let file = lockable(File::options().read(true).write(true).create(true).truncate(false), path)?;
    match file.metadata()?.nlink() {
        0 | 1 => Ok(file),
        _ => Err(io::Error::other("it has other names, too: remove it")),
    }
}

pub(crate) fn packs_directory(directory: &Path) -> PathBuf {
    directory.join("packs")
}

/// Returns the path of a pack's record of damage.
pub(crate) fn damage_path(directory: &Path, pack: Digest) -> PathBuf {
    packs_directory(directory).join(format!("{}{DAMAGED_SUFFIX}", pack.hex()))
}

pub(crate) fn index_path(directory: &Path, pack: Digest) -> PathBuf {
    packs_directory(directory).join(format!("{}{INDEX_SUFFIX}", pack.hex()))
}

/// Reads the index of a pack, and verifies it by the pack's name.
pub(crate) fn read_index(directory: &Path, pack: Digest) -> Result<Index> {
    let path = index_path(directory, pack);
    let bytes = plain_file::read(&path, INDEX_BYTES_MAX).doing("open", &path)?;
    Index::of(directory, pack, &bytes)
}

/// Returns whether a pack has the length in its index.
pub(crate) fn is_whole(directory: &Path, index: &Index) -> bool {
    let bytes = index.blocks.saturating_mul(BLOCK_BYTES as u64);
    fs::metadata(packs_directory(directory).join(index.pack.hex())).is_ok_and(|metadata| metadata.len() == bytes)
}

/// The files of a store.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    /// Packs with an index, by name.
    pub packs: Vec<Digest>,
    /// Packs with a record of damage.
    pub noted: Vec<Digest>,
}

/// Returns the objects that are recorded as damaged in a pack.
pub(crate) fn noted(store: &Path, pack: Digest) -> HashSet<Digest> {
    let Ok(lines) = plain_file::read(&damage_path(store, pack), DAMAGED_BYTES_MAX) else { return HashSet::new() };
    lines.split(|byte| *byte == b'\n').filter_map(Digest::parse).collect()
}
