//! PAX headers: records that say more of a member than its own header can, or of all members that follow.
//!
//! Source: POSIX.1-2024, pax ("pax Header Block"), and GNU tar's manual ("Storing Sparse Files") for the records of sparse files.

use std::collections::BTreeMap;

use crate::build::tree_builder::Refusal;

/// The offsets and lengths of a sparse file's pieces in the form 0.0, a record for each number.
const SPARSE_PIECE: [&[u8]; 2] = [b"GNU.sparse.offset", b"GNU.sparse.numbytes"];
/// What a header for all members may say: they may differ in the rest only, which nobody means for all.
const GLOBAL: [&[u8]; 3] = [b"mtime", b"uid", b"gid"];

/// What becomes of headers for all members (`g`), of which readers do not agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Globals {
    /// They say it of each member that does not say it of itself, as in GNU tar: so it is in archives.
    Apply,
    /// Nothing, as in Go's `archive/tar`, by which containerd and others read layers.
    Ignore,
}

/// The records of a header, the last one of each key.
#[derive(Clone, Debug, Default)]
pub(super) struct Pax {
    records: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The numbers of [`SPARSE_PIECE`], in their order.
    pub(super) pieces: Vec<Vec<u8>>,
}

impl Pax {
    /// Reads the records of a header.
    pub(super) fn parse(mut data: &[u8]) -> Result<Self, Refusal> {
        let mut pax = Self::default();
        while !data.is_empty() {
            let (record, rest) = record(data).ok_or("a PAX header whose records have wrong lengths")?;
            data = rest;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or("a PAX header with a record without =")?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            if SPARSE_PIECE.contains(&key) {
                if key != SPARSE_PIECE[pax.pieces.len() % 2] {
                    return Err("a sparse file whose offsets and lengths do not take turns".into());
                }
                pax.pieces.push(value.to_vec());
            } else {
                pax.records.insert(key.to_vec(), value.to_vec());
            }
        }
        Ok(pax)
    }

    /// The value of a record; one that is empty says nothing.
    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.records.get(key).map(Vec::as_slice).filter(|value| !value.is_empty())
    }

    /// A number in decimal digits.
    pub(super) fn number(&self, key: &[u8]) -> Option<Result<i64, Refusal>> {
        let value = self.get(key)?;
        Some(decimal(value).ok_or_else(|| format!("its {} is no number", key.escape_ascii())))
    }

    /// All extended attributes.
    pub(super) fn xattrs(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.records.iter().filter_map(|(key, value)| Some((key.strip_prefix(b"SCHILY.xattr.")?, value.as_slice())))
    }

    /// Whether something is said of a sparse file.
    pub(super) fn has_sparse(&self) -> bool {
        !self.pieces.is_empty() || self.records.keys().any(|key| key.starts_with(b"GNU.sparse."))
    }

    /// Takes over what a header for all members says, of those that follow.
    pub(super) fn add_global(&mut self, global: Self) -> Result<(), Refusal> {
        let is_of_one = |key: &[u8]| {
            matches!(key, b"path" | b"linkpath" | b"size")
                || key.starts_with(b"SCHILY.")
                || key.starts_with(b"GNU.sparse.")
        };
        if let Some(key) = global.records.keys().find(|key| is_of_one(key)) {
            return Err(format!("a PAX header gives all members the same {}", key.escape_ascii()));
        }
        if global.has_sparse() {
            return Err("a PAX header makes all members sparse".into());
        }
        self.records.extend(global.records.into_iter().filter(|(key, _)| GLOBAL.contains(&key.as_slice())));
        Ok(())
    }

    /// What is said of a member, and of all where nothing is said of this one.
    pub(super) fn over(self, globals: &Self) -> Self {
        let mut records = globals.records.clone();
        records.extend(self.records);
        Self { records, pieces: self.pieces }
    }
}

/// The first record, without its length and its end, and what follows it.
fn record(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let blank = data.iter().take(20).position(|byte| *byte == b' ')?;
    let digits = std::str::from_utf8(&data[..blank]).ok();
    let digits = digits.filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
    let length: usize = digits.parse().ok()?;
    Some((data.get(blank + 1..length)?.strip_suffix(b"\n")?, &data[length..]))
}

fn decimal(text: &[u8]) -> Option<i64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}
