//! The names and paths of the files in a store.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::format::digest::Digest;
use crate::format::erofs::BLOCK_BYTES;
use crate::format::error::{IoContext, Result};
use crate::format::index::Index;

/// The largest index that is read: more objects than an image can have blocks make no sense, and memory is to be bounded.
const INDEX_BYTES_MAX: u64 = 1 << 32;
/// What ends the name of a pack's index.
pub(crate) const INDEX_SUFFIX: &str = ".index";
/// What ends the name of a pack that is not all here.
pub(crate) const PART_SUFFIX: &str = ".part";
/// What ends the name of the note of what is damaged in a pack.
pub(crate) const DAMAGED_SUFFIX: &str = ".damaged";

/// What holds the store's lock.
pub(crate) fn lock_path(folder: &Path) -> PathBuf {
    folder.join("lock")
}

/// Where the packs are.
pub(crate) fn packs_folder(folder: &Path) -> PathBuf {
    folder.join("packs")
}

/// Where it is noted what is damaged in a pack.
pub(crate) fn damage_path(folder: &Path, pack: Digest) -> PathBuf {
    packs_folder(folder).join(format!("{}{DAMAGED_SUFFIX}", pack.hex()))
}

/// Where the index of a pack is.
pub(crate) fn index_path(folder: &Path, pack: Digest) -> PathBuf {
    packs_folder(folder).join(format!("{}{INDEX_SUFFIX}", pack.hex()))
}

/// Reads the index of a pack of a store, and proves it by the pack's name.
pub(crate) fn read_index(folder: &Path, pack: Digest) -> Result<Index> {
    let path = index_path(folder, pack);
    let mut bytes = Vec::new();
    let file = File::open(&path).doing("open", &path)?;
    file.take(INDEX_BYTES_MAX).read_to_end(&mut bytes).doing("read", &path)?;
    Index::of(folder, pack, &bytes)
}

/// Whether a pack of a store has the length that its index tells of.
pub(crate) fn is_whole(folder: &Path, index: &Index) -> bool {
    let bytes = index.blocks.saturating_mul(BLOCK_BYTES as u64);
    fs::metadata(packs_folder(folder).join(index.pack.hex())).is_ok_and(|metadata| metadata.len() == bytes)
}

/// What there is in a store.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    /// Packs with an index, by name.
    pub packs: Vec<Digest>,
    /// Packs of which something is noted as damaged.
    pub noted: Vec<Digest>,
}

/// What is noted as damaged in a pack of a store.
pub(crate) fn noted(store: &Path, pack: Digest) -> HashSet<Digest> {
    let Ok(lines) = fs::read(damage_path(store, pack)) else { return HashSet::new() };
    lines.split(|byte| *byte == b'\n').filter_map(Digest::parse).collect()
}
